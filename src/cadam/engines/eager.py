"""One tensor at a time. The only engine that autograd can look through."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import codes, lists, scalars
from .base import Engine, Item, Job


class Tensors:
    """The functions that a rule's `update` may call, on tensors."""

    sqrt = staticmethod(torch.sqrt)
    sign = staticmethod(torch.sign)
    maximum = staticmethod(lists.maximum)

    @staticmethod
    def square(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def hold(alignment: Tensor, step: Tensor) -> Tensor:
        """The step, but zero where the alignment is not positive. A NaN is no reason to hold: it must show."""
        return lists.hold(step, alignment, 0)  # type: ignore[no-any-return]


class RowTensors(Tensors):
    """The same where a second moment is that of a row."""

    @staticmethod
    def square(x: Tensor) -> Tensor:
        """The mean of the squares of each row."""
        return x.square().reshape(len(x), -1).mean(1).view(len(x), *[1] * (x.dim() - 1))


def functions(item: Item) -> type[Tensors]:
    """The functions for the moments of this parameter."""
    return RowTensors if any(codes.is_by_row(b, item.param) for b in item.state.values()) else Tensors


class Eager(Engine):
    name = "eager"
    any_storage = True
    traceable = True

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            for item, grad in job:
                item.step.add_(1)
                step(job, item, grad)


def step(job: Job, item: Item, grad: Tensor) -> None:
    """The update as it is written, on tensors: for autograd, for graphs, and where nothing can be overwritten."""
    c = scalars.of_step(job.update, job.options, item.step, job.grad_scale)
    # Autograd needs the old values after they are overwritten.
    copy = job.options["differentiable"]
    work = item.work_dtype
    param = item.param.to(work, copy=copy)
    if item.storage:
        state = codes.load(item, None, work)
    else:
        state = {name: buffer.to(work, copy=copy) for name, buffer in item.state.items()}
    moved = job.update(param, grad.to(work), state, c, functions(item))
    item.param.copy_(moved.param)
    if item.storage:
        codes.store(item, moved.state, None, item.step)
    else:
        for name, buffer in item.state.items():
            buffer.copy_(moved.state[name])
    if item.counts is not None:
        count(item.counts, moved.alignment, item.param.numel(), item.param.numel())


def count(counts: Tensor, alignment: Tensor, touched: int, seen: int) -> None:
    """Add one step to the alignment counters, on the device."""
    with torch.no_grad():
        counts[0].add_((alignment > 0).sum())
        counts[1].add_(touched)
        counts[2].add_(seen)
