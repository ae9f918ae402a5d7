"""The assignment of rows to the ids of several features, with one call of compiled code for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..native.loader import package_library
from ..native.structs import ID_FEATURE, ROW_MEMORY, Records, Words
from .id_index import NO_MEMORY, NewRows, new_rows_of
from .ids import Ids
from .row_assignment import RowAssignment

NO_MEMORIES: Records = np.zeros(0, ROW_MEMORY)
"""The argument of `JointBatch.assign` for tables whose rows the caller starts."""


class JointBatch:
    """The ids of several features in a batch, each of which has its own `RowAssignment`, and their rows.

    The rows of a feature are counted from 1. Row 0 is that of missing ids, and row 1 is shared by ids without a row.
    The object can be used for other batches of the same size by writing other values to `ids`.

    Args:
        assignments: The assignment of each feature.
        starts: The number of each feature's shared row in the tables of the model.
        missing_ids: The id of each feature that means that there is none; None if there is always one.
        ids: The ids of each feature.
        rows: Memory for the rows of each feature.

    Attributes:
        ids: The ids of each feature.
        rows: The rows that `find` finds and `assign` replaces.
    """

    def __init__(
        self,
        assignments: Sequence[RowAssignment],
        starts: Sequence[int],
        missing_ids: Sequence[int | None],
        ids: Sequence[Ids],
        rows: Sequence[Words],
    ) -> None:
        self.ids, self.rows, self._assignments = list(ids), list(rows), list(assignments)
        self._features: Records = np.zeros(len(ids), ID_FEATURE)
        self._features["start"], self._features["row_limit"] = starts, [each.row_limit for each in assignments]
        self._features["has_missing"] = [missing is not None for missing in missing_ids]
        self._features["missing_id"] = [missing or 0 for missing in missing_ids]
        self._batches: Records = self._features["batch"]
        self._new = [np.zeros((3, len(each)), np.int64) for each in ids]
        """The new ids of each feature, their counts and their rows."""
        self._batches["n"] = [len(each) for each in ids]
        self._batches["ids"] = [each.ctypes.data for each in self.ids]
        self._batches["rows"] = [each.ctypes.data for each in self.rows]
        for position, name in enumerate(("new_ids", "new_counts", "new_rows")):
            self._batches[name] = [each[position].ctypes.data for each in self._new]
        self._admitted, self._refused = self._features["admitted"], self._batches["refused"]
        self._address = int(self._features.ctypes.data)
        self._indexes: list[tuple[int, int, int]] = []

    def write_table_rows(self, rows: Words, firsts: Sequence[int], lengths: Sequence[int]) -> None:
        """Let `assign` also write the rows of each feature in the tables of the model.

        Args:
            rows: The memory: a line for each event, with entries of all features.
            firsts: The first entry of each feature.
            lengths: The number of ids that each feature has in an event.
        """
        self._table_rows = rows
        self._features["table_rows"] = [rows.ctypes.data + rows.itemsize * first for first in firsts]
        self._features["length"], self._features["stride"] = lengths, rows.shape[1]

    def find(self) -> None:
        """Write the rows of all ids. Nothing else is changed."""
        library = package_library()
        self._update_indexes()
        library.c.cadam_features_find(self._address, len(self._features), library.parallel_for)

    def assign(self, memories: Records) -> None:
        """Give rows to those ids that are to get one, after `find`.

        Args:
            memories: The tables of the model and the state of their optimizer, in which the rows of new ids are
                started: an array of the struct `row_memory`.
        """
        library, memory = package_library().c, (memories.ctypes.data, len(memories))
        for assignment in self._assignments:
            assignment.start_batch()
        full = library.cadam_features_train(self._address, len(self._features), *memory)
        if full == NO_MEMORY:
            raise MemoryError(f"no memory for a batch of {max(map(len, self.ids)):,} ids")
        if full:
            for number in np.flatnonzero(self._features["is_full"]).tolist():
                self._assignments[number].prepare_rows(int(self._batches["new_count"][number]))
                self._update_indexes()
                library.cadam_feature_assign(self._address + number * ID_FEATURE.itemsize, *memory)
        counts = zip(self._assignments, self._admitted.tolist(), self._refused.tolist(), strict=True)
        for assignment, admitted, refused in counts:
            assignment.count(admitted, refused)

    def new_rows(self) -> list[NewRows]:
        """Return the rows that `assign` gave to new ids, for each feature. They are counted from the shared row."""
        counts, first_unused = self._batches["new_count"].tolist(), self._features["first_unused"].tolist()
        return list(map(new_rows_of, self._new, counts, first_unused))

    def _update_indexes(self) -> None:
        """Write the addresses of the indexes to the C structs, which change when an index grows or is loaded."""
        indexes = [assignment.index.addresses() for assignment in self._assignments]
        if indexes != self._indexes:
            self._indexes = indexes
            self._features["index"], self._features["sketch"], self._features["record_count"] = np.array(indexes).T
