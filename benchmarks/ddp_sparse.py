"""Compare `cadam.optim.ddp.gather_rows` with torch's sum of sparse gradients under DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 benchmarks/ddp_sparse.py times
    torchrun --standalone --nproc-per-node 2 benchmarks/ddp_sparse.py steps {torch,rows} [--seconds 480]

`times` prints medians of backward and a step of CAdam, interleaved. `steps` runs backward for ten small tables with
batches of 0 to 30 events until the time is over; torch's sum ends some of these runs with a segmentation fault.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cadam import CAdam
from cadam.online.distributed_learner import join, leave
from cadam.optim.ddp import gather_rows

SHAPES = [
    (10, 20, 4, 16),
    (1, 1_000_000, 16, 512),
    (1, 1_000_000, 16, 8192),
    (1, 20, 64, 8192),
    (10, 100_000, 16, 8192),
]
"""Number of tables, rows, columns, and events per rank."""


class Tables(nn.Module):
    """A model that adds one row of each table for an event, and a linear layer."""

    def __init__(self, tables: int, rows: int, columns: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, columns, sparse=True) for _ in range(tables))
        self.out = nn.Linear(columns, 1)

    def forward(self, ids: Tensor) -> Tensor:
        score: Tensor = self.out(torch.stack([table(ids) for table in self.tables]).sum(0))
        return score.sum()


def wrapped(how: str, tables: int, rows: int, columns: int) -> DistributedDataParallel:
    model = DistributedDataParallel(Tables(tables, rows, columns))
    if how == "rows":
        gather_rows(model)
    return model


def times(rounds: int) -> None:
    for tables, rows, columns, events in SHAPES:
        models = {how: wrapped(how, tables, rows, columns) for how in ("torch", "rows")}
        optimizers = {how: CAdam(model.parameters()) for how, model in models.items()}
        took: dict[str, list[float]] = {how: [] for how in models}
        for number in range(rounds + 5):
            ids = torch.randint(rows, (events,))
            for how, model in models.items():
                model.zero_grad()
                loss = model(ids)
                dist.barrier()
                began = time.perf_counter()
                loss.backward()
                optimizers[how].step()
                if number >= 5:
                    took[how].append(time.perf_counter() - began)
        torchs, ours = (1e3 * statistics.median(took[how]) for how in ("torch", "rows"))
        if dist.get_rank() == 0:
            print(
                f"{tables:2d} x {rows:9,d} x {columns}, {events:5,d} events a rank: torch {torchs:7.2f} ms, rows "
                f"{ours:7.2f} ms, {torchs / ours:.2f} times as fast",
                flush=True,
            )


def steps(how: str, seconds: float) -> None:
    model, chance = wrapped(how, 10, 20, 4), random.Random(dist.get_rank())
    began, count, going = time.monotonic(), 0, torch.ones(1)
    while going.item() == 1:
        for _ in range(100):
            model.zero_grad()
            model(torch.randint(20, (chance.choice([0, 0, 1, 5, 16, 30]),))).backward()
        count += 100
        going.fill_(time.monotonic() - began < seconds)
        dist.all_reduce(going, dist.ReduceOp.MIN)
        if dist.get_rank() == 0 and (count % 10_000 == 0 or going.item() != 1):
            print(f"{how}: {count:,} steps in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["times", "steps"])
    parser.add_argument("how", nargs="?", choices=["torch", "rows"], default="rows")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    join()
    times(given.rounds) if given.what == "times" else steps(given.how, given.seconds)
    leave()


if __name__ == "__main__":
    main()
