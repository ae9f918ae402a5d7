"""The definition of an experiment: its run specs, how one run is computed, and what the results show.

Nothing here computes or stores anything. `cache` and `archive` store results, `runner` computes missing ones, and
`report` shows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .results import Outcome, Results, RunSpec, evaluation_seeds, repeat_seeds
from .summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["quick", "full"]
"""The size of an experiment: a quick rehearsal, or as many seeds and as much data as a result needs."""

OWN_DATA = "CADAM_OWN_DATA"
"""The environment variable with the path of the user's own data, for worker processes."""


def metric_name(*parts: object) -> str:
    """Return a name for a metric or a curve in snake_case, made from words."""
    return re.sub(r"[^a-z0-9]+", "_", " ".join(map(str, parts)).lower())


@dataclass(frozen=True)
class Finished:
    """The outcome of a run that shared a device with other runs, and its share of the computing time."""

    spec: RunSpec
    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The scale, the number of seeds and the data with which an experiment is computed."""

    scale: Scale
    seeds: int
    data: str = ""
    """The path of the user's own data, which replaces the data of the experiment."""
    rows: int | None = None
    """The number of rows of the data to use; None for all."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Plan:
        """Return the plan that was written to a file as these values.

        Raises:
            ValueError: If the values are not those of a plan.
        """
        plan = cls(values["scale"], values["seeds"], values.get("data", ""), values.get("rows"))
        if plan.scale not in ("quick", "full") or not isinstance(plan.seeds, int) or plan.seeds < 1:
            raise ValueError(f"not a valid plan: {plan}")
        return plan

    def test_seeds(self) -> range:
        """Return the seeds that arms are compared on."""
        return evaluation_seeds(self.seeds)

    def repeat_seeds(self) -> range:
        """Return other seeds, as many as `test_seeds`, on which the baseline runs again for the A/A noise floor."""
        return repeat_seeds(self.seeds)


@dataclass(frozen=True)
class Data:
    """A data set that is not part of the package."""

    name: str
    path: str
    """The path below the folder $CADAM_DATA, which is ./data by default."""
    source: str
    size: str

    def location(self) -> Path:
        """Return the path of the data."""
        return Path(os.environ.get("CADAM_DATA", "data")) / self.path

    def missing(self) -> str | None:
        """Return how to get the data if it is missing, otherwise None."""
        if self.location().exists():
            return None
        return (
            f"{self.name} ({self.size}) is not at {self.location()}; get it from {self.source} "
            "and put it there, or set CADAM_DATA to the folder it is in"
        )


def _equal_weight(spec: RunSpec) -> float:
    return 1.0


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the paper.

    Its functions must be importable by name, because worker processes import them: they cannot be lambdas or closures.
    """

    name: str
    title: str
    shows: str
    """One sentence about what the experiment shows."""
    claim: str
    """The claim of the paper."""
    run_specs: Callable[[Plan, Results], Sequence[RunSpec]]
    """Returns the run specs of a plan, as far as they are known from the results so far.

    It is called first without results, and again whenever there are results for all specs it returned, until it
    returns no new specs. An experiment that tunes learning rates returns its tuning specs first, and adds the specs at
    the chosen rates once it gets the results. It always returns the earlier specs too.
    """
    compute: Callable[[RunSpec], Outcome]
    """Computes one run with one CPU thread. The outcome is the same, to the last bit, each time."""
    summary: Callable[[Results], Summary]
    """Summarizes all results of a plan."""
    figures: Callable[[Results], Mapping[str, Figure]]
    """Draws figures, by caption, in the colors of `cadam.ab.report.palette`."""
    seconds: Mapping[Scale, float]
    """The approximate duration on two cores, with the default number of seeds."""
    seeds: Mapping[Scale, int]
    """The default number of seeds."""
    version: int = 1
    """The version of `compute`. Increase it when outcomes change, because results of other versions are not used.

    Experiments that share run specs must have the same version.
    """
    tolerance: float = 0.0
    """The largest relative difference of a metric that is accepted between runs on two kinds of processors."""
    measure: str = ""
    """An explanation of the metrics for readers of the report."""
    data: Data | None = None
    notes: Sequence[str] = ()
    """Notes that are shown with the results: choices of this reproduction, and errors in the paper."""
    parallel: int | None = None
    """The largest number of concurrent runs, if memory or a GPU limits it; None if only the number of cores does."""
    quick_data: Data | None = None
    """The data of the quick scale, if it differs from `data`."""
    compute_many: Callable[[Iterator[RunSpec]], Iterator[Finished]] | None = None
    """Computes several runs concurrently on one device, if this is faster than computing them in sequence.

    It takes the next spec from the iterator whenever it can start another run, and yields each run when it is finished,
    in any order. It is called in the main process with the specs for which `side_by_side` is true. Experiments with the
    same function share one call.
    """
    side_by_side: Callable[[RunSpec], bool] | None = None
    """Returns whether a run is computed by `compute_many` instead of `compute`."""
    takes_data: bool = False
    """Whether a plan can name the user's own data and a number of rows."""
    cuda: Sequence[Scale] = ()
    """The scales that need a CUDA device."""
    packages: Sequence[str] = ()
    """Packages that `compute` needs in addition to the dependencies of cadam-paper."""
    unread: Callable[[Plan], str | None] | None = None
    """Returns the command that the user must run first because the data were not preprocessed yet, or None.

    It is called before `run_specs`, which would preprocess all data, and returns quickly.
    """
    rows: Mapping[Scale, int] | None = None
    """The number of rows for which `seconds` was measured, if a plan can choose the number of rows."""
    weight: Callable[[RunSpec], float] = _equal_weight
    """Returns the cost of a run relative to other runs, which is used to estimate the time left."""

    def required_data(self, scale: Scale) -> Data | None:
        """Return the data set that a scale needs, or None if it needs no data."""
        return self.quick_data if scale == "quick" and self.quick_data is not None else self.data

    def plan(self, scale: Scale, seeds: int | None = None, data: str = "", rows: int | None = None) -> Plan:
        """Return a plan, by default with the default number of seeds."""
        return Plan(scale, self.seeds[scale] if seeds is None else seeds, data, rows)

    def estimate(self, plan: Plan) -> float:
        """Return the approximate duration of a plan in seconds."""
        share = 1.0 if plan.rows is None or self.rows is None else plan.rows / self.rows[plan.scale]
        return self.seconds[plan.scale] * share * plan.seeds / self.seeds[plan.scale]
