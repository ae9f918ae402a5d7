"""The convergence theorem: its two lemmas at every step, and the rate, for the optimizer as it is.

The paper follows the deterministic setting: g_t is the gradient of f at x_t, the step size and both betas are constant,
m and v are bias-corrected, there is neither weight decay nor AMSGrad: `CAdam` with its defaults but for lr, eps and
betas. With D = 2G/eps, gradients bounded by G, and pi_t = mhat_t - grad f(x_t), the lemmas say

    |x_{t+1} - x_t| <= alpha D                                                                        (step length)
    f(x_{t+1}) - f(x_t) <= -alpha/(4G) |grad f(x_t)|^2 + alpha/eps |pi_t|^2                           (descent)

if alpha <= min(r/D, eps/(6L)). Summing the second over t gives the rate that is checked here, with its constants:

    mean |grad f|^2 <= 4 G Delta_1/(alpha T) + 4 G/eps mean |pi|^2                                    (rate)
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
from cadam.ab.results import Outcome, Results, RunSpec
from cadam.ab.summary import Row, Summary
from cadam.statistics.intervals import Array

from .harness.experiment import Experiment, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Functions ----------------------------------------------------------------------------------------------------

At = Callable[[Array, Array], Array]
"""Of points x (..., 2) at steps t (broadcast against x without its last axis); most functions stay as they are."""


@dataclass(frozen=True)
class Function:
    """A function of two variables with |Hessian| <= l0 + lrho |gradient|^rho, and where its runs start.

    `bound` is the theorem's G: no gradient of a run may be longer. `broken` says which assumption fails, if one does;
    the constants are then those the function has almost everywhere.
    """

    formula: str
    value: At
    gradient: At
    rho: float
    l0: float
    lrho: float
    bound: float
    box: tuple[float, float]
    broken: str = ""
    noisy: bool = False

    @property
    def smoothness(self) -> float:
        """L, valid where gradients are at most G long and points at most r apart."""
        return float(3 * self.l0 + 4 * self.lrho * self.bound**self.rho)

    @property
    def radius(self) -> float:
        """r as the paper prints it. G is at least 1 here, where that is no more than the source's G^(rho-1) gives."""
        if self.lrho == 0:
            return math.inf
        near = 1 / (5 * self.lrho * self.bound**self.rho)
        return float(min(near, 1 / (5 * (self.l0 ** (self.rho - 1) * self.lrho) ** (1 / self.rho))))

    def largest_lr(self, eps: float) -> float:
        """The largest alpha that the descent lemma allows."""
        return min(self.radius * eps / (2 * self.bound), eps / (6 * self.smoothness))


COUPLING = np.array([[1.0, 0.6], [0.6, 1.0]])
"""The quadratic's Hessian: its axes are not the coordinates', which is where a mask by coordinate could hurt."""
JUMP = 100


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
    """0 and 1 in turns of JUMP steps."""
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
"""Five that meet the assumptions (cosine and two wells are not convex), and four that do not."""

# One run, and what the lemmas say of it ------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """A run of the optimizer: where it was (1 + steps, runs, d), and at each step the gradient it got and its mhat."""

    path: Array
    given: Array
    momentum: Array


def watch(
    optimizer: type[cadam.Optimizer],
    start: Array,
    gradient: Callable[[Array, int], Array],
    steps: int,
    *,
    lr: float,
    eps: float,
    betas: tuple[float, float],
) -> Trace:
    """Run the optimizer from every row of `start`; mhat is read from its own state."""
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    x.grad = torch.zeros_like(x)
    position, slope = x.detach().numpy(), x.grad.numpy()
    opt = optimizer([x], lr=lr, betas=betas, eps=eps)
    path = np.empty((1 + steps, *position.shape))
    given, momentum = np.empty_like(path[1:]), np.empty_like(path[1:])
    path[0] = position
    for t in range(1, 1 + steps):
        slope[...] = given[t - 1] = gradient(position, t)
        opt.step()
        path[t] = position
        momentum[t - 1] = opt.state[x]["exp_avg"].numpy() / (1 - betas[0] ** t)
    return Trace(path, given, momentum)


@dataclass(frozen=True)
class Check:
    """Both sides of each inequality at every step of every run (steps, runs), and whether it is broken.

    Broken means by more than rounding can explain.
    """

    length: Array
    longest: float
    change: Array
    allowed: Array
    rounding: Array
    squared_gradient: Array
    squared_pi: Array
    bounded: Array
    """Whether all gradients so far were at most G long: the theorem's t < tau."""

    @property
    def step_broken(self) -> Array:
        return np.asarray(self.bounded & (self.length > self.longest * (1 + 1e-12)))

    @property
    def descent_broken(self) -> Array:
        return np.asarray(self.bounded & (self.change > self.allowed + self.rounding))


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
    """Both lemmas for a run. `factor` is that of D = factor * G/eps: 2 in the paper's statement, 1 in its proof.

    `value` and `gradient` take points of all steps (steps, runs, d), the function being that of the step.
    """
    before, after = value(trace.path[:-1]), value(trace.path[1:])
    true = gradient(trace.path[:-1])
    squared, pi = (true**2).sum(-1), ((trace.momentum - true) ** 2).sum(-1)
    largest = np.maximum((true**2).sum(-1), (trace.given**2).sum(-1))
    return Check(
        length=np.linalg.norm(np.diff(trace.path, axis=0), axis=-1),
        longest=factor * lr * bound / eps,
        change=after - before,
        allowed=-lr / (4 * bound) * squared + lr / eps * pi,
        rounding=1e-14 * (1 + np.abs(before)),
        squared_gradient=squared,
        squared_pi=pi,
        bounded=np.maximum.accumulate(largest, axis=0) <= bound**2 * (1 + 1e-12),
    )


# Cells --------------------------------------------------------------------------------------------------------

EPS, BETAS, STEPS, RUNS = 0.5, (0.99, 0.999), 2000, 32
PRACTICE_LR, PRACTICE_EPS = 0.01, 1e-8
SHARES = (0.5, 0.35, 0.25)
"""The gammas of the recipe, as shares of the root mean square of a start's gradient."""
FLIPPED = 0.05
"""How often the noisy function hands over a gradient with its sign turned: a rare, one-off error."""
RECIPES = ("quadratic", "cosine", "exponential")
TIMES = np.unique(np.geomspace(1, STEPS, 60).astype(int))
ARMS = ("CAdam", "Adam")


def theorem_specs(plan: Plan, _: Results) -> list[RunSpec]:
    """Each function at the largest step size the lemmas allow and as in practice; the recipe on three, one seed."""
    specs = []
    for name, function in FUNCTIONS.items():
        options = {"within": (function.largest_lr(EPS), EPS), "practice": (PRACTICE_LR, PRACTICE_EPS)}
        for condition, (lr, eps) in options.items():
            settings = {"eps": eps, "betas": BETAS, "steps": STEPS, "runs": RUNS}
            specs += [_spec(name, arm, lr, condition, seed, settings) for arm in ARMS for seed in plan.test_seeds()]
    for name in RECIPES:
        for share in SHARES:
            lr, eps, betas, gamma, most = recipe(FUNCTIONS[name], share)
            settings = {"eps": eps, "betas": betas, "gamma": gamma, "steps": most, "runs": RUNS}
            specs += [_spec(name, arm, lr, "recipe", plan.test_seeds()[0], settings) for arm in ARMS]
    return specs


def _spec(name: str, arm: str, lr: float, condition: str, seed: int, settings: dict[str, object]) -> RunSpec:
    return RunSpec("theorem", name, "", arm, lr, condition, seed, settings)


def recipe(function: Function, share: float) -> tuple[float, float, tuple[float, float], float, int]:
    """lr, eps, betas and gamma as the theorem chooses them, and T: its constants are unnamed, these are ours.

    1 - beta_1 grows as gamma^2, alpha with it, and so T as gamma^-4.
    """
    side = np.linspace(*function.box, 21)
    starts = np.stack(np.meshgrid(side, side), axis=-1)
    zero = np.zeros(starts.shape[:-1])
    gamma = share * float(np.sqrt((function.gradient(starts, zero) ** 2).sum(-1).mean()))
    slow = min(1.0, 2 * (gamma / function.bound) ** 2)
    lr = min(function.largest_lr(EPS), EPS**1.5 * slow / (function.smoothness * function.bound**0.5))
    gap = float(function.value(starts, zero).max())
    most = math.ceil(max(1 / slow**2, 4 * gap * function.bound / (lr * gamma**2)))
    return lr, EPS, (1 - slow, BETAS[1]), gamma, most


def compute(spec: RunSpec) -> Outcome:
    function, runs = FUNCTIONS[spec.model], spec.settings["runs"]
    rng = np.random.default_rng(spec.seed)
    start = rng.uniform(*function.box, (runs, 2))
    if spec.condition == "recipe":
        return _steps_needed(spec, function, start)
    steps, eps = spec.settings["steps"], spec.settings["eps"]
    signs = np.where(rng.random((steps, runs, 1)) < (FLIPPED if function.noisy else 0), -1.0, 1.0)
    optimizer: type[cadam.Optimizer] = getattr(cadam, spec.optimizer)
    trace = watch(
        optimizer,
        start,
        lambda x, t: function.gradient(x, np.asarray(t)) * signs[t - 1],
        steps,
        lr=spec.lr,
        eps=eps,
        betas=tuple(spec.settings["betas"]),
    )
    times = np.arange(1, 1 + steps)[:, None]
    found = check(
        trace,
        lambda x: function.value(x, times),
        lambda x: function.gradient(x, times),
        bound=function.bound,
        lr=spec.lr,
        eps=eps,
    )
    gap = function.value(start, np.ones(runs))
    mean = found.squared_gradient.cumsum(axis=0) / times
    rate = 4 * function.bound * (gap / (spec.lr * times) + found.squared_pi.cumsum(axis=0) / times / eps)
    shown = TIMES[steps >= TIMES]
    metrics = {
        "steps": float(found.length.size),
        "bounded": float(found.bounded.mean()),
        "step_broken": float(found.step_broken.sum()),
        "descent_broken": float(found.descent_broken.sum()),
        "rate_broken": float((mean > rate * (1 + 1e-12)).sum()),
        "longest_step": float(found.length.max() / found.longest),
        "waiting": float((np.sign(trace.momentum) != np.sign(trace.given)).mean()),
        "mean_squared_gradient": float(mean[-1].mean()),
        "bound": float(rate[-1].mean()),
    }
    return Outcome(metrics, {"mean": mean[shown - 1].mean(axis=1), "rate": rate[shown - 1].mean(axis=1)})


def _steps_needed(spec: RunSpec, function: Function, start: Array) -> Outcome:
    """The first T at which the mean squared gradient norm, averaged over the starts, is at most gamma^2."""
    most, gamma = spec.settings["steps"], spec.settings["gamma"]
    total, needed = 0.0, math.nan
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    x.grad = torch.zeros_like(x)
    position, slope = x.detach().numpy(), x.grad.numpy()
    options = {"lr": spec.lr, "eps": spec.settings["eps"], "betas": tuple(spec.settings["betas"])}
    opt = getattr(cadam, spec.optimizer)([x], **options)
    for t in range(1, 1 + most):
        slope[...] = function.gradient(position, np.asarray(t))
        total += float((slope**2).sum(-1).mean())
        if total <= t * gamma**2:
            needed = float(t)
            break
        opt.step()
    return Outcome({"needed": needed, "enough": float(most), "gamma": gamma})


# What it shows ------------------------------------------------------------------------------------------------


def theorem_summary(results: Results) -> Summary:
    rows = [
        _row(results.where(model=name, condition=condition), name, condition)
        for condition in ("within", "practice")
        for name in FUNCTIONS
    ]
    rows += [_recipe_row(results.where(model=name, condition="recipe"), name) for name in RECIPES]
    inside = Results([r for r in results if r.spec.condition == "within" and not FUNCTIONS[r.spec.model].broken])
    ours = inside.where(optimizer="CAdam")
    broken = sum(_total(ours, f"{kind}_broken") for kind in KINDS)
    noisy = results.where(model="noise", condition="within")
    counts = {arm: _total(noisy.where(optimizer=arm), "descent_broken") for arm in ARMS}
    verdict = (
        f"On the functions that meet the assumptions: {broken:.0f} breaches of the lemmas and the rate in "
        f"{_total(ours, 'steps'):,.0f} steps of CAdam. Where one gradient in {1 / FLIPPED:.0f} has the wrong sign, "
        f"which the theorem leaves out, CAdam breaks the descent lemma {counts['CAdam']:.0f} times, "
        f"Adam {counts['Adam']:.0f}."
    )
    bounded = min(r.outcome.metrics["bounded"] for r in inside)
    warnings = [] if bounded == 1 else [f"gradients passed G in {1 - bounded:.1%} of a spec's steps, left unchecked"]
    return Summary(verdict, rows, warnings)


KINDS = ("step", "descent", "rate")


def _total(results: Results, metric: str) -> float:
    return sum(r.outcome.metrics[metric] for r in results)


def _row(results: Results, name: str, condition: str) -> Row:
    """One function: how often each inequality broke, for both optimizers, and how much of CAdam waited."""
    function = FUNCTIONS[name]
    arms = {arm: results.where(optimizer=arm) for arm in ARMS}
    values = {f"{arm} {kind} broken": _total(found, f"{kind}_broken") for arm, found in arms.items() for kind in KINDS}
    values["steps"] = _total(arms["CAdam"], "steps")
    values["waiting"] = _total(arms["CAdam"], "waiting") / len(arms["CAdam"])
    counts = [f"{arm} " + " / ".join(f"{values[f'{arm} {kind} broken']:.0f}" for kind in KINDS) for arm in ARMS]
    broken = any(values[f"{arm} {kind} broken"] for arm in ARMS for kind in KINDS)
    if condition == "within" and not function.broken:
        paper, verdict = "0 / 0 / 0", "broken" if broken else "holds"
    else:
        why = [function.broken, "alpha too large" if condition == "practice" else ""]
        reasons = "; ".join(filter(None, why))
        paper, verdict = "", f"not covered ({reasons}): {'breaks' if broken else 'no breach seen'}"
    settings = "largest alpha allowed" if condition == "within" else f"lr {PRACTICE_LR:g}, eps {PRACTICE_EPS:g}"
    kind = function.broken or f"rho {function.rho:.2g}"
    return Row(
        f"{name}, {function.formula} ({kind}), {settings}",
        paper,
        f"broken step / descent / rate: {', '.join(counts)}; of {values['steps']:,.0f}; {values['waiting']:.0%} waited",
        "",
        len({r.spec.seed for r in results}),
        results.seconds,
        verdict,
        values=values,
    )


def _slope(results: Results) -> float:
    """The exponent of T in gamma, by least squares."""
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
    figure, axes = palette.panels(2, 5, 12.5, 5.6)
    for panel, (name, function) in zip(axes.flat, FUNCTIONS.items(), strict=False):
        found = results.where(model=name, condition="within")
        _draw_rate(panel, found)
        detail = f"ρ = {function.rho:.2g}" if not function.broken else function.broken
        panel.set_title(f"{name}: {function.formula}\n{detail}", fontsize=9)
        panel.set_xlabel("steps T")
    axes[0, 0].legend(frameon=False, fontsize=8, labelcolor=palette.INK, loc="lower left")
    axes[0, 0].set_ylabel("mean squared gradient norm")
    axes[1, 0].set_ylabel("mean squared gradient norm")
    _draw_recipe(axes[1, 4], results.where(condition="recipe"))
    return {
        "The rate. Five functions meet the assumptions, four do not; step size the largest that the lemmas allow. "
        "Below right, the steps needed for a given gamma with the theorem's choice of alpha and beta": figure
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
            found = results.where(model=name, optimizer=arm)
            gammas = sorted({r.outcome.metrics["gamma"] for r in found})
            needed = [_total(found.where(gamma=g), "needed") / len(found.where(gamma=g)) for g in gammas]
            label = name if arm == "CAdam" else None
            panel.loglog(gammas, needed, marker + "-", color=color, ms=4, lw=width, label=label)
    ends = np.array([0.2, 0.8])
    panel.loglog(ends, 80 * ends**-4.0, color=palette.TARGET, ls="--", lw=1.2, label="slope -4")
    panel.set_xticks([0.1, 0.2, 0.5, 1], ["0.1", "0.2", "0.5", "1"])
    panel.minorticks_off()
    panel.set_title("the theorem's recipe:\nsteps needed for gamma", fontsize=9)
    panel.set_xlabel("gamma")
    panel.set_ylabel("steps T")
    panel.legend(frameon=False, fontsize=7, labelcolor=palette.INK)


THEOREM = Experiment(
    name="theorem",
    title="Convergence (theorem, both lemmas)",
    shows="The two lemmas at every step and the rate, on functions that meet the assumptions and on ones that do not.",
    measure=(
        "A step breaks a lemma where its inequality fails by more than rounding; under the theorem's assumptions none "
        "should. Waited: how much of the time CAdam held a weight still."
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
        "How much the check can say: the descent lemma demands a fall of the function only while the gradient is "
        "large. Near the optimum, where most steps are, it allows a rise, and is hard to break. The rate follows from "
        "the descent lemma: it is drawn, and no evidence of its own.",
        "What the check can say: whether an inequality broke somewhere on these runs, beyond rounding. What it cannot: "
        "that it never breaks elsewhere, or that CAdam is better than Adam. The bounds hold for both, far above both.",
        "The theorem's constants c1, c2, C1, C2 are not given, so its T cannot be tested as a number. Checked are the "
        "lemmas with their constants, the rate that follows from summing the second, and the exponent of gamma.",
        "The step sizes it allows are tiny: at eps 1e-8, on the quadratic here, at most "
        f"{FUNCTIONS['quadratic'].largest_lr(1e-8):.1g}. Checked with eps {EPS:g}. At usual settings the descent lemma "
        "seldom breaks either, but only because |pi|²/eps is then so large that it forbids nothing.",
        "The descent lemma's proof needs |pi masked| <= |pi|, true because a masked element has mhat against grad f. "
        "With noise the mask asks g instead, and CAdam can stand still where mhat is right: the lemma then fails for "
        "CAdam while it holds for Adam, whose proof needs nothing of g. The paper claims the deterministic case only.",
        "The step length lemma has a factor of 2 to spare: its proof gives alpha G/eps.",
        "Slips: the smoothness assumption prints the exponent 2 for rho; r prints G^rho where units ask for G^(rho-1); "
        "beta_2 = 1 is allowed but makes vhat 0/0; (IV) cites alpha <= L/(6L) for eps/(6L); the proof's last line "
        "keeps the norm's H_t; the text's O(alpha gamma^-2) is O(1/(alpha gamma^2)); delta and iota belong to the "
        "stochastic case; the proof's mask is m g >= 0, Algorithm 1's m g > 0 (both satisfy the lemmas).",
        "T ~ gamma^-4 is the recipe's doing: it shrinks alpha with gamma². At a fixed alpha the mean falls as 1/T. "
        "With alpha that small hardly any element waits, so Adam and CAdam need the same T.",
    ),
)
