"""What a source is: anything that gives batches and knows its position."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..events import Batch, Events, Labels


class Source(Protocol):
    """Gives batches, one at a time and only when asked: a slow learner slows the source down, not the other way round.

    `state_dict` is the position after the batch given last, and `load_state_dict` goes there, so that a source read
    again from a position gives the same batches. A source that waits for more gives None now and then meanwhile.
    """

    def __iter__(self) -> Iterator[Events | Labels | Batch | None]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def digest(path: str | Path, start: int, end: int) -> str:
    """A hash of some bytes of a file, to know it again by."""
    with open(path, "rb") as file:
        file.seek(max(start, 0))
        return hashlib.sha256(file.read(end - max(start, 0))).hexdigest()


def worth_saying(count: int) -> bool:
    """Of something that happens again and again: is this time one to log? The first, second, fourth, eighth are."""
    return count.bit_count() == 1


def check_state(state: Mapping[str, Any], **expected: Any) -> None:
    """That a position belongs to this source."""
    for name, value in expected.items():
        if state.get(name) != value:
            raise ValueError(f"the position is of a source with {name} {state.get(name)!r}, this one has {value!r}")
