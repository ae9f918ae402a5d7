"""The kernels of a dense block: whatever lies between the convolutions, and the 1x1 convolutions themselves.

Images lie pixel by pixel: `rows` of them, each with its channels side by side. A block has one array of `features`,
which every layer reads from its start and adds columns to. A batch norm is x * factor + shift. Sums over all rows are
taken tile by tile, and a small kernel adds these up in their order: the same input gives the same bits.
"""
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl

# What they are made of -------------------------------------------------------------------------------------------


@triton.jit
def active(values, factor, shift):
    """Batch norm and ReLU."""
    return tl.maximum(values.to(tl.float32) * factor[None, :] + shift[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def normal(values, mean, scale):
    """Batch norm before its weight and bias."""
    return (values.to(tl.float32) - mean[None, :]) * scale[None, :]


@triton.jit
def get(vector, channel, kept):
    return tl.load(vector + channel, mask=kept, other=0.0)


@triton.jit
def place(row, stride, channel, rows, kept):
    """Where a tile lies, and what of it is there."""
    return row[:, None] * stride + channel[None, :], (row < rows)[:, None] & kept[None, :]


@triton.jit
def tile_of(width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The rows and columns of a program, and which of these columns there are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    return row, channel, channel < width


@triton.jit
def back_to_norm(given, values, factor, shift):
    """What of a gradient passes the ReLU back to a norm that was given these values."""
    return tl.where(active(values, factor, shift) > 0, given, 0.0)


@triton.jit
def without_moments(gradient, normals, through_mean, through_scale, rows):
    """Take out of a gradient what goes through mean and variance."""
    return gradient - (through_mean[None, :] + normals * through_scale[None, :]) / rows


@triton.jit
def write_moments(parts, values, there, tile, channel, width, kept, rows, ROWS: tl.constexpr):
    """Of a tile: the sum of each column, and of the squares of what it is apart from its mean."""
    values = tl.where(there[:, None], values.to(tl.float32), 0.0)
    total = tl.sum(values, 0)
    apart = tl.where(there[:, None], values - (total / tl.minimum(rows - tile * ROWS, ROWS))[None, :], 0.0)
    tl.store(parts + tile * 2 * width + channel, total, mask=kept)
    tl.store(parts + (tile * 2 + 1) * width + channel, tl.sum(apart * apart, 0), mask=kept)


@triton.jit
def write_sums(parts, passed, normals, tile, channel, width, kept):
    """Of a tile: what the gradients of a norm's bias and weight are sums of."""
    tl.store(parts + tile * 2 * width + channel, tl.sum(passed, 0), mask=kept)
    tl.store(parts + (tile * 2 + 1) * width + channel, tl.sum(passed * normals, 0), mask=kept)


# Forward ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def take(x, features, parts, rows, width, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """New columns of the features, and the moments of each tile."""
    tile = tl.program_id(0)
    row, channel, kept = tile_of(width, ROWS, WIDTH)
    source, mask = place(row, width, channel, rows, kept)
    values = tl.load(x + source, mask=mask, other=0.0)
    tl.store(features + row[:, None] * stride + channel[None, :], values, mask=mask)
    write_moments(parts, values, row < rows, tile, channel, width, kept, rows, ROWS)


@triton.jit(do_not_specialize=["rows", "tiles", "old"])
def finish_moments(
    parts,
    mean,
    scale,
    variance,
    weight,
    bias,
    factor,
    shift,
    rows,
    tiles,
    old,
    width,
    epsilon,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What a norm does to its columns.

    The moments of the last ones come from the parts: mean, 1 / standard deviation, unbiased variance. Those of the
    `old` ones before them, a multiple of WIDTH, are there.
    """
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    kept = channel < width
    if tl.program_id(0) * WIDTH < old:
        average, apiece = get(mean, channel, kept), get(scale, channel, kept)
    else:
        new = width - old
        total = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, tiles, TILES):
            tile = start + tl.arange(0, TILES)
            at, mask = place(tile, 2 * new, channel - old, tiles, kept)
            total += tl.sum(tl.load(parts + at, mask=mask, other=0.0), 0)
        average = total / rows
        squares = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, tiles, TILES):
            tile = start + tl.arange(0, TILES)
            at, mask = place(tile, 2 * new, channel - old, tiles, kept)
            count = tl.maximum(tl.minimum(rows - tile * ROWS, ROWS), 1)[:, None]
            apart = tl.load(parts + at, mask=mask, other=0.0) / count - average[None, :]
            inside = tl.load(parts + at + new, mask=mask, other=0.0)
            squares += tl.sum(tl.where(mask, inside + count * apart * apart, 0.0), 0)
        apiece = 1.0 / tl.sqrt(squares / rows + epsilon)
        tl.store(mean + channel, average, mask=kept)
        tl.store(scale + channel, apiece, mask=kept)
        tl.store(variance + channel, squares / (rows - 1), mask=kept)
    product = get(weight, channel, kept) * apiece
    tl.store(factor + channel, product, mask=kept)
    tl.store(shift + channel, get(bias, channel, kept) - average * product, mask=kept)


@triton.jit(do_not_specialize=["rows"])
def squeeze(
    features,
    inner,
    kernel,
    factor,
    shift,
    parts,
    rows,
    width,
    stride,
    INNER: tl.constexpr,
    MEASURE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Norm, ReLU and the 1x1 convolution of a layer; MEASURE: and the moments of each tile."""
    tile = tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    out = tl.arange(0, INNER)
    total = tl.zeros((ROWS, INNER), tl.float32)
    for start in range(0, width, WIDTH):
        channel = start + tl.arange(0, WIDTH)
        kept = channel < width
        at, mask = place(row, stride, channel, rows, kept)
        values = tl.load(features + at, mask=mask, other=0.0)
        taps = tl.load(kernel + out[None, :] * width + channel[:, None], mask=kept[:, None], other=0.0)
        shown = active(values, get(factor, channel, kept), get(shift, channel, kept))
        total = tl.dot(shown.to(taps.dtype), taps, total)
    found = total.to(inner.dtype.element_ty)
    tl.store(inner + row[:, None] * INNER + out[None, :], found, mask=(row < rows)[:, None])
    if MEASURE:
        write_moments(parts, found, row < rows, tile, out, INNER, out < INNER, rows, ROWS)


@triton.jit(do_not_specialize=["rows"])
def show(inner, shown, factor, shift, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Norm and ReLU."""
    row, channel, kept = tile_of(width, ROWS, WIDTH)
    at, mask = place(row, width, channel, rows, kept)
    values = tl.load(inner + at, mask=mask, other=0.0)
    found = active(values, get(factor, channel, kept), get(shift, channel, kept))
    tl.store(shown + at, found.to(shown.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "breadth"])
def pool(
    features,
    pooled,
    factor,
    shift,
    rows,
    breadth,
    width,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Norm, ReLU and average pool. `rows` and `breadth` are those of the result."""
    row, channel, kept = tile_of(width, ROWS, WIDTH)
    out, mask = place(row, width, channel, rows, kept)
    a, b = get(factor, channel, kept), get(shift, channel, kept)
    corner = (row // breadth * WINDOW * breadth + row % breadth) * WINDOW
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for number in tl.static_range(WINDOW * WINDOW):
        source = corner + (number // WINDOW) * breadth * WINDOW + number % WINDOW
        total += active(tl.load(features + source[:, None] * width + channel[None, :], mask=mask, other=0.0), a, b)
    tl.store(pooled + out, (total / (WINDOW * WINDOW)).to(pooled.dtype.element_ty), mask=mask)


# Backward --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "breadth"])
def pool_back(
    features,
    passed,
    gradient,
    mean,
    scale,
    factor,
    shift,
    parts,
    rows,
    breadth,
    width,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What the pool hands back to the features, before the part that goes through their mean and variance."""
    tile = tl.program_id(0)
    row, channel, kept = tile_of(width, ROWS, WIDTH)
    at, mask = place(row, width, channel, rows, kept)
    line, column = row // breadth, row % breadth
    target = line // WINDOW * (breadth // WINDOW) + column // WINDOW
    values = tl.load(features + at, mask=mask, other=0.0)
    given = tl.load(passed + target[:, None] * width + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    a = get(factor, channel, kept)
    given = back_to_norm(given / (WINDOW * WINDOW), values, a, get(shift, channel, kept))
    tl.store(gradient + at, (given * a[None, :]).to(gradient.dtype.element_ty), mask=mask)
    normals = normal(values, get(mean, channel, kept), get(scale, channel, kept))
    write_sums(parts, given, normals, tile, channel, width, kept)


@triton.jit(do_not_specialize=["tiles"])
def finish_sums(
    parts,
    bias_sum,
    weight_sum,
    factor,
    through_mean,
    through_scale,
    tiles,
    width,
    KEEP: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The gradients of a norm's bias and weight; KEEP adds what goes through mean and variance to that of others."""
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    kept = channel < width
    first, second = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for start in range(0, tiles, TILES):
        at, mask = place(start + tl.arange(0, TILES), 2 * width, channel, tiles, kept)
        first += tl.sum(tl.load(parts + at, mask=mask, other=0.0), 0)
        second += tl.sum(tl.load(parts + at + width, mask=mask, other=0.0), 0)
    tl.store(bias_sum + channel, first, mask=kept)
    tl.store(weight_sum + channel, second, mask=kept)
    if KEEP:
        a = get(factor, channel, kept)
        tl.store(through_mean + channel, get(through_mean, channel, kept) + a * first, mask=kept)
        tl.store(through_scale + channel, get(through_scale, channel, kept) + a * second, mask=kept)


@triton.jit(do_not_specialize=["rows"])
def finish_gradient(
    features,
    gradient,
    out,
    mean,
    scale,
    through_mean,
    through_scale,
    rows,
    width,
    stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The gradient of some columns of the features, once all that read them have handed theirs back."""
    row, channel, kept = tile_of(width, ROWS, WIDTH)
    at, mask = place(row, stride, channel, rows, kept)
    values = tl.load(features + at, mask=mask, other=0.0)
    found = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    normals = normal(values, get(mean, channel, kept), get(scale, channel, kept))
    through = get(through_mean, channel, kept), get(through_scale, channel, kept)
    found = without_moments(found, normals, through[0], through[1], rows).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * width + channel[None, :], found, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def inner_sums(inner, passed, mean, scale, factor, shift, parts, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of each tile the sums of what passes the ReLU back to the inner norm."""
    tile = tl.program_id(0)
    row, channel, kept = tile_of(width, ROWS, WIDTH)
    at, mask = place(row, width, channel, rows, kept)
    values = tl.load(inner + at, mask=mask, other=0.0)
    given = tl.load(passed + at, mask=mask, other=0.0).to(tl.float32)
    given = back_to_norm(given, values, get(factor, channel, kept), get(shift, channel, kept))
    normals = normal(values, get(mean, channel, kept), get(scale, channel, kept))
    write_sums(parts, given, normals, tile, channel, width, kept)


@triton.jit(do_not_specialize=["rows"])
def inner_back(
    inner,
    passed,
    mean,
    scale,
    factor,
    shift,
    bias_sum,
    weight_sum,
    rows,
    width,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Through ReLU and inner norm, in place."""
    row, channel, kept = tile_of(width, ROWS, WIDTH)
    at, mask = place(row, width, channel, rows, kept)
    values = tl.load(inner + at, mask=mask, other=0.0)
    given = tl.load(passed + at, mask=mask, other=0.0).to(tl.float32)
    a = get(factor, channel, kept)
    given = back_to_norm(given, values, a, get(shift, channel, kept))
    normals = normal(values, get(mean, channel, kept), get(scale, channel, kept))
    through = get(bias_sum, channel, kept), get(weight_sum, channel, kept)
    found = without_moments(given, normals, through[0], through[1], rows) * a[None, :]
    tl.store(passed + at, found.to(passed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def squeeze_back(
    given,
    features,
    gradient,
    kernel,
    mean,
    scale,
    factor,
    shift,
    parts,
    rows,
    width,
    stride,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Through the 1x1 convolution and the first ReLU; added to what others have handed back to the features."""
    tile = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    kept = channel < width
    at, mask = place(row, stride, channel, rows, kept)
    inside = tl.arange(0, INNER)
    grads = tl.load(given + row[:, None] * INNER + inside[None, :], mask=(row < rows)[:, None], other=0.0)
    taps = tl.load(kernel + inside[:, None] * width + channel[None, :], mask=kept[None, :], other=0.0)
    values = tl.load(features + at, mask=mask, other=0.0)
    before = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.dot(grads, taps)
    a = get(factor, channel, kept)
    total = back_to_norm(total, values, a, get(shift, channel, kept))
    tl.store(gradient + at, (before + total * a[None, :]).to(gradient.dtype.element_ty), mask=mask)
    normals = normal(values, get(mean, channel, kept), get(scale, channel, kept))
    write_sums(parts, total, normals, tile, channel, width, kept)


@triton.jit(do_not_specialize=["rows", "each"])
def squeeze_back_kernel(
    given,
    features,
    parts,
    factor,
    shift,
    rows,
    width,
    stride,
    each,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The gradient of some columns of the 1x1 kernel, from a part of the rows: `each` of them, or what is left."""
    channel, part = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.program_id(1)
    kept = channel < width
    inside = tl.arange(0, INNER)
    a, b = get(factor, channel, kept), get(shift, channel, kept)
    total = tl.zeros((INNER, WIDTH), tl.float32)
    for start in range(part * each, tl.minimum((part + 1) * each, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        grads = tl.load(given + row[:, None] * INNER + inside[None, :], mask=(row < rows)[:, None], other=0.0)
        at, mask = place(row, stride, channel, rows, kept)
        values = tl.load(features + at, mask=mask, other=0.0)
        total = tl.dot(tl.trans(grads), active(values, a, b).to(grads.dtype), total)
    out = parts + part * INNER * width + inside[:, None] * width + channel[None, :]
    tl.store(out, total, mask=kept[None, :])


@triton.jit
def add_up(parts, out, size, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """The sum of the parts of a kernel's gradient."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    part = tl.arange(0, PARTS)
    values = tl.load(parts + part[:, None] * size + at[None, :], mask=(at < size)[None, :], other=0.0)
    tl.store(out + at, tl.sum(values, 0), mask=at < size)
