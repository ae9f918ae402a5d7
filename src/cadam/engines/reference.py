"""The reference engine: the update as it is written, one tensor at a time. Only this engine supports autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from . import foreach_interpreter, moment_state
from .base import Engine, KernelBatch, ParamSlot


class TensorFunctions:
    """The functions that a rule's `update` may call, on tensors."""

    sqrt = staticmethod(torch.sqrt)
    sign = staticmethod(torch.sign)
    maximum = staticmethod(foreach_interpreter.maximum)

    @staticmethod
    def square(x: Tensor) -> Tensor:
        """Return the square of each element."""
        return x * x

    @staticmethod
    def mask(alignment: Tensor, step: Tensor) -> Tensor:
        """Return the step with zeros where the alignment is not positive. A NaN is not masked, so that it is seen."""
        return foreach_interpreter.mask(step, alignment, 0)  # type: ignore[no-any-return]


class RowTensorFunctions(TensorFunctions):
    """The functions for tables whose second moments are shared by a row."""

    @staticmethod
    def square(x: Tensor) -> Tensor:
        """Return the mean square of each row."""
        return moment_state.row_means(x.square())


def functions(slot: ParamSlot) -> type[TensorFunctions]:
    """Return the functions for the moments of this parameter."""
    return RowTensorFunctions if moment_state.has_row_moments(slot) else TensorFunctions


class Eager(Engine):
    """Dense gradients on any device, with any storage, by plain tensor operations."""

    name = "eager"
    any_storage = True
    traceable = True

    def run(self, batches: Sequence[KernelBatch]) -> None:
        """Update one slot after the other, and count alignment once for all slots of a device."""
        for batch in batches:
            coefficients = batch.group.coefficients(batch.grad_scale)
            by_device: dict[torch.device, tuple[list[ParamSlot], list[Tensor | None]]] = {}
            for slot, grad in batch:
                moment_state.advance_step(slot)
                slots, aligned = by_device.setdefault(slot.param.device, ([], []))
                slots.append(slot)
                aligned.append(step(batch, slot, grad, coefficients(slot.step)))
            for slots, aligned in by_device.values():
                foreach_interpreter.count(batch, slots, aligned)


def step(batch: KernelBatch, slot: ParamSlot, grad: Tensor, c: dict[str, Any]) -> Tensor | None:
    """Update one slot with the formula as it is written, block by block where that is possible.

    Autograd and compiled graphs need operations on whole tensors, and so do quantized moments, which share scales.

    Returns:
        The number of aligned elements, or None if they are not counted.
    """
    as_one = batch.group.options["differentiable"] or torch.compiler.is_compiling() or slot.storage
    blocks = [(slot, grad)] if as_one else foreach_interpreter.blocks(slot, grad)
    aligned = [_update(batch, block, block_grad, c) for block, block_grad in blocks]
    return None if aligned[0] is None else reduce(add, aligned)


def _update(batch: KernelBatch, slot: ParamSlot, grad: Tensor, c: dict[str, Any]) -> Any:
    copy = batch.group.options["differentiable"]  # Autograd needs the old values after they are overwritten.
    work = slot.work_dtype
    param = slot.param.to(work, copy=copy)
    if slot.storage:
        state = moment_state.load_moments(slot, None, work)
    else:
        state = {name: buffer.to(work, copy=copy) for name, buffer in slot.state.items()}
    result = batch.group.update(param, grad.to(work), state, c, functions(slot))
    if slot.is_fake:
        return None
    slot.param.copy_(result.param)
    if slot.storage:
        moment_state.store_moments(slot, result.state, None, slot.step)
    else:
        for name, buffer in slot.state.items():
            buffer.copy_(result.state[name])
    return None if slot.counts is None else (result.alignment > 0).sum()


def count(counts: Tensor, alignment: Tensor, touched: int, seen: int) -> None:
    """Add one step to the alignment counters of a parameter, on its device."""
    counts[0].add_((alignment > 0).sum())
    counts[1].add_(touched)
    counts[2].add_(seen)
