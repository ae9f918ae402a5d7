"""Joining and leaving a torch.distributed process group, and collecting objects from all ranks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import Any, NoReturn

import torch
import torch.distributed as dist

logger = logging.getLogger("cadam.online")


def join(backend: str = "gloo") -> None:
    """Initialize the default process group, under torchrun or in a single process.

    Args:
        backend: the backend for `torch.distributed.init_process_group`. With NCCL each process uses the GPU of its
            local rank.
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
    # torchrun keeps one store for all its restarts. Restarted ranks would find the addresses of the ranks that died in
    # it and wait for them forever, so each restart uses its own prefix for the keys in the store.
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = dist.TCPStore(address, port, world, is_master=False)  # type: ignore[attr-defined]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.PrefixStore(f"attempt {attempt}", agent)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def leave() -> NoReturn:
    """End this process with exit code 0 once all ranks have called this function.

    This is the last line of a program that called `join`. As in a normal exit, non-daemon threads are joined,
    functions registered with `atexit` are called and output is flushed.

    Raises:
        RuntimeError: from the barrier, if another rank has failed.
    """
    dist.barrier()
    dist.destroy_process_group()
    # A normal shutdown of the interpreter sometimes aborts the process here ("terminate called without an active
    # exception"). A gloo group has threads that release the tensors of a collective after its caller has continued,
    # and that need the GIL for it. Python ends a thread that asks for the GIL during a shutdown, and C++ calls
    # terminate if that happens in a destructor (pytorch issue 190489). destroy_process_group ends the threads of a
    # group only if nothing refers to it any more, but models and learners do. So this function does what Python does
    # before a shutdown, and then ends the process without one.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def all_gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Collect one picklable value from every rank. All ranks of the group must call this function.

    Args:
        value: the value of this rank.
        group: a process group that can send objects; the default group if None.

    Returns:
        The values of all ranks, in the order of the ranks.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
