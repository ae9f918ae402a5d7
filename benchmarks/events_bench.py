"""Event by event: events a second and log loss beside Vowpal Wabbit, river and a plain loop of torch, on one core.

    python benchmarks/events_bench.py FILE.parquet --label on_base --fields batter,pitcher,... [--events N] [--rounds 5]
    python benchmarks/events_bench.py --criteo [--events N]            generated rows of 39 fields

All learn the same events in the same order, each predicted before it is learnt from, with a weight for every value of
every field (linear) or these and the inner products of all pairs (FM of width 8; in Vowpal Wabbit all pairs of fields,
`--interactions ::`). Learners take turns, several rounds; the median counts. Slow ones get fewer events. Vowpal Wabbit
reads a text file, cadam Parquet; "learning alone" is from encoded events in memory. Log loss: of each at the best
learning rate of a small grid, by the first fifth of the events. Needs: pip install vowpalwabbit river.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import cadam
from cadam.online import Learner, ParquetSource, Schema, models
from cadam.online.event_by_event import CHUNK, EventByEvent
from cadam.online.model_file import LOG_LOSS
from cadam.online.training import Training

SIZE = "hash:262144"
RATES = {
    "cadam": (3e-4, 1e-3, 3e-3, 1e-2),
    "SGD": (0.003, 0.01, 0.03, 0.1),
    "river": (0.0003, 0.001, 0.003, 0.01),
    "VW": (0.01, 0.03, 0.1, 0.5),
}


@dataclass
class Data:
    """The events as files: Parquet, and the text of Vowpal Wabbit; the first of them also as dicts."""

    parquet: Path
    text: Path
    fields: list[str]
    label: str
    events: int

    @property
    def schema(self) -> Schema:
        return Schema(dict.fromkeys(self.fields, SIZE), label=self.label)

    def rows(self, count: int) -> Iterator[tuple[dict[str, float], int]]:
        table = pq.read_table(self.parquet).slice(0, count).to_pydict()
        for row in range(count):
            yield {f"{name}={table[name][row]}": 1.0 for name in self.fields}, int(table[self.label][row])

    def first(self, share: float, folder: Path) -> Data:
        """The first part of it."""
        count = int(share * self.events)
        parquet, text = folder / f"{count}.parquet", folder / f"{count}.vw"
        if not parquet.exists():
            pq.write_table(pq.read_table(self.parquet).slice(0, count), parquet)
            with self.text.open() as lines, text.open("w") as out:
                out.writelines(line for line, _ in zip(lines, range(count), strict=False))
        return Data(parquet, text, self.fields, self.label, count)


def prepared(table: pa.Table, fields: list[str], label: str, folder: Path) -> Data:
    columns = {name: table.column(name).cast(pa.string()) for name in fields}
    columns[label] = table.column(label)
    parquet, text = folder / "events.parquet", folder / "events.vw"
    pq.write_table(pa.table(columns), parquet)
    values = {name: column.to_pylist() for name, column in columns.items()}
    with text.open("w") as out:
        for row in range(len(table)):
            given = " ".join(f"|{chr(97 + i % 26)}{i // 26 or ''} {values[n][row]}" for i, n in enumerate(fields))
            out.write(f"{1 if values[label][row] else -1} {given}\n")
    return Data(parquet, text, fields, label, len(table))


def generated(count: int, folder: Path) -> Data:
    """Rows of 39 fields with values as skewed as those of an advertiser's log, and labels that depend on some."""
    draw = np.random.default_rng(0)
    values = {f"f{i}": np.minimum(draw.zipf(1.2, count), 10 ** (1 + i % 5)) for i in range(39)}
    score = sum(np.sin(values[f"f{i}"] * (i + 1)) for i in range(6)) - 2.0
    label = (draw.random(count) < 1 / (1 + np.exp(-score))).astype(np.int8)
    return prepared(pa.table({**values, "click": label}), list(values), "click", folder)


# Learners: seconds and log loss --------------------------------------------------------------------------------

Timed = tuple[float, float]


def started(data: Data, model: str, optimizer: str, lr: float) -> tuple[torch.nn.Module, cadam.Optimizer]:
    torch.manual_seed(0)
    built = models.build(model, data.schema, width=8)
    extra = {"momentum": 0.0} if optimizer == "SGDM" else {}
    return built, getattr(cadam, optimizer)(built.parameters(), lr=lr, **extra)


def from_file(data: Data, model: str, optimizer: str, lr: float) -> Timed:
    built, made = started(data, model, optimizer, lr)
    learner = Learner(built, made, LOG_LOSS, one_by_one=True)
    assert isinstance(learner.by_event, EventByEvent), learner.by_event
    source = ParquetSource(data.parquet, data.schema, batch_size=CHUNK)
    begin = time.perf_counter()
    learner.run(source)
    seconds = time.perf_counter() - begin
    assert learner.learned == data.events
    return seconds, learner.progress.mean


def learning_alone(data: Data, model: str, optimizer: str, lr: float) -> Timed:
    batches = [batch.events for batch in ParquetSource(data.parquet, data.schema, batch_size=CHUNK)]
    built, made = started(data, model, optimizer, lr)
    engine, seconds, loss = EventByEvent.of(built, made, LOG_LOSS), 0.0, 0.0
    for events in batches:
        begin = time.perf_counter()
        scores, _ = engine.learn(events.features, events.labels)
        seconds += time.perf_counter() - begin
        loss += float((np.logaddexp(0, scores.astype(float)) - events.labels * scores).sum())
    return seconds, loss / data.events


def plain_torch(data: Data, model: str, optimizer: str, lr: float) -> Timed:
    built, made = started(data, model, optimizer, lr)
    training, seconds, loss = Training(built, made, LOG_LOSS), 0.0, 0.0
    for batch in ParquetSource(data.parquet, data.schema, batch_size=1):
        begin = time.perf_counter()
        score = float(training.score(batch.events.features, 1)[0])
        training.step(batch.events.columns())
        seconds += time.perf_counter() - begin
        loss += float(np.logaddexp(0, score) - batch.events.labels[0] * score)
    return seconds, loss / data.events


def vowpal_wabbit(data: Data, pairs: bool, lr: float) -> Timed:
    command = [sys.executable, "-m", "vowpalwabbit", "-d", str(data.text), "--loss_function", "logistic", "-l", str(lr)]
    command += ["--interactions", "::"] if pairs else []
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - begin
    loss = re.search(r"average loss = ([\d.]+)", done.stdout + done.stderr)
    return seconds, float(loss[1]) if loss else math.nan


def river(data: Data, model: str, lr: float) -> Timed:
    from river import facto, linear_model, optim

    if model == "fm":
        learner = facto.FMClassifier(
            n_factors=8, weight_optimizer=optim.SGD(lr), latent_optimizer=optim.SGD(lr), seed=0
        )
    else:
        learner = linear_model.LogisticRegression(optim.SGD(lr))
    rows, loss = list(data.rows(data.events)), 0.0
    begin = time.perf_counter()
    for features, label in rows:
        chance = min(max(learner.predict_proba_one(features)[True], 1e-12), 1 - 1e-12)
        loss -= math.log(chance if label else 1 - chance)
        learner.learn_one(features, bool(label))
    return time.perf_counter() - begin, loss / data.events


# Who takes part -------------------------------------------------------------------------------------------------

Run = Callable[[Data, float], Timed]
LEARNERS: dict[str, tuple[Run, str, float]] = {
    "CAdam linear, learning alone": (lambda d, lr: learning_alone(d, "linear", "CAdam", lr), "cadam", 1.0),
    "CAdam linear, file to metrics": (lambda d, lr: from_file(d, "linear", "CAdam", lr), "cadam", 1.0),
    "Adam linear, file to metrics": (lambda d, lr: from_file(d, "linear", "Adam", lr), "cadam", 1.0),
    "SGD linear, file to metrics": (lambda d, lr: from_file(d, "linear", "SGDM", lr), "SGD", 1.0),
    "Vowpal Wabbit linear": (lambda d, lr: vowpal_wabbit(d, False, lr), "VW", 1.0),
    "river logistic": (lambda d, lr: river(d, "linear", lr), "river", 0.05),
    "torch loop linear": (lambda d, lr: plain_torch(d, "linear", "CAdam", lr), "cadam", 0.003),
    "CAdam FM, learning alone": (lambda d, lr: learning_alone(d, "fm", "CAdam", lr), "cadam", 1.0),
    "CAdam FM, file to metrics": (lambda d, lr: from_file(d, "fm", "CAdam", lr), "cadam", 1.0),
    "Vowpal Wabbit all pairs": (lambda d, lr: vowpal_wabbit(d, True, lr), "VW", 1.0),
    "river FM": (lambda d, lr: river(d, "fm", lr), "river", 0.01),
    "torch loop FM": (lambda d, lr: plain_torch(d, "fm", "CAdam", lr), "cadam", 0.003),
}
"""What is run, by which grid its learning rate is chosen, and on what share of the events."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", nargs="?")
    parser.add_argument("--label", default="on_base")
    parser.add_argument("--fields", default="batter,pitcher,park,batting_team,fielding_team,inning,home,slot,daynight")
    parser.add_argument("--criteo", action="store_true")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.criteo:
            data = generated(options.events, folder)
        else:
            table = pq.read_table(options.file).slice(0, options.events)
            data = prepared(table, options.fields.split(","), options.label, folder)
        print(
            f"{data.events:,} events of {len(data.fields)} fields; one core, "
            f"{platform.processor() or platform.machine()}, {os.getloadavg()[0]:.1f} other processes at work"
        )
        rates = {
            name: best_rate(run, data.first(min(0.2, share), folder), grid)
            for name, (run, grid, share) in LEARNERS.items()
        }
        timed: dict[str, list[Timed]] = {name: [] for name in LEARNERS}
        for _ in range(options.rounds):
            for name, (run, _, share) in LEARNERS.items():
                timed[name].append(run(data if share == 1 else data.first(share, folder), rates[name]))
    speed = {
        name: statistics.median(share * data.events / seconds for seconds, _ in timed[name])
        for name, (_, _, share) in LEARNERS.items()
    }
    wabbit = {"linear": speed["Vowpal Wabbit linear"], "FM": speed["Vowpal Wabbit all pairs"]}
    print(f"{'':32}{'events/s':>12}{'VW = 1':>9}{'rate':>9}{'log loss':>10}  over")
    for name, (_, _, share) in LEARNERS.items():
        family = wabbit["FM" if "FM" in name or "pairs" in name else "linear"]
        count = f"{int(share * data.events):,} events"
        loss = timed[name][-1][1]
        print(f"{name:32}{speed[name]:12,.0f}{speed[name] / family:9.2f}{rates[name]:9g}{loss:10.4f}  {count}")


def best_rate(run: Run, data: Data, grid: str) -> float:
    return min(RATES[grid], key=lambda lr: run(data, lr)[1])


if __name__ == "__main__":
    main()
