"""The commands that cadam-paper adds to `cadam`.

This module is imported for every `cadam --help`, so it names the implementations as text instead of importing them.
"""

from __future__ import annotations

from collections.abc import Callable

from cadam.cli.commands import Command

_EXPERIMENTS = "cadam_paper.experiment_commands"
_DEMO = "cadam_paper.demo"
_CRITEO = "cadam_paper.ctr.command"

COMMANDS = (
    Command(
        "list",
        "List every figure and table: what it shows, needs and costs.",
        f"{_EXPERIMENTS}:add_list_arguments",
        f"{_EXPERIMENTS}:list_experiments",
    ),
    Command(
        "reproduce",
        "Compute figures and tables. Results that exist already are not computed again.",
        f"{_EXPERIMENTS}:add_reproduce_arguments",
        f"{_EXPERIMENTS}:reproduce",
    ),
    Command(
        "report",
        "Write the computed results as one HTML file.",
        f"{_EXPERIMENTS}:add_report_arguments",
        f"{_EXPERIMENTS}:write_report",
    ),
    Command(
        "archive",
        "Add results of the cache to the archive, the published results of the repository.",
        f"{_EXPERIMENTS}:add_archive_arguments",
        f"{_EXPERIMENTS}:archive",
    ),
    Command(
        "demo",
        "See in about a minute what CAdam does: one weight, two simulated click logs, and a page with pictures.",
        f"{_DEMO}:add_arguments",
        f"{_DEMO}:run",
    ),
    Command(
        "criteo",
        "Preprocess Criteo's train.txt for the study of click-through rates, or generate a file like it.",
        f"{_CRITEO}:add_arguments",
        f"{_CRITEO}:run",
    ),
)


def add_commands(add: Callable[[Command], None]) -> None:
    """Add the commands of the paper; the entry point of the group `cadam.commands`."""
    for command in COMMANDS:
        add(command)
