"""From a spec of the click study to its outcome."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from cadam.ab.results import Outcome, RunSpec
from cadam.statistics.intervals import Array

from ..harness.experiment import OWN_DATA, Finished
from .data import Clicks
from .fields import VOCABULARY
from .generator import Generated
from .train import Record, Task, read_stream, read_table

if TYPE_CHECKING:
    from .criteo_dataset import Criteo

POINTS = 50
"""Of a kept curve."""
WINDOWS = 24
"""Of a stream."""


READING = 1
"""Raise it when `criteo` or `split` gives other rows."""


def compute(spec: RunSpec) -> Outcome:
    """One run over the data that the spec names."""
    settings = spec.settings
    if on_gpu(spec) and not torch.cuda.is_available():
        raise RuntimeError(f"{spec} needs a CUDA device, and torch finds none; --quick runs on the CPU")
    clicks, device = clicks_of(spec), torch.device(settings["device"])
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
        return outcome(read_stream(task, clicks, device, WINDOWS))
    return outcome(read_table(task, clicks, device))


def compute_many(specs: Iterator[RunSpec]) -> Iterator[Finished]:
    """Runs on a GPU, one after the other: each fills it. They share the data that lies there."""
    for spec in specs:
        start = time.perf_counter()
        yield Finished(spec, compute(spec), time.perf_counter() - start)


def on_gpu(spec: RunSpec) -> bool:
    return bool(spec.settings["device"] == "cuda")


# Data ----------------------------------------------------------------------------------------------------------


def generated(rows: int, most_ids: int | None, drift: str) -> Generated:
    """Generated clicks, with at most so many ids in a field."""
    vocabulary = VOCABULARY if most_ids is None else tuple(min(size, most_ids) for size in VOCABULARY)
    return Generated(rows, vocabulary, drift=drift)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def own(path: str, rows: int | None) -> Criteo:
    """Criteo's file, or its first lines; read into numbers on first use."""
    from .command import Progress
    from .criteo_dataset import Criteo

    return Criteo(path, rows, tell=Progress())


def read_by(criteo: Criteo) -> str:
    """By what Criteo's file was read, and the version of what reads that. Generated clicks do not depend on it."""
    return f"{criteo.manifest.made_by} {READING}"


def clicks_of(spec: RunSpec) -> Clicks:
    """The data of a spec, if it is still what the spec says it is."""
    settings = spec.settings
    clicks: Clicks
    if settings["source"] == "file":
        path = os.environ.get(OWN_DATA)
        if path is None:
            raise ValueError(f"the spec is about {spec.data!r}: set {OWN_DATA} to where that is, or use --data")
        clicks = own(path, settings["rows"])
    else:
        clicks = generated(settings["rows"], settings["most_ids"], settings["drift"])
    if clicks.description != spec.data:
        raise ValueError(f"the spec is about {spec.data!r}, and what is there is {clicks.description!r}")
    return clicks


# Outcomes ------------------------------------------------------------------------------------------------------


def outcome(record: Record) -> Outcome:
    """AUC in percent. A run that diverged (non-finite loss) has none."""
    fine = bool(np.isfinite(record.loss).all())
    metrics = {
        "loss": float(record.loss.mean()),
        "largest_norm": float(record.norm.max()),
        "alignment": record.dense.over_touched,
        "alignment_of_tables": record.tables.over_touched,
    }
    for part, scores in record.scores.items():
        metrics[f"{part}_auc"] = 100 * scores.auc if fine else math.nan
        metrics[f"{part}_log_loss"] = scores.log_loss if fine else math.nan
    curves = {"loss": thinned(record.loss, POINTS).astype(np.float32)}
    if record.windows is not None:
        curves["windows"] = (100 * record.windows).astype(np.float32)
    return Outcome(metrics, curves)


def thinned(curve: Array, points: int) -> Array:
    """Means of so many parts of a curve, about equally long; fewer where it is shorter."""
    return np.array([part.mean() for part in np.array_split(curve, min(points, len(curve)))])
