"""One run of an A/B: one optimizer on one stream, by prequential evaluation.

Each event is predicted first and learned from afterwards. A run meets the whole stream. The first part of the stream
serves to choose learning rates, under other seeds; for the runs that are compared it is what the model has learned
before it is measured. The rest is measured as a whole, by user and by block of time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from cadam.online.data import simulation
from cadam.online.data.events import Array
from cadam.online.data.limit import LimitedSource
from cadam.online.data.sources import Source
from cadam.online.learner import Learner, Loss
from cadam.online.metrics.gauc import user_auc
from cadam.online.metrics.stream import as_clicks, measure
from cadam.online.models.model_file import LOG_LOSS

from . import control_arms
from .ab_evidence import CHANCE_METRIC
from .results import Outcome, RunSpec

METRICS = ("gauc_by_impressions", "gauc_by_user", "auc", "log_loss", "normalized_entropy", "calibration")
BLOCK_METRICS = ("gauc_by_impressions", "auc", "log_loss")


class Recorder:
    """A metric of the learner that stores every labeled prediction."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Array]] = []

    def update(self, scores: Array, labels: Array, users: Array | None, time: Array) -> None:
        """Store the predictions of labeled events."""
        user_column = np.zeros(len(scores), dtype=np.int64) if users is None else users
        self.parts.append({"scores": scores, "labels": as_clicks(labels, "GAUC and AUC"), "users": user_column})

    def results(self) -> Mapping[str, float]:
        """Return the number of stored predictions."""
        return {"recorded": float(sum(len(part["scores"]) for part in self.parts))}

    def state_dict(self) -> dict[str, Any]:
        """Return the stored predictions."""
        return {"parts": list(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.parts = list(state["parts"])

    def column(self, name: str) -> Array:
        """Return one column of all stored predictions."""
        return np.concatenate([part[name] for part in self.parts])


@dataclass(frozen=True)
class StreamParts:
    """The division of a stream into a tuning part and blocks of equal length."""

    events: int
    tuning: int
    """The number of events in the tuning part, in whole batches."""
    start: int
    """The index of the first measured event."""
    block: int
    """The number of events in a block."""

    @classmethod
    def of(cls, events: int, settings: Mapping[str, Any]) -> StreamParts:
        """Divide a stream by the settings of a run.

        Raises:
            ValueError: If there are too few events for the blocks.
        """
        batch_size, blocks = settings["batch_size"], settings["blocks"]
        tuning = int(events * settings["tuning_share"]) // batch_size * batch_size
        block = (events - tuning) // blocks
        if block < 2 or tuning < batch_size:
            raise ValueError(
                f"{events} events are too few for {blocks} blocks after a tuning part of "
                f"{settings['tuning_share']:.0%} in batches of {batch_size}"
            )
        return cls(events, tuning, events - block * blocks, block)


@dataclass(frozen=True)
class Task:
    """The stream and the model of a run."""

    source: Source
    events: int
    categories: Mapping[str, int]
    """The number of values of each categorical feature."""
    build: Callable[[], nn.Module]
    """Builds the model with new initial weights."""
    loss: Loss = LOG_LOSS


def simulate(source: Source, categories: Mapping[str, int], settings: Mapping[str, Any], parts: StreamParts) -> Source:
    """Apply the simulated changes that the settings of a run name.

    The changes have one fixed seed, so all arms meet the same events under all seeds.
    """
    if change := settings.get("change"):
        times = [parts.start + block * parts.block for block in change["blocks"]]
        source = simulation.SuddenChange(source, change["feature"], categories[change["feature"]], times)
    if noise := settings.get("noise"):
        source = simulation.LabelNoise(source, noise)
    if delay := settings.get("delay"):
        source = simulation.LabelDelay(source, delay)
    return source


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all random generators that a model may use, and restore their states afterwards."""
    states = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])


def gauc_by_chance(labels: Array, users: Array) -> float:
    """Return how far from 0.5 random scores put the GAUC by impressions of these events in 19 of 20 cases.

    The AUC of random scores over n events of a user with p positives has the variance (n + 1) / (12 p (n - p)), that of
    the Mann-Whitney statistic. It is large if most users have one kind of label, and nan if no user has both kinds.
    """
    _, user_index = np.unique(users, return_inverse=True)
    events, positives = np.bincount(user_index), np.bincount(user_index, labels)
    has_both = (positives > 0) & (positives < events)
    n, p = events[has_both], positives[has_both]
    if len(n) == 0:
        return math.nan
    return float(1.96 * np.sqrt((n**2 * (n + 1) / (12 * p * (n - p))).sum()) / n.sum())


def run_arm(spec: RunSpec, task: Task) -> Outcome:
    """Run one optimizer along the stream, or along its tuning part, and measure its predictions.

    Args:
        spec: The spec of the run.
        task: The stream and the model.

    Returns:
        The metrics of the measured part and their curves over blocks. All are nan if the run diverged.
    """
    settings = spec.settings
    parts = StreamParts.of(task.events, settings)
    recorder = Recorder()
    source = simulate(task.source, task.categories, settings, parts)
    events = parts.tuning if settings["tuning"] else parts.events
    is_per_event = settings["batch_size"] == 1
    try:
        with seeded(spec.seed):
            model = task.build()
            optimizer = control_arms.build(spec.optimizer, model, spec.lr, spec.seed)
            learner = Learner(model, optimizer, task.loss, per_event=is_per_event, metrics=[recorder])
            learner.run(LimitedSource(source, events) if is_per_event else source, events=events)
            learner.finish()
    except FloatingPointError:  # the run diverged
        nothing = np.full(settings["blocks"], math.nan)
        return Outcome(dict.fromkeys((*METRICS, "alignment"), math.nan), dict.fromkeys(BLOCK_METRICS, nothing))
    scores, labels, users = (recorder.column(name) for name in ("scores", "labels", "users"))
    if settings["tuning"]:
        # The second half of the part shows better than the first how the optimizer does later. The last batch may
        # extend beyond the part.
        half = slice(parts.tuning // 2, parts.tuning)
        return Outcome(measure(scores[half], labels[half], users[half]))
    start = StreamParts.of(len(scores), settings).start
    measured = scores[start:], labels[start:], users[start:]
    by_user = user_auc(*measured)
    metrics = {**measure(*measured), "alignment": control_arms.agreement(optimizer), "events": len(measured[0])}
    metrics[CHANCE_METRIC] = gauc_by_chance(*measured[1:])
    blocks = list(zip(*(column.reshape(settings["blocks"], -1) for column in measured), strict=True))
    by_block = [measure(*block) for block in blocks]
    curves = {name: np.array([block[name] for block in by_block]) for name in BLOCK_METRICS}
    curves[CHANCE_METRIC] = np.array([gauc_by_chance(*block[1:]) for block in blocks])
    return Outcome(metrics, {**curves, "user_auc": by_user.auc, "user_impressions": by_user.impressions})
