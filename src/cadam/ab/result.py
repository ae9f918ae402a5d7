"""The result of an A/B comparison. Console, JSON and page render it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..statistics.comparison import Kind, sign
from ..statistics.intervals import Interval
from ..statistics.sequential import FIRST_CHECK
from .study import MetricName

METRIC_NAMES: Mapping[MetricName, str] = {"log_loss": "log loss", "auc": "AUC", "gauc": "GAUC"}
UNITS: Mapping[MetricName, str] = {"log_loss": "%", "auc": " points", "gauc": " points"}


@dataclass(frozen=True)
class ArmResult:
    """The measurements of one arm on the judged events, as means over seeds."""

    name: str
    metrics: Mapping[str, float]
    """Log loss, AUC, GAUC by impressions and calibration of the arm's predictions."""
    rate_to_use: float
    """The learning rate with the lowest recent loss at the end."""
    best_rate: float
    """The learning rate with the lowest log loss over all judged events, in hindsight."""
    loss_at_best_rate: float
    loss_by_rate: Mapping[float, float]
    """The log loss over all judged events at each learning rate; nan where a run diverged."""
    loss_by_period: Mapping[float, Sequence[float]]
    """The log loss in each period at each learning rate."""
    own_loss_by_period: Sequence[float]
    """The log loss of the arm itself in each period."""
    rate_by_period: Sequence[float]
    """The learning rate that most batches of each period were predicted with."""
    added_rates: Mapping[float, int]
    """The learning rates beyond the grid, and the number of events after which each of them was added."""
    has_diverged: bool = False
    """Whether all learning rates diverged under some seed."""


@dataclass(frozen=True)
class Curve:
    """The difference so far with its confidence sequence, at some moments of the stream."""

    events: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class PairResult:
    """The comparison of one arm with the baseline. Differences are arm minus baseline.

    They are in percent of the baseline's log loss, or in points if the metric is AUC or GAUC.
    """

    arm: str
    baseline: str
    metric: MetricName
    kind: Kind
    difference: float
    over_time: Interval
    """The confidence sequence at the end."""
    over_seeds: Interval | None
    """The t interval over paired seeds; None if every seed gives the same runs."""
    seed_confidence: float
    required_batches: int = FIRST_CHECK
    """The number of batches, or of blocks for AUC and GAUC, before the confidence sequence has finite ends."""
    recent_over_time: Interval = field(default_factory=lambda: Interval(math.nan, -math.inf, math.inf, 0))
    """The confidence sequence of the recent part of the stream."""
    recent_over_seeds: Interval | None = None
    """The t interval over paired seeds in the recent part; None if every seed gives the same runs."""
    recent_from: int | None = None
    """The number of events before the recent part; None if there is no such part yet."""
    change: Interval = field(default_factory=lambda: Interval(math.nan, -math.inf, math.inf, 0))
    """The change of the difference from the earlier to the recent part."""
    is_fading: bool = False
    """Whether the difference would lose its sign by another such change."""
    is_reversing: bool = False
    """Whether an interval of the recent part excludes 0 on the other side than the mean of the whole stream."""
    is_ending: bool = False
    """Whether it is certain that the difference shrinks, and another such change would end it."""
    is_conflicting: bool = False
    is_same: bool = False
    """Whether all predictions of both arms are equal."""
    decided_at: int | None = None
    """The number of events since which the verdict has stood."""
    first_decided_at: int | None = None
    """The number of events after which there was a verdict for the first time."""
    reopened_at: int | None = None
    """The number of events after which the confidence sequence included 0 again, after it had excluded 0."""
    in_hindsight: float = math.nan
    """The difference of the log loss between the best single learning rates in hindsight, in percent."""
    more_events: int | None = None
    """For an undecided comparison: the estimated number of further events that would decide it."""
    more_seeds: int | None = None
    """For an undecided comparison: the estimated number of seeds that would decide it."""
    periods: Sequence[float] = ()
    """The difference of the log loss in each period, in percent; nan where no event has a weight."""
    users: Interval | None = None
    """The difference of the log loss over users, in percent; None without users."""
    users_ahead: float = math.nan
    """The share of users with a lower log loss, of those with any difference."""
    curve: Curve = field(default_factory=lambda: Curve((), (), (), ()))

    @property
    def is_reversed(self) -> bool:
        """Whether the sign of the difference is another at the best single rates in hindsight."""
        return self.metric == "log_loss" and self.in_hindsight * self.difference < 0

    @property
    def quarters(self) -> list[float]:
        """The difference of the log loss in each quarter of the judged events, in percent."""
        periods = self._judged_periods
        return [float(np.mean(quarter)) for quarter in np.array_split(periods, 4)] if len(periods) >= 4 else []

    @property
    def _judged_periods(self) -> list[float]:
        return [period for period in self.periods if math.isfinite(period)]

    @property
    def trend(self) -> str:
        """Whether the difference "shrinks", "grows" or "changes its sign" along the stream; empty if unclear."""
        if not sign(self.change):
            return ""
        recent = self.recent_over_time.mean
        earlier = recent - self.change.mean
        if earlier * recent < 0:
            return "changes its sign"
        return "shrinks" if abs(recent) < abs(earlier) else "grows"

    @property
    def share_of_periods_ahead(self) -> float:
        """The share of periods in which the arm has the lower log loss."""
        periods = self._judged_periods
        return sum(each < 0 for each in periods) / len(periods) if periods else math.nan

    @property
    def is_decided(self) -> bool:
        """Whether there is a verdict."""
        return self.kind != "inconclusive"


@dataclass(frozen=True)
class Result:
    """The result of a comparison."""

    metric: MetricName
    matters: float
    alpha: float
    seeds: int
    events: int
    """The number of events of the stream."""
    processed_events: int
    """The number of judged events when the comparison stopped."""
    warm_up: int | None
    """The number of judged events before the models were better than the best constant; None if they never were."""
    lag: int
    """The largest number of batches by which labels were late."""
    batches: int
    """The number of batches of the stream."""
    clipped_share: float
    """The share of predictions whose log loss was limited."""
    arms: Sequence[ArmResult]
    """The arms; the first is the baseline."""
    pairs: Sequence[PairResult]
    period_ends: Sequence[int]
    """The number of events at the end of each period."""
    best_constant: float
    """The log loss of the best constant prediction on the judged events."""
    seconds: float = 0.0

    @property
    def judged_events(self) -> int:
        """The number of events that the verdict is about."""
        return 0 if self.warm_up is None else self.processed_events - self.warm_up

    @property
    def is_complete(self) -> bool:
        """Whether the whole stream was processed."""
        return self.processed_events >= self.events

    @property
    def ranking(self) -> list[str]:
        """The arms from the best to the worst, by the metric of the verdict."""
        sign = 1 if self.metric == "log_loss" else -1
        by_name = {arm.name: sign * arm.metrics.get(self.metric, math.nan) for arm in self.arms}
        return sorted(by_name, key=lambda name: (math.isnan(by_name[name]), by_name[name]))

    def arm(self, name: str) -> ArmResult:
        """Return the result of an arm."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def recommended(self) -> str:
        """The arm to use: the best of those that are better than the baseline, otherwise the baseline."""
        better = [pair.arm for pair in self.pairs if pair.kind == "better" and not pair.is_reversed]
        return next((name for name in self.ranking if name in better), self.arms[0].name)


def as_plain(value: Any) -> Any:
    """Return a value as plain values for JSON; numbers that are not finite become None."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {f"{name:g}" if isinstance(name, float) else name: as_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
