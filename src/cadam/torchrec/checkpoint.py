"""Checkpoints of a sharded model: saved by some number of ranks, loaded by any other.

They are folders as cadam.distributed.process_group describes them. The tables, their moments and steps and the dense
part are the
tensors; the state of the dense part's optimizer, the step, the position in the data and the options of the tables are
what all ranks share.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection

from ..distributed.process_group import (
    RankCheckpoints,
    everywhere,
    load_tensors,
    lock_for_all,
    saved_options,
    tensors_of,
)
from ..online.persistence.checkpoints import pack
from ..optim.optimizer import Optimizer
from ..rules.moment_storage import STORAGE_DEFAULTS
from .sharders import tables_of, warn_of_plain_collections
from .tables import Tables

logger = logging.getLogger("cadam.torchrec")

_held: dict[Path, TextIO | None] = {}  # folders that this job saves in, until it ends: no other may


@dataclass(frozen=True)
class Saved:
    """Where a run stood when it was saved."""

    step: int
    position: Any


def save(
    folder: str | Path,
    step: int,
    model: DistributedModelParallel,
    dense: torch.optim.Optimizer,
    position: Any = None,
    *,
    keep: int = 2,
) -> Path:
    """Save a run as the newest checkpoint in `folder`, which all ranks see; all of them must call it.

    The folder is then this job's alone until it ends. One with checkpoints of later steps is refused: load it first.

    Args:
        folder: of the run.
        step: how many steps the run has taken.
        model: the sharded model.
        dense: the optimizer of its dense parameters.
        position: where to go on in the data, the same on all ranks and without regard to their number: anything
            that JSON can hold.
        keep: so many checkpoints stay, the newest.
    """
    warn_of_plain_collections(model)
    try:
        where = json.dumps(position)
    except (TypeError, ValueError) as error:
        raise TypeError(f"position cannot be saved: {error}") from error
    options = _of_all({name: saved_options(tables.options) for name, tables in _by_name(model).items()})
    pack(options, {}, "options of tables")  # what cannot be kept is an error on all ranks, before any writes
    shared = {
        "step": step,
        "position": where,
        "options of tables": options,
        "storage of tables": _of_all({name: _storage(tables.options) for name, tables in _by_name(model).items()}),
        "optimizers": _optimizers(model, dense),
        "dense": dense.state_dict(),
    }
    tree = {"tensors": tensors_of(model), "shared": shared, "own": None}
    kept = RankCheckpoints(folder, keep)
    if (whole := kept.folder.resolve()) not in _held:
        _held[whole] = lock_for_all(whole)
    return kept.save(step, tree)


def load(folder: str | Path, model: DistributedModelParallel, dense: torch.optim.Optimizer) -> Saved | None:
    """Take a run up from its newest good checkpoint; None if there is none yet. All ranks must call it.

    The number of ranks and the sharding may be others than when it was saved; tables and dense part must be the same.
    Options that say what is computed, the learning rate among them, are those of the checkpoint from then on, whatever
    the code gave. How moments are stored stays as the code has it: those of another storage are converted, see
    `Tables.store_as`. A damaged checkpoint is renamed with a message, and the one before it is loaded.
    """
    warn_of_plain_collections(model)
    found = RankCheckpoints(folder).newest()
    if found is None:
        return None
    path, tree = found
    shared = tree["shared"]
    _check_optimizers(path, shared.get("optimizers", {}), _optimizers(model, dense))
    options = {name: _options_of(name, tables, shared) for name, tables in _by_name(model).items()}
    misfits = [problem for of_rank in everywhere(list(_misfits(model, options))) for problem in of_rank]
    if misfits:
        raise ValueError(f"{path}: {misfits[0]}")
    own = {id(tables): (tables, _storage(tables.options)) for tables in tables_of(model)}
    try:
        for name, tables in _by_name(model).items():
            tables.store_as(**_storage(shared.get("storage of tables", {}).get(name, {})))
        load_tensors(path, model)
    finally:
        for tables, storage in own.values():
            tables.store_as(**storage)
    dense.load_state_dict(shared["dense"])
    for name, tables in _by_name(model).items():
        tables.options.update(options[name])
    if dist.get_rank() == 0:
        if "options of tables" not in shared:
            logger.warning("%s keeps of the tables' options the learning rate only; the others are the code's", path)
        if tree["ranks"] != dist.get_world_size() and _has_managed_collision(model):
            logger.warning(
                "%s is of %d ranks, and here are %d: with managed collision, ids that have no slot of their own are "
                "looked up in other rows than before, since each rank has one row for them",
                path,
                tree["ranks"],
                dist.get_world_size(),
            )
    return Saved(shared["step"], json.loads(shared["position"]))


def _storage(options: Mapping[str, Any]) -> dict[str, Any]:
    """How these options keep moments."""
    return {name: options.get(name, value) for name, value in STORAGE_DEFAULTS.items()}


def _by_name(model: DistributedModelParallel) -> dict[str, Tables]:
    """The tables of this rank by the name that the weight of each has in the model."""
    optimizer, by_options = model.fused_optimizer, {id(tables.options): tables for tables in tables_of(model)}
    names = {id(weight): name for name, weight in optimizer.params.items()}
    groups = [group for group in optimizer.param_groups if id(group) in by_options]
    return {names[id(weight)]: by_options[id(group)] for group in groups for weight in group["params"]}


def _of_all(mine: Mapping[str, Any]) -> dict[str, Any]:
    """What the ranks know by name, put together."""
    return {name: value for of_rank in everywhere(mine) for name, value in of_rank.items()}


def _optimizers(model: DistributedModelParallel, dense: torch.optim.Optimizer) -> dict[str, tuple[str, str]]:
    """Of each table and of the dense part, the class of its optimizer and the rule of that."""
    of_tables = {name: _class_and_rule(tables.optimizer_class) for name, tables in _by_name(model).items()}
    return {**_of_all(of_tables), "the dense part": _class_and_rule(type(dense))}


def _class_and_rule(optimizer: type[torch.optim.Optimizer]) -> tuple[str, str]:
    """The names of both; torch's own optimizers have no rule."""
    return optimizer.__name__, optimizer.rule.name if issubclass(optimizer, Optimizer) else ""


def _check_optimizers(path: Path, saved: Mapping[str, tuple[str, str]], here: Mapping[str, tuple[str, str]]) -> None:
    """Refuse what was saved with another rule; CAdam may go on from Adam, and a warning says that it does."""
    others = {part: (saved[part], mine) for part, mine in here.items() if part in saved and saved[part] != mine}
    if not others:
        return
    said = "; ".join(f"{part} with {was[0]}, and here it has {now[0]}" for part, (was, now) in others.items())
    message = f"{path} was saved with another optimizer: {said}"
    if any(was[1] != now[1] for was, now in others.values() if was[1] and now[1]):
        raise ValueError(message)
    if dist.get_rank() == 0:
        logger.warning("%s", message)


def _options_of(name: str, tables: Tables, shared: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a checkpoint gives to a table; what its class stands for stays."""
    if "options of tables" in shared:
        return {**shared["options of tables"].get(name, {}), **tables.optimizer_class.fixed}
    rates, table = shared["learning rates"], tables.table_names[0]
    return {"lr": rates[table]} if table in rates else {}


def _misfits(model: DistributedModelParallel, options: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Why these options cannot be given to the tables by name, if so."""
    first: dict[int, str] = {}
    for name, tables in _by_name(model).items():
        rule = tables.optimizer_class.rule
        needed, here = rule.state({**tables.options, **options[name]}), rule.state(tables.options)
        if needed.keys() != here.keys():
            yield (
                f"{name} was saved with options that need the buffers {sorted(needed)}, and here it has {sorted(here)}"
            )
        other = first.setdefault(id(tables), name)
        if options[name] != options[other]:
            yield f"{other} and {name} have the same options here, and were saved with different ones"


def _has_managed_collision(model: DistributedModelParallel) -> bool:
    return any(isinstance(module, ShardedManagedCollisionCollection) for module in model.modules())


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints of a run, the newest last."""
    return RankCheckpoints(folder).files()
