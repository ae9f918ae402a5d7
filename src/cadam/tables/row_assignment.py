"""The assignment of rows to ids: admission, expiry and eviction, without the values of the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..native.structs import Words
from .id_index import MAX_ROWS, IdIndex, NewRows
from .ids import Ids

EVICTION = ("lru", "lfu", "none")
"""The ids that make room if a table is full: least recently used, least frequently used, or none."""
EVICTED_SHARE = 32
"""An eviction removes 1/32 of the rows, or more if more are needed, because it scans all records."""
SWEEPS = 32
"""Expired ids are searched for at most this many times per period of `expire_after`."""
_TIME_LIMIT = 1 << 62
"""Times and periods are smaller, so that their differences fit into 64 bits."""


class Counters(NamedTuple):
    """The history of a table since it was created, as counters, which are part of its state dict."""

    rows: int
    """The number of ids that have a row now."""
    admitted: int
    """The number of times that an id got a row."""
    evicted: int
    """The number of times that an id lost its row because the table was full."""
    expired: int
    """The number of times that an id lost its row because it was not seen for long."""
    refused: int
    """The number of lookups in training of ids that have no row yet, and so use row 0, the shared row."""


class RowAssignment:
    """Assigns rows to ids within a limit.

    Everything depends on the ids, their order and the times alone, so that a run that is repeated or resumed assigns
    the same rows.

    Args:
        max_rows: The largest number of ids that have a row at the same time; None for no limit.
        evict: One of `EVICTION`.
        admit_after: The number of sightings after which an id gets a row.
        sketch_width: Counters in each line of the sketch, a power of two; None for a width that fits the limit.
        expire_after: The time without a sighting after which an id loses its row; None: never.

    Raises:
        ValueError: If an argument is out of range.
        UnavailableError: If there is no compiled library.
    """

    def __init__(
        self,
        max_rows: int | None = None,
        evict: str = "lru",
        admit_after: int = 1,
        sketch_width: int | None = None,
        expire_after: int | None = None,
    ) -> None:
        limits = {"max_rows": max_rows, "expire_after": expire_after}
        check_positive(admit_after=admit_after, **{name: n for name, n in limits.items() if n is not None})
        if evict not in EVICTION:
            raise ValueError(f"evict must be one of {', '.join(EVICTION)}, got {evict!r}")
        if admit_after >= 1 << 16:
            raise ValueError(
                f"admit_after must be at most 65535, which a counter of the sketch holds, got {admit_after}"
            )
        if sketch_width is not None and (sketch_width < 2 or sketch_width & (sketch_width - 1)):
            raise ValueError(f"sketch_width must be a power of two, got {sketch_width!r}")
        if sketch_width is not None and sketch_width < admit_after > 1:
            raise ValueError(
                f"sketch_width={sketch_width} is too small for admit_after={admit_after}: all counters are halved "
                f"after {sketch_width} sightings of ids without a row, so most ids would never get a row. Give a "
                "larger sketch_width, or none"
            )
        if expire_after is not None and expire_after >= _TIME_LIMIT:
            raise ValueError(f"expire_after must fit into 62 bits, got {expire_after}; None is never")
        self.max_rows, self.evict, self.expire_after = min(max_rows or MAX_ROWS, MAX_ROWS), evict, expire_after
        if sketch_width is None:
            bits = 20 if self.max_rows == MAX_ROWS else self.max_rows.bit_length()
            sketch_width = 1 << max(10, bits, admit_after.bit_length())
        self.index = IdIndex(admit_after, sketch_width)
        self.counts = dict.fromkeys(("admitted", "evicted", "expired", "refused"), 0)
        self.has_clock, self.next_sweep = False, 0

    @property
    def row_limit(self) -> int:
        """The largest number of rows, including the shared row."""
        return self.max_rows + 1

    def counters(self) -> Counters:
        """Return how many rows are in use, and how many ids were admitted, evicted, expired and refused."""
        return Counters(len(self.index), **self.counts)

    # Rows ----------------------------------------------------------------------------------------------------------

    def assign(self, ids: Ids, capacity: int, prepare: Callable[[int], None]) -> tuple[Words, NewRows]:
        """Return the rows of the ids of a training batch, after assigning rows to newly admitted ids.

        Args:
            ids: The ids of a batch.
            capacity: The number of rows that the table has now, including the shared row.
            prepare: Called with the number of rows that are needed, if these are more than `capacity`, before any is
                assigned.

        Returns:
            The row of each id, and the rows that were given to new ids.
        """
        self.start_batch()
        batch = self.index.find_for_training(ids)
        new = batch.try_assign(min(capacity, self.row_limit))
        if new is None:
            prepare(self._make_room(batch.new_count))
            new = batch.assign(self.row_limit)
        self.count(len(new.rows), batch.refused)
        return batch.rows, new

    def start_batch(self) -> None:
        """Move the clock by one if nothing else moves it."""
        if not self.has_clock:
            self._move_clock(self.index.time + 1)

    def prepare_rows(self, needed: int) -> None:
        """Evict ids as far as the limit requires, and let the index have room for a number of new ones."""
        self._make_room(needed)
        self.index.reserve(needed, self.row_limit)

    def count(self, admitted: int, refused: int) -> None:
        """Add the ids that got a row in a batch, and those that share one, to the counters."""
        self.counts["admitted"] += admitted
        self.counts["refused"] += refused

    def _make_room(self, needed: int) -> int:
        """Evict ids if the limit requires it, and return the number of rows that a table then needs."""
        index = self.index
        lacking = needed - index.free_count - (self.row_limit - index.row_count)
        if lacking > 0 and self.evict != "none":
            count = max(lacking, self.max_rows // EVICTED_SHARE)
            self.counts["evicted"] += index.evict(count, by_frequency=self.evict == "lfu")
        return min(index.row_count + max(0, needed - index.free_count), self.row_limit)

    # Time ----------------------------------------------------------------------------------------------------------

    def advance(self, time: int) -> None:
        """Set the stream time of the lookups that follow, and release the rows of expired ids.

        Without this method, time is the number of calls of `assign`.

        Args:
            time: The time of the events, in any unit, such as seconds. If it is earlier than the present time, which
                happens in streams that are not sorted, nothing changes.

        Raises:
            TypeError: If the time is not an integer.
            RuntimeError: If ids were seen before the first call, so that their times are numbers of lookups.
        """
        if not isinstance(time, int | np.integer) or isinstance(time, bool):
            raise TypeError(f"time must be an integer, got {time!r}")
        if not -_TIME_LIMIT < time < _TIME_LIMIT:
            raise ValueError(f"time must fit into 62 bits, got {time}")
        if not self.has_clock and self.index.time:
            raise RuntimeError("call advance before the first lookup in training mode, or never")
        is_first, self.has_clock = not self.has_clock, True
        if is_first or time > self.index.time:
            self._move_clock(int(time), is_first)

    def _move_clock(self, time: int, is_first: bool = False) -> None:
        self.index.time = time
        if self.expire_after is None:
            return
        if is_first or time >= self.next_sweep:
            self.counts["expired"] += self.index.expire(time - self.expire_after)
            self.next_sweep = time + max(1, self.expire_after // SWEEPS)

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the index, the clock and the counters."""
        return {
            "index": self.index.state_dict(),
            "counts": dict(self.counts),
            "has_clock": self.has_clock,
            "next_sweep": self.next_sweep,
        }

    def read_index(self, state: Mapping[str, Any]) -> IdIndex:
        """Check a state dict and return its index, for `load_state_dict`.

        Raises:
            ValueError: If the state is incomplete or damaged, or if its sketch has another size.
        """
        if not isinstance(state, Mapping) or not {"index", "counts", "has_clock", "next_sweep"} <= state.keys():
            raise ValueError("it has no index, so it is not the state dict of a DynamicEmbedding")
        counts = state["counts"] if isinstance(state["counts"], Mapping) else {}
        numbers = [*map(counts.get, self.counts), state["next_sweep"]]
        if not isinstance(state["index"], Mapping) or not all(isinstance(number, int) for number in numbers):
            raise ValueError("its index, a counter or its clock is damaged")
        return self.index.loaded(state["index"])

    def load_state_dict(self, state: Mapping[str, Any], index: IdIndex | None = None) -> None:
        """Continue from a state.

        Args:
            state: The result of `state_dict`.
            index: The result of `read_index`, if the caller has checked the state before.
        """
        self.index = index or self.read_index(state)
        self.counts = {name: int(state["counts"][name]) for name in self.counts}
        self.has_clock, self.next_sweep = bool(state["has_clock"]), int(state["next_sweep"])


def check_positive(**numbers: Any) -> None:
    """Raise ValueError if a number is not a positive integer."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
