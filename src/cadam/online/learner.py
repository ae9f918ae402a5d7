"""The online learner: prequential evaluation (test-then-train) of a model on a stream.

`Learner.run` is the loop::

    for batch in source:
        scores = model(batch.events)  # predict, before any label of these events is used
        labeled = join(batch.labels)  # match labels with their events, whenever they arrive
        metrics.update(labeled)  # compare the earlier predictions with their labels
        train(labeled)
        report()
        save_if_due()

See Gama et al., On evaluating stream learning algorithms (2013), https://doi.org/10.1007/s10994-012-5320-9.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..checkpoint_files import check_like, expect_valid_content
from ..optim.alignment import Ratio
from ..printable import printable
from .data.events import FEATURE_PREFIX, Array, Batch, Columns, Events, Labels, Rejected, as_key_array
from .data.schema import record_as_json
from .fused_step import create_training_step
from .labels.batch_growth import BatchGrowth
from .labels.fake_negatives import fake_negative_weighted_loss
from .labels.join import LabelJoin, LabelOptions, Outcome, Resolved, check_label_options
from .labels.pending import PendingEvents
from .labels.training_queue import TrainingQueue
from .metrics.alignment_counts import AlignmentCounts
from .metrics.log_loss import LogLoss, MeanLoss
from .metrics.metric import Metric, accepts_weights
from .models.initial_bias import FirstLabels, set_bias
from .models.model_file import LOG_LOSS, is_log_loss
from .models.networks import Linear
from .monitoring.drift import DriftMonitor
from .monitoring.reject_limit import rejected_share
from .per_event import PerEventTraining
from .persistence.checkpoint_schedule import CheckpointOptions, CheckpointSchedule, CheckpointStore
from .persistence.checkpoints import Checkpoints
from .persistence.prediction_log import LogOptions, PredictionLog
from .persistence.random_state import get_random_state, set_random_state
from .persistence.reject_file import RejectFile, Rejections
from .persistence.warm_start import Saved, warm_start
from .rate_tuning import RateTuning
from .training_step import Loss

__all__ = ["Batches", "Learner", "Loss"]

logger = logging.getLogger("cadam.online")

MAX_LAG = 1e6
"""If the newest event is further than this many seconds from now, the stream is not live and has no lag."""
MAX_REJECTED_TEXT = 4096
"""The number of characters of a rejected event that are kept."""

Batches = Iterable["Events | Labels | Batch | None"]
"""The output of a source. None means that nothing has arrived; then only reports and checkpoints are due."""


class _Path(IntEnum):
    """The way in which an event is processed in per-event training."""

    TORCH = 0
    """With torch, because the compiled code does not support the event, or the join may have to reject it."""
    PREDICT = 1
    """With compiled code; it has no label yet, so it is only predicted."""
    TRAIN = 2
    """With compiled code; it is predicted and learned."""


class Learner:
    """Predicts the events of a stream and learns each of them once, after its prediction.

    The model is called with the features by name, ``model(**features)``, and returns one score per event; `loss` takes
    scores and labels. Labels may arrive with their events, later, earlier, out of order, repeatedly or never.

    Args:
        model: any torch model.
        optimizer: an optimizer of its parameters.
        loss: computes the mean loss from scores and labels.
        labels: how long events wait for their labels, and what happens to those without one.
        batch_size: events per training step; by default a step uses all events that have just been labeled.
        batch_growth: the largest number of events that are predicted together, and learned in one step, as a function
            of the number of learned events. Larger batches of the source are split. By default there is no limit.
        per_event: whether to learn each event before the next one is predicted. The ready-made models linear and FM
            are then trained by compiled code; `training_mode` tells whether this is the case.
        tune_rate: whether the learning rate is tuned while the stream is learned, see `RateTuning`. The rate of the
            optimizer is where the search starts.
        initialize_bias: whether the bias of a ready-made model is set to the log odds of the labels so far before each
            step, until the model has learned `FIRST_LABELS` labels. A model that is warm-started keeps its bias.
        compile: whether `torch.compile` compiles the model, which must be your own. It takes some seconds at the
            beginning, and the last bits of the scores differ.
        metrics: metrics that are updated with every labeled prediction, in addition to the loss.
        checkpoint: where and how often checkpoints are saved; a folder is enough. `run` resumes from the newest one.
        log: where the prediction log is written; a folder is enough.
        rejected: a file for rejected events (default: ``rejected.jsonl`` beside the checkpoints).
        drift: raises an alarm when the log loss rises; None for no alarm.
        reports: functions that are called with the learner after each batch, such as `Console` or `StatusPage`. Their
            method `end`, if they have one, is called when `run` ends, and `close` by `Learner.close`.

    Example::

        model = models.build("deepfm", schema)
        learner = Learner(
            model,
            CAdam(model.named_parameters(), lr=3e-3),
            nn.functional.binary_cross_entropy_with_logits,
            labels=LabelOptions(horizon=3600, unmatched="negative"),
            checkpoint="state",
            reports=[Console()],
        )
        learner.run(open_source("clicks.csv", schema))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        labels: LabelOptions | None = None,
        batch_size: int | None = None,
        batch_growth: BatchGrowth | None = None,
        per_event: bool = False,
        tune_rate: bool = False,
        initialize_bias: bool = False,
        compile: bool = False,
        metrics: Sequence[Metric] = (),
        checkpoint: CheckpointOptions | Path | str | None = None,
        log: LogOptions | Path | str | None = None,
        rejected: Path | str | None = None,
        drift: DriftMonitor | None = None,
        reports: Sequence[Callable[[Learner], None]] = (),
    ) -> None:
        if per_event and batch_size not in (None, 1):
            raise ValueError(f"per_event learns one event per step, but batch_size is {batch_size}")
        if batch_growth is not None and (per_event or batch_size is not None):
            raise ValueError("batch_growth chooses the number of events per step: leave out batch_size and per_event")
        if per_event and tune_rate:
            raise ValueError("the learning rate is tuned in batches, not with per_event: give a fixed learning rate")
        labels = labels or LabelOptions()
        if labels.early_positives and loss is not LOG_LOSS:
            raise ValueError("early_positives needs the log loss, torch.nn.functional.binary_cross_entropy_with_logits")
        if initialize_bias and (not isinstance(model, Linear) or not is_log_loss(loss)):
            raise ValueError("initialize_bias needs a ready-made model and the log loss")
        if initialize_bias and (per_event or labels.early_positives):
            reason = "one label" if per_event else "labels that are all negative at first"
            raise ValueError(f"initialize_bias would use the log odds of {reason}: leave it out")
        training_loss = fake_negative_weighted_loss if labels.early_positives else loss
        if compile and tune_rate:
            raise ValueError("the models that tune_rate compares are not compiled: leave out compile or tune_rate")
        self.rate_tuning = RateTuning(model, optimizer, training_loss) if tune_rate else None
        self.training = self.rate_tuning or create_training_step(model, optimizer, training_loss, compile=compile)
        self.per_event: PerEventTraining | str | None = None
        """Compiled per-event training, the reason why torch is used instead, or None for training in batches."""
        self.join = LabelJoin(labels)
        if per_event:
            self.per_event = PerEventTraining.create(model, optimizer, loss)
            if self.join.options.horizon != math.inf:
                self.per_event = "with torch: with a horizon, events may expire between any two events"
        self.queue = TrainingQueue(1 if per_event else batch_size)
        self.batch_growth = batch_growth
        self._first_labels = FirstLabels() if initialize_bias else None
        """The labels from which the bias is estimated; None if the bias is not estimated, or not any more."""
        self.log_loss, self.extra_metrics, self.reports = LogLoss(), list(metrics), list(reports)
        self.has_log_loss = is_log_loss(loss)
        """Whether the loss is the log loss. Otherwise `metrics` contains the mean loss instead."""
        if not self.has_log_loss:
            self.extra_metrics.append(MeanLoss(loss))
        self.drift = drift if self.has_log_loss else None
        self.alignment_counts = AlignmentCounts(optimizer)
        if self.rate_tuning is not None:
            # A switch loads another state into the optimizer, which sets its counts of alignment to zero.
            self.rate_tuning.before_switch = self.alignment_counts.keep
        if checkpoint is not None and not isinstance(checkpoint, CheckpointOptions):
            checkpoint = CheckpointOptions(checkpoint)
        self.schedule: CheckpointSchedule | None = None
        if checkpoint is not None:
            self.schedule = CheckpointSchedule(self._open_checkpoints(checkpoint), checkpoint)
            rejected = rejected or Path(checkpoint.folder) / "rejected.jsonl"
        if log is not None and not isinstance(log, LogOptions):
            log = LogOptions(log)
        self.log = PredictionLog(log.folder, log.rows, probabilities=log.probabilities) if log is not None else None
        self.rejections = Rejections(rejected)
        self.missing_columns: Counter[str] = Counter()
        """The number of events whose record did not have a column of the schema, by column."""

        self.events = 0
        self.counts_at_start: Mapping[str, float] = {}
        """The counts when this process started: those of `counts`, and of rejected events and missing columns."""
        self.log_loss_at_start = LogLoss()
        """The log loss of the events before this process started, from which a resumed run continues."""
        self.started, self.resumed, self.resumed_at = time.monotonic(), False, 0
        self.stopped = self._stop_requested = False
        self._time_of_events = math.nan
        """The wall-clock time at which the last events were processed."""
        self._source: Any = None
        self._saved_position: Any = None
        """The position of the source in a checkpoint, until `run` passes it to the source."""
        self._has_ids: bool | None = None
        """Whether the events have ids; unknown before the first event."""

    # The loop -----------------------------------------------------------------------------------------------------

    def run(self, source: Batches, *, events: int | None = None) -> Learner:
        """Learn from a source until it ends, until `stop` is called, or until `events` events were seen in total.

        A learner that has not seen any event resumes from its newest checkpoint. The state is saved at the end.

        Args:
            source: produces batches. With checkpoints it needs `state_dict` and `load_state_dict`, like `Source`.
            events: the total number of events after which to stop, including those before a resume.

        Returns:
            This learner.

        Raises:
            TypeError: if there are checkpoints and the source has no `load_state_dict`.
            FloatingPointError: if the model diverges.
            DamagedCheckpointError: if all checkpoints are damaged.
        """
        self._start(source)
        is_saved = self.resumed
        if not self._is_done(events):
            for batch in source:
                if batch is not None:
                    self.process(batch)
                    is_saved = False
                for report in self.reports:
                    report(self)
                if self._is_save_due():
                    is_saved = self.save() is not None
                if self._is_done(events):
                    break
        self._end(is_saved)
        return self

    def process(self, batch: Events | Labels | Batch) -> None:
        """Process what a source produced: predict events, join labels, train, and record rejected events."""
        if isinstance(batch, Events):
            batch = Batch(batch)
        elif isinstance(batch, Labels):
            batch = Batch(labels=batch)
        if batch.rejected:
            self.rejections.add(batch.rejected)
        self.missing_columns.update(batch.missing_columns)
        parts = [batch] if self.batch_growth is None else batch.split(self.batch_growth.size(self.learned))
        for part in parts:
            # Per-event training reads thousands of events at once, so labels are joined at their place among them.
            pairs = [(part.events, part.labels)] if self.per_event is None else part.in_order()
            for events, labels in pairs:
                has_labels = labels is not None and len(labels) > 0
                if events is not None and len(events):
                    self._process_events(events, labels_follow=has_labels)
                if labels is not None and has_labels:
                    self._match_labels(labels)
                self.pending.withdraw(part.withdrawn)
                self._expire_and_train()
        if self.schedule is not None:
            self.schedule.has_unsaved_events = True

    def stop(self) -> None:
        """Let `run` end after the current batch. Signal handlers and other threads may call this method.

        With a `DistributedLearner` it is enough to call it on one rank: all ranks end after the next round.
        """
        self._stop_requested = True

    def _start(self, source: Batches) -> None:
        """Resume from the newest checkpoint, or save the initial state."""
        if self.schedule is not None and not hasattr(source, "load_state_dict"):
            raise TypeError(f"{type(source).__name__} has no state_dict and load_state_dict, so it cannot be resumed")
        self.stopped = False
        is_new = not self.events and not self.resumed and not self.resume()
        self._source = source
        if self._saved_position is not None:
            with expect_valid_content("the position of the source in the checkpoint"):
                source.load_state_dict(self._saved_position)  # type: ignore[attr-defined]
            self._saved_position = None
        if self.log is not None:
            self.log.check_folder()
        if self.schedule is not None:
            self.schedule.time_of_save = time.monotonic()
            if is_new:
                self.save()  # after a crash, the log and the reject file are cut to their sizes in this checkpoint
        self.started, self.resumed_at = time.monotonic(), self.events
        reasons = {f"rejected/{reason}": count for reason, count in self.rejections.reasons.items()}
        missing = {f"missing_columns/{name}": count for name, count in self.missing_columns.items()}
        self.counts_at_start = {**self.counts(), **reasons, **missing}
        self.log_loss_at_start = replace(self.log_loss)

    def _is_done(self, limit: int | None) -> bool:
        self._check_stop_requested()
        return self.stopped or (limit is not None and self.events >= limit)

    def _check_stop_requested(self) -> None:
        if self._stop_requested:
            self.stopped, self._stop_requested = True, False

    def _is_save_due(self) -> bool:
        return self.schedule is not None and self.schedule.is_due(self.events)

    def _save_if_due(self) -> None:
        """Save a checkpoint if one is due, for callers that use `predict`, `observe` and `learn` instead of `run`."""
        if self.schedule is not None:
            self.schedule.has_unsaved_events = True
            if self._is_save_due():
                self.save()

    def _end(self, is_saved: bool) -> None:
        """Call the last reports, write the rest of the log, and save the state if it has changed."""
        for report in self.reports:
            if hasattr(report, "end"):
                report.end(self)
        if self.log is not None:
            self.log.flush()
        if self.schedule is not None and (self.schedule.has_unsaved_events or not is_saved):
            self.save()
        self._stop_requested = False

    # Predict, observe, learn --------------------------------------------------------------------------------------

    def predict(self, events: Events) -> Array:
        """Predict events, which wait for their labels from now on. Labels among them are ignored.

        Like `observe` and `learn`, it saves a checkpoint if one is due.

        Args:
            events: new events.

        Returns:
            One score per event. Events that the model cannot process are rejected and have the score nan.
        """
        if self.per_event is not None:
            return self.learn(replace(events, labels=None))
        self._advance_ids(events)
        scores, columns, _ = self._predict_batch(events)
        columns.pop("label", None)
        self._resolve(self.join.add_events(columns))
        self._expire_and_train()
        self._save_if_due()
        return scores

    def observe(self, ids: Any, labels: Any) -> None:
        """Observe labels, and learn the events that they belong to in the order of the labels.

        A second label of an event is ignored and counted. A label whose event has not arrived yet is kept.

        Args:
            ids: the ids of the events; their numbers, from 0, if the events have no ids.
            labels: one label per id.

        Raises:
            ValueError: if the ids are text, but the events were predicted without ids.
        """
        keys = as_key_array(ids, "ids")
        if self._has_ids is False and any(isinstance(key, str) for key in keys.tolist()):
            raise ValueError(
                f"the label of {keys[0]!r} matches no event, because the events have no ids: give all records the "
                "id column of the schema before they are encoded, or give the numbers of the events"
            )
        self._match_labels(Labels(keys, labels))
        self._train()
        self._save_if_due()

    def learn(self, events: Events) -> Array:
        """Predict events, then learn those that have labels. The others wait for their labels.

        Args:
            events: new events, with or without labels.

        Returns:
            One score per event, predicted before learning. Rejected events have the score nan.
        """
        scores = self._process_events(events)
        self._expire_and_train()
        self._save_if_due()
        return scores

    def finish(self) -> None:
        """End the stream: resolve all pending events, and learn the rest of the queue with a smaller step."""
        self._resolve(self.join.expire_all())
        self._train(include_short=True)

    def _process_events(self, events: Events, *, labels_follow: bool = False) -> Array:
        """Predict events and resolve those whose outcome is known.

        Args:
            events: new events.
            labels_follow: whether labels of other events are joined before the next training step.
        """
        if self.per_event is not None:
            return self._process_per_event(events)
        return self._process_batch(events, labels_follow=labels_follow)

    def _process_batch(self, events: Events, *, labels_follow: bool = False) -> Array:
        self._advance_ids(events)
        learned = self.training.learn(events.columns()) if self._forms_next_step(events, labels_follow) else None
        scores, columns, labels_of_repeated = self._predict_batch(events, learned)
        resolved = self.join.add_events(columns, labels_of_repeated)
        # If the model has learned these events already, they are all that is resolved: see `_forms_next_step`.
        self._resolve(resolved, is_learned=learned is not None)
        return scores

    def _advance_ids(self, events: Events) -> None:
        """Set the clock by which rows of the kind `id` expire: the time of the stream before these events.

        Raises:
            ValueError: if ids expire by time and the events have no time.
        """
        if not self.training.id_features:
            return
        now = self.join.clock.now
        if events.time is None:
            if any(by_time for module in self.training.id_features for by_time in module.expires_by_time.values()):
                raise ValueError("ids expire after a duration, but the events have no time: give the schema a time")
        elif now == -math.inf and np.isfinite(events.time).any():
            now = float(np.nanmedian(np.where(np.isfinite(events.time), events.time, np.nan)))
        self.training.advance(now, self.events)

    def _forms_next_step(self, events: Events, labels_follow: bool) -> bool:
        """Whether the next training step uses exactly these events, so that one forward pass is enough.

        Args:
            events: the events.
            labels_follow: see `_process_events`.
        """
        if events.labels is None or self.queue.count or self.queue.batch_size not in (None, len(events)):
            return False
        if self.batch_growth is not None and len(events) > self.batch_growth.size(self.learned):
            return False
        if self._first_labels is not None:
            return False  # the bias depends on these labels, so the scores must be computed before it is set
        if self.join.waits_for_horizon or (labels_follow and len(self.pending)):
            return False  # other events are learned first, or get a label before the step
        if isinstance(self.per_event, PerEventTraining) or self._has_ids not in (None, events.ids is not None):
            return False
        is_finite = _is_all_finite(events.labels, *([] if events.time is None else [events.time]))
        if not is_finite or not _are_valid_weights(events.weights):
            return False
        return events.ids is None or bool(self.pending.find_unknown(events.ids.tolist()).all())

    def _predict_batch(self, events: Events, scores: Array | None = None) -> tuple[Array, Columns, Labels | None]:
        """Predict events and reject those that cannot be used.

        Args:
            events: new events.
            scores: their scores, if they have been computed.

        Returns:
            The scores of all events, the columns of the new events, and the labels of the repeated ones.
        """
        count = len(events)
        if count:
            self._check_ids(events.ids is not None)
        failures: dict[int, str] = {}
        # Events that `TrainingStep.learn` has learned have finite scores, and `_forms_next_step` has checked the rest.
        is_checked = scores is not None
        if scores is None:
            scores, failures = self._predict_scores(events)
        columns = self._with_id_and_time(events.columns(), count)
        columns["score"] = scores
        self.events += count
        self._time_of_events = time.time()
        if is_checked or (
            _is_all_finite(*(columns[name] for name in ("score", "time", "label") if name in columns))
            and _are_valid_weights(events.weights)
        ):
            times, self.training.consecutive_unscored = columns["time"], 0
        else:
            unusable = _find_unusable(columns)
            has_score, times = ~unusable["score"], columns["time"][~unusable["time"]]
            unscored = self.training.consecutive_unscored + count
            self.training.consecutive_unscored = 0 if has_score.any() else unscored
            is_usable = ~np.logical_or.reduce(list(unusable.values()))
            if not is_usable.all():
                self._reject_rows(columns, unusable, failures)
                columns = {name: values[is_usable] for name, values in columns.items()}
        if len(times):
            self.join.advance_clock(times)
        if events.ids is None:
            return scores, columns, None
        return scores, *self.join.split_repeated(columns)

    def _predict_scores(self, events: Events) -> tuple[Array, dict[int, str]]:
        return self.training.predict_robustly(events, is_first=self.training.consecutive_unscored == self.events)

    def _with_id_and_time(self, columns: Columns, count: int) -> Columns:
        """Use the number of an event as its id and its time, if it has none."""
        numbers = np.arange(self.events, self.events + count)
        return {"id": numbers, "time": numbers.astype(np.float64), **columns}

    def _check_ids(self, has_ids: bool) -> None:
        """Raise ValueError if only some events have ids: others get numbers, which could be equal to these ids."""
        if self._has_ids is None:
            self._has_ids = has_ids
        elif self._has_ids != has_ids:
            earlier, now = ("without", "with") if has_ids else ("with", "without")
            raise ValueError(
                f"events {now} ids after {self.events:,} events {earlier}: events without ids are numbered, and the "
                "numbers could be mistaken for ids. Give ids to all events or to none"
            )

    def _reject_rows(self, columns: Columns, unusable: Mapping[str, Array], failures: dict[int, str]) -> None:
        """Reject events that cannot be used; raise if the model is the cause.

        Args:
            columns: the columns of all events.
            unusable: a mask of the events to reject for each column that is the cause, see `_find_unusable`.
            failures: an explanation for each event that the model refused, by row.
        """
        self.training.check_scores(failures)
        rejected = []
        for row in np.flatnonzero(np.logical_or.reduce(list(unusable.values()))).tolist():
            name = next(name for name, mask in unusable.items() if mask[row])
            reason = failures.get(row, f"its {name} is {columns[name][row]}")
            rejected.append(_rejected(reason, f"id {columns['id'][row]}", columns, row))
        self.rejections.add(rejected)

    def _match_labels(self, labels: Labels) -> None:
        """Join labels with their events, and reject labels that are not finite."""
        is_finite = np.isfinite(labels.labels)
        if not is_finite.all():
            ids = labels.ids[~is_finite].tolist()
            self.rejections.add([Rejected("its label is not finite", f"id {key}", "", 0) for key in ids])
            labels = Labels(labels.ids[is_finite], labels.labels[is_finite])
        self._resolve(self.join.match_labels(labels))

    def _expire_and_train(self) -> None:
        """Resolve the events whose horizon has passed, and train on the queued events."""
        self._resolve(self.join.expire())
        self._train()

    def _resolve(self, resolved: Iterator[Resolved], *, is_learned: bool = False) -> None:
        """Log and measure events with a final outcome, and queue events for training.

        Args:
            resolved: the events.
            is_learned: whether the model has been trained on them already.
        """
        for part in resolved:
            if part.is_final:
                self._record(part)
            if part.is_learned and not is_learned:
                self.queue.add(part.columns)

    def _record(self, resolved: Resolved) -> None:
        """Log predictions whose outcome is final, and update the metrics with those that have a label."""
        if self.log is not None:
            self.log.add(resolved.columns, resolved.outcomes)
        if resolved.outcomes[0] != Outcome.DROPPED:
            self._update_metrics(resolved.columns)

    def _update_metrics(self, columns: Columns) -> None:
        for metric in (self.log_loss, *self.extra_metrics):
            weights = {"weights": columns["weight"]} if "weight" in columns and accepts_weights(metric) else {}
            metric.update(columns["score"], columns["label"], columns.get("user"), columns["time"], **weights)
        if self.drift is not None:
            self.drift.update(columns, self.log_loss)

    def _train(self, include_short: bool = False) -> None:
        """Take training steps on the queued events, in the order in which they were labeled."""
        largest = None if self.batch_growth is None else self.batch_growth.size(self.learned)
        ends = self.queue.step_ends(include_short, largest)
        if not ends:
            return
        columns, start = self.queue.columns(), 0
        for end in ends:
            if end - start == 1:
                start += self._train_queue_per_event(columns, start)
            if start >= end:  # compiled code has learned this event, and possibly some of the following ones
                continue
            part = {name: values[start:end] for name, values in columns.items()}
            start = end
            if self._first_labels is not None:
                self._initialize_bias(self._first_labels, part)
            error = self.training.train_robustly(part, self._reject_untrainable)
            if error is not None and not self.steps:
                raise error  # the model cannot learn any of its first events, so the model is the cause
        self.queue.remove_first(start)

    def _initialize_bias(self, labels: FirstLabels, columns: Columns) -> None:
        labels.add(columns["label"], columns.get("weight"))
        if (log_odds := labels.log_odds()) is not None:
            for model in self.training.models:
                set_bias(model, log_odds)
        if labels.is_complete:
            self._first_labels = None
            logger.info("the bias starts at %.2f, the log odds of the first %d labels", log_odds, labels.count)

    def _reject_untrainable(self, columns: Columns, error: Exception) -> None:
        reason = f"the model cannot be trained on it: {type(error).__name__}: {error}"
        self.rejections.add([_rejected(reason, f"after step {self.steps}", columns, 0)])

    # Per-event training -------------------------------------------------------------------------------------------

    def _process_per_event(self, events: Events) -> Array:
        """Predict each event, and learn it before the next one is predicted.

        Consecutive events that compiled code can process in the same way are passed to it together.
        """
        scores, paths = np.empty(len(events), dtype=np.float32), self._choose_paths(events)
        start = 0
        for end in (*(np.flatnonzero(np.diff(paths)) + 1).tolist(), len(events)):
            while start < end:
                done = 0
                if paths[start] != _Path.TORCH:
                    done = self._process_compiled(events.take(slice(start, end)), paths[start], scores[start:end])
                    start += done
                if not done:
                    scores[start] = self._process_batch(events.take(slice(start, start + 1)))[0]
                    self._expire_and_train()
                    start += 1
        return scores

    def _choose_paths(self, events: Events) -> Array:
        """Choose a `_Path` for each event.

        The join must see events that are repeated, or whose label arrived before them, so they are processed by torch.
        """
        if not isinstance(self.per_event, PerEventTraining):
            return np.full(len(events), _Path.TORCH)
        if events.weights is not None:
            return np.full(len(events), _Path.TORCH)  # the compiled code has no weights
        labels = np.full(len(events), np.nan) if events.labels is None else events.labels
        paths = np.where(np.isnan(labels), _Path.PREDICT, _Path.TRAIN)
        is_supported = self.per_event.find_supported(events.features) & ~np.isinf(labels)
        if events.time is not None:
            is_supported &= np.isfinite(events.time)
        if events.ids is not None:
            is_supported &= self.pending.find_unknown(events.ids.tolist())
        return np.where(is_supported, paths, _Path.TORCH)

    def _process_compiled(self, events: Events, path: int, scores: Array) -> int:
        """Process events with compiled code.

        Args:
            events: events with the same path.
            path: `_Path.PREDICT` or `_Path.TRAIN`.
            scores: receives the scores.

        Returns:
            How many events were processed. The next event, if there is one, needs torch.
        """
        assert isinstance(self.per_event, PerEventTraining)
        self._check_ids(events.ids is not None)
        if path == _Path.TRAIN:
            assert events.labels is not None
            new_scores, done = self.per_event.train(events.features, events.labels)
        else:
            new_scores = self.per_event.predict(events.features)
            done = _count_leading(np.isfinite(new_scores))
        if not done:
            return 0
        scores[:done] = new_scores[:done]
        columns = self._with_id_and_time(events.take(slice(done)).columns(), done)
        columns["score"] = scores[:done]
        self.events += done
        self._time_of_events = time.time()
        self.training.consecutive_unscored = 0
        # The first, largest and last time set the clock to where it would be if the events had arrived one by one.
        for moment in (columns["time"][0], columns["time"].max(), columns["time"][-1]):
            self.join.advance_clock(np.array([moment]))
        if path == _Path.TRAIN:
            self.training.count_steps(done, done)
        self._resolve(self.join.add_events(columns), is_learned=True)
        self._resolve(self.join.expire())
        return done

    def _train_queue_per_event(self, columns: Columns, start: int) -> int:
        """Learn queued events one by one with compiled code, from position `start` on, and return how many."""
        if not isinstance(self.per_event, PerEventTraining) or "weight" in columns:
            return 0
        events = Events.from_columns({name: values[start:] for name, values in columns.items()})
        events = events.take(slice(_count_leading(self.per_event.find_supported(events.features))))
        if not len(events):
            return 0
        assert events.labels is not None
        _, learned = self.per_event.train(events.features, events.labels)
        if learned:
            self.training.count_steps(learned, learned)
        return learned

    # Properties and metrics ---------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.training.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.training.optimizer

    @property
    def training_mode(self) -> str:
        """A description of how the model is trained, and of the reason if compiled code is not used."""
        if self.per_event is None:
            return (self.training if self.rate_tuning is None else self.rate_tuning.leader).description
        return f"one event at a time, {self.per_event if isinstance(self.per_event, str) else 'compiled'}"

    @property
    def learned(self) -> int:
        """The number of events that the model was trained on."""
        return self.training.learned_events

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return self.training.steps

    @property
    def pending(self) -> PendingEvents:
        """The events that wait for their labels."""
        return self.join.pending

    @property
    def rejected(self) -> int:
        """The number of rejected events."""
        return self.rejections.count

    @property
    def reject_file(self) -> RejectFile | None:
        """The file of rejected events."""
        return self.rejections.file

    @property
    def checkpoints(self) -> CheckpointStore | None:
        """The checkpoints in their folder."""
        return None if self.schedule is None else self.schedule.store

    def counts(self) -> dict[str, float]:
        """Return the counts since the stream began, by name."""
        counts = {"events": self.events, "learned": self.learned, "steps": self.steps, "rejected": self.rejected}
        return {**counts, **vars(self.pending.counts)}

    def metrics(self) -> dict[str, float]:
        """Return all metrics by name. They do not depend on how often the run was stopped and resumed."""
        share = rejected_share(self.rejected, self.events)
        values = {**self.counts(), "pending": len(self.pending), "rejected_share": share}
        for metric in (self.log_loss, *self.extra_metrics):
            values.update(metric.results())
        if not self.has_log_loss:
            del values["log_loss"], values["best_constant"]
        if self.drift is not None:
            values.update(self.drift.results())
        if self.rate_tuning is not None:
            values.update(self.rate_tuning.metrics())
        for module in self.training.id_features:
            values.update(module.metrics())
        if alignment := self.alignment():
            by_name = {"": self.total_alignment(), **{f"/{name}": ratio for name, ratio in alignment.items()}}
            for name, ratio in by_name.items():
                values[f"alignment_over_all{name}"] = ratio.over_all
                values[f"alignment_over_touched{name}"] = ratio.over_touched
        return values

    def alignment(self) -> dict[str, Ratio]:
        """Return the alignment of each parameter since the stream began; empty if the optimizer does not count it."""
        return self.alignment_counts.by_parameter()

    def total_alignment(self) -> Ratio:
        """Return the alignment over all parameters since the stream began."""
        return self.alignment_counts.total()

    def health(self) -> dict[str, float]:
        """Return measurements of this process: events per second since it started, and how far it is behind.

        The lag is the time between the newest event and the moment when it was processed, so it does not grow while no
        events arrive. It is nan if the stream is not live.
        """
        seconds = max(time.monotonic() - self.started, 1e-9)
        lag = self._time_of_events - self.join.clock.latest
        health = {
            "events_a_second": (self.events - self.resumed_at) / seconds,
            "lag_in_seconds": lag if abs(lag) < MAX_LAG else math.nan,
            "failed_checkpoints": 0 if self.schedule is None else self.schedule.failures,
        }
        backlog = getattr(self._source, "backlog", lambda: None)()
        if backlog is not None:
            health["backlog"] = backlog
        return health

    def share_read(self) -> float | None:
        """Return the share of its data that the source has produced, or None if it is unknown."""
        share: float | None = getattr(self._source, "share", None)
        return share

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue as if the learner had never stopped."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_name": type(self.optimizer).__name__,
            "source": self._source.state_dict() if hasattr(self._source, "state_dict") else self._saved_position,
            "rate_tuning": None if self.rate_tuning is None else self.rate_tuning.state_dict(),
            "pending": self.join.state_dict(),
            "queue": self.queue.state_dict(),
            "metrics": [metric.state_dict() for metric in (self.log_loss, *self.extra_metrics)],
            "log": self.log.state_dict() if self.log is not None else None,
            "rejected": self.reject_file.state_dict() if self.reject_file is not None else None,
            "alignment": {name: list(astuple(ratio)) for name, ratio in self.alignment().items()},
            "total_alignment": list(astuple(self.total_alignment())),
            "random": get_random_state(),
            "has_ids": self._has_ids,
            "first_labels": None if self._first_labels is None else self._first_labels.state_dict(),
            "drift": None if self.drift is None else self.drift.state_dict(),
            "reject_reasons": dict(self.rejections.reasons),
            "missing_columns": dict(self.missing_columns),
            "counts": {name: getattr(owner, attribute) for name, (owner, attribute) in self._saved_counts().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Lines of the prediction log that were written after that state are removed.

        Raises:
            ValueError: if the state belongs to another optimizer, or to a learner with other metrics or, while events
                wait for their labels, with other label options.
        """
        if len(state["metrics"]) != 1 + len(self.extra_metrics):
            raise ValueError(
                f"the state has {len(state['metrics']) - 1} metrics, but this learner has {len(self.extra_metrics)}"
            )
        no_alignment = [0, 0, 0]
        example = {
            "counts": {name: getattr(owner, attribute) for name, (owner, attribute) in self._saved_counts().items()},
            "pending": {"counts": vars(self.pending.counts), "head": 0},
            "alignment": dict.fromkeys(state["alignment"], no_alignment),
            "total_alignment": no_alignment,
            "reject_reasons": dict.fromkeys(state["reject_reasons"], 0),
            "optimizer": {"state": {key: {} for key in state["optimizer"]["state"]}},
        }
        check_like(state, example, "the state")
        missing_columns = state.get("missing_columns", {})  # absent in checkpoints of older versions
        check_like(missing_columns, dict.fromkeys(missing_columns, 0), "missing columns")
        saved_name, name = state["optimizer_name"], type(self.optimizer).__name__
        if saved_name != name:
            raise ValueError(f"the state belongs to a learner with {saved_name}, but this one has {name}")
        check_label_options(state["pending"], self.join.options)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.rate_tuning is not None:
            self.rate_tuning.load_state_dict(state.get("rate_tuning"))
        self.pending.load_state_dict(state["pending"])
        self.queue.load_state_dict(state["queue"])
        for metric, saved in zip((self.log_loss, *self.extra_metrics), state["metrics"], strict=True):
            metric.load_state_dict(saved)
        if self.drift is not None and state.get("drift") is not None:  # absent in checkpoints of older versions
            self.drift.load_state_dict(state["drift"])
        for file, key in ((self.log, "log"), (self.reject_file, "rejected")):
            if file is not None and state[key] is not None:
                file.load_state_dict(state[key])
        self.alignment_counts.earlier = {name: Ratio(*counts) for name, counts in state["alignment"].items()}
        self.alignment_counts.earlier_total = Ratio(*state["total_alignment"])
        for name, (owner, attribute) in self._saved_counts().items():
            setattr(owner, attribute, state["counts"][name])
        self._has_ids = state["has_ids"]
        first_labels = state.get("first_labels")  # absent in checkpoints of older versions
        if first_labels is None:
            self._first_labels = None
        elif self._first_labels is not None:
            self._first_labels.load_state_dict(first_labels)
        self.missing_columns = Counter(missing_columns)
        reasons = state["reject_reasons"]
        self.rejections.reasons = Counter({printable(reason): count for reason, count in reasons.items()})
        self.rejections.count_at_start = self.rejections.count
        self._saved_position = state["source"]
        if self.schedule is not None:
            self.schedule.events_at_save = self.events
        set_random_state(state["random"])

    def _saved_counts(self) -> dict[str, tuple[Any, str]]:
        """Map the name of each saved count to the object and the attribute that hold it."""
        counts: dict[str, tuple[Any, str]] = {"events": (self, "events"), "rejected": (self.rejections, "count")}
        for name in ("learned_events", "steps", "consecutive_unscored", "consecutive_unlearned"):
            counts[name] = (self.training, name)
        for name in ("now", "latest", "events_ahead", "first_unconfirmed"):
            counts[f"clock/{name}"] = (self.join.clock, name)
        if self.schedule is not None:
            counts["saves"] = (self.schedule, "saves")
        return counts

    def _open_checkpoints(self, options: CheckpointOptions) -> CheckpointStore:
        return Checkpoints(options.folder, options.keep)

    def save(self) -> Path | None:
        """Save a checkpoint. If it cannot be written, this is logged, and the previous one remains the newest.

        Returns:
            The path of the checkpoint, or None if it could not be written.

        Raises:
            ValueError: if the learner has no folder for checkpoints.
            FloatingPointError: if the model has diverged.
        """
        if self.schedule is None:
            raise ValueError("this learner has no folder for checkpoints: pass checkpoint=")
        self.training.check_finite()
        return self.schedule.save(self.events, self.state_dict)

    def fix_rate(self) -> None:
        """Learn at the rate of the optimizer from now on, if the rate was tuned until now."""
        if self.rate_tuning is not None:
            self.training, self.rate_tuning = self.rate_tuning.leader, None

    def resume(self) -> bool:
        """Continue from the newest good checkpoint.

        Returns:
            Whether there was a checkpoint.

        Raises:
            DamagedCheckpointError: if all checkpoints are damaged.
        """
        newest = self.checkpoints.load_newest() if self.checkpoints is not None else None
        if newest is None:
            return False
        path, state = newest
        with expect_valid_content(path):
            self.load_state_dict(state)
        self.resumed = True
        logger.info("resumed from %s at %d events", path, self.events)
        return True

    def warm_start(self, checkpoint: Saved, options: Mapping[str, Any] | None = None) -> None:
        """Start from a model that was trained elsewhere: ``{"model": state dict, "optimizer": state dict}``.

        The state of torch.optim.Adam fits an optimizer of cadam. If the model was trained with two optimizers, such as
        SparseAdam and Adam, their state dicts can be given as a list. The learning rates do not change.

        Args:
            checkpoint: such a dict, a file of it, or several files: the model's state dict, and each optimizer's.
                Without an optimizer the moments start at zero.
            options: options of the optimizer that take precedence over the saved ones.

        Raises:
            ValueError: if the optimizers do not fit; nothing has changed then.
            RuntimeError: if the model does not fit; nothing has changed then.
        """
        warm_start(self.model, self.optimizer, checkpoint, options)
        self._first_labels = None

    def close(self) -> None:
        """Close the reject file, the reports and the checkpoint folder."""
        for resource in (self.reject_file, self.checkpoints, *self.reports):
            if resource is not None and hasattr(resource, "close"):
                resource.close()


def _is_all_finite(*columns: Array) -> bool:
    """Whether every value is finite, tested by one sum per column.

    False is also possible if a sum overflows; then the caller checks the values one by one.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return len(columns[0]) > 0 and all(math.isfinite(values.sum(dtype=np.float64)) for values in columns)


def _are_valid_weights(weights: Array | None) -> bool:
    """Whether all weights are finite and at least 0, or there are none."""
    return weights is None or (_is_all_finite(weights) and bool(weights.min() >= 0))


def _find_unusable(columns: Columns) -> dict[str, Array]:
    """Return for each column a mask of the events that cannot be used because of their value in it."""
    unusable = {name: ~np.isfinite(columns[name]) for name in ("score", "time")}
    if "label" in columns:
        unusable["label"] = np.isinf(columns["label"])  # nan means that the label is not known yet
    if "weight" in columns:
        unusable["weight"] = ~(np.isfinite(columns["weight"]) & (columns["weight"] >= 0))
    return unusable


def _count_leading(mask: Array) -> int:
    """Return the number of True values before the first False."""
    return int(np.argmin(np.append(mask, False)))


def _rejected(reason: str, where: str, columns: Columns, row: int) -> Rejected:
    """Describe a rejected event with its values."""
    values = {name.removeprefix(FEATURE_PREFIX): column[row] for name, column in columns.items()}
    text = record_as_json(values)
    return Rejected(reason, where, text[:MAX_REJECTED_TEXT], len(text))
