"""The prequential AUC of `cadam run` on one column of numbers, written in several units and with several origins.

The model sees only the order of the numbers, so the AUC is the same in each row.

    python benchmarks/number_units.py
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from cadam.online.metrics.auc import auc

EVENTS = 50_000
UNITS = {"x": (0, 1), "1000 x": (0, 1e3), "1e9 x": (0, 1e9), "1e8 + 10 x": (1e8, 10), "1e9 + 10 x": (1e9, 10)}
"""The origin and the unit of each column."""


def run(path: Path) -> float:
    """Return the AUC of a run over a CSV file."""
    folder = path.with_suffix("")
    command = [sys.executable, "-m", "cadam", "run", str(path), "--label", "click"]
    command += ["--checkpoint", str(folder), "--log", str(folder / "log")]
    subprocess.run(command, check=True, capture_output=True)
    table = pq.read_table(folder / "log")
    return float(auc(table["score"].to_numpy(), table["label"].to_numpy()))


def main() -> None:
    """Print a table of units and AUCs."""
    random = np.random.default_rng(0)
    x = random.normal(size=EVENTS)
    clicks = random.random(EVENTS) < 1 / (1 + np.exp(-2.5 * x))
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (origin, unit)) in enumerate(UNITS.items()):
            path = Path(folder) / f"unit{number}.csv"
            rows = zip((origin + unit * x).tolist(), clicks.astype(int), strict=True)
            with open(path, "w", newline="") as file:
                csv.writer(file).writerows([("x", "click"), *rows])
            print(f"{name:12} {run(path):.4f}", flush=True)


if __name__ == "__main__":
    main()
