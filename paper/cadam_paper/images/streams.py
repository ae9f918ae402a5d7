"""What a run meets, step by step: which samples, how far turned, with which labels.

A stream is a sum of changes: `sudden(60) + noisy(40)` turns the images by 60 degrees at every epoch and gives 40% of
the batches random labels. Made into a schedule, it says all that is random about the data of a run. A schedule follows
from the seed alone, never from the optimizer or the device, and knows samples by number only: it serves any data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from cadam.statistics.intervals import Array

OWN = -1
"""In place of a label: the sample's own counts."""


@dataclass
class Schedule:
    """All steps of a run. Axes: step, and place in the batch."""

    steps_per_epoch: int
    classes: int
    order: Array
    """The number of each sample (steps, batch)."""
    angle: Array
    """How far all images of a step are turned, in degrees (steps,)."""
    labels: Array
    """The label that is shown, or OWN (steps, batch)."""
    flip: Array
    """Which images are mirrored (steps, batch)."""
    shift: Array
    """By how many pixels, down and to the right, images are moved (steps, batch, 2)."""

    @property
    def epochs(self) -> int:
        return len(self.order) // self.steps_per_epoch

    @property
    def step(self) -> Array:
        """The number of each step in the run."""
        return np.arange(len(self.order))

    @property
    def epoch(self) -> Array:
        """The number of each step's epoch."""
        return self.step // self.steps_per_epoch


class Change(Protocol):
    """Something that happens to a stream."""

    name: ClassVar[str]

    @property
    def strength(self) -> float: ...
    def apply(self, schedule: Schedule, random: np.random.Generator) -> None: ...


@dataclass(frozen=True)
class Sudden:
    """At the start of each epoch but the first, the images turn by so many degrees more."""

    strength: float
    name: ClassVar[str] = "sudden"

    def apply(self, schedule: Schedule, random: np.random.Generator) -> None:
        schedule.angle += self.strength * schedule.epoch


@dataclass(frozen=True)
class Continuous:
    """At each step but the first, the images turn by so many degrees more."""

    strength: float
    name: ClassVar[str] = "continuous"

    def apply(self, schedule: Schedule, random: np.random.Generator) -> None:
        schedule.angle += self.strength * schedule.step


@dataclass(frozen=True)
class Noisy:
    """In each epoch, so many percent of the batches, chosen anew, get labels at random."""

    strength: float
    name: ClassVar[str] = "noise"

    def apply(self, schedule: Schedule, random: np.random.Generator) -> None:
        batches = round(self.strength / 100 * schedule.steps_per_epoch)
        for epoch in range(schedule.epochs):
            chosen = epoch * schedule.steps_per_epoch + random.permutation(schedule.steps_per_epoch)[:batches]
            schedule.labels[chosen] = random.integers(schedule.classes, size=(batches, schedule.order.shape[1]))


@dataclass(frozen=True)
class Augmented:
    """Every image is moved by up to so many pixels each way and mirrored at random."""

    strength: float
    name: ClassVar[str] = "augmented"

    def apply(self, schedule: Schedule, random: np.random.Generator) -> None:
        reach = int(self.strength)
        schedule.flip ^= random.random(schedule.flip.shape) < 0.5
        schedule.shift += random.integers(-reach, reach + 1, size=schedule.shift.shape).astype(schedule.shift.dtype)


@dataclass(frozen=True)
class Stream:
    """Changes that happen together; none of them if it is clean."""

    changes: tuple[Change, ...] = ()

    def __add__(self, other: Stream) -> Stream:
        return Stream(self.changes + other.changes)

    def __str__(self) -> str:
        return " + ".join(f"{change.name} {change.strength:g}" for change in self.changes) or "clean"

    def schedule(self, seed: int, samples: int, classes: int, batch: int, epochs: int) -> Schedule:
        """All that is random about a run. Samples left over by the last whole batch of an epoch are not shown in it.

        Order and changes draw from generators of their own: none feels what else happens.
        """
        steps = samples // batch
        if steps == 0:
            raise ValueError(f"a batch of {batch} is more than there are samples: {samples}")
        random = np.random.default_rng([seed, 0])
        order = [random.permutation(samples)[: steps * batch].reshape(steps, batch) for _ in range(epochs)]
        shape = (epochs * steps, batch)
        schedule = Schedule(
            steps,
            classes,
            np.concatenate(order).astype(np.int64),
            np.zeros(shape[0]),
            np.full(shape, OWN, np.int64),
            np.zeros(shape, bool),
            np.zeros((*shape, 2), np.int8),
        )
        for number, change in enumerate(self.changes):
            before = sum(other.name == change.name for other in self.changes[:number])
            change.apply(schedule, np.random.default_rng([seed, 1 + before, *change.name.encode()]))
        return schedule


CLEAN = Stream()


def sudden(degrees: float) -> Stream:
    return _of(Sudden(degrees))


def continuous(degrees: float) -> Stream:
    return _of(Continuous(degrees))


def noisy(percent: float) -> Stream:
    if not 0 <= percent <= 100:
        raise ValueError(f"noise must lie between 0 and 100 percent, got {percent}")
    return _of(Noisy(percent))


def augmented(pixels: float = 4) -> Stream:
    return _of(Augmented(pixels))


def _of(change: Change) -> Stream:
    """A change as a stream; one of strength 0 is none."""
    return Stream((change,)) if change.strength else CLEAN


def parse(text: str) -> Stream:
    """The stream that a text stands for, as `str` writes it: "sudden 60 + noise 40"."""
    makers: dict[str, Callable[[float], Stream]]
    makers = {"sudden": sudden, "continuous": continuous, "noise": noisy, "augmented": augmented}
    stream = CLEAN
    for part in () if text == "clean" else text.split(" + "):
        found = re.fullmatch(r"(\w+) ([\d.]+)", part)
        if found is None or found[1] not in makers:
            known = ", ".join(makers)
            raise ValueError(f"no stream is written {part!r}: a change and its strength; there are {known}")
        stream += makers[found[1]](float(found[2]))
    return stream
