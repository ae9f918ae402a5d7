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
from .base import Engine, Item, Job


class Tensors:
    """The functions that a rule's `update` may call, on tensors."""

    sqrt = staticmethod(torch.sqrt)
    sign = staticmethod(torch.sign)
    maximum = staticmethod(foreach_interpreter.maximum)

    @staticmethod
    def square(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def hold(alignment: Tensor, step: Tensor) -> Tensor:
        """The step, but zero where the alignment is not positive. A NaN is no reason to hold: it must show."""
        return foreach_interpreter.hold(step, alignment, 0)  # type: ignore[no-any-return]


class RowTensors(Tensors):
    """The same where a second moment is that of a row."""

    @staticmethod
    def square(x: Tensor) -> Tensor:
        """The mean of the squares of each row."""
        return quantization.mean_of_rows(x.square())


def functions(item: Item) -> type[Tensors]:
    """The functions for the moments of this parameter."""
    return RowTensors if quantization.shares_moments(item) else Tensors


class Eager(Engine):
    name = "eager"
    any_storage = True
    traceable = True

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            coefficients = scalars.of_steps(job.update, job.options, job.grad_scale)
            counted: dict[torch.device, tuple[list[Item], list[Tensor | None]]] = {}
            for item, grad in job:
                quantization.count_step(item)
                items, aligned = counted.setdefault(item.param.device, ([], []))
                items.append(item)
                aligned.append(step(job, item, grad, coefficients(item.step)))
            for items, aligned in counted.values():
                foreach_interpreter.count(job, items, aligned)


def step(job: Job, item: Item, grad: Tensor, c: dict[str, Any]) -> Tensor | None:
    """The update as it is written, on tensors: for autograd, for graphs, and where nothing can be overwritten.

    Returns the number of aligned elements, None if nobody counts.
    """
    whole = job.options["differentiable"] or torch.compiler.is_compiling() or item.storage
    parts = [(item, grad)] if whole else foreach_interpreter.blocks(item, grad)
    aligned = [_update(job, part, of_grad, c) for part, of_grad in parts]
    return None if aligned[0] is None else reduce(add, aligned)


def _update(job: Job, item: Item, grad: Tensor, c: dict[str, Any]) -> Any:
    # Autograd needs the old values after they are overwritten.
    copy = job.options["differentiable"]
    work = item.work_dtype
    param = item.param.to(work, copy=copy)
    if item.storage:
        state = quantization.load(item, None, work)
    else:
        state = {name: buffer.to(work, copy=copy) for name, buffer in item.state.items()}
    moved = job.update(param, grad.to(work), state, c, functions(item))
    if item.is_stand_in:
        return None
    item.param.copy_(moved.param)
    if item.storage:
        quantization.store(item, moved.state, None, item.step)
    else:
        for name, buffer in item.state.items():
            buffer.copy_(moved.state[name])
    return None if item.counts is None else (moved.alignment > 0).sum()


def count(counts: Tensor, alignment: Tensor, touched: int, seen: int) -> None:
    """Add one step to the alignment counters, on the device."""
    counts[0].add_((alignment > 0).sum())
    counts[1].add_(touched)
    counts[2].add_(seen)
