"""The verdict about two arms along a stream, from the differences of their scores under paired seeds.

Two intervals have to agree. The confidence sequence is about these forecasters on this stream and may be checked after
every batch (see `cadam.statistics.sequential`). The t interval over seeds is about other initial weights: under one
seed both arms start from the same weights. Student's interval is not made for repeated checks. Its confidence is
therefore 1 - alpha / 2, and the confirmation below does the rest: simulated comparisons of equal arms, which are
looked at after every batch, check it (`tests/ab/test_error_rates.py`).

A verdict is meant for the events to come, and an optimizer may only learn the first events faster. Both intervals
therefore also have to agree over the recent part of the stream, which is its last half or up to three quarters
(`RecentSequence`). All intervals have to exclude 0 on the same side: the test of the union of their hypotheses, which
needs no correction for their number (Berger 1982, "Multiparameter hypothesis testing and acceptance sampling",
Technometrics 24(4)). Finally, the trend must not end the difference: if it changes once more by as much as it has
changed from the part before to the recent part, it has to keep its sign. A difference that is inversely proportional
to the square root of the events so far, or falls faster, does not satisfy that.

Such a judgment becomes the verdict once it has stood for as many judged events as came before it. This confirmation
costs events, and only makes wrong verdicts rarer.
"""

from __future__ import annotations

import math

import numpy as np

from ..statistics.comparison import Better, Kind, judge
from ..statistics.intervals import Array, Interval, interval
from ..statistics.sequential import ConfidenceSequence, RecentSequence

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
        self.seed_confidence = 1 - alpha / 2
        self.sequence = ConfidenceSequence(alpha, lag=lag)
        self.recent_sequence = RecentSequence(alpha, total, lag)
        self.kind: Kind = "inconclusive"
        self.judgment: Kind = "inconclusive"
        """What the intervals say now. It becomes the verdict once it is confirmed."""
        self.judged_since = 0.0
        """The number of judged events before the present judgment."""
        self.is_conflicting = False
        self.decided_at: int | None = None
        """The number of events since which the present verdict has stood; None if there is none."""
        self.first_decided_at: int | None = None
        self.reopened_at: int | None = None
        self.has_any_difference = False
        self.curve: list[tuple[int, float, float, float]] = []
        """The number of events, the mean and the ends after each batch."""
        self._sums: Array = np.zeros(0)
        """The sums over events so far: the events, the score of the baseline, and the difference under each seed."""
        self._sums_at_starts: list[Array] = []
        """These sums at the beginning of each recent part."""
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
        if not len(self._sums):
            self._sums = np.zeros(len(arm) + 2)
        if self.sequence.interval.count in self.recent_sequence.starts:
            self._sums_at_starts.append(self._sums)
        self.has_any_difference |= bool(differences.any())
        self._sums = self._sums + count * np.array([1.0, float(baseline.mean()), *differences])
        for sequence in (self.sequence, self.recent_sequence):
            sequence.update(float(differences.mean()), count)
        over_time = self.over_time
        self.curve.append((event, over_time.mean, over_time.low, over_time.high))
        excludes = self.sequence.excludes_zero
        if self._has_excluded and not excludes and self.reopened_at is None:
            self.reopened_at = event
        self._has_excluded |= excludes
        judgment, self.is_conflicting = self._judge()
        if judgment != self.judgment:
            self.judgment, self.judged_since = judgment, self.events - count
        before = self.kind
        self.kind = judgment if self.events >= 2 * self.judged_since else "inconclusive"
        if self.kind != before:
            self.decided_at = None if self.kind == "inconclusive" else event
        if self.first_decided_at is None:
            self.first_decided_at = self.decided_at

    @property
    def events(self) -> float:
        """The number of judged events so far."""
        return float(self._sums[0]) if len(self._sums) else 0.0

    @property
    def over_time(self) -> Interval:
        """The confidence sequence now."""
        return _rescale(self.sequence.interval, self._scale(self._sums))

    @property
    def recent_over_time(self) -> Interval:
        """The confidence sequence of the recent part of the stream now."""
        return _rescale(self.recent_sequence.interval, self._scale(self._recent_sums))

    @property
    def over_seeds(self) -> Interval | None:
        """The t interval over paired seeds now; None if every seed gives the same difference."""
        return self._over_seeds(self._sums)

    @property
    def recent_over_seeds(self) -> Interval | None:
        """The t interval over paired seeds in the recent part; None if every seed gives the same difference."""
        return self._over_seeds(self._recent_sums)

    @property
    def earlier(self) -> float:
        """The mean difference before the recent part; nan if there is none."""
        number = self.recent_sequence.number
        return math.nan if number is None else self._mean(self._sums_at_starts[number])

    @property
    def extrapolated(self) -> float:
        """The mean difference, if it changes once more by as much as it has changed to the recent part."""
        return 2 * self._mean(self._recent_sums) - self.earlier

    @property
    def _recent_sums(self) -> Array:
        """The sums over the recent part; those over nothing if there is none."""
        number = self.recent_sequence.number
        return self._sums - (self._sums if number is None else self._sums_at_starts[number])

    def _scale(self, sums: Array) -> float:
        """Return the factor from differences of scores to percent of the baseline's score, or to points."""
        return 100 * float(sums[0] / sums[1]) if self.relative and len(sums) and sums[1] else 100.0

    def _mean(self, sums: Array) -> float:
        return self._scale(sums) * float(sums[2:].mean() / sums[0]) if len(sums) and sums[0] else math.nan

    def _over_seeds(self, sums: Array) -> Interval | None:
        if not len(sums) or not sums[0]:
            return Interval(math.nan, math.nan, math.nan, 0)
        totals = sums[2:]
        if len(totals) > 1 and bool((totals == totals[0]).all()):
            return None
        return interval(self._scale(sums) * totals / sums[0], confidence=self.seed_confidence)

    def _judge(self) -> tuple[Kind, bool]:
        seeds = filter(None, [self.over_seeds, self.recent_over_seeds])
        kind, is_conflicting = judge([self.over_time, self.recent_over_time, *seeds], self.better, self.matters)
        if kind in ("better", "worse") and self.extrapolated * self.over_time.mean <= 0:
            kind = "inconclusive"
        return kind, is_conflicting

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


def _rescale(interval: Interval, factor: float) -> Interval:
    return Interval(interval.mean * factor, interval.low * factor, interval.high * factor, interval.count)


def _factor(interval: Interval, matters: float) -> float:
    """Return how many times the data it takes until an interval excludes 0 or lies within `matters`."""
    reach = max(abs(interval.mean), matters - abs(interval.mean))
    return (interval.half_width / reach) ** 2 if reach > 0 and math.isfinite(interval.half_width) else math.inf


def _round_up(number: float) -> int:
    """Round up to one significant digit."""
    unit = 10 ** math.floor(math.log10(number)) if number >= 1 else 1
    return int(math.ceil(number / unit) * unit)
