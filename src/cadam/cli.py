"""The command `cadam`."""

from __future__ import annotations

import argparse
import sys

from . import __version__


def main(arguments: list[str] | None = None) -> int:
    from . import bench, demo

    parser = argparse.ArgumentParser(prog="cadam", description="CAdam: Adam with confidence, for online learning.")
    parser.add_argument("--version", action="version", version=f"cadam {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in {"demo": demo, "bench": bench}.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
