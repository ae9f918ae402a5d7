"""The panels of the paper's figures, and the color scale of its heat maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cadam.ab.report import palette
from cadam.statistics.intervals import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETTER, NEUTRAL, WORSE = "#2b6f97", "#f7f7f7", "#c8563d"
"""The two ends and the middle of a color scale, in light and in dark mode."""
ON_PALE, ON_STRONG = "#20242f", "#f8f8f8"
"""The colors of text on the middle and on the ends of the color scale, in light and in dark mode."""


def panels(rows: int, columns: int, width: float, height: float, **sharing: Any) -> tuple[Figure, Array]:
    """Return a figure and the matrix of its panels, in the style of the report.

    Args:
        rows: The number of rows.
        columns: The number of columns.
        width: The width in inches.
        height: The height in inches.
        **sharing: Arguments of `Figure.subplots`, such as `sharex`.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(palette.NEEDS) from error
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=palette.PAPER)
    axes = figure.subplots(rows, columns, squeeze=False, **sharing)
    for panel in axes.flat:
        panel.set_facecolor(palette.PAPER)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(palette.MUTED)
        panel.tick_params(colors=palette.MUTED, labelsize=8, which="both")
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_color(palette.INK)
            text.set_fontsize(9)
    return figure, axes
