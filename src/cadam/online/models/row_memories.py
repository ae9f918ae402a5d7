"""The memory of rows in tables and in the state of their optimizer, where compiled code starts the rows of new ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...native.container_snapshot import ContainerSnapshot
from ...native.structs import ROW_MEMORY, Records
from ...optim.optimizer import Optimizer
from ...tables.joint_assignment import NO_MEMORIES


class RowMemories:
    """Finds the memory of rows, and finds it again when tables, optimizer state or options have changed.

    Args:
        tables: the tables.
        optimizer: the optimizer of the tables; None if they are not trained.
    """

    def __init__(self, tables: Sequence[nn.Embedding], optimizer: torch.optim.Optimizer | None) -> None:
        self.tables, self.optimizer = tables, optimizer
        self._records: Records | None = None
        self._values: list[Tensor | None] = []
        self._weights: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._snapshots: tuple[object, object, ContainerSnapshot, list[int]] | None = None

    def find(self) -> Records | None:
        """Return an array of the struct `row_memory`, or None if compiled code cannot change the memory of rows."""
        if not self._is_unchanged():
            self._records = self._find_again()
        return self._records

    def _is_unchanged(self) -> bool:
        """Whether the last result is still right. The learning rate may have changed: no state depends on it."""
        if self._snapshots is None or any(
            table.weight is not weight for table, weight in zip(self.tables, self._weights, strict=True)
        ):
            return False
        state, groups, containers, addresses = self._snapshots
        optimizer = self.optimizer
        if optimizer is not None and (optimizer.state is not state or optimizer.param_groups is not groups):
            return False
        return containers.is_unchanged() and [buffer.data_ptr() for buffer in self._buffers] == addresses

    def _find_again(self) -> Records | None:
        self._weights, self._snapshots = [table.weight for table in self.tables], None
        pairs: list[tuple[Tensor, Tensor | None]] = [(weight, None) for weight in self._weights]
        optimizer = self.optimizer
        if isinstance(optimizer, Optimizer):
            pairs += [pair for weight in self._weights for pair in optimizer.new_row_state(weight)]
        elif optimizer is not None:
            return None
        if not all(buffer.is_cpu and buffer.is_contiguous() for buffer, _ in pairs):
            return None
        self._buffers, self._values = [buffer for buffer, _ in pairs], [value for _, value in pairs]
        memories = [
            (buffer.data_ptr(), buffer.nbytes // len(buffer), 0 if value is None else value.data_ptr())
            for buffer, value in pairs
        ]
        state, groups = (None, None) if optimizer is None else (optimizer.state, optimizer.param_groups)
        if state is not None and groups is not None:
            containers = [state, groups, *groups, *(state[weight] for weight in self._weights if weight in state)]
            snapshot = ContainerSnapshot(containers, {"lr"})
            self._snapshots = state, groups, snapshot, [buffer.data_ptr() for buffer in self._buffers]
        return np.array(memories, ROW_MEMORY) if memories else NO_MEMORIES
