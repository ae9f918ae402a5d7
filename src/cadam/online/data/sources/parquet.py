"""Events from Parquet: a file, a folder, or a folder to which files are added."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..conversion import HASHED, Values
from ..events import Array, Batch, Rejected
from ..kind import UNITS
from ..schema import MAX_REJECTED_TEXT, Schema
from ..text_columns import MISSING, DictionaryColumn, Quoting, TextColumn, UnreadableValue
from .base import ColumnNames, Source, check_batch_size, check_state
from .column_watch import ColumnWatch
from .partitions import partition_values, read_partition, sample_partitions, time_order
from .prefetch import prefetch
from .records import list_duplicates
from .sample import POSITIONS, Sample, SamplingError, describe, max_rows, spread

logger = logging.getLogger("cadam.online")

CHUNK_BATCHES = 256
"""The number of batches of a chunk, which are converted together. The dictionaries of text columns are converted once
for each chunk, so small chunks take more time."""
MAX_CHUNK_VALUES = 1 << 23
"""With large batches or many columns, fewer are converted together, so that they do not take much memory: at most this
many values, or one batch."""
DAMAGED_CHUNK_DIVISOR = 16
"""Where a chunk cannot be read, it is read again in chunks that are smaller by this factor."""
OLD_CHUNK_BATCHES = 64
"""The number of batches of a chunk in checkpoints of older versions, which do not store this number."""
FINGERPRINT_BYTES = 65_536
"""The number of bytes at the end of a file, where Parquet keeps its metadata, by which the file is recognized."""
UNCHANGED_SECONDS = 10.0
"""An unreadable file in a followed folder is rejected when it has not changed for this time. Until then it may still be
written."""
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Error numbers that say nothing about the file: too many files are open, or memory is short. They end the run, and the
same command reads the file later."""
INSPECTED_FILES = 1000
"""The number of files whose column names are read for validation."""


class ParquetSource(Source):
    """The rows of a Parquet file, or of all Parquet files under a folder in the order of their names.

    Folders such as ``country=DE/dt=2024-01-01`` (Hive partitions) are columns of the files below them, unless a file
    has a column of that name. Such files are read in the order of their partitions of time, see `time_order`.

    Files whose name begins with a dot or an underscore are skipped. To add a file to a folder that is followed, write
    it under such a name and rename it. A file that cannot be read is rejected, entirely or from the first batch on that
    cannot be read. A single value that cannot be read, such as text that is not UTF-8, only rejects its row.

    Args:
        path: A file or a folder.
        schema: The schema of the events.
        batch_size: The number of events per batch.
        follow: Whether to wait for new files at the end.
        poll: The number of seconds between checks for new files.
    """

    def __init__(
        self, path: Path | str, schema: Schema, *, batch_size: int = 1024, follow: bool = False, poll: float = 0.5
    ) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise ImportError("Parquet streams need pyarrow: pip install pyarrow") from error
        check_batch_size(batch_size)
        self.path, self.location, self.schema, self.batch_size = Path(path), str(path), schema, batch_size
        self.follow, self.poll = follow, poll
        self._most_chunk_batches = max(1, min(CHUNK_BATCHES, MAX_CHUNK_VALUES // (batch_size * len(schema.kinds))))
        self._chunk_batches = self._most_chunk_batches
        """The number of batches of a chunk. In a damaged file it is smaller, so that more rows before the damage are
        used."""
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} does not exist")
        self._folder = self.path.parent if self.path.is_file() else self.path
        self._hashed = {name for name, kind in schema.kinds.items() if kind.name in HASHED and not kind.length}
        self.queue: list[str] = []
        """The files that are not finished yet; the first one is being read."""
        self.done: dict[str, list[Any] | None] = {}
        """The files that are finished, each with the `_identity` that it had when it was opened; None if it could not
        be opened, or if an older version read it."""
        self.rejected: set[str] = set()
        """The finished files of which no row could be read. They are read when they have changed."""
        self._attempted: set[str] = set()
        """The files that this run rejected. Without `follow` they are not read again, because a file that is still
        being written would be rejected many times."""
        self._changed: set[str] = set()
        """Finished files whose change was logged."""
        self.chunk = self.batch = 0
        """The next chunk of the current file, and the next batch of that chunk."""
        self.fingerprint: str | None = None
        """The fingerprint of the current file when it was opened."""
        self._opened: list[Any] | None = None
        """The `_identity` of the current file when it was opened."""
        self._unreadable_folders: set[str] = set()
        self._watch = ColumnWatch(schema, str(path))
        self._rows = 0
        """The number of rows of the current file; 0 if it is not known."""

    @classmethod
    def from_uri(cls, uri: str, schema: Schema, **options: Any) -> ParquetSource | None:
        """Open ``parquet:PATH``. Its batches do not depend on time, so `patience` has no effect."""
        path = uri.partition(":")[2]
        return cls(path, schema, batch_size=options["batch_size"], follow=options["follow"]) if path else None

    def __iter__(self) -> Iterator[Batch | None]:
        while True:
            if not self.queue:
                self._find_new_files()
            if self.queue:
                yield from self._read_file(self._folder / self.queue[0])
            elif not self.follow:
                return
            else:
                yield None
                time.sleep(self.poll)

    @property
    def share(self) -> float | None:
        """The fraction of the data that was read, where all files count equally; None if the source has no end."""
        if self.follow:
            return None
        rows = (self.chunk * self._chunk_batches + self.batch) * self.batch_size
        current = min(1.0, rows / max(1, self._rows)) if self.queue else 0.0
        return (len(self.done) + current) / max(1, len(self.done) + len(self.queue))

    def _find_new_files(self) -> None:
        names = [str(path.relative_to(self._folder)) for path in self._list_files()]
        for name in list(self._find_changed(names)):
            if name in self.rejected:
                if name in self._attempted and not self.follow:
                    continue
                logger.warning("%s could not be read before. It has changed and is read now", self._folder / name)
                self.rejected.remove(name)
                del self.done[name]
            elif name not in self._changed:
                logger.error("%s", self._describe_change(name))
                self._changed.add(name)
        new = [name for name in names if name not in self.done and name not in self.queue]
        read = {name: identity for name, identity in self.done.items() if identity and name not in self.rejected}
        missing = {tuple(identity): name for name, identity in read.items() if name not in names} if new else {}
        for name in new:
            identity = _identity(self._folder / name) if missing else None
            if identity and (old := missing.get(tuple(identity))):
                logger.warning("%s is the finished file %s under another name, and is not read again", name, old)
                self.done[name] = self.done.pop(old)
            else:
                self.queue.append(name)

    def _find_changed(self, names: Collection[str]) -> Iterator[str]:
        """Yield the finished files that were replaced, extended or repaired after they were opened."""
        for name in names:
            identity, is_rejected = self.done.get(name), name in self.rejected
            if identity is None and not is_rejected:
                continue
            path = self._folder / name
            with suppress(OSError):
                status = path.stat()
                is_touched = identity is None or [status.st_size, status.st_mtime_ns] != identity[1:]
                # A repair may keep the size and the end of a file, so any change of a rejected file counts.
                if is_touched and (now := _identity(path)) and (is_rejected or now[:2] != (identity or [])[:2]):
                    yield name

    def _describe_change(self, name: str) -> str:
        return (
            f"{self._folder / name} was replaced or extended after it was read, and rows that were learned cannot be "
            "told from new ones: write new rows to new files in a folder"
        )

    def _list_files(self) -> list[Path]:
        """Return the file, or the Parquet files under the folder in the order of their times and names."""
        if self.path.is_file():
            return [self.path]
        files = []
        for parent, _, names in os.walk(self.path, onerror=self._log_unreadable):
            files += [Path(parent, name) for name in names if name.endswith(".parquet") and name[0] not in "._"]
        time_column, _ = self.schema.roles.get("time", (None, None))
        return sorted(files, key=lambda path: time_order(path.relative_to(self._folder), time_column))

    def _log_unreadable(self, error: OSError) -> None:
        if error.filename not in self._unreadable_folders:
            logger.error("%s cannot be listed, and its files are not read: %s", error.filename, error.strerror)
            self._unreadable_folders.add(error.filename)

    def _read_file(self, path: Path) -> Iterator[Batch | None]:
        """Yield the remaining batches of a file, and then move the position to the next file."""
        try:
            for batches in prefetch(self._convert_chunks(path)):
                for batch in batches[self.batch :]:
                    self.batch += 1
                    yield batch
                self.chunk, self.batch = self.chunk + 1, 0
            self._finish_file()
        except Exception as error:  # A damaged file can make pyarrow raise anything, and must not block later files.
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise
            size, changed = (path.stat().st_size, path.stat().st_mtime) if path.exists() else (0, 0.0)
            if self.follow and time.time() - changed < UNCHANGED_SECONDS:
                yield None
                time.sleep(self.poll)
                return
            if self._chunk_batches > 1:
                self._change_chunk_batches(self._chunk_batches // DAMAGED_CHUNK_DIVISOR)
                yield from self._read_file(path)
                return
            first = (self.chunk * self._chunk_batches + self.batch) * self.batch_size
            where = f"{path}, row {first} and all after it" if first else str(path)
            rows = max(1, self._rows - first)
            reason = f"the file cannot be read: {type(error).__name__}: {error}"
            if not (self.chunk or self.batch):
                self.rejected.add(self.queue[0])
                self._attempted.add(self.queue[0])
            self._finish_file()
            yield Batch(rejected=[Rejected(reason[:MAX_REJECTED_TEXT], where, "", size, rows)])

    def _finish_file(self) -> None:
        self.done[self.queue.pop(0)] = self._opened
        self.chunk = self.batch = 0
        self._chunk_batches = self._most_chunk_batches

    def _change_chunk_batches(self, count: int) -> None:
        """Change the number of batches of a chunk, and keep the position."""
        batches = self.chunk * self._chunk_batches + self.batch
        self._chunk_batches = max(1, count)
        self.chunk = max(batches - 1, 0) // self._chunk_batches  # with at least one batch that was consumed
        self.batch = batches - self.chunk * self._chunk_batches

    def _read_chunks(self, path: Path) -> Generator[tuple[Any, int]]:
        """Yield the table of each chunk and its first row, beginning with the chunk of the current position.

        The position is read before the first chunk only, because the later ones are read in another thread.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        # Before the file is opened: if it is replaced from now on, the new file is recognized as another one.
        self._opened, self._rows = None, 0
        self._opened, fingerprint = _identity(path), _fingerprint(path)
        rows = self.batch_size * self._chunk_batches
        first = self.chunk * rows
        # Text that is hashed is read dictionary-encoded, so that each distinct value is hashed only once.
        columns = [column for column in pq.read_schema(path) if column.name in self._hashed]
        dictionaries = [column.name for column in columns if _is_text(column.type)]
        with pq.ParquetFile(path, read_dictionary=dictionaries) as file:
            if (self.chunk or self.batch) and self.fingerprint not in (None, fingerprint):
                raise pa.ArrowInvalid("it is not the file that was being read")
            self.fingerprint = fingerprint
            group_sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            total = file.metadata.num_rows
            if sum(group_sizes) != total or min(group_sizes, default=0) < 0:
                raise pa.ArrowInvalid(f"its metadata says {total} rows, but {sum(group_sizes)} in its row groups")
            self._rows = total
            group_starts = np.cumsum([0, *group_sizes])
            group = int(np.searchsorted(group_starts, first, side="right")) - 1
            skip = first - int(group_starts[min(group, len(group_starts) - 1)])
            names = [name for name in file.schema_arrow.names if name in self.schema.column_names()]
            if duplicates := list_duplicates(names):
                raise pa.ArrowInvalid(f"it has more than one column {duplicates}")
            self._watch.check_names([*file.schema_arrow.names, *self._partitions(path)], str(path))
            held: list[pa.RecordBatch] = []
            count = 0
            for part in file.iter_batches(rows, row_groups=list(range(group, len(group_sizes))), columns=names):
                if skip >= part.num_rows:
                    skip -= part.num_rows
                    continue
                held.append(part.slice(skip))
                count += part.num_rows - skip
                skip = 0
                while count >= rows:
                    table = pa.Table.from_batches(held)
                    yield table.slice(0, rows), first
                    held = table.slice(rows).to_batches()
                    first, count = first + rows, count - rows
            if first + count != total:
                raise pa.ArrowInvalid(f"it has {first + count} rows, but its metadata says {total}")
            if count:
                yield pa.Table.from_batches(held), first

    def _convert_chunks(self, path: Path) -> Generator[list[Batch]]:
        """Yield the batches of each chunk, while a third thread reads the next one."""
        with closing(prefetch(self._read_chunks(path))) as chunks:
            for table, first in chunks:
                yield self._convert(table, path, first)

    def _convert(self, table: Any, path: Path, first: int) -> list[Batch]:
        columns = {name: read_values(table.column(name)) for name in table.column_names}
        indices = np.zeros(table.num_rows, np.int64)
        shared = {
            name: DictionaryColumn([read_partition(name, value, self.schema)], indices)
            for name, value in self._partitions(path).items()
            if name in self.schema.column_names() and name not in columns
        }
        batch = self.schema.convert_columns(
            columns | shared, table.num_rows, lambda row: f"{path}, row {first + row}", shared=shared
        )
        return batch.split(self.batch_size)

    def _partitions(self, path: Path) -> dict[str, str | None]:
        return partition_values(path.relative_to(self._folder))

    def columns(self) -> ColumnNames:
        """Return the columns that the metadata and the folders of the files declare."""
        import pyarrow.parquet as pq

        names: list[str] = []
        for file in islice(self._list_files(), INSPECTED_FILES):
            try:
                names += pq.read_schema(file).names
            except Exception:  # A damaged file is rejected when it is read.
                continue
            names += self._partitions(file)
        return ColumnNames(names, are_complete=self.path.is_file())

    def sample(self) -> Sample:
        """Return rows from several row groups of several files."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        files = self._list_files()
        if not files:
            raise SamplingError(
                f"{self.path} contains no Parquet files (*.parquet), which are the only files that are read from a "
                "folder: name a file of CSV or JSON lines directly"
            )
        chosen = files if len(files) <= POSITIONS else [files[index] for index in spread(POSITIONS, len(files) - 1)]
        tables, total = [], 0
        partitions: list[dict[str, str | None]] = []
        """The partitions of each row."""
        try:
            names = pq.read_schema(chosen[0]).names
            if duplicates := list_duplicates(names):
                raise SamplingError(f"{self.path} has more than one column {duplicates}: rename one of them")
            rows = max(1000, max_rows(len(names)) // len(chosen))
            for path in chosen:
                with pq.ParquetFile(path) as file:
                    total += file.metadata.num_rows
                    parts = _sample_tables(file, rows)
                tables += parts
                partitions += [self._partitions(path)] * sum(part.num_rows for part in parts)
            table = pa.concat_tables(tables, promote_options="default")
        except (pa.ArrowException, OSError) as error:
            raise SamplingError(f"{self.path} cannot be read as Parquet: {error}") from error
        total = total * len(files) // len(chosen)
        columns = {}
        for index, name in enumerate(table.column_names):
            values = read_values(table.column(index))
            columns[name] = values.tolist() if isinstance(values, np.ndarray) else list(values)
        for name in dict.fromkeys(name for values in partitions for name in values if name not in columns):
            columns[name] = sample_partitions([values.get(name) for values in partitions])
        kind = f"{len(files):,} Parquet files" if len(files) > 1 else "Parquet"
        description = describe(kind, total, table.num_rows, min(POSITIONS, len(tables)))
        times = frozenset(column.name for column in table.schema if pa.types.is_timestamp(column.type))
        return Sample(columns, table.num_rows, total, description, time_columns=times)

    def state_dict(self) -> dict[str, Any]:
        """Return the files that are finished, those that are not, and the position in the current one."""
        return {
            "source": "parquet",
            "batch_size": self.batch_size,
            "queue": list(self.queue),
            "done": dict(self.done),
            "rejected": sorted(self.rejected),
            "chunk_batches": self._chunk_batches,
            "chunk": self.chunk,
            "batch": self.batch,
            "fingerprint": self.fingerprint if self.queue and (self.chunk or self.batch) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        check_state(state, source="parquet")
        if state["batch_size"] != self.batch_size:
            raise ValueError(
                f"a position in Parquet counts batches of {state['batch_size']:,} events, but now {self.batch_size:,} "
                "are read at once, which depends on --batch-size"
            )
        done = state["done"]  # a list of names in checkpoints of older versions
        self.queue, self.done = list(state["queue"]), dict(done) if isinstance(done, Mapping) else dict.fromkeys(done)
        self.rejected = set(state.get("rejected", ()))  # absent in checkpoints of older versions
        self.chunk, self.batch = state["chunk"], state["batch"]
        self._chunk_batches = state.get("chunk_batches", OLD_CHUNK_BATCHES)
        self._change_chunk_batches(self._most_chunk_batches)
        self.fingerprint = state["fingerprint"]
        if self.fingerprint is not None and _fingerprint(path := self._folder / self.queue[0]) != self.fingerprint:
            raise ValueError(f"{path} is not the file that was being read, so the position in it is not valid")
        if changed := next(self._find_changed(self.done.keys() - self.rejected), None):
            raise ValueError(self._describe_change(changed))


def _identity(path: Path) -> list[Any] | None:
    """Return a hash of the end of a file, its size and the time of its last change; None if it does not exist.

    The time tells a file that was renamed from a new one with the same content.
    """
    fingerprint = _fingerprint(path)
    return None if fingerprint is None else [fingerprint[:16], path.stat().st_size, path.stat().st_mtime_ns]


def _fingerprint(path: Path) -> str | None:
    """Return a hash by which a file is recognized, or None if the file does not exist."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - FINGERPRINT_BYTES))
        return hashlib.sha256(file.read(FINGERPRINT_BYTES)).hexdigest()


def _sample_tables(file: Any, rows: int) -> list[Any]:
    """Read about `rows` rows of a file from several positions, or the complete file if it has no more."""
    import pyarrow as pa

    groups, total = file.num_row_groups, file.metadata.num_rows
    if total <= rows:
        return [file.read()]
    size = -(-rows // POSITIONS)
    if groups >= POSITIONS:
        batches = (next(file.iter_batches(size, row_groups=[group])) for group in spread(POSITIONS, groups - 1))
    else:
        chosen = {start // size for start in spread(POSITIONS, total - size)}
        batches = (batch for index, batch in enumerate(file.iter_batches(size)) if index in chosen)
    return [pa.Table.from_batches([batch]) for batch in batches]


def read_values(column: Any) -> Values:
    """Return the values of an Arrow column in a form that `convert` accepts.

    The result is an array if no value is missing and numpy has the type, a `TextColumn` or `DictionaryColumn` for text,
    and a list otherwise.
    """
    import pyarrow as pa

    column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # combine_chunks returns one only if there are no chunks.
        return []
    try:
        return _convert_type(column)
    except (ValueError, ArithmeticError, pa.ArrowException):  # Some value has no Python equivalent.
        return [_python_value(scalar) for scalar in column]


def _convert_type(column: Any) -> Values:
    import pyarrow as pa
    import pyarrow.compute as pc

    types = pa.types
    if types.is_timestamp(column.type):
        if column.type.unit == "ns":  # A float64 of seconds has a resolution of about a microsecond.
            column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
        per_second = UNITS[column.type.unit]
        return [None if value is None else value / per_second for value in column.cast(pa.int64()).to_pylist()]
    if types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if types.is_boolean(column.type):
        column = column.cast(pa.int8())
    if _is_text(column.type):
        return _text_column(column)
    if types.is_dictionary(column.type) and _is_text(column.type.value_type):
        # A missing value is encoded as an additional, missing entry at the end of the dictionary.
        indices = pc.fill_null(column.indices.cast(pa.int64()), len(column.dictionary)).to_numpy(zero_copy_only=False)
        dictionary = pa.concat_arrays([column.dictionary, pa.nulls(1, column.type.value_type)])
        return DictionaryColumn(_text_column(dictionary), indices)
    if column.null_count:
        return list(column.to_pylist())
    if types.is_integer(column.type) or types.is_floating(column.type):
        array: Array = column.to_numpy(zero_copy_only=False)
        return array
    if types.is_fixed_size_list(column.type) and types.is_primitive(column.type.value_type):
        values = column.flatten()
        if not values.null_count:
            flat: Array = values.to_numpy(zero_copy_only=False)
            return flat.reshape(-1, column.type.list_size)
    return list(column.to_pylist())


def _is_text(arrow_type: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def _text_column(column: Any) -> TextColumn:
    """Return an Arrow column of text as byte ranges of its buffer, without a copy of the text."""
    import pyarrow as pa

    _, offset_buffer, data_buffer = column.buffers()
    dtype = np.int64 if pa.types.is_large_string(column.type) else np.int32
    offsets = np.frombuffer(offset_buffer, dtype)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    begin = offsets[:-1]
    if column.null_count:
        begin = np.where(column.is_valid().to_numpy(zero_copy_only=False), begin, MISSING)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    return TextColumn(data, begin, offsets[1:], Quoting.ALL)


def _python_value(scalar: Any) -> Any:
    """Return a value as a Python object, or `UnreadableValue` if there is none, as for a date after the year 9999."""
    import pyarrow as pa

    try:
        return scalar.as_py()
    except (ValueError, ArithmeticError, pa.ArrowException) as error:
        return UnreadableValue(f"a value of type {scalar.type} that cannot be read: {error}")
