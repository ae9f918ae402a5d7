"""Run specifications and results: what one training run depends on, and what it measured.

A `RunSpec` names everything a result depends on, so that equal specs give equal results wherever and whenever they are
computed. `Results` is a sequence of results that can be filtered by the fields of their specs. The A/B and the
experiments of the paper share these types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cadam.statistics.intervals import Array

TEST_SEEDS, TUNING_SEEDS, REPEAT_SEEDS = 0, 10_000, 20_000
"""First seed of each range: seeds for results, for choosing a learning rate, and for the second runs of the A/A test.

The ranges are disjoint, so a learning rate is never chosen on a seed that it is later judged by.
"""


def evaluation_seeds(count: int) -> range:
    """Return the seeds that arms are compared on."""
    return range(TEST_SEEDS, TEST_SEEDS + count)


def tuning_seeds(count: int) -> range:
    """Return the seeds that learning rates are chosen on."""
    return range(TUNING_SEEDS, TUNING_SEEDS + count)


def repeat_seeds(count: int) -> range:
    """Return the seeds of the second runs of the baseline, which give the A/A noise floor."""
    return range(REPEAT_SEEDS, REPEAT_SEEDS + count)


@dataclass(frozen=True)
class RunSpec:
    """Everything that the result of one run depends on, in plain JSON values.

    Two experiments that ask for an equal spec, at the same version, share its result. The field `experiment` then
    names the study that both belong to.

    Raises:
        ValueError: If `settings` holds something that is not a plain JSON value.
    """

    experiment: str
    model: str
    data: str
    optimizer: str
    lr: float
    condition: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """All further settings that the result depends on."""

    def __post_init__(self) -> None:
        try:
            plain = json.loads(json.dumps(dict(self.settings), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the settings of a run spec must be plain JSON values, got {self.settings!r}") from error
        object.__setattr__(self, "settings", plain)
        object.__setattr__(self, "lr", float(self.lr))

    def key(self) -> str:
        """Return the spec as one line of JSON; equal specs give equal lines."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def __str__(self) -> str:
        parts = (self.experiment, self.model, self.data, self.condition, self.optimizer, f"lr {self.lr:g}")
        return ", ".join(part for part in (*parts, f"seed {self.seed}") if part)


@dataclass(frozen=True)
class Outcome:
    """The measurements of one run: numbers and arrays by names in snake_case.

    The metrics of a run that diverged are nan or infinite.
    """

    metrics: Mapping[str, float]
    curves: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Provenance:
    """The cost, device, software versions and commit of a result. They are never part of the result itself."""

    seconds: float
    peak_memory: int
    """Peak memory in bytes: of the process on the CPU; on CUDA the memory torch reserved, which includes graphs."""
    device: str
    versions: Mapping[str, str]
    commit: str | None = None
    """The commit of the repository that the code ran from, if it ran from one."""
    dirty: bool | None = None
    """Whether the code differed from that commit."""
    code: str | None = None
    """A hash of the code, in archived results from before commits were recorded."""
    restamped: bool = False
    """Whether `code` is the hash of later code than the code that computed the result."""


@dataclass(frozen=True)
class Result:
    """A run spec, the outcome of the run and its provenance."""

    spec: RunSpec
    outcome: Outcome
    provenance: Provenance


class Results(tuple[Result, ...]):
    """Results in the order of their specs, which can be filtered by the fields of the specs."""

    __slots__ = ()

    def where(self, **fields: Any) -> Results:
        """Return the results whose spec has these values.

        Args:
            **fields: Values by the name of a spec field. Other names are looked up in `RunSpec.settings`.
        """
        return Results([r for r in self if all(_value(r.spec, name) == value for name, value in fields.items())])

    def has(self, specs: Sequence[RunSpec]) -> bool:
        """Return whether there is a result for each of these specs."""
        return {result.spec for result in self}.issuperset(specs)

    def metric(self, name: str) -> dict[int, float]:
        """Return one metric by seed.

        Raises:
            ValueError: If two results have the same seed; filter by more fields first.
        """
        values: dict[int, float] = {}
        for result in self:
            if result.spec.seed in values:
                raise ValueError(f"two results have seed {result.spec.seed}, one of {result.spec}: filter by more")
            values[result.spec.seed] = result.outcome.metrics[name]
        return values

    def metric_by_rate(self, name: str) -> dict[float, dict[int, float]]:
        """Return one metric by learning rate and seed, in increasing order of the rates."""
        rates = sorted({result.spec.lr for result in self})
        return {lr: self.where(lr=lr).metric(name) for lr in rates}

    def curve(self, name: str) -> Array:
        """Return one curve of all results, stacked along a new first axis."""
        return np.stack([result.outcome.curves[name] for result in self])

    def tests(self) -> Results:
        """Return the results of test seeds."""
        return self._with_seeds(TEST_SEEDS, TUNING_SEEDS)

    def tuning(self) -> Results:
        """Return the results of tuning seeds."""
        return self._with_seeds(TUNING_SEEDS, REPEAT_SEEDS)

    def repeats(self) -> Results:
        """Return the results of the second runs of the A/A test."""
        return self._with_seeds(REPEAT_SEEDS, 2 * REPEAT_SEEDS)

    def _with_seeds(self, first: int, end: int) -> Results:
        return Results([result for result in self if first <= result.spec.seed < end])

    @property
    def seconds(self) -> float:
        """The total computing time of these results, in seconds."""
        return sum(result.provenance.seconds for result in self)


def _value(spec: RunSpec, name: str) -> Any:
    return getattr(spec, name) if name in RunSpec.__dataclass_fields__ else spec.settings.get(name)
