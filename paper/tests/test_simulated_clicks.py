"""The simulated click stream of `demo-stream`: reproducible bits, drift and label noise."""

from __future__ import annotations

import numpy as np
import pytest

from cadam_paper import simulated_clicks as stream
from cadam_paper.harness.experiment import Plan
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec

SHORT = {**stream.SETTINGS, "batches": 40, "change_every": 20, "warm_up": 10}


def spec(optimizer: str, seed: int = 0, lr: float = 0.01, **settings: float) -> RunSpec:
    return RunSpec("demo-stream", "", "", optimizer, lr, "", seed, {**SHORT, **settings})


@pytest.mark.parametrize("optimizer", stream.ARMS)
def test_a_seed_gives_the_same_bits(optimizer: str) -> None:
    first, second = stream.compute(spec(optimizer)), stream.compute(spec(optimizer))
    assert first.metrics == second.metrics
    assert all(first.curves[name].tobytes() == second.curves[name].tobytes() for name in first.curves)
    assert stream.compute(spec(optimizer, seed=1)).metrics != first.metrics


def batches(**settings: float) -> tuple[stream.ClickStream, np.ndarray]:
    made = stream.ClickStream(np.random.default_rng(0), {**SHORT, **settings})
    return made, np.concatenate([made.batch()[1] for _ in range(200)])


def test_optimizers_get_the_same_events_and_the_same_first_prediction() -> None:
    adam, cadam = (stream.compute(spec(arm, lr=1e-12)) for arm in ("Adam", "CAdam"))
    assert adam.metrics["auc"] == pytest.approx(cadam.metrics["auc"], abs=1e-6)


def test_label_noise_flips_the_configured_share() -> None:
    clean, noisy = batches(mistakes=0.0)[1], batches(mistakes=0.25)[1]
    assert np.mean(clean != noisy) == pytest.approx(0.25, abs=0.01)


def test_the_stream_can_be_learned_and_a_sudden_shift_costs_auc() -> None:
    steady = stream.compute(spec("Adam", batches=300, change_every=1000, drift=0.0, mistakes=0.0, warm_up=200))
    assert steady.metrics["auc"] > 0.65
    changed = stream.compute(spec("Adam", batches=300, change_every=200, drift=0.0, mistakes=0.0, warm_up=200))
    assert changed.metrics["auc"] < steady.metrics["auc"] - 0.02


def test_a_plan_tunes_first_and_then_tests_on_other_seeds() -> None:
    plan, cost = Plan("quick", 3), Provenance(0.0, 0, "", {})
    tuning = stream.run_specs(plan, Results())
    assert {c.seed for c in tuning}.isdisjoint(plan.test_seeds())
    outcome = stream.compute(spec("Adam"))

    def loss(c: RunSpec) -> float:
        return abs(np.log(c.lr / (0.003 if c.optimizer == "Adam" else 0.01)))

    def made(c: RunSpec) -> Result:
        return Result(c, Outcome({**outcome.metrics, "log_loss": loss(c)}, outcome.curves), cost)

    everything = stream.run_specs(plan, Results([made(c) for c in tuning]))
    new = [c for c in everything if c not in tuning]
    assert {(c.optimizer, c.lr) for c in new} == {("Adam", 0.003), ("CAdam", 0.01)}
    assert [c.seed for c in new if c.optimizer == "CAdam"] == list(plan.test_seeds())
    assert {c.seed for c in new if c.optimizer == "Adam"} == {*plan.test_seeds(), *plan.repeat_seeds()}
    results = Results([made(c) for c in everything])
    summary = stream.summary(results)
    assert [row.seeds for row in summary.rows] == [3, 3]
    assert "CAdam 0.01, Adam 0.003" in summary.verdict
