"""Compare the speed of the learner in two versions of the package, end to end.

    git worktree add /tmp/before COMMIT && cd /tmp/before && python -m cadam.native.build && cd -
    python benchmarks/learner_versions.py /tmp/before . [--events N] [--rounds N] [--busy N] [--device cuda]

Each version runs in its own process, which learns all events once per round: a DeepFM on clicks from Parquet
(13 numbers, 26 categories), with log loss, AUC, normalized entropy and calibration, and with
checkpoints. The runs of the two versions take turns, so that both meet the same machine. Threads are those that the
version's command line chooses. With --per-event, each event is learned before the next one is predicted, and
--batch-size is the number of events that are read together. A slow first version can learn fewer events with
--events-before. With --busy, as many other processes compute without a pause beside them. The first round warms up and
does not count. Processor time is that of all threads of a version; with OMP_NUM_THREADS=1, it is a comparison that
depends less on other processes.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

LEARNING_RATE = 3e-3


def run(path: Path, options: argparse.Namespace, events: int) -> tuple[float, float, float]:
    """Learn events once with the imported version. Return the seconds, the processor seconds, and the log loss."""
    from cadam import CAdam
    from cadam.online import Learner, ParquetSource, StreamMetrics, models
    from click_stream import click_schema

    schema = click_schema()
    torch.manual_seed(0)
    model = models.build(options.model, schema, width=options.width, hidden=options.hidden).to(options.device)
    with suppress(ImportError):  # an older version leaves the number of threads to torch
        from cadam.online.training_step import default_threads

        torch.set_num_threads(default_threads(model, options.batch_size))
    optimizer = CAdam(model.named_parameters(), lr=LEARNING_RATE)
    loss = nn.functional.binary_cross_entropy_with_logits
    with tempfile.TemporaryDirectory() as folder:
        parameters = inspect.signature(Learner.__init__).parameters
        name = "per_event" if "per_event" in parameters else "one_by_one"  # the name in older versions
        per_event = {name: True} if options.per_event else {}
        learner = Learner(model, optimizer, loss, metrics=[StreamMetrics()], checkpoint=folder, **per_event)
        start, processor_start = time.perf_counter(), time.process_time()
        learner.run(ParquetSource(path, schema, batch_size=options.batch_size), events=events)
        seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
        return seconds, processor_seconds, learner.metrics()["log_loss"]


def serve(path: Path, options: argparse.Namespace) -> None:
    """Learn the number of events in each line of the standard input, and print the result."""
    for line in sys.stdin:
        print(*run(path, options, int(line)), flush=True)


def start_worker(tree: Path, path: Path) -> subprocess.Popen[str]:
    """Start the process of a version, with the same arguments as this process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--serve", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask_worker(worker: subprocess.Popen[str], events: int) -> tuple[float, float, float]:
    """Let a version learn events, and return what `run` returned."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(events, file=worker.stdin, flush=True)
    seconds, processor_seconds, log_loss = map(float, worker.stdout.readline().split())
    return seconds, processor_seconds, log_loss


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="*", metavar="TREE", help="two checkouts: before and after")
    parser.add_argument("--events", type=int, default=100_000, metavar="N", help="events per run (default: 100000)")
    parser.add_argument("--events-before", type=int, metavar="N", help="events per run of the first version")
    parser.add_argument("--data", type=Path, metavar="FILE", help="the clicks, which are written if there is no file")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each version (default: 5)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy processes beside them (default: 0)")
    parser.add_argument("--model", default="deepfm", metavar="NAME", help="a ready-made model (default: deepfm)")
    parser.add_argument("--per-event", action="store_true", help="per-event training, with the model linear or fm")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="events per step (default: 256)")
    parser.add_argument(
        "--width", type=int, metavar="N", help="the width of the embeddings (default: that of the model)"
    )
    parser.add_argument(
        "--hidden", type=int, nargs="+", metavar="N", help="hidden layers (default: those of the model)"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.serve, options)
    if len(options.trees) != 2:
        parser.error("give two checkouts: before and after")
    counts = [options.events_before or options.events, options.events]
    with tempfile.TemporaryDirectory() as folder:
        path = options.data or Path(folder) / "clicks.parquet"
        from click_stream import write_clicks

        if not path.exists():
            write_clicks(path, options.events)
        workers = [start_worker(tree, path) for tree in options.trees]
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
        try:
            rounds = [list(map(ask_worker, workers, counts)) for _ in range(options.rounds + 1)][1:]
        finally:
            for process in [*workers, *busy]:
                process.kill()
                process.wait()
    shape = f"width {options.width or 'by default'}, hidden {options.hidden or 'by default'}"
    print(f"{options.model} on {options.device}, {shape}, ")
    print(f"{options.events:,} events, batches of {options.batch_size}, {os.cpu_count()} cores, ", end="")
    print(f"{options.busy} busy processes beside it, {options.rounds} rounds, torch {torch.__version__}\n")
    print(f"{'':10}{'events per second':>19}{'slowest':>11}{'fastest':>11}{'per s of processor':>20}{'log loss':>11}")
    for name, count, results in zip(("before", "after"), counts, zip(*rounds, strict=True), strict=True):
        speeds, of_processor = ([count / one[clock] for one in results] for clock in (0, 1))
        print(f"{name:10}{statistics.median(speeds):19,.0f}{min(speeds):11,.0f}{max(speeds):11,.0f}", end="")
        print(f"{statistics.median(of_processor):20,.0f}{results[0][2]:11.5f}")
    for name, clock in (("speedup", 0), ("in processor time", 1)):
        ratios = [before[clock] / after[clock] * counts[1] / counts[0] for before, after in rounds]
        print(f"{name}: {statistics.median(ratios):.2f} (rounds from {min(ratios):.2f} to {max(ratios):.2f})")
    return None


if __name__ == "__main__":
    main()
