"""Criteo's train.txt to a folder of numbers, in three stages that go on where they were stopped.

    read     the text, once, into tokens/*.parquet (what the file says, in its order) and bad-lines.tsv
    count    the tokens of the training part of split x4: a vocabulary of those seen at least 10 times
    encode   every row into ids.i32: 39 rows of the one table as int32, in the order of the file

The Parquet files are the lasting cache of the text: smaller, typed, for any tool to read, with the
source's sha256 in tokens/_common_metadata. ids.i32 is a flat file because a shuffled epoch reads rows one by one
from anywhere: memory-mapped it needs no more memory than the system can spare, which no row group of Parquet allows.

Each finished piece is written under another name, synced, renamed, and then entered in manifest.json in the same way,
so that whatever ends the process leaves a folder from which the next run goes on. One process at a time works on a
folder; once it is complete, any number of them read it, without a lock and without the right to write there.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np

from cadam.statistics.intervals import Array

from .criteo_parser import BadLine, count_lines, parse, require_pyarrow
from .fields import FIELDS, INTEGERS, offsets
from .split import FOLDS, PARTS, folds

if TYPE_CHECKING:
    import pyarrow

CHUNK = 32 << 20
LONGEST = 1 << 20
"""Bytes of a line, beyond which this is no such text: it would be read whole."""
MIN_COUNT = 10
FORMAT = 2
FIRST_FEW = 5

Stage = Literal["read", "count", "encode"]
STAGES: tuple[Stage, ...] = ("read", "count", "encode")
Tell = Callable[[Stage, float, int], None]
"""Hears the stage, the share of it that is done, and how many rows that is."""


class BadLinesError(ValueError):
    """Lines that are not of Criteo's format, where strict reading was asked for."""


class SourceChangedError(ValueError):
    """The text is not what the folder was begun from."""


@dataclass
class Chunk:
    """A piece of the source: its lines, the rows that were good, the sha256 of all text up to its end."""

    first_line: int
    lines: int
    rows: int
    bad: int
    sha256: str


@dataclass
class Manifest:
    """What a folder holds so far."""

    source: str
    bytes: int
    modified: int
    sample: str
    """A hash of pieces of the source: its time alone does not tell every change."""
    made_by: str
    """Which version of this code reads the text."""
    wanted: int | None
    min_count: int
    format: int = FORMAT
    chunks: list[Chunk] = field(default_factory=list)
    sha256: str | None = None
    encoded: int = 0
    vocabulary: list[int] | None = None
    first_bad: list[BadLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def bad(self) -> int:
        return sum(chunk.bad for chunk in self.chunks)

    @property
    def complete(self) -> bool:
        return self.sha256 is not None and self.vocabulary is not None and self.encoded == len(self.chunks)

    def save(self, folder: Path) -> None:
        _write(folder / "manifest.json", json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """The manifest of a folder; None if there is none, or one of another format."""
        path = folder / "manifest.json"
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                return None
            chunks = [Chunk(**chunk) for chunk in content.pop("chunks")]
            first_bad = [BadLine(**line) for line in content.pop("first_bad")]
            return cls(**content, chunks=chunks, first_bad=first_bad)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged, delete {folder}: {error}") from error


def preprocess(
    source: Path,
    folder: Path,
    *,
    rows: int | None = None,
    strict: bool = False,
    min_count: int = MIN_COUNT,
    workers: int | None = None,
    tell: Tell = lambda stage, share, rows: None,
) -> Manifest:
    """Bring a folder up to date with a source, or with its first `rows` lines; what is there already is kept."""
    if rows is not None and rows < 10:
        raise ValueError(f"rows must be at least 10, got {rows}")
    found = finished(source, folder, rows=rows, min_count=min_count)
    if found is not None:
        if strict:
            _refuse(found)
        return found
    require_pyarrow()
    folder.mkdir(parents=True, exist_ok=True)
    workers = workers or min(4, 1 + (os.cpu_count() or 1))  # one waits for the disk while the others compute
    with _alone(folder), ThreadPoolExecutor(workers) as pool:
        manifest = _begin(source, folder, rows, min_count)
        if strict:
            _refuse(manifest)
        if not _whole(folder, manifest):
            manifest.encoded = 0
        if manifest.complete:
            return manifest
        if manifest.sha256 is None:
            _read(source, folder, manifest, strict, pool, tell)
        if manifest.rows < 10:
            raise ValueError(f"{source}: {manifest.rows} good rows are too few{_report(manifest)}")
        labels = _labels(folder, manifest)
        clicks = int(labels.sum())
        if not FOLDS <= clicks <= len(labels) - FOLDS:
            raise ValueError(f"{source}: {clicks} clicks in {len(labels)} rows: the {FOLDS} folds need both kinds each")
        fold_of = folds(labels)
        if manifest.vocabulary is None:
            _count(folder, manifest, np.isin(fold_of, PARTS["train"]), pool, tell)
        _write(folder / "labels.u8", labels.tobytes())
        _encode(folder, manifest, pool, tell)
    return manifest


def finished(source: Path, folder: Path, *, rows: int | None = None, min_count: int = MIN_COUNT) -> Manifest | None:
    """The manifest of a folder that needs no more work, else None."""
    found = _found(source, folder, rows, min_count)
    return found if found is not None and found.complete and _whole(folder, found) else None


def _begin(source: Path, folder: Path, rows: int | None, min_count: int) -> Manifest:
    """The manifest of a folder that was begun from this source, else an empty one and an empty folder."""
    found = _found(source, folder, rows, min_count)
    if found is not None:
        return found
    (folder / "manifest.json").unlink(missing_ok=True)  # first: it must never speak of what is gone
    for name in ("tokens", "bad", "vocabulary"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    for name in ("ids.i32", "labels.u8", "bad-lines.tsv"):
        (folder / name).unlink(missing_ok=True)
    fresh = _fresh(source, rows, min_count)
    fresh.save(folder)
    return fresh


def _found(source: Path, folder: Path, rows: int | None, min_count: int) -> Manifest | None:
    """The manifest of a folder that was begun from this source and can be gone on with. Complete, it needs neither
    the source nor the code that made it."""
    found = Manifest.load(folder)
    if not source.exists():
        if found is not None and found.complete and (found.wanted, found.min_count) == (rows, min_count):
            return found
        raise FileNotFoundError(f"there is no {source}, and no complete cache of it in {folder}")
    if found is None:
        return None
    fresh = _fresh(source, rows, min_count)
    same = ["bytes", "modified", "sample", "wanted", "min_count", *([] if found.complete else ["made_by"])]
    return found if all(getattr(found, name) == getattr(fresh, name) for name in same) else None


def _fresh(source: Path, rows: int | None, min_count: int) -> Manifest:
    status = source.stat()
    return Manifest(source.name, status.st_size, status.st_mtime_ns, _sample(source), made_by(), rows, min_count)


def _sample(source: Path, pieces: int = 64, size: int = 4096) -> str:
    """A hash of pieces from all over a file, its begin and its end among them."""
    total = hashlib.sha256()
    with source.open("rb") as file:
        last = max(0, file.seek(0, os.SEEK_END) - size)
        for number in range(pieces):
            file.seek(last * number // (pieces - 1))
            total.update(file.read(size))
    return total.hexdigest()[:16]


VERSION = 1
"""Raise it when other ids or numbers are made of the same text: what older code began is then made anew."""


def made_by() -> str:
    """Which version of this code makes a folder."""
    return f"version {VERSION}"


def _whole(folder: Path, manifest: Manifest) -> bool:
    """Are the files there that rows are read from, as long as they must be?"""
    sizes = {"ids.i32": 4 * len(FIELDS) * manifest.rows, "labels.u8": manifest.rows}
    return all((folder / name).exists() and (folder / name).stat().st_size == size for name, size in sizes.items())


def _refuse(manifest: Manifest) -> None:
    if manifest.bad or manifest.notes:
        raise BadLinesError(f"{manifest.source} is damaged, which strict reading refuses{_report(manifest)}")


def _report(manifest: Manifest) -> str:
    lines = [*manifest.notes]
    if manifest.bad:
        lines += [f"bad lines so far: {manifest.bad:,}", *(f"  {line}" for line in manifest.first_bad)]
    return "".join(f"\n  {line}" for line in lines)


# read ----------------------------------------------------------------------------------------------------------


def _read(source: Path, folder: Path, manifest: Manifest, strict: bool, pool: ThreadPoolExecutor, tell: Tell) -> None:
    """Parse chunks of the text side by side, and keep them in order."""
    total, known = hashlib.sha256(), len(manifest.chunks)
    waiting: deque[Future[tuple[Chunk, list[BadLine]]]] = deque()
    texts = _chunks(source, manifest)

    def keep() -> None:
        chunk, bad = waiting.popleft().result()
        manifest.chunks.append(chunk)
        manifest.first_bad.extend(bad[: FIRST_FEW - len(manifest.first_bad)])
        if strict:
            _refuse(manifest)
        manifest.save(folder)

    for number, (text, first_line, place, ends_early) in enumerate(texts):
        total.update(text)
        if number < known:
            if total.hexdigest() != manifest.chunks[number].sha256:
                line = manifest.chunks[number].first_line
                raise SourceChangedError(
                    f"{source} changed since {folder} was begun, from line {line}: delete {folder}"
                )
        else:
            waiting.append(pool.submit(_tokenize, folder, number, text, first_line, ends_early, total.hexdigest()))
        if len(waiting) > pool._max_workers:
            keep()
        tell("read", min(place, 0.99), manifest.rows)  # the last of it is still in work
    while waiting:
        keep()
    if strict:
        _refuse(manifest)
    if not manifest.chunks:
        raise ValueError(f"{source}: 0 good rows are too few, for it is empty")
    manifest.sha256 = total.hexdigest()
    _write_metadata(folder, manifest)
    _write_bad_lines(folder, manifest)
    manifest.save(folder)
    shutil.rmtree(folder / "bad")  # not before the manifest says that all was read: a run that goes on would miss them
    tell("read", 1.0, manifest.rows)


def _chunks(source: Path, manifest: Manifest) -> Iterator[tuple[bytes, int, float, bool]]:
    """Whole lines of the text, the number of the first, how far in the file they end, and whether the last is cut."""
    first_line, lines_left = 1, manifest.wanted
    for text, place in _pieces(source, manifest):
        lines = count_lines(text)
        if lines_left is not None and lines >= lines_left:
            text = text[: _end_of_line(text, lines_left)]
            lines = lines_left
        yield text, first_line, place, not text.endswith(b"\n")
        first_line += lines
        if lines_left is not None:
            lines_left -= lines
            if lines_left == 0:
                return


def _pieces(source: Path, manifest: Manifest) -> Iterator[tuple[bytes, float]]:
    """The text in pieces of whole lines, unpacked, with the share of the file they end at."""
    with source.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        unpacked = _Unpacked(gzip.GzipFile(fileobj=file), source, manifest)
        while piece := unpacked.read_lines(CHUNK) if packed else _read_lines(file, CHUNK):
            if len(piece) >= CHUNK + LONGEST:
                raise ValueError(f"{source} has a line of more than {LONGEST:,} bytes: it is not of Criteo's format")
            yield piece, min(1.0, file.tell() / max(1, manifest.bytes))


def _read_lines(file: BinaryIO, size: int) -> bytes:
    """So many bytes and on to the end of the line, read at once: a copy of all that takes as long as the reading."""
    start = file.tell()
    file.seek(size, os.SEEK_CUR)
    size += len(file.readline(LONGEST))
    file.seek(start)
    return file.read(size)


class _Unpacked:
    """A gzipped text. One that ends early is read up to there, which the manifest notes."""

    def __init__(self, file: gzip.GzipFile, source: Path, manifest: Manifest) -> None:
        self.file, self.source, self.manifest = file, source, manifest

    def read_lines(self, size: int) -> bytes:
        """So many bytes and on to the end of the line."""
        pieces: list[bytes] = []
        while size and (piece := self._tried(self.file.read1, min(size, 1 << 20))):
            pieces.append(piece)
            size -= len(piece)
        pieces.append(self._tried(self.file.readline, LONGEST))
        return b"".join(pieces)

    def _tried(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            return read(size)
        except EOFError:
            note = "the gzip stream ends early; what it has up to there was read"
            self.manifest.notes[:] = [note]
            return b""
        except (zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.source}: the gzip stream is damaged: {error}") from error


def _end_of_line(text: bytes, number: int) -> int:
    """Where line `number` of a text ends, counted from 1."""
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    return int(ends[number - 1]) + 1


def _tokenize(
    folder: Path, number: int, text: bytes, first_line: int, ends_early: bool, sha256: str
) -> tuple[Chunk, list[BadLine]]:
    from pyarrow import parquet

    table, bad = parse(text, first_line, ends_early)
    table = table.replace_schema_metadata({"first line": str(first_line), "sha256 up to its last line": sha256})
    with _replacing(_tokens_file(folder, number)) as path:
        parquet.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    if bad:
        lines = "".join(f"{line.number}\t{line.reason}\t{json.dumps(line.text)}\n" for line in bad)
        _write(folder / "bad" / f"{number:05}.tsv", lines.encode())
    return Chunk(first_line, len(table) + len(bad), len(table), len(bad), sha256), bad


def _tokens_file(folder: Path, number: int) -> Path:
    return folder / "tokens" / f"{number:05}.parquet"


def _write_metadata(folder: Path, manifest: Manifest) -> None:
    """What concerns all token files, where readers of Parquet look for it."""
    from pyarrow import parquet

    schema = parquet.read_schema(_tokens_file(folder, 0))
    about = {"source": manifest.source, "sha256": str(manifest.sha256), "rows": str(manifest.rows)}
    with _replacing(folder / "tokens" / "_common_metadata") as path:
        parquet.write_metadata(schema.with_metadata(about), path)


def _write_bad_lines(folder: Path, manifest: Manifest) -> None:
    """All bad lines in one file: number, what is wrong, how the line starts."""
    if manifest.bad:
        with _replacing(folder / "bad-lines.tsv") as path, path.open("wb") as file:
            for part in sorted((folder / "bad").glob("*.tsv")):
                with part.open("rb") as lines:
                    shutil.copyfileobj(lines, file)


# count ---------------------------------------------------------------------------------------------------------


def _labels(folder: Path, manifest: Manifest) -> Array:
    return np.concatenate([_table(folder, number, ["label"]).column(0) for number in range(len(manifest.chunks))])


def _table(
    folder: Path, number: int, columns: list[str], about: pyarrow.parquet.FileMetaData | None = None
) -> pyarrow.Table:
    """Columns of a token file; `about`, if it is at hand, spares reading what the file says about itself."""
    from pyarrow import parquet

    with parquet.ParquetFile(_tokens_file(folder, number), metadata=about) as file:
        return file.read(columns, use_threads=False)


def _tokens(column: pyarrow.ChunkedArray, name: str) -> tuple[Array, Array | None]:
    """A column as tokens, int32 buckets or uint32 categories, and where categories are missing, if any are."""
    values: Array = (column.fill_null(0) if column.null_count else column).to_numpy()
    if name in INTEGERS:
        return bucketed(values), None
    return values, column.is_null().to_numpy() if column.null_count else None


def bucketed(values: Array) -> Array:
    """floor((ln x)^2) of integers above 2; those up to 2 as they are."""
    common = _common_buckets()
    buckets: Array = common.take(values, mode="clip")
    rare = (values < 0) | (values >= len(common))
    if rare.any():
        buckets[rare] = _bucketed(values[rare])
    return buckets


def _bucketed(values: Array) -> Array:
    logarithms = np.log(np.maximum(values, 1))
    return np.where(values > 2, np.floor(logarithms**2), values).astype(np.int32)


@lru_cache(maxsize=1)
def _common_buckets() -> Array:
    return _bucketed(np.arange(1 << 16))


def _count(folder: Path, manifest: Manifest, train: Array, pool: ThreadPoolExecutor, tell: Tell) -> None:
    """Vocabularies of all fields, one field after the other on each core."""
    from pyarrow import parquet

    abouts = [parquet.read_metadata(_tokens_file(folder, number)) for number in range(len(manifest.chunks))]
    starts = np.cumsum([0, *(chunk.rows for chunk in manifest.chunks)])

    def count(name: str) -> int:
        path = folder / "vocabulary" / f"{name}.parquet"
        if not path.exists():
            kept = np.empty(int(train.sum()), np.int32 if name in INTEGERS else np.uint32)
            filled = 0
            for number, (start, end) in enumerate(pairwise(starts)):
                tokens, missing = _tokens(_table(folder, number, [name], abouts[number]).column(0), name)
                tokens = tokens[train[start:end] if missing is None else train[start:end] & ~missing]
                kept[filled : filled + len(tokens)] = tokens
                filled += len(tokens)
            _write_vocabulary(path, *vocabulary(kept[:filled], manifest.min_count))
        return 1 + len(_vocabulary(folder, name))

    sizes = []
    for done, size in enumerate(pool.map(count, FIELDS), 1):
        sizes.append(size)
        tell("count", done / len(FIELDS), manifest.rows)
    manifest.vocabulary = sizes
    manifest.save(folder)


def vocabulary(tokens: Array, min_count: int) -> tuple[Array, Array]:
    """The tokens seen often enough and how often, most frequent first, equals by token; sorts `tokens` in place."""
    tokens.sort()
    begins = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]])) if len(tokens) else np.empty(0, int)
    counts = np.diff(begins, append=len(tokens))
    kept = counts >= min_count
    found, counts = tokens[begins[kept]], counts[kept]
    order = np.argsort(-counts, kind="stable")
    return found[order], counts[order]


def _write_vocabulary(path: Path, tokens: Array, counts: Array) -> None:
    import pyarrow
    from pyarrow import parquet

    with _replacing(path) as unfinished:
        parquet.write_table(pyarrow.table({"token": tokens, "count": counts}), unfinished)


def _vocabulary(folder: Path, name: str) -> Array:
    from pyarrow import parquet

    tokens: Array = parquet.read_table(folder / "vocabulary" / f"{name}.parquet").column("token").to_numpy()
    return tokens


# encode --------------------------------------------------------------------------------------------------------


class Encoder:
    """Finds the row of the one table for tokens of a field.

    A hash table without probing: a slot holds one token and its number in the field, from 1 on; 0 is for all others.
    Tokens whose slot was taken are searched for in a sorted list, where the slot did not have what was asked for.
    What was not found is multiplied by 0, for choosing takes a processor longer when it cannot foresee the choice.
    """

    def __init__(self, vocabulary: Array, begin: int) -> None:
        tokens = vocabulary.astype(np.uint32)
        numbers = np.arange(1, 1 + len(tokens), dtype=np.uint64)
        self.begin = np.int32(begin)
        self.shift = np.uint32(32 - min(20, max(10, len(tokens).bit_length() + 3)))
        slots = self._slots(tokens)
        self.table = np.zeros(1 << (32 - int(self.shift)), np.uint64)
        self.table[0] = 1 << 32  # an empty slot must have a token that belongs elsewhere: 1 here, 0 in all others
        self.table[slots[::-1]] = (tokens.astype(np.uint64) << np.uint64(32) | numbers)[::-1]  # the most frequent stays
        (left,) = np.nonzero(self.table[slots] >> np.uint64(32) != tokens)
        left = left[np.argsort(tokens[left])]
        self.others, self.other_numbers = tokens[left], numbers[left].astype(np.int32)

    def _slots(self, tokens: Array) -> Array:
        slots: Array = tokens * np.uint32(0x9E3779B1) >> self.shift
        return slots

    def __call__(self, tokens: Array, missing: Array | None) -> Array:
        tokens = tokens.astype(np.uint32, copy=False)
        entries = self.table.take(self._slots(tokens), mode="clip")
        found = entries >> np.uint64(32) == tokens
        numbers: Array = entries.astype(np.int32) * found
        if len(self.others):
            (left,) = np.nonzero(~found)
            places = np.searchsorted(self.others, tokens[left])
            places[places == len(self.others)] = 0
            found = self.others[places] == tokens[left]
            numbers[left[found]] = self.other_numbers[places[found]]
        if missing is not None:
            numbers *= ~missing
        numbers += self.begin
        return numbers


def _encode(folder: Path, manifest: Manifest, pool: ThreadPoolExecutor, tell: Tell) -> None:
    """Write the ids of each chunk where its rows belong."""
    assert manifest.vocabulary is not None
    begins = offsets(manifest.vocabulary)
    encoders = list(pool.map(lambda name, begin: Encoder(_vocabulary(folder, name), begin), FIELDS, begins))
    starts = np.cumsum([0, *(chunk.rows for chunk in manifest.chunks)])
    width = 4 * len(FIELDS)

    def encode(number: int) -> None:
        table = _table(folder, number, list(FIELDS))
        columns = np.empty((len(FIELDS), len(table)), np.int32)
        for place, (name, encoder) in enumerate(zip(FIELDS, encoders, strict=True)):
            columns[place] = encoder(*_tokens(table.column(name), name))
        _write_at(file, np.ascontiguousarray(columns.T).data.cast("B"), int(starts[number]) * width)
        os.fdatasync(file)

    file = os.open(folder / "ids.i32", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.truncate(file, manifest.rows * width)
        left = range(manifest.encoded, len(manifest.chunks))
        for group in _groups(left, 4 * pool._max_workers):
            list(pool.map(encode, group))
            manifest.encoded = group[-1] + 1
            manifest.save(folder)
            tell("encode", manifest.encoded / len(manifest.chunks), int(starts[manifest.encoded]))
    finally:
        os.close(file)


def _write_at(file: int, content: memoryview, place: int) -> None:
    while content:
        written = os.pwrite(file, content, place)
        content, place = content[written:], place + written


def _groups(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


# files ---------------------------------------------------------------------------------------------------------


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Another name to write to; then the file is synced and takes its own name, or never."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    yield unfinished
    with unfinished.open("rb+") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def _write(path: Path, content: bytes) -> None:
    with _replacing(path) as unfinished:
        unfinished.write_bytes(content)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let no other process work on the folder; the system lets go of the lock when a process ends, however it does."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is preprocessing into {folder}") from None
        yield
