"""Distribution change and label noise in the image experiments (sections 3.1 and 3.2 of the paper).

A `Stream` is a sum of changes: `sudden(60) + noisy(40)` rotates the images by another 60 degrees at every epoch and
gives 40% of the batches random labels. `Stream.schedule` turns it into a `Schedule`, which fixes the sample indices,
the rotation angles and the labels of every step. A schedule depends only on the seed, not on the optimizer or the
device. It refers to samples by index, so it can be used with any data set.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from cadam.statistics.intervals import Array

TRUE_LABEL = -1
"""Placeholder in `Schedule.labels` for the true label of the sample."""


@dataclass
class Schedule:
    """The samples, rotations and labels of all steps of a run.

    The first axis of each array is the step, and the second axis, if any, is the position in the batch.
    """

    steps_per_epoch: int
    classes: int
    order: Array
    """Index of each sample, of shape (steps, batch)."""
    angle: Array
    """Rotation angle of all images of a step in degrees, of shape (steps,)."""
    labels: Array
    """Random label, or `TRUE_LABEL`, of shape (steps, batch)."""
    flip: Array
    """Whether each image is mirrored, of shape (steps, batch)."""
    shift: Array
    """Translation of each image in pixels, down and to the right, of shape (steps, batch, 2)."""

    @property
    def epochs(self) -> int:
        """The number of epochs."""
        return len(self.order) // self.steps_per_epoch

    @property
    def step(self) -> Array:
        """Index of each step in the run."""
        return np.arange(len(self.order))

    @property
    def epoch(self) -> Array:
        """Index of the epoch of each step."""
        return self.step // self.steps_per_epoch


class Change(Protocol):
    """A change of the data along a stream."""

    name: ClassVar[str]

    @property
    def strength(self) -> float:
        """The strength of the change. A change of strength 0 has no effect."""

    def apply(self, schedule: Schedule, random: np.random.Generator) -> None:
        """Modify a schedule in place, with random numbers from a generator."""


@dataclass(frozen=True)
class Sudden:
    """Sudden shift: the images are rotated by another `strength` degrees at the start of each epoch after the first."""

    strength: float
    name: ClassVar[str] = "sudden"

    def apply(self, schedule: Schedule, random: np.random.Generator) -> None:
        """Add the rotation of each epoch."""
        schedule.angle += self.strength * schedule.epoch


@dataclass(frozen=True)
class Continuous:
    """Continuous shift: the images are rotated by another `strength` degrees at each step after the first."""

    strength: float
    name: ClassVar[str] = "continuous"

    def apply(self, schedule: Schedule, random: np.random.Generator) -> None:
        """Add the rotation of each step."""
        schedule.angle += self.strength * schedule.step


@dataclass(frozen=True)
class Noisy:
    """Label noise: in each epoch, `strength` percent of the batches, chosen at random, get random labels."""

    strength: float
    name: ClassVar[str] = "noise"

    def apply(self, schedule: Schedule, random: np.random.Generator) -> None:
        """Replace the labels of the chosen batches by random ones."""
        batches = round(self.strength / 100 * schedule.steps_per_epoch)
        for epoch in range(schedule.epochs):
            chosen = epoch * schedule.steps_per_epoch + random.permutation(schedule.steps_per_epoch)[:batches]
            schedule.labels[chosen] = random.integers(schedule.classes, size=(batches, schedule.order.shape[1]))


@dataclass(frozen=True)
class Augmented:
    """Data augmentation: every image is moved by up to `strength` pixels in each direction and mirrored at random."""

    strength: float
    name: ClassVar[str] = "augmented"

    def apply(self, schedule: Schedule, random: np.random.Generator) -> None:
        """Draw a translation and a reflection for each image."""
        reach = int(self.strength)
        schedule.flip ^= random.random(schedule.flip.shape) < 0.5
        schedule.shift += random.integers(-reach, reach + 1, size=schedule.shift.shape).astype(schedule.shift.dtype)


@dataclass(frozen=True)
class Stream:
    """A combination of changes. A stream without changes is called clean."""

    changes: tuple[Change, ...] = ()

    def __add__(self, other: Stream) -> Stream:
        return Stream(self.changes + other.changes)

    def __str__(self) -> str:
        return " + ".join(f"{change.name} {change.strength:g}" for change in self.changes) or "clean"

    def schedule(self, seed: int, samples: int, classes: int, batch: int, epochs: int) -> Schedule:
        """Draw the data of a run.

        The order of the samples and each change have separate random generators, so adding a change does not affect
        the others.

        Args:
            seed: The seed that determines the schedule.
            samples: Number of training samples.
            classes: Number of classes.
            batch: Batch size. An epoch omits the samples that do not fill a whole batch.
            epochs: Number of epochs.

        Raises:
            ValueError: If there are fewer samples than a batch needs.
        """
        steps = samples // batch
        if steps == 0:
            raise ValueError(f"a batch of {batch} needs more samples than there are ({samples})")
        random = np.random.default_rng([seed, 0])
        order = [random.permutation(samples)[: steps * batch].reshape(steps, batch) for _ in range(epochs)]
        shape = (epochs * steps, batch)
        schedule = Schedule(
            steps,
            classes,
            np.concatenate(order).astype(np.int64),
            np.zeros(shape[0]),
            np.full(shape, TRUE_LABEL, np.int64),
            np.zeros(shape, bool),
            np.zeros((*shape, 2), np.int8),
        )
        for number, change in enumerate(self.changes):
            before = sum(other.name == change.name for other in self.changes[:number])
            change.apply(schedule, np.random.default_rng([seed, 1 + before, *change.name.encode()]))
        return schedule


CLEAN = Stream()


def sudden(degrees: float) -> Stream:
    """Return a stream with sudden shift: a rotation by `degrees` at each epoch."""
    return _of(Sudden(degrees))


def continuous(degrees: float) -> Stream:
    """Return a stream with continuous shift: a rotation by `degrees` at each step."""
    return _of(Continuous(degrees))


def noisy(percent: float) -> Stream:
    """Return a stream with label noise in `percent` of the batches.

    Raises:
        ValueError: If the percentage is not between 0 and 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"noise must lie between 0 and 100 percent, got {percent}")
    return _of(Noisy(percent))


def augmented(pixels: float = 4) -> Stream:
    """Return a stream with translations by up to `pixels` and random mirroring."""
    return _of(Augmented(pixels))


def _of(change: Change) -> Stream:
    """Return a stream with one change, or a clean stream if the strength is 0."""
    return Stream((change,)) if change.strength else CLEAN


def parse(text: str) -> Stream:
    """Parse the text form of a stream, such as "sudden 60 + noise 40", which `str(stream)` returns.

    Raises:
        ValueError: If a part of the text is not the name of a change and its strength.
    """
    makers: dict[str, Callable[[float], Stream]]
    makers = {"sudden": sudden, "continuous": continuous, "noise": noisy, "augmented": augmented}
    stream = CLEAN
    for part in () if text == "clean" else text.split(" + "):
        match = re.fullmatch(r"(\w+) ([\d.]+)", part)
        if match is None or match[1] not in makers:
            raise ValueError(f"cannot parse the change {part!r}: expected one of {', '.join(makers)} and a number")
        stream += makers[match[1]](float(match[2]))
    return stream
