"""Generation of Triton kernels from rules, when they are first used.

Input: kernel specifications. Output: the text of a Python module with, for each of them, an element function and the
kernels `_dense`, `_rows` and `_spanning_rows` around it (`PREFACE` describes them). Generating the text does not need
Triton. Triton finds a compiled kernel in its cache on disk by source and line number, so a second process compiles
nothing. The element function of SGD without momentum::

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
    "mean_square": "mean_square({0}, exists, width)",
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
  number of elements, first block, addresses of buffers and scales, and the seed of stochastic rounding. The addresses
  of the gradients are in `grads`.
- `_rows`: updates the rows of a table that a sparse gradient contains. Row numbers are sorted and cut into tiles; rows
  whose entries are all in one tile are updated. `QUANTIZED_STRIDE`, `SCALES_STRIDE` and `ROW_MOMENT_STRIDE` are the
  strides between two rows in quantized buffers, in their scales and in buffers with one value per row.
- `_spanning_rows`: updates the rows whose entries continue in the next tile. There are none if all ids are distinct.
"""

import triton
import triton.language as tl

from cadam.engines.cuda.device_functions import (
    add_counts,
    add_weight_decay,
    advance_row_steps,
    aging_rows,
    agreement,
    align_to_four,
    approximate_divide,
    approximate_sqrt,
    block_pointers,
    block_scale_pointers,
    count_distinct_ids,
    count_seen,
    dequantize,
    divide,
    element_at,
    launch_dependents,
    load,
    load_keys,
    masked,
    maximum,
    mean_square,
    noise_at,
    noise_half,
    noise_key,
    program_columns,
    quantized_block_pointers,
    reciprocal,
    round_stochastically,
    scaled,
    shared_noise,
    shifted_noise_half,
    should_update,
    sign,
    sqrt,
    store,
    store_bfloat16,
    store_int8,
    subtract_step,
    sum_duplicates,
    sum_over_tiles,
    tile_columns,
    wait_for_previous_kernel,
    with_element,
)
'''

UPDATE = '''\
@triton.jit
def {name}_load(p_, {buffers_}mask, rows, WHOLE: tl.constexpr):
    """Load elements and their buffers in their storage format. `rows` marks the rows with an element in `mask`."""
    p = load(p_, mask, WHOLE)
{buffer_loads}    return p, {buffers}


@triton.jit
def {name}_update(
    p, {buffers}{scales}g, p_, {buffers_}
{coefficients}
    start, first_pair, column, key, mask, rows, exists, width,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Update elements that were loaded from these addresses; return which are aligned, and the new scales.

    The elements are at the columns `column` from `start` on, and `first_pair` is the index of their random bits.
    `exists` marks the elements that the row or block really has, over which shared scales and means are computed.
    """
    p = p.to(WORK)
{dequantized}    p, {buffers}alignment = {name}(
        p, g, {buffers}
{coefficients}{row_arguments}
    )
    if STOCHASTIC:
        index = start + {param_noise_offset}
        p = round_stochastically(p, noise_at(key, index + column, index) & 0xFFFF)
    store(p_, p, mask, WHOLE)
{draw_noise}{stores}    aligned = (alignment > 0) if WHOLE else (alignment > 0) & mask
    return aligned, {new_scales}
'''

DENSE = """\
@triton.jit(do_not_specialize=["tensor_number"])
def {name}_dense(
    table, grads, coefficients, stride, owners, tensor_number, found_inf, PARAM: tl.constexpr,
    GRAD: tl.constexpr, STATE: tl.constexpr, WORK: tl.constexpr, SINGLE_TENSOR: tl.constexpr, COUNT: tl.constexpr,
    GUARD: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
):
    if should_update(found_inf, GUARD):
        block = tl.program_id(0)
        i = tensor_number if SINGLE_TENSOR else tl.load(owners + block)
        row = table + i * {row_length}
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
{addresses}{scale_addresses}        c = coefficients + i * stride
{loads_dense}        key = noise_key(tl.load(row + {seed_column}), tl.load(c))
        first = (block - tl.load(row + 3)) * CHUNK
        gap = (tl.num_programs(0) - 1).to(tl.int64) * CHUNK
        agree = 0
{agree_start}        if (first + BLOCK + (BLOCK // CHUNK - 1) * gap <= n) & ((({all_addresses}) & 15) == 0):
{load_all_scales}            start = first
            for k in range(0, BLOCK, UNIT):
                p_ = block_pointers(p, start, PARAM, True, UNIT)
{whole_pointers}{scale_of}                grad = load(block_pointers(g, start, GRAD, True, UNIT), None, True).to(WORK)
                param, {values}= {name}_load(p_, {buffers_}None, None, True)
                aligned, {new_scales}= {name}_update(
                    param, {values}{values_of_scales}grad, p_, {buffers_}
{dense_coefficients}
                    start, ((start & 0xFFFFFFFF) // 2).to(tl.uint32), tl.arange(0, UNIT), key,
                    None, None, None, UNIT, True, WORK, STOCHASTIC,
                )
{keep_scales}                start += UNIT if CHUNK == BLOCK else tl.where((k + UNIT) % CHUNK == 0, gap + UNIT, UNIT)
{add_agreement}{store_all_scales}        else:
            for k in range(0, UNIT if UNIT == BLOCK else tl.minimum(n - first, BLOCK).to(tl.int32), UNIT):
                start = first + k + k // CHUNK * gap
                mask = tl.arange(0, UNIT) < tl.minimum(n - start, UNIT).to(tl.int32)
                p_ = block_pointers(p, start, PARAM, False, UNIT)
{masked_pointers}                grad = load(block_pointers(g, start, GRAD, False, UNIT), mask, False).to(WORK)
                param, {values}= {name}_load(p_, {buffers_}mask, start < n, False)
{load_masked_scales}                aligned, {new_scales}= {name}_update(
                    param, {values}{values_of_scales}grad, p_, {buffers_}
{dense_coefficients}
                    start, ((start & 0xFFFFFFFF) // 2).to(tl.uint32), tl.arange(0, UNIT), key,
                    mask, start < n, mask, UNIT, False, WORK, STOCHASTIC,
                )
{store_masked_scales}                agree += tl.sum(aligned.to(tl.int32), 0)
        if COUNT:
            counts = tl.load(row + 1).to(tl.pointer_type(tl.int64))
            add_counts(counts, agree, tl.where(first == 0, n, 0))
            count_seen(counts, first == 0, n)
"""

ROW_ARGUMENTS = """\
    coefficients, counts, found_inf, seed, n, rows, width, WORK: tl.constexpr,
"""

ROW_CONSTANTS = """\
    EARLY: tl.constexpr, COUNT: tl.constexpr, GUARD: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr, QUANTIZED_STRIDE: tl.constexpr, SCALES_STRIDE: tl.constexpr,
    ROW_MOMENT_STRIDE: tl.constexpr, ALIGNED_BY_FOUR: tl.constexpr,
"""

LOAD_ROWS = """\
        first = row * width
        index = first + column
        p_ = p + index
{row_pointers}{row_scale_pointers}        param, {values}= {name}_load(p_, {buffers_}mask, complete, False)
{load_row_scales}{load_last_steps}"""

UPDATE_ROWS = """\
{loads}            aligned, {new_scales}= {name}_update(
                param, {values}{values_of_scales}g, p_, {buffers_}
{row_coefficients}
                first, first.to(tl.uint32), column, noise_key(seed, tl.load(c)), mask, complete, exists, width,
                False, WORK, STOCHASTIC,
            )
{store_row_scales}"""

ROWS = (
    """\
@triton.jit(do_not_specialize=["n", "rows", "seed"])
def {name}_rows(
    p,
{pointers}{scale_pointers}{row_step_pointers}    values, keys, order, sources, error, partials,
"""
    + ROW_ARGUMENTS
    + """\
    DISTINCT: tl.constexpr, IN_BAGS: tl.constexpr,
"""
    + ROW_CONSTANTS
    + """\
    PARTS: tl.constexpr,
):
    if EARLY:
        launch_dependents()
    if should_update(found_inf, GUARD):
        column, exists = tile_columns(width, COLUMNS, EVEN, PARTS)
        key, is_valid, starts, ends, is_continued, complete = load_keys(keys, error, n, rows, DISTINCT, TILE)
        row, mask = key.to(tl.int64)[:, None, None], complete & exists
        # Load parameter and buffers first: the loads overlap with summing the gradients.
"""
    + LOAD_ROWS
    + """\
        g = sum_duplicates(
            values, order, sources, partials, n, width, column, exists, is_valid, starts, ends, is_continued,
            WORK, DISTINCT, IN_BAGS, TILE,
        )
        if EARLY:
            wait_for_previous_kernel()  # the previous kernel computes the coefficients
        c = coefficients
        moving = tl.sum(complete.to(tl.int32))
        if moving > 0:
"""
    + UPDATE_ROWS
    + """\
            if COUNT:
                touched = 0 if DISTINCT else moving * tl.minimum(width - tl.program_id(1) * COLUMNS, COLUMNS)
                add_counts(counts, tl.sum(aligned.to(tl.int32)), touched)
        if COUNT:
            if DISTINCT:
                count_distinct_ids(counts, is_valid, n, width, TILE)
            count_seen(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)
"""
)

SPANNING_ROWS = (
    """\
@triton.jit(do_not_specialize=["n", "rows", "seed"])
def {name}_spanning_rows(
    p,
{pointers}{scale_pointers}{row_step_pointers}    keys, partials,
"""
    + ROW_ARGUMENTS
    + ROW_CONSTANTS
    + """\
    SPAN: tl.constexpr,
):
    if EARLY:
        wait_for_previous_kernel()
    if should_update(found_inf, GUARD):
        column, exists = program_columns(width, COLUMNS, EVEN)
        row, g, mask, begins = sum_over_tiles(keys, partials, n, rows, width, column, exists, WORK, TILE, SPAN)
        complete = begins
{as_tile}"""
    + LOAD_ROWS
    + """\
        c = coefficients
        if begins:
"""
    + UPDATE_ROWS
    + """\
            if COUNT:
                touched = tl.minimum(width - tl.program_id(1) * COLUMNS, COLUMNS)
                add_counts(counts, tl.sum(aligned.to(tl.int32)), touched)
"""
)

COEFFICIENTS = '''\
"""Generated from the coefficients of a rule."""

import triton
import triton.language as tl

from cadam.engines.cuda.device_functions import (
    count_step, divide, launch_dependents, maximum, positive, power, reciprocal, sqrt,
)


@triton.jit(do_not_specialize=["size"{unspecialized}])
def {name}_coefficients(
    steps, words, rows, more, found_inf, {tensors}{numbers}size,
    MORE: tl.constexpr, GUARD: tl.constexpr, EARLY: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Advance the step of each parameter, store step and coefficients in its row, and copy further words."""
    if EARLY:
        launch_dependents()
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
                agree_by_column += tl.sum(tl.sum(tl.reshape(tl.where(aligned, 1.0, 0.0), (2, UNIT // 8, 4)), 2), 0)
            agree = tl.sum(agree_by_column, 0).to(tl.int32)
"""

AS_TILE = """\
        row, g, mask = row + tl.zeros((1, 1, 1), tl.int64), g[None, None, :], mask[None, None, :]
        column, exists = tile_columns(width, COLUMNS, EVEN, 1)
        complete = begins & (row == row)
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
            fill_arguments(["p", "g", *names.values(), *(["exists", "width"] if spec.storages else [])], 4),
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
            fast[name] = f"add_weight_decay({{0}}, {decay[0].name}, c_{decay[1].name})"
        elif op.kind == "mul" and program.alignment is op.out and (sign := arguments(op.args[1], "sign")):
            fast[name] = f"agreement({{0}}, {sign[0].name})"
        elif op.kind == "sqrt" and name not in exact:
            fast[name] = "approximate_sqrt({0})"
        elif op.kind == "div" and name not in exact and any(arguments(a, "sqrt") for a in arguments(op.args[1], "add")):
            fast[name] = "approximate_divide({0}, {1})"  # its divisor, a square root plus eps, is positive
        elif op.kind == "sub" and program.param is op.out and (step := arguments(op.args[1], "mul")):
            fast[name] = f"subtract_step({{0}}, {step[0].name}, c_{step[1].name})"
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
    is_for_rows_only = "row" in spec.storages or bool(spec.row_step_coefficients or spec.aging_coefficients)
    templates = [UPDATE, ROWS, SPANNING_ROWS] if is_for_rows_only else [UPDATE, DENSE, ROWS, SPANNING_ROWS]
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

    def pointers(whole: bool) -> str:
        function = "quantized_block_pointers" if spec.storages else "block_pointers"
        return each(f"                s_{{b}}_ = {function}(s_{{b}}, start, STATE, {whole}, UNIT)\n")

    loads, row_pointers = "", ""
    for b, storage in storages.items():
        loads += f"    s_{b} = load(s_{b}_, {'rows' if storage == 'row' else 'mask'}, WHOLE)\n"
        if storage == "row":
            pointer = f"s_{b} + row * ROW_MOMENT_STRIDE"
        elif storage == "plain":
            pointer = f"s_{b} + index"
        else:
            pointer = f"align_to_four(s_{b}, ALIGNED_BY_FOUR) + (row * QUANTIZED_STRIDE + column)"
        row_pointers += f"        s_{b}_ = {pointer}\n"
    return {
        "buffers": each("s_{b}, "),
        "buffers_": each("s_{b}_, "),
        "values": each("value_{b}, "),
        "buffer_loads": loads,
        "addresses": each("        s_{b} = tl.load(row + {number})\n"),
        "all_addresses": " | ".join(["p", "g", *(f"s_{b}" for b in spec.buffers)]),
        "whole_pointers": pointers(True),
        "masked_pointers": pointers(False),
        "pointers": each("    s_{b},\n"),
        "row_step_pointers": "    row_steps,\n    by_step,\n" * bool(spec.row_step_coefficients)
        + "    last_steps,\n    by_missed,\n" * bool(spec.aging_coefficients),
        "load_last_steps": "        last = tl.load(last_steps + row, mask=complete, other=0)\n"
        * bool(spec.aging_coefficients),
        "row_pointers": row_pointers,
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
        "load_all_scales": each(
            "            e_{b}_ = block_scale_pointers(e_{b}, first, gap, BLOCK, UNIT, CHUNK)\n"
            "            all_{b} = tl.load(e_{b}_)\n"
        ),
        "scale_of": each("                scale_{b} = element_at(all_{b}, k // UNIT)\n"),
        "keep_scales": each("                all_{b} = with_element(all_{b}, k // UNIT, new_{b})\n"),
        "store_all_scales": each("            tl.store(e_{b}_, all_{b})\n"),
        "load_masked_scales": each(
            "                e_{b}_ = e_{b}.to(tl.pointer_type(tl.uint8)) + start // UNIT\n"
            "                scale_{b} = load(e_{b}_, start < n, False)\n"
        ),
        "store_masked_scales": each("                store(e_{b}_, new_{b}, start < n, False)\n"),
        "scale_pointers": each("    e_{b},\n"),
        "row_scale_pointers": each("        e_{b}_ = e_{b} + row * SCALES_STRIDE\n"),
        "load_row_scales": each("        scale_{b} = load(e_{b}_, complete, False)\n"),
        "store_row_scales": each("            store(e_{b}_, new_{b}, complete, False)\n"),
    }


def _coefficient_fields(spec: KernelSpec) -> dict[str, str]:
    """Return the fields of the templates that load the coefficients and pass them on."""
    names = [f"c_{name}" for name in spec.coefficients]
    row_names = [f"c_{name}" for name in spec.row_step_coefficients]
    aging_names = [f"c_{name}" for name in spec.aging_coefficients]
    by_row = {*row_names, *aging_names}
    loads = [f"{c} = tl.load(c + {k}).to(WORK)\n" for k, c in enumerate(names, 1) if c not in by_row]
    if row_names:
        loads.append(f"row_coefficients = advance_row_steps(row_steps + row, by_step, {len(row_names)}, complete)\n")
        loads += [f"{c} = tl.load(row_coefficients + {k}, mask=complete, other=0)\n" for k, c in enumerate(row_names)]
    if aging_names:
        width = len(aging_names)
        loads.append(f"aging = aging_rows(last_steps + row, last, by_missed, tl.load(c), {width}, complete)\n")
        loads += [f"{c} = tl.load(aging + {k}, mask=complete, other=0)\n" for k, c in enumerate(aging_names)]
    return {
        "loads": textwrap.indent("".join(loads), 12 * " "),
        "loads_dense": textwrap.indent("".join(loads), 8 * " "),
        "coefficients": fill_arguments(names, 8),
        "dense_coefficients": fill_arguments(names, 20),
        "row_coefficients": fill_arguments(names, 16),
    }


def _quantization_fields(spec: KernelSpec) -> dict[str, Any]:
    """Return the fields of the templates that depend on the storage of the moments."""
    dequantized, stores = "", ""
    for k, (b, storage) in enumerate(_storages(spec).items()):
        signed = spec.rule.moments.get(b) == "signed"
        if storage == "int8":
            dequantized += f"    s_{b} = dequantize(s_{b}, e_{b}, {signed})\n"
            noise = f"shifted_noise_half(noise, column, {k > 0})"
            stores += f"    new_{b} = store_int8(s_{b}_, s_{b}, {noise}, mask, exists, WHOLE, {signed})\n"
            continue
        dequantized += f"    s_{b} = s_{b}.to(WORK)\n"
        if storage == "bfloat16":
            stores += f"    store_bfloat16(s_{b}_, s_{b}, noise_half(noise, column, {k > 0}), mask, WHOLE, {signed})\n"
        else:
            stores += f"    store(s_{b}_, s_{b}, {'rows' if storage == 'row' else 'mask'}, WHOLE)\n"
    seed_column = FIRST_BUFFER + len(spec.buffers) + len(_scaled_buffers(spec))
    fields: dict[str, Any] = {
        "seed_column": seed_column,
        "row_length": seed_column + 1,
        "dequantized": dequantized,
        "stores": stores,
        "draw_noise": "    noise = shared_noise(key, start, first_pair, column)\n" if spec.quantized_buffers else "",
    }
    if spec.storages:
        # The noise of the parameters themselves is drawn at indices beyond those of the moments.
        return fields | {
            "param_noise_offset": "(1 << 52)",
            "agree_start": "        agree_by_column = tl.zeros((UNIT // 8,), tl.float32)\n",
            "add_agreement": AGREE_QUANTIZED,
            "row_arguments": "\n        exists, width,",
            "as_tile": AS_TILE,
        }
    return fields | {
        "param_noise_offset": "0",
        "agree_start": "",
        "add_agreement": "                agree += tl.sum(aligned.to(tl.int32), 0)\n",
        "row_arguments": "",
        "as_tile": "",
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
        unspecialized="".join(f', "{x.name}_"' for x in number_symbols),
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
