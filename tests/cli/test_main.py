"""The command line itself: which commands there are, and what it costs to list them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pkgutil import resolve_name

import pytest

import cadam
from cadam.cli import arguments, bench_cases, commands, main
from cadam.online import models
from cadam.online.data.sources import registry
from cadam.online.metrics.registry import METRICS

HEAVY = ("torch", "numpy", "pyarrow", "matplotlib", "pandas")


@pytest.mark.parametrize(
    "words",
    [("--version",), ("--help",), *((command.name, "--help") for command in commands.COMMANDS)],
    ids=" ".join,
)
def test_version_and_help_import_no_heavy_package(words: tuple[str, ...]) -> None:
    program = (
        "import json, sys\n"
        "from cadam.cli.main import main\n"
        "try:\n"
        f"    main({list(words)!r})\n"
        "except SystemExit as end:\n"
        f"    print(json.dumps([end.code, [name for name in {HEAVY!r} if name in sys.modules]]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"cadam {cadam.__version__}\n"


def test_every_command_can_be_parsed_and_run() -> None:
    """The texts that name functions are resolved only when a command is used, so a wrong one is not noticed before."""
    for command in commands.COMMANDS:
        command.add_arguments(argparse.ArgumentParser())
        assert callable(resolve_name(command.implementation))


def test_help_lists_only_commands_that_are_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda group: [])
    with pytest.raises(SystemExit):
        main.main(["--help"])
    first_words = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {"ab", "run", "schema", "export", "bench"} <= first_words
    assert not first_words & set(commands.PAPER_COMMANDS)


@pytest.mark.parametrize("words", [("list",), ("reproduce", "all", "--quick")], ids=" ".join)
def test_a_command_of_the_paper_without_the_paper_says_what_to_install(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda group: [])
    assert main.main(list(words)) == 5
    error = capsys.readouterr().err
    assert f"cadam {words[0]}:" in error
    assert "pip install ./paper" in error


def test_a_broken_command_of_another_package_leaves_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        value = "no_such_module:add"

        def load(self) -> None:
            raise ModuleNotFoundError("No module named 'no_such_module'")

    monkeypatch.setattr(commands, "entry_points", lambda group: [Broken()])
    with pytest.raises(SystemExit) as ended:
        main.main(["run", "--help"])
    assert ended.value.code == 0
    assert "no_such_module" in capsys.readouterr().err


def test_names_in_the_help_are_those_of_the_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    """The arguments are defined apart from the implementation, to keep the help light."""
    assert tuple(models.MODELS) == arguments.MODEL_NAMES
    assert tuple(METRICS) == arguments.METRIC_NAMES
    assert tuple(bench_cases.SUITES) == arguments.BENCHMARK_SUITES
    with pytest.raises(SystemExit):
        main.main(["run", "--help"])
    text = capsys.readouterr().out
    assert [scheme for scheme in registry.schemes() if f"{scheme}:" not in text] == []
