"""What a comparison comes to: one set of kinds for the A/B, the studies, their reports and `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cadam.intervals import Interval

Better = Literal["lower", "higher"]
Kind = Literal["better", "worse", "equivalent", "inconclusive", "diverged"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ONE_SEED = "undecided: one seed; run more (--seeds)"


@dataclass(frozen=True)
class Verdict:
    """An arm against its baseline, as a kind; everything that is said of it in words follows from the kind."""

    kind: Kind
    arm: str
    baseline: str
    conflicting: bool = False
    """Do intervals of the same difference exclude 0 on different sides?"""
    detail: str = ""
    """What the kind does not say, put behind it."""
    next_step: str = ""
    """What would decide an inconclusive comparison."""

    def __str__(self) -> str:
        return self.said(f"{self.arm} better", f"{self.arm} worse")

    def said(self, better: str, worse: str) -> str:
        """In words, with these for better and worse."""
        words: dict[Kind, str] = {
            "better": better,
            "worse": worse,
            "equivalent": "no practical difference",
            "inconclusive": "conflicting" if self.conflicting else "undecided",
            "diverged": "not comparable",
        }
        return f"{words[self.kind]}{self.detail}"

    @property
    def recommendation(self) -> str:
        """What to do."""
        actions: dict[Kind, str] = {
            "better": f"switch to {self.arm}",
            "worse": f"stay with {self.baseline}",
            "equivalent": f"no practical difference, so there is no need to leave {self.baseline}",
            "inconclusive": f"undecided; {self.next_step or 'more data would tell'}",
            "diverged": "look at the runs that diverged first, for example at lower learning rates",
        }
        return actions[self.kind]


def sign(interval: Interval) -> int:
    """On which side of 0 an interval lies; 0 if it holds 0, or if there is none."""
    return int(interval.low > 0) - int(interval.high < 0)


def judge(intervals: Sequence[Interval], better: Better, matters: float = 0.0) -> tuple[Kind, bool]:
    """The kind that intervals of one difference come to together, and whether they conflict.

    `equivalent` where all lie within `matters` of 0, whether they hold 0 or not; else `better` or `worse` where all
    exclude 0 on one side; else `inconclusive`.
    """
    signs = {sign(interval) for interval in intervals}
    conflicting = {-1, 1} <= signs
    if all(-matters <= i.low and i.high <= matters for i in intervals):
        return "equivalent", conflicting
    if len(signs) == 1 and 0 not in signs:
        return ("better" if signs == {1 if better == "higher" else -1} else "worse"), False
    return "inconclusive", conflicting
