"""The verdict about two arms along a stream, from the differences of their scores under paired seeds.

Two intervals have to agree. The confidence sequence is about these forecasters on this stream and may be checked after
every batch (see `cadam.statistics.sequential`). The t interval over seeds is about other initial weights: under one
seed both arms start from the same weights. Student's interval is not made for repeated checks. Its confidence is
therefore 1 - alpha / k, where k is the number of doublings of the stream after the first check, plus 2: the mean
differences of seeds hardly change before the stream has doubled, so a bound over doublings suffices in practice.
Simulated comparisons of equal arms check it (`tests/ab/test_error_rates.py`).
"""

from __future__ import annotations

import math

import numpy as np

from ..statistics.comparison import Better, Kind, judge
from ..statistics.intervals import Array, Interval, interval
from ..statistics.sequential import FIRST_CHECK, ConfidenceSequence

MAX_FACTOR = 100
"""If a decision needs more than this many times the present events or seeds, their number is not given."""


class PairedScores:
    """The differences of two arms so far, and the verdict that they allow.

    Args:
        better: Whether lower or higher scores are better.
        matters: The smallest difference of practical use, in the unit of `scale`.
        alpha: The probability of a wrong verdict.
        total: The number of batches or blocks of the whole stream.
        lag: The number of batches by which labels arrive late.
        relative: Whether differences are in percent of the baseline's score, instead of in hundredths.
    """

    def __init__(
        self, better: Better, matters: float, alpha: float, total: int, lag: int = 0, relative: bool = True
    ) -> None:
        self.better, self.matters, self.relative = better, matters, relative
        doublings = max(0, math.ceil(math.log2(max(total, 1) / FIRST_CHECK))) + 2
        self.seed_confidence = 1 - alpha / doublings
        self.sequence = ConfidenceSequence(alpha, lag=lag)
        self.kind: Kind = "inconclusive"
        self.is_conflicting = False
        self.decided_at: int | None = None
        """The number of events since which the present verdict has stood; None if there is none."""
        self.first_decided_at: int | None = None
        self.reopened_at: int | None = None
        self.has_any_difference = False
        self.curve: list[tuple[int, float, float, float]] = []
        """The number of events, the mean and the ends after each batch."""
        self._events = 0.0
        self._totals: Array = np.zeros(0)
        self._baseline = 0.0
        self._has_excluded = False

    def update(self, arm: Array, baseline: Array, count: float, event: int) -> None:
        """Add the scores of the next batch or block.

        Args:
            arm: The mean score of the arm under each seed.
            baseline: The mean score of the baseline under each seed.
            count: The number of events.
            event: The number of events of the stream after this batch.
        """
        differences = arm - baseline
        if not len(self._totals):
            self._totals = np.zeros(len(arm))
        self.has_any_difference |= bool(differences.any())
        self._events += count
        self._totals = self._totals + count * differences
        self._baseline += count * float(baseline.mean())
        self.sequence.update(float(differences.mean()), count)
        over_time = self.over_time
        self.curve.append((event, over_time.mean, over_time.low, over_time.high))
        excludes = self.sequence.excludes_zero
        if self._has_excluded and not excludes and self.reopened_at is None:
            self.reopened_at = event
        self._has_excluded |= excludes
        before = self.kind
        self.kind, self.is_conflicting = self._judge()
        if self.kind != before:
            self.decided_at = None if self.kind == "inconclusive" else event
        if self.first_decided_at is None:
            self.first_decided_at = self.decided_at

    @property
    def scale(self) -> float:
        """The factor from differences of scores to percent of the baseline's score, or to points."""
        return 100 * self._events / self._baseline if self.relative and self._baseline else 100.0

    @property
    def over_time(self) -> Interval:
        """The confidence sequence now."""
        now = self.sequence.interval
        return Interval(now.mean * self.scale, now.low * self.scale, now.high * self.scale, now.count)

    @property
    def is_seed_invariant(self) -> bool:
        """Whether every one of several seeds gives the same difference."""
        return len(self._totals) > 1 and bool((self._totals == self._totals[0]).all())

    @property
    def over_seeds(self) -> Interval | None:
        """The t interval over paired seeds now; None if every seed gives the same difference."""
        if self.is_seed_invariant:
            return None
        means = self.scale * self._totals / max(self._events, 1)
        return interval(means, confidence=self.seed_confidence)

    def _judge(self) -> tuple[Kind, bool]:
        intervals = [self.over_time, *filter(None, [self.over_seeds])]
        return judge(intervals, self.better, self.matters)

    def estimate_more(self, events: int) -> tuple[int | None, int | None]:
        """Estimate how many more events, or how many seeds in total, would decide an undecided comparison.

        The estimate assumes that the means stay, and that intervals shrink with the square root of the data.

        Args:
            events: The number of judged events so far.

        Returns:
            The number of further events and the number of seeds; None where it is not what is missing, or too large.
        """
        time_factor = _factor(self.over_time, self.matters)
        seeds = self.over_seeds
        seed_factor = 0.0 if seeds is None else _factor(seeds, self.matters)
        more_events = more_seeds = None
        if 1 < time_factor <= MAX_FACTOR:
            more_events = _round_up(max(time_factor - 1, 0.1) * events)
        if seeds is not None and 1 < seed_factor <= MAX_FACTOR:
            more_seeds = math.ceil(seed_factor * max(seeds.count, 1))
        return more_events, more_seeds


def _factor(interval: Interval, matters: float) -> float:
    """Return how many times the data it takes until an interval excludes 0 or lies within `matters`."""
    reach = max(abs(interval.mean), matters - abs(interval.mean))
    return (interval.half_width / reach) ** 2 if reach > 0 and math.isfinite(interval.half_width) else math.inf


def _round_up(number: float) -> int:
    """Round up to one significant digit."""
    unit = 10 ** math.floor(math.log10(number)) if number >= 1 else 1
    return int(math.ceil(number / unit) * unit)
