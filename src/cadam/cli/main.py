"""The entry point of the command line: parses arguments and runs the chosen command."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping

from .. import __version__
from ..printable import printable
from .commands import PAPER_COMMANDS, AddCommands, Command, available_commands
from .exit_codes import (
    DISK_IS_FULL,
    DONE,
    FAILED,
    NO_PACKAGE,
    UNREAD,
    USAGE,
    fail,
    interrupt_code,
    is_stdout_closed,
    prepare_output,
    raise_on_sigterm,
    stop_printing,
)


def main(arguments: list[str] | None = None, extra: tuple[AddCommands, ...] = ()) -> int:
    """Run the command line.

    Args:
        arguments: the arguments after the program's name; by default those of this process.
        extra: functions that add commands beside those of installed packages.

    Returns:
        The exit code.
    """
    prepare_output()
    with raise_on_sigterm():
        try:
            code = _run_command(sys.argv[1:] if arguments is None else arguments, extra)
        except BrokenPipeError:
            if not is_stdout_closed():
                raise
            code = UNREAD
        except OSError as error:  # commands report the files that they cannot write; this is the rest, such as output
            if error.errno not in DISK_IS_FULL:
                raise
            print(printable(f"cadam: output cannot be written: {error}"), file=sys.stderr)
            code = FAILED
        except KeyboardInterrupt as error:  # commands that save their progress handle the interrupt themselves
            code = _report_interrupt(error, "before it was done")
        except SystemExit as end:  # argparse has printed the help or an error
            end.code = _flush_output(USAGE if end.code else DONE)
            raise
    return _flush_output(code)


def _run_command(arguments: list[str], extra: tuple[AddCommands, ...]) -> int:
    # The options before a command take no value, so the first word without a dash is the command.
    name = next((word for word in arguments if not word.startswith("-")), "")
    try:
        commands = available_commands(extra)
        if name in PAPER_COMMANDS and name not in commands:
            advice = "In a clone of the project, install it with: pip install ./paper"
            return fail(name, f"this command belongs to cadam-paper, which is not installed. {advice}", NO_PACKAGE)
        parser = build_parser(commands, with_arguments=[name])
        options, unknown = parser.parse_known_args(arguments)
    except KeyboardInterrupt as error:
        return _report_interrupt(error, "before anything was done")
    if unknown:  # reported by the command's own parser, which shows the usage of the command
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command = commands[options.command]
    if command.advice:
        return fail(command.name, command.advice, NO_PACKAGE)
    return command.run(options)


def _flush_output(code: int) -> int:
    """Write buffered output, and return the exit code: that of the command, or of output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        stop_printing()
        if isinstance(error, BrokenPipeError):
            return UNREAD
        print(printable(f"cadam: standard output cannot be written: {error}"), file=sys.stderr)
        return code or FAILED
    return code


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
    subparsers = parser.add_subparsers(dest="command", required=True, title="commands", metavar="COMMAND")
    paper_summaries: dict[str, str] = {}
    for name, command in commands.items():
        summary = f"({command.advice}) {command.summary}" if command.advice else command.summary
        if name in PAPER_COMMANDS:
            # argparse has one group of commands, and lists only those that have a help text.
            paper_summaries[name] = summary
            subparser = subparsers.add_parser(name, description=command.summary)
        else:
            subparser = subparsers.add_parser(name, help=summary, description=command.summary)
        subparser.set_defaults(parser=subparser)
        if name in with_arguments:
            command.add_arguments(subparser)
    if paper_summaries:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = "\n".join(["commands of the paper's experiments:", *_command_lines(paper_summaries)])
    return parser


def _command_lines(summaries: Mapping[str, str]) -> list[str]:
    """Format commands and their summaries in the layout of argparse."""
    width = max(shutil.get_terminal_size().columns - 2, 40)
    return [
        textwrap.fill(summary, width, initial_indent=f"    {name:<20}", subsequent_indent=24 * " ")
        for name, summary in summaries.items()
    ]


def _report_interrupt(error: KeyboardInterrupt, when: str) -> int:
    print(f"cadam: interrupted {when}", file=sys.stderr)
    return interrupt_code(error)


if __name__ == "__main__":
    sys.exit(main())
