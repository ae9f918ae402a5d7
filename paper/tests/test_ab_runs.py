"""One run of an A/B: it is reproducible, predicts before it learns, and measures the part after tuning."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click_runs import make_settings, make_spec, run_arm
from tests.ab.helpers import write_clicks

from cadam.online.metrics.stream import measure
from cadam_paper.harness.ab_evidence import CHANCE_METRIC
from cadam_paper.harness.ab_runs import gauc_by_chance
from cadam_paper.harness.results import Outcome


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a stream of clicks, its schema and a model."""
    write_clicks(tmp_path)
    return tmp_path


def test_a_run_is_the_same_to_the_bit_and_measures_the_part_after_tuning(folder: Path) -> None:
    first, second = run_arm(make_spec(folder)), run_arm(make_spec(folder))
    assert first.metrics == second.metrics
    assert all(first.curves[name].tobytes() == second.curves[name].tobytes() for name in first.curves)
    assert first.metrics["events"] == 2400
    assert first.metrics["auc"] > 0.55  # the model learns
    assert len(first.curves["log_loss"]) == 24
    assert first.curves["log_loss"].mean() == pytest.approx(first.metrics["log_loss"])
    assert first.curves["user_impressions"].sum() <= 2400
    by_impressions = np.average(first.curves["user_auc"], weights=first.curves["user_impressions"])
    assert by_impressions == pytest.approx(first.metrics["gauc_by_impressions"])
    assert run_arm(make_spec(folder, seed=1)).metrics["auc"] != first.metrics["auc"]


def test_arms_have_the_same_initial_weights_and_events(folder: Path) -> None:
    adam, other = (run_arm(make_spec(folder, arm, lr=1e-12)) for arm in ("Adam", "CAdam"))
    assert adam.metrics["auc"] == pytest.approx(other.metrics["auc"], abs=1e-6)
    assert np.array_equal(adam.curves["user_impressions"], other.curves["user_impressions"])


RANDOM = """
import random
import numpy as np
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(1000, 1)
        self.table.weight.data[:] = torch.from_numpy(np.random.normal(size=(1000, 1))) * random.random()

    def forward(self, user, item):
        return torch.nn.functional.dropout(self.table(item), 0.5, self.training).squeeze(1)

def build():
    return Model()
"""


def test_models_that_use_any_random_generator_are_reproducible(folder: Path) -> None:
    (folder / "model.py").write_text(RANDOM)
    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    first, second = run_arm(make_spec(folder)), run_arm(make_spec(folder))
    assert first.metrics == second.metrics
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before[1]
    assert run_arm(make_spec(folder, seed=1)).metrics != first.metrics


def test_labels_other_than_0_and_1_are_rejected(folder: Path) -> None:
    table = pq.read_table(folder / "clicks.parquet").to_pydict()
    pq.write_table(pa.table({**table, "click": [0.5 * c for c in table["click"]]}), folder / "clicks.parquet")
    with pytest.raises(ValueError, match=r"labels .* GAUC and AUC.* 0\.5"):
        run_arm(make_spec(folder))


def test_tuning_does_not_use_the_measured_part(folder: Path) -> None:
    tuned = run_arm(make_spec(folder, tuning=True))
    table = pq.read_table(folder / "clicks.parquet")
    pq.write_table(table.slice(0, 600), folder / "clicks.parquet")
    assert run_arm(make_spec(folder, tuning=True)).metrics == tuned.metrics


@pytest.mark.parametrize(
    "simulated",
    [{"noise": 0.4}, {"change": {"feature": "item", "blocks": [8]}}, {"delay": 200.0}],
    ids=lambda p: next(iter(p)),
)
def test_simulated_changes_take_effect(folder: Path, simulated: dict[str, Any]) -> None:
    plain, changed = run_arm(make_spec(folder)), run_arm(make_spec(folder, **simulated))
    assert changed.metrics["log_loss"] > plain.metrics["log_loss"]
    if "change" in simulated:  # blocks before the change are equal
        assert np.array_equal(plain.curves["log_loss"][:8], changed.curves["log_loss"][:8])
        assert (changed.curves["log_loss"][8:11] > plain.curves["log_loss"][8:11]).all()
    if "delay" in simulated:
        assert 2200 < changed.metrics["events"] < 2400  # without events whose labels are still delayed at the end


@pytest.mark.parametrize("simulated", [{"noise": 0.4}, {"delay": 200.0}], ids=lambda p: next(iter(p)))
def test_simulated_changes_apply_to_labels_in_separate_records(folder: Path, simulated: dict[str, Any]) -> None:
    rows, lines = pq.read_table(folder / "clicks.parquet").to_pylist(), []
    for number, row in enumerate(rows):
        lines.append({"event": number, **{name: row[name] for name in ("user", "item", "at")}})
        if number >= 20:
            lines.append({"event": number - 20, "click": rows[number - 20]["click"]})
    (folder / "clicks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    schema = {**make_settings(folder)["schema"], "id": "event"}

    def along(**more: Any) -> Outcome:
        return run_arm(replace(make_spec(folder, schema=schema, **more), data=f"jsonl:{folder / 'clicks.jsonl'}"))

    plain, changed = along(), along(**simulated)
    assert changed.metrics["log_loss"] > plain.metrics["log_loss"]
    assert (changed.metrics["events"] < plain.metrics["events"]) == ("delay" in simulated)


def test_the_metrics_of_a_diverged_run_are_nan(folder: Path) -> None:
    assert math.isnan(run_arm(make_spec(folder, "SGDM", lr=1e38)).metrics["gauc_by_impressions"])


def test_too_few_events_are_rejected(folder: Path) -> None:
    with pytest.raises(ValueError, match="3000 events are too few for 2000 blocks"):
        run_arm(make_spec(folder, blocks=2000))


def test_the_gauc_of_random_scores_is_predicted() -> None:
    random = np.random.default_rng(0)
    users = random.integers(0, 12, 400)
    labels = random.random(400) < 0.1
    drawn = [measure(random.random(400), labels, users)["gauc_by_impressions"] for _ in range(2000)]
    assert gauc_by_chance(labels, users) == pytest.approx(1.96 * np.std(drawn), rel=0.05)
    assert np.mean(np.abs(np.array(drawn) - 0.5) < gauc_by_chance(labels, users)) == pytest.approx(0.95, abs=0.02)
    assert math.isnan(gauc_by_chance(np.zeros(9), np.arange(9)))


def test_rare_labels_increase_the_chance_deviation_of_gauc(folder: Path) -> None:
    reach = run_arm(make_spec(folder)).curves["gauc_by_chance"]
    table = pq.read_table(folder / "clicks.parquet").to_pydict()
    rare = [c * (i % 4 == 0) for i, c in enumerate(table["click"])]
    pq.write_table(pa.table({**table, "click": rare}), folder / "clicks.parquet")
    assert len(reach) == 24
    assert np.nanmean(run_arm(make_spec(folder)).curves["gauc_by_chance"]) > 1.2 * np.nanmean(reach)


def test_a_run_measures_how_far_chance_reaches(folder: Path) -> None:
    assert 0.005 < run_arm(make_spec(folder)).metrics[CHANCE_METRIC] < 0.1
