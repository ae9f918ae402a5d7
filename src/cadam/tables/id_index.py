"""The index of a table from ids to rows, in compiled code, with the records by which rows are expired and evicted.

Memory of an id: its record has 24 bytes. The hash table has 8 bytes for each slot, and between 3/8 and 3/4 of the slots
are occupied while the table grows, so that an id takes 11 to 21 bytes there. The hash table doubles at once; no id is
hashed again, and the slots are read and written from front to back.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..native.loader import package_library
from ..native.structs import ID_BATCH, ID_INDEX, ID_SKETCH, TABLE_ROW, Records, Words
from .ids import Ids

SHARED_ROW = 0
"""The row that all ids without a separate row share."""
MAX_ROWS = 1 << 31
"""The largest number of rows that an index can have."""
BYTES_PER_ID = TABLE_ROW.itemsize + 2 * 8
"""A typical number of bytes that the index takes for an id: its record, and two slots."""
SKETCH_DEPTH = 4
"""Counters of an id in the sketch."""
SIGHTINGS_PER_COUNTER = 1
"""The counters are halved after this number of sightings for each counter of a line of the sketch.

If most sightings are of different ids, a new id then finds all its counters in use in 4% of the cases on average, and
in 16% at the end of such a period.
"""
_MIN_BITS = 4
NO_MEMORY = -2
"""The result of compiled functions that found no memory."""
_FIELDS = ("id", "last_seen", "frequency", "used_in")


@dataclass(frozen=True)
class NewRows:
    """The rows that a batch gave to new ids.

    Attributes:
        ids: The ids.
        rows: Their rows.
        is_reused: Whether each row belonged to another id before.
    """

    ids: Ids
    rows: Words
    is_reused: np.ndarray[Any, np.dtype[np.bool_]]


class IdIndex:
    """Finds and assigns the rows of ids.

    Rows are numbered from 1; row 0 is shared by the ids that have no row. Everything is a function of the sequence of
    calls, for any number of threads.

    Args:
        admit_after: An id gets a row when it was seen this often. With 1 there is no sketch.
        sketch_width: Counters in a line of the sketch, a power of two.

    Raises:
        UnavailableError: If there is no compiled library.
    """

    def __init__(self, admit_after: int = 1, sketch_width: int = 1 << 20) -> None:
        package_library()
        self._addresses: tuple[int, int] | None = None
        """The addresses of the C structs of index and sketch; None if the structs have to be updated."""
        self._rows: Records = np.zeros(2, TABLE_ROW)
        self._slots = np.zeros(1 << _MIN_BITS, np.uint64)
        self._index: Records = np.zeros((), ID_INDEX)
        self._index["row_count"] = 1
        self._sketch: Records = np.zeros((), ID_SKETCH)
        self._counters = np.zeros((SKETCH_DEPTH, sketch_width) if admit_after > 1 else (SKETCH_DEPTH, 0), np.uint16)
        self._sketch["bits"], self._sketch["threshold"] = sketch_width.bit_length() - 1, admit_after
        self._sketch["window"] = SIGHTINGS_PER_COUNTER * sketch_width

    @property
    def time(self) -> int:
        """The stream time of the present batch."""
        return int(self._index["time"])

    @time.setter
    def time(self, time: int) -> None:
        self._index["time"] = time

    def finish_step(self) -> None:
        """Record that the optimizer took its step, so that the rows it needed may be released."""
        self._index["step"] += 1

    @property
    def row_count(self) -> int:
        """The number of rows that were ever used, including the shared row."""
        return int(self._index["row_count"])

    @property
    def free_count(self) -> int:
        """The number of rows that were released and not used again."""
        return int(self._index["free_count"])

    def __len__(self) -> int:
        """Return the number of ids."""
        return self.row_count - 1 - self.free_count

    @property
    def nbytes(self) -> int:
        """The memory of the index and the sketch in bytes."""
        return self._rows.nbytes + self._slots.nbytes + self._counters.nbytes

    # Lookups -------------------------------------------------------------------------------------------------------

    def find(self, ids: Ids) -> Words:
        """Return the rows of ids, and the shared row for those that have none. Nothing is changed."""
        return self._find(ids, is_training=False)[0]

    def find_for_training(self, ids: Ids) -> Batch:
        """Look ids up and record that their rows are used. Ids without a row remain for `Batch.try_assign`."""
        rows, misses = self._find(ids, is_training=True)
        return Batch(self, ids, rows, misses)

    def _find(self, ids: Ids, is_training: bool) -> tuple[Words, int]:
        library, rows = package_library(), np.empty(len(ids), np.int64)
        misses = library.c.cadam_index_find(
            self._address(), ids.ctypes.data, len(ids), rows.ctypes.data, is_training, library.parallel_for
        )
        return rows, int(misses)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy, without the addresses of the arrays."""
        return {**self.__dict__, "_addresses": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy. An array in the memory of a pickle is copied, so that it can grow."""
        for name, value in state.items():
            is_borrowed = isinstance(value, np.ndarray) and not value.flags.owndata
            setattr(self, name, value.copy() if is_borrowed else value)

    def _address(self) -> int:
        """Return the address of the C struct."""
        return (self._addresses or self._set_addresses())[0]

    def _sketch_address(self) -> int:
        return (self._addresses or self._set_addresses())[1]

    def addresses(self) -> tuple[int, int, int]:
        """Return the addresses of the C structs of index and sketch, 0 if there is none, and the number of records."""
        return *(self._addresses or self._set_addresses()), len(self._rows)

    def _set_addresses(self) -> tuple[int, int]:
        """Write the addresses of the arrays to the C structs, and return those of the structs."""
        self._index["slots"], self._index["rows"] = self._slots.ctypes.data, self._rows.ctypes.data
        self._index["bits"] = len(self._slots).bit_length() - 1
        self._sketch["counters"] = self._counters.ctypes.data
        self._addresses = int(self._index.ctypes.data), int(self._sketch.ctypes.data) if self._counters.size else 0
        return self._addresses

    def items(self) -> tuple[Ids, Words]:
        """Return all ids and their rows, ordered by row."""
        rows = np.flatnonzero(self._rows["frequency"][: self.row_count])
        return self._rows["id"][rows].copy(), rows

    # Released rows -------------------------------------------------------------------------------------------------

    def expire(self, cutoff: int) -> int:
        """Release the rows of ids that were last seen before a time, and return their number."""
        return int(package_library().c.cadam_index_expire(self._address(), cutoff))

    def evict(self, count: int, *, by_frequency: bool) -> int:
        """Release the rows of ids that were seen least recently, or least often.

        Rows that the next optimizer step needs are not released.

        Args:
            count: The number of rows to release.
            by_frequency: Whether the ids that were seen least often are evicted.

        Returns:
            The number of rows that were released.
        """
        evicted = int(package_library().c.cadam_index_evict(self._address(), count, by_frequency))
        if evicted == NO_MEMORY:
            raise MemoryError(f"no memory to choose {count:,} rows to evict; nothing was changed")
        return evicted

    # Memory --------------------------------------------------------------------------------------------------------

    def reserve(self, new_ids: int, row_limit: int) -> None:
        """Make room for more ids. Large records are moved by remapping their pages.

        Args:
            new_ids: The number of ids that will be added.
            row_limit: The number of rows that will never be exceeded, so that no more are reserved in advance.
        """
        self._addresses = None
        rows = max(self.row_count, min(row_limit, self.row_count + new_ids - self.free_count))
        ids = min(len(self) + new_ids, rows - 1)
        if rows > len(self._rows):
            # Nothing else refers to the memory of the records.
            self._rows.resize(max(rows, min(row_limit, len(self._rows) * 3 // 2)), refcheck=False)
        if 4 * ids <= 3 * len(self._slots):
            return
        slots = np.zeros(_slots_for(ids), np.uint64)
        bits = [len(each).bit_length() - 1 for each in (self._slots, slots)]
        package_library().c.cadam_index_rehash(self._slots.ctypes.data, bits[0], slots.ctypes.data, bits[1])
        self._slots = slots

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the records, the sketch and all numbers, with a checksum. Slots are not part of it."""
        used = self._rows[: self.row_count]
        tensors = {name: torch.from_numpy(used[name].copy()) for name in _FIELDS}
        tensors["sketch"] = torch.from_numpy(self._counters.copy())
        numbers = {name: int(self._index[name]) for name in ("first_free", "free_count", "time", "step")}
        numbers["sketch_added"] = int(self._sketch["added"])
        return {**tensors, **numbers, "checksum": _checksum(tensors, numbers)}

    def loaded(self, state: Mapping[str, Any]) -> IdIndex:
        """Return an index with the options of this one and the content of a state dict.

        Raises:
            ValueError: If the state dict is incomplete, damaged, or of a table with another sketch.
        """
        tensors, numbers = _parts(state)
        if tensors["sketch"].shape != self._counters.shape:
            raise ValueError(
                f"its sketch has shape {tuple(tensors['sketch'].shape)}, and this table needs {self._counters.shape}: "
                "admit_after and sketch_width must be as they were"
            )
        other = copy.deepcopy(self)
        count = len(tensors["id"])
        other._rows = np.zeros(max(2, count), TABLE_ROW)
        for name in _FIELDS:
            other._rows[name][:count] = tensors[name].numpy()
        other._counters = tensors["sketch"].numpy().copy()
        other._sketch["added"] = numbers.pop("sketch_added")
        other._index["row_count"] = count
        for name, number in numbers.items():
            other._index[name] = number
        other._slots, other._addresses = np.zeros(_slots_for(len(other)), np.uint64), None
        row = package_library().c.cadam_index_build(other._address())
        if row != -1:
            raise ValueError(f"its records contradict each other at row {row}: the index is damaged")
        return other


class Batch:
    """A batch of ids that was looked up for training.

    Attributes:
        rows: The row of each id, negative for ids whose row is not decided yet.
        misses: The number of ids without a row at first.
        refused: The number of ids that have the shared row.
        new_count: The number of distinct ids that are to get a row.
    """

    def __init__(self, index: IdIndex, ids: Ids, rows: Words, misses: int) -> None:
        self.rows, self.misses, self.refused, self.new_count = rows, misses, 0, 0
        self._index, self._ids = index, ids

    def try_assign(self, row_limit: int) -> NewRows | None:
        """Decide which ids without a row get one, and give rows to them if nothing has to be evicted or allocated.

        Args:
            row_limit: The number of rows that may be used, including the shared row.

        Returns:
            The new rows, or None if there is no room for them. Then `assign` must be called.
        """
        index, misses = self._index, self.misses
        if not misses:
            return NO_NEW_ROWS
        record = self._record = np.zeros((), ID_BATCH)
        self._new = np.empty((3, misses), np.int64)
        address = self._new.ctypes.data
        record["n"], record["misses"] = len(self._ids), misses
        record["ids"], record["rows"] = self._ids.ctypes.data, self.rows.ctypes.data
        record["new_ids"], record["new_counts"] = address, address + 8 * misses
        record["new_rows"] = address + 16 * misses
        first_unused = index.row_count
        result = package_library().c.cadam_index_train(
            index._address(), index._sketch_address(), record.ctypes.data, row_limit, len(index._rows)
        )
        if result == NO_MEMORY:
            raise MemoryError(f"no memory for a batch of {len(self._ids):,} ids")
        self.new_count = int(record["new_count"])
        return None if result else self._new_rows(first_unused)

    def assign(self, row_limit: int) -> NewRows:
        """Give rows to the new ids. Those for which there is none get the shared row.

        Args:
            row_limit: The number of rows of the table, including the shared row.
        """
        index, first_unused = self._index, self._index.row_count
        index.reserve(self.new_count, row_limit)
        package_library().c.cadam_index_assign(index._address(), self._record.ctypes.data, row_limit)
        return self._new_rows(first_unused)

    def _new_rows(self, first_unused: int) -> NewRows:
        self.refused = int(self._record["refused"])
        return new_rows_of(self._new, self.new_count, first_unused)


def new_rows_of(new: Words, count: int, first_unused: int) -> NewRows:
    """Return the rows that a batch gave to new ids.

    Args:
        new: What the compiled code has written: the new ids, their counts, and their rows.
        count: The number of new ids.
        first_unused: The number of rows that were ever used before the batch.
    """
    ids, rows = new[0, :count].view(np.uint64), new[2, :count]
    has_row = rows != SHARED_ROW
    if not has_row.all():
        ids, rows = ids[has_row], rows[has_row]
    return NewRows(ids, rows, rows < first_unused)


NO_NEW_ROWS = NewRows(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, bool))
"""The result of a batch whose ids all have a row."""


def _slots_for(ids: int) -> int:
    """Return the number of slots for a number of ids: a power of two, of which at most 3/4 are occupied."""
    slots = 1 << _MIN_BITS
    while 3 * slots < 4 * ids:
        slots *= 2
    return slots


def _checksum(tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> int:
    checksum = zlib.crc32(repr(sorted(numbers.items())).encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].numpy().data, checksum)
    return checksum


def _parts(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors and the numbers of a state dict, which are checked against its checksum."""
    dtypes = {"id": torch.uint64, "last_seen": torch.int64, "frequency": torch.uint32, "used_in": torch.uint32}
    dtypes["sketch"] = torch.uint16
    names = ("first_free", "free_count", "time", "step", "sketch_added")
    missing = [name for name in (*dtypes, *names, "checksum") if name not in state]
    if missing:
        raise ValueError(f"its index has no {', '.join(missing)}")
    tensors = {name: state[name] for name in dtypes}
    for name, dtype in dtypes.items():
        if not isinstance(tensors[name], Tensor) or tensors[name].dtype != dtype:
            raise ValueError(f"{name} of its index is not a tensor of {dtype}")
        tensors[name] = tensors[name].cpu().contiguous()
        if name != "sketch" and (tensors[name].dim() != 1 or len(tensors[name]) != len(tensors["id"])):
            raise ValueError(f"{name} of its index has shape {tuple(tensors[name].shape)}; ids {len(tensors['id'])}")
    if not len(tensors["id"]):
        raise ValueError("its index has no shared row")
    if not all(isinstance(state[name], int) for name in names):
        raise ValueError(f"one of {', '.join(names)} of its index is not an integer")
    numbers = {name: int(state[name]) for name in names}
    if _checksum(tensors, numbers) != state["checksum"]:
        raise ValueError("the checksum of its index does not fit: the index is damaged")
    return tensors, numbers
