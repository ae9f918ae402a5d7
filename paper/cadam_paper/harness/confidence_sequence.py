"""Intervals for paired differences along a stream, and a confidence sequence that may be checked after every block.

Both arms of a comparison predict the same events, so all intervals here are about differences: of the AUC of a user, or
of the loss in a block of time. They rest on different assumptions:

- `intervals.interval` over the differences of users assumes that users are independent and come from one population.
  It says how far the difference would move with other users. The events of one user may depend on each other in any
  way.
- `over_blocks` assumes that long windows of time are nearly independent. It says how far the difference would move in
  another period like this one.
- `ConfidenceSequence` answers the same question as `over_blocks`, but may be checked after every block. The probability
  that it ever excludes the true mean is about `alpha`, provided that the dependence between blocks decays within a
  few blocks. An ordinary interval that is checked after every block until it excludes 0 reports a difference that does
  not exist far more often than in 5% of all cases.

The confidence sequence combines these results:

- Howard, Ramdas, McAuliffe and Sekhon (2021), "Time-uniform, nonparametric, nonasymptotic confidence sequences",
  Annals of Statistics 49(2), https://arxiv.org/abs/1810.08240: confidence sequences from mixture martingales.
- Lai (1976), "On confidence sequences", Annals of Statistics 4(2): the mixture martingale for a normal mean with
  unknown variance, which is the one used here.
- Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (2024), "Time-uniform central limit theory and asymptotic confidence
  sequences", Annals of Statistics 52(6), https://arxiv.org/abs/2103.06476: why such a sequence is approximately valid
  for means of other distributions, and how to choose the time at which it is narrowest.
- Kendall (1954), "Note on bias in the estimation of autocorrelation", Biometrika 41: the correction of the estimated
  correlation between neighboring blocks.
- Johnson (1978), "Modified t tests and confidence intervals for asymmetrical populations", Journal of the American
  Statistical Association 73: the correction for skewed differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cadam.statistics.intervals import Array, Interval, interval

WINDOWS = 20
"""The number of windows of time that `over_blocks` makes: few, so that each is long, but enough for a variance."""
FIRST_CHECK = 20
"""The number of blocks before a confidence sequence has finite ends, because the variance has to be estimated first."""
NARROWEST_AT = 100
"""The number of blocks at which a confidence sequence is about as narrow as it can be."""
MAX_CORRELATION = 0.9
"""The upper limit for the estimated correlation between neighboring blocks."""
MIN_JOINED_BLOCKS = 8
"""The smallest number of joined blocks from which a correlation is estimated."""


def over_blocks(differences: Sequence[float] | Array, windows: int = WINDOWS) -> Interval:
    """Return the mean difference over blocks of time with its 95% interval.

    This is the method of batch means: blocks are averaged within a few long windows, whose means are nearly
    independent, and the interval is computed from these means.

    Args:
        differences: The differences of blocks of equal length, in order of time.
        windows: The number of windows.
    """
    blocks = np.asarray(differences, dtype=np.float64)
    if len(blocks) == 0:
        return interval([])
    length = len(blocks) // min(windows, len(blocks))
    used = len(blocks) // length * length
    half_width = interval(blocks[len(blocks) - used :].reshape(-1, length).mean(1)).half_width
    mean = float(blocks.mean())
    return Interval(mean, mean - half_width, mean + half_width, len(blocks))


def count_changes(differences: Array) -> Array:
    """Return, after each block along the last axis, how many blocks so far differ from the block before.

    Differences that are equal up to rounding count as equal.
    """
    x = np.asarray(differences, dtype=np.float64)
    count = np.zeros(x.shape, dtype=np.int64)
    count[..., 1:] = (~np.isclose(x[..., 1:], x[..., :-1], rtol=1e-9, atol=0)).cumsum(-1)
    return count


def effective_blocks(differences: Array) -> Array:
    """Return, after each block along the last axis, the effective number of independent blocks so far.

    The mean of t blocks from an autoregression of order one, whose neighbors have correlation r, has the same variance
    as the mean of t (1 - r) / (1 + r) independent blocks. A slow component that hardly shows between neighbors shows
    between longer blocks. The same estimate is therefore made from blocks joined in groups of L = 2, 4, 8, ..., as
    long as there are at least `MIN_JOINED_BLOCKS` of them: if sums of L blocks have variance V and single blocks
    variance v, the effective number is t (L v / V) (1 - r) / (1 + r). The smallest estimate is returned.

    Each estimated r is increased by its bias (Kendall 1954) and by a part of its standard error: all of it for single
    blocks, half of it for joined blocks, because the smallest of several estimates is already conservative.
    """
    x = np.asarray(differences, dtype=np.float64)
    # Subtracting the first value keeps the running sums accurate if the mean is large. It changes no variance.
    x = x - x[..., :1]
    t = np.arange(1, x.shape[-1] + 1)
    total = x.cumsum(-1)
    mean = total / t
    variance = np.square(x).cumsum(-1) / t - mean**2
    # The factor by which dependence increases the variance of the mean.
    inflation = np.ones_like(x)
    length = 1
    while length == 1 or length * MIN_JOINED_BLOCKS <= x.shape[-1]:
        # joined[k] is the sum of the last `length` blocks up to block k, and 0 before there are that many.
        joined = total.copy()
        joined[..., length:] -= total[..., :-length]
        joined[..., : length - 1] = 0
        # Each pair of adjacent, non-overlapping sums: `earlier` ends where `later` begins.
        earlier = np.zeros_like(x)
        earlier[..., length:] = joined[..., :-length]
        later = joined.copy()
        later[..., : 2 * length - 1] = 0
        joined_mean, joined_count = length * mean, t / length
        sum_count, pair_count = np.maximum(t - length + 1, 1), np.maximum(t - 2 * length + 1, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Variance of the sums and covariance of adjacent sums, both around the mean so far.
            spread = (np.square(joined).cumsum(-1) - 2 * joined_mean * joined.cumsum(-1)) / sum_count + joined_mean**2
            product = (later * earlier).cumsum(-1) - joined_mean * (later + earlier).cumsum(-1)
            correlation = (product / pair_count + joined_mean**2) / spread
            # The bias of a correlation estimated from n values is -(1 + 3 r) / n, its standard error 1 / sqrt(n).
            bias = (1 + 3 * correlation) / joined_count
            correlation += bias + (1.0 if length == 1 else 0.5) / np.sqrt(joined_count)
            correlation = np.clip(correlation, 0.0, MAX_CORRELATION)
            estimate = spread / (length * variance) * (1 + correlation) / (1 - correlation)
        is_usable = (length == 1) | (joined_count >= MIN_JOINED_BLOCKS)
        # fmax ignores nan, which an estimate is as long as the variance is 0.
        inflation = np.where(is_usable, np.fmax(inflation, estimate), inflation)
        length *= 2
    effective: Array = t / inflation
    return effective


def confidence_sequence(differences: Array, alpha: float = 0.05, first_check: int = FIRST_CHECK) -> tuple[Array, Array]:
    """Return the ends of a confidence sequence for the mean difference after each block along the last axis.

    The sequence inverts a t test that may be checked at any time (Lai 1976). Let t be the t statistic of n blocks and
    u = t^2 / (n - 1). The Bayes factor of a normal prior on the standardized mean, with weight c, against a mean of 0,

        B = sqrt(c / (n + c)) ((1 + u) / (1 + u c / (n + c)))^(n / 2),

    is a nonnegative martingale if the true mean is 0. By Ville's inequality the probability that it ever reaches
    1 / alpha is at most alpha. The ends are the means for which B = 1 / alpha. This is exact for independent normal
    differences. For other differences it is an approximation that improves with the number of blocks (Waudby-Smith et
    al. 2024), with two corrections:

    - n is `effective_blocks`, which accounts for dependence that decays within a few blocks.
    - If the differences are skewed, the end on the side of the longer tail moves outwards by
      s g (1 + 2 z^2) / (6 n), where s is the standard deviation, g the skewness, and z the half width in standard
      errors (Johnson 1978).

    The first checks cannot detect a dependence that is about as long as the blocks so far, and are then too narrow;
    `docs/ab_statistics.md` reports how often.

    Ends are infinite before `first_check` blocks, if there are too few effective blocks, and until half of
    `first_check` blocks differ from the block before: blocks that are all equal show no variance, so they say nothing
    about how far the next block may be from them. If the mean changes along the stream, the sequence covers the mean
    of the blocks so far.

    Args:
        differences: The difference in each block, arm minus baseline, in order of time. Leading axes are independent
            streams.
        alpha: The probability of ever excluding the true mean.
        first_check: The first number of blocks with finite ends.

    Returns:
        The lower and the upper ends, in the shape of `differences`.

    Raises:
        ValueError: If `alpha` is not between 0 and 1, or `first_check` is below 2.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if first_check < 2:
        raise ValueError(f"first_check must be at least 2 blocks, got {first_check}")
    x = np.asarray(differences, dtype=np.float64)
    t = np.arange(1, x.shape[-1] + 1)
    n = np.maximum(effective_blocks(x), 1.0)
    changes = count_changes(x)
    # Subtracting the first value keeps the running sums accurate if the mean is large.
    start = x[..., :1]
    x = x - start
    mean = x.cumsum(-1) / t
    square = np.square(x).cumsum(-1) / t
    variance = np.maximum(square - mean**2, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        # The prior weight that makes the sequence narrowest after NARROWEST_AT blocks (Waudby-Smith et al. 2024).
        c = NARROWEST_AT / (-2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1)
        # Solve B = 1 / alpha for u. With k = ((n + c) / (c alpha^2))^(1 / n), (1 + u) / (1 + u c / (n + c)) = k.
        k = np.exp((np.log((n + c) / c) - 2 * math.log(alpha)) / n)
        u = np.where(k * c < n + c, (k - 1) / (1 - k * c / (n + c)), math.inf)
        half_width = np.sqrt(variance * t / (t - 1) * u * (n - 1) / n)
        third_moment = (x**3).cumsum(-1) / t - 3 * mean * square + 2 * mean**3
        skew_shift = third_moment / variance * (1 + 2 * half_width**2 * n / variance) / (6 * n)
    is_known = (t >= first_check) & (changes >= first_check // 2) & (variance > 0) & np.isfinite(half_width)
    low = np.where(is_known, start + mean - half_width + np.minimum(skew_shift, 0.0), -math.inf)
    high = np.where(is_known, start + mean + half_width + np.maximum(skew_shift, 0.0), math.inf)
    return low, high


class ConfidenceSequence:
    """A confidence sequence for the mean paired difference, updated block by block.

    It may be checked after every block, and one may stop as soon as it excludes 0. See `confidence_sequence` for the
    method and its assumption: the dependence between blocks must decay within a few blocks.

    Args:
        alpha: The probability of ever excluding the true mean.

    Example:
        ```python
        sequence = ConfidenceSequence()
        for difference in differences:  # treatment minus baseline, one value per block
            sequence.update(difference)
            if sequence.excludes_zero:
                break
        print(sequence.interval)
        ```
    """

    def __init__(self, alpha: float = 0.05) -> None:
        self.alpha = alpha
        self._differences: list[float] = []

    def update(self, difference: float) -> None:
        """Add the difference of the next block, arm minus baseline.

        Raises:
            ValueError: If the difference is not finite.
        """
        if not math.isfinite(difference):
            raise ValueError(f"a difference must be finite, got {difference}: skip blocks in which it does not exist")
        self._differences.append(float(difference))

    @property
    def interval(self) -> Interval:
        """The mean so far with the present ends of the sequence, which may be infinite."""
        count = len(self._differences)
        if count == 0:
            return Interval(math.nan, -math.inf, math.inf, 0)
        low, high = confidence_sequence(np.array(self._differences), self.alpha)
        return Interval(float(np.mean(self._differences)), float(low[-1]), float(high[-1]), count)

    @property
    def excludes_zero(self) -> bool:
        """Whether the present interval excludes 0."""
        now = self.interval
        return now.low > 0 or now.high < 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which `load_state_dict` continues."""
        return {"differences": list(self._differences)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._differences = [float(value) for value in state["differences"]]


def first_exclusion(low: Array, high: Array) -> Array:
    """Return after how many blocks along the last axis a sequence first excludes 0; 0 if it never does."""
    is_outside = (low > 0) | (high < 0)
    first: Array = np.where(is_outside.any(-1), is_outside.argmax(-1) + 1, 0)
    return first


def lag_one_correlation(differences: Sequence[float] | Array) -> float:
    """Return the correlation between the differences of neighboring blocks; 0 if all differences are equal."""
    x = np.asarray(differences, dtype=np.float64)
    centered = x - x.mean()
    total = float(centered @ centered)
    return float(centered[1:] @ centered[:-1]) / total if total > 0 else 0.0


def recovery_blocks(curve: Array, shift: int, before: int = 10, reach: float = 0.9) -> int | None:
    """Return how many blocks after a shift a metric takes to recover, or None if it does not recover.

    The level before the shift is the mean of the `before` blocks that precede it, and the floor is the lowest value
    since. The metric has recovered in the first block from which the mean of three blocks has made up `reach` of the
    drop. A metric that does not drop recovers after 0 blocks.

    Args:
        curve: The metric in each block; higher is better.
        shift: The index of the first block after the shift.
        before: The number of blocks before the shift that define the level.
        reach: The share of the drop that must be made up.

    Raises:
        ValueError: If the shift is not inside the curve.
    """
    if not 0 < shift < len(curve):
        raise ValueError(f"the shift must be inside the {len(curve)} blocks, got block {shift}")
    level = float(np.mean(curve[max(0, shift - before) : shift]))
    floor = math.inf
    for block in range(shift, len(curve) - 2):
        floor = min(floor, float(curve[block]))
        if np.mean(curve[block : block + 3]) >= floor + reach * (level - floor):
            return block - shift
    return None
