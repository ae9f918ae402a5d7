"""Measure the host time of a CUDA step, until its kernels are launched, without a device.

The CUDA engine runs on tensors of the CPU; the kernels and the driver are replaced by functions of the same arguments
that do nothing. `cold` fills the caches with other data between steps, as a training step does. `warm` repeats the
step without that.

    python benchmarks/host_time.py [--usual]        (--usual: without the replayed step)
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import cadam
from cadam.engines import selection
from cadam.engines.cuda import dense as cuda
from cadam.engines.cuda import launch, sparse_grad, step_replay
from cadam.engines.cuda import sparse as cuda_rows
from cadam.native import build

STUB = """
#include <string.h>
#include <stdint.h>
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuEventQuery(void *event) { return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream)
{
    memcpy((void *)to, from, bytes);
    return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) { return 0; }
"""
ARGUMENTS = {  # one per kind of kernel; only their number matters
    "dense": ("table", "grads", "coefficients", "stride", "owners", "tensor_number", "seed"),
    "keys": ("ids", "keys", "error", "n", "rows"),
    "rows": ("p", "s_exp_avg", "s_exp_avg_sq", "values", "keys", "order", "partials", "coefficients", "counts", "seed"),
    "spanning_rows": ("p", "s_exp_avg", "s_exp_avg_sq", "keys", "partials", "coefficients", "counts", "seed"),
}


NOTHING_MORE = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": 0, "launch_pdl": 0}


class IdleKernel:
    """A replacement for a Triton kernel, which does nothing."""

    def __init__(self, kind: str) -> None:
        self.signature = dict.fromkeys(ARGUMENTS[kind], "i64")

    def __getitem__(self, grid: Any) -> Any:
        compiled = SimpleNamespace(run=lambda *args: None, function=1, packed_metadata=(4, 1, 0), name="idle")
        compiled.metadata, compiled.src = SimpleNamespace(**NOTHING_MORE), SimpleNamespace(signature=self.signature)
        return lambda *args, **constants: compiled


class IdleDriver(step_replay.Driver):
    """A replacement for the CUDA driver, which does nothing."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "stub.c", Path(folder) / "stub.so"
            source.write_text(STUB)
            subprocess.run([build.compiler(), "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
            self.library = ctypes.CDLL(str(library))
        self.functions = step_replay._function_addresses(self.library, step_replay.DRIVER_FUNCTIONS)
        self.current_stream = torch._C._cuda_getCurrentRawStream
        self.get_context = self.library.cuCtxGetCurrent

    def event(self) -> tuple[Any, int]:
        return None, 0


def pretend() -> None:
    """Let the CUDA engine serve tensors of the CPU, without a device."""
    engine, of_rows = cuda.Cuda(), cuda_rows.CudaRows()
    engine.device = of_rows.device = "cpu"
    selection.ENGINES = (engine, of_rows, *selection.ENGINES)
    torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice = (lambda index: 0), (lambda: 0)
    launch.missing_requirement, launch._has_known_launcher = (lambda device: None), lambda: True
    cuda.kernel = cuda_rows.kernel = lambda spec, kind: IdleKernel(kind)
    cuda.triton_type = cuda_rows.triton_type = lambda dtype: dtype
    keys = launch.Launch(IdleKernel("keys"), {})
    sparse_grad.make_keys = step_replay.make_keys = lambda in_bags: keys
    step_replay.driver = IdleDriver


SHAPES = {
    "one tensor": [(1 << 16,)],
    "161 tensors": [(100 + 7 * i,) for i in range(161)],
    "2,000 tiny tensors": [(100 + i % 57,) for i in range(2000)],
}


WARM_UP = 3  # steps that are not counted


def microseconds(optimizer: cadam.Optimizer) -> float:
    """Measure the host time of a step."""
    start = time.perf_counter_ns()
    optimizer.step()
    return (time.perf_counter_ns() - start) / 1e3


def assert_expected(optimizer: cadam.Optimizer, engine: str) -> None:
    found = optimizer.explain()
    assert found[0].engine == engine
    assert (found.steps == "replayed") == (os.environ.get("CADAM_REPLAY") != "0"), found.steps


def measure(shapes: list[tuple[int, ...]], cold: bool, rounds: int) -> list[float]:
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    others = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    ours, theirs = cadam.CAdam(params), torch.optim.Adam(others, foreach=True)
    source, large = [torch.randn_like(p) for p in params], np.zeros(8 << 20)
    times = []
    for _ in range(WARM_UP + rounds):
        for p, g in zip([*params, *others], [*source, *source], strict=True):
            p.grad = None
            p.grad = g.clone()
        if cold:
            theirs.step()
            large += 1
        times.append(microseconds(ours))
    assert_expected(ours, "cuda")
    return times[WARM_UP:]


def measure_rows(cold: bool, rounds: int, dense: int = 0) -> list[float]:
    """Build a table of 1M x 16 with few ids, because torch sorts them here, and a number of dense parameters."""
    table = torch.nn.Parameter(torch.randn(1_000_000, 16))
    params = [torch.nn.Parameter(torch.randn(100 + i)) for i in range(dense)]
    ours, large, times = cadam.CAdam([table, *params]), np.zeros(8 << 20), []
    for _ in range(WARM_UP + rounds):
        ids, values = torch.randint(0, 1_000_000, (1, 256)), torch.randn(256, 16)
        table.grad = torch.sparse_coo_tensor(ids, values, table.shape, check_invariants=False)
        for p in params:
            p.grad = torch.randn_like(p)
        if cold:
            large += 1
        times.append(microseconds(ours))
    assert_expected(ours, "cuda-rows")
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--usual", action="store_true", help="without the replayed step")
    options = parser.parse_args()
    pretend()
    torch.set_num_threads(1)
    if options.usual:
        os.environ["CADAM_REPLAY"] = "0"
    print("microseconds of the host before a step() returns: median (fastest)")
    cases = {name: partial(measure, shapes) for name, shapes in SHAPES.items()}
    cases |= {"a table": measure_rows, "a table, 60 tensors": partial(measure_rows, dense=60)}
    for name, taken in cases.items():
        shown = []
        for cold in (True, False):
            times = taken(cold=cold, rounds=40)
            shown.append(f"{'cold' if cold else 'warm'} {statistics.median(times):7.1f} ({min(times):.1f})")
        print(f"{name:20} {'   '.join(shown)}")


if __name__ == "__main__":
    main()
