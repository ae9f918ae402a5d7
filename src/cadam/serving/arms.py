"""The champion and its challengers: optimizers that learn the same log, of which one is served.

A challenger is a complete learner with its own model, optimizer and pending events. It gets the batches of the
champion, and predicts every event before it learns it. The log losses of champion and challenger are compared on the
same labels, in blocks, with the verdict of the A/B (`PairedScores`).

Labels are compared in the order of their arrival. What a label says is not known before it arrives, and the scores that
it is compared with were computed before. The difference of the losses of a block minus its conditional mean, given all
labels that arrived earlier, is therefore a martingale difference, however late labels are, and the confidence sequence
needs no lag.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

import cadam

from ..online.data.events import Array, Batch, Columns, Events, Labels
from ..online.learner import Learner
from ..online.models.model_file import OptimizerSpec, UsageError
from ..online.persistence.warm_start import with_options
from ..statistics.paired_scores import PairedScores, log_losses

logger = logging.getLogger("cadam.serving")

ALPHA = 0.05
"""The probability that a challenger is ever called better although it is not, for all challengers together."""
MATTERS = 0.1
"""The smallest difference of practical use, in percent of the champion's log loss, as in `cadam ab`."""
BLOCK = 100
"""Labels per block of the comparison. The verdict assumes sums of several events."""
MAX_BLOCKS = 20 << 20
"""The number of blocks for which the confidence sequences of the recent part of the log are prepared."""


@dataclass(frozen=True)
class Arm:
    """An optimizer with its learning rate, as in ``CAdam:lr=0.003``."""

    spec: OptimizerSpec
    lr: float

    @classmethod
    def parse(cls, text: str, lr: float) -> Arm:
        """Parse NAME:OPTION=VALUE:..., where lr is one of the options.

        Args:
            text: the optimizer.
            lr: the learning rate if the text has none.

        Raises:
            UsageError: if the optimizer, an option or the learning rate is invalid.
        """
        parts = text.split(":")
        rates = [part.partition("=")[2] for part in parts if part.partition("=")[0].strip() == "lr"]
        try:
            lr = float(rates[-1]) if rates else lr
        except ValueError:
            raise UsageError(f"{text}: the learning rate must be a number, got {rates[-1]!r}") from None
        if not 0 < lr < float("inf"):
            raise UsageError(f"{text}: the learning rate must be above 0, got {lr:g}")
        rest = [part for part in parts if part.partition("=")[0].strip() != "lr"]
        spec = OptimizerSpec.parse(":".join(rest))
        if spec.group_options:
            raise UsageError(f"{text}: a service takes options of all parameters only, without @")
        return cls(spec, lr)

    def __str__(self) -> str:
        return f"{self.spec}:lr={self.lr:g}"

    @property
    def options(self) -> dict[str, Any]:
        """The options that replace those of a saved optimizer."""
        return {"lr": self.lr, **self.spec.options}

    def build(self, model: nn.Module) -> cadam.Optimizer:
        """Create the optimizer for all parameters of a model."""
        return self.spec.build(model, self.lr)


class RecordingLearner(Learner):
    """A learner that records the labeled predictions of its last batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._resolved: list[Columns] = []

    def process(self, batch: Events | Labels | Batch) -> None:
        """Process what a source produced."""
        self._resolved = []
        super().process(batch)

    def _update_metrics(self, columns: Columns) -> None:
        super()._update_metrics(columns)
        self._resolved.append({name: columns[name] for name in ("id", "score", "label")})

    def losses(self) -> tuple[list[Any], Array]:
        """Return the ids and the log losses of the events that got their labels in the last batch."""
        ids = [key for columns in self._resolved for key in columns["id"].tolist()]
        parts = [log_losses(columns["score"], columns["label"]) for columns in self._resolved]
        return ids, np.concatenate([np.empty(0), *parts])

    def exchange(self, other: RecordingLearner) -> None:
        """Exchange the model, the optimizer and the pending events with another learner of the same stream."""
        for name in ("training", "alignment_counts", "join", "queue"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)


class Challenger:
    """A learner in the shadow of the champion, and its comparison with it.

    Args:
        arm: the optimizer.
        learner: the learner.
        alpha: the probability of a wrong verdict.
    """

    def __init__(self, arm: Arm, learner: RecordingLearner, alpha: float) -> None:
        self.arm, self.learner, self.alpha = arm, learner, alpha
        self.failure: str | None = None
        """The reason why the challenger has stopped, None if it learns."""
        self.restart()

    def restart(self) -> None:
        """Begin the comparison again, because the champion has changed."""
        self.scores = PairedScores("lower", MATTERS, self.alpha, MAX_BLOCKS, is_live=True)
        self._sums: Array = np.zeros(3)
        """The challenger's losses, the champion's losses and the number of labels, summed over the present block."""

    def start_like(self, champion: Learner) -> None:
        """Start from the model of the champion, its pending events, and its moments if they fit."""
        state = Learner.state_dict(champion)
        state |= {"optimizer_name": type(self.learner.optimizer).__name__, "source": None, "rejected": None}
        state["counts"] = {name: value for name, value in state["counts"].items() if name != "saves"}
        state["metrics"] = [metric.state_dict() for metric in (self.learner.log_loss, *self.learner.extra_metrics)]
        fresh = self.learner.optimizer.state_dict()
        try:
            self.learner.load_state_dict({**state, "optimizer": with_options(state["optimizer"], self.arm.options)})
        except ValueError as error:
            logger.warning("challenger %s starts without moments: %s", self.arm, error)
            self.learner.load_state_dict({**state, "optimizer": fresh})

    def process(self, batch: Events | Labels | Batch, champion: RecordingLearner) -> None:
        """Learn the batch that the champion has just learned, and compare their losses."""
        if self.failure is not None:
            return
        if isinstance(batch, Batch):
            batch = replace(batch, rejected=[], missing_columns={})  # the champion reports them
        try:
            self.learner.process(batch)
        except (FloatingPointError, RuntimeError) as error:
            self.failure = str(error)
            logger.error("challenger %s has failed and stops: %s", self.arm, error)
            return
        ids, losses = self.learner.losses()
        champion_ids, champion_losses = champion.losses()
        if ids != champion_ids:  # an event is missing if one of the models has no finite score for it
            known = dict(zip(champion_ids, champion_losses.tolist(), strict=True))
            rows = [row for row, key in enumerate(ids) if key in known]
            losses, champion_losses = losses[rows], np.array([known[ids[row]] for row in rows])
        self._sums = self._sums + np.array([losses.sum(), champion_losses.sum(), len(losses)])
        if self._sums[2] >= BLOCK:
            arm, baseline, count = self._sums.tolist()
            self.scores.update(np.array([arm / count]), np.array([baseline / count]), count, champion.events)
            self._sums = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue."""
        return {
            "learner": self.learner.state_dict(),
            "scores": self.scores.state_dict(),
            "sums": self._sums,
            "failure": self.failure,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.learner.load_state_dict(state["learner"])
        self.scores.load_state_dict(state["scores"])
        self._sums, self.failure = np.array(state["sums"]), state["failure"]
