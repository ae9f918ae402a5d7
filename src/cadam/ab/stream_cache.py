"""A source that reads and encodes its events once, for many runs over the same stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..online.data.events import Batch, Events, Labels
from ..online.data.sources import Source

MAX_BYTES = 256 * 2**20
"""The size of the encoded events that a process keeps in memory. Events beyond it are read again for each run."""


class StreamCache(Source):
    """A source that keeps the batches of another source in memory.

    Rejected records are removed: they are reported once, before the first run, and not by each run.

    Args:
        open_source: Opens the other source at its beginning.
        max_bytes: The size of the batches that are kept.
    """

    def __init__(self, open_source: Callable[[], Source], max_bytes: int = MAX_BYTES) -> None:
        self._open_source, self._max_bytes = open_source, max_bytes
        self._restart()

    def _restart(self) -> None:
        self._batches: list[Batch] = []
        self._bytes_left = self._max_bytes
        self._has_ended = False
        self._source = self._open_source()
        self._reader = iter(self._source)

    def __iter__(self) -> Iterator[Events | Labels | Batch | None]:
        index = 0
        while True:
            if index == len(self._batches) and not self._read_batch():
                break
            yield self._batches[index]
            index += 1
        if not self._has_ended:  # memory is full: read the rest again, from where the kept batches end
            source = self._open_source()
            source.load_state_dict(self._state)
            yield from map(_without_rejects, source)

    def _read_batch(self) -> bool:
        """Read one more batch into memory; return False at the end of the stream or if memory is full."""
        if self._bytes_left <= 0:
            return False
        try:
            batch = _without_rejects(next(self._reader))
        except StopIteration:
            self._has_ended = True
            return False
        except BaseException:
            self._restart()  # an iterator that has raised only reports its end from then on
            raise
        self._batches.append(batch)
        self._bytes_left -= _count_bytes(batch)
        if self._bytes_left <= 0:
            self._state = self._source.state_dict()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Raise NotImplementedError: runs of an A/B start at the beginning and save no checkpoints."""
        raise NotImplementedError("a run of an A/B saves no checkpoints")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise NotImplementedError: runs of an A/B start at the beginning."""
        raise NotImplementedError("a run of an A/B starts at the beginning of its stream")


def _without_rejects(batch: Events | Labels | Batch | None) -> Batch:
    assert isinstance(batch, Batch), "sources that are opened without patience yield batches"
    return replace(batch, rejected=[])


def _count_bytes(batch: Batch) -> int:
    events = 0 if batch.events is None else sum(column.nbytes for column in batch.events.columns().values())
    labels = 0 if batch.labels is None else batch.labels.ids.nbytes + batch.labels.labels.nbytes
    return events + labels
