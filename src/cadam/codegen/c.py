"""Rules as C: the header rules.h of the compiled library, from the one definition of each rule."""

from __future__ import annotations

from collections.abc import Iterable

from ..rules import RULES, Rule
from .structure import Structure, lines, structures

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
}

PREFACE = """\
/* Generated from the rules in cadam/rules.
 *
 * An element function for each rule and a list of them. A `real` is a number or a vector, a `scalar` a number. Every
 * option of a rule is a
 * coefficient: a decay of 0, a shrinking by 1, a threshold of NaN below which nothing is held. */"""


def element(structure: Structure) -> str:
    """The coefficients and the element function of one structure."""
    name, program = structure.name, structure.program
    body = lines(
        program.ops,
        TEMPLATES,
        "    const __auto_type {name} = {value};",
        {c: f"c->{c}" for c in structure.coefficients},
        "(scalar){!r}",
    )
    if program.alignment is None:
        raise AssertionError("the general update always computes its alignment")
    return "\n".join(
        [
            f"struct COEFFICIENTS({name}) {{",
            f"    scalar {', '.join(structure.coefficients)};",
            "};",
            "",
            f"static inline void ELEMENT({name})(",
            f"    const struct COEFFICIENTS({name}) *restrict c, real *p_, real g,",
            "".join(["    ", *(f"real *{b}_, " for b in structure.buffers), "real *alignment_)"]),
            "{",
            "    const real p = *p_;",
            *(f"    const real {b} = *{b}_;" for b in structure.buffers),
            *body,
            f"    *p_ = {program.param.name};",
            *(f"    *{b}_ = {program.state[b].name};" for b in structure.buffers),
            f"    *alignment_ = {program.alignment.name};",
            "}",
        ]
    )


def header(rules: Iterable[Rule] = RULES.values()) -> str:
    """The whole of rules.h, with a kernel for every structure of these rules: those of the catalogue, or others."""
    wanted = structures(rules)
    listed = [f"    X({s.name}, {len(s.buffers)}, {len(s.coefficients)}, {int(bool(s.kinds))})" for s in wanted]
    coded = [f"    X({s.name}, {len(s.kinds)}, {s.kinds[0]}, {s.kinds[-1]})" for s in wanted if s.kinds]
    listing = "\n".join(
        [
            "/* X(name, buffers, coefficients, is its state coded in other storages?) */",
            " \\\n".join(["#undef RULES\n#define RULES(X)", *listed]),
            "/* X(name, buffers, the kinds of the first and the last) */",
            " \\\n".join(["#undef CODED_RULES\n#define CODED_RULES(X)", *coded]),
            "",
        ]
    )
    return "\n\n".join([PREFACE, *map(element, wanted), listing])
