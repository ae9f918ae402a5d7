"""The input layer of the ready-made models: embeddings from one sparse table, and normalized numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..data.schema import Schema

EMBEDDING_STD = 0.05
"""The standard deviation of the initial embeddings."""
MEMORY = 1_000_000
"""The number of events after which the statistics of numbers become an exponential moving average."""
BINS = 16
"""The number of bins of a number. Each bin has a row in the table, in addition to the normalized value."""


class NumberNormalizer(nn.Module):
    """Normalizes numbers to (asinh(x) - mean) / standard deviation, with 0 for missing numbers.

    asinh limits the influence of long tails. Mean and variance are buffers, so they are part of the model's state. A
    training batch is added to the statistics before it is normalized (Chan's parallel form of Welford's update, in
    float64); a batch that is only predicted is not. Before the first training batch every number is normalized to 0.

    Args:
        columns: how many numbers an event has.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        for name in ("count", "mean", "variance"):
            self.register_buffer(name, torch.zeros(columns, dtype=torch.float64))

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized numbers (batch, columns), and a mask of the missing ones, which are nan."""
        missing = numbers.isnan()
        compressed = torch.asinh(torch.where(missing, 0, numbers).double())
        if self.training:
            self._update(compressed.detach(), ~missing)
        deviation = self.variance.clamp_min(1e-12).sqrt()
        scaled = torch.where(missing | (self.variance <= 0), 0, (compressed - self.mean) / deviation)
        return scaled.clamp(-8, 8).float(), missing

    @torch.no_grad()
    def _update(self, compressed: Tensor, present: Tensor) -> None:
        """Add a batch to the statistics."""
        added = present.sum(0).double()
        divisor = added.clamp_min(1)
        mean = torch.where(present, compressed, 0).sum(0) / divisor
        variance = torch.where(present, (compressed - mean).square(), 0).sum(0) / divisor
        share = added / (self.count + added).clamp_min(1)
        difference = mean - self.mean
        self.variance.add_(share * (variance - self.variance) + share * (1 - share) * difference.square())
        self.mean.add_(share * difference)
        self.count.add_(added).clamp_max_(MEMORY)


class Inputs(nn.Module):
    """Converts the features of a schema to embeddings, one per field, and to a linear term per event.

    All categories and hashes are rows of one table with sparse gradients. A list is one field: the mean of its entries.
    So is a time: the mean of its hour and its day of the week. A number x is a field too: x v + u, where the vector v
    belongs to the feature, and u to the bin that x is in, or to the bin of missing numbers.

    Args:
        schema: the features.
        width: the width of the embeddings; 0 for linear terms only.
        linear: whether there are linear terms.
    """

    starts: Tensor
    bin_starts: Tensor

    def __init__(self, schema: Schema, width: int, linear: bool = True) -> None:
        super().__init__()
        kinds = schema.kinds
        self.single_ids = [name for name, kind in kinds.items() if kind.size and not kind.length]
        self.id_lists = [name for name, kind in kinds.items() if kind.size and kind.length]
        self.numbers = [name for name, kind in kinds.items() if kind.name == "number"]
        self.lengths = {name: kind.length for name, kind in kinds.items()}
        """The length of each list feature, 0 for features that are not lists."""
        self.zero_is_missing = {name: kinds[name].optional for name in self.id_lists}
        self.row_ranges: dict[str, tuple[int, int]] = {}
        """For each feature with ids: its first row in the table, and its number of rows."""
        rows = 0
        for name in (*self.single_ids, *self.id_lists):
            self.row_ranges[name] = rows, kinds[name].size
            rows += kinds[name].size
        starts = [self.row_ranges[name][0] for name in self.single_ids]
        number_count = sum(kinds[name].length or 1 for name in self.numbers)
        self.register_buffer("starts", torch.tensor(starts, dtype=torch.int64), persistent=False)
        self.register_buffer("bin_starts", rows + (BINS + 1) * torch.arange(number_count), persistent=False)
        rows += (BINS + 1) * number_count
        self.fields, self.width = len(starts) + len(self.id_lists) + number_count, width
        self.normalizer = NumberNormalizer(number_count)
        weight = torch.empty(rows, width).normal_(0, EMBEDDING_STD)
        self.table = nn.Embedding(rows, width, sparse=True, _weight=weight) if width else None
        self.vectors = None
        if number_count and width:
            self.vectors = nn.Parameter(torch.empty(number_count, width).normal_(0, EMBEDDING_STD))
        self.bias = nn.Parameter(torch.zeros(1))
        self.linear = nn.Embedding(rows, 1, sparse=True, _weight=torch.zeros(rows, 1)) if linear else None
        self.slopes = nn.Parameter(torch.zeros(number_count)) if linear and number_count else None

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return embeddings (batch, fields, width) and linear terms (batch,)."""
        embedded: list[Tensor] = []
        terms: list[Tensor] = [self.bias]
        if self.single_ids:
            ids = torch.stack([features[name] for name in self.single_ids], 1)
            self._look_up(ids + self.starts, embedded, terms)
        for name in self.id_lists:
            ids = features[name]
            weights = (ids > 0).float() if self.zero_is_missing[name] else torch.ones_like(ids, dtype=torch.float32)
            weights = weights / weights.sum(1, keepdim=True).clamp_min(1)
            self._look_up(ids + self.row_ranges[name][0], embedded, terms, weights)
        if self.numbers:
            columns = [features[name].reshape(len(features[name]), -1) for name in self.numbers]
            scaled, missing = self.normalizer(torch.cat(columns, 1))
            # sigmoid(1.702 x) approximates the normal distribution function, so normal numbers fill the bins equally.
            bins = (BINS * torch.sigmoid(1.702 * scaled)).long().clamp_max(BINS - 1)
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
        """Append the embeddings and the linear terms of rows; with weights, their weighted sums."""
        if self.table is not None:
            vectors = self.table(rows)
            embedded.append(vectors if weights is None else (vectors * weights.unsqueeze(2)).sum(1, keepdim=True))
        if self.linear is not None:
            values = self.linear(rows).squeeze(2)
            terms.append((values if weights is None else values * weights).sum(1))
