"""Measuring one run: its duration, its peak memory, and the device and versions that computed it."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from .results import Outcome, Provenance, Result, RunSpec


class DamagedResultError(ValueError):
    """A file of the cache that cannot be read."""


def measure_run(compute: Callable[[RunSpec], Outcome], spec: RunSpec) -> Result:
    """Compute one run with one thread, and record its duration and peak memory.

    Args:
        compute: The function that computes the outcome.
        spec: The spec of the run.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # without this file, the peak is that of the process since its start
        Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    try:
        outcome = compute(spec)
    finally:
        torch.set_num_threads(threads)
    return Result(spec, outcome, current_provenance(time.perf_counter() - start))


def current_provenance(seconds: float) -> Provenance:
    """Return the provenance of a result that this process has just computed in this many seconds."""
    import torch

    import cadam

    is_on_cuda = torch.cuda.is_available() and torch.cuda.max_memory_reserved() > 0
    memory = torch.cuda.max_memory_reserved() if is_on_cuda else _peak_memory()
    device = torch.cuda.get_device_name() if is_on_cuda else f"CPU, {processor_name()}"
    versions = {"cadam": cadam.__version__, "torch": torch.__version__, "numpy": np.__version__}
    if jax := sys.modules.get("jax"):
        versions["jax"] = jax.__version__
        if not is_on_cuda and jax.default_backend() == "gpu":
            accelerator = jax.local_devices()[0]
            memory, device = accelerator.memory_stats()["peak_bytes_in_use"], accelerator.device_kind
    return Provenance(seconds, memory, device, {"python": platform.python_version(), **versions})


def processor_name() -> str:
    """Return the model of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _peak_memory() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
