"""Computation of the runs of the image experiments: from a run spec to its outcome."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cadam.statistics.intervals import Array

from ..harness.cuda_runs import compute_specs, device_of
from ..harness.experiment import Finished
from ..harness.results import Outcome, RunSpec
from . import data, streams
from .train import Record, Run, Task

LANES = 6
"""Number of runs that share one GPU."""
RECOVERED = 0.95
"""A run has recovered from a shift when its accuracy is back at this share of the accuracy before the shift."""


def compute(spec: RunSpec) -> Outcome:
    """Compute one run."""
    run = _run(spec)
    while run.advance():
        pass
    return _outcome(spec, run)


def compute_many(specs: Iterator[RunSpec]) -> Iterator[Finished]:
    """Compute several runs concurrently on one GPU, and yield each as soon as it is finished."""
    return compute_specs(specs, _run, _outcome, LANES)


def _outcome(spec: RunSpec, run: Run) -> Outcome:
    return outcome(spec, run.record(), run.schedule.steps_per_epoch)


def _run(spec: RunSpec) -> Run:
    settings = spec.settings
    task = Task(
        spec.model,
        spec.optimizer,
        spec.lr,
        spec.seed,
        streams.parse(spec.condition),
        settings["epochs"],
        settings["batch"],
        settings["weight_decay"],
        settings["precision"],
        settings["compiled"],
    )
    return Run(task, data.load(spec.data, device_of(spec)))


def outcome(spec: RunSpec, record: Record, steps_per_epoch: int) -> Outcome:
    """Convert the record of a run to metrics and curves.

    Accuracies are in percent. They are NaN if the loss is not finite at some step.
    """
    diverged = not np.isfinite(record.loss).all()
    test = 100 * record.test_accuracy
    window = spec.settings["window"]
    recovery = recovery_steps(record.accuracy, steps_per_epoch)
    return Outcome(
        {
            "accuracy": math.nan if diverged else float(test.mean()),
            "last_accuracy": math.nan if diverged else float(test[-1]),
            "loss": float(record.loss.mean()),
            "alignment": float(record.alignment.mean()),
            "recovery": math.nan if diverged else float(recovery.mean()),
        },
        {
            "test_accuracy": test.astype(np.float32),
            "recovery": recovery,
            "loss": average_windows(record.loss, window).astype(np.float16),
            "accuracy": average_windows(100 * record.accuracy, window).astype(np.float16),
            "alignment": average_windows(record.alignment, window).astype(np.float16),
        },
    )


def average_windows(curve: Array, window: int) -> Array:
    """Average a curve over consecutive windows of steps. An incomplete last window is dropped."""
    length = len(curve) // window * window
    return np.asarray(curve[:length].reshape(-1, window).mean(1))


def recovery_steps(accuracy: Array, steps_per_epoch: int) -> Array:
    """Count the steps after the start of each epoch until the training accuracy has recovered from the shift.

    The accuracy before the shift is the mean over the last eighth of the previous epoch. It has recovered at the first
    step at which the mean over the following twentieth of an epoch is at least 95% of it. If this never happens, the
    result is the number of steps of the epoch.
    """
    before, window = max(1, steps_per_epoch // 8), max(1, steps_per_epoch // 20)
    recoveries = []
    for start in range(steps_per_epoch, len(accuracy), steps_per_epoch):
        level = RECOVERED * accuracy[start - before : start].mean()
        epoch = accuracy[start : start + steps_per_epoch]
        smooth = np.convolve(epoch, np.full(window, 1 / window), mode="valid")
        recovered = np.flatnonzero(smooth >= level - 1e-9)
        recoveries.append(recovered[0] if len(recovered) else steps_per_epoch)
    return np.array(recoveries, np.int32)
