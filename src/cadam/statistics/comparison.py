"""Are two optimizers different, and by how much? Once, for all experiments.

Seeds are paired: both arms meet the same initial weights, batches and noise under one seed, and it is their
difference, seed by seed, whose mean and 95% t interval are given. Beside it stands the A/A noise floor: how far two
means of one and the same optimizer may lie apart when only the seeds differ. There the true difference is 0, so the
floor reaches as far to either side of it, however far apart the two happened to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..ab.verdict import KINDS, MORE_SEEDS, ONE_SEED, SAME_RUNS, Better, Kind, Verdict, judge
from ..trials.experiment import Results, Row
from .intervals import Interval as Interval
from .intervals import interval as interval
from .intervals import t_quantile as t_quantile


class NoLearningRateError(ValueError):
    """An optimizer that diverged at every learning rate of its grid."""


def noise_floor(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The difference of the means of two independent sets with equal variance, with its 95% interval."""
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
    """An arm against its baseline, over paired seeds."""

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
    noise: Interval | None
    """A/A: the baseline's test seeds minus as many others."""
    same_runs: bool = False
    """Do seeds change nothing? Then they are no evidence; see `without_seeds`."""

    @property
    def floor(self) -> float:
        """Two means of the baseline under other seeds lie within it 19 times in 20; nan where that is not known."""
        return math.nan if self.noise is None else self.noise.half_width

    @property
    def qualifier(self) -> str:
        """What has to be added where a difference is smaller than the floor."""
        if self.kind in ("better", "worse") and abs(self.difference.mean) < self.floor:
            return ", below the noise floor"
        return ""

    @property
    def kind(self) -> Kind:
        if self.diverged or self.baseline_diverged:
            return "diverged"
        d = self.difference
        exact = d if self.random else Interval(d.mean, d.mean, d.mean, d.count)
        return judge([exact], self.better)[0]

    @property
    def verdict(self) -> Verdict:
        unknown = self.kind == "inconclusive" and math.isnan(self.difference.low)
        step = MORE_SEEDS if unknown and not self.same_runs else ""
        return Verdict(self.kind, self.arm, self.baseline, detail=self._detail(), next_step=step)

    def _detail(self) -> str:
        if self.kind == "diverged":
            return (
                f": {self.arm} diverged in {self.diverged} of {self.seeds}, {self.baseline} in {self.baseline_diverged}"
            )
        if self.same_runs:
            return f": {SAME_RUNS}"
        if self.kind == "inconclusive":
            return ONE_SEED.removeprefix("undecided") if math.isnan(self.difference.low) else ""
        if self.kind == "equivalent":
            return ": exactly equal"
        if not self.random:
            return " (exact: nothing is random)"
        if self.difference.half_width == 0:
            return ", by the same in every seed: they may not matter here"
        return self.qualifier


def compare(
    arm: Mapping[int, float],
    baseline: Mapping[int, float],
    *,
    names: tuple[str, str],
    better: Better,
    repeat: Mapping[int, float] | None = None,
    random: bool = True,
) -> Comparison:
    """Compare a metric by seed with that of a baseline; `repeat` is the baseline under other seeds, for A/A."""
    if set(arm) != set(baseline):
        alone = sorted(set(arm) ^ set(baseline))
        raise ValueError(f"{names[0]} and {names[1]} must have the same seeds; only one of them has {alone}")
    if repeat is not None and (common := sorted(set(repeat) & set(baseline))):
        raise ValueError(f"A/A needs other seeds than the comparison; both have {common}")
    both = [seed for seed in arm if math.isfinite(arm[seed]) and math.isfinite(baseline[seed])]
    noise = None
    if repeat is not None:
        noise = noise_floor(_finite(baseline), _finite(repeat))
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
    """The comparison where every seed gives the same run: an interval over seeds and a noise floor are not known."""
    d = comparison.difference
    return replace(comparison, difference=Interval(d.mean, math.nan, math.nan, d.count), noise=None, same_runs=True)


def _finite(values: Mapping[int, float]) -> list[float]:
    return [value for value in values.values() if math.isfinite(value)]


def tally(comparisons: Sequence[Comparison], what: str, better: str, worse: str) -> str:
    """How comparisons came out, none left out, as in "lower in 3 of 8 problems, higher in 0, undecided in 5"."""
    kinds, seeds = [c.kind for c in comparisons], max(c.seeds for c in comparisons)
    if seeds == 1 and all(c.random for c in comparisons):
        return ONE_SEED
    won, lost = kinds.count("better"), kinds.count("worse")
    few = f" ({seeds} seeds; --full for more)" if seeds == 2 else ""
    total = len(kinds)
    small = sum(bool(c.qualifier) for c in comparisons)
    less = f"; {small} of these {won + lost} below the noise floor" if small else ""
    return f"{better} in {won} of {total} {what}, {worse} in {lost}, undecided in {total - won - lost}{few}{less}"


def family_row(what: str, comparisons: Mapping[str, Comparison], seconds: float) -> Row:
    """Many problems in one line: where the arm is better and where worse, and how many of each kind there are."""
    kinds: tuple[str, ...] = KINDS
    places = {kind: [name for name, c in comparisons.items() if c.kind == kind] for kind in kinds}
    seeds = max(c.seeds for c in comparisons.values())
    counts = ", ".join(f"{kind} {len(names)}" for kind, names in places.items())
    named = "; ".join(f"{kind} in {', '.join(places[kind])}" for kind in ("better", "worse") if places[kind])
    return Row(
        what,
        "",
        named or f"{len(comparisons)} problems",
        "",
        seeds,
        seconds,
        ONE_SEED if seeds == 1 else counts,
        values={**{kind: float(len(names)) for kind, names in places.items()}, "problems": float(len(comparisons))},
    )


def row(what: str, paper: str, comparison: Comparison, seconds: float, digits: int = 3) -> Row:
    """A comparison as a line of the table."""
    c, spec = comparison, f".{digits}f"
    values = {
        c.arm: c.mean,
        c.baseline: c.baseline_mean,
        "difference": c.difference.mean,
        "low": c.difference.low,
        "high": c.difference.high,
        f"{c.arm} diverged": float(c.diverged),
        f"{c.baseline} diverged": float(c.baseline_diverged),
    }
    floor = ""
    if c.noise is not None:
        values |= {"noise floor": c.floor, "A/A difference": c.noise.mean}
        seen = f"{abs(c.noise.mean):{spec}} seen"
        floor = seen if math.isnan(c.floor) else f"±{c.floor:{spec}} ({seen})"
    return Row(
        what,
        paper,
        f"{c.arm} {c.mean:{spec}}, {c.baseline} {c.baseline_mean:{spec}}",
        "none: all diverged" if c.difference.count == 0 else f"{c.difference:+{spec}}",
        c.seeds,
        seconds,
        str(c.verdict),
        floor,
        values,
        c.kind,
    )


# Learning rates ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The best learning rate of a grid, on tuning seeds."""

    arm: str
    lr: float
    means: Mapping[float, float]
    """The metric at each learning rate; nan where a run diverged."""

    @property
    def warning(self) -> str | None:
        """What the grid leaves open."""
        if len(self.means) == 1:
            return f"{self.arm}: one learning rate ({self.lr:g}), nothing was chosen"
        if self.lr in (min(self.means), max(self.means)):
            end = "lowest" if self.lr == min(self.means) else "highest"
            return f"{self.arm}: the best learning rate, {self.lr:g}, is the {end} of its grid; look beyond it"
        return None


def choose_lr(arm: str, tuning: Results, metric: str, better: Better) -> Choice:
    """The learning rate with the best mean over tuning seeds. One at which any run diverged is not chosen."""
    means = {
        lr: float(np.mean(list(tuning.where(lr=lr).metric(metric).values())))
        for lr in sorted({result.cell.lr for result in tuning})
    }
    usable = {lr: mean for lr, mean in means.items() if math.isfinite(mean)}
    if not usable:
        raise NoLearningRateError(f"{arm} diverged at every learning rate of its grid: {sorted(means)}")
    sign = 1 if better == "lower" else -1
    return Choice(arm, min(usable, key=lambda lr: (sign * usable[lr], lr)), {**means, **usable})
