"""Made by ``python -m cadam.codegen.triton`` from the rules in cadam/rules: do not edit.

For each rule an element function (every option of a rule is a coefficient: a decay of 0, a shrinking by 1, a
threshold of NaN below which nothing is held), the move of a block of elements in memory, and three kernels:

- `_dense`: blocks of whole tensors, found through a table. A row of it is the addresses of parameter and counters,
  the number of elements, the first block, and the addresses of the buffers; those of the gradients come apart.
- `_rows`: tiles of sorted row numbers; rows that lie within a tile are moved.
- `_seams`: the rows that reach over the end of a tile.
"""

# mypy: ignore-errors
# ruff: noqa: F401, N803
# fmt: off

import triton
import triton.language as tl

from cadam.engines.cuda.blocks import (
    count,
    divide,
    fetch,
    hold,
    maximum,
    proceed,
    put,
    reciprocal,
    round_randomly,
    scaled,
    see,
    sign,
    sqrt,
    stretch,
    sum_duplicates,
    sum_over_tiles,
)


@triton.jit
def adam(
    p, g, s_exp_avg, s_exp_avg_sq, c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2, c_weight2,
    c_correct1, c_correct2, c_eps, c_lr,
):
    t0 = g * c_unscale
    t1 = scaled(p, c_l2)
    t2 = t0 + t1
    t3 = t2 - s_exp_avg
    t4 = t3 * c_weight1
    t5 = s_exp_avg + t4
    t6 = s_exp_avg_sq * c_beta2
    t7 = t2 * t2
    t8 = t7 * c_weight2
    t9 = t6 + t8
    t10 = t9 * c_correct2
    t11 = t5 * c_correct1
    t12 = sqrt(t10)
    t13 = t12 + c_eps
    t14 = divide(t11, t13)
    t15 = sign(t2)
    t16 = t5 * t15
    t17 = hold(t16, c_threshold, t14)
    t18 = p * c_shrink
    t19 = t17 * c_lr
    t20 = t18 - t19
    return t20, t5, t9, t16


@triton.jit
def adam_move(
    p_, g, s_exp_avg_, s_exp_avg_sq_, c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
    s_exp_avg = fetch(s_exp_avg_, mask, WHOLE, WORK)
    s_exp_avg_sq = fetch(s_exp_avg_sq_, mask, WHOLE, WORK)
    c_l2 = tl.load(c + 1).to(WORK)
    c_shrink = tl.load(c + 2).to(WORK)
    c_unscale = tl.load(c + 3).to(WORK)
    c_threshold = tl.load(c + 4).to(WORK)
    c_weight1 = tl.load(c + 5).to(WORK)
    c_beta2 = tl.load(c + 6).to(WORK)
    c_weight2 = tl.load(c + 7).to(WORK)
    c_correct1 = tl.load(c + 8).to(WORK)
    c_correct2 = tl.load(c + 9).to(WORK)
    c_eps = tl.load(c + 10).to(WORK)
    c_lr = tl.load(c + 11).to(WORK)
    p, s_exp_avg, s_exp_avg_sq, alignment = adam(
        p, g, s_exp_avg, s_exp_avg_sq,
        c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2, c_weight2, c_correct1, c_correct2, c_eps, c_lr,
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
    put(s_exp_avg_, s_exp_avg, mask, WHOLE)
    put(s_exp_avg_sq_, s_exp_avg_sq, mask, WHOLE)
    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)


@triton.jit(do_not_specialize=["only", "seed"])
def adam_dense(
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
        row = table + i * 6
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
        s_exp_avg = tl.load(row + 4)
        s_exp_avg_sq = tl.load(row + 5)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & (((p | g | s_exp_avg | s_exp_avg_sq) & 15) == 0):
            aligned = adam_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
                stretch(s_exp_avg, start, STATE, True, BLOCK),
                stretch(s_exp_avg_sq, start, STATE, True, BLOCK),
                c,
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
            aligned = adam_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
                stretch(s_exp_avg, start, STATE, False, BLOCK),
                stretch(s_exp_avg_sq, start, STATE, False, BLOCK),
                c,
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


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def adam_rows(
    p,
    s_exp_avg,
    s_exp_avg_sq,
    values,
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
        aligned = adam_move(
            p + place, g, s_exp_avg + place, s_exp_avg_sq + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def adam_seams(
    p,
    s_exp_avg,
    s_exp_avg_sq,
    keys,
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
        place = row * width + column
        aligned = adam_move(
            p + place, g, s_exp_avg + place, s_exp_avg_sq + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))


@triton.jit
def adam_max_exp_avg_sq(
    p, g, s_exp_avg, s_exp_avg_sq, s_max_exp_avg_sq, c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2,
    c_weight2, c_correct1, c_correct2, c_eps, c_lr,
):
    t0 = g * c_unscale
    t1 = scaled(p, c_l2)
    t2 = t0 + t1
    t3 = t2 - s_exp_avg
    t4 = t3 * c_weight1
    t5 = s_exp_avg + t4
    t6 = s_exp_avg_sq * c_beta2
    t7 = t2 * t2
    t8 = t7 * c_weight2
    t9 = t6 + t8
    t10 = t9 * c_correct2
    t11 = maximum(s_max_exp_avg_sq, t10)
    t12 = t5 * c_correct1
    t13 = sqrt(t11)
    t14 = t13 + c_eps
    t15 = divide(t12, t14)
    t16 = sign(t2)
    t17 = t5 * t16
    t18 = hold(t17, c_threshold, t15)
    t19 = p * c_shrink
    t20 = t18 * c_lr
    t21 = t19 - t20
    return t21, t5, t9, t11, t17


@triton.jit
def adam_max_exp_avg_sq_move(
    p_, g, s_exp_avg_, s_exp_avg_sq_, s_max_exp_avg_sq_, c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
    s_exp_avg = fetch(s_exp_avg_, mask, WHOLE, WORK)
    s_exp_avg_sq = fetch(s_exp_avg_sq_, mask, WHOLE, WORK)
    s_max_exp_avg_sq = fetch(s_max_exp_avg_sq_, mask, WHOLE, WORK)
    c_l2 = tl.load(c + 1).to(WORK)
    c_shrink = tl.load(c + 2).to(WORK)
    c_unscale = tl.load(c + 3).to(WORK)
    c_threshold = tl.load(c + 4).to(WORK)
    c_weight1 = tl.load(c + 5).to(WORK)
    c_beta2 = tl.load(c + 6).to(WORK)
    c_weight2 = tl.load(c + 7).to(WORK)
    c_correct1 = tl.load(c + 8).to(WORK)
    c_correct2 = tl.load(c + 9).to(WORK)
    c_eps = tl.load(c + 10).to(WORK)
    c_lr = tl.load(c + 11).to(WORK)
    p, s_exp_avg, s_exp_avg_sq, s_max_exp_avg_sq, alignment = adam_max_exp_avg_sq(
        p, g, s_exp_avg, s_exp_avg_sq, s_max_exp_avg_sq,
        c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2, c_weight2, c_correct1, c_correct2, c_eps, c_lr,
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
    put(s_exp_avg_, s_exp_avg, mask, WHOLE)
    put(s_exp_avg_sq_, s_exp_avg_sq, mask, WHOLE)
    put(s_max_exp_avg_sq_, s_max_exp_avg_sq, mask, WHOLE)
    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)


@triton.jit(do_not_specialize=["only", "seed"])
def adam_max_exp_avg_sq_dense(
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
        row = table + i * 7
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
        s_exp_avg = tl.load(row + 4)
        s_exp_avg_sq = tl.load(row + 5)
        s_max_exp_avg_sq = tl.load(row + 6)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & (((p | g | s_exp_avg | s_exp_avg_sq | s_max_exp_avg_sq) & 15) == 0):
            aligned = adam_max_exp_avg_sq_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
                stretch(s_exp_avg, start, STATE, True, BLOCK),
                stretch(s_exp_avg_sq, start, STATE, True, BLOCK),
                stretch(s_max_exp_avg_sq, start, STATE, True, BLOCK),
                c,
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
            aligned = adam_max_exp_avg_sq_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
                stretch(s_exp_avg, start, STATE, False, BLOCK),
                stretch(s_exp_avg_sq, start, STATE, False, BLOCK),
                stretch(s_max_exp_avg_sq, start, STATE, False, BLOCK),
                c,
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


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def adam_max_exp_avg_sq_rows(
    p,
    s_exp_avg,
    s_exp_avg_sq,
    s_max_exp_avg_sq,
    values,
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
        aligned = adam_max_exp_avg_sq_move(
            p + place, g, s_exp_avg + place, s_exp_avg_sq + place, s_max_exp_avg_sq + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def adam_max_exp_avg_sq_seams(
    p,
    s_exp_avg,
    s_exp_avg_sq,
    s_max_exp_avg_sq,
    keys,
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
        place = row * width + column
        aligned = adam_max_exp_avg_sq_move(
            p + place, g, s_exp_avg + place, s_exp_avg_sq + place, s_max_exp_avg_sq + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))


@triton.jit
def sgdm(
    p, g, s_momentum_buffer, c_l2, c_shrink, c_unscale, c_threshold, c_momentum, c_weight, c_lr,
):
    t0 = g * c_unscale
    t1 = scaled(p, c_l2)
    t2 = t0 + t1
    t3 = s_momentum_buffer * c_momentum
    t4 = t2 * c_weight
    t5 = t3 + t4
    t6 = sign(t2)
    t7 = t5 * t6
    t8 = hold(t7, c_threshold, t5)
    t9 = p * c_shrink
    t10 = t8 * c_lr
    t11 = t9 - t10
    return t11, t5, t7


@triton.jit
def sgdm_move(
    p_, g, s_momentum_buffer_, c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
    s_momentum_buffer = fetch(s_momentum_buffer_, mask, WHOLE, WORK)
    c_l2 = tl.load(c + 1).to(WORK)
    c_shrink = tl.load(c + 2).to(WORK)
    c_unscale = tl.load(c + 3).to(WORK)
    c_threshold = tl.load(c + 4).to(WORK)
    c_momentum = tl.load(c + 5).to(WORK)
    c_weight = tl.load(c + 6).to(WORK)
    c_lr = tl.load(c + 7).to(WORK)
    p, s_momentum_buffer, alignment = sgdm(
        p, g, s_momentum_buffer,
        c_l2, c_shrink, c_unscale, c_threshold, c_momentum, c_weight, c_lr,
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
    put(s_momentum_buffer_, s_momentum_buffer, mask, WHOLE)
    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)


@triton.jit(do_not_specialize=["only", "seed"])
def sgdm_dense(
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
        row = table + i * 5
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
        s_momentum_buffer = tl.load(row + 4)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & (((p | g | s_momentum_buffer) & 15) == 0):
            aligned = sgdm_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
                stretch(s_momentum_buffer, start, STATE, True, BLOCK),
                c,
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
            aligned = sgdm_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
                stretch(s_momentum_buffer, start, STATE, False, BLOCK),
                c,
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


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def sgdm_rows(
    p,
    s_momentum_buffer,
    values,
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
        aligned = sgdm_move(
            p + place, g, s_momentum_buffer + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def sgdm_seams(
    p,
    s_momentum_buffer,
    keys,
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
        place = row * width + column
        aligned = sgdm_move(
            p + place, g, s_momentum_buffer + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))


@triton.jit
def sgdm_ahead(
    p, g, s_momentum_buffer, c_l2, c_shrink, c_unscale, c_threshold, c_momentum, c_weight, c_ahead, c_lr,
):
    t0 = g * c_unscale
    t1 = scaled(p, c_l2)
    t2 = t0 + t1
    t3 = s_momentum_buffer * c_momentum
    t4 = t2 * c_weight
    t5 = t3 + t4
    t6 = t2 * c_weight
    t7 = t5 * c_ahead
    t8 = t6 + t7
    t9 = sign(t2)
    t10 = t5 * t9
    t11 = hold(t10, c_threshold, t8)
    t12 = p * c_shrink
    t13 = t11 * c_lr
    t14 = t12 - t13
    return t14, t5, t10


@triton.jit
def sgdm_ahead_move(
    p_, g, s_momentum_buffer_, c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
    s_momentum_buffer = fetch(s_momentum_buffer_, mask, WHOLE, WORK)
    c_l2 = tl.load(c + 1).to(WORK)
    c_shrink = tl.load(c + 2).to(WORK)
    c_unscale = tl.load(c + 3).to(WORK)
    c_threshold = tl.load(c + 4).to(WORK)
    c_momentum = tl.load(c + 5).to(WORK)
    c_weight = tl.load(c + 6).to(WORK)
    c_ahead = tl.load(c + 7).to(WORK)
    c_lr = tl.load(c + 8).to(WORK)
    p, s_momentum_buffer, alignment = sgdm_ahead(
        p, g, s_momentum_buffer,
        c_l2, c_shrink, c_unscale, c_threshold, c_momentum, c_weight, c_ahead, c_lr,
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
    put(s_momentum_buffer_, s_momentum_buffer, mask, WHOLE)
    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)


@triton.jit(do_not_specialize=["only", "seed"])
def sgdm_ahead_dense(
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
        row = table + i * 5
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
        s_momentum_buffer = tl.load(row + 4)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & (((p | g | s_momentum_buffer) & 15) == 0):
            aligned = sgdm_ahead_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
                stretch(s_momentum_buffer, start, STATE, True, BLOCK),
                c,
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
            aligned = sgdm_ahead_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
                stretch(s_momentum_buffer, start, STATE, False, BLOCK),
                c,
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


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def sgdm_ahead_rows(
    p,
    s_momentum_buffer,
    values,
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
        aligned = sgdm_ahead_move(
            p + place, g, s_momentum_buffer + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def sgdm_ahead_seams(
    p,
    s_momentum_buffer,
    keys,
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
        place = row * width + column
        aligned = sgdm_ahead_move(
            p + place, g, s_momentum_buffer + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))


@triton.jit
def sgdm_without_momentum_buffer(
    p, g, c_l2, c_shrink, c_unscale, c_threshold, c_momentum, c_weight, c_lr,
):
    t0 = g * c_unscale
    t1 = scaled(p, c_l2)
    t2 = t0 + t1
    t3 = sign(t2)
    t4 = t2 * t3
    t5 = hold(t4, c_threshold, t2)
    t6 = p * c_shrink
    t7 = t5 * c_lr
    t8 = t6 - t7
    return t8, t4


@triton.jit
def sgdm_without_momentum_buffer_move(
    p_, g, c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
    c_l2 = tl.load(c + 1).to(WORK)
    c_shrink = tl.load(c + 2).to(WORK)
    c_unscale = tl.load(c + 3).to(WORK)
    c_threshold = tl.load(c + 4).to(WORK)
    c_momentum = tl.load(c + 5).to(WORK)
    c_weight = tl.load(c + 6).to(WORK)
    c_lr = tl.load(c + 7).to(WORK)
    p, alignment = sgdm_without_momentum_buffer(
        p, g,
        c_l2, c_shrink, c_unscale, c_threshold, c_momentum, c_weight, c_lr,
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)


@triton.jit(do_not_specialize=["only", "seed"])
def sgdm_without_momentum_buffer_dense(
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
        row = table + i * 4
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & (((p | g) & 15) == 0):
            aligned = sgdm_without_momentum_buffer_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
                c,
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
            aligned = sgdm_without_momentum_buffer_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
                c,
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


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def sgdm_without_momentum_buffer_rows(
    p,
    values,
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
        aligned = sgdm_without_momentum_buffer_move(
            p + place, g,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def sgdm_without_momentum_buffer_seams(
    p,
    keys,
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
        place = row * width + column
        aligned = sgdm_without_momentum_buffer_move(
            p + place, g,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))


@triton.jit
def lion(
    p, g, s_exp_avg, c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_weight2, c_lr,
):
    t0 = g * c_unscale
    t1 = scaled(p, c_l2)
    t2 = t0 + t1
    t3 = t2 - s_exp_avg
    t4 = t3 * c_weight1
    t5 = s_exp_avg + t4
    t6 = t3 * c_weight2
    t7 = s_exp_avg + t6
    t8 = sign(t5)
    t9 = t5 - t5
    t10 = t8 + t9
    t11 = sign(t2)
    t12 = t5 * t11
    t13 = hold(t12, c_threshold, t10)
    t14 = p * c_shrink
    t15 = t13 * c_lr
    t16 = t14 - t15
    return t16, t7, t12


@triton.jit
def lion_move(
    p_, g, s_exp_avg_, c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
    s_exp_avg = fetch(s_exp_avg_, mask, WHOLE, WORK)
    c_l2 = tl.load(c + 1).to(WORK)
    c_shrink = tl.load(c + 2).to(WORK)
    c_unscale = tl.load(c + 3).to(WORK)
    c_threshold = tl.load(c + 4).to(WORK)
    c_weight1 = tl.load(c + 5).to(WORK)
    c_weight2 = tl.load(c + 6).to(WORK)
    c_lr = tl.load(c + 7).to(WORK)
    p, s_exp_avg, alignment = lion(
        p, g, s_exp_avg,
        c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_weight2, c_lr,
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
    put(s_exp_avg_, s_exp_avg, mask, WHOLE)
    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)


@triton.jit(do_not_specialize=["only", "seed"])
def lion_dense(
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
        row = table + i * 5
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
        s_exp_avg = tl.load(row + 4)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & (((p | g | s_exp_avg) & 15) == 0):
            aligned = lion_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
                stretch(s_exp_avg, start, STATE, True, BLOCK),
                c,
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
            aligned = lion_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
                stretch(s_exp_avg, start, STATE, False, BLOCK),
                c,
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


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def lion_rows(
    p,
    s_exp_avg,
    values,
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
        aligned = lion_move(
            p + place, g, s_exp_avg + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def lion_seams(
    p,
    s_exp_avg,
    keys,
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
        place = row * width + column
        aligned = lion_move(
            p + place, g, s_exp_avg + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))


@triton.jit
def radam(
    p, g, s_exp_avg, s_exp_avg_sq, c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2, c_weight2, c_plain,
    c_adaptive, c_eps, c_lr,
):
    t0 = g * c_unscale
    t1 = scaled(p, c_l2)
    t2 = t0 + t1
    t3 = t2 - s_exp_avg
    t4 = t3 * c_weight1
    t5 = s_exp_avg + t4
    t6 = s_exp_avg_sq * c_beta2
    t7 = t2 * t2
    t8 = t7 * c_weight2
    t9 = t6 + t8
    t10 = t5 * c_plain
    t11 = t5 * c_adaptive
    t12 = sqrt(t9)
    t13 = t12 + c_eps
    t14 = divide(t11, t13)
    t15 = t10 + t14
    t16 = sign(t2)
    t17 = t5 * t16
    t18 = hold(t17, c_threshold, t15)
    t19 = p * c_shrink
    t20 = t18 * c_lr
    t21 = t19 - t20
    return t21, t5, t9, t17


@triton.jit
def radam_move(
    p_, g, s_exp_avg_, s_exp_avg_sq_, c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
    s_exp_avg = fetch(s_exp_avg_, mask, WHOLE, WORK)
    s_exp_avg_sq = fetch(s_exp_avg_sq_, mask, WHOLE, WORK)
    c_l2 = tl.load(c + 1).to(WORK)
    c_shrink = tl.load(c + 2).to(WORK)
    c_unscale = tl.load(c + 3).to(WORK)
    c_threshold = tl.load(c + 4).to(WORK)
    c_weight1 = tl.load(c + 5).to(WORK)
    c_beta2 = tl.load(c + 6).to(WORK)
    c_weight2 = tl.load(c + 7).to(WORK)
    c_plain = tl.load(c + 8).to(WORK)
    c_adaptive = tl.load(c + 9).to(WORK)
    c_eps = tl.load(c + 10).to(WORK)
    c_lr = tl.load(c + 11).to(WORK)
    p, s_exp_avg, s_exp_avg_sq, alignment = radam(
        p, g, s_exp_avg, s_exp_avg_sq,
        c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2, c_weight2, c_plain, c_adaptive, c_eps, c_lr,
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
    put(s_exp_avg_, s_exp_avg, mask, WHOLE)
    put(s_exp_avg_sq_, s_exp_avg_sq, mask, WHOLE)
    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)


@triton.jit(do_not_specialize=["only", "seed"])
def radam_dense(
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
        row = table + i * 6
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
        s_exp_avg = tl.load(row + 4)
        s_exp_avg_sq = tl.load(row + 5)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & (((p | g | s_exp_avg | s_exp_avg_sq) & 15) == 0):
            aligned = radam_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
                stretch(s_exp_avg, start, STATE, True, BLOCK),
                stretch(s_exp_avg_sq, start, STATE, True, BLOCK),
                c,
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
            aligned = radam_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
                stretch(s_exp_avg, start, STATE, False, BLOCK),
                stretch(s_exp_avg_sq, start, STATE, False, BLOCK),
                c,
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


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def radam_rows(
    p,
    s_exp_avg,
    s_exp_avg_sq,
    values,
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
        aligned = radam_move(
            p + place, g, s_exp_avg + place, s_exp_avg_sq + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def radam_seams(
    p,
    s_exp_avg,
    s_exp_avg_sq,
    keys,
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
        place = row * width + column
        aligned = radam_move(
            p + place, g, s_exp_avg + place, s_exp_avg_sq + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))


@triton.jit
def yogi(
    p, g, s_exp_avg, s_exp_avg_sq, c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2, c_weight2,
    c_correct1, c_correct2, c_eps, c_lr,
):
    t0 = g * c_unscale
    t1 = scaled(p, c_l2)
    t2 = t0 + t1
    t3 = t2 - s_exp_avg
    t4 = t3 * c_weight1
    t5 = s_exp_avg + t4
    t6 = t2 * t2
    t7 = s_exp_avg_sq - t6
    t8 = sign(t7)
    t9 = t8 * t6
    t10 = t9 * c_weight2
    t11 = s_exp_avg_sq - t10
    t12 = t5 * c_correct1
    t13 = t11 * c_correct2
    t14 = sqrt(t13)
    t15 = t14 + c_eps
    t16 = divide(t12, t15)
    t17 = sign(t2)
    t18 = t5 * t17
    t19 = hold(t18, c_threshold, t16)
    t20 = p * c_shrink
    t21 = t19 * c_lr
    t22 = t20 - t21
    return t22, t5, t11, t18


@triton.jit
def yogi_move(
    p_, g, s_exp_avg_, s_exp_avg_sq_, c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
    s_exp_avg = fetch(s_exp_avg_, mask, WHOLE, WORK)
    s_exp_avg_sq = fetch(s_exp_avg_sq_, mask, WHOLE, WORK)
    c_l2 = tl.load(c + 1).to(WORK)
    c_shrink = tl.load(c + 2).to(WORK)
    c_unscale = tl.load(c + 3).to(WORK)
    c_threshold = tl.load(c + 4).to(WORK)
    c_weight1 = tl.load(c + 5).to(WORK)
    c_beta2 = tl.load(c + 6).to(WORK)
    c_weight2 = tl.load(c + 7).to(WORK)
    c_correct1 = tl.load(c + 8).to(WORK)
    c_correct2 = tl.load(c + 9).to(WORK)
    c_eps = tl.load(c + 10).to(WORK)
    c_lr = tl.load(c + 11).to(WORK)
    p, s_exp_avg, s_exp_avg_sq, alignment = yogi(
        p, g, s_exp_avg, s_exp_avg_sq,
        c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2, c_weight2, c_correct1, c_correct2, c_eps, c_lr,
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
    put(s_exp_avg_, s_exp_avg, mask, WHOLE)
    put(s_exp_avg_sq_, s_exp_avg_sq, mask, WHOLE)
    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)


@triton.jit(do_not_specialize=["only", "seed"])
def yogi_dense(
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
        row = table + i * 6
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
        s_exp_avg = tl.load(row + 4)
        s_exp_avg_sq = tl.load(row + 5)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & (((p | g | s_exp_avg | s_exp_avg_sq) & 15) == 0):
            aligned = yogi_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
                stretch(s_exp_avg, start, STATE, True, BLOCK),
                stretch(s_exp_avg_sq, start, STATE, True, BLOCK),
                c,
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
            aligned = yogi_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
                stretch(s_exp_avg, start, STATE, False, BLOCK),
                stretch(s_exp_avg_sq, start, STATE, False, BLOCK),
                c,
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


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def yogi_rows(
    p,
    s_exp_avg,
    s_exp_avg_sq,
    values,
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
        aligned = yogi_move(
            p + place, g, s_exp_avg + place, s_exp_avg_sq + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def yogi_seams(
    p,
    s_exp_avg,
    s_exp_avg_sq,
    keys,
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
        place = row * width + column
        aligned = yogi_move(
            p + place, g, s_exp_avg + place, s_exp_avg_sq + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))


@triton.jit
def adabelief(
    p, g, s_exp_avg, s_exp_avg_var, c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2, c_weight2,
    c_correct1, c_correct2, c_eps, c_lr,
):
    t0 = g * c_unscale
    t1 = scaled(p, c_l2)
    t2 = t0 + t1
    t3 = t2 - s_exp_avg
    t4 = t3 * c_weight1
    t5 = s_exp_avg + t4
    t6 = t2 - t5
    t7 = s_exp_avg_var * c_beta2
    t8 = t6 * t6
    t9 = t8 * c_weight2
    t10 = t7 + t9
    t11 = t10 + c_eps
    t12 = t5 * c_correct1
    t13 = t11 * c_correct2
    t14 = sqrt(t13)
    t15 = t14 + c_eps
    t16 = divide(t12, t15)
    t17 = sign(t2)
    t18 = t5 * t17
    t19 = hold(t18, c_threshold, t16)
    t20 = p * c_shrink
    t21 = t19 * c_lr
    t22 = t20 - t21
    return t22, t5, t11, t18


@triton.jit
def adabelief_move(
    p_, g, s_exp_avg_, s_exp_avg_var_, c, place, seed, mask,
    WHOLE: tl.constexpr, WORK: tl.constexpr, STOCHASTIC: tl.constexpr,
):
    """Move the elements at these addresses; 1 where momentum and gradient agree in sign."""
    p = fetch(p_, mask, WHOLE, WORK)
    s_exp_avg = fetch(s_exp_avg_, mask, WHOLE, WORK)
    s_exp_avg_var = fetch(s_exp_avg_var_, mask, WHOLE, WORK)
    c_l2 = tl.load(c + 1).to(WORK)
    c_shrink = tl.load(c + 2).to(WORK)
    c_unscale = tl.load(c + 3).to(WORK)
    c_threshold = tl.load(c + 4).to(WORK)
    c_weight1 = tl.load(c + 5).to(WORK)
    c_beta2 = tl.load(c + 6).to(WORK)
    c_weight2 = tl.load(c + 7).to(WORK)
    c_correct1 = tl.load(c + 8).to(WORK)
    c_correct2 = tl.load(c + 9).to(WORK)
    c_eps = tl.load(c + 10).to(WORK)
    c_lr = tl.load(c + 11).to(WORK)
    p, s_exp_avg, s_exp_avg_var, alignment = adabelief(
        p, g, s_exp_avg, s_exp_avg_var,
        c_l2, c_shrink, c_unscale, c_threshold, c_weight1, c_beta2, c_weight2, c_correct1, c_correct2, c_eps, c_lr,
    )
    if STOCHASTIC:
        p = round_randomly(p, place, seed, tl.load(c))
    put(p_, p, mask, WHOLE)
    put(s_exp_avg_, s_exp_avg, mask, WHOLE)
    put(s_exp_avg_var_, s_exp_avg_var, mask, WHOLE)
    return (alignment > 0).to(tl.int32) if WHOLE else ((alignment > 0) & mask).to(tl.int32)


@triton.jit(do_not_specialize=["only", "seed"])
def adabelief_dense(
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
        row = table + i * 6
        p = tl.load(row)
        n = tl.load(row + 2)
        g = tl.load(grads + i)
        s_exp_avg = tl.load(row + 4)
        s_exp_avg_var = tl.load(row + 5)
        c = coefficients + i * stride
        start = (block - tl.load(row + 3)) * BLOCK
        place = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= n) & (((p | g | s_exp_avg | s_exp_avg_var) & 15) == 0):
            aligned = adabelief_move(
                stretch(p, start, PARAM, True, BLOCK),
                fetch(stretch(g, start, GRAD, True, BLOCK), None, True, WORK),
                stretch(s_exp_avg, start, STATE, True, BLOCK),
                stretch(s_exp_avg_var, start, STATE, True, BLOCK),
                c,
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
            aligned = adabelief_move(
                stretch(p, start, PARAM, False, BLOCK),
                fetch(stretch(g, start, GRAD, False, BLOCK), mask, False, WORK),
                stretch(s_exp_avg, start, STATE, False, BLOCK),
                stretch(s_exp_avg_var, start, STATE, False, BLOCK),
                c,
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


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def adabelief_rows(
    p,
    s_exp_avg,
    s_exp_avg_var,
    values,
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
        aligned = adabelief_move(
            p + place, g, s_exp_avg + place, s_exp_avg_var + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
            see(counts, tl.program_id(0) + tl.program_id(1) == 0, rows.to(tl.int64) * width)


@triton.jit(do_not_specialize=["n", "rows", "seed"])
def adabelief_seams(
    p,
    s_exp_avg,
    s_exp_avg_var,
    keys,
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
        place = row * width + column
        aligned = adabelief_move(
            p + place, g, s_exp_avg + place, s_exp_avg_var + place,
            coefficients, place, seed, mask, False, WORK, STOCHASTIC,
        )
        if COUNT:
            count(counts, tl.sum(aligned), tl.sum(mask.to(tl.int32)))
