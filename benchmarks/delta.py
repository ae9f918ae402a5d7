"""Compare a delta with a full export: size and time, with 1% of the rows of a table of ids changed.

    python benchmarks/delta.py [--rows 1000000] [--share 0.01] [--rounds 5]

A full export reads a checkpoint, traces the model and writes three files. A delta reads the same checkpoint and the
weights of the last export, and writes what differs. The copy in memory applies it, and so does a file.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cadam import CAdam
from cadam.online import Batch, CheckpointOptions, Events, Learner, Schema, load_model, models
from cadam.online.models.model_file import LOG_LOSS
from cadam.online.persistence.deltas import apply_delta_to_file, write_delta
from cadam.online.persistence.export import export

BATCH = 4096


def learn(learner: Learner, ids: np.ndarray[Any, Any]) -> None:
    for start in range(0, len(ids), BATCH):
        part = ids[start : start + BATCH]
        learner.process(Batch(Events({"item": part, "page": part % 10}, (part % 3 == 0).astype(np.float32))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    schema = Schema({"item": f"id:max={arguments.rows}", "page": "category:10"}, label="click")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        schema.write(folder / "schema.json")
        (folder / "model.json").write_text('{"model": "deepfm"}')
        model = models.build("deepfm", schema)
        options = CheckpointOptions(folder, every=10**12)
        learner = Learner(model, CAdam(model.named_parameters(), lr=0.01), LOG_LOSS, checkpoint=options)
        learn(learner, np.random.default_rng(0).permutation(arguments.rows))
        learner.save()
        seconds: dict[str, list[float]] = {}

        def timed(name: str, function: Callable[[], Any]) -> Any:
            start = time.perf_counter()
            result = function()
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            return result

        copy = load_model(folder)
        paths = export(copy, folder / "model.pt2")
        changed: dict[str, int] = {}
        for number in range(arguments.rounds):
            count = int(arguments.share * arguments.rows)
            learn(learner, np.random.default_rng(1 + number).permutation(arguments.rows)[:count])
            learner.save()
            loaded = timed("read a checkpoint (both)", lambda: load_model(folder))
            timed("full export", lambda loaded=loaded: export(loaded, folder / "full.pt2"))
            delta = folder / f"{number}.delta"
            changed = timed("delta", lambda loaded=loaded, path=delta: write_delta(loaded, folder / "model.pt", path))
            assert copy.version
            copy = timed("apply to a copy in memory", lambda copy=copy, path=delta: copy.apply_delta(path))
            timed("apply to a file", lambda path=delta: apply_delta_to_file(path, folder / "model.pt"))
            shutil.copy(folder / "model.pt", folder / "copy.pt")
            for name, value in loaded.model.state_dict().items():
                assert torch.equal(value, copy.model.state_dict()[name]), name
        learner.close()
        print(f"{arguments.rows:,} rows, {arguments.share:.1%} changed, medians of {arguments.rounds} rounds")
        for name, values in seconds.items():
            print(f"{name:28}{statistics.median(values):8.3f} s")
        full, weights, size = paths[0].stat().st_size, paths[1].stat().st_size, delta.stat().st_size
        print(f"bytes: model.pt2 {full:,}, model.pt {weights:,}, delta {size:,} ({size / weights:.3f} of model.pt)")
        print(f"changed rows in the last delta: {changed}")


if __name__ == "__main__":
    main()
