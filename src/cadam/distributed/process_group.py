"""Processes that work on one job, its ranks: how they meet and end, and the one checkpoint they write together.

A checkpoint is a folder: every tensor of the model in torch.distributed.checkpoint, sharded or not; in
`shared.safetensors` what is the same on all ranks, in `rank-N.safetensors` what each has of its own; in
`checkpoint.json` the number of ranks and a hash of every other file. It gets its name when all ranks have written all
of it, so that one that was interrupted is never taken for whole; by the hashes one that was damaged later is found out,
and the one before it is used.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..atomic_write import flush_and_rename
from ..cli.exit_codes import DONE
from ..engines.resolved_group import EXECUTION_OPTIONS
from ..online.persistence.checkpoints import Checkpoints, before, lock, read, rename_damaged, write
from .table_protocol import table_optimizer

logger = logging.getLogger("cadam.online")

PARTIAL, DAMAGED = ".partial", ".damaged"


def join(backend: str = "gloo") -> None:
    """`init_process_group` for a process that torchrun started, or for one on its own.

    torchrun keeps one store for all its attempts. Ranks that it starts anew would find the addresses of those that died
    there and wait for them for ever, so each attempt has names of its own in the store.

    With NCCL each process takes the GPU of its local rank.
    """
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        dist.init_process_group(backend)
        return
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        logger.warning(
            "several nodes share torchrun's own store, and ranks may not find each other there after a restart: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = dist.TCPStore(address, port, world, is_master=False)  # type: ignore[attr-defined]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.PrefixStore(f"attempt {attempt}", agent)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def leave() -> NoReturn:
    """End this process with exit code 0 once all ranks have called this: the last line of a program that called `join`.

    Threads are waited for, functions registered with `atexit` are called, and output is flushed, as at any other end.
    If another rank has failed, this one fails too, with the RuntimeError of the barrier.
    """
    dist.barrier()
    dist.destroy_process_group()
    # Here Python would shut the interpreter down, and that sometimes aborts the process ("terminate called without an
    # active exception"). A gloo group has threads that release the tensors of a collective after its caller has gone
    # on, and need the GIL for it. Python ends a thread that asks for the GIL during a shutdown, and C++ calls terminate
    # if that happens in a destructor (pytorch issue 190489). destroy_process_group ends the threads of a group only if
    # nothing refers to it any more, and models and learners do. So this does what Python does before a shutdown, and
    # then ends the process without one.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(DONE)


def lock_for_all(folder: Path, group: Any = None) -> TextIO | None:
    """Have a folder alone, as a job, until rank 0 closes the file that it is given; all ranks must call it."""
    file, failed = None, None
    if dist.get_rank(group) == 0:
        try:
            file = lock(folder)
        except RuntimeError as error:
            failed = str(error)
    if failed := everywhere(failed, group)[0]:
        raise RuntimeError(failed)
    return file


def everywhere(mine: Any, group: Any = None) -> list[Any]:
    """What each rank gave, by rank; all of them must call it."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group)
    return every


# Tensors -------------------------------------------------------------------------------------------------------


def tensors_of(model: nn.Module) -> dict[str, Any]:
    """Every tensor of a model, and of the optimizer of its tables if it has such, under one name each."""
    return _flat(model.state_dict(), _tables_state(model))


def load_tensors(folder: Path, model: nn.Module, group: Any = None) -> None:
    """Load what `tensors_of` gave when it was saved, by any number of ranks, into the same model."""
    state, tables = model.state_dict(), _tables_state(model)
    try:
        load(_flat(state, tables), checkpoint_id=str(folder), process_group=group)  # in place
    except CheckpointException as error:
        raise ValueError(f"{folder} is not of this model: {error}") from error
    model.load_state_dict(state)
    if (of_tables := table_optimizer(model)) is not None:
        of_tables.load_state_dict(tables)


def saved_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that a checkpoint keeps: those that say what is computed, not how it runs."""
    return {name: value for name, value in group.items() if name not in ("params", *EXECUTION_OPTIONS)}


def _tables_state(model: nn.Module) -> Mapping[str, Any]:
    of_tables = table_optimizer(model)
    return {"state": {}} if of_tables is None else of_tables.state_dict()


def _flat(model: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Not nested: of a rank without tables, an empty part would be looked for on disk."""
    tensors = {f"model.{name}": value for name, value in model.items()}
    for param, state in tables["state"].items():
        tensors.update({f"tables.{param}.{name}": value for name, value in state.items()})
    return tensors


# Folders -------------------------------------------------------------------------------------------------------


class RankCheckpoints(Checkpoints):
    """The checkpoints of one job under a folder that all ranks see; all of them must call each method but `files`.

    A tree to be saved has ``tensors``, as `tensors_of` gives them, ``shared``, of which rank 0's is kept, and ``own``.

    Args:
        keep: so many checkpoints stay, the newest.
        group: a process group for objects; by default that of all ranks.
        hold: keep other jobs away from the folder until `close`.
    """

    def __init__(self, folder: Path | str, keep: int = 3, group: Any = None, *, hold: bool = False) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder, self.keep, self.group = Path(folder), keep, group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_for_all(self.folder, group) if hold else None

    def files(self) -> list[Path]:
        """The whole ones, oldest first."""
        return sorted(path for path in self.folder.glob("checkpoint-*") if path.suffix not in (PARTIAL, DAMAGED))

    def save(self, number: int, tree: Any) -> Path:
        """Keep the tree as checkpoint `number`, which must not be before one that is there: it would never be loaded.

        An OSError is one on all ranks, and leaves what was there before.
        """
        target = self.folder / f"checkpoint-{number:012d}"
        unfinished = target.with_name(target.name + PARTIAL)
        newer = [path.name for path in self._each(self.files)[0] if path > target]
        if newer:
            raise ValueError(f"{self.folder} has {newer[-1]}, newer than {target.name}: load it, or save elsewhere")
        self._each(lambda: self._prepare(unfinished) if self.rank == 0 else None)
        try:
            save(tree["tensors"], checkpoint_id=str(unfinished), process_group=self.group)
        except CheckpointException as error:
            raise OSError(f"{unfinished}: {error}") from error
        hashes = self._each(lambda: self._write(unfinished, tree))
        every = {name: digest for of_rank in hashes for name, digest in of_rank.items()}
        self._each(lambda: self._finish(unfinished, target, every) if self.rank == 0 else None)
        return target

    def newest(self) -> tuple[Path, Any] | None:
        """As `Checkpoints.newest`, but for the tensors: they stay where they are, and `load_tensors` loads them.

        Beside ``shared`` and ``own`` the tree has ``folder`` and ``ranks``, how many saved it; ``own`` is None on those
        beyond them.
        """
        files = self._each(self.files)[0]
        damaged: list[Path] = []
        for path in reversed(files):
            wrong = [name for of_rank in self._each(partial(self._wrong, path)) for name in of_rank]
            if wrong:
                logger.error("damaged checkpoint, %s: %s: %s", before(path, files), path, "; ".join(wrong))
                damaged.append(path)
                continue
            self._each(lambda: rename_damaged(damaged) if self.rank == 0 else None)
            own = path / _own(self.rank)
            return path, {
                "folder": path,
                "ranks": json.loads((path / "checkpoint.json").read_text())["ranks"],
                "shared": read(path / "shared.safetensors"),
                "own": read(own) if own.exists() else None,
            }
        self.check_none(files)
        return None

    def _prepare(self, unfinished: Path) -> None:
        for left in self.folder.glob(f"checkpoint-*{PARTIAL}"):
            shutil.rmtree(left)
        unfinished.mkdir()

    def _write(self, unfinished: Path, tree: Mapping[str, Any]) -> dict[str, str]:
        """This rank's files beside the tensors; a hash of each that it has written."""
        write(unfinished / _own(self.rank), tree["own"])
        if self.rank == 0:
            write(unfinished / "shared.safetensors", tree["shared"])
        mine = [_own(self.rank), *(path.name for path in unfinished.glob(f"__{self.rank}_*"))]
        mine += [".metadata", "shared.safetensors"] if self.rank == 0 else []
        return {name: _digest(unfinished / name) for name in mine}

    def _finish(self, unfinished: Path, target: Path, hashes: Mapping[str, str]) -> None:
        """All ranks have written: make it the newest."""
        new = unfinished / "checkpoint.new"
        new.write_text(json.dumps({"ranks": self.world, "sha256": hashes}))
        flush_and_rename(new, unfinished / "checkpoint.json")
        before = target.with_name(f"{target.name}.before{PARTIAL}")
        if target.exists():
            os.replace(target, before)
        try:
            flush_and_rename(unfinished, target)
        except OSError:
            if before.exists() and not target.exists():
                os.replace(before, target)
            raise
        shutil.rmtree(before, ignore_errors=True)
        for old in [path for path in self.files() if path <= target][: -self.keep]:
            shutil.rmtree(old)

    def _wrong(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint; each rank looks at some of its files."""
        try:
            about = json.loads((path / "checkpoint.json").read_text())
            hashes, needed = dict(about["sha256"]), {_own(rank) for rank in range(about["ranks"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [f"rank {self.rank}: checkpoint.json cannot be read: {error!r}"]
        needed |= {".metadata", "shared.safetensors"}
        wrong = [f"checkpoint.json does not name {name}" for name in sorted(needed - hashes.keys()) if self.rank == 0]
        for name in sorted(hashes)[self.rank :: self.world]:
            try:
                if _digest(path / name) != hashes[name]:
                    wrong.append(f"{name} does not have the hash it was written with")
            except OSError as error:
                wrong.append(str(error))
        return wrong

    def _each(self, work: Callable[[], Any]) -> list[Any]:
        """What each rank's work gives; if it fails on one, it has failed for all."""
        result, failed = None, None
        try:
            result = work()
        except OSError as error:
            failed = f"rank {self.rank}: {error}"
        every = everywhere((result, failed), self.group)
        failures = [failed for _, failed in every if failed is not None]
        if failures:
            raise OSError("; ".join(failures))
        return [result for result, _ in every]


def _own(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()
