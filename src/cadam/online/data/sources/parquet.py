"""Events from Parquet: a file, a folder, or a folder that grows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...persistence.logs import NEEDS
from ..events import Array, Batch, Rejected
from ..schema import KEPT, Repeated, Schema
from ..text_columns import MISSING, Quotes, Texts, Unreadable
from .base import Source, check_state, digest
from .records import repeated

logger = logging.getLogger("cadam.online")

CHUNK = 64  # batches converted at one go
KNOWN_BY = 65_536  # bytes at the end of a file, where Parquet says what is in it, by which it is known again


@dataclass(frozen=True)
class Rows:
    """Says where a row is."""

    path: str
    first: int

    def __call__(self, row: int) -> str:
        return f"{self.path}, row {self.first + row}"


class ParquetSource(Source):
    """The rows of a Parquet file, or of every Parquet file under a folder, by name.

    Files that begin with a dot or an underscore are not looked at: write to such a name, then rename. A file that
    cannot be read is rejected as a whole, or from the first chunk on that cannot be; a value that cannot be, such as
    text that is not UTF-8, with its row.

    Args:
        follow: when all is read, wait for new files instead of ending.
        settled: how many seconds a file that cannot be read must have stayed the same before it is given up, with
            `follow`.
        poll: seconds between looks for new files.
    """

    def __init__(
        self,
        path: Path | str,
        schema: Schema,
        *,
        batch_size: int = 1024,
        follow: bool = False,
        settled: float = 10.0,
        poll: float = 0.5,
    ) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise ImportError(NEEDS) from error
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.path, self.schema, self.batch_size = Path(path), schema, batch_size
        self.follow, self.settled, self.poll = follow, settled, poll
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} does not exist")
        self._hashed = {name for name, kind in schema.kinds.items() if kind.name == "hash" and not kind.length}
        self.queue: list[str] = []  # found, not finished; the first is being read
        self.done: dict[str, None] = {}
        self.chunk = self.batch = 0  # of the file being read: the next to give
        self.known: str | None = None  # what the file being read is known by, as it was opened
        self._unreadable: set[str] = set()  # folders of which this was said
        self._rows = 1  # of the file being read

    def __iter__(self) -> Iterator[Batch | None]:
        while True:
            if not self.queue:
                self._look()
            if self.queue:
                yield from self._file(self._full(self.queue[0]))
            elif not self.follow:
                return
            else:
                yield None
                time.sleep(self.poll)

    @property
    def share(self) -> float | None:
        """Of the data that has been given, if it has an end: files count alike."""
        if self.follow:
            return None
        part = min(1.0, (self.chunk * CHUNK + self.batch) * self.batch_size / max(1, self._rows))
        return (len(self.done) + (part if self.queue else 0)) / max(1, len(self.done) + len(self.queue))

    def _look(self) -> None:
        """Queue new files, by name."""
        if self.path.is_file():
            names = [self.path.name]
        else:
            names = sorted(str(path.relative_to(self.path)) for path in parquet_files(self.path, self._say_unreadable))
        known = self.done.keys() | set(self.queue)
        self.queue += [name for name in names if name not in known]

    def _say_unreadable(self, error: OSError) -> None:
        if error.filename not in self._unreadable:
            logger.error("%s cannot be looked into, files in it are not read: %s", error.filename, error.strerror)
            self._unreadable.add(error.filename)

    def _full(self, name: str) -> Path:
        return self.path if self.path.is_file() else self.path / name

    def _file(self, path: Path) -> Iterator[Batch | None]:
        """The rest of a file; at its end the position moves to the next one."""
        try:
            for batches in self._chunks(path):
                for batch in batches[self.batch :]:
                    self.batch += 1
                    yield batch
                self.chunk, self.batch = self.chunk + 1, 0
            self._next()
        except Exception as error:  # whatever a damaged file can make of pyarrow: good files wait behind it
            size, changed = (path.stat().st_size, path.stat().st_mtime) if path.exists() else (0, 0.0)
            if self.follow and time.time() - changed < self.settled:
                yield None  # somebody may still be writing it
                time.sleep(self.poll)
                return
            first = self.chunk * self.batch_size * CHUNK
            where = f"{path}, row {first} and all after it" if first else str(path)
            reason = f"the file cannot be read: {type(error).__name__}: {error}"
            rejected = Rejected(reason[:KEPT], where, "", size)
            self._next()
            yield Batch(rejected=[rejected])

    def _next(self) -> None:
        self.done[self.queue.pop(0)] = None
        self.chunk = self.batch = 0

    def _chunks(self, path: Path) -> Iterator[list[Batch]]:
        """The batches of each chunk, from the one that the position is in."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = self.batch_size * CHUNK
        first = self.chunk * rows
        with pq.ParquetFile(path) as whole:
            texts = [one.name for one in whole.schema_arrow if one.name in self._hashed and _is_text(one.type)]
            metadata = whole.metadata
        with pq.ParquetFile(path, metadata=metadata, read_dictionary=texts) as file:
            known = _known_by(path)
            if (self.chunk or self.batch) and self.known not in (None, known):
                raise pa.ArrowInvalid("it is not the file that was being read")
            self.known = known
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            total = self._rows = file.metadata.num_rows
            if sum(sizes) != total or min(sizes, default=0) < 0:
                raise pa.ArrowInvalid(f"it says that it has {total} rows, and {sum(sizes)} in its row groups")
            starts = np.cumsum([0, *sizes])
            group = int(np.searchsorted(starts, first, side="right")) - 1
            skip = first - int(starts[min(group, len(starts) - 1)])
            wanted = [name for name in file.schema_arrow.names if name in self.schema.fields()]
            if twice := repeated(wanted):
                raise pa.ArrowInvalid(f"it has more than one column {twice}")
            held: list[pa.RecordBatch] = []
            count = 0
            for part in file.iter_batches(rows, row_groups=list(range(group, len(sizes))), columns=wanted):
                if skip >= part.num_rows:
                    skip -= part.num_rows
                    continue
                held.append(part.slice(skip))
                count += part.num_rows - skip
                skip = 0
                while count >= rows:
                    table = pa.Table.from_batches(held)
                    yield self._batches(table.slice(0, rows), Rows(str(path), first))
                    held = table.slice(rows).to_batches()
                    first, count = first + rows, count - rows
            if first + count != total:
                raise pa.ArrowInvalid(f"it has {first + count} rows, and says that they are {total}")
            if count:
                yield self._batches(pa.Table.from_batches(held), Rows(str(path), first))

    def _batches(self, table: Any, where: Rows) -> list[Batch]:
        values = {name: read_values(table.column(name)) for name in table.column_names}
        return self.schema.batches(values, table.num_rows, where, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": "parquet",
            "batch_size": self.batch_size,
            "queue": list(self.queue),
            "done": list(self.done),
            "chunk": self.chunk,
            "batch": self.batch,
            "begun": self.known if self.queue and (self.chunk or self.batch) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, source="parquet", batch_size=self.batch_size)
        self.queue, self.done = list(state["queue"]), dict.fromkeys(state["done"])
        self.chunk, self.batch = state["chunk"], state["batch"]
        self.known = state["begun"]
        if self.known is not None and _known_by(path := self._full(self.queue[0])) != self.known:
            raise ValueError(f"{path} is not the file that was being read: the position in it means nothing now")


def parquet_files(folder: Path, unreadable: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """The Parquet files under a folder, in no order; `unreadable` is told of folders that cannot be looked into."""
    for place, _, names in os.walk(folder, onerror=unreadable):
        for name in names:
            if name.endswith(".parquet") and not name.startswith((".", "_")):
                yield Path(place, name)


def _known_by(path: Path) -> str | None:
    """What a file is known by; None if it is gone."""
    if not path.exists():
        return None
    size = path.stat().st_size
    return digest(path, size - KNOWN_BY, size)


def read_values(column: Any) -> Array | Sequence[Any]:
    """A column as an array where nothing is missing and numpy has the type; as a list where not, text by its values."""
    import pyarrow as pa

    column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of no chunks
        return []
    try:
        return _at_one_go(column)
    except (ValueError, ArithmeticError, pa.ArrowException):  # some value has no form in Python: look for it
        return [_value(one) for one in column]


def _at_one_go(column: Any) -> Array | Sequence[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_timestamp(column.type):  # becomes a float of seconds, whole microseconds if it is finer
        unit, column = column.type.unit, column.cast(pa.int64())
        if unit == "ns":
            unit, column = "us", pc.divide(column, 1000)
        per_second = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
        return [None if v is None else v / per_second for v in column.to_pylist()]
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if pa.types.is_boolean(column.type):  # all of it are, so that 0 and 1 are meant
        column = column.cast(pa.int8())
    if _is_text(column.type):
        return _texts(column)
    if pa.types.is_dictionary(column.type) and _is_text(column.type.value_type):
        places = pc.fill_null(column.indices.cast(pa.int64()), len(column.dictionary)).to_numpy(zero_copy_only=False)
        return Repeated(_texts(pa.concat_arrays([column.dictionary, pa.nulls(1, column.type.value_type)])), places)
    if column.null_count:
        return list(column.to_pylist())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        array: Array = column.to_numpy(zero_copy_only=False)
        return array
    if pa.types.is_fixed_size_list(column.type) and pa.types.is_primitive(column.type.value_type):
        values = column.flatten()
        if not values.null_count:
            flat: Array = values.to_numpy(zero_copy_only=False)
            return flat.reshape(-1, column.type.list_size)
    return list(column.to_pylist())


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _texts(column: Any) -> Texts:
    import pyarrow as pa

    _, offsets, data = column.buffers()
    width = np.int64 if pa.types.is_large_string(column.type) else np.int32
    ends = np.frombuffer(offsets, width)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    begin = ends[:-1]
    if column.null_count:
        begin = np.where(column.is_valid().to_numpy(zero_copy_only=False), begin, MISSING)
    found = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return Texts(found, begin, ends[1:], Quotes.ALL)


def _value(scalar: Any) -> Any:
    """One value as Python has it; `Unreadable` if it has none, such as a date after the year 9999."""
    import pyarrow as pa

    try:
        return scalar.as_py()
    except (ValueError, ArithmeticError, pa.ArrowException) as error:
        return Unreadable(f"a value of type {scalar.type} that cannot be read: {error}")
