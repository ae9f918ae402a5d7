"""Simulates the drift alarm: false alarms on streams without drift, and the delay until a rise is detected.

    python benchmarks/drift_alarm.py [--runs 20] [--blocks 1000] [--alpha 1e-3]

A value is the mean log loss of a block. The guarantee is an expectation of at most `alpha` false alarms per block, for
independent and normal values. The other streams without drift break its assumptions: skewed values are block means of
the log loss with 4% positives, improving ones have a loss that falls, and correlated ones have a correlation of 0.3
between neighbors. A rise is given in standard deviations of a block.

    python benchmarks/drift_alarm.py time

prints the share of a learner's processor time that the alarm takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from cadam import CAdam
from cadam.online import Events, Learner, Schema, models
from cadam.online.data.events import Array, Columns
from cadam.online.metrics.log_loss import LogLoss
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.monitoring.drift import DriftMonitor, RiseDetector
from cadam.online.per_event import CHUNK_SIZE

Generator = np.random.Generator


def find_alarms(values: Array, alpha: float) -> list[int]:
    """Return the positions of the values that raise an alarm."""
    detector, alarms = RiseDetector(alpha), []
    for position, value in enumerate(values.tolist()):
        if detector.add(value):
            alarms.append(position)
            detector.clear()
        elif (redundant := detector.find_redundant()) is not None:
            detector.remove(redundant)
    return alarms


def skewed(random: Generator, count: int) -> Array:
    """Return block means of the log loss of 1,000 events with about 4% positives."""
    logits = np.log(0.04 / 0.96) + random.normal(size=(count, 1000))
    is_positive = random.random((count, 1000)) < 1 / (1 + np.exp(-logits))
    losses: Array = np.logaddexp(0, np.where(is_positive, -logits, logits)).mean(1)
    return losses


def correlated(random: Generator, count: int) -> Array:
    """Return an autoregression of order one."""
    values = random.normal(size=count)
    for position in range(1, count):
        values[position] += 0.3 * values[position - 1]
    return values


STREAMS: dict[str, Callable[[Generator, int], Array]] = {
    "normal": lambda random, count: random.normal(size=count),
    "skewed": skewed,
    "improving": lambda random, count: skewed(random, count) + 0.2 * np.exp(-np.arange(count) / 50),
    "correlated": correlated,
}


def delay(rise: float, alpha: float, random: Generator, before: int = 100, after: int = 400) -> float:
    """Return the number of blocks from a rise to its alarm; infinite if there is none."""
    values = np.concatenate([random.normal(size=before), random.normal(rise, 1, after)])
    return next((position - before + 1 for position in find_alarms(values, alpha) if position >= before), np.inf)


def time_of_clock(calls: int = 1000) -> float:
    """Return the processor time between two readings of the clock in a row, which can be many microseconds."""
    readings = [time.thread_time() for _ in range(calls)]
    return (readings[-1] - readings[0]) / (calls - 1)


def share_of_time(model_name: str, batch_size: int, count: int = 30_000) -> float:
    """Return the share of processor time that the alarm takes on a stream with 26 ids and 13 numbers per event."""
    random = np.random.default_rng(0)
    kinds = {f"c{n}": "category:1000" for n in range(26)} | {f"n{n}": "number" for n in range(13)}
    features: dict[str, Array] = {
        name: random.integers(0, 1000, count) if kind != "number" else random.normal(size=count)
        for name, kind in kinds.items()
    }
    events = Events(features, random.integers(0, 2, count))
    torch.set_num_threads(1)
    model = models.build(model_name, Schema(kinds))
    drift = DriftMonitor()
    learner = Learner(model, CAdam(model.named_parameters()), LOG_LOSS, drift=drift, per_event=batch_size == 1)
    size = CHUNK_SIZE if batch_size == 1 else batch_size
    batches = [events.take(slice(start, start + size)) for start in range(0, count, size)]
    update, spent, clock = drift.update, 0.0, time_of_clock()

    def measured(columns: Columns, total: LogLoss) -> None:
        nonlocal spent
        before = time.thread_time()
        update(columns, total)
        spent += time.thread_time() - before - clock

    drift.update = measured  # type: ignore[method-assign]
    start = time.process_time()
    for batch in batches:
        learner.process(batch)
    return spent / (time.process_time() - start)


def main() -> None:
    """Print false alarms per stream and delays per rise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("alarms", "time"), default="alarms")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--alpha", type=float, default=1e-3)
    options = parser.parse_args()
    if options.what == "time":
        for model, batch_size in (("deepfm", 256), ("fm", 256), ("linear", 256), ("linear", 1)):
            share = share_of_time(model, batch_size)
            print(f"{model}, batches of {batch_size}: {share:.2%} of the time")
        return
    random = np.random.default_rng(0)
    for name, stream in STREAMS.items():
        counts = [len(find_alarms(stream(random, options.blocks), options.alpha)) for _ in range(options.runs)]
        print(f"{name:>10}: {sum(counts)} false alarms in {options.runs * options.blocks:,} blocks")
    for rise in (0.5, 1.0, 2.0, 3.0, 5.0):
        delays = np.array([delay(rise, options.alpha, random) for _ in range(options.runs)])
        missed = int(np.isinf(delays).sum())
        print(f"a rise by {rise} sd: median delay {np.median(delays):g} blocks, {missed} of {options.runs} missed")


if __name__ == "__main__":
    main()
