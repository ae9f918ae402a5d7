"""Warns if a model is not better than the best constant prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..metrics.log_loss import LogLoss

if TYPE_CHECKING:
    from ..learner import Learner

MIN_LABELED = 2_000
"""The number of labeled events from which on a model is judged."""
TOLERANCE = 0.02
"""Losses count as equal if they differ by less than this share of the loss of the best constant."""


class BaselineCheck:
    """A report that compares the log loss of the second half of a run with that of the best constant prediction."""

    def __init__(self) -> None:
        self._first_half = LogLoss()
        self._next_snapshot = MIN_LABELED

    def __call__(self, learner: Learner) -> None:
        """Save the loss at every doubling, so that at the end at least the second half can be judged alone."""
        if learner.log_loss.count >= self._next_snapshot:
            self._first_half, self._next_snapshot = replace(learner.log_loss), 2 * learner.log_loss.count

    def warning(self, learner: Learner) -> str:
        """Return a warning if the model is not better than a constant, or an empty string."""
        late = learner.log_loss - self._first_half
        if late.count < MIN_LABELED // 2 or late.mean < late.best_constant:
            return ""
        return (
            f"the model is no better than a constant: its log loss was {late.mean:.4f} over the last {late.count:,} "
            f"labeled events, that of the best constant {late.best_constant:.4f}. {self._advice(late)} `cadam ab` "
            "finds the learning rate"
        )

    def _advice(self, late: LogLoss) -> str:
        """Suggest a change of the learning rate.

        With a learning rate that is too high, the model separates events in the wrong direction, so its loss is above
        that of its mean prediction, or its loss rises. With one that is too low, the mean prediction is still far from
        the mean label, or the loss is still falling.
        """
        best = late.best_constant
        excess, earlier_excess = late.mean - best, self._first_half.mean - self._first_half.best_constant
        # The first comparison is negated so that a loss of nan counts as too high.
        if not late.mean <= (1 + TOLERANCE) * late.of_mean_prediction or excess > earlier_excess + TOLERANCE * best:
            return "Try a lower --lr: the loss is clearly above that of a constant, or rises."
        if late.of_mean_prediction > (1 + TOLERANCE) * best or excess < earlier_excess:
            return "Try a higher --lr: the model has hardly moved from its initial weights."
        return "The features may not contain information about the label."
