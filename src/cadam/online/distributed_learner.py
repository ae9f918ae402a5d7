"""The learner on several ranks: each rank reads its own share of the stream, and all ranks train one model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.process_group import all_gather_objects, join, leave
from ..distributed.sharded_checkpoint import ShardedCheckpoints, load_tensors, saved_options, tensors_of
from ..distributed.table_protocol import table_alignments, table_optimizer
from ..optim.alignment import Ratio
from ..optim.ddp import gather_rows
from .data.events import FEATURE_PREFIX, Array, Batch, Columns, Events, Labels, concatenate_columns, select_features
from .learner import Batches, Learner, Loss
from .metrics.alignment_counts import NO_COUNTS
from .metrics.log_loss import MeanLoss
from .models.id_features import IdFeatures
from .models.model_file import is_log_loss
from .monitoring.reject_limit import rejected_share
from .persistence.checkpoint_schedule import CheckpointOptions, CheckpointStore
from .persistence.prediction_log import LogOptions
from .persistence.warm_start import Saved

__all__ = ["DistributedLearner", "join", "leave"]

logger = logging.getLogger("cadam.online")


class DistributedLearner(Learner):
    """`Learner` on every rank of a job that trains one model, a DistributedModelParallel or DistributedDataParallel.

    The ranks work in rounds. In each round a rank processes a batch from its source, or nothing if the source has
    ended, and joins labels with the events of its share. An event and its label must therefore reach the same rank.
    All ranks take every training step together, over the mean loss of the events of all ranks, so `loss` must be a mean
    over events.

    Every method that predicts, learns, saves, resumes or runs must be called on all ranks. They stop together: when all
    sources have ended, after a number of events of all ranks, or when `stop` was called on one rank.

    Metrics are updated with the events of all ranks, and `metrics` returns the same values on each rank. Reports are
    called on rank 0 only.

    The arguments are those of `Learner`, with these differences:

    Args:
        model: a model that exchanges gradients between ranks, and accepts batches without events.
        optimizer: an optimizer of all parameters that the model does not update during backward.
        loss: computes the mean loss from scores and labels.
        checkpoint: a folder that all ranks can access. A checkpoint belongs to the whole job, and the same number of
            ranks can resume from it. The interval between checkpoints counts the events of one rank.
        log: a folder; each rank writes its log to a subfolder.
        rejected: a folder; each rank writes a file to it.
        reports: reports that get the counts of all ranks.
        options: further arguments of `Learner`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        checkpoint: CheckpointOptions | Path | str | None = None,
        log: LogOptions | Path | str | None = None,
        rejected: Path | str | None = None,
        reports: Sequence[Callable[[Learner], None]] = (),
        **options: Any,
    ) -> None:
        if options.get("tune_rate"):
            raise ValueError("the learning rate of a model on several ranks is not tuned: give a fixed learning rate")
        if options.get("batch_growth"):
            raise ValueError("the ranks take every step together, so batches do not grow: leave out batch_growth")
        if any(isinstance(module, IdFeatures) for module in model.modules()):
            raise ValueError(
                "the kind id is for models on one rank, because each rank would give rows to ids in another order: "
                "write hash:N in the schema"
            )
        if not dist.is_initialized():
            raise RuntimeError("there is no process group: call join first")
        if not isinstance(model, DistributedDataParallel) and table_optimizer(model) is None:
            raise TypeError(
                f"each rank would train its own {type(model).__name__}: wrap it in DistributedDataParallel or in "
                "TorchRec's DistributedModelParallel"
            )
        if isinstance(model, DistributedDataParallel):
            try:
                gather_rows(model)
            except ValueError as error:
                logger.warning("torch's own sum of sparse gradients may crash this job: %s", error)
        # Objects are sent over gloo, because NCCL would copy them to a GPU first.
        self.group = dist.new_group(backend="gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if checkpoint is not None and not isinstance(checkpoint, CheckpointOptions):
            checkpoint = CheckpointOptions(checkpoint)
        if rejected is None and checkpoint is not None:
            rejected = Path(checkpoint.folder) / "rejected"
        if log is not None:
            log = log if isinstance(log, LogOptions) else LogOptions(log)
            log = replace(log, folder=Path(log.folder) / f"rank-{self.rank}")
        super().__init__(
            model,
            optimizer,
            self._share_of_loss,
            checkpoint=checkpoint,
            log=log,
            rejected=None if rejected is None else Path(rejected) / f"rank-{self.rank}.jsonl",
            reports=[_JobReport(report) for report in reports] if self.rank == 0 else [],
            **options,
        )
        self._mean_loss = loss
        self.has_log_loss = is_log_loss(loss)
        self.extra_metrics.pop()  # the mean of this rank's share of the loss
        if not self.has_log_loss:
            self.extra_metrics.append(MeanLoss(loss))
        self._events_of_step = 0
        """The number of events of all ranks in the current training step."""
        self._empty_features: Columns | None = None
        """Features of zero events, for a rank that takes part in a round without events; None until they are known."""
        self._resolved: list[Columns] = []
        """Labeled events of this rank that the metrics have not been updated with."""
        self._save_due = self._has_started = False
        self.totals = self._own_counts()
        """Counts over all ranks."""
        self._alignment: dict[str, Ratio] = {}
        self._total_alignment = NO_COUNTS

    def _open_checkpoints(self, options: CheckpointOptions) -> CheckpointStore:
        return ShardedCheckpoints(options.folder, options.keep, self.group, lock=True)

    # Predict, observe, learn --------------------------------------------------------------------------------------

    def process(self, batch: Events | Labels | Batch) -> None:
        """Process a batch together with the other ranks; see `Learner.process`."""
        events = batch if isinstance(batch, Events) else batch.events if isinstance(batch, Batch) else None
        features = events.features if events is not None and len(events) else None
        if self._is_any(features is not None, features) and features is None:
            assert self._empty_features is not None
            self._process_events(Events(self._empty_features))  # the other ranks cannot predict without this one
        super().process(batch)

    def _is_any(self, condition: bool, features: Columns | None) -> bool:
        """Whether a condition is true on any rank. If it is, all ranks know the shapes of the features afterwards.

        Args:
            condition: the condition on this rank.
            features: features of events of this rank; None if it has none.
        """
        answers = all_gather_objects((condition, self._empty_features is not None), self.group)
        is_any = any(condition for condition, _ in answers)
        if is_any and not all(is_known for _, is_known in answers):
            empty = None if features is None else {name: values[:0] for name, values in features.items()}
            self._empty_features = next(one for one in all_gather_objects(empty, self.group) if one is not None)
        return is_any

    def _forms_next_step(self, events: Events, labels_follow: bool) -> bool:
        """Return False: a training step uses the events of all ranks, of which this rank knows only its own."""
        return False

    def _predict_scores(self, events: Events) -> tuple[Array, dict[int, str]]:
        """Predict events. If the model refuses a batch, the job ends: one rank cannot search for the event alone."""
        return self.training.predict(events.features, len(events)), {}

    def _update_metrics(self, columns: Columns) -> None:
        """Keep labeled events until `_combine_ranks` updates the metrics with those of all ranks."""
        self._resolved.append({n: columns[n] for n in ("score", "label", "user", "time", "weight") if n in columns})

    def _train(self, include_short: bool = False) -> None:
        """Take as many steps as the rank with the longest queue needs; other ranks take part without events."""
        columns, ends = self.queue.columns(), self.queue.step_ends(include_short)
        if self._is_any(bool(ends), select_features(columns) or None):
            sizes = all_gather_objects(np.diff([0, *ends]).tolist(), self.group)
            start = 0
            for step in range(max(map(len, sizes))):
                self._events_of_step = sum(of_rank[step] for of_rank in sizes if step < len(of_rank))
                end = ends[step] if step < len(ends) else start
                part = {n: v[start:end] for n, v in columns.items()} if end > start else self._empty_columns()
                self.training.train(part)
                start = end
            self.queue.remove_first(start)
        self._combine_ranks()

    def _empty_columns(self) -> Columns:
        assert self._empty_features is not None
        return {"label": np.empty(0, np.float32), **{FEATURE_PREFIX + n: v for n, v in self._empty_features.items()}}

    def _share_of_loss(self, scores: Tensor, labels: Tensor, **weight: Tensor) -> Tensor:
        """Compute this rank's share of the mean loss over the events of all ranks.

        It is multiplied by the number of ranks, because the gradients are divided by it when they are averaged. A rank
        without events has a gradient of zero, which it must send nevertheless.
        """
        if not len(labels):
            return scores.sum() * 0.0
        return self._mean_loss(scores, labels, **weight) * (len(labels) * self.world / self._events_of_step)

    # Counts and metrics of all ranks ------------------------------------------------------------------------------

    def _own_counts(self) -> dict[str, float]:
        counts = {"events": self.events, "learned": self.learned, "rejected": self.rejected}
        return {**counts, "pending": len(self.pending), **vars(self.pending.counts)}

    def _combine_ranks(self) -> None:
        """Update the metrics with the labeled events of all ranks, and add up the counts of all ranks."""
        resolved = concatenate_columns(self._resolved) if self._resolved else None
        self._resolved = []
        of_ranks = all_gather_objects((resolved, self._own_counts(), *self._own_alignment()), self.group)
        parts = [columns for columns, *_ in of_ranks if columns is not None]
        if parts:
            super()._update_metrics(concatenate_columns(parts))
        self.totals = {name: sum(counts[name] for _, counts, _, _ in of_ranks) for name in self._own_counts()}
        self._total_alignment = sum((total for _, _, _, total in of_ranks), NO_COUNTS)
        self._alignment = {}
        for _, _, ratios, _ in of_ranks:
            for name, ratio in ratios.items():
                self._alignment[name] = self._alignment.get(name, NO_COUNTS) + ratio

    def _own_alignment(self) -> tuple[dict[str, Ratio], Ratio]:
        """Return this rank's alignment counts since the stream began, per parameter and table, and in total."""
        ratios, total = super().alignment(), super().total_alignment()
        for of_tables in table_alignments(self.model):
            total += of_tables.total
            for name, ratio in of_tables.parameters.items():
                ratios[name] = ratio + self.alignment_counts.earlier.get(name, NO_COUNTS)
        return ratios, total

    def alignment(self) -> dict[str, Ratio]:
        """Return the alignment of each parameter and table over all ranks; each replica of a parameter counts."""
        return dict(self._alignment)

    def total_alignment(self) -> Ratio:
        """Return the alignment over all parameters, tables and ranks since the stream began."""
        return self._total_alignment

    def metrics(self) -> dict[str, float]:
        """Return all metrics over all ranks; see `Learner.metrics`."""
        values = {**super().metrics(), **self.totals}
        return {**values, "rejected_share": rejected_share(values["rejected"], values["events"])}

    def health(self) -> dict[str, float]:
        """Return measurements of this rank. Events per second are extrapolated to all ranks."""
        health = super().health()
        return {**health, "events_a_second": health["events_a_second"] * self.world}

    # The loop -----------------------------------------------------------------------------------------------------

    def run(self, source: Batches, *, events: int | None = None) -> Learner:
        """Learn from this rank's share of the stream; see `Learner.run`.

        Args:
            source: this rank's share of the stream.
            events: the total number of events of all ranks after which to stop.
        """
        self._has_started = any(all_gather_objects(self.events > 0 or self.resumed, self.group))
        try:
            return super().run(_SynchronizedSource(self, source, events))
        finally:
            self._has_started = False

    def _check_stop_requested(self) -> None:
        """Do nothing: `agree` lets all ranks stop in the same round."""

    def _is_save_due(self) -> bool:
        return self._save_due

    def _save_if_due(self) -> None:
        """Do nothing: ranks agree on a checkpoint in the rounds of `run` only."""

    def agree(self, *, has_ended: bool, has_batch: bool) -> tuple[bool, bool]:
        """Agree with the other ranks on the next round: whether to stop after it, and whether to save then.

        Returns:
            Whether the sources of all ranks have ended, and whether any rank has a batch.
        """
        answer = (has_ended, has_batch, self._stop_requested, super()._is_save_due())
        ended, batches, stops, saves = zip(*all_gather_objects(answer, self.group), strict=True)
        self._save_due = any(saves)
        if any(stops):
            self.stopped, self._stop_requested = True, False
        return all(ended), any(batches)

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank in the form that `ShardedCheckpoints` saves."""
        own = super().state_dict()
        del own["model"]
        ratios, total = self._own_alignment()
        own["alignment"] = {name: list(astuple(ratio)) for name, ratio in ratios.items()}
        own["total_alignment"] = list(astuple(total))
        own["table_options"] = [saved_options(group) for group in self._table_groups()]
        return {"tensors": tensors_of(self.model), "shared": {"optimizer": own.pop("optimizer")}, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint that `ShardedCheckpoints.load_newest` returned.

        Raises:
            ValueError: if another number of ranks has saved it.
        """
        if state["ranks"] != self.world:
            raise ValueError(
                f"the checkpoint was saved by {state['ranks']} ranks, each with its share of the stream, but now there "
                f"are {self.world}: start {state['ranks']} ranks"
            )
        load_tensors(state["folder"], self.model, self.group)
        super().load_state_dict({**state["own"], **state["shared"], "model": self.model.state_dict()})
        for group, saved in zip(self._table_groups(), state["own"]["table_options"], strict=True):
            group.update(saved)
        self._combine_ranks()

    def resume(self) -> bool:
        """Continue from the newest checkpoint, unless another rank has already started; see `Learner.resume`."""
        return self._has_started or super().resume()

    def _table_groups(self) -> list[dict[str, Any]]:
        optimizer = table_optimizer(self.model)
        return [] if optimizer is None else list(optimizer.param_groups)

    def warm_start(self, checkpoint: Saved, options: Mapping[str, Any] | None = None) -> None:
        """Raise NotImplementedError: load the state into the model and the optimizer on all ranks instead."""
        raise NotImplementedError("load the trained state into the model and the optimizer, on all ranks")


class _SynchronizedSource:
    """A rank's source, read in rounds: in each round every rank gets a batch, which may be empty."""

    def __init__(self, learner: DistributedLearner, source: Batches, events: int | None) -> None:
        self.learner, self.source, self.events = learner, source, events
        if hasattr(source, "load_state_dict"):
            self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict  # type: ignore[attr-defined]
        if hasattr(source, "backlog"):
            self.backlog = source.backlog

    def __iter__(self) -> Iterator[Events | Labels | Batch | None]:
        batches, has_ended = iter(self.source), False
        while self.events is None or self.learner.totals["events"] < self.events:
            batch = None
            if not has_ended:
                try:
                    batch = next(batches)
                except StopIteration:
                    has_ended = True
            all_ended, any_batch = self.learner.agree(has_ended=has_ended, has_batch=batch is not None)
            if all_ended:
                return
            yield Batch() if batch is None and any_batch else batch


class _JobReport:
    """A report that gets a learner with the counts of all ranks."""

    def __init__(self, report: Callable[[Learner], None]) -> None:
        self.report = report

    def __call__(self, learner: Any) -> None:
        self.report(_JobView(learner))  # type: ignore[arg-type]

    def end(self, learner: Any) -> None:
        if hasattr(self.report, "end"):
            self.report.end(_JobView(learner))

    def close(self) -> None:
        if hasattr(self.report, "close"):
            self.report.close()


class _JobView:
    """A learner whose `events`, `rejected` and `pending` are those of all ranks."""

    def __init__(self, learner: DistributedLearner) -> None:
        self._learner, totals = learner, learner.totals
        self.events, self.rejected = int(totals["events"]), int(totals["rejected"])
        self.pending = range(int(totals["pending"]))  # reports only use its length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)
