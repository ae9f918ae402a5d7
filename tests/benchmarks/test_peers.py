"""The benchmark command: its output while it runs, and after an interrupt."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.peers import __main__ as command
from benchmarks.peers.cases import Case, Contender

from cadam.native import loader


def contenders() -> list[Contender]:
    return [Contender("theirs", lambda: None), Contender("ours", lambda: None)]


def test_each_case_is_shown_when_it_is_done_and_kept_when_the_next_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is a pipe, which shows only what is flushed."""
    pipe, path = io.BytesIO(), tmp_path / "results.json"
    seen = ""

    def stopped() -> list[Contender]:
        nonlocal seen
        seen = pipe.getvalue().decode()
        raise KeyboardInterrupt

    def cases(device: str, quick: bool) -> Iterator[Case]:
        for name, make in (("the first", contenders), ("the second", stopped), ("the third", contenders)):
            yield Case(name, "theirs", make, rounds=2)

    monkeypatch.setattr(command, "SUITES", {"made up": cases})
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, write_through=False))
    assert command.main(["--device", "cpu", "--json", str(path)]) == 130
    assert [line.split()[0] for line in seen.splitlines()[-2:]] == ["theirs", "ours"]
    assert "the first" in seen
    assert {result["case"] for result in json.loads(path.read_text())["results"]} == {"the first"}
    err = capsys.readouterr().err.splitlines()
    assert [line.partition(", ")[0] for line in err[:2]] == ["case 1 of 3", "case 2 of 3"]
    assert err[1].endswith("s so far: the second")
    assert err[2:] == ["interrupted: 1 of 3 cases were measured"]


def test_without_c_kernels_the_limit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise loader.UnavailableError("there are none")

    def cases(device: str, quick: bool) -> Iterator[Case]:
        yield Case("a case", "theirs", contenders, elements=10, rounds=2)

    monkeypatch.setattr(loader, "package_library", missing)
    monkeypatch.setattr(command, "SUITES", {"dense": cases})
    assert command.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "the speed limit is left out, because it is measured with the C kernels: there are none" in out
    assert "ours" in out
