"""What the commands that run experiments share: their options, what they print and the page they write."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cadam.ab.report import palette
from cadam.atomic_write import replace_file
from cadam.cli import writable_paths
from cadam.cli.exit_codes import DONE, FAILED, INTERRUPTED, NO_DATA, NO_PACKAGE, NOTHING, UNREAD, USAGE, stop_printing

from . import console, report, runner
from .cache import Cache
from .scoreboard import Scoreboard

EXITS = {
    DONE: "everything asked for is there",
    FAILED: "a spec failed, or is missing from a report; the others are cached",
    USAGE: "the command was not understood: a name or an option that does not exist, a folder that cannot be written "
    "to",
    NO_DATA: "data or a CUDA device is missing; nothing was computed",
    NOTHING: "there is nothing to report yet",
    NO_PACKAGE: "a package is missing; nothing was computed",
    INTERRUPTED: "interrupted; the same command goes on from there",
    UNREAD: "whoever read the output has closed it, as `| head` does; the same command goes on from there",
}
"""What exit codes mean to a command that runs experiments."""


def exit_codes(exits: Mapping[int, str]) -> str:
    """Exit codes and what they mean, for the help of a command."""
    lines = [
        textwrap.fill(text, 120, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7, break_on_hyphens=False)
        for code, text in exits.items()
    ]
    return "\n".join(["exit codes:", *lines, ""])


EXIT_CODES = exit_codes(EXITS)


def cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        metavar="FOLDER",
        help="where results are cached (default: $CADAM_CACHE, else results/cache)",
    )


@lru_cache
def default_cache() -> Path:
    return Path(os.environ.get("CADAM_CACHE", "results/cache"))


def output_argument(parser: argparse.ArgumentParser) -> None:
    path = Path("results/report.html")
    parser.add_argument("--output", type=Path, default=path, metavar="FILE", help=f"the report (default: {path})")


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def print_lines(lines: Sequence[str]) -> None:
    """Print lines, as many as are wanted: a reader such as `head` may close the pipe before the last."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        stop_printing()


def run(requests: Sequence[runner.Request], cache: Cache, jobs: int | None, force: bool, tell: runner.Tell) -> int:
    try:
        runner.run(requests, cache, jobs=jobs, force=force, tell=tell)
    except KeyboardInterrupt:
        for request in requests:  # count anew: specs were done since the run last looked
            known = runner.read(cache, request.experiment, request.plan)
            request.results, request.missing = known.results, known.missing
        print("interrupted: what is done is cached, the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    return FAILED if any(request.failed for request in requests) else DONE


def command_of(request: runner.Request, cache: Path) -> str:
    """What to type to go on."""
    experiment, elsewhere = request.experiment, cache != default_cache()
    command = report.command(experiment, request.plan)
    return f"{command} --cache {shlex.quote(str(cache))}" if elsewhere and not experiment.again else command


def summary_lines(request: runner.Request, cache: Path) -> list[str]:
    """What came out, no wider than the terminal but for what is to be typed.

    Where there is a recommendation, that and its reasons; else the verdict, and that of each row with its difference.
    A comparison of the user's own begins with what it recommends.
    """
    experiment = request.experiment
    lines = ["", f"{experiment.title}: {request.plan.scale}, seeds: {request.plan.seeds}"]
    if experiment.again and request.complete:
        lines = [""]
    if not request.complete:
        failed = f", {len(request.failed)} of them failed" if request.failed else ""
        lines += _wrapped("  ", f"not complete: {len(request.missing)} specs are missing{failed}; this goes on:")
        return [*lines, f"  {command_of(request, cache)}"]
    summary = experiment.summary(request.results)
    for recommendation in summary.recommendations:
        lines += _wrapped("", recommendation.headline)
        for reason in recommendation.reasons:
            lines += _wrapped("  - ", reason)
    if not summary.recommendations:
        if experiment.claim:
            lines += _wrapped("  paper:    ", experiment.claim)
        lines += _wrapped("  meaning:  ", experiment.measure)
        lines += _wrapped("  measured: ", summary.verdict)
    for warning in summary.warnings:
        lines += _wrapped("  beware:   ", warning)
    if summary.recommendations:
        main = {id(recommendation.verdict) for recommendation in summary.recommendations}
        others = {name: verdict for name, verdict in summary.verdicts.items() if id(verdict) not in main}
        return [*lines, *(line for name, verdict in others.items() for line in _wrapped("  ", f"{name}: {verdict}"))]
    for row in summary.rows:
        difference = f" ({row.interval})" if row.interval else ""
        lines += _wrapped("  - ", f"{row.label}: {row.verdict or row.measured}{difference}")
    return lines


def as_json(request: runner.Request) -> dict[str, Any]:
    """What there is of an experiment, for `--json`."""
    head = {
        "experiment": request.experiment.name,
        "title": request.experiment.title,
        "scale": request.plan.scale,
        "seeds": request.plan.seeds,
        "complete": request.complete,
        "specs": len(request.results),
        "failed": [str(spec) for spec in request.failed],
        "seconds": request.results.seconds,
    }
    if not request.complete:
        return head
    summary = request.experiment.summary(request.results)
    verdicts = {
        name: {
            "verdict_kind": verdict.kind,
            "conflicting": verdict.conflicting,
            "verdict": str(verdict),
            "action": verdict.action,
        }
        for name, verdict in summary.verdicts.items()
    }
    found = {
        "recommendations": [recommendation.as_json() for recommendation in summary.recommendations],
        "verdict": summary.verdict,
        "verdicts": verdicts,
        "warnings": list(summary.warnings),
        "rows": [asdict(row) for row in summary.rows],
    }
    return {**head, **_finite(found)}


def _finite(value: Any) -> Any:
    """JSON knows no nan and no inf: null."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wrapped(head: str, text: str) -> list[str]:
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def can_write(command: str, **places: Path | None) -> bool:
    """Whether the places that options name can be written; says so if not. The cache and images are folders."""
    try:
        for option, place in places.items():
            if place is not None:
                (writable_paths.check_file if option == "output" else writable_paths.check_folder)(place, f"--{option}")
    except writable_paths.UnwritableError as error:
        print(f"cadam {command}: {error}", file=sys.stderr)
        return False
    return True


def can_draw() -> bool:
    """Whether figures can be drawn; says so if not."""
    if find_spec("matplotlib") is None:
        print(palette.NEEDS, file=sys.stderr)
        return False
    return True


def write_page(requests: Sequence[runner.Request], heading: report.Heading, output: Path) -> str:
    """Write the report; where it is and how large, in words."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text = report.page(requests, heading).encode()
    replace_file(output, text)
    return f"report: {output} ({len(text) / 1e6:.2f} MB)"


def with_scoreboard(
    requests: Sequence[runner.Request],
    board: Scoreboard,
    cache: Cache,
    force: bool,
    quiet: bool = False,
) -> int:
    """Compute, with a line for each seed as it comes in; then say what came out."""
    if quiet:
        with console.silent(requests) as tell:
            return run(requests, cache, None, force, tell)
    on_terminal = console.on_terminal()
    with console.live(requests, board.table) if on_terminal else console.plain(requests) as tell:

        def note(event: runner.Event) -> None:
            first = not board.metrics
            line = board.note(event)
            if not on_terminal and first and board.metrics:
                print(board.text(board.head))
            if not on_terminal and line:
                print(board.text(line), flush=True)
            tell(event)

        code = run(requests, cache, None, force, note)
    print_lines([line for request in requests for line in summary_lines(request, cache.root)])
    return code
