"""Cheap experiments for tests. Worker processes can import their functions."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cadam.statistics.comparison import compare
from cadam_paper.harness.experiment import Experiment, Plan
from cadam_paper.harness.learning_rates import choose_lr
from cadam_paper.harness.results import Outcome, Results, RunSpec, tuning_seeds
from cadam_paper.harness.summary import Summary, comparison_row

ARMS = ("Adam", "CAdam")


def make_spec(optimizer: str, lr: float, seed: int, **settings: Any) -> RunSpec:
    return RunSpec("walk", "none", "made up", optimizer, lr, "steady", seed, settings)


def run_specs(plan: Plan, results: Results) -> Sequence[RunSpec]:
    return [make_spec(arm, 0.1, seed) for arm in ARMS for seed in plan.test_seeds()]


def compute(spec: RunSpec) -> Outcome:
    """Compute a random walk. Environment variables add a log, a delay or a failure."""
    if log := os.environ.get("LAB_TEST_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{spec.key()}\n")
    time.sleep(float(os.environ.get("LAB_TEST_SLEEP", "0")))
    if os.environ.get("LAB_TEST_FAIL") == f"{spec.optimizer} {spec.seed}":
        raise RuntimeError("failure of the test")
    random = np.random.default_rng([spec.seed, ARMS.index(spec.optimizer)])
    steps = random.normal(size=200)
    shift = abs(np.log10(spec.lr) + 2) + 0.1 * ARMS.index(spec.optimizer)
    return Outcome({"loss": float(steps.mean() + shift), "inf": float("inf")}, {"walk": steps.cumsum()})


def summary(results: Results) -> Summary:
    tests = results.where(lr=results[-1].spec.lr)
    adam, cadam = (
        {s: v for s, v in tests.where(optimizer=a).metric("loss").items() if s < tuning_seeds(1)[0]} for a in ARMS
    )
    comparison = compare(cadam, adam, names=("CAdam", "Adam"), better="lower")
    return Summary(
        f"CAdam's mean loss is {comparison.mean:.6f}.", [comparison_row("loss", "none", comparison, results.seconds)]
    )


def figures(results: Results) -> Mapping[str, Any]:
    from matplotlib.figure import Figure

    from cadam.ab.report import palette

    figure = Figure()
    axes = figure.subplots()
    for result in results[:3]:
        axes.plot(result.outcome.curves["walk"], color=palette.CADAM)
    return {"Walks": figure}


def tuned_specs(plan: Plan, results: Results) -> Sequence[RunSpec]:
    """Return every learning rate on tuning seeds first, then the best rate of each arm on test seeds."""
    tuning = [make_spec(arm, lr, seed) for arm in ARMS for lr in (1e-3, 1e-2, 1e-1) for seed in tuning_seeds(2)]
    if len(results) < len(tuning):
        return tuning
    tuned = Results([r for r in results if r.spec in set(tuning)])
    best = {arm: choose_lr(arm, tuned.where(optimizer=arm).metric_by_rate("loss"), "lower").lr for arm in ARMS}
    return tuning + [make_spec(arm, best[arm], seed) for arm in ARMS for seed in plan.test_seeds()]


WALK = Experiment(
    name="walk",
    title="A walk",
    shows="Where a random walk goes.",
    claim="Nothing.",
    run_specs=run_specs,
    compute=compute,
    summary=summary,
    figures=figures,
    seconds={"quick": 1.0, "full": 2.0},
    seeds={"quick": 3, "full": 6},
)
TUNED = replace(WALK, name="tuned", title="A tuned walk", shows="That phases follow each other.", run_specs=tuned_specs)
