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

from .kernel_spec import KernelSpec, source_lines
from .trace import Op, Trace, Value

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
    "mask": "masked({0}, c_threshold, {1})",
    "mean_square": "mean_square({0}, there, width)",
    "pow": "power({0}, {1})",
    "positive": "positive({0})",
}

PREFACE = '''\
"""Generated from a rule.

An element function (every option of the rule is a coefficient: a decay of 0, a shrinking by 1, a threshold of NaN
below which nothing is held), the move of a block of elements in memory, and three kernels:

- `_dense`: blocks of whole tensors, found through a table. A row of it is the addresses of parameter and counters,
  the number of elements, the first block, and the addresses of the buffers; those of the gradients come apart.
- `_rows`: tiles of sorted row numbers; rows that lie within a tile are moved. The next row begins so many elements
  further: `CODES` in coded buffers, `SCALES` in their scales, `SHARED` in what rows share.
- `_seams`: the rows that reach over the end of a tile; none does where all ids are distinct.
"""

import triton
import triton.language as tl

from cadam.engines.cuda.device_functions import (
    agreement,
    by_four,
    chosen,
    coefficients_of,
    columns_in_parts,
    columns_of,
    count,
    count_distinct,
    decayed,
    decode,
    divide,
    divide_roughly,
    fetch,
    half,
    half_between,
    let_next_begin,
    look,
    masked,
    maximum,
    mean_square,
    moved,
    noise_at,
    noise_key,
    proceed,
    put,
    put_coded,
    put_rounded,
    reciprocal,
    replaced,
    round_up_or_down,
    scaled,
    scales_of,
    see,
    shared_noise,
    sign,
    sqrt,
    sqrt_roughly,
    stretch,
    sum_duplicates,
    sum_over_tiles,
    wait_for_last,
    words,
)
'''

MOVE = '''\
@triton.jit
def {name}_fetch(p_, {buffers_}mask, rows, WHOLE: tl.constexpr):
    """The elements at these addresses with their buffers, as they are stored. `rows` have an element in `mask`."""
    p = fetch(p_, mask, WHOLE)
{fetches}    return p, {buffers}


@triton.jit
def {name}_move(
    p, {buffers}{scales}g, p_, {buffers_}
{coefficients}
    start, word, column, key, mask, rows, there, width,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move elements that were fetched from these addresses; where momentum and gradient agree in sign, and new scales.

    Those of a row, or all of a whole block, share what they share; `there` are those that the row or block has. They
    are at these columns from `start` on, where the random bits are those of `word`.
    """
    p = p.to(WORK)
{decoded}    p, {buffers}alignment = {name}(
        p, g, {buffers}
{coefficients}{of_rows}
    )
    if STOCHASTIC:
        p = round_up_or_down(p, noise_at(key, start + column + {apart}, start + {apart}) & 0xFFFF)
    put(p_, p, mask, WHOLE)
{noise}{puts}    aligned = (alignment > 0) if WHOLE else (alignment > 0) & mask
    return aligned, {new_scales}
'''

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
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    if proceed(found_inf, GUARD):
        block = tl.program_id(0)
        i = only if ALONE else tl.load(owners + block)
        row = table + i * {row}
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
{addresses}        c = coefficients + i * stride
{loads_dense}        key = noise_key({seed}, tl.load(c))
        first = (block - tl.load(row + 3)) * CHUNK
        gap = (tl.num_programs(0) - 1).to(tl.int64) * CHUNK
        agree = 0
{vector}        if (first + BLOCK + (BLOCK // CHUNK - 1) * gap <= n) & ((({together}) & 15) == 0):
{all_scales}            start = first
            for k in range(0, BLOCK, UNIT):
                p_ = stretch(p, start, PARAM, True, UNIT)
{whole}                grad = fetch(stretch(g, start, GRAD, True, UNIT), None, True).to(WORK)
                param, {values}= {name}_fetch(p_, {buffers_}None, None, True)
                aligned, {new_scales}= {name}_move(
                    param, {values}{values_of_scales}grad, p_, {buffers_}
{given}
                    start{far},
                    ((start & 0xFFFFFFFF) // 2).to(tl.uint32),
                    tl.arange(0, UNIT),
                    key,
                    None,
                    None,
                    None,
                    UNIT,
                    True,
                    WORK,
                    STOCHASTIC,
                )
{keep_scales}                start += UNIT if CHUNK == BLOCK else tl.where((k + UNIT) % CHUNK == 0, gap + UNIT, UNIT)
{agree}{put_scales}        else:
            for k in range(0, UNIT if UNIT == BLOCK else tl.minimum(n - first, BLOCK).to(tl.int32), UNIT):
                start = first + k + k // CHUNK * gap
                mask = tl.arange(0, UNIT) < tl.minimum(n - start, UNIT).to(tl.int32)
                p_ = stretch(p, start, PARAM, False, UNIT)
{masked}                grad = fetch(stretch(g, start, GRAD, False, UNIT), mask, False).to(WORK)
                param, {values}= {name}_fetch(p_, {buffers_}mask, start < n, False)
{masked_scales}                aligned, {new_scales}= {name}_move(
                    param, {values}{values_of_scales}grad, p_, {buffers_}
{given}
                    start{far},
                    ((start & 0xFFFFFFFF) // 2).to(tl.uint32),
                    tl.arange(0, UNIT),
                    key,
                    mask,
                    start < n,
                    mask,
                    UNIT,
                    False,
                    WORK,
                    STOCHASTIC,
                )
{masked_put}                agree += tl.sum(aligned.to(tl.int32), 0)
        if COUNT:
            counts = tl.load(row + 1).to(tl.pointer_type(tl.int64))
            count(counts, agree, tl.where(first == 0, n, 0))
            see(counts, first == 0, n)
"""

ROWS = """\
@triton.jit(do_not_specialize=["n", "rows", "seed"])
def {name}_rows(
    p,
{pointers}    values,
    keys,
    order,
    sources,
    error,
    partials,
    coefficients,
    counts,
    found_inf,
    seed,
    n,
    rows,
    width,
    WORK: tl.constexpr,
    DISTINCT: tl.constexpr,
    IN_BAGS: tl.constexpr,
    EARLY: tl.constexpr,
    COUNT: tl.constexpr,
    GUARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    SHARED: tl.constexpr,
    BY_FOUR: tl.constexpr,
    PARTS: tl.constexpr,
):
    if EARLY:
        let_next_begin()
    if proceed(found_inf, GUARD):
        column, there = columns_in_parts(width, COLUMNS, EVEN, PARTS)
        key, inside, starts, ends, goes_on, complete = look(keys, error, n, rows, DISTINCT, TILE)
        row = key.to(tl.int64)[:, None, None]
        first = row * width
        place = first + column
        mask = complete & there
        # While these come, the gradients are summed.
        p_ = p + place
{at}        param, {values}= {name}_fetch(p_, {buffers_}mask, complete, False)
{row_scales}        g = sum_duplicates(
            values, order, sources, partials, n, width, column, there, inside, starts, ends, goes_on,
            WORK, DISTINCT, IN_BAGS, TILE,
        )
        if EARLY:
            wait_for_last()  # which makes the coefficients
        c = coefficients
        moving = tl.sum(complete.to(tl.int32))
        if moving > 0:
{loads}            aligned, {new_scales}= {name}_move(
                param, {values}{values_of_scales}g, p_, {buffers_}
{given_rows}
                first, first.to(tl.uint32), column, noise_key(seed, tl.load(c)), mask, complete, there, width,
                False, WORK, STOCHASTIC,
            )
{row_put}            if COUNT:
                touched = 0 if DISTINCT else moving * tl.minimum(width - tl.program_id(1) * COLUMNS, COLUMNS)
                count(counts, tl.sum(aligned.to(tl.int32)), touched)
        if COUNT:
            if DISTINCT:
                count_distinct(counts, inside, n, width, TILE)
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
    EARLY: tl.constexpr,
    COUNT: tl.constexpr,
    GUARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    SHARED: tl.constexpr,
    BY_FOUR: tl.constexpr,
    SPAN: tl.constexpr,
):
    if EARLY:
        wait_for_last()
    if proceed(found_inf, GUARD):
        column, there = columns_of(width, COLUMNS, EVEN)
        row, g, mask, mine = sum_over_tiles(keys, partials, n, rows, width, column, there, WORK, TILE, SPAN)
        complete = mine
{as_row}        first = row * width
        place = first + column
        p_ = p + place
{at}        param, {values}= {name}_fetch(p_, {buffers_}mask, complete, False)
{row_scales}        c = coefficients
        if mine:
{loads}            aligned, {new_scales}= {name}_move(
                param, {values}{values_of_scales}g, p_, {buffers_}
{given_rows}
                first, first.to(tl.uint32), column, noise_key(seed, tl.load(c)), mask, complete, there, width,
                False, WORK, STOCHASTIC,
            )
{row_put}            if COUNT:
                count(counts, tl.sum(aligned.to(tl.int32)), tl.minimum(width - tl.program_id(1) * COLUMNS, COLUMNS))
"""

COEFFICIENTS = '''\
"""Generated from the coefficients of a rule."""

import triton
import triton.language as tl

from cadam.engines.cuda.device_functions import (
    count_step, divide, let_next_begin, maximum, positive, power, reciprocal, sqrt,
)


@triton.jit(do_not_specialize=["size"{as_they_are}])
def {name}_coefficients(
    steps, words, rows, more, found_inf, {tensors}{numbers}size,
    MORE: tl.constexpr, GUARD: tl.constexpr, EARLY: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Count a step of each parameter and put it in a row of its own, with its coefficients; pass words on."""
    if EARLY:
        let_next_begin()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    t = count_step(steps, i, mask, found_inf, GUARD)
{lines}
    row = rows + i * COLUMNS
{stores}
    if MORE:
        tl.store(more + i, tl.load(words + i, mask=mask), mask=mask)
'''

AGREE_CODED = """\
                each += tl.sum(tl.sum(tl.reshape(tl.where(aligned, 1.0, 0.0), (2, UNIT // 8, 4)), 2), 0)
            agree = tl.sum(each, 0).to(tl.int32)
"""

AS_ROW = """\
        row, g, mask = row + tl.zeros((1, 1, 1), tl.int64), g[None, None, :], mask[None, None, :]
        column, there = columns_in_parts(width, COLUMNS, EVEN, 1)
        complete = mine & (row == row)
"""


def filled(names: Iterable[str], indent: int) -> str:
    """A list of arguments over as many lines as it needs."""
    space = " " * indent
    return textwrap.fill(", ".join(names) + ",", 116, initial_indent=space, subsequent_indent=space)


def element(spec: KernelSpec) -> str:
    """The element function of one spec: new parameter, new buffers and alignment."""
    program = spec.program
    if program.alignment is None:
        raise AssertionError("the general update always computes its alignment")
    names = {**{b: f"s_{b}" for b in spec.buffers}, **{c: f"c_{c}" for c in spec.coefficients}}
    results = [program.param, *(program.state[b] for b in spec.buffers), program.alignment]
    return "\n".join(
        [
            "@triton.jit",
            f"def {spec.name}(",
            filled(["p", "g", *names.values(), *(["there", "width"] if spec.storages else [])], 4),
            "):",
            *source_lines(program.ops, TEMPLATES, "    {name} = {value}", names, overrides=faster(spec)),
            f"    return {', '.join(names.get(value.name, value.name) for value in results)}",
            "",
        ]
    )


def faster(spec: KernelSpec) -> dict[str, str]:
    """Faster expressions for some results, where moments are coded: these are found to the bit on every engine.

    So whatever a moment is made of is computed as it is; the step, which no code depends on, may be rounded otherwise.
    """
    if not spec.storages:
        return {}
    program = spec.program
    made_by = {op.out.name: op for op in program.ops}

    def arguments(value: Any, kind: str) -> tuple[Any, ...]:
        """Of the operation of this kind that the value is the result of; none if it is not."""
        op = made_by.get(value.name) if isinstance(value, Value) else None
        return op.args if op is not None and op.kind == kind else ()

    assert program.alignment is not None
    exact = {op.out.name for op in program.needed_for(*program.state.values(), program.alignment)}
    found = {}
    for name, op in made_by.items():
        if op.kind == "add" and (decay := arguments(op.args[1], "scaled")):
            found[name] = f"decayed({{0}}, {decay[0].name}, c_{decay[1].name})"
        elif op.kind == "mul" and program.alignment is op.out and (sign := arguments(op.args[1], "sign")):
            found[name] = f"agreement({{0}}, {sign[0].name})"
        elif op.kind == "sqrt" and name not in exact:
            found[name] = "sqrt_roughly({0})"
        elif op.kind == "div" and name not in exact and any(arguments(a, "sqrt") for a in arguments(op.args[1], "add")):
            found[name] = "divide_roughly({0}, {1})"  # a root and what keeps it from zero: positive
        elif op.kind == "sub" and program.param is op.out and (step := arguments(op.args[1], "mul")):
            found[name] = f"moved({{0}}, {step[0].name}, c_{step[1].name})"
    return found


def kernels(spec: KernelSpec) -> str:
    """The element function of one spec and the kernels around it."""
    buffers, stored = spec.buffers, spec.storages or ("plain",) * len(spec.buffers)
    scaled = [b for b, how in zip(buffers, stored, strict=True) if how == "int8"]

    def each(template: str, separator: str = "") -> str:
        return separator.join(template.format(b=b, number=4 + k) for k, b in enumerate(buffers))

    def each_scale(template: str) -> str:
        return "".join(template.format(b=b, number=4 + len(buffers) + k) for k, b in enumerate(scaled))

    def decoded(b: str, how: str) -> str:
        if how == "int8":
            return f"    s_{b} = decode(s_{b}, e_{b}, {spec.rule.moments.get(b) == 'signed'})\n"
        return f"    s_{b} = s_{b}.to(WORK)\n"

    def kept(k: int, b: str, how: str) -> str:
        signed = spec.rule.moments.get(b) == "signed"
        half = f"{'half_between' if how == 'int8' else 'half'}(noise, column, {k > 0})"
        if how == "int8":
            return f"    new_{b} = put_coded(s_{b}_, s_{b}, {half}, mask, there, WHOLE, {signed})\n"
        if how == "bfloat16":
            return f"    put_rounded(s_{b}_, s_{b}, {half}, mask, WHOLE, {signed})\n"
        return f"    put(s_{b}_, s_{b}, {'rows' if how == 'row' else 'mask'}, WHOLE)\n"

    def pointers(whole: bool) -> str:
        how = "words" if spec.storages else "stretch"
        return each(f"                s_{{b}}_ = {how}(s_{{b}}, start, STATE, {whole}, UNIT)\n")

    coefficients = [f"c_{name}" for name in spec.coefficients]
    loads = [f"{c} = tl.load(c + {k}).to(WORK)\n" for k, c in enumerate(coefficients, 1)]
    if spec.row_steps:
        own = [f"c_{name}" for name in spec.row_step_coefficients]
        loads = [load for c, load in zip(coefficients, loads, strict=True) if c not in own]
        loads.append(f"own = coefficients_of(row_steps + row, by_step, {len(own)}, complete)\n")
        loads += [f"{c} = tl.load(own + {k}, mask=complete, other=0)\n" for k, c in enumerate(own)]
    fetches = [
        f"    s_{b} = fetch(s_{b}_, {'rows' if how == 'row' else 'mask'}, WHOLE)\n"
        for b, how in zip(buffers, stored, strict=True)
    ]
    where = {"row": "s_{0} + row * SHARED", "plain": "s_{0} + place"}
    at = [
        f"        s_{b}_ = {where.get(how, 'by_four(s_{0}, BY_FOUR) + (row * CODES + column)').format(b)}\n"
        for b, how in zip(buffers, stored, strict=True)
    ]
    values = {
        "name": spec.name,
        "row": 4 + len(buffers) + len(scaled) + bool(spec.storages),
        "buffers": each("s_{b}, "),
        "buffers_": each("s_{b}_, "),
        "new_scales": each_scale("new_{b}, "),
        "keep_scales": each_scale("                all_{b} = replaced(all_{b}, k // UNIT, new_{b})\n"),
        "put_scales": each_scale("            tl.store(e_{b}_, all_{b})\n"),
        "masked_put": each_scale("                put(e_{b}_, new_{b}, start < n, False)\n"),
        "row_put": each_scale("            put(e_{b}_, new_{b}, complete, False)\n"),
        "scales": each_scale("e_{b}, "),
        "fetches": "".join(fetches),
        "all_scales": each_scale(
            "            e_{b}_ = scales_of(e_{b}, first, gap, BLOCK, UNIT, CHUNK)\n"
            "            all_{b} = tl.load(e_{b}_)\n"
        ),
        "masked_scales": each_scale(
            "                e_{b}_ = e_{b}.to(tl.pointer_type(tl.uint8)) + start // UNIT\n"
            "                scale_{b} = fetch(e_{b}_, start < n, False)\n"
        ),
        "row_scales": each_scale("        scale_{b} = fetch(e_{b}_, complete, False)\n"),
        "values_of_scales": each_scale("scale_{b}, "),
        "decoded": "".join(map(decoded, buffers, stored)),
        "loads": textwrap.indent("".join(loads), 12 * " "),
        "loads_dense": textwrap.indent("".join(loads), 8 * " "),
        "coefficients": filled(coefficients, 8),
        "given": filled(coefficients, 20),
        "given_rows": filled(coefficients, 16),
        "vector": "        each = tl.zeros((UNIT // 8,), tl.float32)\n" if spec.storages else "",
        "agree": AGREE_CODED if spec.storages else "                agree += tl.sum(aligned.to(tl.int32), 0)\n",
        "of_rows": "\n        there, width," if spec.storages else "",
        "noise": "    noise = shared_noise(key, start, word, column)\n" * bool(spec.quantized_buffers),
        "puts": "".join(map(kept, range(len(buffers)), buffers, stored)),
        "addresses": each("        s_{b} = tl.load(row + {number})\n")
        + each_scale("        e_{b} = tl.load(row + {number})\n"),
        "together": " | ".join(["p", "g", *(f"s_{b}" for b in buffers)]),
        "whole": pointers(True) + each_scale("                scale_{b} = chosen(all_{b}, k // UNIT)\n"),
        "masked": pointers(False),
        "pointers": each("    s_{b},\n")
        + each_scale("    e_{b},\n")
        + "    row_steps,\n    by_step,\n" * spec.row_steps,
        "at": "".join(at) + each_scale("        e_{b}_ = e_{b} + row * SCALES\n"),
        "values": each("value_{b}, "),
        "as_row": AS_ROW if spec.storages else "",
        # Coded moments have a seed for each parameter, and its elements noise apart from theirs.
        "seed": f"tl.load(row + {3 + len(buffers) + len(scaled) + 1})" if spec.storages else "seed",
        "far": "" if spec.storages else " + (i.to(tl.int64) << 40)",
        "apart": "(1 << 52)" if spec.storages else "0",
    }

    rows_only = "row" in stored or spec.row_steps
    templates = [MOVE, ROWS, SEAMS] if rows_only else [MOVE, DENSE, ROWS, SEAMS]
    return "\n\n".join([element(spec), *(template.format(**values) for template in templates)])


def source(*wanted: KernelSpec) -> str:
    """A whole module of the kernels of these specs."""
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
    # As bits: some versions of Triton take a number for a float32, whatever is said of it.
    read = [f"    {x.name} = {x.name}_.to(tl.int64).to(tl.float64, bitcast=True)" for x in given]
    read += [f"    {x} = tl.load({x}_).to(tl.float64)" for x in trace.inputs]
    text = COEFFICIENTS.format(
        name=name,
        tensors="".join(f"{x}_, " for x in trace.inputs),
        numbers="".join(f"{x.name}_: tl.int64, " for x in given),
        as_they_are="".join(f', "{x.name}_"' for x in given),
        lines="\n".join([*read, *source_lines(ops, TEMPLATES, "    {name} = {value}", {})]),
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
