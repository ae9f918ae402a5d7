"""The learning rate of `cadam run`: fixed, kept when a run resumes, or tuned with `--lr auto`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cadam.cli.main import main
from cadam.online import load_model
from cadam.online.persistence.checkpoints import read_newest
from tests.online.streams import table

COUNT, BATCH = 1280, 64


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    columns = table(COUNT)
    path = tmp_path / "clicks.csv"
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return path


def run(clicks: Path, *options: object) -> int:
    columns = ["--label", "click", "--ignore", "event,at", "--model", "fm", "--batch-size", BATCH]
    folder = clicks.parent / "state"
    return main(["run", str(clicks), *map(str, columns), "--checkpoint", str(folder), *map(str, options)])


def test_switches_are_logged_and_the_saved_model_is_that_of_the_leader(
    clicks: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    prometheus = clicks.parent / "metrics.prom"
    assert run(clicks, "--lr", "auto:0.0003", "--events", COUNT // 2) == 0
    assert run(clicks, "--lr", "auto:0.0003", "--prometheus", prometheus) == 0
    assert "labeled events: its recent loss is" in caplog.text
    assert "resumed from" in caplog.text
    assert "optimizer CAdam, learning rate 0.0003 at first (tuned while the run learns)" in caplog.messages
    console = capfd.readouterr()
    assert "lag  learning" in console.out
    assert re.search(r"^optimizer CAdam, learning rate 0\.\d+ \(tuned, \d+ changes?\)$", console.err, re.MULTILINE)
    assert f"warning: {COUNT:,} labeled events are too few to tune the learning rate" in console.err
    assert "--lr auto:0.0003: the search continues at the rate of the checkpoint" in caplog.text
    state = read_newest(clicks.parent / "state")[1]
    (group,) = state["optimizer"]["param_groups"]
    assert group["lr"] > 0.001
    assert f"cadam_learning_rate {group['lr']!r}" in prometheus.read_text()
    assert load_model(clicks.parent / "state") is not None
    assert run(clicks, "--lr", "0.003", "--events", COUNT) == 0
    assert "the learning rate was" in caplog.text or "the learning rate is no longer tuned" in caplog.text


def test_a_run_that_resumes_without_a_rate_keeps_its_rate(
    clicks: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(clicks, "--lr", "0.03", "--events", COUNT // 2, "--optimizer", "Adam") == 0
    assert run(clicks, "--optimizer", "Adam") == 0
    lines = [*caplog.messages, *capfd.readouterr().err.splitlines()]
    assert lines.count("optimizer Adam, learning rate 0.03") == 4  # at the start and at the end of two runs
    assert "the learning rate was" not in caplog.text
    (group,) = read_newest(clicks.parent / "state")[1]["optimizer"]["param_groups"]
    assert group["lr"] == 0.03
    assert run(clicks, "--lr", "0.5", "--optimizer", "Adam") == 0
    (group,) = read_newest(clicks.parent / "state")[1]["optimizer"]["param_groups"]
    assert group["lr"] == 0.03, "nothing new was read, so nothing is stored"


def test_ready_made_models_are_tuned_by_default_and_resume_as_they_began(
    clicks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(clicks, "--events", COUNT // 2) == 0
    assert "optimizer CAdam, learning rate 0.003 at first (tuned while the run learns)" in caplog.messages
    caplog.clear()
    assert run(clicks) == 0
    assert re.search(r"learning rate \S+ \(tuned, \d+ changes?\)", caplog.text)
    assert read_newest(clicks.parent / "state")[1]["rate_tuning"]["labeled"] == COUNT


def test_runs_event_by_event_and_large_models_have_a_fixed_rate(
    clicks: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(clicks, "--events", 64, "--batch-size", 1) == 0
    assert "optimizer CAdam, learning rate 0.003" in caplog.messages
    caplog.clear()
    monkeypatch.setattr("cadam.cli.run.MAX_TUNED_PARAMETERS", 10)
    assert run(clicks, "--events", 128, "--checkpoint", clicks.parent / "large") == 0
    assert "optimizer CAdam, learning rate 0.003" in caplog.messages
    assert "--lr auto tunes it nevertheless" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lr", "auto", "--batch-size", "1"), "--lr auto needs --batch-size 2 or more"),
        (("--lr", "automatic"), "must be a number, auto or auto:NUMBER, got 'automatic'"),
        (("--lr", "auto:0"), "a first learning rate above 0"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    clicks: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    try:
        code = run(clicks, *options)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    assert code == 2
    assert message in capfd.readouterr().err
