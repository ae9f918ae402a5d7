"""Time one step over many small embedding tables, with unnamed and with named parameters.

`named_parameters()` is what the README recommends, so names must not cost anything. The torch.optim peer is SparseAdam.
All optimizers take turns, and the table shows medians over the rounds.

    python benchmarks/many_tables.py [--tables 26 200 800] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from cadam import CAdam

ROWS, WIDTH, IDS = 1000, 16, 64


def make_tables(count: int) -> list[torch.nn.Parameter]:
    """Return `count` embedding tables, each with a sparse gradient for `IDS` random rows."""
    generator = torch.Generator().manual_seed(0)
    tables = []
    for _ in range(count):
        table = torch.nn.Parameter(torch.zeros(ROWS, WIDTH))
        ids = torch.randint(ROWS, (1, IDS), generator=generator)
        values = torch.randn(IDS, WIDTH, generator=generator)
        table.grad = torch.sparse_coo_tensor(ids, values, table.shape, check_invariants=False)
        tables.append(table)
    return tables


def contenders(count: int) -> dict[str, Callable[[], object]]:
    """Return the step functions to compare."""
    named = [(f"embeddings.{i}.weight", table) for i, table in enumerate(make_tables(count))]
    return {
        "CAdam": CAdam(make_tables(count)).step,
        "CAdam named": CAdam(named).step,
        "SparseAdam": torch.optim.SparseAdam(make_tables(count)).step,
    }


def main() -> None:
    """Print the median time of a step for each number of tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, nargs="+", default=[26, 200, 800])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"{'tables':>8}  {'CAdam':>10}  {'named':>10}  {'SparseAdam':>10}  named / unnamed  SparseAdam / named")
    for count in arguments.tables:
        steps = contenders(count)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            step()
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
        plain, named, peer = (1e3 * statistics.median(times[name]) for name in steps)
        print(
            f"{count:8}  {plain:7.2f} ms  {named:7.2f} ms  {peer:7.2f} ms  {named / plain:15.2f}  {peer / named:18.2f}"
        )


if __name__ == "__main__":
    main()
