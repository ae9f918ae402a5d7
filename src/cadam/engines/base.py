"""What an engine is given: the parameters of a group that take the same update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..rules import Options
from ..update import Update

PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Item:
    """One parameter with what belongs to it, as plain real tensors.

    A DTensor comes as its local shard, a complex tensor as its real view.
    `counts` are the three alignment counters (aligned, touched, seen), or None when nobody counts.
    """

    param: Tensor
    state: dict[str, Tensor]
    step: Tensor
    counts: Tensor | None
    name: str = "the parameter"
    planned: bool = False
    """Is its state yet to be made? Then missing buffers are stand-ins without memory."""

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: that of the parameter and its buffers, and float32 at the least."""
        dtype = torch.promote_types(self.param.dtype, torch.float32)
        for buffer in self.state.values():
            dtype = torch.promote_types(dtype, buffer.dtype)
        return dtype


class NotMeant(str):
    """Why an engine refuses a parameter that it was never meant for: one on other devices, or with other gradients."""


DENSE_ONLY, SPARSE_ONLY = NotMeant("serves dense gradients only"), NotMeant("serves sparse gradients only")


def unreadable(item: Item) -> str | None:
    """Why kernels must not touch a parameter, its state or its step count: they are handed bare addresses."""
    for name, tensor in (("the parameter", item.param), *item.state.items(), ("the step count", item.step)):
        if type(tensor) not in PLAIN or tensor.is_neg():
            return f"{name} is no plain tensor but {type(tensor).__name__}{' with a lazy sign' * tensor.is_neg()}"
    for name, buffer in item.state.items():
        if buffer.device != item.param.device and not (item.planned and buffer.is_meta):
            return f"{name} is on {buffer.device}, the parameter on {item.param.device}"
    return None


@dataclass
class Job:
    """Items of one group, the update they take and the options that its scalars come from.

    A job lives on while nothing but gradients and numbers change from step to step. What an engine works out
    about its items may be kept in `memo` for that long. `grads` are there during a step only, and from the second
    step on not for an engine that looks at gradients by itself.
    """

    update: Update
    options: Options
    items: Sequence[Item]
    grads: Sequence[Tensor] = ()
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[Item, Tensor]]:
        return iter(zip(self.items, self.gradients(), strict=True))

    def gradients(self) -> Sequence[Tensor]:
        return self.grads or [item.param.grad for item in self.items]  # type: ignore[misc]


class Engine(Protocol):
    """Where updates run. An engine gets all its jobs of a step in one call."""

    name: str
    fused: bool
    """Is it what ``fused=True`` asks for?"""
    by_chance: bool
    """Can it round stochastically?"""
    skips_overflow: bool
    """Does it look at `found_inf` itself, on the device? If not, the optimizer reads it before the step."""

    looks: bool
    """Does it look at gradients by itself, through the parameters?"""
    traceable: bool
    """Can torch.compile look through it?"""

    def refuses(self, update: Update, item: Item, grad: Tensor | None, options: Options) -> str | None:
        """Why this engine cannot serve a parameter with such a gradient; None if it can.

        Without a gradient, a dense one is expected.
        """
        ...

    def stale(self, jobs: Sequence[Job]) -> bool:
        """Did a tensor change in a way that the choice of this engine, or its memo, depends on?"""
        ...

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise if an input is bad. All engines check before any of them runs."""
        ...

    def run(self, jobs: Sequence[Job]) -> None:
        """Count the step of every item, and update parameters, buffers and counters in place."""
        ...


def misfit(jobs: Sequence[Job]) -> bool:
    """Do a parameter, its state and its gradient no longer go together?"""
    for job in jobs:
        for item, grad in job:
            param = item.param
            if any(buffer.shape != param.shape for buffer in item.state.values()) or grad.device != param.device:
                return True
            if not grad.is_sparse and (grad.shape != param.shape or grad.is_complex()):
                return True
    return False


def fills_memory(x: Tensor) -> bool:
    """Do the elements fill a stretch of memory, each once, in whatever order of dimensions?"""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
