"""The command `cadam`."""

from __future__ import annotations

import argparse
import select
import sys

from . import __version__
from .exits import INTERRUPTED, UNREAD, stop_printing


def main(arguments: list[str] | None = None) -> int:
    try:
        parser, commands = _parser()
        options, unknown = parser.parse_known_args(arguments)
    except KeyboardInterrupt:
        return _interrupted("before anything was done")
    if unknown:
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


def _parser() -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """The command line, and the commands in it."""
    from . import bench
    from .lab import commands as lab
    from .lab.ctr import command as criteo
    from .online import commands as online

    parser = argparse.ArgumentParser(prog="cadam", description="CAdam: Adam with confidence, for online learning.")
    parser.add_argument("--version", action="version", version=f"cadam {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    lab.add_commands(commands)
    online.add_commands(commands)
    summary = (bench.__doc__ or "").splitlines()[0]
    command = commands.add_parser("bench", help=summary, description=bench.__doc__)
    bench.add_arguments(command)
    command.set_defaults(run=bench.run)
    command = commands.add_parser(
        "criteo",
        help=(criteo.__doc__ or "").strip(),
        description=criteo.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    criteo.add_arguments(command)
    command.set_defaults(run=criteo.run)
    return parser, commands


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
