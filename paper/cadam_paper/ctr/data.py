"""What the study asks of its data: batches of ids and clicks, from Criteo's file or from a generator.

Two readings. `batches` is the paper's tables: a shuffled epoch of the training part, then validation and test. `stream`
is online learning: every row in the order of time, to predict first and learn from afterwards. Label noise turns an
exact share of the training negatives into positives; which ones depends on the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from .fields import FIELDS

Part = Literal["train", "validation", "test"]
Reading = Literal["train", "validation", "test", "stream"]


@dataclass(frozen=True)
class Batch:
    """Impressions and whether they were clicked.

    ids: int64 (batch, 39), rows of the one table, so the offset of each field is added already.
    labels: float32 (batch,), 1 for a click.
    """

    ids: Tensor
    labels: Tensor


class Feed(Protocol):
    """Batches by number, written into given buffers with torch operations that never wait for the device.

    A CUDA graph can capture `fill`: `index` is a 0-dim int64 tensor on the device, and the step after reads the next
    batch once it was increased. There are `rows // batch_size` whole batches; the rest of `rows % batch_size`, if any,
    is filled by the next index into buffers of just that length.
    """

    @property
    def rows(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    def fill(self, index: Tensor, ids: Tensor, labels: Tensor) -> None:
        """Write batch number `index`: ids int64 (batch, 39), labels float32 (batch,)."""


class Clicks(Protocol):
    """A data set of clicks.

    description: which data this is, shown with every result.
    vocabulary: how many rows of the table each field has.
    """

    @property
    def description(self) -> str: ...

    @property
    def vocabulary(self) -> Sequence[int]: ...

    def size(self, part: Part) -> int:
        """How many rows a part has."""

    def batches(
        self, part: Part, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> Iterator[Batch]:
        """The training part as one shuffled epoch in the order of `seed`; the others in a fixed order, never noisy."""

    def stream(self, batch_size: int, *, device: torch.device, noise: float = 0.0, seed: int = 0) -> Iterator[Batch]:
        """Every row in the order of time, to predict first and learn from afterwards."""

    def feed(
        self, reading: Reading, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> Feed:
        """The same batches, to be written into buffers; all that they are made from is kept on the device."""


def buffers(feed: Feed, device: torch.device) -> Iterator[tuple[Tensor, Batch]]:
    """The number of each batch of a feed and room for it; the last one is as long as rows are left."""
    for index, start in enumerate(range(0, feed.rows, feed.batch_size)):
        size = min(feed.batch_size, feed.rows - start)
        ids = torch.empty(size, len(FIELDS), dtype=torch.int64, device=device)
        yield torch.tensor(index, device=device), Batch(ids, torch.empty(size, dtype=torch.float32, device=device))


def read(feed: Feed, device: torch.device) -> Iterator[Batch]:
    """The batches of a feed one after the other."""
    for index, batch in buffers(feed, device):
        feed.fill(index, batch.ids, batch.labels)
        yield batch


def shuffled(rows: int, seed: int) -> Tensor:
    """The order of an epoch: the numbers below `rows`, each once, the same on every device."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))


# Numbers made from numbers -------------------------------------------------------------------------------------

GOLDEN = 0x9E3779B97F4A7C15


def signed(value: int) -> int:
    """The low 64 bits of an integer as torch's int64 has them."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_FIRST, _SECOND, _STEP = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB), signed(GOLDEN)


def mix(values: Tensor) -> Tensor:
    """A random looking int64 for every int64, no two alike: the finalizer of splitmix64, in operations on integers."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _FIRST
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _SECOND
    return values ^ ((values >> 31) & ((1 << 33) - 1))


@lru_cache
def key(seed: int, purpose: int) -> int:
    """A start for `keyed` that seeds and purposes do not share."""
    return int(mix(mix(torch.tensor(signed(seed))) + purpose))


def keyed(start: int, numbers: Tensor) -> Tensor:
    """A random looking int64 for every number below 2**63, different for different numbers."""
    return mix(numbers * _STEP + start)


# Label noise ---------------------------------------------------------------------------------------------------

_NOISE = 1


def noise_keys(rows: Tensor, seed: int) -> Tensor:
    """By which the negatives to be flipped are drawn: those with the smallest keys."""
    return keyed(key(seed, _NOISE), rows)


def noise_limit(negatives: Sequence[Tensor] | Tensor, share: float, seed: int) -> int:
    """The key up to which negatives are flipped, so that it is exactly their share; `negatives` are row numbers."""
    if not 0 <= share <= 1:
        raise ValueError(f"noise is a share of the negatives, between 0 and 1, got {share}")
    parts = [negatives] if isinstance(negatives, Tensor) else negatives
    flips = round(share * sum(map(len, parts)))
    if flips == 0:
        return signed(1 << 63)
    smallest = [part.topk(min(flips, len(part)), largest=False).values for part in (noise_keys(p, seed) for p in parts)]
    return int(torch.cat(smallest).kthvalue(flips).values)


def flip_(labels: Tensor, rows: Tensor, limit: int, seed: int) -> None:
    """Turn the negatives that were drawn into positives, in place."""
    labels.masked_fill_((noise_keys(rows, seed) <= limit) & (labels == 0), 1)
