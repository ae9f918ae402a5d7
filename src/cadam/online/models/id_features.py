"""The rows of features of the kind `id` in the tables of the ready-made models.

The rows of a feature are one range of the tables, as those of a feature of the kind `hash`. The first row of the range
is for missing ids, the second one is shared by the ids without a row, and the others are given to ids and taken back
(`cadam.tables`). A new id starts with the values of the shared row. So a batch has the same scores before its new ids
get their rows, when it is predicted, and afterwards, when it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...native.structs import Words
from ...tables.attachment import ResetRows, known_reset
from ...tables.ids import Ids
from ...tables.joint_assignment import NO_MEMORIES, JointBatch
from ...tables.row_assignment import Counters, RowAssignment
from ..data.events import Array
from ..data.kind import MISSING_ID, SHARED_ID_ROW, Kind
from .row_memories import RowMemories

_DTYPES = {"id": np.int64, "last_seen": np.int64, "frequency": np.int32, "used_in": np.int32, "sketch": np.int16}
"""The tensors of an index, with the signed types in which checkpoints have them."""
_UNSIGNED = {"id": torch.uint64, "frequency": torch.uint32, "used_in": torch.uint32, "sketch": torch.uint16}
_NUMBERS = ("first_free", "free_count", "time", "step", "sketch_added", "checksum")


class IdFeatures(nn.Module):
    """Replaces ids by rows, and gives rows to new ids in training mode.

    Args:
        kinds: the features of the kind ``id``.
        starts: the first row of each feature in the tables.
        tables: the tables. They are not parameters of this module.
    """

    def __init__(self, kinds: Mapping[str, Kind], starts: Mapping[str, int], tables: Sequence[nn.Embedding]) -> None:
        super().__init__()
        self.starts = {name: starts[name] + SHARED_ID_ROW for name in kinds}
        """The shared row of each feature."""
        self.assignments: dict[str, RowAssignment] = {}
        self.expires_by_time: dict[str, bool] = {}
        for name, kind in kinds.items():
            options = kind.id_options
            assert options is not None
            self.assignments[name] = RowAssignment(
                options.max_rows, options.evict, options.admit, expire_after=options.expire
            )
            self.expires_by_time[name] = options.expires_by_time
        self._missing_ids = [MISSING_ID if kind.optional else None for kind in kinds.values()]
        self._tables = list(tables)
        self._memories = RowMemories(self._tables, None)
        self._reset: ResetRows | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle. A copy is not attached to the optimizer."""
        return {**self.__dict__, "_memories": RowMemories(self._tables, None), "_reset": None}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer reset its state of a row whenever the row is given to another id.

        Raises:
            ValueError: if it is not known how the optimizer keeps the state of a row.
        """
        self._reset, self._memories = known_reset(optimizer), RowMemories(self._tables, optimizer)

    def advance(self, time: float, events: int) -> None:
        """Set the clock of each feature, and take back the rows of expired ids.

        Args:
            time: the time of the stream in seconds, for features whose ids expire by time.
            events: the number of events of the stream so far, for the other features.
        """
        for name, assignment in self.assignments.items():
            if not self.expires_by_time[name]:
                assignment.advance(events)
            elif math.isfinite(time):
                assignment.advance(int(time))

    def counters(self) -> dict[str, Counters]:
        """Return the counters of each feature."""
        return {name: assignment.counters() for name, assignment in self.assignments.items()}

    def metrics(self) -> dict[str, float]:
        """Return the counters, and how many ids would share a row in a hashed table, by name and feature."""
        values: dict[str, float] = {}
        for feature, assignment in self.assignments.items():
            counters = assignment.counters()
            values |= {f"id_{name}/{feature}": value for name, value in counters._asdict().items()}
            values[f"id_collisions_avoided/{feature}"] = expected_collisions(counters.rows, assignment.max_rows)
        return values

    # Rows ---------------------------------------------------------------------------------------------------------

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the features with rows instead of ids. In training mode with gradients, new ids get rows."""
        ids = [features[name].detach().cpu().contiguous().numpy() for name in self.assignments]
        batch = self.new_batch([_flat(each) for each in ids], [np.empty(each.size, np.int64) for each in ids])
        batch.find()
        if self.training and torch.is_grad_enabled():
            self.assign(batch)
        rows = {
            name: torch.from_numpy(batch_rows.reshape(each.shape)).to(features[name].device)
            for name, batch_rows, each in zip(self.assignments, batch.rows, ids, strict=True)
        }
        return {**features, **rows}

    def new_batch(self, ids: Sequence[Ids], rows: Sequence[Words]) -> JointBatch:
        """Return a batch of ids.

        Args:
            ids: the ids of each feature, in the order of `assignments`.
            rows: memory for the rows of each feature, relative to its first row.
        """
        return JointBatch(list(self.assignments.values()), list(self.starts.values()), self._missing_ids, ids, rows)

    def assign(self, batch: JointBatch) -> None:
        """Give rows to those ids of a batch that are to get one. Their rows in the tables start as the shared row."""
        memories = self._memories.find()
        batch.assign(NO_MEMORIES if memories is None else memories)
        if memories is None:
            self._start_rows(batch)

    def _start_rows(self, batch: JointBatch) -> None:
        """Set the rows of new ids to the values of the shared rows, and reset the optimizer's state of these rows."""
        for start, new in zip(self.starts.values(), batch.new_rows(), strict=True):
            for table in self._tables:
                weight = table.weight.detach()
                weight[torch.from_numpy(start + new.rows).to(weight.device)] = weight[start].clone()
                if self._reset is not None and new.is_reused.any():
                    self._reset(table.weight, torch.from_numpy(start + new.rows[new.is_reused]).to(weight.device))

    # State --------------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Write the state as tensors, so that every format of weights can store it."""
        for number, assignment in enumerate(self.assignments.values()):
            state = assignment.state_dict()
            index = state["index"]
            for field, dtype in _DTYPES.items():
                destination[f"{prefix}{number}.{field}"] = torch.from_numpy(index[field].numpy().view(dtype))
            numbers = [*(index[name] for name in _NUMBERS), *state["counts"].values()]
            numbers += [state["has_clock"], state["next_sweep"]]
            destination[f"{prefix}{number}.numbers"] = torch.tensor(numbers, dtype=torch.int64)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        fields = (*_DTYPES, "numbers")
        keys = [f"{prefix}{number}.{field}" for number in range(len(self.assignments)) for field in fields]
        missing_keys += [key for key in keys if key not in state_dict]
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in keys]
        if any(key not in state_dict for key in keys):
            return
        states = []
        for number, (name, assignment) in enumerate(self.assignments.items()):
            try:
                state = _read_state(state_dict, f"{prefix}{number}.", list(assignment.counts))
                states.append((assignment, state, assignment.read_index(state)))
                if states[-1][2].row_count > assignment.row_limit:
                    raise ValueError(f"it has {states[-1][2].row_count} rows, more than max={assignment.max_rows}")
            except (ValueError, TypeError) as error:
                error_msgs.append(f"the ids of {name!r} cannot be loaded: {error}")
        if not error_msgs:
            for assignment, state, index in states:
                assignment.load_state_dict(state, index)


def expected_collisions(ids: int, rows: int) -> float:
    """Return how many of some ids are expected to share a row with another one if they are hashed to some rows."""
    return ids * -math.expm1((ids - 1) * math.log1p(-1 / rows)) if ids > 1 and rows > 1 else 0.0


def _flat(ids: Array) -> Ids:
    return np.ascontiguousarray(ids, np.int64).reshape(-1).view(np.uint64)


def _read_state(state_dict: Mapping[str, Any], prefix: str, counters: Sequence[str]) -> dict[str, Any]:
    """Return the state of a `RowAssignment` from the tensors of a state dict."""
    index: dict[str, Any] = {}
    for field, dtype in _DTYPES.items():
        array = state_dict[prefix + field].cpu().contiguous().numpy()
        if array.dtype != dtype:
            raise ValueError(f"{field} is a tensor of {array.dtype}, not of {np.dtype(dtype)}")
        index[field] = torch.from_numpy(array).view(_UNSIGNED.get(field, torch.int64))
    numbers = state_dict[prefix + "numbers"].tolist()
    if len(numbers) != len(_NUMBERS) + len(counters) + 2:
        raise ValueError(f"it has {len(numbers)} numbers")
    index |= dict(zip(_NUMBERS, numbers[: len(_NUMBERS)], strict=True))
    counts = dict(zip(counters, numbers[len(_NUMBERS) : -2], strict=True))
    return {"index": index, "counts": counts, "has_clock": bool(numbers[-2]), "next_sweep": numbers[-1]}
