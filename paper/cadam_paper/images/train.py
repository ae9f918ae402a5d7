"""Training of the image models with all data on the device: images, rotations, model, optimizer and recorded curves.

On CUDA the model may be compiled, a CUDA graph replays the whole training step, and several runs proceed concurrently,
each on its own CUDA stream, because a single run leaves most of a large GPU idle. On the CPU, and if no graph is
requested, the same functions are called eagerly.
"""

from __future__ import annotations

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

from ..harness import control_arms
from ..harness.control_arms import CONTROL_ARMS, MaskedAdam
from ..harness.cuda_runs import Captured
from . import models
from .data import Images
from .streams import TRUE_LABEL, Schedule, Stream

Precision = Literal["float32", "bfloat16"]
TEST_BATCH = 1000
"""Largest batch of test images."""


@dataclass(frozen=True)
class Task:
    """The configuration of a training run."""

    model: str
    optimizer: str
    """Name of an optimizer class of `cadam`, or of a control arm."""
    lr: float
    seed: int
    stream: Stream
    epochs: int
    batch: int = 128
    weight_decay: float = 5e-4
    precision: Precision = "float32"
    compiled: bool = False
    """Whether `torch.compile` fuses the operations between convolutions. This changes the order of summation."""
    moments: str = "float32"
    """The storage format of the optimizer's moments."""


@dataclass(frozen=True)
class Record:
    """The recorded curves of a run: loss, accuracy and alignment by step, and test accuracy by epoch (0 to 1)."""

    loss: Array
    accuracy: Array
    """Share of each batch that is classified correctly before the step, by the true labels."""
    alignment: Array
    test_accuracy: Array


def predict(model: nn.Module, batch: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the logits of a batch."""
    logits = model(batch)
    return F.cross_entropy(logits, labels), logits


@cache
def compiled_predict() -> Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the compiled `predict`, which all runs share.

    With the option `deterministic`, torch does not choose kernels by timing them, so the results are reproducible.
    """
    return torch.compile(predict, dynamic=False, options={"deterministic": True})


def optimizer_for(task: Task, model: nn.Module, device: torch.device) -> cadam.Optimizer | MaskedAdam:
    """Create the optimizer of a task."""
    decay, cuda = task.weight_decay, device.type == "cuda"
    if task.optimizer in CONTROL_ARMS:
        return control_arms.masked(
            task.optimizer, model.parameters(), task.lr, task.seed, device, weight_decay=decay, capturable=cuda
        )
    cls: type[cadam.Optimizer] = getattr(cadam, task.optimizer)
    return cls(model.parameters(), lr=task.lr, weight_decay=decay, capturable=cuda, moments=task.moments)


class Run:
    """One training run. Each call of `advance` performs a training step or the evaluation at the end of an epoch.

    Args:
        task: The configuration of the run.
        images: The data set, on the device of the run.
        graph: Whether to replay CUDA graphs; ignored on the CPU.
        deterministic: Whether to use only deterministic algorithms of cuDNN.
    """

    def __init__(self, task: Task, images: Images, *, graph: bool = True, deterministic: bool = True) -> None:
        device = images.train.device
        cuda = device.type == "cuda"
        self.task, self.images, self.deterministic = task, images, deterministic
        self.schedule = task.stream.schedule(task.seed, len(images.train), images.classes, task.batch, task.epochs)
        self.model = models.build(task.model, images.channels, images.classes, task.seed).to(device)
        if cuda:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = optimizer_for(task, self.model, device)
        self._predict = compiled_predict() if task.compiled else predict
        self._copy_schedule_to_device(device)
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
            self._train = Captured(self.train_step, self.stream, control_arms.generators(self.optimizer))
            self._test = Captured(self.test_step, self.stream)
        self._actions = self._iterate()
        self.done = False

    def _copy_schedule_to_device(self, device: torch.device) -> None:
        schedule, size = self.schedule, self.images.train.shape[-2:]
        self._order = torch.from_numpy(schedule.order).to(device)
        self._labels = torch.from_numpy(schedule.labels).to(device)
        self._rotation = torch.from_numpy(rotations(schedule.angle)).to(device)
        moved = bool(schedule.flip.any() or schedule.shift.any())
        self._moves = torch.from_numpy(moves(schedule, size)).to(device) if moved else None
        self._pixels = torch.from_numpy(pixels(size)).to(device)

    # One step -------------------------------------------------------------------------------------------------

    def train_step(self) -> None:
        """Perform one training step, from selecting the batch to recording the results, entirely on the device."""
        images, step = self.images, self._step
        self.optimizer.zero_grad(set_to_none=True)
        index = self._order.index_select(0, step).squeeze(0)
        scheduled = self._labels.index_select(0, step).squeeze(0)
        true = images.train_labels.index_select(0, index)
        view = self._rotation.index_select(0, step)
        if self._moves is not None:
            view = self._moves.index_select(0, step).squeeze(0) @ view
        batch = self.transform(images.train.index_select(0, index), view)
        with self._numerics():
            loss, logits = self._predict(self.model, batch, torch.where(scheduled == TRUE_LABEL, true, scheduled))
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._loss.index_copy_(0, step, loss.detach().view(1))
        self._correct.index_copy_(0, step, (logits.argmax(1) == true).sum().view(1))
        self._counts.index_copy_(0, step, self.optimizer.alignment_counts().view(1, 3))
        step.add_(1)

    @torch.no_grad()
    def test_step(self) -> None:
        """Evaluate one batch of test images, rotated like the last training batch."""
        images, last = self.images, self._step - 1
        size = min(TEST_BATCH, len(images.test))
        index = self._test_batch * size + torch.arange(size, device=last.device)
        valid = index < len(images.test)
        index = index.clamp(max=len(images.test) - 1)
        batch = self.transform(images.test.index_select(0, index), self._rotation.index_select(0, last))
        self.model.eval()
        with self._numerics():
            logits = self.model(batch)
        self.model.train()
        correct = (logits.argmax(1) == images.test_labels.index_select(0, index)) & valid
        self._test_correct.index_add_(0, last // self.schedule.steps_per_epoch, correct.sum().view(1))
        self._test_batch.add_(1).remainder_(self.test_batches)

    @property
    def test_batches(self) -> int:
        """The number of batches of test images."""
        return -(-len(self.images.test) // TEST_BATCH)

    def transform(self, batch: Tensor, view: Tensor) -> Tensor:
        """Rotate, translate and normalize images. Pixels from outside of the image are black.

        Args:
            batch: Images as bytes, of shape (batch, channels, height, width).
            view: Matrices of shape (1 or batch, 3, 3) that map output coordinates to input coordinates.

        Returns:
            The normalized images in float32.
        """
        coordinates = self._pixels @ view[:, :2].mT
        height, width = batch.shape[-2:]
        grid = coordinates.view(-1, height, width, 2).expand(len(batch), -1, -1, -1)
        rotated = F.grid_sample(batch.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        shape = (1, -1, 1, 1)
        normalized = (rotated - self.images.mean.view(shape)) / self.images.std.view(shape)
        if batch.is_cuda:
            return normalized.contiguous(memory_format=torch.channels_last)
        return normalized

    @contextmanager
    def _numerics(self) -> Iterator[None]:
        """Set the precision of the model, and select either deterministic or the fastest cuDNN algorithms."""
        choice = {"deterministic": self.deterministic, "benchmark": not self.deterministic}
        half = self.task.precision == "bfloat16"
        # Autocast must not cache the cast weights: a replayed graph would not update the cached copies.
        cast = torch.autocast(self._step.device.type, torch.bfloat16, enabled=half, cache_enabled=False)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=True, **choice), cast:
            yield

    # All steps ------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Perform the next training step or evaluation; return False at the end of the run."""
        self.done = next(self._actions, True)
        return not self.done

    def _iterate(self) -> Iterator[bool]:
        """Perform the run and yield False after each training step and each evaluation."""
        for _ in range(self.schedule.epochs):
            for _ in range(self.schedule.steps_per_epoch):
                self._train()
                yield False
            for _ in range(self.test_batches):
                self._test()
            yield False

    def synchronize(self) -> None:
        """Wait until the device has finished all work of this run."""
        if self.stream is not None:
            self.stream.synchronize()

    def record(self) -> Record:
        """Return the curves recorded so far."""
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
        """Free the memory of the graphs and gradients of the run."""
        for captured in (self._train, self._test):
            if isinstance(captured, Captured) and captured.graph is not None:
                captured.graph.reset()
        self.optimizer.zero_grad(set_to_none=True)


# Coordinate transformations ----------------------------------------------------------------------------------------


def pixels(size: Iterable[int]) -> Array:
    """Return the homogeneous coordinates (x, y, 1) of the pixel centers, row by row; the image spans [-1, 1]."""
    height, width = size
    y, x = np.meshgrid(*((2 * np.arange(n) + 1) / n - 1 for n in (height, width)), indexing="ij")
    return np.stack([x, y, np.ones_like(x)], axis=-1).reshape(1, -1, 3).astype(np.float32)


def rotations(angle: Array) -> Array:
    """Return matrices of shape (n, 3, 3) that rotate images counterclockwise by angles in degrees."""
    radians = np.deg2rad(angle)
    matrices = np.tile(np.eye(3), (len(radians), 1, 1))
    matrices[:, 0, 0] = matrices[:, 1, 1] = np.cos(radians)
    matrices[:, 1, 0] = np.sin(radians)
    matrices[:, 0, 1] = -matrices[:, 1, 0]
    return matrices.astype(np.float32)


def moves(schedule: Schedule, size: Iterable[int]) -> Array:
    """Return matrices of shape (steps, batch, 3, 3) that translate and mirror each image."""
    height, width = size
    matrices = np.tile(np.eye(3, dtype=np.float32), (*schedule.flip.shape, 1, 1))
    matrices[..., 0, 0] = np.where(schedule.flip, -1, 1)
    matrices[..., 0, 2] = -schedule.shift[..., 1] * 2 / width
    matrices[..., 1, 2] = -schedule.shift[..., 0] * 2 / height
    return matrices
