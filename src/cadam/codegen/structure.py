"""A recorded update printed as source: one line an operation, in the words of some language."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..defaults import defaults
from ..rules import Options, Rule
from ..update import Scalars, Update
from .program import Program, Value, record


@dataclass(frozen=True)
class Structure:
    """A rule with certain buffers and coefficients: what one compiled kernel serves, whatever the options' values."""

    rule: Rule
    buffers: tuple[str, ...]
    coefficients: tuple[str, ...]

    @classmethod
    def of(cls, rule: Rule, options: Options) -> Structure:
        coefficients = Update(rule, confidence=True).general_coefficients(2.0, options, Scalars)
        return cls(rule, tuple(rule.state(options)), tuple(coefficients))

    @property
    def name(self) -> str:
        """The rule's name, with what sets this structure apart from that of the default options."""
        usual = Structure.of(self.rule, defaults(self.rule))
        more = [b for b in self.buffers if b not in usual.buffers]
        more += [c for c in self.coefficients if c not in usual.coefficients]
        return "_".join([self.rule.name, *more, *(f"without_{b}" for b in usual.buffers if b not in self.buffers)])

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its buffers, if these are one or two and all can be coded in fewer bytes."""
        kinds = tuple(self.rule.moments.get(buffer, "") for buffer in self.buffers)
        return kinds if len(kinds) in (1, 2) and set(kinds) <= {"signed", "positive"} else ()

    @property
    def program(self) -> Program:
        """The one program that covers every option, `Update.general`."""
        coefficients = tuple(name for name in self.coefficients if name != "threshold")
        return record(Update(self.rule, confidence=True).general, self.buffers, coefficients)


def structures(rules: Iterable[Rule]) -> list[Structure]:
    """Every structure of these rules."""
    return [Structure.of(rule, {**defaults(rule), **variant}) for rule in rules for variant in ({}, *rule.variants)]


def lines(
    program: Program, templates: Mapping[str, str], line: str, names: Mapping[str, str], number: str = "{!r}"
) -> list[str]:
    """The operations of `program` in order.

    `templates` has an expression for each kind of operation with ``{0}`` and ``{1}`` for its operands, `line` is
    how a result is named (``{name}``, ``{value}``), `names` are what the inputs are called there, `number` is how a
    number is written.
    """

    def shown(operand: Value | float) -> str:
        return names.get(operand.name, operand.name) if isinstance(operand, Value) else number.format(float(operand))

    return [
        line.format(name=op.out.name, value=templates[op.kind].format(*(shown(a) for a in op.args)))
        for op in program.ops
    ]
