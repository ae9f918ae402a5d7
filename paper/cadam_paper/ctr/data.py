"""The interface of the CTR data sets, and functions that they share: shuffling, hashing and label noise.

A data set can be read in two ways. `batches` is the protocol of the paper's tables: one shuffled epoch of the training
part, then the validation and test parts. `stream` is online learning: all rows in the order of time, each predicted
before it is learned. Label noise turns an exact share of the training negatives into positives; the seed determines
which ones.
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
"""A part of the split of a data set."""
Reading = Literal["train", "validation", "test", "stream"]
"""The rows to read, and their order: a part of the split, or all rows in the order of time."""


@dataclass(frozen=True)
class Batch:
    """A batch of impressions and their labels."""

    ids: Tensor
    """Rows of the shared embedding table, int64 of shape (batch, 39). They include the offset of each field."""
    labels: Tensor
    """1 for a click and 0 otherwise, float32 of shape (batch,)."""


class Feed(Protocol):
    """A source of batches that are written into existing buffers, without synchronizing with the device.

    A CUDA graph can capture `fill`, because the index of the batch is a tensor on the device: after the index was
    incremented, the replayed graph reads the next batch. There are `rows // batch_size` complete batches. The remaining
    `rows % batch_size` rows, if any, are the next batch, which needs buffers of that length.
    """

    @property
    def rows(self) -> int:
        """The number of rows of all batches."""

    @property
    def batch_size(self) -> int:
        """The number of rows of a complete batch."""

    def fill(self, index: Tensor, ids: Tensor, labels: Tensor) -> None:
        """Write the batch with this index.

        Args:
            index: The index of the batch, an int64 tensor without dimensions on the device.
            ids: Output, int64 of shape (batch, 39).
            labels: Output, float32 of shape (batch,).
        """


class Clicks(Protocol):
    """A data set of clicks."""

    @property
    def description(self) -> str:
        """Text that identifies the data. It is stored with every result."""

    @property
    def vocabulary(self) -> Sequence[int]:
        """Number of rows of the shared embedding table that each field has."""

    def size(self, part: Part) -> int:
        """Return the number of rows of a part."""

    def batches(
        self, part: Part, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> Iterator[Batch]:
        """Yield the batches of a part.

        The training part is one epoch, shuffled by `seed`. The other parts have a fixed order and no label noise.
        """

    def stream(self, batch_size: int, *, device: torch.device, noise: float = 0.0, seed: int = 0) -> Iterator[Batch]:
        """Yield all rows in the order of time, for prequential evaluation."""

    def feed(
        self, reading: Reading, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> Feed:
        """Return a `Feed` of the batches of a part or of the stream. All data of the feed are on the device."""


def buffers(feed: Feed, device: torch.device) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the index of each batch of a feed and an empty batch of its size. The last batch may be shorter."""
    for index, start in enumerate(range(0, feed.rows, feed.batch_size)):
        size = min(feed.batch_size, feed.rows - start)
        ids = torch.empty(size, len(FIELDS), dtype=torch.int64, device=device)
        yield torch.tensor(index, device=device), Batch(ids, torch.empty(size, dtype=torch.float32, device=device))


def read(feed: Feed, device: torch.device) -> Iterator[Batch]:
    """Yield the batches of a feed."""
    for index, batch in buffers(feed, device):
        feed.fill(index, batch.ids, batch.labels)
        yield batch


def shuffled(rows: int, seed: int) -> Tensor:
    """Return a random permutation of the numbers below `rows`, which is equal on every device."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))


# Hashing -------------------------------------------------------------------------------------

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, the increment of SplitMix64."""


def signed(value: int) -> int:
    """Return the low 64 bits of an integer as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_FIRST, _SECOND, _STEP = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB), signed(GOLDEN)


def mix(values: Tensor) -> Tensor:
    """Hash int64 values with the finalizer of SplitMix64, which is a bijection.

    Reference: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
    """
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _FIRST
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _SECOND
    return values ^ ((values >> 31) & ((1 << 33) - 1))


@lru_cache
def key(seed: int, purpose: int) -> int:
    """Return an initial value for `keyed` that depends on the seed and on the purpose of the random numbers."""
    return int(mix(mix(torch.tensor(signed(seed))) + purpose))


def keyed(start: int, numbers: Tensor) -> Tensor:
    """Return a pseudorandom int64 for every number below 2**63. Different numbers have different values."""
    return mix(numbers * _STEP + start)


# Label noise ---------------------------------------------------------------------------------------------------

_NOISE = 1
"""The purpose of the random numbers that select the flipped negatives (see `key`)."""


def noise_keys(rows: Tensor, seed: int) -> Tensor:
    """Return the random keys of rows. The negatives with the smallest keys are flipped."""
    return keyed(key(seed, _NOISE), rows)


def noise_limit(negatives: Sequence[Tensor] | Tensor, share: float, seed: int) -> int:
    """Return the largest key of a negative that is flipped, so that exactly `share` of the negatives are flipped.

    Args:
        negatives: The row numbers of the negatives.
        share: The share to flip, from 0 to 1.
        seed: The seed that determines which negatives are flipped.

    Raises:
        ValueError: If the share is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"noise must be a share of the negatives between 0 and 1, got {share}")
    parts = [negatives] if isinstance(negatives, Tensor) else negatives
    flips = round(share * sum(map(len, parts)))
    if flips == 0:
        return signed(1 << 63)
    smallest = [part.topk(min(flips, len(part)), largest=False).values for part in (noise_keys(p, seed) for p in parts)]
    return int(torch.cat(smallest).kthvalue(flips).values)


def flip_(labels: Tensor, rows: Tensor, limit: int, seed: int) -> None:
    """Set the labels of the negatives whose keys are at most `limit` to 1, in place."""
    labels.masked_fill_((noise_keys(rows, seed) <= limit) & (labels == 0), 1)
