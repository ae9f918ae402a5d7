"""Warns if a model is not better than the best constant prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..metrics.log_loss import LogLoss

if TYPE_CHECKING:
    from ..learner import Learner

MIN_LABELED = 2_000
"""The number of labeled events from which on a model is judged."""
MIN_STEPS = 200
"""The number of optimizer steps from which on the learning rate can be the cause of a high loss."""
FEW_STEPS = 50
"""Fewer optimizer steps than this can be the cause although the loss has reached that of a constant."""
MAX_LATE = 0.25
"""Late labels matter if they belong to more events than this share of the judged ones."""
TOLERANCE = 0.02
"""Losses count as equal if they differ by less than this share of the loss of the best constant."""


class BaselineCheck:
    """A report that compares the log loss of the second half of a run with that of the best constant prediction.

    Args:
        left_out: columns of the data that are not features, except those that the user asked to ignore.
    """

    def __init__(self, left_out: Sequence[str] = ()) -> None:
        self.left_out = left_out
        self._most_waiting = 0
        """The largest number of events that waited for their labels at once."""
        self._first_half = LogLoss()
        self._next_snapshot = MIN_LABELED

    def __call__(self, learner: Learner) -> None:
        """Save the loss at every doubling, so that at the end at least the second half can be judged alone."""
        self._most_waiting = max(self._most_waiting, len(learner.pending))
        if learner.log_loss.count >= self._next_snapshot:
            self._first_half, self._next_snapshot = replace(learner.log_loss), 2 * learner.log_loss.count

    def warning(self, learner: Learner) -> str:
        """Return a warning if the model is not better than a constant, or an empty string."""
        late = learner.log_loss - self._first_half
        if not learner.has_log_loss or late.count < MIN_LABELED // 2:
            return ""
        if not late.weight:
            return f"the weights of the last {late.count:,} labeled events are all 0, so nothing was learned from them"
        if late.positives in (0, late.weight):
            return (
                f"the last {late.count:,} labeled events all have the same label, so it is not known whether the model "
                "predicts better than a constant"
            )
        if late.mean < late.best_constant:
            return ""
        return (
            f"the model is no better than a constant: its log loss was {late.mean:.4f} over the last {late.count:,} "
            f"labeled events, that of the best constant {late.best_constant:.4f}. {self._advice(learner, late)}"
        )

    def _advice(self, learner: Learner, late: LogLoss) -> str:
        """Name likely causes. The learning rate is one of them only if no other is known."""
        causes = []
        # A model that has reached the loss of a constant has had enough steps to learn it, unless it started there.
        has_reached_constant = late.mean <= (1 + TOLERANCE) * late.best_constant
        if learner.steps < (FEW_STEPS if has_reached_constant else MIN_STEPS):
            causes.append(f"there were only {learner.steps:,} steps; use more events or a smaller --batch-size")
        if self._most_waiting > MAX_LATE * late.count:
            causes.append(
                f"labels are late: up to {self._most_waiting:,} events waited at once, and were predicted before the "
                "model had learned from the events before them (a shorter --horizon or --early-positives learns sooner)"
                if learner.join.waits_for_horizon
                else f"labels are late: up to {self._most_waiting:,} events waited at once, and were predicted before "
                "the model had learned from the events before them"
            )
        if (unused := learner.pending.counts.late_labels) > MAX_LATE * late.count:
            causes.append(f"{unused:,} labels arrived after --horizon and were not used")
        if self.left_out:
            names = ", ".join(self.left_out[:5]) + (", ..." if len(self.left_out) > 5 else "")
            causes.append(f"columns were left out: {names}; a --schema can make them features")
        if causes:
            return f"Possible causes: {'; '.join(causes)}"
        if learner.rate_tuning is not None:
            return (
                "The learning rate is tuned, and no other rate was better, so the features may not contain information "
                "about the label."
            )
        return f"{self._rate_advice(late)} `cadam ab` finds the learning rate"

    def _rate_advice(self, late: LogLoss) -> str:
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
