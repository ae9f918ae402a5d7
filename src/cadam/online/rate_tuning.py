"""A learning rate that is tuned while a stream is learned: `--lr auto`.

Copies of the model and the optimizer ("candidates") learn the same events at other learning rates. The candidate with
the lowest discounted loss so far is the leader: its model makes the predictions, is saved and is exported. The choice
is that of `RateSelector`, so no prediction uses the label of that event.

Rates lie on a grid of two per decade. The schedule counts labeled events:

1. Search. Ten models learn the first 2,048 events, from 1/300 to 100 times the first rate, all from the initial
   weights. Then there are six, and from 16,384 events on four.
2. Watch, from 49,152 events on. The leader and its two neighbors learn.
3. Rest. Once the leader has not changed for a while, only the two candidates below it learn beside it. After the rest,
   or when one of them takes the lead, a copy of the leader at the next higher rate competes again. The rests become
   longer as long as the leader does not change, and in the longest ones only one candidate learns.

If the leader reaches an end of the window of candidates, the window moves: candidates that are far away are deleted,
and new ones start as copies of the nearest candidate, with its discounted loss, so they lead only if their own losses
are lower than those of the leader.

Candidates below the leader are kept as long as possible, also during a rest, because the weights of a model depend on
the rates that it has learned with. A short stretch of a stream can favor a high rate. If the lower rate were deleted
then, and began again as a copy of the leader, it would keep for a long time what the higher rate has made of the
weights, and it would take many events until its loss is that of a model which has always had the lower rate. Upwards
there is no such difference: a higher rate forgets earlier weights quickly.

The losses are those of events before a step learns them, whether their labels came with them or later.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..statistics.rate_selection import RateSelector
from .data.events import Array, Columns, select_features
from .fused_step import create_training_step
from .training_step import FATAL_ERRORS, Loss, TrainingStep

logger = logging.getLogger("cadam.online")

RATES_PER_DECADE = 2
STAGES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0, (-5, -4, -3, -2, -1, 1, 2, 3, 4)),
    (2_048, (-3, -2, -1, 1, 2)),
    (16_384, (-2, -1, 1)),
    (49_152, (-1, 1)),
)
"""The labeled events at which each stage begins, and the candidates on the grid, relative to the leader.

More candidates are below the leader than above it: in the first events the best rate is high, and it becomes lower.
"""
SLACK = 2
"""A candidate is kept until it is this much further below the leader than the lowest candidate of the stage."""
CLOSE = 0.05
"""During the search, a candidate above the window is kept if its loss is at most this share higher than the leader's.

While no model predicts better than a constant, the leader is a rate at which nothing is learned. Without the higher
rates it would remain so.
"""
PATIENCE = 1_024
"""In the second stage, a leader at an end of the window moves it after leading for this many events.

It is twice as many in the third stage and three times as many in the last. A short burst of unusual events, in which a
high rate is better, then does not delete the models with low rates.
"""
WATCH, LONGEST_WATCH = 16_384, 49_152
"""In the last stage, a rest begins when the leader has not changed for `WATCH` labeled events and no higher rate has a
lower loss, or when the watch has lasted for `LONGEST_WATCH`.

A copy of the leader at a higher rate starts with the leader's discounted loss, so after `WATCH` events more than half
of its loss is still that of the leader, and a copy that learns better may not be ahead by `MARGIN` yet. If it were
deleted then, it would have to start again after a longer rest, with the same result.
"""
FIRST_REST, LONGEST_REST = 32_768, 262_144
"""The labeled events of the first rest, and of the longest one.

A rest is twice as long as the one before if the leader has not changed in between.
"""
MARGIN = 0.001
"""A candidate becomes the leader if its discounted loss is lower than the leader's by more than this share of it."""


class RateTuning(TrainingStep):
    """A training step that tunes the learning rate; see the description of this module.

    `model` and `optimizer` are always those of the leader: when the leader changes, the states of the two models and of
    their optimizers are exchanged.

    Args:
        model: returns one score per event. It must be possible to copy it with `copy.deepcopy`.
        optimizer: updates the parameters of the model. Its learning rate is where the search starts. If its groups have
            different rates, their ratios remain.
        loss: computes the mean loss from scores and labels.

    Raises:
        ValueError: if the model or its optimizer cannot be copied.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        super().__init__(model, optimizer, loss)
        self.leader = create_training_step(model, optimizer, loss)
        """The fastest training step for the model of the leader."""
        self.before_switch: Callable[[], None] = lambda: None
        """Is called before the state of the leader is replaced, which sets the counters of its optimizer to zero."""
        self._reset()
        try:
            self._copy(0, self)
        except Exception as error:
            if isinstance(error, FATAL_ERRORS) and not isinstance(error, TypeError):
                raise
            raise ValueError(
                "the learning rate cannot be tuned, because the model or its optimizer cannot be copied "
                f"({type(error).__name__}: {error}): give a fixed learning rate, as in --lr 0.003"
            ) from error

    def _reset(self) -> None:
        """Start the search at the present learning rate of the optimizer."""
        groups = self.optimizer.param_groups
        self.start = float(groups[0]["lr"])
        if not 0 < self.start < math.inf:
            raise ValueError(f"tuning needs a first learning rate above 0, got {self.start:g}")
        self._ratios = [float(group["lr"]) / self.start for group in groups]
        self.position = 0
        """The position of the leader on the grid; 0 is the first rate."""
        self.candidates: dict[int, TrainingStep] = {}
        """The other candidates by their positions on the grid."""
        self.selector = RateSelector([self.start])
        self.labeled = 0
        """The number of labeled events so far."""
        self.switches = 0
        """The number of changes of the leader."""
        self.stage = 0
        """The number of stages that have begun."""
        self.stable_since = 0
        """The number of labeled events when the leader changed last, or when its candidates were created."""
        self.watched_since = 0
        """The number of labeled events when the present stage or the present watch began."""
        self.rest = FIRST_REST
        """The length of the next rest."""
        self.rest_ends = 0
        """The number of labeled events at which the present rest ends; 0 if there is no rest."""

    @property
    def is_new(self) -> bool:
        """Whether the search is still in its first stage, in which the leader can be a model that hardly learns."""
        return self.labeled < STAGES[1][0]

    @property
    def rate(self) -> float:
        """The learning rate of the leader."""
        return self.rate_at(self.position)

    @property
    def models(self) -> list[nn.Module]:
        """The models of the leader and of all candidates."""
        return [self.model, *(candidate.model for candidate in self.candidates.values())]

    def rate_at(self, position: int) -> float:
        """Return the learning rate at a position of the grid."""
        return self.start * 10 ** (position / RATES_PER_DECADE)

    def metrics(self) -> dict[str, float]:
        """Return the learning rate, the number of its changes and the number of models that learn."""
        return {
            "learning_rate": self.rate,
            "learning_rate_switches": self.switches,
            "learning_rate_candidates": 1 + len(self.candidates),
        }

    def advance(self, time: float, events: int) -> None:
        """Set the clock of features of the kind `id` in the models of all candidates."""
        super().advance(time, events)
        for candidate in self.candidates.values():
            candidate.advance(time, events)

    # Predict and learn --------------------------------------------------------------------------------------------

    def predict(self, features: Columns, count: int) -> Array:
        """Compute the scores of `count` events. A leader that has diverged is replaced first."""
        scores = super().predict(features, count)
        if self.candidates and not np.isfinite(scores).all():
            for position in sorted(self.candidates, key=lambda each: self.selector.loss(self.rate_at(each))):
                candidate_scores = self.candidates[position].predict(features, count)
                if np.isfinite(candidate_scores).all():
                    self._replace_diverged(position)
                    return candidate_scores
        return scores

    def learn(self, columns: Columns) -> Array | None:
        """Compute the scores of labeled events, then let all candidates learn them; see `TrainingStep.learn`."""
        self._begin()
        scores = self.leader.learn(columns)
        if scores is not None:
            self.count_steps(1, len(scores))
            self._compete(columns, scores)
        return scores

    def train(self, columns: Columns) -> None:
        """Take one optimizer step with each candidate. Errors of the leader's model are not caught."""
        self._begin()
        scores = self._scores_before_step(columns)
        super().train(columns)
        self._compete(columns, scores)

    def train_robustly(self, columns: Columns, reject: Callable[[Columns, Exception], None]) -> Exception | None:
        """Take one optimizer step with each candidate; see `TrainingStep.train_robustly`."""
        self._begin()
        if not self.candidates:
            error = super().train_robustly(columns, reject)
            self._compete(columns, None)
            return error
        if self.learn(columns) is not None:
            return None
        scores = None
        try:
            scores = self._scores_before_step(columns)
        except FATAL_ERRORS:
            raise
        except Exception:  # the step finds out which event is the cause
            logger.debug("a batch is not used for the learning rate", exc_info=True)
        error = super().train_robustly(columns, reject)
        self._compete(columns, scores if error is None else None)
        return error

    def check_finite(self) -> None:
        """Raise FloatingPointError if the leader has diverged and no candidate can replace it."""
        for position in sorted(self.candidates, key=lambda each: self.selector.loss(self.rate_at(each))):
            try:
                super().check_finite()
                return
            except FloatingPointError:
                self._replace_diverged(position)
        super().check_finite()

    def _begin(self) -> None:
        """Create the first candidates, before the first step."""
        if not self.stage:
            self.stage = 1
            self._set_window(STAGES[0][1])

    def _scores_before_step(self, columns: Columns) -> Array | None:
        if not self.candidates:
            return None
        return TrainingStep.predict(self, select_features(columns), len(columns["label"]))

    def _compete(self, columns: Columns, scores: Array | None) -> None:
        """Let the candidates learn events, add the losses to the selector, and follow the schedule.

        Args:
            columns: features and labels, which the leader has just learned.
            scores: the scores of the leader from before it learned them; None if they are not to be compared.
        """
        count = len(columns["label"])
        losses = {} if scores is None else {self.rate: self._loss_before_step(scores, columns)}
        for position, candidate in list(self.candidates.items()):
            try:
                candidate_scores = candidate.learn(columns)
                if candidate_scores is None:
                    candidate_scores = candidate.predict(select_features(columns), count)
                    candidate.train(columns)
                losses[self.rate_at(position)] = self._loss_before_step(candidate_scores, columns)
            except FATAL_ERRORS:
                raise
            except Exception:  # an event that this model cannot learn; it does not count for any candidate
                logger.debug("a batch is not used for the learning rate", exc_info=True)
        if self.candidates and len(losses) == len(self.candidates) + 1:
            self.selector.update(losses, count)
        self.labeled += count
        self._remove_diverged()
        if self.labeled == count and self.candidates:
            # No loss after a step is known yet, and with the first step a high rate can have ruined the weights.
            self._switch(min(self.candidates), "the lowest rate predicts until losses can be compared")
            return
        self._choose_leader()
        self._follow_schedule()

    def _loss_before_step(self, scores: Array, columns: Columns) -> float:
        if not np.isfinite(scores).all():
            return math.inf
        with torch.no_grad():
            return float(self._mean_loss(torch.tensor(scores, device=self._device), self._labels(columns), columns))

    # The choice of the rate ---------------------------------------------------------------------------------------

    def _choose_leader(self) -> None:
        if not self.candidates:
            return
        best = self.selector.leader
        position = next((each for each in self.candidates if self.rate_at(each) == best), self.position)
        loss, own = self.selector.loss(best), self.selector.loss(self.rate)
        if position != self.position and not own - loss <= MARGIN * abs(own):
            self._switch(position, f"its recent loss is {loss:.4f} instead of {own:.4f}")

    def _follow_schedule(self) -> None:
        """Move, narrow or delete the window of candidates, where the schedule says so."""
        stage = sum(self.labeled >= start for start, _ in STAGES)
        window = STAGES[stage - 1][1]
        if self.rest_ends:
            if self.labeled >= self.rest_ends:
                self.rest_ends = 0
                self.stable_since = self.watched_since = self.labeled
                self.stage = stage
                self._set_window(window)
            return
        if self.stage < stage:
            self.stage, self.stable_since = stage, self.labeled
            self.watched_since = self.labeled
            self._set_window(window)
        elif stage == len(STAGES) and self._is_rest_due():
            self._rest()
        elif self._is_at_end() and self.labeled - self.stable_since >= PATIENCE * (stage - 1):
            self._set_window(window)

    def _is_rest_due(self) -> bool:
        if self.labeled - self.watched_since >= LONGEST_WATCH:
            return True
        return self.labeled - self.stable_since >= WATCH and not self._is_higher_rate_ahead()

    def _is_higher_rate_ahead(self) -> bool:
        """Whether a candidate above the leader has a lower loss, though not by `MARGIN`; a rest would delete it."""
        own = self.selector.loss(self.rate)
        return any(self.selector.loss(self.rate_at(each)) < own for each in self.candidates if each > self.position)

    def _is_close(self, position: int) -> bool:
        return self.selector.loss(self.rate_at(position)) <= (1 + CLOSE) * self.selector.loss(self.rate)

    def _is_at_end(self) -> bool:
        """Whether no candidate is above the leader, or none below it."""
        own = self.position
        return not min(self.candidates, default=own) < own < max(self.candidates, default=own)

    def _set_window(self, window: tuple[int, ...]) -> None:
        """Set the candidates to those around the leader, and copy the nearest candidate for each rate that is new."""
        required = {self.position + offset for offset in window}
        kept = range(min(required) - SLACK, max(required) + 1)
        is_search = self.stage < len(STAGES)
        for position in [each for each in self.candidates if each not in kept]:
            if not (is_search and position > self.position and self._is_close(position)):
                self._delete(position)
        for position in sorted(required - self.candidates.keys()):
            nearest = min((self.position, *self.candidates), key=lambda each: abs(each - position))
            source = self.candidates.get(nearest, self)
            self.candidates[position] = self._copy(position, source)
            self.selector.add(self.rate_at(position), self.selector.loss(self.rate_at(nearest)))

    def _rest(self) -> None:
        """Delete all candidates except the two below the leader, or the one below it if the rest is a longest one."""
        kept = range(self.position - (1 if self.rest == LONGEST_REST else 2), self.position)
        for position in list(self.candidates):
            if position not in kept:
                self._delete(position)
        self.rest_ends = self.labeled + self.rest
        logger.info("learning rate %.2g is stable; other rates are tried in %s events", self.rate, f"{self.rest:,}")
        self.rest = min(2 * self.rest, LONGEST_REST)

    def _switch(self, position: int, reason: str) -> None:
        """Make a candidate the leader, and the leader a candidate."""
        logger.info(
            "learning rate %.2g instead of %.2g after %s labeled events: %s",
            self.rate_at(position),
            self.rate,
            f"{self.labeled:,}",
            reason,
        )
        self.before_switch()
        candidate = self.candidates.pop(position)
        # A model loads values into its tensors, but an optimizer replaces its tensors, so they need no copy.
        own = {"model": copy.deepcopy(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}
        _load(self, _state(candidate))
        _load(candidate, own)
        self.candidates[self.position] = candidate
        self.position = position
        self.switches += 1
        self.stable_since, self.rest = self.labeled, FIRST_REST
        self.rest_ends = min(self.rest_ends, self.labeled)

    def _replace_diverged(self, position: int) -> None:
        diverged = self.position
        self._switch(position, "the model has diverged")
        self._delete(diverged)

    def _remove_diverged(self) -> None:
        for position in list(self.candidates):
            if not math.isfinite(self.selector.loss(self.rate_at(position))) and self.selector.weight:
                self._delete(position)

    def _delete(self, position: int) -> None:
        del self.candidates[position]
        self.selector.remove(self.rate_at(position))

    def _copy(self, position: int, source: TrainingStep) -> TrainingStep:
        """Copy a candidate or the leader, for another learning rate."""
        model, optimizer = copy.deepcopy((source.model, source.optimizer))
        candidate = create_training_step(model, optimizer, self.loss)
        for group, ratio in zip(optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = ratio * self.rate_at(position)
        return candidate

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the tuning, with the models of all candidates except the leader's."""
        state = {name: getattr(self, name) for name in _SAVED}
        selector = self.selector.state_dict()
        selector["totals"] = {str(rate): total for rate, total in selector["totals"].items()}
        return {
            **state,
            "ratios": self._ratios,
            "selector": selector,
            "candidates": {position: _state(candidate) for position, candidate in self.candidates.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state, after the state of the leader has been loaded into the model and the optimizer.

        Args:
            state: the result of `state_dict`; None to start tuning at the present learning rate of the optimizer.
        """
        self.candidates = {}
        if state is None:
            self._reset()
            return
        for name in _SAVED:
            setattr(self, name, state[name])
        self._ratios = list(state["ratios"])
        self.selector.load_state_dict(state["selector"])
        for position, candidate_state in state["candidates"].items():
            candidate = self.candidates[int(position)] = self._copy(int(position), self)
            _load(candidate, candidate_state)


_SAVED = ("start", "position", "labeled", "switches", "stage", "stable_since", "watched_since", "rest", "rest_ends")


def _state(step: TrainingStep) -> dict[str, Any]:
    return {"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}


def _load(step: TrainingStep, state: Mapping[str, Any]) -> None:
    step.model.load_state_dict(state["model"])
    step.optimizer.load_state_dict(state["optimizer"])
