"""Measure the effect of quantized moments on a factorization machine that predicts a stream and then learns it.

    python benchmarks/quantized_quality.py DATA [--streams flights Retrosheet] [--events 300000] [--seeds 3]
    python benchmarks/quantized_quality.py DATA --streams MovieLens-1M --movielens-1m ratings.dat
    python benchmarks/quantized_quality.py DATA --passes 20

DATA is a folder with nycflights13.parquet, ml_latest_small.parquet and retrosheet-2000-2024.parquet. MovieLens-1M is a
file of lines "user::film::stars::seconds", or with tabs. Every storage sees the same events from the same starting
weights; each number is the mean over seeds of its difference to float32, with a 95% interval (Student's t over seeds).
The noise floor beside it is float32 against itself with other starts.

`--passes` is the long run: the flights again and again with fields of few values, so that every row is touched
thousands of times. It prints how far log loss and second moments are from float32's after some of the passes.
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
from cadam.engines import quantization as codes
from cadam.online.metrics.auc import auc

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


FEW = ["carrier", "origin", "dest", "hour", "month"]
"""Fields of flights that have few values."""

Data = tuple[Tensor, Tensor, np.ndarray[Any, Any], int]
"""The rows of the table by event, the labels, the users, and the number of rows that the table needs."""


def movielens_1m(path: Path, events: int) -> Data:
    numbers = np.array(path.read_bytes().replace(b"::", b" ").split(), dtype=np.int64).reshape(-1, 4)
    user, film, stars, _ = numbers[np.argsort(numbers[:, 3], kind="stable")].T
    users, films = (np.unique(column, return_inverse=True)[1] for column in (user, film))
    rows = torch.tensor(np.stack([users, films + users.max() + 1], 1))
    label = torch.tensor(stars >= 4, dtype=torch.float32)
    return rows[:events], label[:events], users[:events], int(rows.max()) + 1


def stream(folder: Path, name: str, events: int, only: Sequence[str] = ()) -> Data:
    file, fields, user = STREAMS[name]
    fields = list(only) or fields
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
    users = columns[fields.index(user) if user in fields else 0]
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
    """Return the log loss, the GAUC weighted by events, and the alignment ratio of all touched elements."""
    ids, labels, users, rows = data
    torch.manual_seed(seed)
    model = FactorizationMachine(rows)
    optimizer = cadam.CAdam(model.parameters(), lr=LR, **options)
    scores, loss = learn(model, optimizer, ids, labels)
    return loss, gauc(scores.numpy(), labels.numpy(), users), optimizer.alignment().total.over_touched


def learn(model: nn.Module, optimizer: cadam.Optimizer, ids: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Predict each batch and then learn from it. Returns the scores and their log loss."""
    predicted = []
    for start in range(0, len(ids), BATCH):
        logits = model(ids[start : start + BATCH])
        predicted.append(logits.detach())
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, labels[start : start + BATCH]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    scores = torch.cat(predicted)
    return scores, float(nn.functional.binary_cross_entropy_with_logits(scores.double(), labels.double()))


def long_run(data: Any, seeds: int, passes: int) -> None:
    """Repeat passes over the events and compare quantized moments with float32."""
    ids, labels, _, rows = data
    touched = len(ids) * ids.shape[1] * passes // rows
    print(f"\nlong run: {passes} passes over {len(ids)} events, {rows} rows, each met {touched} times on average")
    shown = sorted({1, passes // 4, passes // 2, passes})
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for storage in ("float32", "bfloat16", "int8", "int8, row v"):
        found[storage] = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = FactorizationMachine(rows)
            optimizer = cadam.CAdam(model.parameters(), lr=LR, **STORAGES[storage])
            after: list[tuple[float, float]] = []
            for number in range(1, passes + 1):
                loss = learn(model, optimizer, ids, labels)[1]
                state = codes.plain(optimizer.state[model.factors.weight], optimizer.rule)
                if number in shown:
                    after.append((loss, float(state["exp_avg_sq"].double().sqrt().mean())))
            found[storage].append(after)
    base = found["float32"]
    for k, number in enumerate(shown):
        print(f"  pass {number}: float32 log loss {statistics.mean(run[k][0] for run in base):.5f}")
        for storage in list(found)[1:]:
            pairs = [(run[k], exact[k]) for run, exact in zip(found[storage], base, strict=True)]
            loss = interval([a[0] - b[0] for a, b in pairs])
            root = interval([a[1] / b[1] - 1 for a, b in pairs])
            print(f"    {storage:12} log loss {loss}, mean root of second moments, relative {root}", flush=True)


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
    parser.add_argument("--streams", nargs="+", default=list(STREAMS), choices=[*STREAMS, "MovieLens-1M"])
    parser.add_argument("--movielens-1m", type=Path, metavar="FILE")
    parser.add_argument("--passes", type=int, help="number of passes of the long run")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.passes:
        long_run(stream(asked.data, "flights", asked.events, FEW), asked.seeds, asked.passes)
        return
    for name in asked.streams:
        if name != "MovieLens-1M":
            data = stream(asked.data, name, asked.events)
        elif asked.movielens_1m is None:
            parser.error("MovieLens-1M needs --movielens-1m FILE")
        else:
            data = movielens_1m(asked.movielens_1m, asked.events)
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
