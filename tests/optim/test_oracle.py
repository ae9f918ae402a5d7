"""Every optimizer, engine and layout against the float64 oracle: parameters, buffers, steps and counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

import cadam
from cadam.rules import RULES
from tests.engines.engines_under_test import DENSE, ENGINES, PLAIN_ENGINES, ROWS, served
from tests.optim import oracle
from tests.optim.family import FAMILY, buffers, parameter, sparse
from tests.optim.oracle import Oracle

STEPS = 30
LR, WEIGHT_DECAY = 0.03, 0.1

# The tolerance relative to the largest element of a tensor. In float64, each of the 30 steps adds a few units in the
# last place. In float32, a unit is 6e-8; parameters and moments are rounded once per step, and 30 steps differ by at
# most 2e-6 if both precisions make the same decisions, see `CLEAR`.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6}

# Near a tie (momentum almost zero, or Yogi's v almost g^2), rounding to float32 may change a decision, after which the
# results differ for good. The float32 runs use data for which no decision of the oracle is closer to a tie than this,
# relative to the gradients; the error of float32 is about 1e-7. Gradients and their sums are exact in both.
CLEAR = 1e-5

# Values other than the defaults, so that every option has an effect on the result.
UNUSUAL: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 0.01, "initial_accumulator": 0.1, "momentum": 0.7}
SGDM_FORMS = (
    {"dampening": 0.0},
    {"dampening": 0.4},
    {"dampening": 0.0, "nesterov": True},
    {"momentum": 0.0, "dampening": 0.4},
)


def variants(cls: type[cadam.Optimizer]) -> Iterator[dict[str, Any]]:
    """Yield settings of the rule's own options: defaults, unusual values, and each of its switches."""
    rule = cls.rule
    unusual = {name: value for name, value in UNUSUAL.items() if name in rule.defaults}
    yield {}
    yield unusual
    yield from ({**unusual, **variant} for variant in rule.variants if not variant.keys() & cls.fixed.keys())
    if rule.name == "sgdm":
        yield from SGDM_FORMS


CASES = [
    pytest.param(name, options, decay, id=f"{name}-{','.join(f'{k}={v}' for k, v in options.items())}-{decay}")
    for name, cls in FAMILY.items()
    for options in variants(cls)
    for decay in oracle.DECAYS
    if not (decay == "l2" and cls.fixed.get("decoupled_weight_decay"))
]


def oracle_of(cls: type[cadam.Optimizer], param: np.ndarray, **options: Any) -> Oracle:
    fixed = {name: value for name, value in cls.fixed.items() if name != "decoupled_weight_decay"}
    return Oracle(cls.rule.name, param, confidence=cls.confidence, **{**options, **fixed})


def decaying(cls: type[cadam.Optimizer], decay: str) -> dict[str, Any]:
    """Return the constructor arguments for a kind of weight decay."""
    if decay == "none":
        return {"weight_decay": 0.0}
    return {"weight_decay": WEIGHT_DECAY, "decoupled_weight_decay": decay == "decoupled"}


def grads(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return multiples of 1/16 in [-1, 1], a tenth of them zero. They and their sums are exact in every precision."""
    return rng.integers(-16, 17, shape) / 16 * (rng.random(shape) > 0.1)


def plan_dense(seed: int) -> tuple[list[np.ndarray], list[list[Any]]]:
    """Return two parameters and their gradients. The second has none at every fifth step, so step counts differ."""
    rng = np.random.default_rng(seed)
    starts = [rng.standard_normal((2, 5)).astype(np.float32), rng.standard_normal(()).astype(np.float32)]
    return starts, [[grads(rng, (2, 5)), grads(rng, ()) if t % 5 != 2 else None] for t in range(STEPS)]


def plan_rows(seed: int) -> tuple[list[np.ndarray], list[list[Any]]]:
    """Return a table and some of its rows with duplicates for each step: once none, and never the last row."""
    rng = np.random.default_rng(seed)
    start = rng.standard_normal((7, 2)).astype(np.float32)
    steps = []
    for t in range(STEPS):
        ids = rng.integers(0, 6, 0 if t == 7 else 8)
        steps.append([([(int(i),) for i in ids], grads(rng, (len(ids), 2)))])
    return [start], steps


PLANS = {DENSE: plan_dense, ROWS: plan_rows}


def follow(oracles: list[Oracle], steps: list[list[Any]]) -> None:
    for step in steps:
        for one, grad in zip(oracles, step, strict=True):
            if isinstance(grad, tuple):
                one.step_rows(*grad)
            elif grad is not None:
                one.step(grad)


def run(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], steps: list[list[Any]]) -> None:
    for step in steps:
        for param, grad in zip(params, step, strict=True):
            if grad is None:
                param.grad = None
            elif isinstance(grad, tuple):
                ids, rows = grad
                param.grad = sparse(ids, rows, param)
            else:
                param.grad = torch.as_tensor(grad, dtype=param.dtype)
        optimizer.step()


def assert_agree(optimizer: Any, params: list[torch.Tensor], oracles: list[Oracle], tolerance: float) -> None:
    """Parameters, buffers, step counts and alignment counters equal those of the oracles."""
    ratios = optimizer.alignment().parameters.values()
    for param, one, ratio in zip(params, oracles, ratios, strict=True):
        state = buffers(optimizer, param)
        assert set(state) == set(one.state)
        assert float(optimizer.state[param]["step"]) == one.t
        for name, expected in [("param", one.param), *one.state.items()]:
            actual = (param if name == "param" else state[name]).detach().to(torch.float64).numpy()
            error = np.abs(actual - expected).max(initial=0.0)
            assert error <= tolerance * np.abs(expected).max(initial=1e-30), f"{name} is off by {error:.1e}"
        assert (ratio.aligned, ratio.touched, ratio.seen) == (one.aligned, one.touched, one.seen)


@lru_cache(maxsize=8)  # the engines of a case are tested one after the other
def followed(
    name: str, options: tuple[tuple[str, Any], ...], decay: str, layout: str
) -> tuple[list[np.ndarray], list[list[Any]], list[Oracle]]:
    """Return parameters, their gradients, and oracles that have followed them without a decision close to a tie."""
    weight_decay = 0.0 if decay == "none" else WEIGHT_DECAY
    for seed in range(20):
        starts, steps = PLANS[layout](seed)
        oracles = [oracle_of(FAMILY[name], s, decay=decay, weight_decay=weight_decay, **dict(options)) for s in starts]
        follow(oracles, steps)
        if min(one.clear for one in oracles) > CLEAR:
            return starts, steps, oracles
    pytest.fail("every run comes near a tie: choose other data")


def assert_agrees(
    name: str, options: dict[str, Any], decay: str, engine: str, layout: str, *, maximize: bool, dtypes: Iterable[Any]
) -> None:
    common = {**options, "lr": LR, "maximize": maximize}
    starts, steps, oracles = followed(name, tuple(common.items()), decay, layout)
    for dtype in dtypes:
        if not ENGINES[engine].serves(layout, dtype):
            continue
        params = [parameter(start, dtype) for start in starts]
        optimizer = FAMILY[name](params, **common, **decaying(FAMILY[name], decay), **ENGINES[engine].options)
        run(optimizer, params, steps)
        assert_agree(optimizer, params, oracles, TOLERANCE[dtype])


@pytest.mark.parametrize(("engine", "layout"), served())
@pytest.mark.parametrize(("name", "options", "decay"), CASES)
def test_agrees_with_the_oracle(name: str, options: dict[str, Any], decay: str, engine: str, layout: str) -> None:
    """All engines run in float64. Engines that keep scalars as plain numbers also run in float32."""
    dtypes = [torch.float64, torch.float32] if engine in PLAIN_ENGINES else [torch.float64]
    assert_agrees(name, options, decay, engine, layout, maximize=False, dtypes=dtypes)


@pytest.mark.parametrize(("engine", "layout"), served(plain=True))
@pytest.mark.parametrize(("name", "options", "decay"), CASES)
def test_agrees_with_the_oracle_uphill(
    name: str, options: dict[str, Any], decay: str, engine: str, layout: str
) -> None:
    assert_agrees(name, options, decay, engine, layout, maximize=True, dtypes=[torch.float64])


@pytest.mark.parametrize("engine", [engine for engine, _ in served((ROWS,), plain=True)])
@pytest.mark.parametrize("name", FAMILY)
def test_a_parameter_may_change_between_dense_and_sparse_gradients(name: str, engine: str) -> None:
    """Gradients are rows, single elements or whole tables in any order; each counts as one step."""
    cls, rng = FAMILY[name], np.random.default_rng(3)
    starts = [rng.standard_normal((5, 3)).astype(np.float32), rng.standard_normal(4).astype(np.float32)]
    steps: list[list[Any]] = []
    for t in range(STEPS):
        if t % 3 == 0:
            table: Any = grads(rng, (5, 3))
        elif t % 3 == 1:
            table = ([(int(i),) for i in rng.integers(0, 5, 6)], grads(rng, (6, 3)))
        else:  # as many sparse dimensions as the table has
            table = ([(int(i), int(j)) for i, j in rng.integers(0, 3, (6, 2))], grads(rng, (6,)))
        steps.append([table, grads(rng, (4,))])
    oracles = [oracle_of(cls, start, lr=LR) for start in starts]
    follow(oracles, steps)
    params = [parameter(start) for start in starts]
    optimizer = cls(params, lr=LR, weight_decay=0.0, **ENGINES[engine].options)
    run(optimizer, params, steps)
    assert_agree(optimizer, params, oracles, TOLERANCE[torch.float64])


@pytest.mark.parametrize("engine", [engine for engine, _ in served((DENSE,), plain=True)])
@pytest.mark.parametrize("name", FAMILY)
def test_options_may_change_between_steps(name: str, engine: str) -> None:
    """A learning rate or decay set in the group counts from the next step on, as lr schedulers rely on."""
    cls, rng = FAMILY[name], np.random.default_rng(4)
    start = rng.standard_normal(6).astype(np.float32)
    decoupled = bool(cls.fixed.get("decoupled_weight_decay", cls.rule.defaults.get("decoupled_weight_decay", False)))
    one = oracle_of(cls, start, decay="decoupled" if decoupled else "l2")
    param = parameter(start)
    optimizer = cls([param], weight_decay=0.0, **ENGINES[engine].options)
    for t in range(STEPS):
        lr, weight_decay, grad = 0.1 / (t + 1), 0.01 * (t // 10), grads(rng, (6,))
        one.options["lr"], one.weight_decay = lr, weight_decay
        optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)
        follow([one], [[grad]])
        run(optimizer, [param], [[grad]])
    assert_agree(optimizer, [param], [one], TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", FAMILY)
def test_differentiable_agrees_with_the_oracle(name: str) -> None:
    """Autograd can differentiate the step, and the result is the same."""
    cls, (starts, steps) = FAMILY[name], plan_dense(0)
    oracles = [oracle_of(cls, start, lr=LR) for start in starts]
    follow(oracles, steps)
    params = [parameter(start).detach() for start in starts]
    optimizer = cls(params, lr=LR, weight_decay=0.0, differentiable=True)
    run(optimizer, params, steps)
    assert_agree(optimizer, params, oracles, TOLERANCE[torch.float64])


@pytest.mark.parametrize(("engine", "layout"), served())
def test_the_requested_engine_runs(engine: str, layout: str) -> None:
    starts, steps = PLANS[layout](0)
    params = [parameter(start) for start in starts]
    optimizer = FAMILY["CAdam"](params, **ENGINES[engine].options)
    run(optimizer, params, steps[:1])
    assert {row.engine for row in optimizer.explain()} == {ENGINES[engine].runs[layout]}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_an_oracle_with_its_defaults(name: str) -> None:
    if name not in oracle.RULES:
        pytest.fail(
            f"the rule {name!r} has no oracle: write its mathematics for one float64 element as a function in "
            "tests/optim/oracle.py, from its definition and not from src/cadam, and add it to RULES there"
        )
    own = {k: v for k, v in RULES[name].defaults.items() if k not in ("weight_decay", "decoupled_weight_decay")}
    assert own == oracle.RULES[name].defaults, f"teach the options and defaults of {name!r} to tests/optim/oracle.py"
    plain = {option for option, value in own.items() if option not in UNUSUAL and type(value) in (int, float, tuple)}
    assert plain <= {"lr"}, f"give these options of {name!r} a value in UNUSUAL, so that their place matters"


def test_every_rule_is_in_the_catalogue_with_and_without_confidence() -> None:
    assert {(cls.rule.name, cls.confidence) for cls in FAMILY.values()} == {
        (r, c) for r in RULES for c in (True, False)
    }
    for name, cls in FAMILY.items():
        assert cls.confidence == (name.startswith("C")), name


def test_decay_by_default() -> None:
    """Only AdamW and CAdamW decay by default. Decay is L2 unless the name or the rule says otherwise."""
    groups = {name: cls([parameter(0.0)]).param_groups[0] for name, cls in FAMILY.items()}
    assert {name: group["weight_decay"] for name, group in groups.items() if group["weight_decay"]} == {
        "AdamW": 1e-2,
        "CAdamW": 1e-2,
    }
    decoupled = {name for name, cls in FAMILY.items() if cls.rule.defaults.get("decoupled_weight_decay")}
    assert {"Lion", "CLion"} <= decoupled
    assert {name for name, group in groups.items() if group["decoupled_weight_decay"]} == {
        "AdamW",
        "CAdamW",
        *decoupled,
    }
