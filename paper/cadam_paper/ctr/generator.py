"""A generator of simulated clicks with the fields, vocabulary sizes, skew and click rate of the Criteo data set.

The labels come from a known teacher model. Every value is a function of (seed, row number, field) and is computed with
integers, or with floats that hold small integers. A row therefore has the same bits on every device, in any order.

    hash      = mix(seed, row)                            one 64-bit number per row
    uniform   = mix(hash * multiplier[field])             64 bits for each of the 39 fields
    id        = start[bin] + low bits * width[bin]        the top 12 bits choose one of 4096 equally likely bins
    logit     = bias + sum w[id] + sum over pairs of eight fields <v[id], v[id']>
    label     = uniform < sigmoid(logit)                  the sigmoid is looked up in a table

A frequent id occupies many bins, and rare ids share a bin. This gives a skewed distribution with known probabilities
and without a search. Using the teacher's probability as the score gives the best AUC that any model can reach.

Drift alternates between two distributions, A and B. They differ in the weights w of every second field, and in the
frequencies of the ids: the frequent ids of A are rare in B, and vice versa.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from cadam.online.metrics.auc import auc
from cadam.statistics.intervals import Array

from .data import GOLDEN, Batch, Part, Reading, buffers, flip_, key, keyed, mix, noise_limit, read, shuffled, signed
from .fields import FIELDS, OOV, VOCABULARY, offsets

Drift = Literal["none", "gradual", "sudden", "hours"]
"""Gradual: from A to B over all rows. Sudden: A and B alternate by quarters. Hours: A at noon, B at midnight."""

ROWS = 45_840_617
CLICK_RATE = 0.256
DAYS = 7

# These numbers are estimates that resemble the Criteo data set: the share of rows in which a field is missing or out
# of vocabulary, and the exponent of the Zipf distribution of its ids (the probability of the k-th id is proportional
# to k**-exponent).
ABSENT = {"C3": 0.30, "C4": 0.10, "C6": 0.12, "C12": 0.25, "C16": 0.18, "C19": 0.44, "C20": 0.44, "C21": 0.22}
ABSENT |= {"C22": 0.76, "C24": 0.04, "C25": 0.44, "C26": 0.44}
EXPONENTS = dict.fromkeys(("C5", "C6", "C8", "C9", "C14", "C17", "C20", "C22", "C23", "I10", "I12"), 2.0)
DEFAULT_EXPONENT = 1.05

PAIRED = ("I5", "I11", "C2", "C7", "C14", "C15", "C17", "C26")
"""The fields whose pairs contribute to the logit."""
RANK = 4
"""The length of the vectors v."""
LINEAR_SPREAD, PAIR_SPREAD = 1.35, 0.75
"""Standard deviations of the linear and the pairwise part of the logit. They give a best AUC of 0.82."""
HALF_SPREAD_COUNT = 100
"""Ids with this expected count in the training part have half the weight of frequent ids.

The weights of rare ids cannot be learned, so they should have little influence.
"""

BIN_BITS, WIDTH_BITS = 12, 20
"""Number of bits of a bin index, and of the number of ids in a bin."""
BINS = 1 << BIN_BITS
UNIT, PAIR_UNIT = 4096, 64
"""Logits are multiples of 1/4096, and elements of v of 1/64. They are stored as integers in these units.

Sums of integers below 2**24 are exact in float32, so the order of summation does not matter.
"""
RANGE = 8 * UNIT
"""Logits are clipped to [-8, 8]."""

_ROWS, _LABELS, _FIELDS = 10, 11, 12
"""The purposes of random numbers (see `key`). Field i has the purpose _FIELDS + i."""


@dataclass(frozen=True)
class _Teacher:
    """The tables from which rows are generated, on one device."""

    multipliers: Tensor
    """One odd number per field, which makes the hashes of the fields of a row differ, of shape (39,)."""
    shifts: Tensor
    """The first bin of each field plus BINS / 2, of shape (39,).

    The top bits of a signed integer are a number from -BINS / 2 to BINS / 2 - 1. Adding the shift gives the bin.
    """
    bins: Tensor
    """First id and number of ids of each bin, packed into one integer, for A and then for B; shape (2 * 39 * BINS,)."""
    linear: Tensor
    """The weights w in A, of shape (ids,)."""
    change: Tensor
    """The weights w in B minus those in A, of shape (ids,)."""
    paired: Tensor
    """The columns of the fields `PAIRED`, of shape (8,)."""
    pairs: Tensor
    """The vectors v, of shape (ids, RANK)."""
    probabilities: Tensor
    """The sigmoid of every logit in units of 2**-32, of shape (2 * RANGE,)."""
    bias: int
    """The bias of the logit in multiples of 1 / UNIT."""

    def to(self, device: torch.device) -> _Teacher:
        """Return a copy with all tensors on a device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "bias"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class Generated:
    """A data set of simulated clicks. Equal settings and seeds give equal rows on every device.

    Of ten consecutive rows, the first belongs to the test part, the second to the validation part and the others to the
    training part.

    Args:
        rows: Number of rows.
        vocabulary: Number of ids per field.
        seed: The seed of the teacher and of the rows.
        drift: The kind of distribution change along the rows.
    """

    rows: int = ROWS
    vocabulary: Sequence[int] = VOCABULARY
    seed: int = 2018
    drift: Drift = "none"

    def __post_init__(self) -> None:
        if not 10 <= self.rows < 1 << 40:
            raise ValueError(f"rows must be at least 10 and below 2**40, got {self.rows}")
        if len(self.vocabulary) != len(FIELDS) or min(self.vocabulary) < 4 or max(self.vocabulary) >= 1 << WIDTH_BITS:
            raise ValueError(f"vocabulary must have {len(FIELDS)} sizes from 4 to {(1 << WIDTH_BITS) - 1}")
        if self.drift not in get_args(Drift):
            raise ValueError(f"drift must be one of {', '.join(get_args(Drift))}, got {self.drift!r}")
        object.__setattr__(self, "vocabulary", tuple(self.vocabulary))

    @property
    def description(self) -> str:
        """Text that identifies the data. It is stored with every result."""
        drift = "no drift" if self.drift == "none" else f"drift {self.drift}"
        return f"generated clicks, {self.rows:,} rows, {sum(self.vocabulary):,} ids, {drift}, seed {self.seed}"

    def size(self, part: Part) -> int:
        """Return the number of rows of a part."""
        test, validation = (self.rows + 9) // 10, (self.rows + 8) // 10
        return {"test": test, "validation": validation, "train": self.rows - test - validation}[part]

    def batches(
        self, part: Part, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> Iterator[Batch]:
        """Yield the batches of a part (see `Clicks.batches`)."""
        return read(self.feed(part, batch_size, seed=seed, device=device, noise=noise), device)

    def stream(self, batch_size: int, *, device: torch.device, noise: float = 0.0, seed: int = 0) -> Iterator[Batch]:
        """Yield all rows in the order of time, for prequential evaluation."""
        return read(self.feed("stream", batch_size, seed=seed, device=device, noise=noise), device)

    def feed(
        self, reading: Reading, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> GeneratedFeed:
        """Return a feed of the batches of a part or of the stream."""
        rows = self.rows if reading == "stream" else self.size(reading)
        noisy = noise if reading in ("train", "stream") else 0.0
        limit = _noise_limit(self, reading, noisy, seed, device) if noisy else None
        order = shuffled(rows, seed).to(device, torch.int32) if reading == "train" else None
        return GeneratedFeed(self, reading, rows, batch_size, _teacher_on(self, device), order, limit, seed)

    def draw_(self, teacher: _Teacher, rows: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """Generate the rows with these numbers and write them into `ids` and `labels`.

        Returns:
            The probability of a click for each row, in units of 2**-32.
        """
        hashes = keyed(key(self.seed, _ROWS), rows)
        bits = hashes[:, None] * teacher.multipliers
        bits ^= bits >> 32
        bits *= signed(GOLDEN)
        bins = (bits >> (64 - BIN_BITS)).add_(teacher.shifts)
        progress = self._drift_progress(rows)
        if progress is not None:
            bins += ((hashes & 255) < progress).long().mul_(len(FIELDS) * BINS)[:, None]
        bins = _lookup(teacher.bins, bins)
        bits &= (1 << 32) - 1
        bits *= bins & ((1 << WIDTH_BITS) - 1)
        bits >>= 32
        torch.add(bits, bins >> WIDTH_BITS, out=ids)
        logits = self._logits(teacher, ids, progress)
        probabilities = _lookup(teacher.probabilities, logits.clamp_(-RANGE, RANGE - 1).add_(RANGE))
        uniform = mix(hashes + key(self.seed, _LABELS)) & ((1 << 32) - 1)
        labels.copy_(uniform < probabilities)
        return probabilities

    def _logits(self, teacher: _Teacher, ids: Tensor, progress: Tensor | None) -> Tensor:
        vectors = _lookup(teacher.pairs, ids.index_select(1, teacher.paired))
        twice = vectors.sum(1).square_().sum(1) - vectors.square_().sum((1, 2))
        logits = _lookup(teacher.linear, ids).sum(1).add_(twice, alpha=0.5).long() + teacher.bias
        if progress is not None:
            logits += (_lookup(teacher.change, ids).sum(1).long() * progress) >> 8
        return logits

    def _drift_progress(self, rows: Tensor) -> Tensor | None:
        """Return the position of each row between the distributions A (0) and B (256), or None without drift."""
        if self.drift == "gradual":
            return rows * 256 // self.rows
        if self.drift == "sudden":
            return (rows * 4 // self.rows % 2) * 256
        if self.drift == "hours":
            return ((rows * (24 * DAYS) // self.rows % 24) - 12).abs_() * 256 // 12
        return None


def _lookup(table: Tensor, indices: Tensor) -> Tensor:
    """Return table[indices]. On the CPU, `index_select` is several times faster than indexing."""
    return table.index_select(0, indices.view(-1)).view(*indices.shape, *table.shape[1:])


@dataclass(frozen=True)
class GeneratedFeed:
    """A `Feed` of generated clicks."""

    clicks: Generated
    reading: Reading
    rows: int
    batch_size: int
    teacher: _Teacher
    order: Tensor | None
    """The positions of the rows in the order of the batches; None for the order of time."""
    limit: int | None
    """The noise limit (see `noise_limit`); None without label noise."""
    seed: int
    """The seed of the label noise."""

    def fill(self, index: Tensor, ids: Tensor, labels: Tensor) -> None:
        """Write the batch with this index into `ids` and `labels`."""
        self.draw_(index, ids, labels)

    def draw_(self, index: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """Write a batch like `fill`, and return the probabilities of clicks before noise, in units of 2**-32."""
        positions = torch.arange(len(ids), device=ids.device).add_(index * self.batch_size)
        if self.order is not None:
            positions = self.order[positions].long()
        rows = _row_numbers(self.reading, positions)
        probabilities = self.clicks.draw_(self.teacher, rows, ids, labels)
        if self.limit is not None:
            flip_(labels, rows, self.limit, self.seed)
        return probabilities


def _row_numbers(reading: Reading, positions: Tensor) -> Tensor:
    """Convert positions in a part to row numbers, in the order of time."""
    if reading == "stream":
        return positions
    if reading == "train":
        return positions + 2 * (positions // 8) + 2
    return positions * 10 + (reading == "validation")


def best_auc(clicks: Generated, part: Part = "test", *, rows: int | None = None, device: torch.device) -> float:
    """Return the AUC of the teacher's probabilities on a part, which is the best AUC that a model can expect.

    Args:
        clicks: The generated clicks.
        part: The part to evaluate.
        rows: Number of rows to use; None for all.
        device: The device on which the rows are generated.
    """
    scores, labels = [], []
    feed = clicks.feed(part, 10_000, device=device)
    if rows is not None:
        feed = replace(feed, rows=min(rows, feed.rows))
    for index, batch in buffers(feed, device):
        scores.append(feed.draw_(index, batch.ids, batch.labels).cpu())
        labels.append(batch.labels.cpu())
    return auc(torch.cat(scores).numpy(), torch.cat(labels).numpy())


@lru_cache(maxsize=8)
def _noise_limit(clicks: Generated, reading: Reading, noise: float, seed: int, device: torch.device) -> int:
    """Return the noise limit (see `noise_limit`), which needs a pass over all labels to find the negatives."""
    feed = replace(clicks.feed(reading, 10_000, device=device), order=None)
    negatives, start = [], 0
    for batch in read(feed, device):
        rows = _row_numbers(reading, torch.arange(start, start + len(batch.labels), device=device))
        negatives.append(rows[batch.labels == 0])
        start += len(batch.labels)
    return noise_limit(torch.cat(negatives), noise, seed)


# The teacher ------------------------------------------------------------------------------------------------


def popularity(field: str, size: int) -> Array:
    """Return the probability of each id of a field: out-of-vocabulary first, then from frequent to rare."""
    absent = ABSENT.get(field, 0.0)
    ranks = np.arange(1, size, dtype=np.float64)
    weights = ranks ** -EXPONENTS.get(field, DEFAULT_EXPONENT)
    return np.concatenate([[absent], weights * ((1 - absent) / weights.sum())])


def _make_bins(probabilities: Array, offset: int) -> tuple[Array, Array]:
    """Return the first id and the number of ids of equally likely bins that approximate these probabilities."""
    ends = np.cumsum(probabilities)
    edges = np.searchsorted(ends, np.arange(BINS) / BINS, side="right")
    edges = np.append(edges, len(probabilities))
    return offset + edges[:-1], np.maximum(np.diff(edges), 1)


def _reverse_bins(starts: Array, widths: Array, offset: int, size: int) -> tuple[Array, Array]:
    """Return the bins with the order of the ids reversed, except for the out-of-vocabulary id."""
    in_vocabulary = starts > offset + OOV
    return np.where(in_vocabulary, 2 * offset + size + 1 - starts - widths, starts), widths


def _shares(starts: Array, widths: Array, rows: int) -> Array:
    """Return the probability of every id from the bins that contain it."""
    steps = np.zeros(rows + 1)
    np.add.at(steps, starts, 1 / (BINS * widths))
    np.add.at(steps, starts + widths, -1 / (BINS * widths))
    return np.maximum(np.cumsum(steps)[:-1], 0)


@lru_cache(maxsize=4)
def _teacher_on(clicks: Generated, device: torch.device) -> _Teacher:
    return _teacher(clicks).to(device)


@lru_cache(maxsize=4)
def _teacher(clicks: Generated) -> _Teacher:
    """Draw the teacher's tables, and scale them to the desired standard deviation of logits and click rate."""
    random = np.random.default_rng(clicks.seed)
    field_offsets, total = offsets(clicks.vocabulary), sum(clicks.vocabulary)
    bins_a, bins_b, spread = [], [], np.empty(total)
    for field, offset, size in zip(FIELDS, field_offsets, clicks.vocabulary, strict=True):
        bins_a.append(_make_bins(popularity(field, size), offset))
        bins_b.append(_reverse_bins(*bins_a[-1], offset, size) if clicks.drift != "none" else bins_a[-1])
        spread[offset : offset + size] = random.lognormal(0, 0.5)
    starts, widths = (np.concatenate([bins[part] for bins in [*bins_a, *bins_b]]) for part in (0, 1))
    half = len(starts) // 2
    expected = 0.8 * clicks.rows * _shares(starts[:half], widths[:half], total)
    expected = (expected + 0.8 * clicks.rows * _shares(starts[half:], widths[half:], total)) / 2
    spread *= expected / (expected + HALF_SPREAD_COUNT)
    drifting = np.repeat(np.arange(len(FIELDS)) % 2 == 0, clicks.vocabulary)
    linear, other = spread * random.standard_normal((2, total))
    pairs = spread[:, None] * random.standard_normal((total, RANK))

    multipliers = [int(key(clicks.seed, _FIELDS + number)) | 1 for number in range(len(FIELDS))]
    levels = (np.arange(-RANGE, RANGE) + 0.5) / UNIT
    teacher = _Teacher(
        multipliers=torch.tensor(multipliers),
        shifts=torch.arange(len(FIELDS)) * BINS + BINS // 2,
        bins=torch.from_numpy((starts << WIDTH_BITS) | widths),
        linear=torch.zeros(total),
        change=torch.zeros(total),
        paired=torch.tensor([FIELDS.index(name) for name in PAIRED]),
        pairs=torch.zeros(total, RANK),
        probabilities=torch.from_numpy(np.round(2.0**32 / (1 + np.exp(-levels))).astype(np.int64)),
        bias=0,
    )
    ids = torch.empty(1 << 16, len(FIELDS), dtype=torch.int64)
    sample = torch.arange(len(ids)) * max(1, clicks.rows // len(ids))
    replace(clicks, drift="none").draw_(teacher, sample, ids, torch.empty(len(ids)))
    sampled = ids.numpy()

    linear_part = linear[sampled].sum(1)
    scale = LINEAR_SPREAD * UNIT / linear_part.std()
    linear, other = (np.clip(np.round(scale * w), -RANGE, RANGE) for w in (linear, other))
    paired = np.array([FIELDS.index(name) for name in PAIRED])
    for column in paired:  # center the vectors, so that the pairwise part contains no effect of a single field
        offset, size = field_offsets[column], clicks.vocabulary[column]
        pairs[offset : offset + size] -= pairs[sampled[:, column]].mean(0)
    vectors = pairs[sampled[:, paired]]
    pair_part = (np.square(vectors.sum(1)) - np.square(vectors).sum(1)).sum(1) / 2
    pairs = np.clip(np.round(PAIR_UNIT * math.sqrt(PAIR_SPREAD / pair_part.std()) * pairs), -128, 128)
    teacher = replace(
        teacher,
        linear=torch.from_numpy(linear).float(),
        change=torch.from_numpy(np.where(drifting, other - linear, 0)).float(),
        pairs=torch.from_numpy(pairs).float(),
    )
    logits = clicks._logits(teacher, ids, None)
    return replace(teacher, bias=_bias(logits.numpy()))


def _bias(logits: Array) -> int:
    """Find the bias for which the mean probability equals the click rate, by bisection."""
    low, high = -RANGE, RANGE
    while high - low > 1:
        middle = (low + high) // 2
        rate = np.mean(1 / (1 + np.exp(-(logits + middle) / UNIT)))
        low, high = (middle, high) if rate < CLICK_RATE else (low, middle)
    return low
