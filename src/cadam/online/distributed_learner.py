"""The learner on many ranks: each reads its own share of the stream, and all of them train one model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.process_group import (
    RankCheckpoints,
    everywhere,
    join,
    leave,
    load_tensors,
    saved_options,
    tensors_of,
)
from ..distributed.table_protocol import table_alignments, table_optimizer
from ..optim.alignment import Ratio
from ..optim.ddp import gather_rows
from .data.events import FEATURE_PREFIX, Array, Batch, Columns, Events, Labels, concatenate_columns, select_features
from .learner import Batches, Learner, Loss
from .metrics.running import NONE
from .monitoring import reject_limit

__all__ = ["DistributedLearner", "join", "leave"]

logger = logging.getLogger("cadam.online")


class DistributedLearner(Learner):
    """`Learner` on every rank of a job, over one model: a DistributedModelParallel or a DistributedDataParallel.

    The ranks go in rounds. In each a rank takes a batch of its own source, nothing if it has none left, and joins
    labels with events of its own share; so an event and its label must come to the same rank. All ranks take every
    step together, over the mean loss of the events of all of them: `loss` must be a mean over events.

    So every method that predicts, learns, saves, resumes or runs must be called on all ranks. They stop together: when
    all sources have ended, after so many `events` of all ranks, or when `stop` was called on one of them.

    Metrics are told of the events of all ranks, rank by rank in each round, and are the same on each; so is what
    `metrics` gives. `reports` are called on rank 0.

    Arguments are those of `Learner`, but for:

    Args:
        model: whose ranks exchange gradients; it must take batches without events.
        optimizer: of all parameters that the model does not update in backward.
        checkpoint: a folder that all ranks see. A checkpoint is one for the job; it can be resumed by as many ranks.
        checkpoint_every: events between checkpoints, of one rank.
        log: a folder with the log of each rank in a folder of its own.
        rejected: a folder with a file for each rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        checkpoint: Path | str | None = None,
        keep: int = 3,
        log: Path | str | None = None,
        rejected: Path | str | None = None,
        reports: Sequence[Callable[[Learner], None]] = (),
        **options: Any,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("there is no process group: call join first")
        if not isinstance(model, DistributedDataParallel) and table_optimizer(model) is None:
            raise TypeError(
                f"the ranks would train a {type(model).__name__} each: wrap it in DistributedDataParallel or in "
                "TorchRec's DistributedModelParallel"
            )
        if isinstance(model, DistributedDataParallel):
            try:
                gather_rows(model)
            except ValueError as error:
                logger.warning("torch's own sum of sparse gradients may crash this job: %s", error)
        self.group = dist.new_group(backend="gloo")  # for objects: they need not pass through a GPU
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if rejected is None and checkpoint is not None:
            rejected = Path(checkpoint) / "rejected"
        super().__init__(
            model,
            optimizer,
            self._share_of_loss,
            log=None if log is None else Path(log) / f"rank-{self.rank}",
            rejected=None if rejected is None else Path(rejected) / f"rank-{self.rank}.jsonl",
            reports=[Shown(report) for report in reports] if self.rank == 0 else [],
            **options,
        )
        if checkpoint is not None:
            self.saving.checkpoints = RankCheckpoints(checkpoint, keep, self.group, hold=True)
        self._mean_loss, self._of_all = loss, 0
        self._nothing: Columns | None = None  # the features of no events
        self._settled: list[Columns] = []
        self._asked = self._due = self._begun = False
        self.totals, self._ratios = self._counts(), {}  # type: dict[str, float], dict[str, Ratio]
        self._ratio = NONE

    # Predict, observe, learn ---------------------------------------------------------------------------------

    def take(self, batch: Events | Labels | Batch) -> None:
        events = batch if isinstance(batch, Events) else batch.events if isinstance(batch, Batch) else None
        features = events.features if events is not None and len(events) else None
        if self._any(features is not None, features) and features is None:
            assert self._nothing is not None
            self._take_events(Events(self._nothing))  # the other ranks cannot predict without this one
        super().take(batch)

    def _any(self, here: bool, features: Columns | None) -> bool:
        """Whether it is so on any rank; if it is, all know from then on what features of no events look like."""
        every = everywhere((here, self._nothing is not None), self.group)
        found = any(here for here, _ in every)
        if found and not all(known for _, known in every):
            known = None if features is None else {name: values[:0] for name, values in features.items()}
            self._nothing = next(given for given in everywhere(known, self.group) if given is not None)
        return found

    def _scores(self, events: Events) -> tuple[Array, dict[int, str]]:
        """A model that refuses a batch ends the job: a rank cannot look for the event without the others."""
        return self.training.score(events.features, len(events)), {}

    def _count(self, columns: Columns) -> None:
        """Once all ranks do so, in `_count_together`."""
        self._settled.append({n: columns[n] for n in ("score", "label", "user", "time") if n in columns})

    def _learn(self, all_of_it: bool = False) -> None:
        """As many steps as the rank with the most events ready has; the others go along without events."""
        ready, ends = self.ready.columns(), self.ready.ends(all_of_it)
        features = select_features(ready)
        if self._any(bool(ends), features or None):
            sizes = everywhere([end - start for start, end in zip([0, *ends], ends, strict=False)], self.group)
            start = 0
            for step in range(max(map(len, sizes))):
                self._of_all = sum(of_rank[step] for of_rank in sizes if step < len(of_rank))
                end = ends[step] if step < len(ends) else start
                part = {n: v[start:end] for n, v in ready.items()} if end > start else self._no_columns()
                self.training.step(part)
                start = end
            self.ready.drop(start)
        self._count_together()

    def _no_columns(self) -> Columns:
        assert self._nothing is not None
        return {"label": np.empty(0, np.float32), **{FEATURE_PREFIX + n: v for n, v in self._nothing.items()}}

    def _share_of_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """This rank's part in the mean over the events of all ranks, times the ranks, by which gradients are divided.

        A rank without events has a gradient of zero, which it must send all the same.
        """
        if not len(labels):
            return scores.sum() * 0.0
        return self._mean_loss(scores, labels) * (len(labels) * self.world / self._of_all)

    # Over all ranks ------------------------------------------------------------------------------------------

    def _counts(self) -> dict[str, float]:
        return {
            "events": self.events,
            "learned": self.learned,
            "pending": len(self.pending),
            "rejected": self.rejected,
            **vars(self.pending.counts),
        }

    def _count_together(self) -> None:
        """Tell the metrics of what was settled on all ranks, and add up what they count."""
        settled = concatenate_columns(self._settled) if self._settled else None
        every = everywhere((settled, self._counts(), *self._own_alignment()), self.group)
        self._settled = []
        parts = [settled for settled, *_ in every if settled is not None]
        if parts:
            super()._count(concatenate_columns(parts))
        self.totals = {name: sum(counts[name] for _, counts, *_ in every) for name in self._counts()}
        self._ratios, self._ratio = {}, sum((total for *_, total in every), NONE)
        for _, _, ratios, _ in every:
            for name, ratio in ratios.items():
                self._ratios[name] = self._ratios.get(name, NONE) + ratio

    def _own_alignment(self) -> tuple[dict[str, Ratio], Ratio]:
        """What this rank has counted since the stream began: per parameter and table, and in total."""
        ratios, total = super().alignment(), super().total_alignment()
        for of_tables in table_alignments(self.model):
            total += of_tables.total
            for name, ratio in of_tables.parameters.items():
                ratios[name] = ratio + self.alignment_counts.before.get(name, NONE)
        return ratios, total

    def alignment(self) -> dict[str, Ratio]:
        """Alignment counts per parameter and table over all ranks since the stream began; copies count once each."""
        return dict(self._ratios)

    def total_alignment(self) -> Ratio:
        """As `alignment`, over all parameters and tables."""
        return self._ratio

    def metrics(self) -> dict[str, float]:
        """As `Learner.metrics`, over all ranks; the same on each."""
        numbers = {**super().metrics(), **self.totals}
        return {**numbers, "rejected_share": reject_limit.share(numbers["rejected"], numbers["events"])}

    def health(self) -> dict[str, float]:
        """As `Learner.health`, of this rank; but events a second are those of all, if they are as fast as this one."""
        health = super().health()
        return {**health, "events_a_second": health["events_a_second"] * self.world}

    # The loop ------------------------------------------------------------------------------------------------

    def run(self, source: Batches, *, events: int | None = None) -> Learner:
        """As `Learner.run`, with this rank's share of the stream; `events` counts those of all ranks."""
        self._begun = any(everywhere(self.events > 0 or self.resumed, self.group))
        try:
            return super().run(Rounds(self, source, events))
        finally:
            self._begun = False

    def stop(self) -> None:
        """Let `run` end on all ranks after the next round; one of them calling it is enough."""
        self._asked = True

    def _heed(self) -> None:
        """All ranks do so together, in `agree`."""

    def _save_is_due(self) -> bool:
        return self._due

    def agree(self, *, ended: bool, some: bool) -> tuple[bool, bool]:
        """Before a round: whether all ranks have ended, and whether any has a batch; and what follows the round."""
        mine = (ended, some, self._asked, super()._save_is_due())
        ends, somes, asked, due = zip(*everywhere(mine, self.group), strict=True)
        self._due = any(due)
        if any(asked):
            self.stopped, self._asked = True, False
        return all(ends), any(somes)

    # State ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What `RankCheckpoints` saves of this rank."""
        own = super().state_dict()
        del own["model"]
        ratios, total = self._own_alignment()
        own["alignment"] = {n: list(astuple(r)) for n, r in ratios.items()}
        own["total_alignment"] = list(astuple(total))
        own["options_of_tables"] = [saved_options(group) for group in self._table_groups()]
        return {"tensors": tensors_of(self.model), "shared": {"optimizer": own.pop("optimizer")}, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of as many ranks, as `RankCheckpoints.newest` gives it."""
        if state["ranks"] != self.world:
            raise ValueError(
                f"the checkpoint is of {state['ranks']} ranks, each with its share of the stream, and here are "
                f"{self.world}: start {state['ranks']}"
            )
        load_tensors(state["folder"], self.model, self.group)
        model = self.model.state_dict()
        super().load_state_dict({**state["own"], **state["shared"], "model": model})
        for group, saved in zip(self._table_groups(), state["own"]["options_of_tables"], strict=True):
            group.update(saved)
        self._count_together()

    def resume(self) -> bool:
        """As `Learner.resume`; but a rank that saw nothing yet, where others did, runs on with them."""
        return self._begun or super().resume()

    def _table_groups(self) -> list[dict[str, Any]]:
        of_tables = table_optimizer(self.model)
        return [] if of_tables is None else list(of_tables.param_groups)

    def warm_start(
        self, checkpoint: Mapping[str, Any] | Path | str | Sequence[Any], options: Mapping[str, Any] | None = None
    ) -> None:
        raise NotImplementedError("load what is to be taken over into the model and the optimizer, on all ranks")


class Rounds:
    """A rank's source, read in step with the others': each round gives every rank a batch, an empty one if need be."""

    def __init__(self, learner: DistributedLearner, source: Batches, events: int | None) -> None:
        self.learner, self.source, self.events = learner, source, events
        if hasattr(source, "load_state_dict"):
            self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict  # type: ignore[attr-defined]
        if hasattr(source, "backlog"):
            self.backlog = source.backlog

    def __iter__(self) -> Iterator[Events | Labels | Batch | None]:
        own, ended = iter(self.source), False
        while self.events is None or self.learner.totals["events"] < self.events:
            batch = None
            if not ended:
                try:
                    batch = next(own)
                except StopIteration:
                    ended = True
            over, some = self.learner.agree(ended=ended, some=batch is not None)
            if over:
                return
            yield batch if batch is not None or not some else Batch()


class Shown:
    """A report that sees a learner with the counts of all ranks."""

    def __init__(self, report: Callable[[Learner], None]) -> None:
        self.report = report

    def __call__(self, learner: Any) -> None:
        self.report(Whole(learner))  # type: ignore[arg-type]

    def end(self, learner: Any) -> None:
        if hasattr(self.report, "end"):
            self.report.end(Whole(learner))


class Whole:
    """A learner as reports know it, with `events`, `rejected` and `pending` of all ranks."""

    def __init__(self, learner: DistributedLearner) -> None:
        self._learner, totals = learner, learner.totals
        self.events, self.rejected = int(totals["events"]), int(totals["rejected"])
        self.pending = range(int(totals["pending"]))  # its length is asked for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)
