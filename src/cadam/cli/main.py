"""The entry point of the command line: parses arguments and runs the chosen command."""

from __future__ import annotations

import argparse
import select
import sys
from collections.abc import Collection

from .. import __version__
from .commands import PAPER_COMMANDS, AddCommands, Command, available_commands
from .exit_codes import INTERRUPTED, NO_PACKAGE, UNREAD, fail, stop_printing


def main(arguments: list[str] | None = None, extra: tuple[AddCommands, ...] = ()) -> int:
    """Run the command line.

    Args:
        arguments: the arguments after the program's name; by default those of this process.
        extra: functions that add commands beside those of installed packages.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # The options before a command take no value, so the first word without a dash is the command.
    name = next((word for word in arguments if not word.startswith("-")), "")
    try:
        commands = available_commands(extra)
        if name in PAPER_COMMANDS and name not in commands:
            advice = "In a clone of the project, install it with: pip install ./paper"
            return fail(name, f"this command belongs to cadam-paper, which is not installed. {advice}", NO_PACKAGE)
        parser = build_parser(commands, with_arguments=[name])
        options, unknown = parser.parse_known_args(arguments)
    except KeyboardInterrupt:
        return _report_interrupt("before anything was done")
    if unknown:  # reported by the command's own parser, which shows the usage of the command
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return commands[options.command].run(options)
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        stop_printing()
        return UNREAD
    except KeyboardInterrupt:  # commands that save their progress handle the interrupt themselves
        return _report_interrupt("before it was done")


def build_parser(commands: dict[str, Command], with_arguments: Collection[str]) -> argparse.ArgumentParser:
    """Build the parser of the command line.

    Args:
        commands: the commands by name.
        with_arguments: names of the commands whose arguments are added, which imports the modules that define them.
            The other commands only get their name and summary.

    Returns:
        The parser. Its result has the attributes `command` and `parser`, the chosen command's name and parser.
    """
    parser = argparse.ArgumentParser(prog="cadam", description="CAdam: Adam with confidence, for online learning.")
    parser.add_argument("--version", action="version", version=f"cadam {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in commands.items():
        subparser = subparsers.add_parser(name, help=command.summary, description=command.summary)
        subparser.set_defaults(parser=subparser)
        if name in with_arguments:
            command.add_arguments(subparser)
    return parser


def _report_interrupt(when: str) -> int:
    print(f"cadam: interrupted {when}", file=sys.stderr)
    return INTERRUPTED


def _is_stdout_closed() -> bool:
    """Whether standard output is a pipe that its reader has closed."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return False  # stdout was replaced by an object without a file descriptor
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
