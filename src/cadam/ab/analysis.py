"""The analysis of an A/B comparison, which follows the runs along the stream.

An arm is an optimizer with its own tuning: for each batch, its prediction is that of the learning rate with the lowest
discounted past loss under the same seed (`cadam.statistics.rate_selection`). If labels arrive late, only the losses
that were known when the batch was predicted count. The log loss of an event is limited to `MAX_LOSS`, so that
differences have all moments.

Each of several arms is compared with the baseline at a share of the error probability (Bonferroni's inequality; Dunn
1961, "Multiple comparisons among means", Journal of the American Statistical Association 56(293)).

Warm-up ends, for all arms at the same moment, when the recent log loss of every arm is below that of the best constant
prediction for the same events; or when that is true of one arm and as many events again have passed. The moment depends
only on the past and treats all arms alike.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from ..online.metrics.stream import measure
from ..statistics.comparison import Better
from ..statistics.intervals import Array, Interval, interval
from ..statistics.paired_scores import MAX_LOSS, PairedScores, log_losses
from ..statistics.rate_selection import RateSelector
from .result import ArmResult, Curve, PairResult, Result
from .runner import RunCache
from .stream import JudgedEvents
from .study import MAX_ADDED_RATES, Run, Study, next_rate, rate_between

WARM_UP_HALF_LIFE = 2_000
"""The half-life, in events, of the losses that decide when warm-up ends."""
MIN_WARM_UP = 500
"""The smallest number of events of the warm-up."""
PERIODS = 20
"""The number of periods of equal length in which arms are shown."""
CURVE_POINTS = 200
"""The number of moments at which the confidence sequence is shown."""
METRIC_KEYS = {"log_loss": "log_loss", "auc": "auc", "gauc": "gauc_by_impressions"}


class _ArmState:
    """One arm under one seed: its selector and what it predicted with."""

    def __init__(self, grid: tuple[float, ...], lag: int) -> None:
        self.selector = RateSelector(grid)
        self.leaders = [self.selector.leader] * (lag + 1)
        """The leader for each batch so far, and for the next `lag` + 1 batches."""
        self.losses: list[float] = []
        """The loss of each batch."""

    def update(self, losses: Mapping[float, float], count: int) -> None:
        loss = losses[self.leaders[len(self.losses)]]
        self.losses.append(loss if math.isfinite(loss) else MAX_LOSS)
        if count:
            self.selector.update(losses, count)
        self.leaders.append(self.selector.leader)


class Analysis:
    """Follows the runs of a comparison along the stream.

    Args:
        study: The comparison.
        judged: The judged events.
        cache: The recorded scores.
    """

    def __init__(self, study: Study, judged: JudgedEvents, cache: RunCache) -> None:
        self.study, self.judged, self.cache = study, judged, cache
        self.batches = 0
        """The number of batches so far."""
        self.rates: dict[str, list[float]] = {arm: sorted(study.grid) for arm in study.arms}
        self.added: dict[str, dict[float, int]] = {arm: {} for arm in study.arms}
        self._losses: dict[Run, Array] = {}
        """The mean loss of each batch, by run."""
        self._arms = {
            (arm, seed): _ArmState(study.grid, judged.lag) for arm in study.arms for seed in range(study.seeds)
        }
        self._counts = np.diff(judged.ends, prepend=0)
        self._weights = self._sums_by_batch(judged.weights)
        """The sum of the weights of the events of each batch; their number if there are no weights."""
        self._positives = self._sums_by_batch(judged.weights * judged.labels)
        self.warm_up_batches: int | None = None
        self._recent = dict.fromkeys(study.arms, 0.0)
        self._recent_positives = self._recent_count = 0.0
        self._first_better: int | None = None
        self._blocks_done = 0
        total = study.blocks if study.metric != "log_loss" else int((self._counts > 0).sum())
        lag = judged.lag if study.metric == "log_loss" else math.ceil(judged.lag * total / max(len(self._counts), 1))
        better: Better = "lower" if study.metric == "log_loss" else "higher"
        alpha = study.alpha / max(1, len(study.arms) - 1)  # Bonferroni's correction for several arms
        self.pairs = {
            arm: PairedScores(better, study.matters, alpha, total, lag, relative=study.metric == "log_loss")
            for arm in study.arms[1:]
        }

    # Along the stream -------------------------------------------------------------------------------------------

    @property
    def events(self) -> int:
        """The number of judged events so far."""
        return int(self.judged.ends[self.batches - 1]) if self.batches else 0

    @property
    def warm_up(self) -> int | None:
        """The number of judged events of the warm-up; None if it has not ended."""
        return None if self.warm_up_batches is None else int(self.judged.ends[self.warm_up_batches - 1])

    @property
    def is_decided(self) -> bool:
        """Whether every arm has a verdict, and the same sign at the best learning rates in hindsight."""
        return all(pair.kind != "inconclusive" and not self._is_reversed(arm) for arm, pair in self.pairs.items())

    def _is_reversed(self, arm: str) -> bool:
        """Whether the difference has another sign at the best single rates in hindsight, so that it is undecided."""
        pair = self.pairs[arm]
        if self.study.metric != "log_loss" or pair.kind not in ("better", "worse"):
            return False
        return _in_hindsight(self._best_rate(arm)[1], self._best_rate(self.study.baseline)[1]) * pair.over_time.mean < 0

    def runs(self) -> list[Run]:
        """Return all runs, with those at added learning rates."""
        return [Run(arm, lr, seed) for arm in self.study.arms for lr in self.rates[arm] for seed in self._seeds]

    @property
    def _seeds(self) -> range:
        return range(self.study.seeds)

    def update(self, batch: int) -> None:
        """Follow the runs, which have got that far, to a number of batches."""
        for run in self.runs():
            self._extend(run, batch)
        for number in range(self.batches, batch):
            count = int(self._counts[number])
            for (arm, seed), state in self._arms.items():
                losses = {lr: float(self._losses[Run(arm, lr, seed)][number]) for lr in state.selector.rates}
                state.update(losses, count)
            self.batches = number + 1
            if self._weights[number] == 0:
                continue
            if self.warm_up_batches is None:
                self._follow_warm_up(number, count)
            elif self.study.metric == "log_loss":
                baseline = self._arm_losses(self.study.baseline, number)
                for arm, pair in self.pairs.items():
                    pair.update(self._arm_losses(arm, number), baseline, float(self._weights[number]), self.events)
        if self.study.metric != "log_loss" and self.warm_up is not None:
            self._follow_blocks()
        if self.batches == len(self._counts):
            for pair in self.pairs.values():
                pair.finish(self.events)

    def _sums_by_batch(self, values: Array, first: int = 0, end: int | None = None) -> Array:
        """Return the sums of the values of judged events over each of some batches."""
        counts = self._counts[first:end]
        sums: Array = np.add.reduceat(np.append(values, 0.0), np.cumsum(counts) - counts)
        return np.where(counts > 0, sums, 0.0)

    def _extend(self, run: Run, batch: int) -> None:
        """Compute the batch losses of a run up to a number of batches."""
        known = self._losses.get(run, np.empty(0))
        if len(known) >= batch:
            return
        first, last = int(self.judged.ends[len(known) - 1]) if len(known) else 0, int(self.judged.ends[batch - 1])
        labels = self.judged.labels[first:last]
        losses = log_losses(self.cache.files(run).read(first, last), labels)
        sums = self._sums_by_batch(self.judged.weights[first:last] * losses, len(known), batch)
        weights = self._weights[len(known) : batch]
        means = np.divide(sums, weights, out=np.zeros_like(sums), where=weights > 0)
        self._losses[run] = np.concatenate([known, means])

    def _arm_losses(self, arm: str, batch: int) -> Array:
        return np.array([self._arms[arm, seed].losses[batch] for seed in self._seeds])

    def _follow_warm_up(self, batch: int, count: int) -> None:
        decay = 2 ** (-count / WARM_UP_HALF_LIFE)
        weight = float(self._weights[batch])
        self._recent_count = decay * self._recent_count + weight
        self._recent_positives = decay * self._recent_positives + float(self._positives[batch])
        for arm in self.study.arms:
            loss = float(self._arm_losses(arm, batch).mean())
            self._recent[arm] = decay * self._recent[arm] + weight * loss
        constant = constant_loss(self._recent_positives / self._recent_count)
        is_better = [self._recent[arm] / self._recent_count < constant for arm in self.study.arms]
        if self.events < MIN_WARM_UP:
            return
        if any(is_better) and self._first_better is None:
            self._first_better = self.events
        has_waited = self._first_better is not None and self.events >= 2 * self._first_better
        if all(is_better) or has_waited:
            self.warm_up_batches = batch + 1

    def _follow_blocks(self) -> None:
        """Add the blocks of time that are complete, for AUC and GAUC."""
        assert self.warm_up is not None
        size = max(2, (len(self.judged.labels) - self.warm_up) // self.study.blocks)
        while (end := self.warm_up + (self._blocks_done + 1) * size) <= self.events:
            part = slice(end - size, end)
            values = {arm: self._block_values(arm, part) for arm in self.study.arms}
            self._blocks_done += 1
            baseline = values[self.study.baseline]
            for arm, pair in self.pairs.items():
                if np.isfinite(values[arm]).all() and np.isfinite(baseline).all():
                    pair.update(values[arm], baseline, size, end)

    def _block_values(self, arm: str, part: slice) -> Array:
        name = METRIC_KEYS[self.study.metric]
        labels, users = self.judged.labels[part], self.judged.users[part]
        values = [measure(self.scores(arm, seed, part), labels, users)[name] for seed in self._seeds]
        return np.array(values)

    def scores(self, arm: str, seed: int, part: slice) -> Array:
        """Return the scores of an arm, each at the learning rate that it was predicted with."""
        leaders = np.array(self._arms[arm, seed].leaders[: self.batches])
        by_event = np.repeat(leaders, self._counts[: self.batches])[part]
        scores = np.empty(len(by_event), np.float32)
        for lr in np.unique(by_event).tolist():
            rows = by_event == lr
            scores[rows] = self.cache.files(Run(arm, lr, seed)).read(part.start, part.stop)[rows]
        return np.nan_to_num(scores, nan=0.0)

    # Added learning rates ---------------------------------------------------------------------------------------

    def rates_to_add(self) -> list[Run]:
        """Return the runs at learning rates that extend or refine the grid of an arm.

        A rate is added beyond an end of the grid where most seeds of an arm have their leader, and between the best
        rate and its better neighbor if they are far apart. A grid of one rate stays as it is.
        """
        added: list[tuple[str, float]] = []
        for arm in self.study.arms:
            states = [self._arms[arm, seed].selector for seed in self._seeds]
            rates = tuple(self.rates[arm])
            if len(rates) == 1:
                continue
            ends = {False: [s.is_leader_lowest for s in states], True: [s.is_leader_highest for s in states]}
            for upwards, at_end in ends.items():
                outside = [
                    rate for rate in rates if (rate > max(self.study.grid) if upwards else rate < min(self.study.grid))
                ]
                if 2 * sum(at_end) > len(states) and len(outside) < MAX_ADDED_RATES:
                    added.append((arm, next_rate(rates, upwards)))
            between = rate_between(self._recent_losses(arm))
            if between is not None and between not in rates:
                added.append((arm, between))
        return [Run(arm, rate, seed) for arm, rate in added for seed in self._seeds]

    def _recent_losses(self, arm: str) -> dict[float, float]:
        """Return the discounted loss at each learning rate of an arm, as a mean over seeds."""
        states = [self._arms[arm, seed].selector for seed in self._seeds]
        return {lr: float(np.mean([state.loss(lr) for state in states])) for lr in states[0].rates}

    def add(self, runs: list[Run]) -> None:
        """Let runs at further learning rates, which have got as far as the others, compete from now on."""
        for run in runs:
            self._extend(run, self.batches)
            alone = RateSelector([run.lr])
            for loss, count in zip(self._losses[run].tolist(), self._counts.tolist(), strict=False):
                if count:
                    alone.update({run.lr: loss}, count)
            self._arms[run.arm, run.seed].selector.add(run.lr, alone.loss(run.lr))
            if run.lr not in self.rates[run.arm]:
                self.rates[run.arm] = sorted([*self.rates[run.arm], run.lr])
                self.added[run.arm][run.lr] = self.events

    # The result -------------------------------------------------------------------------------------------------

    def result(self, seconds: float = 0.0) -> Result:
        """Return the result so far."""
        start = self.warm_up if self.warm_up is not None else 0
        part = slice(start, self.events)
        first_batch = self.warm_up_batches or 0
        periods = self._periods(first_batch)
        arms = [self._arm_result(arm, part, first_batch, periods) for arm in self.study.arms]
        pairs = [self._pair_result(arm, arms, part, first_batch, periods) for arm in self.study.arms[1:]]
        return Result(
            metric=self.study.metric,
            matters=self.study.matters,
            alpha=self.study.alpha,
            seeds=self.study.seeds,
            events=len(self.judged.labels),
            processed_events=self.events,
            warm_up=self.warm_up,
            lag=self.judged.lag,
            batches=len(self._counts),
            clipped_share=self._clipped_share(part),
            arms=arms,
            pairs=pairs,
            period_ends=[int(self.judged.ends[end - 1]) for _, end in periods],
            best_constant=self._best_constant(part),
            seconds=seconds,
        )

    def _best_constant(self, part: slice) -> float:
        labels, weights = self.judged.labels[part], self.judged.weights[part]
        return constant_loss(float((labels * weights).sum() / weights.sum())) if weights.sum() else math.nan

    def _clipped_share(self, part: slice) -> float:
        labels = self.judged.labels[part]
        losses = [log_losses(self.scores(*key, part), labels) for key in self._arms]
        return float(np.mean([(each >= MAX_LOSS).mean() for each in losses])) if len(labels) else 0.0

    def _periods(self, first: int) -> list[tuple[int, int]]:
        """Return the first batch of each period and the batch after its last, with about as many events each."""
        ends = self.judged.ends[: self.batches]
        start = 0 if first == 0 else int(ends[first - 1])
        targets = np.linspace(start, self.events, PERIODS + 1)[1:]
        edges = np.unique([first, *(np.searchsorted(ends, targets) + 1)])
        return [(int(a), min(int(b), self.batches)) for a, b in itertools.pairwise(edges)]

    def _mean(self, values: Array, first: int, end: int) -> float:
        """Return the mean over events of batch means."""
        weights = self._weights[first:end]
        return float((values[first:end] * weights).sum() / weights.sum()) if weights.sum() else math.nan

    def _losses_by_rate(self, arm: str) -> dict[float, Array]:
        """Return the loss of each batch at each learning rate of an arm, as a mean over seeds."""
        return {lr: np.mean([self._losses[Run(arm, lr, seed)] for seed in self._seeds], 0) for lr in self.rates[arm]}

    def _best_rate(self, arm: str) -> tuple[float, float]:
        """Return the learning rate with the lowest loss over all judged events, and this loss; nan if all diverged."""
        first = self.warm_up_batches or 0
        losses = {lr: self._mean(values, first, self.batches) for lr, values in self._losses_by_rate(arm).items()}
        finite = {lr: loss for lr, loss in losses.items() if math.isfinite(loss)}
        return min(finite.items(), key=lambda item: item[1]) if finite else (math.nan, math.nan)

    def _arm_result(self, arm: str, part: slice, first: int, periods: list[tuple[int, int]]) -> ArmResult:
        by_rate = self._losses_by_rate(arm)
        loss_by_rate = {lr: self._mean(values, first, self.batches) for lr, values in by_rate.items()}
        own = np.mean([self._arms[arm, seed].losses for seed in self._seeds], 0)
        best_rate, loss_at_best_rate = self._best_rate(arm)
        selectors = [self._arms[arm, seed].selector for seed in self._seeds]
        usable = {lr: loss for lr, loss in self._recent_losses(arm).items() if math.isfinite(loss)}
        leaders = [
            Counter(rate for seed in self._seeds for rate in self._arms[arm, seed].leaders[a:b]).most_common(1)[0][0]
            for a, b in periods
        ]
        metrics: dict[str, float] = {}
        if part.stop > part.start:
            labels, users, weights = (
                column[part] for column in (self.judged.labels, self.judged.users, self.judged.weights)
            )
            measured = [measure(self.scores(arm, seed, part), labels, users, weights) for seed in self._seeds]
            keys = {"auc": "auc", "gauc": "gauc_by_impressions", "calibration": "calibration"}
            metrics = {name: float(np.mean([each[key] for each in measured])) for name, key in keys.items()}
        metrics["log_loss"] = self._mean(own, first, self.batches)
        return ArmResult(
            name=arm,
            metrics=metrics,
            rate_to_use=min(usable, key=lambda lr: usable[lr]) if usable else math.nan,
            best_rate=best_rate,
            loss_at_best_rate=loss_at_best_rate,
            loss_by_rate=loss_by_rate,
            loss_by_period={lr: [self._mean(values, *period) for period in periods] for lr, values in by_rate.items()},
            own_loss_by_period=[self._mean(own, *period) for period in periods],
            rate_by_period=leaders,
            added_rates=self.added[arm],
            has_diverged=any(not any(math.isfinite(s.loss(lr)) for lr in s.rates) for s in selectors),
        )

    def _pair_result(
        self, arm: str, arms: list[ArmResult], part: slice, first: int, periods: list[tuple[int, int]]
    ) -> PairResult:
        pair = self.pairs[arm]
        results = {each.name: each for each in arms}
        own, base = results[arm], results[self.study.baseline]
        kind = pair.kind
        is_same = bool(pair.curve) and not pair.has_any_difference
        if own.has_diverged or base.has_diverged:
            kind = "diverged"
        elif is_same:
            kind = "equivalent"
        by_period = [
            100 * (a / b - 1) if b else math.nan
            for a, b in zip(own.own_loss_by_period, base.own_loss_by_period, strict=True)
        ]
        more_events, more_seeds = pair.estimate_more() if kind == "inconclusive" else (None, None)
        if self._is_reversed(arm):
            more_events = round(pair.events)  # as many events again, in which the arms may have found their rates
        users, users_ahead = self._over_users(arm, part, base.metrics["log_loss"])
        over_seeds = pair.over_seeds
        return PairResult(
            arm=arm,
            baseline=self.study.baseline,
            metric=self.study.metric,
            kind=kind,
            difference=pair.over_time.mean,
            over_time=pair.over_time,
            over_seeds=over_seeds,
            seed_confidence=pair.seed_confidence,
            required_batches=pair.sequence.required_batches,
            recent_over_time=pair.recent_over_time,
            recent_over_seeds=pair.recent_over_seeds,
            recent_from=pair.recent_from,
            change=pair.change,
            is_fading=pair.is_fading,
            is_reversing=pair.is_reversing,
            is_ending=pair.is_ending,
            is_conflicting=pair.is_conflicting,
            is_same=is_same,
            decided_at=pair.decided_at,
            first_decided_at=pair.first_decided_at,
            reopened_at=pair.reopened_at,
            in_hindsight=_in_hindsight(own.loss_at_best_rate, base.loss_at_best_rate),
            more_events=more_events,
            more_seeds=more_seeds,
            periods=by_period,
            users=users,
            users_ahead=users_ahead,
            curve=_thin(pair.curve),
        )

    def _over_users(self, arm: str, part: slice, base: float) -> tuple[Interval | None, float]:
        """Return the difference of the log loss over users in percent, and the share of users who have a lower one."""
        if not self.judged.has_users or part.stop <= part.start:
            return None, math.nan
        labels = self.judged.labels[part]
        difference = np.zeros(part.stop - part.start)
        for seed in self._seeds:
            for name, sign in ((arm, 1), (self.study.baseline, -1)):
                difference += sign * log_losses(self.scores(name, seed, part), labels) / self.study.seeds
        event_weights = self.judged.weights[part]
        has_weight = event_weights > 0
        _, index = np.unique(self.judged.users[part][has_weight], return_inverse=True)
        weights = np.bincount(index, event_weights[has_weight])
        means = np.bincount(index, (event_weights * difference)[has_weight]) / weights
        differs = means != 0
        ahead = float((means < 0).sum() / max(differs.sum(), 1))
        return interval(100 * means / base, weights), ahead


def _in_hindsight(arm: float, baseline: float) -> float:
    """Return the difference of the losses at the best single rates in percent of the baseline's."""
    return 100 * (arm / baseline - 1)


def constant_loss(share: float) -> float:
    """Return the log loss of the best constant prediction for events of which this share is positive."""
    if not 0 < share < 1:
        return 0.0
    return -share * math.log(share) - (1 - share) * math.log1p(-share)


def _thin(points: list[tuple[int, float, float, float]]) -> Curve:
    """Return a curve with at most about `CURVE_POINTS` of the points, with the last one."""
    step = max(1, len(points) // CURVE_POINTS)
    chosen = [*points[::step], *points[-1:]] if (len(points) - 1) % step else points[::step]
    columns = list(zip(*chosen, strict=True)) or [(), (), (), ()]
    return Curve(*(list(column) for column in columns))
