"""Late labels, labels from another source, and event weights in `cadam ab`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam.cli.main import main
from tests.ab.helpers import ab_command

DELAY, HORIZON = 120.0, 250.0
"""The mean delay of the labels and the horizon, in seconds; there is one event per second."""


def compare_arms(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    arguments = ab_command(folder, "--json", "--lr", "0.3", "--full", "--output", str(folder / "late.html"), *more)
    assert main(arguments) == 0, capsys.readouterr().err
    for report in folder.glob("late.*"):
        report.unlink()
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.fixture
def late(folder: Path) -> Path:
    """The click stream without labels, and the positives as a second source, after a delay."""
    table = pq.read_table(folder / "clicks.parquet")
    ids = np.arange(table.num_rows)
    clicks, at = table["click"].to_numpy(), table["at"].to_numpy()
    delays = np.random.default_rng(0).exponential(DELAY, table.num_rows)
    events = table.drop_columns("click").append_column("event", pa.array(ids))
    pq.write_table(events, folder / "clicks.parquet")
    rows = np.flatnonzero((clicks == 1) & (delays < HORIZON))
    rows = rows[np.argsort((at + delays)[rows], kind="stable")]
    labels = {"event": ids[rows], "click": clicks[rows], "at": (at + delays)[rows]}
    pq.write_table(pa.table(labels), folder / "labels.parquet")
    schema = json.loads((folder / "schema.json").read_text())
    (folder / "schema.json").write_text(json.dumps({**schema, "id": "event"}))
    return folder


def test_events_without_a_label_are_negative_after_the_horizon(late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--labels", str(late / "labels.parquet"), "--horizon", f"{HORIZON:g}")
    result = compare_arms(late, capsys, *options)
    positives = pq.read_table(late / "labels.parquet").num_rows
    share = positives / 3000
    assert result["events"] == 3000, "every event is judged, also those without a label"
    expected = -share * np.log(share) - (1 - share) * np.log1p(-share)
    assert result["best_constant"] == pytest.approx(expected, abs=0.02)
    assert result["lag"] == pytest.approx(HORIZON / 50, abs=2)
    assert f"--labels {late / 'labels.parquet'} --horizon {HORIZON:g}" in result["run"].replace("'", "")
    early = compare_arms(late, capsys, *options, "--early-positives")
    assert (early["events"], early["lag"]) == (3000, result["lag"]), "events are judged at their horizon in both cases"
    assert "--early-positives" in early["run"]
    assert early["arms"][0]["metrics"]["log_loss"] != result["arms"][0]["metrics"]["log_loss"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--early-positives",), "--early-positives needs --horizon"),
        (("--early-positives", "--horizon", "9", "--unmatched", "drop"), "--unmatched drop drops them"),
        (("--labels", "labels.parquet", "--delay", "3"), "--delay simulates late labels, but --labels has real ones"),
        (("--labels", "missing.parquet"), "missing.parquet"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    late: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(late)
    assert main(ab_command(late, *options)) == 2
    assert text in capsys.readouterr().err


def test_labels_of_another_source_need_a_schema(late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = ("--label", "click", "--labels", str(late / "labels.parquet"), "--horizon", "250")
    assert main(["ab", str(late / "clicks.parquet"), *labels, "--cache", str(late / "runs")]) == 2
    error = capsys.readouterr().err
    assert "has no column 'click' for the label" in error
    assert "where the labels are another source, --schema names the label, the id and the time" in error


def test_other_labels_are_another_comparison(late: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--labels", str(late / "labels.parquet"), "--horizon", f"{HORIZON:g}", "--events", "1500")
    first = compare_arms(late, capsys, *options)
    labels = pq.read_table(late / "labels.parquet")
    pq.write_table(labels.slice(0, labels.num_rows // 4), late / "labels.parquet")
    second = compare_arms(late, capsys, *options)
    assert second["best_constant"] < first["best_constant"]


def test_weights_of_events_count_in_training_and_judgment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = compare_arms(folder, capsys)
    table = pq.read_table(folder / "clicks.parquet")
    clicks = table["click"].to_numpy()
    weights = np.where(clicks == 1, 3.0, 1.0)
    pq.write_table(table.append_column("w", pa.array(weights)), folder / "clicks.parquet")
    schema = json.loads((folder / "schema.json").read_text())
    (folder / "schema.json").write_text(json.dumps({**schema, "weight": "w"}))
    weighted = compare_arms(folder, capsys)
    judged = slice(weighted["warm_up"], None)
    share = np.average(clicks[judged], weights=weights[judged])
    assert weighted["best_constant"] == pytest.approx(-share * np.log(share) - (1 - share) * np.log1p(-share))
    assert weighted["arms"][0]["metrics"]["log_loss"] != plain["arms"][0]["metrics"]["log_loss"]
    calibration = weighted["arms"][0]["metrics"]["calibration"]
    assert calibration > 0.8, "a model that ignores the weights predicts 53% instead of 77%"
