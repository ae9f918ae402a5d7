"""The numerical experiments: the paper's settings, paired and independent runs, summaries and figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cadam
from cadam.statistics.comparison import KINDS
from cadam_paper import numerical
from cadam_paper.harness.experiment import Experiment, metric_name
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec
from cadam_paper.harness.verdict import ONE_SEED

EXPERIMENTS = {
    "fig-shift": numerical.FIG_SHIFT,
    "fig-noise": numerical.FIG_NOISE,
    "fig-no-noise": numerical.FIG_NO_NOISE,
    "sweep-cycle": numerical.SWEEP_CYCLE,
    "sweep-lr": numerical.SWEEP_LR,
}


def small(experiment: Experiment, seeds: int = 2) -> list[RunSpec]:
    """Return the specs of an experiment with fewer steps and runs."""
    specs = experiment.run_specs(experiment.plan("quick", seeds), Results())
    return [replace(spec, settings={**spec.settings, "runs": 2, "steps": 20}) for spec in specs]


def results(experiment: Experiment, specs: list[RunSpec]) -> Results:
    return Results([Result(spec, experiment.compute(spec), Provenance(0.0, 0, "cpu", {})) for spec in specs])


def test_every_optimizer_of_the_catalog_takes_part() -> None:
    catalog = {
        name
        for name in cadam.__all__
        if isinstance(value := getattr(cadam, name), type)
        and issubclass(value, cadam.Optimizer)
        and value is not cadam.Optimizer
    }
    assert set(numerical.ARMS) == catalog
    for arm, baseline in numerical.PAIRS:
        assert getattr(cadam, arm).confidence
        assert not getattr(cadam, baseline).confidence
        assert issubclass(getattr(cadam, arm), getattr(cadam, baseline))


REGRETS = {
    ("L1", "sudden"): (14.85, 7.87),
    ("L1", "linear"): (6.42, 4.78),
    ("L1", "sine"): (12.17, 7.70),
    ("L2", "sudden"): (8.25, 3.56),
    ("L2", "linear"): (0.93, 0.47),
    ("L2", "sine"): (0.29, 0.48),
}
"""Regret of Adam and CAdam at the paper's settings, from an independent implementation. The paper has no numbers."""


def test_regrets_at_the_papers_settings() -> None:
    """The regrets agree with an independent implementation to two digits."""
    first = {c.optimizer: c for c in numerical.shift_specs(numerical.FIG_SHIFT.plan("full"), Results()) if c.seed == 0}
    adam, cadam_ = (numerical.compute_shift(first[arm]).metrics for arm in ("Adam", "CAdam"))
    for (loss, target), expected in REGRETS.items():
        name = metric_name("paper regret", loss, target)
        assert (round(adam[name], 2), round(cadam_[name], 2)) == expected


def test_tracking_agrees_with_autograd_on_single_parameters() -> None:
    """One panel is computed again with autograd on a single element, adding up the regret."""
    starts, phases = np.array([0.3, -0.7]), np.array([0.0, 0.4])
    tracked = numerical.track_minima("CAdam", 0.5, [10, 40], starts, phases, 50)
    panel, cycle, run = numerical.SHIFTS.index(("L2", "sine")), 1, 1
    x = torch.tensor([starts[run]], dtype=torch.float64, requires_grad=True)
    opt, regret = cadam.CAdam([x], lr=0.5), 0.0
    for t in range(1, 51):
        loss = (x - np.sin(2 * np.pi * (t / 40 + phases[run]))).square().sum()
        regret += loss.item()
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert tracked.regret[panel, cycle, run] == pytest.approx(regret, rel=1e-12)
    assert tracked.path[-1, panel, cycle, run] == pytest.approx(x.item(), rel=1e-12)


@pytest.mark.parametrize("name", numerical.LANDSCAPES)
def test_gradients_of_landscapes_are_autograds(name: str) -> None:
    formulas: dict[str, Any] = {
        "separable L1": lambda x, y: x.abs() + y.abs(),
        "inseparable L1": lambda x, y: (x + y).abs() + (x - y).abs() / 10,
        "inseparable L2": lambda x, y: (x + y) ** 2 + (x - y) ** 2 / 10,
        "Rosenbrock": lambda x, y: (1 - x) ** 2 + 100 * (y - x**2) ** 2,
    }
    landscape = numerical.LANDSCAPES[name]
    points = np.random.default_rng(0).uniform(-2, 2, (2, 50))
    x, y = (torch.tensor(p, requires_grad=True) for p in points)
    value = formulas[name](x, y)
    value.sum().backward()
    np.testing.assert_allclose(landscape.value(*points), value.detach().numpy(), rtol=1e-12)
    by_torch = [p.grad.numpy() for p in (x, y) if p.grad is not None]
    np.testing.assert_allclose(landscape.gradient(*points), by_torch, rtol=1e-9)
    assert landscape.value(*np.array(landscape.minimum)) == 0


def test_the_gradient_noise_is_that_of_the_paper() -> None:
    component, whole = np.moveaxis(numerical.noise(7, 200, 300), 1, 0)
    for factors in (component[..., 0], component[..., 1], whole[..., 0]):
        scaled = factors[factors != 1]
        assert scaled.size / factors.size == pytest.approx(0.5, abs=0.01)
        assert -1 <= scaled.min() < -0.99
        assert 0.99 < scaled.max() < 1
        assert scaled.mean() == pytest.approx(0, abs=0.02)
    assert np.array_equal(whole[..., 0], whole[..., 1])
    assert abs(np.corrcoef(component[..., 0].ravel(), component[..., 1].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("optimizer", numerical.ARMS)
def test_runs_do_not_influence_each_other(optimizer: str) -> None:
    """A run has the same bits alone and in a batch of odd size, even if another run of the batch diverges."""
    start = np.random.default_rng(0).uniform(-2, 2, 37)
    start[5] = 1e300

    def gradient(x: np.ndarray, t: int) -> np.ndarray:
        return 2 * x**3 - np.sin(t)

    path, _ = numerical.descend(optimizer, start, gradient, 30, lr=0.01)
    for run in (0, 4, 6, 31, 36):
        alone, _ = numerical.descend(optimizer, start[run : run + 1], gradient, 30, lr=0.01)
        assert path[:, run].tobytes() == alone[:, 0].tobytes()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_run_gives_the_same_bits_each_time_and_depends_on_its_seed(name: str) -> None:
    experiment = EXPERIMENTS[name]
    spec = next(c for c in small(experiment) if c.optimizer == "CAdam")
    first, again, other = (experiment.compute(c) for c in (spec, spec, replace(spec, seed=spec.seed + 1)))
    assert first.metrics == again.metrics
    assert all(first.curves[k].tobytes() == again.curves[k].tobytes() for k in first.curves)
    assert first.metrics != other.metrics


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_optimizers_get_the_same_starts_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are equal for all optimizers with the same seed, and differ between seeds."""
    seen: list[np.ndarray] = []

    def record(_: str, start: np.ndarray, gradient: Any, steps: int, **__: Any) -> tuple[np.ndarray, float]:
        seen.append(np.stack([start, *(gradient(start, t).copy() for t in range(1, 1 + steps))]))
        return seen[-1], 1.0

    monkeypatch.setattr(numerical, "descend", record)
    spec = small(EXPERIMENTS[name])[0]
    for changes in ({"optimizer": "Adam"}, {"optimizer": "CLion"}, {"optimizer": "Adam", "seed": spec.seed + 1}):
        EXPERIMENTS[name].compute(replace(spec, **changes))
    assert np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])


def test_a_diverged_run_is_not_hidden() -> None:
    spec = next(c for c in numerical.lr_specs(numerical.SWEEP_LR.plan("quick", 1), Results()) if c.optimizer == "SGDM")
    outcome = numerical.compute_landscapes(replace(spec, lr=1.0, settings={**spec.settings, "steps": 60, "runs": 4}))
    assert not np.isfinite(outcome.metrics["loss_rosenbrock_component"])
    assert np.isfinite(outcome.metrics["loss_separable_l1_component"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_summary_and_figures_are_made_from_the_results(name: str) -> None:
    experiment = EXPERIMENTS[name]
    small_results = results(experiment, small(experiment))
    summary = experiment.summary(small_results)
    assert summary.verdict
    assert len(summary.rows) >= len(numerical.PAIRS) - 1
    figures = experiment.figures(small_results)
    assert figures
    for figure in figures.values():
        figure.savefig("/dev/null", format="svg")
    better = Results([_improved(r) if r.spec.optimizer == "CAdam" else r for r in small_results])
    assert experiment.summary(better).rows[0].values["CAdam"] < summary.rows[0].values["CAdam"]


def _improved(result: Result) -> Result:
    metrics = {name: value - 1 for name, value in result.outcome.metrics.items()}
    return replace(result, outcome=Outcome(metrics, result.outcome.curves))


@pytest.mark.parametrize("name", ["fig-shift", "fig-noise"])
def test_one_seed_gives_no_verdict_on_other_pairs(name: str) -> None:
    experiment = EXPERIMENTS[name]
    rows = experiment.summary(results(experiment, small(experiment, seeds=1))).rows
    family = [row for row in rows if " against " in row.label]
    assert len(family) == len(numerical.PAIRS) - 1
    assert {row.verdict for row in family} == {ONE_SEED}
    family = [
        row
        for row in experiment.summary(results(experiment, small(experiment, seeds=3))).rows
        if " against " in row.label
    ]
    for row in family:
        kinds = KINDS
        assert row.verdict == ", ".join(f"{kind} {row.values[kind]:.0f}" for kind in kinds)
        assert sum(row.values[kind] for kind in kinds) == row.values["problems"]
        assert row.interval == ""


def test_the_papers_start_and_random_starts_are_distinguished() -> None:
    """The verdict mentions both if CAdam is worse from the paper's start and better from random starts."""
    original = results(numerical.FIG_SHIFT, small(numerical.FIG_SHIFT, seeds=4))
    changed = []
    for result in original:
        sign = 1 if result.spec.optimizer == "CAdam" else 0
        metrics = {
            metric: value + sign * (1e3 if metric == "paper_regret_l2_sine" else -1e3)
            for metric, value in result.outcome.metrics.items()
        }
        changed.append(replace(result, outcome=Outcome(metrics, result.outcome.curves)))
    verdict = numerical.FIG_SHIFT.summary(Results(changed)).verdict
    assert "5 of the paper's 6 panels, one run from x0 = 0 each, not in L2 sine." in verdict
    assert "lower in 6 of 6 panels, higher in 0, undecided in 0." in verdict
    assert verdict.endswith("So L2 sine is higher from that one start, and lower on average.")
