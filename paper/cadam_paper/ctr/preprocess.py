"""Preprocessing of Criteo's train.txt into a folder of ids, in three stages that can be interrupted and resumed.

    read     parse the text into tokens/*.parquet, in the order of the file, and bad-lines.tsv
    count    count the tokens of the training part of split x4; those that occur at least 10 times are the vocabulary
    encode   write each row to ids.i32 as 39 rows of the shared embedding table (int32), in the order of the file

The Parquet files are a permanent copy of the text. They are smaller, typed and readable by other tools, and
tokens/_common_metadata contains the SHA-256 hash of the source. ids.i32 is a flat file because a shuffled epoch
accesses single rows in random order: a memory-mapped flat file supports this with bounded memory, Parquet does not.

Each file is written under a temporary name, synchronized to disk, renamed, and then recorded in manifest.json in the
same way. A process that is killed at any time therefore leaves a folder from which the next one resumes. Only one
process at a time can write to a folder. Once it is complete, any number of processes can read it without a lock and
without write permission.
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
"""Bytes of text that are parsed at once."""
MAX_LINE = 1 << 20
"""The longest allowed line in bytes. Without this limit, a file without newlines would be read into memory at once."""
MIN_COUNT = 10
"""Tokens that occur less often in the training part are out of vocabulary."""
FORMAT = 2
"""Version of the manifest's format."""
MAX_SHOWN = 5
"""Number of invalid lines that messages show."""

Stage = Literal["read", "count", "encode"]
STAGES: tuple[Stage, ...] = ("read", "count", "encode")
Report = Callable[[Stage, float, int], None]
"""Function that is called with the stage, its completed share, and the number of rows."""


class BadLinesError(ValueError):
    """Raised in strict mode if the source has invalid lines."""


class SourceChangedError(ValueError):
    """Raised if the source differs from the one that the folder was started with."""


@dataclass
class Chunk:
    """A chunk of the source: its numbers of lines, of valid rows and of invalid lines.

    `sha256` is the hash of the whole text from the start of the file to the end of the chunk.
    """

    first_line: int
    lines: int
    rows: int
    bad: int
    sha256: str


@dataclass
class Manifest:
    """The state of a folder, stored as manifest.json."""

    source: str
    bytes: int
    modified: int
    sample: str
    """Hash of samples of the source, because a file can change without a change of its size and modification time."""
    made_by: str
    """Version of the code that parsed the text (see `made_by`)."""
    wanted: int | None
    """Number of requested lines; None for all."""
    min_count: int
    format: int = FORMAT
    chunks: list[Chunk] = field(default_factory=list)
    sha256: str | None = None
    encoded: int = 0
    """Number of encoded chunks."""
    vocabulary: list[int] | None = None
    first_bad: list[BadLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Warnings about the source."""

    @property
    def rows(self) -> int:
        """The number of valid rows so far."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def bad(self) -> int:
        """The number of invalid lines so far."""
        return sum(chunk.bad for chunk in self.chunks)

    @property
    def complete(self) -> bool:
        """Whether all rows are encoded."""
        return self.sha256 is not None and self.vocabulary is not None and self.encoded == len(self.chunks)

    def save(self, folder: Path) -> None:
        """Write manifest.json."""
        _write(folder / "manifest.json", json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """Load the manifest of a folder; return None if it does not exist or has another format.

        Raises:
            ValueError: If the manifest is damaged.
        """
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
            raise ValueError(f"{path} is damaged ({error}): delete {folder} and try again") from error


def preprocess(
    source: Path,
    folder: Path,
    *,
    rows: int | None = None,
    strict: bool = False,
    min_count: int = MIN_COUNT,
    workers: int | None = None,
    report: Report = lambda stage, share, rows: None,
) -> Manifest:
    """Preprocess a source into a folder, and resume where an earlier call stopped.

    Args:
        source: The file train.txt, possibly compressed with gzip.
        folder: The folder for the ids.
        rows: Number of lines to use; None for all.
        strict: Whether to raise an error for invalid lines instead of skipping them.
        min_count: Tokens that occur less often are out of vocabulary.
        workers: Number of threads; None to choose automatically.
        report: Called with the stage, its completed share, and the number of rows.

    Returns:
        The manifest of the complete folder.

    Raises:
        BadLinesError: In strict mode, if the source has invalid lines.
        SourceChangedError: If the source changed since an interrupted call.
    """
    if rows is not None and rows < 10:
        raise ValueError(f"rows must be at least 10, got {rows}")
    complete = finished(source, folder, rows=rows, min_count=min_count)
    if complete is not None:
        if strict:
            _raise_if_damaged(complete)
        return complete
    require_pyarrow()
    folder.mkdir(parents=True, exist_ok=True)
    # There is one thread more than there are cores, because usually one of them waits for the disk.
    workers = workers or min(4, 1 + (os.cpu_count() or 1))
    with _lock(folder), ThreadPoolExecutor(workers) as pool:
        manifest = _load_or_create(source, folder, rows, min_count)
        if strict:
            _raise_if_damaged(manifest)
        if not _has_all_rows(folder, manifest):
            manifest.encoded = 0
        if manifest.complete:
            return manifest
        if manifest.sha256 is None:
            _read(source, folder, manifest, strict, pool, report)
        if manifest.rows < 10:
            raise ValueError(f"{source}: {manifest.rows} valid rows are too few{_describe_damage(manifest)}")
        labels = _labels(folder, manifest)
        clicks = int(labels.sum())
        if not FOLDS <= clicks <= len(labels) - FOLDS:
            raise ValueError(
                f"{source}: {clicks} clicks in {len(labels)} rows, but each of the {FOLDS} folds needs both classes"
            )
        fold_of = folds(labels)
        if manifest.vocabulary is None:
            _count(folder, manifest, np.isin(fold_of, PARTS["train"]), pool, report)
        _write(folder / "labels.u8", labels.tobytes())
        _encode(folder, manifest, pool, report)
    return manifest


def finished(source: Path, folder: Path, *, rows: int | None = None, min_count: int = MIN_COUNT) -> Manifest | None:
    """Return the manifest of a folder that is complete, otherwise None."""
    manifest = _load_matching(source, folder, rows, min_count)
    if manifest is None or not manifest.complete or not _has_all_rows(folder, manifest):
        return None
    return manifest


def _load_or_create(source: Path, folder: Path, rows: int | None, min_count: int) -> Manifest:
    """Return the manifest of a folder that was started from this source, or empty the folder and create a manifest."""
    manifest = _load_matching(source, folder, rows, min_count)
    if manifest is not None:
        return manifest
    (folder / "manifest.json").unlink(missing_ok=True)  # deleted first, because it must not refer to missing files
    for name in ("tokens", "bad", "vocabulary"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    for name in ("ids.i32", "labels.u8", "bad-lines.tsv"):
        (folder / name).unlink(missing_ok=True)
    manifest = _new_manifest(source, rows, min_count)
    manifest.save(folder)
    return manifest


def _load_matching(source: Path, folder: Path, rows: int | None, min_count: int) -> Manifest | None:
    """Return the manifest of a folder if it was started from this source and can be continued, otherwise None.

    A complete folder can be used even if the source was deleted or another version of the code created it.
    """
    manifest = Manifest.load(folder)
    if not source.exists():
        if manifest is not None and manifest.complete and (manifest.wanted, manifest.min_count) == (rows, min_count):
            return manifest
        raise FileNotFoundError(f"{source} does not exist, and {folder} has no complete cache of it")
    if manifest is None:
        return None
    new = _new_manifest(source, rows, min_count)
    names = ["bytes", "modified", "sample", "wanted", "min_count", *([] if manifest.complete else ["made_by"])]
    return manifest if all(getattr(manifest, name) == getattr(new, name) for name in names) else None


def _new_manifest(source: Path, rows: int | None, min_count: int) -> Manifest:
    status = source.stat()
    return Manifest(source.name, status.st_size, status.st_mtime_ns, _sample(source), made_by(), rows, min_count)


def _sample(source: Path, pieces: int = 64, size: int = 4096) -> str:
    """Hash samples from evenly spaced positions of a file, including its start and its end."""
    total = hashlib.sha256()
    with source.open("rb") as file:
        last = max(0, file.seek(0, os.SEEK_END) - size)
        for number in range(pieces):
            file.seek(last * number // (pieces - 1))
            total.update(file.read(size))
    return total.hexdigest()[:16]


VERSION = 1
"""Increase this number when the same text would give other ids. Unfinished folders of older versions are discarded."""


def made_by() -> str:
    """Return the version of this code, as it is stored in manifests."""
    return f"version {VERSION}"


def _has_all_rows(folder: Path, manifest: Manifest) -> bool:
    """Whether the files of ids and labels exist and have the expected sizes."""
    sizes = {"ids.i32": 4 * len(FIELDS) * manifest.rows, "labels.u8": manifest.rows}
    return all((folder / name).exists() and (folder / name).stat().st_size == size for name, size in sizes.items())


def _raise_if_damaged(manifest: Manifest) -> None:
    if manifest.bad or manifest.notes:
        raise BadLinesError(f"{manifest.source} is damaged, and strict mode was requested{_describe_damage(manifest)}")


def _describe_damage(manifest: Manifest) -> str:
    lines = [*manifest.notes]
    if manifest.bad:
        lines += [f"invalid lines so far: {manifest.bad:,}", *(f"  {line}" for line in manifest.first_bad)]
    return "".join(f"\n  {line}" for line in lines)


# Stage 1: read -------------------------------------------------------------------------------------------------


def _read(
    source: Path, folder: Path, manifest: Manifest, strict: bool, pool: ThreadPoolExecutor, report: Report
) -> None:
    """Parse chunks of the text concurrently, and record them in order."""
    total, recorded = hashlib.sha256(), len(manifest.chunks)
    pending: deque[Future[tuple[Chunk, list[BadLine]]]] = deque()
    texts = _chunks(source, manifest)

    def record_next() -> None:
        chunk, bad = pending.popleft().result()
        manifest.chunks.append(chunk)
        manifest.first_bad.extend(bad[: MAX_SHOWN - len(manifest.first_bad)])
        if strict:
            _raise_if_damaged(manifest)
        manifest.save(folder)

    for number, (text, first_line, share, ends_early) in enumerate(texts):
        total.update(text)
        if number < recorded:
            if total.hexdigest() != manifest.chunks[number].sha256:
                line = manifest.chunks[number].first_line
                raise SourceChangedError(
                    f"{source} changed after line {line} since {folder} was started: delete {folder} and try again"
                )
        else:
            pending.append(pool.submit(_tokenize, folder, number, text, first_line, ends_early, total.hexdigest()))
        if len(pending) > pool._max_workers:
            record_next()
        report("read", min(share, 0.99), manifest.rows)  # the last chunks are still being parsed
    while pending:
        record_next()
    if strict:
        _raise_if_damaged(manifest)
    if not manifest.chunks:
        raise ValueError(f"{source} is empty")
    manifest.sha256 = total.hexdigest()
    _write_metadata(folder, manifest)
    _write_bad_lines(folder, manifest)
    manifest.save(folder)
    shutil.rmtree(folder / "bad")  # only after the manifest was saved, because a resumed call would need these files
    report("read", 1.0, manifest.rows)


def _chunks(source: Path, manifest: Manifest) -> Iterator[tuple[bytes, int, float, bool]]:
    """Yield chunks of complete lines, up to the requested number of lines.

    Yields:
        The text, the number of its first line, the share of the file up to its end, and whether it lacks a final
        newline.
    """
    first_line, lines_left = 1, manifest.wanted
    for text, share in _pieces(source, manifest):
        lines = count_lines(text)
        if lines_left is not None and lines >= lines_left:
            text = text[: _end_of_line(text, lines_left)]
            lines = lines_left
        yield text, first_line, share, not text.endswith(b"\n")
        first_line += lines
        if lines_left is not None:
            lines_left -= lines
            if lines_left == 0:
                return


def _pieces(source: Path, manifest: Manifest) -> Iterator[tuple[bytes, float]]:
    """Yield the decompressed text in pieces of complete lines, with the share of the file up to their end."""
    with source.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        decompressed = _GzipText(gzip.GzipFile(fileobj=file), source, manifest)
        while piece := decompressed.read_lines(CHUNK) if is_compressed else _read_lines(file, CHUNK):
            if len(piece) >= CHUNK + MAX_LINE:
                raise ValueError(
                    f"{source} has a line of more than {MAX_LINE:,} bytes, so it does not have Criteo's format"
                )
            yield piece, min(1.0, file.tell() / max(1, manifest.bytes))


def _read_lines(file: BinaryIO, size: int) -> bytes:
    """Read `size` bytes and the rest of the last line.

    The end of the line is determined first, so that a single read returns everything: joining two buffers would take
    as long as the read itself.
    """
    start = file.tell()
    file.seek(size, os.SEEK_CUR)
    size += len(file.readline(MAX_LINE))
    file.seek(start)
    return file.read(size)


class _GzipText:
    """A text that is compressed with gzip. If the file is truncated, a note in the manifest says so."""

    def __init__(self, file: gzip.GzipFile, source: Path, manifest: Manifest) -> None:
        self.file, self.source, self.manifest = file, source, manifest

    def read_lines(self, size: int) -> bytes:
        """Read `size` bytes and the rest of the last line."""
        pieces: list[bytes] = []
        while size and (piece := self._read(self.file.read1, min(size, 1 << 20))):
            pieces.append(piece)
            size -= len(piece)
        pieces.append(self._read(self.file.readline, MAX_LINE))
        return b"".join(pieces)

    def _read(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            return read(size)
        except EOFError:
            note = "the gzip stream is truncated; the text before its end was read"
            self.manifest.notes[:] = [note]
            return b""
        except (zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.source}: the gzip stream is damaged: {error}") from error


def _end_of_line(text: bytes, number: int) -> int:
    """Return the end of a line of a text. Lines are counted from 1."""
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
    """Write the metadata of all token files to _common_metadata, as is usual for Parquet data sets."""
    from pyarrow import parquet

    schema = parquet.read_schema(_tokens_file(folder, 0))
    about = {"source": manifest.source, "sha256": str(manifest.sha256), "rows": str(manifest.rows)}
    with _replacing(folder / "tokens" / "_common_metadata") as path:
        parquet.write_metadata(schema.with_metadata(about), path)


def _write_bad_lines(folder: Path, manifest: Manifest) -> None:
    """Write all invalid lines to one file, with their numbers, the reasons, and the beginning of their texts."""
    if manifest.bad:
        with _replacing(folder / "bad-lines.tsv") as path, path.open("wb") as file:
            for part in sorted((folder / "bad").glob("*.tsv")):
                with part.open("rb") as lines:
                    shutil.copyfileobj(lines, file)


# Stage 2: count ------------------------------------------------------------------------------------------------


def _labels(folder: Path, manifest: Manifest) -> Array:
    return np.concatenate([_table(folder, number, ["label"]).column(0) for number in range(len(manifest.chunks))])


def _table(
    folder: Path, number: int, columns: list[str], metadata: pyarrow.parquet.FileMetaData | None = None
) -> pyarrow.Table:
    """Read columns of a token file. Passing its metadata, if they are loaded already, avoids reading them again."""
    from pyarrow import parquet

    with parquet.ParquetFile(_tokens_file(folder, number), metadata=metadata) as file:
        return file.read(columns, use_threads=False)


def _tokens(column: pyarrow.ChunkedArray, name: str) -> tuple[Array, Array | None]:
    """Return the tokens of a column and a mask of its missing categories, or None if no category is missing.

    Tokens are int32 buckets of integers or uint32 categories.
    """
    values: Array = (column.fill_null(0) if column.null_count else column).to_numpy()
    if name in INTEGERS:
        return bucketed(values), None
    return values, column.is_null().to_numpy() if column.null_count else None


def bucketed(values: Array) -> Array:
    """Return floor((ln x)^2) for integers above 2, and the integer itself otherwise. Small integers are looked up."""
    common = _common_buckets()
    buckets: Array = common.take(values, mode="clip")
    other = (values < 0) | (values >= len(common))
    if other.any():
        buckets[other] = _compute_buckets(values[other])
    return buckets


def _compute_buckets(values: Array) -> Array:
    logarithms = np.log(np.maximum(values, 1))
    return np.where(values > 2, np.floor(logarithms**2), values).astype(np.int32)


@lru_cache(maxsize=1)
def _common_buckets() -> Array:
    return _compute_buckets(np.arange(1 << 16))


def _count(folder: Path, manifest: Manifest, train: Array, pool: ThreadPoolExecutor, report: Report) -> None:
    """Count the tokens of all fields and write their vocabularies; each thread processes one field at a time."""
    from pyarrow import parquet

    metadata = [parquet.read_metadata(_tokens_file(folder, number)) for number in range(len(manifest.chunks))]
    starts = np.cumsum([0, *(chunk.rows for chunk in manifest.chunks)])

    def count(name: str) -> int:
        path = folder / "vocabulary" / f"{name}.parquet"
        if not path.exists():
            kept = np.empty(int(train.sum()), np.int32 if name in INTEGERS else np.uint32)
            filled = 0
            for number, (start, end) in enumerate(pairwise(starts)):
                tokens, missing = _tokens(_table(folder, number, [name], metadata[number]).column(0), name)
                tokens = tokens[train[start:end] if missing is None else train[start:end] & ~missing]
                kept[filled : filled + len(tokens)] = tokens
                filled += len(tokens)
            _write_vocabulary(path, *vocabulary(kept[:filled], manifest.min_count))
        return 1 + len(_vocabulary(folder, name))

    sizes = []
    for done, size in enumerate(pool.map(count, FIELDS), 1):
        sizes.append(size)
        report("count", done / len(FIELDS), manifest.rows)
    manifest.vocabulary = sizes
    manifest.save(folder)


def vocabulary(tokens: Array, min_count: int) -> tuple[Array, Array]:
    """Return the tokens that occur at least `min_count` times, and their counts.

    The most frequent token comes first; ties are ordered by token. The argument is sorted in place.
    """
    tokens.sort()
    starts = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]])) if len(tokens) else np.empty(0, int)
    counts = np.diff(starts, append=len(tokens))
    kept = counts >= min_count
    frequent, counts = tokens[starts[kept]], counts[kept]
    order = np.argsort(-counts, kind="stable")
    return frequent[order], counts[order]


def _write_vocabulary(path: Path, tokens: Array, counts: Array) -> None:
    import pyarrow
    from pyarrow import parquet

    with _replacing(path) as unfinished:
        parquet.write_table(pyarrow.table({"token": tokens, "count": counts}), unfinished)


def _vocabulary(folder: Path, name: str) -> Array:
    from pyarrow import parquet

    tokens: Array = parquet.read_table(folder / "vocabulary" / f"{name}.parquet").column("token").to_numpy()
    return tokens


# Stage 3: encode -----------------------------------------------------------------------------------------------


class Encoder:
    """Maps the tokens of a field to rows of the shared embedding table.

    It is a hash table without probing: a slot holds one token and its id in the field, which starts at 1, because 0 is
    the out-of-vocabulary id. Tokens whose slot is occupied by a more frequent token are kept in a sorted array and are
    found by binary search. Ids are multiplied by a 0/1 mask instead of being selected by a branch, because the branch
    would be mispredicted often.
    """

    def __init__(self, vocabulary: Array, offset: int) -> None:
        tokens = vocabulary.astype(np.uint32)
        numbers = np.arange(1, 1 + len(tokens), dtype=np.uint64)
        self.offset = np.int32(offset)
        self.shift = np.uint32(32 - min(20, max(10, len(tokens).bit_length() + 3)))
        slots = self._slots(tokens)
        self.table = np.zeros(1 << (32 - int(self.shift)), np.uint64)
        # An empty slot contains 0, which looks like token 0. No other token than 0 matches it, and token 0 belongs to
        # slot 0, so only slot 0 needs a different value: token 1, which belongs to another slot.
        self.table[0] = 1 << 32
        # If several tokens have the same slot, the last write remains. In reverse order, this is the most frequent one.
        self.table[slots[::-1]] = (tokens.astype(np.uint64) << np.uint64(32) | numbers)[::-1]
        (displaced,) = np.nonzero(self.table[slots] >> np.uint64(32) != tokens)
        displaced = displaced[np.argsort(tokens[displaced])]
        self.others, self.other_numbers = tokens[displaced], numbers[displaced].astype(np.int32)

    def _slots(self, tokens: Array) -> Array:
        slots: Array = tokens * np.uint32(0x9E3779B1) >> self.shift
        return slots

    def __call__(self, tokens: Array, missing: Array | None) -> Array:
        """Return the rows of the shared embedding table for tokens.

        Args:
            tokens: The tokens of a column.
            missing: A mask of missing values, which get the out-of-vocabulary id; None if there are none.
        """
        tokens = tokens.astype(np.uint32, copy=False)
        entries = self.table.take(self._slots(tokens), mode="clip")
        matches = entries >> np.uint64(32) == tokens
        numbers: Array = entries.astype(np.int32) * matches
        if len(self.others):
            (unmatched,) = np.nonzero(~matches)
            positions = np.searchsorted(self.others, tokens[unmatched])
            positions[positions == len(self.others)] = 0
            matches = self.others[positions] == tokens[unmatched]
            numbers[unmatched[matches]] = self.other_numbers[positions[matches]]
        if missing is not None:
            numbers *= ~missing
        numbers += self.offset
        return numbers


def _encode(folder: Path, manifest: Manifest, pool: ThreadPoolExecutor, report: Report) -> None:
    """Write the ids of each chunk to their position in ids.i32."""
    assert manifest.vocabulary is not None
    encoders = list(
        pool.map(lambda name, offset: Encoder(_vocabulary(folder, name), offset), FIELDS, offsets(manifest.vocabulary))
    )
    starts = np.cumsum([0, *(chunk.rows for chunk in manifest.chunks)])
    width = 4 * len(FIELDS)

    def encode(number: int) -> None:
        table = _table(folder, number, list(FIELDS))
        columns = np.empty((len(FIELDS), len(table)), np.int32)
        for index, (name, encoder) in enumerate(zip(FIELDS, encoders, strict=True)):
            columns[index] = encoder(*_tokens(table.column(name), name))
        _write_at(file, np.ascontiguousarray(columns.T).data.cast("B"), int(starts[number]) * width)
        os.fdatasync(file)

    file = os.open(folder / "ids.i32", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.truncate(file, manifest.rows * width)
        remaining = range(manifest.encoded, len(manifest.chunks))
        for group in _groups(remaining, 4 * pool._max_workers):
            list(pool.map(encode, group))
            manifest.encoded = group[-1] + 1
            manifest.save(folder)
            report("encode", manifest.encoded / len(manifest.chunks), int(starts[manifest.encoded]))
    finally:
        os.close(file)


def _write_at(file: int, content: memoryview, position: int) -> None:
    while content:
        written = os.pwrite(file, content, position)
        content, position = content[written:], position + written


def _groups(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


# Files ---------------------------------------------------------------------------------------------------------


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; then synchronize the file to disk and rename it to `path`."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    yield unfinished
    with unfinished.open("rb+") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def _write(path: Path, content: bytes) -> None:
    with _replacing(path) as unfinished:
        unfinished.write_bytes(content)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the folder against other writers. The operating system releases the lock when the process ends or is killed.

    Raises:
        RuntimeError: If another process holds the lock.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is preprocessing into {folder}") from None
        yield
