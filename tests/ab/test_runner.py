"""The runner: results are kept in files, interrupted studies resume, and worker processes compute the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadam.ab import runner
from cadam.ab.report.console import Progress
from cadam.ab.results import Outcome, Provenance, Result, RunSpec
from cadam.ab.run_arm import run_arm
from cadam.ab.runner import DamagedResultError, RunCache, RunEvent, StudyRunner, count_workers
from cadam.ab.study import Study, count_work
from tests.ab.helpers import ab_command, make_settings, make_spec

SPEC = RunSpec("ab", "model", "data", "Adam", 0.1, "", 3, {"tuning": False, "tuning_share": 0.2})


def make_study(folder: Path) -> Study:
    settings = make_settings(folder)
    shared = {name: settings[name] for name in ("schema", "data")}
    data, model = f"parquet:{folder / 'clicks.parquet'}", f"{folder / 'model.py'}:build"
    return Study("ab", data, ("Adam", "CAdam"), 50, model, (0.03, 0.1), 1, events=1500, blocks=24, settings=shared)


def test_a_result_is_read_from_its_file_to_the_last_bit(tmp_path: Path) -> None:
    metrics = {"auc": 0.1 + 0.2, "log_loss": float("nan"), "calibration": float("inf")}
    curves = {"auc": np.array([0.1, np.nan]), "user_impressions": np.arange(3), "empty": np.empty((0, 2))}
    provenance = Provenance(1.5, 2, "CPU", {"torch": "2"})
    cache = RunCache(tmp_path)
    assert cache.load(SPEC) is None
    cache.save(Result(SPEC, Outcome(metrics, curves), provenance))
    result = cache.load(SPEC)
    assert result is not None
    assert (result.spec, result.provenance) == (SPEC, provenance)
    assert np.array_equal(list(result.outcome.metrics.values()), list(metrics.values()), equal_nan=True)
    for name, curve in curves.items():
        assert result.outcome.curves[name].dtype == curve.dtype
        assert result.outcome.curves[name].tobytes() == curve.tobytes()
    assert cache.load(replace(SPEC, seed=4)) is None


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" + data])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, damage: object) -> None:
    cache = RunCache(tmp_path)
    cache.save(Result(SPEC, Outcome({"auc": 0.5}), Provenance(0, 0, "", {})))
    path = cache.path(SPEC)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DamagedResultError, match=path.name):
        cache.load(SPEC)


def test_a_file_at_the_path_of_another_run_is_an_error(tmp_path: Path) -> None:
    cache, other = RunCache(tmp_path), replace(SPEC, seed=4)
    cache.save(Result(SPEC, Outcome({"auc": 0.5}), Provenance(0, 0, "", {})))
    cache.path(SPEC).rename(cache.path(other))
    with pytest.raises(DamagedResultError, match="seed 3"):
        cache.load(other)


def test_workers_compute_the_same_as_one_process_and_the_cache_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(folder)
    first = StudyRunner(study, 2, RunCache(folder / "one"))
    first.run()
    assert first.missing == 0
    monkeypatch.setattr(runner, "count_workers", lambda seconds, limit: 2)
    events: list[RunEvent] = []
    second = StudyRunner(study, 2, RunCache(folder / "two"), workers=2, notify=events.append)
    second.run()
    assert [r.spec for r in second.results] == [r.spec for r in first.results]
    assert all(a.outcome.metrics == b.outcome.metrics for a, b in zip(first.results, second.results, strict=True))
    assert {event.kind for event in events} == {"computed"}
    damaged = second.cache.path(second.results[0].spec)
    damaged.write_bytes(b"")
    events.clear()
    again = StudyRunner(study, 2, RunCache(folder / "two"), notify=events.append)
    again.run()
    kinds = [event.kind for event in events]
    assert (kinds.count("damaged"), kinds.count("computed")) == (1, 1)
    assert kinds.count("cached") == len(first.results) - 1


def test_the_number_of_workers_is_limited() -> None:
    assert count_workers(1e6, 1) == 1
    assert count_workers(1e6, 3) == 3
    assert count_workers(0.0, 3) == 1


def test_a_failed_run_leaves_the_study_incomplete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_for_cadam(spec: RunSpec) -> Outcome:
        if spec.optimizer == "CAdam":
            raise RuntimeError("broken")
        return run_arm(spec)

    monkeypatch.setattr("cadam.ab.run_arm.run_arm", fail_for_cadam)
    study_runner = StudyRunner(make_study(folder), 2, RunCache(folder / "runs"))
    study_runner.run()
    assert len(study_runner.failures) == 2  # the tuning runs of CAdam; nothing follows without them
    assert all("broken" in text for text in study_runner.failures.values())
    assert study_runner.missing == count_work(study_runner.study, 2)[0] - 2


def test_the_number_of_runs_is_known_before_the_learning_rates(folder: Path) -> None:
    study = make_study(folder)
    study_runner = StudyRunner(study, 2, RunCache(folder / "runs"))
    total, passes = count_work(study, 2)
    assert study_runner.missing == total
    study_runner.run()
    assert len(study_runner.results) == total
    assert passes == pytest.approx(0.2 * 4 + 4 + 2 + 2)


def test_the_time_left_follows_the_pace_of_computed_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("cadam.ab.report.console.time.monotonic", lambda: now[0])
    study = make_study(folder)
    progress = Progress(study, 2)
    assert progress.describe_rest() == "starting"
    progress.update(RunEvent("cached", study.spec("Adam", 0.1, 0)))
    assert progress.describe_rest() == "starting"
    now[0] = 10.0
    progress.update(RunEvent("computed", study.spec("CAdam", 0.1, 0)))
    left = 10.0 * (count_work(study, 2)[1] - 2)
    assert progress.describe_rest() == f"about {left:.0f} s left"
    assert str(progress) == f"2 of {count_work(study, 2)[0]} runs"


def test_killing_the_command_ends_its_workers_and_loses_only_runs_in_progress(folder: Path) -> None:
    """The parent process is killed with SIGKILL, so it cannot end its workers itself."""
    slow = "import time\nimport cadam.ab.runner as runner\nrunner.count_workers = lambda seconds, limit: 2\n"
    code = f"{slow}from cadam.cli.main import main\nimport sys\nif __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    (folder / "command.py").write_text(code)
    model = (folder / "model.py").read_text()
    (folder / "model.py").write_text(model.replace("def build():", "def build():\n    import time; time.sleep(0.3)"))
    arguments = ab_command(folder, "--lr", "0.03,0.1")
    process = subprocess.Popen(
        [sys.executable, str(folder / "command.py"), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while len(list((folder / "runs").rglob("*.npz"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        workers = _children(process.pid)
        assert workers
    finally:
        process.kill()
        process.wait()
    finished = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*.npz")}
    assert finished
    deadline = time.monotonic() + 30
    while any(map(_is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_is_alive, workers))
    subprocess.run([sys.executable, str(folder / "command.py"), *arguments], check=True, capture_output=True)
    assert all(path.stat().st_mtime_ns == written for path, written in finished.items())


def _children(pid: int) -> list[int]:
    output = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(text) for text in output.split()]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_an_interrupt_keeps_finished_runs(folder: Path) -> None:
    model = (folder / "model.py").read_text()
    (folder / "model.py").write_text(model.replace("def build():", "def build():\n    import time; time.sleep(0.3)"))
    code = "import sys; from cadam.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ab_command(folder, "--lr", "0.03,0.1")
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list((folder / "runs").rglob("*.npz")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"the same command continues" in errors
    assert b"cadam ab --data" in output


def test_a_spec_on_the_click_stream_is_computed(folder: Path) -> None:
    event = runner._compute_run(RunCache(folder / "runs"), make_spec(folder))
    assert event.kind == "computed"
    assert RunCache(folder / "runs").load(make_spec(folder)) is not None
