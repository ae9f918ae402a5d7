"""Clicks made on the device: Criteo's fields, vocabulary sizes, skew and click rate, from a teacher that is known.

Every value is a function of (seed, row number, field) in operations on integers, or on floats that hold small integers,
so that a row has the same bits on every device, in whatever order rows are made.

    hash      = mix(seed, row)                            one 64-bit number a row
    uniform   = mix(hash * multiplier[field])             64 bits for each of the 39 fields
    id        = start[cell] + low bits * width[cell]      the top 12 bits choose one of 4096 equally likely cells
    logit     = bias + sum w[id] + sum over pairs of eight fields <v[id], v[id']>
    label     = uniform < sigmoid(logit)                  the sigmoid from a table

A popular id has many cells of its own, rare ones share a cell: skewed ids without searching, and with known
probabilities. The teacher's own probability as a score gives the best AUC that any model can reach.

Drift moves the appeal of every second field (from w to another draw of it) and who comes (popular ids become rare and
rare ones popular) to and fro between two worlds, A and B.
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
"""Gradual: from A to B along all rows. Sudden: A and B in turn, by quarters. Hours: A at noon, B at midnight."""

ROWS = 45_840_617
CLICK_RATE = 0.256
DAYS = 7

# Chosen to resemble Criteo's file, whose rows are not at hand: how often a field is missing or too rare, and how
# steeply popularity falls (probability of the k-th id ~ k**-steepness).
ABSENT = {"C3": 0.30, "C4": 0.10, "C6": 0.12, "C12": 0.25, "C16": 0.18, "C19": 0.44, "C20": 0.44, "C21": 0.22}
ABSENT |= {"C22": 0.76, "C24": 0.04, "C25": 0.44, "C26": 0.44}
STEEPNESS = dict.fromkeys(("C5", "C6", "C8", "C9", "C14", "C17", "C20", "C22", "C23", "I10", "I12"), 2.0)
USUAL_STEEPNESS = 1.05

PAIRED = ("I5", "I11", "C2", "C7", "C14", "C15", "C17", "C26")
RANK = 4
LINEAR_SPREAD, PAIR_SPREAD = 1.35, 0.75
"""Standard deviations of the two parts of the logit: they make the best AUC 0.82."""
FAMILIAR = 100
"""Ids seen about this often in training have half the spread of frequent ones: what cannot be learned matters less."""

CELL_BITS, WIDTH_BITS = 12, 20
CELLS = 1 << CELL_BITS
UNIT = 4096
"""Logits are whole numbers of 1/4096, v of 1/64: sums below 2**24 of them are exact in float32 in any order."""
PAIR_UNIT = 64
RANGE = 8 * UNIT
"""Logits beyond 8 count as 8."""

_ROWS, _LABELS, _FIELDS = 10, 11, 12


@dataclass(frozen=True)
class _World:
    """The tables that rows are made from, on one device."""

    multipliers: Tensor  # (39,): one odd number a field
    shifts: Tensor  # (39,): where the cells of each field begin, and half of them, for the cell number is signed
    cells: Tensor  # (2 * 39 * CELLS,): first id and number of ids of each cell, in A and then in B
    linear: Tensor  # (ids,): w in A
    change: Tensor  # (ids,): w in B less w in A
    paired: Tensor  # (8,): the columns of PAIRED
    pairs: Tensor  # (ids, RANK): v
    chances: Tensor  # (2 * RANGE,): sigmoid of every logit, in 2**-32
    bias: int

    def to(self, device: torch.device) -> _World:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "bias"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class Generated:
    """Generated clicks. The same settings and seed give the same rows everywhere.

    Of ten rows in turn the first is for testing, the second for validation, the others for training.
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
        drift = "no drift" if self.drift == "none" else f"drift {self.drift}"
        return f"generated clicks, {self.rows:,} rows, {sum(self.vocabulary):,} ids, {drift}, seed {self.seed}"

    def size(self, part: Part) -> int:
        test, validation = (self.rows + 9) // 10, (self.rows + 8) // 10
        return {"test": test, "validation": validation, "train": self.rows - test - validation}[part]

    def batches(
        self, part: Part, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> Iterator[Batch]:
        return read(self.feed(part, batch_size, seed=seed, device=device, noise=noise), device)

    def stream(self, batch_size: int, *, device: torch.device, noise: float = 0.0, seed: int = 0) -> Iterator[Batch]:
        return read(self.feed("stream", batch_size, seed=seed, device=device, noise=noise), device)

    def feed(
        self, reading: Reading, batch_size: int, *, seed: int = 0, device: torch.device, noise: float = 0.0
    ) -> GeneratedFeed:
        rows = self.rows if reading == "stream" else self.size(reading)
        noisy = noise if reading in ("train", "stream") else 0.0
        limit = _noise_limit(self, reading, noisy, seed, device) if noisy else None
        order = shuffled(rows, seed).to(device, torch.int32) if reading == "train" else None
        return GeneratedFeed(self, reading, rows, batch_size, _world_on(self, device), order, limit, seed)

    def draw_(self, world: _World, rows: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """Write the rows of these numbers into `ids` and `labels`; return the probability of a click, in 2**-32."""
        hashes = keyed(key(self.seed, _ROWS), rows)
        bits = hashes[:, None] * world.multipliers
        bits ^= bits >> 32
        bits *= signed(GOLDEN)
        cells = (bits >> (64 - CELL_BITS)).add_(world.shifts)
        towards = self._towards(rows)
        if towards is not None:
            cells += ((hashes & 255) < towards).long().mul_(len(FIELDS) * CELLS)[:, None]
        cells = _at(world.cells, cells)
        bits &= (1 << 32) - 1
        bits *= cells & ((1 << WIDTH_BITS) - 1)
        bits >>= 32
        torch.add(bits, cells >> WIDTH_BITS, out=ids)
        logits = self._logits(world, ids, towards)
        chances = _at(world.chances, logits.clamp_(-RANGE, RANGE - 1).add_(RANGE))
        uniform = mix(hashes + key(self.seed, _LABELS)) & ((1 << 32) - 1)
        labels.copy_(uniform < chances)
        return chances

    def _logits(self, world: _World, ids: Tensor, towards: Tensor | None) -> Tensor:
        vectors = _at(world.pairs, ids.index_select(1, world.paired))
        twice = vectors.sum(1).square_().sum(1) - vectors.square_().sum((1, 2))
        logits = _at(world.linear, ids).sum(1).add_(twice, alpha=0.5).long() + world.bias
        if towards is not None:
            logits += (_at(world.change, ids).sum(1).long() * towards) >> 8
        return logits

    def _towards(self, rows: Tensor) -> Tensor | None:
        """How far each row is on the way from A (0) to B (256)."""
        if self.drift == "gradual":
            return rows * 256 // self.rows
        if self.drift == "sudden":
            return (rows * 4 // self.rows % 2) * 256
        if self.drift == "hours":
            return ((rows * (24 * DAYS) // self.rows % 24) - 12).abs_() * 256 // 12
        return None


def _at(table: Tensor, places: Tensor) -> Tensor:
    """table[places]; index_select is several times faster on CPU."""
    return table.index_select(0, places.view(-1)).view(*places.shape, *table.shape[1:])


@dataclass(frozen=True)
class GeneratedFeed:
    """Batches of generated clicks by number, for buffers of the caller: see `Feed`."""

    clicks: Generated
    reading: Reading
    rows: int
    batch_size: int
    world: _World
    order: Tensor | None
    limit: int | None
    seed: int

    def fill(self, index: Tensor, ids: Tensor, labels: Tensor) -> None:
        self.draw_(index, ids, labels)

    def draw_(self, index: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        """As `fill`; returns the probability of a click before noise, in 2**-32."""
        positions = torch.arange(len(ids), device=ids.device).add_(index * self.batch_size)
        if self.order is not None:
            positions = self.order[positions].long()
        rows = _row_numbers(self.reading, positions)
        chances = self.clicks.draw_(self.world, rows, ids, labels)
        if self.limit is not None:
            flip_(labels, rows, self.limit, self.seed)
        return chances


def _row_numbers(reading: Reading, positions: Tensor) -> Tensor:
    """The rows at these positions of a part, in the order of time."""
    if reading == "stream":
        return positions
    if reading == "train":
        return positions + 2 * (positions // 8) + 2
    return positions * 10 + (reading == "validation")


def best_auc(clicks: Generated, part: Part = "test", *, rows: int | None = None, device: torch.device) -> float:
    """The AUC of the teacher's own probabilities on a part, or on its first rows: no model beats it but by luck."""
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
    """Which negatives are flipped: all of them have to be known first, one pass over the labels."""
    feed = replace(clicks.feed(reading, 10_000, device=device), order=None)
    negatives, start = [], 0
    for batch in read(feed, device):
        rows = _row_numbers(reading, torch.arange(start, start + len(batch.labels), device=device))
        negatives.append(rows[batch.labels == 0])
        start += len(batch.labels)
    return noise_limit(torch.cat(negatives), noise, seed)


# The two worlds ------------------------------------------------------------------------------------------------


def popularity(field: str, size: int) -> Array:
    """The probability of each id of a field: out-of-vocabulary first, then from popular to rare."""
    absent = ABSENT.get(field, 0.0)
    ranks = np.arange(1, size, dtype=np.float64)
    known = ranks ** -STEEPNESS.get(field, USUAL_STEEPNESS)
    return np.concatenate([[absent], known * ((1 - absent) / known.sum())])


def _cells(chances: Array, begin: int) -> tuple[Array, Array]:
    """First id and number of ids of each of the equally likely cells that come nearest to these probabilities."""
    ends = np.cumsum(chances)
    edges = np.searchsorted(ends, np.arange(CELLS) / CELLS, side="right")
    edges = np.append(edges, len(chances))
    return begin + edges[:-1], np.maximum(np.diff(edges), 1)


def _reversed(starts: Array, widths: Array, begin: int, size: int) -> tuple[Array, Array]:
    """The same cells with the rarest ids first; out-of-vocabulary stays what it is."""
    known = starts > begin + OOV
    return np.where(known, 2 * begin + size + 1 - starts - widths, starts), widths


def _shares(starts: Array, widths: Array, rows: int) -> Array:
    """The probability of every id, from the cells it is in."""
    steps = np.zeros(rows + 1)
    np.add.at(steps, starts, 1 / (CELLS * widths))
    np.add.at(steps, starts + widths, -1 / (CELLS * widths))
    return np.maximum(np.cumsum(steps)[:-1], 0)


@lru_cache(maxsize=4)
def _world_on(clicks: Generated, device: torch.device) -> _World:
    return _world(clicks).to(device)


@lru_cache(maxsize=4)
def _world(clicks: Generated) -> _World:
    """Draw the tables, then scale them to the spread of logits and the click rate that are wanted."""
    random = np.random.default_rng(clicks.seed)
    begins, total = offsets(clicks.vocabulary), sum(clicks.vocabulary)
    here, there, appeal = [], [], np.empty(total)
    for field, begin, size in zip(FIELDS, begins, clicks.vocabulary, strict=True):
        here.append(_cells(popularity(field, size), begin))
        there.append(_reversed(*here[-1], begin, size) if clicks.drift != "none" else here[-1])
        appeal[begin : begin + size] = random.lognormal(0, 0.5)
    starts, widths = (np.concatenate([cells[part] for cells in [*here, *there]]) for part in (0, 1))
    half = len(starts) // 2
    expected = 0.8 * clicks.rows * _shares(starts[:half], widths[:half], total)
    expected = (expected + 0.8 * clicks.rows * _shares(starts[half:], widths[half:], total)) / 2
    appeal *= expected / (expected + FAMILIAR)
    drifting = np.repeat(np.arange(len(FIELDS)) % 2 == 0, clicks.vocabulary)
    linear, other = appeal * random.standard_normal((2, total))
    pairs = appeal[:, None] * random.standard_normal((total, RANK))

    multipliers = [int(key(clicks.seed, _FIELDS + number)) | 1 for number in range(len(FIELDS))]
    levels = (np.arange(-RANGE, RANGE) + 0.5) / UNIT
    world = _World(
        multipliers=torch.tensor(multipliers),
        shifts=torch.arange(len(FIELDS)) * CELLS + CELLS // 2,
        cells=torch.from_numpy((starts << WIDTH_BITS) | widths),
        linear=torch.zeros(total),
        change=torch.zeros(total),
        paired=torch.tensor([FIELDS.index(name) for name in PAIRED]),
        pairs=torch.zeros(total, RANK),
        chances=torch.from_numpy(np.round(2.0**32 / (1 + np.exp(-levels))).astype(np.int64)),
        bias=0,
    )
    ids = torch.empty(1 << 16, len(FIELDS), dtype=torch.int64)
    sample = torch.arange(len(ids)) * max(1, clicks.rows // len(ids))
    replace(clicks, drift="none").draw_(world, sample, ids, torch.empty(len(ids)))
    seen = ids.numpy()

    linear_part = linear[seen].sum(1)
    scale = LINEAR_SPREAD * UNIT / linear_part.std()
    linear, other = (np.clip(np.round(scale * w), -RANGE, RANGE) for w in (linear, other))
    at = np.array([FIELDS.index(name) for name in PAIRED])
    for column in at:  # centered, so that pairs say nothing about one field alone
        begin, size = begins[column], clicks.vocabulary[column]
        pairs[begin : begin + size] -= pairs[seen[:, column]].mean(0)
    vectors = pairs[seen[:, at]]
    pair_part = (np.square(vectors.sum(1)) - np.square(vectors).sum(1)).sum(1) / 2
    pairs = np.clip(np.round(PAIR_UNIT * math.sqrt(PAIR_SPREAD / pair_part.std()) * pairs), -128, 128)
    world = replace(
        world,
        linear=torch.from_numpy(linear).float(),
        change=torch.from_numpy(np.where(drifting, other - linear, 0)).float(),
        pairs=torch.from_numpy(pairs).float(),
    )
    logits = clicks._logits(world, ids, None)
    return replace(world, bias=_bias(logits.numpy()))


def _bias(logits: Array) -> int:
    """What makes the mean probability the click rate, by bisection."""
    low, high = -RANGE, RANGE
    while high - low > 1:
        middle = (low + high) // 2
        rate = np.mean(1 / (1 + np.exp(-(logits + middle) / UNIT)))
        low, high = (middle, high) if rate < CLICK_RATE else (low, middle)
    return low
