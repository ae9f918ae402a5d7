"""The host's share of a step on CUDA, measured without a device: how long until the kernels are launched.

The CUDA engine runs on tensors of the CPU; the kernels and the driver are replaced by functions of the same arguments
that do nothing. Between steps the caches are filled with other things, as they are by a training step: `cold`. `warm`
is the same step over and over.

    python benchmarks/host_time.py [--usual]        (--usual: without the prepared step)
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import cadam
from cadam import engines
from cadam.engines import again, cuda
from cadam.kernels import build

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
ARGUMENTS = {"table": "*i64", "grads": "*i64", "coefficients": "*fp64", "stride": "i32", "owners": "*i32"}
ARGUMENTS |= {"only": "i32", "found_inf": "constexpr", "seed": "i64"}


class IdleKernel:
    """Stands for a Triton kernel."""

    def __getitem__(self, grid: Any) -> Any:
        compiled = SimpleNamespace(run=lambda *args: None, function=1, packed_metadata=(4, 1, 0), name="idle")
        compiled.metadata, compiled.src = SimpleNamespace(), SimpleNamespace(signature=ARGUMENTS)
        return lambda *args, **constants: compiled


class IdleDriver(again.Driver):
    """Stands for the CUDA driver."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "stub.c", Path(folder) / "stub.so"
            source.write_text(STUB)
            subprocess.run([build.compiler(), "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
            self.library = ctypes.CDLL(str(library))
        self.functions = again._addresses(self.library, again.CUDA)
        self.current_stream = torch._C._cuda_getCurrentRawStream
        self.get_context = self.library.cuCtxGetCurrent

    def event(self) -> tuple[Any, int]:
        return None, 0


def pretend() -> None:
    """Let the CUDA engine serve tensors of the CPU, with nothing behind it."""
    engine = cuda.Cuda()
    engine.device = "cpu"
    engines.ENGINES = (engine, *engines.ENGINES)
    torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice = (lambda index: 0), (lambda: 0)
    cuda.lacking, cuda.kernel, cuda._direct = (lambda device: None), (lambda *what: IdleKernel()), lambda: True
    cuda.triton_type = lambda dtype: dtype
    again.driver = IdleDriver


SHAPES = {
    "one tensor": [(1 << 16,)],
    "161 tensors": [(100 + 7 * i,) for i in range(161)],
    "2,000 tiny tensors": [(100 + i % 57,) for i in range(2000)],
}


def measure(shapes: list[tuple[int, ...]], cold: bool, rounds: int) -> list[float]:
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    others = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    ours, theirs = cadam.CAdam(params), torch.optim.Adam(others, foreach=True)
    source, large = [torch.randn_like(p) for p in params], np.zeros(8 << 20)
    times = []
    for turn in range(rounds + 3):
        for p, g in zip([*params, *others], [*source, *source], strict=True):
            p.grad = None
            p.grad = g.clone()
        if cold:
            theirs.step()
            large += 1
        start = time.perf_counter_ns()
        ours.step()
        taken = time.perf_counter_ns() - start
        if turn >= 3:
            times.append(taken / 1e3)
    assert ours.explain()[0].engine == "cuda"
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--usual", action="store_true", help="without the prepared step")
    options = parser.parse_args()
    pretend()
    torch.set_num_threads(1)
    if options.usual:
        cadam.plan.Plan.prepare = lambda *args: None
    print("microseconds of the host before a step() returns: median (fastest)")
    for name, shapes in SHAPES.items():
        shown = []
        for cold in (True, False):
            times = measure(shapes, cold, 40)
            shown.append(f"{'cold' if cold else 'warm'} {statistics.median(times):7.1f} ({min(times):.1f})")
        print(f"{name:20} {'   '.join(shown)}")


if __name__ == "__main__":
    main()
