"""Text from data is escaped wherever it is shown, and printed commands can be pasted into a shell."""

from __future__ import annotations

import doctest
import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cadam import printable as module
from cadam.ab.report.console import wrap
from cadam.ab.report.page import template_environment
from cadam.cli import main
from cadam.cli.exit_codes import FAILED
from cadam.online import Rejected, Schema
from cadam.online.monitoring import prometheus_metrics
from cadam.online.monitoring.rejection_reasons import suggest_fix
from cadam.printable import printable, shell_word
from tests.online.streams import events, learner

HOSTILE = "price\x1b[2J\x9b1m\r\u202eA\nforged line"


def is_clean(text: str) -> bool:
    return all(line == printable(line) for line in text.split("\n")) and "\nforged" not in text


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_examples_are_correct() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("text", ["it's", HOSTILE, "back\\slash'\n", "ü 中", "\udcff", ""])
def test_a_shell_reads_a_quoted_word_as_it_was(text: str) -> None:
    word = shell_word(text)
    assert is_clean(word)
    answer = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert answer == text.encode("utf-8", "surrogateescape")


def test_columns_with_control_characters_are_escaped_on_the_console_and_in_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cadam.online")
    rows = [{HOSTILE: (row * 37 % 101) / 8, "item": row % 9, "click": row % 3 // 2} for row in range(600)]
    data = write(tmp_path / "a\x1b[31m.jsonl", rows)
    for command in (["schema", "--output", str(tmp_path / "s.json")], ["run", "--checkpoint", str(tmp_path / "runs")]):
        assert main.main([command[0], str(data), "--label", "click", *command[1:]]) == 0
    write(data, [*rows, *({**row, HOSTILE: "\x1b[2J"} for row in rows)])
    main.main(["run", str(data), "--schema", str(tmp_path / "s.json"), "--checkpoint", str(tmp_path / "other")])
    console = capsys.readouterr()
    assert "forged line" in console.out
    assert "forged line" in console.err
    assert is_clean(console.out)
    assert is_clean(console.err)
    assert caplog.messages
    assert all(message == printable(message) for message in caplog.messages)
    assert any("forged line" in message for message in caplog.messages)


def test_reasons_of_rejected_events_are_escaped_also_as_labels_of_metrics() -> None:
    rejected = Rejected(f"{HOSTILE}: 3 is not text", "a\x1b.csv", "\x1b", 1)
    assert rejected.reason == printable(rejected.reason)
    assert rejected.where == "a\\x1b.csv"
    assert rejected.event == "\x1b"  # the reject file has the record as it was; JSON escapes it
    ours = learner()
    ours.learn(events(4))
    ours.rejections.add([rejected])
    ours.missing_columns[f"{HOSTILE} 2"] = 1
    text = prometheus_metrics.to_text(prometheus_metrics.families(ours))
    assert "forged line: " in text
    assert "forged line 2" in text
    assert is_clean(text)


def test_names_are_escaped_in_the_report_of_a_comparison() -> None:
    page = (
        template_environment("cadam.ab.report")
        .from_string("<p>{{ name }}</p>{{ figure | safe }}")
        .render(name=HOSTILE, figure="<svg>\n")
    )
    assert "\x1b" not in page
    assert page.endswith("<svg>\n") or page.endswith("<svg>")
    assert is_clean("\n".join(wrap("  ", f"with a change of {HOSTILE}")))


@pytest.mark.parametrize("value", ["it's; rm -rf ~", "$(id)", "a b"])
def test_the_suggested_label_is_quoted_for_the_shell(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"price": row, "out come": (value, "p", "q", "q", "p")[row % 5]} for row in range(60)]
    assert main.main(["schema", str(write(tmp_path / "a.jsonl", rows)), "--label", "out come"]) == 2
    hint = capsys.readouterr().err.partition("as in --label ")[2].strip()
    answer = subprocess.run(["bash", "-c", f"printf %s {hint}"], capture_output=True, check=True, text=True).stdout
    assert answer == f"out come=={value}"


def test_suggestions_for_rejected_events_are_quoted_for_the_shell() -> None:
    schema = Schema({"a b": "number", "c": "number"}, label="click", time="it's")
    assert f"--ignore {shell_word('a b')}" in suggest_fix({"missing field 'a b'": 1}, schema)
    reason = "it's: text 'x' is not a time of the format iso"
    word = shell_word("it's:%d/%m/%Y %H:%M")
    assert f"--time {word}" in suggest_fix({reason: 1}, schema)


def test_a_schema_that_cannot_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "a.jsonl", [{"price": row, "click": row % 2} for row in range(50)])

    def full(path: Path, content: bytes, temporary: str | None = None) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cadam.online.data.schema.replace_file", full)
    output = tmp_path / "schema.json"
    assert main.main(["schema", str(data), "--label", "click", "--output", str(output)]) == FAILED
    assert f"cadam schema: {output} cannot be written" in capsys.readouterr().err
