"""Checkpoints of a job with several ranks: one folder per checkpoint, to which every rank writes its part.

A checkpoint folder contains

- ``__N_*.distcp`` and ``.metadata``: the tensors of the model, sharded or not, written by torch.distributed.checkpoint,
- ``shared.safetensors``: values that are equal on all ranks,
- ``rank-N.safetensors``: values that belong to rank N,
- ``checkpoint.json``: the number of ranks and a hash of every other file.

The folder gets its final name when all ranks have written their files, so that an interrupted checkpoint is never
loaded. The hashes reveal files that were damaged later; then the previous checkpoint is loaded instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from filelock import FileLock
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..atomic_write import flush_and_rename
from ..checkpoint_files import (
    check_no_checkpoints,
    describe_fallback,
    lock_folder,
    read_tree,
    rename_damaged,
    write_tree,
)
from ..engines.resolved_group import EXECUTION_OPTIONS
from .process_group import all_gather_objects
from .table_protocol import table_optimizer

logger = logging.getLogger("cadam.online")

PARTIAL = ".partial"
CHECKPOINT_NAME = re.compile("checkpoint-[0-9]{12,}")
"""Names that `ShardedCheckpoints.save` gives. Other folders are never loaded or deleted."""


def lock_folder_for_job(folder: Path, group: Any = None) -> FileLock | None:
    """Lock a folder for this job. All ranks must call this function.

    Returns:
        The lock on rank 0, None on the other ranks.

    Raises:
        RuntimeError: on all ranks, if another job has locked the folder.
    """
    lock, failure = None, None
    if dist.get_rank(group) == 0:
        try:
            lock = lock_folder(folder)
        except RuntimeError as error:
            failure = str(error)
    if failure := all_gather_objects(failure, group)[0]:
        raise RuntimeError(failure)
    return lock


def tensors_of(model: nn.Module) -> dict[str, Any]:
    """Collect every tensor of a model, and of the optimizer of its embedding tables, by a unique name."""
    return _flatten(model.state_dict(), _table_state(model))


def load_tensors(folder: Path, model: nn.Module, group: Any = None) -> None:
    """Load the tensors of a checkpoint, which any number of ranks may have saved, into a model of the same kind.

    Raises:
        ValueError: if the checkpoint belongs to another model.
    """
    state, tables = model.state_dict(), _table_state(model)
    try:
        load(_flatten(state, tables), checkpoint_id=str(folder), process_group=group)  # writes into these tensors
    except CheckpointException as error:
        raise ValueError(f"{folder} is not a checkpoint of this model: {error}") from error
    model.load_state_dict(state)
    if (optimizer := table_optimizer(model)) is not None:
        optimizer.load_state_dict(tables)


def saved_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options of a parameter group that change the result of a step, not just how it is executed."""
    return {name: value for name, value in group.items() if name not in ("params", *EXECUTION_OPTIONS)}


def _table_state(model: nn.Module) -> Mapping[str, Any]:
    optimizer = table_optimizer(model)
    return {"state": {}} if optimizer is None else optimizer.state_dict()


def _flatten(model: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both states into one flat dict.

    A nested dict would not do: torch.distributed.checkpoint would look for the empty dict of a rank without tables.
    """
    tensors = {f"model.{name}": value for name, value in model.items()}
    for param, state in tables["state"].items():
        tensors.update({f"tables.{param}.{name}": value for name, value in state.items()})
    return tensors


class ShardedCheckpoints:
    """The checkpoints of one job in a folder that all ranks can read and write.

    All ranks must call every method except `files`. A tree to be saved is a dict with the keys ``tensors`` (see
    `tensors_of`), ``shared`` (the value of rank 0 is saved) and ``own`` (the value of each rank is saved).

    Args:
        folder: the folder of all checkpoints of the job.
        keep: how many of the newest checkpoints are kept.
        group: a process group that can send objects; the default group if None.
        lock: whether to lock the folder against other jobs until `close`.
    """

    def __init__(self, folder: Path | str, keep: int = 3, group: Any = None, *, lock: bool = False) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder, self.keep, self.group = Path(folder), keep, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder_for_job(self.folder, group) if lock else None

    def files(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("checkpoint-*") if CHECKPOINT_NAME.fullmatch(path.name))

    def save(self, number: int, tree: Any) -> Path:
        """Save a tree as checkpoint `number`.

        Raises:
            ValueError: if the folder has a newer checkpoint, which would be loaded instead of this one.
            OSError: on all ranks, if any rank cannot write. Older checkpoints are then unchanged.
        """
        target = self.folder / f"checkpoint-{number:012d}"
        unfinished = target.with_name(target.name + PARTIAL)
        newer = [path.name for path in self._on_each_rank(self.files)[0] if path > target]
        if newer:
            raise ValueError(f"{self.folder} has {newer[-1]}, newer than {target.name}: load it, or save elsewhere")
        self._on_each_rank(lambda: self._prepare(unfinished) if self.rank == 0 else None)
        try:
            save(tree["tensors"], checkpoint_id=str(unfinished), process_group=self.group)
        except CheckpointException as error:
            raise OSError(f"{unfinished}: {error}") from error
        hashes: dict[str, str] = {}
        for hashes_of_rank in self._on_each_rank(lambda: self._write(unfinished, tree)):
            hashes.update(hashes_of_rank)
        self._on_each_rank(lambda: self._finish(unfinished, target, hashes) if self.rank == 0 else None)
        return target

    def load_newest(self) -> tuple[Path, Any] | None:
        """Load the newest checkpoint that is not damaged, except for its tensors, which `load_tensors` loads.

        Returns:
            None if there are no checkpoints; otherwise the folder of the checkpoint, and a dict with the keys
            ``shared``, ``own`` (None on a rank that did not exist when the checkpoint was saved), ``folder`` and
            ``ranks`` (how many ranks saved it).

        Raises:
            DamagedCheckpointError: if all checkpoints are damaged.
        """
        files = self._on_each_rank(self.files)[0]
        damaged: list[Path] = []
        for path in reversed(files):
            problems = [text for texts in self._on_each_rank(partial(self._find_damage, path)) for text in texts]
            if problems:
                fallback = describe_fallback(path, files)
                logger.error("damaged checkpoint, %s: %s: %s", fallback, path, "; ".join(problems))
                damaged.append(path)
                continue
            self._on_each_rank(lambda: rename_damaged(damaged) if self.rank == 0 else None)
            own = path / _rank_file(self.rank)
            return path, {
                "folder": path,
                "ranks": json.loads((path / "checkpoint.json").read_text())["ranks"],
                "shared": read_tree(path / "shared.safetensors"),
                "own": read_tree(own) if own.exists() else None,
            }
        check_no_checkpoints(self.folder, files)
        return None

    def close(self) -> None:
        """Release the lock of the folder."""
        if self._lock is not None:
            self._lock.release()

    def _prepare(self, unfinished: Path) -> None:
        for leftover in self.folder.glob(f"checkpoint-*{PARTIAL}"):
            shutil.rmtree(leftover)
        unfinished.mkdir()

    def _write(self, unfinished: Path, tree: Mapping[str, Any]) -> dict[str, str]:
        """Write the files of this rank other than tensors; return the hash of every file that this rank wrote."""
        write_tree(unfinished / _rank_file(self.rank), tree["own"])
        names = [_rank_file(self.rank), *(path.name for path in unfinished.glob(f"__{self.rank}_*"))]
        if self.rank == 0:
            write_tree(unfinished / "shared.safetensors", tree["shared"])
            names += [".metadata", "shared.safetensors"]
        return {name: _file_hash(unfinished / name) for name in names}

    def _finish(self, unfinished: Path, target: Path, hashes: Mapping[str, str]) -> None:
        """Write checkpoint.json, give the folder its final name and delete old checkpoints."""
        new = unfinished / "checkpoint.new"
        new.write_text(json.dumps({"ranks": self.world, "sha256": hashes}))
        flush_and_rename(new, unfinished / "checkpoint.json")
        replaced = target.with_name(f"{target.name}.before{PARTIAL}")
        if target.exists():
            os.replace(target, replaced)
        try:
            flush_and_rename(unfinished, target)
        except OSError:
            if replaced.exists() and not target.exists():
                os.replace(replaced, target)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        for old in [path for path in self.files() if path <= target][: -self.keep]:
            shutil.rmtree(old)

    def _find_damage(self, path: Path) -> list[str]:
        """Describe the damage of a checkpoint. Each rank verifies the hashes of some of its files."""
        try:
            content = json.loads((path / "checkpoint.json").read_text())
            hashes, needed = dict(content["sha256"]), {_rank_file(rank) for rank in range(content["ranks"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [f"rank {self.rank}: checkpoint.json cannot be read: {error!r}"]
        problems = []
        if self.rank == 0:
            needed |= {".metadata", "shared.safetensors"}
            problems = [f"checkpoint.json does not name {name}" for name in sorted(needed - hashes.keys())]
        for name in sorted(hashes)[self.rank :: self.world]:
            try:
                if _file_hash(path / name) != hashes[name]:
                    problems.append(f"{name} does not match its hash in checkpoint.json")
            except OSError as error:
                problems.append(str(error))
        return problems

    def _on_each_rank(self, function: Callable[[], Any]) -> list[Any]:
        """Call a function on every rank and collect the results; an OSError of one rank is raised on all ranks."""
        result, failure = None, None
        try:
            result = function()
        except OSError as error:
            failure = f"rank {self.rank}: {error}"
        outcomes = all_gather_objects((result, failure), self.group)
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures:
            raise OSError("; ".join(failures))
        return [result for result, _ in outcomes]


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
