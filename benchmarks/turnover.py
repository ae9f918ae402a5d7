"""Compare a table of hashed ids with DynamicEmbedding on a generated stream whose catalog turns over.

Items are created all the time. Half of the events are about items younger than a day, the others about older ones, and
some items are much more popular than others. The label depends on the item and on a context with a fixed set of values.
Each event is predicted before it is learned from; the table shows the mean log loss of these predictions.

All arms have the same model and optimizer. The hashed table has as many rows as fit into the memory that the limited
dynamic tables may use: rows, moments and index. Every arm learns the stream once with each learning rate; the
other columns are those of its best one. If TorchRec is installed, its managed collision is an arm, with as many rows as
the hashed table.

    python benchmarks/turnover.py [--events 5000000] [--rows 250000] [--processes 1] [--out FOLDER]
    python benchmarks/turnover.py --events 20000000 --events-per-item 3.2 --processes 16 --out FOLDER    # 5 million ids
    python benchmarks/turnover.py --movielens ml_latest_small.parquet  # a real stream: movies, users as the context
    python benchmarks/turnover.py --retrosheet retrosheet.parquet      # baseball: batters, pitchers as the context

The folder gets the table as it is printed, the memory over time as JSON, and a plot of it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import cadam
from cadam.tables import DynamicEmbedding

DAYS = 10
DAY = 86400
WIDTH = 8
CONTEXTS = 100
BATCH = 4096
REAL_BATCH = 256
RATES = (0.01, 0.02, 0.05)
EVENTS_PER_ITEM = 3.5
BLOCK = 64 * BATCH
"""The number of events that are generated with one seed, by one process."""


class Batch(NamedTuple):
    time: int
    items: Tensor
    contexts: Tensor
    labels: Tensor


def uniform(values: np.ndarray[Any, Any], salt: int) -> np.ndarray[Any, Any]:
    """Return a number in (0, 1) that belongs to each integer, with the finalizer of splitmix64."""
    x = values.astype(np.uint64) + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2**53 + 2.0**-54


def normal(values: np.ndarray[Any, Any], salt: int) -> np.ndarray[Any, Any]:
    return np.sqrt(-2 * np.log(uniform(values, salt))) * np.cos(2 * np.pi * uniform(values, salt + 1000))


def stream(events: int) -> Iterator[Batch]:
    """Yield the batches of the stream, whose items are numbered by their time of creation."""
    for start in range(0, events, BLOCK):
        for time_of_batch, *columns in generate_block(events, start):
            yield Batch(time_of_batch, *map(torch.from_numpy, columns))


def generate_block(events: int, block_start: int, events_per_item: float = EVENTS_PER_ITEM) -> list[tuple[Any, ...]]:
    """Return the batches of a block of the stream as arrays."""
    per_day = events / events_per_item / DAYS
    context_vectors = np.random.default_rng(0).normal(size=(CONTEXTS, WIDTH)) / np.sqrt(WIDTH)
    random = np.random.default_rng([1, block_start])
    batches = []
    for start in range(block_start, min(events, block_start + BLOCK), BATCH):
        n = min(BATCH, events - start)
        now = (start + BATCH / 2) / events * DAYS
        newest, day_ago = int(per_day * (now + 1)), int(per_day * now)  # a day of items exists at the start
        is_young = random.random(n) < 0.5
        low, high = np.where(is_young, day_ago, 0), np.where(is_young, newest, max(1, day_ago))
        # Take the most popular of up to 16 random items, which gives a skewed distribution over a catalog that moves.
        rounds = 4 ** random.integers(0, 3, n)
        items = low + (random.random(n) * (high - low)).astype(np.int64)
        for number in range(1, 16):
            other = low + (random.random(n) * (high - low)).astype(np.int64)
            is_better = (number < rounds) & (uniform(other, 1) > uniform(items, 1))
            items = np.where(is_better, other, items)
        contexts = random.integers(0, CONTEXTS, n)
        vectors = np.stack([normal(items, 2 + k) for k in range(WIDTH)], 1)
        logits = -1.5 + 1.5 * normal(items, 50) + (vectors * context_vectors[contexts]).sum(1)
        labels = (random.random(n) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        ids = (items.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)  # ids without an order
        batches.append((int(now * DAY), ids, contexts, labels))
    return batches


def movielens(path: str) -> list[Batch]:
    """Return ratings in the order of their time. The label is whether a rating is at least 4."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    order = np.argsort(columns["timestamp"], kind="stable")
    movies, users, times, ratings = (columns[name][order] for name in ("movieId", "userId", "timestamp", "rating"))
    return list(split_events(times, movies.astype(np.int64), users, ratings >= 4))


def retrosheet(path: str) -> list[Batch]:
    """Return plate appearances of baseball in the order of their time. The label is whether the batter gets on base."""
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["time", "batter", "pitcher", "on_base"])
    codes = [table[name].combine_chunks().dictionary_encode().indices.to_numpy() for name in ("batter", "pitcher")]
    batters, pitchers = (each.astype(np.int64) for each in codes)
    return list(split_events(table["time"].to_numpy(), batters, pitchers, table["on_base"].to_numpy()))


def split_events(times: Any, items: Any, contexts: Any, labels: Any) -> Iterator[Batch]:
    """Yield batches of a real stream. Contexts share rows if there are more of them than `CONTEXTS`."""
    for start in range(0, len(items), REAL_BATCH):
        part = slice(start, start + REAL_BATCH)
        columns = items[part], contexts[part] % CONTEXTS, labels[part].astype(np.float32)
        tensors = [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]
        yield Batch(int(times[start]), tensors[0], tensors[1].long(), tensors[2])


class HashedTable(nn.Embedding):
    """The usual table: the row of an id is the remainder of its hash."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, WIDTH + 1, sparse=True)
        nn.init.normal_(self.weight, 0, 0.01)

    def forward(self, ids: Tensor) -> Tensor:
        mixed = (ids ^ (ids >> 31)) * 0x2545F4914F6CDD1D
        return super().forward(((mixed ^ (mixed >> 29)) & (2**62 - 1)) % self.num_embeddings)


class ManagedCollisionTable(nn.Module):
    """The managed collision of TorchRec on the CPU, with LRU eviction every `INTERVAL` batches."""

    INTERVAL = 20

    def __init__(self, rows: int) -> None:
        from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule

        super().__init__()
        self.slots = MCHManagedCollisionModule(
            zch_size=rows,
            device=torch.device("cpu"),
            eviction_policy=LRU_EvictionPolicy(),
            eviction_interval=self.INTERVAL,
            input_hash_size=2**62,
        )
        self.table = HashedTable(rows)
        self.optimizer: cadam.Optimizer | None = None

    def forward(self, ids: Tensor) -> Tensor:
        from torchrec import JaggedTensor

        features = {"item": JaggedTensor(ids & (2**62 - 1), lengths=torch.ones(len(ids), dtype=torch.int64))}
        features = self.slots.profile(features)
        evicted = self.slots.evict()
        if evicted is not None and self.optimizer is not None:
            with torch.no_grad():
                self.table.weight[evicted] = 0.01 * torch.randn(len(evicted), WIDTH + 1)
            self.optimizer.reset_rows(self.table.weight, evicted)
        return nn.functional.embedding(self.slots.remap(features)["item"].values(), self.table.weight, sparse=True)

    def nbytes(self) -> int:
        """Return the bytes of rows, moments and buffers."""
        return 3 * self.table.weight.nbytes + sum(buffer.nbytes for buffer in self.slots.buffers())


class Model(nn.Module):
    """The score is the item's bias and the context's bias and the product of their vectors."""

    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.items, self.contexts = items, nn.Embedding(CONTEXTS, WIDTH + 1, sparse=True)
        nn.init.normal_(self.contexts.weight, 0, 0.1)

    def forward(self, items: Tensor, contexts: Tensor) -> Tensor:
        a, b = self.items(items), self.contexts(contexts)
        return a[:, 0] + b[:, 0] + (a[:, 1:] * b[:, 1:]).sum(1)


class Result(NamedTuple):
    loss: float
    last_half: float
    seconds: float
    memory: list[int]
    counters: Any


def run(make: Callable[[], nn.Module], rate: float, batches: list[Batch]) -> Result:
    """Learn the stream, and return the log loss and the memory of the table and its moments over time."""
    torch.manual_seed(0)
    model = Model(make())
    optimizer = cadam.Adam(model.parameters(), lr=rate)
    table = model.items
    if isinstance(table, DynamicEmbedding):
        table.attach(optimizer)
    elif isinstance(table, ManagedCollisionTable):
        table.optimizer = optimizer
    losses, memory = [], []
    start = time.perf_counter()
    for batch in batches:
        if isinstance(table, DynamicEmbedding):
            table.advance(batch.time)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.items, batch.contexts), batch.labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if isinstance(table, DynamicEmbedding):
            memory.append(sum(table.memory().values()))
        elif isinstance(table, ManagedCollisionTable):
            memory.append(table.nbytes())
        else:
            memory.append(3 * table.weight.nbytes)  # type: ignore[operator, union-attr]
    seconds = time.perf_counter() - start
    counters = table.counters() if isinstance(table, DynamicEmbedding) else None
    return Result(float(np.mean(losses)), float(np.mean(losses[len(losses) // 2 :])), seconds, memory, counters)


_BATCHES: list[Batch] = []
_ARMS: dict[str, Callable[[], nn.Module]] = {}
"""The stream and the arms, which processes inherit."""


def _run_arm(arm: tuple[str, float]) -> Result:
    torch.set_num_threads(1)
    return run(_ARMS[arm[0]], arm[1], _BATCHES)


def list_arms(rows: int, expiry: int) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that create the tables to compare, by name."""
    hashed = int(rows * (1 + 42 / (3 * 4 * (WIDTH + 1))))  # the index takes about 42 bytes for each row
    options: dict[str, dict[str, Any]] = {
        "dynamic, LRU": {"max_rows": rows},
        "dynamic, LFU": {"max_rows": rows, "evict": "lfu"},
        "dynamic, LRU, admission": {"max_rows": rows, "admit_after": 2},
        "dynamic, expiry": {"expire_after": expiry},
        "dynamic, LRU, admission, expiry": {"max_rows": rows, "admit_after": 2, "expire_after": expiry},
        "dynamic, no limit": {},
    }
    arms: dict[str, Callable[[], nn.Module]] = {f"hash:{hashed}": lambda: HashedTable(hashed)}
    for name, given in options.items():
        arms[name] = lambda given=given: DynamicEmbedding(WIDTH + 1, **given)  # type: ignore[misc]
    arms[f"hash:{10 * hashed}"] = lambda: HashedTable(10 * hashed)
    if find_spec("torchrec") is not None:
        arms["managed collision, LRU"] = lambda: ManagedCollisionTable(hashed)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--rows", type=int, help="limit of the dynamic tables (default: a twentieth of the events)")
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that generate the stream, and then learn it"
    )
    parser.add_argument(
        "--movielens", metavar="FILE", help="ratings of MovieLens in Parquet, instead of the generated ones"
    )
    parser.add_argument("--retrosheet", metavar="FILE", help="plate appearances of baseball in Parquet")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates of each arm")
    parser.add_argument("--events-per-item", type=float, default=EVENTS_PER_ITEM)
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="folder for the results and a plot of the memory")
    arguments = parser.parse_args()
    start = time.perf_counter()
    lines: list[str] = []

    def report(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "turnover.txt").write_text("\n".join(lines) + "\n")

    is_real = bool(arguments.movielens or arguments.retrosheet)
    if is_real:
        _BATCHES.extend(movielens(arguments.movielens) if arguments.movielens else retrosheet(arguments.retrosheet))
    else:
        with get_context("fork").Pool(arguments.processes) as pool:
            blocks = [(arguments.events, at, arguments.events_per_item) for at in range(0, arguments.events, BLOCK)]
            for block in pool.starmap(generate_block, blocks, chunksize=1):
                _BATCHES.extend(Batch(moment, *map(torch.from_numpy, columns)) for moment, *columns in block)
    batches = _BATCHES
    items = torch.cat([batch.items for batch in batches])
    rows = arguments.rows or len(items) // 20
    _ARMS.update(list_arms(rows, 30 * DAY if is_real else DAY))
    rate_of_ones = float(torch.cat([batch.labels for batch in batches]).mean())
    days = (batches[-1].time - batches[0].time) / DAY
    report(
        f"{len(items):,} events, {len(items.unique()):,} distinct items, {rate_of_ones:.3f} positive, {days:.0f} days"
    )
    report(f"prepared in {time.perf_counter() - start:.0f} seconds")
    rates = "".join(f"{f'rate {rate}':>11}" for rate in arguments.rates)
    report(f"{'':34}{rates}{'2nd half':>10}{'MB, most':>10}{'MB, last':>10}{'seconds':>9}")
    results = {}
    # Long runs are started first, so that the processes end at about the same time.
    slowest = sorted(_ARMS, key=lambda name: name.startswith("hash"))
    jobs = [(name, rate) for name in slowest for rate in arguments.rates]
    with get_context("fork").Pool(arguments.processes) as pool:
        finished = pool.imap(_run_arm, jobs, chunksize=1)
        for name in slowest:
            runs = [next(finished) for _ in arguments.rates]
            best = results[name] = min(runs, key=lambda result: result.loss)
            losses = "".join(f"{result.loss:11.4f}" for result in runs)
            peak, last = max(best.memory) / 1e6, best.memory[-1] / 1e6
            report(f"{name:34}{losses}{best.last_half:10.4f}{peak:10.1f}{last:10.1f}{best.seconds:9.1f}")
    report("\nCounters at the end:")
    for name, result in results.items():
        if result.counters:
            report(f"{name:34}" + ", ".join(f"{key} {value:,}" for key, value in result.counters._asdict().items()))
    report("\nMemory in MB at the end of each tenth of the stream:")
    for name, result in results.items():
        ends = [result.memory[len(batches) * tenth // DAYS - 1] / 1e6 for tenth in range(1, DAYS + 1)]
        report(f"{name:34}" + "".join(f"{megabytes:7.1f}" for megabytes in ends))
    report(f"\n{arguments.processes} processes, {time.perf_counter() - start:.0f} seconds in all")
    if arguments.out:
        memory = {name: result.memory[:: max(1, len(batches) // 500)] for name, result in results.items()}
        (arguments.out / "memory.json").write_text(json.dumps(memory))
        plot(memory, days, arguments.out / "memory.png")


def plot(memory: dict[str, list[int]], days: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for name, values in memory.items():
        axes.plot(np.linspace(0, days, len(values)), np.array(values) / 1e6, label=name, linewidth=1)
    axes.set(xlabel="days", ylabel="MB: rows, moments, index", title="Memory of a table whose catalog turns over")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
