"""A numerical check of the paper's convergence theorem (theorem 4.3) and its two lemmas, on runs of `CAdam` itself.

The theorem is about the deterministic setting: g_t is the exact gradient of f at x_t, the step size and both betas are
constant, m and v are bias-corrected, and there is neither weight decay nor AMSGrad. This is `CAdam` with its defaults
except for lr, eps and betas. With gradients bounded by G, D = 2G/eps and pi_t = mhat_t - grad f(x_t), the lemmas state

    |x_{t+1} - x_t| <= alpha D                                                                        (step length)
    f(x_{t+1}) - f(x_t) <= -alpha/(4G) |grad f(x_t)|^2 + alpha/eps |pi_t|^2                           (descent)

if alpha <= min(r/D, eps/(6L)). Summing the descent lemma over t gives the convergence rate with explicit constants:

    mean |grad f|^2 <= 4 G Delta_1/(alpha T) + 4 G/eps mean |pi|^2                                    (rate)

Each inequality is checked at every step of every run, on functions that meet the theorem's assumptions and on functions
that violate one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

import cadam
from cadam.ab.report import palette
from cadam.statistics.intervals import Array

from . import archive_names
from .harness.experiment import Experiment, Plan
from .harness.panels import panels
from .harness.results import Outcome, Results, RunSpec
from .harness.summary import Row, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Functions ----------------------------------------------------------------------------------------------------

PointFunction = Callable[[Array, Array], Array]
"""A function of points x with shape (..., 2) and of steps t, which broadcast against x without its last axis."""


@dataclass(frozen=True)
class Function:
    """A function of two variables with |Hessian| <= l0 + lrho |gradient|^rho.

    `bound` is the theorem's G, which the gradient norm of a run must not exceed. Runs start in the square `box`.
    `violation` names the assumption of the theorem that the function violates, if any; the constants then apply almost
    everywhere.
    """

    formula: str
    value: PointFunction
    gradient: PointFunction
    rho: float
    l0: float
    lrho: float
    bound: float
    box: tuple[float, float]
    violation: str = ""
    noisy: bool = False

    @property
    def smoothness(self) -> float:
        """The constant L, which is valid for gradient norms up to G and points at most r apart."""
        return float(3 * self.l0 + 4 * self.lrho * self.bound**self.rho)

    @property
    def radius(self) -> float:
        """The radius r as the paper prints it, with G^rho.

        The source that the paper cites has G^(rho-1). Every G here is at least 1, so the printed radius is the smaller.
        """
        if self.lrho == 0:
            return math.inf
        near = 1 / (5 * self.lrho * self.bound**self.rho)
        return float(min(near, 1 / (5 * (self.l0 ** (self.rho - 1) * self.lrho) ** (1 / self.rho))))

    def largest_lr(self, eps: float) -> float:
        """Return the largest step size alpha that the descent lemma allows."""
        return min(self.radius * eps / (2 * self.bound), eps / (6 * self.smoothness))


COUPLING = np.array([[1.0, 0.6], [0.6, 1.0]])
"""Hessian of the quadratic. Its eigenvectors are not the coordinate axes, which is the harder case for a mask that acts
on each coordinate."""
JUMP = 100
"""Number of steps between two jumps of the moving target."""


def _quadratic(x: Array, _: Array) -> Array:
    return np.asarray(0.5 * (x * (x @ COUPLING)).sum(-1))


def _quadratic_gradient(x: Array, _: Array) -> Array:
    return np.asarray(x @ COUPLING)


def _cosine(x: Array, _: Array) -> Array:
    return np.asarray((1 - np.cos(x)).sum(-1))


def _cosine_gradient(x: Array, _: Array) -> Array:
    return np.sin(x)


def _wells(x: Array, _: Array) -> Array:
    return np.asarray(((x**2 - 1) ** 2).sum(-1) / 4)


def _wells_gradient(x: Array, _: Array) -> Array:
    return np.asarray(x**3 - x)


def _cosh(x: Array, _: Array) -> Array:
    return np.asarray((2 * np.cosh(x) - 2).sum(-1))


def _cosh_gradient(x: Array, _: Array) -> Array:
    return np.asarray(2 * np.sinh(x))


def _barrier(x: Array, _: Array) -> Array:
    return np.asarray((x + 1 / x - 2).sum(-1))


def _barrier_gradient(x: Array, _: Array) -> Array:
    return np.asarray(1 - x**-2.0)


def _kink(x: Array, _: Array) -> Array:
    return np.asarray(np.abs(x).sum(-1))


def _kink_gradient(x: Array, _: Array) -> Array:
    return np.sign(x)


def _ledge(x: Array, _: Array) -> Array:
    return np.asarray((x**2 / 2 + 0.3 * (np.abs(x) < 0.5)).sum(-1))


def _ledge_gradient(x: Array, _: Array) -> Array:
    return x


def _moving(x: Array, t: Array) -> Array:
    return np.asarray(((x - _target(t)) ** 2).sum(-1) / 2)


def _moving_gradient(x: Array, t: Array) -> Array:
    return np.asarray(x - _target(t))


def _target(t: Array) -> Array:
    """Return the target at step t, which alternates between 0 and 1 every `JUMP` steps."""
    return np.asarray((np.asarray(t) // JUMP % 2)[..., None])


FUNCTIONS = {
    "quadratic": Function("½ xᵀAx", _quadratic, _quadratic_gradient, 0, 1.6, 0, 2.5, (-1, 1)),
    "cosine": Function("Σ 1 - cos x", _cosine, _cosine_gradient, 0, 1, 0, 1.5, (-2.5, 2.5)),
    "two wells": Function("Σ (x²-1)²/4", _wells, _wells_gradient, 2 / 3, 2, 3, 1.5, (-1.3, 1.3)),
    "exponential": Function("Σ eˣ + e⁻ˣ - 2", _cosh, _cosh_gradient, 1, 2, 1, 2.2, (-0.7, 0.7)),
    "barrier": Function("Σ x + 1/x - 2", _barrier, _barrier_gradient, 3 / 2, 2.7, 3, 1.2, (0.8, 2)),
    "kink": Function("Σ |x|", _kink, _kink_gradient, 0, 1, 0, 1.5, (-1, 1), "gradient jumps at 0"),
    "ledge": Function("Σ x²/2 + 0.3 [|x|<½]", _ledge, _ledge_gradient, 0, 1, 0, 1.5, (-1, 1), "f jumps"),
    "noise": Function(
        "½ xᵀAx, noisy gradient", _quadratic, _quadratic_gradient, 0, 1.6, 0, 2.5, (-1, 1), "g is not grad f", True
    ),
    "moving": Function("½ |x - x*(t)|²", _moving, _moving_gradient, 0, 1, 0, 3, (-1, 1), "f changes"),
}
"""Five functions that meet the assumptions (cosine and two wells are not convex), and four that violate one."""

# The inequalities of the lemmas along one run ------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """A recorded run of the optimizer."""

    path: Array
    """Positions, of shape (1 + steps, runs, dimensions)."""
    gradients: Array
    """The gradient that the optimizer received at each step."""
    momentum: Array
    """The bias-corrected first moment mhat after each step."""


def record_run(
    optimizer: type[cadam.Optimizer],
    start: Array,
    gradient: Callable[[Array, int], Array],
    steps: int,
    *,
    lr: float,
    eps: float,
    betas: tuple[float, float],
) -> Trace:
    """Run the optimizer from every row of `start` and record it; mhat is computed from the optimizer's state."""
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    x.grad = torch.zeros_like(x)
    position, slope = x.detach().numpy(), x.grad.numpy()
    opt = optimizer([x], lr=lr, betas=betas, eps=eps)
    path = np.empty((1 + steps, *position.shape))
    gradients, momentum = np.empty_like(path[1:]), np.empty_like(path[1:])
    path[0] = position
    for t in range(1, 1 + steps):
        slope[...] = gradients[t - 1] = gradient(position, t)
        opt.step()
        path[t] = position
        momentum[t - 1] = opt.state[x]["exp_avg"].numpy() / (1 - betas[0] ** t)
    return Trace(path, gradients, momentum)


@dataclass(frozen=True)
class Check:
    """Both sides of each inequality at every step of every run; arrays have the shape (steps, runs)."""

    step_length: Array
    step_length_bound: float
    change: Array
    """Change of the function value in the step."""
    change_bound: Array
    rounding: Array
    """Tolerance for rounding errors in `change`."""
    squared_gradient: Array
    squared_pi: Array
    bounded: Array
    """Whether all gradient norms up to this step are at most G. This is the theorem's condition t < tau."""

    @property
    def violates_step_length(self) -> Array:
        """Whether a step is longer than the step length lemma allows, by more than rounding errors."""
        return np.asarray(self.bounded & (self.step_length > self.step_length_bound * (1 + 1e-12)))

    @property
    def violates_descent(self) -> Array:
        """Whether the function decreases less than the descent lemma requires, by more than rounding errors."""
        return np.asarray(self.bounded & (self.change > self.change_bound + self.rounding))


def check(
    trace: Trace,
    value: Callable[[Array], Array],
    gradient: Callable[[Array], Array],
    *,
    bound: float,
    lr: float,
    eps: float,
    factor: float = 2.0,
) -> Check:
    """Evaluate both lemmas along a recorded run.

    Args:
        trace: The recorded run.
        value: Function values at points of shape (steps, runs, dimensions), each with the function of its step.
        gradient: Exact gradients at such points.
        bound: The constant G.
        lr: The step size alpha.
        eps: The optimizer's eps.
        factor: The factor in D = factor * G/eps. The paper states the lemma with 2 and proves it with 1.

    Returns:
        Both sides of the inequalities.
    """
    before, after = value(trace.path[:-1]), value(trace.path[1:])
    true = gradient(trace.path[:-1])
    squared, pi = (true**2).sum(-1), ((trace.momentum - true) ** 2).sum(-1)
    largest = np.maximum((true**2).sum(-1), (trace.gradients**2).sum(-1))
    return Check(
        step_length=np.linalg.norm(np.diff(trace.path, axis=0), axis=-1),
        step_length_bound=factor * lr * bound / eps,
        change=after - before,
        change_bound=-lr / (4 * bound) * squared + lr / eps * pi,
        rounding=1e-14 * (1 + np.abs(before)),
        squared_gradient=squared,
        squared_pi=pi,
        bounded=np.maximum.accumulate(largest, axis=0) <= bound**2 * (1 + 1e-12),
    )


# Runs --------------------------------------------------------------------------------------------------------

EPS, BETAS, STEPS, RUNS = 0.5, (0.99, 0.999), 2000, 32
PRACTICE_LR, PRACTICE_EPS = 0.01, 1e-8
SHARES = (0.5, 0.35, 0.25)
"""Target gradient norms gamma, as fractions of the root mean square gradient norm at the starting points."""
FLIPPED = 0.05
"""Probability that the noisy function returns a gradient with the opposite sign."""
RECIPES = ("quadratic", "cosine", "exponential")
"""Functions that also run with the parameters that the theorem prescribes."""
TIMES = np.unique(np.geomspace(1, STEPS, 60).astype(int))
"""Steps at which curves are stored."""
ARMS = ("CAdam", "Adam")


def theorem_specs(plan: Plan, _: Results) -> list[RunSpec]:
    """List the runs of the experiment.

    Every function runs at the largest step size that the lemmas allow ("within") and at a usual step size ("practice").
    Three functions also run with the parameters that the theorem prescribes ("recipe"), with one seed.
    """
    specs = []
    for name, function in FUNCTIONS.items():
        options = {"within": (function.largest_lr(EPS), EPS), "practice": (PRACTICE_LR, PRACTICE_EPS)}
        for condition, (lr, eps) in options.items():
            settings = {"eps": eps, "betas": BETAS, "steps": STEPS, "runs": RUNS}
            specs += [_spec(name, arm, lr, condition, seed, settings) for arm in ARMS for seed in plan.test_seeds()]
    for name in RECIPES:
        for share in SHARES:
            lr, eps, betas, gamma, max_steps = recipe(FUNCTIONS[name], share)
            settings = {"eps": eps, "betas": betas, "gamma": gamma, "steps": max_steps, "runs": RUNS}
            specs += [_spec(name, arm, lr, "recipe", plan.test_seeds()[0], settings) for arm in ARMS]
    return specs


def _spec(name: str, arm: str, lr: float, condition: str, seed: int, settings: dict[str, object]) -> RunSpec:
    return RunSpec("theorem", name, "", arm, lr, condition, seed, settings)


def recipe(function: Function, share: float) -> tuple[float, float, tuple[float, float], float, int]:
    """Return lr, eps, betas, gamma and the number of steps T as the theorem prescribes them.

    The theorem does not name its constants, so these are our choice. 1 - beta_1 and alpha are proportional to gamma^2,
    hence T is proportional to gamma^-4.
    """
    side = np.linspace(*function.box, 21)
    starts = np.stack(np.meshgrid(side, side), axis=-1)
    zero = np.zeros(starts.shape[:-1])
    gamma = share * float(np.sqrt((function.gradient(starts, zero) ** 2).sum(-1).mean()))
    slow = min(1.0, 2 * (gamma / function.bound) ** 2)
    lr = min(function.largest_lr(EPS), EPS**1.5 * slow / (function.smoothness * function.bound**0.5))
    gap = float(function.value(starts, zero).max())
    max_steps = math.ceil(max(1 / slow**2, 4 * gap * function.bound / (lr * gamma**2)))
    return lr, EPS, (1 - slow, BETAS[1]), gamma, max_steps


def compute(spec: RunSpec) -> Outcome:
    """Compute one run: the violations of each inequality, or for a "recipe" the number of steps until gamma."""
    function, runs = FUNCTIONS[spec.model], spec.settings["runs"]
    rng = np.random.default_rng(spec.seed)
    start = rng.uniform(*function.box, (runs, 2))
    if spec.condition == "recipe":
        return _steps_needed(spec, function, start)
    steps, eps = spec.settings["steps"], spec.settings["eps"]
    signs = np.where(rng.random((steps, runs, 1)) < (FLIPPED if function.noisy else 0), -1.0, 1.0)
    optimizer: type[cadam.Optimizer] = getattr(cadam, spec.optimizer)
    trace = record_run(
        optimizer,
        start,
        lambda x, t: function.gradient(x, np.asarray(t)) * signs[t - 1],
        steps,
        lr=spec.lr,
        eps=eps,
        betas=tuple(spec.settings["betas"]),
    )
    times = np.arange(1, 1 + steps)[:, None]
    checked = check(
        trace,
        lambda x: function.value(x, times),
        lambda x: function.gradient(x, times),
        bound=function.bound,
        lr=spec.lr,
        eps=eps,
    )
    gap = function.value(start, np.ones(runs))
    mean = checked.squared_gradient.cumsum(axis=0) / times
    rate = 4 * function.bound * (gap / (spec.lr * times) + checked.squared_pi.cumsum(axis=0) / times / eps)
    shown = TIMES[steps >= TIMES]
    metrics = {
        "steps": float(checked.step_length.size),
        "bounded": float(checked.bounded.mean()),
        "step_broken": float(checked.violates_step_length.sum()),
        "descent_broken": float(checked.violates_descent.sum()),
        "rate_broken": float((mean > rate * (1 + 1e-12)).sum()),
        "longest_step": float(checked.step_length.max() / checked.step_length_bound),
        archive_names.MASKED_SHARE: float((np.sign(trace.momentum) != np.sign(trace.gradients)).mean()),
        "mean_squared_gradient": float(mean[-1].mean()),
        "bound": float(rate[-1].mean()),
    }
    return Outcome(metrics, {"mean": mean[shown - 1].mean(axis=1), "rate": rate[shown - 1].mean(axis=1)})


def _steps_needed(spec: RunSpec, function: Function, start: Array) -> Outcome:
    """Find the first T at which the mean squared gradient norm, averaged over the starts, is at most gamma^2."""
    max_steps, gamma = spec.settings["steps"], spec.settings["gamma"]
    total, needed = 0.0, math.nan
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    x.grad = torch.zeros_like(x)
    position, slope = x.detach().numpy(), x.grad.numpy()
    options = {"lr": spec.lr, "eps": spec.settings["eps"], "betas": tuple(spec.settings["betas"])}
    opt = getattr(cadam, spec.optimizer)([x], **options)
    for t in range(1, 1 + max_steps):
        slope[...] = function.gradient(position, np.asarray(t))
        total += float((slope**2).sum(-1).mean())
        if total <= t * gamma**2:
            needed = float(t)
            break
        opt.step()
    return Outcome({"needed": needed, "enough": float(max_steps), "gamma": gamma})


# Tables ------------------------------------------------------------------------------------------------


def theorem_summary(results: Results) -> Summary:
    """Summarize the violations by function and condition, and the exponents of T as a power of gamma."""
    rows = [
        _row(results.where(model=name, condition=condition), name, condition)
        for condition in ("within", "practice")
        for name in FUNCTIONS
    ]
    rows += [_recipe_row(results.where(model=name, condition="recipe"), name) for name in RECIPES]
    inside = Results([r for r in results if r.spec.condition == "within" and not FUNCTIONS[r.spec.model].violation])
    ours = inside.where(optimizer="CAdam")
    violations = sum(_total(ours, f"{kind}_broken") for kind in KINDS)
    noisy = results.where(model="noise", condition="within")
    counts = {arm: _total(noisy.where(optimizer=arm), "descent_broken") for arm in ARMS}
    verdict = (
        f"On the functions that meet the assumptions: {violations:.0f} violations of the lemmas and the rate in "
        f"{_total(ours, 'steps'):,.0f} steps of CAdam. With one gradient in {1 / FLIPPED:.0f} of the wrong sign, "
        f"which the theorem does not cover, CAdam violates the descent lemma {counts['CAdam']:.0f} times, "
        f"Adam {counts['Adam']:.0f} times."
    )
    bounded = min(r.outcome.metrics["bounded"] for r in inside)
    warnings = []
    if bounded < 1:
        warnings = [f"gradient norms exceeded G in up to {1 - bounded:.1%} of a run's steps, which are not checked"]
    return Summary(verdict, rows, warnings)


KINDS = ("step", "descent", "rate")
"""The checked inequalities: both lemmas, and the convergence rate."""


def _total(results: Results, metric: str) -> float:
    return sum(r.outcome.metrics[metric] for r in results)


def _row(results: Results, name: str, condition: str) -> Row:
    """Summarize one function: violations of each inequality by optimizer, and the masked share of CAdam's updates."""
    function = FUNCTIONS[name]
    arms = {arm: results.where(optimizer=arm) for arm in ARMS}
    values = {
        f"{arm} {kind} violations": _total(of_arm, f"{kind}_broken") for arm, of_arm in arms.items() for kind in KINDS
    }
    values["steps"] = _total(arms["CAdam"], "steps")
    values["masked"] = _total(arms["CAdam"], archive_names.MASKED_SHARE) / len(arms["CAdam"])
    counts = [f"{arm} " + " / ".join(f"{values[f'{arm} {kind} violations']:.0f}" for kind in KINDS) for arm in ARMS]
    violated = any(values[f"{arm} {kind} violations"] for arm in ARMS for kind in KINDS)
    if condition == "within" and not function.violation:
        paper, verdict = "0 / 0 / 0", "violated" if violated else "no violation"
    else:
        reasons = "; ".join(filter(None, [function.violation, "alpha too large" if condition == "practice" else ""]))
        paper, verdict = "", f"not covered ({reasons}): {'violated' if violated else 'no violation'}"
    settings = "largest alpha allowed" if condition == "within" else f"lr {PRACTICE_LR:g}, eps {PRACTICE_EPS:g}"
    kind = function.violation or f"rho {function.rho:.2g}"
    return Row(
        f"{name}, {function.formula} ({kind}), {settings}",
        paper,
        f"violations of step length / descent / rate: {', '.join(counts)}; "
        f"{values['steps']:,.0f} steps; {values['masked']:.0%} of updates masked",
        "",
        len({r.spec.seed for r in results}),
        results.seconds,
        verdict,
        values=values,
    )


def _slope(results: Results) -> float:
    """Fit the exponent of T as a power of gamma by least squares."""
    gammas, needed = ([r.outcome.metrics[name] for r in results] for name in ("gamma", "needed"))
    return float(np.polyfit(np.log(gammas), np.log(needed), 1)[0])


def _recipe_row(results: Results, name: str) -> Row:
    slopes = {arm: _slope(results.where(optimizer=arm)) for arm in ARMS}
    worst = max(r.outcome.metrics["needed"] / r.outcome.metrics["enough"] for r in results)
    return Row(
        f"{name}: steps T until the mean squared gradient is gamma²",
        "T grows no faster than gamma to the -4: an exponent of -4 or above",
        ", ".join(f"{arm}: gamma to the {slope:.2f}" for arm, slope in slopes.items()),
        "",
        len({r.spec.seed for r in results}),
        results.seconds,
        f"T at most {worst:.0%} of 4 Δ₁G/(αγ²)",
        values={**{f"{arm} exponent": slope for arm, slope in slopes.items()}, "share of T": worst},
    )


def theorem_figures(results: Results) -> dict[str, Figure]:
    """Draw the mean squared gradient and its bound for each function, and the steps needed by gamma."""
    figure, axes = panels(2, 5, 12.5, 5.6)
    for panel, (name, function) in zip(axes.flat, FUNCTIONS.items(), strict=False):
        _draw_rate(panel, results.where(model=name, condition="within"))
        detail = function.violation or f"ρ = {function.rho:.2g}"
        panel.set_title(f"{name}: {function.formula}\n{detail}", fontsize=9)
        panel.set_xlabel("steps T")
    axes[0, 0].legend(frameon=False, fontsize=8, labelcolor=palette.INK, loc="lower left")
    axes[0, 0].set_ylabel("mean squared gradient norm")
    axes[1, 0].set_ylabel("mean squared gradient norm")
    _draw_recipe(axes[1, 4], results.where(condition="recipe"))
    return {
        "The convergence rate on five functions that meet the assumptions and four that do not, at the largest step "
        "size that the lemmas allow. Lower right: the steps needed for a given gamma with the theorem's choice of "
        "alpha and beta": figure
    }


def _draw_rate(panel: Axes, results: Results) -> None:
    bounds = results.where(optimizer="CAdam").curve("rate").mean(axis=0)
    times = TIMES[: len(bounds)]
    panel.loglog(times, bounds, color=palette.TARGET, ls="--", lw=1.2, label="CAdam's bound")
    for arm, color, width in (("Adam", palette.ADAM, 3.5), ("CAdam", palette.CADAM, 1.5)):
        means = results.where(optimizer=arm).curve("mean").mean(axis=0)
        panel.loglog(times, means, color=color, lw=width, label=arm)


def _draw_recipe(panel: Axes, results: Results) -> None:
    for marker, name in zip("osD", RECIPES, strict=True):
        for arm, color, width in (("Adam", palette.ADAM, 3.5), ("CAdam", palette.CADAM, 1.5)):
            of_arm = results.where(model=name, optimizer=arm)
            gammas = sorted({r.outcome.metrics["gamma"] for r in of_arm})
            needed = [_total(of_arm.where(gamma=g), "needed") / len(of_arm.where(gamma=g)) for g in gammas]
            label = name if arm == "CAdam" else None
            panel.loglog(gammas, needed, marker + "-", color=color, ms=4, lw=width, label=label)
    ends = np.array([0.2, 0.8])
    panel.loglog(ends, 80 * ends**-4.0, color=palette.TARGET, ls="--", lw=1.2, label="slope -4")
    panel.set_xticks([0.1, 0.2, 0.5, 1], ["0.1", "0.2", "0.5", "1"])
    panel.minorticks_off()
    panel.set_title("parameters of the theorem:\nsteps needed for gamma", fontsize=9)
    panel.set_xlabel("gamma")
    panel.set_ylabel("steps T")
    panel.legend(frameon=False, fontsize=7, labelcolor=palette.INK)


THEOREM = Experiment(
    name="theorem",
    title="Convergence (theorem 4.3 and its two lemmas)",
    shows="Whether the lemmas and the rate hold at every step, on functions that meet the assumptions and on others.",
    measure=(
        "A step violates a lemma if its inequality fails by more than rounding errors; under the theorem's assumptions "
        "no step should. Masked: the share of elementwise updates that CAdam skipped."
    ),
    claim="CAdam keeps Adam's convergence rate for non-convex, (rho, L0, Lrho)-smooth functions with exact gradients.",
    run_specs=theorem_specs,
    compute=compute,
    summary=theorem_summary,
    figures=theorem_figures,
    seconds={"quick": 25, "full": 40},
    tolerance=1e-6,
    seeds={"quick": 1, "full": 2},
    notes=(
        "Power of the check: the descent lemma requires the function to decrease only while the gradient is large. "
        "Near the optimum, where most steps are, it permits an increase and is hard to violate. The rate follows from "
        "the descent lemma; it is drawn but is not independent evidence.",
        "The check shows whether an inequality failed on these runs by more than rounding errors. It cannot show that "
        "it never fails elsewhere, or that CAdam is better than Adam. The bounds hold for both optimizers and are far "
        "above the measured values of both.",
        "The paper does not give the constants c1, c2, C1, C2 of the theorem, so its T cannot be tested as a number. "
        "The check covers the lemmas with their constants, the rate that follows from summing the descent lemma, and "
        "the exponent of gamma.",
        "The step sizes that the theorem allows are tiny: at eps 1e-8, on this quadratic, at most "
        f"{FUNCTIONS['quadratic'].largest_lr(1e-8):.1g}. The check therefore uses eps {EPS:g}. At usual settings the "
        "descent lemma rarely fails either, but only because |pi|²/eps is then so large that the bound is vacuous.",
        "The proof of the descent lemma needs |pi masked| <= |pi|, which is true because mhat and grad f have opposite "
        "signs in a masked element. With noise the mask compares mhat with g instead, so CAdam may mask an element "
        "whose mhat is right. The lemma then fails for CAdam but not for Adam, whose proof does not use g. The paper "
        "claims the deterministic case only.",
        "The step length lemma is loose by a factor of 2: its proof gives alpha G/eps.",
        "Misprints in the paper: the smoothness assumption has the exponent 2 instead of rho; r has G^rho where the "
        "units require G^(rho-1); beta_2 = 1 is allowed but makes vhat 0/0; (IV) cites alpha <= L/(6L) instead of "
        "eps/(6L); the last line of the proof keeps the norm's H_t; the text's O(alpha gamma^-2) should be "
        "O(1/(alpha gamma^2)); delta and iota belong to the stochastic case; the proof's mask is m g >= 0 but "
        "Algorithm 1's is m g > 0 (both satisfy the lemmas).",
        "T ~ gamma^-4 is a consequence of the prescribed parameters: alpha shrinks with gamma². At a fixed alpha the "
        "mean decreases as 1/T. With alpha this small hardly any element is masked, so Adam and CAdam need the same T.",
    ),
)
