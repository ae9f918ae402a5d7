"""What an experiment is: cells that each give one outcome, and what their outcomes show together.

A cell is everything one result depends on; its outcome is the same to the bit whenever and wherever it is computed
again. An experiment names its cells and turns their outcomes into rows of a table, figures and a verdict. Nothing here
runs or stores anything: `cache` and `archive` hold results, `runner` computes those that are missing, `report` shows
them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from ..ab.verdict import Kind, Recommendation, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["quick", "full"]
Array: TypeAlias = NDArray[Any]

OWN_DATA = "CADAM_OWN_DATA"
"""The environment variable by which a run tells its processes where the user's own data lies."""

TEST_SEEDS, TUNING_SEEDS, REPEAT_SEEDS = 0, 10_000, 20_000
"""Where each kind of seed starts: results, choosing a learning rate, the second run of A/A. They never meet."""


@dataclass(frozen=True)
class Cell:
    """What one result depends on, in plain JSON values. `settings` holds whatever the named fields do not.

    Experiments that ask for the same cell, of the same version, share its result: `experiment` then names the study.
    """

    experiment: str
    model: str
    data: str
    optimizer: str
    lr: float
    condition: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        try:
            plain = json.loads(json.dumps(dict(self.settings), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the settings of a cell must be plain JSON values, got {self.settings!r}") from error
        object.__setattr__(self, "settings", plain)
        object.__setattr__(self, "lr", float(self.lr))

    def key(self) -> str:
        """The cell as one line of JSON, the same for equal cells."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def __str__(self) -> str:
        parts = (self.experiment, self.model, self.data, self.condition, self.optimizer, f"lr {self.lr:g}")
        return ", ".join(part for part in (*parts, f"seed {self.seed}") if part)


def metric_name(*parts: object) -> str:
    """A name for a metric or a curve, in snake_case, from words."""
    return re.sub(r"[^a-z0-9]+", "_", " ".join(map(str, parts)).lower())


@dataclass(frozen=True)
class Outcome:
    """What a cell gave: numbers and arrays, by names in snake_case. A run that diverged has metrics nan or inf."""

    metrics: Mapping[str, float]
    curves: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Provenance:
    """Where a result comes from: what computing it took, on what and by what. Never part of the result."""

    seconds: float
    peak_memory: int
    """Bytes: of the process on the CPU; on CUDA what torch has reserved, which holds the memory of graphs too."""
    device: str
    versions: Mapping[str, str]
    commit: str | None = None
    """The commit of the project's repository, where the code ran from one."""
    dirty: bool | None = None
    """Did the code differ from that commit?"""
    code: str | None = None
    """A hash of the code, on results from before commits were recorded."""
    restamped: bool = False
    """Does `code` name later code than that which computed the result?"""


@dataclass(frozen=True)
class Result:
    """A cell, its outcome and where that comes from."""

    cell: Cell
    outcome: Outcome
    provenance: Provenance


@dataclass(frozen=True)
class Finished:
    """A cell that was computed beside others, and its share of the time."""

    cell: Cell
    outcome: Outcome
    seconds: float


class Results(Sequence[Result]):
    """Results in the order of their cells, to be picked from by the fields of the cell."""

    def __init__(self, results: Sequence[Result] = ()) -> None:
        self._results = tuple(results)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: int | slice) -> Result | Results:
        return Results(self._results[index]) if isinstance(index, slice) else self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results)

    def where(self, **fields: Any) -> Results:
        """Those whose cell has these values; a name that is no field of the cell is looked up in its settings."""
        return Results([r for r in self if all(_field(r.cell, name) == value for name, value in fields.items())])

    def has(self, cells: Sequence[Cell]) -> bool:
        """Is there a result of each of these cells?"""
        known = {result.cell for result in self}
        return all(cell in known for cell in cells)

    def metric(self, name: str) -> dict[int, float]:
        """One metric by seed. Two results of one seed are an error: pick by more fields first."""
        values: dict[int, float] = {}
        for result in self:
            if result.cell.seed in values:
                raise ValueError(f"two results with seed {result.cell.seed}, one is {result.cell}: say which is meant")
            values[result.cell.seed] = result.outcome.metrics[name]
        return values

    def curve(self, name: str) -> Array:
        """One curve of all results, stacked: a row each."""
        return np.stack([result.outcome.curves[name] for result in self])

    def tests(self) -> Results:
        """Those of test seeds."""
        return self._of_seeds(TEST_SEEDS, TUNING_SEEDS)

    def tuning(self) -> Results:
        """Those of tuning seeds."""
        return self._of_seeds(TUNING_SEEDS, REPEAT_SEEDS)

    def repeats(self) -> Results:
        """Those of the second run of A/A."""
        return self._of_seeds(REPEAT_SEEDS, 2 * REPEAT_SEEDS)

    def _of_seeds(self, first: int, end: int) -> Results:
        return Results([result for result in self if first <= result.cell.seed < end])

    @property
    def seconds(self) -> float:
        """What these results cost to compute, one after the other."""
        return sum(result.provenance.seconds for result in self)


def _field(cell: Cell, name: str) -> Any:
    return getattr(cell, name) if name in Cell.__dataclass_fields__ else cell.settings.get(name)


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
        return range(TEST_SEEDS, TEST_SEEDS + self.seeds)

    def repeat_seeds(self) -> range:
        """As many again, for the same optimizer once more: the A/A noise floor."""
        return range(REPEAT_SEEDS, REPEAT_SEEDS + self.seeds)


def tuning_seeds(count: int) -> range:
    """Seeds that learning rates are chosen on."""
    return range(TUNING_SEEDS, TUNING_SEEDS + count)


@dataclass(frozen=True)
class Row:
    """A line of the table: what the paper says beside what was measured.

    The texts are for people; `values` has the same numbers by name, for `--json`.
    """

    what: str
    paper: str
    measured: str
    interval: str
    seeds: int
    seconds: float
    verdict: str = ""
    noise_floor: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    verdict_kind: Kind | None = None
    """None where the line compares nothing."""
    conflicting: bool = False


@dataclass(frozen=True)
class Summary:
    """What the results of an experiment say: the verdict in a sentence or two, the table, and what to be wary of."""

    verdict: str
    rows: Sequence[Row]
    warnings: Sequence[str] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """What decides, by name, where that is more than a row says."""
    recommendations: Sequence[Recommendation] = ()
    """What to do, one for each arm, where a user asked for their own stream."""


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


def _alike(cell: Cell) -> float:
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
    cells: Callable[[Plan, Results], Sequence[Cell]]
    """The cells of a plan, as far as they can be named from the results found so far.

    It is asked first with no results, and again whenever all it named are there, until it names nothing new. An
    experiment without phases ignores the results; one that tunes names its tuning cells first, and adds the cells at
    the chosen learning rates once those results are there. It always names the earlier cells too.
    """
    compute: Callable[[Cell], Outcome]
    """The outcome of a cell, the same to the bit each time. It runs with one CPU thread."""
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
    Experiments that share cells share it."""
    tolerance: float = 0.0
    """How far a metric may differ, relative to its size, where another kind of processor computes it again."""
    measure: str = ""
    """What its numbers are and which are good, in plain words: shown where they first appear."""
    data: Data | None = None
    notes: Sequence[str] = ()
    """Slips of the paper and choices made here, shown with the results."""
    parallel: int | None = None
    """How many cells may run at once, if memory or a GPU sets a limit."""
    quick_data: Data | None = None
    """The data that --quick uses in place of `data`."""
    compute_many: Callable[[Iterator[Cell]], Iterator[Finished]] | None = None
    """Cells side by side on one device, where that is faster than one after the other.

    It takes a cell when it has room for one and gives each back as soon as it is done, in any order. It runs in the
    process that was started, over the cells of all experiments that share it and of which `side_by_side` is true.
    """
    side_by_side: Callable[[Cell], bool] | None = None
    """Which cells `compute_many` is for."""
    takes_data: bool = False
    """Can a plan name data and a number of rows?"""
    cuda: Sequence[Scale] = ()
    """The scales whose cells are computed on a CUDA device."""
    packages: Sequence[str] = ()
    """What has to be installed to compute it, beside what every experiment needs."""
    again: str = ""
    """What to type to compute it, where that is not `cadam reproduce` with its name."""
    unread: Callable[[Plan], str | None] | None = None
    """What to do first where naming the cells of a plan would take reading through its data; asking reads nothing."""
    rows: Mapping[Scale, int] | None = None
    """How many rows `seconds` is about, where a plan can name fewer."""
    weight: Callable[[Cell], float] = _alike
    """How much work a cell is beside the others of the experiment; the time left goes by it."""

    def needed(self, scale: Scale) -> Data | None:
        """The data of a scale."""
        return self.quick_data if scale == "quick" and self.quick_data is not None else self.data

    def plan(self, scale: Scale, seeds: int | None = None, data: str = "", rows: int | None = None) -> Plan:
        return Plan(scale, self.seeds[scale] if seeds is None else seeds, data, rows)

    def estimate(self, plan: Plan) -> float:
        """About how many seconds a plan takes."""
        share = 1.0 if plan.rows is None or self.rows is None else plan.rows / self.rows[plan.scale]
        return self.seconds[plan.scale] * share * plan.seeds / self.seeds[plan.scale]
