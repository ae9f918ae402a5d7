"""The HTML page of a study: one file that needs nothing else.

It has the recommendation, the figures and all numbers. The report of the paper extends the template: it has a section
for each experiment, and begins with a table of verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cadam.ab.report import palette
from cadam.ab.report.page import template_environment
from cadam.ab.text import format_duration
from cadam.statistics.comparison import Kind

from .results import Results
from .summary import Row, Summary
from .verdict import Recommendation

if TYPE_CHECKING:
    from jinja2 import Environment, Template


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
    explanation: str
    """An explanation of the measures."""
    summary: Summary
    figures: Mapping[str, str] = field(default_factory=dict)
    """SVG drawings by caption."""
    notes: Sequence[str] = ()


def render_page(title: str, section: Section) -> str:
    """Render the page of a study as HTML."""
    return render(page_templates().get_template("page.html.j2"), title, [section])


def render(template: Template, title: str, sections: Sequence[Section], **variables: Any) -> str:
    """Render a template that extends the page of a study, or that page itself."""
    return template.render(title=title, sections=sections, color_css=palette.color_css(), **variables).lstrip()


def page_templates() -> Environment:
    """Return the templates of pages, with the functions that they call."""
    environment = template_environment("cadam_paper.harness")
    environment.globals |= {"interval_rows": interval_rows, "table_columns": table_columns}
    return environment


@dataclass(frozen=True)
class Mark:
    """One interval in a small picture, in coordinates of the picture: 0 is at 100, the largest end 95 away."""

    kind: str
    low: float
    middle: float
    high: float
    text: str


def interval_rows(recommendation: Recommendation) -> list[tuple[str, Kind, str, list[Mark]]]:
    """Return a row for each deciding interval of a recommendation: its source, kind, side and mark.

    All marks are on one scale. An interval that is unknown has no mark.
    """
    intervals = recommendation.values.get("intervals", {})
    scale = picture_scale([ends for ends in intervals.values() if has_ends(ends)])
    rows: list[tuple[str, Kind, str, list[Mark]]] = []
    for source, ends in intervals.items():
        low, high = ends["low"], ends["high"]
        kind: Kind = "better" if low > 0 else "worse" if high < 0 else "inconclusive"
        side = {"better": "ahead", "worse": "behind"}.get(kind, "inconclusive" if has_ends(ends) else "unknown")
        marks = [Mark(kind, scale * low, scale * (low + high) / 2, scale * high, source)]
        rows.append((source, kind, side, marks if scale and has_ends(ends) else []))
    return rows


def has_ends(values: Mapping[str, float]) -> bool:
    """Whether an interval has two finite ends."""
    return all(math.isfinite(values.get(end, math.nan)) for end in ("low", "high"))


def picture_scale(intervals: Sequence[Mapping[str, float]]) -> float:
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
