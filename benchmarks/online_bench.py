"""Measure the speed of the online learner, the overhead of its loop, and its memory over time.

    python benchmarks/online_bench.py [speed|memory|memory-one-by-one] [--events N] [--threads N] [--json FILE]

speed: events with their labels from Parquet through a small DeepFM (39 fields, a table of 100,000 x 8, two layers of
64) with the prediction log and checkpoints on. A plain loop of the same model and optimizer on the same batches takes
turns with it, 10 batches each, so that both meet the same machine. The loop's own overhead is the median of how much
longer a turn of the learner takes than the turn of the plain loop beside it, and the share of checkpoints and of
writing the log, which fall into few turns; reading the data is timed apart. The overhead of the sums takes all turns as
they are, those included in which something else ran on the machine.
memory: events from memory through a tiny model, labels 2,000 events later, a third of them never; the resident memory
after the first tenth and at the end. memory-one-by-one: the same with a small FM, per-event training and metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from cadam import CAdam
from cadam.online import (
    Batch,
    Events,
    LabelOptions,
    Labels,
    Learner,
    ParquetSource,
    Schema,
    Source,
    StreamMetrics,
    models,
)
from cadam.online.models.model_file import LOG_LOSS
from peers.cases import DeepFM

ROWS, FIELDS, BATCH, TURN = 100_000, 39, 1024, 10
BAR_SECONDS, BAR_OVERHEAD = 60.0, 0.10
loss = nn.functional.binary_cross_entropy_with_logits


def write_stream(path: Path, count: int) -> None:
    """Write clicks with skewed ids in pieces, so that the benchmark itself needs little memory."""
    random = np.random.default_rng(0)
    fields = pa.list_(pa.int32(), FIELDS)
    schema = pa.schema(
        {"event": pa.int64(), "user": pa.int64(), "at": pa.float64(), "fields": fields, "label": pa.int8()}
    )
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, count, 50_000):
            size = min(50_000, count - start)
            ids = (ROWS * random.random((size, FIELDS)) ** 3).astype(np.int32)
            number = np.arange(start, start + size)
            columns = [
                pa.array(number),
                pa.array(ids[:, 0].astype(np.int64)),
                pa.array(number / 1000),
                pa.FixedSizeListArray.from_arrays(pa.array(ids.ravel()), FIELDS),
                pa.array((random.random(size) < 0.25).astype(np.int8)),
            ]
            writer.write_table(pa.table(columns, schema=schema))


class Turns(Source):
    """A source that lets the plain loop learn from the same batches, in turns with the learner."""

    def __init__(self, source: Source) -> None:
        self.source, self.reading = source, 0.0
        self.plain: list[float] = []  # seconds of each turn
        self.learner: list[float] = []
        torch.manual_seed(0)
        self.model = DeepFM(ROWS, 8, 64, sparse=True)
        self.optimizer = CAdam(self.model.named_parameters())

    def __iter__(self) -> Iterator[Any]:
        """Yield batches in turns. The plain loop learns from each turn before or after the learner, alternately."""
        batches, number = iter(self.source), 0
        while True:
            start = time.perf_counter()
            turn = [batch for batch in islice(batches, TURN) if isinstance(batch, Batch)]
            self.reading += time.perf_counter() - start
            if not turn:
                return
            events = [batch.events for batch in turn if batch.events is not None]
            if number % 2 == 0:
                self.learn(events)
            start = time.perf_counter()
            yield from turn
            self.learner.append(time.perf_counter() - start)
            if number % 2:
                self.learn(events)
            number += 1

    def learn(self, turn: list[Events]) -> None:
        start = time.perf_counter()
        for events in turn:
            fields, labels = torch.from_numpy(events.features["fields"]), torch.from_numpy(events.labels)
            self.optimizer.zero_grad()
            scores = self.model(fields)  # as in the learner, one pass gives the scores and the gradients
            loss(scores, labels).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self.plain.append(time.perf_counter() - start)

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)


def timed(owner: Any, name: str) -> list[float]:
    """Let a method append the seconds of each call to the list that is returned."""
    seconds: list[float] = []
    method = getattr(owner, name)

    def noting(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(owner, name, noting)
    return seconds


def warm_up() -> None:
    """Run the first step, whose one-time costs count for neither side."""
    model = DeepFM(ROWS, 8, 64, sparse=True)
    loss(model(torch.zeros(BATCH, FIELDS, dtype=torch.int64)), torch.zeros(BATCH)).backward()  # type: ignore[no-untyped-call]
    CAdam(model.named_parameters()).step()


def speed(count: int, folder: Path) -> dict[str, float]:
    write_stream(folder / "clicks.parquet", count)
    schema = Schema({"fields": f"category:{ROWS}[{FIELDS}]"}, id="event", user="user", time="at")
    turns = Turns(ParquetSource(folder / "clicks.parquet", schema, batch_size=BATCH))
    torch.manual_seed(0)
    model = DeepFM(ROWS, 8, 64, sparse=True)
    optimizer = CAdam(model.named_parameters())
    learner = Learner(model, optimizer, loss, checkpoint=folder / "state", log=folder / "log")
    warm_up()
    apart = [timed(learner, "save"), timed(learner.log, "_write")]
    start = time.perf_counter()
    learner.run(turns)
    plain = sum(turns.plain)
    seconds = time.perf_counter() - start - plain
    longer = statistics.median(ours / theirs - 1 for ours, theirs in zip(turns.learner, turns.plain, strict=True))
    saving, writing = (sum(times) / plain for times in apart)
    return {
        "events": learner.events,
        "seconds": seconds,
        "events_a_second": count / seconds,
        "plain loop, seconds": plain,
        "reading, seconds": turns.reading,
        "overhead": longer + saving + writing,
        "of that checkpoints": saving,
        "of that the log": writing,
        "overhead of the sums": (seconds - turns.reading) / plain - 1,
        "log_loss": learner.metrics()["log_loss"],
    }


# Memory --------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 4, sparse=True)

    def forward(self, item: Tensor) -> Tensor:
        total: Tensor = self.table(item).sum(1)
        return total


class Endless(Source):
    """Yield events without labels, and the labels of the events 2,000 earlier, of which a third never arrive."""

    def __init__(self, count: int, size: int = 2000) -> None:
        self.count, self.size, self.position = count, size, 0
        self.random = np.random.default_rng(0)
        self.resident: list[tuple[int, float]] = []

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.count:
            start, self.position = self.position, self.position + self.size
            ids = np.arange(start, self.position)
            labelled = ids[ids % 3 > 0] - self.size
            labels = Labels(labelled, self.random.random(len(labelled)) < 0.25)
            yield Batch(Events({"item": self.random.integers(1000, size=self.size)}, ids=ids, users=ids % 5000), labels)
            if self.position % (self.count // 10) < self.size:
                self.resident.append((self.position, resident()))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def resident() -> float:
    """Return the resident memory in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def memory(count: int, folder: Path, one_by_one: bool) -> dict[str, Any]:
    stream, places = Endless(count), {"checkpoint": folder / "state", "log": folder / "log"}
    if one_by_one:
        model: nn.Module = models.build("fm", Schema({"item": "category:1000"}))
        optimizer = CAdam(model.named_parameters())
        metrics, labels = [StreamMetrics(100_000)], LabelOptions(capacity=10_000)
        learner = Learner(model, optimizer, LOG_LOSS, per_event=True, labels=labels, metrics=metrics, **places)
        print(f"learning {learner.training_mode}")
    else:
        model = Tiny()
        optimizer = CAdam(model.named_parameters())
        labels = LabelOptions(horizon=10_000, unmatched="negative")
        learner = Learner(model, optimizer, loss, labels=labels, **places)
    start = time.perf_counter()
    learner.run(stream)
    first, last = stream.resident[0][1], stream.resident[-1][1]
    return {
        "events": learner.events,
        "seconds": time.perf_counter() - start,
        "MB after a tenth": first,
        "MB at the end": last,
        "MB more": last - first,
        "MB by events": stream.resident,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("speed", "memory", "memory-one-by-one"), default="speed")
    parser.add_argument("--events", type=int, metavar="N", help="default: 1,000,000 for speed, 10,000,000 for memory")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        if options.part == "speed":
            found: dict[str, Any] = speed(options.events or 1_000_000, Path(folder))
        else:
            found = memory(options.events or 10_000_000, Path(folder), options.part != "memory")
    for name, value in found.items():
        print(f"{name:24}", f"{value:,.4g}" if isinstance(value, float) else value)
    if options.part == "speed":
        print(f"bars: a million events in {BAR_SECONDS:.0f} s, overhead {BAR_OVERHEAD:.0%}")
    if options.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": options.threads}
        options.json.write_text(json.dumps({**machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
