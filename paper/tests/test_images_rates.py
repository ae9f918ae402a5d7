"""The experiments on images over learning rates: their runs and their summaries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cadam_paper import catalog
from cadam_paper.harness import runner
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec
from cadam_paper.images import rates

EXPERIMENT = catalog.find("fig-rates")


def results(best: dict[str, float], seeds: int = 3, earlier: Results | None = None) -> Results:
    """Simulate the runs that follow from `earlier` results. The accuracy of an arm peaks at its best rate."""
    plan = EXPERIMENT.plan("full", seeds)

    def accuracy(spec: RunSpec) -> float:
        away = abs(math.log10(spec.lr / best[spec.optimizer]))
        return 80 - 10 * away + 0.1 * spec.seed + (0.5 if spec.optimizer == "CAdam" else 0.0) * (1 + 0.1 * spec.seed)

    return Results(
        [
            Result(spec, Outcome({"accuracy": accuracy(spec)}), Provenance(1.0, 1, "none", {}))
            for spec in EXPERIMENT.run_specs(plan, earlier or Results())
        ]
    )


def test_both_optimizers_run_at_every_rate_condition_and_seed() -> None:
    specs = EXPERIMENT.run_specs(EXPERIMENT.plan("full"), Results())
    assert len(specs) == len(set(specs)) == 2 * 5 * 4 * 5
    assert {spec.settings["epochs"] for spec in specs} == {30}


def test_each_arm_is_judged_at_its_own_best_rate() -> None:
    simulated = results({"Adam": 3e-4, "CAdam": 1e-3})
    rows = {row.label: row for row in EXPERIMENT.summary(simulated).rows}
    own = rows["sudden 80°: each at its own best rate"]
    assert own.values["difference"] == pytest.approx(0.55)
    assert rows["sudden 80°: both at Adam's best rate, 0.0003"].values["difference"] < -4
    assert rows["sudden 80°: both at 3 times that, 0.001"].values["difference"] > 5
    assert rows["sudden 80°: CAdam within 1 of its best"].values["best"] == 1e-3
    assert not EXPERIMENT.summary(simulated).warnings
    assert len(EXPERIMENT.figures(simulated)) == 1


def test_without_results_no_extension_of_the_grid_is_expected() -> None:
    """Otherwise the estimated time would be that of a grid with all possible rates."""
    request = runner.Request(EXPERIMENT, EXPERIMENT.plan("full"))
    runner.look_up(request, lambda _, spec: None)
    assert runner.later_specs(request, results({"Adam": 3e-4, "CAdam": 1e-3})[0]) == []


def test_the_grid_is_extended_until_the_best_rate_is_inside() -> None:
    best = {"Adam": 1e-5, "CAdam": 1e-3}
    current = results(best)
    for rate in (1e-5, 3e-6):
        before, current = current, results(best, earlier=current)
        assert len(current) == len(before) + 2 * len(rates.CONDITIONS) * 3, "both arms, so that both have every rate"
        assert {result.spec.lr for result in current} - {result.spec.lr for result in before} == {rate}
    assert len(results(best, earlier=current)) == len(current)
    assert not EXPERIMENT.summary(current).warnings


def test_every_pair_and_model_has_runs_that_no_other_has() -> None:
    specs = [
        spec
        for name in ("fig-rates", "fig-rates-amsgrad", "fig-rates-sgdm", "fig-rates-resnet")
        for spec in catalog.find(name).run_specs(catalog.find(name).plan("full"), Results())
    ]
    assert len(specs) == len(set(specs)) == 200 + 120 + 120 + 72


def test_a_best_rate_at_an_end_of_the_grid_gives_a_warning() -> None:
    warnings = EXPERIMENT.summary(results({"Adam": 3e-5, "CAdam": 1e-3})).warnings
    assert len(warnings) == len(rates.CONDITIONS)
    assert all("Adam" in text and "3e-05" in text for text in warnings)


def test_a_summary_on_digits_starts_with_a_disclaimer() -> None:
    full = results({"Adam": 3e-4, "CAdam": 1e-3})
    quick = Results([replace(result, spec=replace(result.spec, data="digits")) for result in full])
    assert EXPERIMENT.summary(quick).verdict.startswith("Not the paper's setting")
    assert not EXPERIMENT.summary(full).verdict.startswith("Not the paper's setting")
