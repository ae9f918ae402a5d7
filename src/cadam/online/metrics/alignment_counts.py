"""Alignment counts since the beginning of a stream, across restarts of the process."""

from __future__ import annotations

from typing import Any

from ...optim.alignment import Ratio

NO_COUNTS = Ratio(0, 0, 0)


class AlignmentCounts:
    """Adds the counts from before the last restart to those of the optimizer.

    Args:
        optimizer: any optimizer; the counts are empty if it does not count alignment.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer if hasattr(optimizer, "alignment") else None
        self.earlier: dict[str, Ratio] = {}
        self.earlier_total = NO_COUNTS

    def keep(self) -> None:
        """Keep the present counts before a state is loaded, which sets those of the optimizer to zero."""
        self.earlier, self.earlier_total = {**self.earlier, **self.by_parameter()}, self.total()

    def by_parameter(self) -> dict[str, Ratio]:
        """Return the counts of each parameter that has any. There are none with `track_alignment=False`."""
        current = {} if self.optimizer is None else self.optimizer.alignment().parameters
        counts = {name: ratio + self.earlier.get(name, NO_COUNTS) for name, ratio in current.items()}
        return {name: ratio for name, ratio in counts.items() if ratio.seen}

    def total(self) -> Ratio:
        """Return the counts over all parameters, including those that share a name with another one."""
        return self.earlier_total + (NO_COUNTS if self.optimizer is None else self.optimizer.alignment().total)
