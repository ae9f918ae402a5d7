"""Training on clicks: a pass over the data in which everything stays on the device, and exact AUC at its end.

Two readings. `read_table` learns from one shuffled epoch and then predicts validation and test; `read_stream` takes
the rows in the order of time, predicts each batch first and then learns from it. On CUDA a graph holds the whole
step, from making the batch to the update of the tables; on the CPU the same functions are called one by one.

Matrix products on CUDA are TF32 by default: inputs rounded to 11 bits, sums in float32.
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

from ..images.train import Captured
from . import models
from .data import Clicks, Feed, Part

Precision = Literal["float32", "tf32"]


@dataclass(frozen=True)
class Task:
    """What is trained and how."""

    model: str
    optimizer: str
    """A name of the catalog."""
    lr: float
    seed: int
    """Of the initial weights, the order of the epoch, the label noise and dropout."""
    batch: int = 10_000
    noise: float = 0.0
    """The share of training negatives that are shown as clicks."""
    width: int | None = None
    hidden: int | Sequence[int] | None = None
    """Length of an embedding, and of each hidden layer or of all alike; None for the usual ones of the model."""
    max_norm: float = 10.0
    """To which the gradient is clipped, tables and all."""
    table_l2: float = 0.0
    """L2 penalty on the rows of tables that a batch touches."""
    precision: Precision = "tf32"
    """Of matrix products on CUDA; the CPU's are float32."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More options of the optimizer, such as weight_decay."""


@dataclass(frozen=True)
class Scores:
    """How well a part was predicted."""

    auc: float
    log_loss: float


@dataclass(frozen=True)
class Record:
    """What came out of a run. A run that diverged (non-finite loss) has scores that are nan."""

    loss: Array
    """By step, in training."""
    norm: Array
    """Of the gradient before clipping, by step."""
    dense: Ratio
    tables: Ratio
    """Alignment over the whole run."""
    scores: Mapping[str, Scores]
    """Of validation and test, or of the stream."""
    windows: Array | None = None
    """AUC of the stream, window by window."""


def optimizer_for(task: Task, model: nn.Module, *, capturable: bool) -> cadam.Optimizer:
    """One optimizer for all: ordinary on dense parameters, row-lazy on tables."""
    dense, tables = models.parameters(model)
    group: dict[str, Any] = {"params": tables}
    if task.table_l2:
        group |= {"weight_decay": task.table_l2, "decoupled_weight_decay": False}
    cls: type[cadam.Optimizer] = getattr(cadam, task.optimizer)
    return cls([{"params": dense}, group], lr=task.lr, capturable=capturable, **task.options)


class Learner:
    """A model, its optimizer and what they record on the device."""

    def __init__(self, task: Task, clicks: Clicks, device: torch.device) -> None:
        self.task, self.fields, self.device = task, len(clicks.vocabulary), device
        self.model = models.build(
            task.model, clicks.vocabulary, task.seed, width=task.width, hidden=task.hidden, device=device
        )
        self.optimizer = optimizer_for(task, self.model, capturable=device.type == "cuda")
        self.losses = torch.empty(0, device=device)
        self.norms = torch.empty(0, device=device)

    def learn(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """One step; loss and norm of the gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.binary_cross_entropy_with_logits(self.model(ids), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = cadam.clip_grad_norm_(self.model.parameters(), self.task.max_norm)
        self.optimizer.step()
        return loss.detach(), norm

    @torch.no_grad()
    def predict(self, ids: Tensor) -> Tensor:
        """Logits, without dropout."""
        self.model.eval()
        logits: Tensor = self.model(ids)
        self.model.train()
        return logits

    # Passes over data -----------------------------------------------------------------------------------------

    def training(self, feed: Feed, *, graph: bool = True) -> Iterator[None]:
        """Learn from one batch after the other."""
        self._new_curves(feed)

        def step(index: Tensor, ids: Tensor, labels: Tensor) -> None:
            self._keep(index, *self.learn(ids, labels))

        yield from self._each(feed, step, graph)

    def train(self, feed: Feed, *, graph: bool = True) -> None:
        """Learn from every batch."""
        for _ in self.training(feed, graph=graph):
            pass

    def test(self, feed: Feed, *, learn: bool = False, graph: bool = True) -> tuple[Tensor, Tensor]:
        """Predict every row, and with `learn` learn from each batch once it is predicted: logits and labels."""
        if learn:
            self._new_curves(feed)
        logits, labels_seen = self._places(feed), self._places(feed)

        def step(index: Tensor, ids: Tensor, labels: Tensor) -> None:
            _place(logits, index, self.predict(ids))
            _place(labels_seen, index, labels)
            if learn:
                self._keep(index, *self.learn(ids, labels))

        for _ in self._each(feed, step, graph):
            pass
        return logits.view(-1)[: feed.rows], labels_seen.view(-1)[: feed.rows]

    def _each(self, feed: Feed, step: Callable[[Tensor, Tensor, Tensor], None], graph: bool) -> Iterator[None]:
        """Call a step with the number of every batch and the batch; a CUDA graph makes the batch too."""
        index = torch.zeros((), dtype=torch.int64, device=self.device)

        def on_batches_of(size: int) -> Callable[[], None]:
            ids = torch.empty(size, self.fields, dtype=torch.int64, device=self.device)
            labels = torch.empty(size, device=self.device)

            def call() -> None:
                feed.fill(index, ids, labels)
                step(index, ids, labels)
                index.add_(1)

            return call

        whole, rest = divmod(feed.rows, feed.batch_size)
        call = on_batches_of(feed.batch_size)
        captured = (
            Captured(call, torch.cuda.current_stream(self.device)) if graph and self.device.type == "cuda" else None
        )
        try:
            for _ in range(whole):
                (captured or call)()
                yield
            if rest:
                on_batches_of(rest)()
                yield
        finally:
            if captured is not None and captured.graph is not None:
                torch.cuda.synchronize(self.device)
                self.optimizer.zero_grad(set_to_none=True)  # they lie in the memory of the graph
                captured.graph.reset()

    def _new_curves(self, feed: Feed) -> None:
        steps = -(-feed.rows // feed.batch_size)
        self.losses, self.norms = (torch.zeros(steps, device=self.device) for _ in range(2))

    def _keep(self, index: Tensor, loss: Tensor, norm: Tensor) -> None:
        self.losses.index_copy_(0, index.view(1), loss.view(1))
        self.norms.index_copy_(0, index.view(1), norm.view(1))

    def _places(self, feed: Feed) -> Tensor:
        """Room for a number for every row, a line for every batch."""
        return torch.zeros(-(-feed.rows // feed.batch_size), feed.batch_size, device=self.device)

    def record(self, scores: Mapping[str, Scores], windows: Array | None = None) -> Record:
        dense, tables = self.optimizer.alignment().groups
        return Record(self.losses.cpu().numpy(), self.norms.cpu().numpy(), dense, tables, scores, windows)


def _place(places: Tensor, index: Tensor, values: Tensor) -> None:
    places[:, : len(values)].index_copy_(0, index.view(1), values.view(1, -1))


@contextmanager
def numerics(task: Task, device: torch.device) -> Iterator[None]:
    """The precision of products, dropout from the seed, and on CUDA a stream that graphs can be captured on."""
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


def scored(logits: Tensor, labels: Tensor) -> Scores:
    return Scores(auc(logits, labels), log_loss(logits, labels))


def read_table(task: Task, clicks: Clicks, device: torch.device, *, graph: bool = True) -> Record:
    """One shuffled epoch over the training part; then validation and test, both clean."""
    with numerics(task, device):
        learner = Learner(task, clicks, device)
        learner.train(clicks.feed("train", task.batch, seed=task.seed, device=device, noise=task.noise), graph=graph)
        parts: tuple[Part, ...] = ("validation", "test")
        scores: dict[str, Scores] = {}
        for part in parts:
            scores[part] = scored(*learner.test(clicks.feed(part, task.batch, device=device), graph=graph))
        return learner.record(scores)


def read_stream(task: Task, clicks: Clicks, device: torch.device, windows: int, *, graph: bool = True) -> Record:
    """Every row in the order of time, predicted before it is learned from; AUC over all and over so many windows."""
    with numerics(task, device):
        learner = Learner(task, clicks, device)
        feed = clicks.feed("stream", task.batch, seed=task.seed, device=device, noise=task.noise)
        logits, labels = learner.test(feed, learn=True, graph=graph)
        parts = zip(logits.tensor_split(windows), labels.tensor_split(windows), strict=True)
        return learner.record({"stream": scored(logits, labels)}, np.array([auc(*part) for part in parts]))
