"""Print the kernels that are generated from a rule of the package.

python tools/show_kernels.py RULE [--c | --triton]
"""

from __future__ import annotations

import argparse
import signal

from cadam.codegen import c_source, triton_source
from cadam.codegen.kernel_spec import kernel_specs
from cadam.rules import RULES


def main() -> None:
    """Print the C source, the Triton source, or both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rule", choices=RULES, help="the name of the rule")
    language = parser.add_mutually_exclusive_group()
    language.add_argument("--c", action="store_true", help="print only the C source")
    language.add_argument("--triton", action="store_true", help="print only the Triton source")
    options = parser.parse_args()
    rule = RULES[options.rule]
    if not options.triton:
        print(c_source.header([rule]))
    if not options.c:
        print(triton_source.source(*kernel_specs([rule])))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback if a reader such as `head` stops early
    main()
