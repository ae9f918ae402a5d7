"""The loop of online learning: predict, record, join the label when it comes, learn, and never count an event twice."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..alignment import Ratio
from . import log as files
from .before_0_2 import rename_file, renamed_option, upgraded
from .checkpoint import Checkpoints
from .events import FEATURE, Array, Batch, Columns, Events, Labels, Rejected, concatenated, keys
from .metric_names import Metrics
from .pending import Pending
from .progress import LogLoss, Metric

logger = logging.getLogger("cadam.online")

Loss = Callable[[Tensor, Tensor], Tensor]
Unmatched = Literal["drop", "negative"]
UNSCORED = 1000  # so many events in a row without a finite score, or not to be learnt from, are the model's fault
SURE = 3  # so many events in a row that are ahead by more than the horizon set the clock
FATAL = tuple(getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name))
NOT_THE_EVENTS = (TypeError, MemoryError, *FATAL)  # a model that is called wrongly, or a machine that fails
Batches = Iterable["Events | Labels | Batch | None"]


class Learner:
    """Learns from a stream: each event is predicted before anything is learnt from it, and learnt from once.

    The model is called with the features by name, ``model(**features)``, and gives a score per event; `loss` takes
    scores and labels. Labels may come with the events, later, out of order, before them, twice or never.

    Args:
        horizon: how long a prediction waits for its label, in seconds of the events' time; in events if they have none.
        unmatched: what an event without a label becomes after the horizon: ``"drop"``, or ``"negative"``, label 0,
            which needs a finite horizon.
        capacity: how many events wait at most; beyond it the oldest are let go as if past the horizon.
        remember: how many finished events are remembered, so that what comes twice is known.
        batch_size: learn in steps of this many events; by default from whatever has just got its labels.
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
        metrics: Sequence[Metric] = (),
        checkpoint: Path | str | None = None,
        checkpoint_every: int = 1_000_000,
        checkpoint_seconds: float = 30.0,
        keep: int = 3,
        log: Path | str | None = None,
        log_rows: int = 50_000,
        rejected: Path | str | None = None,
        reports: Sequence[Callable[[Learner], None]] = (),
        set_aside: Path | str | None = None,
    ) -> None:
        rejected = renamed_option("rejected", rejected, "set_aside", set_aside)
        if unmatched not in ("drop", "negative"):
            raise ValueError(f"unmatched must be 'drop' or 'negative', got {unmatched!r}")
        if unmatched == "negative" and horizon == math.inf:
            raise ValueError("unmatched='negative' needs a finite horizon, which says when an event counts as negative")
        for name, value in (("batch_size", batch_size), ("checkpoint_every", checkpoint_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.unmatched, self.batch_size = unmatched, batch_size
        self.checkpoint_every, self.checkpoint_seconds = checkpoint_every, checkpoint_seconds
        self.pending = Pending(horizon, capacity, remember)
        self.progress, self.own_metrics, self.reports = LogLoss(), list(metrics), list(reports)
        self.checkpoints = Checkpoints(checkpoint, keep) if checkpoint is not None else None
        self.log = files.PredictionLog(log, log_rows) if log is not None else None
        if rejected is None and checkpoint is not None:
            rejected = Path(checkpoint) / "rejected.jsonl"
            rename_file(Path(checkpoint) / "set-aside.jsonl", rejected)
        self.reject_file = files.RejectFile(rejected) if rejected is not None else None

        self.events = self.learned = self.steps = self.rejected = self.unscored = self.unlearned = 0
        self.clock, self.last_time = -math.inf, math.nan
        self.ahead = self.doubted = 0  # events in a row that the clock does not believe, and from which on
        self.saves, self.failed_saves, self._saved_at = 0, 0, 0
        self.saved = True  # whether the disk took the last checkpoint
        self._saved_when, self._unsaved = time.monotonic(), False
        self.started, self.resumed, self.resumed_at = time.monotonic(), False, 0
        self._ready: list[Columns] = []  # labelled, to be learnt from
        self._waiting_to_learn = 0
        self._alignment: dict[str, Ratio] = {}  # counted before the last resume
        self._total_alignment = Ratio(0, 0, 0)
        self._source: Any = None
        self._position: Any = None  # of a source, from a checkpoint
        self.stopped = self._asked = False  # whether the last run was stopped; whether somebody has asked for it
        self._with_ids: bool | None = None  # whether the events bring ids; not known before the first
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._finite = {name for name, value in model.named_buffers() if _is_finite(value)}  # a mask may never be

    # Predict, observe, learn ---------------------------------------------------------------------------------

    def predict(self, events: Events) -> Array:
        """Scores of events, which from now on wait for their labels. Labels among them are not looked at.

        The score of an event that the model cannot take is nan; it is rejected.
        """
        scores, columns, _ = self._predict(events)
        columns.pop("label", None)
        self._wait(columns)
        self._expired(self.pending.expire(self.clock))
        self._learn()
        return scores

    def observe(self, ids: Any, labels: Any) -> None:
        """Labels of events, by id, and learn from those that now have one.

        They are learnt from in the order of the labels given. The second label of an event is ignored and counted; one
        whose event has not come yet is kept for the horizon.
        """
        self._observe(Labels(keys(ids, "ids"), labels))
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
            self._reject(batch.rejected)
        if batch.events is not None and len(batch.events):
            self._take_events(batch.events)
        if batch.labels is not None and len(batch.labels):
            self._observe(batch.labels)
        self._learn()

    def finish(self) -> None:
        """The stream has ended for good: no label will come any more, and the last steps may be short."""
        self._expired(self.pending.expire_all())
        self._learn(all_of_it=True)

    def _take_events(self, events: Events) -> Array:
        scores, columns, again = self._predict(events)
        known = ~np.isnan(columns["label"]) if "label" in columns else np.zeros(len(columns["id"]), dtype=bool)
        if known.any():
            labelled = columns if known.all() else {name: values[known] for name, values in columns.items()}
            self.pending.finish(labelled["id"].tolist())
            self._settle(labelled, files.LABEL)
        if again is not None:
            self._observe(self.pending.waited_for(again))
        if not known.all():
            self._wait({name: values[~known] for name, values in columns.items() if name != "label"})
        if again is not None:  # of events that came a moment ago, in this batch
            self._observe(self.pending.waited_for(again))
        self._expired(self.pending.expire(self.clock))
        return scores

    def _predict(self, events: Events) -> tuple[Array, Columns, Labels | None]:
        """Scores of all events, the columns of those that can be used and are new, and the labels of the others."""
        count = len(events)
        if count:
            self._check_ids(events.ids is not None)
        scores, failed = self._scores(events)
        columns = events.columns()
        if "id" not in columns:
            columns["id"] = np.arange(self.events, self.events + count)
        if "time" not in columns:
            columns["time"] = np.arange(self.events, self.events + count, dtype=np.float64)
        columns["score"] = scores
        self.events += count
        if _all_finite(*(columns[name] for name in ("score", "time", "label") if name in columns)):
            times, self.unscored = columns["time"], 0
        else:
            scored, timed = np.isfinite(scores), np.isfinite(columns["time"])
            times, usable = columns["time"][timed], scored & timed
            self.unscored = 0 if scored.any() else self.unscored + count
            if "label" in columns:  # nan: not known yet
                usable &= ~np.isinf(columns["label"])
            if not usable.all():
                self._refuse(columns, np.flatnonzero(~usable), failed)
                columns = {name: values[usable] for name, values in columns.items()}
        if len(times):
            self._tick(times)
        again = None
        if events.ids is not None:
            new = self.pending.new(columns["id"].tolist())
            if new is not None:
                if "label" in columns:
                    brought = ~new & ~np.isnan(columns["label"])
                    again = Labels(columns["id"][brought], columns["label"][brought])
                columns = {name: values[new] for name, values in columns.items()}
        return scores, columns, again

    def _tick(self, times: Array) -> None:
        """Set the clock to the median time of a batch, if that is later.

        A single event that is dated years ahead must not end everyone's wait, nor stop the clock until then. Those that
        came while the clock was in doubt have come at the time that it is set to.
        """
        median, self.last_time = _median_and_largest(times)
        limit = self.clock + self.pending.horizon
        if median <= limit or self.clock == -math.inf:
            self.clock, self.ahead = max(self.clock, median), 0
            return
        if not self.ahead:
            self.doubted = self.pending.tail
        self.ahead += int((times > limit).sum())
        if self.ahead >= SURE:
            self.pending.came_at(median, self.doubted, self.clock)
            self.clock, self.ahead = median, 0

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
        """Scores, nan where the model refused the event; and why it did.

        A model that refuses all of its first events is wrong itself; later, `UNSCORED` in a row say so.
        """
        _set_mode(self.model, training=False)
        try:
            with torch.no_grad():
                return self._forward(events.features, len(events)).cpu().numpy(), {}
        except NOT_THE_EVENTS:
            raise
        except Exception as error:
            whole = error
        scores, failed = np.full(len(events), np.nan, dtype=np.float32), {}
        halves = [slice(0, len(events))]
        while halves:  # one event may spoil a batch: look for it, half by half
            half = halves.pop()
            try:
                with torch.no_grad():
                    part = {name: values[half] for name, values in events.features.items()}
                    scores[half] = self._forward(part, half.stop - half.start).cpu().numpy()
            except NOT_THE_EVENTS:
                raise
            except Exception as error:
                middle = (half.start + half.stop) // 2
                if middle == half.start:
                    failed[half.start] = f"the model refused it: {type(error).__name__}: {error}"
                else:
                    halves += [slice(half.start, middle), slice(middle, half.stop)]
        if len(failed) == len(events) > 1 and self.unscored == self.events:
            raise whole
        return scores, failed

    def _forward(self, features: Columns, count: int) -> Tensor:
        scores = self.model(**{name: self._tensor(values) for name, values in features.items()})
        if not isinstance(scores, Tensor) or scores.numel() != count:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"the model must give a score per event: {count} events gave {shape}")
        return scores.reshape(count).float()

    def _tensor(self, values: Array) -> Tensor:
        if not values.flags.writeable or not values.flags.c_contiguous:
            values = np.array(values, order="C")
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _refuse(self, columns: Columns, rows: Array, failed: Mapping[int, str]) -> None:
        """Reject events whose score, time or label is not finite; where the model is to blame, that is an error."""
        if self.unscored:
            self._check_finite()
        if self.unscored > UNSCORED and failed:
            raise RuntimeError(f"the model refused {self.unscored} events in a row; {failed[max(failed)]}")
        if self.unscored > UNSCORED:
            raise FloatingPointError(f"the model has diverged: {self.unscored} events in a row have no finite score")
        rejected = []
        for row in rows.tolist():
            event = {name.removeprefix(FEATURE): _shown(values[row]) for name, values in columns.items()}
            text = str(event)
            wrong = next(n for n in ("score", "time", "label") if n in columns and not np.isfinite(columns[n][row]))
            reason = failed.get(row, f"its {wrong} is {columns[wrong][row]}")
            rejected.append(Rejected(reason, f"id {columns['id'][row]}", text[:4096], len(text)))
        self._reject(rejected)

    def _check_finite(self) -> None:
        """Of weights, buffers and the optimizer's state: an infinite second moment holds a weight still for ever."""
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        names = {value: name for name, value in found.items()}
        found |= {name: value for name, value in self.model.named_buffers() if name in self._finite}
        for param, state in self.optimizer.state.items():
            whose = names.get(param, "a parameter")
            found |= {f"the optimizer's {kind} of {whose}": v for kind, v in state.items() if isinstance(v, Tensor)}
        for name, value in found.items():
            if not _is_finite(value):
                raise FloatingPointError(f"the model has diverged: {name} is no longer finite")

    def _reject(self, rejected: Sequence[Rejected]) -> None:
        before, self.rejected = self.rejected, self.rejected + len(rejected)
        if self.reject_file is not None:
            self.reject_file.add(rejected)
        if before.bit_length() != self.rejected.bit_length():  # at 1, 2, 4, 8...
            where = self.reject_file.path if self.reject_file is not None else "no file, rejected= names one"
            last = rejected[-1]
            logger.warning("events rejected: %d (%s); the last, %s: %s", self.rejected, where, last.where, last.reason)

    def _wait(self, columns: Columns) -> None:
        if len(columns["id"]):
            ids = columns["id"].tolist()
            self.pending.add(columns, self.clock)
            early = self.pending.early_labels(ids)
            if early is not None:
                self._observe(Labels(keys(early[0], "ids"), early[1]))
        self._expired(self.pending.expire(self.clock))

    def _observe(self, labels: Labels) -> None:
        known = np.isfinite(labels.labels)
        if not known.all():
            bad = np.flatnonzero(~known)
            self._reject([Rejected("its label is not finite", f"id {labels.ids[i]}", "", 0) for i in bad.tolist()])
            labels = Labels(labels.ids[known], labels.labels[known])
        columns = self.pending.match(labels.ids.tolist(), labels.labels, self.clock)
        if columns is not None:
            self._settle(columns, files.LABEL)

    def _expired(self, columns: Columns | None) -> None:
        if columns is None:
            return
        value, outcome = (0.0, files.ASSUMED) if self.unmatched == "negative" else (math.nan, files.DROPPED)
        columns["label"] = np.full(len(columns["id"]), value, dtype=np.float32)
        self._settle(columns, outcome)

    def _settle(self, columns: Columns, outcome: int) -> None:
        """It is decided what became of these events: log, count, and keep for learning."""
        if self.log is not None:
            self.log.add(columns, outcome)
        if outcome == files.DROPPED:
            return
        for metric in (self.progress, *self.own_metrics):
            metric.update(columns["score"], columns["label"], columns.get("user"), columns["time"])
        self._ready.append({n: v for n, v in columns.items() if n == "label" or n.startswith(FEATURE)})
        self._waiting_to_learn += len(columns["label"])

    def _learn(self, all_of_it: bool = False) -> None:
        """Steps over the events that are ready, in the order in which they got ready."""
        least = 1 if self.batch_size is None or all_of_it else self.batch_size
        if self._waiting_to_learn < least:
            return
        columns = concatenated(self._ready)
        size, start = self.batch_size or self._waiting_to_learn, 0
        while self._waiting_to_learn - start >= least:
            part = {name: values[start : start + size] for name, values in columns.items()}
            start = min(start + size, self._waiting_to_learn)
            error = self._train(part)
            if error is not None and not self.steps:
                raise error  # a model that cannot be trained on any of its first events is wrong itself
        left = self._waiting_to_learn - start
        self._ready = [{name: values[start:].copy() for name, values in columns.items()}] if left else []
        self._waiting_to_learn = left

    def _loss_of(self, columns: Columns) -> Tensor:
        features = {name.removeprefix(FEATURE): v for name, v in columns.items() if name.startswith(FEATURE)}
        labels = self._tensor(columns["label"])
        _set_mode(self.model, training=True)
        self.optimizer.zero_grad()
        return self.loss(self._forward(features, len(labels)), labels)

    def _update(self, loss: Tensor, count: int) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps += 1
        self.learned += count
        self.unlearned = 0

    def _train(self, columns: Columns) -> Exception | None:
        """A step, or if the model refuses it, two half as long; what it refuses alone is rejected. The last refusal.

        The model has scored these events. What it cannot be trained on may be a single one, by batch norm.
        """
        try:
            loss = self._loss_of(columns)
        except NOT_THE_EVENTS:
            raise
        except Exception as error:
            count = len(columns["label"])
            if count == 1:
                self._not_learnt(columns, error)
                return error
            halves = (slice(0, count // 2), slice(count // 2, count))
            refusals = [self._train({name: values[half] for name, values in columns.items()}) for half in halves]
            return refusals[1] or refusals[0]
        self._update(loss, len(columns["label"]))
        return None

    def _not_learnt(self, columns: Columns, error: Exception) -> None:
        """Reject an event that the model cannot be trained on; `UNSCORED` in a row are the model's fault."""
        self.unlearned += 1
        if self.unlearned > UNSCORED:
            raise error
        text = str({name.removeprefix(FEATURE): _shown(values[0]) for name, values in columns.items()})
        reason = f"the model cannot be trained on it: {type(error).__name__}: {error}"
        self._reject([Rejected(reason, f"after step {self.steps}", text[:4096], len(text))])

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
        self._source, self._saved_when = source, time.monotonic()
        if self._position is not None:
            source.load_state_dict(self._position)  # type: ignore[attr-defined]
            self._position = None
        if self.log is not None:
            self.log.check()
        if new and self.checkpoints is not None:
            self.save()  # a crash from here on finds where log and reject file began
        self.started, self.resumed_at, saved = time.monotonic(), self.events, False
        self._heed()
        if not self.stopped and (events is None or self.events < events):
            for batch in source:
                if batch is not None:
                    self.take(batch)
                    self._unsaved = True
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
        late = time.monotonic() - self._saved_when > self.checkpoint_seconds
        return self.events - self._saved_at >= self.checkpoint_every or (late and self._unsaved)

    def stop(self) -> None:
        """Let `run` end after the batch it is at, or before its first; for signal handlers and other threads, too."""
        self._asked = True

    def _heed(self) -> None:
        """Take note of `stop`."""
        if self._asked:
            self.stopped, self._asked = True, False

    # Numbers -------------------------------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Numbers by name: the same for the same stream, however often the run was stopped and resumed."""
        numbers = {
            "events": self.events,
            "learned": self.learned,
            "steps": self.steps,
            "pending": len(self.pending),
            "rejected": self.rejected,
            **vars(self.pending.counts),
        }
        for metric in (self.progress, *self.own_metrics):
            numbers.update(metric.results())
        alignment = self.alignment()
        if alignment:
            by_parameter = {f"/{name}": ratio for name, ratio in alignment.items()}
            for name, ratio in {"": self.total_alignment(), **by_parameter}.items():
                numbers[f"alignment_over_all{name}"] = ratio.over_all
                numbers[f"alignment_over_touched{name}"] = ratio.over_touched
        return Metrics(numbers)

    def alignment(self) -> dict[str, Ratio]:
        """Alignment counts per parameter since the stream began; empty if the optimizer does not count them."""
        if not hasattr(self.optimizer, "alignment"):
            return {}
        now = self.optimizer.alignment().parameters
        return {name: ratio + self._alignment.get(name, Ratio(0, 0, 0)) for name, ratio in now.items()}

    def total_alignment(self) -> Ratio:
        """As `alignment`, over all parameters: also over those that share a name, of which it has only one."""
        now = self.optimizer.alignment().total if hasattr(self.optimizer, "alignment") else Ratio(0, 0, 0)
        return self._total_alignment + now

    def health(self) -> Metrics:
        """How the process does: events a second since it started or resumed, seconds behind the events' time."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        backlog = getattr(self._source, "backlog", None)
        return Metrics(
            events_a_second=(self.events - self.resumed_at) / seconds,
            lag_in_seconds=time.time() - self.last_time,
            failed_checkpoints=self.failed_saves,
            **({"backlog": backlog()} if backlog is not None else {}),
        )

    # State ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that makes this learner go on as if it had never stopped."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_name": type(self.optimizer).__name__,
            "source": self._source.state_dict() if hasattr(self._source, "state_dict") else self._position,
            "pending": self.pending.state_dict(),
            "ready": concatenated(self._ready) if self._ready else {},
            "metrics": [metric.state_dict() for metric in (self.progress, *self.own_metrics)],
            "log": self.log.state_dict() if self.log is not None else None,
            "rejected": self.reject_file.state_dict() if self.reject_file is not None else None,
            "alignment": {n: list(astuple(r)) for n, r in self.alignment().items()},
            "total_alignment": list(astuple(self.total_alignment())),
            "random": _random_state(),
            "with_ids": self._with_ids,
            "counts": {name: getattr(self, name) for name in _COUNTS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Files written since are taken back to where they were."""
        state = upgraded(state)
        if len(state["metrics"]) != 1 + len(self.own_metrics):
            raise ValueError(f"the state has {len(state['metrics']) - 1} metrics, here are {len(self.own_metrics)}")
        name, here = state["optimizer_name"], type(self.optimizer).__name__
        if name != here:
            raise ValueError(f"the state is of a learner with {name}, here is {here}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.pending.load_state_dict(state["pending"])
        ready = dict(state["ready"])
        self._ready, self._waiting_to_learn = ([ready], len(ready["label"])) if ready else ([], 0)
        for metric, saved in zip((self.progress, *self.own_metrics), state["metrics"], strict=True):
            metric.load_state_dict(saved)
        for file, name in ((self.log, "log"), (self.reject_file, "rejected")):
            if file is not None and state[name] is not None:
                file.load_state_dict(state[name])
        self._alignment = {name: Ratio(*counts) for name, counts in state["alignment"].items()}
        whole = state.get("total_alignment")  # older checkpoints do not have it
        self._total_alignment = sum(self._alignment.values(), Ratio(0, 0, 0)) if whole is None else Ratio(*whole)
        for name in _COUNTS:
            setattr(self, name, state["counts"].get(name, 0))  # older checkpoints do not have all
        self._with_ids = state.get("with_ids")  # older checkpoints do not say
        self._position, self._saved_at = state["source"], self.events
        _set_random_state(state["random"])

    def save(self) -> Path | None:
        """Write a checkpoint. If the disk does not take it, say so and go on: the one before it stays the newest."""
        if self.checkpoints is None:
            raise ValueError("this learner has no folder for checkpoints: pass checkpoint=")
        self._check_finite()
        self.saves += 1
        self._saved_at, self._saved_when, self._unsaved = self.events, time.monotonic(), False
        try:
            path = self.checkpoints.save(self.saves, self.state_dict())
            self.saved = True
            return path
        except OSError as error:
            self.failed_saves, self.saved = self.failed_saves + 1, False
            logger.error("no checkpoint at %d events, learning goes on without: %s", self.events, error)
            return None

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

    def take_over(self, checkpoint: Mapping[str, Any] | Path | str) -> None:
        """Start from a model trained elsewhere: ``{"model": state dict, "optimizer": state dict}``, or a file of it.

        The optimizer's may be that of torch.optim.Adam; without it the moments start anew. The learning rate is not
        taken over: it stays what this optimizer was made with.
        """
        if not isinstance(checkpoint, Mapping):
            checkpoint = torch.load(checkpoint, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, Mapping) or "model" not in checkpoint:
            raise ValueError("expected a dict with the key 'model', and 'optimizer' if the moments are to be kept")
        self.model.load_state_dict(checkpoint["model"])
        if "optimizer" in checkpoint:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = lr

    def close(self) -> None:
        """Let go of files and of the checkpoint folder."""
        for file in (self.reject_file, self.checkpoints):
            if file is not None:
                file.close()


_COUNTS = (
    *("events", "learned", "steps", "rejected", "unscored", "unlearned"),
    *("clock", "ahead", "doubted", "last_time", "saves"),
)


def _set_mode(module: nn.Module, training: bool) -> None:
    """As `module.train(training)`, but for the price of nn.Module's setting of attributes, at every batch."""
    if type(module).train is not nn.Module.train or "train" in module.__dict__:
        module.train(training)  # in its own way
        return
    module.__dict__["training"] = training
    for child in module._modules.values():
        if child is not None:
            _set_mode(child, training)


def _all_finite(*columns: Array) -> bool:
    """Whether every value is, by one look at each column: a sum that is not finite may also be one that overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        return len(columns[0]) > 0 and all(math.isfinite(values.sum(dtype=np.float64)) for values in columns)


def _median_and_largest(values: Array) -> tuple[float, float]:
    """As np.median, which takes six times as long for the events of a batch; of two in the middle the smaller one."""
    middle, last = (len(values) - 1) // 2, len(values) - 1
    ordered = np.partition(values, (middle, last))
    return float(ordered[middle]), float(ordered[last])


def _is_finite(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())


def _shown(value: Any) -> Any:
    """A value of a column for people: as Python has it."""
    return value.tolist() if hasattr(value, "tolist") else value


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
