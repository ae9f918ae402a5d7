"""Triton kernels that normalize numbers on a CUDA device, in two launches instead of about seventy.

They compute what `NumberNormalizer` and `Inputs.forward_with_torch` compute with operations of torch. This module needs
Triton, so it is imported only when numbers are on a CUDA device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""The number of events that a program of `_rank_kernel` processes."""
CHUNK = 1024
"""The number of events that a program of `_add_kernel` processes at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _count_below(sample, values, include_equal: tl.constexpr, log_size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many sorted sample values are below each value, by binary search."""
    count = tl.zeros_like(values).to(tl.int32)
    for power in tl.static_range(1, log_size + 1):
        step = (1 << log_size) >> power
        probe = tl.load(sample + count + step - 1)
        is_counted = probe <= values if include_equal else probe < values
        count = tl.where(is_counted, count + step, count)
    probe = tl.load(sample + count)
    is_counted = probe <= values if include_equal else probe < values
    return count + is_counted.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _rank_kernel(  # type: ignore[no-untyped-def]
    numbers, sample, counts, bin_starts, scaled, rows, events, columns,
    sample_size: tl.constexpr, log_size: tl.constexpr, bin_count: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute the normalized value and the row of the bin of each number of one column."""
    column = tl.program_id(0)
    event = tl.program_id(1) * block + tl.arange(0, block)
    is_event = event < events
    place = event * columns + column
    values = tl.load(numbers + place, mask=is_event, other=0.0)
    sample += column * sample_size
    below = _count_below(sample, values, False, log_size)
    not_above = _count_below(sample, values, True, log_size)
    size = tl.minimum(tl.load(counts + column), sample_size) + 1
    # The mean of the two counts is the middle of equal values.
    ranks = (below + not_above + 1).to(tl.float64) / (2.0 * size.to(tl.float64))
    is_missing = values != values
    is_infinite = tl.abs(values) == float("inf")
    ranks = tl.where(is_missing, 0.5, ranks)
    bins = tl.where(is_missing, bin_count, (bin_count * tl.where(is_infinite, 0.5, ranks)).to(tl.int64))
    tl.store(rows + place, bins + tl.load(bin_starts + column), mask=is_event)
    ranks = tl.where(is_infinite, float("nan"), ranks)  # an infinite number makes the score nan
    tl.store(scaled + place, (tl.log(ranks / (1 - ranks)) / 1.702).to(scaled.dtype.element_ty), mask=is_event)


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(  # type: ignore[no-untyped-def]
    numbers, sample, counts, scratch, events, columns,
    sample_size: tl.constexpr, stride: tl.constexpr, max_shift: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Add the numbers of one column to its sample; the rule is described in `NumberNormalizer`."""
    column = tl.program_id(0)
    sample += column * sample_size
    scratch += column * sample_size
    slots = tl.arange(0, sample_size)
    count = tl.load(counts + column)
    shift = tl.zeros_like(count)
    for power in tl.static_range(1, max_shift + 1):
        shift += (count >= sample_size << power).to(tl.int64)
    end = count
    for start in range(0, events, chunk):
        event = start + tl.arange(0, chunk)
        values = tl.load(numbers + event * columns + column, mask=event < events, other=float("nan"))
        end += tl.sum((values == values).to(tl.int64), 0)
    last_replaced = ((end - 1) >> shift) - sample_size
    tl.store(scratch + slots, tl.full([sample_size], float("-inf"), tl.float64))
    tl.debug_barrier()
    before = count
    for start in range(0, events, chunk):
        event = start + tl.arange(0, chunk)
        values = tl.load(numbers + event * columns + column, mask=event < events, other=float("nan"))
        is_present = values == values
        index = before + tl.cumsum(is_present.to(tl.int64), 0) - 1
        number = index >> shift
        is_sampled = is_present & (number > last_replaced) & (number << shift == index)
        slot = tl.where(index < sample_size, index, number * stride % sample_size)
        # With the maximum, the order of equal slots does not matter.
        tl.atomic_max(scratch + tl.where(is_sampled, slot, 0), values, mask=is_sampled)
        before += tl.sum(is_present.to(tl.int64), 0)
    tl.debug_barrier()
    new = tl.load(scratch + slots, volatile=True)
    is_new = new > float("-inf")
    if tl.sum(is_new.to(tl.int32), 0) > 0:
        tl.store(sample + slots, tl.sort(tl.where(is_new, new, tl.load(sample + slots))))
    tl.store(counts + column, end)


def rank_numbers(
    numbers: Tensor, sample: Tensor, counts: Tensor, bin_starts: Tensor, dtype: torch.dtype, bins: int
) -> tuple[Tensor, Tensor]:
    """Return the normalized numbers and the rows of their bins, both (batch, columns).

    Args:
        numbers: the numbers (batch, columns) in float64.
        sample: the sorted samples (columns, sample size) in float64.
        counts: the number of values that each column has had.
        bin_starts: the row of the first bin of each column.
        dtype: the type of the normalized numbers.
        bins: the number of bins, without that of missing numbers.
    """
    events, columns = numbers.shape
    scaled = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
    rows = torch.empty(numbers.shape, dtype=torch.int64, device=numbers.device)
    grid = (columns, triton.cdiv(events, BLOCK))
    size = sample.shape[1]
    sizes: dict[str, Any] = {"sample_size": size, "log_size": size.bit_length() - 1, "bin_count": bins, "block": BLOCK}
    _rank_kernel[grid](numbers, sample, counts, bin_starts, scaled, rows, events, columns, **sizes)
    return scaled, rows


def add_numbers(numbers: Tensor, sample: Tensor, counts: Tensor, stride: int, max_shift: int) -> None:
    """Add a batch of numbers (batch, columns) in float64 to the samples.

    Args:
        numbers: the numbers.
        sample: the sorted samples (columns, sample size), which are changed.
        counts: the number of values that each column has had, which is changed.
        stride: `SLOT_STRIDE`.
        max_shift: `MAX_SHIFT`.
    """
    events, columns = numbers.shape
    sizes: dict[str, Any] = {"sample_size": sample.shape[1], "stride": stride, "max_shift": max_shift, "chunk": CHUNK}
    _add_kernel[(columns,)](numbers, sample, counts, torch.empty_like(sample), events, columns, **sizes)
