"""Checkpoints of a sharded model: saved by some number of ranks, loaded by any other.

They are folders as cadam.online.ranks describes them. The tables, their moments and steps and the dense part are the
tensors; the state of the dense part's optimizer, the step, the position in the data and the learning rates of the
tables are what all ranks share.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torchrec.distributed import DistributedModelParallel

from ..online.ranks import RankCheckpoints, everywhere, load_tensors, lock_for_all, tensors_of
from .sharders import tables_of

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
    rates = {name: tables.get_learning_rate() for tables in tables_of(model) for name in tables.table_names}
    shared = {
        "step": step,
        "position": json.dumps(position),
        "learning rates": {name: rate for of_rank in everywhere(rates) for name, rate in of_rank.items()},
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
    A damaged checkpoint is put aside with a message, and the one before it is loaded.
    """
    found = RankCheckpoints(folder).newest()
    if found is None:
        return None
    path, shared = found[0], found[1]["shared"]
    load_tensors(path, model)
    dense.load_state_dict(shared["dense"])
    for tables in tables_of(model):
        tables.set_learning_rate(shared["learning rates"][tables.table_names[0]])
    return Saved(shared["step"], json.loads(shared["position"]))


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints of a run, the newest last."""
    return RankCheckpoints(folder).files()
