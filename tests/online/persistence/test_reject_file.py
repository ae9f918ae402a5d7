"""The file of rejected events: its content, a file that is rotated or shared, a device, and a disk that is full."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadam.cli.exit_codes import FAILED
from cadam.online import Rejected, Schema
from cadam.online.data.sources.records import Message, convert_messages
from cadam.online.persistence.reject_file import RejectFile
from tests.cli.test_run import HERE, run
from tests.online.data.test_sources import write_jsonl
from tests.online.streams import events, learner, table


def bad_table(count: int, bad: int) -> dict[str, Any]:
    """Events of which the last `bad` have an item that does not exist."""
    columns = table(count)
    columns["item"] = np.where(np.arange(count) >= count - bad, 10**6, columns["item"])
    return columns


@pytest.mark.parametrize("change", ["delete", "rotate", "cut"])
def test_a_run_resumes_after_its_reject_file_was_deleted_or_rotated(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", bad_table(300, 9))
    options: tuple[object, ...] = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state")
    options = (*options, "--batch-size", 50, "--quiet", "--max-rejected", 1)
    assert run(*options) == 0
    path = tmp_path / "state" / "rejected.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 9
    if change == "rotate":
        path.rename(tmp_path / "rejected.jsonl.1")
    elif change == "delete":
        path.unlink()
    else:
        path.write_text(lines[0] + "\n")
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    assert run(*options) == 0
    assert str(path) in caplog.text
    assert "rotated" in caplog.text
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == (10 if change == "cut" else 9)


def test_events_that_the_reject_file_could_not_take_are_a_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", bad_table(300, 9))
    options: tuple[object, ...] = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", tmp_path / "state")
    options = (*options, "--batch-size", 50, "--max-rejected", 1)
    with monkeypatch.context() as patch:
        patch.setattr(RejectFile, "add", _add_to_full_disk)
        assert run(*options) == FAILED
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert "9 of 9 rejected events could not be written" in last_line
    assert str(tmp_path / "state" / "rejected.jsonl") in last_line
    write_jsonl(tmp_path / "b.jsonl", table(300, seed=3))
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write((tmp_path / "b.jsonl").read_text())
    assert run(*options) == 0  # nothing was lost in this run


def _add_to_full_disk(self: RejectFile, rejected: list[Rejected]) -> None:
    """Raise the error that `RejectFile.add` gets if the disk is full."""
    self.count += len(rejected)
    self.lost += len(rejected)


@pytest.mark.parametrize("value", [b"cheap", "ü\x1b".encode(), b"\xff"])
def test_a_rejected_event_of_redis_is_written_as_json(value: bytes) -> None:
    schema = Schema({"price": "number"}, label="click")
    message = Message("entry 1-0", fields={b"price": value, b"click": b"1"})
    (rejected,) = convert_messages([message], schema, 1000).rejected
    assert json.loads(rejected.event) == {"price": value.decode(errors="replace"), "click": "1"}


def test_an_event_that_the_model_refuses_is_written_as_json(tmp_path: Path) -> None:
    ours = learner(rejected=tmp_path / "rejected.jsonl")
    batch = events(20)
    batch.features["item"][7] = 10**6
    ours.learn(batch)
    ours.close()
    (line,) = (tmp_path / "rejected.jsonl").read_text().splitlines()
    assert json.loads(json.loads(line)["event"])["item"] == 10**6


def rejected(*names: str) -> list[Rejected]:
    return [Rejected("bad", name, "{}", 2) for name in names]


def positions(path: Path) -> list[str]:
    return [json.loads(line)["where"] for line in path.read_text().splitlines()]


def restarted(path: Path, state: dict[str, Any]) -> RejectFile:
    file = RejectFile(path)
    file.load_state_dict(state)
    return file


def test_learners_that_share_a_reject_file_keep_the_lines_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    one, other = RejectFile(path), RejectFile(path)
    one.add(rejected("one 1"))
    state, other_state = one.state_dict(), other.state_dict()
    one.add(rejected("one 2"))
    other.add(rejected("other 1", "other 2"))
    one.add(rejected("one 3"))
    resumed, other_resumed = restarted(path, state), restarted(path, other_state)
    resumed.add(rejected("one 2", "one 3", "one 4"))
    other_resumed.add(rejected("other 1", "other 2", "other 3"))
    assert positions(path) == ["one 1", "one 2", "other 1", "other 2", "one 3", "one 4", "other 3"]


def test_a_second_crash_before_all_events_are_rejected_again_repeats_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rejected.jsonl"
    file = RejectFile(path)
    state = file.state_dict()
    file.add(rejected("1", "2", "3", "4"))
    file = restarted(path, state)
    file.add(rejected("1", "2"))
    state = file.state_dict()
    file = restarted(path, state)
    file.add(rejected("3"))
    file.add(rejected("4", "5"))
    assert positions(path) == ["1", "2", "3", "4", "5"]


def test_a_line_that_was_written_in_part_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "rejected.jsonl"
    file = RejectFile(path)
    state = file.state_dict()
    file.add(rejected("1", "2"))
    path.write_bytes(path.read_bytes()[:-7])
    restarted(path, state).add(rejected("1", "2"))
    assert positions(path) == ["1", "2"]


def test_another_file_in_place_of_the_reject_file_is_not_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rejected.jsonl"
    file = RejectFile(path)
    file.add(rejected("1"))
    state = file.state_dict()
    foreign = "x" * 200 + "\nlast"
    path.write_text(foreign)
    restarted(path, state).add(rejected("2"))
    assert path.read_text().startswith(foreign + "\n{")
    assert "not the file of the checkpoint" in caplog.text


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_a_device_takes_rejected_events_and_is_neither_synced_nor_cut(device: str) -> None:
    file = RejectFile(device)
    file.add(rejected("1"))
    state = file.state_dict()
    assert state == {"count": 1, "size": 0, "lost": int(device == "/dev/full")}
    assert restarted(Path(device), state).count == 1


def test_a_pipe_takes_rejected_events(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    file = RejectFile(tmp_path / "pipe")
    file.add(rejected("1"))
    restarted(tmp_path / "pipe", file.state_dict()).add(rejected("2"))
    assert len(os.read(reader, 1000).splitlines()) == 2
    os.close(reader)
