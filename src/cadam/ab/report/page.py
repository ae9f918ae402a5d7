"""The HTML page of a study or of several experiments: one file that needs nothing else.

A page with several sections begins with a table of verdicts. Each section has the recommendation or the verdict, the
figures, and all numbers. The A/B renders one section; the report of the paper renders one per experiment.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from ...statistics.comparison import Kind
from ..results import Results
from ..summary import Row, Summary
from ..text import format_duration
from ..verdict import Recommendation, kind_names
from . import palette
from .figures import css_variable

if TYPE_CHECKING:
    from jinja2 import Environment

KIND_NAMES = kind_names("better", "worse")


@dataclass(frozen=True)
class Heading:
    """The title of a page, and paragraphs at its beginning and its end."""

    title: str
    lead: Sequence[str] = ()
    foot: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """One study or experiment on a page."""

    name: str
    """The id of the section, for links."""
    title: str
    description: str
    command: str
    """The command that computes the results."""
    facts: str
    """The cost and the provenance of the results."""
    explanation: str = ""
    """An explanation of the measures."""
    claim: str = ""
    """The claim of a paper that the section is about."""
    summary: Summary | None = None
    """The summary; None if results are missing."""
    state: str = ""
    """If results are missing: which ones."""
    figures: Mapping[str, str] = field(default_factory=dict)
    """SVG drawings by caption."""
    notes: Sequence[str] = ()


def render_page(heading: Heading, sections: Sequence[Section]) -> str:
    """Render a page as HTML."""
    template = page_templates().get_template("page.html.j2")
    return template.render(heading=heading, sections=sections, color_css=_color_css()).lstrip()


@lru_cache
def page_templates() -> Environment:
    """Load the templates of pages, with the functions that they call."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cadam.ab.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals |= {
        "kind_names": KIND_NAMES,
        "main_rows": main_rows,
        "count_kinds": count_kinds,
        "row_marks": row_marks,
        "interval_rows": interval_rows,
        "table_columns": table_columns,
    }
    return environment


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that an overview shows.

    If rows are labeled "condition: measure" and every condition has the first measure, these are the rows of the first
    measure. Otherwise they are all rows that compare something.
    """
    compared = [row for row in rows if row.verdict_kind is not None]
    parts = [row.label.partition(": ") for row in compared]
    first_measure = parts[0][2] if parts else ""
    by_first = [row for row, (_, _, measure) in zip(compared, parts, strict=True) if measure == first_measure]
    conditions = {condition for condition, _, measure in parts if measure}
    has_all = {row.label.partition(": ")[0] for row in by_first} == conditions
    return by_first if first_measure and has_all else compared


def count_kinds(rows: Sequence[Row]) -> dict[Kind, int]:
    """Return how many rows have each kind of verdict, without the kinds that do not occur."""
    counts = Counter(row.verdict_kind for row in rows)
    return {kind: counts[kind] for kind in KIND_NAMES if counts[kind]}


@dataclass(frozen=True)
class Mark:
    """One interval in a small picture, in coordinates of the picture: 0 is at 100, the largest end 95 away."""

    kind: str
    low: float
    middle: float
    high: float
    text: str


def row_marks(rows: Sequence[Row]) -> list[Mark]:
    """Return the intervals of rows for a picture, on a common scale with 0 in the middle."""
    known = [row for row in rows if _has_ends(row.values)]
    scale = _picture_scale([row.values for row in known])
    marks = []
    for row in known:
        low, high = row.values["low"], row.values["high"]
        middle = row.values.get("difference", (low + high) / 2)
        text = f"{row.label}: {row.interval}"
        marks.append(Mark(str(row.verdict_kind), scale * low, scale * middle, scale * high, text))
    return marks if scale else []


def interval_rows(recommendation: Recommendation) -> list[tuple[str, Kind, str, list[Mark]]]:
    """Return a row for each deciding interval of a recommendation: its source, kind, side and mark.

    All marks are on one scale. An interval that is unknown has no mark.
    """
    intervals = recommendation.values.get("intervals", {})
    scale = _picture_scale([ends for ends in intervals.values() if _has_ends(ends)])
    rows: list[tuple[str, Kind, str, list[Mark]]] = []
    for source, ends in intervals.items():
        low, high = ends["low"], ends["high"]
        kind: Kind = "better" if low > 0 else "worse" if high < 0 else "inconclusive"
        side = {"better": "ahead", "worse": "behind"}.get(kind, "inconclusive" if _has_ends(ends) else "unknown")
        marks = [Mark(kind, scale * low, scale * (low + high) / 2, scale * high, source)]
        rows.append((source, kind, side, marks if scale and _has_ends(ends) else []))
    return rows


def _has_ends(values: Mapping[str, float]) -> bool:
    return all(math.isfinite(values.get(end, math.nan)) for end in ("low", "high"))


def _picture_scale(intervals: Sequence[Mapping[str, float]]) -> float:
    """Return the factor that puts the farthest end 95 away from 0; 0 if there is nothing to show."""
    farthest = max((max(abs(ends["low"]), abs(ends["high"])) for ends in intervals), default=0.0)
    return 95 / farthest if farthest else 0.0


def table_columns(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return the columns of the table: the head, the label on a phone, and the attribute of a row.

    The column of a paper's numbers is left out if no row has one.
    """
    columns = [
        ("", "", "label"),
        ("paper", "paper", "reference"),
        ("measured", "measured", "measured"),
        ("difference [95% interval]", "difference", "interval"),
        ("A/A noise floor", "noise floor", "noise_floor"),
        ("seeds", "seeds", "seeds"),
        ("verdict", "verdict", "verdict"),
    ]
    has_reference = any(row.reference for row in rows)
    return [column for column in columns if column[2] != "reference" or has_reference]


def describe_cost(results: Results, unit: str, is_shared: bool = False) -> str:
    """Return where numbers come from: how many runs, their cost, devices and versions.

    Args:
        results: The results.
        unit: The plural noun for the results.
        is_shared: Whether runs shared a device, so that their memory is that of all together.
    """
    if not results:
        return "Nothing computed yet."
    versions = _distinct(", ".join(f"{k} {v}" for k, v in r.provenance.versions.items()) for r in results)
    devices = _distinct(r.provenance.device for r in results)
    memory = max(r.provenance.peak_memory for r in results) / 1e6
    return (
        f"{len(results)} {unit}, {format_duration(results.seconds)} of computing in total, at most {memory:.0f} MB "
        f"{'at once' if is_shared else 'each'}; {devices}; {versions}."
    )


def _distinct(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


def _color_css() -> str:
    """Return CSS variables for the colors of the palette, in light and dark mode."""
    light = "".join(f"{css_variable(color)}:{color};" for color in palette.DARK)
    dark = "".join(f"{css_variable(color)}:{other};" for color, other in palette.DARK.items())
    names = {
        "ink": palette.INK,
        "muted": palette.MUTED,
        "line": palette.GRID,
        "paper": palette.PAPER,
        "accent": palette.CADAM,
        "warn": palette.ADAM,
        "good": palette.SERIES[2],
    }
    aliases = "".join(f"--{name}:var({css_variable(color)});" for name, color in names.items())
    return f":root{{{light}{aliases}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"
