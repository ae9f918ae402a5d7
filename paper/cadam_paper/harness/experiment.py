"""What an experiment is: specs that each give one outcome, and what their outcomes show together.

A spec is everything one result depends on; its outcome is the same to the bit whenever and wherever it is computed
again. An experiment names its specs and turns their outcomes into rows of a table, figures and a verdict. Nothing here
runs or stores anything: `cache` and `archive` hold results, `runner` computes those that are missing, `report` shows
them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cadam.ab.results import Outcome, Results, RunSpec, evaluation_seeds, repeat_seeds
from cadam.ab.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["quick", "full"]

OWN_DATA = "CADAM_OWN_DATA"
"""The environment variable by which a run tells its processes where the user's own data lies."""


def metric_name(*parts: object) -> str:
    """A name for a metric or a curve, in snake_case, from words."""
    return re.sub(r"[^a-z0-9]+", "_", " ".join(map(str, parts)).lower())


@dataclass(frozen=True)
class Finished:
    """A spec that was computed beside others, and its share of the time."""

    spec: RunSpec
    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class Plan:
    """How much of an experiment is asked for."""

    scale: Scale
    seeds: int
    data: str = ""
    """Where the user's own data lies, in place of what the experiment brings."""
    rows: int | None = None
    """Of the data, where not all are wanted."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Plan:
        """A plan as it was written to a file."""
        plan = cls(values["scale"], values["seeds"], values.get("data", ""), values.get("rows"))
        if plan.scale not in ("quick", "full") or not isinstance(plan.seeds, int) or plan.seeds < 1:
            raise ValueError(f"no such plan: {plan}")
        return plan

    def test_seeds(self) -> range:
        """Seeds that results come from."""
        return evaluation_seeds(self.seeds)

    def repeat_seeds(self) -> range:
        """As many again, for the same optimizer once more: the A/A noise floor."""
        return repeat_seeds(self.seeds)


@dataclass(frozen=True)
class Data:
    """A data set that cannot come with the package."""

    name: str
    path: str
    """Where it is looked for, under $CADAM_DATA (by default ./data)."""
    source: str
    size: str

    def location(self) -> Path:
        return Path(os.environ.get("CADAM_DATA", "data")) / self.path

    def missing(self) -> str | None:
        """What to do about it if it is not there."""
        if self.location().exists():
            return None
        return (
            f"{self.name} ({self.size}) is not at {self.location()}; get it from {self.source} "
            "and put it there, or set CADAM_DATA to the folder it is in"
        )


def _alike(spec: RunSpec) -> float:
    return 1.0


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the paper, as something that can be computed again.

    The functions must be importable by name (no lambdas or closures): worker processes import them.
    """

    name: str
    title: str
    shows: str
    """What it shows, in a sentence."""
    claim: str
    """What the paper says about it."""
    run_specs: Callable[[Plan, Results], Sequence[RunSpec]]
    """The specs of a plan, as far as they can be named from the results found so far.

    It is asked first with no results, and again whenever all it named are there, until it names nothing new. An
    experiment without phases ignores the results; one that tunes names its tuning specs first, and adds the specs at
    the chosen learning rates once those results are there. It always names the earlier specs too.
    """
    compute: Callable[[RunSpec], Outcome]
    """The outcome of a spec, the same to the bit each time. It runs with one CPU thread."""
    summary: Callable[[Results], Summary]
    """The verdict and the table, from all results of a plan."""
    figures: Callable[[Results], Mapping[str, Figure]]
    """Figures by caption, drawn with the colours of `palette`."""
    seconds: Mapping[Scale, float]
    """About how long it takes on two cores, with as many seeds as by default."""
    seeds: Mapping[Scale, int]
    """How many seeds by default."""
    version: int = 1
    """Raise it when what `compute` gives changes: cached and archived results of another version no longer count.
    Experiments that share specs share it."""
    tolerance: float = 0.0
    """How far a metric may differ, relative to its size, where another kind of processor computes it again."""
    measure: str = ""
    """What its numbers are and which are good, in plain words: shown where they first appear."""
    data: Data | None = None
    notes: Sequence[str] = ()
    """Slips of the paper and choices made here, shown with the results."""
    parallel: int | None = None
    """How many specs may run at once, if memory or a GPU sets a limit."""
    quick_data: Data | None = None
    """The data that --quick uses in place of `data`."""
    compute_many: Callable[[Iterator[RunSpec]], Iterator[Finished]] | None = None
    """Cells side by side on one device, where that is faster than one after the other.

    It takes a spec when it has room for one and gives each back as soon as it is done, in any order. It runs in the
    process that was started, over the specs of all experiments that share it and of which `side_by_side` is true.
    """
    side_by_side: Callable[[RunSpec], bool] | None = None
    """Which specs `compute_many` is for."""
    takes_data: bool = False
    """Can a plan name data and a number of rows?"""
    cuda: Sequence[Scale] = ()
    """The scales whose specs are computed on a CUDA device."""
    packages: Sequence[str] = ()
    """What has to be installed to compute it, beside what every experiment needs."""
    again: str = ""
    """What to type to compute it, where that is not `cadam reproduce` with its name."""
    unread: Callable[[Plan], str | None] | None = None
    """What to do first where naming the specs of a plan would take reading through its data; asking reads nothing."""
    rows: Mapping[Scale, int] | None = None
    """How many rows `seconds` is about, where a plan can name fewer."""
    weight: Callable[[RunSpec], float] = _alike
    """How much work a spec is beside the others of the experiment; the time left goes by it."""

    def needed(self, scale: Scale) -> Data | None:
        """The data of a scale."""
        return self.quick_data if scale == "quick" and self.quick_data is not None else self.data

    def plan(self, scale: Scale, seeds: int | None = None, data: str = "", rows: int | None = None) -> Plan:
        return Plan(scale, self.seeds[scale] if seeds is None else seeds, data, rows)

    def estimate(self, plan: Plan) -> float:
        """About how many seconds a plan takes."""
        share = 1.0 if plan.rows is None or self.rows is None else plan.rows / self.rows[plan.scale]
        return self.seconds[plan.scale] * share * plan.seeds / self.seeds[plan.scale]
