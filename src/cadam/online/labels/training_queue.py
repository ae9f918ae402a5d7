"""Events that have their labels and wait to be learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data.events import FEATURE_PREFIX, Columns, concatenate_columns


class Ready:
    """In the order in which they got their labels; `batch_size` to a step, or all there are."""

    def __init__(self, batch_size: int | None) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.parts: list[Columns] = []
        self.count = 0

    def add(self, columns: Columns) -> None:
        self.parts.append({n: v for n, v in columns.items() if n == "label" or n.startswith(FEATURE_PREFIX)})
        self.count += len(columns["label"])

    def columns(self) -> Columns:
        """All of them; empty if there are none."""
        return concatenate_columns(self.parts) if self.parts else {}

    def ends(self, all_of_it: bool) -> list[int]:
        """Where the steps end that can be taken: full ones, and with `all_of_it` a short one."""
        size = self.batch_size or max(self.count, 1)
        ends = list(range(size, self.count + 1, size))
        return [*ends, self.count] if all_of_it and self.count % size else ends

    def drop(self, count: int) -> None:
        """So many, the first, have been learnt from."""
        left = {name: values[count:].copy() for name, values in self.columns().items()} if count < self.count else {}
        self.load_state_dict(left)

    def state_dict(self) -> Columns:
        return self.columns()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.parts = [dict(state)] if state else []
        self.count = len(state["label"]) if state else 0
