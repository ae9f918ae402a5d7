"""`cadam demo`: the mechanism on one weight, an A/B on two simulated click logs, and one page that shows both.

The first log has what CAdam is made for: the preferences of the users change suddenly at regular intervals, and a share
of the labels is flipped. The second log has neither. Both are judged by `cadam ab` with its defaults, so the commands
on the page repeat the results. The logs are simulated, and no evidence about real traffic.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cadam.ab.report import palette
from cadam.ab.report.figures import styled, svg
from cadam.ab.report.page import render_part, template_environment, verdict_cards
from cadam.ab.result import Result
from cadam.ab.runner import RunCache, StudyRunner
from cadam.ab.text import format_duration
from cadam.atomic_write import replace_file
from cadam.cli import ab
from cadam.cli.ab_arguments import add_arguments as add_ab_arguments
from cadam.cli.exit_codes import DONE, NO_PACKAGE, USAGE, interrupt_code

from . import mechanism
from .harness import command
from .harness.panels import panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS = ("price", "discount", "rating", "stock", "recency", "session", "similarity", "popularity")
"""The columns with numbers; a click depends on a weighted sum of them."""
USERS, DEVICES = 500, ("android", "ios", "web")


@dataclass(frozen=True)
class ClickLog:
    """A simulated click log.

    Attributes:
        name: The name of its file, without suffix.
        title: A title for people.
        events: The number of events.
        shift_interval: The number of events after which the preferences of all users change; 0 for never.
        flipped_labels: The share of the labels that are flipped.
        seed: The seed of the random numbers.
    """

    name: str
    title: str
    events: int = 48_000
    shift_interval: int = 0
    flipped_labels: float = 0.0
    seed: int = 0

    @property
    def shifts(self) -> list[int]:
        """The events at which the preferences change."""
        return list(range(self.shift_interval, self.events, self.shift_interval)) if self.shift_interval else []

    def lines(self) -> list[str]:
        """Return the lines of the CSV file."""
        random = np.random.default_rng(self.seed)
        user_bias, device_bias = 0.5 * random.normal(size=USERS), 0.3 * random.normal(size=len(DEVICES))
        epochs = np.zeros(self.events, np.int64)
        epochs[self.shifts] = 1
        taste = random.normal(size=(1 + len(self.shifts), len(NUMBERS)))[np.cumsum(epochs)]
        users = (USERS * random.random(self.events) ** 2).astype(np.int64)
        devices = random.integers(len(DEVICES), size=self.events)
        numbers = random.normal(size=(self.events, len(NUMBERS)))
        logits = -1 + user_bias[users] + device_bias[devices] + (numbers * taste).sum(1)
        clicks = random.random(self.events) < 1 / (1 + np.exp(-logits))
        clicks ^= random.random(self.events) < self.flipped_labels
        lines = [",".join(("time", "user_id", "device", *NUMBERS, "click"))]
        for event in range(self.events):
            values = ",".join(f"{value:.3f}" for value in numbers[event])
            lines.append(
                f"{1_700_000_000 + 10 * event},{users[event]},{DEVICES[devices[event]]},{values},{clicks[event]:d}"
            )
        return lines


LOGS = (
    ClickLog("shifting_clicks", "A click log that shifts, with label noise", shift_interval=6_000, flipped_labels=0.2),
    ClickLog("steady_clicks", "The same log without shift and without label noise"),
)
"""The logs of the demo."""
WIDTH = 3.8
"""The width of a figure in inches, with which its text can be read on a phone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam demo`."""
    parser.epilog = command.EXIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.cache_arguments(parser)
    command.output_argument(parser, "results/demo.html")
    parser.add_argument("--force", action="store_true", help="compute results again that exist already")


def run(options: argparse.Namespace) -> int:
    """Run the demo, write its page, and return the exit code."""
    if not command.can_draw():
        return NO_PACKAGE
    folder = options.output.parent / options.output.stem
    if not command.can_write("demo", cache=options.cache, output=options.output, folder=folder):
        return USAGE
    print("Comparing Adam and CAdam on two simulated click logs. This needs no data and no GPU.")
    judged = []
    try:
        for log in LOGS:
            print(f"\n{log.title}")
            path = folder / f"{log.name}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, "".join(f"{line}\n" for line in log.lines()).encode())
            result = judge(path, options)
            judged.append((log, path, result))
            (card,) = verdict_cards(result)
            print(card["headline"])
    except KeyboardInterrupt as error:
        print("interrupted: recorded scores are kept, and this command continues from there", file=sys.stderr)
        return interrupt_code(error)
    page = render_page(judged).encode()
    replace_file(options.output, page)
    print(f"\npage: {options.output} ({len(page) / 1e6:.2f} MB). Open it in a browser.")
    return DONE


def judge(path: Path, options: argparse.Namespace) -> Result:
    """Run `cadam ab` with its defaults on a log, and write its report beside the log."""
    parser = argparse.ArgumentParser()
    add_ab_arguments(parser)
    report = path.with_suffix(".html")
    ab_options = parser.parse_args(
        [str(path), "--label", "click", "--cache", str(options.cache), "--output", str(report)]
    )
    comparison = ab.prepare(ab_options)
    cache = RunCache(options.cache, comparison.study)
    runner = StudyRunner(comparison.study, cache, ab_options.threads, comparison.model_bytes)
    if options.force:
        runner.forget()
    stream = ab.read_stream(comparison, cache, ab_options)
    result = ab.compute(comparison, stream, runner, ab_options)
    runner.delete_checkpoints()
    ab.write_report(comparison, result, ab.as_json(comparison, result, report, ab_options), report)
    return result


# The page ----------------------------------------------------------------------------------------------------------


def render_page(judged: list[tuple[ClickLog, Path, Result]]) -> str:
    """Render the page of the demo as HTML."""
    figures = styled(
        lambda: {
            "mechanism": mechanism.figure(WIDTH),
            **{log.name: draw_losses(log, result) for log, _, result in judged},
        }
    )
    sections: list[dict[str, Any]] = [
        {
            "log": log,
            "path": path,
            "report": f"{path.parent.name}/{path.stem}.html",
            "cards": render_part("cards.html.j2", cards=verdict_cards(result)),
            "drawing": svg(figures[log.name], log.name, f"{log.title}: log loss of Adam and CAdam along the stream"),
            "result": result,
            "duration": format_duration(result.seconds),
        }
        for log, path, result in judged
    ]
    template = template_environment("cadam_paper").get_template("demo.html.j2")
    return template.render(
        style=render_part("style.css.j2", color_css=palette.color_css()),
        mechanism=svg(figures["mechanism"], "mechanism", "One weight with Adam and with CAdam"),
        sections=sections,
        numbers=len(NUMBERS),
    ).lstrip()


def draw_losses(log: ClickLog, result: Result) -> Figure:
    """Draw the log loss of both optimizers in each period of the stream, with the shifts of the log."""
    figure, axes = panels(1, 1, WIDTH, 2.4)
    panel = axes[0, 0]
    processed = result.processed_events
    for shift in log.shifts:
        if shift < processed:
            panel.axvline(shift, color=palette.TARGET, lw=1, ls=":")
    colors = palette.arm_colors([arm.name for arm in result.arms])
    starts = [result.warm_up or 0, *result.period_ends[:-1]]
    middles = [(start + end) / 2 for start, end in zip(starts, result.period_ends, strict=True)]
    for arm in result.arms:
        panel.plot(middles, arm.own_loss_by_period, "o-", ms=3.5, lw=1.5, color=colors[arm.name], label=arm.name)
    panel.axhline(result.best_constant, color=palette.MUTED, lw=0.8, ls="--", label="best constant prediction")
    panel.set(xlabel="events", ylabel="log loss", xlim=(0, processed))
    panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, handlelength=1, columnspacing=1)
    return figure
