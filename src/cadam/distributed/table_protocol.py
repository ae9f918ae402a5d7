"""The interface between the distributed learner and models that update embedding tables during the backward pass.

TorchRec's sharded models are of this kind. This package does not import TorchRec: `cadam.torchrec` implements
`TableOptimizer` and registers how the alignment of its tables is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from ..optim.alignment import Alignment


class TableOptimizer(Protocol):
    """The optimizer of a model's embedding tables, available as the attribute `fused_optimizer` of the model."""

    @property
    def param_groups(self) -> Any:
        """The options of the tables, as in `torch.optim.Optimizer`."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of all tables."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of all tables."""


AlignmentCounter = Callable[[nn.Module], Alignment]
_alignment_counters: list[AlignmentCounter] = []


def register_alignment(counter: AlignmentCounter) -> None:
    """Register a function that counts the alignment of a model's tables on this rank.

    Args:
        counter: is called with any model that has a table optimizer, and must return an empty count for tables of a
            kind that it does not know.
    """
    if counter not in _alignment_counters:
        _alignment_counters.append(counter)


def table_optimizer(model: nn.Module) -> TableOptimizer | None:
    """Return the optimizer that updates a model's tables during backward, or None if there is none."""
    optimizer: TableOptimizer | None = getattr(model, "fused_optimizer", None)
    return optimizer


def table_alignments(model: nn.Module) -> list[Alignment]:
    """Count the alignment of a model's tables on this rank, once per registered counter."""
    if table_optimizer(model) is None:
        return []
    return [counter(model) for counter in _alignment_counters]
