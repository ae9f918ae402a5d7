"""What storing moments in fewer bytes does to a model: a factorization machine that predicts a stream, then learns it.

    python benchmarks/light_quality.py DATA [--events 300000] [--seeds 3]

DATA is a folder with nycflights13.parquet, ml_latest_small.parquet and retrosheet-2000-2024.parquet. Every storage
sees the same events from the same starting weights; each number is the mean over seeds of its difference to float32,
with a 95% interval (Student's t over seeds). The noise floor beside it is float32 against itself with other starts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

import cadam
from cadam.metrics import auc

WIDTH, BATCH, LR = 16, 256, 3e-3
STORAGES: dict[str, dict[str, Any]] = {
    "float32": {},
    "row v": {"second_moment": "row"},
    "bfloat16": {"moments": "bfloat16"},
    "int8": {"moments": "int8"},
    "int8, row v": {"moments": "int8", "second_moment": "row"},
    "row steps": {"row_steps": True},
}
STREAMS = {
    "flights": ("nycflights13", ["carrier", "flight", "tailnum", "origin", "dest", "hour", "month"], "tailnum"),
    "MovieLens small": ("ml_latest_small", ["userId", "movieId"], "userId"),
    "Retrosheet": (
        "retrosheet-2000-2024",
        ["batter", "pitcher", "park", "batting_team", "fielding_team", "inning", "slot"],
        "batter",
    ),
}
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}


def stream(folder: Path, name: str, events: int) -> tuple[Tensor, Tensor, np.ndarray[Any, Any], int]:
    """Rows of the table by event, labels, users and the rows that the table needs."""
    file, fields, user = STREAMS[name]
    table = pq.read_table(folder / f"{file}.parquet")
    if name == "flights":
        label = np.nan_to_num(table["arr_delay"].to_numpy().astype(float), nan=99.0) > 15
    elif name == "Retrosheet":
        label = table["on_base"].to_numpy() > 0
    else:
        label = table["rating"].to_numpy() >= 4
    columns, rows = [], 0
    for field in fields:
        _, codes = np.unique(table[field].to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
        columns.append(codes[:events] + rows)
        rows += int(codes.max()) + 1
    users = columns[fields.index(user)]
    return torch.tensor(np.stack(columns, 1)), torch.tensor(label[:events], dtype=torch.float32), users, rows


class FactorizationMachine(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.factors = nn.Embedding(rows, WIDTH, sparse=True)
        self.linear = nn.Embedding(rows, 1, sparse=True)
        nn.init.normal_(self.factors.weight, 0, 0.01)
        nn.init.zeros_(self.linear.weight)

    def forward(self, ids: Tensor) -> Tensor:
        e = self.factors(ids)
        pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
        total: Tensor = pairs + self.linear(ids).sum((1, 2))
        return total


def run(data: Any, seed: int, **options: Any) -> tuple[float, float, float]:
    """Log loss, GAUC weighted by events, and the alignment ratio of all elements touched."""
    ids, labels, users, rows = data
    torch.manual_seed(seed)
    model = FactorizationMachine(rows)
    optimizer = cadam.CAdam(model.parameters(), lr=LR, **options)
    predicted = []
    for start in range(0, len(ids), BATCH):
        logits = model(ids[start : start + BATCH])
        predicted.append(logits.detach())
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, labels[start : start + BATCH]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    scores = torch.cat(predicted)
    loss = float(nn.functional.binary_cross_entropy_with_logits(scores.double(), labels.double()))
    return loss, gauc(scores.numpy(), labels.numpy(), users), optimizer.alignment().total.over_touched


def gauc(scores: Any, labels: Any, users: Any) -> float:
    order = np.argsort(users, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(users[order])) + 1)
    total = weight = 0.0
    for part in parts:
        if 0 < labels[part].sum() < len(part):
            total += len(part) * auc(scores[part], labels[part])
            weight += len(part)
    return total / weight


def interval(values: Sequence[float]) -> str:
    half = T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return (
        f"{statistics.mean(values):+.5f} [{statistics.mean(values) - half:+.5f}, {statistics.mean(values) + half:+.5f}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in STREAMS:
        data = stream(asked.data, name, asked.events)
        found = {
            storage: [run(data, seed, **options) for seed in range(asked.seeds)]
            for storage, options in STORAGES.items()
        }
        base = found["float32"]
        print(f"\n{name}: {len(data[0])} events, {asked.seeds} seeds, {data[3]} rows", flush=True)
        mean = [statistics.mean(values) for values in zip(*base, strict=True)]
        print(f"  float32: log loss {mean[0]:.5f}, GAUC {mean[1]:.5f}, alignment ratio {mean[2]:.4f}")
        apart = [abs(a - b) for values in zip(*base, strict=True) for a, b in pairwise(values)]
        size = len(base) - 1
        print(f"  noise floor (other starts): log loss {max(apart[:size]):.5f}, GAUC {max(apart[size : 2 * size]):.5f}")
        for storage in list(STORAGES)[1:]:
            pairs = list(zip(found[storage], base, strict=True))
            loss, ranked, aligned = ([a[k] - b[k] for a, b in pairs] for k in range(3))
            print(
                f"  {storage:12} log loss {interval(loss)}, GAUC {interval(ranked)}, alignment {interval(aligned)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
