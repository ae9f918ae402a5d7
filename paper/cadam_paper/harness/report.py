"""The report of experiments as one HTML page, whose template extends that of the A/B report.

It begins with a table of verdicts, and each experiment has a section with its verdict, figures and all numbers. Every
number on the page comes from results of the cache or the archive.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cadam.ab.report.figures import styled, svg
from cadam.statistics.comparison import Kind

from . import page as study_page
from .experiment import Experiment, Plan
from .page import Mark, describe_cost, has_ends, picture_scale
from .runner import Request
from .summary import Row, Summary
from .verdict import kind_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


KIND_NAMES = kind_names("better", "worse")


@dataclass(frozen=True)
class Heading:
    """The title of a page, and paragraphs at its beginning and its end."""

    title: str
    lead: Sequence[str] = ()
    foot: Sequence[str] = ()


@dataclass(frozen=True)
class Section(study_page.Section):
    """One experiment on a page."""

    claim: str = ""
    """The claim of the paper that the experiment is about."""
    state: str = ""
    """If results are missing: which ones. There is no summary then."""


def command(experiment: Experiment, plan: Plan) -> str:
    """Return the command that computes an experiment."""
    seeds = "" if plan.seeds == experiment.seeds[plan.scale] else f" --seeds {plan.seeds}"
    data = f" --data {shlex.quote(plan.data)}" if plan.data else ""
    rows = "" if plan.rows is None else f" --rows {plan.rows}"
    return f"cadam reproduce {experiment.name} --{plan.scale}{seeds}{data}{rows}"


def draw(experiment: Experiment, request: Request) -> Mapping[str, Figure]:
    """Draw the figures of an experiment, by caption."""
    return styled(partial(experiment.figures, request.results))


def page(requests: Sequence[Request], heading: Heading) -> str:
    """Render the page of several experiments."""
    from jinja2 import ChoiceLoader, PackageLoader

    templates = study_page.page_templates()
    assert templates.loader is not None
    templates.loader = ChoiceLoader([templates.loader, PackageLoader("cadam_paper.harness", ".")])
    templates.globals |= {
        "kind_names": KIND_NAMES,
        "main_rows": main_rows,
        "count_kinds": count_kinds,
        "row_marks": row_marks,
    }
    sections = [section(request) for request in requests]
    template = templates.get_template("report.html.j2")
    return study_page.render(template, heading.title, sections, lead=heading.lead, foot=heading.foot)


def section(request: Request) -> Section:
    """Return the section of one experiment, without numbers and figures if results are missing."""
    experiment = request.experiment
    runs_side_by_side = experiment.side_by_side
    is_shared = runs_side_by_side is not None and any(runs_side_by_side(result.spec) for result in request.results)
    figures: dict[str, str] = {}
    if request.complete:
        for number, (caption, figure) in enumerate(draw(experiment, request).items(), 1):
            figures[caption] = svg(figure, f"{experiment.name}-{number}", caption)
    return Section(
        name=experiment.name,
        title=experiment.title,
        description=experiment.shows,
        command=command(experiment, request.plan),
        facts=describe_cost(request.results, "runs", is_shared),
        explanation=experiment.measure,
        claim=experiment.claim,
        summary=experiment.summary(request.results) if request.complete else Summary("", []),
        state="" if request.complete else describe_state(request),
        figures=figures,
        notes=experiment.notes,
    )


def describe_state(request: Request) -> str:
    """Describe which results of an incomplete experiment exist."""
    if request.unknown:
        return f"Unknown: {request.unknown}."
    done, missing = len(request.results), len(request.missing)
    return f"Incomplete: {done} of at least {done + missing} runs are there; the others failed or were not computed."


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


def row_marks(rows: Sequence[Row]) -> list[Mark]:
    """Return the intervals of rows for a picture, on a common scale with 0 in the middle."""
    known = [row for row in rows if has_ends(row.values)]
    scale = picture_scale([row.values for row in known])
    marks = []
    for row in known:
        low, high = row.values["low"], row.values["high"]
        middle = row.values.get("difference", (low + high) / 2)
        text = f"{row.label}: {row.interval}"
        marks.append(Mark(str(row.verdict_kind), scale * low, scale * middle, scale * high, text))
    return marks if scale else []
