"""Whatever happens to process, server or disk: no event is lost, none counts twice, no checkpoint is half."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from online_process import COUNT, records
from online_redis import Server
from online_streams import Replayed, build, events, files, learner, weights

from cadam.online import checkpoint
from cadam.online.log import LABEL, PredictionLog


def parquet_stream(folder: Path) -> str:
    folder.mkdir()
    rows = records()
    for number, start in enumerate(range(0, len(rows), 700)):
        part = rows[start : start + 700]
        columns = {name: [row.get(name) for row in part] for name in rows[0]}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")
    return str(folder)


def redis_stream(server: Server) -> str:
    pipe = server.client.pipeline(transaction=False)
    for row in records():
        pipe.xadd("clicks", {name: repr(value) for name, value in row.items()})
    pipe.execute()
    return server.url


@pytest.mark.parametrize("kind", ["parquet", "redis"])
@pytest.mark.parametrize("kills", [pytest.param(3, id="3"), pytest.param(50, id="50", marks=pytest.mark.slow)])
def test_killed_at_random_moments_everything_is_as_if_it_had_not_been(kind: str, kills: int, tmp_path: Path) -> None:
    server = Server(tmp_path) if kind == "redis" else None
    try:
        place = parquet_stream(tmp_path / "data") if server is None else redis_stream(server)
        script = Path(__file__).with_name("online_process.py")
        result = subprocess.run(
            [sys.executable, script, kind, place, str(tmp_path / "runs"), str(kills)],
            capture_output=True,
            text=True,
            timeout=900,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert result.returncode == 0, result.stderr
    finally:
        if server is not None:
            server.stop()
    whole, *killed = map(json.loads, result.stdout.splitlines())
    assert whole.pop("kills") == 0
    assert sum(run.pop("kills") for run in killed) >= kills
    for run in killed:
        assert run == whole
    assert int(whole["metrics"]["events"]) + int(whole["metrics"]["rejected"]) == COUNT
    assert int(whole["metrics"]["repeated_labels"]) > 0 < int(whole["metrics"]["expired"])
    assert int(whole["metrics"]["rejected"]) > 0
    assert len(whole["log"]) > 4


class Full:
    """A stream during which the disk is full for a while: no file may grow beyond some bytes."""

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
    def run(name: str, source: object) -> object:
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
    assert "learning goes on without" in caplog.text
    assert full.saving.failed == 5
    assert weights(well) == weights(full)
    assert well.metrics() == full.metrics()
    assert files(tmp_path / "well-log") == files(tmp_path / "full-log")
    left = [p for p in (tmp_path / "full").iterdir() if p.name not in (".lock", "rejected.jsonl")]
    assert len(left) == 3
    for path in left:
        checkpoint.read(path)


def test_rows_of_a_log_that_cannot_be_written_are_held_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = PredictionLog(tmp_path, rows=10, most=25)

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log, "_write", full)
        for start in range(0, 60, 6):
            columns = {name: np.arange(start, start + 6) for name in ("id", "time", "score")}
            log.add({**columns, "label": np.zeros(6)}, LABEL)
    assert log.lost == 35
    assert sum(len(part["score"]) for part in log.parts_waiting) == log.waiting == 25
    assert "35 rows of the prediction log are lost so far" in caplog.text
    log.flush()
    found = [pq.read_table(path)["id"].to_pylist() for path in sorted(tmp_path.glob("part-*"))]
    assert [i for part in found for i in part] == list(range(35, 60))


def test_a_process_that_ends_while_the_disk_is_full_goes_on_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    whole = learner(build(), checkpoint=tmp_path / "whole", checkpoint_every=100)
    whole.run(Replayed([events(20, seed=n, first=20 * n) for n in range(60)]))
    cut = learner(build(), checkpoint=tmp_path / "cut", checkpoint_every=100)
    cut.run(Full(20, 60, 100), events=700)
    assert cut.saving.failed > 0
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
    assert ours.reject_file.lost == 1
    assert "only counted" in caplog.text
    assert len([json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]) == 2
