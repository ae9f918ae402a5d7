"""``python -m cadam.codegen show RULE``: the kernels of a rule, as they are compiled. Needs no torch and no Triton."""

from __future__ import annotations

import argparse
import signal
from typing import NoReturn

from ..rules import RULES
from . import c_source, triton_source
from .kernel_spec import kernel_specs


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(f"{message}\nThe rules: {', '.join(RULES)}.")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m cadam.codegen", description="Kernels, generated from the rules.")
    show = parser.add_subparsers(required=True).add_parser("show", help="print the kernels of a rule")
    show.add_argument("rule", choices=RULES, metavar="RULE", help=f"one of {', '.join(RULES)}")
    language = show.add_mutually_exclusive_group()
    language.add_argument("--c", action="store_true", help="in C only")
    language.add_argument("--triton", action="store_true", help="in Triton only")
    asked = parser.parse_args(arguments)
    if not asked.triton:
        print(c_source.header([RULES[asked.rule]]))
    if not asked.c:
        print(triton_source.source(*kernel_specs([RULES[asked.rule]])))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback where a reader such as `head` stops early
    raise SystemExit(main())
