"""Compare ways to use confidence on embedding tables, on streams with new items and on three public streams.

    python benchmarks/confidence_for_tables.py DATA FOLDER [--events 300000] [--streams turnover,flights] [--seeds 3]

DATA has the Parquet files of the public streams, and FOLDER gets the simulated ones. The model is DeepFM with the
schema that `cadam run` infers, in batches of 256. Every arm runs at the same fixed learning rates. The table has the
mean log loss over the stream at the best rate of each arm, relative to Adam: the mean over seeds, and in brackets the
lowest and the highest of them, and the rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cadam
from cadam.online import Events, Schema, models
from cadam.online.data.sources import open_source, resolve_uri
from cadam.online.fused_step import create_training_step
from cadam.online.models.model_file import LOG_LOSS
from defaults import infer, prepare

BATCH_SIZE = 256
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
BASELINE = "Adam"
ARMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    BASELINE: ("Adam", {}),
    "CAdam": ("CAdam", {}),
    "tables without confidence": ("CAdam", {"confidence": False}),
    "confidence_after=100": ("CAdam", {"confidence_after": 100}),
    "confidence_after=1000": ("CAdam", {"confidence_after": 1000}),
    "exact updates": ("CAdam", {"sparse_updates": "exact"}),
}
"""The optimizer of each arm, and the options of the parameter group of the tables."""
TABLES = ("inputs.table.", "inputs.linear.")
"""The beginnings of the names of the tables' parameters."""
STREAMS = ("turnover", "stationary", "flights", "movielens", "baseball")


def read(path: Path, options: list[str]) -> tuple[Schema, list[Events]]:
    """Return the schema of a stream and its batches."""
    schema = infer(path, options)
    source = open_source(resolve_uri(str(path)), schema, batch_size=BATCH_SIZE)
    batches = [batch.events for batch in source if batch is not None and batch.events is not None]
    return schema, [events for events in batches if len(events)]


def learn(schema: Schema, batches: list[Events], arm: str, rate: float, seed: int) -> float:
    """Return the mean log loss over the stream; each batch is predicted before it is learned."""
    torch.manual_seed(seed)
    model = models.build("deepfm", schema)
    name, table_options = ARMS[arm]
    tables = [param for key, param in model.named_parameters() if key.startswith(TABLES)]
    others = [param for key, param in model.named_parameters() if not key.startswith(TABLES)]
    optimizer = getattr(cadam, name)([{"params": tables, **table_options}, {"params": others}], lr=rate)
    training = create_training_step(model, optimizer, LOG_LOSS)
    losses = []
    for batch in batches:
        logits = training.learn(batch.columns()).astype(np.float64)  # type: ignore[union-attr]
        losses.append(np.mean(np.logaddexp(0, logits) - logits * batch.labels))
    return float(np.average(losses, weights=[len(batch) for batch in batches]))


def main() -> None:
    """Run all arms on all streams, and print one line for each stream."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--streams", default=",".join(STREAMS))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    print(f"| stream | {' | '.join(ARMS)} |")
    print("| --- " * (len(ARMS) + 1) + "|")
    for name in options.streams.split(","):
        schema, batches = read(*prepare(name, options.data, options.folder, options.events))
        best = {}
        for arm in ARMS:
            losses = {
                rate: np.array([learn(schema, batches, arm, rate, seed) for seed in range(options.seeds)])
                for rate in RATES
            }
            best[arm] = min(losses.items(), key=lambda item: float(item[1].mean()))
        rate, first = best[BASELINE]
        cells = [f"{first.mean():.4f} ({rate:g})"]
        for arm, (rate, by_seed) in best.items():
            if arm != BASELINE:
                change = by_seed / first - 1
                cells.append(f"{change.mean():+.2%} ({change.min():+.2%} to {change.max():+.2%}, {rate:g})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
