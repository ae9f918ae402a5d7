"""What a learner tells while it runs: a table on the console, scalars for TensorBoard, a text file for Prometheus."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ...optim.alignment import Alignment, Ratio, Writer
from ..metrics.running import LogLoss
from . import prometheus_metrics

if TYPE_CHECKING:
    from ..learner import Learner

logger = logging.getLogger("cadam.online")

HEAD = (
    ("events", 12),
    ("average", 9),
    ("since", 9),
    ("constant", 9),
    ("since", 9),
    ("aligned", 9),
    ("pending", 9),
    ("rejected", 9),
    ("events/s", 10),
    ("lag", 8),
)
UNDER = ("", "loss", "last", "best", "last", "touched", "", "", "", "s")


LEGEND = """\
average loss: log loss so far; since last: since the line before; constant best: that of the best constant prediction
aligned: share of touched elements whose gradient and momentum agree; pending: events that wait for their label
lag: seconds between the time of the newest event and now"""


class Console:
    """A line each time the number of events has doubled, and each `seconds`: the log loss so far and since the last
    line, beside what the best constant would have had, known only afterwards; the share of touched elements that
    aligned since the last line. On a terminal, below it, how far it is and what time is left, where there is an end.
    """

    def __init__(self, stream: TextIO | None = None, seconds: float = 30.0, legend: bool = False) -> None:
        self.stream = stream or sys.stdout
        self.seconds, self.legend, self.said = seconds, legend, time.monotonic()
        self.bar = Bar(self.stream) if self.stream.isatty() else None
        self.next = 0
        self.last = LogLoss()
        self.window = Window()

    def __call__(self, learner: Learner) -> None:
        self._head(learner)
        if learner.events >= self.next or time.monotonic() - self.said >= self.seconds:
            self._line(learner)
            while self.next <= learner.events:
                self.next *= 2
        if self.bar is not None:
            self.bar.show(learner)

    def end(self, learner: Learner) -> None:
        """The last line, the metrics that were asked for, and what aligned by parameter, if anything was learnt."""
        self._head(learner)
        self._line(learner)
        if not learner.learned:
            return
        numbers = {name: value for metric in learner.own_metrics for name, value in metric.results().items()}
        if numbers:
            width = max(map(len, numbers)) + 2
            lines = (f"{name:<{width}}{value:.6g}" for name, value in numbers.items())
            print("", *lines, sep="\n", file=self.stream, flush=True)
        alignment = learner.alignment()
        if alignment:
            total = learner.total_alignment()
            print(f"\n{Alignment(total, (total,), alignment)}", file=self.stream, flush=True)

    def _head(self, learner: Learner) -> None:
        """Above the first line."""
        if not self.next:
            self.next = 1 << max(6, learner.resumed_at.bit_length())
            if self.legend:
                print(LEGEND, file=self.stream)
            for names in (tuple(name for name, _ in HEAD), UNDER):
                self._print(names)

    def _line(self, learner: Learner) -> None:
        progress, health = learner.progress, learner.health()
        since = progress - self.last
        self.said = time.monotonic()
        self.last = replace(progress)
        aligned = self.window.since(learner).total.over_touched
        losses = (progress.mean, since.mean, progress.best_constant, since.best_constant)
        self._print(
            (
                f"{learner.events:,}",
                *(_number(value, ".4f") for value in losses),
                _number(aligned, ".3f"),
                f"{len(learner.pending):,}",
                f"{learner.rejected:,}",
                f"{health['events_a_second']:,.0f}",
                _number(health["lag_in_seconds"], ".1f"),
            )
        )

    def _print(self, values: tuple[str, ...]) -> None:
        cells = (f"{value:>{width}}" for value, (_, width) in zip(values, HEAD, strict=True))
        if self.bar is not None:
            self.bar.clear()
        print("".join(cells), file=self.stream, flush=True)


class Bar:
    """How much of the data has been read and what time is left, in the last line of a terminal."""

    WIDTH, EVERY = 30, 0.2

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.shown = stream, 0.0
        self.began: tuple[float, float] | None = None

    def show(self, learner: Learner) -> None:
        """Draw it anew, at most five times a second; nothing where the data has no end that is known."""
        share, now = learner.share_read(), time.monotonic()
        if share is None or now - self.shown < self.EVERY:
            return
        self.began = self.began or (now, share)
        done, seconds = share - self.began[1], now - self.began[0]
        left = f", {_span(seconds * (1 - share) / done)} left" if done > 0 and seconds > 1 else ""
        full = int(self.WIDTH * share)
        self.stream.write(
            f"\r\x1b[K[{'=' * full}{' ' * (self.WIDTH - full)}] {share:.0%}, {learner.events:,} events{left}"
        )
        self.stream.flush()
        self.shown = now

    def clear(self) -> None:
        self.stream.write("\r\x1b[K")


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) and abs(value) < 1e6 else "-"


class Window:
    """Alignment since it was last asked for."""

    def __init__(self) -> None:
        self.before: Mapping[str, Ratio] = {}
        self.total_before = Ratio(0, 0, 0)

    def since(self, learner: Learner) -> Alignment:
        now, before = learner.alignment(), self.before
        whole = learner.total_alignment()
        total = whole - self.total_before
        self.before, self.total_before = now, whole
        return Alignment(total, (total,), {name: r - before.get(name, Ratio(0, 0, 0)) for name, r in now.items()})


class Scalars:
    """Every number of the learner, each `every` events, to TensorBoard's writer or anything else with add_scalar.

    The alignment, per parameter and in total, is that since the last time.
    """

    def __init__(self, writer: Writer, every: int = 10_000) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.writer, self.every, self.written = writer, every, 0
        self.window = Window()

    def __call__(self, learner: Learner) -> None:
        if learner.events - self.written >= self.every:
            self.end(learner)

    def end(self, learner: Learner) -> None:
        self.written = learner.events
        for name, value in {**learner.metrics(), **learner.health()}.items():
            if math.isfinite(value) and not name.startswith("alignment"):
                self.writer.add_scalar(f"online/{prometheus_metrics.plain(name)}", value, learner.events)
        self.window.since(learner).write(self.writer, learner.events, parameters=True)


class Prometheus:
    """Every number of the learner in a text file for Prometheus's node exporter, each `seconds`.

    The file is replaced as a whole; a disk that does not take it is said once, and learning goes on.
    """

    def __init__(self, path: Path | str, seconds: float = 10.0) -> None:
        prometheus_metrics.check_installed()
        self.path, self.seconds = Path(path), seconds
        self.written, self.said = -math.inf, False
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, learner: Learner) -> None:
        if time.monotonic() - self.written >= self.seconds:
            self.end(learner)

    def end(self, learner: Learner) -> None:
        self.written = time.monotonic()
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            new.write_text(self.text(learner))
            os.replace(new, self.path)
            self.said = False
        except OSError as error:
            if not self.said:
                logger.error("%s cannot be written: %s", self.path, error)
            self.said = True

    @staticmethod
    def text(learner: Learner) -> str:
        return prometheus_metrics.text(prometheus_metrics.families(learner))
