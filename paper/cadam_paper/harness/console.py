"""Display of the progress of experiments: progress bars on a terminal, lines of text elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cadam.ab.report.console import supports_live_display as supports_live_display
from cadam.ab.report.console import wrap
from cadam.ab.text import format_duration

from .experiment import Experiment
from .results import RunSpec
from .runner import Event, Notify, Request, later_specs
from .summary import Summary

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_INTERVAL = 5.0
"""Seconds between lines of progress."""


class Progress:
    """The number of finished runs of several experiments, and the time that the others will take."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.start = time.monotonic()
        self.done: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.work: defaultdict[str, float] = defaultdict(float)
        """The summed weights of the runs that have ended, by experiment."""
        self._later: dict[str, tuple[Sequence[RunSpec], list[RunSpec]]] = {}
        """The estimate of the runs of later phases, by experiment: the missing runs it was based on, and the result."""

    def update(self, event: Event) -> None:
        """Count a run that has ended."""
        name = event.experiment.name
        if event.kind in ("stored", "computed", "computed elsewhere"):
            self.done[name] += 1
        if event.kind == "computed":
            self.computed[name] += 1
        if event.kind == "failed":
            self.failed[name] += 1
        if event.kind in ("stored", "computed", "computed elsewhere", "failed"):
            self.work[name] += event.experiment.weight(event.spec)
        if event.result is not None:
            for request in self.requests:
                if request.experiment.name == name and not self._has_estimate(request):
                    self._later[name] = request.missing, later_specs(request, event.result)

    def _has_estimate(self, request: Request) -> bool:
        return self._later.get(request.experiment.name, (None,))[0] is request.missing

    def later(self, request: Request) -> list[RunSpec]:
        """Return the runs that later phases are expected to add (see `runner.later_specs`)."""
        return self._later[request.experiment.name][1] if self._has_estimate(request) else []

    def recount(self) -> None:
        """Count the results again: an interrupted command may have stored a run without reporting it."""
        self.done = Counter({request.experiment.name: len(request.results) for request in self.requests})

    def total(self, request: Request) -> int:
        """Return the number of runs, including the expected ones of later phases."""
        return len(request.results) + len(request.missing) + len(self.later(request))

    def describe_count(self, request: Request) -> str:
        """Return how many runs of an experiment are finished, in words."""
        about = "about " if self.later(request) else ""
        return f"{self.done[request.experiment.name]} of {about}{self.total(request)} runs"

    def seconds_left(self) -> float:
        """Return the seconds left.

        The estimates of the experiments are used first. After three computed runs, they are scaled by the speed so far.
        """
        expected = []
        for request in self.requests:
            experiment = request.experiment
            specs = [*(result.spec for result in request.results), *request.missing, *self.later(request)]
            if total := sum(map(experiment.weight, specs)):
                share = max(0.0, total - self.work[experiment.name]) / total
                expected.append((share, experiment.estimate(request.plan)))
        ahead = sum(share * seconds for share, seconds in expected)
        behind = sum((1 - share) * seconds for share, seconds in expected)
        elapsed = time.monotonic() - self.start
        return ahead * elapsed / behind if behind > 0 and self.computed.total() > 2 else ahead

    def describe_rest(self) -> str:
        """Return the time left in words."""
        has_begun = self.done.total() + self.failed.total() > 0
        return f"about {format_duration(self.seconds_left())} left" if has_begun else "starting"

    def line(self, request: Request) -> str:
        """Return one line about an experiment."""
        name = request.experiment.name
        failed = f", {self.failed[name]} failed" if self.failed[name] else ""
        return f"{name}: {self.describe_count(request)}{failed}"


Table = Callable[[], "RenderableType"]
"""Function that returns the content to show above the progress bars."""


def report_problem(event: Event) -> None:
    """Print a failed or damaged run to standard error."""
    if event.kind == "damaged":
        print(f"damaged, computing it again: {event.message}", file=sys.stderr)
    elif event.kind == "failed":
        print(f"failed: {event.spec}\n{event.message}", file=sys.stderr)


def report_damaged(event: Event) -> None:
    """Print a damaged result to standard error, for commands that compute nothing."""
    if event.kind == "damaged":
        print(f"damaged, and missing until `cadam reproduce` computes it again: {event.message}", file=sys.stderr)


@contextmanager
def silent(requests: Sequence[Request]) -> Iterator[Notify]:
    """Print only failed and damaged runs."""
    yield report_problem


@contextmanager
def plain(requests: Sequence[Request]) -> Iterator[Notify]:
    """Print a line about all unfinished experiments every few seconds, and a line for each experiment at the end."""
    progress, last_print = Progress(requests), time.monotonic()
    finished: set[str] = set()

    def notify(event: Event) -> None:
        nonlocal last_print, finished
        report_problem(event)
        progress.update(event)
        now = time.monotonic()
        if event.kind == "computed" and now - last_print > LINE_INTERVAL:
            last_print = now
            lines = "; ".join(progress.line(r) for r in requests if r.experiment.name not in finished)
            print(f"{lines}; {progress.describe_rest()}", flush=True)
            # Determined again each time, because a later phase may add runs to an experiment.
            finished = {r.experiment.name for r in requests if progress.done[r.experiment.name] == progress.total(r)}

    yield notify
    progress.recount()
    for request in requests:
        print(progress.line(request), flush=True)


@contextmanager
def live(requests: Sequence[Request], table: Table | None = None) -> Iterator[Notify]:
    """Show progress bars and the time left, redrawn in place."""
    from rich.console import Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table as Grid
    from rich.text import Text

    progress = Progress(requests)

    def render() -> RenderableType:
        grid = Grid.grid(padding=(0, 2))
        for request in requests:
            name, total = request.experiment.name, progress.total(request)
            bar = ProgressBar(total=max(total, 1), completed=progress.done[name], width=30)
            failed = f"[red]{progress.failed[name]} failed[/red]" if progress.failed[name] else ""
            grid.add_row(name, bar, progress.describe_count(request), failed)
        elapsed = format_duration(time.monotonic() - progress.start)
        footer = Text(f"{elapsed} so far, {progress.describe_rest()}", style="dim")
        return Group(*([table()] if table else []), grid, footer)

    with Live(get_renderable=render, refresh_per_second=4) as display:

        def notify(event: Event) -> None:
            if event.kind in ("failed", "damaged"):
                text = event.message if event.kind == "damaged" else f"{event.spec}\n{event.message}"
                display.console.print(f"{event.kind}: {text}", markup=False, style="red")
            progress.update(event)

        yield notify
        progress.recount()


def describe_state(experiment: Experiment, request: Request, published: int = 0) -> str:
    """Describe in a few words which results of an experiment exist.

    Args:
        experiment: The experiment.
        request: The experiment with its stored results.
        published: The number of results that come from the archive.
    """
    if request.unknown:
        return f"unknown: {request.unknown}"
    if request.complete:
        state = "published" if published == len(request.results) else "done"
        part = f", {published} of {len(request.results)} results published" if state == "done" and published else ""
        return f"{state} ({request.plan.scale}, {request.plan.seeds} seeds{part})"
    data = experiment.required_data(request.plan.scale)
    if data is not None and data.missing():
        return "data missing"
    return f"{len(request.results)} runs so far" if request.results else "not run"


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
