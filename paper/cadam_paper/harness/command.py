"""Options, console output and files that the commands of the paper share."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cadam.ab.report import palette
from cadam.ab.report.console import wrap
from cadam.atomic_write import replace_file
from cadam.cli.arguments import format_exit_codes
from cadam.cli.exit_codes import (
    DONE,
    FAILED,
    INTERRUPTED,
    NO_DATA,
    NO_PACKAGE,
    NOTHING,
    TERMINATED,
    UNREAD,
    USAGE,
    interrupt_code,
)
from cadam.cli.writable_paths import UnwritableError, check_file, check_folder

from . import report, runner
from .cache import Cache
from .console import summary_lines as recommendation_lines
from .summary_json import summary_as_json
from .time_limit import TimeLimit

EXIT_CODES = format_exit_codes(
    {
        DONE: "all requested results are there",
        FAILED: "a run failed, or is missing from a report; the others are cached",
        USAGE: "the command is invalid: a name or an option does not exist, or a folder cannot be written to",
        NO_DATA: "data or a CUDA device is missing; nothing was computed",
        NOTHING: "there is nothing to report yet",
        NO_PACKAGE: "a package is missing; nothing was computed",
        INTERRUPTED: "interrupted, or at the limit of --seconds; the same command continues from there",
        UNREAD: "the reader of the output has closed it, as `| head` does; the same command continues from there",
        TERMINATED: "stopped by SIGTERM; the same command continues from there",
    }
)
"""The exit codes of the commands, for their help."""


def cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option `--cache` to a parser."""
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        metavar="FOLDER",
        help="the folder of computed results (default: $CADAM_CACHE, or results/cache)",
    )


@lru_cache
def default_cache() -> Path:
    """Return the default folder of the cache: $CADAM_CACHE, or results/cache."""
    return Path(os.environ.get("CADAM_CACHE", "results/cache"))


def output_argument(parser: argparse.ArgumentParser, default: str = "results/report.html") -> None:
    """Add the option `--output` to a parser."""
    path = Path(default)
    parser.add_argument("--output", type=Path, default=path, metavar="FILE", help=f"the report (default: {path})")


def print_lines(lines: Sequence[str]) -> None:
    """Print lines."""
    print("\n".join(lines), flush=True)


def run(
    requests: Sequence[runner.Request],
    cache: Cache,
    jobs: int | None,
    force: bool,
    notify: runner.Notify,
    limit: TimeLimit | None = None,
) -> int:
    """Compute the missing runs and return the exit code."""
    limit = limit or TimeLimit()
    try:
        runner.run(requests, cache, jobs=jobs, force=force, notify=notify, limit=limit)
    except KeyboardInterrupt as error:
        # Runs may have finished since the last event, so read the results of all requests again.
        for request in requests:
            stored = runner.read(cache, request.experiment, request.plan)
            request.results, request.missing = stored.results, stored.missing
        print("interrupted: finished runs are cached, and the same command continues from there", file=sys.stderr)
        return interrupt_code(error)
    if any(request.failed for request in requests):
        return FAILED
    if limit.has_refused:
        print("the time limit is reached: finished runs are cached, and the same command continues", file=sys.stderr)
        return INTERRUPTED
    return DONE


def command_of(request: runner.Request, cache: Path) -> str:
    """Return the command that computes the missing runs of a request."""
    command = report.command(request.experiment, request.plan)
    return command if cache == default_cache() else f"{command} --cache {shlex.quote(str(cache))}"


def summary_lines(request: runner.Request, cache: Path) -> list[str]:
    """Return lines of text about the results of an experiment.

    If its summary has recommendations, the lines contain only these; otherwise the paper's claim, the explanation of
    the metrics, the verdict, the warnings and the rows.
    """
    experiment = request.experiment
    lines = ["", f"{experiment.title}: {request.plan.scale}, seeds: {request.plan.seeds}"]
    if not request.complete:
        failed = f", {len(request.failed)} of them failed" if request.failed else ""
        lines += wrap("  ", f"incomplete: {len(request.missing)} runs are missing{failed}; this command continues:")
        return [*lines, f"  {command_of(request, cache)}"]
    summary = experiment.summary(request.results)
    if summary.recommendations:
        return [*lines, *recommendation_lines(summary)]
    if experiment.claim:
        lines += wrap("  paper:    ", experiment.claim)
    lines += wrap("  measures: ", experiment.measure)
    lines += wrap("  verdict:  ", summary.verdict)
    for warning in summary.warnings:
        lines += wrap("  warning:  ", warning)
    for row in summary.rows:
        difference = f" ({row.interval})" if row.interval else ""
        lines += wrap("  - ", f"{row.label}: {row.verdict or row.measured}{difference}")
    return lines


def as_json(request: runner.Request) -> dict[str, Any]:
    """Return an experiment and its results as a dictionary for JSON."""
    values = {
        "experiment": request.experiment.name,
        "title": request.experiment.title,
        "scale": request.plan.scale,
        "seeds": request.plan.seeds,
        "complete": request.complete,
        "runs": len(request.results),
        "failed": [str(spec) for spec in request.failed],
        "seconds": request.results.seconds,
    }
    if request.complete:
        values |= summary_as_json(request.experiment.summary(request.results))
    return values


def can_write(command: str, **paths: Path | None) -> bool:
    """Return whether the paths of options can be written, and print why not.

    Args:
        command: The name of the command.
        **paths: The paths by the name of their option. `output` is a file, the others are folders.
    """
    try:
        for option, path in paths.items():
            if path is not None:
                check = check_file if option == "output" else check_folder
                check(path, f"--{option}")
    except UnwritableError as error:
        print(f"cadam {command}: {error}", file=sys.stderr)
        return False
    return True


def can_draw() -> bool:
    """Return whether figures can be drawn, and print what to install if not."""
    if find_spec("matplotlib") is None:
        print(palette.NEEDS, file=sys.stderr)
        return False
    return True


def write_page(requests: Sequence[runner.Request], heading: report.Heading, output: Path) -> str:
    """Write the report, and return a line about its path and size."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text = report.page(requests, heading).encode()
    replace_file(output, text)
    return f"report: {output} ({len(text) / 1e6:.2f} MB)"
