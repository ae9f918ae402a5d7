"""Measure where the time of a batch goes: `cadam run` with a ready-made model on clicks from Parquet.

    python benchmarks/learner_time.py [--model NAME] [--device cpu] [--batch-size 256] [--events N] [--repeats N]
                                      [--width N] [--hidden N M] [--before TREE]

Each event has 13 numbers and 26 categories and comes with its label. Runs of three kinds take turns, so that all meet
the same machine: the learner as it is, the learner with two forward passes per batch (one for the scores and one for
the gradients), and the learner with timers, whose times are exclusive of each other. Timers measure processor time
of the thread that learns, which varies less than wall time on a machine that is busy with other processes. On CUDA they
measure wall time and wait for the device, so their sum is larger than the time of a run without them; backward pass and
optimizer step are one CUDA graph there. Reading and encoding run in a second thread; with timers they run in the same
one, without the threads of pyarrow. All numbers are medians over the repeats; the first run of each kind warms up and
does not count. With --before, a column has the times of another version, whose checkout is TREE: its reading includes
encoding, and its metrics are in "other".

The limit of a part is the larger of two times: that of the bytes that it must move at the speed of copying memory, and
that of its multiplications and additions at the speed of a large matrix product. Both speeds are measured at the start,
with as many threads as the learner has, on the device for those parts that run there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cadam import CAdam
from cadam.online import Batch, Learner, ParquetSource, Schema, Source
from cadam.online.data.sources import parquet
from cadam.online.data.sources.prefetch import prefetch
from cadam.online.device import select_device
from cadam.online.fused_step import FusedPass, FusedStep, has_onednn
from cadam.online.graph_step import CapturedStep
from cadam.online.models.inputs import BINS
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.models.networks import Linear
from cadam.online.run_config import model_builder
from click_stream import click_schema, write_clicks

PARTS = ("read", "encode", "copy", "forward", "backward", "optimizer", "update", "metrics", "other")
"""The parts of a batch, in the order of the table. The update is backward pass and optimizer step as one CUDA graph."""


class Timers:
    """Sums the seconds of each part; the time of a part that another part calls counts only for the inner one."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: Counter[str] = Counter()
        self._is_on_cuda = device.type == "cuda"
        self._clock = time.perf_counter if self._is_on_cuda else time.thread_time
        self._running = ["other"]
        self._last = self._clock()

    def switch(self) -> None:
        """Assign the time since the last switch to the part that is running."""
        if self._is_on_cuda:
            if torch.cuda.is_current_stream_capturing():
                return  # a capture must not wait for the device; it counts for the part that runs around it
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
    """Learn all events once. Return the seconds by the clock and by the processor; if "timed", those of each part."""
    device = select_device(options.device)
    assert device is not None
    torch.manual_seed(0)
    model = model_builder(options.model, schema, model_options(options), device)[0]()
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
    is_fused = isinstance(learner.training, FusedStep)
    timers.time("optimizer", optimizer, "step_on_same_grads" if is_fused else "step", "zero_grad")
    timers.time("metrics", learner.log_loss, "update")
    compiled = [(FusedPass, "forward", "forward"), (FusedPass, "backward", "backward")]
    compiled += [(CapturedStep, "copy_batch", "copy"), (CapturedStep, "forward", "forward")]
    compiled += [(CapturedStep, "update", "update")]
    methods = [(owner, name, part, getattr(owner, name)) for owner, name, part in compiled]
    Tensor.backward = lambda self: timers.call("backward", backward, self)  # type: ignore[method-assign]
    parquet.prefetch = iter  # type: ignore[assignment]
    for owner, name, part, method in methods:
        setattr(owner, name, lambda *given, part=part, method=method: timers.call(part, method, *given))
    try:
        learner.run(TimedSource(source, timers))
        timers.switch()
    finally:
        Tensor.backward = backward  # type: ignore[method-assign]
        parquet.prefetch = prefetch
        for owner, name, _, method in methods:
            setattr(owner, name, method)
    return dict(timers.seconds)


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of the model."""
    return {name: getattr(options, name) for name in ("width", "hidden") if getattr(options, name) is not None}


def run_before(path: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of each part in another version, which runs in its own process."""
    script = Path(__file__).with_name("learner_time_of_version.py")
    settings = [options.repeats, options.batch_size, options.device, json.dumps(model_options(options))]
    command = [sys.executable, str(script), str(path), *map(str, settings)]
    environment = {**os.environ, "PYTHONPATH": str(options.before.resolve() / "src")}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    seconds: dict[str, float] = json.loads(output)
    return seconds


def limits(path: Path, schema: Schema, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds per batch that the bytes and the arithmetic of each part take at least."""
    device, cpu = select_device(options.device), torch.device("cpu")
    assert device is not None
    speeds = {place: measure_speeds(place) for place in {device, cpu}}
    model = model_builder(options.model, schema, model_options(options), cpu)[0]()
    assert isinstance(model, Linear)
    count = options.batch_size
    batches = [batch for batch in ParquetSource(path, schema, batch_size=count) if isinstance(batch, Batch)]
    features = [batch.events.features for batch in batches[:50] if batch.events is not None]
    distinct = statistics.mean(sum(len(np.unique(v)) for v in f.values() if v.dtype.kind == "i") for f in features)
    distinct += len(model.inputs.bin_starts) * BINS
    encoded = sum(values.nbytes for values in features[0].values())
    tables = [p for name, p in model.named_parameters() if name in ("inputs.table.weight", "inputs.linear.weight")]
    row_bytes = sum(p.shape[1] * p.element_size() for p in tables)
    gathered = model.inputs.fields * count * row_bytes
    dense = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in tables)
    needs = {
        "read": (path.stat().st_size / options.events * count + encoded, 0),
        "encode": (2 * encoded, 0),
        "forward": (encoded + 2 * gathered, 2 * dense * count),
        "backward": (3 * gathered, 4 * dense * count),
        # Three tensors (weights and two moments) are read and written; gradients and ids are read.
        "optimizer": (6 * distinct * row_bytes + gathered + 8 * model.inputs.fields * count + 7 * 4 * dense, 0),
        "metrics": (8 * count, 0),
    }
    times = {}
    for part, (moved, work) in needs.items():
        bytes_per_second, flops = speeds[cpu if part in ("read", "encode", "metrics") else device]
        times[part] = max(moved / bytes_per_second, work / flops)
    if device != cpu:
        times["update"] = times.pop("backward") + times.pop("optimizer")
    return times


def measure_speeds(device: torch.device) -> tuple[float, float]:
    """Return how many bytes per second a device copies, and how many operations per second a matrix product has."""
    # On a GPU a call has to be long enough that its launch does not count.
    size, side = (32_000_000, 1024) if device.type == "cpu" else (500_000_000, 8192)
    source, square = torch.randn(size, device=device), torch.randn(side, side, device=device)
    target = torch.empty_like(source)
    products: list[Callable[[], object]] = [lambda: square @ square]
    if device.type == "cpu" and has_onednn():
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(square, square, None, "none", [], ""))
    bytes_per_second = 2 * source.nbytes / fastest(lambda: target.copy_(source), device)
    return bytes_per_second, 2 * side**3 / min(fastest(product, device) for product in products)


def fastest(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls."""
    timers, seconds = Timers(device), []
    for _ in range(20):
        timers.call("call", function)
        seconds.append(timers.seconds.pop("call"))
    return min(seconds)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deepfm", metavar="NAME", help="a ready-made model (default: deepfm)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:N or auto (default: cpu)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="events per step (default: 256)")
    parser.add_argument("--events", type=int, default=50_000, metavar="N", help="events per run (default: 50000)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each kind (default: 5)")
    parser.add_argument("--width", type=int, metavar="N", help="width of the embeddings (default: that of the model)")
    parser.add_argument("--hidden", type=int, nargs="+", metavar="N", help="hidden layers (default: by the model)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch (default: 1)")
    parser.add_argument("--before", type=Path, metavar="TREE", help="the checkout of another version, with its library")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds = ("as it is", "two passes", "timed")
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clicks.parquet"
        write_clicks(path, options.events)
        schema = click_schema()
        least = limits(path, schema, options)
        for _ in range(options.repeats + 1):
            for kind in kinds:
                runs[kind].append(run(path, schema, options, kind))
        before = {} if options.before is None else run_before(path, options)
    medians = {
        kind: {part: statistics.median(one[part] for one in each[1:]) for part in each[0]}
        for kind, each in runs.items()
    }
    batches = -(-options.events // options.batch_size)
    print(f"{options.model} on {options.device}, batches of {options.batch_size} events, torch {torch.__version__}\n")
    header = f"{'before':>10}" if before else ""
    print(f"{'part':12}{header}{'us per batch':>14}{'share':>9}{'limit in us':>14}")
    total = sum(medians["timed"].values())
    for part in PARTS:
        if not (part in medians["timed"] or before.get(part)):
            continue
        seconds = medians["timed"].get(part, 0.0)
        earlier = f"{1e6 * before.get(part, 0.0) / batches:10,.0f}" if before else ""
        limit = f"{1e6 * least[part]:14,.1f}" if part in least else ""
        print(f"{part:12}{earlier}{1e6 * seconds / batches:14,.0f}{seconds / total:9.1%}{limit}")
    earlier = f"{1e6 * sum(before.values()) / batches:10,.0f}" if before else ""
    print(f"{'sum':12}{earlier}{1e6 * total / batches:14,.0f}{1:9.1%}{1e6 * sum(least.values()):14,.1f}\n")
    print(f"{'':12}{'events per second':>19}{'per second of processor time':>31}")
    for kind in kinds[:2]:
        speeds = [options.events / medians[kind][clock] for clock in ("total", "processor")]
        print(f"{kind:12}{speeds[0]:19,.0f}{speeds[1]:31,.0f}")
    if options.json:
        options.json.write_text(
            json.dumps({**vars(options), "json": None, "before": before, "seconds": medians}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
