"""After a kill, a server failure or a full disk, no event is lost or counted twice, and no checkpoint is partial."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cadam import checkpoint_files
from cadam.online import Learner
from cadam.online.labels.join import Outcome
from cadam.online.persistence import checkpoints
from cadam.online.persistence.prediction_log import PredictionLog
from tests.online.learner_process import COUNT, records
from tests.online.redis_server import Server
from tests.online.streams import Replayed, build, events, files, learner, table, weights
from tests.optim.exact import present

SMALL_STATE = {"moments": "int8", "second_moment": "row", "row_steps": True}
LIMITED_IDS = {"user": "id:max=30,admit=2,expire=60s"}


def parquet_stream(folder: Path, rows: list[dict[str, Any]]) -> str:
    folder.mkdir()
    for number, start in enumerate(range(0, len(rows), 700)):
        part = rows[start : start + 700]
        columns = {name: [row.get(name) for row in part] for name in rows[0]}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")
    return str(folder)


def run_and_kill(kind: str, place: str, folder: Path, kills: int, variables: Mapping[str, str]) -> dict[str, Any]:
    """Run a learner with and without kills, check that the results are equal, and return them."""
    script = Path(__file__).parents[1] / "learner_process.py"
    result = subprocess.run(
        [sys.executable, script, kind, place, str(folder), str(kills)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    assert result.returncode == 0, result.stderr
    whole, *killed = map(json.loads, result.stdout.splitlines())
    assert whole.pop("kills") == 0
    assert sum(run.pop("kills") for run in killed) >= kills
    for run in killed:
        assert run == whole
    return dict(whole)


def redis_stream(server: Server) -> str:
    pipe = server.client.pipeline(transaction=False)
    for row in records():
        pipe.xadd("clicks", {name: repr(value) for name, value in row.items()})
    pipe.execute()
    return server.url


@pytest.mark.parametrize(
    ("kind", "model", "storage", "kinds", "is_tuned"),
    [
        ("parquet", "", {}, {}, False),
        ("redis", "", {}, {}, False),
        pytest.param("parquet", "deepfm", {}, {}, False, marks=pytest.mark.slow),
        pytest.param("parquet", "deepfm", {}, {}, True, marks=pytest.mark.slow),
        pytest.param("parquet", "deepfm", SMALL_STATE, {}, False, marks=pytest.mark.slow),
        pytest.param("parquet", "deepfm", {"moments": "int8"}, {}, False, marks=pytest.mark.slow),
        pytest.param("parquet", "deepfm", {}, LIMITED_IDS, False, marks=pytest.mark.slow),
        ("parquet", "deepfm", SMALL_STATE, LIMITED_IDS, True),  # everything of the slow variants at once
    ],
)
@pytest.mark.parametrize("kills", [pytest.param(3, id="3"), pytest.param(50, id="50", marks=pytest.mark.slow)])
def test_a_job_killed_at_random_moments_ends_with_the_same_bits(
    kind: str,
    model: str,
    storage: dict[str, Any],
    kinds: dict[str, str],
    is_tuned: bool,
    kills: int,
    tmp_path: Path,
) -> None:
    server = Server(tmp_path) if kind == "redis" else None
    try:
        place = parquet_stream(tmp_path / "data", records()) if server is None else redis_stream(server)
        variables = {
            "ONLINE_MODEL": model,
            "ONLINE_STORAGE": json.dumps(storage),
            "ONLINE_KINDS": json.dumps(kinds),
            "ONLINE_TUNED": str(int(is_tuned)),
        }
        whole = run_and_kill(kind, place, tmp_path / "runs", kills, variables)
    finally:
        if server is not None:
            server.stop()
    assert int(whole["metrics"]["events"]) + int(whole["metrics"]["rejected"]) == COUNT
    assert int(whole["metrics"]["repeated_labels"]) > 0 < int(whole["metrics"]["expired"])
    assert int(whole["metrics"]["rejected"]) > 0
    assert len(whole["log"]) > 4
    assert (len(whole["candidates"]) > 0) == is_tuned
    assert int(whole["metrics"].get("learning_rate_switches", 0)) > 0 or not is_tuned
    for name in kinds:
        assert all(int(whole["metrics"][f"id_{count}/{name}"]) for count in ("rows", "admitted", "evicted", "expired"))


@pytest.mark.parametrize(
    "grows", [pytest.param(False, id="fixed", marks=pytest.mark.slow), pytest.param(True, id="growing")]
)
@pytest.mark.parametrize("kills", [pytest.param(3, id="3"), pytest.param(50, id="50", marks=pytest.mark.slow)])
def test_a_fused_training_step_killed_at_random_moments_ends_with_the_same_bits(
    kills: int, grows: bool, tmp_path: Path
) -> None:
    """All labels come with their events, so that the scores are those of the training step.

    With growing batches, the first of them are learned by two passes, because they set the bias of the model.
    """
    columns = {name: values.tolist() for name, values in table(COUNT, seed=2).items()}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    place = parquet_stream(tmp_path / "data", rows)
    variables = {"ONLINE_MODEL": "deepfm", "ONLINE_GROWTH": str(int(grows))}
    whole = run_and_kill("labeled", place, tmp_path / "runs", kills, variables)
    assert int(whole["metrics"]["learned"]) == COUNT
    assert (int(whole["metrics"]["steps"]) > 2 * COUNT // 16) == grows


class Full:
    """Learn a stream during which the disk is full for a while: files may not grow beyond a number of bytes."""

    def __init__(self, first: int, last: int, bytes_left: int) -> None:
        self.stream = Replayed([events(20, seed=n, first=20 * n) for n in range(60)])
        self.first, self.last, self.bytes_left = first, last, bytes_left

    def __iter__(self):  # type: ignore[no-untyped-def]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            for number, batch in enumerate(self.stream):
                full = self.first <= number < self.last
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.bytes_left if full else before[0], before[1]))
                yield batch
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def state_dict(self):  # type: ignore[no-untyped-def]
        return self.stream.state_dict()

    def load_state_dict(self, state):  # type: ignore[no-untyped-def]
        self.stream.load_state_dict(state)


@pytest.mark.parametrize("bytes_left", [0, 100, 2000])
def test_a_full_disk_at_a_checkpoint(bytes_left: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(name: str, source: Any) -> Learner:
        ours = learner(
            build(), checkpoint=tmp_path / name, checkpoint_every=100, log=tmp_path / f"{name}-log", log_rows=70
        )
        seen = []
        ours.reports = [lambda _: seen.append(len(list((tmp_path / name).glob("checkpoint-*"))))]
        ours.run(source)
        ours.close()
        return ours

    well = run("well", Replayed([events(20, seed=n, first=20 * n) for n in range(60)]))
    with caplog.at_level(logging.ERROR):
        full = run("full", Full(20, 45, bytes_left))
    assert "learning continues" in caplog.text
    assert present(full.schedule).failures == 5
    assert weights(well) == weights(full)
    assert well.metrics() == full.metrics()
    assert files(tmp_path / "well-log") == files(tmp_path / "full-log")
    left = [p for p in (tmp_path / "full").iterdir() if p.name not in (".lock", "rejected.jsonl")]
    assert len(left) == 3
    for path in left:
        checkpoint_files.read_tree(path)


def test_log_rows_that_cannot_be_written_are_buffered_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = PredictionLog(tmp_path, rows=10, max_buffered=25)

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log, "_write", full)
        for start in range(0, 60, 6):
            columns = {name: np.arange(start, start + 6) for name in ("id", "time", "score")}
            log.add({**columns, "label": np.zeros(6)}, np.full(6, Outcome.LABELED, np.int8))
    assert log.lost_rows == 35
    assert sum(len(part["score"]) for part in log.buffer) == log.buffered_rows == 25
    assert len(caplog.records) == 1  # it was tried once, and the next attempt is due after a minute
    assert log.unwritten_rows == 25
    log.flush()
    assert log.unwritten_rows == 0
    assert caplog.messages[1:] == ["35 rows of the prediction log are lost because the disk was full"]
    found = [pq.read_table(path)["id"].to_pylist() for path in sorted(tmp_path.glob("part-*"))]
    assert [i for part in found for i in part] == list(range(35, 60))


def test_a_log_on_a_full_disk_is_retried_once_a_minute_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = [events(20, seed=n, first=20 * n) for n in range(60)]
    whole = learner(checkpoint=tmp_path / "whole", log=tmp_path / "whole-log", log_rows=70)
    whole.run(Replayed(stream))
    tried, now = [], [1000.0]

    def full(*_: object) -> None:
        tried.append(now[0])
        raise OSError(28, "No space left on device")

    cut = learner(checkpoint=tmp_path / "cut", log=tmp_path / "cut-log", log_rows=70)
    cut.reports = [lambda _: now.__setitem__(0, now[0] + 2.5)]  # 60 batches take two and a half minutes
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(PredictionLog, "_write", full)
        patch.setattr(time, "monotonic", lambda: now[0])
        cut.run(Replayed(stream), events=1200)
    assert len(tried) == 4  # at once, after one minute and after two, and at the end
    assert len(caplog.records) == 4
    assert present(cut.log).unwritten_rows == 1200
    cut.close()
    again = learner(checkpoint=tmp_path / "cut", log=tmp_path / "cut-log", log_rows=70)
    again.run(Replayed(stream))
    assert present(again.log).unwritten_rows == 0
    assert files(tmp_path / "cut-log") == files(tmp_path / "whole-log")


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """Temporary files of safetensors and of checkpoints are deleted, and no others."""
    left = [".tmpAb3dEf", ".tmp000000", ".checkpoint-000000000003.safetensors.new"]
    others = [".tmp", ".tmpAb3dEfg", "tmpAb3dEf", "notes.txt"]
    for name in (*left, *others):
        (tmp_path / name).write_bytes(b"x")
    ours = learner(checkpoint=tmp_path)
    ours.close()
    assert {path.name for path in tmp_path.iterdir()} == {*others, ".lock", "rejected.jsonl"}


def test_temporary_files_of_safetensors_match_the_removed_names(tmp_path: Path) -> None:
    """The next start deletes whatever a process leaves that was killed while it wrote."""
    found: set[str] = set()
    for attempt in range(40):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    checkpoint_files.write_tree(
                        tmp_path / "checkpoint-000000000001.safetensors", {"a": torch.zeros(2_000_000)}
                    )
            finally:
                os._exit(1)
        time.sleep(0.02 + 0.003 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found |= {path.name for path in tmp_path.iterdir()} - {"checkpoint-000000000001.safetensors"}
        if found:
            break
    assert all(checkpoints.TEMPORARY_FILE.fullmatch(name) for name in found)
    checkpoints.Checkpoints(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} <= {"checkpoint-000000000001.safetensors", ".lock"}


def test_a_truncated_file_of_the_log_is_detected(tmp_path: Path) -> None:
    def ours() -> Learner:
        return learner(checkpoint=tmp_path / "state", log=tmp_path / "log", log_rows=30)

    first = ours()
    first.run(Replayed([events(20, seed=n, first=20 * n) for n in range(5)]))
    first.close()
    part = tmp_path / "log" / "part-00000001.parquet"
    part.write_bytes(part.read_bytes()[:-10])
    second = ours()
    with pytest.raises(ValueError, match=r"part-00000001\.parquet, .* is cut short"):
        second.resume()
    second.close()


def test_old_files_of_the_log_may_be_removed_but_not_one_in_the_middle(tmp_path: Path) -> None:
    stream = [events(20, seed=n, first=20 * n) for n in range(20)]

    def run(name: str, upto: int) -> None:
        ours = learner(checkpoint=tmp_path / name, log=tmp_path / f"{name}-log", log_rows=30)
        try:
            ours.run(Replayed(stream), events=upto)
        finally:
            ours.close()

    run("whole", 400)
    run("cut", 200)
    log = tmp_path / "cut-log"
    for number in (0, 1, 2):  # there are six files
        (log / f"part-{number:08d}.parquet").unlink()
    run("cut", 300)
    run("cut", 400)
    whole = files(tmp_path / "whole-log")
    assert files(log) == {name: found for name, found in whole.items() if name > "part-00000003"}
    (log / "part-00000007.parquet").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=r"lacks part-00000007\.parquet"):
        run("cut", 500)
    (tmp_path / "away").rename(log / "part-00000007.parquet")
    for path in log.iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"must stay"):
        run("cut", 500)


def test_a_process_that_ends_while_the_disk_is_full_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    whole = learner(build(), checkpoint=tmp_path / "whole", checkpoint_every=100)
    whole.run(Replayed([events(20, seed=n, first=20 * n) for n in range(60)]))
    cut = learner(build(), checkpoint=tmp_path / "cut", checkpoint_every=100)
    cut.run(Full(20, 60, 100), events=700)
    assert present(cut.schedule).failures > 0
    cut.close()
    again = learner(build(), checkpoint=tmp_path / "cut", checkpoint_every=100)
    again.run(Replayed([events(20, seed=n, first=20 * n) for n in range(60)]))
    assert weights(whole) == weights(again)
    assert whole.metrics() == again.metrics()


def test_the_rejected_file_survives_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = learner(rejected=tmp_path / "rejected.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def one_bad(first: int) -> None:
        batch = events(20, first=first)
        batch.features["item"][7] = 10**6
        ours.learn(batch)

    one_bad(0)
    size = (tmp_path / "rejected.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        one_bad(20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    one_bad(40)
    assert ours.metrics()["rejected"] == 3
    assert present(ours.reject_file).lost == 1
    assert "only counted" in caplog.text
    assert len([json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]) == 2
