"""Studies that need a GPU or much time: their runs at full scale, and a tiny run of every arm on the CPU."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_controls import SimulatedControls

from cadam_paper import catalog
from cadam_paper.harness import runner
from cadam_paper.harness.control_arms import LONG_MOMENTUM
from cadam_paper.harness.rate_controls import MASKS
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec
from cadam_paper.published import is_complete
from cadam_paper.stream_tables import STREAMS

PAGE = Path(__file__).parents[2] / "docs" / "paper.md"
RUNS = {
    "lm-mixed-10m": 18,
    "lm-shift-10m": 18,
    "lm-mixed-10m-controls": 36,
    "lm-shift-10m-controls": 36,
    "lm-mixed-50m": 18,
    "lm-shift-50m": 18,
    "fig-rates-lion": 96,
    "fig-rates-radam": 96,
    "continual": 400,
    "continual-small": 384,
}
"""The number of runs at full scale before a grid is extended."""
PUBLISHED = ("continual-small",)
"""The studies of `RUNS` that were run and have a page of their own."""


def specs(name: str, scale: Any) -> list[RunSpec]:
    experiment = catalog.find(name)
    return list(experiment.run_specs(experiment.plan(scale), Results()))


@pytest.mark.parametrize("name", RUNS)
def test_a_study_has_its_runs_and_a_command_on_the_page_unless_it_was_run(name: str) -> None:
    assert len(set(specs(name, "full"))) == RUNS[name]
    section = PAGE.read_text().partition("## Ready and not run")[2].partition("\n## ")[0]
    is_listed = re.search(rf"cadam reproduce .*{name}(?![\w-]).* --full", section) is not None
    assert is_listed == (not is_complete(name)) == (name not in PUBLISHED)


@pytest.mark.parametrize("name", [f"rates-{stream}-controls" for stream in STREAMS])
def test_the_control_arms_of_a_stream_are_either_published_or_listed_as_ready(name: str) -> None:
    section = PAGE.read_text().partition("## Ready and not run")[2].partition("\n## ")[0]
    assert (f"cadam reproduce {name} --full" in section) != is_complete(name)


CONDITIONS_AND_ROUNDS = {
    "fig-rates-clicks-controls": (5, 2),
    "fig-rates-controls": (4, 1),
    "fig-rates-resnet-controls": (4, 1),
}


@pytest.mark.parametrize("name", CONDITIONS_AND_ROUNDS)
def test_the_control_arms_on_a_gpu_complete_one_condition_before_the_next(name: str) -> None:
    conditions, rounds = CONDITIONS_AND_ROUNDS[name]
    simulated = SimulatedControls(name)
    stages = []
    while simulated.request.missing:
        stages.append(simulated.request.missing)
        simulated.compute()
    for stage in stages:
        assert len({spec.condition for spec in stage}) == 1
    arms = [{spec.optimizer for spec in stage} for stage in stages]
    assert arms == [set(MASKS)] * conditions + [{LONG_MOMENTUM}] * (conditions * (rounds - 1))
    assert {len(stage) for stage in stages[:conditions]} == {2 * 3 * 3}, "arms, rates and seeds"
    assert not catalog.find(name).summary(simulated.request.results).warnings
    assert len(catalog.find(name).figures(simulated.request.results)) == 1
    section = PAGE.read_text().partition("## Ready and not run")[2].partition("\n## ")[0]
    is_listed = re.search(rf"cadam reproduce .*{name}(?![\w-]).* --full", section) is not None
    assert is_listed == (not is_complete(name))


@pytest.mark.parametrize("name", CONDITIONS_AND_ROUNDS)
def test_a_control_arm_trains_a_small_network(name: str) -> None:
    main = specs(name, "quick")[0]
    for arm in MASKS if main.experiment == "images" else MASKS[1:]:
        spec = replace(main, optimizer=arm, settings={**main.settings, "epochs": 2})
        outcome = catalog.find(name).compute(spec).metrics
        assert math.isfinite(outcome["loss"])
        assert 0.3 < outcome["alignment"] < 1


def test_the_time_is_not_estimated_from_a_run_with_other_metrics() -> None:
    request = runner.Request(catalog.find("fig-rates-clicks"), catalog.find("fig-rates-clicks").plan("full"))
    runner.look_up(request, lambda experiment, spec: None)
    example = Result(request.missing[0], Outcome({"stream_auc": 70.0}), Provenance(1.0, 1, "none", {}))
    assert runner.later_specs(request, example) == []


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("lm-")])
def test_every_arm_of_a_language_model_runs_on_the_cpu(name: str) -> None:
    tiny = {spec.optimizer: replace(spec, settings={**spec.settings, "steps": 3}) for spec in specs(name, "quick")}
    assert {"AdamW", "CAdamW"} <= set(tiny)
    for spec in tiny.values():
        assert math.isfinite(catalog.find(name).compute(spec).metrics["loss"])


@pytest.mark.parametrize("rule", ["Lion", "RAdam"])
def test_lion_and_radam_train_a_small_network(rule: str) -> None:
    name = f"fig-rates-{rule.lower()}"
    tiny = {spec.optimizer: replace(spec, settings={**spec.settings, "epochs": 2}) for spec in specs(name, "quick")}
    assert set(tiny) == {rule, f"C{rule}"}
    for spec in tiny.values():
        assert 0 <= catalog.find(name).compute(spec).metrics["accuracy"] <= 100


def test_the_small_continual_study_averages_squares_of_pixels() -> None:
    pytest.importorskip("jax")
    from cadam_paper.continual import train

    full, pooled = (train._images("digits", pool)[0] for pool in (1, 2))
    assert full.shape[1] == 4 * pooled.shape[1]
    assert abs(float(full.mean()) - float(pooled.mean())) < 0.5
    settings = {**specs("continual-small", "quick")[0].settings, "tasks": 2, "steps": 4, "pool": 2}
    spec = replace(specs("continual-small", "quick")[0], settings=settings)
    assert 0 <= catalog.find("continual-small").compute(spec).metrics["accuracy"] <= 100
    assert {spec.settings["device"] for spec in specs("continual-small", "full")} == {"cpu"}
