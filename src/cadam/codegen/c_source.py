"""Rules as C: the header rules.h of the compiled library, from the one definition of each rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..rules import RULES, Rule
from .kernel_spec import Structure, lines, structures
from .trace import Op

MAX_CODED = 2  # as in native/cadam.h

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
    "hold": "HOLD({0}, {1})",
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


def element(structure: Structure) -> str:
    """The coefficients and the element function of one structure, or both of its functions."""
    name, program = structure.name, structure.program
    if program.alignment is None:
        raise AssertionError("the general update always computes its alignment")
    means = [op for op in program.ops if op.kind == "mean_square"]
    results = [
        f"    *p_ = {program.param.name};",
        *(f"    *{b}_ = {program.state[b].name};" for b in structure.buffers),
        f"    *alignment_ = {program.alignment.name};",
    ]
    text = [f"struct COEFFICIENTS({name}) {{", f"    scalar {', '.join(structure.coefficients)};", "};", ""]
    if means:
        (squared,) = means[0].args
        text += _function(f"{name}_squared", structure, program.needed_for(squared), "real *squared_")
        unused = [f"    (void){name};" for name in ("p", *structure.buffers)]
        text += [*unused, f"    *squared_ = {squared.name};", "}", ""]
    text += _function(
        name, structure, program.ops, "real mean_square, real *alignment_" if means else "real *alignment_"
    )
    return "\n".join([*text, *results, "}"])


def _function(name: str, structure: Structure, ops: Iterable[Op], more: str) -> list[str]:
    """The head of a function with these operations, and its lines."""
    return [
        f"static inline void ELEMENT({name})(",
        f"    const struct COEFFICIENTS({structure.name}) *restrict c, real *p_, real g,",
        "".join(["    ", *(f"real *{b}_, " for b in structure.buffers), f"{more})"]),
        "{",
        "    const real p = *p_;",
        *(f"    const real {b} = *{b}_;" for b in structure.buffers),
        *lines(
            ops,
            TEMPLATES,
            "    const __auto_type {name} = {value};",
            {c: f"c->{c}" for c in structure.coefficients},
            "(scalar){!r}",
        ),
    ]


STORAGES = {"float32": "F32", "bfloat16": "BF16", "int8": "INT8"}


def stored(structure: Structure) -> list[str]:
    """The storages of moments, other than float32, that there are kernels for."""
    return ["bfloat16", "int8"] if structure.kinds else []


def stored_by_row(structure: Structure) -> list[str]:
    """The storages of first moments that there are kernels for where second moments are those of rows."""
    kinds = [structure.rule.moments.get(buffer) for buffer in structure.buffers]
    if structure.by_row is None:
        return []
    return list(STORAGES) if "maximum" not in kinds and kinds.count("signed") <= MAX_CODED else ["float32"]


def _entries(structure: Structure) -> Iterator[str]:
    """Each kernel for other storages: rule, element function, storage, is it by row?, buffers; then of each buffer
    how it is stored, its kind, and its number among those that are coded."""
    by_row = structure.by_row
    for shared, storages in ((None, stored(structure)), (by_row, stored_by_row(structure))):
        made = shared or structure
        for storage in storages:
            buffers, number = [], 0
            for k, buffer in enumerate(made.buffers):
                is_row = made.stored[k : k + 1] == ("row",)
                buffers.append(f"{'ROW' if is_row else STORAGES[storage]}, {made.rule.moments[buffer]}, {number}")
                number += not is_row
            head = f"{structure.name}, {made.name}, {STORAGES[storage]}, {int(shared is not None)}"
            yield f"    X({head}, {len(made.buffers)}, {', '.join(buffers)})"


def header(rules: Iterable[Rule] = RULES.values()) -> str:
    """The whole of rules.h, with a kernel for every structure of these rules: those of the catalogue, or others."""
    wanted = structures(rules)
    listed = [
        f"    X({s.name}, {len(s.buffers)}, {len(s.coefficients)}, {len(stored(s))}, {len(stored_by_row(s))})"
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
    elements = [element(made) for s in wanted for made in (s, s.by_row) if made is not None]
    return "\n\n".join([PREFACE, *elements, listing])
