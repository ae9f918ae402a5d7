"""Paired comparison of two optimizers over seeds.

Under one seed both arms start from the same weights and meet the same batches and noise. The comparison is therefore
about the difference seed by seed: its mean and 95% t interval. Beside it stands the A/A noise floor, which says how far
apart two means of the same optimizer lie when only the seeds differ. The true A/A difference is 0, so the noise floor
is symmetric around 0 and does not depend on how far apart the two means happened to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from .intervals import Interval, interval, t_quantile

Better = Literal["lower", "higher"]
"""Whether lower or higher values of a metric are better."""
Kind = Literal["better", "worse", "equivalent", "inconclusive", "diverged"]
"""The possible conclusions of a comparison."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Position = Literal["above", "below", "within", "open"]
"""The position of an interval relative to 0 and to the smallest difference that matters."""


def sign(interval: Interval) -> int:
    """Return the side of 0 on which an interval lies: 1, -1, or 0 if it contains 0 or has no ends."""
    return int(interval.low > 0) - int(interval.high < 0)


def is_within(interval: Interval, matters: float) -> bool:
    """Return whether the whole interval lies within `matters` of 0."""
    return -matters <= interval.low and interval.high <= matters


def position(interval: Interval, matters: float) -> Position:
    """Return "above" or "below" for an interval that excludes 0, otherwise "within" or "open"."""
    if side := sign(interval):
        return "above" if side > 0 else "below"
    return "within" if is_within(interval, matters) else "open"


def judge(intervals: Sequence[Interval], better: Better, matters: float = 0.0) -> tuple[Kind, bool]:
    """Combine several intervals of one difference into one conclusion.

    The null hypothesis is the union of those of the intervals, so that all of them have to exclude 0 and no correction
    for their number is needed (Berger 1982, "Multiparameter hypothesis testing and acceptance sampling", Technometrics
    24(4)). Equivalence by an interval within two limits is the test of Schuirmann (1987), "A comparison of the two
    one-sided tests procedure and the power approach", Journal of Pharmacokinetics and Biopharmaceutics 15(6).

    Args:
        intervals: Intervals of the same difference, for example over seeds, users and time.
        better: Whether lower or higher values are better.
        matters: The smallest difference of practical use.

    Returns:
        The kind, and whether intervals exclude 0 on different sides. The kind is "equivalent" if all intervals lie
        within `matters` of 0, "better" or "worse" if all of them exclude 0 on the same side, otherwise "inconclusive".
    """
    signs = {sign(each) for each in intervals}
    is_conflicting = {-1, 1} <= signs
    if all(is_within(each, matters) for each in intervals):
        return "equivalent", is_conflicting
    if len(signs) == 1 and 0 not in signs:
        return ("better" if signs == {1 if better == "higher" else -1} else "worse"), False
    return "inconclusive", is_conflicting


def noise_floor(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the difference of the means of two independent samples of equal variance, with its 95% interval.

    This is the two-sample interval of Student's t with a pooled variance (Fisher 1925, "Applications of Student's
    distribution", Metron 5).

    Args:
        first: Values under one set of seeds.
        second: Values of the same optimizer under other seeds.
    """
    if not first or not second:
        return Interval(math.nan, math.nan, math.nan, 0)
    n, m = len(first), len(second)
    mean = float(np.mean(first) - np.mean(second))
    if n + m == 2:
        return Interval(mean, math.nan, math.nan, 2)
    squares = float(np.var(first) * n + np.var(second) * m)
    half = t_quantile(0.95, n + m - 2) * math.sqrt(squares / (n + m - 2) * (1 / n + 1 / m))
    return Interval(mean, mean - half, mean + half, n + m)


@dataclass(frozen=True)
class Comparison:
    """The comparison of an arm with its baseline over paired seeds."""

    arm: str
    baseline: str
    better: Better
    mean: float
    baseline_mean: float
    difference: Interval
    """Arm minus baseline, over the seeds in which both are finite."""
    diverged: int
    baseline_diverged: int
    seeds: int
    random: bool
    """Whether seeds are a random sample. If False, the difference is exact."""
    noise: Interval | None
    """The A/A difference: the baseline's test seeds minus as many other seeds."""
    same_runs: bool = False
    """Whether every seed gives the same run. Seeds are then no evidence; see `without_seeds`."""

    @property
    def floor(self) -> float:
        """The A/A noise floor: 19 of 20 A/A differences are smaller. It is nan if it is unknown."""
        return math.nan if self.noise is None else self.noise.half_width

    @property
    def is_below_floor(self) -> bool:
        """Whether the difference excludes 0 but is smaller than the noise floor."""
        return self.kind in ("better", "worse") and abs(self.difference.mean) < self.floor

    @property
    def kind(self) -> Kind:
        """The conclusion from the interval over seeds."""
        if self.diverged or self.baseline_diverged:
            return "diverged"
        d = self.difference
        exact = d if self.random else Interval(d.mean, d.mean, d.mean, d.count)
        return judge([exact], self.better)[0]


def compare(
    arm: Mapping[int, float],
    baseline: Mapping[int, float],
    *,
    names: tuple[str, str],
    better: Better,
    repeat: Mapping[int, float] | None = None,
    random: bool = True,
) -> Comparison:
    """Compare a metric of an arm with that of its baseline, seed by seed, by the paired interval of Student (1908).

    Args:
        arm: The metric of the arm by seed.
        baseline: The metric of the baseline by seed.
        names: The names of the arm and of the baseline.
        better: Whether lower or higher values are better.
        repeat: The metric of the baseline under other seeds, for the A/A noise floor.
        random: Whether seeds are a random sample.

    Raises:
        ValueError: If arm and baseline have different seeds, or `repeat` shares seeds with the baseline.
    """
    if set(arm) != set(baseline):
        unpaired = sorted(set(arm) ^ set(baseline))
        raise ValueError(f"{names[0]} and {names[1]} must have the same seeds; only one of them has {unpaired}")
    if repeat is not None and (common := sorted(set(repeat) & set(baseline))):
        raise ValueError(f"the A/A test needs other seeds than the comparison; both have {common}")
    both = [seed for seed in arm if math.isfinite(arm[seed]) and math.isfinite(baseline[seed])]
    noise = None if repeat is None else noise_floor(_finite(baseline), _finite(repeat))
    return Comparison(
        *names,
        better,
        float(np.mean([arm[s] for s in both])) if both else math.nan,
        float(np.mean([baseline[s] for s in both])) if both else math.nan,
        interval([arm[s] - baseline[s] for s in both]),
        len(arm) - len(_finite(arm)),
        len(baseline) - len(_finite(baseline)),
        len(arm),
        random,
        noise,
    )


def without_seeds(comparison: Comparison) -> Comparison:
    """Return a comparison without interval over seeds and noise floor, for arms whose seeds all give the same run."""
    d = comparison.difference
    return replace(comparison, difference=Interval(d.mean, math.nan, math.nan, d.count), noise=None, same_runs=True)


def _finite(values: Mapping[int, float]) -> list[float]:
    return [value for value in values.values() if math.isfinite(value)]
