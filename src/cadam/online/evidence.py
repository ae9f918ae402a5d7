"""Is one arm better than the other on a stream? Intervals for paired differences, and one that may be watched.

Both arms predict the same events, so it is differences that count: of a user's AUC, of a block of time's loss. What
each interval takes for granted:

- `over_users`: users are independent of each other and come from one population. It says how far the difference would
  move with other users; events of one user may depend on each other in any way.
- `over_blocks`: blocks of time, joined into a few long stretches, are nearly independent. It says how far the
  difference would move in another time like this one.
- `ConfidenceSequence`: the same question as over blocks, but valid at every look: the chance that it ever misses the
  true mean, over all looks together, is at most `alpha`. An interval made for one look, watched after every block
  until it excludes 0, finds a difference where there is none far more often than 5% of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cadam.intervals import Array, Interval, interval

STRETCHES = 20
"""How many stretches of time `over_blocks` makes: few enough that each is long, enough for a variance."""
FIRST_LOOK = 20
"""Blocks before a confidence sequence says anything: its variance is an estimate."""
STRONGEST = 0.9
"""The largest dependence of a block on the one before that is believed."""


def over_users(difference: Array, weight: Array | None = None) -> Interval:
    """The mean difference over users and its 95% interval, each user a cluster; `weight` as for GAUC's weighting."""
    return interval(difference, weight)


def over_blocks(differences: Sequence[float] | Array, stretches: int = STRETCHES) -> Interval:
    """The mean difference over equally long blocks in time order, with a 95% interval from means of long stretches."""
    blocks = np.asarray(differences, dtype=np.float64)
    length = len(blocks) // min(stretches, max(len(blocks), 1)) if len(blocks) else 0
    if length == 0:
        return interval([])
    whole = len(blocks) // length * length
    found = interval(blocks[len(blocks) - whole :].reshape(-1, length).mean(1))
    mean = float(blocks.mean())
    return Interval(mean, mean - found.half_width, mean + found.half_width, len(blocks))


def confidence_sequence(
    differences: Array, alpha: float = 0.05, first_look: int = FIRST_LOOK, sharpest: int = 100
) -> tuple[Array, Array]:
    """Lower and upper ends after each block (the last axis), together valid at every look with chance 1 - alpha.

    It inverts the t test that may be watched: with u = t^2 / (n - 1) from n blocks, and c chosen so that the interval
    is about narrowest after `sharpest` blocks, the Bayes factor

        sqrt(c / (n + c)) ((1 + u) / (1 + u c / (n + c)))^(n / 2)

    of "some difference" over "none" is a martingale where there is none, so the chance that it ever reaches 1 / alpha
    is at most alpha (Ville). That is exact for independent normal differences. For others it holds as the central limit
    theorem does, so nothing is said before `first_look` blocks: the ends are infinite there. Blocks may depend on
    each other as in an autoregression of order one: n is then the number of independent blocks that would tell as much,
    by the correlation of neighbours and one standard error more. Mean and variance may change along the stream; what is
    covered is then the mean so far.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    if first_look < 2:
        raise ValueError(f"first_look must be at least 2 blocks, got {first_look}")
    x = np.asarray(differences, dtype=np.float64)
    t = np.arange(1, x.shape[-1] + 1)
    start = x[..., :1]
    x = x - start  # the sums below then lose no digits to a large mean
    mean = x.cumsum(-1) / t
    variance = np.maximum(np.square(x).cumsum(-1) / t - mean**2, 0.0)
    products = np.zeros_like(x)
    products[..., 1:] = (x[..., 1:] * x[..., :-1]).cumsum(-1)
    # The sum of (x_i - mean) (x_{i-1} - mean) over i = 2..t.
    covariance = products - mean * (2 * t * mean - x[..., :1] - x) + (t - 1) * mean**2
    with np.errstate(divide="ignore", invalid="ignore"):
        related = np.where(variance > 0, covariance / (t * variance), 0.0)
        # Estimated from t blocks, it is too low by (1 + 3 related) / t on average (Kendall).
        related = np.clip(related + (1 + 3 * related) / t + 1 / np.sqrt(t), 0.0, STRONGEST)
        n = np.maximum(t * (1 - related) / (1 + related), 1.0)
        c = sharpest / (-2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1)
        reached = np.exp((np.log((n + c) / c) - 2 * math.log(alpha)) / n)
        u = np.where(reached * c < n + c, (reached - 1) / (1 - reached * c / (n + c)), math.inf)
        half = np.sqrt(variance * t / (t - 1) * u * (n - 1) / n)
    half = np.where(t < first_look, math.inf, np.where(variance > 0, half, 0.0))
    return start + mean - half, start + mean + half


class ConfidenceSequence:
    """An interval for the mean paired difference that may be looked at after every block, and acted on."""

    def __init__(self, alpha: float = 0.05, first_look: int = FIRST_LOOK, sharpest: int = 100) -> None:
        self.alpha, self.first_look, self.sharpest = alpha, first_look, sharpest
        self._differences: list[float] = []

    def update(self, difference: float) -> None:
        """Take in the difference of the next block: arm minus baseline."""
        if not math.isfinite(difference):
            raise ValueError(
                f"a difference must be finite, got {difference}: leave out blocks in which it does not exist"
            )
        self._differences.append(float(difference))

    @property
    def interval(self) -> Interval:
        """The mean so far and the ends valid now and at every other look; infinite before the first."""
        count = len(self._differences)
        if count == 0:
            return Interval(math.nan, -math.inf, math.inf, 0)
        low, high = confidence_sequence(np.array(self._differences), self.alpha, self.first_look, self.sharpest)
        return Interval(float(np.mean(self._differences)), float(low[-1]), float(high[-1]), count)

    @property
    def decided(self) -> bool:
        """Whether 0 is outside at this look."""
        now = self.interval
        return now.low > 0 or now.high < 0

    def state_dict(self) -> dict[str, Any]:
        return {"differences": list(self._differences)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._differences = [float(value) for value in state["differences"]]


def first_alarm(low: Array, high: Array) -> Array:
    """After how many blocks a sequence first excludes 0, along the last axis; 0 if it never does."""
    outside = (low > 0) | (high < 0)
    alarms: Array = np.where(outside.any(-1), outside.argmax(-1) + 1, 0)
    return alarms


def relatedness(differences: Sequence[float] | Array) -> float:
    """How much a block's difference goes with that of the block before: their correlation."""
    x = np.asarray(differences, dtype=np.float64)
    spread = x - x.mean()
    total = float(spread @ spread)
    return float(spread[1:] @ spread[:-1]) / total if total > 0 else 0.0


def recovery(curve: Array, moment: int, before: int = 10, reach: float = 0.9) -> int | None:
    """How many blocks after a shift a metric (more is better) takes to come back; None if it does not.

    The level before is the mean of the `before` blocks that precede the shift, the floor the lowest value since. It is
    back in the first block from which the mean of three blocks has made up `reach` of the fall. A metric that does not
    fall has recovered after 0 blocks.
    """
    if not 0 < moment < len(curve):
        raise ValueError(f"the shift must lie within the {len(curve)} blocks, got block {moment}")
    level = float(np.mean(curve[max(0, moment - before) : moment]))
    floor = math.inf
    for block in range(moment, len(curve) - 2):
        floor = min(floor, float(curve[block]))
        if np.mean(curve[block : block + 3]) >= floor + reach * (level - floor):
            return block - moment
    return None
