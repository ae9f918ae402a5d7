"""Computation of the runs of the CTR experiments: from a run spec to its outcome."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cadam.statistics.intervals import Array

from ..harness.cuda_runs import device_of
from ..harness.experiment import OWN_DATA, Finished
from ..harness.results import Outcome, RunSpec
from .data import Clicks
from .fields import VOCABULARY
from .generator import Generated
from .train import Record, Task, train_epoch, train_stream

if TYPE_CHECKING:
    from .criteo_dataset import Criteo

POINTS = 50
"""Number of points of a stored curve."""
WINDOWS = 24
"""Number of windows of a stream whose AUC is stored."""


READING = 1
"""Version of the code that reads the preprocessed rows. Increase it when `criteo_dataset` or `split` changes them."""


def compute(spec: RunSpec) -> Outcome:
    """Compute one run."""
    settings = spec.settings
    device, clicks = device_of(spec), clicks_of(spec)
    task = Task(
        spec.model,
        spec.optimizer,
        spec.lr,
        spec.seed,
        settings["batch"],
        settings["noise"],
        settings["width"],
        settings["hidden"],
        settings["max_norm"],
        settings["table_l2"],
        settings["precision"],
    )
    if settings["reading"] == "stream":
        return outcome(train_stream(task, clicks, device, WINDOWS))
    return outcome(train_epoch(task, clicks, device))


def compute_many(specs: Iterator[RunSpec]) -> Iterator[Finished]:
    """Compute runs on one GPU in sequence, because a single run uses all of it. They share the data on the GPU."""
    for spec in specs:
        start = time.perf_counter()
        yield Finished(spec, compute(spec), time.perf_counter() - start)


# Data ----------------------------------------------------------------------------------------------------------


def generated(rows: int, max_ids: int | None, drift: str) -> Generated:
    """Return generated clicks with at most `max_ids` ids per field."""
    vocabulary = VOCABULARY if max_ids is None else tuple(min(size, max_ids) for size in VOCABULARY)
    return Generated(rows, vocabulary, drift=drift)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def load_criteo(path: str, rows: int | None) -> Criteo:
    """Load the user's Criteo file, or its first lines, which are preprocessed on first use."""
    from .command import Progress
    from .criteo_dataset import Criteo

    return Criteo(path, rows, report=Progress())


def read_by(criteo: Criteo) -> str:
    """Return the versions of the code that preprocessed and that reads the Criteo file. It is part of the run spec."""
    return f"{criteo.manifest.made_by} {READING}"


def clicks_of(spec: RunSpec) -> Clicks:
    """Load the data of a run spec.

    Raises:
        ValueError: If the data is not available, or differs from the description in the run spec.
    """
    settings = spec.settings
    clicks: Clicks
    if settings["source"] == "file":
        path = os.environ.get(OWN_DATA)
        if path is None:
            raise ValueError(f"the run needs {spec.data!r}: set {OWN_DATA} to its path, or use --data")
        clicks = load_criteo(path, settings["rows"])
    else:
        clicks = generated(settings["rows"], settings["most_ids"], settings["drift"])
    if clicks.description != spec.data:
        raise ValueError(f"the run needs {spec.data!r}, but the data is {clicks.description!r}")
    return clicks


# Outcomes ------------------------------------------------------------------------------------------------------


def outcome(record: Record) -> Outcome:
    """Convert the record of a run to metrics and curves.

    The AUC is in percent. AUC and log loss are NaN if the training loss is not finite at some step.
    """
    finite = bool(np.isfinite(record.loss).all())
    metrics = {
        "loss": float(record.loss.mean()),
        "largest_norm": float(record.norm.max()),
        "alignment": record.dense.over_touched,
        "alignment_of_tables": record.tables.over_touched,
    }
    for part, scores in record.scores.items():
        metrics[f"{part}_auc"] = 100 * scores.auc if finite else math.nan
        metrics[f"{part}_log_loss"] = scores.log_loss if finite else math.nan
    curves = {"loss": thin(record.loss, POINTS).astype(np.float32)}
    if record.windows is not None:
        curves["windows"] = (100 * record.windows).astype(np.float32)
    return Outcome(metrics, curves)


def thin(curve: Array, points: int) -> Array:
    """Average a curve over `points` parts of about equal length, or fewer if the curve is shorter."""
    return np.array([part.mean() for part in np.array_split(curve, min(points, len(curve)))])
