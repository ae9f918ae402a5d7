"""The commands of the guide "Your data" run in order on the file that the guide writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cadam.cli import main
from tests.documented import blocks

PATH = Path(__file__).parents[3] / "docs" / "your_data.md"
PAGE = PATH.read_text()
COMMANDS = [
    line
    for block in blocks(PATH)
    if block.language == "sh"
    for line in block.code.replace("\\\n", " ").splitlines()
    if line
]


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param([c for c in COMMANDS if not c.startswith("cadam ab")], id="run"),
        pytest.param([c for c in COMMANDS if c.startswith("cadam ab")], id="ab", marks=pytest.mark.slow),
    ],
)
def test_the_commands_of_the_guide_run(
    commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(next(block.code for block in blocks(PATH) if block.language == "python"), {})
    assert commands
    for line in commands:
        assert main.main(shlex.split(line, comments=True)[1:]) == 0, line
        output = capsys.readouterr()
        assert "rejected (" not in output.err
        assert "no better than a constant" not in output.err
        assert "better than chance" not in output.out
        if line.startswith("cadam schema"):
            (table,) = re.findall(r"```text\n(clicks\.csv: CSV.*?)```", PAGE, re.DOTALL)
            shown = " ".join(table.split())
            assert shown in " ".join(output.out.split())
