"""Generation of ``rules.h``, the C header with the arithmetic of all rules.

Input: rules. Output: the text of a header with one element function per kernel specification, and macros that list
them. ``native/src/kernels.c`` includes it and puts loops around the functions, once for scalars and once for each width
of vectors: there, `real` is a number or a vector, `scalar` is a number, and ``SQRT``, ``SIGN`` and so on are macros.
The element function of SGD without momentum, shortened::

    static inline void ELEMENT(sgdm_without_momentum_buffer)(
        const struct COEFFICIENTS(sgdm_without_momentum_buffer) *restrict c, real *p_, real g, real *alignment_)
    {
        const real p = *p_;
        const __auto_type t0 = g * c->unscale;
        const __auto_type t1 = SCALED(p, c->l2);
        const __auto_type t2 = t0 + t1;
        ...
        *p_ = t8;
        *alignment_ = t4;
    }
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..rules import RULES, Rule
from .kernel_spec import KernelSpec, aging_specs, kernel_specs, source_lines
from .trace import Op

TEMPLATES = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "reciprocal": "1 / {0}",
    "sqrt": "SQRT({0})",
    "sign": "SIGN({0})",
    "maximum": "MAXIMUM({0}, {1})",
    "scaled": "SCALED({0}, {1})",
    "mask": "MASKED({0}, {1})",
    "mean_square": "mean_square",
}
"""C expression of each kind of operation."""

PREFACE = """\
/* Generated from the rules in cadam/rules by cadam/codegen/c_source.py.
 *
 * Each kernel specification has an element function; the macros at the end list them. A `real` is a number or a vector,
 * a `scalar` is a number. Every option of a rule is a coefficient: without weight decay, `l2` is 0 and `shrink` is 1;
 * without confidence, `threshold` is NaN, which masks nothing.
 *
 * If second moments have one value per row, there are two functions: the first returns the value to be squared, and the
 * second receives the mean of these squares over the row. */"""

STORAGES = {"float32": "F32", "bfloat16": "BF16", "int8": "INT8"}
"""Name of each storage of moments in C."""


def element(spec: KernelSpec) -> str:
    """Return the struct of coefficients and the element function (or both functions) of a specification."""
    name, program = spec.name, spec.program
    if program.alignment is None:
        raise AssertionError("the general update always computes its alignment")
    squares = [op for op in program.ops if op.kind == "mean_square"]
    text = [f"struct COEFFICIENTS({name}) {{", f"    scalar {', '.join(spec.coefficients)};", "};", ""]
    if squares:
        (squared,) = squares[0].args
        text += _function_head(f"{name}_squared", spec, program.needed_for(squared), "real *squared_")
        unused = [f"    (void){name};" for name in ("p", *spec.buffers)]
        text += [*unused, f"    *squared_ = {squared.name};", "}", ""]
    last_arguments = "real mean_square, real *alignment_" if squares else "real *alignment_"
    text += _function_head(name, spec, program.ops, last_arguments)
    text.append(f"    *p_ = {program.param.name};")
    text += [f"    *{b}_ = {program.state[b].name};" for b in spec.buffers]
    text += [f"    *alignment_ = {program.alignment.name};", "}"]
    return "\n".join(text)


def _function_head(name: str, spec: KernelSpec, ops: Iterable[Op], last_arguments: str) -> list[str]:
    """Return a function up to its results: the declaration and the operations."""
    names = {c: f"c->{c}" for c in spec.coefficients}
    return [
        f"static inline void ELEMENT({name})(",
        f"    const struct COEFFICIENTS({spec.name}) *restrict c, real *p_, real g,",
        "".join(["    ", *(f"real *{b}_, " for b in spec.buffers), f"{last_arguments})"]),
        "{",
        "    const real p = *p_;",
        *(f"    const real {b} = *{b}_;" for b in spec.buffers),
        *source_lines(ops, TEMPLATES, "    const __auto_type {name} = {value};", names, "(scalar){!r}"),
    ]


def _storage_entries(spec: KernelSpec) -> Iterator[str]:
    """Return the entries of a specification in the macros of stored rules, one for each kernel with another storage."""
    for is_by_row, element_spec, storages in (
        (0, spec, spec.quantized_storages),
        (1, spec.with_row_second_moments, spec.row_storages),
    ):
        if element_spec is None or (is_by_row and spec.aging_coefficients):
            continue
        for storage in storages:
            buffers, quantized = [], 0
            for k, buffer in enumerate(element_spec.buffers):
                is_row = element_spec.storages[k : k + 1] == ("row",)
                name = "ROW" if is_row else STORAGES[storage]
                buffers.append(f"{name}, {spec.rule.moments[buffer]}, {quantized}")
                quantized += not is_row
            head = f"{spec.name}, {element_spec.name}, {STORAGES[storage]}, {is_by_row}"
            yield f"    X({head}, {len(buffers)}, {', '.join(buffers)})"


def header(rules: Iterable[Rule] = RULES.values()) -> str:
    """Return the text of rules.h with the kernels of these rules, by default those of the package."""
    rules = list(rules)
    specs, aging = kernel_specs(rules), aging_specs(rules)
    listed = [
        f"    X({s.name}, {len(s.buffers)}, {len(s.coefficients)}, {len(s.quantized_storages)}, {len(s.row_storages)})"
        for s in specs
    ]
    stored = [entry for s in specs for entry in _storage_entries(s)]
    aged = [
        f"    X({s.name}, {len(s.buffers)}, {len(s.coefficients)}, {len(s.aging_coefficients)}, "
        f"{len(s.quantized_storages)})"
        for s in aging
    ]
    stored_aged = [entry for s in aging for entry in _storage_entries(s)]
    listing = "\n".join(
        [
            "/* X(name, buffers, coefficients, quantized storages, storages with second moments by row) */",
            " \\\n".join(["#undef RULES\n#define RULES(X)", *listed]),
            "/* X(name, buffers, coefficients, how many of these are for the steps that a row missed, "
            "quantized storages) */",
            " \\\n".join(["#undef AGING_RULES\n#define AGING_RULES(X)", *aged]),
            "/* X(name, element function, storage, whether second moments are by row, buffers; then for each buffer:",
            " * storage, kind, index among the quantized buffers) */",
            " \\\n".join(["#undef STORED_RULES\n#define STORED_RULES(X)", *stored]),
            " \\\n".join(["#undef STORED_AGING_RULES\n#define STORED_AGING_RULES(X)", *stored_aged]),
            "",
        ]
    )
    elements = [element(variant) for s in specs for variant in (s, s.with_row_second_moments) if variant is not None]
    elements += map(element, aging)
    return "\n\n".join([PREFACE, *elements, listing])
