"""The fused engine for sparse gradients on the CPU: C kernels from raw row ids to the updated table."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...native.loader import package_library
from ...native.structs import MAX_QUANTIZED_WIDTH, SPARSE_TABLE, Records
from .. import moment_state
from ..aging import aging_refusal, aging_table
from ..base import PLAIN, Engine, KernelBatch, ParamSlot, Refusal, UnavailableError, Words
from ..resolved_group import ResolvedGroup
from ..sparse_reference import check_step_count, row_out_of_range
from .dense import (
    DTYPES,
    STORAGES,
    Floats64,
    coefficient_sets,
    has_one_value_per_row,
    kernel,
    kernel_refusal,
    storage_refusal,
)

HALVES = (torch.bfloat16, torch.float16)
Ints32 = np.ndarray[Any, np.dtype[np.int32]]
_ONE_SET = np.zeros(1, np.int32)
MAX_MARKED_COUNT = 1 << 24
"""Up to this step count, distinct step counts are marked in an array, which is faster than sorting them."""
DONE, NO_MEMORY = -1, -2
"""The results of the C functions for success, and if memory runs out. Other results are the position of a bad id."""


class NativeRows(Engine):
    """Sparse gradients on the CPU, by C kernels. Duplicate rows are summed in their order of appearance."""

    name = "native-rows"
    device = "cpu"
    sparse = True
    fused = True

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        """Refuse wide rows with quantized or shared moments: a kernel keeps such a row in its cache."""
        width = slot.param.shape[1:].numel()
        if width > MAX_QUANTIZED_WIDTH and (slot.moments != "float32" or moment_state.has_row_moments(slot)):
            return Refusal.unsupported(
                f"has {slot.storage} for rows of up to {MAX_QUANTIZED_WIDTH} elements, and these have {width}"
            )
        return storage_refusal(slot, rows=True)

    def input_refusal(self, group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Refusal | None:
        """Refuse tables that are not contiguous, and gradients in other dtypes than kernels exist for."""
        assert grad is not None
        if grad.sparse_dim() == 0:
            return Refusal.unsupported("the gradient has no sparse dimension")
        table, values = slot.param.dtype, grad._values().dtype
        if values not in (table, table.to_complex()) and not (table in HALVES and values == torch.float32):
            return Refusal.unsupported(f"the gradient is {grad.dtype}, the parameter {table}")
        if not slot.param.is_contiguous():
            return Refusal.unsupported("the table is not contiguous")
        steps = slot.row_counts if slot.last_steps is None else slot.last_steps
        if steps is not None and not (steps.dtype == torch.int32 and has_one_value_per_row(steps, slot.param)):
            return Refusal.unsupported("the step counts of its rows are not one int32 for each row")
        return aging_refusal(group, slot) or kernel_refusal(group, slot, rows=True)

    def check(self, batches: Sequence[KernelBatch]) -> None:
        """Raise IndexError if a gradient names a row that its table does not have."""
        for batch in batches:
            library, _ = kernel(batch, rows=True)
            inputs = batch.memo["inputs"] = [TableGrad.of(slot, grad) for slot, grad in batch]
            checked: set[tuple[int, int, int]] = set()
            for slot, grad in zip(batch.slots, inputs, strict=True):
                check_step_count(slot)
                for dimension, rows in enumerate(grad.sparse_shape):
                    ids = grad.ids.data_ptr() + dimension * grad.count * grad.ids.element_size(), grad.count, rows
                    if ids in checked:
                        continue
                    checked.add(ids)
                    bad = library.c.cadam_check_ids(*ids, library.parallel_for)
                    if bad >= 0:
                        raise row_out_of_range(slot, int(grad.ids[dimension, bad]), rows)

    def run(self, batches: Sequence[KernelBatch]) -> None:
        """Update the tables of all batches."""
        for batch in batches:
            step = batch.memo["step"] = SparseStep(batch, batch.memo.pop("inputs"))
            step.run()

    def repetition(self, batches: Sequence[KernelBatch]) -> Callable[[], None] | None:
        """Return a function that runs the last step again."""
        steps: list[SparseStep] = [batch.memo["step"] for batch in batches if "step" in batch.memo]
        if len(steps) < len(batches) or not all(step.is_repeatable for step in steps):
            return None

        def repeat() -> None:
            for step in steps:
                step.repeat()

        return repeat


@dataclass
class TableGrad:
    """A sparse gradient of a table as the kernels read it: contiguous ids and values."""

    ids: Tensor
    """Row ids, one line for each sparse dimension."""
    values: Tensor
    count: int
    sparse_shape: torch.Size
    width: int
    is_view: bool
    """Whether ids and values are those of the gradient, not copies."""

    @classmethod
    def of(cls, slot: ParamSlot, grad: Tensor) -> TableGrad:
        """Read the parts of a sparse gradient."""
        ids, values, shape = grad._indices(), grad._values(), slot.param.shape
        if values.is_complex():
            values = torch.view_as_real(values)
        sparse, dense = shape[: len(ids)], shape[len(ids) :]
        is_view = ids.is_contiguous() and values.is_contiguous()
        return cls(ids.contiguous(), values.contiguous(), ids.shape[1], sparse, dense.numel(), is_view)

    def row_ids(self) -> Tensor:
        """Return one row number for each value: for several sparse dimensions, that of the flattened table."""
        rows = self.ids[0]
        for size, ids in zip(self.sparse_shape[1:], self.ids[1:], strict=True):
            rows = rows * size + ids
        return rows


class SparseStep:
    """The arguments of the kernels for the tables of a batch.

    All tables whose gradients have the same ids share one call.

    Args:
        batch: The tables.
        grads: Their gradients.
    """

    def __init__(self, batch: KernelBatch, grads: Sequence[TableGrad]) -> None:
        self.batch, self.library = batch, kernel(batch, rows=True)[0]
        self.records = batch.memo.get("tables")
        if self.records is None:
            self.records = _table_records(batch.slots, kernel(batch, rows=True)[1])
            if batch.grad_snapshot is not None:  # The batch belongs to a plan, which notices if a tensor moves.
                batch.memo["tables"] = self.records
        self.sets: dict[float, Floats64] = {}
        """The coefficients by step count, where rows do not count their own steps."""
        self.calls: dict[tuple[int, int, int], tuple[Tensor, list[int]]] = {}
        """The ids of each call, and the numbers of its tables."""
        addresses: Words = np.empty((2, len(grads)), np.int64)
        self.kept: list[object] = [grads, addresses]
        """Objects whose memory the calls use."""
        for i, (slot, grad) in enumerate(zip(batch.slots, grads, strict=True)):
            rows = grad.sparse_shape.numel()
            if not rows or not grad.width:
                slot.step.add_(1)
                continue
            ids = grad.row_ids()
            c = self._complete_record(self.records[i], slot, grad, ids)
            addresses[:, i] = grad.values.data_ptr(), c.ctypes.data
            self.calls.setdefault((ids.data_ptr(), grad.count, rows), (ids, []))[1].append(i)
        self.is_repeatable = (
            len(self.sets) == 1
            and sum(len(members) for _, members in self.calls.values()) == len(grads)
            and all(slot.row_counts is None and slot.last_steps is None for slot in batch.slots)
            and all(len(grad.sparse_shape) == 1 and grad.is_view for grad in grads)
        )
        self.arguments = []
        """The arguments of each call, without those for threads."""
        for (start, count, _), (_, members) in self.calls.items():
            tables, of_grads, of_sets = self.records[members], *addresses[:, members].copy()
            self.kept += [tables, of_grads, of_sets]
            self.arguments.append(
                (tables.ctypes.data, len(members), start, count, of_grads.ctypes.data, of_sets.ctypes.data)
            )

    def _complete_record(self, table: Records, slot: ParamSlot, grad: TableGrad, ids: Tensor) -> Floats64:
        """Complete the C struct of a table for its gradient, and return the coefficients of the step."""
        step, counts = slot.step.item() + 1, slot.row_counts
        if slot.row_steps is not None:
            c, set_of_count = _sets_of_rows(self.batch, slot, ids)
        else:
            if step not in self.sets:
                self.sets[step] = coefficient_sets(self.batch, [step])
            c, set_of_count = self.sets[step], _ONE_SET
            if slot.row_updates is not None:
                c, set_of_count = np.repeat(c, 2, 0), _set_of_updates(self.batch.group.numbers["confidence_after"])
                c[0, _threshold(self.batch)] = np.nan
        self.kept += [c, set_of_count]
        table["rows"], table["width"] = grad.sparse_shape.numel(), grad.width
        table["row_steps"] = 0 if counts is None else counts.data_ptr()
        table["set_of"], table["last_count"] = set_of_count.ctypes.data, len(set_of_count) - 1
        table["coefficient_sets"] = len(c)
        if slot.last_steps is not None:
            aging = aging_table(self.batch.group, step, slot.work_dtype)
            table["row_steps"], table["aging"] = slot.last_steps.data_ptr(), aging.ctypes.data
            table["max_missed"] = len(aging) - 1
            self.kept.append(aging)
        table["grad_dtype"] = DTYPES[grad.values.dtype]
        return c

    def run(self) -> None:
        """Count a step and update the tables."""
        threads, parallel_for = torch.get_num_threads(), self.library.parallel_for
        for arguments, ((_, count, rows), (ids, members)) in zip(self.arguments, self.calls.items(), strict=True):
            failed = self.library.c.cadam_sparse_step(*arguments, threads, parallel_for)
            if failed == DONE:
                continue
            names = ", ".join(self.batch.slots[i].name for i in members)
            if failed == NO_MEMORY:
                raise MemoryError(f"{names}: no memory for a step of {count} rows; nothing of it was changed")
            raise IndexError(f"{names}: row id {int(ids[failed])} is out of range for {rows} rows")
        torch.autograd.graph.increment_version([slot.param for slot in self.batch.slots])

    def repeat(self) -> None:
        """Count a step and update the tables, with new values in the memory of the last gradients."""
        (c,) = self.sets.values()
        c[:] = coefficient_sets(self.batch, [self.batch.slots[0].step.item() + 1])
        self.run()


def _table_records(slots: Sequence[ParamSlot], kernel_index: int) -> Records:
    """Return the C structs of tables, without the fields that depend on the gradients."""
    records = np.zeros(len(slots), SPARSE_TABLE)
    for slot, table in zip(slots, records, strict=True):
        table["param"], table["step"], table["seed"] = slot.param.data_ptr(), slot.step.data_ptr(), slot.seed
        table["counts"] = 0 if slot.counts is None else slot.counts.data_ptr()
        table["kernel"] = kernel_index
        table["dtype"], table["moments"] = DTYPES[slot.param.dtype], STORAGES[slot.moments]
        for k, (name, buffer) in enumerate(slot.state.items()):
            table["state"][k] = buffer.data_ptr()
            if moment_state.is_row_moment(buffer, slot.param):
                table["row_moments"] |= 1 << k
            if name in slot.scales:
                table["scales"][k] = slot.scales[name].data_ptr()
    return records


@lru_cache(maxsize=8)
def _set_of_updates(confidence_after: int) -> Ints32:
    """Return which set of coefficients a row uses, by its number of updates: 0 without the mask, then 1 with it."""
    set_of_count = np.zeros(confidence_after + 1, np.int32)
    set_of_count[-1] = 1
    return set_of_count


def _threshold(batch: KernelBatch) -> int:
    """Return the position of the coefficient `threshold`, which is NaN where there is no mask."""
    return batch.group.sparse_kernel_spec.coefficients.index("threshold")


def _sets_of_rows(batch: KernelBatch, slot: ParamSlot, ids: Tensor) -> tuple[Floats64, Ints32]:
    """Return a set of coefficients for each step count of these rows, and the index of the set by step count."""
    assert slot.row_steps is not None
    steps = slot.row_steps.view(-1).index_select(0, ids.view(-1)).numpy() + 1
    if steps.size and steps.max() <= MAX_MARKED_COUNT:
        reached = np.zeros(steps.max() + 1, bool)
        reached[steps] = True
        steps = np.flatnonzero(reached)
    else:
        steps = np.unique(steps)
    set_of_step = np.zeros(int(steps[-1]) + 1 if steps.size else 1, np.int32)
    set_of_step[steps] = np.arange(len(steps))
    sets = coefficient_sets(batch, steps.astype(np.float64))
    if slot.row_updates is not None:
        sets[steps < batch.group.numbers["confidence_after"], _threshold(batch)] = np.nan
    return sets, set_of_step


def has_norm(values: Tensor) -> bool:
    """Whether `norm` supports row gradients like these."""
    if values.device.type != "cpu" or values.dtype not in DTYPES or type(values) not in PLAIN:
        return False
    try:
        package_library()
    except UnavailableError:
        return False
    return True


def norm(ids: Tensor, values: Tensor, rows: int) -> Tensor | None:
    """Return the Euclidean norm of row gradients, with duplicates summed in at least float32.

    The result is the same for any number of threads.

    Args:
        ids: The row of each gradient.
        values: One gradient per line.
        rows: The number of rows of the table.

    Returns:
        The norm, or None if an id is out of range.
    """
    library, squares = package_library(), ctypes.c_double()
    ids, values = ids.contiguous(), values.contiguous()
    count, width = values.shape
    if rows and width:
        table = np.zeros(1, SPARSE_TABLE)
        table["rows"], table["width"], table["dtype"] = rows, width, DTYPES[values.dtype]
        failed = library.c.cadam_sparse_squared_norm(
            table.ctypes.data,
            ids.data_ptr(),
            count,
            values.data_ptr(),
            ctypes.addressof(squares),
            torch.get_num_threads(),
            library.parallel_for,
        )
        if failed == NO_MEMORY:
            raise MemoryError(f"no memory for the norm of {count} rows")
        if failed >= 0:
            return None
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.tensor(squares.value, dtype=torch.float64, device="cpu").sqrt().to(dtype)
