"""Streams, models and learners for the tests of online learning."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cadam import CAdam
from cadam.online import CheckpointOptions, Events, LabelOptions, Learner, LogOptions, Schema, Source
from cadam.online.training_step import TrainingStep

USERS, ITEMS = 50, 20
FIELDS = {
    **{name: ("labels", name) for name in ("horizon", "unmatched", "early_positives", "capacity", "remember")},
    "checkpoint": ("checkpoint", "folder"),
    "checkpoint_every": ("checkpoint", "every"),
    "checkpoint_seconds": ("checkpoint", "seconds"),
    "keep": ("checkpoint", "keep"),
    "log": ("log", "folder"),
    "log_rows": ("log", "rows"),
}
"""The group and the field of each grouped option of `Learner`."""
SCHEMA = Schema(
    {"user": f"category:{USERS}", "item": f"category:{ITEMS}", "price": "number"},
    label="click",
    id="event",
    user="user",
    time="at",
)


SHORT_SCHEDULE: dict[str, Any] = {
    "STAGES": ((0, (-5, -4, -3, -2, -1, 1, 2, 3, 4)), (256, (-2, -1, 1, 2)), (512, (-2, -1, 1)), (1024, (-1, 1))),
    "WATCH": 256,
    "LONGEST_WATCH": 768,
    "PATIENCE": 64,
    "FIRST_REST": 256,
    "LONGEST_REST": 1024,
}
"""Values of the constants of `rate_tuning`, with which all stages end within 3,000 events."""


class Small(nn.Module):
    """A factorization of user and item, with the price beside it, and dropout, so that the random state matters."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, 4, sparse=True)
        self.items = nn.Embedding(ITEMS, 4, sparse=True)
        self.out = nn.Sequential(nn.Dropout(0.1), nn.Linear(5, 1))

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
        both = self.users(user) * self.items(item)
        score: Tensor = self.out(torch.cat([both, price[:, None]], 1)).squeeze(1)
        return score


def build(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def learner(model: nn.Module | None = None, storage: Mapping[str, Any] | None = None, **options: Any) -> Learner:
    model = model or build()
    optimizer = CAdam(model.named_parameters(), lr=0.01, **storage or {})
    return Learner(model, optimizer, nn.functional.binary_cross_entropy_with_logits, **grouped(options))


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Learner` from a flat dict: ``horizon=5`` becomes ``labels=LabelOptions(horizon=5)``, and so on."""
    groups: dict[str, dict[str, Any]] = {"labels": {}, "checkpoint": {}, "log": {}}
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        group, field = FIELDS.get(name, ("", name))
        (groups[group] if group else arguments)[field] = value
    arguments["labels"] = LabelOptions(**groups["labels"])
    if "checkpoint" in options:
        arguments["checkpoint"] = CheckpointOptions(**groups["checkpoint"])
    if "log" in options:
        arguments["log"] = LogOptions(**groups["log"])
    return arguments


def table(count: int, seed: int = 0, first: int = 0) -> dict[str, np.ndarray]:
    """Columns of a stream."""
    random = np.random.default_rng(seed)
    user, item = random.integers(USERS, size=count), random.integers(ITEMS, size=count)
    return {
        "event": np.arange(first, first + count),
        "user": user,
        "item": item,
        "price": random.normal(size=count).astype(np.float32),
        "click": ((user + item) % 3 == 0).astype(np.float32),
        "at": np.arange(first, first + count, dtype=np.float64),
    }


def events(count: int, seed: int = 0, first: int = 0, *, labels: bool = True) -> Events:
    columns = table(count, seed, first)
    features = {name: columns[name] for name in ("user", "item", "price")}
    clicks = columns["click"] if labels else None
    return Events(features, clicks, columns["event"], columns["user"], columns["at"])


class Replayed(Source):
    """A source that replays a list of batches from a position."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.position = batches, 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def weights(learner: Learner | TrainingStep) -> list[bytes]:
    """The bytes of all tensors of model and optimizer."""
    state = learner.optimizer.state_dict()["state"]
    tensors = [*learner.model.state_dict().values(), *(t for s in state.values() for t in s.values())]
    return [tensor.numpy().tobytes() for tensor in tensors]


def files(folder: Path) -> dict[str, str]:
    """Every file of a folder that is not hidden, with a hash of its content."""
    found = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}
