"""The design of an A/B comparison: its arms, learning rates, seeds and segments."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

MetricName = Literal["log_loss", "auc", "gauc"]
METRICS: tuple[MetricName, ...] = get_args(MetricName)
FIRST_SEGMENT = 10_000
"""The number of events in the first segment of a stream."""
SEGMENT_GROWTH = 1.5
"""The end of each segment divided by that of the segment before."""
MAX_ADDED_RATES = 4
"""The number of learning rates that may be added at each end of the grid of an arm."""
FINEST_RATIO = 2.0
"""A learning rate is added between the best one and its better neighbor if their ratio is above this."""


@dataclass(frozen=True)
class Run:
    """One run of a comparison: one optimizer at one learning rate under one seed."""

    arm: str
    lr: float
    seed: int

    def __str__(self) -> str:
        return f"{self.arm} at {self.lr:g}, seed {self.seed}"


@dataclass(frozen=True)
class Study:
    """An A/B comparison: the arms, the data, and how they are judged."""

    data: str
    arms: tuple[str, ...]
    """The optimizers, as `OptimizerSpec` reads them; the first is the baseline."""
    model: str
    batch_size: int
    grid: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    """The learning rates of every arm. Further ones are added beside the best rate, and beyond the ends of the grid."""
    seeds: int = 5
    metric: MetricName = "log_loss"
    """The metric that the verdict is about."""
    matters: float = 0.1
    """The smallest difference of practical use: in percent of the log loss, or in points of AUC or GAUC."""
    blocks: int = 100
    """The number of blocks of time in which AUC and GAUC are measured."""
    alpha: float = 0.05
    """The probability of a wrong verdict, over all arms together, by Bonferroni's inequality (Dunn 1961, "Multiple
    comparisons among means", Journal of the American Statistical Association 56(293))."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Everything else that a run depends on, such as the schema and hashes of the data and the model."""

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return self.arms[0]

    @property
    def is_per_event(self) -> bool:
        """Whether events are learned one by one."""
        return self.batch_size == 1

    def runs(self) -> list[Run]:
        """Return the runs that the comparison begins with."""
        return [Run(arm, lr, seed) for seed in range(self.seeds) for lr in self.grid for arm in self.arms]

    @property
    def run_settings(self) -> dict[str, Any]:
        """Everything that a run depends on besides its arm, learning rate and seed, as plain values."""
        return {"data": self.data, "model": self.model, "batch_size": self.batch_size, "settings": dict(self.settings)}

    @property
    def identity(self) -> str:
        """A short hash that differs between comparisons with other data, models, arms, seeds or settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode()).hexdigest()[:8]


def next_rate(rates: tuple[float, ...], upwards: bool) -> float:
    """Return the learning rate that extends a grid at one end, by the ratio of the two rates there."""
    low, high = list(pairwise(rates))[-1 if upwards else 0] if len(rates) > 1 else (1.0, 3.0)
    rate = rates[-1] * high / low if upwards else rates[0] * low / high
    return float(f"{rate:.2g}")


def rate_between(losses: Mapping[float, float]) -> float | None:
    """Return the learning rate halfway, on a logarithmic scale, between the best one and its better neighbor.

    The loss at the best rate of a coarse grid is higher than at the best rate. How much higher depends on how steep the
    loss is around its minimum, so that a coarse grid favors the arm that tolerates rates which are too high.

    Args:
        losses: The loss at each learning rate, in increasing order of the rates. It may be nan or infinite.

    Returns:
        The rate, or None if the ratio of the two is at most `FINEST_RATIO`, or the best rate is at an end.
    """
    rates = [rate for rate, loss in losses.items() if math.isfinite(loss)]
    best = min(range(len(rates)), key=lambda index: losses[rates[index]], default=0)
    if not 0 < best < len(rates) - 1:
        return None
    neighbor = min(rates[best - 1], rates[best + 1], key=lambda rate: losses[rate])
    low, high = sorted([rates[best], neighbor])
    return float(f"{math.sqrt(low * high):.2g}") if high / low > FINEST_RATIO else None


def segment_ends(batch_ends: list[int]) -> list[int]:
    """Return the ends of the segments, as numbers of batches. At each end, all runs wait and the comparison is judged.

    The first segment ends after about `FIRST_SEGMENT` events, and each further end is `SEGMENT_GROWTH` times as many
    events from the beginning. So a decision needs at most `SEGMENT_GROWTH` times the events that would be enough.

    Args:
        batch_ends: The number of judged events after each batch.
    """
    ends, target = [], float(FIRST_SEGMENT)
    for number, events in enumerate(batch_ends, 1):
        if events >= target:
            ends.append(number)
            target = max(target, events) * SEGMENT_GROWTH
    # A short last segment is part of the one before.
    if ends and batch_ends[ends[-1] - 1] * 1.2 > batch_ends[-1]:
        ends.pop()
    return [*ends, len(batch_ends)]
