"""Is one arm better than the other on a stream? Intervals for paired differences, and a confidence sequence.

Both arms predict the same events, so it is differences that count: of a user's AUC, of a block of time's loss. What
each interval takes for granted:

- `over_users`: users are independent of each other and come from one population. It says how far the difference would
  move with other users; events of one user may depend on each other in any way.
- `over_blocks`: blocks of time, joined into a few long stretches, are nearly independent. It says how far the
  difference would move in another time like this one.
- `ConfidenceSequence`: the same question as over blocks, but made to be looked at after every block: over all looks
  together it misses the true mean with a chance of about `alpha`, where blocks are long enough that what is left of
  their dependence dies out over a few of them. An interval made for one look, watched after every block until it
  excludes 0, finds a difference where there is none far more often than 5% of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .intervals import Array, Interval, interval

STRETCHES = 20
"""How many stretches of time `over_blocks` makes: few enough that each is long, enough for a variance."""
FIRST_LOOK = 20
"""Blocks before a confidence sequence says anything: its variance is an estimate."""
STRONGEST = 0.9
"""The largest dependence of a block on the one before that is believed."""
FEWEST = 8
"""Blocks are joined, to see slow dependence, into no fewer than this many."""


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


def changes(differences: Array) -> Array:
    """After each block (the last axis), how many blocks so far differ from the one before, by more than rounding."""
    x = np.asarray(differences, dtype=np.float64)
    count = np.zeros(x.shape, dtype=np.int64)
    count[..., 1:] = (~np.isclose(x[..., 1:], x[..., :-1], rtol=1e-9, atol=0)).cumsum(-1)
    return count


def independent_blocks(differences: Array) -> Array:
    """After each block (the last axis), how many independent blocks would tell as much of the mean as those so far.

    As for an autoregression of order one: t blocks whose neighbours have the correlation r tell as much as
    t (1 - r) / (1 + r). Neighbours that hardly go together may still share a slow part, which shows between longer
    stretches. So the same is asked of blocks joined by L = 2, 4, 8, ..., while there are at least `FEWEST`: if the sums
    of L blocks have the variance V, and single ones v, it is t (L v / V) (1 - r) / (1 + r). The least is taken. Each
    r counts with its bias and a part of its standard error on top: all of it for single blocks, and half for joined
    ones, since the least of several is cautious already.
    """
    x = np.asarray(differences, dtype=np.float64)
    x = x - x[..., :1]  # the sums below then lose no digits to a large mean
    t = np.arange(1, x.shape[-1] + 1)
    total = x.cumsum(-1)
    mean = total / t
    variance = np.square(x).cumsum(-1) / t - mean**2
    dependence = np.ones_like(x)
    length = 1
    while length == 1 or length * FEWEST <= x.shape[-1]:
        joined = total.copy()  # sums of so many blocks, up to each block
        joined[..., length:] -= total[..., :-length]
        joined[..., : length - 1] = 0
        before = np.zeros_like(x)
        before[..., length:] = joined[..., :-length]
        after = joined.copy()
        after[..., : 2 * length - 1] = 0
        level, many = length * mean, t / length
        sums, pairs = np.maximum(t - length + 1, 1), np.maximum(t - 2 * length + 1, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            square = (np.square(joined).cumsum(-1) - 2 * level * joined.cumsum(-1)) / sums + level**2
            product = ((after * before).cumsum(-1) - level * (after + before).cumsum(-1)) / pairs + level**2
            related = product / square
            # Estimated from so many, it is too low by (1 + 3 related) / many on average (Kendall).
            related += (1 + 3 * related) / many + (1.0 if length == 1 else 0.5) / np.sqrt(many)
            related = np.clip(related, 0.0, STRONGEST)
            found = square / (length * variance) * (1 + related) / (1 - related)
        seen = (length == 1) | (many >= FEWEST)
        dependence = np.where(seen, np.fmax(dependence, found), dependence)
        length *= 2
    worth: Array = t / dependence
    return worth


def confidence_sequence(
    differences: Array, alpha: float = 0.05, first_look: int = FIRST_LOOK, sharpest: int = 100
) -> tuple[Array, Array]:
    """Lower and upper ends after each block (the last axis), for all looks together at about 1 - alpha.

    It inverts the t test that may be watched: with u = t^2 / (n - 1) from n blocks, and c chosen so that the interval
    is about narrowest after `sharpest` blocks, the Bayes factor

        sqrt(c / (n + c)) ((1 + u) / (1 + u c / (n + c)))^(n / 2)

    of "some difference" over "none" is a martingale where there is none, so the chance that it ever reaches 1 / alpha
    is at most alpha (Ville). That is exact for independent normal differences. For others it is an approximation that
    gets better with the number of blocks: n is then `independent_blocks`, which sees dependence that dies out over a
    few blocks, and the end on the side of the longer tail is moved out by s g (1 + 2 z^2) / (6 n) (Johnson; s: standard
    deviation, g: skewness, z: half the width in standard errors). The first looks cannot see a dependence about as long
    as themselves and are then too sure: docs/ab.md has how often.

    Ends are infinite where nothing can be said: before `first_look` blocks, with too few independent ones, and until
    half as many blocks as `first_look` differ from the one before. Blocks that are all alike show no variance, and how
    far the next may lie from them is unknown. Mean and variance may change along the stream; what is covered is then
    the mean so far.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    if first_look < 2:
        raise ValueError(f"first_look must be at least 2 blocks, got {first_look}")
    x = np.asarray(differences, dtype=np.float64)
    t = np.arange(1, x.shape[-1] + 1)
    n = np.maximum(independent_blocks(x), 1.0)
    start = x[..., :1]
    differ = changes(x)
    x = x - start  # the sums below then lose no digits to a large mean
    mean = x.cumsum(-1) / t
    square = np.square(x).cumsum(-1) / t
    variance = np.maximum(square - mean**2, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        c = sharpest / (-2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1)
        reached = np.exp((np.log((n + c) / c) - 2 * math.log(alpha)) / n)
        u = np.where(reached * c < n + c, (reached - 1) / (1 - reached * c / (n + c)), math.inf)
        half = np.sqrt(variance * t / (t - 1) * u * (n - 1) / n)
        third = (x**3).cumsum(-1) / t - 3 * mean * square + 2 * mean**3
        tail = third / variance * (1 + 2 * half**2 * n / variance) / (6 * n)
    known = (t >= first_look) & (differ >= first_look // 2) & (variance > 0) & np.isfinite(half)
    low = np.where(known, start + mean - half + np.minimum(tail, 0.0), -math.inf)
    high = np.where(known, start + mean + half + np.maximum(tail, 0.0), math.inf)
    return low, high


class ConfidenceSequence:
    """An interval for the mean paired difference that may be looked at after every block, and acted on.

    See `confidence_sequence` for what it rests on: dependence between blocks must die out over a few of them.
    """

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
        """The mean so far and the ends made for this and every other look; infinite where nothing can be said."""
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
