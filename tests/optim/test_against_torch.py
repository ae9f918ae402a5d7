"""Without confidence, the family computes what torch.optim and pytorch_optimizer compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import Tensor

import cadam
from tests.engines.engines_under_test import DENSE, ENGINES, ROWS, served
from tests.optim.family import buffers, parameter, sparse

STEPS = 50
DENSE_ENGINES = [name for name, _ in served((DENSE,))]
ROWS_ENGINES = [name for name, _ in served((ROWS,))]
Case = tuple[type[cadam.Optimizer], dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]


def named(cases: Sequence[Case]) -> list[Any]:
    return [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in cases]


def same(ours: type[cadam.Optimizer], theirs: type[torch.optim.Optimizer], *options: dict[str, Any]) -> list[Case]:
    """Return cases in which both optimizers take the same options."""
    return [(ours, o, theirs, o) for o in options]


def decoupled(ours: type[cadam.Optimizer], theirs: type[torch.optim.Optimizer], *options: dict[str, Any]) -> list[Case]:
    """Return cases of pytorch_optimizer, whose name for `decoupled_weight_decay` is `weight_decouple`."""
    renamed = {"decoupled_weight_decay": "weight_decouple"}
    theirs_off = {"weight_decouple": False, "foreach": False}
    return [(ours, o, theirs, {**theirs_off, **{renamed.get(k, k): v for k, v in o.items()}}) for o in options]


TORCH = [
    *same(
        cadam.Adam,
        torch.optim.Adam,
        {},
        {"lr": 0.02, "betas": (0.7, 0.95), "eps": 0.01},
        {"lr": 0.02, "betas": (0.0, 0.9)},
        {"lr": 0.02, "weight_decay": 0.1},
        {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"lr": 0.02, "weight_decay": 0.1, "maximize": True},
    ),
    *same(
        cadam.AdamW,
        torch.optim.AdamW,
        {},
        {"lr": 0.02, "weight_decay": 0.1, "eps": 0.01},
        {"lr": 0.02, "weight_decay": 0.1, "maximize": True},
        {"lr": 0.02, "weight_decay": 0.0},
    ),
    *same(
        cadam.RAdam,
        torch.optim.RAdam,
        {},
        {"lr": 0.02, "betas": (0.7, 0.95), "eps": 0.01},
        {"lr": 0.02, "betas": (0.9, 0.6)},  # with this beta2, RAdam never divides by the second moment
        {"lr": 0.02, "weight_decay": 0.1},
        {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"lr": 0.02, "weight_decay": 0.1, "maximize": True},
    ),
    *same(
        cadam.SGDM,
        torch.optim.SGD,
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.0},
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.4},
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.0, "nesterov": True},
        {"lr": 0.02, "momentum": 0.0, "dampening": 0.0},
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1},
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True},
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    ),
]
LIBRARY = [
    *decoupled(
        cadam.AdaBelief,
        pytorch_optimizer.AdaBelief,
        {"lr": 0.02},
        {"lr": 0.02, "betas": (0.7, 0.95), "eps": 0.01},
        {"lr": 0.02, "weight_decay": 0.1},
        {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ),
    *decoupled(
        cadam.Lion,
        pytorch_optimizer.Lion,
        {"lr": 0.02, "decoupled_weight_decay": True},
        {"lr": 0.02, "betas": (0.7, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": False},
        {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ),
    *decoupled(
        cadam.Yogi,
        pytorch_optimizer.Yogi,
        {},
        {"lr": 0.02, "betas": (0.7, 0.95), "initial_accumulator": 0.1, "eps": 0.01},
        {"lr": 0.02, "weight_decay": 0.1},
        {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ),
]


def starts() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal((3, 4)), rng.standard_normal(())]


def walk(
    optimizer: torch.optim.Optimizer, params: list[Tensor], to_grad: Callable[[Tensor, np.ndarray], Tensor]
) -> None:
    """Take 50 steps with the gradients that all optimizers get, some of them zero."""
    rng = np.random.default_rng(2)
    for _ in range(STEPS):
        for param in params:
            values = rng.standard_normal(tuple(param.shape)) * (rng.random(tuple(param.shape)) > 0.1)
            param.grad = to_grad(param, values)
        optimizer.step()


def dense(param: Tensor, values: np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=param.dtype)


def every_other_row(param: Tensor, values: np.ndarray) -> Tensor:
    """Return a sparse gradient of some rows, the first of them in two parts."""
    rows = [i for i in range(len(values)) if values[i].sum() > 0] or [0]
    ids = [(i,) for i in [*rows, rows[0]]]
    return sparse(ids, np.stack([values[i] for (i,) in ids]), param)


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("engine", DENSE_ENGINES)
@pytest.mark.parametrize(("ours", "options", "theirs", "their_options"), named(TORCH + LIBRARY))
def test_equal(
    ours: type[cadam.Optimizer],
    options: dict[str, Any],
    theirs: type[torch.optim.Optimizer],
    their_options: dict[str, Any],
    engine: str,
) -> None:
    """Compare parameters and the buffers of the same names after 50 steps."""
    mine, other = [[parameter(start) for start in starts()] for _ in range(2)]
    optimizer = ours(mine, **options, **ENGINES[engine].options)
    reference = theirs(other, **their_options)
    if theirs is pytorch_optimizer.Yogi:  # It starts exp_avg at the initial accumulator too.
        accumulator = reference.param_groups[0]["initial_accumulator"]
        for param in other:
            moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.full_like(param, accumulator)}
            reference.state[param] = {name: moment.detach() for name, moment in moments.items()}
    walk(optimizer, mine, dense)
    walk(reference, other, dense)
    assert_equal(mine, other)
    for a, b in zip(mine, other, strict=True):
        moments = {k: v for k, v in buffers(reference, b).items() if v is not None}
        assert set(buffers(optimizer, a)) == set(moments)
        assert_equal(list(buffers(optimizer, a).values()), [moments[name] for name in buffers(optimizer, a)])


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.7, 0.95)])
@pytest.mark.parametrize("engine", ROWS_ENGINES)
def test_adam_on_rows_is_sparse_adam(engine: str, betas: tuple[float, float], maximize: bool) -> None:
    """SparseAdam adds eps before the bias correction; eps is too small here to make a difference."""
    options: dict[str, Any] = {"lr": 0.02, "betas": betas, "eps": 1e-30, "maximize": maximize}
    start, *_ = starts()
    mine, other = [parameter(start)], [parameter(start)]
    ours, theirs = cadam.Adam(mine, **options, **ENGINES[engine].options), torch.optim.SparseAdam(other, **options)
    walk(ours, mine, every_other_row)
    walk(theirs, other, every_other_row)
    assert_equal(mine, other)
    assert_equal(list(buffers(ours, mine[0]).values()), list(buffers(theirs, other[0]).values()))


@pytest.mark.parametrize("engine", ROWS_ENGINES)
def test_sparse_adam_adds_eps_before_the_bias_correction(engine: str) -> None:
    """In the first step, eps in SparseAdam has the effect of eps / sqrt(1 - beta2) in cadam."""
    (start, *_), grad, eps = starts(), np.full((1, 4), 0.5), 0.1

    def after(optimizer: Callable[..., torch.optim.Optimizer], eps: float) -> Tensor:
        param = parameter(start)
        param.grad = sparse([(1,)], grad, param)
        optimizer([param], lr=0.02, eps=eps).step()
        return param

    ours = partial(cadam.Adam, **ENGINES[engine].options)
    theirs = after(torch.optim.SparseAdam, eps)
    assert not torch.allclose(after(ours, eps), theirs, rtol=1e-3)
    assert_equal([after(ours, eps / math.sqrt(1 - 0.999))], [theirs])


@pytest.mark.parametrize("engine", DENSE_ENGINES)
def test_sgdm_is_sgd_with_a_smaller_learning_rate(engine: str) -> None:
    """The moving average of the paper is always 1 - momentum times the sum of torch."""
    mine, other = [[parameter(start) for start in starts()] for _ in range(2)]
    walk(cadam.SGDM(mine, lr=0.2, momentum=0.9, **ENGINES[engine].options), mine, dense)
    walk(torch.optim.SGD(other, lr=0.2 * (1 - 0.9), momentum=0.9), other, dense)
    assert_equal(mine, other)


@pytest.mark.parametrize("engine", DENSE_ENGINES)
def test_amsgrad_takes_the_maximum_after_the_correction_torch_before(engine: str) -> None:
    """Gradients 1 and 0.1, b2 = 0.99: vhat is 1, then 0.01/0.0199. CAmsGrad keeps 1; torch corrects its raw 0.01."""
    grads, options = (1.0, 0.1), {"lr": 1.0, "betas": (0.0, 0.99), "eps": 0.0, "amsgrad": True}

    def second_step(optimizer: Callable[..., torch.optim.Optimizer], **more: Any) -> tuple[float, float]:
        param = parameter([0.0])
        opt = optimizer([param], **options, **more)
        for grad in grads:
            before = param.item()
            param.grad = torch.full_like(param, grad)
            opt.step()
        return before - param.item(), opt.state[param]["max_exp_avg_sq"].item()

    assert second_step(cadam.Adam, **ENGINES[engine].options) == pytest.approx((0.1 / math.sqrt(1.0), 1.0))
    assert second_step(torch.optim.Adam) == pytest.approx((0.1 / math.sqrt(0.01 / 0.0199), 0.01))


@pytest.mark.parametrize("engine", DENSE_ENGINES)
def test_amsgrad_equals_torch_while_the_corrected_second_moment_grows(engine: str) -> None:
    """While it grows, both maxima are the newest second moment with its own bias correction."""
    mine, other = parameter(starts()[0]), parameter(starts()[0])
    optimizers = [
        cadam.AmsGrad([mine], lr=0.02, **ENGINES[engine].options),
        torch.optim.Adam([other], lr=0.02, amsgrad=True),
    ]
    for t in range(STEPS):
        for param, optimizer in zip((mine, other), optimizers, strict=True):
            param.grad = torch.full_like(param, 1.1**t) * torch.linspace(-1, 1, 12, dtype=param.dtype).reshape(3, 4)
            optimizer.step()
    assert_equal([mine], [other])
