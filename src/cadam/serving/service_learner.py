"""The learner of a service: a `Learner` with a guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..online.data.events import Batch, Columns, Events, Labels
from ..online.learner import Learner
from .guard import Guard


class ServiceLearner(Learner):
    """A learner whose log loss is watched by a guard, if there is one and the loss is the log loss.

    Args:
        *arguments: the model, the optimizer and the loss.
        guard: the guard, None for none.
        **options: further arguments of `Learner`.
    """

    reports: list[Callable[[Any], None]]

    def __init__(self, *arguments: Any, guard: Guard | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.guard = guard if self.has_log_loss else None
        self.position = 0
        """The number of the last log entry that was processed."""

    @property
    def is_alert(self) -> bool:
        """Whether the guard has stopped the publication of snapshots."""
        return self.guard is not None and self.guard.is_alert

    @property
    def is_stop_requested(self) -> bool:
        """Whether `stop` was called and the learner has not ended yet."""
        return self._stop_requested

    def process(self, batch: Events | Labels | Batch) -> None:
        """Process what the log produced."""
        super().process(batch)
        self.position = self._source.position

    def _update_metrics(self, columns: Columns) -> None:
        super()._update_metrics(columns)
        if self.guard is not None:
            was_alert = self.is_alert
            self.guard.update(columns, self.training, self.position)
            if self.is_alert != was_alert and self.schedule is not None:
                self.schedule.make_due()  # a restart must not forget the alert

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue."""
        return {**super().state_dict(), "guard": None if self.guard is None else self.guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        super().load_state_dict(state)
        self.position = state["source"]["position"]
        if self.guard is not None and state.get("guard") is not None:  # absent in checkpoints of older versions
            self.guard.load_state_dict(state["guard"])
