"""The verdict about two arms along a stream, from the differences of their scores under paired seeds.

Two intervals have to agree. The confidence sequence is about these forecasters on this stream and may be checked after
every batch (see `cadam.statistics.sequential`). The t interval over seeds is about other initial weights: under one
seed both arms start from the same weights. Student's interval (Student 1908, "The probable error of a mean", Biometrika
6(1)) is not made for repeated checks. Its confidence is therefore 1 - alpha / 2, and the confirmation below does the
rest: simulated comparisons of equal arms, which are looked at after every batch and judged at the end, check it
(`tests/ab/test_error_rates.py`). It assumes that differences over seeds are about normal; the section "Limits" of
docs/ab_statistics.md has the error rates for others.

**While a stream runs**, a verdict may come after any batch and ends the comparison, so the rule is strict. A verdict is
meant for the events to come, and an optimizer may only learn the first events faster. Both intervals therefore also
have to agree over the recent part of the stream, which is its last half or up to three quarters (`RecentSequence`). All
intervals have to exclude 0 on the same side: the test of the union of their hypotheses, which needs no correction for
their number (Berger 1982, "Multiparameter hypothesis testing and acceptance sampling", Technometrics 24(4)). Finally,
the trend must not end the difference: if it changes once more by as much as it has changed from the part before to the
recent part, it has to keep its sign. A difference that is inversely proportional to the square root of the events so
far, or falls faster, does not satisfy that. Such a judgment becomes the verdict once it still holds after as many
further events as were judged before it. This confirmation costs events, but it makes wrong verdicts rarer.

**When a finite stream has ended** (`PairedScores.finish`), there are no further events to wait for, and this moment was
not chosen because of what was seen. The two intervals over the whole stream then decide, again by the test of the union
of their hypotheses. For the interval over time this costs no error probability: a confidence sequence covers the
average difference at all times at once (Choe and Ramdas; Waudby-Smith et al., both cited in
`cadam.statistics.sequential`), so that its last interval belongs to the same event of probability 1 - alpha as all
those that were looked at before. The interval over seeds is used once more; at its confidence of 1 - alpha / 2 this
adds at most alpha / 2. The burden of proof about the trend is reversed: the recent part, which has fewer events, does
not have to exclude 0 by itself, but there is no verdict if one of its intervals excludes 0 on the other side, or if it
is certain that the difference shrinks and another such change would end it (`is_ending`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from .comparison import Better, Kind, judge, position, sign
from .intervals import Array, Interval, interval
from .sequential import ConfidenceSequence, RecentSequence

MAX_LOSS = 15.0
"""The upper limit of the log loss of one event, in nats: a probability of 3e-7 for what happened."""
MAX_FACTOR = 100
"""If a decision needs more than this many times the present events or seeds, their number is not given."""
MIN_GROWTH = 1.1
"""The smallest estimate of the factor by which the data of an undecided interval must grow."""

_SAVED = (
    *("kind", "judgment", "judged_since", "is_conflicting", "decided_at", "first_decided_at", "reopened_at"),
    *("has_any_difference", "_has_excluded"),
)
"""The plain attributes of `PairedScores` that its state contains."""


def log_losses(scores: Array, labels: Array) -> Array:
    """Return the log loss of each event, at most `MAX_LOSS`; nan for scores that are not finite."""
    x = np.where(labels > 0.5, -scores.astype(np.float64), scores)
    with np.errstate(over="ignore", invalid="ignore"):
        losses: Array = np.minimum(np.logaddexp(0.0, x), MAX_LOSS)
    return np.where(np.isfinite(scores), losses, np.nan)


class PairedScores:
    """The differences of two arms so far, and the verdict that they allow.

    The interval over time is the confidence sequence of Choe and Ramdas (2024), "Comparing sequential forecasters", the
    one over seeds that of Student (1908), "The probable error of a mean". Both have to agree: the test of the union of
    hypotheses of Berger (1982), "Multiparameter hypothesis testing and acceptance sampling".

    Args:
        better: Whether lower or higher scores are better.
        matters: The smallest difference of practical use, in the unit of `scale`.
        alpha: The probability of a wrong verdict.
        total: The number of batches or blocks of the whole stream.
        lag: The number of batches by which labels arrive late.
        relative: Whether differences are in percent of the baseline's score, instead of in hundredths.
        is_live: Whether two forecasters are compared while they are in use. The verdict is then about these two alone,
            without an interval over seeds, and no curve is kept.
    """

    def __init__(
        self,
        better: Better,
        matters: float,
        alpha: float,
        total: int,
        lag: int = 0,
        relative: bool = True,
        *,
        is_live: bool = False,
    ) -> None:
        self.better, self.matters, self.relative, self.is_live = better, matters, relative, is_live
        self.seed_confidence = 1 - alpha / 2
        self.sequence = ConfidenceSequence(alpha, lag=lag)
        self.recent_sequence = RecentSequence(alpha, total, lag)
        self.kind: Kind = "inconclusive"
        self.judgment: Kind = "inconclusive"
        """The conclusion from the intervals now. It becomes the verdict once it is confirmed."""
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
        self._starts: list[_Start] = []
        """The beginnings of the recent parts so far."""
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
            self._starts.append(_Start(event, self._sums, self.over_time))
        self.has_any_difference |= bool(differences.any())
        self._sums = self._sums + count * np.array([1.0, float(baseline.mean()), *differences])
        for sequence in (self.sequence, self.recent_sequence):
            sequence.update(float(differences.mean()), count)
        over_time = self.over_time
        if not self.is_live:
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
        self._record_decision(before, event)

    def finish(self, event: int) -> None:
        """Judge the whole stream, because it has ended; the description of the module gives the rule and its reasons.

        Args:
            event: The number of events of the stream.
        """
        before = self.kind
        self.judgment, self.is_conflicting = self._judge_at_end()
        self.kind = self.judgment
        self._record_decision(before, event)

    def _record_decision(self, before: Kind, event: int) -> None:
        """Record since when the verdict has stood, after it may have changed."""
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
        """The t interval over paired seeds now; None without seeds, or if every seed gives the same difference."""
        return self._over_seeds(self._sums)

    @property
    def recent_over_seeds(self) -> Interval | None:
        """The t interval over paired seeds in the recent part; None if every seed gives the same difference."""
        return self._over_seeds(self._recent_sums)

    @property
    def earlier(self) -> Interval:
        """The confidence sequence at the beginning of the recent part, for the events before it."""
        return Interval(math.nan, -math.inf, math.inf, 0) if self._start is None else self._start.over_time

    @property
    def recent_from(self) -> int | None:
        """The number of events of the stream before the recent part; None if there is no such part yet."""
        return None if self._start is None else self._start.event

    @property
    def change(self) -> Interval:
        """The change of the difference from the earlier to the recent part, with the ends that both intervals allow."""
        recent, earlier = self.recent_over_time, self.earlier
        ends = recent.low - earlier.high, recent.high - earlier.low
        return Interval(recent.mean - earlier.mean, *ends, recent.count)

    @property
    def is_fading(self) -> bool:
        """Whether the difference would lose its sign by another change like that to the recent part."""
        return (self.recent_over_time.mean + self.change.mean) * self.over_time.mean <= 0

    @property
    def is_reversing(self) -> bool:
        """Whether an interval of the recent part excludes 0 on the other side than the mean of the whole stream."""
        intervals = filter(None, [self.recent_over_time, self.recent_over_seeds])
        return any(sign(each) * self.over_time.mean < 0 for each in intervals)

    @property
    def is_ending(self) -> bool:
        """Whether it is certain that the difference shrinks, and another such change would end it."""
        return self.is_fading and sign(self.change) * self.over_time.mean < 0

    @property
    def _start(self) -> _Start | None:
        number = self.recent_sequence.number
        return None if number is None else self._starts[number]

    @property
    def _recent_sums(self) -> Array:
        """The sums over the recent part; zero if there is none."""
        return self._sums - (self._sums if self._start is None else self._start.sums)

    def _scale(self, sums: Array) -> float:
        """Return the factor from differences of scores to percent of the baseline's score, or to points."""
        return 100 * float(sums[0] / sums[1]) if self.relative and len(sums) and sums[1] else 100.0

    def _over_seeds(self, sums: Array) -> Interval | None:
        if self.is_live:
            return None
        if not len(sums) or not sums[0]:
            return Interval(math.nan, math.nan, math.nan, 0)
        totals = sums[2:]
        if len(totals) > 1 and bool((totals == totals[0]).all()):
            return None
        return interval(self._scale(sums) * totals / sums[0], confidence=self.seed_confidence)

    def _judge(self) -> tuple[Kind, bool]:
        seeds = filter(None, [self.over_seeds, self.recent_over_seeds])
        kind, is_conflicting = judge([self.over_time, self.recent_over_time, *seeds], self.better, self.matters)
        return "inconclusive" if kind in ("better", "worse") and self.is_fading else kind, is_conflicting

    def _judge_at_end(self) -> tuple[Kind, bool]:
        intervals = filter(None, [self.over_time, self.over_seeds])
        kind, is_conflicting = judge(list(intervals), self.better, self.matters)
        is_doubtful = kind in ("better", "worse") and (self.is_reversing or self.is_ending)
        return "inconclusive" if is_doubtful else kind, is_conflicting

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which `load_state_dict` continues."""
        return {
            **{name: getattr(self, name) for name in _SAVED},
            "curve": list(self.curve),
            "sums": self._sums.copy(),
            "starts": [[start.event, start.sums.copy(), list(astuple(start.over_time))] for start in self._starts],
            "sequence": self.sequence.state_dict(),
            "recent_sequence": self.recent_sequence.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned, for the same arguments."""
        for name in _SAVED:
            setattr(self, name, state[name])
        self.curve, self._sums = [tuple(point) for point in state["curve"]], np.array(state["sums"])
        self._starts = [_Start(event, np.array(sums), Interval(*ends)) for event, sums, ends in state["starts"]]
        self.sequence.load_state_dict(state["sequence"])
        self.recent_sequence.load_state_dict(state["recent_sequence"])

    def estimate_more(self) -> tuple[int | None, int | None]:
        """Estimate what would decide a comparison that is undecided at the end of its stream.

        The estimate assumes that the means stay, and that intervals shrink with the square root of the data.

        Returns:
            The number of further events and the number of seeds in total; None where it is not what is missing, or too
            large.
        """
        time_factor = self._time_factor()
        if self.is_reversing or self.is_ending:
            time_factor = max(time_factor, 2)  # as many events again show whether the earlier or the recent part lasts
        seed_factor = 0.0 if self.over_seeds is None else growth_until_decided(self.over_seeds, self.matters)
        more_events = more_seeds = None
        if 1 < time_factor <= MAX_FACTOR:
            more_events = round_up((time_factor - 1) * self.events)
        if self.over_seeds is not None and 1 < seed_factor <= MAX_FACTOR:
            more_seeds = math.ceil(seed_factor * self.over_seeds.count)
        return more_events, more_seeds

    def _time_factor(self) -> float:
        """Return the factor by which the events must grow until the confidence sequence decides."""
        if math.isfinite(self.over_time.half_width):
            return growth_until_decided(self.over_time, self.matters)
        batches = self.sequence.interval.count  # too few for finite ends
        return max(self.sequence.required_batches / batches, 1.5) if batches else math.inf


@dataclass(frozen=True)
class _Start:
    """The state at the beginning of a recent part."""

    event: int
    sums: Array
    over_time: Interval


def _rescale(interval: Interval, factor: float) -> Interval:
    return Interval(interval.mean * factor, interval.low * factor, interval.high * factor, interval.count)


def growth_until_decided(interval: Interval, matters: float) -> float:
    """Return the factor by which the data must grow until an interval excludes 0 or lies within `matters`.

    The estimate assumes that the mean stays, and that the interval shrinks with the square root of the data. It is 1
    for an interval that excludes 0 or lies within `matters` now. For any other it is at least `MIN_GROWTH`: the ends of
    a confidence sequence can be at different distances from the mean, so that it includes 0 although half of its width
    is less than the mean.
    """
    if not math.isfinite(interval.half_width):
        return math.inf
    if position(interval, matters) != "open":
        return 1.0
    reach = max(abs(interval.mean), matters - abs(interval.mean))
    return max((interval.half_width / reach) ** 2, MIN_GROWTH) if reach > 0 else math.inf


def round_up(number: float) -> int:
    """Round up to one significant digit."""
    unit = 10 ** math.floor(math.log10(number)) if number >= 1 else 1
    return int(math.ceil(number / unit) * unit)
