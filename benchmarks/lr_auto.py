"""Compare a learning rate that is tuned while it learns (`--lr auto`) with the best fixed rate in hindsight.

    python benchmarks/lr_auto.py FOLDER [--streams A,B] [--events N] [--run-defaults] [--processes N] [--output FILE]

FOLDER contains the Parquet files of six public streams. Two further streams are simulated: their labels depend on
weights that change quickly in one half and not at all in the other, so the best rate changes half-way. The schema is
inferred, the model is DeepFM, and batches have 256 events. With `--run-defaults` batches are small in the beginning and
the bias starts at the log odds of the first labels, as in `cadam run`, for fixed and tuned rates alike. Fixed rates are
two per decade from 0.0003 to 0.1. Losses are mean log losses after the first 20,000 events (the second half of shorter
streams), and over the whole stream. The cost is the processor time of learning, divided by the mean of the fixed rates,
over the whole stream and over its last quarter. It does not include reading, conversion and metrics.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

import cadam
from cadam.online import Events, Schema, models
from cadam.online.data.inference import ColumnOptions, infer_schema, take_sample
from cadam.online.data.sources import open_source, resolve_uri
from cadam.online.fused_step import create_training_step
from cadam.online.labels.batch_growth import BatchGrowth
from cadam.online.models.initial_bias import FirstLabels, set_bias
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.rate_tuning import RateTuning

BATCH_SIZE = 256
FIXED = tuple(3e-4 * 10 ** (k / 2) for k in range(6))
LIMIT = 0.005
"""The accepted excess over the loss of the best fixed rate."""
STARTS = (3e-5, 3e-3, 3e-1)
WARM_UP = 20_000
STREAMS = {
    "flights": ("nycflights13.parquet", "arr_delay>15", ("dep_delay", "dep_time", "arr_time", "air_time")),
    "movielens": ("ml_latest_small.parquet", "rating>=4", ()),
    "electricity": ("elec2.parquet", "target", ()),
    "forest": ("covtype.parquet", "Cover_Type==2", ()),
    "weather": ("noaa_weather.parquet", "target", ()),
    "baseball": ("retrosheet-2000-2024.parquet", "on_base", ("event",)),
}
SIMULATED = {"drift starts": (False, True), "drift ends": (True, False)}


@dataclass(frozen=True)
class Task:
    """A run of the comparison."""

    folder: Path
    events: int
    model: str
    optimizer: str
    seed: int
    has_run_defaults: bool
    stream: str
    rate: float
    is_tuned: bool


@cache
def load(folder: Path, name: str, limit: int) -> tuple[Schema, list[Events]]:
    """Return the schema and the batches of a stream."""
    return simulate(SIMULATED[name]) if name in SIMULATED else read(folder, name, limit)


def read(folder: Path, name: str, limit: int) -> tuple[Schema, list[Events]]:
    """Read the labeled events of a public stream in batches."""
    file, label, ignored = STREAMS[name]
    uri = resolve_uri(str(folder / file))
    schema = infer_schema(take_sample(uri), ColumnOptions(label, None, None, None, ignored), file).schema
    batches, count = [], 0
    for batch in open_source(uri, schema, batch_size=BATCH_SIZE):
        events = None if batch is None else batch.events
        if events is None or events.labels is None:
            continue
        events = events.take(np.flatnonzero(~np.isnan(events.labels)))
        if len(events):
            batches.append(events)
            count += len(events)
        if count >= limit:
            break
    return schema, batches


def simulate(is_drifting: Sequence[bool], events: int = 200_000) -> tuple[Schema, list[Events]]:
    """Simulate a stream of equal parts. Weights of the parts that drift change by a random step after each batch."""
    random = np.random.default_rng(0)
    fields, values = 8, 50
    weights = random.normal(size=(fields, values))
    schema = Schema({f"f{field}": f"category:{values}" for field in range(fields)}, label="click")
    batches, count = [], events // BATCH_SIZE
    for number in range(count):
        ids = random.integers(values, size=(fields, BATCH_SIZE))
        logits = 0.7 * np.take_along_axis(weights, ids, 1).sum(0)
        labels = (random.random(BATCH_SIZE) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        batches.append(Events({f"f{field}": ids[field] for field in range(fields)}, labels))
        if is_drifting[number * len(is_drifting) // count]:
            step = 0.1
            weights = np.sqrt(1 - step**2) * weights + step * random.normal(size=weights.shape)
    return schema, batches


@dataclass(frozen=True)
class Run:
    """The losses and the processor time of a run."""

    events: int
    late: float
    whole: float
    seconds: float
    last_seconds: float
    """The processor time of the last quarter of the batches."""
    switches: int = 0
    last_rate: float = 0.0


def grow(batches: Sequence[Events]) -> Iterator[Events]:
    """Divide batches into those that `cadam run` learns: small ones in the beginning."""
    growth, learned = BatchGrowth(), 0
    for batch in batches:
        start = 0
        while start < len(batch):
            end = min(start + growth.size(learned), len(batch))
            yield batch.take(slice(start, end))
            learned += end - start
            start = end


def learn(task: Task) -> Run:
    """Learn a stream with a fixed or a tuned rate."""
    torch.set_num_threads(1)
    schema, batches = load(task.folder, task.stream, task.events)
    first_labels = FirstLabels() if task.has_run_defaults else None
    if task.has_run_defaults:
        batches = list(grow(batches))
    torch.manual_seed(task.seed)
    model = models.build(task.model, schema)
    optimizer = getattr(cadam, task.optimizer, None) or getattr(torch.optim, task.optimizer)
    build = RateTuning if task.is_tuned else create_training_step
    training = build(model, optimizer(model.parameters(), lr=task.rate), LOG_LOSS)
    losses, times = [], [time.process_time()]
    for batch in batches:
        columns = batch.columns()
        if first_labels is not None and not first_labels.is_complete:
            scores = training.predict(batch.features, len(batch))
            first_labels.add(batch.labels)
            for each in training.models:
                set_bias(each, first_labels.log_odds())
            training.train(columns)
        else:
            scores = training.learn(columns)
        if scores is None:  # the leader has diverged
            scores = training.predict(batch.features, len(batch))
            training.train(columns)
        logits = scores.astype(np.float64)
        losses.append(float(np.mean(np.logaddexp(0, logits) - logits * batch.labels)))
        times.append(time.process_time())
    counts = np.array([len(batch) for batch in batches])
    is_late = np.cumsum(counts) > min(WARM_UP, counts.sum() / 2)
    late = np.average(np.array(losses)[is_late], weights=counts[is_late])
    tuned = (training.switches, training.rate) if isinstance(training, RateTuning) else ()
    seconds = times[-1] - times[0], times[-1] - times[-1 - len(batches) // 4]
    return Run(int(counts.sum()), float(late), float(np.average(losses, weights=counts)), *seconds, *tuned)


def report(name: str, fixed: dict[float, Run], tuned: dict[float, Run], output: TextIO) -> bool:
    """Write the table of one stream, and return whether all tuned runs are within the limit."""
    best = min(fixed, key=lambda rate: fixed[rate].late)
    best_whole = min(run.whole for run in fixed.values())
    seconds, last_seconds = (
        float(np.mean([getattr(run, name) for run in fixed.values()])) for name in ("seconds", "last_seconds")
    )
    late = fixed[best].late
    print(f"\n{name}: {fixed[best].events:,} events, best fixed rate {best:.2g}: {late:.5f} late", file=output)
    print("  fixed, late:", *(f"{rate:.2g} {run.late:.4f}" for rate, run in fixed.items()), file=output)
    for start, run in tuned.items():
        losses = f"late {run.late / late - 1:+7.2%}   whole {run.whole / best_whole - 1:+7.2%}"
        times = f"time {run.seconds / seconds:4.1f}, last quarter {run.last_seconds / last_seconds:3.1f}"
        rates = f"switches {run.switches:3d}   last rate {run.last_rate:.2g}"
        print(f"  auto from {start:<6g} {losses}   {times}   {rates}", file=output, flush=True)
    return all(run.late <= (1 + LIMIT) * late for run in tuned.values())


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--streams", default=",".join([*STREAMS, *SIMULATED]), metavar="A,B")
    parser.add_argument("--events", type=int, default=500_000, metavar="N", help="events per stream")
    parser.add_argument("--model", default="deepfm", choices=tuple(models.MODELS))
    parser.add_argument("--optimizer", default="CAdam", metavar="NAME", help="a class of cadam or torch.optim")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--run-defaults", action="store_true", help="growing batches and the first bias of cadam run")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="runs at the same time")
    parser.add_argument("--output", type=argparse.FileType("a"), default=sys.stdout, metavar="FILE")
    options = parser.parse_args()
    common = (options.folder, options.events, options.model, options.optimizer, options.seed, options.run_defaults)
    rates = [*((rate, False) for rate in FIXED), *((start, True) for start in STARTS)]
    names = options.streams.split(",")
    tasks = [Task(*common, name, rate, is_tuned) for name in names for rate, is_tuned in rates]
    within = 0
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        runs = pool.map(learn, tasks)
        for name in names:
            results = [next(runs) for _ in rates]
            fixed, tuned = dict(zip(FIXED, results, strict=False)), dict(zip(STARTS, results[-3:], strict=True))
            within += report(name, fixed, tuned, options.output)
    print(f"\n{within} of {len(names)} streams are within {LIMIT:.1%} from all first rates", file=options.output)


if __name__ == "__main__":
    main()
