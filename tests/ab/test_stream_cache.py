"""A stream that is read once gives every run the batches of the source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadam.ab.stream_cache import StreamCache
from cadam.online.data.events import Batch
from cadam.online.data.schema import Schema
from cadam.online.data.sources import Source, open_source


def open_clicks(folder: Path) -> Source:
    schema = Schema(**json.loads((folder / "schema.json").read_text()))
    return open_source(f"parquet:{folder / 'clicks.parquet'}", schema, batch_size=50, patience=None)


def columns(batches: Any) -> list[dict[str, np.ndarray]]:
    return [batch.events.columns() for batch in batches]


@pytest.mark.parametrize("max_bytes", [1, 20_000, 10**9])
def test_every_iteration_gives_the_batches_of_the_source(folder: Path, max_bytes: int) -> None:
    expected = columns(open_clicks(folder))
    stream = StreamCache(lambda: open_clicks(folder), max_bytes)
    partial = iter(stream)
    first = [next(partial) for _ in range(7)]  # a tuning run stops early
    assert len(columns(first)) == 7
    for _ in range(2):
        batches = columns(stream)
        assert len(batches) == len(expected) == 60
        for batch, other in zip(batches, expected, strict=True):
            assert all(np.array_equal(batch[name], other[name]) for name in other)


def test_the_source_is_read_once_if_it_fits_into_memory(folder: Path) -> None:
    opened = []

    def open_source() -> Source:
        opened.append(1)
        return open_clicks(folder)

    stream = StreamCache(open_source)
    assert len(list(stream)) == len(list(stream)) == 60
    assert len(opened) == 1


def test_after_an_error_the_stream_is_read_from_its_beginning() -> None:
    class Unreliable(Source):
        failures = 1

        def __iter__(self) -> Iterator[Batch]:
            yield Batch()
            if Unreliable.failures:
                Unreliable.failures -= 1
                raise OSError("broken")
            yield Batch()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    stream = StreamCache(Unreliable)
    with pytest.raises(OSError, match="broken"):
        list(stream)
    assert len(list(stream)) == 2
