"""Checkpoints of a sharded model, which another number of ranks can load.

A checkpoint is a folder; see `cadam.distributed.sharded_checkpoint` for its format. Its tensors are the tables, their
moments and steps, and the dense part. All ranks share the state of the dense part's optimizer, the step, the position
in the data and the options of the tables.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection

from ..checkpoint_files import pack_tree
from ..distributed.process_group import all_gather_objects
from ..distributed.sharded_checkpoint import (
    ShardedCheckpoints,
    load_tensors,
    lock_folder_for_job,
    saved_options,
    tensors_of,
)
from ..optim.optimizer import Optimizer
from .sharders import iter_tables, warn_about_unsharded_collections
from .tables import STATE_OPTIONS, Tables

logger = logging.getLogger("cadam.torchrec")

_locks: dict[Path, FileLock | None] = {}
"""Locks of the folders that this job saves to, held until the process ends, so that no other job saves there."""

DENSE = "the dense part"
"""The key of the dense part's optimizer beside the names of the tables."""


@dataclass(frozen=True)
class SavedRun:
    """The progress of a run when it was saved."""

    step: int
    """The number of steps that the run had taken."""
    position: Any
    """The position in the data that was passed to `save`."""


def save(
    folder: str | Path,
    step: int,
    model: DistributedModelParallel,
    dense: torch.optim.Optimizer,
    position: Any = None,
    *,
    keep: int = 2,
) -> Path:
    """Save a run as the newest checkpoint of a folder. All ranks must call it.

    The folder then belongs to this job until it ends. A folder with checkpoints of later steps is rejected: load it
    first.

    Args:
        folder: the folder of the run, which all ranks can access.
        step: the number of steps that the run has taken.
        model: the sharded model.
        dense: the optimizer of its dense parameters.
        position: where to resume in the data. It must be the same on all ranks, not depend on their number, and be
            convertible to JSON.
        keep: the number of checkpoints to keep.

    Returns:
        The path of the checkpoint.

    Raises:
        TypeError: the position cannot be converted to JSON.
    """
    warn_about_unsharded_collections(model)
    try:
        position_text = json.dumps(position)
    except (TypeError, ValueError) as error:
        raise TypeError(f"position cannot be saved: {error}") from error
    tables_by_name = _tables_by_name(model)
    options = _merge_ranks({name: saved_options(tables.options) for name, tables in tables_by_name.items()})
    pack_tree(options, {}, "options of tables")  # raises on all ranks, before any of them writes, if it cannot be saved
    shared = {
        "step": step,
        "position": position_text,
        "options of tables": options,
        "storage of tables": _merge_ranks({name: _storage(tables.options) for name, tables in tables_by_name.items()}),
        "optimizers": _optimizer_names(model, dense),
        "dense": dense.state_dict(),
    }
    tree = {"tensors": tensors_of(model), "shared": shared, "own": None}
    checkpoints = ShardedCheckpoints(folder, keep)
    path = checkpoints.folder.resolve()
    if path not in _locks:
        _locks[path] = lock_folder_for_job(path)
    return checkpoints.save(step, tree)


def load(folder: str | Path, model: DistributedModelParallel, dense: torch.optim.Optimizer) -> SavedRun | None:
    """Load the newest intact checkpoint of a folder. All ranks must call it.

    The number of ranks and the sharding may differ from those of the checkpoint; the tables and the dense part must be
    the same. Options that change what is computed, such as the learning rate, are those of the checkpoint. Options that
    change how moments are stored are those of the code: the moments are converted, see `Tables.set_storage`. A damaged
    checkpoint is renamed with a message, and the one before it is loaded.

    Args:
        folder: the folder of the run.
        model: the sharded model.
        dense: the optimizer of its dense parameters.

    Returns:
        The progress of the run, or None if there is no checkpoint yet.

    Raises:
        ValueError: the checkpoint was saved with other optimizers or options than the tables can take.
    """
    warn_about_unsharded_collections(model)
    newest = ShardedCheckpoints(folder).load_newest()
    if newest is None:
        return None
    path, tree = newest
    shared = tree["shared"]
    _check_optimizers(path, shared["optimizers"], _optimizer_names(model, dense))
    tables_by_name = _tables_by_name(model)
    # The options that an optimizer class fixes, such as its confidence, stay those of the class.
    options = {
        name: {**shared["options of tables"].get(name, {}), **tables.optimizer_class.fixed}
        for name, tables in tables_by_name.items()
    }
    problems = [
        problem for problems in all_gather_objects(list(_option_problems(model, options))) for problem in problems
    ]
    if problems:
        raise ValueError(f"{path}: {problems[0]}")
    own_storage = [(tables, _storage(tables.options)) for tables in iter_tables(model)]
    try:
        for name, tables in tables_by_name.items():
            tables.set_storage(**_storage(shared["storage of tables"].get(name, {})))
        load_tensors(path, model)
        for name, tables in tables_by_name.items():
            tables.options.update(options[name])
            tables.adopt_options()
    finally:
        for tables, storage in own_storage:
            tables.set_storage(**storage)
    dense.load_state_dict(shared["dense"])
    if dist.get_rank() == 0 and tree["ranks"] != dist.get_world_size() and _has_managed_collision(model):
        logger.warning(
            "%s was saved by %d ranks and is loaded by %d: with managed collision, ids without a row of their own are "
            "now looked up in other rows, because each rank has one row for them",
            path,
            tree["ranks"],
            dist.get_world_size(),
        )
    return SavedRun(shared["step"], json.loads(shared["position"]))


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the complete checkpoints of a run, the newest last."""
    return ShardedCheckpoints(folder).files()


def _storage(options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options that the form of the state depends on."""
    return {name: options.get(name, value) for name, value in STATE_OPTIONS.items()}


def _tables_by_name(model: DistributedModelParallel) -> dict[str, Tables]:
    """Map the name of each weight of this rank to the tables that it is part of."""
    optimizer, by_options = model.fused_optimizer, {id(tables.options): tables for tables in iter_tables(model)}
    names = {id(weight): name for name, weight in optimizer.params.items()}
    groups = [group for group in optimizer.param_groups if id(group) in by_options]
    return {names[id(weight)]: by_options[id(group)] for group in groups for weight in group["params"]}


def _merge_ranks(values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the dictionaries of all ranks."""
    return {name: value for of_rank in all_gather_objects(values) for name, value in of_rank.items()}


def _optimizer_names(model: DistributedModelParallel, dense: torch.optim.Optimizer) -> dict[str, tuple[str, str]]:
    """Return the names of the optimizer class and of its rule, for each table and for the dense part."""
    tables = {name: _class_and_rule(tables.optimizer_class) for name, tables in _tables_by_name(model).items()}
    return {**_merge_ranks(tables), DENSE: _class_and_rule(type(dense))}


def _class_and_rule(optimizer: type[torch.optim.Optimizer]) -> tuple[str, str]:
    """Return the names of an optimizer class and of its rule, which is empty for torch's optimizers."""
    return optimizer.__name__, optimizer.rule.name if issubclass(optimizer, Optimizer) else ""


def _check_optimizers(path: Path, saved: Mapping[str, tuple[str, str]], current: Mapping[str, tuple[str, str]]) -> None:
    """Raise ValueError if a rule differs from the checkpoint.

    Another class with the same rule is allowed with a warning, such as CAdam after Adam.
    """
    changes = {part: (saved[part], names) for part, names in current.items() if saved.get(part, names) != names}
    if not changes:
        return
    details = "; ".join(f"{part} had {old[0]} and now has {new[0]}" for part, (old, new) in changes.items())
    message = f"{path} was saved with another optimizer: {details}"
    if any(old[1] != new[1] for old, new in changes.values() if old[1] and new[1]):
        raise ValueError(message)
    if dist.get_rank() == 0:
        logger.warning("%s", message)


def _option_problems(model: DistributedModelParallel, options: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Describe why the options of a checkpoint, by name of the table, do not fit the tables of this rank."""
    first_names: dict[int, str] = {}
    for name, tables in _tables_by_name(model).items():
        rule = tables.optimizer_class.rule
        saved, current = rule.state({**tables.options, **options[name]}), rule.state(tables.options)
        if saved.keys() != current.keys():
            yield f"{name} was saved with the buffers {sorted(saved)} and now has {sorted(current)}"
        first = first_names.setdefault(id(tables), name)
        if options[name] != options[first]:
            yield f"{first} and {name} share their options, but were saved with different ones"


def _has_managed_collision(model: DistributedModelParallel) -> bool:
    return any(isinstance(module, ShardedManagedCollisionCollection) for module in model.modules())
