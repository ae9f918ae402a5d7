"""A batch size that grows with the number of learned events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchGrowth:
    """Small batches in the beginning of a stream, then larger ones, in powers of two.

    A model needs many optimizer steps before it predicts well, so small batches are better in the beginning, where few
    events have been learned. Later, larger batches take less time per event. Smith et al., Don't decay the learning
    rate, increase the batch size (2018), https://arxiv.org/abs/1711.00489, let batches grow for a similar reason.

    The size depends on nothing but the number of learned events, so that a resumed run has the same batches.

    Args:
        first: the size of the first batches, a power of two.
        last: the size of all batches in the end, a power of two.
        divisor: a power of two. Between the first and the last size, the size is the largest power of two that is at
            most the number of learned events divided by this.

    Example:
        >>> growth = BatchGrowth(first=32, last=256, divisor=1024)
        >>> [growth.size(learned) for learned in (0, 65_535, 65_536, 131_072, 262_144)]
        [32, 32, 64, 128, 256]
    """

    first: int = 32
    last: int = 256
    divisor: int = 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.first > self.last:
            raise ValueError(f"the first batch size is {self.first}, which is above the last one, {self.last}")

    def size(self, learned: int) -> int:
        """Return the size of the next batch.

        Args:
            learned: the number of events that have been learned.
        """
        power_of_two = 1 << max(learned // self.divisor, 1).bit_length() - 1
        return min(max(power_of_two, self.first), self.last)
