"""Time the runs that `cadam ab` needed under its first protocol (commit 6d816cb) with the runner of this version.

    python benchmarks/ab_workload.py DATA [options of cadam ab]

The first protocol had a tuning part: each arm learned the first fifth of the stream at every learning rate under two
seeds. Then each arm learned the whole stream under five seeds, the baseline under five more, and each arm once at every
other rate. Today's protocol follows other runs, so its time does not tell whether the runner has become faster. The
time includes reading and encoding the data, starting the processes, and log loss, AUC and GAUC of each complete run.
"""

from __future__ import annotations

import sys
import tempfile
import time

from cadam.ab.runner import RunCache, StudyRunner
from cadam.ab.study import Run, Study
from cadam.cli.ab import prepare, read_stream
from cadam.cli.commands import available_commands
from cadam.cli.main import build_parser
from cadam.online.metrics.stream import measure

TUNING_SHARE, TUNING_SEEDS, SEEDS = 0.2, 2, 5
CHOSEN_RATE = 3e-3
"""The rate of the complete runs. Which one it is has no influence on their time."""


def tuning_runs(study: Study) -> list[Run]:
    """Return the runs over the tuning part."""
    seeds = range(1000, 1000 + TUNING_SEEDS)
    return [Run(arm, lr, seed) for arm in study.arms for lr in study.grid for seed in seeds]


def complete_runs(study: Study) -> list[Run]:
    """Return the runs over the whole stream."""
    tests = [Run(arm, CHOSEN_RATE, seed) for seed in range(SEEDS) for arm in study.arms]
    repeats = [Run(study.baseline, CHOSEN_RATE, 100 + seed) for seed in range(SEEDS)]
    others = [Run(arm, lr, 0) for arm in study.arms for lr in study.grid if lr != CHOSEN_RATE]
    return [*tests, *repeats, *others]


def main() -> None:
    """Run everything once, and print the time."""
    with tempfile.TemporaryDirectory() as folder:
        options = build_parser(available_commands(), ["ab"]).parse_args(["ab", *sys.argv[1:], "--cache", folder])
        start = time.perf_counter()
        comparison = prepare(options)
        study = comparison.study
        cache = RunCache(options.cache, study)
        runner = StudyRunner(study, cache, options.threads, comparison.model_bytes)
        stream = read_stream(comparison, cache, options)
        read = time.perf_counter()
        judged, batches = stream.judged, stream.batches
        parts = [(tuning_runs(study), int(TUNING_SHARE * batches)), (complete_runs(study), batches)]
        runner.runs = [run for runs, _ in parts for run in runs]
        total = sum(len(runs) * end for runs, end in parts) * study.batch_size
        with runner.working():
            for runs, end in parts:
                for advanced in runner.advance(runs, end, total):
                    if advanced.failure:
                        raise RuntimeError(advanced.failure)
        learned = time.perf_counter()
        users = judged.users if judged.has_users else None
        for run in parts[1][0]:
            measure(cache.files(run).read(0, len(judged.labels)), judged.labels, users)
        end_time = time.perf_counter()
        print(f"{len(runner.runs)} runs, {total:,} events learned in {runner.workers} processes")
        print(f"reading {read - start:.1f} s, runs {learned - read:.1f} s, metrics {end_time - learned:.1f} s")
        print(f"all: {end_time - start:.1f} s")


if __name__ == "__main__":
    main()
