"""What a comparison comes to: one set of kinds for the A/B, the studies, their reports and `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..statistics.intervals import Interval

Better = Literal["lower", "higher"]
Kind = Literal["better", "worse", "equivalent", "inconclusive", "diverged"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Action = Literal["switch", "stay", "no practical difference", "undecided", "not comparable"]
ACTIONS: Mapping[Kind, Action] = {
    "better": "switch",
    "worse": "stay",
    "equivalent": "no practical difference",
    "inconclusive": "undecided",
    "diverged": "not comparable",
}
"""What each kind of verdict recommends."""
MORE_SEEDS = "run more seeds (--seeds)"
ONE_SEED = f"undecided: one seed; {MORE_SEEDS}"
SAME_RUNS = "every seed gives the same run, so seeds tell nothing"
SAME_ARM = "every metric is equal to the last bit under every seed"


def called(better: str, worse: str) -> dict[Kind, str]:
    """What each kind of verdict is called, with these for better and worse."""
    return {**ACTIONS, "better": better, "worse": worse}


@dataclass(frozen=True)
class Verdict:
    """An arm against its baseline, as a kind; everything that is said of it in words follows from the kind."""

    kind: Kind
    arm: str
    baseline: str
    same: bool = False
    """Do both arms compute the same?"""
    conflicting: bool = False
    """Do intervals of the same difference exclude 0 on different sides?"""
    detail: str = ""
    """What the kind does not say, put behind it."""
    next_step: str = ""
    """What would decide an inconclusive comparison."""
    more_events: int | None = None
    """About how many more events would decide, where that can be estimated."""

    def __str__(self) -> str:
        return self.said(f"{self.arm} better", f"{self.arm} worse")

    def said(self, better: str, worse: str) -> str:
        """In words, with these for better and worse."""
        conflicting = self.kind == "inconclusive" and self.conflicting
        return f"{'conflicting' if conflicting else called(better, worse)[self.kind]}{self.detail}"

    @property
    def action(self) -> Action:
        return ACTIONS[self.kind]


@dataclass(frozen=True)
class Recommendation:
    """What to do, for someone who reads one line; the reasons are for someone who reads five."""

    verdict: Verdict
    effect: str
    """What was measured, in one clause: "GAUC is 0.30 points higher (85.20 -> 85.50)"."""
    reasons: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind it, for `--json`."""
    useless: str = ""
    """Why nothing is to be recommended, whatever the verdict, in one clause."""

    @property
    def action(self) -> Action:
        return "undecided" if self.useless else self.verdict.action

    @property
    def headline(self) -> str:
        """The first line of the console and of the page."""
        verdict = self.verdict
        if self.useless:
            return f"Undecided: {self.useless}."
        step = verdict.next_step or "more data would tell"
        texts: dict[Kind, str] = {
            "better": f"Switch to {verdict.arm}: {self.effect}.",
            "worse": f"Stay with {verdict.baseline}: {self.effect}.",
            "equivalent": f"No practical difference: {self.effect}.",
            "inconclusive": f"Undecided: {self.effect}. {step[:1].upper()}{step[1:]}.",
            "diverged": f"Not comparable{verdict.detail}. Compare again at lower learning rates.",
        }
        return texts[verdict.kind]

    def as_json(self) -> dict[str, Any]:
        verdict = self.verdict
        return {
            "action": self.action,
            "headline": self.headline,
            "verdict_kind": verdict.kind,
            "conflicting": verdict.conflicting,
            "treatment": verdict.arm,
            "baseline": verdict.baseline,
            "more_events": verdict.more_events,
            "reasons": list(self.reasons),
            **self.values,
        }


def sign(interval: Interval) -> int:
    """On which side of 0 an interval lies; 0 if it holds 0, or if there is none."""
    return int(interval.low > 0) - int(interval.high < 0)


def within(interval: Interval, matters: float) -> bool:
    """Does all of an interval lie within `matters` of 0?"""
    return -matters <= interval.low and interval.high <= matters


Place = Literal["above", "below", "within", "open"]


def place(interval: Interval, matters: float) -> Place:
    """Where an interval lies: on one side of 0; else around it within `matters`, or further."""
    if sign(interval):
        return "above" if sign(interval) > 0 else "below"
    return "within" if within(interval, matters) else "open"


def judge(intervals: Sequence[Interval], better: Better, matters: float = 0.0) -> tuple[Kind, bool]:
    """The kind that intervals of one difference come to together, and whether they conflict.

    `equivalent` where all lie within `matters` of 0, whether they hold 0 or not; else `better` or `worse` where all
    exclude 0 on one side; else `inconclusive`.
    """
    signs = {sign(interval) for interval in intervals}
    conflicting = {-1, 1} <= signs
    if all(within(interval, matters) for interval in intervals):
        return "equivalent", conflicting
    if len(signs) == 1 and 0 not in signs:
        return ("better" if signs == {1 if better == "higher" else -1} else "worse"), False
    return "inconclusive", conflicting
