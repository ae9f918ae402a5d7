"""What an engine is given: the parameters of a group that take the same update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..rules import Options
from ..update import Update


@dataclass(frozen=True)
class Item:
    """One parameter on its way through a step, as plain real tensors.

    A DTensor comes as its local shard, a complex tensor as its real view; a sparse gradient stays as it is.
    `counts` are the three alignment counters (aligned, touched, seen), or None when nobody counts.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    step: Tensor
    counts: Tensor | None

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: that of the parameter and its buffers, and float32 at the least."""
        dtype = torch.promote_types(self.param.dtype, torch.float32)
        for buffer in self.state.values():
            dtype = torch.promote_types(dtype, buffer.dtype)
        return dtype


@dataclass(frozen=True)
class Job:
    """Items of one group, the update they take and the options that its scalars come from."""

    update: Update
    options: Options
    items: Sequence[Item]
    grad_scale: Tensor | None = None


class Engine(Protocol):
    """Where updates run. An engine gets all its jobs of a step in one call."""

    name: str

    def refuses(self, param: Tensor, options: Options) -> str | None:
        """Why this engine cannot serve a parameter with a dense gradient; None if it can."""
        ...

    def run(self, jobs: Sequence[Job]) -> None:
        """Count the step of every item, and update parameters, buffers and counters in place."""
        ...
