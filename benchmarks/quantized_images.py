"""Train a dense model to the end with moments in bfloat16 and int8: test accuracy minus that of float32.

    CADAM_DATA=FOLDER python benchmarks/quantized_images.py [--epochs 30] [--seeds 3] [--lr 3e-4]

VGG-16 on CIFAR-10 with CAdam, without any change of the data; each storage under the same seeds. The noise floor is
float32 under as many other seeds. On an H200 twelve runs of 30 epochs, six at a time, take about three minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch

from cadam.rules.moment_storage import STORAGES
from cadam.statistics import comparison
from cadam_paper.harness.cuda_runs import run_concurrently
from cadam_paper.images import data, streams
from cadam_paper.images.runs import LANES
from cadam_paper.images.train import Run, Task

REPEAT = 100
"""Offset of the seeds of the noise floor, so that they differ from the others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-4)
    wanted = parser.parse_args()
    images = data.load("CIFAR-10", torch.device("cuda"))
    arms = [(storage, seed) for storage in STORAGES for seed in range(wanted.seeds)]
    arms += [("float32", REPEAT + seed) for seed in range(wanted.seeds)]

    def runs() -> Iterator[Run]:
        for storage, seed in arms:
            task = Task("VGG-16", "CAdam", wanted.lr, seed, streams.Stream(()), wanted.epochs, moments=storage, **HOW)
            yield Run(task, images)

    start = time.monotonic()
    last: dict[tuple[str, int], float] = {}
    mean: dict[tuple[str, int], float] = {}
    for run, seconds in run_concurrently(runs(), LANES):
        record, task = run.record(), run.task
        run.release()
        arm = task.moments, task.seed
        last[arm], mean[arm] = 100 * float(record.test_accuracy[-1]), 100 * float(record.test_accuracy.mean())
        accuracy = f"{last[arm]:.2f}% after the last epoch, {mean[arm]:.2f}% in the mean"
        alignment = f"alignment ratio {record.alignment.mean():.4f}"
        print(f"{task.moments:9} seed {task.seed:3}: {accuracy}, {alignment}, {seconds:.0f} s", flush=True)
    for what, found in (("last epoch", last), ("mean over epochs", mean)):
        by_seed = {s: {seed: found[s, seed] for seed in range(wanted.seeds)} for s in STORAGES}
        again = [found["float32", REPEAT + seed] for seed in range(wanted.seeds)]
        floor = comparison.noise_floor(list(by_seed["float32"].values()), again)
        print(f"{what}: noise floor {floor.mean:+.2f} [{floor.low:+.2f}, {floor.high:+.2f}]")
        for storage in STORAGES[1:]:
            pair = comparison.compare(by_seed[storage], by_seed["float32"], names=(storage, "float32"), better="higher")
            difference = pair.difference
            print(f"  {storage} minus float32: {difference.mean:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]")
    print(f"{time.monotonic() - start:.0f} s")


HOW = {"batch": 128, "weight_decay": 5e-4, "precision": "bfloat16", "compiled": True}


if __name__ == "__main__":
    main()
