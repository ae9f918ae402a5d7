"""Sparse gradients on the CPU, by the C kernels: from raw ids to the updated table."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...native.loader import Library, package_library
from ...rules import Options
from ...rules.update import Update
from .. import quantization
from ..base import PLAIN, Engine, KernelBatch, ParamSlot, Refusal, UnavailableError
from ..sparse_reference import out_of_range
from .dense import (
    DTYPES,
    MAX_BUFFERS,
    MAX_CODED,
    STORAGES,
    WIDEST,
    Floats64,
    is_of_rows,
    kernel,
    kernel_refusal,
    sets,
    storage_refusal,
)

HALVES = (torch.bfloat16, torch.float16)
MANY = 1 << 24
"""Steps up to which rows are put in order by counting."""


class NativeRows(Engine):
    """Sparse gradients: from raw ids to the updated table, duplicates summed in order of appearance."""

    name = "native-rows"
    device = "cpu"
    sparse = True
    fused = True

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        width = slot.param.shape[1:].numel()
        if width > WIDEST and slot.storage != "row_steps=True":
            return Refusal.unsupported(
                f"has {slot.storage} for rows of up to {WIDEST} elements, and these have {width}"
            )
        return storage_refusal(slot, rows=True)

    def input_refusal(self, update: Update, slot: ParamSlot, grad: Tensor | None, options: Options) -> Refusal | None:
        assert grad is not None
        if grad.sparse_dim() == 0:
            return Refusal.unsupported("the gradient has no sparse dimension")
        table, values = slot.param.dtype, grad._values().dtype
        if values not in (table, table.to_complex()) and not (table in HALVES and values == torch.float32):
            return Refusal.unsupported(f"the gradient is {grad.dtype}, the parameter {table}")
        if not slot.param.is_contiguous():
            return Refusal.unsupported("the table is not contiguous")
        steps = slot.row_steps
        if steps is not None and not (steps.dtype == torch.int32 and is_of_rows(steps, slot.param)):
            return Refusal.unsupported("the step counts of its rows are not one int32 for each row")
        return kernel_refusal(update, slot, options)

    def stale(self, batches: Sequence[KernelBatch]) -> bool:
        return any(self.refusal(batch.update, slot, grad, batch.options) for batch in batches for slot, grad in batch)

    def check(self, batches: Sequence[KernelBatch]) -> None:
        for batch in batches:
            library, _ = kernel(batch)
            for slot, grad in batch:
                ids, n = grad._indices().contiguous(), grad._nnz()
                for dimension, rows in enumerate(slot.param.shape[: grad.sparse_dim()]):
                    start = ids.data_ptr() + dimension * n * ids.element_size()
                    bad = library.c.cadam_check_ids(start, n, rows, library.parallel_for)
                    if bad >= 0:
                        raise out_of_range(slot, int(ids[dimension, bad]), rows)

    def run(self, batches: Sequence[KernelBatch]) -> None:
        for batch in batches:
            for slot, grad in batch:
                _step(*kernel(batch), batch, slot, grad)


def _step(library: Library, number: int, batch: KernelBatch, slot: ParamSlot, grad: Tensor) -> None:
    sparse_shape = slot.param.shape[: grad.sparse_dim()]
    ids, values_, n = grad._indices(), grad._values(), grad._nnz()
    if values_.is_complex():
        values_ = torch.view_as_real(values_)
    rows, width = sparse_shape.numel(), slot.param.shape[grad.sparse_dim() :].numel()
    if len(sparse_shape) > 1:
        ids = _flat(ids, sparse_shape)
    ids, values_ = ids.contiguous(), values_.contiguous()
    if not rows or not width:
        slot.step.add_(1)
        return
    pointers = [buffer.data_ptr() for buffer in slot.state.values()]
    pointers += [0] * (MAX_BUFFERS - len(pointers))
    counts = 0 if slot.counts is None else slot.counts.data_ptr()
    tensors = (slot.param.data_ptr(), *pointers, slot.step.data_ptr(), counts)
    scales = [slot.scales[name].data_ptr() if name in slot.scales else 0 for name in slot.state][:MAX_CODED]
    scales += [0] * (MAX_CODED - len(scales))
    by_row = sum(quantization.is_by_row(buffer, slot.param) << k for k, buffer in enumerate(slot.state.values()))
    kind = (number, DTYPES[slot.param.dtype], *scales, slot.seed, STORAGES[slot.moments], by_row)
    if slot.row_steps is None:
        c, own = sets(batch, [slot.step.item() + 1]), (0, 0, 1)
    else:
        c, set_of = _of_rows(batch, slot.row_steps, ids)
        own = (slot.row_steps.data_ptr(), set_of.ctypes.data, len(c))
    table = np.array([*tensors, rows, width, *kind, *own, DTYPES[values_.dtype]], np.int64)
    failed = library.c.cadam_sparse_step(
        table.ctypes.data,
        ids.data_ptr(),
        n,
        values_.data_ptr(),
        c.ctypes.data,
        torch.get_num_threads(),
        library.parallel_for,
    )
    if failed == -2:
        raise MemoryError(f"{slot.name}: no memory for a step of {n} rows; it was not changed")
    if failed >= 0:
        raise IndexError(f"{slot.name}: row id {int(ids.view(-1)[failed])} is out of range for {rows} rows")
    torch.autograd.graph.increment_version(slot.param)


def _of_rows(
    batch: KernelBatch, row_steps: Tensor, ids: Tensor
) -> tuple[Floats64, np.ndarray[Any, np.dtype[np.int32]]]:
    """The sets of coefficients of the steps that these rows take, and by step the number of its set."""
    steps = row_steps.view(-1).index_select(0, ids.view(-1)).numpy() + 1
    if steps.size and steps.max() <= MANY:
        taken = np.zeros(steps.max() + 1, bool)
        taken[steps] = True
        steps = np.flatnonzero(taken)
    else:
        steps = np.unique(steps)
    set_of = np.zeros(int(steps[-1]) + 1 if steps.size else 1, np.int32)
    set_of[steps] = np.arange(len(steps))
    return sets(batch, steps.astype(np.float64)), set_of


def has_norm(values: Tensor) -> bool:
    """Can `norm` serve row gradients like these?"""
    if values.device.type != "cpu" or values.dtype not in DTYPES or type(values) not in PLAIN:
        return False
    try:
        package_library()
    except UnavailableError:
        return False
    return True


def norm(ids: Tensor, values: Tensor, rows: int) -> Tensor | None:
    """The Euclidean norm of row gradients, duplicates summed in float32 at the least; None if an id is no row.

    The result is the same for any number of threads.
    """
    library, squares = package_library(), ctypes.c_double()
    ids, values = ids.contiguous(), values.contiguous()
    n, width = values.shape
    if rows and width:
        table = np.array(
            [0] * (MAX_BUFFERS + 3) + [rows, width, 0, DTYPES[values.dtype]] + [0] * (MAX_CODED + 7), np.int64
        )
        failed = library.c.cadam_sparse_squared_norm(
            table.ctypes.data,
            ids.data_ptr(),
            n,
            values.data_ptr(),
            ctypes.addressof(squares),
            torch.get_num_threads(),
            library.parallel_for,
        )
        if failed == -2:
            raise MemoryError(f"no memory for the norm of {n} rows")
        if failed >= 0:
            return None
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.tensor(squares.value, dtype=torch.float64, device="cpu").sqrt().to(dtype)


def _flat(ids: Tensor, shape: torch.Size) -> Tensor:
    """Row numbers from the ids of many sparse dimensions."""
    flat = ids[0]
    for size, more in zip(shape[1:], ids[1:], strict=True):
        flat = flat * size + more
    return flat
