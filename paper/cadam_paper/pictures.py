"""Pictures of the documentation that are not figures of an experiment: diagrams, a verdict, speeds, and the answer.

`figure_files` writes them. Speeds are read from docs/speed.md, whose tables the tests compare with the results.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cadam.ab.report import palette
from cadam.statistics.intervals import Interval

from . import evidence, judged_streams
from .harness.panels import panels
from .published import ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Diagrams --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A box of a diagram.

    Attributes:
        x: The left edge, in units of the diagram.
        y: The lower edge.
        width: The width.
        height: The height.
        title: The first line, in bold.
        text: Further lines.
        color: The color of the border.
    """

    x: float
    y: float
    width: float
    height: float
    title: str
    text: str = ""
    color: str = palette.MUTED


def diagram(
    width: float,
    height: float,
    boxes: Mapping[str, Box],
    arrows: Sequence[tuple[str, str, str]],
    notes: Sequence[tuple[float, float, str]] = (),
) -> Figure:
    """Draw boxes and arrows.

    Args:
        width: The width of the diagram; a unit is a tenth of an inch.
        height: The height of the diagram.
        boxes: The boxes by name.
        arrows: Triples of the box where an arrow starts, the box where it ends, and its label.
        notes: Triples of a position and a text.
    """
    figure, axes = panels(1, 1, width / 10, height / 10)
    panel = axes[0, 0]
    panel.set(xlim=(0, width), ylim=(0, height))
    panel.axis("off")
    for box in boxes.values():
        _draw_box(panel, box)
    for start, end, label in arrows:
        _draw_arrow(panel, boxes[start], boxes[end], label)
    for x, y, text in notes:
        panel.text(x, y, text, ha="center", va="center", fontsize=9, color=palette.MUTED)
    return figure


def _draw_box(panel: Axes, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch(
        (box.x, box.y),
        box.width,
        box.height,
        boxstyle="round,pad=0,rounding_size=0.8",
        fc=palette.PAPER,
        ec=box.color,
        lw=1.8,
    )
    panel.add_patch(shape)
    middle, lines = box.x + box.width / 2, box.text.count("\n") + 1 if box.text else 0
    top = box.y + box.height / 2 + 0.85 * lines
    panel.text(middle, top, box.title, ha="center", va="center", fontsize=9.5, weight="bold", color=palette.INK)
    if box.text:
        center = top - 1.2 - 0.85 * lines
        panel.text(middle, center, box.text, ha="center", va="center", fontsize=8.5, color=palette.INK)


def _draw_arrow(panel: Axes, start: Box, end: Box, label: str) -> None:
    """Draw an arrow between the nearest sides of two boxes."""
    if start.x + start.width <= end.x or end.x + end.width <= start.x:
        forward = start.x < end.x
        begin_x, end_x = (start.x + start.width, end.x) if forward else (start.x, end.x + end.width)
        level = end.y + end.height / 2
        # A horizontal arrow, if it would not start near a corner.
        is_level = start.y + 1 <= level <= start.y + start.height - 1
        points = ((begin_x, level if is_level else start.y + start.height / 2), (end_x, level))
    else:
        low, high = max(start.x, end.x), min(start.x + start.width, end.x + end.width)
        middle = (low + high) / 2
        downward = start.y > end.y
        begin_y, end_y = (start.y, end.y + end.height) if downward else (start.y + start.height, end.y)
        points = ((middle, begin_y), (middle, end_y))
    style = {"arrowstyle": "-|>", "color": palette.MUTED, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
    panel.annotate("", points[1], points[0], arrowprops=style)
    if label:
        x, y = ((a + b) / 2 for a, b in zip(*points, strict=True))
        vertical = points[0][0] == points[1][0]
        panel.text(
            x + (0.7 if vertical else 0),
            y + (0 if vertical else 0.5),
            label,
            ha="left" if vertical else "center",
            va="center" if vertical else "bottom",
            fontsize=8,
            color=palette.MUTED,
        )


def architecture() -> Figure:
    """Draw how a rule, confidence and an engine make an optimizer."""
    boxes = {
        "rule": Box(1, 11.3, 20, 13, "rule", "Adam, SGDM, Lion,\nRAdam, Yogi, AdaBelief,\nor your own"),
        "confidence": Box(
            30,
            12,
            21,
            13,
            "confidence",
            "an element moves where\nmomentum and gradient\nhave the same sign",
            palette.CADAM,
        ),
    }
    engines = {
        "reference": ("torch operations", "reference, foreach"),
        "cpu": ("C kernels", "CPU, dense and sparse"),
        "cuda": ("Triton kernels", "CUDA, dense and sparse"),
        "jax": ("JAX", "optax transformations"),
        "keras": ("Keras", "three backends"),
    }
    for number, (name, (title, text)) in enumerate(engines.items()):
        boxes[name] = Box(61, 29 - 7 * number, 22, 5.6, title, text)
    arrows = [("rule", "confidence", ""), *(("confidence", name, "") for name in engines)]
    notes = ((11, 27.5, "written once,\nfor one element"), (40.5, 27.5, "on or off"), (72, 36, "where it runs"))
    return diagram(84, 38, boxes, arrows, notes)


def data_flow() -> Figure:
    """Draw the path of an event through the online learner."""
    boxes = {
        "source": Box(1, 22, 15, 8, "events", "file, Redis, Kafka\nor HTTP"),
        "schema": Box(22, 22, 13, 8, "schema", "check and\nencode"),
        "predict": Box(41, 22, 13, 8, "predict", "before it\nlearns", palette.CADAM),
        "waiting": Box(62, 22, 16, 8, "join by id", "events wait for\ntheir labels"),
        "learn": Box(62, 9, 16, 8, "learn", "one step of the\noptimizer", palette.CADAM),
        "rejected": Box(22, 9, 13, 6, "rejected", "with a reason"),
        "labels": Box(62, 34, 16, 5, "labels, late or not"),
        "metrics": Box(41, 9, 13, 8, "metrics", "status page,\nPrometheus"),
        "checkpoint": Box(62, 0.6, 16, 4.6, "checkpoint"),
    }
    arrows = [
        ("source", "schema", ""),
        ("schema", "predict", ""),
        ("predict", "waiting", ""),
        ("labels", "waiting", ""),
        ("waiting", "learn", "matched"),
        ("schema", "rejected", "does not fit"),
        ("learn", "metrics", ""),
        ("predict", "metrics", "score"),
        ("learn", "checkpoint", ""),
    ]
    return diagram(80, 40, boxes, arrows)


def service() -> Figure:
    """Draw the parts of the learning service."""
    boxes = {
        "application": Box(1, 5, 16, 21, "application", "asks for scores,\nreports labels"),
        "workers": Box(31, 18, 18, 8, "HTTP workers", "answer from the\nlatest model"),
        "queue": Box(31, 5, 18, 8, "event log", "on disk before\nthe answer"),
        "learner": Box(61, 5, 20, 8, "learner", "champion, and\nchallengers beside it", palette.CADAM),
        "models": Box(61, 18, 20, 8, "published model", "guarded; promotion\nand rollback"),
    }
    arrows = [
        ("application", "workers", "/predict"),
        ("application", "queue", "/feedback, /learn"),
        ("queue", "learner", ""),
        ("learner", "models", "publishes"),
        ("models", "workers", "loads"),
    ]
    return diagram(82, 30, boxes, arrows)


def texts(draw: Callable[[], Figure]) -> list[str]:
    """List the texts of a diagram with their positions, to detect that the image file is outdated."""
    (panel,) = draw().axes
    return [f"{text.get_text()} {text.get_position()}" for text in panel.texts]


# The verdict of an A/B -------------------------------------------------------------------------------------------

VERDICT_STREAM = "flights-3m"
"""The stream whose verdict the documentation shows. Its gain is close to the median of all judged streams."""

VERDICT_TITLE = "cadam ab on 3 million flights"


def verdict_card() -> Figure:
    """Draw the card at the top of the report of `cadam ab` for one stream."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    result = judged_streams.verdicts()[VERDICT_STREAM]
    pair, (verdict, *_) = result["pairs"][0], result["verdicts"]
    color = {"better": palette.SERIES[2], "worse": palette.ADAM}.get(pair["kind"], palette.MUTED)
    lines = textwrap.wrap(verdict["headline"], 52)
    height = 20.2 + 2.4 * len(lines)
    figure, axes = panels(1, 1, 5.8, height / 10)
    panel = axes[0, 0]
    panel.set(xlim=(0, 58), ylim=(0, height))
    panel.axis("off")
    frame = FancyBboxPatch(
        (0.6, 0.6), 56.8, height - 1.2, boxstyle="round,pad=0,rounding_size=0.8", fc="none", ec=palette.GRID
    )
    panel.add_patch(frame)
    panel.add_patch(Rectangle((0.6, 0.6), 1.2, height - 1.2, color=color))
    headline = "\n".join(lines)
    panel.text(3.5, height - 1.9, VERDICT_TITLE, va="top", fontsize=8.5, color=palette.MUTED)
    panel.text(3.5, height - 4.4, headline, va="top", fontsize=11, weight="bold", color=palette.INK, linespacing=1.35)
    chip = {"boxstyle": "round,pad=0.35,rounding_size=0.7", "fc": color, "ec": "none"}
    panel.text(4.2, 13.9, verdict["action"], va="center", fontsize=9, weight="bold", color=palette.PAPER, bbox=chip)
    recent, whole = pair["recent_over_time"], pair["over_time"]
    intervals = {
        "over time": whole,
        f"over {pair['over_seeds']['count']} seeds": pair["over_seeds"],
        f"last {recent['count'] / whole['count']:.0%}" if recent else "": recent,
    }
    known = {name: interval for name, interval in intervals.items() if interval is not None}
    reach = max(abs(end) for interval in known.values() for end in (interval["low"], interval["high"]))
    scale, middle = 11 / reach, 26
    panel.plot([middle, middle], [2.2, 11.6], color=palette.MUTED, lw=1)
    for row, (name, interval) in enumerate(known.items()):
        y = 10.2 - 3.5 * row
        low, mean, high = (middle + scale * interval[end] for end in ("low", "mean", "high"))
        panel.text(3.5, y, name, va="center", fontsize=9.5, color=palette.INK)
        panel.plot([low, high], [y, y], color=color, lw=2)
        panel.plot([mean], [y], "o", color=color, ms=6)
        label = f"{interval['mean']:+.2f}% ({interval['low']:+.2f} to {interval['high']:+.2f})"
        panel.text(30, y, label, va="center", fontsize=9.5, color=palette.INK)
    unit = "change of the log loss with interval; left of 0, CAdam is better"
    panel.text(13, 12.6, unit, va="center", fontsize=8.5, color=palette.MUTED)
    panel.text(middle, 1.5, "0", ha="center", va="center", fontsize=8.5, color=palette.MUTED)
    return figure


def verdict_numbers() -> list[str]:
    """List the texts and numbers of the verdict card."""
    return [VERDICT_TITLE, *(str(judged_streams.verdicts()[VERDICT_STREAM][part]) for part in ("pairs", "verdicts"))]


# Speed -----------------------------------------------------------------------------------------------------------

SPEED_ROWS = {
    "one huge tensor, against torch's fused Adam": "one huge tensor\n(against fused Adam)",
    "2,000 tiny tensors": "2,000 tiny tensors\n(against fused Adam)",
    "a table of 1M x 16, 260,000 ids, against SparseAdam": "a table of 1M x 16\n(against SparseAdam)",
}
"""The rows of docs/speed.md that the chart shows, and their labels."""


def speeds() -> dict[str, list[tuple[float, float]]]:
    """Return the range of times as fast, on two CPU cores and on the H200, by label."""
    page = (ROOT / "docs" / "speed.md").read_text("utf-8")
    ranges = {}
    for name, label in SPEED_ROWS.items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*)$", page, re.MULTILINE)
        numbers = [[float(n) for n in re.findall(r"\d+(?:\.\d+)?", cell)] for cell in row.split("|")[:2]]
        ranges[label] = [(min(cell), max(cell)) for cell in numbers]
    return ranges


def speed_chart() -> Figure:
    """Draw how many times as fast a step of CAdam is as the step of torch."""
    figure, axes = panels(1, 1, 5.8, 2.9)
    panel = axes[0, 0]
    positions = []
    for row, (label, devices) in enumerate(speeds().items()):
        positions.append((row, label))
        for (low, high), offset, alpha in zip(devices, (-0.2, 0.2), (1.0, 0.55), strict=True):
            y = row + offset
            panel.barh(y, low - 1, 0.36, left=1, color=palette.CADAM, alpha=alpha, lw=0)
            if high > low:
                panel.plot([low, high], [y, y], color=palette.INK, lw=1.4)
            text = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            panel.text(max(high, 1) * 1.04, y, text, va="center", fontsize=8.5, color=palette.INK)
    for name, alpha in (("two CPU cores", 1.0), ("H200", 0.55)):
        panel.barh([math.nan], [math.nan], color=palette.CADAM, alpha=alpha, label=name)
    panel.axvline(1, color=palette.ADAM, lw=1.4)
    panel.set_yticks([row for row, _ in positions], [label for _, label in positions])
    panel.set(
        xscale="log",
        xlim=(0.8, 30),
        ylim=(2.6, -0.6),
        xlabel="optimizer step: times as fast as torch (red line), slowest to fastest run",
    )
    panel.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    panel.minorticks_off()
    panel.tick_params(axis="y", labelcolor=palette.INK, length=0)
    panel.legend(loc="upper right", fontsize=8.5)
    return figure


# The advice by situation ------------------------------------------------------------------------------------------


def switch_rows() -> list[tuple[str, dict[str, list[Interval]]]]:
    """Return the intervals of each situation of the README's table by unit, with gains of CAdam as positive numbers."""
    pairs = evidence.adam_pairs()
    images = {label: [pair.at_own_rates for (_, at), pair in pairs.items() if at == label] for _, label in pairs}
    shifted, steady = (
        [one.difference for label in labels for one in images[label]]
        for labels in (("sudden 80°", "continuous 2°"), ("without change", "noise 40%"))
    )
    streams = [_reverse(Interval(**pair["over_time"])) for pair in judged_streams.first_pairs() if pair["over_time"]]
    high, low = (
        [one.difference for one in compare(pairs)] for compare in (evidence.compare_above, evidence.compare_below)
    )
    points, percent = "points of accuracy", "% of the log loss"
    return [
        ("images that are rotated during training", {points: shifted}),
        ("a learning rate that is too high", {points: high}),
        ("images without shift, or with label noise", {points: steady}),
        ("a learning rate that is too low", {points: low}),
        ("event streams (intervals over time)", {percent: streams}),
    ]


def _reverse(interval: Interval) -> Interval:
    """Return the interval of the negative quantity, for a loss."""
    return Interval(-interval.mean, -interval.high, -interval.low, interval.count)


def switch_figure() -> Figure:
    """Draw every interval behind the README's table of situations."""
    rows = switch_rows()
    figure, axes = panels(len(rows), 1, 5.8, 0.75 + 0.16 * sum(len(v) for _, by in rows for v in by.values()) + 2.4)
    for panel, (situation, by_unit) in zip(axes[:, 0], rows, strict=True):
        ((unit, intervals),) = by_unit.items()
        _draw_intervals(panel, intervals, 6.0 if "accuracy" in unit else 25.0)
        panel.set_title(situation, loc="left")
        if situation == rows[-1][0] or situation == rows[-2][0]:
            panel.set_xlabel(f"gain of CAdam, {unit}; right of 0, CAdam is better")
    return figure


def _draw_intervals(panel: Axes, intervals: Iterable[Interval], limit: float) -> None:
    ordered = sorted(intervals, key=lambda interval: interval.mean)
    panel.axvline(0, color=palette.MUTED, lw=0.8)
    for y, each in enumerate(ordered):
        color = palette.CADAM if each.low > 0 else palette.ADAM if each.high < 0 else palette.TARGET
        panel.plot([max(each.low, -limit), min(each.high, limit)], [y, y], color=color, lw=1.8)
        panel.plot([max(-limit, min(limit, each.mean))], [y], "o", color=color, ms=4.5)
    panel.set(xlim=(-limit, limit), ylim=(-0.7, len(ordered) - 0.3), yticks=[])


Picture = tuple[Callable[[], "Figure"], Callable[[], list[str]]]
"""The function that draws a picture, and the function that lists its numbers or texts."""
DIAGRAMS: dict[str, Callable[[], Figure]] = {"architecture": architecture, "data-flow": data_flow, "service": service}
"""The diagrams by the name of their file."""
PICTURES: dict[str, Picture] = {
    "docs/img/verdict.svg": (verdict_card, verdict_numbers),
    "docs/img/speed.svg": (speed_chart, lambda: ["optimizer step", str(speeds())]),
    "docs/img/switch.svg": (switch_figure, lambda: [str(switch_rows())]),
    **{f"docs/img/{name}.svg": (draw, partial(texts, draw)) for name, draw in DIAGRAMS.items()},
}
"""The pictures by the path of their file."""
