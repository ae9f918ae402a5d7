"""Training and evaluation of the CTR models, with all data on the device.

There are two protocols. `train_epoch` learns from one shuffled epoch and then evaluates the validation and test parts,
as in the paper's tables. `train_stream` is prequential evaluation: it reads the rows in the order of time, and predicts
each batch before it learns from it. On CUDA a graph replays the whole step, from the generation of the batch to the
update of the embedding tables; on the CPU the same functions are called eagerly.

Matrix products on CUDA use TF32 by default: inputs are rounded to 11 bits, sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import cadam
from cadam.online.metrics.auc import auc
from cadam.online.metrics.log_loss import log_loss
from cadam.optim.alignment import Ratio
from cadam.statistics.intervals import Array

from ..harness import control_arms
from ..harness.control_arms import CONTROL_ARMS, MaskedAdam
from ..harness.cuda_runs import Captured
from . import models
from .data import Clicks, Feed, Part

Precision = Literal["float32", "tf32"]


@dataclass(frozen=True)
class Task:
    """The configuration of a training run."""

    model: str
    optimizer: str
    """Name of an optimizer class of `cadam`, or of a control arm."""
    lr: float
    seed: int
    """Seed of the initial weights, the order of the epoch, the label noise, dropout and a random mask."""
    batch: int = 10_000
    noise: float = 0.0
    """Share of the training negatives whose labels are flipped to clicks."""
    width: int | None = None
    """Length of an embedding; None for the default of the model."""
    hidden: int | Sequence[int] | None = None
    """Widths of the hidden layers, or one width for all; None for the default of the model."""
    max_norm: float = 10.0
    """Norm to which the gradient of all parameters, including the embedding tables, is clipped."""
    table_l2: float = 0.0
    """L2 penalty on the rows of the embedding tables that a batch uses."""
    precision: Precision = "tf32"
    """Precision of matrix products on CUDA. The CPU always uses float32."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the optimizer, such as weight_decay."""


@dataclass(frozen=True)
class Scores:
    """The metrics of the predictions on a part of the data."""

    auc: float
    log_loss: float


@dataclass(frozen=True)
class Record:
    """The results of a run. If it diverged (non-finite loss), its scores are NaN."""

    loss: Array
    """Training loss by step."""
    norm: Array
    """Norm of the gradient before clipping by step."""
    dense: Ratio
    """Alignment ratio of the dense parameters over the whole run."""
    tables: Ratio
    """Alignment ratio of the embedding tables over the whole run."""
    scores: Mapping[str, Scores]
    """Metrics of the validation and test parts, or of the stream."""
    windows: Array | None = None
    """AUC of consecutive windows of the stream."""


def optimizer_for(task: Task, model: nn.Module, *, capturable: bool) -> cadam.Optimizer | MaskedAdam:
    """Create the optimizer of a task, with one group for dense parameters and one for embedding tables."""
    dense, tables = models.parameters(model)
    group: dict[str, Any] = {"params": tables}
    if task.table_l2:
        group |= {"weight_decay": task.table_l2, "decoupled_weight_decay": False}
    if task.optimizer in CONTROL_ARMS:
        groups, device = [{"params": dense}, group], dense[0].device
        return control_arms.masked(
            task.optimizer, groups, task.lr, task.seed, device, capturable=capturable, **task.options
        )
    cls: type[cadam.Optimizer] = getattr(cadam, task.optimizer)
    return cls([{"params": dense}, group], lr=task.lr, capturable=capturable, **task.options)


class Learner:
    """A model, its optimizer, and the curves that are recorded on the device."""

    def __init__(self, task: Task, clicks: Clicks, device: torch.device) -> None:
        self.task, self.fields, self.device = task, len(clicks.vocabulary), device
        self.model = models.build(
            task.model, clicks.vocabulary, task.seed, width=task.width, hidden=task.hidden, device=device
        )
        self.optimizer = optimizer_for(task, self.model, capturable=device.type == "cuda")
        self.losses = torch.empty(0, device=device)
        self.norms = torch.empty(0, device=device)

    def learn(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Perform one training step; return the loss and the norm of the gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.binary_cross_entropy_with_logits(self.model(ids), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = cadam.clip_grad_norm_(self.model.parameters(), self.task.max_norm)
        self.optimizer.step()
        return loss.detach(), norm

    @torch.no_grad()
    def predict(self, ids: Tensor) -> Tensor:
        """Return the logits without dropout."""
        self.model.eval()
        logits: Tensor = self.model(ids)
        self.model.train()
        return logits

    # Passes over the data -----------------------------------------------------------------------------------------

    def training(self, feed: Feed, *, graph: bool = True) -> Iterator[None]:
        """Learn from the batches of a feed, and yield after each one."""
        self._new_curves(feed)

        def step(index: Tensor, ids: Tensor, labels: Tensor) -> None:
            self._record(index, *self.learn(ids, labels))

        yield from self._for_each_batch(feed, step, graph)

    def train(self, feed: Feed, *, graph: bool = True) -> None:
        """Learn from all batches of a feed."""
        for _ in self.training(feed, graph=graph):
            pass

    def test(self, feed: Feed, *, learn: bool = False, graph: bool = True) -> tuple[Tensor, Tensor]:
        """Predict all rows of a feed.

        Args:
            feed: The source of the batches.
            learn: Whether to learn from each batch after it was predicted (prequential evaluation).
            graph: Whether to use a CUDA graph.

        Returns:
            The logits and the labels of all rows.
        """
        if learn:
            self._new_curves(feed)
        logits, all_labels = self._row_buffer(feed), self._row_buffer(feed)

        def step(index: Tensor, ids: Tensor, labels: Tensor) -> None:
            _write_batch(logits, index, self.predict(ids))
            _write_batch(all_labels, index, labels)
            if learn:
                self._record(index, *self.learn(ids, labels))

        for _ in self._for_each_batch(feed, step, graph):
            pass
        return logits.view(-1)[: feed.rows], all_labels.view(-1)[: feed.rows]

    def _for_each_batch(
        self, feed: Feed, step: Callable[[Tensor, Tensor, Tensor], None], graph: bool
    ) -> Iterator[None]:
        """Call `step` with the index, ids and labels of every batch. A CUDA graph includes filling the batch."""
        index = torch.zeros((), dtype=torch.int64, device=self.device)

        def make_call(size: int) -> Callable[[], None]:
            ids = torch.empty(size, self.fields, dtype=torch.int64, device=self.device)
            labels = torch.empty(size, device=self.device)

            def call() -> None:
                feed.fill(index, ids, labels)
                step(index, ids, labels)
                index.add_(1)

            return call

        complete, rest = divmod(feed.rows, feed.batch_size)
        call = make_call(feed.batch_size)
        captured = None
        if graph and self.device.type == "cuda":
            captured = Captured(call, torch.cuda.current_stream(self.device), control_arms.generators(self.optimizer))
        try:
            for _ in range(complete):
                (captured or call)()
                yield
            if rest:
                make_call(rest)()
                yield
        finally:
            if captured is not None and captured.graph is not None:
                torch.cuda.synchronize(self.device)
                self.optimizer.zero_grad(
                    set_to_none=True
                )  # the gradients are in memory of the graph, which is freed next
                captured.graph.reset()

    def _new_curves(self, feed: Feed) -> None:
        steps = -(-feed.rows // feed.batch_size)
        self.losses, self.norms = (torch.zeros(steps, device=self.device) for _ in range(2))

    def _record(self, index: Tensor, loss: Tensor, norm: Tensor) -> None:
        self.losses.index_copy_(0, index.view(1), loss.view(1))
        self.norms.index_copy_(0, index.view(1), norm.view(1))

    def _row_buffer(self, feed: Feed) -> Tensor:
        """Return a buffer with one number for every row of a feed, of shape (batches, batch size)."""
        return torch.zeros(-(-feed.rows // feed.batch_size), feed.batch_size, device=self.device)

    def record(self, scores: Mapping[str, Scores], windows: Array | None = None) -> Record:
        """Return the recorded curves with the scores of the run."""
        dense, tables = self.optimizer.alignment().groups
        return Record(self.losses.cpu().numpy(), self.norms.cpu().numpy(), dense, tables, scores, windows)


def _write_batch(buffer: Tensor, index: Tensor, values: Tensor) -> None:
    buffer[:, : len(values)].index_copy_(0, index.view(1), values.view(1, -1))


@contextmanager
def numerics(task: Task, device: torch.device) -> Iterator[None]:
    """Set the precision of matrix products and the seed of dropout while the context is active.

    On CUDA, a new stream becomes the current one, because the default stream does not support graph capture.
    """
    before = torch.get_float32_matmul_precision()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(task.seed)
        torch.set_float32_matmul_precision("high" if devices and task.precision == "tf32" else "highest")
        try:
            if not devices:
                yield
                return
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                yield
            torch.cuda.current_stream(device).wait_stream(stream)
        finally:
            torch.set_float32_matmul_precision(before)


def compute_scores(logits: Tensor, labels: Tensor) -> Scores:
    """Return the metrics of predictions."""
    return Scores(auc(logits, labels), log_loss(logits, labels))


def train_epoch(task: Task, clicks: Clicks, device: torch.device, *, graph: bool = True) -> Record:
    """Train on one shuffled epoch, then evaluate the validation and test parts, which have no label noise."""
    with numerics(task, device):
        learner = Learner(task, clicks, device)
        learner.train(clicks.feed("train", task.batch, seed=task.seed, device=device, noise=task.noise), graph=graph)
        parts: tuple[Part, ...] = ("validation", "test")
        scores: dict[str, Scores] = {}
        for part in parts:
            scores[part] = compute_scores(*learner.test(clicks.feed(part, task.batch, device=device), graph=graph))
        return learner.record(scores)


def train_stream(task: Task, clicks: Clicks, device: torch.device, windows: int, *, graph: bool = True) -> Record:
    """Read all rows in the order of time, and predict each batch before learning from it (prequential evaluation).

    The record contains the AUC over all rows and over `windows` windows of equal length.
    """
    with numerics(task, device):
        learner = Learner(task, clicks, device)
        feed = clicks.feed("stream", task.batch, seed=task.seed, device=device, noise=task.noise)
        logits, labels = learner.test(feed, learn=True, graph=graph)
        parts = zip(logits.tensor_split(windows), labels.tensor_split(windows), strict=True)
        return learner.record({"stream": compute_scores(logits, labels)}, np.array([auc(*part) for part in parts]))
