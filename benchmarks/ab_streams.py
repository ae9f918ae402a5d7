"""Write simulated streams, and check the verdict of `cadam ab` on them against the best rates in hindsight.

Three streams do not drift: "logistic" (numbers and two categories, logistic truth), "clusters" (numbers around the
vertices of a hypercube, as scikit-learn's `make_classification` draws them) and "stationary" (users and items with
tastes and traits, a factorization). Of the others, "drift" has tastes and qualities that are random walks, "turnover"
a catalog of which an item is offered for a tenth of the stream, "sudden" has items exchanged at a third and at two
thirds of the stream, and "clicks" is a log of rare clicks with many sparse categories.

    python benchmarks/ab_streams.py FOLDER [--events 60000] [--kinds stationary,drift] [--arms adam,cadam] [--full]

Further options are those of `cadam ab`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from cadam.statistics.intervals import Array

USERS, ITEMS, WIDTH = 2000, 400, 4
STEPS = 100
"""The number of times that tastes and the catalog change along the stream."""
LIFE = 10
"""The number of these steps for which an item of the "turnover" stream is offered."""


def draw_labels(random: np.random.Generator, logits: Array) -> Array:
    """Return labels, 0 or 1, whose probabilities have these logits."""
    labels: Array = (random.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.int64)
    return labels


def draw_zipf(random: np.random.Generator, exponent: float, size: int, events: int) -> Array:
    """Return integers below `size` with Zipf's distribution, in an order that does not follow their frequency."""
    ids: Array = np.minimum(random.zipf(exponent, events) - 1, size - 1) * 7919 % size
    return ids


def make_logistic(random: np.random.Generator, events: int) -> dict[str, Array]:
    """Return numbers and two categories with a logistic truth."""
    numbers = random.standard_normal((events, 8))
    shop, device = draw_zipf(random, 1.3, 50, events), random.integers(0, 5, events)
    weights, by_shop, by_device = 0.5 * random.standard_normal(8), random.normal(0, 0.7, 50), random.normal(0, 0.4, 5)
    clicks = draw_labels(random, numbers @ weights + by_shop[shop] + by_device[device] - 1)
    return {**{f"n{i}": numbers[:, i] for i in range(8)}, "shop": shop, "device": device, "click": clicks}


def make_clusters(random: np.random.Generator, events: int) -> dict[str, Array]:
    """Return 5 informative, 5 redundant and 10 useless numbers of two classes, 4 clusters each; 5% are mislabeled."""
    vertices = random.permutation([[int(bit) for bit in f"{number:05b}"] for number in range(32)])[:8]
    cluster = random.integers(0, 8, events)
    informative = random.standard_normal((events, 5))
    mixing = random.uniform(-1, 1, (8, 5, 5))
    for number in range(8):
        informative[cluster == number] = informative[cluster == number] @ mixing[number]
    informative += 2 * vertices[cluster] - 1
    redundant = informative @ random.uniform(-1, 1, (5, 5))
    columns = np.concatenate([informative, redundant, random.standard_normal((events, 10))], 1)
    labels = (cluster % 2) ^ (random.random(events) < 0.05)
    return {**{f"n{i}": columns[:, i] for i in range(20)}, "click": labels.astype(np.int64)}


def make_clicks(random: np.random.Generator, events: int) -> dict[str, Array]:
    """Return a log of rare clicks with 6 numbers and 10 sparse categories, two of which interact."""
    numbers = random.lognormal(0, 1, (events, 6))
    sizes = [10, 30, 100, 300, 1000, 3000, 3000, 10_000, 10_000, 30_000]
    categories = [draw_zipf(random, 1.25, size, events) for size in sizes]
    logits = np.log(numbers) @ random.normal(0, 0.2, 6) - 3
    for size, ids in zip(sizes, categories, strict=True):
        logits = logits + random.normal(0, 0.35, size)[ids]
    left, right = (random.normal(0, 0.5, (sizes[i], 3))[categories[i]] for i in (4, 5))
    clicks = draw_labels(random, logits + (left * right).sum(1))
    names = {f"c{i}": ids for i, ids in enumerate(categories)}
    return {**{f"n{i}": numbers[:, i] for i in range(6)}, **names, "click": clicks}


def make_catalog(kind: str) -> Callable[[np.random.Generator, int], dict[str, Array]]:
    """Return the function that makes a stream of users and items, with or without drift."""

    def make(random: np.random.Generator, events: int) -> dict[str, Array]:
        tastes = random.standard_normal((USERS, WIDTH))
        traits, quality = 0.4 * random.standard_normal((ITEMS, WIDTH)), random.normal(-1.5, 0.8, ITEMS)
        user, slot = draw_zipf(random, 1.3, USERS, events), draw_zipf(random, 1.2, ITEMS, events)
        item, clicks = slot.copy(), np.empty(events, dtype=np.int64)
        offered = np.arange(ITEMS)
        for step, rows in enumerate(np.array_split(np.arange(events), STEPS)):
            logits = quality[slot[rows]] + (tastes[user[rows]] * traits[slot[rows]]).sum(1)
            clicks[rows] = draw_labels(random, logits)
            item[rows] = offered[slot[rows]]
            if kind == "drift":
                tastes += 0.15 * random.standard_normal(tastes.shape)
                quality += 0.1 * random.standard_normal(ITEMS)
            elif kind == "sudden" and step in (STEPS // 3, 2 * STEPS // 3):
                offered = random.permutation(offered)
            elif kind == "turnover":
                new = np.flatnonzero(np.arange(ITEMS) % LIFE == step % LIFE)
                offered[new] = offered.max() + 1 + np.arange(len(new))
                traits[new] = 0.4 * random.standard_normal((len(new), WIDTH))
                quality[new] = random.normal(-1.5, 0.8, len(new))
        return {"user": user, "item": item, "hour": np.arange(events) // 50 % 24, "click": clicks}

    return make


KINDS: Mapping[str, Callable[[np.random.Generator, int], dict[str, Array]]] = {
    "logistic": make_logistic,
    "clusters": make_clusters,
    "stationary": make_catalog("stationary"),
    "drift": make_catalog("drift"),
    "turnover": make_catalog("turnover"),
    "sudden": make_catalog("sudden"),
    "clicks": make_clicks,
}
"""The functions that return the columns of each stream, from a generator and a number of events."""


def write_stream(path: Path, kind: str, events: int, seed: int = 0) -> None:
    """Write a simulated stream as CSV.

    Args:
        path: The file.
        kind: One of `KINDS`.
        events: The number of events.
        seed: The seed.
    """
    columns = KINDS[kind](np.random.default_rng(seed), events)
    # Integers of many values are taken for numbers, so the categories of "clicks" are texts.
    formats = [
        f"{name}-%d" if name[0] == "c" and name != "click" else "%d" if values.dtype.kind == "i" else "%.4f"
        for name, values in columns.items()
    ]
    rows = np.stack(list(columns.values()), 1)
    np.savetxt(path, rows, fmt=formats, delimiter=",", header=",".join(columns), comments="")


def main() -> None:
    """Run the comparisons and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--kinds", default=",".join(KINDS))
    options, ab_options = parser.parse_known_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| stream | verdict | difference | in the recent part | in hindsight | events | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind in options.kinds.split(","):
        path = options.folder / f"{kind}-{options.events}.csv"
        write_stream(path, kind, options.events)
        command = [sys.executable, "-m", "cadam", "ab", str(path), "--label", "click", "--json", *ab_options]
        command += ["--cache", str(options.folder / "cache"), "--output", str(path.with_suffix(".html"))]
        start = time.monotonic()
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for pair, verdict in zip(result["pairs"], result["verdicts"], strict=True):
            more = "" if pair["more_events"] is None else f", {pair['more_events']:,} more events"
            more += "" if pair["more_seeds"] is None else f", {pair['more_seeds']} seeds"
            recent = pair["recent_over_time"]["mean"]
            print(
                f"| {kind}, {pair['arm']} | {verdict['action']}{more} | {pair['difference']:+.2f}% | "
                f"{'' if recent is None else f'{recent:+.2f}%'} | {pair['in_hindsight']:+.2f}% | "
                f"{result['processed_events']:,} | {time.monotonic() - start:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
