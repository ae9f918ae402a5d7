"""Rules as C: the header rules.h of the compiled library, from the one definition of each rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..rules import RULES, Rule
from .kernel_spec import KernelSpec, kernel_specs, source_lines
from .trace import Op

MAX_QUANTIZED_BUFFERS = 2  # as in native/cadam.h

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

PREFACE = """\
/* Generated from the rules in cadam/rules.
 *
 * An element function for each rule and a list of them. A `real` is a number or a vector, a `scalar` a number. Every
 * option of a rule is a
 * coefficient: a decay of 0, a shrinking by 1, a threshold of NaN below which nothing is held.
 *
 * Where second moments are those of rows, there are two: one says what is squared, and the mean of these squares over
 * the row is given to the other. */"""


def element(spec: KernelSpec) -> str:
    """The coefficients and the element function of one spec, or both of its functions."""
    name, program = spec.name, spec.program
    if program.alignment is None:
        raise AssertionError("the general update always computes its alignment")
    means = [op for op in program.ops if op.kind == "mean_square"]
    results = [
        f"    *p_ = {program.param.name};",
        *(f"    *{b}_ = {program.state[b].name};" for b in spec.buffers),
        f"    *alignment_ = {program.alignment.name};",
    ]
    text = [f"struct COEFFICIENTS({name}) {{", f"    scalar {', '.join(spec.coefficients)};", "};", ""]
    if means:
        (squared,) = means[0].args
        text += _function(f"{name}_squared", spec, program.needed_for(squared), "real *squared_")
        unused = [f"    (void){name};" for name in ("p", *spec.buffers)]
        text += [*unused, f"    *squared_ = {squared.name};", "}", ""]
    text += _function(name, spec, program.ops, "real mean_square, real *alignment_" if means else "real *alignment_")
    return "\n".join([*text, *results, "}"])


def _function(name: str, spec: KernelSpec, ops: Iterable[Op], more: str) -> list[str]:
    """The head of a function with these operations, and its lines."""
    return [
        f"static inline void ELEMENT({name})(",
        f"    const struct COEFFICIENTS({spec.name}) *restrict c, real *p_, real g,",
        "".join(["    ", *(f"real *{b}_, " for b in spec.buffers), f"{more})"]),
        "{",
        "    const real p = *p_;",
        *(f"    const real {b} = *{b}_;" for b in spec.buffers),
        *source_lines(
            ops,
            TEMPLATES,
            "    const __auto_type {name} = {value};",
            {c: f"c->{c}" for c in spec.coefficients},
            "(scalar){!r}",
        ),
    ]


STORAGES = {"float32": "F32", "bfloat16": "BF16", "int8": "INT8"}


def dense_storages(spec: KernelSpec) -> list[str]:
    """The storages of moments, other than float32, that there are kernels for."""
    return ["bfloat16", "int8"] if spec.is_quantizable else []


def row_storages(spec: KernelSpec) -> list[str]:
    """The storages of first moments that there are kernels for where second moments are those of rows."""
    kinds = [spec.rule.moments.get(buffer) for buffer in spec.buffers]
    if spec.with_row_second_moments is None:
        return []
    return list(STORAGES) if "maximum" not in kinds and kinds.count("signed") <= MAX_QUANTIZED_BUFFERS else ["float32"]


def _entries(spec: KernelSpec) -> Iterator[str]:
    """Each kernel for other storages: rule, element function, storage, is it by row?, buffers; then of each buffer
    how it is stored, its kind, and its number among those that are coded."""
    by_row = spec.with_row_second_moments
    for shared, storages in ((None, dense_storages(spec)), (by_row, row_storages(spec))):
        made = shared or spec
        for storage in storages:
            buffers, number = [], 0
            for k, buffer in enumerate(made.buffers):
                is_row = made.storages[k : k + 1] == ("row",)
                buffers.append(f"{'ROW' if is_row else STORAGES[storage]}, {made.rule.moments[buffer]}, {number}")
                number += not is_row
            head = f"{spec.name}, {made.name}, {STORAGES[storage]}, {int(shared is not None)}"
            yield f"    X({head}, {len(made.buffers)}, {', '.join(buffers)})"


def header(rules: Iterable[Rule] = RULES.values()) -> str:
    """The whole of rules.h, with a kernel for every spec of these rules: those of the catalogue, or others."""
    wanted = kernel_specs(rules)
    listed = [
        f"    X({s.name}, {len(s.buffers)}, {len(s.coefficients)}, {len(dense_storages(s))}, {len(row_storages(s))})"
        for s in wanted
    ]
    others = [entry for s in wanted for entry in _entries(s)]
    listing = "\n".join(
        [
            "/* X(name, buffers, coefficients, other storages, storages with second moments by row) */",
            " \\\n".join(["#undef RULES\n#define RULES(X)", *listed]),
            "/* X(name, element function, storage, are second moments by row?, buffers; then of each buffer: how it is",
            " * stored, its kind, its number among those that are coded) */",
            " \\\n".join(["#undef STORED_RULES\n#define STORED_RULES(X)", *others]),
            "",
        ]
    )
    elements = [element(made) for s in wanted for made in (s, s.with_row_second_moments) if made is not None]
    return "\n\n".join([PREFACE, *elements, listing])
