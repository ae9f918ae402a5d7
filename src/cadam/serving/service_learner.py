"""The learner of a service: the champion with its challengers and a guard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..online.data.events import Batch, Columns, Events, Labels
from ..online.persistence.warm_start import with_options
from .arms import Arm, Challenger, RecordingLearner
from .event_log import EventLog, LogUnavailableError
from .guard import Guard

logger = logging.getLogger("cadam.serving")


class ServiceLearner(RecordingLearner):
    """The champion of a service, which challengers accompany and a guard watches.

    Args:
        arm: the optimizer of the champion.
        *arguments: the model, the optimizer and the loss.
        challengers: the challengers.
        guard: watches the log loss, None for no guard. It is not used with another loss.
        **options: further arguments of `Learner`.
    """

    reports: list[Callable[[Any], None]]

    def __init__(
        self,
        arm: Arm,
        *arguments: Any,
        challengers: Sequence[Challenger] = (),
        guard: Guard | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.arm, self.challengers = arm, list(challengers)
        self.first_arm = arm
        """The champion before the first promotion."""
        self.promotions = 0
        """The number of the last promotion of the log that was applied."""
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
        """Process what the log produced, after the promotions before it."""
        self.apply_promotions(self._source.log)
        super().process(batch)
        for challenger in self.challengers:
            challenger.process(batch, self)
        self.position = self._source.position

    def _update_metrics(self, columns: Columns) -> None:
        super()._update_metrics(columns)
        if self.guard is not None:
            was_alert = self.is_alert
            self.guard.update(columns, self.training, self.position)
            if self.is_alert != was_alert and self.schedule is not None:
                self.schedule.make_due()  # a restart must not forget the alert

    # Promotions ---------------------------------------------------------------------------------------------------

    def apply_promotions(self, log: EventLog) -> None:
        """Apply the promotions that the log has recorded for this position, and new ones now.

        The position is recorded before a promotion is applied, so that it is applied at the same one after a crash.
        """
        if not self.challengers:
            return
        for promotion in log.promotions(self.promotions):
            position = promotion.position
            if position is None:
                position = self.position
                try:
                    log.set_promotion_position(promotion.number, position)
                except LogUnavailableError as error:  # for example a full disk; the next call tries again
                    logger.error("%s is not promoted yet: %s", promotion.challenger, error)
                    return
            if position > self.position:
                break
            self.promotions = promotion.number
            self.promote(promotion.challenger)

    def promote(self, name: str) -> None:
        """Let a challenger become the champion, and the champion a challenger. Comparisons begin again."""
        challenger = next((each for each in self.challengers if str(each.arm) == name), None)
        if challenger is None or challenger.failure is not None:
            logger.warning("%s cannot become the champion: it is not a challenger that learns", name)
            return
        self.exchange(challenger.learner)
        self.arm, challenger.arm = challenger.arm, self.arm
        for each in self.challengers:
            each.restart()
        if self.schedule is not None:
            self.schedule.make_due()
        logger.warning("%s is the champion now, and %s a challenger", self.arm, challenger.arm)

    def find_winner(self) -> str | None:
        """Return the challenger that is better than the champion by the verdict of the A/B, None if there is none."""
        better = [each for each in self.challengers if each.failure is None and each.scores.kind == "better"]
        return str(min(better, key=lambda each: each.scores.over_time.mean).arm) if better else None

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue."""
        arms = {
            "champion": str(self.arm),
            "first": str(self.first_arm),
            "promotions": self.promotions,
            "challengers": {str(each.arm): each.state_dict() for each in self.challengers},
        }
        guard = None if self.guard is None else self.guard.state_dict()
        return {**super().state_dict(), "guard": guard, "arms": arms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Challengers that it does not contain start like the champion."""
        arms = state.get("arms") or {"challengers": {}, "promotions": 0}  # absent in checkpoints of older versions
        saved = arms["challengers"]
        champion = next((each for each in self.challengers if str(each.arm) == arms.get("champion")), None)
        if champion is not None:  # it was promoted
            self.exchange(champion.learner)
            self.arm, champion.arm = champion.arm, self.arm
        super().load_state_dict({**state, "optimizer": with_options(state["optimizer"], self.arm.options)})
        self.promotions, self.position = arms["promotions"], state["source"]["position"]
        for challenger in self.challengers:
            if str(challenger.arm) in saved:
                challenger.load_state_dict(saved[str(challenger.arm)])
            else:
                challenger.start_like(self)
        if self.guard is not None and state.get("guard") is not None:
            self.guard.load_state_dict(state["guard"])
