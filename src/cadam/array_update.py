"""The coefficients of a step where its number is an array, as it is under jit.

In float32, ``1 - beta**t`` loses digits in the first steps: 1e-5 of it with beta 0.999, enough for RAdam to start
adapting one step too early. So where the options are plain numbers, the first steps are looked up in a table that is
computed on the host, in float64. Later steps, and options that are arrays themselves, take the power as an
exponential, whose distance from 1 does not cancel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .numpy_functions import OnHost
from .rules import Options, Rule
from .rules.update import Update

EARLY = 1024
"""How many steps are in the table."""


class Arrays:
    """The functions that a rule may call, on arrays."""

    sign = staticmethod(jnp.sign)

    @staticmethod
    def sqrt(x: Any) -> Any:
        return jnp.sqrt(_plain(x))

    @staticmethod
    def square(x: Any) -> Any:
        return x * x

    @staticmethod
    def maximum(x: Any, y: Any) -> Any:
        return jnp.maximum(_plain(x), _plain(y))

    @staticmethod
    def positive(x: Any) -> Flag:
        return Flag(x > 0)

    @staticmethod
    def hold(alignment: Any, step: Any) -> Any:
        """The step, but zero where the alignment is not positive. A NaN is no reason to hold: it must show."""
        return jnp.where(alignment <= 0, 0.0, step)


def of_step(update: Update, count: Any, options: Options) -> dict[str, Any]:
    """Every scalar that step `count` (an integer array, from 1) needs, with -1 as the learning rate."""
    c = {name: _plain(value) for name, value in _of_step(update, count, {**options, "lr": -1.0}).items()}
    # Behind the barrier they are computed once, not in the loop over the elements. Plain numbers stay plain.
    arrays = jax.lax.optimization_barrier({name: value for name, value in c.items() if is_array(value)})
    return {**c, **arrays}


def _of_step(update: Update, count: Any, o: Options) -> dict[str, Any]:
    if jax.config.jax_enable_x64:
        return update.coefficients(count.astype(jnp.float64), o, Arrays)
    late = update.coefficients(Count(count.astype(jnp.float32)), o, Arrays)
    if any(is_array(value) for value in jax.tree.leaves(o)):
        return late
    early = update.coefficients(np.arange(1, EARLY + 1, dtype=np.float64), o, OnHost)

    def chosen(name: str) -> Any:
        table = early[name]
        if not isinstance(table, np.ndarray):
            return table  # the same number at every step
        return jnp.where(
            count <= EARLY, jnp.asarray(table, jnp.float32)[jnp.minimum(count, EARLY) - 1], _plain(late[name])
        )

    return {name: chosen(name) for name in early}


def check_rule(rule: Any) -> None:
    """Raise TypeError for what is no rule, such as the name of one."""
    if not isinstance(rule, Rule):
        raise TypeError(f"a rule is needed, such as cadam.rules.RULES['adam'], got {rule!r}")


def count_true(aligned: jax.Array) -> jax.Array:
    """How many are true. Rows of 32 are summed as bytes first: XLA sums a long axis on the CPU ten times slower."""
    whole = jnp.shape(aligned)[-1] // 32 * 32 if jnp.ndim(aligned) else 0
    if not whole:
        return jnp.sum(aligned, dtype=jnp.uint32)
    rows = aligned[..., :whole].reshape(*aligned.shape[:-1], whole // 32, 32).sum(-1, dtype=jnp.uint8)
    return jnp.sum(rows, dtype=jnp.uint32) + jnp.sum(aligned[..., whole:], dtype=jnp.uint32)


def is_array(value: Any) -> bool:
    """Is its number unknown while a function is traced?"""
    return isinstance(value, (jax.Array, np.ndarray))


def _plain(value: Any) -> Any:
    """An array or a number of Python's, whose dtype gives way to that of the elements."""
    if isinstance(value, Scalar):
        return value.value()
    return value.item() if isinstance(value, np.generic) else value


class Scalar:
    """A number of which one operation can be done better than on its `value`, an array; all others are done on that."""

    def value(self) -> Any:
        raise NotImplementedError


def _operation(name: str) -> Callable[[Scalar, Any], Any]:
    swapped = name.startswith("r")
    operate = getattr(operator, name.removeprefix("r"))

    def run(self: Scalar, other: Any) -> Any:
        x, y = self.value(), other.value() if isinstance(other, Scalar) else other
        return operate(y, x) if swapped else operate(x, y)

    return run


for _name in ("add", "sub", "mul", "truediv", "pow", "gt", "ge", "lt", "le"):
    setattr(Scalar, f"__{_name}__", _operation(_name))
for _name in ("radd", "rsub", "rmul", "rtruediv", "rpow"):
    setattr(Scalar, f"__{_name}__", _operation(_name))


class Count(Scalar):
    """The number t of a step; ``beta**t`` is a `Power`."""

    def __init__(self, t: Any) -> None:
        self.t = t

    def value(self) -> Any:
        return self.t

    def __rpow__(self, beta: Any) -> Power:
        if is_array(beta):
            return Power(self.t * jnp.log1p(beta - 1))
        return Power(self.t * (math.log(beta) if beta > 0 else -math.inf))


class Power(Scalar):
    """exp(x), whose distance from 1 keeps its digits."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def value(self) -> Any:
        return jnp.exp(self.x)

    def __rsub__(self, other: Any) -> Any:
        return (other - 1) - jnp.expm1(self.x)


class Flag(Scalar):
    """1 or 0. XLA would compile ``eps + (1 - flag)`` to ``(eps + 1) - flag``, where a small eps is lost."""

    def __init__(self, is_set: Any) -> None:
        self.is_set = is_set

    def value(self) -> Any:
        return jnp.where(self.is_set, 1.0, 0.0)

    def __rsub__(self, other: Any) -> Any:
        return jnp.where(self.is_set, other - 1.0, other)
