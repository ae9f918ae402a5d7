"""Check the trainer of the image study on a CUDA device: its results in a graph, its speed, and how many runs fit.

    python benchmarks/images_cuda.py [--data FOLDER] [--json FILE] [--parts PART ...]

The parts are independent: one that fails prints its traceback, and the others continue. Without CIFAR-10 at --data (or
$CADAM_DATA) random images of the same shape take its place: the times are the same, accuracies mean nothing then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cadam_paper.harness.cuda_runs import run_concurrently
from cadam_paper.images import data
from cadam_paper.images.data import Images
from cadam_paper.images.streams import Stream, continuous, noisy, sudden
from cadam_paper.images.train import Record, Run, Task

Line = tuple[str, str]
BAR_EPOCH, BAR_THROUGHPUT = 0.9, 1.5
TURNING, GLIDING = sudden(60) + noisy(20), continuous(2)
"""Streams: rotation per epoch with label noise, and rotation per step."""


def task(
    model: str = "VGG-16",
    optimizer: str = "CAdam",
    seed: int = 0,
    epochs: int = 3,
    stream: Stream = TURNING,
    **options: Any,
) -> Task:
    return Task(
        model,
        optimizer,
        3e-4,
        seed,
        stream,
        epochs,
        **{"precision": "bfloat16", "compiled": True, **options},
    )


def random_images() -> Images:
    random = np.random.default_rng(0)

    def some(count: int) -> tuple[Any, Any]:
        return random.integers(256, size=(count, 3, 32, 32), dtype=np.uint8), random.integers(10, size=count)

    return Images.of(some(50_000), some(10_000))


def synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def advance(runs: Sequence[Run], turns: int) -> None:
    for _ in range(turns):
        for run in runs:
            run.advance()


# Parts ---------------------------------------------------------------------------------------------------------


def same_curves(images: Images, found: dict[str, Any]) -> list[Line]:
    """Compare runs with the settings of the study: VGG-16, compiled, in bfloat16."""
    kinds = [("VGG-16", "CAdam", TURNING, "bfloat16", True), ("VGG-16", "Adam", GLIDING, "bfloat16", True)]
    return [same_curve(images, found, *kind) for kind in kinds]


def same_curves_elsewhere(images: Images, found: dict[str, Any]) -> list[Line]:
    """Compare runs with other precisions and models."""
    kinds = [
        (model, optimizer, stream, precision, compiled)
        for precision, compiled in (("float32", False), ("bfloat16", False), ("bfloat16", True))
        for model, optimizer, stream in (("VGG-16", "Adam", TURNING), ("ResNet-18", "CAdam", GLIDING))
    ]
    kinds.append(("DenseNet-121", "CAdam", TURNING, "bfloat16", True))
    return [same_curve(images, found, *kind) for kind in kinds]


def same_curve(
    images: Images, found: dict[str, Any], model: str, optimizer: str, stream: Stream, precision: str, compiled: bool
) -> Line:
    """Compare a run in a graph and a second run without one with a run without a graph, all with the same seed.

    There are three short epochs, so that the images are rotated and the graph of the evaluation is replayed at each
    angle.
    """
    few, epochs = first_of(images, 20 * 128, 5000), 3
    kind = f"{model} {optimizer}, {stream}, {precision}{' compiled' if compiled else ''}"
    records = {}
    for name, graph in (("plain", False), ("plain again", False), ("graph", True), ("graph again", True)):
        what = task(model, optimizer, epochs=epochs, stream=stream, precision=precision, compiled=compiled)
        run = Run(what, few, graph=graph)
        while run.advance():
            pass
        records[name] = run.record()
        synchronized()
        run.release()
    apart = {name: differences(record, records["plain"]) for name, record in records.items()}
    graph_record = records["graph"]
    found[kind] = {
        "apart from plain": apart,
        "last loss": {name: float(record.loss[-1]) for name, record in records.items()},
        "test accuracy": {name: record.test_accuracy.tolist() for name, record in records.items()},
        "finite": bool(np.isfinite(graph_record.loss).all()),
    }
    again = max(apart["plain again"].values())
    text = f"{in_words(apart['graph'])} (plain again: at most {again:.1e}); "
    text += f"loss {graph_record.loss[0]:.4f} to {graph_record.loss[-1]:.4f}"
    return f"graph - plain, {kind}, {epochs} epochs of 20 steps", text


def first_of(images: Images, train: int, test: int) -> Images:
    """Return the first images of each part."""
    return dataclasses.replace(
        images,
        train=images.train[:train],
        train_labels=images.train_labels[:train],
        test=images.test[:test],
        test_labels=images.test_labels[:test],
    )


def differences(ours: Record, other: Record) -> dict[str, float]:
    """Return the greatest difference in each curve; nan if one of the runs diverged."""
    return {name: float(np.abs(getattr(ours, name) - getattr(other, name)).max()) for name in vars(ours)}


def in_words(apart: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.1e}" for name, value in apart.items())


def neighbours(images: Images, found: dict[str, Any]) -> list[Line]:
    """Compare curves and test results of a run alone with those of the run among six: they must be equal."""
    some = first_of(images, 200 * 128, len(images.test))

    def two_epochs(seed: int) -> Run:
        optimizer, stream = (("CAdam", TURNING), ("Adam", GLIDING))[seed % 2]
        return Run(task(optimizer=optimizer, seed=seed, epochs=2, stream=stream), some)

    alone = {seed: next(run.record() for run, _ in run_concurrently([two_epochs(seed)], 1)) for seed in (0, 1)}
    among = {run.task.seed: run.record() for run, _ in run_concurrently(map(two_epochs, range(6)), 6)}
    lines = []
    for seed, record in alone.items():
        apart = differences(among[seed], record)
        found[f"neighbours, seed {seed}"] = apart
        lines.append((f"alone - among six, VGG-16, two epochs of 200 steps, seed {seed}", in_words(apart)))
    return lines


def epoch_time(
    images: Images, found: dict[str, Any], model: str, runs: int, deterministic: bool = True, compiled: bool = True
) -> float:
    """Measure the seconds of one epoch for a number of runs, tests included; the first epoch warms up."""
    start = synchronized()
    torch.cuda.reset_peak_memory_stats()
    lanes = [
        Run(task(model, seed=seed, epochs=3, compiled=compiled), images, deterministic=deterministic)
        for seed in range(runs)
    ]
    kind = f"{'compiled' if compiled else 'not compiled'}, {'deterministic' if deterministic else 'fastest'}"
    steps = lanes[0].schedule.steps_per_epoch
    advance(lanes, steps + 1)
    begin = synchronized()
    warming = begin - start
    advance(lanes, steps)
    asked = time.perf_counter() - begin
    trained = synchronized() - begin
    advance(lanes, 1)
    seconds = synchronized() - begin
    launching = launch_time(lanes[0])
    for run in lanes:
        run.release()
    found[f"{model}, {runs} at once, {kind}"] = {
        "epoch": seconds,
        "without tests": trained,
        "asking": asked,
        "launching a step": launching,
        "first epoch with set-up": warming,
        "peak memory": torch.cuda.max_memory_reserved(),
    }
    print(
        f"  {model} x{runs} {kind}: {seconds:.3f} s "
        f"({trained:.3f} without tests, host busy {asked:.3f}, {1e3 * launching:.2f} ms to launch a step that nothing "
        f"stands before), set-up and first epoch {warming:.1f} s, "
        f"{torch.cuda.max_memory_reserved() / 1e9:.1f} GB",
        flush=True,
    )
    return seconds


def launch_time(run: Run) -> float:
    """Measure the host time to launch a step while the device is idle."""
    times = []
    for _ in range(11):
        begin = synchronized()
        run.advance()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def lone(images: Images, found: dict[str, Any]) -> list[Line]:
    lines = []
    for compiled, deterministic in ((False, True), (True, True), (True, False)):
        seconds = epoch_time(images, found, "VGG-16", 1, deterministic, compiled)
        kind = ("compiled, " if compiled else "") + ("deterministic" if deterministic else "fastest algorithms")
        bar = f"{'meets' if seconds <= BAR_EPOCH else 'MISSES'} {BAR_EPOCH} s"
        lines.append((f"VGG-16, one run, {kind}", f"{seconds:.3f} s an epoch, {bar}"))
    return lines


def many(images: Images, found: dict[str, Any]) -> list[Line]:
    lines, one = [], epoch_time(images, found, "VGG-16", 1)
    for runs in (2, 4, 6, 8, 12):
        ratio = runs * one / epoch_time(images, found, "VGG-16", runs)
        bar = f"{'meets' if ratio >= BAR_THROUGHPUT else 'misses'} {BAR_THROUGHPUT}"
        lines.append((f"VGG-16, {runs} at once", f"{ratio:.2f} times one's throughput, {bar}"))
        found[f"throughput of {runs}"] = ratio
    return lines


def others(images: Images, found: dict[str, Any]) -> list[Line]:
    lines = []
    for model in ("ResNet-18", "DenseNet-121"):
        one = epoch_time(images, found, model, 1)
        ratios = {runs: runs * one / epoch_time(images, found, model, runs) for runs in (4, 8)}
        at_once = ", ".join(f"{runs} at once {ratio:.2f}" for runs, ratio in ratios.items())
        lines.append((model, f"{one:.2f} s an epoch; {at_once} times the throughput"))
    return lines


def kernels(images: Images, found: dict[str, Any]) -> list[Line]:
    return [kernels_of(model, images, found) for model in ("VGG-16", "ResNet-18", "DenseNet-121")]


def kernels_of(model: str, images: Images, found: dict[str, Any]) -> Line:
    """Profile a step."""
    from torch.profiler import ProfilerActivity, profile

    run = Run(task(model, epochs=1), images)
    advance([run], 10)
    synchronized()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        advance([run], 20)
        synchronized()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 20
    count = sum(row.count for row in rows) / 20
    found[f"kernels of {model}"] = [(row.key, row.self_device_time_total / 20, row.count / 20) for row in rows[:40]]
    for row in rows[:20]:
        print(f"  {row.self_device_time_total / 20:8.1f} us {row.count / 20:6.1f} x  {row.key[:90]}", flush=True)
    run.release()
    return f"a {model} step", f"{total:.0f} us in {count:.0f} kernels"


PARTS: dict[str, Callable[[Images, dict[str, Any]], list[Line]]] = {
    "same curves": same_curves,
    "neighbours": neighbours,
    "one run": lone,
    "side by side": many,
    "kernels": kernels,
    "same curves elsewhere": same_curves_elsewhere,
    "other models": others,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("CADAM_DATA", "data")))
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "images_cuda.json")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        images, source = data.read_cifar10(options.data), "CIFAR-10"
    except FileNotFoundError as error:
        images, source = random_images(), f"random images: {error}"
    images = images.to(device)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "images": source,
        "failed": [],
    }
    print(found, flush=True)
    lines: list[Line] = []
    for name in options.parts:
        start = time.perf_counter()
        print(f"{name}:", flush=True)
        try:
            lines += PARTS[name](images, found)
        except Exception:
            traceback.print_exc()
            found["failed"].append(name)
            lines.append((name, "FAILED, see its traceback above"))
        print(f"  took {time.perf_counter() - start:.1f} s", flush=True)
        options.json.write_text(json.dumps(found, indent=1))
    width = max(len(what) for what, _ in lines)
    print("\n" + "\n".join(f"{what:{width}}  {text}" for what, text in lines))


if __name__ == "__main__":
    main()
