"""An update as a list of operations, recorded by running it once on symbols.

Engines that do not call tensors one operation at a time read this list: foreach runs it over lists of
tensors, compiled engines print it as source.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
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
"""The operations that Python's operators do, on whatever has them; the others are those of a framework."""


@dataclass(frozen=True, eq=False)
class Value:
    """A symbol: an element (parameter, gradient, buffer), a coefficient, or the result of an operation."""

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
    """``out = kind(*args)``; an argument is a value or a number."""

    kind: str
    out: Value
    args: tuple[Any, ...]


@dataclass(eq=False)
class Trace:
    """Records operations; also the `f` that rules call while they are recorded."""

    ops: list[Op] = field(default_factory=list)
    by_row: bool = False
    """Are second moments those of rows?"""
    inputs: list[str] = field(default_factory=list)
    """Of the coefficients: numbers that are known on the device only."""

    def input(self) -> Value:
        self.inputs.append(f"x{len(self.inputs)}")
        return Value(self, self.inputs[-1], scalar=True)

    def record(self, kind: str, *args: Any) -> Value:
        for arg in args:
            if not isinstance(arg, (Value, int, float)):
                raise TypeError(f"a rule's update may combine its values with numbers only, not {type(arg).__name__}")
        # Addition and multiplication commute: put the element first, as list operations want it.
        if len(args) == 2 and _is_scalar(args[0]) and not _is_scalar(args[1]):
            if kind in ("add", "mul", "maximum"):
                args = (args[1], args[0])
            elif kind == "sub":
                return self.record("add", self.record("neg", args[1]), args[0])
            elif kind == "div":
                return self.record("mul", self.record("reciprocal", args[1]), args[0])
        out = Value(self, f"t{len(self.ops)}", all(_is_scalar(a) for a in args))
        self.ops.append(Op(kind, out, args))
        return out

    def sqrt(self, x: Value) -> Value:
        return self.record("sqrt", x)

    def square(self, x: Value) -> Value:
        return self.record("mean_square", x) if self.by_row else self.record("mul", x, x)

    def sign(self, x: Value) -> Value:
        return self.record("sign", x)

    def maximum(self, x: Value, y: Any) -> Value:
        return self.record("maximum", x, y)

    def positive(self, x: Value) -> Value:
        """1 where x > 0, else 0."""
        return self.record("positive", x)

    def scaled(self, x: Value, factor: Value) -> Value:
        """x times the factor, and zero where the factor is zero, whatever x."""
        return self.record("scaled", x, factor)

    def mask(self, test: Value, x: Value) -> Value:
        return self.record("mask", test, x)


def _is_scalar(operand: Any) -> bool:
    return not isinstance(operand, Value) or operand.scalar


@dataclass(frozen=True)
class Program:
    """A recorded update: its operations, and which of their results are the new values."""

    ops: tuple[Op, ...]
    param: Value
    state: dict[str, Value]
    alignment: Value | None

    def needed_for(self, *wanted: Value, known: Collection[str] = ()) -> list[Op]:
        """The operations that these values are computed by, in order, if those of the names `known` are there."""
        names, found = {value.name for value in wanted}, []
        for op in reversed(self.ops):
            if op.out.name in names and op.out.name not in known:
                names |= {arg.name for arg in op.args if isinstance(arg, Value)}
                found.append(op)
        return found[::-1]


@cache
def record(update: Update, buffers: tuple[str, ...], coefficients: tuple[str, ...], by_row: bool = False) -> Program:
    """Run `update` once on symbols named ``p``, ``g``, the buffers and the coefficients."""
    trace = Trace(by_row=by_row)
    moved = update(
        Value(trace, "p"),
        Value(trace, "g"),
        {name: Value(trace, name) for name in buffers},
        {name: Value(trace, name, scalar=True) for name in coefficients},
        trace,
    )
    missing = set(buffers) - set(moved.state)
    if missing:
        raise ValueError(f"the rule {update.rule.name!r} returns no new value for its buffers {sorted(missing)}")
    return Program(tuple(trace.ops), moved.param, moved.state, moved.alignment)
