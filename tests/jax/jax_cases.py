"""Shared code for the tests of the JAX optimizers: all optimizers, their oracles, and gradients for 200 steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # the tests ignore other devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cadam.jax
from cadam.rules import RULES
from tests.optim.oracle import Oracle

STEPS, LR, WEIGHT_DECAY = 200, 1e-3, 0.1
# The smallest distance from a tie of any decision of the oracle; see test_oracle.py.
CLEAR = 1e-5

FIXED: dict[str, dict[str, Any]] = {"amsgrad": {"amsgrad": True}}
RULE_OF = {**{name: name for name in RULES}, "adamw": "adam", "amsgrad": "adam"}
NAMES = [c + name for name in RULE_OF for c in ("", "c")]
# Every rule with and without confidence. The other optimizers are these rules with another option.
OF_RULES = [c + name for name in RULES for c in ("", "c")]
# Unusual values of the options, by their names in the oracle and in the rules.
UNUSUAL: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 0.01, "initial_accumulator": 0.1, "momentum": 0.7}


def rule_of(name: str) -> str:
    return RULE_OF[name] if name in RULE_OF else RULE_OF[name.removeprefix("c")]


def is_confident(name: str) -> bool:
    return name not in RULE_OF


def is_decoupled(name: str) -> bool:
    return name.endswith(("adamw", "lion"))


def optimizer(name: str, options: dict[str, Any], decay: str = "none") -> optax.GradientTransformationExtraArgs:
    """Create an optimizer by the name of its function, with options by their names in the rules."""
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
    """Yield every optimizer with defaults, with unusual values, and with each switch of its rule, each with a decay."""
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
    """The parameter, buffers and counters of an oracle after each of its steps."""

    def __init__(self, name: str, options: dict[str, Any], decay: str, seed: int, steps: int, shape: Any) -> None:
        rng = np.random.default_rng(seed)
        self.start = rng.uniform(-1, 1, shape).astype(np.float32)
        # Multiples of 1/16 in [-1, 1], some of them zero, which are exact in every precision.
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
    """Return the first random run in which no decision was close to a tie."""
    return _followed(name, tuple((options or {}).items()), decay, steps, tuple(shape))


@cache
def _followed(name: str, options: Any, decay: str, steps: int, shape: Any) -> Followed:
    for seed in range(200):
        run = Followed(name, dict(options), decay, seed, steps, shape)
        if run.oracle.clear > CLEAR:
            return run
    raise AssertionError(f"no run of {name} is clear of ties")


def trained(tx: Any, params: Any, grads: Any, *, jit: bool = True) -> tuple[Any, Any]:
    """Return parameters and state after a step with each of `grads`, a tree of stacked gradients."""

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
