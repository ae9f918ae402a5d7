"""A small click stream with a model and a schema, and studies on it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cadam.ab.result import ArmResult, Curve, PairResult, Result
from cadam.ab.runner import RunCache
from cadam.ab.stream import EncodedStream, encode_stream
from cadam.ab.study import Study
from cadam.online.data.events import Batch
from cadam.online.data.schema import Schema
from cadam.online.data.sources import open_source
from cadam.statistics.comparison import Kind
from cadam.statistics.intervals import Interval

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


def make_study(folder: Path, **fields: Any) -> Study:
    """Return a study on the click stream."""
    schema = json.loads((folder / "schema.json").read_text())
    # The time of the change is in place of the hash that the command records, so that changed data are read again.
    data = str((folder / "clicks.parquet").stat().st_mtime_ns)
    common: dict[str, Any] = {"arms": ("Adam", "CAdam"), "batch_size": 50, "grid": (0.01, 0.03, 0.1), "seeds": 2}
    settings = {"schema": schema, "data": data, **fields.pop("settings", {})}
    uri, model = f"parquet:{folder / 'clicks.parquet'}", f"{folder / 'model.py'}:build"
    return Study(data=uri, model=model, settings=settings, **{**common, **fields})


def encode(folder: Path, study: Study) -> tuple[EncodedStream, RunCache]:
    """Encode the click stream for a study."""
    cache = RunCache(folder / "runs", study)
    source = open_source(study.data, Schema(**study.settings["schema"]), batch_size=study.batch_size, patience=None)
    batches = (batch for batch in source if isinstance(batch, Batch))
    return encode_stream(batches, cache.stream_folder, study.is_per_event), cache


def ab_command(folder: Path, *more: str) -> list[str]:
    """Return the arguments of `cadam ab` on the click stream."""
    return [
        "ab",
        *("--model", f"{folder / 'model.py'}:build", "--data", f"parquet:{folder / 'clicks.parquet'}"),
        *("--schema", str(folder / "schema.json"), "--cache", str(folder / "runs")),
        *("--output", str(folder / "report.html"), "--batch-size", "50", "--seeds", "2"),
        *more,
    ]


def make_result(arm: str = "CAdam", kind: Kind = "better", **fields: Any) -> Result:
    """Return a result with one pair of arms."""
    arms = [
        ArmResult(
            name=name,
            metrics={"log_loss": loss, "auc": 0.7, "gauc": 0.65, "calibration": 1.01},
            rate_to_use=0.03,
            best_rate=0.03,
            loss_at_best_rate=loss,
            loss_by_rate={0.01: 0.6, 0.03: loss, 0.1: math.nan},
            loss_by_period={0.01: [0.6, 0.6], 0.03: [loss, loss], 0.1: [0.7, math.nan]},
            own_loss_by_period=[loss, loss],
            rate_by_period=[0.01, 0.03],
            added_rates={},
            has_diverged=kind == "diverged" and name == arm,
        )
        for name, loss in (("Adam", 0.5), (arm, 0.495))
    ]
    pair_fields: dict[str, Any] = {
        "arm": arm,
        "baseline": "Adam",
        "metric": "log_loss",
        "kind": kind,
        "difference": -1.0,
        "over_time": Interval(-1.0, -1.5, -0.5, 400),
        "over_seeds": Interval(-1.0, -1.2, -0.8, 5),
        "seed_confidence": 0.975,
        "recent_over_time": Interval(-0.9, -1.3, -0.4, 200),
        "recent_over_seeds": Interval(-0.9, -1.2, -0.6, 5),
        "recent_from": 14_000,
        "change": Interval(-0.2, -1.1, 0.7, 200),
        "decided_at": 20_000,
        "first_decided_at": 20_000,
        "in_hindsight": -0.9,
        "periods": [-1.0, -1.0],
        "users": Interval(-1.0, -1.3, -0.7, 50),
        "users_ahead": 0.8,
        "curve": Curve([1000, 2000], [-1.0, -1.0], [-math.inf, -1.5], [math.inf, -0.5]),
    }
    result: dict[str, Any] = {
        "metric": "log_loss",
        "matters": 0.1,
        "alpha": 0.05,
        "seeds": 5,
        "events": 100_000,
        "processed_events": 30_000,
        "warm_up": 2_000,
        "lag": 0,
        "batches": 391,
        "clipped_share": 0.0,
        "arms": arms,
        "period_ends": [15_000, 30_000],
        "best_constant": 0.6,
    }
    result |= {name: fields.pop(name) for name in list(fields) if name in result}
    return Result(pairs=[PairResult(**{**pair_fields, **fields})], **result)
