"""A recorded update printed as source: one line an operation, in the words of some language."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..rules import Options, Rule
from ..rules.defaults import defaults
from ..rules.update import Scalars, Update
from .trace import Op, Program, Value, record


@dataclass(frozen=True)
class Structure:
    """A rule with certain buffers and coefficients: what one compiled kernel serves, whatever the options' values."""

    rule: Rule
    buffers: tuple[str, ...]
    coefficients: tuple[str, ...]
    stored: tuple[str, ...] = ()
    """How each buffer is stored: ``plain``, ``bfloat16``, ``int8`` or ``row``; empty if all are plain."""
    row_steps: bool = False
    """Do rows count their own steps?"""

    @classmethod
    def of(cls, rule: Rule, options: Options, *, rows: bool = False) -> Structure:
        """That of these options; `rows` says that it is for tables, whose second moments may be those of rows."""
        coefficients = Update(rule, confidence=True).general_coefficients(2.0, options, Scalars)
        buffers = tuple(rule.state(options))
        by_row = {b for b in buffers if rows and options["second_moment"] == "row" and rule.moments[b] != "signed"}
        moments = "plain" if options["moments"] == "float32" else options["moments"]
        stored = tuple("row" if b in by_row else moments for b in buffers)
        row_steps = rows and bool(options["row_steps"])
        return cls(rule, buffers, tuple(coefficients), stored if set(stored) - {"plain"} else (), row_steps)

    @property
    def name(self) -> str:
        """The rule's name, with what sets this structure apart from that of the default options."""
        usual = Structure.of(self.rule, defaults(self.rule))
        more = [b for b in self.buffers if b not in usual.buffers]
        more += [c for c in self.coefficients if c not in usual.coefficients]
        more += [f"{s}_{b}" for b, s in zip(self.buffers, self.stored, strict=False) if s != "plain"]
        more += ["row_steps"] * self.row_steps
        return "_".join([self.rule.name, *more, *(f"without_{b}" for b in usual.buffers if b not in self.buffers)])

    @property
    def coded(self) -> tuple[str, ...]:
        """The buffers that are stored in fewer bytes than those of the arithmetic."""
        return tuple(b for b, how in zip(self.buffers, self.stored, strict=False) if how in ("bfloat16", "int8"))

    @property
    def plain(self) -> Structure:
        """The same with plain buffers: C has one kernel for all storages."""
        return replace(self, stored=(), row_steps=False)

    @property
    def by_step(self) -> tuple[str, ...]:
        """The coefficients that a row has by its own step count: those of the rule."""
        shared = ("l2", "shrink", "unscale", "threshold", "lr")
        return tuple(name for name in self.coefficients if name not in shared) if self.row_steps else ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its buffers, if these are one or two and all can be coded in fewer bytes."""
        kinds = tuple(self.rule.moments.get(buffer, "") for buffer in self.buffers)
        return kinds if len(kinds) in (1, 2) and set(kinds) <= {"signed", "positive"} else ()

    @property
    def by_row(self) -> Structure | None:
        """The same with its second moments by row; None if it has none, or asks for the mean square more than once."""
        kinds = [self.rule.moments.get(buffer) for buffer in self.buffers]
        if None in kinds or set(kinds) <= {"signed"}:
            return None
        made = replace(self, stored=tuple("plain" if kind == "signed" else "row" for kind in kinds))
        return made if [op.kind for op in made.program.ops].count("mean_square") == 1 else None

    @property
    def program(self) -> Program:
        """The one program that covers every option, `Update.general`."""
        coefficients = tuple(name for name in self.coefficients if name != "threshold")
        return record(Update(self.rule, confidence=True).general, self.buffers, coefficients, "row" in self.stored)


def structures(rules: Iterable[Rule]) -> list[Structure]:
    """Every structure of these rules."""
    return [Structure.of(rule, {**defaults(rule), **variant}) for rule in rules for variant in ({}, *rule.variants)]


def lines(
    ops: Iterable[Op],
    templates: Mapping[str, str],
    line: str,
    names: Mapping[str, str],
    number: str = "{!r}",
    special: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """The operations in order.

    `templates` has an expression for each kind of operation with ``{0}`` and ``{1}`` for its operands, `line` is
    how a result is named (``{name}``, ``{value}``), `names` are what the inputs are called there, `number` is how a
    number is written, `special` has expressions for certain results.
    """

    def shown(operand: Value | float) -> str:
        return names.get(operand.name, operand.name) if isinstance(operand, Value) else number.format(float(operand))

    return [
        line.format(
            name=op.out.name, value=special.get(op.out.name, templates[op.kind]).format(*(shown(a) for a in op.args))
        )
        for op in ops
    ]
