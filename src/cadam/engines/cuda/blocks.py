"""What every Triton kernel is made of: element functions, access to memory, and the kernels that know no rule.

The kernels of the rules, which `codegen.triton` generates, call these.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl
from triton.language.extra import libdevice

# Functions of an element -----------------------------------------------------------------------------------------


@triton.jit
def sqrt(x):
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def divide(x, y):
    return x / y if y.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def reciprocal(x):
    return 1.0 / x if x.dtype == tl.float64 else tl.div_rn(1.0, x)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def positive(x):
    return (x > 0).to(x.dtype)


@triton.jit
def power(x, y):
    return libdevice.pow(x, y)


@triton.jit
def scaled(x, factor):
    """x times the factor, and zero where the factor is zero, whatever x."""
    return tl.where(factor == 0, 0.0, x * factor)


@triton.jit
def hold(alignment, threshold, step):
    """No number is <= NaN: with that threshold nothing is held, and a NaN in the alignment never is."""
    return tl.where(alignment <= threshold, 0.0, step)


# Memory ----------------------------------------------------------------------------------------------------------


@triton.jit
def proceed(found_inf, GUARD: tl.constexpr):
    """May the step be done, that is, has no gradient overflowed?"""
    go = True
    if GUARD:
        go = tl.load(found_inf) == 0
    return go


@triton.jit
def stretch(address, start, TYPE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to a block of elements. A whole block is known to lie at a multiple of 16 bytes."""
    pointer = address.to(tl.pointer_type(TYPE))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start + tl.arange(0, BLOCK)


@triton.jit
def fetch(pointers, mask, WHOLE: tl.constexpr, WORK: tl.constexpr):
    """Values from memory in the dtype of the arithmetic; without a mask where the block is whole."""
    values = tl.load(pointers) if WHOLE else tl.load(pointers, mask=mask, other=0)
    return values.to(WORK)


@triton.jit
def put(pointers, values, mask, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def scramble(x):
    """32 bits of which each depends on all of the bits of x (the finalizer of MurmurHash3)."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x


@triton.jit
def noise_at(place, far, seed, step):
    """32 random bits: a hash of the seed, the step and the element's place, the same wherever it is computed.

    `far` is any place whose upper half is that of `place`: one for all of a block, or each its own.
    """
    high = scramble((seed.to(tl.int64) >> 32).to(tl.uint32) ^ scramble(step.to(tl.int64).to(tl.uint32)))
    key = scramble(seed.to(tl.uint32) ^ high)
    return scramble(place.to(tl.uint32) ^ scramble((far >> 32).to(tl.uint32) ^ key))


@triton.jit
def round_up_or_down(x, noise):
    """x rounded to one of its two neighbours in bfloat16 by 16 bits of noise."""
    bits = x.to(tl.uint32, bitcast=True) + noise
    # A NaN with all bits set would overflow.
    return tl.where(x == x, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), x)


@triton.jit
def round_randomly(x, place, seed, step):
    """x rounded to one of its two neighbours in bfloat16, to each the more often the nearer it is."""
    return round_up_or_down(x, noise_at(place, place, seed, step) & 0xFFFF)


# Coded moments, as cadam/moments.py defines them: blocks of rows that share a scale each --------------------------


@triton.jit
def blocks_of(address, start, TYPE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to a block of elements, 256 of which share a scale."""
    pointer = address.to(tl.pointer_type(TYPE))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start + tl.arange(0, BLOCK // 256)[:, None] * 256 + tl.arange(0, 256)[None, :]


@triton.jit
def scales_of(address, start, BLOCK: tl.constexpr):
    """Pointers to the scales of a block of elements."""
    return address.to(tl.pointer_type(tl.uint8)) + start // 256 + tl.arange(0, BLOCK // 256)[:, None]


@triton.jit
def any_of(mask):
    """Which rows of it have an element?"""
    return tl.max(mask.to(tl.int32), 1, keep_dims=True) > 0


@triton.jit
def fetch_row(pointers, mask, WHOLE: tl.constexpr, WORK: tl.constexpr):
    """One value for each row."""
    return tl.load(pointers, mask=any_of(mask), other=0).to(WORK)


@triton.jit
def put_row(pointers, values, mask, WHOLE: tl.constexpr):
    tl.store(pointers, values, mask=any_of(mask))


@triton.jit
def fetch_coded(pointers, scales, mask, WHOLE: tl.constexpr, SIGNED: tl.constexpr):
    """Values from codes of one byte and the exponents that they share."""
    if WHOLE:
        code = tl.load(pointers).to(tl.int32)
        exponent = tl.load(scales).to(tl.int32)
    else:
        code = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        exponent = tl.load(scales, mask=any_of(mask), other=32).to(tl.int32)
    base = tl.where(exponent == 255, 0x7FC00000, (exponent - 31) << 23)
    if SIGNED:
        size = code & 0x7F
        bits = ((size << 21) + base) | ((code & 0x80) << 24)
    else:
        size = code
        bits = (size << 20) + base
    return tl.where(size == 0, 0.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def put_coded(pointers, scales, x, noise, mask, WHOLE: tl.constexpr, SIGNED: tl.constexpr):
    """Code values, rounded by 16 bits of noise each."""
    shift: tl.constexpr = 21 if SIGNED else 20
    noise = noise.to(tl.int32)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    largest = tl.max(size if WHOLE else tl.where(mask, size, 0), 1, keep_dims=True)
    exponent = tl.maximum((largest + (1 << shift)) >> 23, 32)
    exponent = tl.where(exponent >= 254, 255, exponent)
    base = tl.where(exponent == 255, 0x78000000, (exponent - 31) << 23)
    code = (size - base + (noise << (shift - 16))) >> shift
    code = tl.maximum(code, 0) | ((bits >> 24) & 0x80) if SIGNED else tl.maximum(code, tl.minimum(size, 1))
    code = code.to(tl.uint8)
    if WHOLE:
        tl.store(pointers, code)
        tl.store(scales, exponent.to(tl.uint8))
    else:
        tl.store(pointers, code, mask=mask)
        tl.store(scales, exponent.to(tl.uint8), mask=any_of(mask))


@triton.jit
def mean_square(x, mask, width):
    """The mean of the squares of each row."""
    total = tl.sum(tl.where(mask, x * x, 0.0), 1, keep_dims=True)
    return divide(total, tl.zeros_like(total) + width)


# Counting --------------------------------------------------------------------------------------------------------


@triton.jit
def count(counts, aligned, touched):
    """Add to the first two of a parameter's counters: elements aligned, elements touched."""
    tl.atomic_add(counts, aligned.to(tl.int64), sem="relaxed")
    if touched > 0:
        tl.atomic_add(counts + 1, touched.to(tl.int64), sem="relaxed")


@triton.jit
def see(counts, first, seen):
    """Add to the third, elements seen, by the first program only."""
    if first:
        tl.atomic_add(counts + 2, seen.to(tl.int64), sem="relaxed")


@triton.jit
def count_step(steps, i, mask, found_inf, GUARD: tl.constexpr):
    """Add one to the step counts at these addresses, unless a gradient overflowed; what they are then, in float64."""
    pointers = tl.load(steps + i, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    t = tl.load(pointers, mask=mask, other=0)
    if proceed(found_inf, GUARD):
        t += 1
        tl.store(pointers, t, mask=mask)
    return t.to(tl.float64)


# Rows ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n", "rows"])
def make_keys(ids, keys, error, n, rows, BLOCK: tl.constexpr):
    """Ids as keys to sort by. One that is no row of the table becomes `rows`, which no kernel writes to."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    row = tl.load(ids + i, mask=mask, other=0).to(tl.int64)
    note_keys(keys + i, row, row < 0, error, rows, mask)


@triton.jit
def note_keys(keys, row, negative, error, rows, mask):
    wrong = negative | (row >= rows)
    tl.store(keys, tl.where(wrong, rows, row), mask=mask)
    bad = wrong & mask
    if tl.max(bad.to(tl.int32), 0) > 0:
        tl.store(error + 1 + tl.zeros_like(row), row, mask=bad)
        tl.store(error, 1)


@triton.jit(do_not_specialize=["n", "rows", "bags", "batch", "first"])
def make_bag_keys(ids, offsets, starts, keys, sources, error, n, rows, bags, batch, first, BLOCK: tl.constexpr):
    """The same of ids in bags, feature by feature, and for each the place of its bag's gradient, sample by sample.

    The bag of an id is the last that begins at it or before: it is found by halving the bags.
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
    note_keys(keys + i, start + row, row < 0, error, rows, mask)


@triton.jit
def _in_segment(starts1, sum1, starts2, sum2):
    return starts1 | starts2, tl.where(starts2 != 0, sum2, sum1 + sum2)


@triton.jit
def sum_duplicates(
    values,
    keys,
    order,
    sources,
    partials,
    n,
    rows,
    width,
    column,
    WORK: tl.constexpr,
    ORDERED: tl.constexpr,
    IN_BAGS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the gradients of each row in one tile of the sorted keys, in the order in which they came.

    Returns the row of each position, the running sums, and where they are complete. A sum that began in an
    earlier tile or goes on in the next is left in `partials`: the tile's first, or its last.
    """
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    here = at < n
    key = tl.load(keys + at, mask=here, other=-1)
    before = tl.load(keys + tile * TILE - 1, mask=tile > 0, other=-1)
    starts = key != tl.load(keys + at - 1, mask=here & (at > 0), other=-1)
    ends = key != tl.load(keys + at + 1, mask=at + 1 < n, other=-1)
    source = at.to(tl.int64) if ORDERED else tl.load(order + at, mask=here, other=0)
    if IN_BAGS:
        source = tl.load(sources + source, mask=here, other=0).to(tl.int64)
    inside = (here & (key < rows))[:, None] & (column < width)[None, :]
    g = tl.load(values + source[:, None] * width + column[None, :], mask=inside, other=0).to(WORK)
    flags = tl.broadcast_to(starts[:, None].to(tl.int32), (TILE, COLUMNS))
    _, sums = tl.associative_scan((flags, g), 0, _in_segment)
    goes_on = key == before
    last = tl.arange(0, TILE) == TILE - 1
    partial = (goes_on & (ends | last)) | (last & ~ends)
    slot = 2 * tile.to(tl.int64) + tl.where(goes_on, 0, 1)
    tl.store(partials + slot[:, None] * width + column[None, :], sums, mask=inside & partial[:, None])
    return key.to(tl.int64), sums, inside & (ends & ~goes_on)[:, None]


@triton.jit
def sum_over_tiles(
    keys,
    partials,
    n,
    rows,
    width,
    column,
    WORK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The whole sum of the row in which this tile ends, if it begins here and goes on in the next tile.

    Tiles are added `SPAN` at a time, so that a row which fills thousands of them is no long chain.
    """
    tile = tl.program_id(0)
    key = tl.load(keys + tile * TILE + TILE - 1)
    after = tl.load(keys + tile * TILE + TILE)
    before = tl.load(keys + tile * TILE - 1, mask=tile > 0, other=-1)
    mine = (key == after) & (key != before) & (key < rows)
    inside = (column < width) & mine
    total = tl.load(partials + (2 * tile.to(tl.int64) + 1) * width + column, mask=inside, other=0).to(WORK)
    next_tile = tile + 1
    while mine:
        span = next_tile + tl.arange(0, SPAN)
        same = tl.load(keys + span * TILE, mask=span < tl.cdiv(n, TILE), other=-1) == key
        pointers = partials + (2 * span.to(tl.int64) * width)[:, None] + column[None, :]
        total += tl.sum(tl.load(pointers, mask=same[:, None] & inside[None, :], other=0), 0)
        mine = tl.sum(same.to(tl.int32), 0) == SPAN
        next_tile += SPAN
    return key.to(tl.int64), total, inside


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
    ORDERED: tl.constexpr,
    IN_BAGS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """For each tile, the squares of the rows' sums that are complete in it, added up."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    _, g, mask = sum_duplicates(
        values, keys, order, sources, partials, n, rows, width, column, WORK, ORDERED, IN_BAGS, TILE, COLUMNS
    )
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(squares + at, tl.sum(tl.where(mask, g * g, 0.0)))


@triton.jit(do_not_specialize=["n", "rows"])
def seam_squares(
    keys,
    partials,
    squares,
    n,
    rows,
    width,
    WORK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The same of the sum that begins in a tile and goes on in the next."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    _, g, mask = sum_over_tiles(keys, partials, n, rows, width, column, WORK, TILE, COLUMNS, SPAN)
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(squares + at, tl.sum(tl.where(mask, g * g, 0.0)))
