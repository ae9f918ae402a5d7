"""One tensor at a time. The only engine that autograd can look through."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import lists, scalars
from .base import Engine, Item, Job


class Tensors:
    """The functions that a rule's `update` may call, on tensors."""

    sqrt = staticmethod(torch.sqrt)
    sign = staticmethod(torch.sign)
    maximum = staticmethod(lists.maximum)

    @staticmethod
    def hold(alignment: Tensor, step: Tensor) -> Tensor:
        """The step, but zero where the alignment is not positive. A NaN is no reason to hold: it must show."""
        return lists.hold(step, alignment, 0)  # type: ignore[no-any-return]


class Eager(Engine):
    name = "eager"
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
    state = {name: buffer.to(work, copy=copy) for name, buffer in item.state.items()}
    moved = job.update(param, grad.to(work), state, c, Tensors)
    item.param.copy_(moved.param)
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
