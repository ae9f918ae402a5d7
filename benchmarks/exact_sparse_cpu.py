"""Compare the options of tables on the CPU: time, bytes per row, and agreement with dense gradients.

    python benchmarks/exact_sparse_cpu.py [time] [rounding] [movement]      # about three minutes

- `time` interleaves the steps of lazy updates, exact updates and `confidence_after` on one thread. It prints the median
  processor time of each, which other programs on the machine hardly change, and the median ratio of a round.
- `rounding` trains a table in float32 with exact sparse updates and another one with dense gradients, and counts the
  rows that differ by more than a learning rate: near a tie of the mask, rounding decides whether an element moves.
- `movement` trains a table with dense gradients with Adam and with CAdam, and prints how far its rows move.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

import cadam

TABLES = [(1_000_000, 16), (300_000, 64)]
IDS = 50_000
WARM_UP, ROUNDS = 20, 100
LATE = "confidence_after=1000"
VARIANTS: dict[str, dict[str, Any]] = {
    "lazy": {},
    "exact": {"sparse_updates": "exact"},
    LATE: {"confidence_after": 1000},
    "int8, lazy": {"moments": "int8"},
    "int8, exact": {"moments": "int8", "sparse_updates": "exact"},
    f"int8, {LATE}": {"moments": "int8", "confidence_after": 1000},
}


def zipf_ids(rng: np.random.Generator, rows: int, count: int) -> torch.Tensor:
    """Return row numbers whose frequencies are about inversely proportional to their ranks."""
    return torch.from_numpy(np.minimum(rows ** rng.random(count), rows - 1).astype(np.int64))


def sparse_grad(table: torch.Tensor, ids: torch.Tensor, seed: int) -> torch.Tensor:
    values = torch.randn(len(ids), table.shape[1], generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(ids[None], values, table.shape, check_invariants=False)


def measure_time() -> None:
    """Print the time of a step, its ratio, and the bytes of state per row."""
    torch.set_num_threads(1)
    for rows, width in TABLES:
        rng, sides = np.random.default_rng(0), {}
        for name, options in VARIANTS.items():
            table = torch.nn.Parameter(torch.zeros(rows, width))
            sides[name] = table, cadam.CAdam([table], **options)
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for round_number in range(WARM_UP + ROUNDS):
            ids = zipf_ids(rng, rows, IDS)
            for name in rng.permutation(list(VARIANTS)).tolist():
                table, optimizer = sides[name]
                table.grad = sparse_grad(table, ids, round_number)
                start = time.process_time()
                optimizer.step()
                if round_number >= WARM_UP:
                    times[name].append(time.process_time() - start)
        print(f"{rows:,} rows of {width}, {IDS:,} ids a step; speed relative to lazy updates with the same moments")
        for name, (table, optimizer) in sides.items():
            state: dict[str, Any] = optimizer.state[table]
            size = sum(x.numel() * x.itemsize for x in state.values() if x.numel() >= rows)
            lazy = "int8, lazy" if name.startswith("int8") else "lazy"
            ratio = statistics.median(a / b for a, b in zip(times[lazy], times[name], strict=True))
            median = statistics.median(times[name]) * 1e3
            print(f"  {name}: {median:.2f} ms, speed {ratio:.2f}, {size / rows:.0f} bytes of state per row", flush=True)


def measure_rounding(
    rows: int = 5000, width: int = 16, steps: int = 1000, lr: float = 1e-3, device: str = "cpu"
) -> None:
    """Print the share of rows that differ from dense gradients after many float32 steps."""
    exact, lazy, dense = (torch.nn.Parameter(torch.zeros(rows, width, device=device)) for _ in range(3))
    optimizers = [
        cadam.CAdam([exact], lr=lr, sparse_updates="exact"),
        cadam.CAdam([lazy], lr=lr),
        cadam.CAdam([dense], lr=lr),
    ]
    rng = np.random.default_rng(1)
    for step in range(steps):
        exact.grad = lazy.grad = sparse_grad(exact, zipf_ids(rng, rows, 200), step).to(device).coalesce()
        dense.grad = exact.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()
    print(f"{steps:,} float32 steps on {rows:,} rows of {width}, compared with dense gradients:")
    for name, table in {"exact": exact, "lazy": lazy}.items():
        differ = (table - dense).abs().amax(1)
        print(
            f"  {name}: {(differ > lr).float().mean():.2%} of the rows differ by more than a learning rate, "
            f"{(differ > lr / 1000).float().mean():.2%} by more than a thousandth of it"
        )


def measure_movement(rows: int = 2000, lr: float = 1e-3) -> None:
    """Print how far rows with dense gradients of one sign move with CAdam, relative to Adam."""
    print("distance that a row with dense gradients moves with CAdam, relative to Adam:")
    for batches in (5, 10, 20, 50, 100, 500):
        adam, cadam_ = (torch.nn.Parameter(torch.zeros(rows, 1)) for _ in range(2))
        optimizers = [cadam.Adam([adam], lr=lr), cadam.CAdam([cadam_], lr=lr)]
        generator = torch.Generator().manual_seed(0)
        for _ in range(20 * batches):
            adam.grad = (torch.rand(rows, 1, generator=generator) < 1 / batches).float()
            cadam_.grad = adam.grad
            for optimizer in optimizers:
                optimizer.step()
        print(f"  in one of {batches} batches: {(cadam_.mean() / adam.mean()).item():.2f}", flush=True)


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["time", "rounding", "movement"]
    if "time" in chosen:
        measure_time()
    if "rounding" in chosen:
        measure_rounding()
    if "movement" in chosen:
        measure_movement()
