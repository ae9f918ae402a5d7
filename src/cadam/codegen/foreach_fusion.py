"""A recorded update as the operations that torch has: three operands at once, and in place where that is possible.

`fused` writes ``a + (b - a) * w`` as a lerp, ``a + x * y * s`` as an addcmul, ``a + x / y * s`` as an addcdiv and
``a + x * s`` as one addition; factors are multiplied with each other first, as they are numbers. `placed` says which
operation may overwrite its operand, so that new moments and parameters are computed where the old ones are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..rules.update import Update
from .trace import Op, Program, Trace, Value, record


@dataclass(frozen=True)
class Term:
    """``factor * x``, ``factor * x * y`` or ``factor * x / y``: a value that is not computed yet."""

    factor: Any
    x: Value
    y: Value | None = None
    kind: str = ""
    """``mul`` or ``div`` where there is a y."""

    @property
    def plain(self) -> bool:
        return self.y is None


class Fusion:
    """Records a program anew; values stay terms for as long as no operation needs them computed."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.terms: dict[str, Term] = {}
        self.scalars: dict[str, Any] = {}
        self.computed: dict[str, Value] = {}

    def input(self, name: str, scalar: bool = False) -> None:
        value = Value(self.trace, name, scalar)
        if scalar:
            self.scalars[name] = value
        else:
            self.terms[name], self.computed[name] = Term(1, value), value

    def value(self, old: Value) -> Value:
        """The computed value."""
        if old.name not in self.computed:
            term = self.terms[old.name]
            base = term.x if term.y is None else self.trace.record(term.kind, term.x, term.y)
            self.computed[old.name] = base if _is_one(term.factor) else self.trace.record("mul", base, term.factor)
            self.terms[old.name] = Term(1, self.computed[old.name])
        return self.computed[old.name]

    def operand(self, old: Any) -> Any:
        return self.scalar(old) if _is_scalar(old) else self.value(old)

    def scalar(self, old: Any) -> Any:
        return self.scalars[old.name] if isinstance(old, Value) else old

    def times(self, a: Any, b: Any) -> Any:
        """The product of two factors."""
        if _is_one(a) or _is_one(b):
            return b if _is_one(a) else a
        return self.trace.record("mul", a, b) if isinstance(a, Value) or isinstance(b, Value) else a * b

    def add(self, op: Op) -> None:
        """Take over one operation."""
        if op.out.scalar:
            self.scalars[op.out.name] = self.trace.record(op.kind, *map(self.scalar, op.args))
            return
        self.terms[op.out.name] = self.term(op)
        term = self.terms[op.out.name]
        if term.plain and _is_one(term.factor):
            self.computed[op.out.name] = term.x

    def term(self, op: Op) -> Term:
        first, second = (*op.args, None)[:2]
        term = self.terms[first.name]
        if op.kind == "neg":
            return replace(term, factor=self.times(-1, term.factor))
        if op.kind == "mul" and _is_scalar(second):
            return replace(term, factor=self.times(term.factor, self.scalar(second)))
        if op.kind == "mul":
            other = self.terms[second.name]
            a, b = (t if t.plain else Term(1, self.value(v)) for t, v in ((term, first), (other, second)))
            return Term(self.times(a.factor, b.factor), a.x, b.x, "mul")
        if op.kind == "div" and not _is_scalar(second):
            a = term if term.plain else Term(1, self.value(first))
            return Term(a.factor, a.x, self.value(second), "div")
        if op.kind in ("add", "sub") and not _is_scalar(second):
            return Term(1, self.sum(op))
        if op.kind == "mask":  # what is held is zero, whatever the factor
            held = self.terms[second.name]
            base = held.x if held.y is None else self.trace.record(held.kind, held.x, held.y)
            return Term(held.factor, self.trace.record("mask", self.value(first), base))
        return Term(1, self.trace.record(op.kind, *map(self.operand, op.args)))

    def sum(self, op: Op) -> Value:
        first, second = op.args
        added = self.terms[second.name]
        if op.kind == "sub":
            added = replace(added, factor=self.times(-1, added.factor))
        elif added.plain and _is_one(added.factor):  # the other one may be worth more as the term
            first, second, added = second, first, self.terms[first.name]
        base = self.value(first)
        if added.y is not None and not isinstance(added.factor, Value):
            # A product alone is rounded first, on every engine: ``sign(v - g * g)`` must find that they are equal.
            added = Term(added.factor, self.trace.record(added.kind, added.x, added.y))
        if added.y is not None:
            return self.trace.record(f"addc{added.kind}", base, added.x, added.y, added.factor)
        if op.kind == "add" and (difference := self.difference(added.x)) and difference.args[1] is base:
            return self.trace.record("lerp", base, difference.args[0], added.factor)
        if _is_one(added.factor) or added.factor == -1:
            return self.trace.record("add" if _is_one(added.factor) else "sub", base, added.x)
        return self.trace.record("add_scaled", base, added.x, added.factor)

    def difference(self, x: Value) -> Op | None:
        found = next((op for op in self.trace.ops if op.out is x), None)
        return found if found is not None and found.kind == "sub" else None


def _is_one(factor: Any) -> bool:
    return not isinstance(factor, Value) and factor == 1


def _is_scalar(operand: Any) -> bool:
    return not isinstance(operand, Value) or operand.scalar


def fused(program: Program, elements: Sequence[str], coefficients: Sequence[str]) -> Program:
    """The same program in operations of three operands. Its coefficients must be numbers, not tensors."""
    fusion = Fusion()
    for name in elements:
        fusion.input(name)
    for name in coefficients:
        fusion.input(name, scalar=True)
    for op in program.ops:
        fusion.add(op)
    alignment = None if program.alignment is None else fusion.value(program.alignment)
    state = {name: fusion.value(value) for name, value in program.state.items()}
    return Program(tuple(fusion.trace.ops), fusion.value(program.param), state, alignment)


@dataclass(frozen=True)
class Instruction:
    """``out = kind(*args)``, by names; a number stands for itself."""

    kind: str
    out: str
    args: tuple[Any, ...]
    overwritten: int | None = None
    """The operand that the result takes the place of."""
    dying: tuple[str, ...] = ()
    """What nothing needs any more after it."""


@dataclass(frozen=True)
class Placed:
    """Instructions, and the names under which the results are found after them."""

    scalars: tuple[Instruction, ...]
    """Between coefficients: to be done once, whatever the number of tensors."""
    elements: tuple[Instruction, ...]
    results: Mapping[str, str]
    """Of ``p`` and every buffer."""
    elsewhere: frozenset[str]
    """Those of them that do not lie where the old value was."""
    alignment: str | None


@cache
def placed(update: Update, buffers: tuple[str, ...], coefficients: tuple[str, ...], numbers: bool) -> Placed:
    """The instructions of an update; `numbers` says that all coefficients are numbers."""
    program = record(update, buffers, coefficients)
    inputs = ("p", "g", *buffers)
    if numbers:
        program = fused(program, inputs, coefficients)
    results = {"p": program.param.name, **{name: program.state[name].name for name in buffers}}
    alignment = None if program.alignment is None else program.alignment.name
    ops = _needed(program, {*results.values(), *([alignment] if alignment else [])})
    dying = _dying(ops, {*results.values(), *([alignment] if alignment else [])})
    # Only what becomes the new value of an input may take the place of the old one.
    heirs = {result: name for name, result in reversed(results.items())}
    for op, last in zip(reversed(ops), reversed(dying), strict=True):
        for operand in _overwritable(op) if op.out.name in heirs else ():
            if op.args[operand].name in last:
                heirs.setdefault(op.args[operand].name, heirs[op.out.name])
                break
    homes = {name: name for name in inputs}
    elements = []
    for op, last in zip(ops, dying, strict=True):
        place = None
        for operand in _overwritable(op):
            name = op.args[operand].name
            home = homes.get(name, name)
            if name in last and (home not in inputs or heirs.get(op.out.name) == home != "g"):
                place, homes[op.out.name] = operand, home
                break
        args = tuple(a.name if isinstance(a, Value) else a for a in op.args)
        elements.append(Instruction(op.kind, op.out.name, args, place, tuple(last)))
    scalars = [
        Instruction(op.kind, op.out.name, tuple(a.name if isinstance(a, Value) else a for a in op.args))
        for op in program.ops
        if op.out.scalar
    ]
    elsewhere = frozenset(name for name, result in results.items() if homes.get(result) != name)
    return Placed(tuple(scalars), tuple(elements), results, elsewhere, alignment)


def _overwritable(op: Op) -> tuple[int, ...]:
    """The operands that torch can overwrite, the better ones first."""
    if op.kind == "mask":
        return (1,)
    both = op.kind in ("add", "mul", "maximum") and not _is_scalar(op.args[1])
    return (0, 1) if both else (0,)


def _needed(program: Program, wanted: set[str]) -> list[Op]:
    """The operations on elements that the results need, in order."""
    needed, ops = set(wanted), []
    for op in reversed(program.ops):
        if op.out.name in needed and not op.out.scalar:
            needed |= {a.name for a in op.args if isinstance(a, Value)}
            ops.append(op)
    return ops[::-1]


def _dying(ops: Sequence[Op], wanted: set[str]) -> list[set[str]]:
    """For each operation the elements that nothing needs after it."""
    needed, result = set(wanted), []
    for op in reversed(ops):
        here = {a.name for a in op.args if isinstance(a, Value) and not a.scalar}
        result.append(here - needed)
        needed |= here
    return result[::-1]
