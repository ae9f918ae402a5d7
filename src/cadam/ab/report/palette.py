"""The style of all figures: their colors, fonts and lines.

Each optimizer has one color in every figure: CAdam is blue, Adam is orange-red, and other arms take the next colors of
one fixed list. Pages turn the colors of this module into CSS variables, so that figures follow the light and the dark
mode. Any other color is the same in both modes, which only suits parts that bring their own background, such as a
color scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NEEDS = "figures need matplotlib: in a clone of the project, pip install '.[online]'"
"""The message if matplotlib is not installed."""

INK, MUTED, GRID, PAPER = "#1f2430", "#6b7280", "#d5d9e0", "#fefefe"
"""The colors of text, secondary text, grid lines and the background."""
ADAM, CADAM, TARGET = "#c8553d", "#2a6f97", "#8a8f98"
SERIES = (CADAM, ADAM, "#5b8c5a", "#8e6c8a", "#c2973b", "#3c8d8a", "#a0527a", "#7a7f45")
"""The colors of arms; the first two are reserved for CAdam and Adam."""

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
"""The color that replaces each color in dark mode."""

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
"""The settings of matplotlib while figures are drawn and saved."""


def arm_colors(arms: Iterable[str]) -> dict[str, str]:
    """Return one color per arm: blue for CAdam, orange-red for Adam, and others from `SERIES` in order.

    Options after a colon do not matter: one arm of CAdam and one of Adam take their colors, and further arms of the
    same optimizer take colors from the list.

    Example:
        >>> arm_colors(["Adam", "CAdam:moments=int8"]) == {"Adam": ADAM, "CAdam:moments=int8": CADAM}
        True
    """
    reserved = {"CAdam": CADAM, "Adam": ADAM}
    colors: dict[str, str] = {}
    for arm in arms:
        color = reserved.get(arm.partition(":")[0])
        if color is None or color in colors.values():
            # The reserved colors come last, for comparisons of many arms without CAdam or Adam.
            color = next(c for c in (*SERIES[2:], *SERIES[:2]) if c not in colors.values())
        colors[arm] = color
    return colors


def css_variable(color: str) -> str:
    """Return the name of the CSS variable for a color of the palette."""
    return f"--c{color[1:]}"


def color_css() -> str:
    """Return CSS variables for the colors of the palette, in light and dark mode."""
    light = "".join(f"{css_variable(color)}:{color};" for color in DARK)
    dark = "".join(f"{css_variable(color)}:{other};" for color, other in DARK.items())
    names = {
        "ink": INK,
        "muted": MUTED,
        "line": GRID,
        "paper": PAPER,
        "accent": CADAM,
        "warn": ADAM,
        "good": SERIES[2],
    }
    aliases = "".join(f"--{name}:var({css_variable(color)});" for name, color in names.items())
    return f":root{{{light}{aliases}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"
