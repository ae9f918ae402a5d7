"""Generation of Triton kernels from rules, when they are first used.

Input: kernel specifications. Output: the text of a Python module with, for each of them, an element function and the
kernels `_dense`, `_rows` and `_seams` around it (`PREFACE` describes them). Generating the text does not need Triton.
Triton finds a compiled kernel in its cache on disk by source and line number, so a second process compiles nothing.
The element function of SGD without momentum::

    @triton.jit
    def sgdm_without_momentum_buffer(
        p, g, c_l2, c_shrink, c_unscale, c_threshold, c_momentum, c_weight, c_lr,
    ):
        t0 = g * c_unscale
        t1 = scaled(p, c_l2)
        t2 = t0 + t1
        t3 = sign(t2)
        t4 = t2 * t3
        t5 = masked(t4, c_threshold, t2)
        t6 = p * c_shrink
        t7 = t5 * c_lr
        t8 = t6 - t7
        return t8, t4
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

FIRST_BUFFER = 4
"""Column of the first buffer in the table of `_dense`; parameter, counters, size and first block come before it."""

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
"""Triton expression of each kind of operation."""

PREFACE = '''\
"""Generated from a rule by cadam/codegen/triton_source.py.

Every rule has an element function, functions that load and update a block of elements, and up to three kernels. Every
option of the rule is a coefficient: without weight decay, `l2` is 0 and `shrink` is 1; without confidence, `threshold`
is NaN, which masks nothing.

- `_dense`: updates blocks of whole tensors. Each tensor has a row in `table`: addresses of parameter and counters,
  number of elements, first block, addresses of buffers and scales, and the seed of quantized moments. The addresses of
  the gradients are in `grads`.
- `_rows`: updates the rows of a table that a sparse gradient contains. Row numbers are sorted and cut into tiles; rows
  whose entries are all in one tile are updated. `CODES`, `SCALES` and `SHARED` are the strides between two rows in
  quantized buffers, in their scales and in buffers with one value per row.
- `_seams`: updates the rows whose entries continue in the next tile. There are none if all ids are distinct.
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
    """Load elements and their buffers in their storage format. `rows` marks the rows with an element in `mask`."""
    p = fetch(p_, mask, WHOLE)
{fetches}    return p, {buffers}


@triton.jit
def {name}_move(
    p, {buffers}{scales}g, p_, {buffers_}
{coefficients}
    start, word, column, key, mask, rows, there, width,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Update elements that were loaded from these addresses; return which are aligned, and the new scales.

    The elements are at the columns `column` from `start` on, and `word` is the index of their random bits. `there`
    marks the elements that the row or block really has, over which shared scales and means are computed.
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
{addresses}{scale_addresses}        c = coefficients + i * stride
{loads_dense}        key = noise_key({seed}, tl.load(c))
        first = (block - tl.load(row + 3)) * CHUNK
        gap = (tl.num_programs(0) - 1).to(tl.int64) * CHUNK
        agree = 0
{vector}        if (first + BLOCK + (BLOCK // CHUNK - 1) * gap <= n) & ((({together}) & 15) == 0):
{all_scales}            start = first
            for k in range(0, BLOCK, UNIT):
                p_ = stretch(p, start, PARAM, True, UNIT)
{whole}{whole_scales}                grad = fetch(stretch(g, start, GRAD, True, UNIT), None, True).to(WORK)
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
{pointers}{scale_pointers}{row_step_pointers}    values,
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
        key, inside, starts, ends, is_continued, complete = look(keys, error, n, rows, DISTINCT, TILE)
        row = key.to(tl.int64)[:, None, None]
        first = row * width
        place = first + column
        mask = complete & there
        # Load parameter and buffers first: the loads overlap with summing the gradients.
        p_ = p + place
{at}{at_scales}        param, {values}= {name}_fetch(p_, {buffers_}mask, complete, False)
{row_scales}        g = sum_duplicates(
            values, order, sources, partials, n, width, column, there, inside, starts, ends, is_continued,
            WORK, DISTINCT, IN_BAGS, TILE,
        )
        if EARLY:
            wait_for_last()  # the previous kernel computes the coefficients
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
{pointers}{scale_pointers}{row_step_pointers}    keys,
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
{at}{at_scales}        param, {values}= {name}_fetch(p_, {buffers_}mask, complete, False)
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
    """Advance the step of each parameter, store step and coefficients in its row, and copy further words."""
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

AGREE_QUANTIZED = """\
                each += tl.sum(tl.sum(tl.reshape(tl.where(aligned, 1.0, 0.0), (2, UNIT // 8, 4)), 2), 0)
            agree = tl.sum(each, 0).to(tl.int32)
"""

AS_ROW = """\
        row, g, mask = row + tl.zeros((1, 1, 1), tl.int64), g[None, None, :], mask[None, None, :]
        column, there = columns_in_parts(width, COLUMNS, EVEN, 1)
        complete = mine & (row == row)
"""


def fill_arguments(names: Iterable[str], indent: int) -> str:
    """Return a list of arguments, wrapped to as many lines as it needs."""
    space = " " * indent
    return textwrap.fill(", ".join(names) + ",", 116, initial_indent=space, subsequent_indent=space)


def element(spec: KernelSpec) -> str:
    """Return the element function of a specification; its results are new parameter, new buffers and alignment."""
    program = spec.program
    if program.alignment is None:
        raise AssertionError("the general update always computes its alignment")
    names = {**{b: f"s_{b}" for b in spec.buffers}, **{c: f"c_{c}" for c in spec.coefficients}}
    results = [program.param, *(program.state[b] for b in spec.buffers), program.alignment]
    return "\n".join(
        [
            "@triton.jit",
            f"def {spec.name}(",
            fill_arguments(["p", "g", *names.values(), *(["there", "width"] if spec.storages else [])], 4),
            "):",
            *source_lines(program.ops, TEMPLATES, "    {name} = {value}", names, overrides=fast_expressions(spec)),
            f"    return {', '.join(names.get(value.name, value.name) for value in results)}",
            "",
        ]
    )


def fast_expressions(spec: KernelSpec) -> dict[str, str]:
    """Return faster expressions for some results of a kernel with quantized moments, by the name of the result.

    Quantized moments must be the same to the bit on every engine, so everything they are computed from keeps its exact
    expression. No stored moment depends on the step, so its square root and quotient may be approximate.
    """
    if not spec.storages:
        return {}
    program = spec.program
    op_of = {op.out.name: op for op in program.ops}

    def arguments(value: Any, kind: str) -> tuple[Any, ...]:
        """Return the arguments of the operation that computes the value if it is of this kind, else nothing."""
        op = op_of.get(value.name) if isinstance(value, Value) else None
        return op.args if op is not None and op.kind == kind else ()

    assert program.alignment is not None
    exact = {op.out.name for op in program.needed_for(*program.state.values(), program.alignment)}
    fast = {}
    for name, op in op_of.items():
        if op.kind == "add" and (decay := arguments(op.args[1], "scaled")):
            fast[name] = f"decayed({{0}}, {decay[0].name}, c_{decay[1].name})"
        elif op.kind == "mul" and program.alignment is op.out and (sign := arguments(op.args[1], "sign")):
            fast[name] = f"agreement({{0}}, {sign[0].name})"
        elif op.kind == "sqrt" and name not in exact:
            fast[name] = "sqrt_roughly({0})"
        elif op.kind == "div" and name not in exact and any(arguments(a, "sqrt") for a in arguments(op.args[1], "add")):
            fast[name] = "divide_roughly({0}, {1})"  # its divisor, a square root plus eps, is positive
        elif op.kind == "sub" and program.param is op.out and (step := arguments(op.args[1], "mul")):
            fast[name] = f"moved({{0}}, {step[0].name}, c_{step[1].name})"
    return fast


def kernels(spec: KernelSpec) -> str:
    """Return the element function of a specification and the kernels around it."""
    fields = {
        "name": spec.name,
        **_buffer_fields(spec),
        **_scale_fields(spec),
        **_coefficient_fields(spec),
        **_quantization_fields(spec),
    }
    is_for_rows_only = "row" in spec.storages or spec.row_steps
    templates = [MOVE, ROWS, SEAMS] if is_for_rows_only else [MOVE, DENSE, ROWS, SEAMS]
    return "\n\n".join([element(spec), *(template.format(**fields) for template in templates)])


def _storages(spec: KernelSpec) -> dict[str, str]:
    """Return the storage of each buffer, by its name."""
    return dict(zip(spec.buffers, spec.storages or ("plain",) * len(spec.buffers), strict=True))


def _scaled_buffers(spec: KernelSpec) -> list[str]:
    """Return the buffers that have scales."""
    return [buffer for buffer, storage in _storages(spec).items() if storage == "int8"]


def _buffer_fields(spec: KernelSpec) -> dict[str, str]:
    """Return the fields of the templates that read, write and address the buffers."""
    storages = _storages(spec)

    def each(template: str) -> str:
        return "".join(template.format(b=b, number=FIRST_BUFFER + k) for k, b in enumerate(spec.buffers))

    def block_pointers(whole: bool) -> str:
        function = "words" if spec.storages else "stretch"
        return each(f"                s_{{b}}_ = {function}(s_{{b}}, start, STATE, {whole}, UNIT)\n")

    fetches, row_pointers = "", ""
    for b, storage in storages.items():
        fetches += f"    s_{b} = fetch(s_{b}_, {'rows' if storage == 'row' else 'mask'}, WHOLE)\n"
        if storage == "row":
            pointer = f"s_{b} + row * SHARED"
        elif storage == "plain":
            pointer = f"s_{b} + place"
        else:
            pointer = f"by_four(s_{b}, BY_FOUR) + (row * CODES + column)"
        row_pointers += f"        s_{b}_ = {pointer}\n"
    return {
        "buffers": each("s_{b}, "),
        "buffers_": each("s_{b}_, "),
        "values": each("value_{b}, "),
        "fetches": fetches,
        "addresses": each("        s_{b} = tl.load(row + {number})\n"),
        "together": " | ".join(["p", "g", *(f"s_{b}" for b in spec.buffers)]),
        "whole": block_pointers(True),
        "masked": block_pointers(False),
        "pointers": each("    s_{b},\n"),
        "row_step_pointers": "    row_steps,\n    by_step,\n" * spec.row_steps,
        "at": row_pointers,
    }


def _scale_fields(spec: KernelSpec) -> dict[str, str]:
    """Return the fields of the templates that read and write the scales of int8 buffers."""
    first = FIRST_BUFFER + len(spec.buffers)

    def each(template: str) -> str:
        return "".join(template.format(b=b, number=first + k) for k, b in enumerate(_scaled_buffers(spec)))

    return {
        "scales": each("e_{b}, "),
        "new_scales": each("new_{b}, "),
        "values_of_scales": each("scale_{b}, "),
        "scale_addresses": each("        e_{b} = tl.load(row + {number})\n"),
        "all_scales": each(
            "            e_{b}_ = scales_of(e_{b}, first, gap, BLOCK, UNIT, CHUNK)\n"
            "            all_{b} = tl.load(e_{b}_)\n"
        ),
        "whole_scales": each("                scale_{b} = chosen(all_{b}, k // UNIT)\n"),
        "keep_scales": each("                all_{b} = replaced(all_{b}, k // UNIT, new_{b})\n"),
        "put_scales": each("            tl.store(e_{b}_, all_{b})\n"),
        "masked_scales": each(
            "                e_{b}_ = e_{b}.to(tl.pointer_type(tl.uint8)) + start // UNIT\n"
            "                scale_{b} = fetch(e_{b}_, start < n, False)\n"
        ),
        "masked_put": each("                put(e_{b}_, new_{b}, start < n, False)\n"),
        "scale_pointers": each("    e_{b},\n"),
        "at_scales": each("        e_{b}_ = e_{b} + row * SCALES\n"),
        "row_scales": each("        scale_{b} = fetch(e_{b}_, complete, False)\n"),
        "row_put": each("            put(e_{b}_, new_{b}, complete, False)\n"),
    }


def _coefficient_fields(spec: KernelSpec) -> dict[str, str]:
    """Return the fields of the templates that load the coefficients and pass them on."""
    names = [f"c_{name}" for name in spec.coefficients]
    row_names = [f"c_{name}" for name in spec.row_step_coefficients]
    loads = [f"{c} = tl.load(c + {k}).to(WORK)\n" for k, c in enumerate(names, 1) if c not in row_names]
    if spec.row_steps:
        loads.append(f"own = coefficients_of(row_steps + row, by_step, {len(row_names)}, complete)\n")
        loads += [f"{c} = tl.load(own + {k}, mask=complete, other=0)\n" for k, c in enumerate(row_names)]
    return {
        "loads": textwrap.indent("".join(loads), 12 * " "),
        "loads_dense": textwrap.indent("".join(loads), 8 * " "),
        "coefficients": fill_arguments(names, 8),
        "given": fill_arguments(names, 20),
        "given_rows": fill_arguments(names, 16),
    }


def _quantization_fields(spec: KernelSpec) -> dict[str, Any]:
    """Return the fields of the templates that depend on the storage of the moments."""
    decoded, puts = "", ""
    for k, (b, storage) in enumerate(_storages(spec).items()):
        signed = spec.rule.moments.get(b) == "signed"
        if storage == "int8":
            decoded += f"    s_{b} = decode(s_{b}, e_{b}, {signed})\n"
            noise = f"half_between(noise, column, {k > 0})"
            puts += f"    new_{b} = put_coded(s_{b}_, s_{b}, {noise}, mask, there, WHOLE, {signed})\n"
            continue
        decoded += f"    s_{b} = s_{b}.to(WORK)\n"
        if storage == "bfloat16":
            puts += f"    put_rounded(s_{b}_, s_{b}, half(noise, column, {k > 0}), mask, WHOLE, {signed})\n"
        else:
            puts += f"    put(s_{b}_, s_{b}, {'rows' if storage == 'row' else 'mask'}, WHOLE)\n"
    columns = FIRST_BUFFER + len(spec.buffers) + len(_scaled_buffers(spec))
    fields: dict[str, Any] = {
        "decoded": decoded,
        "puts": puts,
        "noise": "    noise = shared_noise(key, start, word, column)\n" if spec.quantized_buffers else "",
    }
    if spec.storages:
        # The table has one more column: the seed of each parameter. The noise of the parameters themselves is drawn at
        # indices beyond those of the moments.
        return fields | {
            "row": columns + 1,
            "seed": f"tl.load(row + {columns})",
            "far": "",
            "apart": "(1 << 52)",
            "vector": "        each = tl.zeros((UNIT // 8,), tl.float32)\n",
            "agree": AGREE_QUANTIZED,
            "of_rows": "\n        there, width,",
            "as_row": AS_ROW,
        }
    return fields | {
        "row": columns,
        "seed": "seed",
        "far": " + (i.to(tl.int64) << 40)",
        "apart": "0",
        "vector": "",
        "agree": "                agree += tl.sum(aligned.to(tl.int32), 0)\n",
        "of_rows": "",
        "as_row": "",
    }


def source(*specs: KernelSpec) -> str:
    """Return the text of a module with the kernels of these specifications."""
    text = "\n\n".join([PREFACE, *map(kernels, specs)])
    return "\n".join(map(str.rstrip, text.split("\n")))


def coefficients(name: str, trace: Trace, results: Iterable[Any]) -> tuple[str, list[float]]:
    """Return a kernel that computes coefficients in float64 on the device.

    Numbers are arguments of the kernel and not part of its source, so that the source is the same for all values of the
    options and is compiled once.

    Args:
        name: Name of the kernel.
        trace: The recorded computation. Its inputs ``x0``, ``x1``, ... are read from tensors; ``t`` is the step count.
        results: The values to store, as symbols of the trace or numbers.

    Returns:
        The text of a module with the kernel, and the numbers to pass to it.
    """
    number_symbols: list[Value] = []
    numbers: list[float] = []

    def as_symbol(operand: Any) -> Value:
        if isinstance(operand, Value):
            return operand
        numbers.append(float(operand))
        number_symbols.append(Value(trace, f"n{len(number_symbols)}", scalar=True))
        return number_symbols[-1]

    ops = [Op(op.kind, op.out, tuple(map(as_symbol, op.args))) for op in trace.ops]
    stores = ["t", *(as_symbol(result).name for result in results)]
    # Numbers are passed as the bits of a float64: some versions of Triton convert Python floats to float32.
    reads = [f"    {x.name} = {x.name}_.to(tl.int64).to(tl.float64, bitcast=True)" for x in number_symbols]
    reads += [f"    {x} = tl.load({x}_).to(tl.float64)" for x in trace.inputs]
    text = COEFFICIENTS.format(
        name=name,
        tensors="".join(f"{x}_, " for x in trace.inputs),
        numbers="".join(f"{x.name}_: tl.int64, " for x in number_symbols),
        as_they_are="".join(f', "{x.name}_"' for x in number_symbols),
        lines="\n".join([*reads, *source_lines(ops, TEMPLATES, "    {name} = {value}", {})]),
        stores="\n".join(f"    tl.store(row + {k}, {value}, mask=mask)" for k, value in enumerate(stores)),
    )
    return text, numbers


def module(name: str, text: str) -> ModuleType:
    """Return a module with generated kernels, ready to launch. Equal sources have equal names in every process.

    Triton reads the source of a kernel with `inspect`, which finds it in `linecache`, so no file is written.
    """
    name = f"{__package__}.kernels.{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        path = f"<{name}>"
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        generated = ModuleType(name)
        exec(compile(text, path, "exec"), generated.__dict__)
        sys.modules[name] = generated
    return sys.modules[name]
