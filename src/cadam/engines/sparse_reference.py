"""Sparse gradients, row-lazy: only the rows that the gradient holds touch parameter, moments or counters.

The same arithmetic as the reference, on the gathered rows. A gradient's sparse dimensions may be any number
of the leading ones; with all of them sparse a "row" is a single element. Bias correction goes by the one step
count of the parameter, as in torch.optim.SparseAdam, unless rows have their own (`row_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import coefficients, quantization
from .base import Engine, KernelBatch, ParamSlot
from .reference import count, functions


class Rows(Engine):
    name = "rows"
    sparse = True
    any_storage = True

    def check(self, batches: Sequence[KernelBatch]) -> None:
        check_ids(batches)

    def run(self, batches: Sequence[KernelBatch]) -> None:
        for batch in batches:
            for slot, grad in batch:
                quantization.count_step(slot)
                _step(batch, slot, grad)


def _of_rows(batch: KernelBatch, counts: Tensor, where: tuple[Tensor, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The coefficients of rows that count their own steps: by row where they depend on the count."""
    counts[where] += 1  # the rows are distinct
    c = batch.update.coefficients(
        coefficients.exact(counts[where]), batch.options, coefficients.ScalarFunctions, batch.grad_scale
    )
    return {name: v.to(dtype) if isinstance(v, Tensor) and v.dim() else v for name, v in c.items()}


def check_ids(batches: Sequence[KernelBatch]) -> None:
    """Raise IndexError if a gradient names a row that its parameter does not have. Reads the ids."""
    for batch in batches:
        for slot, grad in batch:
            for dimension, ids in zip(slot.param.shape, grad._indices(), strict=False):
                if ids.numel():
                    low, high = map(int, torch.aminmax(ids))
                    if low < 0 or high >= dimension:
                        raise out_of_range(slot, low if low < 0 else high, dimension)


def out_of_range(slot: ParamSlot, row: int, rows: int) -> IndexError:
    return IndexError(f"{slot.name}: row id {row} is out of range for {rows} rows; no parameter was changed")


def summed(grad: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """The distinct rows of a sparse gradient and their values, duplicates summed in `dtype`."""
    values = grad._values()
    if values.is_complex():
        values = torch.view_as_real(values)
    size = tuple(grad.shape[: grad.sparse_dim()]) + tuple(values.shape[1:])
    wide = torch.sparse_coo_tensor(
        grad._indices(), values.to(dtype), size, is_coalesced=grad.is_coalesced(), check_invariants=False
    )
    wide = wide.coalesce()
    return tuple(wide.indices()), wide.values()


def _step(batch: KernelBatch, slot: ParamSlot, grad: Tensor) -> None:
    work = slot.work_dtype
    where, values = summed(grad, work)
    if slot.counts is not None and values.numel() == 0:
        slot.counts[2].add_(slot.param.numel())
    if values.numel() == 0:
        return
    if slot.row_steps is not None:
        c = _of_rows(batch, slot.row_steps, where, work)
    else:
        c = coefficients.of_step(batch.update, batch.options, slot.step, batch.grad_scale)
    moved = batch.update(slot.param[where].to(work), values, quantization.load(slot, where, work), c, functions(slot))
    slot.param[where] = moved.param.to(slot.param.dtype)
    quantization.store(slot, moved.state, where, slot.step)
    if slot.counts is not None:
        count(slot.counts, moved.alignment, values.numel(), slot.param.numel())
