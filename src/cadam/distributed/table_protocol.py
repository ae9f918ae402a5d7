"""What the ranks' learner needs of a model that updates its embedding tables in backward, as TorchRec's do.

This package knows no such model: whoever makes them implements `TableOptimizer`, and registers how they are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from ..optim.alignment import Alignment


class TableOptimizer(Protocol):
    """The optimizer of a model's tables, which the model has as `fused_optimizer`."""

    @property
    def param_groups(self) -> Any: ...
    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


Count = Callable[[nn.Module], Alignment]
_counts: list[Count] = []


def register_alignment(count: Count) -> None:
    """Let the learner count the alignment of tables on this rank so; of other models' tables it must find none."""
    if count not in _counts:
        _counts.append(count)


def table_optimizer(model: nn.Module) -> TableOptimizer | None:
    """What a model updates its tables with in backward; None if it has no such."""
    found: TableOptimizer | None = getattr(model, "fused_optimizer", None)
    return found


def table_alignments(model: nn.Module) -> list[Alignment]:
    """What is counted of a model's tables on this rank."""
    return [count(model) for count in _counts] if table_optimizer(model) is not None else []
