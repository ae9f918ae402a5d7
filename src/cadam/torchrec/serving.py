"""Updating a serving copy of the tables with the rows that training has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from .sharders import iter_tables, table_names


@dataclass(frozen=True)
class ChangedRows:
    """Rows of one table with their current values."""

    table: str
    """The name of the table."""
    rows: Tensor
    """Row numbers in the whole table, not in the shard."""
    column: int
    """The first column of `values` in the whole table."""
    values: Tensor
    """The current values, one row per row number."""


def track_changes(model: DistributedModelParallel) -> None:
    """Start to record which rows change, by an update or because managed collision gives them to another id.

    Args:
        model: the sharded model.

    Raises:
        ValueError: two collections have a table of the same name.
    """
    for name, count in Counter(name for names in table_names(model) for name in names).items():
        if count > 1:
            raise ValueError(
                f"{count} collections have a table {name!r}: changes are identified by the name of the table, so give "
                "each table a different name"
            )
    for tables in iter_tables(model):
        tables.start_tracking()


def changed_rows(model: DistributedModelParallel) -> list[ChangedRows]:
    """Return the rows of this rank that changed since the last call, with their current values.

    Every rank returns its own rows; for a replicated table, every rank returns all of them. Rows that `load` restored
    are not included: copy the whole tables after it.

    Args:
        model: the sharded model, after `track_changes`.

    Returns:
        The changed rows of each table that has any.
    """
    changes = []
    for tables in iter_tables(model):
        shards = zip(
            tables.table_names, tables.shard_offsets, tables.split_by_table(tables.flat_weights()), strict=True
        )
        for (name, (first_row, column), values), rows in zip(shards, tables.pop_changes(), strict=True):
            if len(rows):
                changes.append(ChangedRows(name, rows + first_row, column, values.index_select(0, rows)))
    return changes


def apply_changes(tables: Mapping[str, Tensor], changes: Sequence[ChangedRows]) -> None:
    """Write changed rows into a serving copy of the tables.

    Args:
        tables: the whole tables by name. They are changed in place.
        changes: the results of `changed_rows` of all ranks.

    Raises:
        KeyError: the serving copy lacks a table.
    """
    for change in changes:
        if change.table not in tables:
            raise KeyError(f"the serving copy has no table {change.table!r}; it has {sorted(tables)}")
        table = tables[change.table]
        columns = slice(change.column, change.column + change.values.shape[1])
        table[change.rows.to(table.device), columns] = change.values.to(table.device, table.dtype)
