"""The HTML page of an A/B: one file that needs nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...printable import printable_lines
from ...statistics.comparison import Kind
from ..result import UNITS, PairResult, Result
from ..study import Study
from ..text import format_duration
from ..wording import action, all_intervals, format_interval, headline, objection, reasons, summary, warnings
from . import palette
from .figures import result_figures, styled, svg

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Mark:
    """One interval in a small picture, in which 0 is at 100 and the farthest end is 95 away."""

    source: str
    kind: Kind
    low: float
    middle: float
    high: float
    text: str
    is_known: bool


def render_page(title: str, study: Study, result: Result, command: str, run_command: str) -> str:
    """Render the page of a result as HTML.

    Args:
        title: The title.
        study: The comparison.
        result: The result.
        command: The command that computes the result.
        run_command: The command that learns with the recommended arm; empty if there is none.
    """
    figures = styled(partial(result_figures, result))
    drawings = {
        caption: svg(figure, f"figure-{number}", caption) for number, (caption, figure) in enumerate(figures.items(), 1)
    }
    template = template_environment("cadam.ab.report").get_template("page.html.j2")
    return template.render(
        title=title,
        study=study,
        result=result,
        unit=UNITS[result.metric],
        colors=palette.arm_colors(study.arms),
        cards=verdict_cards(result),
        figures=drawings,
        warnings=warnings(result),
        command=command,
        run_command=run_command,
        duration=format_duration(result.seconds),
        color_css=palette.color_css(),
        css_variable=palette.css_variable,
    ).lstrip()


def verdict_cards(result: Result) -> list[dict[str, Any]]:
    """Return the variables of the card of each arm: its verdict and the intervals behind it."""
    return [
        {
            "kind": "inconclusive" if objection(pair, result) else pair.kind,
            "action": action(pair, result),
            "headline": headline(pair, result),
            "summary": summary(pair, result),
            "marks": interval_marks(pair),
            "reasons": reasons(pair, result),
        }
        for pair in result.pairs
    ]


def render_part(name: str, **variables: Any) -> str:
    """Render a part of the page, such as ``cards.html.j2``, for another page.

    Args:
        name: The file of the template.
        **variables: The variables of the template.
    """
    return template_environment("cadam.ab.report").get_template(name).render(**variables)


def template_environment(package: str) -> Environment:
    """Return the templates of a package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        # Names from data may contain control characters. Markup is text of this package, such as figures.
        finalize=lambda value: printable_lines(value) if type(value) is str else value,
    )


def interval_marks(pair: PairResult) -> list[Mark]:
    """Return the intervals of both parts and over users on one scale; an unknown interval has no ends."""
    intervals = {f"over {source}": each for source, each in all_intervals(pair).items()}
    if pair.users is not None:
        intervals["over users"] = pair.users
    ends = [abs(end) for each in intervals.values() for end in (each.low, each.high) if math.isfinite(end)]
    scale = 95 / max(ends) if ends and max(ends) > 0 else 0.0
    lower_is_better = pair.metric == "log_loss"
    marks = []
    for source, each in intervals.items():
        side = int(each.low > 0) - int(each.high < 0)
        is_lower_better = lower_is_better or source == "over users"
        kind: Kind = "inconclusive" if side == 0 else "better" if (side < 0) == is_lower_better else "worse"
        is_known = math.isfinite(each.half_width)
        low, middle, high = (scale * end if is_known else 0.0 for end in (each.low, each.mean, each.high))
        unit = "%" if source == "over users" else UNITS[pair.metric]
        marks.append(Mark(source, kind, low, middle, high, format_interval(each, unit), is_known))
    return marks
