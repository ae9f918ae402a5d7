"""Training with everything on the device: data, rotation, forward, backward, optimizer and the record of each step.

On CUDA the model is compiled or has kernels of its own, a graph holds the whole step, and several runs go side by side,
each on a stream of its own: one run alone leaves most of a large GPU idle. On the CPU, and where no graph is wanted,
the same functions are called step by step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import cadam
from cadam.statistics.intervals import Array

from . import models
from .data import Images
from .streams import OWN, Schedule, Stream

Precision = Literal["float32", "bfloat16"]
WARM_UP = 3
"""Calls before a graph is captured: kernels are compiled and algorithms chosen in them. They count as any other."""
TEST_BATCH = 1000
"""Test images at once, at most."""


@dataclass(frozen=True)
class Task:
    """What is trained, how and on what."""

    model: str
    optimizer: str
    lr: float
    seed: int
    stream: Stream
    epochs: int
    batch: int = 128
    weight_decay: float = 5e-4
    precision: Precision = "float32"
    compiled: bool = False
    """Fuse what lies between the convolutions of the training step. Sums are taken in another order then.

    On CUDA in bfloat16, the blocks of DenseNet have kernels of their own for it, which refuse sizes they do not know;
    else torch compiles the model.
    """
    moments: str = "float32"
    """How the optimizer stores its moments."""


@dataclass(frozen=True)
class Record:
    """What came out of a run: curves by step, and by epoch the test accuracy, as a share."""

    loss: Array
    accuracy: Array
    """The share of each batch classified correctly before the step, by the samples' own labels."""
    alignment: Array
    test_accuracy: Array


def predict(model: nn.Module, batch: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the logits it comes from."""
    logits = model(batch)
    return F.cross_entropy(logits, labels), logits


@cache
def compiled_predict() -> Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same, compiled once for all models of a kind, into kernels that do not depend on how fast others were."""
    return torch.compile(predict, dynamic=False, options={"deterministic": True})


class Captured:
    """A function without arguments or result that a CUDA graph holds from its fourth call on."""

    def __init__(self, function: Callable[[], None], stream: torch.cuda.Stream) -> None:
        self.function, self.stream = function, stream
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            if self.graph is None and self.calls < WARM_UP:
                self.calls += 1
                self.function()
                return
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                # On the stream of the run: matrix products keep a workspace for each stream, and graphs that were
                # captured on the same one would share it while they run at the same time.
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self.function()
            self.graph.replay()


class Run:
    """One training run. `advance` does a step of it, or the tests that end an epoch."""

    def __init__(self, task: Task, images: Images, *, graph: bool = True, deterministic: bool = True) -> None:
        device = images.train.device
        cuda = device.type == "cuda"
        self.task, self.images, self.deterministic = task, images, deterministic
        self.schedule = task.stream.schedule(task.seed, len(images.train), images.classes, task.batch, task.epochs)
        self.model = models.build(task.model, images.channels, images.classes, task.seed).to(device)
        if cuda:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer: cadam.Optimizer = getattr(cadam, task.optimizer)(
            self.model.parameters(),
            lr=task.lr,
            weight_decay=task.weight_decay,
            capturable=cuda,
            moments=task.moments,
        )
        self._predict = compiled_predict() if task.compiled else predict
        self._place_schedule(device)
        steps, epochs = len(self.schedule.order), self.schedule.epochs
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._test_batch = torch.zeros_like(self._step)
        self._loss = torch.zeros(steps, device=device)
        self._correct = torch.zeros(steps, dtype=torch.int64, device=device)
        self._counts = torch.zeros(steps, 3, dtype=torch.int64, device=device)
        self._test_correct = torch.zeros(epochs, dtype=torch.int64, device=device)
        self._train: Callable[[], None] = self.train_step
        self._test: Callable[[], None] = self.test_step
        self.stream = torch.cuda.Stream(device) if cuda and graph else None  # type: ignore[no-untyped-call]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
            self._train, self._test = Captured(self.train_step, self.stream), Captured(self.test_step, self.stream)
        self._turns = self._all()
        self.done = False

    def _place_schedule(self, device: torch.device) -> None:
        schedule, size = self.schedule, self.images.train.shape[-2:]
        self._order = torch.from_numpy(schedule.order).to(device)
        self._labels = torch.from_numpy(schedule.labels).to(device)
        self._rotation = torch.from_numpy(rotations(schedule.angle)).to(device)
        moved = bool(schedule.flip.any() or schedule.shift.any())
        self._moves = torch.from_numpy(moves(schedule, size)).to(device) if moved else None
        self._pixels = torch.from_numpy(pixels(size)).to(device)

    # One step -------------------------------------------------------------------------------------------------

    def train_step(self) -> None:
        """Everything from taking the batch to recording what became of it; all of it stays on the device."""
        images, step = self.images, self._step
        self.optimizer.zero_grad(set_to_none=True)
        index = self._order.index_select(0, step).squeeze(0)
        shown = self._labels.index_select(0, step).squeeze(0)
        own = images.train_labels.index_select(0, index)
        view = self._rotation.index_select(0, step)
        if self._moves is not None:
            view = self._moves.index_select(0, step).squeeze(0) @ view
        batch = self.seen(images.train.index_select(0, index), view)
        with self._numerics():
            loss, logits = self._predict(self.model, batch, torch.where(shown == OWN, own, shown))
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._loss.index_copy_(0, step, loss.detach().view(1))
        self._correct.index_copy_(0, step, (logits.argmax(1) == own).sum().view(1))
        self._counts.index_copy_(0, step, self.optimizer.alignment_counts().view(1, 3))
        step.add_(1)

    @torch.no_grad()
    def test_step(self) -> None:
        """Test images, a batch of them, turned as the last training batch was."""
        images, last = self.images, self._step - 1
        size = min(TEST_BATCH, len(images.test))
        index = self._test_batch * size + torch.arange(size, device=last.device)
        there = index < len(images.test)
        index = index.clamp(max=len(images.test) - 1)
        batch = self.seen(images.test.index_select(0, index), self._rotation.index_select(0, last))
        self.model.eval()
        with self._numerics():
            logits = self.model(batch)
        self.model.train()
        right = (logits.argmax(1) == images.test_labels.index_select(0, index)) & there
        self._test_correct.index_add_(0, last // self.schedule.steps_per_epoch, right.sum().view(1))
        self._test_batch.add_(1).remainder_(self.test_batches)

    @property
    def test_batches(self) -> int:
        return -(-len(self.images.test) // TEST_BATCH)

    def seen(self, batch: Tensor, view: Tensor) -> Tensor:
        """Images as the model sees them: moved and turned, with black around them, and normalized.

        `view` takes places in what is seen to places in the image, a matrix (1 or batch, 3, 3).
        """
        places = self._pixels @ view[:, :2].mT
        height, width = batch.shape[-2:]
        grid = places.view(-1, height, width, 2).expand(len(batch), -1, -1, -1)
        turned = F.grid_sample(batch.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        shape = (1, -1, 1, 1)
        normalized = (turned - self.images.mean.view(shape)) / self.images.std.view(shape)
        if batch.is_cuda:
            return normalized.contiguous(memory_format=torch.channels_last)
        return normalized

    @contextmanager
    def _numerics(self) -> Iterator[None]:
        """The precision of the model, and how algorithms are chosen: the same every time, or the fastest ones."""
        choice = {"deterministic": self.deterministic, "benchmark": not self.deterministic}
        half = self.task.precision == "bfloat16"
        # Casts of weights are not kept from one step to the next: a graph could not renew them.
        cast = torch.autocast(self._step.device.type, torch.bfloat16, enabled=half, cache_enabled=False)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=True, **choice), cast:
            yield

    # All steps ------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """One turn of the run; False once it is at its end."""
        self.done = next(self._turns, True)
        return not self.done

    def _all(self) -> Iterator[bool]:
        for _ in range(self.schedule.epochs):
            for _ in range(self.schedule.steps_per_epoch):
                self._train()
                yield False
            for _ in range(self.test_batches):
                self._test()
            yield False

    def synchronize(self) -> None:
        """Wait until the device has done what this run has asked of it."""
        if self.stream is not None:
            self.stream.synchronize()

    def record(self) -> Record:
        """What the run has recorded so far."""
        self.synchronize()
        counts = np.diff(self._counts.cpu().numpy(), axis=0, prepend=0)
        with np.errstate(invalid="ignore"):
            alignment = counts[:, 0] / counts[:, 2]
        return Record(
            self._loss.cpu().numpy(),
            self._correct.cpu().numpy() / self.task.batch,
            alignment,
            self._test_correct.cpu().numpy() / len(self.images.test),
        )

    def release(self) -> None:
        """Give the memory of a run's graphs and gradients back."""
        for captured in (self._train, self._test):
            if isinstance(captured, Captured) and captured.graph is not None:
                captured.graph.reset()
        self.optimizer.zero_grad(set_to_none=True)


# Where pixels come from ----------------------------------------------------------------------------------------


def pixels(size: Iterable[int]) -> Array:
    """The centers of the pixels, row by row, as (x, y, 1); the image reaches from -1 to 1."""
    height, width = size
    y, x = np.meshgrid(*((2 * np.arange(n) + 1) / n - 1 for n in (height, width)), indexing="ij")
    return np.stack([x, y, np.ones_like(x)], axis=-1).reshape(1, -1, 3).astype(np.float32)


def rotations(angle: Array) -> Array:
    """Matrices (n, 3, 3) that turn images counter-clockwise by so many degrees."""
    radians = np.deg2rad(angle)
    matrices = np.tile(np.eye(3), (len(radians), 1, 1))
    matrices[:, 0, 0] = matrices[:, 1, 1] = np.cos(radians)
    matrices[:, 1, 0] = np.sin(radians)
    matrices[:, 0, 1] = -matrices[:, 1, 0]
    return matrices.astype(np.float32)


def moves(schedule: Schedule, size: Iterable[int]) -> Array:
    """Matrices (steps, batch, 3, 3) that move and mirror each image."""
    height, width = size
    matrices = np.tile(np.eye(3, dtype=np.float32), (*schedule.flip.shape, 1, 1))
    matrices[..., 0, 0] = np.where(schedule.flip, -1, 1)
    matrices[..., 0, 2] = -schedule.shift[..., 1] * 2 / width
    matrices[..., 1, 2] = -schedule.shift[..., 0] * 2 / height
    return matrices


# Runs side by side ---------------------------------------------------------------------------------------------


def side_by_side(runs: Iterable[Run], lanes: int) -> Iterator[tuple[Run, float]]:
    """Advance up to `lanes` runs in turn; each that ends is given back, and the next one takes its place.

    With a run come the seconds it took: while several went on, each took its share of the time.
    """
    waiting = iter(runs)
    seconds: dict[Run, float] = {}
    mark = time.perf_counter()

    def share() -> None:
        nonlocal mark
        now = time.perf_counter()
        for run in seconds:
            seconds[run] += (now - mark) / len(seconds)
        mark = now

    while True:
        while len(seconds) < lanes:
            share()
            following = next(waiting, None)
            if following is None:
                break
            seconds[following] = 0.0
        if not seconds:
            return
        ended = [run for run in seconds if not run.advance()]
        for run in ended:
            run.synchronize()
            share()
            yield run, seconds.pop(run)
            mark = time.perf_counter()
