"""Rules as Triton: the kernels of a rule, generated from its one definition when they are first used.

To generate them takes no Triton. Its cache on disk finds a kernel by source and line number, so a second process
compiles nothing.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
import textwrap
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from .program import Op, Trace, Value
from .structure import Structure, lines

TEMPLATES = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "divide({0}, {1})",
    "neg": "-{0}",
    "reciprocal": "reciprocal({0})",
    "sqrt": "sqrt({0})",
    "sign": "sign({0})",
    "maximum": "maximum({0}, {1})",
    "scaled": "scaled({0}, {1})",
    "hold": "hold({0}, c_threshold, {1})",
    "mean_square": "mean_square({0}, mask, width)",
    "pow": "power({0}, {1})",
    "positive": "positive({0})",
}

PREFACE = '''\
"""Generated from a rule.

An element function (every option of the rule is a coefficient: a decay of 0, a shrinking by 1, a threshold of NaN
below which nothing is held), the move of a block of elements in memory, and three kernels:

- `_dense`: blocks of whole tensors, found through a table. A row of it is the addresses of parameter and counters,
  the number of elements, the first block, and the addresses of the buffers; those of the gradients come apart.
- `_rows`: tiles of sorted row numbers; rows that lie within a tile are moved.
- `_seams`: the rows that reach over the end of a tile.
"""

import triton
import triton.language as tl

from cadam.engines.cuda.blocks import (
    blocks_of,
    count,
    divide,
    fetch,
    fetch_coded,
    fetch_row,
    hold,
    maximum,
    mean_square,
    noise_at,
    proceed,
    put,
    put_coded,
    put_row,
    reciprocal,
    round_up_or_down,
    round_randomly,
    scaled,
    scales_of,
    see,
    sign,
    sqrt,
    stretch,
    sum_duplicates,
    sum_over_tiles,
)
'''

MOVE = '''\
@triton.jit
def {name}_move(
    p_, g, {buffers_}c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
{fetches}{loads}    p, {buffers}alignment = {name}(
        p, g, {buffers}
{coefficients}
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
{puts}    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)
'''

CODED_MOVE = '''\
@triton.jit
def {name}_move(
    p_, g, {buffers_}{scales_}c, place, far, seed, mask, width,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses, rows or blocks that share what they share; 1 where the signs agree."""
    p = fetch(p_, mask, WHOLE, WORK)
{fetches}{loads}    p, {buffers}alignment = {name}(
        p, g, {buffers}
{coefficients}
        mask, width,
    )
    noise = noise_at(place, far, seed, tl.load(c))
    if STOCHASTIC:
        p = round_randomly(p, place + (1 << 52), seed, tl.load(c))
    put(p_, p, mask, WHOLE)
{puts}    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)
'''

CODED_DENSE = """\
@triton.jit(do_not_specialize=["only", "seed"])
def {name}_dense(
    table,
    grads,
    coefficients,
    stride,
    owners,
    only,
    found_inf,
    seed,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    WORK: tl.constexpr,
    ALONE: tl.constexpr,
    COUNT: tl.constexpr,
    GUARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if proceed(found_inf, GUARD):
        block = tl.program_id(0)
        i = only if ALONE else tl.load(owners + block)
        row = table + i * {row}
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
{addresses}        own = tl.load(row + {row} - 1)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK // 256)[:, None] * 256 + tl.arange(0, 256)[None, :]
        if (start + BLOCK <= n) & ((({together}) & 15) == 0):
            aligned = {name}_move(
                blocks_of(p, start, PARAM, True, BLOCK),
                fetch(blocks_of(g, start, GRAD, True, BLOCK), None, True, WORK),
{whole}                c,
                place,
                start,
                own,
                None,
                256,
                True,
                WORK,
                STOCHASTIC,
            )
            agree = tl.sum(aligned)
        else:
            mask = place < n
            aligned = {name}_move(
                blocks_of(p, start, PARAM, False, BLOCK),
                fetch(blocks_of(g, start, GRAD, False, BLOCK), mask, False, WORK),
{masked}                c,
                place,
                start,
                own,
                mask,
                256,
                False,
                WORK,
                STOCHASTIC,
            )
            agree = tl.sum(aligned)
        if COUNT:
            counts = tl.load(row + 1).to(tl.pointer_type(tl.int64))
            count(counts, agree, tl.where(start == 0, n, 0))
            see(counts, start == 0, n)
"""

DENSE = """\
@triton.jit(do_not_specialize=["only", "seed"])
def {name}_dense(
    table,
    grads,
    coefficients,
    stride,
    owners,
    only,
    found_inf,
    seed,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    WORK: tl.constexpr,
    ALONE: tl.constexpr,
    COUNT: tl.constexpr,
    GUARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if proceed(found_inf, GUARD):
        block = tl.program_id(0)
        i = only if ALONE else tl.load(owners + block)
        row = table + i * {row}
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
{addresses}        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & ((({together}) & 15) == 0):
            aligned = {name}_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
{whole}                c,
                place + (i.to(tl.int64) << 40),
                seed,
                None,
                True,
                WORK,
                STOCHASTIC,
            )
            agree = tl.sum(aligned, 0)
        else:
            mask = place < n
            aligned = {name}_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
{masked}                c,
                place + (i.to(tl.int64) << 40),
                seed,
                mask,
                False,
                WORK,
                STOCHASTIC,
            )
            agree = tl.sum(aligned, 0)
        if COUNT:
            counts = tl.load(row + 1).to(tl.pointer_type(tl.int64))
            count(counts, agree, tl.where(start == 0, n, 0))
            see(counts, start == 0, n)
"""

ROWS = """\
@triton.jit(do_not_specialize=["n", "rows", "seed"])
def {name}_rows(
    p,
{pointers}    values,
    keys,
    order,
    sources,
    partials,
    coefficients,
    counts,
    found_inf,
    seed,
    n,
    rows,
    width,
    WORK: tl.constexpr,
    ORDERED: tl.constexpr,
    IN_BAGS: tl.constexpr,
    COUNT: tl.constexpr,
    GUARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if proceed(found_inf, GUARD):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        row, g, mask = sum_duplicates(
            values, keys, order, sources, partials, n, rows, width, column, WORK, ORDERED, IN_BAGS, TILE, COLUMNS
        )
        place = row[:, None] * width + column[None, :]
        aligned = {name}_move(
            p + place, g, {at}
            coefficients, place, {far}seed, mask, {width}False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)
"""

SEAMS = """\
@triton.jit(do_not_specialize=["n", "rows", "seed"])
def {name}_seams(
    p,
{pointers}    keys,
    partials,
    coefficients,
    counts,
    found_inf,
    seed,
    n,
    rows,
    width,
    WORK: tl.constexpr,
    COUNT: tl.constexpr,
    GUARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
):
    if proceed(found_inf, GUARD):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        row, g, mask = sum_over_tiles(keys, partials, n, rows, width, column, WORK, TILE, COLUMNS, SPAN)
{as_rows}        place = row * width + column
        aligned = {name}_move(
            p + place, g, {at}
            coefficients, place, {far}seed, mask, {width}False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
"""

COEFFICIENTS = '''\
"""Generated from the coefficients of a rule."""

import triton
import triton.language as tl

from cadam.engines.cuda.blocks import count_step, divide, maximum, positive, power, reciprocal, sqrt


@triton.jit(do_not_specialize=["size"])
def {name}_coefficients(
    steps, numbers, words, rows, more, found_inf, {tensors}size,
    MORE: tl.constexpr, GUARD: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Count a step of each parameter and put it in a row of its own, with its coefficients; pass words on."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    t = count_step(steps, i, mask, found_inf, GUARD)
{lines}
    row = rows + i * COLUMNS
{stores}
    if MORE:
        tl.store(more + i, tl.load(words + i, mask=mask), mask=mask)
'''

AS_ROWS = """\
        row, g, mask, column = row + tl.zeros((1, 1), tl.int64), g[None, :], mask[None, :], column[None, :]
"""


def filled(names: Iterable[str], indent: int) -> str:
    """A list of arguments over as many lines as it needs."""
    space = " " * indent
    return textwrap.fill(", ".join(names) + ",", 116, initial_indent=space, subsequent_indent=space)


def element(structure: Structure) -> str:
    """The element function of one structure: new parameter, new buffers and alignment."""
    program = structure.program
    if program.alignment is None:
        raise AssertionError("the general update always computes its alignment")
    names = {**{b: f"s_{b}" for b in structure.buffers}, **{c: f"c_{c}" for c in structure.coefficients}}
    results = [program.param, *(program.state[b] for b in structure.buffers), program.alignment]
    return "\n".join(
        [
            "@triton.jit",
            f"def {structure.name}(",
            filled(["p", "g", *names.values(), *(["mask", "width"] if structure.stored else [])], 4),
            "):",
            *lines(program.ops, TEMPLATES, "    {name} = {value}", names),
            f"    return {', '.join(names.get(value.name, value.name) for value in results)}",
            "",
        ]
    )


def kernels(structure: Structure) -> str:
    """The element function of one structure and the kernels around it."""
    buffers, stored = structure.buffers, structure.stored or ("plain",) * len(structure.buffers)
    scaled = [b for b, how in zip(buffers, stored, strict=True) if how == "int8"]

    def each(template: str, separator: str = "") -> str:
        return separator.join(template.format(b=b, number=4 + k) for k, b in enumerate(buffers))

    def each_scale(template: str) -> str:
        return "".join(template.format(b=b, number=4 + len(buffers) + k) for k, b in enumerate(scaled))

    def fetched(b: str, how: str) -> str:
        signed = structure.rule.moments.get(b) == "signed"
        if how == "int8":
            return f"    s_{b} = fetch_coded(s_{b}_, e_{b}_, mask, WHOLE, {signed})\n"
        return f"    s_{b} = fetch{'_row' if how == 'row' else ''}(s_{b}_, mask, WHOLE, WORK)\n"

    def kept(k: int, b: str, how: str) -> str:
        signed, half = structure.rule.moments.get(b) == "signed", "noise >> 16" if k else "noise & 0xFFFF"
        if how == "int8":
            return f"    put_coded(s_{b}_, e_{b}_, s_{b}, {half}, mask, WHOLE, {signed})\n"
        if how == "bfloat16":
            return f"    put(s_{b}_, round_up_or_down(s_{b}, {half}), mask, WHOLE)\n"
        return f"    put{'_row' if how == 'row' else ''}(s_{b}_, s_{b}, mask, WHOLE)\n"

    stretch = "blocks_of" if structure.stored else "stretch"
    scales = each_scale("                scales_of(e_{b}, start, BLOCK),\n")
    columns = [f"tl.load(c + {k}).to(WORK)" for k in range(1, 1 + len(structure.coefficients))]
    assigned = [f"    c_{c} = {load}\n" for c, load in zip(structure.coefficients, columns, strict=True)]
    values = {
        "name": structure.name,
        "row": 4 + len(buffers) + len(scaled) + bool(structure.stored),
        "buffers": each("s_{b}, "),
        "buffers_": each("s_{b}_, "),
        "scales_": each_scale("e_{b}_, "),
        "fetches": "".join(map(fetched, buffers, stored)),
        "loads": "".join(assigned),
        "coefficients": filled((f"c_{c}" for c in structure.coefficients), 8),
        "puts": "".join(map(kept, range(len(buffers)), buffers, stored)),
        "addresses": each("        s_{b} = tl.load(row + {number})\n")
        + each_scale("        e_{b} = tl.load(row + {number})\n"),
        "together": " | ".join(["p", "g", *(f"s_{b}" for b in buffers)]),
        "whole": each(f"                {stretch}(s_{{b}}, start, STATE, True, BLOCK),\n") + scales,
        "masked": each(f"                {stretch}(s_{{b}}, start, STATE, False, BLOCK),\n") + scales,
        "pointers": each("    s_{b},\n") + each_scale("    e_{b},\n"),
        "far": "place, " if structure.stored else "",
        "width": "width, " if structure.stored else "",
        "as_rows": AS_ROWS if structure.stored else "",
    }

    def text_of(template: str, index: str) -> str:
        at = [f"s_{b} + {f'row{index}' if how == 'row' else 'place'}," for b, how in zip(buffers, stored, strict=True)]
        return template.format(**values, at=" ".join([*at, *(f"e_{b} + row{index}," for b in scaled)]))

    if not structure.stored:
        templates = [(MOVE, ""), (DENSE, ""), (ROWS, ""), (SEAMS, "")]
    elif "row" in stored:
        templates = [(CODED_MOVE, ""), (ROWS, "[:, None]"), (SEAMS, "")]
    else:
        templates = [(CODED_MOVE, ""), (CODED_DENSE, ""), (ROWS, "[:, None]"), (SEAMS, "")]
    return "\n\n".join([element(structure), *(text_of(*template) for template in templates)])


def source(*wanted: Structure) -> str:
    """A whole module of the kernels of these structures."""
    text = "\n\n".join([PREFACE, *map(kernels, wanted)])
    return "\n".join(map(str.rstrip, text.split("\n")))


def coefficients(name: str, trace: Trace, results: Iterable[Any]) -> tuple[str, list[float]]:
    """The kernel that computes these results of `trace` in float64, and the numbers that it must be given.

    Values ``x0``, ``x1``... are read from tensors, and ``t`` is the step count. Numbers are no part of the source, so
    that it is the same whatever the options' values.
    """
    given: list[Value] = []
    numbers: list[float] = []

    def of(operand: Any) -> Value:
        if isinstance(operand, Value):
            return operand
        numbers.append(float(operand))
        given.append(Value(trace, f"n{len(given)}", scalar=True))
        return given[-1]

    ops = [Op(op.kind, op.out, tuple(map(of, op.args))) for op in trace.ops]
    stores = ["t", *(of(result).name for result in results)]
    read = [f"    {value.name} = tl.load(numbers + {k})" for k, value in enumerate(given)]
    read += [f"    {x} = tl.load({x}_).to(tl.float64)" for x in trace.inputs]
    text = COEFFICIENTS.format(
        name=name,
        tensors="".join(f"{x}_, " for x in trace.inputs),
        lines="\n".join([*read, *lines(ops, TEMPLATES, "    {name} = {value}", {})]),
        stores="\n".join(f"    tl.store(row + {k}, {value}, mask=mask)" for k, value in enumerate(stores)),
    )
    return text, numbers


def module(name: str, text: str) -> ModuleType:
    """Generated kernels, ready to launch; the same source has the same name in every process.

    Triton reads the source of its kernels with `inspect`, which finds it in `linecache`: nothing is written.
    """
    name = f"{__package__}.kernels.{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        path = f"<{name}>"
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        made = ModuleType(name)
        exec(compile(text, path, "exec"), made.__dict__)
        sys.modules[name] = made
    return sys.modules[name]
