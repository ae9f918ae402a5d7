"""Compare the speed of the learner with features of the kind `id` and of the kind `hash`, from Parquet to the log loss.

    python benchmarks/id_run.py [--events 500000] [--rounds 5] [--model deepfm] [--batch-size 1024]

Two columns are ids of a catalog that turns over, as in turnover.py; four columns are categories, and three are numbers.
Both schemas have the same number of rows. Runs take turns, and both ratios are medians over the rounds: of the time of
the clock, and of the processor time of all threads, which other processes disturb less. A checkpoint is saved at the
beginning and at the end of each run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from cadam import CAdam
from cadam.online import Learner, ParquetSource, Schema, models
from cadam.online.models.model_file import LOG_LOSS
from turnover import stream


def write_events(path: Path, events: int) -> int:
    """Write the events, and return the number of distinct items."""
    random = np.random.default_rng(1)
    batches = list(stream(events))
    items = np.concatenate([batch.items.numpy() for batch in batches])
    columns = {
        "item": items,
        "user": (random.zipf(1.3, events) % 10_000_000).astype(np.int64) * 7919,
        "context": np.concatenate([batch.contexts.numpy() for batch in batches]),
        **{f"category{n}": random.integers(0, 50, events) for n in range(3)},
        **{f"number{n}": random.normal(size=events) for n in range(3)},
        "at": np.concatenate([np.full(len(batch.items), float(batch.time)) for batch in batches]),
        "click": np.concatenate([batch.labels.numpy() for batch in batches]),
    }
    pq.write_table(pa.table(columns), path)
    return len(np.unique(items))


class Result(NamedTuple):
    """The seconds of a run by the clock and by the processor, its log loss, and the metrics of ids."""

    seconds: float
    processor_seconds: float
    log_loss: float
    counts: dict[str, float]


def run(path: Path, kind: str, model: str, batch_size: int) -> Result:
    """Learn all events."""
    features = {"item": kind, "user": kind, "context": "category:100"}
    features |= {f"category{n}": "category:50" for n in range(3)} | {f"number{n}": "number" for n in range(3)}
    schema = Schema(features, label="click", time="at")
    torch.manual_seed(0)
    network = models.build(model, schema)
    with tempfile.TemporaryDirectory() as folder:
        start, processor_start = time.perf_counter(), time.process_time()
        learner = Learner(network, CAdam(network.named_parameters(), lr=0.01), LOG_LOSS, checkpoint=folder)
        learner.run(ParquetSource(path, schema, batch_size=batch_size))
        learner.close()
        seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
    metrics = learner.metrics()
    counts = {name: value for name, value in metrics.items() if name.startswith("id_")}
    return Result(seconds, processor_seconds, metrics["log_loss"], counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--model", default="deepfm", choices=models.MODELS)
    parser.add_argument("--batch-size", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = arguments.rows
    hashed = f"hash:{rows}"
    kinds = [hashed, f"id:max={rows}", f"id:max={rows},admit=2", f"id:max={rows},expire=1d"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.parquet"
        items = write_events(path, arguments.events)
        print(
            f"{arguments.events:,} events, {items:,} items, {arguments.model}, batches of {arguments.batch_size:,}, "
            f"medians of {arguments.rounds} rounds"
        )
        run(path, kinds[0], arguments.model, arguments.batch_size)
        rounds = [
            {kind: run(path, kind, arguments.model, arguments.batch_size) for kind in kinds}
            for _ in range(arguments.rounds)
        ]
    print(
        f"{'kind':28}{'events/s':>10}{'speed':>8}{'by processor':>14}{'log loss':>10}  "
        "ids with a row, admitted, evicted, expired (item)"
    )
    for kind in kinds:
        seconds = statistics.median(each[kind].seconds for each in rounds)
        speed = statistics.median(each[hashed].seconds / each[kind].seconds for each in rounds)
        by_processor = statistics.median(
            each[hashed].processor_seconds / each[kind].processor_seconds for each in rounds
        )
        counts = rounds[0][kind].counts
        details = ", ".join(
            f"{counts[f'id_{name}/item']:,}" for name in ("rows", "admitted", "evicted", "expired") if counts
        )
        print(
            f"{kind:28}{arguments.events / seconds:10,.0f}{speed:8.3f}{by_processor:14.3f}"
            f"{rounds[0][kind].log_loss:10.4f}  {details}"
        )


if __name__ == "__main__":
    main()
