"""Measure where the time of a batch goes in any version of the package; `learner_time.py --before TREE` calls it.

    PYTHONPATH=TREE/src python benchmarks/learner_time_of_version.py FILE BATCH_SIZE REPEATS

It uses only what all versions have: a model, an optimizer, a learner and a source. It prints the median of the
seconds of each part over the repeats, as JSON. Reading includes encoding.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cadam import CAdam
from cadam.online import Learner, ParquetSource, models
from click_stream import click_schema


class Timed:
    """Sums the processor time of each part in a run."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def call(self, part: str, function: Any, *arguments: Any, **options: Any) -> Any:
        """Call a function as a part."""
        start = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            self.seconds[part] += time.thread_time() - start

    def wrap(self, part: str, owner: Any, name: str) -> None:
        """Time a method of an object as a part from now on."""
        method = getattr(owner, name)
        setattr(owner, name, lambda *given, **options: self.call(part, method, *given, **options))

    def read(self, source: Any) -> Iterator[Any]:
        """Yield the batches of a source, whose reading is timed."""
        batches, end = iter(source), object()
        while (batch := self.call("read", next, batches, end)) is not end:
            yield batch


def run(path: Path, batch_size: int) -> dict[str, float]:
    """Learn all events once, and return the seconds of each part."""
    schema, timed = click_schema(), Timed()
    torch.manual_seed(0)
    model = models.build("deepfm", schema)
    optimizer = CAdam(model.named_parameters(), lr=3e-3)
    learner = Learner(model, optimizer, nn.functional.binary_cross_entropy_with_logits)
    timed.wrap("forward", model, "forward")
    timed.wrap("optimizer", optimizer, "step")
    timed.wrap("optimizer", optimizer, "zero_grad")
    timed.wrap("backward", Tensor, "backward")
    start = time.thread_time()
    learner.run(timed.read(ParquetSource(path, schema, batch_size=batch_size)))
    total = time.thread_time() - start
    return {**timed.seconds, "other": total - sum(timed.seconds.values())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    backward = Tensor.backward
    runs = []
    for _ in range(int(sys.argv[3]) + 1):
        runs.append(run(Path(sys.argv[1]), int(sys.argv[2])))
        Tensor.backward = backward  # type: ignore[method-assign]
    print(json.dumps({part: statistics.median(each[part] for each in runs[1:]) for part in runs[0]}))
