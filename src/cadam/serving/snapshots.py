"""Snapshots of the model: the learner publishes them, and front processes predict with the newest one.

A snapshot is one file of weights that is replaced atomically, so a reader finds the old model or the new one. Readers
map the file into memory: loading takes less than a millisecond whatever its size, and all front processes share it.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoint_files import read_tree
from ..online.data.events import Array
from ..online.persistence.export import ScoringModel
from .config import ServiceConfig
from .log_source import LogSource
from .service_learner import ServiceLearner
from .versions import Versions, version_name

logger = logging.getLogger("cadam.serving")

SNAPSHOT_FILE = "snapshot.safetensors"
SECONDS_UNTIL_RETRY = 0.5
"""The time after an attempt to write a snapshot until a missing file counts as deleted."""
GUARD_TAG = "before-alert"
"""The tag of the version that is served during an alert of the guard."""


class NotReadyError(RuntimeError):
    """The learner has not published a snapshot or a status yet."""


@dataclass(frozen=True)
class SnapshotInfo:
    """The state of the model that a snapshot has.

    Args:
        generation: the number of rollbacks before it.
        position: the number of the last log entry that the learner had read.
        steps: the number of training steps.
        events: the number of events that the learner had seen.
        learned: the number of events that the model was trained on.
        time: when it was published, in seconds since 1970.
    """

    generation: int
    position: int
    steps: int
    events: int
    learned: int
    time: float

    @property
    def version(self) -> str:
        """The name of the version."""
        return version_name(self.position, self.generation)


class SnapshotPublisher:
    """A report of the learner that publishes a snapshot when one is due.

    A snapshot whose weights are not finite is not published: predictions continue with the last good one. After a
    restart the learner repeats a part of the log; until it has caught up with the published snapshot, that one stays.

    During an alert of the guard nothing new is published, and the newest version before the loss rose is served.

    Args:
        source: the source of the learner, which knows the position.
        config: the configuration of the service.
        versions: the versions of the service.
    """

    def __init__(self, source: LogSource, config: ServiceConfig, versions: Versions) -> None:
        self.source, self.config, self.versions = source, config, versions
        self.path = config.runtime_folder() / SNAPSHOT_FILE
        self.seconds, self.steps = config.refresh_seconds, config.refresh_steps
        self.published = read_info(self.path)
        """The newest snapshot, None if there is none."""
        self.is_diverged = False
        self.bytes = 0
        self._time_of_write, self._published_steps, self._published_promotions = -math.inf, -1, 0
        self._has_logged_failure = False

    def __call__(self, learner: ServiceLearner) -> None:
        """Publish a snapshot if the model has changed and a snapshot is due, or if the last one was deleted."""
        if learner.is_alert:
            self._withdraw(learner)
        elif (not self._is_current(learner) and self._is_due(learner.steps)) or self._was_deleted():
            self.end(learner)

    def _is_current(self, learner: ServiceLearner) -> bool:
        """Whether the published snapshot has the present weights of the champion."""
        return learner.steps == self._published_steps and learner.promotions == self._published_promotions

    def _is_due(self, steps: int) -> bool:
        if self.steps is not None:
            return steps - self._published_steps >= self.steps or self._published_steps < 0
        return time.monotonic() - self._time_of_write >= self.seconds

    def _was_deleted(self) -> bool:
        """Whether the snapshot is gone, for example because systemd has deleted what a user left in shared memory."""
        return time.monotonic() - self._time_of_write > SECONDS_UNTIL_RETRY and not self.path.exists()

    def end(self, learner: ServiceLearner) -> None:
        """Publish a snapshot now, unless a newer one is published or the guard has raised an alert."""
        if learner.is_alert:
            self._withdraw(learner)
            return
        info = SnapshotInfo(
            *(self.source.generation, self.source.position, learner.steps, learner.events, learner.learned),
            time=time.time(),
        )
        if self.published is not None and _order(info) < _order(self.published):
            return
        self._time_of_write = time.monotonic()
        weights = {name: value.detach().cpu() for name, value in learner.model.state_dict().items()}
        if self.published is not None and not _has_finite_weights(learner.model):
            if not self.is_diverged:
                logger.error("the model has diverged: version %s stays in use", self.published.version)
            self.is_diverged = True
            return
        try:
            self.config.runtime_folder()  # it may have been deleted
            write_snapshot(self.path, weights, info)
        except OSError as error:  # predictions continue with the snapshot before; the next one is tried in time
            if not self._has_logged_failure:
                logger.error("the snapshot of version %s could not be written: %s", info.version, error)
            self._has_logged_failure = True
            return
        self.is_diverged, self.published, self._has_logged_failure = False, info, False
        self._published_steps, self._published_promotions = learner.steps, learner.promotions
        self.bytes = self.path.stat().st_size

    def _withdraw(self, learner: ServiceLearner) -> None:
        """Serve the newest version before the loss rose, and let the guard compare the learner with it."""
        guard = learner.guard
        if guard is None or guard.position is None or guard.served is not None:
            return
        version = self.versions.newest_before(guard.position)
        if version is not None:
            info = SnapshotInfo(
                *(version.generation, version.position, learner.steps, version.events, version.learned),
                time=time.time(),
            )
            try:
                self.versions.tag(version.name, GUARD_TAG)  # it is not deleted then
                write_snapshot(self.path, read_tree(self.versions.path(version.name))["model"], info)
            except OSError as error:  # the next call tries again
                logger.error("version %s could not be served again: %s", version.name, error)
                return
            self.published, self._published_steps = info, -1
            logger.error("version %s is served, which has the tag %s", version.name, GUARD_TAG)
        guard.served = ServedModel(self.path.parent, lambda: copy.deepcopy(learner.model))
        guard.served.refresh()

    def covered_position(self, learner: ServiceLearner) -> int:
        """Return the position up to which all labels that were learned are in the published snapshot."""
        if self._is_current(learner) or self.published is None:
            return self.source.position
        return self.published.position


def _order(info: SnapshotInfo) -> tuple[int, int]:
    return info.generation, info.position


def _has_finite_weights(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p.sum() if p.numel() > 1 else p).all()) for p in model.parameters())


def write_snapshot(path: Path, weights: Mapping[str, Tensor], info: SnapshotInfo) -> None:
    """Replace a snapshot. It is not flushed to disk, because it can be computed again.

    Raises:
        OSError: if it cannot be written. The snapshot before it is then unchanged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    addresses = set()
    for name, value in weights.items():
        is_shared = value.data_ptr() in addresses  # safetensors refuses tensors that share memory, such as tied weights
        addresses.add(value.data_ptr())
        tensors[name] = value.clone() if is_shared else value.contiguous()
    new = path.with_name(f".{path.name}.new")
    try:
        save_file(tensors, new, {"info": json.dumps(asdict(info))})
    except SafetensorError as error:
        raise OSError(f"{new}: {error}") from error
    os.replace(new, path)


def read_info(path: Path) -> SnapshotInfo | None:
    """Read what a snapshot contains, None if there is none."""
    loaded = _open(path)
    return None if loaded is None else loaded[0]


def _open(path: Path) -> tuple[SnapshotInfo, dict[str, Tensor]] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            info = SnapshotInfo(**json.loads(file.metadata()["info"]))
            return info, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("the snapshot %s cannot be read and is ignored: %s", path, error)
        return None


class ServedModel:
    """The model that a front process predicts with, which follows the newest snapshot.

    `refresh` may run in another thread than `scores`. Replacing the weights takes a fraction of a millisecond, because
    the file of the snapshot is mapped into memory before.

    Args:
        folder: the folder of the snapshot.
        build: builds the model.
    """

    def __init__(self, folder: Path, build: Callable[[], nn.Module]) -> None:
        self.path = folder / SNAPSHOT_FILE
        self.info: SnapshotInfo | None = None
        """The snapshot in use, None before the first one was loaded."""
        self._model = ScoringModel(build()).eval().requires_grad_(False)
        self._lock = threading.Lock()
        self._file: tuple[int, int] | None = None

    def refresh(self) -> bool:
        """Load the newest snapshot if it is not in use yet, and return whether it was loaded."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        file = (status.st_ino, status.st_mtime_ns)
        if file == self._file or (loaded := _open(self.path)) is None:
            return False
        info, weights = loaded
        with self._lock:
            self._model.model.load_state_dict(weights, assign=True)
            self.info, self._file = info, file
        return True

    def scores(self, features: Mapping[str, Array]) -> tuple[SnapshotInfo, Array]:
        """Compute the scores of encoded events, and return them with the snapshot that they come from.

        Raises:
            NotReadyError: if no snapshot was loaded yet.
        """
        tensors = {name: torch.from_numpy(_writable(values)) for name, values in features.items()}
        with self._lock, torch.inference_mode():
            if self.info is None:
                raise NotReadyError("there is no snapshot of the model yet: the learner is starting")
            scores: Array = self._model(tensors).numpy()
            return self.info, scores


def _writable(values: Array) -> Array:
    array: Array = np.ascontiguousarray(values)
    return array if array.flags.writeable else array.copy()
