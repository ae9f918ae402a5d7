"""Measure where the time of a batch goes: `cadam run` with a ready-made model on clicks from Parquet.

    python benchmarks/learner_time.py [--model NAME] [--device cpu] [--batch-size 256] [--events N] [--repeats N]

Each event has 13 numbers and 26 categories and comes with its label. Runs of three kinds take turns, so that all meet
the same machine: the learner as it is, the learner with two forward passes per batch (one for the scores and one for
the gradients), and the learner with timers, whose times are exclusive of each other. Timers measure processor time,
which varies less than wall time on a machine that is busy with other processes. On CUDA they measure wall time and
wait for the device, so their sum is larger than the time of a run without them. All numbers are medians over the
repeats; the first run of each kind warms up and does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from cadam import CAdam
from cadam.online import Learner, ParquetSource, Schema, Source
from cadam.online.device import select_device
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.run_config import model_builder

NUMBERS, CATEGORIES, ROWS_PER_CATEGORY = 13, 26, 10_000
PARTS = ("read", "encode", "forward", "backward", "optimizer", "metrics", "other")


def write_clicks(path: Path, count: int) -> Schema:
    """Write clicks with skewed categories as text and numbers with outliers, and return their schema."""
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {f"n{i}": random.lognormal(size=count) for i in range(NUMBERS)}
    for i in range(CATEGORIES):
        ids = (10 ** (1 + 4 * i / CATEGORIES) * random.random(count) ** 3).astype(np.int64)
        columns[f"c{i}"] = pa.array([f"{value:08x}" for value in ids.tolist()]).dictionary_encode()
    columns["click"] = (random.random(count) < 0.25).astype(np.int8)
    pq.write_table(pa.table(columns), path)
    numbers = {f"n{i}": "number" for i in range(NUMBERS)}
    return Schema({**numbers, **{f"c{i}": f"hash:{ROWS_PER_CATEGORY}" for i in range(CATEGORIES)}}, label="click")


class Timers:
    """Sums the seconds of each part; the time of a part that another part calls counts only for the inner one."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: Counter[str] = Counter()
        self._is_on_cuda = device.type == "cuda"
        self._clock = time.perf_counter if self._is_on_cuda else time.process_time
        self._running = ["other"]
        self._last = self._clock()

    def switch(self) -> None:
        """Assign the time since the last switch to the part that is running."""
        if self._is_on_cuda:
            torch.cuda.synchronize()
        now = self._clock()
        self.seconds[self._running[-1]] += now - self._last
        self._last = now

    def call(self, part: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function as a part."""
        self.switch()
        self._running.append(part)
        try:
            return function(*arguments, **options)
        finally:
            self.switch()
            self._running.pop()

    def time(self, part: str, owner: Any, *methods: str) -> None:
        """Time methods of an object as a part from now on."""
        for name in methods:
            setattr(owner, name, partial(self.call, part, getattr(owner, name)))


class TimedSource:
    """A source whose reading is timed."""

    def __init__(self, source: Source, timers: Timers) -> None:
        self.source, self.timers = source, timers

    def __iter__(self) -> Iterator[Any]:
        batches, end = iter(self.source), object()
        while (batch := self.timers.call("read", next, batches, end)) is not end:
            yield batch


def run(path: Path, schema: Schema, options: argparse.Namespace, kind: str) -> dict[str, float]:
    """Learn all events once, and return the seconds in total and of the processor; if "timed", those of each part."""
    device = select_device(options.device)
    assert device is not None
    torch.manual_seed(0)
    model = model_builder(options.model, schema, {}, device)[0]()
    optimizer = CAdam(model.named_parameters(), lr=3e-3)
    learner = Learner(model, optimizer, LOG_LOSS)
    source = ParquetSource(path, schema, batch_size=options.batch_size)
    if kind == "two passes":
        learner.training.has_single_pass = False
    if kind != "timed":
        start, processor_start = time.perf_counter(), time.process_time()
        learner.run(source)
        return {"total": time.perf_counter() - start, "processor": time.process_time() - processor_start}
    backward = Tensor.backward
    timers = Timers(device)
    timers.time("encode", source, "_convert")
    timers.time("forward", learner.training, "_forward")
    timers.time("optimizer", optimizer, "step", "zero_grad")
    timers.time("metrics", learner.log_loss, "update")
    Tensor.backward = lambda self: timers.call("backward", backward, self)  # type: ignore[method-assign]
    try:
        learner.run(TimedSource(source, timers))
        timers.switch()
    finally:
        Tensor.backward = backward  # type: ignore[method-assign]
    return dict(timers.seconds)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deepfm", metavar="NAME", help="a ready-made model (default: deepfm)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:N or auto (default: cpu)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="events per step (default: 256)")
    parser.add_argument("--events", type=int, default=50_000, metavar="N", help="events per run (default: 50000)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each kind (default: 5)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds = ("as it is", "two passes", "timed")
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clicks.parquet"
        schema = write_clicks(path, options.events)
        for _ in range(options.repeats + 1):
            for kind in kinds:
                runs[kind].append(run(path, schema, options, kind))
    medians = {
        kind: {part: statistics.median(one[part] for one in each[1:]) for part in each[0]}
        for kind, each in runs.items()
    }
    batches = -(-options.events // options.batch_size)
    print(f"{options.model} on {options.device}, batches of {options.batch_size} events, torch {torch.__version__}\n")
    print(f"{'part':12}{'us per batch':>14}{'share':>9}")
    total = sum(medians["timed"].values())
    for part in PARTS:
        seconds = medians["timed"].get(part, 0.0)
        print(f"{part:12}{1e6 * seconds / batches:14,.0f}{seconds / total:9.1%}")
    print(f"{'sum':12}{1e6 * total / batches:14,.0f}{1:9.1%}\n")
    print(f"{'':12}{'events per second':>19}{'per second of processor time':>31}")
    for kind in kinds[:2]:
        speeds = [options.events / medians[kind][clock] for clock in ("total", "processor")]
        print(f"{kind:12}{speeds[0]:19,.0f}{speeds[1]:31,.0f}")
    if options.json:
        options.json.write_text(json.dumps({**vars(options), "json": None, "seconds": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
