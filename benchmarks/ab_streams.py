"""Write simulated click streams, and check the verdict of `cadam ab` on them against the best rates in hindsight.

The streams have the same users and items. In "stationary", tastes stay. In "drift", the tastes of users and the
qualities of items are random walks. In "turnover", the catalog changes: an item is offered for a tenth of the stream.

    python benchmarks/ab_streams.py FOLDER [--events 60000] [--arms adam,cadam]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from cadam.statistics.intervals import Array

KINDS = ("stationary", "drift", "turnover")
USERS, ITEMS, WIDTH = 2000, 400, 4
STEPS = 100
"""The number of times that tastes and the catalog change along the stream."""


def make_stream(kind: str, events: int, seed: int = 0) -> dict[str, Array]:
    """Return the columns of a simulated click stream.

    Args:
        kind: One of `KINDS`.
        events: The number of events.
        seed: The seed.
    """
    random = np.random.default_rng(seed)
    tastes = random.standard_normal((USERS, WIDTH))
    traits, quality = 0.4 * random.standard_normal((ITEMS, WIDTH)), random.normal(-1.5, 0.8, ITEMS)
    user = np.minimum(random.zipf(1.3, events) - 1, USERS - 1) * 7919 % USERS
    slot = np.minimum(random.zipf(1.2, events) - 1, ITEMS - 1) * 7919 % ITEMS
    item, clicks = slot.copy(), np.empty(events, dtype=np.int64)
    offered = np.arange(ITEMS)
    for step, rows in enumerate(np.array_split(np.arange(events), STEPS)):
        logits = quality[slot[rows]] + (tastes[user[rows]] * traits[slot[rows]]).sum(1)
        clicks[rows] = random.random(len(rows)) < 1 / (1 + np.exp(-logits))
        item[rows] = offered[slot[rows]]
        if kind == "drift":
            tastes += 0.15 * random.standard_normal(tastes.shape)
            quality += 0.1 * random.standard_normal(ITEMS)
        elif kind == "turnover":
            new = np.flatnonzero(np.arange(ITEMS) % (STEPS // 10) == step % (STEPS // 10))
            offered[new] = offered.max() + 1 + np.arange(len(new))
            traits[new], quality[new] = (
                0.4 * random.standard_normal((len(new), WIDTH)),
                random.normal(-1.5, 0.8, len(new)),
            )
    return {"user": user, "item": item, "hour": np.arange(events) // 50 % 24, "click": clicks}


def write_stream(path: Path, columns: dict[str, Array]) -> None:
    """Write the columns of a stream as CSV."""
    rows = np.stack(list(columns.values()), 1)
    np.savetxt(path, rows, fmt="%d", delimiter=",", header=",".join(columns), comments="")


def main() -> None:
    """Run the comparisons and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--arms", default="adam,cadam")
    options, more = parser.parse_known_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| stream | verdict | difference | in hindsight | events | seconds |\n| --- | --- | --- | --- | --- | --- |")
    for kind in KINDS:
        path = options.folder / f"{kind}.csv"
        write_stream(path, make_stream(kind, options.events))
        command = [sys.executable, "-m", "cadam", "ab", str(path), "--label", "click", "--user", "user", "--json"]
        command += ["--arms", options.arms, "--cache", str(options.folder / "cache"), *more]
        command += ["--output", str(options.folder / f"{kind}.html")]
        start = time.monotonic()
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for pair, verdict in zip(result["pairs"], result["verdicts"], strict=True):
            print(
                f"| {kind}, {pair['arm']} | {verdict['action']} | {pair['difference']:+.2f}% | "
                f"{pair['in_hindsight']:+.2f}% | {result['processed_events']:,} | {time.monotonic() - start:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
