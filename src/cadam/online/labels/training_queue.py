"""The queue of labeled events that are waiting for a training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.events import FEATURE_PREFIX, Columns, concatenate_columns


class TrainingQueue:
    """Labeled events in the order in which they were labeled.

    Args:
        batch_size: events per training step; None to train on all queued events at once.
    """

    def __init__(self, batch_size: int | None) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.parts: list[Columns] = []
        self.count = 0

    def add(self, columns: Columns) -> None:
        """Append the features, labels and weights of events."""
        self.parts.append(
            {n: v for n, v in columns.items() if n in ("label", "weight") or n.startswith(FEATURE_PREFIX)}
        )
        self.count += len(columns["label"])

    def columns(self) -> Columns:
        """Return all queued events; an empty dict if there are none."""
        return concatenate_columns(self.parts) if self.parts else {}

    def step_ends(self, include_short: bool, largest: int | None = None) -> list[int]:
        """Return the positions in the queue at which the next training steps end.

        Args:
            include_short: whether a last step with fewer than `batch_size` events is taken too.
            largest: the number of events of the largest step, if there is no `batch_size`.
        """
        size = self.batch_size or largest or max(self.count, 1)
        ends = list(range(size, self.count + 1, size))
        return [*ends, self.count] if (include_short or self.batch_size is None) and self.count % size else ends

    def remove_first(self, count: int) -> None:
        """Remove the first events, after they have been learned."""
        rest = {name: values[count:].copy() for name, values in self.columns().items()} if count < self.count else {}
        self.load_state_dict(rest)

    def state_dict(self) -> Columns:
        """Return all queued events."""
        return self.columns()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the queued events."""
        self.parts = [dict(state)] if state else []
        self.count = len(state["label"]) if state else 0
