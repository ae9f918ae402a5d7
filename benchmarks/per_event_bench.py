"""Compare per-event training with Vowpal Wabbit, river and a plain torch loop: events per second and log loss.

    python benchmarks/per_event_bench.py RETROSHEET.parquet                    all parts, one after the other
    python benchmarks/per_event_bench.py RETROSHEET.parquet --part PART        one of them: `PARTS`

Two sets of events: nine fields of plate appearances (Retrosheet) and 39 fields of generated Criteo rows. All learn the
same events in the same order, each predicted before it is learned, with a weight for every value of every field
(linear) or these and the inner products of all pairs (FM of width 8; in Vowpal Wabbit all pairs of fields,
`--interactions ::`). Learners take turns, several rounds; the median counts. Slow ones get the first of the events.
Vowpal Wabbit reads a text file, cadam Parquet; "learning alone" is from encoded events in memory. Log loss: of each at
the best learning rate of a small grid by the first fifth of its events, with that of CAdam over the same events beside
it. Parts leave what they made in a folder, and print the whole table. Needs: pip install vowpalwabbit river, and the
package of ./paper for the generated rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import cadam
from cadam.online import Learner, ParquetSource, Schema, models
from cadam.online.data.sources import open_source
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.per_event import CHUNK_SIZE, PerEventTraining
from cadam.online.training_step import TrainingStep

SIZE = "hash:262144"
FIELDS = "batter,pitcher,park,batting_team,fielding_team,inning,home,slot,daynight"
RATES = {
    "cadam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "SGD": (0.001, 0.003, 0.01, 0.03, 0.1),
    "river": (0.001, 0.003, 0.01, 0.03, 0.1),
    "VW": (0.01, 0.03, 0.1, 0.3, 1.0),
}


@dataclass
class Data:
    """The events as files. The first ones are also kept as dicts."""

    folder: Path
    fields: list[str]
    label: str
    events: int

    @property
    def parquet(self) -> Path:
        return self.folder / "events.parquet"

    @property
    def schema(self) -> Schema:
        return Schema(dict.fromkeys(self.fields, SIZE), label=self.label)

    def rows(self, count: int) -> Iterator[tuple[dict[str, float], int]]:
        table = pq.read_table(self.parquet).slice(0, count).to_pydict()
        for row in range(count):
            yield {f"{name}={table[name][row]}": 1.0 for name in self.fields}, int(table[self.label][row])

    def first(self, share: float) -> Data:
        """Return the first part of the events."""
        if share == 1:
            return self
        count = int(share * self.events)
        folder = self.folder / str(count)
        return prepared(pq.read_table(self.parquet).slice(0, count), self.fields, self.label, folder)


def prepared(table: pa.Table, fields: list[str], label: str, folder: Path, lines: bool = False) -> Data:
    """Write the events as Parquet and in the format of Vowpal Wabbit; with `lines` also as CSV and JSON."""
    made = Data(folder, fields, label, len(table))
    if (folder / "whole").exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    columns = {name: table.column(name).cast(pa.string()) for name in fields}
    columns[label] = table.column(label)
    pq.write_table(pa.table(columns), made.parquet)
    values = {name: column.to_pylist() for name, column in columns.items()}
    rows = list(zip(*values.values(), strict=True))
    spaces = [f"|{chr(97 + i % 26)}{i // 26 or ''}" for i in range(len(fields))]
    with (folder / "events.vw").open("w") as out:
        for row in rows:
            given = " ".join(f"{space} {value}" for space, value in zip(spaces, row[:-1], strict=True))
            out.write(f"{1 if row[-1] else -1} {given}\n")
    if lines:
        with (folder / "events.csv").open("w") as out:
            out.write(",".join(values) + "\n")
            out.writelines(",".join(map(str, row)) + "\n" for row in rows)
        with (folder / "events.jsonl").open("w") as out:
            out.writelines(json.dumps(dict(zip(values, row, strict=True))) + "\n" for row in rows)
    (folder / "whole").touch()
    return made


def generated(count: int) -> pa.Table:
    """Return generated Criteo rows with integers, and categories as eight hexadecimal digits."""
    from cadam_paper.ctr import fields
    from cadam_paper.ctr.generator import Generated

    batches = list(Generated(rows=count).stream(10_000, device=torch.device("cpu")))
    ids = torch.cat([batch.ids for batch in batches]).numpy()
    columns: dict[str, Any] = {}
    for place, name in enumerate(fields.FIELDS):
        distinct, where = np.unique(ids[:, place], return_inverse=True)
        shown = [f"{2654435761 * int(one) % 2**32:08x}" for one in distinct] if name[0] == "C" else distinct
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(where), pa.array(map(str, shown)))
    columns["click"] = torch.cat([batch.labels for batch in batches]).numpy().astype(np.int8)
    return pa.table(columns)


# Learners: seconds and log loss --------------------------------------------------------------------------------

Timed = tuple[float, float]


def started(data: Data, model: str, optimizer: str, lr: float) -> tuple[torch.nn.Module, cadam.Optimizer]:
    torch.manual_seed(0)
    built = models.build(model, data.schema, width=8)
    extra = {"momentum": 0.0} if optimizer == "SGDM" else {}
    return built, getattr(cadam, optimizer)(built.parameters(), lr=lr, **extra)


def from_file(data: Data, model: str, optimizer: str, lr: float) -> Timed:
    built, made = started(data, model, optimizer, lr)
    learner = Learner(built, made, LOG_LOSS, per_event=True)
    assert isinstance(learner.by_event, PerEventTraining), learner.by_event
    source = ParquetSource(data.parquet, data.schema, batch_size=CHUNK_SIZE)
    begin = time.perf_counter()
    learner.run(source)
    seconds = time.perf_counter() - begin
    assert learner.learned == data.events
    return seconds, learner.log_loss.mean


def read(data: Data, form: str) -> Timed:
    """Read encoded chunks from a file."""
    path = data.folder / f"events.{form}"
    source = open_source(f"{form}:{path}", data.schema, batch_size=CHUNK_SIZE)
    begin = time.perf_counter()
    count = sum(len(batch.events) for batch in source if batch is not None and batch.events is not None)
    seconds = time.perf_counter() - begin
    assert count == data.events
    return seconds, math.nan


def learning_alone(data: Data, model: str, optimizer: str, lr: float) -> Timed:
    batches = [batch.events for batch in ParquetSource(data.parquet, data.schema, batch_size=CHUNK_SIZE)]
    built, made = started(data, model, optimizer, lr)
    engine, seconds, loss = PerEventTraining.create(built, made, LOG_LOSS), 0.0, 0.0
    for events in batches:
        begin = time.perf_counter()
        scores, _ = engine.learn(events.features, events.labels)
        seconds += time.perf_counter() - begin
        loss += float((np.logaddexp(0, scores.astype(float)) - events.labels * scores).sum())
    return seconds, loss / data.events


def plain_torch(data: Data, model: str, optimizer: str, lr: float) -> Timed:
    built, made = started(data, model, optimizer, lr)
    training, seconds, loss = TrainingStep(built, made, LOG_LOSS), 0.0, 0.0
    for batch in ParquetSource(data.parquet, data.schema, batch_size=1):
        begin = time.perf_counter()
        score = float(training.predict(batch.events.features, 1)[0])
        training.step(batch.events.columns())
        seconds += time.perf_counter() - begin
        loss += float(np.logaddexp(0, score) - batch.events.labels[0] * score)
    return seconds, loss / data.events


def vowpal_wabbit(data: Data, pairs: bool, lr: float) -> Timed:
    command = [
        sys.executable,
        "-m",
        "vowpalwabbit",
        "-d",
        str(data.folder / "events.vw"),
        "--loss_function",
        "logistic",
        "-l",
        str(lr),
    ]
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


# Contenders ----------------------------------------------------------------------------------------------------

Run = Callable[[Data, float], Timed]


@dataclass(frozen=True)
class Taker:
    """A learner: the function that runs it, the grid of its rate, and the shares of the events that it learns."""

    run: Run
    grid: str = "cadam"
    shares: tuple[float, float] = (1.0, 1.0)


def cadam_rows(model: str, shown: str) -> dict[str, Taker]:
    alone = {
        f"CAdam {shown}, learning alone": Taker(lambda d, lr: learning_alone(d, model, "CAdam", lr)),
        f"CAdam {shown}, file to metrics": Taker(lambda d, lr: from_file(d, model, "CAdam", lr)),
        f"Adam {shown}, file to metrics": Taker(lambda d, lr: from_file(d, model, "Adam", lr)),
        f"SGD {shown}, file to metrics": Taker(lambda d, lr: from_file(d, model, "SGDM", lr), "SGD"),
    }
    return alone


LEARNERS: dict[str, dict[str, Taker]] = {
    "linear": {
        **cadam_rows("linear", "linear"),
        "Vowpal Wabbit linear": Taker(lambda d, lr: vowpal_wabbit(d, False, lr), "VW"),
        "river logistic": Taker(lambda d, lr: river(d, "linear", lr), "river", (0.1, 0.02)),
        "torch loop linear": Taker(lambda d, lr: plain_torch(d, "linear", "CAdam", lr), "cadam", (0.003, 0.002)),
    },
    "fm": {
        **cadam_rows("fm", "FM"),
        "Vowpal Wabbit all pairs": Taker(lambda d, lr: vowpal_wabbit(d, True, lr), "VW", (1.0, 0.1)),
        "river FM": Taker(lambda d, lr: river(d, "fm", lr), "river", (0.01, 0.001)),
        "torch loop FM": Taker(lambda d, lr: plain_torch(d, "fm", "CAdam", lr), "cadam", (0.003, 0.001)),
    },
    "sources": {
        f"{form} to encoded chunks": Taker(lambda d, lr, form=form: read(d, form), "")  # type: ignore[misc]
        for form in ("parquet", "csv", "jsonl")
    },
}
PEERS = {"linear": "Vowpal Wabbit linear", "fm": "Vowpal Wabbit all pairs", "sources": "parquet to encoded chunks"}
PARTS = ["files", "rates", *(f"{family}-{fields}" for fields in (9, 39) for family in LEARNERS)]


def best_rate(taker: Taker, data: Data) -> float:
    """Yield learning rates of the grid in ascending order, up to the first that is worse than the one before it."""
    best, chosen = math.inf, 0.0
    for rate in RATES[taker.grid]:
        loss = taker.run(data, rate)[1]
        if not loss < best:
            break
        best, chosen = loss, rate
    return chosen


class Bench:
    """The results of the parts so far, stored in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, Path(options.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "found.json"
        self.found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def keep(self, name: str, value: Any) -> None:
        self.found[name] = value
        self.file.write_text(json.dumps(self.found))

    def data(self, fields: int) -> Data:
        folder = self.folder / str(fields)
        if fields == 39:
            if not (folder / "whole").exists():
                return prepared(table := generated(self.options.events), table.column_names[:-1], "click", folder, True)
            names = pq.read_schema(folder / "events.parquet").names
            return Data(folder, names[:-1], "click", self.options.events)
        names = FIELDS.split(",")
        return prepared(pq.read_table(self.options.file).slice(0, self.options.events), names, "on_base", folder, True)

    def run(self, part: str) -> None:
        if part == "files":
            for fields, place in ((9, 0), (39, 1)):
                data = self.data(fields)
                for takers in LEARNERS.values():
                    for share in {taker.shares[place] for taker in takers.values()}:
                        data.first(share).first(0.2)
        elif part == "rates":
            for fields in (9, 39):
                for family in ("linear", "fm"):
                    self.choose_rates(family, fields)
        else:
            family, fields = part.split("-")
            self.time(family, int(fields))

    def choose_rates(self, family: str, fields: int) -> None:
        data = self.data(fields)
        for name, taker in LEARNERS[family].items():
            key = f"rate {fields} {name}"
            if key not in self.found:
                few = data.first(taker.shares[fields == 39]).first(0.2)
                self.keep(key, best_rate(taker, few))

    def time(self, family: str, fields: int) -> None:
        """Run some rounds, in each of which all learners take turns."""
        data = self.data(fields)
        takers = {name: (taker, data.first(taker.shares[fields == 39])) for name, taker in LEARNERS[family].items()}
        timed: dict[str, list[Timed]] = {name: [] for name in takers}
        others = os.getloadavg()[0]
        for _ in range(self.options.rounds):
            for name, (taker, part) in takers.items():
                timed[name].append(taker.run(part, self.found.get(f"rate {fields} {name}", 0.0)))
        rows = {
            name: (
                part.events,
                statistics.median(part.events / seconds for seconds, _ in timed[name]),
                timed[name][0][1],
            )
            for name, (_, part) in takers.items()
        }
        beside = {}
        if family != "sources":
            (taker, _), *_ = takers.values()  # CAdam, learning alone
            rate = self.found[f"rate {fields} {next(iter(takers))}"]
            beside = {part.events: taker.run(part, rate)[1] for _, part in takers.values()}
        self.keep(f"{family}-{fields}", {"rows": rows, "beside": beside, "others": others})

    def show(self, part: str) -> None:
        family, fields = part.split("-")
        found = self.found[part]
        beside = {int(count): loss for count, loss in found["beside"].items()}
        print(
            f"\n{part}: {self.options.events:,} events of {fields} fields, {self.options.rounds} rounds; one core, "
            f"{platform.processor() or platform.machine()}, {found['others']:.1f} load average before it"
        )
        peer = PEERS[family]
        print(f"{'':34}{'events/s':>12}{'x ' + peer.split()[0]:>10}{'rate':>8}{'log loss':>10}{'CAdam':>9}  over")
        for name, (count, speed, loss) in found["rows"].items():
            ratio = speed / found["rows"][peer][1]
            losses = "" if math.isnan(loss) else f"{loss:10.4f}{beside[count]:9.4f}"
            rate = self.found.get(f"rate {fields} {name}")
            print(f"{name:34}{speed:12,.0f}{ratio:10.3g}{'' if rate is None else f'{rate:g}':>8}{losses:19}  {count:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", help="plate appearances of Retrosheet, see paper/cadam_paper/real_streams.py")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--folder", default="events-bench", help="for files and what was found")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options)
    for part in options.part or PARTS:
        bench.run(part)
    for part in PARTS[2:]:
        if part in bench.found:
            bench.show(part)


if __name__ == "__main__":
    main()
