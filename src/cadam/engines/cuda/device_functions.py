"""Triton device functions that the generated kernels call, and the kernels that do not depend on a rule.

`codegen.triton_source` generates the kernels of the rules from these functions: arithmetic on elements, access to
memory, quantized moments, and sums over the duplicate ids of sparse gradients. Names in capitals are compile-time
constants.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl
from triton.language.extra import libdevice

# Functions of an element -----------------------------------------------------------------------------------------


@triton.jit
def sqrt(x):
    """Return the square root, correctly rounded."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def divide(x, y):
    """Return x / y, correctly rounded."""
    return x / y if y.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def reciprocal(x):
    """Return 1 / x, correctly rounded."""
    return 1.0 / x if x.dtype == tl.float64 else tl.div_rn(1.0, x)


@triton.jit
def sign(x):
    """Return 1, -1 or 0; 0 for NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def maximum(x, y):
    """Return the larger value, or NaN if x or y is NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def positive(x):
    """Return 1 where x is positive, else 0."""
    return (x > 0).to(x.dtype)


@triton.jit
def power(x, y):
    """Return x to the power of y."""
    return libdevice.pow(x, y)


@triton.jit
def scaled(x, factor):
    """Return x * factor, but zero where the factor is zero, even if x is infinite or NaN."""
    return tl.where(factor == 0, 0.0, x * factor)


@triton.jit
def agreement(x, y):
    """Return 2**150 * x * y, which is positive exactly where x and y agree in sign and does not underflow to zero.

    The result is NaN if x or y is NaN, or if one of them is zero and the other is 2**53 or larger.
    """
    return (x * 2.0**75) * (y * 2.0**75)


@triton.jit
def add_weight_decay(g, p, factor):
    """Return the gradient with coupled weight decay. The branch skips the arithmetic if the factor is zero."""
    if factor != 0:
        g = g + p * factor
    return g


@triton.jit
def approximate_sqrt(x):
    """Return an approximate square root, off by a few units in the last place.

    A subnormal x is treated as the smallest normal number.
    """
    return tl.sqrt(maximum(x, 1.1754943508222875e-38))


@triton.jit
def approximate_divide(x, y):
    """Return an approximate x / y for positive normal y, off by a few units in the last place."""
    root = tl.rsqrt(y)
    return x * (root * root)


@triton.jit
def subtract_step(p, step, lr):
    """Return p - step * lr, rounded once."""
    return tl.fma(step, tl.zeros_like(step) - lr, p)


@triton.jit
def masked(alignment, threshold, step):
    """Return the step, but zero where the alignment is at most the threshold. A NaN threshold masks nothing."""
    return tl.where(alignment <= threshold, 0.0, step)


# Order of kernels ----------------------------------------------------------------------------------------------


@triton.jit
def launch_dependents():
    """Allow the next kernel to begin. It must call `wait_for_previous_kernel` before it reads what this one writes."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_previous_kernel():
    """Wait until the previous kernel on the stream has ended."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


# Memory ----------------------------------------------------------------------------------------------------------


@triton.jit
def should_update(found_inf, GUARD: tl.constexpr):
    """Whether the step may be taken, because no gradient has overflowed."""
    proceed = True
    if GUARD:
        proceed = tl.load(found_inf) == 0
    return proceed


@triton.jit
def block_pointers(address, start, TYPE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers to a block of elements. The compiler may assume that a whole block is aligned to 16 bytes."""
    pointer = address.to(tl.pointer_type(TYPE))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start + tl.arange(0, BLOCK)


@triton.jit
def load(pointers, mask, WHOLE: tl.constexpr):
    """Load values, without a mask if the block is whole."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=mask, other=0)


@triton.jit
def store(pointers, values, mask, WHOLE: tl.constexpr):
    """Store values, without a mask if the block is whole."""
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def hash_bits(x):
    """Return 32 bits that each depend on all bits of x (the finalizer of MurmurHash3)."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x


@triton.jit
def noise_key(seed, step):
    """Return the key of the rounding noise of one parameter in one step."""
    high = hash_bits((seed.to(tl.int64) >> 32).to(tl.uint32) ^ hash_bits(step.to(tl.int64).to(tl.uint32)))
    return hash_bits(seed.to(tl.uint32) ^ high)


@triton.jit
def noise_at(key, index, upper):
    """Return 32 random bits: a hash of the key and the index of the element, `index`.

    `upper` is any index with the same upper 32 bits as `index`. One index for a whole block saves arithmetic.
    """
    return hash_bits(index.to(tl.uint32) ^ hash_bits((upper >> 32).to(tl.uint32) ^ key))


@triton.jit
def shared_noise(key, start, first_pair, column):
    """Return 32 random bits that two neighboring columns share.

    `start` is the index of the first element of the row or block, and `first_pair` the number of its first pair. The
    number of the pair is the same expression for both columns, so that the compiler computes the hash once.
    """
    return hash_bits((first_pair + ((column | 1) >> 1).to(tl.uint32)) ^ hash_bits((start >> 32).to(tl.uint32) ^ key))


@triton.jit
def noise_half(noise, column, SECOND: tl.constexpr):
    """Return 16 of the 32 bits for a buffer.

    The first buffer uses the lower half in even columns and the upper half in odd ones, the second buffer vice versa.
    """
    return tl.where((column & 1) == (1 if SECOND else 0), noise & 0xFFFF, noise >> 16)


@triton.jit
def shifted_noise_half(noise, column, SECOND: tl.constexpr):
    """Return the 16 bits of a buffer as `noise_half` does, moved to the two bytes in the middle of the word."""
    bytes = tl.where((column & 1) == (1 if SECOND else 0), 0x4104, 0x4324)
    return libdevice.byte_perm(noise.to(tl.int32, bitcast=True), 0, bytes).to(tl.uint32, bitcast=True)


@triton.jit
def round_stochastically(x, noise):
    """Round x stochastically to one of its two neighbors in bfloat16, by 16 bits of noise."""
    bits = x.to(tl.uint32, bitcast=True) + noise
    # Adding noise to a NaN that has all bits set would overflow.
    return tl.where(x == x, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), x)


# Quantized moments, as cadam/rules/moment_storage.py defines them --------------------------------
#
# Elements that share a scale are one row of a tile, or a whole one-dimensional block. A thread has four neighboring
# elements: 16 bytes of float32 and one word of int8 values.


@triton.jit
def quantized_block_pointers(address, start, TYPE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers to a block of quantized values, aligned so that a thread gets four neighbors and not more."""
    pointer = address.to(tl.pointer_type(TYPE))
    if WHOLE:
        pointer = tl.multiple_of(pointer, TYPE.primitive_bitwidth // 2)
    return pointer + start + tl.arange(0, BLOCK)


@triton.jit
def block_scale_pointers(address, first, gap, BLOCK: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr):
    """Return pointers to the scales of all units of a program. Loading them together avoids a wait for each unit."""
    k = tl.arange(0, BLOCK // UNIT) * UNIT
    return address.to(tl.pointer_type(tl.uint8)) + (first + k + k // CHUNK * gap) // UNIT


@triton.jit
def element_at(x, i):
    """Return element i of a vector."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == i, x, 0), 0)


@triton.jit
def with_element(x, i, value):
    """Return a vector with element i replaced."""
    return tl.where(tl.arange(0, x.shape[0]) == i, value, x)


@triton.jit
def align_to_four(pointer, IS_ALIGNED: tl.constexpr):
    """Tell the compiler that a pointer is aligned to four quantized values and not to more, if IS_MULTIPLE.

    With a better alignment it would give a thread more than four neighbors.
    """
    type: tl.constexpr = pointer.dtype.element_ty
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer.to(tl.int64).to(tl.pointer_type(type)), type.primitive_bitwidth // 2)
    return pointer


@triton.jit
def advance_row_steps(steps, by_step, WIDTH: tl.constexpr, rows):
    """Advance the step counts of rows and return the addresses of the coefficients of these steps.

    `by_step` has a row of coefficients for each step count. They do not change after the last one, whose number is in
    row 0.
    """
    t = tl.load(steps, mask=rows, other=0) + 1
    tl.debug_barrier()  # All threads that share a row must have read its count before it is overwritten.
    tl.store(steps, t, mask=rows)
    return by_step + tl.minimum(t, tl.load(by_step).to(tl.int32)) * WIDTH


@triton.jit
def aging_rows(last_steps, last, by_missed, step, WIDTH: tl.constexpr, rows):
    """Set the steps of the rows' last updates, and return the addresses of the coefficients of the steps they missed.

    `last` has the values that were loaded from `last_steps`. Row k + 1 of `by_missed` has the coefficients for k missed
    steps. They do not change after the last row, whose number is in row 0.
    """
    t = step.to(tl.int32)
    tl.debug_barrier()  # All threads that share a row must have read its last step before it is overwritten.
    tl.store(last_steps, t, mask=rows)
    return by_missed + tl.minimum(t - last, tl.load(by_missed).to(tl.int32)) * WIDTH


@triton.jit
def dequantize(code, exponent, SIGNED: tl.constexpr):
    """Return the float32 values of int8 values and their shared exponents."""
    base = (exponent.to(tl.int32) - 31) << 23
    if SIGNED:
        bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 21) & -0x70200000  # sign and magnitude
        x = (bits + base).to(tl.float32, bitcast=True)
        least = base.to(tl.float32, bitcast=True)  # the value that a magnitude of zero would stand for
        nan_value = (base + (127 << 21)).to(
            tl.float32, bitcast=True
        )  # the number that the value of NaN would stand for
        x = tl.where(tl.abs(x) == nan_value, float("nan"), x)
        return tl.where(tl.abs(x) == least, 0.0, x)
    code = code.to(tl.int32)
    bits = tl.where(code == 255, 0x7FC00000, (code << 20) + tl.minimum(code, 1) * base)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_bfloat16(pointers, x, noise, mask, WHOLE: tl.constexpr, SIGNED: tl.constexpr):
    """Store values in bfloat16, rounded stochastically by 16 bits of noise. The clamp keeps NaNs from overflowing."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.minimum((bits & 0x7FFFFFFF) + noise, 0x7FFFFFFF)
    if SIGNED:
        rounded |= bits & 0x80000000
    store(pointers.to(tl.pointer_type(tl.uint16), bitcast=True), (rounded >> 16).to(tl.uint16), mask, WHOLE)


@triton.jit
def store_int8(pointers, x, noise, mask, exists, WHOLE: tl.constexpr, SIGNED: tl.constexpr):
    """Store values as int8, rounded stochastically, and return their shared exponents.

    The 16 bits of noise are in the two bytes in the middle of the word. Infinite and NaN elements do not count for the
    exponent; they get the largest value, which stands for NaN.
    """
    shift: tl.constexpr = 21 if SIGNED else 20
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + (noise >> (24 - shift))
    # The exponent field of the number after the rounded one, plus one. It is negative for infinite and NaN elements.
    next_number = (rounded + (1 << shift) + (1 << 23)).to(tl.int32, bitcast=True)
    largest = row_max(next_number if WHOLE else tl.where(exists, next_number, 0))
    exponent = tl.maximum((largest >> 23) - 1, 32)
    above = rounded.to(tl.int32, bitcast=True) - ((exponent - 31) << 23)
    above = tl.maximum(above, 0 if SIGNED else tl.minimum(magnitude, 1).to(tl.int32) << shift)
    code = tl.where(next_number < 0, 127 if SIGNED else 255, above >> shift).to(tl.uint32)
    if SIGNED:
        code |= bits >> 24 & 0x80
    store(pointers, code.to(tl.uint8), mask, WHOLE)
    return exponent.to(tl.uint8)


@triton.jit
def row_max(x):
    """Return the largest element of a block, or of each row of a tile."""
    return tl.max(x, 0) if len(x.shape) == 1 else tl.max(tl.max(x, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def mean_square(x, exists, width):
    """Return the mean of the squares of each row."""
    total = tl.sum(tl.sum(tl.where(exists, x * x, 0.0), 1, keep_dims=True), 2, keep_dims=True)
    return divide(total, tl.zeros_like(total) + width)


# Counting --------------------------------------------------------------------------------------------------------


@triton.jit
def add_counts(counts, aligned, touched):
    """Add to the first two alignment counters of a parameter: elements aligned and elements touched."""
    tl.atomic_add(counts, aligned.to(tl.int64), sem="relaxed")
    if touched > 0:
        tl.atomic_add(counts + 1, touched.to(tl.int64), sem="relaxed")


@triton.jit
def count_distinct_ids(counts, is_valid, n, width, TILE: tl.constexpr):
    """Add to the counter of elements touched, for distinct ids.

    The first program adds the elements of all ids, and each program subtracts those of its invalid ids. A program
    without invalid ids adds nothing, because atomic additions to the same counter are executed one after the other.
    """
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1)
    if tl.program_id(0) + columns == 0:
        tl.atomic_add(counts + 1, n.to(tl.int64) * width, sem="relaxed")
    left_out = (position < n) & ~is_valid & (columns == 0)
    tl.atomic_add(
        counts + 1 + tl.zeros_like(position), tl.zeros_like(position).to(tl.int64) - width, left_out, sem="relaxed"
    )


@triton.jit
def count_seen(counts, first, seen):
    """Add to the third alignment counter, elements seen. Only the first program does so."""
    if first:
        tl.atomic_add(counts + 2, seen.to(tl.int64), sem="relaxed")


@triton.jit
def count_step(steps, i, mask, found_inf, GUARD: tl.constexpr):
    """Add one to the step counts at these addresses unless a gradient overflowed, and return them in float64."""
    pointers = tl.load(steps + i, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    t = tl.load(pointers, mask=mask, other=0)
    if should_update(found_inf, GUARD):
        next_count = (t.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
        t = tl.where(t < 16777216.0, t + 1, next_count)
        tl.store(pointers, t, mask=mask)
    return t.to(tl.float64)


# Rows ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "rows"])
def make_keys(ids, keys, error, n, rows, BLOCK: tl.constexpr):
    """Write the sort keys of ids. The key of an invalid id is `rows`, a row that no kernel writes to."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    row = tl.load(ids + i, mask=mask, other=0).to(tl.int64)
    store_keys(keys + i, row, row < 0, error, rows, mask)


@triton.jit
def store_keys(keys, row, negative, error, rows, mask):
    """Write keys, and report rows that are out of range."""
    invalid = negative | (row >= rows)
    tl.store(keys, tl.where(invalid, rows, row), mask=mask)
    report_invalid_ids(error, row, invalid & mask)


@triton.jit
def report_invalid_ids(error, row, invalid):
    """Report invalid ids to the host: first one of them, then a flag that there is one."""
    tl.store(error + 1 + tl.zeros_like(row), row, mask=invalid)
    tl.store(error + tl.zeros_like(row), 1, mask=invalid)


@triton.jit(do_not_specialize=["n", "rows", "bags", "batch", "first"])
def make_bag_keys(ids, offsets, starts, keys, sources, error, n, rows, bags, batch, first, BLOCK: tl.constexpr):
    """Write the sort keys of ids in bags, and the position of the gradient of each id's bag.

    Ids are ordered by feature and then by sample, gradients by sample and then by feature. The bag of an id is the last
    one that begins at or before it, which a binary search over the offsets finds.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    bag, left = tl.zeros_like(i), bags
    while left > 1:
        half = left // 2
        begun = tl.load(offsets + bag + half, mask=mask, other=0) <= i + first
        bag = tl.where(begun, bag + half, bag)
        left -= half
    feature = bag // batch
    tl.store(sources + i, (bag - feature * batch) * (bags // batch) + feature, mask=mask)
    row = tl.load(ids + i, mask=mask, other=0).to(tl.int64)
    start = tl.load(starts + feature, mask=mask, other=0)
    store_keys(keys + i, start + row, row < 0, error, rows, mask)


@triton.jit
def _in_segment(starts1, sum1, starts2, sum2):
    """Combine two parts of a segmented sum: a sum starts again where a segment starts."""
    return starts1 | starts2, tl.where(starts2 != 0, sum2, sum1 + sum2)


@triton.jit
def program_columns(width, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Return the columns of this program and which of them exist. With EVEN, the width is a multiple of COLUMNS."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return column, tl.full((COLUMNS,), True, tl.int1) if EVEN else column < width


@triton.jit
def tile_columns(width, COLUMNS: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr):
    """Return the columns of this program and which of them exist, in the shape of a tile.

    The dimensions of a tile are rows, parts of the columns, and columns of a part. A thread has four columns of each
    part. With more parts a thread has more of a row, and fewer threads repeat the work that is done once for each row.
    """
    part = (tl.arange(0, PARTS) * (COLUMNS // PARTS))[None, :, None]
    column = tl.program_id(1) * COLUMNS + part + tl.arange(0, COLUMNS // PARTS)[None, None, :]
    return column, tl.full(column.shape, True, tl.int1) if EVEN else column < width


@triton.jit
def load_keys(keys, error, n, rows, DISTINCT: tl.constexpr, TILE: tl.constexpr):
    """Load one tile of the sorted keys.

    With DISTINCT, every key is a different row. If there is an `error`, the keys are ids that were not checked yet, and
    an invalid one is reported.

    Returns:
        For each position of the tile: the key, whether it is a valid row, whether a row begins there, whether a row
        ends there, and whether the row began in an earlier tile. Last, in the shape of a tile, whether a row that began
        in this tile is complete there.
    """
    tile = tl.program_id(0)
    position = tile * TILE + tl.arange(0, TILE)
    in_range = position < n
    key = tl.load(keys + position, mask=in_range, other=-1)
    is_valid = in_range & (key < rows)
    if error is not None:
        is_valid = is_valid & (key >= 0)
        report_invalid_ids(error, key.to(tl.int64), in_range & ~is_valid)
    if DISTINCT:
        starts, ends, is_continued = in_range, in_range, tl.zeros_like(in_range)
    else:
        starts = key != tl.load(keys + position - 1, mask=in_range & (position > 0), other=-1)
        ends = key != tl.load(keys + position + 1, mask=position + 1 < n, other=-1)
        is_continued = key == tl.load(keys + tile * TILE - 1, mask=tile > 0, other=-1)
    return key, is_valid, starts, ends, is_continued, (is_valid & ends & ~is_continued)[:, None, None]


@triton.jit
def sum_duplicates(
    values,
    order,
    sources,
    partials,
    n,
    width,
    column,
    exists,
    is_valid,
    starts,
    ends,
    is_continued,
    WORK: tl.constexpr,
    DISTINCT: tl.constexpr,
    IN_BAGS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum the gradients of each row in one tile, in the order of the ids, and return the running sums.

    The sum of a row that reaches over several tiles is written to `partials`, which has two entries for each tile: one
    for a row that began in an earlier tile, and one for a row that continues in the next tile.
    """
    tile = tl.program_id(0)
    position = tile * TILE + tl.arange(0, TILE)
    in_range = position < n
    source = position.to(tl.int64) if DISTINCT else tl.load(order + position, mask=in_range, other=0)
    if IN_BAGS:
        source = tl.load(sources + source, mask=in_range, other=0).to(tl.int64)
    wanted = is_valid[:, None, None] & exists
    g = tl.load(values + source[:, None, None] * width + column, mask=wanted, other=0).to(WORK)
    if DISTINCT:
        sums = g
    else:
        inner = tl.sum((starts & (tl.arange(0, TILE) > 0)).to(tl.int32), 0)  # rows that begin inside the tile
        if inner == TILE - 1:
            sums = g
        elif inner == 0:
            sums = tl.sum(g, 0, keep_dims=True) + tl.zeros_like(g)
        else:
            flags = tl.broadcast_to(starts[:, None, None].to(tl.int32), g.shape)
            _, sums = tl.associative_scan((flags, g), 0, _in_segment)
        last = tl.arange(0, TILE) == TILE - 1
        partial = (is_continued & (ends | last)) | (last & ~ends)
        slot = 2 * tile.to(tl.int64) + tl.where(is_continued, 0, 1)
        tl.store(partials + slot[:, None, None] * width + column, sums, mask=wanted & partial[:, None, None])
    return sums


@triton.jit
def sum_over_tiles(
    keys,
    partials,
    n,
    rows,
    width,
    column,
    exists,
    WORK: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Return the sum of the row at the end of this tile, if the row begins here and continues in the next tile.

    SPAN tiles are added at a time, so that a row with many thousands of ids does not become a long chain of additions.
    """
    tile = tl.program_id(0)
    key = tl.load(keys + tile * TILE + TILE - 1)
    after = tl.load(keys + tile * TILE + TILE)
    before = tl.load(keys + tile * TILE - 1, mask=tile > 0, other=-1)
    continues = (key == after) & (key != before) & (key < rows)
    begins = continues
    is_valid = exists & continues
    total = tl.load(partials + (2 * tile.to(tl.int64) + 1) * width + column, mask=is_valid, other=0).to(WORK)
    next_tile = tile + 1
    while continues:
        span = next_tile + tl.arange(0, SPAN)
        same = tl.load(keys + span * TILE, mask=span < tl.cdiv(n, TILE), other=-1) == key
        pointers = partials + (2 * span.to(tl.int64) * width)[:, None] + column[None, :]
        total += tl.sum(tl.load(pointers, mask=same[:, None] & is_valid[None, :], other=0), 0)
        continues = tl.sum(same.to(tl.int32), 0) == SPAN
        next_tile += SPAN
    return key.to(tl.int64), total, is_valid, begins


@triton.jit(do_not_specialize=["n", "rows"])
def row_squares(
    values,
    keys,
    order,
    sources,
    partials,
    squares,
    n,
    rows,
    width,
    WORK: tl.constexpr,
    DISTINCT: tl.constexpr,
    IN_BAGS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Write the sum of squares of each tile, over the rows that begin and end in it."""
    column, exists = tile_columns(width, COLUMNS, EVEN, 1)
    _, is_valid, starts, ends, is_continued, complete = load_keys(keys, None, n, rows, DISTINCT, TILE)
    g = sum_duplicates(
        values,
        order,
        sources,
        partials,
        n,
        width,
        column,
        exists,
        is_valid,
        starts,
        ends,
        is_continued,
        WORK,
        DISTINCT,
        IN_BAGS,
        TILE,
    )
    mask = complete & exists
    position = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(squares + position, tl.sum(tl.where(mask, g * g, 0.0)))


@triton.jit(do_not_specialize=["n", "rows"])
def spanning_row_squares(
    keys,
    partials,
    squares,
    n,
    rows,
    width,
    WORK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Write the sum of squares of each row that begins in a tile and continues in the next."""
    column, exists = program_columns(width, COLUMNS, EVEN)
    _, g, mask, _ = sum_over_tiles(keys, partials, n, rows, width, column, exists, WORK, TILE, SPAN)
    position = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(squares + position, tl.sum(tl.where(mask, g * g, 0.0)))
