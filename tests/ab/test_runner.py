"""The encoded stream and the runs: the same bits in any number of processes, after interruptions, and late labels."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import filelock
import numpy as np
import pyarrow.parquet as pq
import pytest

from cadam.ab import runner
from cadam.ab.comparison import compare
from cadam.ab.runner import Advance, RunFiles, StudyRunner, advance_run, forget_runs
from cadam.ab.stream import EncodedStream, encode_stream
from cadam.ab.study import Run, Study, next_rate, segment_ends
from cadam.online.data.events import Batch
from cadam.online.data.schema import Schema
from cadam.online.data.simulation import LabelDelay
from cadam.online.data.sources import open_source
from tests.ab.helpers import EVENTS, ab_command, encode, make_study


def scores_of(study: Study, cache: runner.RunCache) -> dict[Run, bytes]:
    return {run: cache.files(run).scores_path.read_bytes() for run in study.runs()}


def test_an_encoded_stream_has_the_batches_of_its_source(folder: Path) -> None:
    study = make_study(folder)
    stream, cache = encode(folder, study)
    table = pq.read_table(folder / "clicks.parquet").to_pydict()
    assert (stream.events, stream.batches) == (EVENTS, EVENTS // 50)
    events = stream.batch(3).events
    assert events is not None
    assert events.labels is not None
    np.testing.assert_array_equal(events.features["item"], table["item"][150:200])
    np.testing.assert_array_equal(events.labels, table["click"][150:200])
    judged = stream.judged
    np.testing.assert_array_equal(judged.labels, table["click"])
    np.testing.assert_array_equal(judged.users, table["user"])
    assert judged.lag == 0
    assert judged.ends.tolist() == [*range(50, EVENTS + 1, 50), EVENTS]
    events.features["item"][:] = 0
    again = EncodedStream(cache.stream_folder).batch(3).events
    assert again is not None
    np.testing.assert_array_equal(again.features["item"], table["item"][150:200], "a run cannot change the file")


def test_late_labels_are_judged_when_they_arrive(folder: Path) -> None:
    study = make_study(folder)
    source = open_source(study.data, Schema(**study.settings["schema"]), batch_size=50, patience=None)
    batches = (batch for batch in LabelDelay(source, mean=100) if isinstance(batch, Batch))
    judged = encode_stream(batches, folder / "late", per_event=False).judged
    assert len(judged.labels) == EVENTS
    assert 4 < judged.lag < 40, "delays have a mean of two batches"
    assert judged.labels.mean() == pytest.approx(np.mean(pq.read_table(folder / "clicks.parquet")["click"].to_pylist()))
    assert judged.ends[0] < 50


def test_workers_compute_the_same_bits_as_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MIN_SECONDS_FOR_WORKERS", 0.0)
    study = make_study(folder, grid=(0.03, 0.1), seeds=1)
    stream, cache = encode(folder, study)
    alone = compare(study, stream, StudyRunner(study, cache, workers=1), full=True)
    expected = scores_of(study, cache)
    together = StudyRunner(study, cache, workers=2)
    together.forget()
    stream, cache = encode(folder, study)
    result = compare(study, stream, together, full=True).result()
    assert scores_of(study, cache) == expected
    assert result.pairs == alone.result().pairs


@pytest.mark.parametrize("keeps_in_memory", [True, False])
def test_an_interrupted_run_continues_with_the_same_bits(folder: Path, keeps_in_memory: bool) -> None:
    study = make_study(folder)
    stream, cache = encode(folder, study)
    run = Run("CAdam", 0.03, 0)
    settings = json.dumps(study.run_settings)
    whole = Advance(run, folder / "whole", cache.stream_folder, settings, stream.batches + 1, keeps_in_memory)
    assert not advance_run(whole).failure
    parts = replace(whole, folder=folder / "parts")
    for batch in (7, 8, 31, stream.batches + 1):
        assert not advance_run(replace(parts, batch=batch)).failure
        forget_runs()  # as if the process had ended
        with (folder / "parts" / "scores.f32").open("ab") as file:
            file.write(b"half a write")
    count = RunFiles(folder / "parts").progress()[1]
    first, second = (RunFiles(folder / name).read(0, count) for name in ("whole", "parts"))
    assert count == EVENTS
    np.testing.assert_array_equal(first, second)
    assert (folder / "parts" / "checkpoint.pt").exists() != keeps_in_memory


def test_two_comparisons_at_the_same_time_share_their_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = make_study(folder)
    stream, cache = encode(folder, study)
    end, settings = stream.batches + 1, json.dumps(study.run_settings)
    whole = Advance(Run("CAdam", 0.03, 0), folder / "whole", cache.stream_folder, settings, end, keeps_in_memory=True)
    assert not advance_run(whole).failure
    shared, append = replace(whole, folder=folder / "shared"), RunFiles.append

    def append_locked(files: RunFiles, scores: np.ndarray, batches: int) -> None:
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(files.lock().lock_file).acquire(timeout=0)
        append(files, scores, batches)

    monkeypatch.setattr(RunFiles, "append", append_locked)
    processes: list[dict[Path, runner._ActiveRun]] = [{}, {}]
    for process, batch in ((0, 7), (1, 7), (1, 20), (0, 20), (0, 31), (1, 40), (0, end), (1, end)):
        monkeypatch.setattr(runner, "_active", processes[process])
        assert not advance_run(replace(shared, batch=batch)).failure
    assert RunFiles(shared.folder).progress() == RunFiles(whole.folder).progress() == (end, EVENTS)
    assert RunFiles(shared.folder).scores_path.read_bytes() == RunFiles(whole.folder).scores_path.read_bytes()


@pytest.mark.parametrize("damage", ["progress is lost", "too many scores"])
def test_a_run_with_damaged_files_is_repeated(folder: Path, damage: str) -> None:
    study = make_study(folder)
    stream, cache = encode(folder, study)
    settings = json.dumps(study.run_settings)
    run = Advance(Run("CAdam", 0.03, 0), folder / "run", cache.stream_folder, settings, 7, keeps_in_memory=False)
    files = RunFiles(run.folder)
    assert not advance_run(run).failure
    if damage == "progress is lost":
        files.progress_path.write_text("")
    else:
        files.append(np.zeros(350), 7)
    end = stream.batches + 1
    assert not advance_run(replace(run, batch=end)).failure
    assert files.progress() == (end, EVENTS)
    assert not advance_run(replace(run, folder=folder / "whole", batch=end)).failure
    assert files.scores_path.read_bytes() == RunFiles(folder / "whole").scores_path.read_bytes()


def test_a_diverged_run_predicts_nothing_from_then_on(folder: Path) -> None:
    study = make_study(folder, arms=("Adam", "SGDM"), grid=(0.03, 1e38), seeds=1)
    stream, cache = encode(folder, study)
    result = compare(study, stream, StudyRunner(study, cache)).result()
    assert np.isnan(cache.files(Run("SGDM", 1e38, 0)).read(EVENTS - 10, EVENTS)).all()
    assert result.arm("SGDM").best_rate == 0.03
    alone = replace(study, grid=(1e38,))
    assert compare(alone, stream, StudyRunner(alone, cache)).result().pairs[0].kind == "diverged"


def test_segments_grow_and_cover_the_stream() -> None:
    ends = [256 * n for n in range(1, 1201)]
    segments = segment_ends(ends)
    events = [ends[end - 1] for end in segments]
    assert events[0] == 10_240
    assert all(1.2 <= b / a <= 1.8 for a, b in itertools.pairwise(events))
    assert segments[-1] == len(ends)
    assert segment_ends([50, 100]) == [2]


def test_a_grid_is_extended_by_its_own_ratio() -> None:
    assert next_rate((0.001, 0.003), upwards=True) == 0.009
    assert next_rate((0.001, 0.01), upwards=False) == 0.0001
    assert next_rate((0.01,), upwards=True) == 0.03


def test_killing_the_command_ends_its_workers_and_keeps_scores(folder: Path) -> None:
    start = "import cadam.ab.runner as runner\nrunner.MIN_SECONDS_FOR_WORKERS = 0.0\n"
    code = f"{start}import cadam.ab.study as study\nstudy.FIRST_SEGMENT = 200\n"
    code += f"from cadam.cli.main import main\nif __name__ == '__main__': main({ab_command(folder, '--seeds', '20')!r})"
    (folder / "command.py").write_text(code)
    process = subprocess.Popen([sys.executable, str(folder / "command.py")], start_new_session=True)
    deadline = time.monotonic() + 120
    while not list((folder / "runs").rglob("scores.f32")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list((folder / "runs").rglob("scores.f32"))
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("workers are left")


def blocked_signals() -> set[int]:
    """Return the signals that this process blocks."""
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="this system cannot block signals")
def test_workers_are_started_with_interrupts_blocked() -> None:
    """Otherwise an interrupt while they import their modules prints a traceback of each."""
    before = blocked_signals()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with runner.interrupts_blocked():
            future = pool.submit(blocked_signals)
        assert signal.SIGINT in future.result()
    assert blocked_signals() == before
