"""Recording of an update as a list of operations.

Input: an `Update` (a rule with weight decay and mask around it) and the names of its buffers and coefficients.
`record` calls the update once with symbols instead of numbers; each operation on a symbol is appended to a `Trace`.
Output: a `Program`, which engines print as source or run over lists of tensors. For SGD with momentum it begins::

    t0 = mul(g, unscale)
    t1 = scaled(p, l2)
    t2 = add(t0, t1)                    # the gradient with L2 weight decay
    t3 = mul(momentum_buffer, momentum)
    t4 = mul(t2, weight)
    t5 = add(t3, t4)                    # the new momentum
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..rules.update import Update

ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "reciprocal": lambda x: 1 / x,
}
"""Kinds of operations that are operators of Python. The other kinds are functions of a framework."""


@dataclass(frozen=True, eq=False)
class Value:
    """A symbol: an element (parameter, gradient, buffer), a coefficient, or the result of an operation.

    Attributes:
        trace: The trace that records operations on this symbol.
        name: Name of the input, or ``t0``, ``t1``, ... for results.
        scalar: Whether it is a coefficient, or computed from coefficients only.
    """

    trace: Trace
    name: str
    scalar: bool = False

    def __add__(self, other: Any) -> Value:
        return self.trace.record("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return self.trace.record("add", self, other)

    def __sub__(self, other: Any) -> Value:
        return self.trace.record("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return self.trace.record("add", self.trace.record("neg", self), other)

    def __mul__(self, other: Any) -> Value:
        return self.trace.record("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return self.trace.record("mul", self, other)

    def __truediv__(self, other: Any) -> Value:
        return self.trace.record("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return self.trace.record("mul", self.trace.record("reciprocal", self), other)

    def __pow__(self, other: Any) -> Value:
        return self.trace.record("pow", self, other)

    def __rpow__(self, other: Any) -> Value:
        return self.trace.record("pow", other, self)

    def __neg__(self) -> Value:
        return self.trace.record("neg", self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"a rule's update must not branch on a value (here {self.name!r}): use f.maximum, f.sign, "
            "or a coefficient that is 0 or 1"
        )


@dataclass(frozen=True)
class Op:
    """The operation ``out = kind(*args)``. An argument is a `Value` or a number."""

    kind: str
    out: Value
    args: tuple[Any, ...]


@dataclass(eq=False)
class Trace:
    """A recorder of operations. It is also the function set `f` that a rule calls while it is recorded.

    Attributes:
        ops: The operations recorded so far, in order.
        row_second_moments: Whether second moments have one value per row, so that `square` is the mean over the row.
        inputs: Names of scalars that are tensors on the device, in the trace of a rule's coefficients.
    """

    ops: list[Op] = field(default_factory=list)
    row_second_moments: bool = False
    inputs: list[str] = field(default_factory=list)

    def input(self) -> Value:
        """Add a scalar input and return its symbol."""
        self.inputs.append(f"x{len(self.inputs)}")
        return Value(self, self.inputs[-1], scalar=True)

    def record(self, kind: str, *args: Any) -> Value:
        """Append an operation and return the symbol of its result."""
        for arg in args:
            if not isinstance(arg, (Value, int, float)):
                raise TypeError(f"a rule's update may combine its values with numbers only, not {type(arg).__name__}")
        # The foreach operations need a list of tensors as their first argument, so the element is put before a scalar.
        if len(args) == 2 and is_scalar(args[0]) and not is_scalar(args[1]):
            if kind in ("add", "mul", "maximum"):
                args = (args[1], args[0])
            elif kind == "sub":
                return self.record("add", self.record("neg", args[1]), args[0])
            elif kind == "div":
                return self.record("mul", self.record("reciprocal", args[1]), args[0])
        out = Value(self, f"t{len(self.ops)}", all(is_scalar(a) for a in args))
        self.ops.append(Op(kind, out, args))
        return out

    def sqrt(self, x: Value) -> Value:
        """Record the square root of x."""
        return self.record("sqrt", x)

    def square(self, x: Value) -> Value:
        """Record the square of x, or the mean square of its row."""
        return self.record("mean_square", x) if self.row_second_moments else self.record("mul", x, x)

    def sign(self, x: Value) -> Value:
        """Record the sign of x."""
        return self.record("sign", x)

    def maximum(self, x: Value, y: Any) -> Value:
        """Record the larger of x and y."""
        return self.record("maximum", x, y)

    def positive(self, x: Value) -> Value:
        """Record 1 where x > 0, else 0."""
        return self.record("positive", x)

    def scaled(self, x: Value, factor: Value) -> Value:
        """Record x times the factor, which is zero where the factor is zero even if x is infinite or NaN."""
        return self.record("scaled", x, factor)

    def mask(self, alignment: Value, step: Value) -> Value:
        """Record the step, or zero where the alignment is not positive."""
        return self.record("mask", alignment, step)


def is_scalar(operand: Any) -> bool:
    """Whether an operand is a number or a scalar symbol, not an element."""
    return not isinstance(operand, Value) or operand.scalar


@dataclass(frozen=True)
class Program:
    """A recorded update.

    Attributes:
        ops: The operations, in order.
        param: The symbol of the new parameter.
        state: The symbol of the new value of each buffer, by name.
        alignment: The symbol of the alignment, or None if it is not computed.
    """

    ops: tuple[Op, ...]
    param: Value
    state: dict[str, Value]
    alignment: Value | None

    def needed_for(self, *values: Value) -> list[Op]:
        """Return the operations from which these values are computed, in order."""
        names, ops = {value.name for value in values}, []
        for op in reversed(self.ops):
            if op.out.name in names:
                names |= {arg.name for arg in op.args if isinstance(arg, Value)}
                ops.append(op)
        return ops[::-1]


@cache
def record(
    update: Update, buffers: tuple[str, ...], coefficients: tuple[str, ...], row_second_moments: bool = False
) -> Program:
    """Record an update by calling it once with symbols.

    Args:
        update: The update.
        buffers: Names of its buffers, which become the names of their symbols. The parameter is ``p``, the gradient
            ``g``.
        coefficients: Names of its coefficients, which become the names of scalar symbols.
        row_second_moments: Whether second moments have one value per row.

    Returns:
        The recorded program.

    Raises:
        ValueError: If the rule does not return a new value for each buffer.
    """
    trace = Trace(row_second_moments=row_second_moments)
    result = update(
        Value(trace, "p"),
        Value(trace, "g"),
        {name: Value(trace, name) for name in buffers},
        {name: Value(trace, name, scalar=True) for name in coefficients},
        trace,
    )
    missing = set(buffers) - set(result.state)
    if missing:
        raise ValueError(f"the rule {update.rule.name!r} returns no new value for its buffers {sorted(missing)}")
    return Program(tuple(trace.ops), result.param, result.state, result.alignment)
