"""Measure how fast rows of 64 columns can be read and written on a GPU, the upper bound for `quantized_cuda.py`.

    python benchmarks/row_traffic.py

Needs nvcc, and 52 GB of the GPU's memory. A kernel that touches what a step of 50M rows touches, in a CUDA graph, for
each storage of the moments: with distinct ids, and with raw ids that were sorted before, so that it costs nothing.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from peers import cases
from quantized_cuda import _replay, in_graph, interleaved

ROWS, WIDTH = 50_000_000, 64
STORAGES = ("float32", "bfloat16", "int8")


def built() -> ctypes.CDLL:
    source = Path(__file__).with_name("row_traffic.cu")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/row_traffic.so"
        how = ["-O3", "-arch=native", "-shared", "-Xcompiler", "-fPIC"]
        subprocess.run(["nvcc", *how, "-o", library, str(source)], check=True)
        return ctypes.CDLL(library)


def main() -> None:
    library = built()
    floats = [torch.zeros(ROWS, WIDTH, device="cuda") for _ in range(3)]
    codes = torch.zeros(ROWS, 4 * WIDTH, dtype=torch.uint8, device="cuda")
    state = [*floats, codes, torch.zeros(ROWS, dtype=torch.int16, device="cuda")]
    batches = [cases.sample_ids("fields", ROWS, cases.IDS_PER_BATCH, seed).cuda() for seed in range(4)]

    def touch(storage: int, ids: Tensor, grads: Tensor, order: Tensor | None) -> None:
        pointers = [None if x is None else ctypes.c_void_p(x.data_ptr()) for x in (*state, grads, ids, order)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        failed = library.row_traffic(storage, *pointers, len(ids), len(grads), stream)
        if failed:
            raise RuntimeError(f"CUDA reports error {failed}")

    contenders = {}
    for kind in ("distinct", "raw"):
        for storage, name in enumerate(STORAGES):
            graphs = []
            for batch in batches:
                rows = torch.unique(batch).int()
                order = torch.sort(batch, stable=True)[1] if kind == "raw" else None
                grads = torch.randn(len(rows if order is None else batch), WIDTH, device="cuda")
                graphs.append(in_graph(partial(touch, storage, rows, grads, order)))
            contenders[f"{kind} {name}"] = partial(_replay, cycle(graphs))
    times = interleaved(contenders, rounds=25, inside=8)
    for name, taken in times.items():
        ratio = times[name.split()[0] + " float32"] / taken
        print(f"  {name:20} {1000 * taken:6.1f} us  {ratio:5.2f} x float32")


if __name__ == "__main__":
    main()
