"""Compares the speed of optimizer steps with other optimizers and with the memory bandwidth.

python -m benchmarks.peers [SUITE...] [--device cpu|cuda] [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from cadam.native import loader

from .cases import SUITES, cpu_limit, cuda_limit
from .timing import MakeLimit, Result, describe_machine, draw, measure, print_results

INTERRUPTED = 130
"""The exit code after SIGINT."""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    add = parser.add_argument
    suites = f"any of {', '.join(SUITES)} (default: all; graphs runs on CUDA only)"
    add("suites", nargs="*", metavar="SUITE", help=suites)
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a device, else cpu")
    add("--quick", action="store_true", help="run smaller and fewer cases: one or two minutes instead of about five")
    add("--json", metavar="FILE", help="also write the results to this file")
    add("--plot", metavar="FILE", help="draw the results (needs matplotlib)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the suites that the arguments name and return the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.suites if name not in SUITES]:
        parser.error(f"unknown suite {unknown[0]!r}; the suites are {', '.join(SUITES)}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device and a build of torch with CUDA")
    machine = describe_machine(device)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print("ratio: time of the case's peer divided by this time; limit: share of the machine's speed limit", flush=True)
    make_limit = cuda_limit if device == "cuda" else _cpu_limit_if_available()
    cases = [
        (case, make_limit if suite in ("dense", "graphs") else None)
        for suite in options.suites or SUITES
        for case in SUITES[suite](device, options.quick)
    ]
    results: list[Result] = []
    start, done, code = time.monotonic(), 0, 0
    try:
        for case, limit in cases:
            elapsed = time.monotonic() - start
            print(f"case {done + 1} of {len(cases)}, {elapsed:.0f} s so far: {case.name}", file=sys.stderr, flush=True)
            results_of_case = measure(case, device, limit)
            print_results(results_of_case)
            results += results_of_case
            done += 1
            if options.json:
                content = {"about": machine, "results": [asdict(result) for result in results]}
                Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    except KeyboardInterrupt:
        print(f"interrupted: {done} of {len(cases)} cases were measured", file=sys.stderr)
        code = INTERRUPTED
    if options.plot and results:
        draw(results, options.plot)
    if unsteady := {result.case for result in results if result.is_unsteady}:
        print(f"\nUnsteady cases: {'; '.join(sorted(unsteady))}. Something else was running; measure them again.")
    return code


def _cpu_limit_if_available() -> MakeLimit | None:
    """Return the function that builds the CPU's speed limit, or None if there are no C kernels to measure it with."""
    try:
        loader.package_library()
    except loader.UnavailableError as reason:
        print(f"the speed limit is left out, because it is measured with the C kernels: {reason}")
        return None
    return cpu_limit


if __name__ == "__main__":
    sys.exit(main())
