"""Broken variants of the update, each caught by a check that the real one passes.

A check states one fact of the definition about the public classes. A mutant breaks the package under them: another
rule, another `Update`, another way to gather rows. It runs through the same engines and meets the same checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks

import cadam
from cadam import Rule, Step
from cadam.engines import sparse_reference
from cadam.rules.update import Update, UpdateResult
from tests.engines.engines_under_test import ENGINES, LAYOUTS, ROWS, served
from tests.optim.family import FAMILY, buffers, gradient, parameter, same_bits, sparse
from tests.optim.test_oracle import UNUSUAL, assert_agrees

# Checks ---------------------------------------------------------------------------------------------------


def path(
    name: str,
    start: list[float],
    grads: list[list[float]],
    engine: str,
    layout: str,
    dtype: Any = torch.float64,
    **o: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the parameter before and after each of `grads`, and the buffers at the end."""
    param = parameter(start, dtype)
    optimizer = FAMILY[name]([param], **{"lr": 0.1, **o, **ENGINES[engine].options})
    seen = [param.detach().clone()]
    for grad in grads:
        param.grad = gradient(layout, grad, param)
        optimizer.step()
        seen.append(param.detach().clone())
    return seen, buffers(optimizer, param)


def elements_are_independent(engine: str, layout: str) -> None:
    """An element beside masked elements moves as it does alone."""
    together, _ = path("CAdam", [1.0, 2.0, 3.0], [[1, 1, 1], [1, -0.5, -0.5]], engine, layout)
    alone, _ = path("CAdam", [1.0], [[1], [1]], engine, layout)
    assert same_bits(together[-1][:1], alone[-1])


def a_zero_gradient_moves_nothing(engine: str, layout: str) -> None:
    (_, before, after), _ = path("CAdam", [1.0], [[1], [0]], engine, layout)
    assert same_bits(before, after)


def disagreement_holds(engine: str, layout: str) -> None:
    """m is 0.1, and then 0.04 with g = -0.5, so the element does not move."""
    (_, before, after), _ = path("CAdam", [1.0], [[1], [-0.5]], engine, layout)
    assert same_bits(before, after)


def moments_follow_every_gradient(engine: str, layout: str) -> None:
    """m and v are the averages of all gradients, including those of masked steps."""
    _, state = path("CAdam", [1.0], [[1], [-0.5], [0.25]], engine, layout)
    m = 0.9 * (0.9 * 0.1 - 0.05) + 0.025
    v = 0.999 * (0.999 * 0.001 + 0.001 * 0.25) + 0.001 * 0.0625
    assert state["exp_avg"].item() == pytest.approx(m, rel=1e-12)
    assert state["exp_avg_sq"].item() == pytest.approx(v, rel=1e-12)


def the_mask_sees_the_new_momentum(engine: str, layout: str) -> None:
    """The first step moves the element, and so does a gradient that changes the sign of the momentum."""
    (start, first, second), _ = path("CAdam", [1.0], [[1], [-20]], engine, layout)
    assert first < start
    assert second > first


def eps_is_outside_the_root(engine: str, layout: str) -> None:
    (start, first), _ = path("CAdam", [1.0], [[1]], engine, layout, eps=0.25)
    assert (start - first).item() == pytest.approx(0.1 * 1 / (1 + 0.25), rel=1e-12)


def the_first_step_is_lr(engine: str, layout: str) -> None:
    """The bias corrections are exact from step one on."""
    (start, first), _ = path("CAdam", [1.0], [[3]], engine, layout, eps=0.0)
    assert (start - first).item() == pytest.approx(0.1, rel=1e-12)


def small_gradients_move_half_weights(engine: str, layout: str) -> None:
    """g = 1e-4 and m = 1e-5 agree, though their product is zero in float16."""
    (start, first), _ = path("CAdam", [1.0], [[1e-4]], engine, layout, torch.float16)
    assert first < start


def waiting_elements_decay(engine: str, layout: str) -> None:
    """Decoupled decay multiplies by 1 - lr*weight_decay, also where the step is held."""
    (_, before, after), _ = path("CAdamW", [1.0], [[1], [-0.5]], engine, layout, weight_decay=0.5)
    assert after.item() == pytest.approx(before.item() * (1 - 0.1 * 0.5), rel=1e-12)


def l2_takes_part_in_the_mask(engine: str, layout: str) -> None:
    """g = -0.5 + 1*p is positive, and so is its momentum: p moves, though the loss alone pulls the other way."""
    (start, first), _ = path("CAdam", [1.0], [[-0.5]], engine, layout, weight_decay=1.0, eps=0.0)
    assert (start - first).item() == pytest.approx(0.1, rel=1e-12)


def maximising_climbs(engine: str, layout: str) -> None:
    (start, first), _ = path("CAdam", [1.0], [[1]], engine, layout, maximize=True)
    assert first > start


def a_broken_gradient_shows(engine: str, layout: str) -> None:
    (_, after), _ = path("CAdam", [1.0, 1.0], [[math.nan, math.inf]], engine, layout)
    assert not after.isfinite().any()


def amsgrad_keeps_the_corrected_maximum(engine: str, layout: str) -> None:
    """vhat is 1 and then 0.01/0.0199: the second step divides by the root of 1."""
    options = {"betas": (0.0, 0.99), "eps": 0.0}
    (_, before, after), _ = path("CAmsGrad", [1.0], [[1], [0.1]], engine, layout, **options)
    assert (before - after).item() == pytest.approx(0.1 * 0.1, rel=1e-12)


def lion_tests_its_interpolant(engine: str, layout: str) -> None:
    """c = 0.9*0.01 - 0.05 has the sign of g = -0.5, the new m = 0.0049 has not: it moves."""
    (_, before, after), _ = path("CLion", [1.0], [[1], [-0.5]], engine, layout)
    assert after > before


def duplicates_are_summed(engine: str, layout: str) -> None:
    param = parameter([[1.0], [1.0]])
    optimizer = FAMILY["CAdam"]([param], **ENGINES[engine].options)
    param.grad = sparse([(1,), (1,)], [[1.0], [2.0]], param)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].flatten().tolist() == pytest.approx([0.0, 0.3])


def absent_rows_keep_their_bits(engine: str, layout: str) -> None:
    param = parameter([[1.0], [1.0]])
    optimizer = FAMILY["CAdamW"]([param], lr=0.1, weight_decay=0.5, **ENGINES[engine].options)
    for ids in ([(0,), (1,)], [(1,)]):
        before = [x.detach()[0].clone() for x in (param, *buffers(optimizer, param).values())]
        param.grad = sparse(ids, [[1.0]] * len(ids), param)
        optimizer.step()
    after = [x.detach()[0] for x in (param, *buffers(optimizer, param).values())]
    assert all(map(same_bits, before, after))


def one_step_count_for_all_rows(engine: str, layout: str) -> None:
    """A row that comes first at the second step is corrected by the second step's factors."""
    param = parameter([[1.0], [1.0]])
    optimizer = FAMILY["CAdam"]([param], lr=0.1, eps=0.0, **ENGINES[engine].options)
    for row in (0, 1):
        param.grad = sparse([(row,)], [[1.0]], param)
        optimizer.step()
    steps = (0.1, 0.1 * (0.1 / (1 - 0.9**2)) / math.sqrt(0.001 / (1 - 0.999**2)))
    assert (1 - param).flatten().tolist() == pytest.approx(steps, rel=1e-12)


def follows_the_oracle(engine: str, layout: str, *, name: str = "CAdam", decay: str = "none", **options: Any) -> None:
    """Thirty steps of random gradients end where the float64 oracle ends."""
    assert_agrees(name, options, decay, engine, layout, maximize=False, dtypes=[torch.float64])


Check = Callable[[str, str], None]
ROWS_ONLY: tuple[Check, ...] = (duplicates_are_summed, absent_rows_keep_their_bits, one_step_count_for_all_rows)
CHECKS: tuple[Check, ...] = (
    elements_are_independent,
    a_zero_gradient_moves_nothing,
    disagreement_holds,
    moments_follow_every_gradient,
    the_mask_sees_the_new_momentum,
    eps_is_outside_the_root,
    the_first_step_is_lr,
    small_gradients_move_half_weights,
    waiting_elements_decay,
    l2_takes_part_in_the_mask,
    maximising_climbs,
    a_broken_gradient_shows,
    amsgrad_keeps_the_corrected_maximum,
    lion_tests_its_interpolant,
    *ROWS_ONLY,
)


def layouts(check: Check) -> tuple[str, ...]:
    return (ROWS,) if check in ROWS_ONLY else LAYOUTS


# Mutants --------------------------------------------------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]


def with_update(mutant: type[Update]) -> Break:
    """Let every optimizer use `mutant` instead of `Update`."""
    of = Update.of.__func__  # type: ignore[attr-defined]

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Update, "of", classmethod(lambda cls, *args, **kwargs: of(mutant, *args, **kwargs)))

    return apply


def with_rule(cls: type[cadam.Optimizer], change: Callable[[Rule], Rule]) -> Break:
    """Let `cls` and its subclasses use a changed rule."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(cls, "rule", change(cls.rule))

    return apply


def with_step(cls: type[cadam.Optimizer], change: Callable[[Step, Any, Any, Any, Any], Step]) -> Break:
    """Change the `Step` that the rule returns. `change` gets it, the gradient, buffers, coefficients and functions."""

    def changed(rule: Rule) -> Rule:
        return replace(rule, update=lambda g, s, c, f: change(rule.update(g, s, c, f), g, s, c, f))

    return with_rule(cls, changed)


def with_mask(mask: Callable[[Tensor, Tensor], Tensor]) -> Break:
    """Apply the mask with `mask`, a function of the alignment (positive, zero or negative) and the step."""

    class Functions:
        def __init__(self, f: Any) -> None:
            self.sqrt, self.sign, self.maximum, self.square, self.mask = f.sqrt, f.sign, f.maximum, f.square, mask

    class Mutant(Update):
        def __call__(self, p: Any, g: Any, state: Any, coefficients: Any, f: Any) -> UpdateResult:
            return super().__call__(p, g, state, coefficients, Functions(f))

    return with_update(Mutant)


def rescaled(alignment: Tensor, step: Tensor) -> Tensor:
    mask = (alignment > 0).to(step.dtype)
    return step * mask * mask.numel() / mask.sum()


def masked_moments(moved: Step, g: Any, s: Any, c: Any, f: Any) -> Step:
    agree = moved.momentum * g > 0
    kept = {name: torch.where(agree, new, getattr(s, name)) for name, new in moved.state.items()}
    return replace(moved, state=kept)


def modified_gradient(rule: Rule) -> Rule:
    def update(g: Any, s: Any, c: Any, f: Any) -> Step:
        agree = rule.update(g, s, c, f).momentum * g > 0
        return rule.update(g * agree, s, c, f)

    return replace(rule, update=update)


def eps_inside(moved: Step, g: Any, s: Any, c: Any, f: Any) -> Step:
    vhat = moved.state["exp_avg_sq"] * c.correct2
    return replace(moved, step=moved.momentum * c.correct1 / f.sqrt(vhat + c.eps))


def half_product(moved: Step, g: Any, s: Any, c: Any, f: Any) -> Step:
    product = (moved.momentum.half() * g.half()).to(g.dtype)
    return replace(moved, momentum=product * f.sign(g))


def raw_maximum(moved: Step, g: Any, s: Any, c: Any, f: Any) -> Step:
    if not hasattr(s, "max_exp_avg_sq"):
        return moved
    raw = f.maximum(s.max_exp_avg_sq, moved.state["exp_avg_sq"])
    step = moved.momentum * c.correct1 / (f.sqrt(raw * c.correct2) + c.eps)
    return Step(step, moved.momentum, {**moved.state, "max_exp_avg_sq": raw})


def next_step(rule: Rule) -> Rule:
    return replace(rule, coefficients=lambda t, o, f: rule.coefficients(t + 1, o, f))


def step_per_row(rule: Rule) -> Rule:
    def state(o: Mapping[str, Any]) -> dict[str, float]:
        return {**rule.state(o), "age": 0.0}

    def coefficients(t: Any, o: Mapping[str, Any], f: Any) -> dict[str, Any]:
        return {**rule.coefficients(t, o, f), "betas": o["betas"]}

    def update(g: Any, s: Any, c: Any, f: Any) -> Step:
        age = s.age + 1
        c.correct1, c.correct2 = (1 / (1 - beta**age) for beta in c.betas)
        moved = rule.update(g, s, c, f)
        return replace(moved, state={**moved.state, "age": age})

    return replace(rule, state=state, coefficients=coefficients, update=update)


class DecayWaits(Update):
    """Decoupled decay acts only on elements that are not masked."""

    def __call__(self, p: Any, g: Any, state: Any, coefficients: Any, f: Any) -> UpdateResult:
        moved = super().__call__(p, g, state, coefficients, f)
        return replace(moved, param=torch.where(moved.alignment > 0, moved.param, p))


class DecayWithoutLr(Update):
    """p <- p * (1 - weight_decay)."""

    def coefficients(self, t: Any, o: Any, f: Any, grad_scale: Any = None) -> dict[str, Any]:
        return {**super().coefficients(t, o, f, grad_scale), "shrink": 1 - o["weight_decay"]}


class MaskBeforeL2(Update):
    """The mask compares with the gradient of the loss, without the L2 penalty."""

    def __call__(self, p: Any, g: Any, state: Any, coefficients: Any, f: Any) -> UpdateResult:
        free = replace(self, confidence=False)
        moved = Update.__call__(free, p, g, state, coefficients, f)
        momentum = moved.alignment * torch.sign(g + p * coefficients.get("l2", 0.0))
        return replace(moved, param=torch.where(momentum * g > 0, moved.param, p))


class MaskBeforeMaximize(Update):
    """The mask compares with the gradient before `maximize` changes its sign."""

    def __call__(self, p: Any, g: Any, state: Any, coefficients: Any, f: Any) -> UpdateResult:
        moved = super().__call__(p, g, state, coefficients, f)
        return replace(moved, param=torch.where(moved.alignment > 0, p, moved.param)) if self.maximize else moved


def duplicates_overwrite(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        sparse_reference, "sum_duplicates", lambda grad, dtype: (tuple(grad._indices()), grad._values().to(dtype))
    )


def absent_rows_get_zeros(patch: pytest.MonkeyPatch) -> None:
    def every_row(grad: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
        dense = grad.to_dense().to(dtype)
        return (torch.arange(len(dense)),), dense

    patch.setattr(sparse_reference, "sum_duplicates", every_row)


def all_rows_decay(patch: pytest.MonkeyPatch) -> None:
    def decay_the_rest(optimizer: cadam.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                absent = [i for i in range(len(param)) if i not in param.grad._indices()]
                param.data[absent] *= 1 - group["lr"] * group["weight_decay"]

    patch.setitem(_global_optimizer_post_hooks, -1, decay_the_rest)


@dataclass(frozen=True)
class Mutant:
    """A change that breaks the package, and the checks that must fail then."""

    apply: Break
    caught_by: tuple[Check, ...]


def on(name: str, decay: str = "none", **options: Any) -> Check:
    """Return the check against the oracle. It is the only check of rules other than Adam."""
    return partial(follows_the_oracle, name=name, decay=decay, **options)


def unusual(name: str) -> Check:
    """Return the check against the oracle with options so large that each has a visible effect."""
    return on(name, **{k: v for k, v in UNUSUAL.items() if k in FAMILY[name].rule.defaults})


ORACLE = on("CAdam")

MUTANTS = {
    "rescaled mask": Mutant(with_mask(rescaled), (elements_are_independent, ORACLE)),
    ">= for >": Mutant(
        with_mask(lambda alignment, step: torch.where(alignment < 0, 0, step)), (a_zero_gradient_moves_nothing, ORACLE)
    ),
    "m*m for m*g": Mutant(
        with_step(cadam.Adam, lambda moved, g, s, c, f: replace(moved, momentum=moved.momentum**2 * f.sign(g))),
        (disagreement_holds, ORACLE),
    ),
    "masked moments": Mutant(with_step(cadam.Adam, masked_moments), (moments_follow_every_gradient, ORACLE)),
    "modified gradient": Mutant(with_rule(cadam.Adam, modified_gradient), (moments_follow_every_gradient, ORACLE)),
    "eps inside the root": Mutant(with_step(cadam.Adam, eps_inside), (eps_is_outside_the_root, ORACLE)),
    "mask from the old m": Mutant(
        with_step(cadam.Adam, lambda moved, g, s, c, f: replace(moved, momentum=s.exp_avg)),
        (the_mask_sees_the_new_momentum, ORACLE),
    ),
    "mask by the product in fp16": Mutant(with_step(cadam.Adam, half_product), (small_gradients_move_half_weights,)),
    "no mask": Mutant(with_mask(lambda alignment, step: step), (disagreement_holds, ORACLE)),
    "mask hides NaN": Mutant(
        with_mask(lambda alignment, step: torch.where(alignment > 0, step, 0)), (a_broken_gradient_shows,)
    ),
    "mask before L2": Mutant(with_update(MaskBeforeL2), (l2_takes_part_in_the_mask, on("CAdam", "l2"))),
    "mask before maximize": Mutant(with_update(MaskBeforeMaximize), (maximising_climbs,)),
    "bias correction of the next step": Mutant(with_rule(cadam.Adam, next_step), (the_first_step_is_lr, ORACLE)),
    "decay waits with the step": Mutant(
        with_update(DecayWaits), (waiting_elements_decay, on("CAdamW", "decoupled"), on("CSGDM", "decoupled"))
    ),
    "decay without lr": Mutant(
        with_update(DecayWithoutLr), (waiting_elements_decay, on("CAdamW", "decoupled"), on("Lion", "decoupled"))
    ),
    "maximum of the raw second moment": Mutant(
        with_step(cadam.Adam, raw_maximum), (amsgrad_keeps_the_corrected_maximum, on("CAmsGrad"))
    ),
    "duplicates overwrite each other": Mutant(duplicates_overwrite, (duplicates_are_summed,)),
    "absent rows get a zero gradient": Mutant(absent_rows_get_zeros, (absent_rows_keep_their_bits,)),
    "decay on absent rows": Mutant(all_rows_decay, (absent_rows_keep_their_bits,)),
    "steps counted per row": Mutant(with_rule(cadam.Adam, step_per_row), (one_step_count_for_all_rows,)),
    "Lion tested with its moment": Mutant(
        with_step(cadam.Lion, lambda moved, g, s, c, f: replace(moved, momentum=moved.state["exp_avg"])),
        (lion_tests_its_interpolant, on("CLion")),
    ),
    "Lion keeps its interpolant": Mutant(
        with_step(cadam.Lion, lambda moved, g, s, c, f: replace(moved, state={"exp_avg": moved.momentum})),
        (on("CLion"), on("Lion")),
    ),
    "Yogi starts at zero": Mutant(
        with_rule(cadam.Yogi, lambda rule: replace(rule, state=lambda o: {"exp_avg": 0.0, "exp_avg_sq": 0.0})),
        (on("CYogi"), on("Yogi")),
    ),
    "AdaBelief without eps in its variance": Mutant(
        with_step(
            cadam.AdaBelief,
            lambda moved, g, s, c, f: replace(
                moved, state={**moved.state, "exp_avg_var": moved.state["exp_avg_var"] - c.eps}
            ),
        ),
        (unusual("CAdaBelief"),),
    ),
    "RAdam adds eps after the correction": Mutant(
        with_rule(
            cadam.RAdam,
            lambda rule: replace(
                rule,
                coefficients=lambda t, o, f: rule.coefficients(
                    t, {**o, "eps": o["eps"] * math.sqrt(1 - o["betas"][1] ** t)}, f
                ),
            ),
        ),
        (unusual("CRAdam"),),
    ),
    "SGDM corrects its bias": Mutant(
        with_step(cadam.SGDM, lambda moved, g, s, c, f: replace(moved, step=moved.step / (1 - c.momentum))),
        (on("CSGDM"), on("SGDM")),
    ),
    "SGDM dampens the first gradient": Mutant(
        with_rule(
            cadam.SGDM,
            lambda rule: replace(rule, coefficients=lambda t, o, f: rule.coefficients(max(t, 2), o, f)),
        ),
        (on("CSGDM", dampening=0.4), on("SGDM", dampening=0.4)),
    ),
}


def title(check: Check) -> str:
    if isinstance(check, partial):
        return "-".join([check.func.__name__, *(str(v) for v in check.keywords.values())])
    return check.__name__


# Tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "engine", "layout"),
    [
        pytest.param(check, engine, layout, id=f"{title(check)}-{engine}-{layout}")
        for check in CHECKS
        for engine, layout in served()
        if layout in layouts(check)
    ],
)
def test_the_unchanged_optimizer_passes_every_check(check: Check, engine: str, layout: str) -> None:
    check(engine, layout)


@pytest.mark.parametrize(
    ("mutant", "check", "layout"),
    [
        pytest.param(mutant, check, layout, id=f"{mutant}: {title(check)}-{layout}")
        for mutant, broken in MUTANTS.items()
        for check in broken.caught_by
        for layout in layouts(check)
    ],
)
def test_the_mutant_is_caught(mutant: str, check: Check, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the mutant's checks fails. Without the mutant, tests above and in test_oracle.py pass them."""
    MUTANTS[mutant].apply(monkeypatch)
    with pytest.raises(AssertionError):
        check("eager", layout)


def test_every_check_catches_a_mutant() -> None:
    used = {check for mutant in MUTANTS.values() for check in mutant.caught_by}
    assert set(CHECKS) <= used, f"these catch nothing: {[title(c) for c in CHECKS if c not in used]}"
