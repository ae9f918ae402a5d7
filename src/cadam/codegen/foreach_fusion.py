"""Translation of a recorded update to torch operations with three operands, in place where that is possible.

Input: an `Update`. Output: an `InPlaceProgram` of instructions, which `cadam.engines.foreach_interpreter` runs over
lists of tensors. Each pass over memory costs time, so there are two optimizations:

1. `fuse` replaces ``a + (b - a) * w`` by a lerp, ``a + x * y * s`` by an addcmul, ``a + x / y * s`` by an addcdiv and
   ``a + x * s`` by an addition with a factor. Scalar factors are multiplied with each other first.
2. `in_place_program` decides which instruction may overwrite an operand, so that new moments and parameters are
   computed in the memory of the old ones.

The moments of Adam become two instructions that overwrite their first operand::

    exp_avg <- lerp(exp_avg, g, weight1)
    exp_avg_sq <- mul(exp_avg_sq, beta2); exp_avg_sq <- addcmul(exp_avg_sq, g, g, weight2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..rules.update import Update
from .trace import Op, Program, Trace, Value, is_scalar, record


@dataclass(frozen=True)
class Term:
    """A value that is not computed yet: ``factor * x``, ``factor * x * y`` or ``factor * x / y``.

    Attributes:
        factor: A number or a scalar symbol.
        x: The first operand.
        y: The second operand, or None.
        kind: ``mul`` or ``div`` if there is a second operand.
    """

    factor: Any
    x: Value
    y: Value | None = None
    kind: str = ""


class Fusion:
    """Records a program again with fused operations: a value remains a `Term` until an operation needs its result."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.terms: dict[str, Term] = {}
        self.scalars: dict[str, Any] = {}
        self.computed: dict[str, Value] = {}

    def add_input(self, name: str, scalar: bool = False) -> None:
        """Add an element or a scalar of the program."""
        value = Value(self.trace, name, scalar)
        if scalar:
            self.scalars[name] = value
        else:
            self.terms[name], self.computed[name] = Term(1, value), value

    def add(self, op: Op) -> None:
        """Add an operation of the program."""
        if op.out.scalar:
            self.scalars[op.out.name] = self.trace.record(op.kind, *map(self.scalar, op.args))
            return
        term = self.terms[op.out.name] = self.term(op)
        if term.y is None and _is_one(term.factor):
            self.computed[op.out.name] = term.x

    def compute(self, old: Value) -> Value:
        """Return the new symbol of an element of the program; record its computation if it is still a term."""
        if old.name not in self.computed:
            term = self.terms[old.name]
            product = self.without_factor(term)
            self.computed[old.name] = (
                product if _is_one(term.factor) else self.trace.record("mul", product, term.factor)
            )
            self.terms[old.name] = Term(1, self.computed[old.name])
        return self.computed[old.name]

    def without_factor(self, term: Term) -> Value:
        """Return a term without its factor; record its product or quotient if it has two operands."""
        return term.x if term.y is None else self.trace.record(term.kind, term.x, term.y)

    def one_operand_term(self, old: Value) -> Term:
        """Return an element as a term with one operand. A term with two operands is computed for that."""
        term = self.terms[old.name]
        return term if term.y is None else Term(1, self.compute(old))

    def operand(self, old: Any) -> Any:
        """Return the new symbol of an element or scalar, or the number itself."""
        return self.scalar(old) if is_scalar(old) else self.compute(old)

    def scalar(self, old: Any) -> Any:
        """Return the new symbol of a scalar, or the number itself."""
        return self.scalars[old.name] if isinstance(old, Value) else old

    def multiply_factors(self, a: Any, b: Any) -> Any:
        """Return the product of two factors; record it if one of them is a symbol."""
        if _is_one(a) or _is_one(b):
            return b if _is_one(a) else a
        return self.trace.record("mul", a, b) if isinstance(a, Value) or isinstance(b, Value) else a * b

    def term(self, op: Op) -> Term:
        """Return the result of an operation on elements as a term."""
        first, second = (*op.args, None)[:2]
        if op.kind == "neg":
            term = self.terms[first.name]
            return replace(term, factor=self.multiply_factors(-1, term.factor))
        if op.kind == "mul" and is_scalar(second):
            term = self.terms[first.name]
            return replace(term, factor=self.multiply_factors(term.factor, self.scalar(second)))
        if op.kind == "mul":
            a, b = self.one_operand_term(first), self.one_operand_term(second)
            return Term(self.multiply_factors(a.factor, b.factor), a.x, b.x, "mul")
        if op.kind == "div" and not is_scalar(second):
            a = self.one_operand_term(first)
            return Term(a.factor, a.x, self.compute(second), "div")
        if op.kind in ("add", "sub") and not is_scalar(second):
            return Term(1, self.sum(op))
        if op.kind == "mask":  # a masked element is zero with any factor, so the factor can be applied later
            step = self.terms[second.name]
            product = self.without_factor(step)
            return Term(step.factor, self.trace.record("mask", self.compute(first), product))
        return Term(1, self.trace.record(op.kind, *map(self.operand, op.args)))

    def sum(self, op: Op) -> Value:
        """Record an addition or subtraction of elements, fused with the multiplication of its second operand."""
        first, second = op.args
        added = self.terms[second.name]
        if op.kind == "sub":
            added = replace(added, factor=self.multiply_factors(-1, added.factor))
        elif added.y is None and _is_one(added.factor):  # only the first operand can be a term worth fusing
            first, second, added = second, first, self.terms[first.name]
        base = self.compute(first)
        if added.y is not None and not isinstance(added.factor, Value):
            # Engines agree on rounding a product without a scalar factor first: ``sign(v - g * g)`` must be 0 where
            # v equals the rounded square.
            added = Term(added.factor, self.without_factor(added))
        if added.y is not None:
            return self.trace.record(f"addc{added.kind}", base, added.x, added.y, added.factor)
        difference = next((o for o in self.trace.ops if o.out is added.x and o.kind == "sub"), None)
        if op.kind == "add" and difference is not None and difference.args[1] is base:
            return self.trace.record("lerp", base, difference.args[0], added.factor)
        if _is_one(added.factor) or added.factor == -1:
            return self.trace.record("add" if _is_one(added.factor) else "sub", base, added.x)
        return self.trace.record("add_scaled", base, added.x, added.factor)


def _is_one(factor: Any) -> bool:
    return not isinstance(factor, Value) and factor == 1


def fuse(program: Program, elements: Sequence[str], coefficients: Sequence[str]) -> Program:
    """Return the program with operations of up to three operands. Its coefficients must be numbers, not tensors."""
    fusion = Fusion()
    for name in elements:
        fusion.add_input(name)
    for name in coefficients:
        fusion.add_input(name, scalar=True)
    for op in program.ops:
        fusion.add(op)
    alignment = None if program.alignment is None else fusion.compute(program.alignment)
    state = {name: fusion.compute(value) for name, value in program.state.items()}
    return Program(tuple(fusion.trace.ops), fusion.compute(program.param), state, alignment)


@dataclass(frozen=True)
class Instruction:
    """The instruction ``out = kind(*args)``.

    Attributes:
        kind: Kind of the operation.
        out: Name of the result.
        args: Names of the operands, or numbers.
        overwritten: Index of the operand whose memory the result takes, or None if it needs new memory.
        last_uses: Names of the elements that no later instruction needs.
    """

    kind: str
    out: str
    args: tuple[Any, ...]
    overwritten: int | None = None
    last_uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class InPlaceProgram:
    """The instructions of an update, and the names of their results.

    Attributes:
        scalars: Instructions between coefficients, which run once for all tensors.
        elements: Instructions on elements, which run for every tensor.
        results: Name of the new value of ``p`` and of every buffer.
        not_in_place: Those of ``p`` and the buffers whose new value is not in the memory of the old one.
        alignment: Name of the alignment, or None if it is not computed.
    """

    scalars: tuple[Instruction, ...]
    elements: tuple[Instruction, ...]
    results: Mapping[str, str]
    not_in_place: frozenset[str]
    alignment: str | None


@cache
def in_place_program(
    update: Update, buffers: tuple[str, ...], coefficients: tuple[str, ...], numbers: bool
) -> InPlaceProgram:
    """Return the instructions of an update.

    Args:
        update: The update.
        buffers: Names of its buffers.
        coefficients: Names of its coefficients.
        numbers: Whether all coefficients are numbers, so that operations can be fused. torch's fused operations do not
            take tensors as factors.
    """
    program = record(update, buffers, coefficients)
    inputs = ("p", "g", *buffers)
    if numbers:
        program = fuse(program, inputs, coefficients)
    results = {"p": program.param.name, **{name: program.state[name].name for name in buffers}}
    alignment = None if program.alignment is None else program.alignment.name
    outputs = {*results.values(), *([alignment] if alignment else [])}
    ops = _needed_element_ops(program, outputs)
    last_uses = _last_uses(ops, outputs)
    successors = _successors(ops, last_uses, results)
    # The input in whose memory a value is, or the name of a value with its own memory.
    memory = {name: name for name in inputs}
    elements = []
    for op, last in zip(ops, last_uses, strict=True):
        overwritten = None
        for operand in _overwritable(op):
            name = op.args[operand].name
            owner = memory.get(name, name)
            # The memory of an input may only be used on the way to its own new value; the gradient is never changed.
            if name in last and (owner not in inputs or successors.get(op.out.name) == owner != "g"):
                overwritten, memory[op.out.name] = operand, owner
                break
        elements.append(_instruction(op, overwritten, tuple(last)))
    scalars = tuple(_instruction(op) for op in program.ops if op.out.scalar)
    not_in_place = frozenset(name for name, result in results.items() if memory.get(result) != name)
    return InPlaceProgram(scalars, tuple(elements), results, not_in_place, alignment)


def _instruction(op: Op, overwritten: int | None = None, last_uses: tuple[str, ...] = ()) -> Instruction:
    args = tuple(arg.name if isinstance(arg, Value) else arg for arg in op.args)
    return Instruction(op.kind, op.out.name, args, overwritten, last_uses)


def _successors(ops: Sequence[Op], last_uses: Sequence[set[str]], results: dict[str, str]) -> dict[str, str]:
    """Return the input whose new value each intermediate value becomes, by a chain of overwriting operations."""
    successors = {result: name for name, result in reversed(results.items())}
    for op, last in zip(reversed(ops), reversed(last_uses), strict=True):
        for operand in _overwritable(op) if op.out.name in successors else ():
            if op.args[operand].name in last:
                successors.setdefault(op.args[operand].name, successors[op.out.name])
                break
    return successors


def _overwritable(op: Op) -> tuple[int, ...]:
    """Return the indices of the operands that torch can overwrite, in order of preference."""
    if op.kind == "mask":
        return (1,)
    both = op.kind in ("add", "mul", "maximum") and not is_scalar(op.args[1])
    return (0, 1) if both else (0,)


def _needed_element_ops(program: Program, outputs: set[str]) -> list[Op]:
    """Return the operations on elements that the outputs need, in order."""
    needed, ops = set(outputs), []
    for op in reversed(program.ops):
        if op.out.name in needed and not op.out.scalar:
            needed |= {arg.name for arg in op.args if isinstance(arg, Value)}
            ops.append(op)
    return ops[::-1]


def _last_uses(ops: Sequence[Op], outputs: set[str]) -> list[set[str]]:
    """Return, for each operation, its operands that are needed neither by a later operation nor as an output."""
    needed, result = set(outputs), []
    for op in reversed(ops):
        operands = {arg.name for arg in op.args if isinstance(arg, Value) and not arg.scalar}
        result.append(operands - needed)
        needed |= operands
    return result[::-1]
