"""The commands of `cadam`, described without importing what they run.

Importing torch takes seconds, so `cadam --help` and `cadam --version` must not import it. A `Command` therefore names
its functions as text, and they are imported when the command is used. Other packages add commands through the entry
point group `cadam.commands`; `cadam-paper` does.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import resolve_name

ENTRY_POINTS = "cadam.commands"
"""Entry point group of packages that add commands. Each entry names an `AddCommands` function."""


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Example:
        ```python
        Command("export", "Export the model of a run.", "my_package.arguments:add_export", "my_package.export:run")
        ```
    """

    name: str
    """The name that users type, as in `cadam run`."""
    summary: str
    """One sentence for `cadam --help`."""
    arguments: str
    """`MODULE:FUNCTION` of the function that adds the arguments to the command's `ArgumentParser`."""
    implementation: str
    """`MODULE:FUNCTION` of the function that takes the parsed options and returns the exit code."""
    packages: tuple[str, ...] = ()
    """Packages without which the command cannot run."""
    extra: str = "online"
    """The extra that installs these packages."""

    @property
    def advice(self) -> str:
        """The packages to install before the command can run, as advice; empty if it can run."""
        missing = [package for package in self.packages if find_spec(package) is None]
        install = f"in a clone of the project, pip install '.[{self.extra}]'"
        return f"needs {' and '.join(missing)}: {install}" if missing else ""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the arguments of this command to its parser."""
        resolve_name(self.arguments)(parser)

    def run(self, options: Namespace) -> int:
        """Run this command and return its exit code."""
        return int(resolve_name(self.implementation)(options))


AddCommands = Callable[[Callable[[Command], None]], None]
"""A function that passes each of a package's commands to the function it is given."""

COMMANDS = (
    Command(
        "ab",
        "Compare optimizers on your own stream: paired runs, a confidence sequence and a verdict.",
        "cadam.cli.ab_arguments:add_arguments",
        "cadam.cli.ab:run",
        ("matplotlib", "jinja2"),
    ),
    Command(
        "run",
        "Learn from a stream: predict, join the labels, learn and save checkpoints. Resumes by itself.",
        "cadam.cli.arguments:add_run_arguments",
        "cadam.cli.run:run",
        ("safetensors",),
    ),
    Command(
        "schema",
        "Infer the schema of data: what each column is, and why. The schema is written as JSON and can be edited.",
        "cadam.cli.arguments:add_schema_arguments",
        "cadam.cli.schema:run",
    ),
    Command(
        "serve",
        "Serve a model over HTTP that learns from its feedback: predictions, a durable log of events, and snapshots.",
        "cadam.cli.serve_arguments:add_serve_arguments",
        "cadam.cli.serve:run",
        ("starlette", "uvicorn", "httptools", "safetensors", "prometheus_client"),
        "serve",
    ),
    Command(
        "versions",
        "List the versions of a service, or give one a tag.",
        "cadam.cli.serve_arguments:add_versions_arguments",
        "cadam.cli.versions:list_versions",
        ("safetensors",),
    ),
    Command(
        "rollback",
        "Let a service, running or not, continue from an earlier version.",
        "cadam.cli.serve_arguments:add_rollback_arguments",
        "cadam.cli.versions:roll_back",
        ("safetensors",),
    ),
    Command(
        "migrate",
        "Add, drop or resize columns of a saved state, or switch its optimizer. Everything else is kept.",
        "cadam.cli.serve_arguments:add_migrate_arguments",
        "cadam.cli.migrate:run",
        ("safetensors",),
    ),
    Command(
        "export",
        "Export the model of a run's checkpoint with torch.export, its weights as .pt, and its schema.",
        "cadam.cli.arguments:add_export_arguments",
        "cadam.cli.export:run",
        ("safetensors",),
    ),
    Command(
        "apply",
        "Apply a delta of `cadam export --since` to the weights of an export.",
        "cadam.cli.arguments:add_apply_arguments",
        "cadam.cli.export:apply",
        ("safetensors",),
    ),
)

PAPER_COMMANDS = ("list", "reproduce", "report", "archive", "demo", "criteo")
"""Commands that the package cadam-paper adds. Without it, they are missing from `cadam --help`."""


def available_commands(extra: tuple[AddCommands, ...] = ()) -> dict[str, Command]:
    """Collect the commands of cadam and of installed packages, by name.

    Args:
        extra: further functions that add commands, for packages that can be imported but are not installed.

    Returns:
        The commands in the order of `cadam --help`. A package whose entry point fails is left out with a message.
    """
    commands = {command.name: command for command in COMMANDS}

    def add(command: Command) -> None:
        commands[command.name] = command

    for add_commands in extra:
        add_commands(add)
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            entry_point.load()(add)
        except Exception as error:  # an error in another package must not disable the commands of this one
            print(f"cadam: cannot load the commands of {entry_point.value}: {error}", file=sys.stderr)
    return commands
