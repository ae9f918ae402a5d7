"""What a run says while it runs: a live display on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cadam.ab.results import RunSpec

from .experiment import Experiment
from .report import duration
from .runner import Event, Request, Tell, to_come

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERY = 5.0
"""Seconds between plain lines."""


class Progress:
    """How far the requests are, and how long the rest will take at the pace so far."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.began = time.monotonic()
        self.done: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.work: defaultdict[str, float] = defaultdict(float)
        """Done, or lost."""
        self._to_come: dict[str, tuple[Sequence[RunSpec], list[RunSpec]]] = {}
        """Cells that an experiment will name later, with those it was waiting for when they were looked for."""

    def note(self, event: Event) -> None:
        name = event.experiment.name
        if event.kind in ("found", "computed", "elsewhere"):
            self.done[name] += 1
        if event.kind == "computed":
            self.computed[name] += 1
        if event.kind == "failed":
            self.failed[name] += 1
        if event.kind in ("found", "computed", "elsewhere", "failed"):
            self.work[name] += event.experiment.weight(event.spec)
        if event.result is not None:
            for request in self.requests:
                if request.experiment.name == name and not self._looked_ahead(request):
                    self._to_come[name] = request.missing, to_come(request, event.result)

    def _looked_ahead(self, request: Request) -> bool:
        return self._to_come.get(request.experiment.name, (None,))[0] is request.missing

    def to_come(self, request: Request) -> list[RunSpec]:
        """About what an experiment with phases will name later."""
        return self._to_come[request.experiment.name][1] if self._looked_ahead(request) else []

    def recount(self) -> None:
        """At the end, go by what the requests hold: a spec can be cached and the run end before that was told."""
        self.done = Counter({request.experiment.name: len(request.results) for request in self.requests})

    def total(self, request: Request) -> int:
        """Cells named so far, and about those that will be."""
        return len(request.results) + len(request.missing) + len(self.to_come(request))

    def counted(self, request: Request) -> str:
        about = "about " if self.to_come(request) else ""
        what = "runs" if request.experiment.again else "specs"
        return f"{self.done[request.experiment.name]} of {about}{self.total(request)} {what}"

    def left(self) -> float:
        """Seconds left: by the pace of this run, before it has one by the experiments' own estimates."""
        expected = []
        for request in self.requests:
            experiment = request.experiment
            specs = [*(result.spec for result in request.results), *request.missing, *self.to_come(request)]
            if total := sum(map(experiment.weight, specs)):
                share = max(0.0, total - self.work[experiment.name]) / total
                expected.append((share, experiment.estimate(request.plan)))
        ahead = sum(share * seconds for share, seconds in expected)
        behind = sum((1 - share) * seconds for share, seconds in expected)
        ran = time.monotonic() - self.began
        return ahead * ran / behind if behind > 0 and sum(self.computed.values()) > 2 else ahead

    def outlook(self) -> str:
        """The time left in words; none before the first spec is done."""
        begun = sum(self.done.values()) + sum(self.failed.values())
        return f"about {duration(self.left())} left" if begun else "starting"

    def line(self, request: Request) -> str:
        name = request.experiment.name
        failed = f", {self.failed[name]} failed" if self.failed[name] else ""
        whose = "" if request.experiment.again else f"{name}: "  # a comparison of the user's own is alone
        return f"{whose}{self.counted(request)}{failed}"


Table = Callable[[], "RenderableType"]
"""Something more to show below the bars, drawn anew each time."""


def complain(event: Event) -> None:
    """Say on the error stream what went wrong with a spec."""
    if event.kind == "damaged":
        print(f"damaged, computing it again: {event.message}", file=sys.stderr)
    elif event.kind == "failed":
        print(f"failed: {event.spec}\n{event.message}", file=sys.stderr)


def say_damaged(event: Event) -> None:
    """Say on the error stream which spec cannot be believed, where nothing is computed."""
    if event.kind == "damaged":
        print(f"damaged, missing until `cadam reproduce` computes it again: {event.message}", file=sys.stderr)


@contextmanager
def silent(requests: Sequence[Request]) -> Iterator[Tell]:
    """Nothing but what goes wrong."""
    yield complain


@contextmanager
def plain(requests: Sequence[Request]) -> Iterator[Tell]:
    """A line when an experiment begins and ends, and every few seconds between."""
    progress, said = Progress(requests), time.monotonic()
    finished: set[str] = set()

    def tell(event: Event) -> None:
        nonlocal said, finished
        complain(event)
        progress.note(event)
        now = time.monotonic()
        if event.kind == "computed" and now - said > EVERY:
            said = now
            lines = "; ".join(progress.line(r) for r in requests if r.experiment.name not in finished)
            print(f"{lines}; {progress.outlook()}", flush=True)
            finished = {r.experiment.name for r in requests if _all_done(progress, r)}  # until it names more specs

    yield tell
    progress.recount()
    for request in requests:
        print(progress.line(request), flush=True)


def _all_done(progress: Progress, request: Request) -> bool:
    return progress.done[request.experiment.name] == progress.total(request)


@contextmanager
def live(requests: Sequence[Request], table: Table | None = None) -> Iterator[Tell]:
    """Bars and the time left, redrawn in place."""
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
            grid.add_row("" if request.experiment.again else name, bar, progress.counted(request), failed)
        ran = duration(time.monotonic() - progress.began)
        footer = Text(f"{ran} so far, {progress.outlook()}", style="dim")
        return Group(*([table()] if table else []), grid, footer)

    with Live(get_renderable=render, refresh_per_second=4) as display:

        def tell(event: Event) -> None:
            if event.kind in ("failed", "damaged"):
                text = event.message if event.kind == "damaged" else f"{event.spec}\n{event.message}"
                display.console.print(f"{event.kind}: {text}", markup=False, style="red")
            progress.note(event)

        yield tell
        progress.recount()


def on_terminal() -> bool:
    """Whether a live display can be shown: on a terminal, with rich installed."""
    from importlib.util import find_spec

    return sys.stdout.isatty() and find_spec("rich") is not None


def state(experiment: Experiment, request: Request, published: int = 0) -> str:
    """How much of an experiment there is, in a few words; `published` results of it were not computed here."""
    if request.unknown:
        return f"not known: {request.unknown}"
    if request.complete:
        what = "published" if published == len(request.results) else "done"
        some = f", {published} of {len(request.results)} results published" if what == "done" and published else ""
        return f"{what} ({request.plan.scale}, {request.plan.seeds} seeds{some})"
    data = experiment.needed(request.plan.scale)
    if data is not None and data.missing():
        return "data missing"
    return f"{len(request.results)} specs so far" if request.results else "not run"
