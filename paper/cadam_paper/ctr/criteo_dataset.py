"""The user's own copy of Criteo's display advertising data, read from a cache that is made on first use."""

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
from .preprocess import Manifest, Tell, preprocess
from .split import folds, rows_of

NAMES = ("train.txt", "train.txt.gz")


def find_source(path: Path) -> Path:
    """The file itself, or Criteo's file in this folder."""
    if path.is_dir():
        for name in NAMES:
            if (path / name).exists():
                return path / name
        raise FileNotFoundError(f"{path} has no {' and no '.join(NAMES)}")
    return path


def cache_folder(source: Path, rows: int | None, cache: Path | None) -> Path:
    """Where the numbers of a source are kept: beside it, unless said otherwise; a prefix on its own."""
    return (cache or source.with_name(f"{source.name}.cache")) / ("all" if rows is None else f"first-{rows}")


class Criteo:
    """Rows of Criteo's file: `table` reading by the published split x4, `stream` reading in the order of the file.

    The ids stay in a memory-mapped file, so that memory is taken only as the system can spare it. A shuffled epoch
    picks rows from anywhere in it: fast while the file (156 bytes a row, 7 GB in all) fits into memory that is free,
    and as fast as the disk is otherwise.
    """

    def __init__(
        self,
        path: Path | str,
        rows: int | None = None,
        *,
        cache: Path | None = None,
        strict: bool = False,
        tell: Tell = lambda stage, share, rows: None,
    ) -> None:
        source = find_source(Path(path))
        self.folder = cache_folder(source, rows, cache)
        self.manifest: Manifest = preprocess(source, self.folder, rows=rows, strict=strict, tell=tell)
        shape = (self.manifest.rows, len(FIELDS))
        self._ids = torch.from_numpy(np.memmap(self.folder / "ids.i32", np.int32, "c", shape=shape))
        self._labels = torch.from_numpy(np.fromfile(self.folder / "labels.u8", np.uint8))
        if Manifest.load(self.folder) != self.manifest:  # readers have no lock
            raise RuntimeError(f"{self.folder} is made anew by another process just now: try again later")
        self._on_device: tuple[torch.device, Tensor, Tensor] = (torch.device("cpu"), self._ids, self._labels)
        self._rows: dict[Part, Tensor] = {}

    @property
    def description(self) -> str:
        wanted = self.manifest.wanted
        which = f"first {wanted:,} lines" if wanted is not None else "all lines"
        left_out = f", {self.manifest.bad:,} bad lines left out" if self.manifest.bad else ""
        return (
            f"a file of Criteo's format, {self.manifest.source}, {which}, {self.manifest.rows:,} rows{left_out}, "
            f"sha256 {str(self.manifest.sha256)[:16]}"
        )

    @property
    def vocabulary(self) -> Sequence[int]:
        assert self.manifest.vocabulary is not None
        return tuple(self.manifest.vocabulary)

    @cached_property
    def _folds(self) -> Array:
        return folds(self._labels.numpy())

    def rows(self, part: Part) -> Tensor:
        """The numbers of the rows of a part, from 0 among the good lines, in the order of the published split."""
        if part not in self._rows:
            self._rows[part] = torch.from_numpy(rows_of(part, self._folds).astype(np.int32))
        return self._rows[part]

    def size(self, part: Part) -> int:
        return len(self.rows(part))

    def batches(
        self, part: Part, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> Iterator[Batch]:
        return self._read(part, batch_size, seed, device, noise)

    def stream(self, batch_size: int, *, device: torch.device, noise: float = 0.0, seed: int = 0) -> Iterator[Batch]:
        return self._read("stream", batch_size, seed, device, noise)

    def _read(self, reading: Reading, size: int, seed: int, device: torch.device, noise: float) -> Iterator[Batch]:
        """Batches gathered on CPU, then moved: only the batch is on the device."""
        cpu = torch.device("cpu")
        for batch in read(self.feed(reading, size, seed=seed, device=cpu, noise=noise), cpu):
            yield Batch(batch.ids.to(device), batch.labels.to(device))

    def feed(
        self, reading: Reading, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> TableFeed:
        """Batches by number, from all rows on the device."""
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
    """Batches of a table by number, for buffers of the caller: see `Feed`."""

    rows: int
    batch_size: int
    ids: Tensor
    labels: Tensor
    order: Tensor | None
    limit: int | None
    seed: int

    def fill(self, index: Tensor, ids: Tensor, labels: Tensor) -> None:
        rows = torch.arange(len(ids), device=ids.device).add_(index * self.batch_size)
        if self.order is not None:
            rows = self.order.index_select(0, rows).long()
        ids.copy_(self.ids.index_select(0, rows))
        labels.copy_(self.labels.index_select(0, rows))
        if self.limit is not None:
            flip_(labels, rows, self.limit, self.seed)
