"""Rules on JAX arrays, for `cadam.jax` and for `cadam.keras` on its JAX backend.

This module needs JAX, but neither optax nor torch.

Under `jax.jit` the step number is an array, and the coefficients of a step must be computed from it. In float32,
``1 - beta**t`` loses digits in the first steps (a relative error of 1e-5 for beta = 0.999), enough for RAdam to switch
to its adaptive step one step too early. So if all options are plain numbers, the coefficients of the first steps are
looked up in a table that numpy computes in float64. For later steps, and if an option is an array, ``beta**t`` is
computed as ``exp(t * log(beta))``, and ``1 - beta**t`` with `expm1`, which does not cancel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .numpy_functions import NumpyFunctions
from .rules import Options, Rule
from .rules.update import Update

TABLE_STEPS = 1024
"""Number of first steps whose coefficients are computed in float64 and looked up in a table."""


class JaxFunctions:
    """The functions that a rule may call, on JAX arrays."""

    sign = staticmethod(jnp.sign)

    @staticmethod
    def sqrt(x: Any) -> Any:
        """Return the square root of x."""
        return jnp.sqrt(_array_or_number(x))

    @staticmethod
    def square(x: Any) -> Any:
        """Return the square of x."""
        return x * x

    @staticmethod
    def maximum(x: Any, y: Any) -> Any:
        """Return the larger of x and y."""
        return jnp.maximum(_array_or_number(x), _array_or_number(y))

    @staticmethod
    def positive(x: Any) -> Flag:
        """Return 1 where x > 0, else 0."""
        return Flag(x > 0)

    @staticmethod
    def mask(alignment: Any, step: Any) -> Any:
        """Return the step, or zero where the alignment is not positive. A NaN is not masked, so that it shows."""
        return jnp.where(alignment <= 0, 0.0, step)


class CountedMask:
    """The functions of a table whose confidence mask begins after some updates of a row."""

    def __init__(self, is_masked: Any) -> None:
        self._is_masked = is_masked

    def __getattr__(self, name: str) -> Any:
        return getattr(JaxFunctions, name)

    def mask(self, alignment: Any, step: Any) -> Any:
        """Return the step, with zeros in masked rows where the alignment is not positive."""
        return jnp.where(self._is_masked, JaxFunctions.mask(alignment, step), step)


def aging_coefficients(rule: Rule, missed: Any, options: Options) -> dict[str, Any]:
    """Return the scalars of `Rule.age`, by name.

    Args:
        rule: The rule.
        missed: The number of steps that each row has missed; an integer array.
        options: Options of the rule; numbers or arrays.
    """
    is_double = jax.config.jax_enable_x64
    steps = missed.astype(jnp.float64) if is_double else Count(missed.astype(jnp.float32))
    return {name: _array_or_number(value) for name, value in rule.aging(steps, options, JaxFunctions).items()}


def step_coefficients(update: Update, count: Any, options: Options) -> dict[str, Any]:
    """Return every scalar that one step needs, by name, for a learning rate of -1.

    Args:
        update: The update.
        count: Number of the step, counted from 1; an integer array.
        options: Options of the update; numbers or arrays.
    """
    o = {**options, "lr": -1.0}
    c = {name: _array_or_number(value) for name, value in _coefficients(update, count, o).items()}
    # The barrier makes XLA compute the scalars once instead of inside the loop over the elements.
    arrays = jax.lax.optimization_barrier({name: value for name, value in c.items() if is_array(value)})
    return {**c, **arrays}


def _coefficients(update: Update, count: Any, o: Options) -> dict[str, Any]:
    if jax.config.jax_enable_x64:
        return update.coefficients(count.astype(jnp.float64), o, JaxFunctions)
    computed = update.coefficients(Count(count.astype(jnp.float32)), o, JaxFunctions)
    if any(is_array(value) for value in jax.tree.leaves(o)):
        return computed
    tables = update.coefficients(np.arange(1, TABLE_STEPS + 1, dtype=np.float64), o, NumpyFunctions)

    def look_up(name: str) -> Any:
        table = tables[name]
        if not isinstance(table, np.ndarray):
            return table  # the coefficient does not depend on the step
        early = jnp.asarray(table, jnp.float32)[jnp.minimum(count, TABLE_STEPS) - 1]
        return jnp.where(count <= TABLE_STEPS, early, _array_or_number(computed[name]))

    return {name: look_up(name) for name in tables}


def count_true(values: jax.Array) -> jax.Array:
    """Count the true values.

    Groups of 32 are summed as bytes first: on a CPU, XLA takes ten times as long to sum a long axis at once.
    """
    grouped = jnp.shape(values)[-1] // 32 * 32 if jnp.ndim(values) else 0
    if not grouped:
        return jnp.sum(values, dtype=jnp.uint32)
    sums = values[..., :grouped].reshape(*values.shape[:-1], grouped // 32, 32).sum(-1, dtype=jnp.uint8)
    return jnp.sum(sums, dtype=jnp.uint32) + jnp.sum(values[..., grouped:], dtype=jnp.uint32)


def is_array(value: Any) -> bool:
    """Whether the value is an array, whose number may be unknown while a function is traced."""
    return isinstance(value, (jax.Array, np.ndarray))


def _array_or_number(value: Any) -> Any:
    """Return an array, or a Python number, which does not change the dtype of the arrays it is combined with."""
    if isinstance(value, Scalar):
        return value.value()
    return value.item() if isinstance(value, np.generic) else value


class Scalar:
    """A number with one operation that subclasses compute more accurately; all others use the array `value()`."""

    def value(self) -> Any:
        """Return the number as an array."""
        raise NotImplementedError


def _operation(name: str) -> Callable[[Scalar, Any], Any]:
    """Return the method for an operator of Python, such as `add` or its reflected version `radd`."""
    is_reflected = name.startswith("r")
    operate = getattr(operator, name.removeprefix("r"))

    def run(self: Scalar, other: Any) -> Any:
        x, y = self.value(), other.value() if isinstance(other, Scalar) else other
        return operate(y, x) if is_reflected else operate(x, y)

    return run


for _name in ("add", "sub", "mul", "truediv", "pow", "gt", "ge", "lt", "le"):
    setattr(Scalar, f"__{_name}__", _operation(_name))
for _name in ("radd", "rsub", "rmul", "rtruediv", "rpow"):
    setattr(Scalar, f"__{_name}__", _operation(_name))


class Count(Scalar):
    """The number t of a step. ``beta**t`` is a `Power`."""

    def __init__(self, t: Any) -> None:
        self.t = t

    def value(self) -> Any:
        """Return t."""
        return self.t

    def __rpow__(self, beta: Any) -> Power:
        if is_array(beta):
            return Power(self.t * jnp.log1p(beta - 1))
        return Power(self.t * (math.log(beta) if beta > 0 else -math.inf))


class Power(Scalar):
    """The number exp(x). ``1 - exp(x)`` is computed as ``-expm1(x)``, which does not lose digits near 0."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def value(self) -> Any:
        """Return exp(x)."""
        return jnp.exp(self.x)

    def __rsub__(self, other: Any) -> Any:
        return (other - 1) - jnp.expm1(self.x)


class Flag(Scalar):
    """The number 1 or 0.

    Subtraction is a `where`: XLA would compile ``eps + (1 - flag)`` to ``(eps + 1) - flag``, which loses a small eps.
    """

    def __init__(self, is_set: Any) -> None:
        self.is_set = is_set

    def value(self) -> Any:
        """Return 1.0 or 0.0."""
        return jnp.where(self.is_set, 1.0, 0.0)

    def __rsub__(self, other: Any) -> Any:
        return jnp.where(self.is_set, other - 1.0, other)
