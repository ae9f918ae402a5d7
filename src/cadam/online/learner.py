"""The loop of online learning: predict, record, join the label when it comes, learn, and never count an event twice."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..optim.alignment import Ratio
from .data.events import FEATURE_PREFIX, Array, Batch, Columns, Events, Labels, Rejected, as_key_array
from .labels.join import LabelJoin, Settled, Unmatched
from .labels.pending import Pending
from .labels.training_queue import Ready
from .metrics.running import AlignmentCounts, LogLoss, Metric
from .monitoring import reject_limit
from .per_event import EventByEvent
from .persistence.checkpoint_schedule import Saving, random_state, set_random_state
from .persistence.checkpoints import Checkpoints
from .persistence.logs import DROPPED, PredictionLog, RejectFile, Rejections
from .persistence.warm_start import check_complete, join_optimizers, read_trained, with_options
from .training_step import Loss, Training

__all__ = ["Batches", "Learner", "Loss"]

logger = logging.getLogger("cadam.online")

NO_LAG = 1e6  # seconds, beyond which events are not of now

Batches = Iterable["Events | Labels | Batch | None"]
ALONE, WAITS, LEARNT = range(3)
"""Of an event among others that come together: it goes through torch, has no label yet, or has one."""


class Learner:
    """Learns from a stream: each event is predicted before anything is learnt from it, and learnt from once.

    The model is called with the features by name, ``model(**features)``, and gives a score per event; `loss` takes
    scores and labels. Labels may come with the events, later, out of order, before them, twice or never.

    Args:
        horizon: how long a prediction waits for its label, in seconds of the events' time; in events if they have none.
        unmatched: what an event without a label becomes after the horizon: ``"drop"``, or ``"negative"``, label 0,
            which needs a finite horizon.
        capacity: how many events wait at most; beyond it the oldest expire as if past the horizon.
        remember: how many finished events are remembered, so that what comes twice is known.
        batch_size: learn in steps of this many events; by default from whatever has just got its labels.
        one_by_one: learn from each event before the next is predicted, also where a source gives many at one go. The
            ready-made models linear and FM are then learnt by compiled code; `learning` says whether, and why not.
        metrics: told of every labelled prediction; see `Metric`.
        checkpoint: a folder for checkpoints; `run` resumes from the newest by itself.
        checkpoint_every: events between checkpoints; `checkpoint_seconds` is the longest time between them. Where they
            fall changes nothing but how much is computed again after a crash.
        keep: how many checkpoints are kept.
        log: a folder for the prediction log, in Parquet parts of `log_rows` rows.
        rejected: a file for rejected events (default: ``rejected.jsonl`` beside the checkpoints).
        reports: called with the learner after each batch: `Console`, `Scalars`, `Prometheus` or any function. Their
            method `end`, if they have one, is called when `run` ends.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        horizon: float = math.inf,
        unmatched: Unmatched = "drop",
        capacity: int = 1_000_000,
        remember: int = 100_000,
        batch_size: int | None = None,
        one_by_one: bool = False,
        metrics: Sequence[Metric] = (),
        checkpoint: Path | str | None = None,
        checkpoint_every: int = 1_000_000,
        checkpoint_seconds: float = 30.0,
        keep: int = 3,
        log: Path | str | None = None,
        log_rows: int = 50_000,
        rejected: Path | str | None = None,
        reports: Sequence[Callable[[Learner], None]] = (),
    ) -> None:
        self.training = Training(model, optimizer, loss)
        if one_by_one and batch_size not in (None, 1):
            raise ValueError(f"one_by_one learns from one event in a step, and batch_size is {batch_size}")
        self.by_event = EventByEvent.of(model, optimizer, loss) if one_by_one else None
        if one_by_one and horizon != math.inf:
            self.by_event = "by torch: a horizon may end an event's wait for its label between any two events"
        self.join = LabelJoin(horizon, unmatched, capacity, remember)
        self.ready = Ready(1 if one_by_one else batch_size)
        self.progress, self.own_metrics, self.reports = LogLoss(), list(metrics), list(reports)
        self.alignment_counts = AlignmentCounts(optimizer)
        checkpoints = Checkpoints(checkpoint, keep) if checkpoint is not None else None
        self.saving = Saving(checkpoints, checkpoint_every, checkpoint_seconds)
        self.log = PredictionLog(log, log_rows) if log is not None else None
        if rejected is None and checkpoint is not None:
            rejected = Path(checkpoint) / "rejected.jsonl"
        self.rejections = Rejections(rejected)

        self.events = 0
        self.counts_before: Mapping[str, float] = {}
        """What was counted before the process began to run: `counts`, and what was rejected by reason."""
        self.started, self.resumed, self.resumed_at = time.monotonic(), False, 0
        self.stopped = self._asked = False  # whether the last run was stopped; whether somebody has asked for it
        self._source: Any = None
        self._position: Any = None  # of a source, from a checkpoint
        self._with_ids: bool | None = None  # whether the events bring ids; not known before the first

    # Predict, observe, learn ---------------------------------------------------------------------------------

    def predict(self, events: Events) -> Array:
        """Scores of events, which from now on wait for their labels. Labels among them are not looked at.

        The score of an event that the model cannot take is nan; it is rejected.
        """
        if self.by_event is not None:
            return self.learn(replace(events, labels=None))
        scores, columns, _ = self._predict(events)
        columns.pop("label", None)
        self._settle(self.join.wait(columns))
        self._learn()
        return scores

    def observe(self, ids: Any, labels: Any) -> None:
        """Labels of events, by id, and learn from those that now have one.

        They are learnt from in the order of the labels given. The second label of an event is ignored and counted; one
        whose event has not come yet is kept for the horizon.
        """
        self._observe(Labels(as_key_array(ids, "ids"), labels))
        self._learn()

    def learn(self, events: Events) -> Array:
        """Predict events, then learn from those whose labels they bring; the others wait. Gives the scores."""
        scores = self._take_events(events)
        self._learn()
        return scores

    def take(self, batch: Events | Labels | Batch) -> None:
        """Whatever a source gives: predict its events, join its labels, learn, reject what cannot be used."""
        if isinstance(batch, Events):
            batch = Batch(batch)
        elif isinstance(batch, Labels):
            batch = Batch(labels=batch)
        if batch.rejected:
            self.rejections.add(batch.rejected)
        for events, labels in batch.in_order() if self.by_event is not None else ((batch.events, batch.labels),):
            if events is not None and len(events):
                self._take_events(events)
            if labels is not None and len(labels):
                self._observe(labels)
            self._learn()

    def finish(self) -> None:
        """The stream has ended for good: no label will come any more, and the last steps may be short."""
        self._settle(self.join.end())
        self._learn(all_of_it=True)

    def _take_events(self, events: Events) -> Array:
        if self.by_event is None:
            return self._take_together(events)
        scores, kinds = np.empty(len(events), dtype=np.float32), self._kinds(events)
        start = 0
        for end in (*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(events)):
            while start < end:
                taken = 0
                if kinds[start] != ALONE:
                    taken = self._take_compiled(events.take(slice(start, end)), kinds[start], scores[start:end])
                    start += taken
                if not taken:
                    scores[start] = self._take_together(events.take(slice(start, start + 1)))[0]
                    self._learn()
                    start += 1
        return scores

    def _kinds(self, events: Events) -> Array:
        """What compiled code can do with each event: `ALONE`, `WAITS` or `LEARNT`.

        An event that waits is only predicted. One that came before, or after its label, is for the join to decide on.
        """
        if not isinstance(self.by_event, EventByEvent):
            return np.full(len(events), ALONE)
        labels = np.full(len(events), np.nan) if events.labels is None else events.labels
        kinds = np.where(np.isnan(labels), WAITS, LEARNT)
        fit = self.by_event.fits(events.features) & ~np.isinf(labels)
        if events.time is not None:
            fit &= np.isfinite(events.time)
        if events.ids is not None:
            fit &= self.pending.unheard_of(events.ids.tolist())
        return np.where(fit, kinds, ALONE)

    def _take_compiled(self, events: Events, kind: int, scores: Array) -> int:
        """Predict events of a kind and, if they are `LEARNT`, learn from each before the next: how many of the first.

        Time is what it would be if they had come one after the other.
        """
        assert isinstance(self.by_event, EventByEvent)
        self._check_ids(events.ids is not None)
        if kind == LEARNT:
            assert events.labels is not None
            found, done = self.by_event.learn(events.features, events.labels)
        else:
            found = self.by_event.scores(events.features)
            done = int(np.argmin(np.append(np.isfinite(found), False)))
        if not done:
            return 0
        scores[:done] = found[:done]
        columns = self._numbered(events.take(slice(done)).columns(), done)
        columns["score"] = scores[:done]
        self.events += done
        self.training.unscored = 0
        for moment in (columns["time"][0], columns["time"].max(), columns["time"][-1]):
            self.join.tick(np.array([moment]))
        if kind == LEARNT:
            self.training.count(done, done)
        for settled, outcome in self.join.take(columns, None):
            self._note(settled, outcome)
        return done

    def _take_together(self, events: Events) -> Array:
        scores, columns, brought = self._predict(events)
        self._settle(self.join.take(columns, brought))
        return scores

    def _predict(self, events: Events) -> tuple[Array, Columns, Labels | None]:
        """Scores of all events, the columns of those that can be used and are new, and the labels of the others."""
        count = len(events)
        if count:
            self._check_ids(events.ids is not None)
        scores, failed = self._scores(events)
        columns = self._numbered(events.columns(), count)
        columns["score"] = scores
        self.events += count
        if _all_finite(*(columns[name] for name in ("score", "time", "label") if name in columns)):
            times, self.training.unscored = columns["time"], 0
        else:
            scored, timed = np.isfinite(scores), np.isfinite(columns["time"])
            times, usable = columns["time"][timed], scored & timed
            self.training.unscored = 0 if scored.any() else self.training.unscored + count
            if "label" in columns:  # nan: not known yet
                usable &= ~np.isinf(columns["label"])
            if not usable.all():
                self._refuse(columns, np.flatnonzero(~usable), failed)
                columns = {name: values[usable] for name, values in columns.items()}
        if len(times):
            self.join.tick(times)
        if events.ids is None:
            return scores, columns, None
        return scores, *self.join.new(columns)

    def _numbered(self, columns: Columns, count: int) -> Columns:
        """With ids and times: numbers, where there are none."""
        numbers = np.arange(self.events, self.events + count)
        return {"id": numbers, "time": numbers.astype(np.float64), **columns}

    def _check_ids(self, given: bool) -> None:
        """That all events have ids or none: a number given here and an id may be equal without being one event's."""
        if self._with_ids is None:
            self._with_ids = given
        elif self._with_ids != given:
            before, now = ("without", "with") if given else ("with", "without")
            raise ValueError(
                f"events {now} ids after {self.events:,} {before}: those without are numbered, and their numbers would "
                "be taken for ids; give ids to all events or to none"
            )

    def _scores(self, events: Events) -> tuple[Array, dict[int, str]]:
        return self.training.scores(events, first=self.training.unscored == self.events)

    def _refuse(self, columns: Columns, rows: Array, failed: dict[int, str]) -> None:
        """Reject events whose score, time or label is not finite; where the model is to blame, that is an error."""
        self.training.check_scored(failed)
        rejected = []
        for row in rows.tolist():
            text = str(_event(columns, row))
            wrong = next(n for n in ("score", "time", "label") if n in columns and not np.isfinite(columns[n][row]))
            reason = failed.get(row, f"its {wrong} is {columns[wrong][row]}")
            rejected.append(Rejected(reason, f"id {columns['id'][row]}", text[:4096], len(text)))
        self.rejections.add(rejected)

    def _observe(self, labels: Labels) -> None:
        known = np.isfinite(labels.labels)
        if not known.all():
            bad = np.flatnonzero(~known)
            self.rejections.add(
                [Rejected("its label is not finite", f"id {labels.ids[i]}", "", 0) for i in bad.tolist()]
            )
            labels = Labels(labels.ids[known], labels.labels[known])
        self._settle(self.join.match(labels))

    def _settle(self, settled: Iterator[Settled]) -> None:
        """It is decided what became of events: log, count, and keep for learning."""
        for columns, outcome in settled:
            self._note(columns, outcome)
            if outcome != DROPPED:
                self.ready.add(columns)

    def _note(self, columns: Columns, outcome: int) -> None:
        """Log predictions, and tell the metrics of those that have a label."""
        if self.log is not None:
            self.log.add(columns, outcome)
        if outcome != DROPPED:
            self._count(columns)

    def _count(self, columns: Columns) -> None:
        """Tell the metrics of predictions and their labels."""
        for metric in (self.progress, *self.own_metrics):
            metric.update(columns["score"], columns["label"], columns.get("user"), columns["time"])

    def _learn(self, all_of_it: bool = False) -> None:
        """Steps over the events that are ready, in the order in which they got ready."""
        ends = self.ready.ends(all_of_it)
        if not ends:
            return
        columns, start = self.ready.columns(), 0
        for end in ends:
            if start == end - 1:  # compiled code may already have taken it
                start += self._learn_compiled(columns, start)
            if start >= end:
                continue
            part = {name: values[start:end] for name, values in columns.items()}
            start = end
            error = self.training.learn(part, self._not_learnt)
            if error is not None and not self.steps:
                raise error  # a model that cannot be trained on any of its first events is wrong itself
        self.ready.drop(start)

    def _learn_compiled(self, columns: Columns, start: int) -> int:
        """Learn from events that are ready, one by one from the first of them on: how many."""
        if not isinstance(self.by_event, EventByEvent):
            return 0
        rest = Events.from_columns({name: values[start:] for name, values in columns.items()})
        fit = self.by_event.fits(rest.features)
        rest = rest.take(slice(int(np.argmin(np.append(fit, False)))))
        if not len(rest):
            return 0
        assert rest.labels is not None
        _, done = self.by_event.learn(rest.features, rest.labels)
        if done:
            self.training.count(done, done)
        return done

    def _not_learnt(self, columns: Columns, error: Exception) -> None:
        """Reject an event that the model cannot be trained on."""
        text = str(_event(columns, 0))
        reason = f"the model cannot be trained on it: {type(error).__name__}: {error}"
        self.rejections.add([Rejected(reason, f"after step {self.steps}", text[:4096], len(text))])

    # The loop ------------------------------------------------------------------------------------------------

    def run(self, source: Batches, *, events: int | None = None) -> Learner:
        """Learn from a source until it ends, `stop` is called or so many `events` were seen in all.

        Resumes from the newest checkpoint, if there is one and this learner has seen nothing yet. At the end the state
        is saved.
        """
        if self.checkpoints is not None and not hasattr(source, "load_state_dict"):
            raise TypeError(f"{type(source).__name__} has no state_dict and load_state_dict, so it cannot be resumed")
        self.stopped = False
        new = not self.events and not self.resumed and not self.resume()
        self._source, self.saving.when = source, time.monotonic()
        if self._position is not None:
            source.load_state_dict(self._position)  # type: ignore[attr-defined]
            self._position = None
        if self.log is not None:
            self.log.check()
        if new and self.checkpoints is not None:
            self.save()  # a crash from here on finds where log and reject file began
        self.started, self.resumed_at, saved = time.monotonic(), self.events, False
        reasons = {f"rejected/{reason}": count for reason, count in self.rejections.reasons.items()}
        self.counts_before = {**self.counts(), **reasons}
        self._heed()
        if not self.stopped and (events is None or self.events < events):
            for batch in source:
                if batch is not None:
                    self.take(batch)
                    self.saving.unsaved = True
                for report in self.reports:
                    report(self)
                saved = self.checkpoints is not None and self._save_is_due() and self.save() is not None
                self._heed()
                if self.stopped or (events is not None and self.events >= events):
                    break
        for report in self.reports:
            if hasattr(report, "end"):
                report.end(self)
        if self.log is not None:
            self.log.flush()
        if self.checkpoints is not None and not saved:
            self.save()
        self._asked = False
        return self

    def _save_is_due(self) -> bool:
        return self.saving.is_due(self.events)

    def stop(self) -> None:
        """Let `run` end after the batch it is at, or before its first; for signal handlers and other threads, too."""
        self._asked = True

    def _heed(self) -> None:
        """Take note of `stop`."""
        if self._asked:
            self.stopped, self._asked = True, False

    # What it has and counts ---------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self.training.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.training.optimizer

    @property
    def learning(self) -> str:
        """What learns, and why it is not compiled code."""
        if self.by_event is None:
            return "by torch, in batches"
        return f"one event at a time, {self.by_event if isinstance(self.by_event, str) else 'compiled'}"

    @property
    def learned(self) -> int:
        """Events that were learnt from."""
        return self.training.learned

    @property
    def steps(self) -> int:
        return self.training.steps

    @property
    def pending(self) -> Pending:
        """The events that wait for their labels."""
        return self.join.pending

    @property
    def rejected(self) -> int:
        """How many events were rejected."""
        return self.rejections.count

    @property
    def reject_file(self) -> RejectFile | None:
        return self.rejections.file

    @property
    def checkpoints(self) -> Checkpoints | None:
        return self.saving.checkpoints

    def counts(self) -> dict[str, float]:
        """What only grows, since the stream began."""
        own = {"events": self.events, "learned": self.learned, "steps": self.steps, "rejected": self.rejected}
        return {**own, **vars(self.pending.counts)}

    def metrics(self) -> dict[str, float]:
        """Numbers by name: the same for the same stream, however often the run was stopped and resumed."""
        share = reject_limit.share(self.rejected, self.events)
        numbers = {**self.counts(), "pending": len(self.pending), "rejected_share": share}
        for metric in (self.progress, *self.own_metrics):
            numbers.update(metric.results())
        alignment = self.alignment()
        if alignment:
            by_parameter = {f"/{name}": ratio for name, ratio in alignment.items()}
            for name, ratio in {"": self.total_alignment(), **by_parameter}.items():
                numbers[f"alignment_over_all{name}"] = ratio.over_all
                numbers[f"alignment_over_touched{name}"] = ratio.over_touched
        return numbers

    def alignment(self) -> dict[str, Ratio]:
        """Alignment counts per parameter since the stream began; empty if the optimizer does not count them."""
        return self.alignment_counts.by_parameter()

    def total_alignment(self) -> Ratio:
        """As `alignment`, over all parameters: also over those that share a name, of which it has only one."""
        return self.alignment_counts.total()

    def health(self) -> dict[str, float]:
        """How the process does: events a second since it started or resumed, seconds behind the events' time.

        A stream of long ago, or whose time is no clock, has no lag: nan.
        """
        seconds = max(time.monotonic() - self.started, 1e-9)
        backlog = getattr(self._source, "backlog", lambda: None)()
        lag = time.time() - self.join.clock.latest
        health = {
            "events_a_second": (self.events - self.resumed_at) / seconds,
            "lag_in_seconds": lag if abs(lag) < NO_LAG else math.nan,
            "failed_checkpoints": self.saving.failed,
        }
        if backlog is not None:
            health["backlog"] = backlog
        return health

    def share_read(self) -> float | None:
        """How much of its data the source has given; None where that is not known, or has no end."""
        share: float | None = getattr(self._source, "share", None)
        return share

    # State ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that makes this learner go on as if it had never stopped."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_name": type(self.optimizer).__name__,
            "source": self._source.state_dict() if hasattr(self._source, "state_dict") else self._position,
            "pending": self.pending.state_dict(),
            "ready": self.ready.state_dict(),
            "metrics": [metric.state_dict() for metric in (self.progress, *self.own_metrics)],
            "log": self.log.state_dict() if self.log is not None else None,
            "rejected": self.reject_file.state_dict() if self.reject_file is not None else None,
            "alignment": {n: list(astuple(r)) for n, r in self.alignment().items()},
            "total_alignment": list(astuple(self.total_alignment())),
            "random": random_state(),
            "with_ids": self._with_ids,
            "reject_reasons": dict(self.rejections.reasons),
            "counts": {name: getattr(owner, own) for name, (owner, own) in self._owners().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Files written since are taken back to where they were."""
        if len(state["metrics"]) != 1 + len(self.own_metrics):
            raise ValueError(f"the state has {len(state['metrics']) - 1} metrics, here are {len(self.own_metrics)}")
        name, here = state["optimizer_name"], type(self.optimizer).__name__
        if name != here:
            raise ValueError(f"the state is of a learner with {name}, here is {here}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.pending.load_state_dict(state["pending"])
        self.ready.load_state_dict(state["ready"])
        for metric, saved in zip((self.progress, *self.own_metrics), state["metrics"], strict=True):
            metric.load_state_dict(saved)
        for file, name in ((self.log, "log"), (self.reject_file, "rejected")):
            if file is not None and state[name] is not None:
                file.load_state_dict(state[name])
        self.alignment_counts.before = {name: Ratio(*counts) for name, counts in state["alignment"].items()}
        self.alignment_counts.total_before = Ratio(*state["total_alignment"])
        for name, (owner, own) in self._owners().items():
            setattr(owner, own, state["counts"][name])
        self._with_ids = state["with_ids"]
        self.rejections.reasons = Counter(state["reject_reasons"])
        self.rejections.at_start = self.rejections.count
        self._position, self.saving.at = state["source"], self.events
        set_random_state(state["random"])

    def _owners(self) -> dict[str, tuple[Any, str]]:
        """Where each count of a state lives: whose attribute it is."""
        clock, training = self.join.clock, self.training
        return {
            "events": (self, "events"),
            **{name: (training, name) for name in ("learned", "steps", "unscored", "unlearned")},
            "rejected": (self.rejections, "count"),
            "clock": (clock, "now"),
            "ahead": (clock, "ahead"),
            "doubted": (clock, "doubted"),
            "last_time": (clock, "latest"),
            "saves": (self.saving, "count"),
        }

    def save(self) -> Path | None:
        """Write a checkpoint. If the disk does not take it, say so and go on: the one before it stays the newest."""
        if self.checkpoints is not None:
            self.training.check_finite()
        return self.saving.save(self.events, self.state_dict)

    def resume(self) -> bool:
        """Go on from the newest good checkpoint; False if there is none."""
        found = self.checkpoints.newest() if self.checkpoints is not None else None
        if found is None:
            return False
        path, state = found
        self.load_state_dict(state)
        self.resumed = True
        logger.info("resumed from %s at %d events", path, self.events)
        return True

    def warm_start(
        self, checkpoint: Mapping[str, Any] | Path | str | Sequence[Any], options: Mapping[str, Any] | None = None
    ) -> None:
        """Start from a model trained elsewhere: ``{"model": state dict, "optimizer": state dict}``, or a file of it.

        The optimizer's may be that of torch.optim.Adam; without it the moments start anew. Of a model with sparse
        tables it may be a list, SparseAdam's and Adam's; see `join_optimizers`. In place of one file there may be
        several: the model's state dict, and each optimizer's. The learning rate is not taken over: it stays what this
        optimizer was made with. Nor is what `options` has: that holds in place of the checkpoint's.
        """
        trained = read_trained(checkpoint)
        groups = self.optimizer.param_groups
        state = join_optimizers(trained.optimizers, self.model, groups) if len(trained.optimizers) > 1 else None
        if len(trained.optimizers) == 1:
            check_complete(trained.optimizers[0], sum(len(group["params"]) for group in groups))
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        rates = [group["lr"] for group in groups]
        try:
            self.model.load_state_dict(trained.model)  # what fits is written before an error says what does not
            for one in [state] if state is not None else trained.optimizers:
                self.optimizer.load_state_dict(with_options(one, options or {}))
        except Exception:
            self.model.load_state_dict(before)  # all of it is taken over, or nothing
            raise
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

    def close(self) -> None:
        """Release files and the checkpoint folder, and end reports that have something to end."""
        for one in (self.reject_file, self.checkpoints, *self.reports):
            if one is not None and hasattr(one, "close"):
                one.close()


def _all_finite(*columns: Array) -> bool:
    """Whether every value is, by one look at each column: a sum that is not finite may also be one that overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return len(columns[0]) > 0 and all(math.isfinite(values.sum(dtype=np.float64)) for values in columns)


def _event(columns: Columns, row: int) -> dict[str, Any]:
    """An event for people: its values as Python has them."""
    values = {name.removeprefix(FEATURE_PREFIX): column[row] for name, column in columns.items()}
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
