"""The console output of an A/B: the progress of its runs, and the summary."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...printable import printable, printable_lines
from ..runner import RunEvent
from ..study import Study, count_work, run_length
from ..summary import Summary
from ..text import format_duration
from .scoreboard import Scoreboard

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_INTERVAL = 5.0
"""Seconds between lines of progress if the output is not a terminal."""


class Progress:
    """The number of finished runs of a study, and the time that the others will take."""

    def __init__(self, study: Study, seeds: int) -> None:
        self.total, self._total_work = count_work(study, seeds)
        self.finished = self.failed = 0
        self._work = self._computed_work = 0.0
        self._start = time.monotonic()

    def update(self, event: RunEvent) -> None:
        """Count a run that has ended."""
        if event.kind == "damaged":
            return
        length = run_length(event.spec)
        self._work += length
        if event.kind == "failed":
            self.failed += 1
        else:
            self.finished += 1
        if event.kind != "cached":
            self._computed_work += length

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def describe_rest(self) -> str:
        """Return the time left at the pace of this process, in words."""
        if not self._computed_work:
            return "starting"
        left = (self._total_work - self._work) * self.seconds / self._computed_work
        return f"about {format_duration(max(left, 0.0))} left"

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.finished} of {self.total} runs{failed}"


def report_problem(event: RunEvent) -> None:
    """Print a failed or damaged run to standard error."""
    if event.kind == "damaged":
        print(printable(f"damaged, computing it again: {event.message}"), file=sys.stderr)
    elif event.kind == "failed":
        print(printable_lines(f"failed: {event.spec}\n{event.message}"), file=sys.stderr)


def supports_live_display() -> bool:
    """Return whether standard output is a terminal and rich is installed."""
    return sys.stdout.isatty() and find_spec("rich") is not None


@contextmanager
def show_progress(study: Study, seeds: int, board: Scoreboard) -> Iterator[Callable[[RunEvent], None]]:
    """Show the progress of a study: redrawn in place on a terminal, otherwise in lines.

    Yields:
        A function to call with each event.
    """
    progress = Progress(study, seeds)
    with (_live if supports_live_display() else _lines)(progress, board) as notify:
        yield notify


@contextmanager
def _lines(progress: Progress, board: Scoreboard) -> Iterator[Callable[[RunEvent], None]]:
    last_print = time.monotonic()

    def notify(event: RunEvent) -> None:
        nonlocal last_print
        report_problem(event)
        if event.result is not None:
            is_first = not board
            line = board.add(event.result)
            if is_first and board:
                print(printable_lines(board.format(board.head)))
            if line:
                print(printable_lines(board.format(line)), flush=True)
        progress.update(event)
        if event.kind == "computed" and time.monotonic() - last_print > LINE_INTERVAL:
            last_print = time.monotonic()
            print(f"{progress}; {progress.describe_rest()}", flush=True)

    yield notify
    print(progress, flush=True)


@contextmanager
def _live(progress: Progress, board: Scoreboard) -> Iterator[Callable[[RunEvent], None]]:
    from rich.console import Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def render() -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(ProgressBar(total=progress.total, completed=progress.finished, width=30), str(progress))
        duration = format_duration(progress.seconds)
        return Group(board.table(), grid, Text(f"{duration} so far, {progress.describe_rest()}", style="dim"))

    with Live(get_renderable=render, refresh_per_second=4) as display:

        def notify(event: RunEvent) -> None:
            if event.kind in ("failed", "damaged"):
                text = event.message if event.kind == "damaged" else f"{event.spec}\n{event.message}"
                display.console.print(printable_lines(f"{event.kind}: {text}"), markup=False, style="red")
            if event.result is not None:
                board.add(event.result)
            progress.update(event)

        yield notify


def summary_lines(summary: Summary) -> list[str]:
    """Return the recommendations with their reasons, the warnings, and the verdicts under other conditions."""
    lines = []
    for recommendation in summary.recommendations:
        lines += wrap("", recommendation.headline)
        for reason in recommendation.reasons:
            lines += wrap("  - ", reason)
    for warning in summary.warnings:
        lines += wrap("  warning:  ", warning)
    recommended = {id(recommendation.verdict) for recommendation in summary.recommendations}
    for name, verdict in summary.verdicts.items():
        if id(verdict) not in recommended:
            lines += wrap("  ", f"{name}: {verdict}")
    return lines


def wrap(prefix: str, text: str) -> list[str]:
    """Wrap a text to the width of the terminal; the first line begins with the prefix."""
    width = max(40, shutil.get_terminal_size().columns)
    indent = " " * len(prefix)
    return textwrap.wrap(
        printable(text), width, initial_indent=prefix, subsequent_indent=indent, break_on_hyphens=False
    )
