"""What the archive has, and how it is written on pages: results by experiment, rows by name, specs of tables."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cadam.ab.summary import Row, Summary
from cadam.statistics.intervals import Interval

from . import catalog
from .harness import runner
from .harness.archive import Archive
from .harness.experiment import Plan

ROOT = Path(__file__).parents[2]


@cache
def archive() -> Archive:
    return Archive(ROOT / "results")


@cache
def request(name: str) -> runner.Request:
    """An experiment as it was archived, with the results that are there."""
    plan = archive().plan(catalog.find(name))
    if plan is None:
        raise LookupError(f"{name} is not in {archive().root}")
    return _looked_up(name, plan)


@cache
def part(name: str) -> runner.Request:
    """What the archive has of an experiment at full scale, be it whole or not."""
    return _looked_up(name, catalog.find(name).plan("full"))


def _looked_up(name: str, plan: Plan) -> runner.Request:
    asked = runner.Request(catalog.find(name), plan)
    runner.look_up(asked, archive().find)
    return asked


@cache
def is_archived(name: str) -> bool:
    """Does the archive have all that an experiment was asked for?"""
    return archive().plan(catalog.find(name)) is not None and request(name).complete


@cache
def summary(name: str) -> Summary:
    """What an archived experiment says."""
    asked = request(name)
    return asked.experiment.summary(asked.results)


def row(name: str, what: str) -> Row:
    """The one line of an archived experiment that begins like this."""
    found = [each for each in summary(name).rows if each.label.startswith(what)]
    if len(found) != 1:
        raise LookupError(f"{name}: {len(found)} lines begin with {what!r}")
    return found[0]


def lines(name: str, start: str = "", end: str = "") -> list[Row]:
    """The lines of an archived experiment that begin and end like this."""
    return [each for each in summary(name).rows if each.label.startswith(start) and each.label.endswith(end)]


def interval(found: Row, scale: float = 1.0) -> Interval:
    """The difference of a line."""
    mean, low, high = (scale * found.values[name] for name in ("difference", "low", "high"))
    return Interval(mean, low, high, found.seeds)


def in_brackets(found: Interval) -> str:
    """A difference and its interval, in bold where that excludes 0."""
    text = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
    return f"**{text}**" if found.low > 0 or found.high < 0 else text


def short(rate: float) -> str:
    return f"{rate:g}" if rate >= 0.01 else f"{rate:.0e}".replace("e-0", "e-")


def head(*columns: str) -> list[str]:
    return [line(*columns), line(*["---"] * len(columns))]


def line(*specs: str) -> str:
    return f"| {' | '.join(specs)} |"
