"""A small click stream with a model and a schema, and run specs for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cadam.ab.results import RunSpec

USERS, ITEMS, EVENTS = 200, 100, 3000
MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(200, 4, sparse=True)
        self.items = nn.Embedding(100, 4, sparse=True)
        self.bias = nn.Embedding(100, 1, sparse=True)
        for table in (self.users, self.items, self.bias):
            nn.init.normal_(table.weight, 0, 0.1)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1) + self.bias(item).squeeze(1)

def build():
    return Model()
"""


def write_clicks(folder: Path) -> None:
    """Write clicks.parquet, schema.json and model.py. Items differ in how often they are clicked."""
    random = np.random.default_rng(0)
    users, items = random.integers(0, USERS, EVENTS), random.integers(0, ITEMS, EVENTS)
    logits = 1.5 * random.standard_normal(ITEMS)[items] + 0.5 * random.standard_normal(USERS)[users]
    clicks = random.random(EVENTS) < 1 / (1 + np.exp(-logits))
    columns = {"user": users, "item": items, "click": clicks.astype(float), "at": np.arange(EVENTS) * 1.0}
    pq.write_table(pa.table(columns), folder / "clicks.parquet")
    schema = {
        "features": {"user": f"category:{USERS}", "item": f"category:{ITEMS}"},
        "label": "click",
        "user": "user",
        "time": "at",
    }
    (folder / "schema.json").write_text(json.dumps(schema))
    (folder / "model.py").write_text(MODEL)


def make_settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of a run on the click stream."""
    schema = json.loads((folder / "schema.json").read_text())
    # In place of the hash that the command records, so that changed data are read again.
    data = str((folder / "clicks.parquet").stat().st_mtime_ns)
    common = {"events": EVENTS, "batch_size": 50, "tuning_share": 0.2, "blocks": 24, "tuning": False}
    return {**common, "schema": schema, "data": data, **more}


def make_spec(folder: Path, arm: str = "Adam", seed: int = 0, lr: float = 0.03, **more: Any) -> RunSpec:
    """Return the spec of a run on the click stream."""
    uri = f"parquet:{folder / 'clicks.parquet'}"
    return RunSpec("ab", f"{folder / 'model.py'}:build", uri, arm, lr, "", seed, make_settings(folder, **more))


def ab_command(folder: Path, *more: str) -> list[str]:
    """Return the arguments of `cadam ab` on the click stream."""
    return [
        "ab",
        *("--model", f"{folder / 'model.py'}:build", "--data", f"parquet:{folder / 'clicks.parquet'}"),
        *("--schema", str(folder / "schema.json"), "--cache", str(folder / "runs")),
        *("--output", str(folder / "report.html"), "--batch-size", "50", "--blocks", "24", "--seeds", "2"),
        *more,
    ]
