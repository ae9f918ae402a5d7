"""The console output of an A/B: the progress of its runs, and the result."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from ...printable import printable
from ..comparison import Progress
from ..result import UNITS, Result
from ..text import format_duration
from ..wording import headline, reasons, warnings

LINE_INTERVAL = 5.0
"""Seconds between lines of progress if the output is not a terminal."""


def supports_live_display() -> bool:
    """Return whether standard output is a terminal and rich is installed."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def describe_state(progress: Progress) -> str:
    """Return the state of a comparison in words: the events so far, and the differences of the arms."""
    analysis = progress.analysis
    if analysis.warm_up is None:
        return f"{analysis.events:,} events, warm-up"
    unit = UNITS[analysis.study.metric]
    parts = [
        f"{arm} {pair.over_time.mean:+.2f}{unit} ({pair.kind})" for arm, pair in analysis.pairs.items() if pair.curve
    ]
    return ", ".join([f"{analysis.events:,} events", *parts])


@contextmanager
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """Show the progress of a comparison: a bar on a terminal, otherwise lines.

    Yields:
        A function to call with each state.
    """
    start, first_share = time.monotonic(), -1.0

    def time_left(done: float) -> str:
        nonlocal first_share
        if first_share < 0:
            first_share = done  # recorded scores of an earlier command take no time
        if done <= first_share:
            return "starting"
        left = (1 - done) * (time.monotonic() - start) / (done - first_share)
        return f"at most about {format_duration(left)} left"

    if supports_live_display():
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        with Bar(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")) as bar:
            task = bar.add_task("reading", total=1.0, left="")

            def redraw(progress: Progress) -> None:
                text = describe_state(progress)
                bar.update(task, completed=progress.done, description=printable(text), left=time_left(progress.done))

            yield redraw
        return
    last_print = start

    def print_line(progress: Progress) -> None:
        nonlocal last_print
        left = time_left(progress.done)
        if progress.advanced is None:
            print(printable(describe_state(progress)), flush=True)
        elif time.monotonic() - last_print > LINE_INTERVAL:
            print(f"{progress.done:.0%} of the stream; {left}", flush=True)
        else:
            return
        last_print = time.monotonic()

    yield print_line


def result_lines(result: Result) -> list[str]:
    """Return the verdicts with their reasons, the ranking of several arms, and the warnings."""
    lines = []
    for pair in result.pairs:
        lines += wrap("", headline(pair, result))
        for reason in reasons(pair, result):
            lines += wrap("  - ", reason)
    if len(result.pairs) > 1:
        lines += wrap("", f"Ranking, the best first: {', '.join(result.ranking)}.")
    for text in warnings(result):
        lines += wrap("  warning:  ", text)
    stopped = "" if result.is_complete else f" of {result.events:,}; --full reads all of them"
    lines += wrap("", f"{result.processed_events:,} events{stopped}. {format_duration(result.seconds)} of computing.")
    return lines


def wrap(prefix: str, text: str) -> list[str]:
    """Wrap a text to the width of the terminal; the first line begins with the prefix."""
    width = max(40, shutil.get_terminal_size().columns)
    indent = " " * len(prefix)
    return textwrap.wrap(
        printable(text), width, initial_indent=prefix, subsequent_indent=indent, break_on_hyphens=False
    )
