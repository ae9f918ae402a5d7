"""Measure a training step of a DynamicEmbedding whose rows are partly in memory-mapped files.

    python benchmarks/overflow.py --folder FOLDER [--ids 2000000] [--share 0.125] [--steps 40]

The same ids are learned with all rows in memory and with only a share of them, in turns. Lookups follow a Zipf law over
ids in a random order, so that rows which are used often are anywhere in the table. "warm" is a step while the operating
system still has all pages in memory; "cold" are the steps after it was asked to write all pages of the files to the
disk and to drop them (Linux), which is the worst case: every row that is used is read from the disk once.
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cadam
from cadam.tables import DynamicEmbedding

WIDTH = 16
BATCH = 4096
MADV_PAGEOUT = 21
MS_SYNC = 4


class Arm:
    """A table with its optimizer, which has learned all ids once."""

    def __init__(self, ids: int, **options: Any) -> None:
        self.table = DynamicEmbedding(WIDTH, **options)
        self.optimizer = cadam.CAdam(self.table.parameters(), lr=0.01)
        self.table.attach(self.optimizer)
        for start in range(0, ids, 16 * BATCH):
            self.step(torch.arange(start, min(ids, start + 16 * BATCH)))

    def step(self, ids: torch.Tensor) -> float:
        """Take a training step, and return its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        (self.table(ids) - 1).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def drop_pages(self, first_mapped: int) -> int:
        """Ask for the pages of mapped chunks to be written and dropped, and return their bytes."""
        libc, total = ctypes.CDLL(None, use_errno=True), 0
        libc.madvise.argtypes = libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for chunk in list(self.table.chunks)[first_mapped:]:
            state = self.optimizer.state.get(chunk, {}).values()
            for tensor in (chunk, *(x for x in state if x.dim())):
                for function, flag in ((libc.msync, MS_SYNC), (libc.madvise, MADV_PAGEOUT)):
                    if function(tensor.data_ptr(), tensor.nbytes, flag):
                        raise OSError(ctypes.get_errno(), "the pages cannot be dropped")
                total += tensor.nbytes
        return total


def zipf(random: np.random.Generator, ids: int) -> torch.Tensor:
    """Return ids of a batch: popular ones anywhere among all ids."""
    ranks = np.minimum(ids ** random.random(BATCH), ids - 1).astype(np.int64)
    return torch.from_numpy(ranks * 2654435761 % ids)


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ids", type=int, default=2_000_000)
    parser.add_argument("--share", type=float, default=0.125)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    memory_rows = int(arguments.ids * arguments.share)
    options = {"memory_rows": memory_rows, "overflow_folder": arguments.folder}
    arms = {"all rows in memory": Arm(arguments.ids), "rows in files": Arm(arguments.ids, **options)}
    mapped = arms["rows in files"]
    chunk_ends = np.cumsum([len(chunk) for chunk in mapped.table.chunks])
    first_mapped = int((chunk_ends <= memory_rows).sum())
    random = np.random.default_rng(0)
    batches = [zipf(random, arguments.ids) for _ in range(arguments.steps)]
    times: dict[str, list[float]] = {}
    for batch in batches:
        for name, arm in arms.items():
            times.setdefault(name + ", warm", []).append(arm.step(batch))
    dropped, faults = mapped.drop_pages(first_mapped), page_faults()
    for batch in batches:
        times.setdefault("rows in files, cold", []).append(mapped.step(batch))
    faults = page_faults() - faults
    print(
        f"{arguments.ids:,} ids of width {WIDTH}, {arguments.share:.3f} of the rows in memory, {dropped / 1e6:,.0f} MB "
        f"of rows and moments in files, {len(mapped.table.chunks)} chunks against "
        f"{len(arms['all rows in memory'].table.chunks)}, batches of {BATCH:,}"
    )
    print(f"{'milliseconds per step':28}{'median':>9}{'first 10':>10}{'last 10':>9}")
    for name, seconds in times.items():
        parts = (statistics.median(part) * 1000 for part in (seconds, seconds[:10], seconds[-10:]))
        print(f"{name:28}" + "".join(f"{value:{width}.2f}" for value, width in zip(parts, (9, 10, 9), strict=True)))
    print(f"{faults:,} pages were read from the disk in {len(batches)} cold steps")


if __name__ == "__main__":
    main()
