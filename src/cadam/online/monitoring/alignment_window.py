"""The alignment of an optimizer between two reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...optim.alignment import Alignment
from ..metrics.alignment_counts import NO_COUNTS

if TYPE_CHECKING:
    from ..learner import Learner


class AlignmentWindow:
    """Computes the alignment counts since the last call."""

    def __init__(self) -> None:
        self._last = Alignment(NO_COUNTS, (NO_COUNTS,), {})

    def advance(self, learner: Learner) -> Alignment:
        """Return the counts since the last call, or since the stream began."""
        last, total, by_parameter = self._last, learner.total_alignment(), learner.alignment()
        self._last = Alignment(total, (total,), by_parameter)
        difference = total - last.total
        parameters = {name: ratio - last.parameters.get(name, NO_COUNTS) for name, ratio in by_parameter.items()}
        return Alignment(difference, (difference,), parameters)
