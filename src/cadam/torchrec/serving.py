"""Bring a serving copy of the tables up to date with the rows that training has touched since the last time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig


@dataclass(frozen=True)
class Changed:
    """Rows of one table, by their numbers in the whole table, with the values they have now from `column` on."""

    table: str
    rows: Tensor
    column: int
    values: Tensor


def track_changes(model: DistributedModelParallel) -> None:
    """Note from now on which rows are looked up; those are the ones that can change."""
    model.init_torchrec_delta_tracker(DeltaTrackerConfig())


def changed_rows(model: DistributedModelParallel) -> list[Changed]:
    """The rows on this rank that were looked up since the last call.

    Every rank gives its own; a replicated table's changes are whole only with those of all ranks together. Call it
    between steps, when no lookup waits for its backward.
    """
    tracker = model.get_delta_tracker()
    if tracker is None:
        raise RuntimeError("nothing was tracked: call track_changes(model) before training")
    state, changes = model.state_dict(), []
    for name, rows in tracker.get_unique_ids().items():
        value = state[f"{name}.weight"]
        parts = [(value, (0, 0))]
        if hasattr(value, "local_shards"):
            parts = [(shard.tensor, shard.metadata.shard_offsets) for shard in value.local_shards()]
        for tensor, (first_row, first_column) in parts:
            values = tensor.detach().index_select(0, rows)
            changes.append(Changed(name.split(".")[-1], rows + first_row, first_column, values))
    return changes


def apply_(tables: Mapping[str, Tensor], changes: Sequence[Changed]) -> None:
    """Write changes into a serving copy, which has each table whole, by name. Rows not named stay as they are."""
    for change in changes:
        if change.table not in tables:
            raise KeyError(f"the serving copy has no table {change.table!r}; it has {sorted(tables)}")
        table = tables[change.table]
        columns = slice(change.column, change.column + change.values.shape[1])
        table[change.rows.to(table.device), columns] = change.values.to(table.device, table.dtype)
