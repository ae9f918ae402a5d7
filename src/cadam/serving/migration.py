"""Migration of the folder of a run or a service: `cadam migrate`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from ..online.data.events import FEATURE_PREFIX
from ..online.data.schema import Schema
from ..online.models.model_file import UsageError
from ..online.persistence.checkpoints import Checkpoints, list_checkpoints, read_newest
from ..online.persistence.migration import Migration, count_waiting
from ..online.run_config import (
    MODEL_FILE,
    SCHEMA_FILE,
    SCHEMA_KEY,
    RunConfig,
    check_same_schema,
    model_builder,
    read_ready_made_model,
)
from .arms import Arm
from .config import SERVICE_LOCK_FILE, ServiceConfig, is_service, with_id_and_time, without_label
from .event_log import open_log
from .snapshots import SNAPSHOT_FILE
from .versions import VERSIONS_FOLDER

BACKUP = "before-migration"
"""The folder for what a migration replaces. A number follows from the second migration on."""
ENTRIES_PER_READ = 10_000
"""The number of entries of a log that are read at once."""


def read_model(folder: Path) -> tuple[str, dict[str, Any], Schema]:
    """Return the ready-made model of a folder, its settings and its schema.

    Raises:
        UsageError: if the folder has no checkpoint, a model that is not ready-made, or a schema that was edited.
    """
    if not list_checkpoints(folder):
        raise UsageError(f"{folder} has no checkpoint: give the folder of a run or of a service")
    try:
        described = read_ready_made_model(folder)
    except UsageError:
        raise UsageError(f"{folder} has a model of your own: only ready-made models can be migrated") from None
    if described is None or not (folder / SCHEMA_FILE).is_file():
        raise UsageError(f"{folder} does not describe its model: {MODEL_FILE} or {SCHEMA_FILE} is missing")
    schema = Schema.read(folder / SCHEMA_FILE)
    complete = with_id_and_time if is_service(folder) else lambda schema: schema
    check_same_schema(schema, folder, in_order=True, complete=complete)
    return *described, schema


def migrate_state(folder: Path, migration: Migration, state: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Migrate the state of a run or a service, with its challengers.

    Challengers get the new columns. Another optimizer or learning rate is that of the champion. Events of a service
    that wait for their labels are encoded again from its log.

    Returns:
        The new state, and how many events that wait have old buckets of `Migration.ambiguous_columns`.

    Raises:
        UsageError: if the state cannot be migrated.
        LogUnavailableError: if the log of the service cannot be read.
    """
    migrated = _migrate_arms(migration, state)
    if not migration.ambiguous_columns or not (stale := count_waiting(state)):
        return migrated, 0
    if is_service(folder):
        challengers = (migrated.get("arms") or {}).get("challengers", {})
        learners = [migrated, *(each["learner"] for each in challengers.values())]
        stale -= _encode_again(folder, migration, learners)
    return migrated, stale


def _encode_again(folder: Path, migration: Migration, learners: Sequence[dict[str, Any]]) -> int:
    """Encode columns of the events that wait for their labels again, from the log of their service.

    Args:
        folder: the folder of the service.
        migration: the migration, whose `ambiguous_columns` are encoded.
        learners: the migrated states of the learners, which are changed. The first is that of the champion.

    Returns:
        How many events of the champion were encoded. The log may not have the others any more.
    """
    schema = without_label(with_id_and_time(migration.new))
    positions = []
    for learner in learners:
        pending = learner["pending"]
        rows = pending["number_of"]["values"] - pending["head"]
        positions.append(dict(zip(pending["number_of"]["keys"].tolist(), rows.tolist(), strict=True)))
        pending["rows"] |= {key: pending["rows"][key].copy() for key in map(_column, migration.ambiguous_columns)}
    waiting, last, after, count = set().union(*positions), learners[0]["source"]["position"], 0, 0
    with closing(open_log(folder)) as log:
        while entries := log.read(after, last=last, limit=ENTRIES_PER_READ):
            after = entries[-1].number
            bodies = [entry.body for entry in entries if entry.kind == "event" and entry.id in waiting]
            events = schema.convert_records([json.loads(body) for body in bodies], [log.location] * len(bodies)).events
            if events is None or events.ids is None:
                continue
            for learner, row_of in zip(learners, positions, strict=True):
                rows = np.array([row_of.get(key, -1) for key in events.ids.tolist()])
                for name in migration.ambiguous_columns:
                    learner["pending"]["rows"][_column(name)][rows[rows >= 0]] = events.features[name][rows >= 0]
            count += sum(key in positions[0] for key in events.ids.tolist())
    return count


def _column(feature: str) -> str:
    return FEATURE_PREFIX + feature


def _migrate_arms(migration: Migration, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a run or a service, with its challengers."""
    migrated = migration.state(state)
    if isinstance(source := migrated["source"], Mapping):
        migrated["source"] = {**source, SCHEMA_KEY: migration.new.settings()}
    arms = state.get("arms")
    if arms is None:
        return migrated
    columns_only = replace(migration, optimizer=None, lr=None)
    challengers = {
        name: {**each, "learner": columns_only.state(each["learner"])} for name, each in arms["challengers"].items()
    }
    old = Arm.parse(arms["champion"], 1.0)
    champion = Arm(migration.optimizer or old.spec, migration.lr or old.lr)
    if str(champion) in challengers:
        raise UsageError(
            f"{champion} is a challenger: start the service with --challenger for it and promote it with POST /promote"
        )
    is_changed = str(champion) != str(old)
    first = str(champion) if is_changed else arms["first"]
    migrated["arms"] = {**arms, "champion": str(champion), "first": first, "challengers": challengers}
    if migration.old.features != migration.new.features or is_changed:
        migrated["guard"] = None  # the loss of the new model is another one
    return migrated


def migrate_folder(folder: Path, migration: Migration) -> Path:
    """Replace the state of a folder. What it replaces is moved to a folder, which is returned.

    Old versions and checkpoints are moved too, because they do not fit the new schema. If the migration is interrupted,
    the old files are in that folder or in their place.

    Raises:
        UsageError: if the state cannot be migrated, or if the service has a rollback to carry out first.
        RuntimeError: if a learner or a service uses the folder.
    """
    with _no_service(folder), closing(Checkpoints(folder, keep=1_000_000)) as store:
        newest = store.load_newest()
        assert newest is not None
        _, state = newest
        _check_rollbacks(folder, state)
        migrated, _ = migrate_state(folder, migration, state)
        number = int(store.files()[-1].stem.partition("-")[2]) + 1
        migrated["counts"] = {**migrated["counts"], "saves": number}
        if is_service(folder):  # if it was killed, its last snapshot is still there, with weights of the old schema
            service = ServiceConfig(str(folder), migration.model, migration.new_settings)
            (service.runtime_folder() / SNAPSHOT_FILE).unlink(missing_ok=True)
        backup = _unused(folder / BACKUP)
        backup.mkdir()
        build, loss = model_builder(migration.model, migration.new, migration.new_settings)
        config = RunConfig("", migration.new, migration.model, build, loss, migration.new_settings)
        staged = backup / "new"
        staged.mkdir()
        for name in (SCHEMA_FILE, MODEL_FILE):
            shutil.copy(folder / name, staged / name)  # notes about ignored columns are kept
        config.write(staged)
        old_files = store.files()
        store.save(number, migrated)
        for path in (*old_files, folder / VERSIONS_FOLDER):
            if path.exists():
                os.replace(path, backup / path.name)
        for name in (SCHEMA_FILE, MODEL_FILE):
            os.replace(folder / name, backup / name)
            os.replace(staged / name, folder / name)
        staged.rmdir()
    return backup


@contextmanager
def _no_service(folder: Path) -> Iterator[None]:
    """Keep services from being started in a folder, which the learner's lock does not do while it is started again.

    Raises:
        RuntimeError: if a service runs in the folder.
    """
    if not (folder / SERVICE_LOCK_FILE).exists():  # the folder of a run
        yield
        return
    lock = FileLock(folder / SERVICE_LOCK_FILE)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise RuntimeError(f"a cadam serve runs in {folder}: stop it first") from None
    try:
        yield
    finally:
        lock.release()


def _unused(path: Path) -> Path:
    number, unused = 1, path
    while unused.exists():
        number += 1
        unused = path.with_name(f"{path.name}-{number}")
    return unused


def read_state(folder: Path) -> Mapping[str, Any]:
    """Read the newest state of a folder that a learner may be using."""
    state: Mapping[str, Any] = read_newest(folder)[1]
    return state


def _check_rollbacks(folder: Path, state: Mapping[str, Any]) -> None:
    """Raise UsageError if a service has not carried out a rollback yet, whose version would not fit."""
    if not is_service(folder):
        return
    with closing(open_log(folder)) as log:
        rollbacks = log.rollbacks()
    if rollbacks and rollbacks[-1].number > state["source"]["rollback"]:
        raise UsageError(
            f"{folder} has not gone back to version {rollbacks[-1].version} yet: start and stop the service, "
            "then migrate it"
        )
