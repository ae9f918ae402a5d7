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
def agreement(x, y):
    """2**150 times the product: positive where both agree in sign, and only there; it never underflows to zero.

    NaN where one is, or where one is zero and the other 2**53 or more.
    """
    return (x * 2.0**75) * (y * 2.0**75)


@triton.jit
def decayed(g, p, factor):
    """g with coupled decay, for which there is nothing to do where the factor, which all elements share, is zero."""
    if factor != 0:
        g = g + p * factor
    return g


@triton.jit
def sqrt_roughly(x):
    """To some units in the last place. What is below the normal numbers is taken for the smallest of these."""
    return tl.sqrt(maximum(x, 1.1754943508222875e-38))


@triton.jit
def divide_roughly(x, y):
    """Likewise, for a y that is positive and normal."""
    root = tl.rsqrt(y)
    return x * (root * root)


@triton.jit
def moved(p, step, lr):
    """p - step * lr, rounded once."""
    return tl.fma(step, tl.zeros_like(step) - lr, p)


@triton.jit
def masked(alignment, threshold, step):
    """No number is <= NaN: with that threshold nothing is held, and a NaN in the alignment never is."""
    return tl.where(alignment <= threshold, 0.0, step)


# One kernel after another ----------------------------------------------------------------------------------------


@triton.jit
def let_next_begin():
    """The kernel after this one may begin; what this one writes it sees after `wait_for_last`."""
    tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_last():
    """Wait until the kernel before this one has ended."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


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
def fetch(pointers, mask, WHOLE: tl.constexpr):
    """Values from memory; without a mask where the block is whole."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=mask, other=0)


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
def noise_key(seed, step):
    """What the noise of one step of a parameter comes from."""
    high = scramble((seed.to(tl.int64) >> 32).to(tl.uint32) ^ scramble(step.to(tl.int64).to(tl.uint32)))
    return scramble(seed.to(tl.uint32) ^ high)


@triton.jit
def noise_at(key, place, far):
    """32 random bits: a hash of the key and the element's place, the same wherever it is computed.

    `far` is any place whose upper half is that of `place`: one for all of a block, or each its own.
    """
    return scramble(place.to(tl.uint32) ^ scramble((far >> 32).to(tl.uint32) ^ key))


@triton.jit
def shared_noise(key, start, word, column):
    """32 random bits for each two neighbours in columns of what begins at `start`; `word` is that of the first two.

    All have one expression for the number of these two, so that the compiler finds it to be the same for both.
    """
    return scramble((word + ((column | 1) >> 1).to(tl.uint32)) ^ scramble((start >> 32).to(tl.uint32) ^ key))


@triton.jit
def half(noise, column, SECOND: tl.constexpr):
    """16 of these bits for a buffer: of the first one, the lower half at even places and the upper half at odd ones."""
    return tl.where((column & 1) == (1 if SECOND else 0), noise & 0xFFFF, noise >> 16)


@triton.jit
def half_between(noise, column, SECOND: tl.constexpr):
    """The same, moved to the two bytes in the middle."""
    bytes = tl.where((column & 1) == (1 if SECOND else 0), 0x4104, 0x4324)
    return libdevice.byte_perm(noise.to(tl.int32, bitcast=True), 0, bytes).to(tl.uint32, bitcast=True)


@triton.jit
def round_up_or_down(x, noise):
    """x rounded to one of its two neighbours in bfloat16 by 16 bits of noise."""
    bits = x.to(tl.uint32, bitcast=True) + noise
    # A NaN with all bits set would overflow.
    return tl.where(x == x, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), x)


# Quantized moments, as cadam/rules/moment_storage.py defines them --------------------------------
#
# Whatever shares a scale is a row of a tile of rows, or all of a one-dimensional block. Four elements of it lie side by
# side in a thread: 16 bytes of float32, one word of codes.


@triton.jit
def words(address, start, TYPE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to a block of codes, of which a thread shall have no more than four side by side."""
    pointer = address.to(tl.pointer_type(TYPE))
    if WHOLE:
        pointer = tl.multiple_of(pointer, TYPE.primitive_bitwidth // 2)
    return pointer + start + tl.arange(0, BLOCK)


@triton.jit
def scales_of(address, first, gap, BLOCK: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr):
    """Pointers to the scales of all units of a program: in each unit's turn, its scale would be waited for."""
    k = tl.arange(0, BLOCK // UNIT) * UNIT
    return address.to(tl.pointer_type(tl.uint8)) + (first + k + k // CHUNK * gap) // UNIT


@triton.jit
def chosen(x, i):
    """One element of a vector."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == i, x, 0), 0)


@triton.jit
def replaced(x, i, value):
    """A vector with another element there."""
    return tl.where(tl.arange(0, x.shape[0]) == i, value, x)


@triton.jit
def by_four(pointer, IS_MULTIPLE: tl.constexpr):
    """Such a pointer from one that may be known to lie better; the same where it is no multiple of four codes."""
    type: tl.constexpr = pointer.dtype.element_ty
    if IS_MULTIPLE:
        pointer = tl.multiple_of(pointer.to(tl.int64).to(tl.pointer_type(type)), type.primitive_bitwidth // 2)
    return pointer


@triton.jit
def coefficients_of(steps, by_step, WIDTH: tl.constexpr, rows):
    """Count a step of these rows; where the coefficients of each one's step are.

    `by_step` has a row of them for each step count, all later ones being like the last. Row 0 tells which that is.
    """
    t = tl.load(steps, mask=rows, other=0) + 1
    tl.debug_barrier()  # threads that share a row have all read its count
    tl.store(steps, t, mask=rows)
    return by_step + tl.minimum(t, tl.load(by_step).to(tl.int32)) * WIDTH


@triton.jit
def decode(code, exponent, SIGNED: tl.constexpr):
    """Values from codes of one byte and the exponents that they share."""
    exponent = exponent.to(tl.int32)
    broken = exponent == 255
    base = (exponent - 31) << 23
    if SIGNED:
        bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 21) & -0x70200000  # the sign, and seven bits
        x = (bits + base).to(tl.float32, bitcast=True)
        least = base.to(tl.float32, bitcast=True)  # what a code of zero would be
        return tl.where(tl.abs(x) == least, 0.0, x * tl.where(broken, float("nan"), 1.0))
    code = code.to(tl.int32)
    bits = code * tl.where(broken, 0, 1 << 20) + tl.minimum(code, 1) * tl.where(broken, 0x7FC00000, base)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def put_rounded(pointers, x, noise, mask, WHOLE: tl.constexpr, SIGNED: tl.constexpr):
    """Store values in bfloat16, rounded to one of the two neighbours by 16 bits of noise. NaN must not overflow."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.minimum((bits & 0x7FFFFFFF) + noise, 0x7FFFFFFF)
    if SIGNED:
        rounded |= bits & 0x80000000
    put(pointers.to(tl.pointer_type(tl.uint16), bitcast=True), (rounded >> 16).to(tl.uint16), mask, WHOLE)


@triton.jit
def put_coded(pointers, x, noise, mask, there, WHOLE: tl.constexpr, SIGNED: tl.constexpr):
    """Code values, rounded by 16 bits of noise each, which are the two bytes in the middle; the exponents they share.

    What is above the smallest code is moved up, so that the code is the byte before these.
    """
    shift: tl.constexpr = 21 if SIGNED else 20
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    largest = largest_of(size if WHOLE else tl.where(there, size, 0))
    # A NaN has more bits than infinity has, and would overflow.
    exponent = tl.maximum((tl.minimum(largest, 0x7F800000) + (1 << shift)) >> 23, 32)
    exponent = tl.where(exponent >= 254, 255, exponent)
    base = tl.where(exponent == 255, 0x78000000, (exponent - 31) << 23)
    above = (tl.maximum(size - base, 0 if SIGNED else tl.minimum(size, 1) << 20) << (24 - shift)).to(tl.uint32) + noise
    if SIGNED:
        above |= bits.to(tl.uint32) & 0x80000000
    code = above >> 24
    put(pointers, code.to(tl.uint8), mask, WHOLE)
    return exponent.to(tl.uint8)


@triton.jit
def largest_of(x):
    """The largest element of a block, or of each row of a tile."""
    return tl.max(x, 0) if len(x.shape) == 1 else tl.max(tl.max(x, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def mean_square(x, there, width):
    """The mean of the squares of each row."""
    total = tl.sum(tl.sum(tl.where(there, x * x, 0.0), 1, keep_dims=True), 2, keep_dims=True)
    return divide(total, tl.zeros_like(total) + width)


# Counting --------------------------------------------------------------------------------------------------------


@triton.jit
def count(counts, aligned, touched):
    """Add to the first two of a parameter's counters: elements aligned, elements touched."""
    tl.atomic_add(counts, aligned.to(tl.int64), sem="relaxed")
    if touched > 0:
        tl.atomic_add(counts + 1, touched.to(tl.int64), sem="relaxed")


@triton.jit
def count_distinct(counts, inside, n, width, TILE: tl.constexpr):
    """The same of elements touched, for distinct ids: the first program counts all, each takes off what is no row.

    Programs that add to one number wait for each other, so each has no more than one addition to make.
    """
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1)
    if tl.program_id(0) + columns == 0:
        tl.atomic_add(counts + 1, n.to(tl.int64) * width, sem="relaxed")
    left_out = (at < n) & ~inside & (columns == 0)
    tl.atomic_add(counts + 1 + tl.zeros_like(at), tl.zeros_like(at).to(tl.int64) - width, left_out, sem="relaxed")


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
        following = (t.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
        t = tl.where(t < 16777216.0, t + 1, following)
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
    note(error, row, wrong & mask)


@triton.jit
def note(error, row, wrong):
    """Tell the host of ids that are no rows: one of them, then that there was one."""
    tl.store(error + 1 + tl.zeros_like(row), row, mask=wrong)
    tl.store(error + tl.zeros_like(row), 1, mask=wrong)


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
def columns_of(width, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """The columns of this program, and which of them there are: all where the width is a multiple of so many."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return column, tl.full((COLUMNS,), True, tl.int1) if EVEN else column < width


@triton.jit
def columns_in_parts(width, COLUMNS: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr):
    """The same in the shape of a tile: rows, parts of the columns, columns of a part.

    A thread has four columns of each part: the more parts, the more of a row it has, and the less it does twice.
    """
    part = (tl.arange(0, PARTS) * (COLUMNS // PARTS))[None, :, None]
    column = tl.program_id(1) * COLUMNS + part + tl.arange(0, COLUMNS // PARTS)[None, None, :]
    return column, tl.full(column.shape, True, tl.int1) if EVEN else column < width


@triton.jit
def look(keys, error, n, rows, DISTINCT: tl.constexpr, TILE: tl.constexpr):
    """One tile of the sorted keys. Where all are distinct, a row begins and ends wherever there is a key.

    If there is an `error`, they are ids as they came, and it gets a note of one that is no row.

    Returns the key of each position, is it that of a row, does a row begin or end there, did it begin in an earlier
    tile, and, shaped as a tile, is a row complete there that began in this one.
    """
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    here = at < n
    key = tl.load(keys + at, mask=here, other=-1)
    inside = here & (key < rows)
    if error is not None:
        inside = inside & (key >= 0)
        note(error, key.to(tl.int64), here & ~inside)
    if DISTINCT:
        starts, ends, goes_on = here, here, tl.zeros_like(here)
    else:
        starts = key != tl.load(keys + at - 1, mask=here & (at > 0), other=-1)
        ends = key != tl.load(keys + at + 1, mask=at + 1 < n, other=-1)
        goes_on = key == tl.load(keys + tile * TILE - 1, mask=tile > 0, other=-1)
    return key, inside, starts, ends, goes_on, (inside & ends & ~goes_on)[:, None, None]


@triton.jit
def sum_duplicates(
    values,
    order,
    sources,
    partials,
    n,
    width,
    column,
    there,
    inside,
    starts,
    ends,
    goes_on,
    WORK: tl.constexpr,
    DISTINCT: tl.constexpr,
    IN_BAGS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum the gradients of each row in one tile that was looked at, in the order in which they came.

    Returns the running sums. A sum that began in an earlier tile or goes on in the next is left in `partials`: the
    tile's first, or its last.
    """
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    here = at < n
    source = at.to(tl.int64) if DISTINCT else tl.load(order + at, mask=here, other=0)
    if IN_BAGS:
        source = tl.load(sources + source, mask=here, other=0).to(tl.int64)
    wanted = inside[:, None, None] & there
    g = tl.load(values + source[:, None, None] * width + column, mask=wanted, other=0).to(WORK)
    if DISTINCT:
        sums = g
    else:
        inner = tl.sum((starts & (tl.arange(0, TILE) > 0)).to(tl.int32), 0)  # rows that begin in the midst of the tile
        if inner == TILE - 1:
            sums = g
        elif inner == 0:
            sums = tl.sum(g, 0, keep_dims=True) + tl.zeros_like(g)
        else:
            flags = tl.broadcast_to(starts[:, None, None].to(tl.int32), g.shape)
            _, sums = tl.associative_scan((flags, g), 0, _in_segment)
        last = tl.arange(0, TILE) == TILE - 1
        partial = (goes_on & (ends | last)) | (last & ~ends)
        slot = 2 * tile.to(tl.int64) + tl.where(goes_on, 0, 1)
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
    there,
    WORK: tl.constexpr,
    TILE: tl.constexpr,
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
    began = mine
    inside = there & mine
    total = tl.load(partials + (2 * tile.to(tl.int64) + 1) * width + column, mask=inside, other=0).to(WORK)
    next_tile = tile + 1
    while mine:
        span = next_tile + tl.arange(0, SPAN)
        same = tl.load(keys + span * TILE, mask=span < tl.cdiv(n, TILE), other=-1) == key
        pointers = partials + (2 * span.to(tl.int64) * width)[:, None] + column[None, :]
        total += tl.sum(tl.load(pointers, mask=same[:, None] & inside[None, :], other=0), 0)
        mine = tl.sum(same.to(tl.int32), 0) == SPAN
        next_tile += SPAN
    return key.to(tl.int64), total, inside, began


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
    """For each tile, the squares of the rows' sums that are complete in it, added up."""
    column, there = columns_in_parts(width, COLUMNS, EVEN, 1)
    _, inside, starts, ends, goes_on, complete = look(keys, None, n, rows, DISTINCT, TILE)
    g = sum_duplicates(
        values,
        order,
        sources,
        partials,
        n,
        width,
        column,
        there,
        inside,
        starts,
        ends,
        goes_on,
        WORK,
        DISTINCT,
        IN_BAGS,
        TILE,
    )
    mask = complete & there
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
    EVEN: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The same of the sum that begins in a tile and goes on in the next."""
    column, there = columns_of(width, COLUMNS, EVEN)
    _, g, mask, _ = sum_over_tiles(keys, partials, n, rows, width, column, there, WORK, TILE, SPAN)
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(squares + at, tl.sum(tl.where(mask, g * g, 0.0)))
