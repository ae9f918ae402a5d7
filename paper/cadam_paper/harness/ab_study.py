"""The design of an A/B study: which runs it consists of, and which learning rates it compares the arms at.

All arms meet the same events from the same initial weights. The first part of the stream is for tuning: each arm gets
the learning rate with the lowest log loss there, under seeds that are used for nothing else. The arms are then compared
on the rest of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cadam.statistics.comparison import Better

from .learning_rates import RateChoice, choose_lr
from .results import Results, RunSpec, evaluation_seeds, repeat_seeds, tuning_seeds

UNCHANGED = "as it is"
"""The condition of the stream without any simulated change."""


@dataclass(frozen=True)
class Study:
    """An A/B comparison: the arms, the data, and how the stream is divided."""

    name: str
    data: str
    arms: tuple[str, ...]
    """The optimizers, as `OptimizerSpec` reads them; the first is the baseline."""
    batch_size: int
    model: str = "small DeepFM"
    grid: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    """The learning rates to choose from."""
    tuning_seeds: int = 2
    tuning_share: float = 0.2
    """The share of the stream on which learning rates are chosen."""
    blocks: int = 50
    """The number of blocks of time that the measured part is divided into."""
    events: int | None = None
    """The number of events at the beginning of the stream that are used; None for all."""
    simulated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    """Simulated changes of the stream by condition, as settings of `run_arm.simulate`."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Everything else that a result depends on, such as the schema and hashes of the data and the model."""
    matters: float = 0.001
    """The smallest difference of GAUC of practical use; arms that differ by less are equivalent."""
    reference: str = ""
    """The difference of GAUC that a paper reports, for studies that repeat one of a paper."""

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return self.arms[0]

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions of the stream, beginning with the unchanged one."""
        return (UNCHANGED, *self.simulated)

    def spec(self, arm: str, lr: float, seed: int, condition: str = UNCHANGED, tuning: bool = False) -> RunSpec:
        """Return the spec of one run of this study."""
        settings = {
            "events": self.events,
            "batch_size": self.batch_size,
            "tuning_share": self.tuning_share,
            "blocks": self.blocks,
            "tuning": tuning,
            **self.simulated.get(condition, {}),
            **self.settings,
        }
        return RunSpec(self.name, self.model, self.data, arm, lr, condition, seed, settings)


def tuning_specs(study: Study) -> list[RunSpec]:
    """Return the runs that learning rates are chosen from."""
    return [
        study.spec(arm, lr, seed, tuning=True)
        for arm in study.arms
        for lr in study.grid
        for seed in tuning_seeds(study.tuning_seeds)
    ]


def evaluation_specs(study: Study, seeds: int, rates: Mapping[str, float]) -> list[RunSpec]:
    """Return the runs that arms are compared by.

    These are all arms under all conditions and seeds, the baseline under other seeds for the A/A noise floor, and the
    learning rates that were not chosen, under one seed, to check the choice.

    Args:
        study: The study.
        seeds: The number of seeds.
        rates: The chosen learning rate of each arm.
    """
    compared = [
        study.spec(arm, rates[arm], seed, condition)
        for condition in study.conditions
        for seed in evaluation_seeds(seeds)
        for arm in study.arms
    ]
    repeats = [study.spec(study.baseline, rates[study.baseline], seed) for seed in repeat_seeds(seeds)]
    first_seed = evaluation_seeds(seeds)[0]
    not_chosen = [study.spec(arm, lr, first_seed) for arm in study.arms for lr in study.grid if lr != rates[arm]]
    return [*compared, *repeats, *not_chosen]


def run_specs(study: Study, seeds: int, results: Results) -> Sequence[RunSpec]:
    """Return the runs of a study as far as they are known from the results so far.

    Args:
        study: The study.
        seeds: The number of seeds.
        results: The results so far. The runs after tuning depend on the results of the tuning runs.
    """
    tuning = tuning_specs(study)
    if len(results) < len(tuning):
        return tuning
    rates = {arm: choice.lr for arm, choice in choose_rates(study, results).items()}
    return [*tuning, *evaluation_specs(study, seeds, rates)]


def run_length(spec: RunSpec) -> float:
    """Return the share of the stream that a run meets."""
    return float(spec.settings["tuning_share"]) if spec.settings["tuning"] else 1.0


def choose_rates(study: Study, results: Results) -> dict[str, RateChoice]:
    """Choose the learning rate of each arm: the lowest log loss on the tuning part."""
    tuning = results.tuning()
    return {arm: choose_lr(arm, tuning.where(optimizer=arm).metric_by_rate("log_loss"), "lower") for arm in study.arms}


def at_chosen_rates(study: Study, results: Results) -> Results:
    """Return the results of evaluation seeds at the learning rates that were chosen."""
    rates = {arm: choice.lr for arm, choice in choose_rates(study, results).items()}
    return Results([result for result in results.tests() if result.spec.lr == rates[result.spec.optimizer]])


def hindsight_rates(
    study: Study, results: Results, metric: str = "log_loss", better: Better = "lower"
) -> dict[str, RateChoice]:
    """Choose the learning rates again, by a metric of the measured part under one seed."""
    seed = min(result.spec.seed for result in results.tests())
    tests = results.tests().where(condition=UNCHANGED, seed=seed)
    return {arm: choose_lr(arm, tests.where(optimizer=arm).metric_by_rate(metric), better) for arm in study.arms}
