"""Measure where the time of a batch goes in any version of the package; `learner_time.py --before TREE` calls it.

    PYTHONPATH=TREE/src python benchmarks/learner_time_of_version.py FILE REPEATS BATCH_SIZE DEVICE OPTIONS

OPTIONS are those of the model, as JSON. On CUDA the times are those of the wall clock, with the device at rest before
and after each part; on the CPU they are processor time. The script uses only what all versions have: a model, an
optimizer, a learner and a source. It prints the median of the seconds of each part over the repeats, as JSON. Reading
includes encoding.
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
    """Sums the time of each part in a run."""

    def __init__(self, device: str) -> None:
        self.seconds: Counter[str] = Counter()
        self._is_on_cuda = device != "cpu"

    def now(self) -> float:
        """Return the time, once the device has computed everything."""
        if self._is_on_cuda:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.thread_time()

    def call(self, part: str, function: Any, *arguments: Any, **options: Any) -> Any:
        """Call a function as a part."""
        start = self.now()
        try:
            return function(*arguments, **options)
        finally:
            self.seconds[part] += self.now() - start

    def wrap(self, part: str, owner: Any, name: str) -> None:
        """Time a method of an object as a part from now on."""
        method = getattr(owner, name)
        setattr(owner, name, lambda *given, **options: self.call(part, method, *given, **options))

    def read(self, source: Any) -> Iterator[Any]:
        """Yield the batches of a source, whose reading is timed."""
        batches, end = iter(source), object()
        while (batch := self.call("read", next, batches, end)) is not end:
            yield batch


def run(path: Path, batch_size: int, device: str, model_options: dict[str, Any]) -> dict[str, float]:
    """Learn all events once, and return the seconds of each part."""
    schema, timed = click_schema(), Timed(device)
    torch.manual_seed(0)
    model = models.build("deepfm", schema, **model_options).to(device)
    optimizer = CAdam(model.named_parameters(), lr=3e-3)
    learner = Learner(model, optimizer, nn.functional.binary_cross_entropy_with_logits)
    timed.wrap("forward", model, "forward")
    timed.wrap("optimizer", optimizer, "step")
    timed.wrap("optimizer", optimizer, "zero_grad")
    timed.wrap("backward", Tensor, "backward")
    start = timed.now()
    learner.run(timed.read(ParquetSource(path, schema, batch_size=batch_size)))
    total = timed.now() - start
    return {**timed.seconds, "other": total - sum(timed.seconds.values())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    backward = Tensor.backward
    runs = []
    file, repeats, batch_size, device, model_options = sys.argv[1:]
    for _ in range(int(repeats) + 1):
        runs.append(run(Path(file), int(batch_size), device, json.loads(model_options)))
        Tensor.backward = backward  # type: ignore[method-assign]
    print(json.dumps({part: statistics.median(each[part] for each in runs[1:]) for part in runs[0]}))
