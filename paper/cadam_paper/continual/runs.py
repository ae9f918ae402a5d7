"""Computation of the runs of the continual-learning study: from run specs to their outcomes."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..harness.experiment import Finished
from ..harness.results import Outcome, RunSpec

if TYPE_CHECKING:
    from .train import Record, Task


def compute(spec: RunSpec) -> Outcome:
    """Compute one run."""
    return next(compute_many(iter([spec]))).outcome


def compute_many(specs: Iterator[RunSpec]) -> Iterator[Finished]:
    """Compute all runs of an arm as one program, and yield them as soon as it ends. Their cost is divided equally.

    Raises:
        RuntimeError: If a run needs a GPU and JAX finds none.
    """
    from . import train

    groups: dict[Task, list[RunSpec]] = defaultdict(list)
    for spec in specs:
        groups[_task(spec)].append(spec)
    for task, of_task in groups.items():
        start = time.perf_counter()
        records = train.compute(task, [train.Run(spec.condition, spec.lr, spec.seed) for spec in of_task])
        seconds = (time.perf_counter() - start) / len(of_task)
        for spec, record in zip(of_task, records, strict=True):
            yield Finished(spec, outcome(record), seconds)


def shares_program(spec: RunSpec) -> bool:
    """Return True: every run is computed together with the other runs of its arm."""
    return True


def _task(spec: RunSpec) -> Task:
    import jax

    from .train import Task

    settings = dict(spec.settings)
    if settings.pop("device") == "cuda" and jax.default_backend() != "gpu":
        raise RuntimeError(f"{spec} needs a CUDA device, and JAX does not find one; --quick runs on the CPU")
    return Task(spec.optimizer, spec.data, **settings)


def outcome(record: Record) -> Outcome:
    """Convert the record of a run to metrics and curves. Accuracies are in percent, and NaN if the loss diverged.

    The metrics are the mean accuracy over all tasks, and the means over the first and over the last tenth of them.
    """
    tenth = max(1, len(record.accuracy) // 10)
    accuracy = 100 * record.accuracy.astype(float)
    diverged = not np.isfinite(record.loss).all()
    metrics = {"accuracy": accuracy, "first_accuracy": accuracy[:tenth], "last_accuracy": accuracy[-tenth:]}
    curves = {"accuracy": accuracy, "inactive": record.inactive, "loss": record.loss}
    return Outcome(
        {name: math.nan if diverged else float(values.mean()) for name, values in metrics.items()},
        {name: values.astype(np.float32) for name, values in curves.items()},
    )
