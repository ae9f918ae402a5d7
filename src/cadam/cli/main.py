"""The command `cadam`."""

from __future__ import annotations

import argparse
import select
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from .. import __version__
from .exit_codes import INTERRUPTED, NO_PACKAGE, UNREAD, stop_printing

COMMANDS = "cadam.commands"
"""The group of entry points by which other packages add commands: each names a function that takes the subparsers."""
PAPER = ("list", "reproduce", "report", "archive", "demo", "criteo")
"""Commands of cadam-paper."""


def main(arguments: list[str] | None = None, more: Sequence[Adder] = ()) -> int:
    """Run a command; `more` adds some beside those of installed packages."""
    try:
        parser, commands = _parser(more)
        options, unknown = parser.parse_known_args(arguments)
    except KeyboardInterrupt:
        return _interrupted("before anything was done")
    if unknown and options.run is not _not_installed:
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(options.run(options))
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        stop_printing()
        return UNREAD
    except KeyboardInterrupt:  # commands that have something to go on from say so themselves
        return _interrupted("before it was done")


Adder = Callable[[Any], None]
"""Adds commands to a parser's."""


def parser() -> argparse.ArgumentParser:
    """The command line with the commands of installed packages, as its page is made from."""
    return _parser(())[0]


def _parser(
    more: Sequence[Adder],
) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """The command line, and the commands in it."""
    from ..online.persistence import export
    from . import ab as ab
    from . import bench
    from . import run as online

    parser = argparse.ArgumentParser(prog="cadam", description="CAdam: Adam with confidence, for online learning.")
    parser.add_argument("--version", action="version", version=f"cadam {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (ab.add_commands, online.add_commands, export.add_commands, *more):
        add(commands)
    for found in entry_points(group=COMMANDS):
        try:
            if (add := found.load()) not in more:
                add(commands)
        except Exception as error:  # whatever another package does wrong, our commands work
            print(f"cadam: the commands of {found.value} are left out: {error}", file=sys.stderr)
    summary = (bench.__doc__ or "").splitlines()[0]
    command = commands.add_parser("bench", help=summary, description=bench.__doc__)
    bench.add_arguments(command)
    command.set_defaults(run=bench.run)
    for name in PAPER:
        if name not in commands.choices:
            command = commands.add_parser(name, add_help=False, help="needs cadam-paper, which is not installed")
            command.set_defaults(run=_not_installed)
    return parser, commands


def _not_installed(options: argparse.Namespace) -> int:
    print(
        f"cadam {options.command}: the paper's experiments are a package of their own, cadam-paper, which is not "
        "installed: in a clone of the project, pip install ./paper",
        file=sys.stderr,
    )
    return NO_PACKAGE


def _interrupted(when: str) -> int:
    print(f"cadam: interrupted {when}", file=sys.stderr)
    return INTERRUPTED


def _nobody_reads() -> bool:
    """Whether what is printed goes into a pipe that its reader has closed."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return False  # printed into this process, not into a pipe
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
