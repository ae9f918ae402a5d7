"""One tensor at a time. The only engine that autograd can look through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from . import coefficients as scalars
from . import foreach_interpreter, quantization
from .base import Engine, KernelBatch, ParamSlot


class Tensors:
    """The functions that a rule's `update` may call, on tensors."""

    sqrt = staticmethod(torch.sqrt)
    sign = staticmethod(torch.sign)
    maximum = staticmethod(foreach_interpreter.maximum)

    @staticmethod
    def square(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def mask(alignment: Tensor, step: Tensor) -> Tensor:
        """The step, but zero where the alignment is not positive. A NaN is never masked, so that it stays visible."""
        return foreach_interpreter.mask(step, alignment, 0)  # type: ignore[no-any-return]


class RowTensors(Tensors):
    """The same where a second moment is that of a row."""

    @staticmethod
    def square(x: Tensor) -> Tensor:
        """The mean of the squares of each row."""
        return quantization.mean_of_rows(x.square())


def functions(slot: ParamSlot) -> type[Tensors]:
    """The functions for the moments of this parameter."""
    return RowTensors if quantization.shares_moments(slot) else Tensors


class Eager(Engine):
    name = "eager"
    any_storage = True
    traceable = True

    def run(self, batches: Sequence[KernelBatch]) -> None:
        for batch in batches:
            coefficients = scalars.of_steps(batch.update, batch.options, batch.grad_scale)
            counted: dict[torch.device, tuple[list[ParamSlot], list[Tensor | None]]] = {}
            for slot, grad in batch:
                quantization.count_step(slot)
                slots, aligned = counted.setdefault(slot.param.device, ([], []))
                slots.append(slot)
                aligned.append(step(batch, slot, grad, coefficients(slot.step)))
            for slots, aligned in counted.values():
                foreach_interpreter.count(batch, slots, aligned)


def step(batch: KernelBatch, slot: ParamSlot, grad: Tensor, c: dict[str, Any]) -> Tensor | None:
    """The update as it is written, on tensors: for autograd, for graphs, and where nothing can be overwritten.

    Returns the number of aligned elements, None if nobody counts.
    """
    whole = batch.options["differentiable"] or torch.compiler.is_compiling() or slot.storage
    parts = [(slot, grad)] if whole else foreach_interpreter.blocks(slot, grad)
    aligned = [_update(batch, part, of_grad, c) for part, of_grad in parts]
    return None if aligned[0] is None else reduce(add, aligned)


def _update(batch: KernelBatch, slot: ParamSlot, grad: Tensor, c: dict[str, Any]) -> Any:
    # Autograd needs the old values after they are overwritten.
    copy = batch.options["differentiable"]
    work = slot.work_dtype
    param = slot.param.to(work, copy=copy)
    if slot.storage:
        state = quantization.load(slot, None, work)
    else:
        state = {name: buffer.to(work, copy=copy) for name, buffer in slot.state.items()}
    moved = batch.update(param, grad.to(work), state, c, functions(slot))
    if slot.is_stand_in:
        return None
    slot.param.copy_(moved.param)
    if slot.storage:
        quantization.store(slot, moved.state, None, slot.step)
    else:
        for name, buffer in slot.state.items():
            buffer.copy_(moved.state[name])
    return None if slot.counts is None else (moved.alignment > 0).sum()


def count(counts: Tensor, alignment: Tensor, touched: int, seen: int) -> None:
    """Add one step to the alignment counters, on the device."""
    counts[0].add_((alignment > 0).sum())
    counts[1].add_(touched)
    counts[2].add_(seen)
