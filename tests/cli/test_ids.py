"""`cadam run` and a service with features of the kind `id`: odd ids, full disks, damaged checkpoints and snapshots."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cadam import checkpoint_files
from cadam.atomic_write import write_with
from cadam.cli.main import main
from cadam.online import Schema, load_model, models
from cadam.serving.snapshots import ServedModel, SnapshotInfo, write_snapshot
from tests.online.models.test_id_features import batches, new_learner, schema

ODD = {17: "x" * 10240, 18: str(2**64 - 1), 19: "", 20: str(-(2**63)), 21: "-1", 22: '"a,""b"'}
FEATURES = {"user": "id:max=50,admit=2,expire=1h?", "item": "id:max=20", "price": "number?"}


def write_clicks(path: Path, count: int = 600, first: int = 0) -> None:
    random = np.random.default_rng(first)
    lines = ["user,item,price,at,click"]
    for number in range(first, first + count):
        user, item = ODD.get(number, f"u{random.integers(0, 80) + number // 10}"), random.integers(0, 40)
        lines.append(f"{user},{item},{random.normal():.3f},{1_600_000_000 + 20 * number},{int(item % 3 == 0)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(folder: Path, data: Path, *arguments: str) -> int:
    state = ["--schema", str(folder / "schema.json"), "--checkpoint", str(folder / "state")]
    return main(["run", str(data), *state, "--lr", "0.01", "--batch-size", "32", *arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Schema(FEATURES, label="click", time="at").write(tmp_path / "schema.json")
    write_clicks(tmp_path / "clicks.csv")
    return tmp_path


def test_odd_ids_are_learned_or_rejected_with_a_reason(folder: Path) -> None:
    assert run(folder, folder / "clicks.csv", "--prometheus", str(folder / "metrics.prom")) == 0
    (rejected,) = (folder / "state" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(rejected)["reason"] == "user: text of 10240 characters is longer than 1024"
    metrics = (folder / "metrics.prom").read_text()
    assert 'cadam_id_rows{feature="item"} 20.0' in metrics
    assert 'cadam_id_collisions_avoided{feature="user"}' in metrics
    loaded = load_model(folder / "state")
    assert loaded.events == 599
    records: list[Any] = [{"user": user, "item": 1} for user in ("", None, 2**64 - 1, "never seen", -1)]
    assert np.isfinite(loaded.predict(records)).all()


def test_a_damaged_checkpoint_with_ids_is_replaced_by_the_one_before(folder: Path, capsys: Any) -> None:
    assert run(folder, folder / "clicks.csv", "--every", "200") == 0
    *_, newest = sorted((folder / "state").glob("checkpoint-*"))
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(bytes(content))
    events = load_model(folder / "state").events
    assert 0 < events < 599
    assert run(folder, folder / "clicks.csv") == 0  # it repeats the events after the older checkpoint
    assert load_model(folder / "state").events == 599


def test_learning_continues_while_the_disk_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = 0

    def fail(*arguments: Any) -> None:
        nonlocal writes
        writes += 1
        if writes in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_with(*arguments)

    monkeypatch.setattr(checkpoint_files, "write_with", fail)
    assert run(folder, folder / "clicks.csv", "--every", "200") == 0
    monkeypatch.undo()
    assert load_model(folder / "state").events == 599


def test_ids_that_expire_by_time_need_a_time(folder: Path, capsys: Any) -> None:
    Schema(FEATURES, label="click").write(folder / "schema.json")
    assert run(folder, folder / "clicks.csv") == 2
    assert "give the column of the time, or a number of events, as in expire=1e6" in capsys.readouterr().err


def test_a_front_process_predicts_with_the_ids_of_a_snapshot(tmp_path: Path) -> None:
    learner = new_learner("fm")
    served = ServedModel(tmp_path, lambda: models.build("fm", schema()))
    for number, events in enumerate(batches(5)):
        learner.learn(events)
        weights = {name: value.detach() for name, value in learner.model.state_dict().items()}
        write_snapshot(served.path, weights, SnapshotInfo(0, number, number, number, number, 0.0))
        assert served.refresh()
        features = {name: torch.from_numpy(values) for name, values in events.features.items()}
        with torch.no_grad():
            expected = learner.model.eval()(**features)
        np.testing.assert_array_equal(served.scores(events.features)[1], expected)
