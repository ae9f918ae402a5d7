"""The command ``python -m cadam.codegen show RULE``, which prints the generated kernels of a rule."""

from __future__ import annotations

import argparse
import signal
from typing import NoReturn

from ..rules import RULES
from . import c_source, triton_source
from .kernel_spec import kernel_specs


class Parser(argparse.ArgumentParser):
    """An argument parser that lists the rules in its error messages."""

    def error(self, message: str) -> NoReturn:
        """Print the message and the names of the rules, and exit with code 2."""
        super().error(f"{message}\nThe rules: {', '.join(RULES)}.")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m cadam.codegen", description="Print the kernels that are generated from the rules.")
    show = parser.add_subparsers(required=True).add_parser("show", help="print the kernels of a rule")
    show.add_argument("rule", choices=RULES, metavar="RULE", help=f"one of {', '.join(RULES)}")
    language = show.add_mutually_exclusive_group()
    language.add_argument("--c", action="store_true", help="print only the C source")
    language.add_argument("--triton", action="store_true", help="print only the Triton source")
    options = parser.parse_args(arguments)
    rule = RULES[options.rule]
    if not options.triton:
        print(c_source.header([rule]))
    if not options.c:
        print(triton_source.source(*kernel_specs([rule])))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback if a reader such as `head` stops early
    raise SystemExit(main())
