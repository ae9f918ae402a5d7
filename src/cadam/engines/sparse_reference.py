"""The reference engine for sparse gradients: only the rows that the gradient contains are read or written.

The arithmetic is that of the dense reference, on the gathered rows. The sparse dimensions of a gradient may be any
number of the leading dimensions; if all dimensions are sparse, a "row" is a single element. The bias correction uses
the one step count of the parameter, as in torch.optim.SparseAdam, unless rows count their own steps (`row_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..rules.sparse_updates import MAX_STEP
from ..rules.update import ScalarFunctions
from . import moment_state
from .base import Engine, KernelBatch, ParamSlot
from .reference import TensorFunctions, count, functions
from .resolved_group import to_float64


class Rows(Engine):
    """Sparse gradients on any device, with any storage, by plain tensor operations."""

    name = "rows"
    sparse = True
    any_storage = True

    def check(self, batches: Sequence[KernelBatch]) -> None:
        """Raise IndexError if a gradient names a row that its parameter does not have. Reads the ids on the host."""
        for batch in batches:
            for slot, grad in batch:
                check_step_count(slot)
                for rows, ids in zip(slot.param.shape, grad._indices(), strict=False):
                    if ids.numel():
                        low, high = map(int, torch.aminmax(ids))
                        if low < 0 or high >= rows:
                            raise row_out_of_range(slot, low if low < 0 else high, rows)

    def run(self, batches: Sequence[KernelBatch]) -> None:
        """Update one table after the other."""
        for batch in batches:
            coefficients = batch.group.coefficients(batch.grad_scale)
            for slot, grad in batch:
                moment_state.advance_step(slot)
                _update_rows(batch, slot, grad, coefficients)


def row_out_of_range(slot: ParamSlot, row: int, rows: int) -> IndexError:
    """Make the error for a row id that the parameter does not have."""
    return IndexError(f"{slot.name}: row id {row} is out of range for {rows} rows; no parameter was changed")


def check_step_count(slot: ParamSlot) -> None:
    """Raise OverflowError if the step count, a float32, can no longer say how many steps a row has missed."""
    if slot.last_steps is not None and slot.step >= MAX_STEP:
        raise OverflowError(f"{slot.name}: sparse_updates='exact' counts {MAX_STEP:,} steps at most; use 'lazy'")


def sum_duplicates(grad: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the distinct rows of a sparse gradient and their values, with duplicates summed in `dtype`."""
    values = grad._values()
    if values.is_complex():
        values = torch.view_as_real(values)
    size = tuple(grad.shape[: grad.sparse_dim()]) + tuple(values.shape[1:])
    coalesced = torch.sparse_coo_tensor(
        grad._indices(), values.to(dtype), size, is_coalesced=grad.is_coalesced(), check_invariants=False
    ).coalesce()
    return tuple(coalesced.indices()), coalesced.values()


def _update_rows(batch: KernelBatch, slot: ParamSlot, grad: Tensor, coefficients: Any) -> None:
    work = slot.work_dtype
    rows, values = sum_duplicates(grad, work)
    if values.numel() == 0:
        if slot.counts is not None:
            slot.counts[2].add_(slot.param.numel())
        return
    if slot.row_steps is not None:
        c = _coefficients_by_row(batch, slot.row_steps, rows, work)
    else:
        c = coefficients(slot.step)
    if slot.last_steps is not None:
        c = {**c, **_aging_coefficients(batch, slot.last_steps, rows, slot.step)}
    c = {name: value.to(work) if isinstance(value, Tensor) and value.dim() else value for name, value in c.items()}
    state = moment_state.load_moments(slot, rows, work)
    f: Any = functions(slot)
    if slot.row_updates is not None:
        f = CountedMask(f, _count_update(slot, rows) >= batch.group.numbers["confidence_after"])
    result = batch.group.row_update(slot.param[rows].to(work), values, state, c, f)
    slot.param[rows] = result.param.to(slot.param.dtype)
    moment_state.store_moments(slot, result.state, rows, slot.step)
    if slot.counts is not None:
        count(slot.counts, result.alignment, values.numel(), slot.param.numel())


class CountedMask:
    """The functions of a table whose confidence mask begins after some updates of a row."""

    def __init__(self, functions: type[TensorFunctions], is_masked: Tensor) -> None:
        self._functions, self._is_masked = functions, is_masked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def mask(self, alignment: Tensor, step: Tensor) -> Tensor:
        """Return the step, with zeros in masked rows where the alignment is not positive."""
        return torch.where(self._is_masked, self._functions.mask(alignment, step), step)


def _count_update(slot: ParamSlot, rows: tuple[Tensor, ...]) -> Tensor:
    """Count an update of each row, unless its steps were counted already, and return the counts."""
    assert slot.row_updates is not None
    if slot.row_steps is None:
        slot.row_updates[rows] += 1  # The rows are distinct.
    return slot.row_updates[rows]


def _coefficients_by_row(
    batch: KernelBatch, counts: Tensor, rows: tuple[Tensor, ...], dtype: torch.dtype
) -> dict[str, Any]:
    """Count a step of each row and return the coefficients, by row where they depend on the step count."""
    counts[rows] += 1  # The rows are distinct.
    group, steps = batch.group, to_float64(counts[rows])
    c = group.update.coefficients(steps, group.options, ScalarFunctions, batch.grad_scale)
    return {name: v.to(dtype) if isinstance(v, Tensor) and v.dim() else v for name, v in c.items()}


def _aging_coefficients(
    batch: KernelBatch, last_steps: Tensor, rows: tuple[Tensor, ...], step: Tensor
) -> dict[str, Tensor]:
    """Return the coefficients for the steps that each row missed, and set the steps of the rows' last updates."""
    group = batch.group
    missed = to_float64(step) - 1 - last_steps[rows]
    last_steps[rows] = int(step)
    return group.update.rule.aging(missed, group.numbers, ScalarFunctions)
