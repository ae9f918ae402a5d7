"""Items that a second thread computes: their order, errors, and the end of the thread."""

from __future__ import annotations

import errno
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam.online import Batch, ParquetSource, Schema
from cadam.online.data.sources.lines import BATCHES_PER_CHUNK, Format, Line, LinesSource
from cadam.online.data.sources.parquet import CHUNK_BATCHES, OLD_CHUNK_BATCHES
from cadam.online.data.sources.prefetch import prefetch

SCHEMA = Schema({"x": "number"}, label="y")


class Items:
    """Counts up to `count`, then raises `error` if there is one, and notes what happened."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.computed, self.threads, self.is_closed = 0, set[threading.Thread](), False
        self.has_computed = threading.Semaphore(0)

    def compute(self) -> Generator[int]:
        try:
            for number in range(self.count):
                self.threads.add(threading.current_thread())
                self.computed += 1
                self.has_computed.release()
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True

    def check_ended(self) -> None:
        assert self.is_closed
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.mark.parametrize("count", [0, 1, 2, 50])
@pytest.mark.parametrize("ahead", [1, 3])
def test_items_come_in_order_from_another_thread(count: int, ahead: int) -> None:
    items = Items(count)
    assert list(prefetch(items.compute(), ahead)) == list(range(count))
    assert threading.current_thread() not in items.threads
    items.check_ended()


def test_the_thread_is_ahead_of_the_consumer_by_a_fixed_number_of_items() -> None:
    items = Items(100)
    iterator = iter(prefetch(items.compute(), ahead=2))
    assert next(iterator) == 0
    for _ in range(4):  # the item that was consumed, two that wait, and one that the thread wants to add
        assert items.has_computed.acquire(timeout=60)
    assert not items.has_computed.acquire(timeout=0.05)
    assert items.computed == 4
    iterator.close()
    items.check_ended()


def test_an_error_is_raised_after_the_items_before_it() -> None:
    items = Items(3, OSError("unreadable"))
    seen = []
    with pytest.raises(OSError, match="unreadable"):  # noqa: PT012
        for item in prefetch(items.compute()):
            seen.append(item)
    assert seen == [0, 1, 2]
    items.check_ended()


def test_an_error_of_the_consumer_ends_the_thread() -> None:
    items = Items(1000)

    def consume() -> None:
        for item in prefetch(items.compute()):
            if item == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    items.check_ended()
    assert items.computed < 10


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_the_items_are_computed_by_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    items = Items(5)
    assert list(prefetch(items.compute())) == list(range(5))
    assert items.threads == {threading.current_thread()}
    assert items.is_closed


def test_a_file_is_read_although_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 2 * 4 * CHUNK_BATCHES + 3
    pq.write_table(pa.table({"x": np.arange(rows, dtype=float), "y": np.zeros(rows)}), tmp_path / "x.parquet")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        batches = list(ParquetSource(tmp_path / "x.parquet", SCHEMA, batch_size=4))
    values = [batch.events.features["x"] for batch in batches if isinstance(batch, Batch) and batch.events is not None]
    np.testing.assert_array_equal(np.concatenate(values), np.arange(rows))


def test_a_file_is_not_rejected_because_too_many_files_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"x": np.arange(9.0), "y": np.zeros(9)}), tmp_path / "x.parquet")
    source = ParquetSource(tmp_path / "x.parquet", SCHEMA, batch_size=4)

    def open_too_many(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetFile", open_too_many)
        with pytest.raises(OSError, match="Too many open files"):
            next(iter(source))
    batches = [batch for batch in source if isinstance(batch, Batch)]
    assert [0 if batch.events is None else len(batch.events) for batch in batches] == [4, 4, 1]
    assert not any(batch.rejected for batch in batches)


def test_the_position_is_that_of_the_batches_that_were_consumed(tmp_path: Path) -> None:
    """A second thread has read the next chunk, but a source that continues from the position does not skip it."""
    rows = 2 * 4 * CHUNK_BATCHES + 3
    pq.write_table(pa.table({"x": np.arange(rows, dtype=float), "y": np.zeros(rows)}), tmp_path / "x.parquet")
    for consumed in (0, 1, CHUNK_BATCHES - 1, CHUNK_BATCHES, CHUNK_BATCHES + 1, 2 * CHUNK_BATCHES):
        source = ParquetSource(tmp_path / "x.parquet", SCHEMA, batch_size=4)
        batches = iter(source)
        for _ in range(consumed):
            next(batches)
        resumed = ParquetSource(tmp_path / "x.parquet", SCHEMA, batch_size=4)
        resumed.load_state_dict(source.state_dict())
        rest = [batch for batch in resumed if isinstance(batch, Batch)]
        values = np.concatenate([batch.events.features["x"] for batch in rest if batch.events is not None])
        np.testing.assert_array_equal(values, np.arange(4 * consumed, rows))
        batches.close()  # type: ignore[attr-defined]
        again = next(iter(source))  # this source continues at its position, too
        assert isinstance(again, Batch)
        assert again.events is not None
        assert again.events.features["x"][0] == 4 * consumed
    assert not any(thread.name == "cadam prefetch" for thread in threading.enumerate())


def test_large_batches_are_read_in_small_chunks_from_positions_of_any_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of an old version does not name the number of batches of a chunk."""
    monkeypatch.setattr("cadam.online.data.sources.parquet.CHUNK_BATCHES", OLD_CHUNK_BATCHES)
    rows, sizes = 4 * OLD_CHUNK_BATCHES + 6, list[int]()
    convert = ParquetSource._convert

    def recording(self: ParquetSource, table: pa.Table, *others: Any) -> list[Batch]:
        sizes.append(table.num_rows)
        return convert(self, table, *others)

    pq.write_table(pa.table({"x": np.arange(rows, dtype=float), "y": np.zeros(rows)}), tmp_path / "x.parquet")
    for consumed in (*range(4), *range(OLD_CHUNK_BATCHES - 1, OLD_CHUNK_BATCHES + 3)):
        source = ParquetSource(tmp_path / "x.parquet", SCHEMA, batch_size=4)
        batches = iter(source)
        for _ in range(consumed):
            next(batches)
        state = source.state_dict()
        batches.close()  # type: ignore[attr-defined]
        assert state.pop("chunk_batches") == OLD_CHUNK_BATCHES
        with monkeypatch.context() as patch:
            patch.setattr("cadam.online.data.sources.parquet.MAX_CHUNK_VALUES", 9)
            patch.setattr(ParquetSource, "_convert", recording)
            resumed = ParquetSource(tmp_path / "x.parquet", SCHEMA, batch_size=4)
            resumed.load_state_dict(state)
            rest = [batch.events for batch in resumed if isinstance(batch, Batch) and batch.events is not None]
        values = np.concatenate([np.empty(0), *(events.features["x"] for events in rest)])
        np.testing.assert_array_equal(values, np.arange(min(4 * consumed, rows), rows))
    assert max(sizes) == 8


def test_lines_of_large_batches_are_handed_over_in_small_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.csv").write_text("x,y\n" + "1,0\n" * 100)
    monkeypatch.setattr("cadam.online.data.sources.lines.MAX_CHUNK_LINES", 20)
    source = LinesSource(tmp_path / "x.csv", SCHEMA, "csv", batch_size=8)
    assert [len(chunk) for chunk in source._read_chunks()] == [2] * 6 + [1]


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_lines_are_read_ahead_and_resumed_at_the_position_of_the_consumer(tmp_path: Path, format: Format) -> None:
    rows = 2 * 4 * BATCHES_PER_CHUNK + 3
    lines = [f"{i},0" for i in range(rows)] if format == "csv" else [f'{{"x": {i}, "y": 0}}' for i in range(rows)]
    path = tmp_path / f"x.{format}"
    path.write_text("\n".join([*["x,y"] * (format == "csv"), *lines]) + "\n")
    for consumed in (0, 1, BATCHES_PER_CHUNK - 1, BATCHES_PER_CHUNK, BATCHES_PER_CHUNK + 1, 2 * BATCHES_PER_CHUNK):
        source = LinesSource(path, SCHEMA, format, batch_size=4)
        batches = iter(source)
        for _ in range(consumed):
            next(batches)
        assert not consumed or any(thread.name == "cadam prefetch" for thread in threading.enumerate())
        resumed = LinesSource(path, SCHEMA, format, batch_size=4)
        resumed.load_state_dict(source.state_dict())
        rest = [batch for batch in resumed if batch is not None]
        values = np.concatenate([batch.events.features["x"] for batch in rest if batch.events is not None])
        np.testing.assert_array_equal(values, np.arange(4 * consumed, rows))
        batches.close()  # type: ignore[attr-defined]
    assert not any(thread.name == "cadam prefetch" for thread in threading.enumerate())


def test_lines_before_an_error_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    path.write_text("x,y\n" + "1,0\n" * 12)
    convert, calls = LinesSource._convert, []

    def fail_at_the_third(self: LinesSource, lines: list[Line]) -> Batch:
        calls.append(lines)
        if len(calls) == 3:
            raise OSError("unreadable")
        return convert(self, lines)

    monkeypatch.setattr(LinesSource, "_convert", fail_at_the_third)
    source, seen = LinesSource(path, SCHEMA, "csv", batch_size=4), []
    with pytest.raises(OSError, match="unreadable"):  # noqa: PT012
        for batch in source:
            seen.append(batch)
    assert len(seen) == 2
    assert source.state_dict()["line"] == 9
