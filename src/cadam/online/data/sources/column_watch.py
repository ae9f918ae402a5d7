"""Warnings about columns that the data no longer has, and about new ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from ..events import Batch
from ..schema import Schema

logger = logging.getLogger("cadam.online")

EVENTS_WITHOUT_COLUMN = 1000
"""Records may omit optional fields. A field is reported if this many events in a row do not have it."""


class ColumnWatch:
    """Warns once about each column of the schema that the data does not have, and about each new column.

    Args:
        schema: The schema of the events.
        location: The path, stream or topic that is read, for messages.
    """

    def __init__(self, schema: Schema, location: str) -> None:
        self.schema, self.location = schema, location
        self._reported: set[str] = set()
        self._known: set[str] = set()
        self._events_without: Counter[str] = Counter()

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Check the names of the columns of a file, which all of its records have."""
        missing = [name for name in self.schema.column_names() if name not in names]
        if "id" in self.schema.roles and self.schema.target.column in missing:
            missing.remove(self.schema.target.column)  # The labels may be in other files.
        self._report(missing, f"{where} has")
        new = [name for name in names if self._known and name not in self._known and name not in self._reported]
        if new:
            logger.warning(
                "%s has new columns, which are not used: %s. If one of them is an old column with a new name, rename "
                "it, or start with a new schema",
                *(where, ", ".join(map(repr, new))),
            )
        self._reported.update(new)
        self._known.update(names)

    def check_batch(self, batch: Batch) -> None:
        """Report columns that all recent records lack. The records of a batch may have different columns."""
        count = 0 if batch.events is None else len(batch.events)
        for name in {*self._events_without, *batch.missing_columns} if count else ():
            is_absent = batch.missing_columns.get(name) == count
            self._events_without[name] = self._events_without[name] + count if is_absent else 0
        absent = [name for name, number in self._events_without.items() if number >= EVENTS_WITHOUT_COLUMN]
        self._report(absent, f"{self.location}: the last {EVENTS_WITHOUT_COLUMN:,} events have")

    def _report(self, missing: Sequence[str], subject: str) -> None:
        for name in missing:
            if name in self._reported:
                continue
            self._reported.add(name)
            kind = self.schema.kinds.get(name)
            if name in [column for column, _ in self.schema.roles.values()] or (kind and not kind.optional):
                consequence = "such events are rejected"
            elif kind is None:
                consequence = "such events are predicted but not learned from"
            else:
                consequence = "its values are taken as missing"
            logger.warning("%s no column %r, which the schema has: %s", subject, name, consequence)
