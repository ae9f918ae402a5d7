"""Migration of the folder of a run or a service: `cadam migrate`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..online.data.schema import Schema
from ..online.models.model_file import UsageError
from ..online.persistence.checkpoints import Checkpoints, list_checkpoints, read_newest
from ..online.persistence.migration import Migration
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
from .config import SERVICE_LOCK_FILE, ServiceConfig, is_service, with_id_and_time
from .event_log import open_log
from .snapshots import SNAPSHOT_FILE
from .versions import VERSIONS_FOLDER

BACKUP = "before-migration"
"""The folder for what a migration replaces. A number follows from the second migration on."""


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


def migrate_state(migration: Migration, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a run or a service, with its challengers.

    Challengers get the new columns. Another optimizer or learning rate is that of the champion.

    Raises:
        UsageError: if the state cannot be migrated.
    """
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
        migrated = migrate_state(migration, state)
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
