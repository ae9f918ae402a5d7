"""The log loss of a run before and after `cadam migrate`: columns and optimizer change.

    python -m benchmarks.migrate_curve [--events 50000]

A `cadam run` learns the first half of a simulated stream. Copies of its folder are migrated, and continue with the
second half. The log loss of the predictions, each made before its label was learned, is printed in windows, from the
prediction log. Beside the migrations are the run without one, and a run that starts from nothing at the second half.
All columns are in the data from the beginning: brand is left out until it is added, and items share 500 buckets until
there are 4,000.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from cadam.online.data.events import Array
from cadam.statistics.paired_scores import log_losses

SCHEMA = {"features": {"item": "hash:500", "device": "category:4", "price": "number?"}, "label": "click"}
MIGRATIONS = {
    "none": [],
    "add": ["--add", "brand=hash:200?"],
    "drop": ["--drop", "device"],
    "resize": ["--resize", "item=hash:4000"],
    "optimizer": ["--optimizer", "adam"],
}
NEW = "new run"
WINDOWS = 10
"""The number of windows in each half."""


def simulate(count: int, seed: int = 0) -> tuple[list[str], Array]:
    """Return events as JSON and the logits of their clicks, which depend on the item, its brand, device and price."""
    random = np.random.default_rng(seed)
    item = (2000 * random.beta(1, 3, count)).astype(int)
    device, brand, price = random.integers(4, size=count), random.integers(20, size=count), random.uniform(size=count)
    logits = random.normal(-1, 1, 2000)[item] + random.normal(0, 0.4, 4)[device] + random.normal(0, 0.8, 20)[brand]
    logits -= price
    clicks = (random.uniform(size=count) < 1 / (1 + np.exp(-logits))).astype(int)
    columns = zip(*(each.tolist() for each in (item, device, brand, price, clicks)), strict=True)
    names = ("item", "device", "brand", "price", "click")
    return [json.dumps(dict(zip(names, values, strict=True))) for values in columns], logits


def cadam(*arguments: str | Path) -> str:
    """Run a command and return what it prints to standard output."""
    command = [sys.executable, "-m", "cadam", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def learn(data: Path, folder: Path, *options: str | Path) -> None:
    """Continue a run, or start it."""
    cadam("run", data, "--checkpoint", folder / "run", "--log", folder / "log", "--lr", "0.003", "--quiet", *options)


def window_losses(folder: Path, size: int) -> Array:
    """Return the mean log loss of each window of the prediction log of a run."""
    table = pq.read_table(folder / "log").to_pydict()
    losses = log_losses(np.array(table["score"]), np.array(table["label"]))
    return losses[: len(losses) // size * size].reshape(-1, size).mean(axis=1)


def main() -> None:
    """Run the migrations and print the windows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=50_000, help="in each half; files of the log have 50,000")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare(folder, options.events)


def compare(folder: Path, count: int) -> None:
    """Learn the halves of a stream with each migration between them, and print the log losses."""
    lines, logits = simulate(2 * count)
    data, second, schema = folder / "clicks.jsonl", folder / "second.jsonl", folder / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    data.write_text("\n".join(lines[:count]) + "\n")
    learn(data, folder / "first", "--schema", schema)
    with open(data, "a", encoding="utf-8") as file:
        file.write("\n".join(lines[count:]) + "\n")
    second.write_text("\n".join(lines[count:]) + "\n")
    size, losses = count // WINDOWS, {}
    for case, changes in MIGRATIONS.items():
        shutil.copytree(folder / "first", folder / case)
        if changes:
            print(f"cadam migrate FOLDER {' '.join(changes)}")
            described = cadam("migrate", folder / case / "run", *changes).splitlines()[:-1]
            print("".join(f"    {line}\n" for line in described))
        learn(data, folder / case, *(changes if case == "optimizer" else ()))
        losses[case] = window_losses(folder / case, size)
    learn(second, folder / NEW, "--schema", schema)
    losses[NEW] = np.append(np.full(WINDOWS, np.nan), window_losses(folder / NEW, size))
    noise = np.logaddexp(0, -logits) + logits / (1 + np.exp(logits))
    losses["lowest possible"] = noise.reshape(-1, size).mean(axis=1)
    print(f"log loss in windows of {size:,} events\n")
    print(f"{'events':>9}" + "".join(f"{case:>{max(11, len(case) + 2)}}" for case in losses))
    for number in range(2 * WINDOWS):
        if number == WINDOWS:
            print("          -- migration --")
        cells = "".join(f"{values[number]:>{max(11, len(case) + 2)}.4f}" for case, values in losses.items())
        print(f"{(number + 1) * size:>9,}{cells}")


if __name__ == "__main__":
    main()
