"""What the tests of the JAX optimizers share: every optimizer, its oracle, and gradients for 200 steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # whatever else there is

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cadam.jax
from cadam.rules import RULES
from tests.optim.oracle import Oracle

STEPS, LR, WEIGHT_DECAY = 200, 1e-3, 0.1
# Near a tie float32 may decide otherwise than float64, rightly; see test_oracle.py.
CLEAR = 1e-5

FIXED: dict[str, dict[str, Any]] = {"amsgrad": {"amsgrad": True}}
RULE_OF = {**{name: name for name in RULES}, "adamw": "adam", "amsgrad": "adam"}
NAMES = [c + name for name in RULE_OF for c in ("", "c")]
# Every rule without confidence and with it; the others are the same rules with an option.
OF_RULES = [c + name for name in RULES for c in ("", "c")]
# The same options as the oracle and the rules call them, and as the functions of the family do.
UNUSUAL: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 0.01, "initial_accumulator": 0.1, "momentum": 0.7}


def rule_of(name: str) -> str:
    return RULE_OF[name] if name in RULE_OF else RULE_OF[name.removeprefix("c")]


def is_confident(name: str) -> bool:
    return name not in RULE_OF


def is_decoupled(name: str) -> bool:
    return name.endswith(("adamw", "lion"))


def optimizer(name: str, options: dict[str, Any], decay: str = "none") -> optax.GradientTransformationExtraArgs:
    """A function of the family by its name, with the options as rules call them."""
    given = dict(options)
    if "betas" in given:
        given["b1"], given["b2"] = given.pop("betas")
    if "initial_accumulator" in given:
        given["initial_accumulator_value"] = given.pop("initial_accumulator")
    if decay != "none" or name.endswith("adamw"):
        given["weight_decay"] = 0.0 if decay == "none" else WEIGHT_DECAY
    if decay != "none" and not name.endswith("adamw"):
        given["decoupled_weight_decay"] = decay == "decoupled"
    return getattr(cadam.jax, name)(LR, **given)


def variants() -> Iterator[Any]:
    """Every optimizer with its defaults, with unusual values, and with every switch of its rule; each with a decay."""
    for name in NAMES:
        rule = RULES[rule_of(name)]
        unusual = {k: v for k, v in UNUSUAL.items() if k in rule.defaults}
        fixed = FIXED.get(name.removeprefix("c") if is_confident(name) else name, {})
        switches = [{**unusual, **switch} for switch in rule.variants if not switch.keys() & fixed.keys()]
        for number, options in enumerate([{}, unusual, *switches]):
            decay = "none" if number == 0 else "decoupled" if is_decoupled(name) or number % 2 == 0 else "l2"
            shown = ",".join(f"{k}={v}" for k, v in options.items())
            yield pytest.param(name, options, decay, id=f"{name}-{shown}-{decay}")


class Followed:
    """An oracle after each of its steps."""

    def __init__(self, name: str, options: dict[str, Any], decay: str, seed: int, steps: int, shape: Any) -> None:
        rng = np.random.default_rng(seed)
        self.start = rng.uniform(-1, 1, shape).astype(np.float32)
        # Sixteenths in [-1, 1], some of them zero: exact in every precision.
        self.grads = rng.integers(-16, 17, (steps, *shape)) / 16 * (rng.random((steps, *shape)) > 0.1)
        weight_decay = 0.0 if decay == "none" else WEIGHT_DECAY
        fixed = FIXED.get(name.removeprefix("c") if is_confident(name) else name, {})
        self.oracle = Oracle(
            rule_of(name),
            self.start,
            confidence=is_confident(name),
            decay=decay,
            weight_decay=weight_decay,
            lr=LR,
            **{**options, **fixed},
        )
        before = 0
        for grad in self.grads:
            before = self.oracle.aligned
            self.oracle.step(grad)
        self.alignment = (self.oracle.aligned - before) / self.start.size
        self.param = self.oracle.param


def followed(
    name: str, options: dict[str, Any] | None = None, decay: str = "none", *, steps: int = STEPS, shape: Any = (2, 3)
) -> Followed:
    """The first of some random runs in which no decision was close to a tie."""
    return _followed(name, tuple((options or {}).items()), decay, steps, tuple(shape))


@cache
def _followed(name: str, options: Any, decay: str, steps: int, shape: Any) -> Followed:
    for seed in range(200):
        run = Followed(name, dict(options), decay, seed, steps, shape)
        if run.oracle.clear > CLEAR:
            return run
    raise AssertionError(f"no run of {name} is clear of ties")


def trained(tx: Any, params: Any, grads: Any, *, jit: bool = True) -> tuple[Any, Any]:
    """Parameters and state after a step with each of `grads`, a tree of stacked gradients."""

    def step(carry: Any, grad: Any) -> Any:
        params, state = carry
        updates, state = tx.update(grad, state, params)
        return (optax.apply_updates(params, updates), state), None

    carry = (params, tx.init(params))
    if jit:
        return jax.jit(lambda carry, grads: jax.lax.scan(step, carry, grads)[0])(carry, grads)
    for t in range(len(jax.tree.leaves(grads)[0])):
        carry, _ = step(carry, jax.tree.map(lambda g, t=t: g[t], grads))
    return carry


def arrays(run: Followed, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(run.start, dtype), jnp.asarray(run.grads, dtype)


def alignment(state: Any) -> float:
    return float(optax.tree_utils.tree_get(state, "alignment"))


def largest_difference(actual: Any, expected: Sequence[float] | np.ndarray) -> float:
    return float(np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64)).max())
