"""A recorded update printed as source: one line an operation, in the words of some language."""

from __future__ import annotations

from collections.abc import Mapping

from ..update import Update
from .program import Program, Value, record


def lines(program: Program, templates: Mapping[str, str], line: str, names: Mapping[str, str]) -> list[str]:
    """The operations of `program` in order.

    `templates` has an expression for each kind of operation with ``{0}`` and ``{1}`` for its operands, `line` is
    how a result is named (``{name}``, ``{value}``), `names` are what the inputs are called there.
    """

    def shown(operand: Value | float) -> str:
        return names.get(operand.name, operand.name) if isinstance(operand, Value) else repr(float(operand))

    return [
        line.format(name=op.out.name, value=templates[op.kind].format(*(shown(a) for a in op.args)))
        for op in program.ops
    ]


def general_program(update: Update, buffers: tuple[str, ...], coefficients: tuple[str, ...]) -> Program:
    """The one program that covers every option of a rule with these buffers and coefficients."""
    return record(update.general, buffers, tuple(name for name in coefficients if name != "threshold"))
