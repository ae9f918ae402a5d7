"""A confidence sequence for the mean difference between the scores of two forecasters along a stream.

Two forecasters predict the same events, batch by batch, before the labels of a batch are known. The difference of
their losses in a batch minus its conditional mean, given everything before the batch, is then a martingale difference,
however the stream drifts and however its events depend on each other. `ConfidenceSequence` is an interval for the
average of these conditional means so far, which may be checked after every batch: the probability that it ever excludes
that average is about `alpha`. It is about the two forecasters as they are, on this stream; whether other initial
weights would give the same difference is a question for an interval over seeds.

Sources:

- Choe and Ramdas (2024), "Comparing sequential forecasters", Operations Research 72(4),
  https://arxiv.org/abs/2110.00115: the quantity, why it needs no assumption on the stream, and the form for labels
  that arrive late (section 4.3).
- Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (2024), "Time-uniform central limit theory and asymptotic confidence
  sequences", Annals of Statistics 52(6), https://arxiv.org/abs/2103.06476: the interval for martingale differences
  whose variance changes, of which moments of an order above 2 must be bounded, and the choice of its parameter.
  Bounded scores, such as a log loss with an upper limit, have all moments.
- Robbins (1970), "Statistical methods related to the law of the iterated logarithm", Annals of Mathematical
  Statistics 41(5): the normal mixture that is inverted.
- Hall (1992), "On the removal of skewness by transformation", Journal of the Royal Statistical Society B 54(1): the
  transformation of Student's statistic whose inverse corrects the ends for skewness.
- Abramowitz and Stegun (1964), "Handbook of Mathematical Functions", 26.7.5: the expansion of Student's quantile, which
  accounts for the estimated variance of few batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .intervals import Interval

FIRST_CHECK = 20
"""The number of batches before the sequence has finite ends, because the variance has to be estimated first."""
NARROWEST_AT = 500
"""The number of batches at which the sequence is about as narrow as it can be."""


class ConfidenceSequence:
    """A confidence sequence for the mean difference of two forecasters, updated batch by batch.

    It is that of Choe and Ramdas (2024) in the asymptotic form of Waudby-Smith et al. (2024), with the mixture of
    Robbins (1970); the description of the module has the references.

    Let S be the sum over events of the differences so far, W the number of events, and V the sum over batches of the
    squared deviations of the batches' sums. The ends are S / W -+ h / W with

        h = sqrt((V + r) log((V + r) / (r alpha^2))),

    which inverts the mixture of normal likelihood ratios whose prior variance is 1 / r. The parameter r is fixed at the
    first check, so that the sequence is narrowest after about `NARROWEST_AT` batches like the first ones. The quantile
    h / sqrt(V) of the normal distribution is replaced by that of Student's t. If the sums of batches are skewed, the
    estimates of their mean and their variance depend on each other, and symmetric ends would exclude the true mean too
    often on one side. Each end is therefore the outer one of the symmetric end and of that by Hall's transformation.

    If labels arrive up to `lag` batches late, the sequence uses blocks of that many batches. The difference of a block
    is known before the next but one begins, so odd and even blocks form two martingales. Each gets half of `alpha`, and
    the ends are the means of their ends, weighted by their events.

    Args:
        alpha: The probability of ever excluding the true mean.
        first_check: The number of batches, or of blocks, before the ends are finite.
        lag: The largest number of batches by which labels arrive after their batch.

    Raises:
        ValueError: If an argument is out of range.

    Example::

        sequence = ConfidenceSequence()
        for difference, events in batches:  # the mean difference of the losses of a batch, and its number of events
            sequence.update(difference, events)
            if sequence.excludes_zero:
                break
        print(sequence.interval)
    """

    def __init__(self, alpha: float = 0.05, first_check: int = FIRST_CHECK, lag: int = 0) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
        if first_check < 2 or lag < 0:
            raise ValueError(f"first_check must be at least 2 and lag at least 0, got {first_check} and {lag}")
        self.lag = lag
        self._batches = 0
        self._block = _Block()
        parts = 1 if lag == 0 else 2
        self.required_batches = first_check * parts * max(lag, 1)
        """The number of batches before the ends are finite."""
        self._sums = [_Sums(alpha / parts, first_check) for _ in range(parts)]

    def update(self, difference: float, count: float = 1) -> None:
        """Add the mean difference of the next batch, arm minus baseline, and the number of its events.

        Raises:
            ValueError: If the difference is not finite.
        """
        if not math.isfinite(difference):
            raise ValueError(f"a difference must be finite, got {difference}: skip batches in which it does not exist")
        block = self._block
        block.add(difference, count)
        self._batches += 1
        if self._batches % max(self.lag, 1) == 0:
            number = self._batches // max(self.lag, 1)
            self._sums[number % len(self._sums)].update(block.total / block.count, block.count)
            self._block = _Block()

    @property
    def interval(self) -> Interval:
        """The mean so far with the present ends of the sequence, which may be infinite. `count` is that of batches."""
        events = sum(sums.events for sums in self._sums)
        if events == 0:
            return Interval(math.nan, -math.inf, math.inf, self._batches)
        mean = sum(sums.total for sums in self._sums) / events
        below, above = (sum(ends) / events for ends in zip(*(sums.deviations() for sums in self._sums), strict=True))
        return Interval(mean, mean - below, mean + above, self._batches)

    @property
    def excludes_zero(self) -> bool:
        """Whether the present interval excludes 0."""
        now = self.interval
        return now.low > 0 or now.high < 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which `load_state_dict` continues."""
        return {
            "batches": self._batches,
            "block": vars(self._block).copy(),
            "sums": [vars(sums).copy() for sums in self._sums],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: If the state belongs to a sequence with another lag.
        """
        if len(state["sums"]) != len(self._sums):
            raise ValueError(f"the state belongs to a sequence with another lag than {self.lag}")
        self._batches = int(state["batches"])
        vars(self._block).update(state["block"])
        for sums, saved in zip(self._sums, state["sums"], strict=True):
            vars(sums).update(saved)


class RecentSequence:
    """A confidence sequence for the mean difference over the recent part of a stream.

    A separate confidence sequence begins after 20, 40, 80, ... batches. The present interval is that of the latest of
    them which covers at least half of the stream so far. As one looks at K sequences along a stream, each of them has
    the error probability `alpha` / K (Bonferroni's inequality; Dunn 1961, "Multiple comparisons among means", Journal
    of the American Statistical Association 56(293)), so that the probability that any of them ever excludes the mean
    over its own part is about `alpha`. Every part is fixed before its events are predicted, so that each sequence has
    the properties of `ConfidenceSequence`.

    Args:
        alpha: The probability of ever excluding the true mean of the recent part.
        total: The number of batches of the whole stream.
        lag: The largest number of batches by which labels arrive after their batch.
    """

    def __init__(self, alpha: float, total: int, lag: int = 0) -> None:
        first = FIRST_CHECK * max(lag, 1)
        self.starts = [first * 2**k for k in range(max(1, math.floor(math.log2(max(total / 2 / first, 1))) + 1))]
        """The numbers of batches after which the sequences begin."""
        self.sequences = [ConfidenceSequence(alpha / len(self.starts), lag=lag) for _ in self.starts]
        self._batches = 0

    def update(self, difference: float, count: float = 1) -> None:
        """Add the mean difference of the next batch, arm minus baseline, and the number of its events."""
        for start, sequence in zip(self.starts, self.sequences, strict=True):
            if self._batches >= start:
                sequence.update(difference, count)
        self._batches += 1

    @property
    def number(self) -> int | None:
        """The number of the present sequence, from 0; None before the first has covered half of the stream."""
        covering = [number for number, start in enumerate(self.starts) if 2 * start <= self._batches]
        return covering[-1] if covering else None

    @property
    def interval(self) -> Interval:
        """The mean over the recent part with its ends, which may be infinite. `count` is that of batches."""
        number = self.number
        return Interval(math.nan, -math.inf, math.inf, 0) if number is None else self.sequences[number].interval

    def state_dict(self) -> dict[str, Any]:
        """Return the state, from which `load_state_dict` continues."""
        return {"batches": self._batches, "sequences": [sequence.state_dict() for sequence in self.sequences]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned, for a stream of the same length."""
        self._batches = int(state["batches"])
        for sequence, saved in zip(self.sequences, state["sequences"], strict=True):
            sequence.load_state_dict(saved)


class _Block:
    """The sum of the differences of consecutive batches."""

    def __init__(self) -> None:
        self.total = self.count = 0.0

    def add(self, difference: float, count: float) -> None:
        self.total += difference * count
        self.count += count


class _Sums:
    """The sums of one martingale, from which its ends follow."""

    def __init__(self, alpha: float, first_check: int) -> None:
        self.alpha, self.first_check = alpha, first_check
        self.batches, self.events, self.total = 0, 0.0, 0.0
        self.squares = self.products = self.square_counts = 0.0
        """The sums of (n d)^2, n (n d) and n^2 over batches, where n is the count and d the difference."""
        self.cubes = [0.0, 0.0, 0.0, 0.0]
        """The sums of (n d)^3, n (n d)^2, n^2 (n d) and n^3 over batches."""
        self.origin = 0.0
        """The first difference, which is subtracted so that the squares stay accurate if the mean is large."""
        self.parameter = 0.0
        """The parameter r of the mixture; 0 before the first check."""

    def update(self, difference: float, count: float) -> None:
        if self.batches == 0:
            self.origin = difference
        centered = count * (difference - self.origin)
        self.batches += 1
        self.events += count
        self.total += count * difference
        self.squares += centered**2
        self.products += centered * count
        self.square_counts += count**2
        self.cubes = [cube + centered ** (3 - power) * count**power for power, cube in enumerate(self.cubes)]
        if self.parameter == 0 and self.batches >= self.first_check:
            self.parameter = self._variance() * NARROWEST_AT / self.batches / _mixture_factor(self.alpha)

    def _variance(self) -> float:
        """Return the sum V of squared deviations from the mean, corrected for the mean that is estimated."""
        mean = self.total / self.events - self.origin
        deviations = self.squares - 2 * mean * self.products + mean**2 * self.square_counts
        return max(deviations, 0.0) * self.batches / (self.batches - 1)

    def _skewness(self, variance: float) -> float:
        """Return the skewness of the mean over batches: that of a batch divided by the square root of their number."""
        mean = self.total / self.events - self.origin
        weights = (1.0, -3 * mean, 3 * mean**2, -(mean**3))
        return math.fsum(weight * cube for weight, cube in zip(weights, self.cubes, strict=True)) / (
            variance * math.sqrt(variance)
        )

    def deviations(self) -> tuple[float, float]:
        """Return how far the ends of the interval for the sum over events lie below and above the sum."""
        variance = self._variance() if self.batches > 1 else 0.0
        # Batches that are all equal show no variance, so they say nothing about the next batch.
        if self.parameter <= 0 or variance <= 1e-18 * max(self.squares, self.origin**2 * self.square_counts):
            return math.inf, math.inf
        r, skewness = self.parameter, self._skewness(variance)
        normal = math.sqrt((1 + r / variance) * math.log((variance + r) / (r * self.alpha**2)))
        quantile = student_quantile(normal, self.batches - 1)
        below, above = (max(quantile, side * remove_skewness(side * quantile, skewness)) for side in (1, -1))
        return below * math.sqrt(variance), above * math.sqrt(variance)


def _mixture_factor(alpha: float) -> float:
    """Return V / r, the ratio of the variance sum and the parameter, at which the sequence is narrowest."""
    return -2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1


def student_quantile(normal: float, degrees: int) -> float:
    """Return the quantile of Student's t that corresponds to a quantile of the normal distribution, approximately.

    The expansion is 26.7.5 of Abramowitz and Stegun (1964).

    Args:
        normal: The quantile of the standard normal distribution.
        degrees: The degrees of freedom; from about 10 on the error is below 1% for quantiles up to 4.
    """
    z, n = normal, degrees
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def remove_skewness(quantile: float, skewness: float) -> float:
    """Return the quantile of Student's statistic of skewed values, by the inverse of the transformation of Hall (1992).

    Args:
        quantile: The quantile for values without skewness.
        skewness: The skewness of the mean: that of the values divided by the square root of their number.
    """
    if abs(skewness) < 1e-6:
        return quantile
    return 3 / skewness * (float(np.cbrt(1 + skewness * (quantile - skewness / 6))) - 1)
