"""The interface of a source, and helpers that several sources share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..events import Batch, Events, Labels
from ..schema import Schema
from .sample import Sample, SamplingError


@dataclass(frozen=True)
class ColumnNames:
    """The columns that the data of a source has, as far as its beginning shows.

    Args:
        names: The names in the order of their appearance. A name is repeated if several columns have it.
        are_complete: Whether every record has exactly these columns, as in a CSV file. Otherwise records may differ.
    """

    names: list[str]
    are_complete: bool


class Source(ABC):
    """A stream of batches that knows its position.

    A source is pulled: it reads only when the next batch is requested, so a slow learner slows its source down.
    `state_dict` returns the position after the last batch. A source that continues from there with `load_state_dict`
    produces the batches that the first one would have produced next.

    The three abstract methods are enough for `Learner.run`. A source that `open_source` and the command line can open
    also has `from_uri` and an entry in `cadam.sources_and_metrics.SOURCES`. With `sample`, a schema can be inferred
    from its data. With `columns`, missing columns are an error before the run starts.

    Example:
        >>> class Repeated(Source):
        ...     def __init__(self, events, times):
        ...         self.events, self.times, self.position = events, times, 0
        ...
        ...     def __iter__(self):
        ...         while self.position < self.times:
        ...             self.position += 1
        ...             yield self.events
        ...
        ...     def state_dict(self):
        ...         return {"position": self.position}
        ...
        ...     def load_state_dict(self, state):
        ...         self.position = state["position"]
    """

    location: str = "the source"
    """The path, stream or topic that is read, for messages."""

    @abstractmethod
    def __iter__(self) -> Iterator[Events | Labels | Batch | None]:
        """Yield batches from the current position on, and None from time to time while waiting for more data."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""

    @classmethod
    def from_uri(cls, uri: str, schema: Schema, **options: Any) -> Source | None:
        """Open the source that a URI names, or return None if the URI is incomplete.

        Args:
            uri: A URI that begins with one of `schemes`.
            schema: The schema of the events.
            options: The options `batch_size`, `follow` and `patience` of `open_source`.
        """
        return None

    @property
    def share(self) -> float | None:
        """The fraction of the data that was read, None if that is unknown or if the data has no end."""
        return None

    def backlog(self) -> int | None:
        """Return the number of available records that were not read yet, None if that is unknown."""
        return None

    def columns(self) -> ColumnNames | None:
        """Return the names of the columns, None if they cannot be known without consuming data."""
        return None

    def sample(self) -> Sample:
        """Return some of the data for schema inference.

        Raises:
            SamplingError: If no sample can be taken; the message says what to do.
        """
        raise SamplingError(f"no schema can be inferred from {self.location}: write one, and give --schema schema.json")


def is_power_of_two(count: int) -> bool:
    """Whether a repeated problem should be logged again: only its 1st, 2nd, 4th, 8th, ... occurrence is."""
    return count.bit_count() == 1


def check_state(state: Mapping[str, Any], **expected: Any) -> None:
    """Raise ValueError if a saved position belongs to another source."""
    for name, value in expected.items():
        if state.get(name) != value:
            raise ValueError(f"the position is of a source with {name} {state.get(name)!r}, but this one has {value!r}")


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError if a batch size is not positive."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
