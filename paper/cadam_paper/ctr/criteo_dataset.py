"""The Criteo display advertising data set, read from the user's copy of train.txt.

The text is preprocessed on first use, and the resulting ids are kept in a cache folder (see `preprocess`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cadam.statistics.intervals import Array

from .data import Batch, Part, Reading, flip_, noise_limit, read, shuffled
from .fields import FIELDS
from .preprocess import Manifest, Report, preprocess
from .split import folds, rows_of

NAMES = ("train.txt", "train.txt.gz")


def find_source(path: Path) -> Path:
    """Return the path itself, or the file train.txt or train.txt.gz in it if the path is a folder.

    Raises:
        FileNotFoundError: If the folder has neither of these files.
    """
    if path.is_dir():
        for name in NAMES:
            if (path / name).exists():
                return path / name
        raise FileNotFoundError(f"{path} contains neither {' nor '.join(NAMES)}")
    return path


def cache_folder(source: Path, rows: int | None, cache: Path | None) -> Path:
    """Return the folder for the ids of a source: all rows and each number of first rows have separate folders.

    Args:
        source: The file train.txt or train.txt.gz.
        rows: Number of first rows; None for all.
        cache: The parent folder; None for a folder next to the source.
    """
    return (cache or source.with_name(f"{source.name}.cache")) / ("all" if rows is None else f"first-{rows}")


class Criteo:
    """The rows of Criteo's train.txt, as the parts of split x4 (`batches`) or in the order of the file (`stream`).

    The ids are memory-mapped, so they use only memory that the system can spare. A shuffled epoch accesses rows in
    random order, which is fast while the file (156 bytes per row, 7 GB in total) fits into free memory. Otherwise the
    speed is limited by the disk.

    Args:
        path: The file train.txt, the compressed train.txt.gz, or the folder that contains one of them.
        rows: Number of lines to use; None for all.
        cache: The folder of the preprocessed ids; None for a folder next to the file.
        strict: Whether to raise an error for invalid lines instead of skipping them.
        report: Called with the stage of the preprocessing, its completed share, and the number of rows.
    """

    def __init__(
        self,
        path: Path | str,
        rows: int | None = None,
        *,
        cache: Path | None = None,
        strict: bool = False,
        report: Report = lambda stage, share, rows: None,
    ) -> None:
        source = find_source(Path(path))
        self.folder = cache_folder(source, rows, cache)
        self.manifest: Manifest = preprocess(source, self.folder, rows=rows, strict=strict, report=report)
        shape = (self.manifest.rows, len(FIELDS))
        self._ids = torch.from_numpy(np.memmap(self.folder / "ids.i32", np.int32, "c", shape=shape))
        self._labels = torch.from_numpy(np.fromfile(self.folder / "labels.u8", np.uint8))
        if (
            Manifest.load(self.folder) != self.manifest
        ):  # readers do not take the lock, so a writer may have changed the files
            raise RuntimeError(f"another process is writing {self.folder}: try again later")
        self._on_device: tuple[torch.device, Tensor, Tensor] = (torch.device("cpu"), self._ids, self._labels)
        self._rows: dict[Part, Tensor] = {}

    @property
    def description(self) -> str:
        """Text that identifies the data. It is stored with every result."""
        requested_lines = self.manifest.wanted
        lines = f"first {requested_lines:,} lines" if requested_lines is not None else "all lines"
        skipped = f", {self.manifest.bad:,} bad lines left out" if self.manifest.bad else ""
        return (
            f"a file of Criteo's format, {self.manifest.source}, {lines}, {self.manifest.rows:,} rows{skipped}, "
            f"sha256 {str(self.manifest.sha256)[:16]}"
        )

    @property
    def vocabulary(self) -> Sequence[int]:
        """Number of rows of the shared embedding table that each field has."""
        assert self.manifest.vocabulary is not None
        return tuple(self.manifest.vocabulary)

    @cached_property
    def _folds(self) -> Array:
        return folds(self._labels.numpy())

    def rows(self, part: Part) -> Tensor:
        """Return the row numbers of a part in the order of the published split, counting valid lines from 0."""
        if part not in self._rows:
            self._rows[part] = torch.from_numpy(rows_of(part, self._folds).astype(np.int32))
        return self._rows[part]

    def size(self, part: Part) -> int:
        """Return the number of rows of a part."""
        return len(self.rows(part))

    def batches(
        self, part: Part, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> Iterator[Batch]:
        """Yield the batches of a part (see `Clicks.batches`)."""
        return self._read(part, batch_size, seed, device, noise)

    def stream(self, batch_size: int, *, device: torch.device, noise: float = 0.0, seed: int = 0) -> Iterator[Batch]:
        """Yield all rows in the order of the file, for prequential evaluation."""
        return self._read("stream", batch_size, seed, device, noise)

    def _read(self, reading: Reading, size: int, seed: int, device: torch.device, noise: float) -> Iterator[Batch]:
        """Yield batches that are assembled on the CPU and then copied, so that the device stores only one batch."""
        cpu = torch.device("cpu")
        for batch in read(self.feed(reading, size, seed=seed, device=cpu, noise=noise), cpu):
            yield Batch(batch.ids.to(device), batch.labels.to(device))

    def feed(
        self, reading: Reading, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> TableFeed:
        """Return a feed of the batches of a part or of the stream. All rows are copied to the device."""
        rows = None if reading == "stream" else self.rows(reading)
        limit = None
        if noise and reading in ("train", "stream"):
            learned = torch.arange(len(self._labels), dtype=torch.int32) if rows is None else rows
            limit = noise_limit(learned[self._labels.index_select(0, learned) == 0].long(), noise, seed)
        if rows is not None and reading == "train":
            rows = rows[shuffled(len(rows), seed)]
        if self._on_device[0] != device:
            self._on_device = (device, self._ids.to(device), self._labels.to(device))
        _, ids, labels = self._on_device
        total = len(labels) if rows is None else len(rows)
        return TableFeed(total, batch_size, ids, labels, None if rows is None else rows.to(device), limit, seed)


@dataclass(frozen=True)
class TableFeed:
    """A `Feed` of rows from a table of ids."""

    rows: int
    batch_size: int
    ids: Tensor
    labels: Tensor
    order: Tensor | None
    """The row numbers in the order of the batches; None for the order of the table."""
    limit: int | None
    """The noise limit (see `noise_limit`); None without label noise."""
    seed: int
    """The seed of the label noise."""

    def fill(self, index: Tensor, ids: Tensor, labels: Tensor) -> None:
        """Write the batch with this index into `ids` and `labels`."""
        rows = torch.arange(len(ids), device=ids.device).add_(index * self.batch_size)
        if self.order is not None:
            rows = self.order.index_select(0, rows).long()
        ids.copy_(self.ids.index_select(0, rows))
        labels.copy_(self.labels.index_select(0, rows))
        if self.limit is not None:
            flip_(labels, rows, self.limit, self.seed)
