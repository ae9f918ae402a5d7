"""Compare `cadam run` without options with Vowpal Wabbit, river and FTRL with their defaults, on thirteen streams.

    python benchmarks/defaults.py DATA FOLDER --peers PYTHON [--events 60000] [--streams A,B] [--run "--lr 0.01"]

DATA has the Parquet files of six public streams; seven more are simulated by `ab_streams`. FOLDER gets the streams and
the predictions of the peers, which are computed once. PYTHON is an interpreter with vowpalwabbit and river. ``--run``
has further options of `cadam run`, to try another default. Defaults may be chosen on the streams of `TUNING` only.

Every learner predicts an event before it learns it. Columns: the log loss over the whole stream, and, in brackets, the
number of events after which the summed loss stays below that of the best constant, or "never".
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from ab_streams import KINDS, write_stream
from cadam.online import Schema
from cadam.online.data.inference import ColumnOptions, infer_schema, take_sample
from cadam.online.data.sources import resolve_uri
from cadam.statistics.intervals import Array
from evidence_streams import STREAMS

PUBLIC = ("flights", "movielens", "electricity", "weather", "forest", "baseball")
TUNING = ("flights", "clicks", "drift")
"""The streams that defaults may be chosen on."""
CADAM = "cadam run"
LEARNERS = (CADAM, "VW", "VW, FTRL", "river", "river, FTRL")
LEAST = 1e-7
"""Probabilities are at least this far from 0 and 1, so that one wrong prediction does not decide the comparison."""


def prepare(name: str, data: Path, folder: Path, events: int) -> tuple[Path, list[str]]:
    """Write the first events of a stream to the folder; return the file and its options of `cadam run`."""
    if name in KINDS:
        path = folder / f"{name}-{events}.csv"
        if not path.exists():
            write_stream(path, name, events)
        return path, ["--label", "click"]
    file, options = STREAMS[name]
    values = dict(zip(options[::2], options[1::2], strict=True))
    values.pop("--user", None)  # it only groups a metric that is not compared here
    path = folder / f"{name}-{events}.parquet"
    if not path.exists():
        table = pq.read_table(data / file)
        label = re.split("[><=]", values["--label"])[0]
        pq.write_table(table.filter(pc.is_valid(table[label])).slice(0, events), path)
    return path, [part for option in values.items() for part in option]


def infer(path: Path, options: list[str]) -> Schema:
    """Return the schema that `cadam run` infers."""
    values = dict(zip(options[::2], options[1::2], strict=True))
    ignored = tuple(values.get("--ignore", "").split(",")) if "--ignore" in values else ()
    columns = ColumnOptions(values["--label"], None, None, None, ignored)
    return infer_schema(take_sample(resolve_uri(str(path))), columns, path.name).schema


def write_vowpal_wabbit(path: Path, options: list[str], labels: Array, output: Path) -> None:
    """Write the columns that `cadam run` uses as a file of Vowpal Wabbit."""
    schema = infer(path, options)
    table = pq.read_table(path) if path.suffix == ".parquet" else pa.csv.read_csv(path)
    columns = []
    for name, feature in schema.features.items():
        values, kind = table[name], str(feature)
        if kind.startswith("number"):
            numbers = np.nan_to_num(pc.cast(values, pa.float64()).to_numpy(zero_copy_only=False))
            columns.append([f"{name}:{value:.6g}" for value in numbers])
        elif kind.startswith("clock"):
            # The learner derives the time of day and the day of the week; the others get both as categories.
            is_iso = kind.startswith("clock:iso")
            times = values.to_numpy(zero_copy_only=False).astype("datetime64[s]" if is_iso else "int64").astype("int64")
            columns += [[f"hour={value}" for value in times // 3600 % 24]]
            columns += [[f"weekday={value}" for value in times // 86_400 % 7]]
        else:
            columns.append([f"{name}={str(value).replace(' ', '_').replace(':', '_')}" for value in values.to_pylist()])
    with output.open("w") as file:
        for label, *features in zip(labels, *columns, strict=True):
            file.write(f"{1 if label else -1} | {' '.join(features)}\n")


def run_cadam(path: Path, options: list[str], more: list[str]) -> tuple[Array, Array]:
    """Return the probabilities that `cadam run` predicts, and the labels."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "cadam", "run", str(path), *options, *more, "--quiet", "--log", str(log)]
        subprocess.run([*command, "--checkpoint", str(Path(folder, "run"))], check=True, stdout=subprocess.DEVNULL)
        table = pq.read_table(log)
    scores, labels = (table[name].to_numpy().astype(float) for name in ("score", "label"))
    return 1 / (1 + np.exp(-scores)), labels


def log_losses(probabilities: Array, labels: Array) -> Array:
    """Return the log loss of each event."""
    probabilities = np.clip(probabilities, LEAST, 1 - LEAST)
    losses: Array = -np.where(labels > 0, np.log(probabilities), np.log1p(-probabilities))
    return losses


def events_to_beat(losses: Array, constant: Array) -> float:
    """Return the number of events after which the summed loss stays below that of the constant; infinite if never."""
    behind = np.flatnonzero(np.cumsum(losses) >= np.cumsum(constant))
    count = 0 if len(behind) == 0 else int(behind[-1]) + 1
    return math.inf if count == len(losses) else count


def main() -> None:
    """Run all learners on all streams, and print one line for each stream."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--streams", default=",".join((*PUBLIC, *KINDS)))
    parser.add_argument("--run", default="")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"| stream | events | best constant | {' | '.join(LEARNERS)} | lowest |")
    print("| --- " * (len(LEARNERS) + 4) + "|")
    for name in options.streams.split(","):
        path, run_options = prepare(name, options.data, options.folder, options.events)
        probabilities, labels = run_cadam(path, run_options, options.run.split())
        peers = path.with_suffix(".npz")
        if not peers.exists():
            stream = path.with_suffix(".vw")
            write_vowpal_wabbit(path, run_options, labels, stream)
            script = Path(__file__).with_name("online_peers.py")
            subprocess.run([options.peers, str(script), str(stream), str(peers)], check=True)
        predictions = {CADAM: probabilities, **np.load(peers)}
        constant = log_losses(np.full(len(labels), labels.mean()), labels)
        losses = {learner: log_losses(predictions[learner], labels) for learner in LEARNERS}
        means = {learner: losses[learner].mean() for learner in LEARNERS}
        cells = [f"{means[each]:.4f} ({events_to_beat(losses[each], constant):,.0f})" for each in LEARNERS]
        title = f"{name} (tuning)" if name in TUNING else name
        lowest = min(means, key=lambda each: means[each])
        row = " | ".join([title, f"{len(labels):,}", f"{constant.mean():.4f}", *cells, lowest])
        print(f"| {row.replace('(inf)', '(never)')} |", flush=True)


if __name__ == "__main__":
    main()
