"""The CTR prediction experiments: tables 1 and 2 of the paper, the Criteo column of table 4, and streams with drift.

The learning rate of each optimizer and model is chosen by validation AUC on tuning seeds. The results are test AUCs on
other seeds. Runs that several experiments need are computed once.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cadam.ab.report import palette
from cadam.statistics import comparison as statistics
from cadam.statistics.comparison import Comparison
from cadam.statistics.intervals import Array

from ..archive_names import STREAM_AS_RECORDED
from ..harness import rate_pairs
from ..harness.comparisons import tally
from ..harness.cuda_runs import on_gpu
from ..harness.experiment import Experiment, Plan, Scale
from ..harness.learning_rates import RateChoice, choose_lr
from ..harness.panels import panels
from ..harness.rates import RateCurve
from ..harness.results import Results, RunSpec, tuning_seeds
from ..harness.summary import Row, Summary, comparison_row
from ..harness.verdict import verdict_over_seeds
from . import runs
from .generator import ROWS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODELS = ("DeepFM", "WideDeep", "DNN", "PNN", "DCN")
OPTIMIZERS = ("Yogi", "RAdam", "Adam", "AdaBelief", "AdamW", "AmsGrad", "CAdam", "CAmsGrad")
ARMS = ("CAdam", "Adam")
AMSGRAD, SGDM = ("CAmsGrad", "AmsGrad"), ("CSGDM", "SGDM")
PAIRS = (SGDM, ARMS, AMSGRAD)
CLEAN, NOISE = "clean", 0.01
NOISY = f"{NOISE:.0%} of negatives shown as clicks"
MEAN = "mean of the models"
"""Label of rows about the mean over all models."""

PAPER = {
    "Yogi": (80.42, 80.69, 80.68, 80.52, 80.40),
    "RAdam": (80.84, 80.91, 80.89, 80.96, 80.90),
    "Adam": (80.87, 80.90, 80.89, 80.90, 81.05),
    "AdaBelief": (80.84, 80.90, 80.88, 80.89, 81.02),
    "AdamW": (80.87, 80.90, 80.88, 80.90, 81.00),
    "AmsGrad": (80.88, 80.92, 80.91, 80.92, 81.08),
    "CAdam": (80.88, 80.93, 80.90, 80.93, 81.06),
    "CAmsGrad": (80.90, 80.93, 80.92, 80.94, 81.09),
}
PAPER_NOISY = {"Adam": (80.51, 80.47, 80.48, 80.66, 80.51), "CAdam": (80.81, 80.79, 80.78, 80.96, 80.77)}
"""AUC x 100 in tables 1 (`PAPER`) and 2 (`PAPER_NOISY`) of the paper, for each model in the order of `MODELS`."""
PAPER_ABLATION = {"SGDM": 77.16, "CSGDM": 77.71, "Adam": 80.92, "CAdam": 80.94, "AmsGrad": 80.94, "CAmsGrad": 80.96}
"""AUC x 100 in table 4 of the paper, mean of the models."""

GRIDS: dict[Scale, tuple[float, ...]] = {
    "quick": (2e-3, 5e-3, 1e-2, 2e-2, 5e-2),
    "full": (2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
}
"""Initial grids of learning rates: 1/5, 1/2, 1, 2 and 5 times the default."""
SGDM_GRIDS: dict[Scale, tuple[float, ...]] = {"quick": (0.3, 1, 3, 10, 30), "full": (0.1, 0.3, 1, 3, 10)}
SETTINGS: dict[Scale, dict[str, Any]] = {
    "quick": {
        "rows": 20_000,
        "most_ids": 60,
        "batch": 400,
        "width": 4,
        "hidden": 32,
        "device": "cpu",
        "precision": "float32",
    },
    "full": {
        "rows": ROWS,
        "most_ids": None,
        "batch": 10_000,
        "width": None,
        "hidden": None,
        "device": "cuda",
        "precision": "tf32",
    },
}
COMMON: dict[str, Any] = {
    "source": "generated",
    "reading": "table",
    "drift": "none",
    "noise": 0.0,
    "max_norm": 10.0,
    "table_l2": 0.0,
}
"""Settings of every run, unless its condition overrides them."""
DRIFTS = ("gradual", "sudden", "hours")


# Runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A condition of training, with the metrics that choose learning rates and that are reported."""

    name: str
    settings: Mapping[str, Any]
    tuned_by: str = "validation_auc"
    result: str = "test_auc"


TABLE = Condition(CLEAN, {})
TABLE_NOISY = Condition(NOISY, {"noise": NOISE})
STREAM = Condition(STREAM_AS_RECORDED, {"reading": "stream"}, "stream_auc", "stream_auc")
STREAMS = [
    replace(STREAM, name=f"stream, drift {drift}", settings={"reading": "stream", "drift": drift}) for drift in DRIFTS
]


def spec(plan: Plan, model: str, optimizer: str, lr: float, condition: Condition, seed: int) -> RunSpec:
    """Return the spec of one run. If the plan names the user's file, the file is preprocessed first."""
    settings = {**SETTINGS[plan.scale], **COMMON, **condition.settings, "rows": requested_rows(plan)}
    if plan.data:
        criteo = runs.load_criteo(plan.data, settings["rows"])
        settings |= {"source": "file", "most_ids": None, "read_by": runs.read_by(criteo)}
        data = criteo.description
    else:
        data = runs.generated(settings["rows"], settings["most_ids"], settings["drift"]).description
    return RunSpec("ctr", model, data, optimizer, lr, condition.name, seed, settings)


def requested_rows(plan: Plan) -> int | None:
    """Return the number of rows of a plan; None for all rows of a file."""
    if plan.rows is None and plan.data and plan.scale == "full":
        return None
    rows: int = SETTINGS[plan.scale]["rows"]
    return rows if plan.rows is None else plan.rows


def unread(plan: Plan) -> str | None:
    """Return the command to run first if the user's file was not preprocessed yet, otherwise None."""
    from .criteo_dataset import cache_folder, find_source
    from .preprocess import finished

    if not plan.data:
        return None
    source, rows = find_source(Path(plan.data)), requested_rows(plan)
    folder = cache_folder(source, rows, None)
    if finished(source, folder, rows=rows) is not None:
        return None
    first = "" if rows is None else f" --rows {rows}"
    return f"{source} was not preprocessed into {folder} yet: run `cadam criteo {shlex.quote(plan.data)}{first}`"


def tuning_specs(
    plan: Plan, optimizers: Sequence[str], condition: Condition, results: Results, models: Sequence[str] = MODELS
) -> list[RunSpec]:
    """Return the tuning runs: every rate of the grid, which is extended as long as the best rate is at one of its ends.

    A high rate may work with one seed and fail with another. If a grid was extended, its rates are therefore chosen on
    three seeds instead of one. An optimizer with confidence and the same optimizer without always have the same rates
    and seeds.
    """
    single = [(optimizer,) for optimizer in optimizers if not any(optimizer in pair for pair in PAIRS)]
    paired = [pair for pair in PAIRS if set(pair) <= set(optimizers)]
    all_specs: list[RunSpec] = []
    for model, arms in product(models, [*single, *paired]):
        grid = (SGDM_GRIDS if "SGDM" in arms else GRIDS)[plan.scale]
        specs = partial(_tuning_specs, plan, model, arms, condition)
        curves = partial(_tuning_curves, model, arms, condition)
        tuning = results.tuning().where(model=model, condition=condition.name)
        of_arms = rate_pairs.extended_specs(grid, partial(specs, tuning_seeds(1)), curves, tuning)
        rates = sorted({spec.lr for spec in of_arms})
        if len(rates) > len(grid) and tuning.has(of_arms):
            of_arms = rate_pairs.extended_specs(rates, partial(specs, tuning_seeds(3)), curves, tuning)
        all_specs += of_arms
    return all_specs


def _tuning_specs(
    plan: Plan, model: str, arms: Sequence[str], condition: Condition, seeds: Iterable[int], grid: Sequence[float]
) -> list[RunSpec]:
    return [spec(plan, model, arm, lr, condition, seed) for arm in arms for lr in grid for seed in seeds]


def _tuning_curves(model: str, arms: Sequence[str], condition: Condition, results: Results) -> list[RateCurve]:
    curves = []
    for arm in arms:
        of_arm = results.where(optimizer=arm)
        scores = {run.spec.lr: of_arm.where(lr=run.spec.lr).metric(condition.tuned_by) for run in of_arm}
        curves.append(RateCurve(f"{arm} on {model}", "higher", scores))
    return curves


def choose_rate(results: Results, model: str, optimizer: str, condition: Condition) -> RateChoice:
    """Choose the best learning rate of an optimizer on a model."""
    tuning = results.tuning().where(model=model, optimizer=optimizer, condition=condition.name)
    return choose_lr(f"{optimizer} on {model}", tuning.metric_by_rate(condition.tuned_by), "higher")


def test_specs(
    plan: Plan, rates: Mapping[tuple[str, str], float], condition: Condition, baselines: Sequence[str]
) -> list[RunSpec]:
    """Return the test runs of each model and optimizer at its learning rate, and the repeat runs of the baselines."""
    specs = []
    for (model, optimizer), lr in rates.items():
        seeds = [*plan.test_seeds(), *(plan.repeat_seeds() if optimizer in baselines else ())]
        specs += [spec(plan, model, optimizer, lr, condition, seed) for seed in seeds]
    return specs


Rates = Mapping[tuple[str, str], float]
"""Learning rates by (model, optimizer)."""


def choose_rates(
    results: Results, optimizers: Sequence[str], condition: Condition, models: Sequence[str] = MODELS
) -> dict[tuple[str, str], float]:
    """Return the best learning rate by (model, optimizer)."""
    return {(m, o): choose_rate(results, m, o, condition).lr for m in models for o in optimizers}


def criteo_specs(plan: Plan, results: Results) -> list[RunSpec]:
    """Return the runs of table 1."""
    tuning = tuning_specs(plan, OPTIMIZERS, TABLE, results)
    if not results.has(tuning):
        return tuning
    return [*tuning, *test_specs(plan, choose_rates(results, OPTIMIZERS, TABLE), TABLE, ("Adam", "AmsGrad"))]


def rate_choices(results: Results) -> dict[str, Rates]:
    """Return three choices of learning rates for noisy data, because the paper does not state which one it used."""
    clean = choose_rates(results, ARMS, TABLE)
    default = GRIDS["full" if results[0].spec.settings["hidden"] is None else "quick"][2]
    return {
        "lr best on clean data": clean,
        f"default lr {default:g}": dict.fromkeys(clean, default),
        "lr best on noisy data": choose_rates(results, ARMS, TABLE_NOISY),
    }


def noise_specs(plan: Plan, results: Results) -> list[RunSpec]:
    """Return the runs of table 2."""
    tuning = [spec for c in (TABLE, TABLE_NOISY) for spec in tuning_specs(plan, ARMS, c, results)]
    if not results.has(tuning):
        return tuning
    specs = [*tuning, *test_specs(plan, choose_rates(results, ARMS, TABLE), TABLE, ("Adam",))]
    for rates in rate_choices(results).values():
        specs += test_specs(plan, rates, TABLE_NOISY, ("Adam",))
    return specs


def ablation_specs(plan: Plan, results: Results) -> list[RunSpec]:
    """Return the runs of the Criteo column of table 4."""
    optimizers = [optimizer for pair in PAIRS for optimizer in pair]
    tuning = tuning_specs(plan, optimizers, TABLE, results)
    if not results.has(tuning):
        return tuning
    return [*tuning, *test_specs(plan, choose_rates(results, optimizers, TABLE), TABLE, [base for _, base in PAIRS])]


STREAMED = ("DeepFM",)
"""The models that run on streams."""


def stream_specs(plan: Plan, results: Results) -> list[RunSpec]:
    """Return the runs on streams."""
    conditions = [STREAM] if plan.data else STREAMS
    tuning = [spec for condition in conditions for spec in tuning_specs(plan, ARMS, condition, results, STREAMED)]
    if not results.has(tuning):
        return tuning
    tests = [test_specs(plan, choose_rates(results, ARMS, c, STREAMED), c, ("Adam",)) for c in conditions]
    return [*tuning, *(spec for specs in tests for spec in specs)]


# Tables -------------------------------------------------------------------------------------------------


def by_seed(
    part: Results, optimizer: str, rates: Rates, condition: Condition, models: Sequence[str]
) -> dict[int, float]:
    """Return the metric of an optimizer by seed, averaged over models; NaN if a run of any model diverged."""
    by_model = [
        part.where(model=m, optimizer=optimizer, condition=condition.name, lr=rates[m, optimizer]).metric(
            condition.result
        )
        for m in models
    ]
    return {seed: float(np.mean([values[seed] for values in by_model])) for seed in by_model[0]}


def compare_arms(
    results: Results, pair: tuple[str, str], rates: Rates, condition: Condition, models: Sequence[str]
) -> Comparison:
    """Compare two optimizers in the mean over some models, each at its own learning rate."""
    tests, repeats = results.tests(), results.repeats()
    arm, baseline = (by_seed(tests, optimizer, rates, condition, models) for optimizer in pair)
    repeat = by_seed(repeats, pair[1], rates, condition, models)
    return statistics.compare(arm, baseline, names=pair, better="higher", repeat=repeat)


def _row(label: str, paper: str, comparison: Comparison, part: Results) -> Row:
    return comparison_row(label, paper, comparison, part.seconds)


def _verdict(comparison: Comparison) -> str:
    return f"{comparison.arm} against {comparison.baseline}: {verdict_over_seeds(comparison)}"


def _paper(pair: tuple[str, str], table: Mapping[str, Sequence[float]], models: Sequence[str]) -> str:
    """Format the paper's AUCs of a pair, averaged over some models."""
    return ", ".join(f"{name} {_paper_value(table[name], models):.2f}" for name in pair)


def _paper_value(values: Sequence[float], models: Sequence[str]) -> float:
    return float(np.mean([value for value, model in zip(values, MODELS, strict=True) if model in models]))


def _mean_and_models() -> list[tuple[str, tuple[str, ...]]]:
    return [(MEAN, MODELS), *((model, (model,)) for model in MODELS)]


def _runs_of(
    results: Results, optimizers: Sequence[str], models: Sequence[str], condition: Condition, rates: Rates
) -> Results:
    """Return the test runs of some optimizers and models at their learning rates."""
    models_and_rates = {(m, o, rates[m, o]) for m in models for o in optimizers}
    tests = results.tests().where(condition=condition.name)
    return Results([r for r in tests if (r.spec.model, r.spec.optimizer, r.spec.lr) in models_and_rates])


def describe_data(results: Results) -> str:
    """Return the first sentence of a verdict, which names the data and warns if data or models are not the paper's."""
    spec = results[0].spec
    small = "" if spec.settings["hidden"] is None else "small models on "
    if spec.settings["source"] == "file" and not small and f", {ROWS:,} rows" in spec.data:
        return f"On {spec.data}: the paper's data, if the file is Criteo's original. "
    data = spec.data.replace(f"drift {spec.settings['drift']}", "drift")
    return f"Not the paper's setting: {small}{data}. The numbers cannot be compared with the paper's. "


def _warnings(results: Results, optimizers: Sequence[str], condition: Condition, models: Sequence[str]) -> list[str]:
    """Return a warning that lists the best learning rates at the end of a grid, if any."""
    ends = [c for m in models for o in optimizers if (c := choose_rate(results, m, o, condition)).warning]
    if not ends:
        return []
    listed = ", ".join(f"{c.arm} {c.lr:g}" for c in ends)
    return [
        f"{condition.name}: these best learning rates are at an end of the grid, so better ones may exist: {listed}"
    ]


def criteo_summary(results: Results) -> Summary:
    """Compare the optimizers of table 1 by model and in the mean over models."""
    rates = choose_rates(results, OPTIMIZERS, TABLE)
    rows: list[Row] = []
    means: list[Comparison] = []
    by_model: list[Comparison] = []
    for pair in (ARMS, AMSGRAD):
        for label, models in _mean_and_models():
            comparison = compare_arms(results, pair, rates, TABLE, models)
            part = _runs_of(results, pair, models, TABLE, rates)
            rows.append(_row(f"{label}: {pair[0]} against {pair[1]}", _paper(pair, PAPER, models), comparison, part))
            (means if label == MEAN else by_model).append(comparison)
    others = [(other, "Adam") for other in ("Yogi", "RAdam", "AdaBelief", "AdamW", "AmsGrad", "CAmsGrad")]
    for pair in (*others, ("CAmsGrad", "CAdam")):
        comparison = compare_arms(results, pair, rates, TABLE, MODELS)
        part = _runs_of(results, pair, MODELS, TABLE, rates)
        row = _row(f"{MEAN}: {pair[0]} against {pair[1]}", _paper(pair, PAPER, MODELS), comparison, part)
        values = {
            f"{o} on {m}": float(np.mean(list(by_seed(results.tests(), o, rates, TABLE, (m,)).values())))
            for m in MODELS
            for o in pair
        }
        rows.append(replace(row, values={**row.values, **values}))
    counts = tally(by_model, "comparisons", "higher", "lower")
    verdict = (
        f"{describe_data(results)}Test AUC, {MEAN}: {'; '.join(map(_verdict, means))}. By model, with confidence "
        f"against without: {counts}."
    )
    return Summary(verdict, rows, _warnings(results, OPTIMIZERS, TABLE, MODELS))


def noise_summary(results: Results) -> Summary:
    """Compare Adam and CAdam with label noise, and the AUC that each loses by noise."""
    rows, verdicts = [], []
    for reading, rates in rate_choices(results).items():
        for label, models in _mean_and_models():
            comparison = compare_arms(results, ARMS, rates, TABLE_NOISY, models)
            part = _runs_of(results, ARMS, models, TABLE_NOISY, rates)
            rows.append(
                _row(f"{reading}: {label}: CAdam against Adam", _paper(ARMS, PAPER_NOISY, models), comparison, part)
            )
            if label == MEAN:
                verdicts.append(f"{reading}: {verdict_over_seeds(comparison)}")
    drop, rates = _drop(results), choose_rates(results, ARMS, TABLE)
    part = Results([r for c in (TABLE, TABLE_NOISY) for r in _runs_of(results, ARMS, MODELS, c, rates)])
    rows.append(_row(f"lost by noise, {MEAN}, lr best on clean data", "CAdam 0.12, Adam 0.39", drop, part))
    subject = f"Test AUC with noisy training labels, {MEAN}, CAdam against Adam."
    verdict = f"{describe_data(results)}{subject} {'; '.join(verdicts)}."
    tail = f" AUC lost by noise at the lr best on clean data: {verdict_over_seeds(drop)}."
    ends = [w for c in (TABLE, TABLE_NOISY) for w in _warnings(results, ARMS, c, MODELS)]
    return Summary(verdict + tail, rows, ends)


def _drop(results: Results) -> Comparison:
    """Compare the AUC that noise costs each optimizer, at the learning rates that are best on clean data."""
    rates, tests = choose_rates(results, ARMS, TABLE), results.tests()

    def lost(optimizer: str) -> dict[int, float]:
        clean, noisy = (by_seed(tests, optimizer, rates, c, MODELS) for c in (TABLE, TABLE_NOISY))
        return {seed: clean[seed] - noisy[seed] for seed in clean}

    return statistics.compare(lost("CAdam"), lost("Adam"), names=ARMS, better="lower")


def ablation_summary(results: Results) -> Summary:
    """Compare SGDM, Adam and AMSGrad with and without confidence."""
    rows, comparisons = [], []
    optimizers = [optimizer for pair in PAIRS for optimizer in pair]
    rates = choose_rates(results, optimizers, TABLE)
    for pair in PAIRS:
        for label, models in _mean_and_models() if pair == SGDM else _mean_and_models()[:1]:
            comparison = compare_arms(results, pair, rates, TABLE, models)
            paper = ", ".join(f"{name} {PAPER_ABLATION[name]:.2f}" for name in pair) if label == MEAN else ""
            part = _runs_of(results, pair, models, TABLE, rates)
            rows.append(_row(f"{label}: {pair[0]} against {pair[1]}", paper, comparison, part))
            if label == MEAN:
                comparisons.append(comparison)
    verdict = f"{describe_data(results)}Test AUC, {MEAN}: {'; '.join(map(_verdict, comparisons))}."
    return Summary(verdict, rows, _warnings(results, optimizers, TABLE, MODELS))


def stream_conditions(results: Results) -> list[Condition]:
    """Return the stream conditions that the results contain."""
    return [c for c in (STREAM, *STREAMS) if results.where(condition=c.name)]


def stream_summary(results: Results) -> Summary:
    """Compare Adam and CAdam on each stream."""
    rows, verdicts = [], []
    for condition in stream_conditions(results):
        rates = choose_rates(results, ARMS, condition, STREAMED)
        comparison = compare_arms(results, ARMS, rates, condition, STREAMED)
        rates_text = ", ".join(f"{arm} lr {rates['DeepFM', arm]:g}" for arm in ARMS)
        part = _runs_of(results, ARMS, STREAMED, condition, rates)
        rows.append(_row(f"{condition.name}: AUC over the stream ({rates_text})", "", comparison, part))
        verdicts.append(f"{condition.name.removeprefix('stream, ')}: {verdict_over_seeds(comparison)}")
    ends = [warning for c in stream_conditions(results) for warning in _warnings(results, ARMS, c, STREAMED)]
    return Summary(f"{describe_data(results)}{'; '.join(verdicts)}.", rows, ends)


# Figures -------------------------------------------------------------------------------------------------------


def _dots(panel: Axes, comparisons: Sequence[Comparison], papers: Sequence[float], colors: Sequence[str]) -> None:
    """Draw differences with their intervals as rows, and the paper's differences as diamonds."""
    for y, (comparison, paper, color) in enumerate(zip(comparisons, papers, colors, strict=True)):
        difference = comparison.difference
        if difference.count > 1:
            panel.plot([difference.low, difference.high], [y] * 2, color=color, lw=2)
        panel.plot(difference.mean, y, "o", ms=5, color=color)
        panel.plot(paper, y, "D", ms=4, mfc="none", color=palette.TARGET)
    panel.axvline(0, color=palette.MUTED, lw=0.8)
    panel.invert_yaxis()


def _legend(figure: Figure, panel: Axes) -> None:
    panel.plot([], [], "o-", ms=5, color=palette.INK, label="measured, 95% interval")
    panel.plot([], [], "D", ms=4, mfc="none", color=palette.TARGET, label="paper, on all of Criteo")
    figure.legend(fontsize=8, loc="outside upper right", ncols=2)


def criteo_figures(results: Results) -> dict[str, Figure]:
    """Draw the AUC of each optimizer minus that of Adam, by model."""
    rates = choose_rates(results, OPTIMIZERS, TABLE)
    others = [optimizer for optimizer in OPTIMIZERS if optimizer != "Adam"]
    colors = [palette.CADAM if name.startswith("C") else palette.ADAM for name in others]
    figure, axes = panels(2, 3, 10.5, 5.6, sharey=True)
    for panel, (label, models) in zip(axes.flat, _mean_and_models(), strict=True):
        comparisons = [compare_arms(results, (other, "Adam"), rates, TABLE, models) for other in others]
        base = _paper_value(PAPER["Adam"], models)
        _dots(panel, comparisons, [_paper_value(PAPER[other], models) - base for other in others], colors)
        panel.set_title(label)
        panel.set_yticks(range(len(others)), others)
    axes[0, 0].set_ylim(len(others) - 0.5, -0.5)
    for panel in axes[-1]:
        panel.set_xlabel("AUC x 100 minus Adam's")
    _legend(figure, axes[0, 0])
    caption = "Test AUC of each optimizer minus that of Adam, each at its own learning rate (blue: with confidence)"
    return {f"{caption}. The panels have different scales.": figure}


def noise_figures(results: Results) -> dict[str, Figure]:
    """Draw the AUC of CAdam minus that of Adam with label noise, by model and choice of the learning rates."""
    names = _mean_and_models()
    figure, axes = panels(1, 3, 10.5, 3.2, sharey=True)
    for panel, (reading, rates) in zip(axes[0], rate_choices(results).items(), strict=True):
        comparisons = [compare_arms(results, ARMS, rates, TABLE_NOISY, models) for _, models in names]
        papers = [_paper_value(PAPER_NOISY["CAdam"], m) - _paper_value(PAPER_NOISY["Adam"], m) for _, m in names]
        _dots(panel, comparisons, papers, [palette.CADAM] * len(names))
        panel.set(title=reading, xlabel="AUC x 100, CAdam minus Adam")
        panel.set_yticks(range(len(names)), [label for label, _ in names])
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    _legend(figure, axes[0, 0])
    return {f"Test AUC of CAdam minus that of Adam with {NOISY}, for three choices of learning rates": figure}


def ablation_figures(results: Results) -> dict[str, Figure]:
    """Draw the gain from confidence by optimizer and model."""
    names = _mean_and_models()
    rates = choose_rates(results, [optimizer for pair in PAIRS for optimizer in pair], TABLE)
    figure, axes = panels(1, 3, 10.5, 3.2, sharey=True)
    for panel, pair in zip(axes[0], PAIRS, strict=True):
        comparisons = [compare_arms(results, pair, rates, TABLE, models) for _, models in names]
        if pair[0] in PAPER:
            papers = [_paper_value(PAPER[pair[0]], m) - _paper_value(PAPER[pair[1]], m) for _, m in names]
        else:
            papers = [PAPER_ABLATION[pair[0]] - PAPER_ABLATION[pair[1]], *[np.nan] * len(MODELS)]
        _dots(panel, comparisons, papers, [palette.CADAM] * len(names))
        panel.set(title=f"{pair[0]} minus {pair[1]}", xlabel="AUC x 100 gained")
        panel.set_yticks(range(len(names)), [label for label, _ in names])
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    _legend(figure, axes[0, 0])
    return {"Gain in test AUC from confidence, each optimizer at its own learning rate": figure}


def stream_figures(results: Results) -> dict[str, Figure]:
    """Draw the AUC of Adam and CAdam along each stream."""
    conditions = stream_conditions(results)
    figure, axes = panels(1, len(conditions), 10.5, 3.0, sharey=True)
    for panel, condition in zip(axes[0], conditions, strict=True):
        rates = choose_rates(results, ARMS, condition, STREAMED)
        for arm, color in zip(ARMS, (palette.CADAM, palette.ADAM), strict=True):
            part = results.tests().where(optimizer=arm, condition=condition.name, lr=rates["DeepFM", arm])
            curve: Array = part.curve("windows").mean(0)
            panel.plot(100 * (np.arange(len(curve)) + 0.5) / len(curve), curve, color=color, lw=1.3, label=arm)
        panel.set(title=condition.name.removeprefix("stream, "), xlabel="percent of the stream")
    axes[0, 0].set_ylabel("AUC x 100 per window")
    axes[0, 0].legend(fontsize=8)
    return {"AUC along the stream, predicted before learning; mean over test seeds": figure}


# Experiments ---------------------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {
    "compute": runs.compute,
    "compute_many": runs.compute_many,
    "side_by_side": on_gpu,
    "version": 1,
    "measure": (
        "AUC x 100: how often a click is ranked above an impression without a click, in percent; higher is better, 50 "
        "is guessing. The optimizers of the paper's table differ by hundredths."
    ),
    "cuda": ("full",),
    "takes_data": True,
    "unread": unread,
    "rows": {scale: settings["rows"] for scale, settings in SETTINGS.items()},
}
NOTES = (
    "The data are generated clicks with Criteo's 39 fields and click rate, unless --data names Criteo's train.txt. "
    f"--quick uses {SETTINGS['quick']['rows']:,} rows, at most {SETTINGS['quick']['most_ids']} ids per field and "
    "hidden layers of 32 on the CPU. It demonstrates the experiment and is not evidence about Criteo. --full uses "
    "45,840,617 rows (or --rows), 910,747 ids and the paper's models with batch size 10,000, one epoch, on a CUDA "
    "device.",
    "Every optimizer updates only the rows of the embedding tables that a batch uses. AdamW has a weight decay of "
    "0.01, on the tables only for these rows; without decay it would be equal to Adam. There is no L2 penalty.",
    "Seeds change the initial weights, the order of the epoch and dropout; the data stays the same, as in the paper.",
    "The sizes that the paper gives for its models (77M...) are megabytes of the saved model, not parameters.",
    "Each learning rate is chosen by validation AUC on one seed, or on three seeds if the best rate was at the end of "
    "the grid and higher or lower rates were tried. These seeds are not used for results. The rates and seeds are the "
    "same with and without confidence.",
)

TAB_CRITEO = Experiment(
    name="tab-criteo",
    title="CTR prediction: eight optimizers on five models (table 1)",
    shows="Test AUC of DeepFM, WideDeep, DNN, PNN and DCN after one epoch, each optimizer at its best learning rate.",
    claim="CAdam and its AMSGrad variant outperform other optimizers across different models.",
    run_specs=criteo_specs,
    summary=criteo_summary,
    figures=criteo_figures,
    seconds={"quick": 70, "full": 9600},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES,
        "In the paper's table, PNN is best with RAdam (80.96), although CAmsGrad (80.94) is in bold, and the mean "
        "of Yogi's row is 80.54, not 80.52. The paper reports the best result of its grid; here learning rates are "
        "chosen on validation data and other seeds. The paper mentions GAUC, but Criteo has no users, so only AUC is "
        "possible.",
    ),
    **SHARED,
)
TAB_CRITEO_NOISE = Experiment(
    name="tab-criteo-noise",
    title="CTR prediction: label noise (table 2)",
    shows="Test AUC of Adam and CAdam with the labels of 1% of the training negatives flipped to clicks.",
    claim="CAdam has the higher AUC and loses less of it through noise (0.12 against 0.39).",
    run_specs=noise_specs,
    summary=noise_summary,
    figures=noise_figures,
    seconds={"quick": 50, "full": 5000},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES,
        "Exactly 1% of the training negatives are flipped, the same ones for every optimizer. The validation and test "
        "parts have no noise.",
        "The paper does not state its learning rates for noisy data. Its noisy Adam row equals what others report for "
        "clean data at the default learning rate, so three choices are shown. If two of them have the same learning "
        "rates, their rows come from the same runs.",
    ),
    **SHARED,
)
TAB_ABLATION_CRITEO = Experiment(
    name="tab-ablation-criteo",
    title="CTR prediction: confidence for other optimizers (table 4)",
    shows="SGDM, Adam and AMSGrad with and without confidence, mean over the five models.",
    claim="Adding confidence consistently improves performance: CSGDM, CAdam and CAmsGrad beat their counterparts.",
    run_specs=ablation_specs,
    summary=ablation_summary,
    figures=ablation_figures,
    seconds={"quick": 60, "full": 9000},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES,
        "tab-criteo shows CAdam and CAmsGrad for each model. Both tables share their runs.",
        "SGDM and CSGDM have a separate initial grid, 0.1 to 10 (--quick: 0.3 to 30). Their steps are not normalized "
        "by the size of the gradients, so rates up to 5e-3, where the paper's grid ends, were expected to be too "
        "small and were not tried. Their momentum is a moving average, so their steps are a tenth of those of "
        "torch.optim.SGD at the same learning rate.",
    ),
    **SHARED,
)
STREAM_CRITEO = Experiment(
    name="stream-criteo",
    title="CTR prediction: prequential evaluation on a stream with drift",
    shows="DeepFM with Adam and with CAdam, which predicts clicks in the order of time and then learns from them.",
    claim=(
        "The paper's text says that it trains on the data up to each timestamp to simulate online learning, but its "
        "tables use a shuffled split. It has no numbers for this protocol."
    ),
    run_specs=stream_specs,
    summary=stream_summary,
    figures=stream_figures,
    seconds={"quick": 25, "full": 3300},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES[:3],
        "Gradual drift moves from one distribution to another over all rows, sudden drift alternates by quarters, and "
        "hourly drift alternates between noon and midnight of seven days. The frequencies of the ids and the weights "
        "of half of the fields change.",
        "The learning rates of both optimizers are chosen in hindsight, by AUC over the same stream on tuning seeds.",
    ),
    **SHARED,
)
