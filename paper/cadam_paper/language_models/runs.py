"""Computation of the runs of the language-model study: from a run spec to its outcome."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np

from ..harness.cuda_runs import compute_specs, device_of
from ..harness.experiment import Finished
from ..harness.results import Outcome, RunSpec
from ..images.runs import average_windows
from . import corpus
from .train import Record, Run, Task

LANES = {"GPT 3M": 4}
"""Number of runs that share one GPU, by model; 1 if absent. Only the smallest model leaves most of a GPU idle."""
POINTS = 200
"""Number of points of a stored loss curve."""


def compute(spec: RunSpec) -> Outcome:
    """Compute one run."""
    run = _run(spec)
    while run.advance():
        pass
    return _outcome(spec, run)


def compute_many(specs: Iterator[RunSpec]) -> Iterator[Finished]:
    """Compute several runs concurrently on one GPU, and yield each as soon as it is finished.

    The model of the first run decides how many runs proceed at once.
    """
    first = next(specs, None)
    if first is None:
        return iter(())
    return compute_specs(chain([first], specs), _run, _outcome, LANES.get(first.model, 1))


def _outcome(spec: RunSpec, run: Run) -> Outcome:
    return outcome(run.record())


def _run(spec: RunSpec) -> Run:
    settings = spec.settings
    task = Task(
        model=spec.model,
        optimizer=spec.optimizer,
        lr=spec.lr,
        seed=spec.seed,
        condition=spec.condition,
        schedule=settings["schedule"],
        steps=settings["steps"],
        batch=settings["batch"],
        context=settings["context"],
        bfloat16=settings["bfloat16"],
        compiled=settings["compiled"],
    )
    return Run(task, corpus.load(spec.data), device_of(spec))


def outcome(record: Record) -> Outcome:
    """Convert the record of a run to metrics and curves. All are in bits per byte, and NaN if the loss diverged.

    The metrics are the mean loss over the pass (`loss`), the mean over its last twentieth (`last_loss`), and the mean
    over domains of the loss on held-out text (`held_out`).
    """
    diverged = not np.isfinite(record.loss).all()
    steps = len(record.loss)
    last = record.loss[-max(1, steps // 20) :]
    return Outcome(
        {
            "loss": math.nan if diverged else float(record.loss.mean()),
            "last_loss": math.nan if diverged else float(last.mean()),
            "held_out": math.nan if diverged else float(record.held_out.mean()),
        },
        {
            "loss": average_windows(record.loss, max(1, steps // POINTS)).astype(np.float32),
            "held_out": record.held_out.astype(np.float32),
        },
    )
