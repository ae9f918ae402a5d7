"""One arm of an A/B on one stream: predict, then learn, and what its predictions were worth.

A run meets the whole stream. Its first part serves to choose learning rates, on other seeds, and is then what a model
has learnt before it is measured; only the rest is measured, as a whole, user by user and block of time by block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from cadam.ab.results import Outcome, RunSpec

from ..online.data import simulation
from ..online.data.events import Array, Batch, Events, Labels
from ..online.data.limit import LimitedSource
from ..online.data.schema import Schema
from ..online.data.sources import Source, open_source
from ..online.learner import Learner, Loss
from ..online.metrics.stream import clicks, measure, user_auc
from ..online.models.model_file import LOG_LOSS, OptimizerSpec
from ..online.per_event import CHUNK
from ..online.run_config import builder
from .study import BY_CHANCE

METRICS = ("gauc_by_impressions", "gauc_by_user", "auc", "log_loss", "normalised_entropy", "calibration")
BY_BLOCK = ("gauc_by_impressions", "auc", "log_loss")


class Recorder:
    """A metric that keeps every labelled prediction."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Array]] = []

    def update(self, scores: Array, labels: Array, users: Array | None, time: Array) -> None:
        whose = np.zeros(len(scores), dtype=np.int64) if users is None else users
        self.parts.append({"scores": scores, "labels": clicks(labels, "GAUC and AUC"), "users": whose})

    def results(self) -> Mapping[str, float]:
        return {"recorded": float(sum(len(part["scores"]) for part in self.parts))}

    def state_dict(self) -> dict[str, Any]:
        return {"parts": list(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.parts = list(state["parts"])

    def column(self, name: str) -> Array:
        return np.concatenate([part[name] for part in self.parts])


@dataclass(frozen=True)
class Parts:
    """Which events are for tuning, and where the equally long blocks of the measured part begin."""

    events: int
    tuning: int
    start: int
    block: int

    @classmethod
    def of(cls, events: int, settings: Mapping[str, Any]) -> Parts:
        size = settings["batch_size"]
        tuning = int(events * settings["tuning_share"]) // size * size
        block = (events - tuning) // settings["blocks"]
        if block < 2 or tuning < size:
            raise ValueError(
                f"{events} events are too few for {settings['blocks']} blocks after a tuning part of "
                f"{settings['tuning_share']:.0%} in batches of {size}"
            )
        return cls(events, tuning, events - block * settings["blocks"], block)


class Usable(Source):
    """A source without what cannot be used, which is said once, before all runs, and not by each of them."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Events | Labels | Batch | None]:
        for batch in self.source:
            yield replace(batch, rejected=[]) if isinstance(batch, Batch) else batch

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)


@dataclass(frozen=True)
class Subject:
    """What a run is about: the stream from its start, how many events it has, and a new model for it."""

    source: Source
    events: int
    fields: Mapping[str, int]
    """Categorical features, with how many values each has."""
    build: Callable[[], nn.Module]
    loss: Loss = LOG_LOSS


def subject(spec: RunSpec) -> Subject:
    """A stream of the user's, read by a schema, with a model of theirs."""
    settings = spec.settings
    schema = Schema(**settings["schema"])
    fields = {name: kind.size for name, kind in schema.kinds.items() if kind.size}
    size = CHUNK if settings["batch_size"] == 1 and schema.id is None else settings["batch_size"]
    opened = open_source(spec.data, schema, batch_size=size, patience=None)
    build, loss = builder(spec.model, schema, settings)
    return Subject(Usable(opened), settings["events"], fields, build, loss)


def planted(source: Source, fields: Mapping[str, int], settings: Mapping[str, Any], parts: Parts) -> Source:
    """The stream with what is done to it. That has one seed: all arms, under all seeds, meet the same events."""
    if change := settings.get("change"):
        change_points = [parts.start + block * parts.block for block in change["blocks"]]
        source = simulation.SuddenChange(source, change["feature"], fields[change["feature"]], change_points)
    if noise := settings.get("noise"):
        source = simulation.LabelNoise(source, noise)
    if delay := settings.get("delay"):
        source = simulation.LabelDelay(source, delay)
    return source


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All that a model may draw from, at its start and in training, begins at a seed; as it was before, afterwards."""
    before = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(before[0])
        random.setstate(before[1])


def by_chance(labels: Array, users: Array) -> float:
    """How far from 0.5 random scores put the GAUC by impressions of these events, 19 times in 20.

    With p clicks among n events of a user, the AUC of random scores has the variance (n + 1) / (12 p (n - p)). So it
    reaches far where users mostly have one kind of label; nan where nobody has both.
    """
    _, code = np.unique(users, return_inverse=True)
    events, clicked = np.bincount(code), np.bincount(code, labels)
    both = (clicked > 0) & (clicked < events)
    n, p = events[both], clicked[both]
    return float(1.96 * np.sqrt((n**2 * (n + 1) / (12 * p * (n - p))).sum()) / n.sum()) if len(n) else math.nan


def compute(spec: RunSpec, given: Subject | None = None) -> Outcome:
    """Run an arm along the stream that the spec names, unless another is given; or along its tuning part."""
    settings = spec.settings
    given = given or subject(spec)
    parts = Parts.of(given.events, settings)
    recorder = Recorder()
    source = planted(given.source, given.fields, settings, parts)
    try:
        with seeded(spec.seed):
            model = given.build()
            optimizer = OptimizerSpec.of(spec.optimizer).build(model, spec.lr)
            one_by_one, events = settings["batch_size"] == 1, parts.tuning if settings["tuning"] else parts.events
            learner = Learner(model, optimizer, given.loss, one_by_one=one_by_one, metrics=[recorder])
            learner.run(LimitedSource(source, events) if one_by_one else source, events=events)
            learner.finish()
    except FloatingPointError:  # it diverged
        nothing = np.full(settings["blocks"], math.nan)
        return Outcome(dict.fromkeys((*METRICS, "alignment"), math.nan), dict.fromkeys(BY_BLOCK, nothing))
    scores, labels, users = (recorder.column(name) for name in ("scores", "labels", "users"))
    if settings["tuning"]:
        # How it learns from scratch is not how it will do later. The last batch may reach beyond the part.
        half = slice(parts.tuning // 2, parts.tuning)
        return Outcome(measure(scores[half], labels[half], users[half]))
    start = Parts.of(len(scores), settings).start
    measured = scores[start:], labels[start:], users[start:]
    within = user_auc(*measured)
    metrics = {**measure(*measured), "alignment": optimizer.alignment().total.over_touched, "events": len(measured[0])}
    metrics[BY_CHANCE] = by_chance(*measured[1:])
    columns = list(zip(*(column.reshape(settings["blocks"], -1) for column in measured), strict=True))
    blocks = [measure(*block) for block in columns]
    curves = {name: np.array([block[name] for block in blocks]) for name in BY_BLOCK}
    curves[BY_CHANCE] = np.array([by_chance(labels, users) for _, labels, users in columns])
    return Outcome(metrics, {**curves, "user_auc": within.auc, "user_impressions": within.impressions})
