"""The specification of a compiled kernel, and the printer that turns recorded operations into lines of source.

Input: a rule and its options. Output: a `KernelSpec`, which names everything that the source of a kernel depends on.
The values of options are not part of it: they become coefficients that the kernel receives at run time. One kernel
therefore serves every learning rate, weight decay and so on, with or without confidence.

    >>> KernelSpec.of(ADAM, {**defaults(ADAM), "amsgrad": True}).name
    'adam_max_exp_avg_sq'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..rules import Options, Rule
from ..rules.defaults import defaults
from ..rules.sparse_updates import counts_updates
from ..rules.update import ScalarFunctions, Update
from .trace import Op, Program, Value, record

MAX_QUANTIZED_BUFFERS = 2
"""The number of quantized buffers that the C library supports; native/src/cadam.h has the same constant."""


@dataclass(frozen=True)
class KernelSpec:
    """A rule with the buffers and coefficients that one compiled kernel has.

    Attributes:
        rule: The rule that the kernel computes.
        buffers: Names of the buffers, in the order of the kernel's arguments.
        coefficients: Names of the coefficients, in the order in which the kernel reads them.
        storages: Storage of each buffer: ``plain``, ``bfloat16``, ``int8``, or ``row`` for one value per row of a
            table. Empty if all buffers are plain.
        row_steps: Whether each row of a table counts its own steps.
        counts_updates: Whether the confidence mask of a row depends on the number of its updates.
        aging_coefficients: Names of the coefficients with which the moments of a row first make up for the steps that
            it missed. They are the last of `coefficients`. Empty unless sparse updates are exact.
    """

    rule: Rule
    buffers: tuple[str, ...]
    coefficients: tuple[str, ...]
    storages: tuple[str, ...] = ()
    row_steps: bool = False
    aging_coefficients: tuple[str, ...] = ()
    counts_updates: bool = False

    @classmethod
    def of(cls, rule: Rule, options: Options, *, rows: bool = False) -> KernelSpec:
        """Return the specification of the kernel for these options.

        Args:
            rule: The rule.
            options: Options of the parameter group, as plain numbers.
            rows: Whether the kernel updates rows of a table, which may have one second moment per row and their own
                step counts.
        """
        coefficients = Update(rule, confidence=True).general_coefficients(2.0, options, ScalarFunctions)
        is_exact = rows and options["sparse_updates"] == "exact"
        aging = rule.aging(1.0, options, ScalarFunctions) if is_exact else {}
        coefficients |= aging
        buffers = tuple(rule.state(options))
        by_row = {b for b in buffers if rows and options["second_moment"] == "row" and rule.moments[b] != "signed"}
        moments = "plain" if options["moments"] == "float32" else options["moments"]
        storages = tuple("row" if b in by_row else moments for b in buffers)
        row_steps = rows and bool(options["row_steps"])
        storages = storages if set(storages) - {"plain"} else ()
        by_updates = rows and counts_updates(options)
        return cls(rule, buffers, tuple(coefficients), storages, row_steps, tuple(aging), by_updates)

    @property
    def name(self) -> str:
        """The rule's name, followed by the differences from the kernel of the default options."""
        default = KernelSpec.of(self.rule, defaults(self.rule))
        extra = [b for b in self.buffers if b not in default.buffers]
        extra += [c for c in self.coefficients if c not in default.coefficients]
        extra += [f"{s}_{b}" for b, s in zip(self.buffers, self.storages, strict=False) if s != "plain"]
        extra += ["row_steps"] * self.row_steps + ["counts_updates"] * self.counts_updates
        extra += [f"without_{b}" for b in default.buffers if b not in self.buffers]
        return "_".join([self.rule.name, *extra])

    @property
    def quantized_buffers(self) -> tuple[str, ...]:
        """The buffers that are stored as bfloat16 or int8."""
        return tuple(b for b, s in zip(self.buffers, self.storages, strict=False) if s in ("bfloat16", "int8"))

    @property
    def needs_whole_rows(self) -> bool:
        """Whether a program needs all elements of a row: they share a scale, a moment or a step count."""
        return bool(self.storages or self.row_step_coefficients or self.aging_coefficients)

    @property
    def without_storages(self) -> KernelSpec:
        """The specification with plain buffers. The C library finds the kernels of all storages under its name."""
        return replace(self, storages=(), row_steps=False, counts_updates=False)

    @property
    def row_step_coefficients(self) -> tuple[str, ...]:
        """The coefficients that depend on the number of updates of a row: those of the rule with row steps, the mask.

        Empty if rows do not count their updates.
        """
        shared = {"l2", "shrink", "unscale", "threshold", "lr"}
        by_count = set(self.coefficients) - shared if self.row_steps else set()
        by_count |= {"threshold"} if self.counts_updates else set()
        return tuple(name for name in self.coefficients if name in by_count)

    @property
    def quantized_storages(self) -> list[str]:
        """The quantized storages for which the C library has kernels, with one second moment per element.

        It has them for one or two buffers, each a first or a second moment.
        """
        kinds = [self.rule.moments.get(buffer) for buffer in self.buffers]
        is_quantizable = len(kinds) in (1, MAX_QUANTIZED_BUFFERS) and set(kinds) <= {"signed", "positive"}
        return ["bfloat16", "int8"] if is_quantizable else []

    @property
    def row_storages(self) -> list[str]:
        """The storages of first moments for which the C library has kernels with one second moment per row."""
        if self.with_row_second_moments is None:
            return []
        kinds = [self.rule.moments.get(buffer) for buffer in self.buffers]
        can_quantize = "maximum" not in kinds and kinds.count("signed") <= MAX_QUANTIZED_BUFFERS
        return ["float32", "bfloat16", "int8"] if can_quantize else ["float32"]

    @property
    def with_row_second_moments(self) -> KernelSpec | None:
        """The specification with one second moment per row.

        None if the rule has no second moment, or squares more than one value.
        """
        kinds = [self.rule.moments.get(buffer) for buffer in self.buffers]
        if None in kinds or set(kinds) <= {"signed"}:
            return None
        spec = replace(self, storages=tuple("plain" if kind == "signed" else "row" for kind in kinds))
        return spec if [op.kind for op in spec.program.ops].count("mean_square") == 1 else None

    @property
    def program(self) -> Program:
        """The recorded operations of `Update.general`, which covers every option by its coefficients."""
        coefficients = tuple(name for name in self.coefficients if name != "threshold")
        update = Update(self.rule, confidence=True, ages=bool(self.aging_coefficients)).general
        return record(update, self.buffers, coefficients, "row" in self.storages)


def kernel_specs(rules: Iterable[Rule]) -> list[KernelSpec]:
    """Return the specification of every dense float32 kernel of these rules: one per variant of a rule."""
    return [KernelSpec.of(rule, {**defaults(rule), **variant}) for rule in rules for variant in ({}, *rule.variants)]


def aging_specs(rules: Iterable[Rule]) -> list[KernelSpec]:
    """Return the specification of every kernel for exact sparse updates of these rules."""
    exact = {"sparse_updates": "exact"}
    return [
        KernelSpec.of(rule, {**defaults(rule), **variant, **exact}, rows=True)
        for rule in rules
        for variant in ({}, *rule.variants)
        if rule.age is not None and rule.aging(1.0, {**defaults(rule), **variant}, ScalarFunctions)
    ]


def source_lines(
    ops: Iterable[Op],
    templates: Mapping[str, str],
    line: str,
    names: Mapping[str, str],
    number: str = "{!r}",
    overrides: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Print operations as lines of source, in order.

    Args:
        ops: The operations.
        templates: An expression for each kind of operation, with ``{0}`` and ``{1}`` for its operands.
        line: Template of a line, with ``{name}`` for the result and ``{value}`` for the expression.
        names: Names of the inputs in the source, where they differ from those in the trace.
        number: Template of a number.
        overrides: Expressions for certain results, by the name of the result, instead of those of `templates`.
    """

    def print_operand(operand: Value | float) -> str:
        return names.get(operand.name, operand.name) if isinstance(operand, Value) else number.format(float(operand))

    lines = []
    for op in ops:
        template = overrides.get(op.out.name, templates[op.kind])
        lines.append(line.format(name=op.out.name, value=template.format(*map(print_operand, op.args))))
    return lines
