"""Runs of archived A/B studies on the small click stream of the A/B tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.ab.helpers import EVENTS

from cadam.online.data.schema import Schema
from cadam.online.data.sources import open_source
from cadam.online.per_event import CHUNK_SIZE
from cadam.online.run_config import model_builder
from cadam_paper.harness import ab_runs
from cadam_paper.harness.results import Outcome, RunSpec


def make_settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of a run on the click stream."""
    schema = json.loads((folder / "schema.json").read_text())
    common = {"events": EVENTS, "batch_size": 50, "tuning_share": 0.2, "blocks": 24, "tuning": False}
    return {**common, "schema": schema, **more}


def make_spec(folder: Path, arm: str = "Adam", seed: int = 0, lr: float = 0.03, **more: Any) -> RunSpec:
    """Return the spec of a run on the click stream."""
    uri = f"parquet:{folder / 'clicks.parquet'}"
    return RunSpec("ab", f"{folder / 'model.py'}:build", uri, arm, lr, "", seed, make_settings(folder, **more))


def run_arm(spec: RunSpec) -> Outcome:
    """Run an arm on the stream and the model that a spec names."""
    settings = spec.settings
    schema = Schema(**settings["schema"])
    size = CHUNK_SIZE if settings["batch_size"] == 1 and schema.id is None else settings["batch_size"]
    source = open_source(spec.data, schema, batch_size=size, patience=None)
    categories = {name: kind.size for name, kind in schema.kinds.items() if kind.size}
    build, loss = model_builder(spec.model, schema, settings)
    return ab_runs.run_arm(spec, ab_runs.Task(source, settings["events"], categories, build, loss))
