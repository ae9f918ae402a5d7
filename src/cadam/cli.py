"""The command `cadam`."""

from __future__ import annotations

import argparse
import sys

from . import __version__


def main(arguments: list[str] | None = None) -> int:
    from . import bench
    from .lab import commands as lab
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
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
