"""A small data set of clicks in memory that implements the protocol `cadam_paper.ctr.data.Clicks`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cadam_paper.ctr.data import Batch, Part, Reading
from cadam_paper.ctr.fields import offsets


@dataclass(frozen=True)
class InMemoryFeed:
    """A feed of rows in memory."""

    ids: Tensor
    labels: Tensor
    batch_size: int

    @property
    def rows(self) -> int:
        return len(self.labels)

    def fill(self, index: Tensor, ids: Tensor, labels: Tensor) -> None:
        positions = index * self.batch_size + torch.arange(len(labels), device=ids.device)
        ids.copy_(self.ids[positions])
        labels.copy_(self.labels[positions])


def read(feed: InMemoryFeed) -> Iterator[Batch]:
    yield from map(Batch, feed.ids.split(feed.batch_size), feed.labels.split(feed.batch_size))


class InMemoryClicks:
    """Clicks whose ids are drawn at random. Small ids are more frequent, and each id changes the click probability."""

    def __init__(self, rows: int = 3000, vocabulary: tuple[int, ...] = (4, 30, 11, 2000), seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.description, self.vocabulary = f"{rows} rows held in memory", vocabulary
        columns = [
            (n * torch.rand(rows, generator=random) ** 3).long() + start
            for n, start in zip(vocabulary, offsets(vocabulary), strict=True)
        ]
        self.ids = torch.stack(columns, 1)
        effect = torch.randn(sum(vocabulary), generator=random)
        self.labels = (torch.rand(rows, generator=random) < torch.sigmoid(effect[self.ids].sum(1) - 1)).float()
        cut = int(0.8 * rows), int(0.9 * rows)
        self.parts = {"train": slice(0, cut[0]), "validation": slice(*cut), "test": slice(cut[1], rows)}

    def size(self, part: Part) -> int:
        return len(self.labels[self.parts[part]])

    def batches(
        self, part: Part, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> Iterator[Batch]:
        return read(self.feed(part, batch_size, seed=seed, device=device, noise=noise))

    def stream(self, batch_size: int, *, device: torch.device, noise: float = 0.0, seed: int = 0) -> Iterator[Batch]:
        return read(self.feed("stream", batch_size, seed=seed, device=device, noise=noise))

    def feed(
        self, reading: Reading, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> InMemoryFeed:
        part = slice(None) if reading == "stream" else self.parts[reading]
        ids, labels = self.ids[part], self.labels[part].clone()
        if reading == "train":
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
            ids, labels = ids[order], labels[order]
        negatives = (labels == 0).nonzero().squeeze(1)
        labels[negatives[: round(noise * len(negatives))]] = 1
        return InMemoryFeed(ids.to(device), labels.to(device), batch_size)
