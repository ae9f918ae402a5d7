"""The fused engine for dense gradients on the CPU: C kernels over raw addresses, on torch's threads, one call per step.

A step reads and writes every value once. The addresses of parameters and state stay the same while the plan lasts
(`cadam.engines.step_plan`); those of the gradients are read in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...codegen.kernel_spec import KernelSpec
from ...native.loader import Library, find_kernel
from ...native.structs import DENSE_TENSOR, MAX_BUFFERS, MAX_COEFFICIENTS, MAX_QUANTIZED
from ...native.tensor_snapshot import align_layouts
from .. import moment_state, quantization
from ..base import (
    PLAIN,
    Engine,
    KernelBatch,
    ParamSlot,
    Refusal,
    RefusalKind,
    UnavailableError,
    Words,
    fills_memory,
    unreadable_memory,
)
from ..resolved_group import ResolvedGroup

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
STORAGES = {"float32": 0, "bfloat16": 1, "int8": 2}
SIZES = np.array([4, 8, 2, 2])  # bytes of an element, by the numbers in DTYPES

Floats64 = np.ndarray[Any, np.dtype[np.float64]]

GRAIN = 32768  # elements below which waking a second thread takes longer than the work


# Refusals ----------------------------------------------------------------------------------------------------------


def kernel_refusal(group: ResolvedGroup, slot: ParamSlot, rows: bool = False) -> Refusal | None:
    """Return why the kernels for sparse (`rows`) or dense gradients cannot serve a parameter, or None if they can."""
    fused, foreach = group.options["fused"], group.options["foreach"]
    if fused is False or (foreach is not None and not fused):
        return Refusal(RefusalKind.NOT_REQUESTED, f"fused={fused}, foreach={foreach} was asked for")
    reason = _unsupported_tensors(group, slot)
    if reason is not None:
        return Refusal.unsupported(reason)
    library = find_kernel(group.sparse_kernel_spec if rows else group.kernel_spec)
    return Refusal(RefusalKind.UNAVAILABLE, str(library)) if isinstance(library, UnavailableError) else None


def _unsupported_tensors(group: ResolvedGroup, slot: ParamSlot) -> str | None:
    if group.options["differentiable"]:
        return "differentiable=True needs the eager engine"
    reason = unreadable_memory(slot)
    if reason:
        return reason
    param = slot.param
    if param.dtype not in DTYPES:
        return f"has no kernels for {param.dtype}"
    work = torch.promote_types(param.dtype, torch.float32)
    row_moments = []
    for name, buffer in slot.state.items():
        by_row = moment_state.is_row_moment(buffer, param)
        row_moments.append(by_row)
        shared = by_row and moment_state.becomes_row_moment(param, slot.kinds.get(name, ""), group.options)
        expected = work if shared else quantization.QUANTIZED_DTYPES.get(slot.moments, work)
        if buffer.dtype != expected:
            return f"keeps the state of {param.dtype} in {expected}, and {name} is {buffer.dtype}"
        if shared and not has_one_value_per_row(buffer, param):
            return f"{name} does not have one number for each row"
        if not shared and (by_row or buffer.stride() != param.stride()):
            return f"{name} does not have the memory layout of the parameter"
    if not fills_memory(param):
        return "the parameter's elements overlap or have gaps between them"
    if any(x.data_ptr() % x.element_size() for x in (param, *slot.state.values()) if x.device.type == "cpu"):
        return "the parameter or its state is not aligned in memory"
    if slot.step.device.type != "cpu" or slot.step.dtype != torch.float32:
        return f"counts steps in float32 on the CPU, and this count is {slot.step.dtype} on {slot.step.device}"
    if any(not scales.is_contiguous() for scales in slot.scales.values()):
        return "the scales of its moments are not contiguous"
    if any(row_moments) and row_moments != [slot.kinds[name] != "signed" for name in slot.state]:
        return "some of its second moments are those of rows, and others are not"
    if slot.moments not in _storages(group.kernel_spec, any(row_moments)):
        return f"has no {slot.storage} for the moments of the rule {group.update.rule.name!r}"
    return None


@cache
def _storages(spec: KernelSpec, row_moments: bool) -> list[str]:
    return spec.row_storages if row_moments else ["float32", *spec.quantized_storages]


def has_one_value_per_row(x: Tensor, table: Tensor) -> bool:
    """Whether the tensor has one value for each row of the table, contiguous and on the same device, or is planned."""
    is_here = x.device == table.device or x.is_meta
    return x.shape == moment_state.row_shape(table) and x.is_contiguous() and is_here


def storage_refusal(slot: ParamSlot, rows: bool) -> Refusal | None:
    """Return why the kernels for sparse (`rows`) or dense gradients cannot serve this storage, or None if they can."""
    shared = moment_state.has_row_moments(slot)
    if not rows and (shared or slot.row_steps is not None):
        return Refusal.unsupported(f"has no {slot.storage} for dense gradients")
    if slot.param.dtype == torch.float64 and (shared or slot.moments in quantization.QUANTIZED_DTYPES):
        return Refusal.unsupported(f"has {slot.storage} for at most float32, and the parameter is {slot.param.dtype}")
    reason = moment_state.scale_mismatch(slot, rows)
    return None if reason is None else Refusal.unsupported(reason)


# The engine --------------------------------------------------------------------------------------------------------


class Native(Engine):
    """Dense gradients on the CPU, by C kernels."""

    name = "native"
    device = "cpu"
    fused = True
    finds_grads = True

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        """Refuse moments and step counts that belong to rows."""
        return storage_refusal(slot, rows=False)

    def input_refusal(self, group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Refusal | None:
        """Refuse gradients in another dtype than the parameter, and tensor subclasses."""
        refusal = kernel_refusal(group, slot)
        if refusal is not None or grad is None:
            return refusal
        if grad.dtype != slot.param.dtype:
            return Refusal.unsupported(f"the gradient is {grad.dtype}, the parameter {slot.param.dtype}")
        if type(grad) not in PLAIN:
            return Refusal.unsupported(f"serves plain gradients only, not {type(grad).__name__}")
        return None

    def run(self, batches: Sequence[KernelBatch]) -> None:
        """Update all batches in one call."""
        memo = batches[0].memo
        if "native" not in memo:
            memo["native"] = DenseStep(batches)
        memo["native"].run(batches)

    def repetition(self, batches: Sequence[KernelBatch]) -> Callable[[], None] | None:
        """Return a function that runs the last step again."""
        step: DenseStep | None = batches[0].memo.get("native")
        if step is None or not step.is_repeatable:
            return None
        return partial(step.repeat, batches[0])


class DenseStep:
    """All tensors of a step as a table for the kernels, with one row of addresses and numbers for each parameter."""

    def __init__(self, batches: Sequence[KernelBatch]) -> None:
        slots = [slot for batch in batches for slot in batch.slots]
        self.library, _ = kernel(batches[0])
        self.params = [slot.param for slot in slots]
        self.overlaps = any(batch.overlaps for batch in batches)
        self.ends = np.cumsum([len(batch.slots) for batch in batches]).tolist()
        self.grad_index = np.concatenate([batch.grad_index for batch in batches])
        self.table = np.zeros(len(slots), DENSE_TENSOR)
        table = self.table
        table["param"] = [param.data_ptr() for param in self.params]
        table["elements"] = [param.numel() for param in self.params]
        table["dtype"] = [DTYPES[param.dtype] for param in self.params]
        table["step"] = [slot.step.data_ptr() for slot in slots]
        table["counts"] = [0 if slot.counts is None else slot.counts.data_ptr() for slot in slots]
        table["seed"] = [slot.seed for slot in slots]
        table["moments"] = [STORAGES[slot.moments] for slot in slots]
        table["state"] = _padded_addresses([slot.state for slot in slots], MAX_BUFFERS)
        table["scales"] = _padded_addresses([slot.scales for slot in slots], MAX_QUANTIZED)
        for batch, start, end in zip(batches, [0, *self.ends], self.ends, strict=False):
            table["kernel"][start:end] = kernel(batch)[1]
        self.strided = np.array([not param.is_contiguous() for param in self.params])
        self.has_strided = bool(self.strided.any())
        self.is_repeatable = False

    def run(self, batches: Sequence[KernelBatch]) -> None:
        """Count a step and update all parameters."""
        table = self.table
        table["grad"], copies = self._gradients(batches)
        c = self._coefficients(batches)
        # All parameters have the same step count and are updated at once, from gradients that have not been copied.
        self.is_repeatable = len(batches) == len(c) == 1 and not copies and not self.overlaps
        self._call(c)
        del copies

    def repeat(self, batch: KernelBatch) -> None:
        """Count a step and update all parameters, with new values in the memory of the last gradients."""
        self._call(coefficient_sets(batch, [batch.slots[0].step.item() + 1]))

    def _call(self, c: Floats64) -> None:
        table = self.table
        for rows in np.split(table, len(table)) if self.overlaps else [table]:
            failed = self.library.c.cadam_dense_step(
                rows.ctypes.data, len(rows), c.ctypes.data, len(c), GRAIN, self.library.parallel_for
            )
            if failed:
                raise MemoryError("no memory for the step; nothing was changed")
        torch.autograd.graph.increment_version(self.params)

    def _gradients(self, batches: Sequence[KernelBatch]) -> tuple[Words, list[Tensor]]:
        """Return the addresses of the gradients, and copies of those that have another memory layout."""
        snapshot = batches[0].grad_snapshot
        if snapshot is None:
            raise AssertionError("the engine 'native' needs the snapshot of a plan")
        addresses, kinds = snapshot.addresses[self.grad_index], snapshot.kinds[self.grad_index]
        needs_copy = (kinds & 1 == 0) | (kinds < 0)  # not contiguous, or not readable
        if not self.has_strided and not np.bitwise_or.reduce(addresses) & 7 and not needs_copy.any():
            return addresses, []
        needs_copy |= self.strided | (addresses % SIZES[self.table["dtype"]] != 0)
        grads = [grad for batch in batches for grad in batch.gradients()]
        return align_layouts(addresses, np.flatnonzero(needs_copy).tolist(), grads, self.params)

    def _coefficients(self, batches: Sequence[KernelBatch]) -> Floats64:
        """Return a set of coefficients for each group and step count, and note in each row which one it uses."""
        steps = np.empty(len(self.table))
        self.library.c.cadam_read_steps(self.table.ctypes.data, len(self.table), steps.ctypes.data)
        steps += 1
        sets: list[Floats64] = []
        start = first = 0
        for batch, end in zip(batches, self.ends, strict=True):
            different, index = steps[start : start + 1], np.zeros((), np.int64)
            if (steps[start:end] != different).any():
                different, index = np.unique(steps[start:end], return_inverse=True)
            self.table["coefficient_set"][start:end] = index + first
            sets.append(coefficient_sets(batch, different.tolist()))
            start, first = end, first + len(different)
        return sets[0] if len(sets) == 1 else np.concatenate(sets)


def _padded_addresses(tensors: Sequence[Mapping[str, Tensor]], width: int) -> list[list[int]]:
    """Return the addresses of each slot's tensors as rows of equal length."""
    rows = [[x.data_ptr() for x in by_name.values()] for by_name in tensors]
    return [row + [0] * (width - len(row)) for row in rows]


def kernel(batch: KernelBatch, rows: bool = False) -> tuple[Library, int]:
    """Return the library that has the kernel of a batch, for sparse (`rows`) or dense gradients, and its number."""
    library = find_kernel(batch.group.sparse_kernel_spec if rows else batch.group.kernel_spec)
    if isinstance(library, UnavailableError):
        raise library
    return library


def coefficient_sets(batch: KernelBatch, steps: Sequence[float] | Floats64) -> Floats64:
    """Return a set of coefficients for each step count, in the kernel's order. Arrays of counts need only one call."""
    grad_scale = None if batch.grad_scale is None else batch.grad_scale.item()
    sets = np.zeros((len(steps), MAX_COEFFICIENTS))
    many = isinstance(steps, np.ndarray)
    for row, step in [(sets, steps)] if many else zip(sets, steps, strict=True):
        values = batch.group.kernel_coefficients(step, grad_scale)
        for column, value in enumerate(values.values()):
            row[..., column] = value
    return sets
