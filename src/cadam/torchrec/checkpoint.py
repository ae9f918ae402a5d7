"""Checkpoints of a sharded model: saved by some number of ranks, loaded by any other.

A checkpoint is a folder of torch.distributed.checkpoint with the tables, their moments and steps and the dense part;
beside it `dense.pt`, the state of the dense part's optimizer, which every rank has whole, and `run.json` with what
belongs to no tensor: the step, the position in the data, learning rates of tables. It is written under another name
first, so that one that was interrupted is never taken for whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torchrec.distributed import DistributedModelParallel

from .sharders import tables_of

PARTIAL = ".partial"


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
    every_rate: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every_rate, rates)
    merged = {name: rate for of_rank in every_rate for name, rate in of_rank.items()}
    run = json.dumps({"step": step, "position": position, "learning_rates": merged})
    target = Path(folder) / f"step-{step:012d}"
    partial = target.with_name(target.name + PARTIAL)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "run.json").write_text(run)
        torch.save(dense.state_dict(), partial / "dense.pt")
    dist.barrier()
    tensors = _flat(model.state_dict(), model.fused_optimizer.state_dict())
    save_tensors(tensors, checkpoint_id=str(partial))
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def load(folder: str | Path, model: DistributedModelParallel, dense: torch.optim.Optimizer) -> Saved | None:
    """Take a run up from its newest checkpoint; None if there is none yet. All ranks must call it.

    The number of ranks and the sharding may be others than when it was saved; tables and dense part must be the same.
    """
    found = checkpoints(folder)
    if not found:
        return None
    run = json.loads((found[-1] / "run.json").read_text())
    state, tables_state = model.state_dict(), model.fused_optimizer.state_dict()
    load_tensors(_flat(state, tables_state), checkpoint_id=str(found[-1]))  # in place
    model.load_state_dict(state)
    model.fused_optimizer.load_state_dict(tables_state)
    dense.load_state_dict(torch.load(found[-1] / "dense.pt", map_location="cpu"))
    for tables in tables_of(model):
        tables.set_learning_rate(run["learning_rates"][tables.table_names[0]])
    return Saved(run["step"], run["position"])


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints of a run, the newest last."""
    return sorted(path for path in Path(folder).glob("step-*") if path.suffix != PARTIAL)


def _flat(model: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor under one name. Not nested: of a rank without tables, an empty part would be looked for on disk."""
    tensors = {f"model.{name}": value for name, value in model.items()}
    for param, state in tables["state"].items():
        tensors.update({f"tables.{param}.{name}": value for name, value in state.items()})
    return tensors
