"""The command line: the list of commands, and the imports that it needs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import cadam
from cadam.cli import arguments, commands, main
from cadam.online import models

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
    """Functions are named as text, which is resolved when a command is used, so a wrong one is noticed late."""
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
    assert {"ab", "run", "schema", "export"} <= first_words
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


def test_models_in_the_help_are_those_of_the_implementation() -> None:
    """The arguments are defined in other modules than the implementation, so that the help imports little."""
    assert tuple(models.MODELS) == arguments.MODEL_NAMES


# Output and signals ----------------------------------------------------------------------------------------------


CLICKS = "user,label\n" + "".join(f"é{number % 7},{number % 2}\n" for number in range(2000))
"""Events with a user whose name is not ASCII."""


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def start(*words: object, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cadam", *map(str, words)]
    options = {"env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, **options)


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("schema", "clicks.csv", "--label", "label"),
        ("run", "clicks.csv", "--label", "label"),
        ("ab", "clicks.csv", "--label", "label", "--user", "user"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_ends_with_141_if_nobody_reads_its_output(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text(CLICKS, encoding="utf-8")
    with start(*words, cwd=tmp_path) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 141, errors
    assert "Error" not in errors


def test_characters_that_the_console_does_not_have_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "clické.csv").write_text(CLICKS.replace("user", "usér"), encoding="utf-8")
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    with start("run", "clické.csv", "--label", "label", cwd=tmp_path, env=environment) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    assert b"us\\xe9r" in output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is missing")
def test_output_that_cannot_be_written_is_a_failure_in_one_line() -> None:
    with Path("/dev/full").open("w") as full, start("--help", stdout=full) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    (line,) = errors.decode().splitlines()
    assert "standard output" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is missing")
def test_output_that_exceeds_the_buffer_and_cannot_be_written_is_a_failure_without_traceback() -> None:
    """The output is longer than the buffer, so the write fails inside the command and not in the last flush."""
    code = "import sys; from cadam.cli import main; main._run_command = lambda *_: print(100_000 * '.')"
    words = [sys.executable, "-c", f"{code}; sys.exit(main.main([]))"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("cadam: output cannot be written: ")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="/dev/stdout is missing")
def test_a_device_as_the_output_of_schema_is_written_but_not_read(tmp_path: Path) -> None:
    """Reading the pipe would block because this process is its writer, and reading /dev/full would never end."""
    (tmp_path / "clicks.csv").write_text(CLICKS, encoding="utf-8")
    with start("schema", "clicks.csv", "--label", "label", "--output", "/dev/stdout", cwd=tmp_path) as process:
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert b'"features"' in output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is missing")
def test_a_run_on_a_full_disk_learns_and_reports_the_lost_output(tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text(CLICKS, encoding="utf-8")
    words = ("run", "clicks.csv", "--label", "label")
    with Path("/dev/full").open("w") as full, start(*words, stdout=full, cwd=tmp_path) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert b"the stream has ended at 2,000 events" in errors
    assert b"standard output cannot be written" in errors
    assert list((tmp_path / "runs" / "clicks").glob("checkpoint-*"))


def test_a_closed_standard_output_does_not_end_a_run(tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text(CLICKS, encoding="utf-8")
    command = f"{shlex.quote(sys.executable)} -m cadam run clicks.csv --label label >&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert "the stream has ended at 2,000 events" in done.stderr


@pytest.mark.parametrize("moment", ["cadam.online.run_config.infer_schema", "cadam.online.models.build"])
def test_sigterm_during_startup_ends_the_run_and_leaves_no_file(moment: str, tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text(CLICKS, encoding="utf-8")
    program = (
        "import os, signal, sys\n"
        "from pkgutil import resolve_name\n"
        "from cadam.cli.main import main\n"
        f"module, name = resolve_name({moment.rpartition('.')[0]!r}), {moment.rpartition('.')[2]!r}\n"
        "function = getattr(module, name)\n"
        "def terminated(*arguments, **options):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return function(*arguments, **options)\n"
        "setattr(module, name, terminated)\n"
        "sys.exit(main(['run', 'clicks.csv', '--label', 'label', '--quiet']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 143
    assert done.stderr == "cadam run: interrupted before anything was done\n"
    assert [path.name for path in tmp_path.iterdir()] == ["clicks.csv"]


def test_a_command_whose_packages_are_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as if the package were not installed
    with pytest.raises(SystemExit):
        main.main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "run (needs safetensors:" in words
    assert "schema Infer" in words
    assert main.main(["run", "no-such-file.csv", "--label", "click"]) == 5
    error = capsys.readouterr().err
    assert "cadam run:" in error
    assert ".[online]" in error
