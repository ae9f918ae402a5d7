"""The input layer of the ready-made models: embeddings from one sparse table, and normalized numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor, nn

from ..data.schema import Schema
from .compiled_inputs import compiled_inputs
from .id_features import IdFeatures

EMBEDDING_STD = 0.05
"""The standard deviation of the initial embeddings."""
BINS = 16
"""The number of bins of a number. Each bin has a row in the table, in addition to the normalized value."""
SAMPLE_SIZE = 512
"""The number of earlier values of each number that are kept to normalize the next ones."""
MAX_SHIFT = 11
"""At least every 2**11-th value is sampled, so a sample represents at most the last 512 * 2**11 (a million) values."""
SLOT_STRIDE = 317
"""Odd, so that `SAMPLE_SIZE` replacements in a row replace different slots of the sample, and not neighbors."""

KERNEL_CONSTANTS = {"bins": BINS, "sample_size": SAMPLE_SIZE, "slot_stride": SLOT_STRIDE, "max_shift": MAX_SHIFT}
"""The constants that compiled code needs, by their names in its structs."""


def pairwise_interactions(embedded: Tensor) -> Tensor:
    """Compute the sum of the inner products of all pairs of embeddings, in linear time.

    The sum over pairs equals ((sum v)^2 - sum v^2) / 2, see Rendle, Factorization Machines (2010),
    https://doi.org/10.1109/ICDM.2010.127.

    Args:
        embedded: embeddings (batch, fields, width).

    Returns:
        One number per event (batch,).
    """
    products: Tensor = 0.5 * (embedded.sum(1).square() - embedded.square().sum(1)).sum(1)
    return products


class NumberNormalizer(nn.Module):
    """Normalizes numbers to their rank among a sample of earlier numbers, from 0 (smallest) to 1 (largest).

    A rank depends only on the order of the numbers. So the unit and the origin of a number do not matter, nor do its
    distribution and single outliers. The samples are buffers in float64 and part of the model's state. A batch is
    normalized by the sample from before the batch; a training batch is added to the sample afterwards, by `add`.
    Missing numbers, and all numbers before the first training batch, have the rank 0.5.

    The sample of a number contains its first `SAMPLE_SIZE` values. From then on, every value, every second, every
    fourth and so on replaces an earlier one, so that the sample is replaced once while the number of values doubles. It
    thus represents between the last half and all of the values.

    Args:
        columns: how many numbers an event has.
    """

    same_in_training = True
    """Training mode changes the sample, but not the ranks of the batch."""
    count: Tensor
    sample: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(columns, dtype=torch.int64))
        # Each sample is sorted. Slots that have no value yet are infinite and thus at the end.
        self.register_buffer("sample", torch.full((columns, SAMPLE_SIZE), math.inf, dtype=torch.float64))

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ranks (batch, columns) in float64, and a mask of the missing numbers, which are nan."""
        missing = numbers.isnan()
        values = numbers.detach().double().T.contiguous()
        below, not_above = (torch.searchsorted(self.sample, values, right=right) for right in (False, True))
        # The mean of the two counts is the middle of equal values.
        ranks = (below + not_above + 1).T / (2.0 * (self.count.clamp_max(SAMPLE_SIZE) + 1).double())
        # An infinite number makes the score nan.
        return torch.where(missing, 0.5, torch.where(numbers.isinf(), math.nan, ranks)), missing

    def normalize(self, numbers: Tensor, bin_starts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the ranks as normal numbers, and the rows of their bins, both (batch, columns)."""
        if (kernels := _kernels(numbers)) is not None:
            values = numbers.double().contiguous()
            ranked: tuple[Tensor, Tensor] = kernels.rank_numbers(
                values, self.sample, self.count, bin_starts, dtype, BINS
            )
            return ranked
        ranks, missing = self(numbers)
        # sigmoid(1.702 x) approximates the normal distribution function, so this maps ranks to normal numbers.
        scaled = (torch.logit(ranks) / 1.702).to(dtype)
        return scaled, torch.where(missing, BINS, (BINS * ranks.nan_to_num(0.5)).long()) + bin_starts

    @torch.no_grad()
    def add(self, numbers: Tensor) -> None:
        """Add a batch of numbers (batch, columns) to the samples."""
        if (kernels := _kernels(numbers)) is not None:
            kernels.add_numbers(numbers.double().contiguous(), self.sample, self.count, SLOT_STRIDE, MAX_SHIFT)
            return
        values, present = numbers.double().T.contiguous(), ~numbers.isnan().T
        shift = (torch.frexp(self.count.double() / SAMPLE_SIZE).exponent - 1).clamp(0, MAX_SHIFT).long().unsqueeze(1)
        index = self.count.unsqueeze(1) + present.cumsum(1) - 1
        number = index >> shift
        self.count.add_(present.sum(1))
        # If there are more than SAMPLE_SIZE replacements, only the last ones remain.
        is_last = number > ((self.count.unsqueeze(1) - 1) >> shift) - SAMPLE_SIZE
        is_sampled = present & is_last & (number << shift == index)
        if is_sampled.device.type == "cpu" and not bool(is_sampled.any()):  # on other devices, the host would wait
            return
        slots = torch.where(index < SAMPLE_SIZE, index, number * SLOT_STRIDE % SAMPLE_SIZE)
        # Other values are written to an additional slot. With the maximum, the order of equal slots does not matter.
        extended = nn.functional.pad(self.sample, (0, 1))
        extended.scatter_reduce_(1, torch.where(is_sampled, slots, SAMPLE_SIZE), values, "amax", include_self=False)
        self.sample.copy_(extended[:, :SAMPLE_SIZE].sort(1).values)


def _kernels(numbers: Tensor) -> ModuleType | None:
    """Return the kernels for numbers on a CUDA device, or None if operations of torch are used."""
    if numbers.device.type != "cuda" or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return None
    try:
        return import_module(".number_kernels", __package__)
    except ImportError:  # without Triton
        return None


def feature_dtype(model: nn.Module) -> torch.dtype:
    """Return the type in which a model gets features that are float64.

    It is float64 if the model normalizes numbers by `NumberNormalizer` or has parameters in float64, else float32.
    """
    is_normalizing = any(isinstance(module, NumberNormalizer) for module in model.modules())
    has_float64 = any(param.dtype == torch.float64 for param in model.parameters())
    return torch.float64 if is_normalizing or has_float64 else torch.float32


def cast_features(features: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return features of which those in float64 have the given type."""
    return {name: v.to(dtype) if v.dtype == torch.float64 else v for name, v in features.items()}


def _is_traced() -> bool:
    """Whether torch records the operations, to compile or to export them."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


class Inputs(nn.Module):
    """Converts the features of a schema to embeddings, one per field, and to a linear term per event.

    All categories, hashes and ids are rows of one table with sparse gradients; `ids` gives rows to ids. A list is one
    field: the mean of its entries. So are the words of a text, and a time: the mean of its hour and its day of the
    week. A number is a field too: x v + u, where x is the normalized number, the vector v belongs to the feature, and u
    to the bin of x, or to the bin of missing numbers.

    Args:
        schema: the features.
        width: the width of the embeddings; 0 for linear terms only.
        linear: whether there are linear terms.
        has_pairs: whether the pairwise interactions of the embeddings are added to the linear terms.
    """

    same_in_training = True
    """Training mode changes the sample of the normalizer, but not the outputs."""

    starts: Tensor
    bin_starts: Tensor

    def __init__(self, schema: Schema, width: int, linear: bool = True, has_pairs: bool = False) -> None:
        super().__init__()
        kinds = schema.kinds
        self.single_ids = [name for name, kind in kinds.items() if kind.size and not kind.length]
        self.id_lists = [name for name, kind in kinds.items() if kind.size and kind.length]
        self.numbers = [name for name, kind in kinds.items() if kind.name == "number"]
        self.lengths = {name: kind.length for name, kind in kinds.items()}
        """The length of each list feature, 0 for features that are not lists."""
        self.zero_is_missing = {name: kinds[name].zero_is_missing for name in self.id_lists}
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
        self.has_pairs = has_pairs
        self.ids: nn.Module | None = None
        """Replaces ids by rows, if there are features of the kind `id`."""
        id_kinds = {name: kinds[name] for name in self.row_ranges if kinds[name].id_options is not None}
        if id_kinds:
            tables = [table for table in (self.table, self.linear) if table is not None]
            self.ids = IdFeatures(id_kinds, {name: start for name, (start, _) in self.row_ranges.items()}, tables)

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return embeddings (batch, fields, width) and the sum of the other terms of the score (batch,)."""
        if self.ids is not None:
            features = self.ids(features)
        if not _is_traced():
            compiled = compiled_inputs(self, KERNEL_CONSTANTS)
            outputs = None if isinstance(compiled, str) else compiled(self, features)
            if outputs is not None:
                return outputs
        return self.forward_with_torch(features)

    def find_uncompiled(self) -> str | None:
        """Return why compiled code does not compute this layer, or None if it does."""
        compiled = compiled_inputs(self, KERNEL_CONSTANTS)
        return compiled if isinstance(compiled, str) else compiled.find_unsupported(self)

    def forward_with_torch(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the outputs with operations of torch, on any device and in any dtype."""
        if not _is_traced() and not torch._C._are_functorch_transforms_active():
            self._check_ids(features)
        rows: list[Tensor] = []
        weights: list[Tensor | None] = []
        """For each part of the rows: the weights with which they are summed, or None if each row is a field."""
        scaled: Tensor | None = None
        if self.single_ids:
            rows.append(torch.stack([features[name] for name in self.single_ids], 1) + self.starts)
            weights.append(None)
        for name in self.id_lists:
            ids = features[name]
            present = (ids > 0).float() if self.zero_is_missing[name] else torch.ones_like(ids, dtype=torch.float32)
            rows.append(ids + self.row_ranges[name][0])
            weights.append(present / present.sum(1, keepdim=True).clamp_min(1))
        if self.numbers:
            columns = [features[name].reshape(len(features[name]), -1) for name in self.numbers]
            numbers = torch.cat(columns, 1)
            scaled, bins = self.normalizer.normalize(numbers, self.bin_starts, self.bias.dtype)
            rows.append(bins)
            weights.append(None)
        embedded = self._look_up(self.table, rows, weights)
        values = self._look_up(self.linear, rows, weights)
        terms = [self.bias, *(part.squeeze(2).sum(1) for part in values)]
        if scaled is not None and self.training:  # after the lookups, which fail if an id is not a row of the table
            self.normalizer.add(numbers)
        if scaled is not None and self.vectors is not None:
            embedded[-1] = embedded[-1] + scaled.unsqueeze(2) * self.vectors
        if scaled is not None and self.slopes is not None:
            terms.append(scaled @ self.slopes)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        if not embedded:
            return total.new_zeros(len(total), 0, 0), total
        vectors = torch.cat(embedded, 1)
        return vectors, total + pairwise_interactions(vectors) if self.has_pairs else total

    def _check_ids(self, features: dict[str, Tensor]) -> None:
        """Raise an error if an id is not a row of its feature. It could be a row of another one.

        On a GPU the check would wait for the device, so ids are not checked there.

        Raises:
            IndexError: if an id is negative or too large.
        """
        for name, (_, size) in self.row_ranges.items():
            ids = features[name]
            if not ids.is_cpu:
                return
            is_wrong = (ids < 0) | (ids >= size)
            if bool(is_wrong.any()):
                wrong = int(ids[is_wrong][0])
                raise IndexError(f"feature {name!r} has the id {wrong}, and its rows are 0 to {size - 1}")

    @staticmethod
    def _look_up(table: nn.Embedding | None, rows: list[Tensor], weights: list[Tensor | None]) -> list[Tensor]:
        """Return the vectors of each part of the rows (batch, fields, width); with weights, their weighted sum.

        All parts are looked up at once: adding sparse gradients of several lookups would wait for the device.
        """
        if table is None or not rows:
            return []
        parts = torch.split(table(torch.cat(rows, 1)), [part.shape[1] for part in rows], 1)
        return [
            vectors if each is None else (vectors * each.unsqueeze(2)).sum(1, keepdim=True)
            for vectors, each in zip(parts, weights, strict=True)
        ]
