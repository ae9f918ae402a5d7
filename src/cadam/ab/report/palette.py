"""The look of every figure: its panels and its colours.

The report turns the colours into CSS variables, so that figures follow light and dark. Any other colour stays as it is
in both modes, which only suits what brings its own background, like a colour scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cadam.statistics.intervals import Array

NEEDS = "figures need matplotlib: in a clone of the project, pip install '.[online]'"
"""What to say where it is not installed."""

INK, MUTED, GRID, PAPER = "#1f2430", "#6b7280", "#d5d9e0", "#fefefe"
ADAM, CADAM, TARGET = "#c8553d", "#2a6f97", "#8a8f98"
SERIES = (CADAM, ADAM, "#5b8c5a", "#8e6c8a", "#c2973b", "#3c8d8a", "#a0527a", "#7a7f45")
"""For more lines than two; CAdam is always the first, Adam the second."""

BETTER, NEUTRAL, WORSE = "#2b6f97", "#f7f7f7", "#c8563d"
ON_PALE, ON_STRONG = "#20242f", "#f8f8f8"
"""Ends and middle of a colour scale, and text on it: the same in light and dark."""

DARK = {
    INK: "#e6e8ee",
    MUTED: "#a2a9b5",
    GRID: "#394150",
    PAPER: "#14171d",
    ADAM: "#f08b73",
    CADAM: "#6db8e0",
    TARGET: "#8d94a0",
    "#5b8c5a": "#8cc48b",
    "#8e6c8a": "#c6a3c2",
    "#c2973b": "#e4bd67",
    "#3c8d8a": "#6fc7c3",
    "#a0527a": "#dd8fb6",
    "#7a7f45": "#b9bf7c",
}
"""What each becomes on a dark page."""

STYLE: dict[Any, Any] = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "path.simplify_threshold": 0.25,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
"""Matplotlib's settings while figures are drawn and saved."""


def panels(rows: int, columns: int, width: float, height: float, **sharing: Any) -> tuple[Figure, Array]:
    """A figure with a grid of plain panels, always as a matrix."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(NEEDS) from error
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    axes = figure.subplots(rows, columns, squeeze=False, **sharing)
    for panel in axes.flat:
        panel.set_facecolor(PAPER)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(MUTED)
        panel.tick_params(colors=MUTED, labelsize=8, which="both")
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_color(INK)
            text.set_fontsize(9)
    return figure, axes
