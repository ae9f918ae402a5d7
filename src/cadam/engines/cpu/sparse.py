"""Sparse gradients on the CPU, by the C kernels: from raw ids to the updated table."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...native.library import Library, package_library
from ...rules import Options
from ...rules.update import Update
from .. import quantization
from ..base import PLAIN, Engine, Item, Job, UnavailableError
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
    lacks_storage,
    refusal,
    sets,
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

    def lacks_storage(self, item: Item) -> str | None:
        width = item.param.shape[1:].numel()
        if width > WIDEST and item.storage != "row_steps=True":
            return f"has {item.storage} for rows of up to {WIDEST} elements, and these have {width}"
        return lacks_storage(item, rows=True)

    def lacks(self, update: Update, item: Item, grad: Tensor | None, options: Options) -> str | None:
        assert grad is not None
        if grad.sparse_dim() == 0:
            return "the gradient has no sparse dimension"
        table, values = item.param.dtype, grad._values().dtype
        if values not in (table, table.to_complex()) and not (table in HALVES and values == torch.float32):
            return f"the gradient is {grad.dtype}, the parameter {table}"
        if not item.param.is_contiguous():
            return "the table is not contiguous"
        steps = item.row_steps
        if steps is not None and not (steps.dtype == torch.int32 and is_of_rows(steps, item.param)):
            return "the step counts of its rows are not one int32 for each row"
        return refusal(update, item, options)

    def stale(self, jobs: Sequence[Job]) -> bool:
        return any(self.refuses(job.update, item, grad, job.options) for job in jobs for item, grad in job)

    def check(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            library, _ = kernel(job)
            for item, grad in job:
                ids, n = grad._indices().contiguous(), grad._nnz()
                for dimension, rows in enumerate(item.param.shape[: grad.sparse_dim()]):
                    start = ids.data_ptr() + dimension * n * ids.element_size()
                    bad = library.c.cadam_check_ids(start, n, rows, library.parallel_for)
                    if bad >= 0:
                        raise out_of_range(item, int(ids[dimension, bad]), rows)

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            for item, grad in job:
                _step(*kernel(job), job, item, grad)


def _step(library: Library, number: int, job: Job, item: Item, grad: Tensor) -> None:
    sparse_shape = item.param.shape[: grad.sparse_dim()]
    ids, values_, n = grad._indices(), grad._values(), grad._nnz()
    if values_.is_complex():
        values_ = torch.view_as_real(values_)
    rows, width = sparse_shape.numel(), item.param.shape[grad.sparse_dim() :].numel()
    if len(sparse_shape) > 1:
        ids = _flat(ids, sparse_shape)
    ids, values_ = ids.contiguous(), values_.contiguous()
    if not rows or not width:
        item.step.add_(1)
        return
    pointers = [buffer.data_ptr() for buffer in item.state.values()]
    pointers += [0] * (MAX_BUFFERS - len(pointers))
    counts = 0 if item.counts is None else item.counts.data_ptr()
    tensors = (item.param.data_ptr(), *pointers, item.step.data_ptr(), counts)
    scales = [item.scales[name].data_ptr() if name in item.scales else 0 for name in item.state][:MAX_CODED]
    scales += [0] * (MAX_CODED - len(scales))
    by_row = sum(quantization.is_by_row(buffer, item.param) << k for k, buffer in enumerate(item.state.values()))
    kind = (number, DTYPES[item.param.dtype], *scales, item.seed, STORAGES[item.moments], by_row)
    if item.row_steps is None:
        c, own = sets(job, [item.step.item() + 1]), (0, 0, 1)
    else:
        c, set_of = _of_rows(job, item.row_steps, ids)
        own = (item.row_steps.data_ptr(), set_of.ctypes.data, len(c))
    table = np.array([*tensors, rows, width, *kind, *own, DTYPES[values_.dtype]], np.int64)
    failed = library.c.cadam_rows(
        table.ctypes.data,
        ids.data_ptr(),
        n,
        values_.data_ptr(),
        c.ctypes.data,
        torch.get_num_threads(),
        library.parallel_for,
    )
    if failed == -2:
        raise MemoryError(f"{item.name}: no memory for a step of {n} rows; it was not changed")
    if failed >= 0:
        raise IndexError(f"{item.name}: row id {int(ids.view(-1)[failed])} is out of range for {rows} rows")
    torch.autograd.graph.increment_version(item.param)


def _of_rows(job: Job, row_steps: Tensor, ids: Tensor) -> tuple[Floats64, np.ndarray[Any, np.dtype[np.int32]]]:
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
    return sets(job, steps.astype(np.float64)), set_of


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
        failed = library.c.cadam_rows_squares(
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
