"""Groups of processes with gloo, in which a test runs a function."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from cadam.distributed.process_group import leave


def worker(
    rank: int, world: int, folder: str, job: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    for name in ("torchrec", "root"):
        logging.getLogger(name).setLevel(logging.ERROR)
    address, timeout = f"file://{folder}/rendezvous", timedelta(seconds=90)
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=address, timeout=timeout)
    with open(f"{folder}/error.{rank}", "w") as errors:
        faulthandler.enable(errors)
        try:
            torch.save(job(*args, **options), Path(folder, f"result.{rank}"))
        except Exception:
            errors.write(traceback.format_exc())
            raise
        leave()


def run(world: int, folder: Path, job: Callable[..., Any], *args: Any, seconds: float = 400, **options: Any) -> Any:
    """Run `job` on `world` processes with gloo and return the result of rank 0. An error of any rank is raised."""
    folder.mkdir(parents=True)
    # Imported once for all groups. Modules that are not installed are ignored.
    multiprocessing.set_forkserver_preload(
        ["torch", "torch._dynamo", "cadam.online.distributed_learner", "cadam.torchrec"]
    )
    context = start_processes(
        worker, (world, str(folder), job, args, options), nprocs=world, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job.__name__} on {world} processes did not finish in {seconds} s")
    except Exception as error:
        errors = [file.read_text() for file in sorted(folder.glob("error.*"))]
        raise AssertionError("\n".join([str(error), *errors])) from error
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return torch.load(folder / "result.0", weights_only=False)
