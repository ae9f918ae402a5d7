"""The report of experiments: one HTML page, rendered by the template of the A/B.

Every number on the page comes from results of the cache or the archive.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cadam.ab.report.figures import styled, svg
from cadam.ab.report.page import Heading, Section, describe_cost, render_page

from .experiment import Experiment, Plan
from .runner import Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    return render_page(heading, [section(request) for request in requests])


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
        summary=experiment.summary(request.results) if request.complete else None,
        state="" if request.complete else describe_state(request),
        figures=figures,
        notes=experiment.notes,
    )


def describe_state(request: Request) -> str:
    """Return which results of an incomplete experiment there are."""
    if request.unknown:
        return f"Unknown: {request.unknown}."
    done, missing = len(request.results), len(request.missing)
    return f"Incomplete: {done} of at least {done + missing} runs are there; the others failed or were not computed."
