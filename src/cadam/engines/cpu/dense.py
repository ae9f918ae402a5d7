"""The fused engine on the CPU: C kernels over raw pointers, on torch's own threads, one call a step.

A step reads and writes every value once. The pointers are taken anew in each step: gradients move, and nothing
keeps a user from replacing what a parameter or a buffer points to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...codegen.c_source import dense_storages, row_storages
from ...codegen.kernel_spec import KernelSpec
from ...native.loader import Library, find_kernel
from ...native.tensor_snapshot import CHANGED, TensorSnapshot, align_layouts, snapshot_grads
from ...numpy_functions import NumpyFunctions
from ...rules import Options
from ...rules.update import Update
from .. import coefficients, quantization
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

MAX_BUFFERS, MAX_COEFFICIENTS, MAX_CODED, WIDEST = 4, 32, 2, 1024  # as in native/cadam.h
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
STORAGES = {"float32": 0, "bfloat16": 1, "int8": 2}
SIZES = np.array([4, 8, 2, 2])  # in bytes, in that order

Floats64 = np.ndarray[Any, np.dtype[np.float64]]

GRAIN = 32768  # elements below which a second thread is not worth waking


# What the engines can serve ------------------------------------------------------------------------------------


def kernel_refusal(update: Update, slot: ParamSlot, options: Options) -> Refusal | None:
    """Return why the kernels cannot serve a parameter, whatever its gradient is, or None if they can."""
    if options["fused"] is False or (options["foreach"] is not None and not options["fused"]):
        requested = f"fused={options['fused']}, foreach={options['foreach']}"
        return Refusal(RefusalKind.NOT_REQUESTED, f"{requested} was asked for")
    reason = _unsupported_tensors(update, slot, options)
    if reason is not None:
        return Refusal.unsupported(reason)
    found = find_kernel(KernelSpec.of(update.rule, coefficients.as_numbers(options)))
    return Refusal(RefusalKind.UNAVAILABLE, str(found)) if isinstance(found, UnavailableError) else None


def _unsupported_tensors(update: Update, slot: ParamSlot, options: Options) -> str | None:
    if options["differentiable"]:
        return "differentiable=True needs the eager engine"
    reason = unreadable_memory(slot)
    if reason:
        return reason
    if slot.param.dtype not in DTYPES:
        return f"has no kernels for {slot.param.dtype}"
    work = torch.promote_types(slot.param.dtype, torch.float32)
    for name, buffer in slot.state.items():
        shared = quantization.shares(slot.param, slot.kinds.get(name, ""), options) and quantization.is_by_row(
            buffer, slot.param
        )
        wanted = work if shared else quantization.CODES.get(slot.moments, work)
        if buffer.dtype != wanted:
            return f"keeps the state of {slot.param.dtype} in {wanted}, and {name} is {buffer.dtype}"
        if shared and not is_of_rows(buffer, slot.param):
            return f"{name} does not have one number for each row"
        if not shared and (buffer.shape != slot.param.shape or buffer.stride() != slot.param.stride()):
            return f"{name} does not lie in memory as the parameter does"
    if not fills_memory(slot.param):
        return "the parameter's elements overlap or have gaps between them"
    if any(t.data_ptr() % t.element_size() for t in (slot.param, *slot.state.values()) if t.device.type == "cpu"):
        return "the parameter or its state is not aligned in memory"
    if slot.step.device.type != "cpu" or slot.step.dtype != torch.float32:
        return f"counts steps in float32 on the CPU, and this count is {slot.step.dtype} on {slot.step.device}"
    if any(not scales.is_contiguous() for scales in slot.scales.values()):
        return "the scales of its moments are not contiguous"
    spec = KernelSpec.of(update.rule, coefficients.as_numbers(options))
    by_row = [quantization.is_by_row(buffer, slot.param) for buffer in slot.state.values()]
    if any(by_row) and by_row != [slot.kinds[name] != "signed" for name in slot.state]:
        return "some of its second moments are those of rows, and others are not"
    storages = row_storages(spec) if any(by_row) else ["float32", *dense_storages(spec)]
    if slot.moments not in storages:
        return f"has no {slot.storage} for the moments of the rule {update.rule.name!r}"
    return None


def is_of_rows(x: Tensor, table: Tensor) -> bool:
    """Has it one number for each row, one after the other in memory?"""
    return x.shape == quantization.by_row(table) and x.is_contiguous() and x.device == table.device


def storage_refusal(slot: ParamSlot, rows: bool) -> Refusal | None:
    """Return why the kernels cannot serve moments that are stored this way, or None if they can."""
    reason = _unsupported_storage(slot, rows)
    return None if reason is None else Refusal.unsupported(reason)


def _unsupported_storage(slot: ParamSlot, rows: bool) -> str | None:
    shared = quantization.shares_moments(slot)
    if not rows and (shared or slot.row_steps is not None):
        return f"has no {slot.storage} for dense gradients"
    if slot.param.dtype == torch.float64 and (shared or slot.moments in quantization.CODES):
        return f"has {slot.storage} for at most float32, and the parameter is {slot.param.dtype}"
    return quantization.other_scales(slot, rows)


# Dense ---------------------------------------------------------------------------------------------------------

# Of a dense_tensor:
P, G, S, STEP, COUNTS, N, KERNEL, DTYPE, C, SCALES, SEED, MOMENTS, COLUMNS = 0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16


class Native(Engine):
    name = "native"
    device = "cpu"
    fused = True
    finds_grads = True

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        return storage_refusal(slot, rows=False)

    def input_refusal(self, update: Update, slot: ParamSlot, grad: Tensor | None, options: Options) -> Refusal | None:
        refusal = kernel_refusal(update, slot, options)
        if refusal is not None or grad is None:
            return refusal
        if grad.dtype != slot.param.dtype:
            return Refusal.unsupported(f"the gradient is {grad.dtype}, the parameter {slot.param.dtype}")
        if type(grad) not in PLAIN:
            return Refusal.unsupported(f"serves plain gradients only, not {type(grad).__name__}")
        return None

    def stale(self, batches: Sequence[KernelBatch]) -> bool:
        return _step(batches).stale()

    def run(self, batches: Sequence[KernelBatch]) -> None:
        _step(batches).step(batches)


def _step(batches: Sequence[KernelBatch]) -> DenseStep:
    made: DenseStep | None = batches[0].memo.get("native")
    if made is None or not made.serves(batches):
        made = batches[0].memo["native"] = DenseStep.of(batches)
    return made


@dataclass
class DenseStep:
    """All tensors of a step as the kernels want them: a row of numbers each."""

    library: Library
    members: list[Sequence[ParamSlot]]
    """The slots of each batch. Not the batches themselves: they keep this."""
    rows: Words
    params: TensorSnapshot
    grads: TensorSnapshot
    steps: TensorSnapshot
    buffers: list[tuple[list[int] | slice, int, TensorSnapshot]]
    """The first buffers, the second..., then their scales: rows and column that they belong in, and they themselves."""
    strided: dict[int, tuple[int, ...]]
    """The strides of parameters that are not contiguous."""
    disjoint: bool
    """Does no parameter share memory with another?"""

    def __post_init__(self) -> None:
        self.fit = self._fit()

    @classmethod
    def of(cls, batches: Sequence[KernelBatch]) -> DenseStep:
        slots = [slot for batch in batches for slot in batch.slots]
        rows = np.zeros((len(slots), COLUMNS), np.int64)
        start = 0
        for batch in batches:
            library, number = kernel(batch)
            for row, slot in zip(rows[start:], batch.slots, strict=False):
                row[KERNEL] = number
                row[DTYPE] = DTYPES[slot.param.dtype]
                row[COUNTS] = 0 if slot.counts is None else slot.counts.data_ptr()
                row[SEED], row[MOMENTS] = slot.seed, STORAGES[slot.moments]
            start += len(batch.slots)
        params = TensorSnapshot([slot.param for slot in slots], threads=True)
        rows[:, P], rows[:, N] = params.addresses, params.sizes
        return cls(
            library,
            [batch.slots for batch in batches],
            rows,
            params,
            snapshot_grads(params.tensors, [grad for batch in batches for grad in batch.gradients()], threads=True),
            TensorSnapshot([slot.step for slot in slots], threads=True, swappable=()),
            [_nth([slot.state for slot in slots], k, S) for k in range(max(len(slot.state) for slot in slots))]
            + [
                _nth([slot.scales for slot in slots], k, SCALES) for k in range(max(len(slot.scales) for slot in slots))
            ],
            {i: param.stride() for i, param in enumerate(params.tensors) if not param.is_contiguous()},
            _disjoint(params),
        )

    def serves(self, batches: Sequence[KernelBatch]) -> bool:
        return len(batches) == len(self.members) and all(
            batch.slots is slots for batch, slots in zip(batches, self.members, strict=True)
        )

    def stale(self) -> bool:
        """Kernels trust sizes and layouts: has a parameter other memory, a buffer or a gradient another size?"""
        if self.params.update():
            return True
        slots = [slot for members in self.members for slot in members] if self.strided else []
        for i, stride in self.strided.items():
            if any(tensor.stride() != stride for tensor in (slots[i].param, *slots[i].state.values())):
                return True
        if self.steps.update() & CHANGED or any(buffers.update() & CHANGED for _, _, buffers in self.buffers):
            return True
        if self.grads.update() & CHANGED:
            self.fit = self._fit()
        return not self.fit

    def _fit(self) -> bool:
        """Do the gradients have the sizes, dtypes and device of their parameters?"""
        grads, params = self.grads, self.params
        return np.array_equal(grads.sizes, params.sizes) and np.array_equal(grads.kinds // 2, params.kinds // 2)

    def step(self, batches: Sequence[KernelBatch]) -> None:
        rows = self.rows
        grads, copies = self._grads(batches)
        rows[:, G], rows[:, STEP] = grads, self.steps.addresses
        for where, column, buffers in self.buffers:
            rows[where, column] = buffers.addresses
        c = self._coefficients(batches)
        for part in [rows] if self.disjoint else np.split(rows, len(rows)):
            failed = self.library.c.cadam_dense_step(
                part.ctypes.data, len(part), c.ctypes.data, len(c), GRAIN, self.library.parallel_for
            )
            if failed:
                raise MemoryError("no memory for the step; nothing was changed")
        del copies
        torch.autograd.graph.increment_version(self.params.tensors)

    def _grads(self, batches: Sequence[KernelBatch]) -> tuple[Words, list[Tensor]]:
        """Where the gradients lie, as the parameters do: one that does not is copied."""
        kinds = self.grads.kinds != self.params.kinds
        aligned = not np.bitwise_or.reduce(self.grads.addresses) & 7
        if aligned and not self.strided and not kinds.any():
            return self.grads.addresses, []
        odd = kinds | (self.grads.addresses % SIZES[self.rows[:, DTYPE]] != 0)
        odd[list(self.strided)] = True
        every = [grad for batch in batches for grad in batch.gradients()]
        return align_layouts(self.grads.addresses, np.flatnonzero(odd).tolist(), every, self.params.tensors)

    def _coefficients(self, batches: Sequence[KernelBatch]) -> Floats64:
        """The sets of coefficients, one for each group and step count; notes in each row which is its own."""
        steps = np.empty(len(self.rows))
        self.library.c.cadam_read_steps(self.rows.ctypes.data, len(self.rows), steps.ctypes.data)
        steps += 1
        made: list[Floats64] = []
        start = 0
        for batch in batches:
            own = slice(start, start + len(batch.slots))
            start = own.stop
            different, index = steps[own][:1], np.zeros((), np.int64)
            if (steps[own] != different).any():
                different, index = np.unique(steps[own], return_inverse=True)
            self.rows[own, C] = index + sum(map(len, made))
            made.append(sets(batch, different.tolist()))
        return np.concatenate(made)


def _disjoint(params: TensorSnapshot) -> bool:
    order = np.argsort(params.addresses, kind="stable")
    starts = params.addresses[order]
    ends = starts + np.array([param.nbytes for param in params.tensors], np.int64)[order]
    return bool((ends[:-1] <= starts[1:]).all())


def _nth(held: Sequence[Mapping[str, Tensor]], k: int, first: int) -> tuple[list[int] | slice, int, TensorSnapshot]:
    """The number `k` of all of these, for the column `first + k`."""
    where = [row for row, tensors in enumerate(held) if len(tensors) > k]
    tensors = TensorSnapshot([list(held[row].values())[k] for row in where], threads=True, swappable=())
    return slice(None) if len(where) == len(held) else where, first + k, tensors


def kernel(batch: KernelBatch) -> tuple[Library, int]:
    """The kernel that serves a batch, as its number in its library."""
    found = find_kernel(KernelSpec.of(batch.update.rule, coefficients.as_numbers(batch.options)))
    if isinstance(found, UnavailableError):
        raise found
    return found


def sets(batch: KernelBatch, steps: Sequence[float] | Floats64) -> Floats64:
    """A set of coefficients of a batch for each of these steps, in the kernel's order."""
    grad_scale = None if batch.grad_scale is None else batch.grad_scale.item()
    options, made = coefficients.as_numbers(batch.options), np.zeros((len(steps), MAX_COEFFICIENTS))
    many = isinstance(steps, np.ndarray)  # all at once
    for rows, t in [(made, steps)] if many else zip(made, steps, strict=True):
        c = batch.update.general_coefficients(
            t, options, NumpyFunctions if many else coefficients.ScalarFunctions, grad_scale
        )
        for column, value in enumerate(c.values()):
            rows[..., column] = value
    return made
