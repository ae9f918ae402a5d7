"""The encoded stream: events that were read and converted once, in files that all runs map into memory.

A folder has one file per column, an index with the number of events of each batch, and the judged events: those whose
outcome becomes known, in the order in which it does. That order does not depend on the model, so every run records its
scores in it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..atomic_write import replace_file
from ..online.data.events import Array, Batch, Events, Labels
from ..online.labels.join import LabelOptions
from ..online.learner import Learner
from ..online.metrics.stream import as_clicks
from ..online.models.model_file import LOG_LOSS

INDEX = "index.json"
JUDGED = "judged.npz"
"""The file that is written last: a folder with it is complete."""
EVENT_COLUMNS = "events"
LABEL_COLUMNS = "labels"


class Recorder:
    """A metric of the learner that collects the scores and labels of judged events since the last call of `take`."""

    def __init__(self) -> None:
        self._parts: list[tuple[Array, Array, Array]] = []

    def update(self, scores: Array, labels: Array, users: Array | None, time: Array) -> None:
        """Add the predictions of events whose outcome is known now."""
        user_column = np.zeros(len(scores), dtype=np.int64) if users is None else users
        self._parts.append((np.asarray(scores, dtype=np.float32), labels, user_column))

    def take(self) -> tuple[Array, Array, Array]:
        """Return the scores, labels and users since the last call, and forget them."""
        parts, self._parts = self._parts, []
        if not parts:
            return np.empty(0, np.float32), np.empty(0), np.empty(0, np.int64)
        scores, labels, users = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return scores, labels, users

    def results(self) -> Mapping[str, float]:
        """Return nothing: the scores are taken, not summarized."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: scores are taken before a checkpoint is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class JudgedEvents:
    """The events whose outcome becomes known, in the order in which it does."""

    labels: Array
    users: Array
    """The user of each event as a number; 0 if the schema has no user."""
    weights: Array
    """The weight of each event, with a mean of 1; 1 if the schema has no weight."""
    ends: Array
    """The number of judged events after each batch of the stream, and after its end."""
    lag: int
    """The largest number of batches between the prediction of an event and its outcome."""

    @property
    def has_users(self) -> bool:
        """Whether there is more than one user."""
        return len(self.users) > 0 and bool((self.users != self.users[0]).any())


class EncodedStream:
    """The batches of an encoded stream, mapped into memory.

    Args:
        folder: The folder that `encode_stream` has written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = json.loads((folder / INDEX).read_text(encoding="utf-8"))

    @staticmethod
    def is_complete(folder: Path) -> bool:
        """Whether a folder contains a whole encoded stream."""
        return (folder / JUDGED).exists()

    def digest(self) -> str:
        """Return a hash of the batches."""
        digest = hashlib.sha256()
        for path in sorted([self.folder / INDEX, *self.folder.glob("*.bin")]):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    @property
    def events(self) -> int:
        """The number of events."""
        return int(self.index["events"][-1])

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self.index["events"]) - 1

    @cached_property
    def _columns(self) -> dict[str, dict[str, Array]]:
        return {
            group: {
                name: _map_file(self.folder / f"{group}-{number}.bin", np.dtype(dtype), tuple(shape))
                for number, (name, (dtype, shape)) in enumerate(columns.items())
            }
            for group, columns in self.index["columns"].items()
        }

    def batch(self, number: int) -> Batch:
        """Return one batch."""
        rows = slice(*self.index["events"][number : number + 2])
        columns = {name: values[rows] for name, values in self._columns[EVENT_COLUMNS].items()}
        batch = Batch(Events.from_columns(columns) if rows.stop > rows.start else None)
        rows = slice(*self.index["labels"][number : number + 2])
        if rows.stop > rows.start:
            columns = {name: values[rows] for name, values in self._columns[LABEL_COLUMNS].items()}
            batch.labels = Labels(columns["id"], columns["label"])
            if self.index["has_label_order"][number]:
                batch.events_before = columns["events_before"]
        return batch

    @cached_property
    def judged(self) -> JudgedEvents:
        """The judged events."""
        with np.load(self.folder / JUDGED) as file:
            return JudgedEvents(file["labels"], file["users"], file["weights"], file["ends"], int(file["lag"]))


def _map_file(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if 0 in shape:
        return np.empty(shape, dtype)
    # Copy on write gives arrays that torch accepts without a copy, and that no run can change in the file.
    return np.memmap(path, dtype, "c", shape=shape).view(np.ndarray)


class _ColumnFiles:
    """Files to which the columns of one group are appended."""

    def __init__(self, folder: Path, group: str, files: ExitStack) -> None:
        self.folder, self.group, self._stack = folder, group, files
        self.columns: dict[str, tuple[IO[bytes], np.dtype[Any], list[int]]] = {}

    def append(self, columns: Mapping[str, Array]) -> None:
        for name, values in columns.items():
            if name not in self.columns:
                path = self.folder / f"{self.group}-{len(self.columns)}.bin"
                new_file = self._stack.enter_context(path.open("wb"))
                self.columns[name] = new_file, values.dtype, [0, *values.shape[1:]]
            file, dtype, shape = self.columns[name]
            file.write(np.ascontiguousarray(values, dtype=dtype).tobytes())
            shape[0] += len(values)

    def description(self) -> dict[str, tuple[str, list[int]]]:
        return {name: (dtype.str, shape) for name, (_, dtype, shape) in self.columns.items()}


class _KeyNumbers:
    """Numbers for keys: integers stay as they are, and texts are numbered by their first occurrence."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def encode(self, keys: Array) -> Array:
        if keys.dtype.kind in "iu":
            return keys.astype(np.int64, copy=False)
        numbers = self.numbers
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys.tolist()], dtype=np.int64)


def encode_stream(
    batches: Iterable[Batch], folder: Path, per_event: bool, label_options: LabelOptions | None = None
) -> EncodedStream:
    """Write a stream to a folder, in place of what the folder contains.

    Args:
        batches: The batches. Rejected records are left out.
        folder: The folder.
        per_event: Whether runs learn the events one by one, so that labels and events of a batch alternate.
        label_options: How long events wait for their labels.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    users, ids = _KeyNumbers(), _KeyNumbers()
    event_counts, label_counts, has_order = [0], [0], []
    with ExitStack() as files:
        groups = {name: _ColumnFiles(folder, name, files) for name in (EVENT_COLUMNS, LABEL_COLUMNS)}
        for batch in batches:
            events, labels = batch.events, batch.labels
            if events is not None:
                columns = events.columns()
                columns.setdefault("label", np.full(len(events), np.nan, dtype=np.float32))
                for name, numbers in (("user", users), ("id", ids)):
                    if name in columns:
                        columns[name] = numbers.encode(columns[name])
                groups[EVENT_COLUMNS].append(columns)
            if labels is not None:
                before = batch.events_before if batch.events_before is not None else np.zeros(len(labels), np.int64)
                columns = {"id": ids.encode(labels.ids), "label": labels.labels, "events_before": before}
                groups[LABEL_COLUMNS].append(columns)
            event_counts.append(event_counts[-1] + (0 if events is None else len(events)))
            label_counts.append(label_counts[-1] + (0 if labels is None else len(labels)))
            has_order.append(batch.events_before is not None)
        columns_of = {name: group.description() for name, group in groups.items()}
    index = {"columns": columns_of, "events": event_counts, "labels": label_counts, "has_label_order": has_order}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    stream = EncodedStream(folder)
    judged = find_judged_events(stream, per_event, label_options)
    buffer = BytesIO()
    np.savez(buffer, **vars(judged))
    replace_file(folder / JUDGED, buffer.getvalue())
    return stream


class _ConstantModel(nn.Module):
    """A model whose scores are all 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, **features: Tensor) -> Tensor:
        count = len(next(iter(features.values())))
        return self.weight.expand(count)


def find_judged_events(
    stream: EncodedStream, per_event: bool, label_options: LabelOptions | None = None
) -> JudgedEvents:
    """Find the events whose outcome becomes known, by a run of a model that does not learn.

    Raises:
        ValueError: If a label is neither 0 nor 1, or if all weights are 0.
    """
    model, recorder = _ConstantModel(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    learner = Learner(model, optimizer, LOG_LOSS, labels=label_options, metrics=[recorder])
    labels, indices, ends, lag, count = [], [], [], 0, 0
    users: list[Array] = []
    weights: list[Array] = []
    starts = np.array(stream.index["events"])
    for number in range(stream.batches + 1):
        if number < stream.batches:
            batch = stream.batch(number)
            if batch.events is not None:
                events, first = batch.events, int(starts[number])
                users.append(np.zeros(len(events), np.int64) if events.users is None else events.users)
                weights.append(np.ones(len(events)) if events.weights is None else events.weights)
                # The index of an event takes the place of its user, so that the recorder says which events are judged.
                numbers = np.arange(first, first + len(events))
                batch = replace(batch, events=replace(events, users=numbers))
            parts = batch.in_order() if per_event else [(batch.events, batch.labels)]
            for part_events, part_labels in parts:
                learner.process(Batch(part_events, part_labels))
        else:
            learner.finish()
        _, part, index = recorder.take()
        labels.append(as_clicks(part, "the log loss, AUC and GAUC of an A/B"))
        indices.append(index)
        count += len(part)
        ends.append(count)
        if len(index):
            predicted_in = int(np.searchsorted(starts, index.min(), side="right")) - 1
            lag = max(lag, number - predicted_in)
    all_indices = np.concatenate(indices)
    user_column = np.concatenate(users)[all_indices] if users else np.empty(0, np.int64)
    weight_column = np.concatenate(weights)[all_indices].astype(np.float64) if weights else np.empty(0)
    if len(weight_column) and not weight_column.any():
        raise ValueError("the weights of all labeled events are 0, so there is nothing to compare")
    weight_column /= weight_column.mean() if len(weight_column) else 1.0
    return JudgedEvents(np.concatenate(labels).astype(np.float32), user_column, weight_column, np.array(ends), lag)
