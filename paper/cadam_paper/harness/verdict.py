"""Verdicts and recommendations: the conclusion of a comparison, in words that console, page and JSON share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cadam.statistics.comparison import Comparison, Kind

Action = Literal["switch", "stay", "no practical difference", "undecided", "not comparable"]
ACTIONS: Mapping[Kind, Action] = {
    "better": "switch",
    "worse": "stay",
    "equivalent": "no practical difference",
    "inconclusive": "undecided",
    "diverged": "not comparable",
}
"""The recommended action for each kind of verdict."""
MORE_SEEDS = "run more seeds (--seeds)"
ONE_SEED = f"undecided: there is one seed; {MORE_SEEDS}"
SAME_RUNS = "every seed gives the same run, so seeds are not evidence"
SAME_ARM = "every metric is equal to the last bit under every seed"


def kind_names(better: str, worse: str) -> dict[Kind, str]:
    """Return a name for each kind of verdict, with these names for "better" and "worse"."""
    return {**ACTIONS, "better": better, "worse": worse}


@dataclass(frozen=True)
class Verdict:
    """The conclusion about an arm and its baseline. All wording follows from its kind."""

    kind: Kind
    arm: str
    baseline: str
    same: bool = False
    """Whether both arms compute the same, to the last bit."""
    conflicting: bool = False
    """Whether intervals of the same difference exclude 0 on different sides."""
    detail: str = ""
    """Text that follows the name of the kind, such as which intervals support it."""
    next_step: str = ""
    """For an inconclusive comparison: how to reach a conclusion."""
    more_events: int | None = None
    """The estimated number of further events that would give a conclusion, if it can be estimated."""

    def __str__(self) -> str:
        return self.describe(f"{self.arm} better", f"{self.arm} worse")

    def describe(self, better: str, worse: str) -> str:
        """Return the verdict in words, with these words for "better" and "worse"."""
        if self.kind == "inconclusive" and self.conflicting:
            return f"conflicting{self.detail}"
        return f"{kind_names(better, worse)[self.kind]}{self.detail}"

    @property
    def action(self) -> Action:
        """The action that this kind of verdict recommends."""
        return ACTIONS[self.kind]


def verdict_over_seeds(comparison: Comparison) -> Verdict:
    """Return the verdict that the interval over seeds gives alone."""
    is_unknown = comparison.kind == "inconclusive" and math.isnan(comparison.difference.low)
    next_step = MORE_SEEDS if is_unknown and not comparison.same_runs else ""
    detail = _seed_detail(comparison)
    return Verdict(comparison.kind, comparison.arm, comparison.baseline, detail=detail, next_step=next_step)


def _seed_detail(c: Comparison) -> str:
    if c.kind == "diverged":
        return f": {c.arm} diverged in {c.diverged} of {c.seeds}, {c.baseline} in {c.baseline_diverged}"
    if c.same_runs:
        return f": {SAME_RUNS}"
    if c.kind == "inconclusive":
        return ONE_SEED.removeprefix("undecided") if math.isnan(c.difference.low) else ""
    if c.kind == "equivalent":
        return ": exactly equal"
    if not c.random:
        return " (exact: nothing is random)"
    if c.difference.half_width == 0:
        return ", by the same amount under every seed: seeds may have no effect here"
    return floor_qualifier(c)


def floor_qualifier(comparison: Comparison) -> str:
    """Return the text to add to a verdict whose difference is smaller than the noise floor."""
    return ", below the noise floor" if comparison.is_below_floor else ""


@dataclass(frozen=True)
class Recommendation:
    """The recommended action with its reasons."""

    verdict: Verdict
    effect: str
    """The measured effect in one clause: "GAUC is 0.30 points higher (85.20 -> 85.50)"."""
    reasons: Sequence[str] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind the recommendation, for JSON."""
    objection: str = ""
    """The reason why nothing can be recommended although there is a verdict, in one clause; empty if there is none."""

    @property
    def action(self) -> Action:
        """The recommended action; "undecided" if there is an objection."""
        return "undecided" if self.objection else self.verdict.action

    @property
    def headline(self) -> str:
        """The first line of the console output and of the page."""
        verdict = self.verdict
        if self.objection:
            return f"Undecided: {self.objection}."
        step = verdict.next_step or "more data would give a conclusion"
        texts: dict[Kind, str] = {
            "better": f"Switch to {verdict.arm}: {self.effect}.",
            "worse": f"Stay with {verdict.baseline}: {self.effect}.",
            "equivalent": f"No practical difference: {self.effect}.",
            "inconclusive": f"Undecided: {self.effect}. {step[:1].upper()}{step[1:]}.",
            "diverged": f"Not comparable{verdict.detail}. Compare again at lower learning rates.",
        }
        return texts[verdict.kind]

    def as_json(self) -> dict[str, Any]:
        """Return the recommendation as plain values, for JSON."""
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
