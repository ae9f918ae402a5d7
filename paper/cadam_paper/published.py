"""Access to the published results, and the formatting of numbers in the tables of the documentation.

The published results are the archive in results/. The other modules of the documentation (`pages`, `evidence`,
`claims` and `stream_tables`) take every number from the functions of this module.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cadam.statistics.intervals import Interval, t_quantile

from . import catalog
from .harness import runner
from .harness.archive import Archive
from .harness.experiment import Plan
from .harness.summary import Row, Summary

ROOT = Path(__file__).parents[2]
"""The root of the repository."""


@cache
def archive() -> Archive:
    """Open the archive of the repository."""
    return Archive(ROOT / "results")


@cache
def load(name: str) -> runner.Request:
    """Load an experiment with its published results, for the plan that it was archived with.

    Raises:
        LookupError: If the archive has no plan of the experiment.
    """
    plan = archive().plan(catalog.find(name))
    if plan is None:
        raise LookupError(f"{name} is not in {archive().root}")
    return _load_plan(name, plan)


@cache
def load_full_scale(name: str) -> runner.Request:
    """Load the published results of an experiment at full scale, even if some of its runs are missing."""
    return _load_plan(name, catalog.find(name).plan("full"))


def _load_plan(name: str, plan: Plan) -> runner.Request:
    request = runner.Request(catalog.find(name), plan)
    runner.look_up(request, archive().find)
    return request


@cache
def is_complete(name: str) -> bool:
    """Return whether the archive has every run of the plan that the experiment was archived with."""
    return archive().plan(catalog.find(name)) is not None and load(name).complete


@cache
def summary(name: str) -> Summary:
    """Summarize the published results of an experiment."""
    request = load(name)
    return request.experiment.summary(request.results)


def find_row(name: str, prefix: str) -> Row:
    """Return the only row of an experiment's summary whose label starts with `prefix`.

    Raises:
        LookupError: If no row or several rows match.
    """
    rows = find_rows(name, prefix)
    if len(rows) != 1:
        raise LookupError(f"{name}: {len(rows)} rows have a label that starts with {prefix!r}, expected one")
    return rows[0]


def find_rows(name: str, prefix: str = "", suffix: str = "") -> list[Row]:
    """Return the rows of an experiment's summary whose labels have this prefix and suffix."""
    return [row for row in summary(name).rows if row.label.startswith(prefix) and row.label.endswith(suffix)]


def difference_of(row: Row, scale: float = 1.0) -> Interval:
    """Return the difference of a row and its interval, multiplied by `scale`."""
    mean, low, high = (scale * row.values[name] for name in ("difference", "low", "high"))
    return Interval(mean, low, high, row.seeds)


def is_significant_among(difference: Interval, count: int) -> bool:
    """Whether a difference is significant as one of `count` comparisons, by the Bonferroni correction.

    Dunn (1961), "Multiple comparisons among means", Journal of the American Statistical Association 56(293). The
    difference is significant if its interval at the level 1 - 0.05 / count excludes 0.
    """
    ratio = t_quantile(1 - 0.05 / count, difference.count - 1) / t_quantile(0.95, difference.count - 1)
    return abs(difference.mean) > ratio * difference.half_width


def format_interval(interval: Interval) -> str:
    """Format a difference and its interval, in bold if the interval excludes 0."""
    text = f"{interval.mean:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"
    return f"**{text}**" if interval.low > 0 or interval.high < 0 else text


def format_rate(rate: float) -> str:
    """Format a learning rate with as few characters as possible."""
    return f"{rate:g}" if rate >= 0.01 else f"{rate:.0e}".replace("e-0", "e-")


def table_header(*columns: str) -> list[str]:
    """Return the two header lines of a Markdown table."""
    return [table_row(*columns), table_row(*["---"] * len(columns))]


def table_row(*columns: str) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(columns)} |"
