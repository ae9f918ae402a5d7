"""A report of the progress of a learner as a table on the console, with a progress bar on terminals."""

from __future__ import annotations

import atexit
import logging
import math
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from ...optim.alignment import Alignment
from ..metrics.log_loss import LogLoss
from .alignment_window import AlignmentWindow

if TYPE_CHECKING:
    from ..learner import Learner

logger = logging.getLogger("cadam.online")

COLUMNS = (
    ("events", "", 12),
    ("average", "loss", 9),
    ("recent", "loss", 9),
    ("average", "constant", 10),
    ("recent", "constant", 10),
    ("aligned", "touched", 9),
    ("pending", "", 9),
    ("rejected", "", 9),
    ("events/s", "", 10),
    ("lag", "s", 8),
)
"""Both lines of the heading of each column, and its width."""
RATE_COLUMN = ("learning", "rate", 10)
"""The column that is added if the learning rate is tuned."""
LEGEND = """\
average loss: the mean log loss so far; recent loss: since the previous line, or since the run was resumed
average constant, recent constant: the log loss of the best constant prediction in hindsight, for the same events
aligned touched: share of elements with a nonzero gradient whose momentum has the same sign
pending: events that wait for their label; lag: seconds from the time of the newest event to its processing"""


class Console:
    """Prints a line whenever the number of events has doubled, and after at most `seconds` seconds.

    A line has the log loss so far and since the last line, each beside that of the best constant prediction in
    hindsight, and the share of updated elements that were aligned since the last line. On a terminal, a progress bar
    below the table shows the remaining time if the length of the data is known.

    Args:
        stream: where to print; standard output by default.
        seconds: the longest time between two lines.
        legend: whether to explain the columns first.
    """

    def __init__(self, stream: TextIO | None = None, seconds: float = 30.0, legend: bool = False) -> None:
        self.stream = stream or sys.stdout
        self.seconds, self.legend = seconds, legend
        self._progress_bar = ProgressBar(self.stream) if self.stream.isatty() else None
        self._time_of_line = time.monotonic()
        self._next_events = 0
        self._last_loss = LogLoss()
        self._alignment = AlignmentWindow()
        self._has_failed = False

    def __call__(self, learner: Learner) -> None:
        """Print a line if it is due, and update the progress bar."""
        self._print_heading(learner)
        if learner.events >= self._next_events or time.monotonic() - self._time_of_line >= self.seconds:
            self._print_line(learner)
            while self._next_events <= learner.events:
                self._next_events *= 2
        if self._progress_bar is not None:
            self._progress_bar.update(learner)

    def end(self, learner: Learner) -> None:
        """Print the last line, then the requested metrics and the alignment of each parameter."""
        self.close()
        self._print_heading(learner)
        self._print_line(learner)
        if not learner.learned:
            return
        values = {name: value for metric in learner.extra_metrics for name, value in metric.results().items()}
        if values:
            width = max(map(len, values)) + 2
            self._print("", *(f"{name:<{width}}{value:.6g}" for name, value in values.items()))
        if alignment := learner.alignment():
            total = learner.total_alignment()
            self._print(f"\n{Alignment(total, (total,), alignment)}")

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress_bar is not None:
            self._progress_bar.close()

    def _print_heading(self, learner: Learner) -> None:
        """Print the heading, before the first line."""
        if not self._next_events:
            self._next_events = 1 << max(6, learner.resumed_at.bit_length())
            self._last_loss = learner.log_loss_at_start
            if self.legend:
                self._print(LEGEND)
            columns = (*COLUMNS, *([] if learner.rate_tuning is None else [RATE_COLUMN]))
            self._print_row([first for first, _, _ in columns])
            self._print_row([second for _, second, _ in columns])

    def _print_line(self, learner: Learner) -> None:
        loss, health = learner.log_loss, learner.health()
        recent = loss - self._last_loss
        losses = (loss.mean, recent.mean, loss.best_constant, recent.best_constant)
        self._time_of_line, self._last_loss = time.monotonic(), replace(loss)
        self._print_row(
            [
                f"{learner.events:,}",
                *(_format(value if learner.has_log_loss else math.nan, ".4f") for value in losses),
                _format(self._alignment.advance(learner).total.over_touched, ".3f"),
                f"{len(learner.pending):,}",
                f"{learner.rejected:,}",
                f"{health['events_a_second']:,.0f}",
                _format(health["lag_in_seconds"], ".1f"),
                *([] if learner.rate_tuning is None else [f"{learner.rate_tuning.rate:.2g}"]),
            ]
        )

    def _print_row(self, values: list[str]) -> None:
        self._print(
            "".join(f"{value:>{width}}" for value, (_, _, width) in zip(values, (*COLUMNS, RATE_COLUMN), strict=False))
        )

    def _print(self, *lines: str) -> None:
        try:
            if self._progress_bar is not None:
                self._progress_bar.print_above("\n".join(lines))
            else:
                print(*lines, sep="\n", file=self.stream, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:  # the disk is full, for example
            if not self._has_failed:
                logger.error("the console cannot be written; learning continues without it: %s", error)
            self._has_failed = True


class ProgressBar:
    """A progress bar in the last line of a terminal, drawn by rich."""

    SECONDS_BETWEEN_UPDATES = 0.2

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns: list[Any] = [
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[events]:,} events,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        ]
        self._progress = Progress(*columns, console=RichConsole(file=stream), transient=True, auto_refresh=False)
        self._task: Any = None
        self._time_of_update = 0.0
        # rich hides the cursor. It must be shown again even if the program ends with an error.
        atexit.register(self.close)

    def update(self, learner: Learner) -> None:
        """Draw the bar, at most five times a second and only if the length of the data is known."""
        share, now = learner.share_read(), time.monotonic()
        if share is None or now - self._time_of_update < self.SECONDS_BETWEEN_UPDATES:
            return
        if self._task is None:
            self._task = self._progress.add_task("", total=1.0, events=0)
            self._progress.start()
        self._progress.update(self._task, completed=share, events=learner.events)
        self._progress.refresh()
        self._time_of_update = now

    def print_above(self, text: str) -> None:
        """Print text above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()
        atexit.unregister(self.close)


def _format(value: float, format_spec: str) -> str:
    return f"{value:{format_spec}}" if math.isfinite(value) and abs(value) < 1e6 else "-"
