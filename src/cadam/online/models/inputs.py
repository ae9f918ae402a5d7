"""What the models see of an event: an embedding per field, from one sparse table, and numbers normalised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..data.schema import Schema

EMBEDDING_STD = 0.05
MEMORY = 1_000_000
"""Statistics of numbers are those of about so many events: all of the first, then older ones fade."""
BINS = 16
"""Places that a number has in the table beside its normalised value."""


class Normalised(nn.Module):
    """Numbers less their mean, by their standard deviation, after asinh, which tames long tails; 0 where missing.

    Mean and variance are buffers, so they are part of the model's state. A batch that is learnt from is counted before
    it is normalised (Chan's parallel form of Welford's update, in float64); a batch that is only scored is not. Before
    the first one that is learnt from, every number is 0.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        for name in ("count", "mean", "variance"):
            self.register_buffer(name, torch.zeros(columns, dtype=torch.float64))

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised numbers (batch, columns), and where one is missing (nan)."""
        missing = numbers.isnan()
        tamed = torch.asinh(torch.where(missing, 0, numbers).double())
        if self.training:
            self._count(tamed.detach(), ~missing)
        deviation = self.variance.clamp_min(1e-12).sqrt()
        scaled = torch.where(missing | (self.variance <= 0), 0, (tamed - self.mean) / deviation)
        return scaled.clamp(-8, 8).float(), missing

    @torch.no_grad()
    def _count(self, tamed: Tensor, there: Tensor) -> None:
        new = there.sum(0).double()
        some = new.clamp_min(1)
        mean = torch.where(there, tamed, 0).sum(0) / some
        variance = torch.where(there, (tamed - mean).square(), 0).sum(0) / some
        share = new / (self.count + new).clamp_min(1)
        apart = mean - self.mean
        self.variance.add_(share * (variance - self.variance) + share * (1 - share) * apart.square())
        self.mean.add_(share * apart)
        self.count.add_(new).clamp_max_(MEMORY)


class Inputs(nn.Module):
    """The fields of a schema's features: an embedding (batch, fields, width) and the linear term of each event.

    Categories and hashes are places in one table with sparse gradients. A list is one field, the mean of what is in it,
    and so is a time, the mean of its hour and its day of the week. A number x is a field, too: x v + u, where v is a
    vector of its own, and u that of the bin that x lies in, or of a missing one. With width 0 there are linear terms
    only.
    """

    starts: Tensor
    bin_starts: Tensor

    def __init__(self, schema: Schema, width: int, linear: bool = True) -> None:
        super().__init__()
        kinds = schema.kinds
        self.places = [name for name, kind in kinds.items() if kind.size and not kind.length]
        self.bags = [name for name, kind in kinds.items() if kind.size and kind.length]
        self.missing_first = {name: kinds[name].optional for name in self.bags}
        self.numbers = [name for name, kind in kinds.items() if kind.name == "number"]
        count = sum(kinds[name].length or 1 for name in self.numbers)
        self.lengths = {name: kind.length for name, kind in kinds.items()}  # 0: not a list
        self.ranges: dict[str, tuple[int, int]] = {}  # of the table: the first row of a feature, and how many it has
        rows = 0
        for name in (*self.places, *self.bags):
            self.ranges[name] = rows, kinds[name].size
            rows += kinds[name].size
        starts = [self.ranges[name][0] for name in self.places]
        self.register_buffer("starts", torch.tensor(starts, dtype=torch.int64), persistent=False)
        self.register_buffer("bin_starts", rows + (BINS + 1) * torch.arange(count), persistent=False)
        rows += (BINS + 1) * count
        self.fields, self.width = len(starts) + len(self.bags) + count, width
        self.normalised = Normalised(count)
        weight = torch.empty(rows, width).normal_(0, EMBEDDING_STD)
        self.table = nn.Embedding(rows, width, sparse=True, _weight=weight) if width else None
        self.vectors = nn.Parameter(torch.empty(count, width).normal_(0, EMBEDDING_STD)) if count and width else None
        self.bias = nn.Parameter(torch.zeros(1))
        self.linear = nn.Embedding(rows, 1, sparse=True, _weight=torch.zeros(rows, 1)) if linear else None
        self.slopes = nn.Parameter(torch.zeros(count)) if linear and count else None

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Embeddings (batch, fields, width) and linear terms (batch,)."""
        embedded: list[Tensor] = []
        terms: list[Tensor] = [self.bias]
        if self.places:
            ids = torch.stack([features[name] for name in self.places], 1)
            self._look_up(ids + self.starts, embedded, terms)
        for name in self.bags:
            inside = features[name]
            weights = (inside > 0).float() if self.missing_first[name] else torch.ones_like(inside, dtype=torch.float32)
            weights = weights / weights.sum(1, keepdim=True).clamp_min(1)
            self._look_up(inside + self.ranges[name][0], embedded, terms, weights)
        if self.numbers:
            columns = [features[name].reshape(len(features[name]), -1) for name in self.numbers]
            scaled, missing = self.normalised(torch.cat(columns, 1))
            bins = (BINS * torch.sigmoid(1.702 * scaled)).long().clamp_max(BINS - 1)  # about equally full if normal
            self._look_up(torch.where(missing, BINS, bins) + self.bin_starts, embedded, terms)
            if self.vectors is not None:
                embedded[-1] = embedded[-1] + scaled.unsqueeze(2) * self.vectors
            if self.slopes is not None:
                terms.append(scaled @ self.slopes)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return torch.cat(embedded, 1) if embedded else total.new_zeros(len(total), 0, 0), total

    def _look_up(
        self, rows: Tensor, embedded: list[Tensor], terms: list[Tensor], weights: Tensor | None = None
    ) -> None:
        if self.table is not None:
            found = self.table(rows)
            embedded.append(found if weights is None else (found * weights.unsqueeze(2)).sum(1, keepdim=True))
        if self.linear is not None:
            each = self.linear(rows).squeeze(2)
            terms.append((each if weights is None else each * weights).sum(1))
