"""The lemmas of the convergence theorem hold for CAdam, and modified optimizers violate them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import cadam
from cadam_paper import archive_names, theory
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec

UNIT = st.integers(-16, 16).map(lambda n: n / 16)
COVERED = [name for name, function in theory.FUNCTIONS.items() if not function.violation]


@st.composite
def problems(draw: Callable[..., Any]) -> dict[str, Any]:
    """Draw a quadratic function, which may be non-convex, and options that the lemmas allow.

    Gradients range from far below eps to far above, and the step size is the largest that the smoothness allows.
    """
    width = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(UNIT, min_size=width, max_size=width), min_size=width, max_size=width))
    hessian = np.array(rows) + np.array(rows).T
    scale = 10.0 ** draw(st.integers(-3, 3))
    start = scale * np.array(draw(st.lists(UNIT, min_size=width, max_size=width)))
    eps = 10.0 ** draw(st.integers(-2, 1))
    smoothness = max(float(np.linalg.norm(hessian, 2)), 1e-3)
    betas = draw(st.tuples(st.sampled_from([0.0, 0.5, 0.9, 0.99]), st.sampled_from([0.0, 0.5, 0.999])))
    return {"hessian": hessian, "start": start, "eps": eps, "lr": eps / (6 * smoothness), "betas": betas}


def violated_lemmas(
    optimizer: type[cadam.Optimizer], problem: dict[str, Any], factor: float = 1.0, steps: int = 12
) -> set[str]:
    """Return the lemmas that a run violates, with the smallest valid G: the largest gradient norm of the run."""
    hessian, eps, lr = problem["hessian"], problem["eps"], problem["lr"]
    start = problem["start"][None]
    trace = theory.record_run(optimizer, start, lambda x, _: x @ hessian, steps, lr=lr, eps=eps, betas=problem["betas"])
    longest = float(np.linalg.norm(trace.gradients, axis=-1).max())

    def run(bound: float) -> theory.Check:
        return theory.check(
            trace,
            lambda x: 0.5 * (x * (x @ hessian)).sum(-1),
            lambda x: x @ hessian,
            bound=bound,
            lr=lr,
            eps=eps,
            factor=factor,
        )

    violated = set()
    if run(max(longest, 1e-300)).violates_step_length.any():
        violated.add("step")
    if run(max(longest, eps)).violates_descent.any():
        violated.add("descent")
    return violated


def examples(n: int) -> Any:
    return settings(
        max_examples=n, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.parametrize("optimizer", [cadam.CAdam, cadam.Adam])
@examples(150)
@given(problem=problems())
def test_the_lemmas_hold_at_every_step(optimizer: type[cadam.Optimizer], problem: dict[str, Any]) -> None:
    assert not violated_lemmas(optimizer, problem)


class Mutant(cadam.CAdam):
    """CAdam with a modified step: `moved` returns the parameter after the step."""

    def step(self, closure: Any = None) -> Any:
        (param,) = self.param_groups[0]["params"]
        before = param.detach().clone()
        loss = super().step(closure)
        with torch.no_grad():
            param.copy_(self.moved(before, param.detach().clone(), param.grad))
        return loss

    def moved(self, before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def unmasked_step(self) -> torch.Tensor:
        """Return the step of Adam, without the mask."""
        group = self.param_groups[0]
        (state,) = self.state.values()
        t, (b1, b2) = state["step"].item(), group["betas"]
        return (
            -group["lr"] * state["exp_avg"] / (1 - b1**t) / ((state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"])
        )


class Inverted(Mutant):
    """Updates exactly the elements that CAdam masks."""

    def moved(self, before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.where(after != before, before, before + self.unmasked_step())


class Doubled(Mutant):
    def moved(self, before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return 2 * after - before


class Tripled(Mutant):
    def moved(self, before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return 3 * after - 2 * before


class Uncorrected(Mutant):
    """Omits the bias correction of the first moment."""

    def moved(self, before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        (state,) = self.state.values()
        return before + (after - before) * (1 - self.param_groups[0]["betas"][0] ** state["step"].item())


class Ascending(Mutant):
    def moved(self, before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return 2 * before - after


@pytest.mark.parametrize(
    ("mutant", "lemma", "factor"),
    [
        (Inverted, "descent", 1.0),
        (Uncorrected, "descent", 1.0),
        (Ascending, "descent", 1.0),
        (Doubled, "step", 1.0),
        (Tripled, "step", 2.0),
    ],
)
def test_a_modified_optimizer_violates_a_lemma(mutant: type[cadam.Optimizer], lemma: str, factor: float) -> None:
    @settings(examples(400), phases=[Phase.generate])
    @given(problem=problems())
    def holds(problem: dict[str, Any]) -> None:
        assert lemma not in violated_lemmas(mutant, problem, factor)

    with pytest.raises(AssertionError):
        holds()


def test_the_printed_step_bound_does_not_detect_a_doubled_step() -> None:
    """The printed bound is 2 alpha G/eps, but the proof gives alpha G/eps."""

    @examples(150)
    @given(problem=problems())
    def holds(problem: dict[str, Any]) -> None:
        assert "step" not in violated_lemmas(Doubled, problem, factor=2.0)

    holds()


@pytest.mark.parametrize(("optimizer", "breaks"), [(cadam.CAdam, True), (cadam.Adam, False)])
def test_one_gradient_of_the_wrong_sign_violates_descent_for_cadam_only(
    optimizer: type[cadam.Optimizer], breaks: bool
) -> None:
    """The last of 20 gradients has the wrong sign. This hardly changes mhat, but CAdam's mask uses that gradient.

    The function is 1 - cos x near pi/2, where its slope is about 1.
    """
    lr, eps, steps = 0.004, 0.5, 20
    trace = theory.record_run(
        optimizer,
        np.full((1, 1), 1.8),
        lambda x, t: np.sin(x) * (-1 if t == steps else 1),
        steps,
        lr=lr,
        eps=eps,
        betas=(0.99, 0.999),
    )
    checked = theory.check(trace, lambda x: (1 - np.cos(x)).sum(-1), np.sin, bound=1.0, lr=lr, eps=eps)
    assert not checked.violates_descent[:-1].any()
    assert bool(checked.violates_descent[-1, 0]) is breaks


@pytest.mark.parametrize("name", COVERED)
def test_functions_have_their_stated_smoothness(name: str) -> None:
    """Gradients are the derivatives, |Hessian| <= l0 + lrho |gradient|^rho, and |gradient| <= G at starting points."""
    function = theory.FUNCTIONS[name]
    rng = np.random.default_rng(0)
    spread = (0.05, 5.0) if name == "barrier" else (-5.0, 5.0)
    x, t, h = rng.uniform(*spread, (4000, 2)), np.zeros(4000), 1e-6
    slope = function.gradient(x, t)
    columns, numeric = [], []
    for unit in np.eye(2):
        columns.append((function.gradient(x + h * unit, t) - function.gradient(x - h * unit, t)) / (2 * h))
        numeric.append((function.value(x + h * unit, t) - function.value(x - h * unit, t)) / (2 * h))
    np.testing.assert_allclose(np.stack(numeric, -1), slope, rtol=1e-4, atol=1e-6)
    hessian = np.linalg.norm(np.stack(columns, -1), 2, axis=(-2, -1))
    allowed = function.l0 + function.lrho * np.linalg.norm(slope, axis=-1) ** function.rho
    assert (hessian <= allowed * (1 + 1e-6)).all()
    starts = rng.uniform(*function.box, (4000, 2))
    assert np.linalg.norm(function.gradient(starts, t), axis=-1).max() <= function.bound
    assert function.bound >= max(1, 2 * theory.EPS)


def run_specs(steps: int = 300) -> list[RunSpec]:
    """Return the specs of the experiment with fewer steps and runs, without those of the condition "recipe"."""
    return [
        replace(spec, settings={**spec.settings, "runs": 4, "steps": steps})
        for spec in theory.theorem_specs(theory.THEOREM.plan("quick", 1), Results())
        if spec.condition != "recipe"
    ]


def test_a_run_gives_the_same_bits_each_time() -> None:
    spec = run_specs()[0]
    first, second = theory.compute(spec), theory.compute(spec)
    assert first.metrics == second.metrics
    assert all(np.array_equal(first.curves[name], second.curves[name]) for name in first.curves)


def test_the_mask_acts_where_the_lemmas_are_checked() -> None:
    """If nothing were masked, CAdam would be equal to Adam."""
    for name in COVERED:
        spec = next(
            c for c in run_specs(2000) if c.model == name and c.condition == "within" and c.optimizer == "CAdam"
        )
        metrics = theory.compute(spec).metrics
        assert metrics[archive_names.MASKED_SHARE] > 0.1
        assert metrics["bounded"] == 1
        assert metrics["step_broken"] == metrics["descent_broken"] == metrics["rate_broken"] == 0


def test_the_verdict_is_read_from_the_results() -> None:
    computed = [Result(c, theory.compute(c), Provenance(0.0, 0, "cpu", {})) for c in run_specs()]
    fake = []
    for spec in theory.theorem_specs(theory.THEOREM.plan("quick", 1), Results()):
        if spec.condition == "recipe":
            gamma = spec.settings["gamma"]
            outcome = Outcome({"needed": 10 * gamma**-4, "enough": 1e6, "gamma": gamma})
            fake.append(Result(spec, outcome, Provenance(0.0, 0, "cpu", {})))
    summary = theory.theorem_summary(Results(computed + fake))
    assert "0 violations" in summary.verdict
    assert [row.verdict for row in summary.rows[: len(COVERED)]] == ["no violation"] * len(COVERED)
    assert summary.rows[-1].values["CAdam exponent"] == pytest.approx(-4)
    first = computed[0]
    worse = Outcome({**first.outcome.metrics, "descent_broken": 3.0}, first.outcome.curves)
    changed = theory.theorem_summary(Results([Result(first.spec, worse, first.provenance), *computed[1:], *fake]))
    assert "3 violations" in changed.verdict
    assert changed.rows[0].verdict == "violated"
