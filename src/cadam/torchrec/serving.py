"""Bring a serving copy of the tables up to date with the rows that training has touched since the last time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from .sharders import table_names, tables_of


@dataclass(frozen=True)
class Changed:
    """Rows of one table, by their numbers in the whole table, with the values they have now from `column` on."""

    table: str
    rows: Tensor
    column: int
    values: Tensor


def track_changes(model: DistributedModelParallel) -> None:
    """Note from now on which rows change: those that are updated, and those that pass to another id."""
    for name, times in Counter(name for names in table_names(model) for name in names).items():
        if times > 1:
            raise ValueError(f"{times} collections have a table {name!r}: changes go by name, so give each its own")
    for tables in tables_of(model):
        tables.note_changes()


def changed_rows(model: DistributedModelParallel) -> list[Changed]:
    """The rows on this rank that changed since the last call, with the values they have now.

    Every rank gives its own, of a replicated table each gives all. What `load` brings is not among them: copy the
    tables anew after it.
    """
    changes = []
    for tables in tables_of(model):
        every = zip(tables.table_names, tables.places, tables.by_table(tables.memory()), strict=True)
        for (name, (row, column), values), rows in zip(every, tables.take_changes(), strict=True):
            if len(rows):
                changes.append(Changed(name, rows + row, column, values.index_select(0, rows)))
    return changes


def apply_(tables: Mapping[str, Tensor], changes: Sequence[Changed]) -> None:
    """Write changes into a serving copy, which has each table whole, by name. Rows not named stay as they are."""
    for change in changes:
        if change.table not in tables:
            raise KeyError(f"the serving copy has no table {change.table!r}; it has {sorted(tables)}")
        table = tables[change.table]
        columns = slice(change.column, change.column + change.values.shape[1])
        table[change.rows.to(table.device), columns] = change.values.to(table.device, table.dtype)
