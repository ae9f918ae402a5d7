"""Accuracy over learning rates: both optimizers of a pair at every rate, under four conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from cadam.ab.results import Results, RunSpec
from cadam.ab.summary import Summary

from ..harness import rate_pairs
from ..harness.experiment import Experiment, Plan, Scale
from ..harness.rate_pairs import Pair
from ..harness.rates import RateCurve
from . import streams, study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONDITIONS = {
    "without change": streams.sudden(0),
    "sudden 80°": streams.sudden(80),
    "continuous 2°": streams.continuous(2),
    "noise 40%": streams.noisy(40),
}
GRIDS: dict[str, dict[Scale, tuple[float, ...]]] = {
    "Adam": {"quick": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "full": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)},
    "AmsGrad": {"quick": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "full": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)},
    "SGDM": study.SGDM_GRIDS,
}
"""Where each baseline and its pair begin; a grid grows until it holds the best rates of both."""
FEWER: dict[Scale, tuple[float, ...]] = {"quick": (3e-3, 1e-2, 3e-2), "full": (1e-4, 3e-4, 1e-3)}
"""Where a larger model begins."""
NEAR = 1.0
"""Points of accuracy within which a rate counts as near the best."""
CAPTION = (
    "Above: mean test accuracy over learning rates, with 95% intervals over seeds; a ring marks the best rate, dotted "
    "lines the paper's accuracies. Below: the difference at each rate for both; the dashed line is the paper's."
)


@dataclass(frozen=True)
class Curves:
    """What is run: a model, and an optimizer with confidence before the one without."""

    family: str
    arms: tuple[str, str]

    def grid(self, scale: Scale) -> tuple[float, ...]:
        return GRIDS[self.arms[1]][scale] if self.family == "vgg" else FEWER[scale]


def run_specs(plan: Plan, found: Results, what: Curves) -> list[RunSpec]:
    """Both arms at every rate under every condition and seed."""
    named: list[RunSpec] = []
    for stream in CONDITIONS.values():
        here = partial(_specs, plan, what, stream)
        named += rate_pairs.extended_specs(
            what.grid(plan.scale), here, partial(_curves, what=what), _under(found, stream)
        )
    return named


def _specs(plan: Plan, what: Curves, stream: streams.Stream, grid: Sequence[float]) -> list[RunSpec]:
    return [
        study.spec(plan, what.family, arm, rate, stream, seed)
        for seed in plan.test_seeds()
        for rate in grid
        for arm in what.arms
    ]


def _under(results: Results, stream: streams.Stream) -> Results:
    return results.where(condition=str(stream))


def _curves(results: Results, what: Curves) -> list[RateCurve]:
    return [RateCurve.of(results, arm, "accuracy", "higher") for arm in what.arms]


def pairs(results: Results, what: Curves, missing: Iterable[RunSpec] = ()) -> dict[str, Pair]:
    """The curves of the treatment and of the baseline by condition, beside what the paper has for VGG.

    Conditions that lack one of the `missing` runs are left out.
    """
    found, lacking = {}, {spec.condition for spec in missing}
    for name, stream in CONDITIONS.items():
        if str(stream) in lacking:
            continue
        here = _under(results, stream)
        treatment, baseline = _curves(here, what)
        paper = study.PAPER.get((name.split()[0], what.arms[1])) if what.family == "vgg" else None
        found[name] = Pair(treatment, baseline, paper, here.seconds)
    return found


def summary(results: Results, what: Curves) -> Summary:
    found = rate_pairs.summary(pairs(results, what), NEAR, same_data=True)
    return replace(found, verdict=f"{study.rehearsal(results)}{found.verdict}")


def figures(results: Results, what: Curves) -> Mapping[str, Figure]:
    return {CAPTION: rate_pairs.figure(pairs(results, what), "mean test accuracy, %", same_data=True)}


def _experiment(suffix: str, what: Curves, seconds: Mapping[Scale, float], seeds: int) -> Experiment:
    model, (treatment, baseline) = study.MODELS[what.family]["full"], what.arms
    return Experiment(
        name=f"fig-rates{suffix}",
        title=f"Accuracy over learning rates, {model}: {baseline} and {treatment}",
        shows=f"{baseline} and {treatment} over learning rates, without change and under the paper's three conditions.",
        claim="The paper compares at one rate for both, which it does not give.",
        run_specs=partial(run_specs, what=what),
        summary=partial(summary, what=what),
        figures=partial(figures, what=what),
        seconds=seconds,
        seeds={"quick": 3, "full": seeds},
        notes=(
            *study.NOTES[:2],
            "Best against best, the rate of each seed is chosen on the other seeds.",
            "Rates are judged on the same 10,000 test images that results are measured on, under other seeds.",
            "The grid grows where a best rate stands at its end.",
        ),
        **study.SHARED,
    )


FIG_RATES = _experiment("", Curves("vgg", study.ARMS), {"quick": 60, "full": 2660}, seeds=5)
FIG_RATES_AMSGRAD = _experiment(
    "-amsgrad", Curves("vgg", ("CAmsGrad", "AmsGrad")), {"quick": 60, "full": 1600}, seeds=3
)
FIG_RATES_SGDM = _experiment("-sgdm", Curves("vgg", ("CSGDM", "SGDM")), {"quick": 60, "full": 1600}, seeds=3)
FIG_RATES_RESNET = _experiment("-resnet", Curves("resnet", study.ARMS), {"quick": 60, "full": 1730}, seeds=3)
