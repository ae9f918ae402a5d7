"""The paper's two tables on click-through rates, the row of its ablation, and the same models on a stream.

Every optimizer gets the learning rate that is best for it and for the model: by validation AUC, on tuning seeds.
Results are test AUC, from other seeds. Experiments share specs: what two of them need is computed once.
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
from cadam.ab.report.palette import panels
from cadam.ab.results import Results, RunSpec, tuning_seeds
from cadam.ab.summary import Row, Summary, comparison_row
from cadam.ab.verdict import verdict_over_seeds
from cadam.statistics import comparison as statistics
from cadam.statistics.comparison import Comparison
from cadam.statistics.intervals import Array
from cadam.statistics.learning_rates import RateChoice, choose_lr

from ..harness import rate_pairs
from ..harness.comparisons import tally
from ..harness.experiment import Experiment, Plan, Scale
from ..harness.rates import RateCurve
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
"""AUC x 100 by model, in the order of MODELS."""
PAPER_ABLATION = {"SGDM": 77.16, "CSGDM": 77.71, "Adam": 80.92, "CAdam": 80.94, "AmsGrad": 80.94, "CAmsGrad": 80.96}

GRIDS: dict[Scale, tuple[float, ...]] = {
    "quick": (2e-3, 5e-3, 1e-2, 2e-2, 5e-2),
    "full": (2e-4, 5e-4, 1e-3, 2e-3, 5e-3),
}
"""A fifth, half, once, twice and five times the default."""
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
"""Settings of every spec unless its condition says otherwise."""
DRIFTS = ("gradual", "sudden", "hours")


# Cells ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """Under what a model is trained, and by which scores learning rates are chosen and results given."""

    name: str
    settings: Mapping[str, Any]
    tuned_by: str = "validation_auc"
    result: str = "test_auc"


TABLE = Condition(CLEAN, {})
TABLE_NOISY = Condition(NOISY, {"noise": NOISE})
STREAM = Condition("stream, as it comes", {"reading": "stream"}, "stream_auc", "stream_auc")
STREAMS = [
    replace(STREAM, name=f"stream, drift {drift}", settings={"reading": "stream", "drift": drift}) for drift in DRIFTS
]


def spec(plan: Plan, model: str, optimizer: str, lr: float, condition: Condition, seed: int) -> RunSpec:
    settings = {**SETTINGS[plan.scale], **COMMON, **condition.settings, "rows": rows_wanted(plan)}
    if plan.data:
        criteo = runs.own(plan.data, settings["rows"])
        settings |= {"source": "file", "most_ids": None, "read_by": runs.read_by(criteo)}
        data = criteo.description
    else:
        data = runs.generated(settings["rows"], settings["most_ids"], settings["drift"]).description
    return RunSpec("ctr", model, data, optimizer, lr, condition.name, seed, settings)


def rows_wanted(plan: Plan) -> int | None:
    """The rows of a plan; None for all that a file has."""
    if plan.rows is None and plan.data and plan.scale == "full":
        return None
    rows: int = SETTINGS[plan.scale]["rows"]
    return rows if plan.rows is None else plan.rows


def unread(plan: Plan) -> str | None:
    """What to run first where the numbers of the user's file are not there."""
    from .criteo_dataset import cache_folder, find_source
    from .preprocess import finished

    if not plan.data:
        return None
    source, rows = find_source(Path(plan.data)), rows_wanted(plan)
    folder = cache_folder(source, rows, None)
    if finished(source, folder, rows=rows) is not None:
        return None
    first = "" if rows is None else f" --rows {rows}"
    return f"the numbers of {source} are not in {folder}: run `cadam criteo {shlex.quote(plan.data)}{first}`"


def tuning_specs(
    plan: Plan, optimizers: Sequence[str], condition: Condition, found: Results, models: Sequence[str] = MODELS
) -> list[RunSpec]:
    """Every learning rate of the grid, and rates beyond it as long as the best one stands at its end.

    High rates do well with one seed and fail with the next: where the grid had to grow, a rate is chosen on three.
    An optimizer with confidence and the one without always have the same rates and seeds.
    """
    alone = [(optimizer,) for optimizer in optimizers if not any(optimizer in pair for pair in PAIRS)]
    alike = [pair for pair in PAIRS if set(pair) <= set(optimizers)]
    named: list[RunSpec] = []
    for model, arms in product(models, [*alone, *alike]):
        grid = (SGDM_GRIDS if "SGDM" in arms else GRIDS)[plan.scale]
        specs = partial(_tuning_specs, plan, model, arms, condition)
        curves = partial(_tuning_curves, model, arms, condition)
        mine = found.tuning().where(model=model, condition=condition.name)
        of_arms = rate_pairs.extended_specs(grid, partial(specs, tuning_seeds(1)), curves, mine)
        rates = sorted({each.lr for each in of_arms})
        if len(rates) > len(grid) and mine.has(of_arms):
            of_arms = rate_pairs.extended_specs(rates, partial(specs, tuning_seeds(3)), curves, mine)
        named += of_arms
    return named


def _tuning_specs(
    plan: Plan, model: str, arms: Sequence[str], condition: Condition, seeds: Iterable[int], grid: Sequence[float]
) -> list[RunSpec]:
    return [spec(plan, model, arm, lr, condition, seed) for arm in arms for lr in grid for seed in seeds]


def _tuning_curves(model: str, arms: Sequence[str], condition: Condition, found: Results) -> list[RateCurve]:
    curves = []
    for arm in arms:
        mine = found.where(optimizer=arm)
        scores = {each.spec.lr: mine.where(lr=each.spec.lr).metric(condition.tuned_by) for each in mine}
        curves.append(RateCurve(f"{arm} on {model}", "higher", scores))
    return curves


def choice(found: Results, model: str, optimizer: str, condition: Condition) -> RateChoice:
    """The learning rate that is best for an optimizer on a model."""
    tuning = found.tuning().where(model=model, optimizer=optimizer, condition=condition.name)
    return choose_lr(f"{optimizer} on {model}", tuning.metric_by_rate(condition.tuned_by), "higher")


def test_specs(
    plan: Plan, rates: Mapping[tuple[str, str], float], condition: Condition, baselines: Sequence[str]
) -> list[RunSpec]:
    """Each (model, optimizer) at its learning rate; baselines once more on other seeds, for A/A."""
    specs = []
    for (model, optimizer), lr in rates.items():
        seeds = [*plan.test_seeds(), *(plan.repeat_seeds() if optimizer in baselines else ())]
        specs += [spec(plan, model, optimizer, lr, condition, seed) for seed in seeds]
    return specs


Rates = Mapping[tuple[str, str], float]


def chosen(
    found: Results, optimizers: Sequence[str], condition: Condition, models: Sequence[str] = MODELS
) -> dict[tuple[str, str], float]:
    """The best learning rate by (model, optimizer)."""
    return {(m, o): choice(found, m, o, condition).lr for m in models for o in optimizers}


def criteo_specs(plan: Plan, found: Results) -> list[RunSpec]:
    tuning = tuning_specs(plan, OPTIMIZERS, TABLE, found)
    if not found.has(tuning):
        return tuning
    return [*tuning, *test_specs(plan, chosen(found, OPTIMIZERS, TABLE), TABLE, ("Adam", "AmsGrad"))]


def readings(found: Results) -> dict[str, Rates]:
    """At which learning rates the noisy data is learned: the paper does not say."""
    clean = chosen(found, ARMS, TABLE)
    default = GRIDS["full" if found[0].spec.settings["hidden"] is None else "quick"][2]
    return {
        "lr best on clean data": clean,
        f"default lr {default:g}": dict.fromkeys(clean, default),
        "lr best on noisy data": chosen(found, ARMS, TABLE_NOISY),
    }


def noise_specs(plan: Plan, found: Results) -> list[RunSpec]:
    tuning = [each for c in (TABLE, TABLE_NOISY) for each in tuning_specs(plan, ARMS, c, found)]
    if not found.has(tuning):
        return tuning
    specs = [*tuning, *test_specs(plan, chosen(found, ARMS, TABLE), TABLE, ("Adam",))]
    for rates in readings(found).values():
        specs += test_specs(plan, rates, TABLE_NOISY, ("Adam",))
    return specs


def ablation_specs(plan: Plan, found: Results) -> list[RunSpec]:
    optimizers = [optimizer for pair in PAIRS for optimizer in pair]
    tuning = tuning_specs(plan, optimizers, TABLE, found)
    if not found.has(tuning):
        return tuning
    return [*tuning, *test_specs(plan, chosen(found, optimizers, TABLE), TABLE, [base for _, base in PAIRS])]


STREAMED = ("DeepFM",)


def stream_specs(plan: Plan, found: Results) -> list[RunSpec]:
    conditions = [STREAM] if plan.data else STREAMS
    tuning = [each for condition in conditions for each in tuning_specs(plan, ARMS, condition, found, STREAMED)]
    if not found.has(tuning):
        return tuning
    tests = [test_specs(plan, chosen(found, ARMS, c, STREAMED), c, ("Adam",)) for c in conditions]
    return [*tuning, *(each for specs in tests for each in specs)]


# What they say -------------------------------------------------------------------------------------------------


def by_seed(
    part: Results, optimizer: str, rates: Rates, condition: Condition, models: Sequence[str]
) -> dict[int, float]:
    """The result of an optimizer by seed, averaged over models; nan where any of them diverged."""
    each = [
        part.where(model=m, optimizer=optimizer, condition=condition.name, lr=rates[m, optimizer]).metric(
            condition.result
        )
        for m in models
    ]
    return {seed: float(np.mean([values[seed] for values in each])) for seed in each[0]}


def compared(
    results: Results, pair: tuple[str, str], rates: Rates, condition: Condition, models: Sequence[str], aa: bool = True
) -> Comparison:
    """An optimizer against another on the mean of some models, each at its own learning rate."""
    tests, repeats = results.tests(), results.repeats()
    arm, baseline = (by_seed(tests, optimizer, rates, condition, models) for optimizer in pair)
    repeat = by_seed(repeats, pair[1], rates, condition, models) if aa else None
    return statistics.compare(arm, baseline, names=pair, better="higher", repeat=repeat)


def _row(what: str, paper: str, comparison: Comparison, part: Results) -> Row:
    return comparison_row(what, paper, comparison, part.seconds)


def _verdict(comparison: Comparison) -> str:
    return f"{comparison.arm} against {comparison.baseline}: {verdict_over_seeds(comparison)}"


def _paper(pair: tuple[str, str], table: Mapping[str, Sequence[float]], models: Sequence[str]) -> str:
    """The paper's numbers of a pair: of a model, or their mean."""
    return ", ".join(f"{name} {_paper_value(table[name], models):.2f}" for name in pair)


def _paper_value(values: Sequence[float], models: Sequence[str]) -> float:
    return float(np.mean([value for value, model in zip(values, MODELS, strict=True) if model in models]))


def _each_and_mean() -> list[tuple[str, tuple[str, ...]]]:
    return [(MEAN, MODELS), *((model, (model,)) for model in MODELS)]


def _of(
    results: Results, optimizers: Sequence[str], models: Sequence[str], condition: Condition, rates: Rates
) -> Results:
    """The runs that a row's numbers come from."""
    wanted = {(m, o, rates[m, o]) for m in models for o in optimizers}
    tests = results.tests().where(condition=condition.name)
    return Results([r for r in tests if (r.spec.model, r.spec.optimizer, r.spec.lr) in wanted])


def about(results: Results) -> str:
    """What must be said first: which data this is, and where it is not the paper's, or not its models."""
    spec = results[0].spec
    small = "" if spec.settings["hidden"] is None else "small models on "
    if spec.settings["source"] == "file" and not small and f", {ROWS:,} rows" in spec.data:
        return f"On {spec.data}: the paper's data, if the file is Criteo's own. "
    data = spec.data.replace(f"drift {spec.settings['drift']}", "drift")
    return f"Not the paper's run: {small}{data}; its numbers do not compare with the paper's. "


def _warnings(results: Results, optimizers: Sequence[str], condition: Condition, models: Sequence[str]) -> list[str]:
    """Best learning rates at the end of a grid, in one line."""
    ends = [c for m in models for o in optimizers if (c := choice(results, m, o, condition)).warning]
    if not ends:
        return []
    listed = ", ".join(f"{c.arm} {c.lr:g}" for c in ends)
    return [f"{condition.name}: best learning rates at an end of the grid, look beyond it: {listed}"]


def criteo_summary(results: Results) -> Summary:
    rates = chosen(results, OPTIMIZERS, TABLE)
    rows, mine = [], []
    for pair in (ARMS, AMSGRAD):
        for label, models in _each_and_mean():
            comparison = compared(results, pair, rates, TABLE, models)
            part = _of(results, pair, models, TABLE, rates)
            rows.append(_row(f"{label}: {pair[0]} against {pair[1]}", _paper(pair, PAPER, models), comparison, part))
            mine.append(comparison)
    others = [(other, "Adam") for other in ("Yogi", "RAdam", "AdaBelief", "AdamW", "AmsGrad", "CAmsGrad")]
    for pair in (*others, ("CAmsGrad", "CAdam")):
        comparison = compared(results, pair, rates, TABLE, MODELS)
        part = _of(results, pair, MODELS, TABLE, rates)
        row = _row(f"{MEAN}: {pair[0]} against {pair[1]}", _paper(pair, PAPER, MODELS), comparison, part)
        values = {
            f"{o} on {m}": float(np.mean(list(by_seed(results.tests(), o, rates, TABLE, (m,)).values())))
            for m in MODELS
            for o in pair
        }
        rows.append(replace(row, values={**row.values, **values}))
    over_models = tally([mine[i] for i in range(len(mine)) if i % 6], "comparisons", "higher", "lower")
    verdict = (
        f"{about(results)}Test AUC, {MEAN}: {_verdict(mine[0])}; {_verdict(mine[6])}. Model by model, with confidence "
        f"against without: {over_models}."
    )
    return Summary(verdict, rows, _warnings(results, OPTIMIZERS, TABLE, MODELS))


def noise_summary(results: Results) -> Summary:
    rows, verdicts = [], []
    for reading, rates in readings(results).items():
        for label, models in _each_and_mean():
            comparison = compared(results, ARMS, rates, TABLE_NOISY, models)
            part = _of(results, ARMS, models, TABLE_NOISY, rates)
            rows.append(
                _row(f"{reading}: {label}: CAdam against Adam", _paper(ARMS, PAPER_NOISY, models), comparison, part)
            )
            if label == MEAN:
                verdicts.append(f"{reading}: {verdict_over_seeds(comparison)}")
    drop, rates = _drop(results), chosen(results, ARMS, TABLE)
    part = Results([r for c in (TABLE, TABLE_NOISY) for r in _of(results, ARMS, MODELS, c, rates)])
    rows.append(_row(f"lost by noise, {MEAN}, lr best on clean data", "CAdam 0.12, Adam 0.39", drop, part))
    verdict = f"{about(results)}Test AUC with noisy training labels, {MEAN}, CAdam against Adam. {'; '.join(verdicts)}."
    tail = f" AUC lost by noise at the lr best on clean data: {verdict_over_seeds(drop)}."
    ends = [w for c in (TABLE, TABLE_NOISY) for w in _warnings(results, ARMS, c, MODELS)]
    return Summary(verdict + tail, rows, ends)


def _drop(results: Results) -> Comparison:
    """How much AUC the noise costs each arm, at the learning rate best on clean data."""
    rates, tests = chosen(results, ARMS, TABLE), results.tests()

    def lost(optimizer: str) -> dict[int, float]:
        clean, noisy = (by_seed(tests, optimizer, rates, c, MODELS) for c in (TABLE, TABLE_NOISY))
        return {seed: clean[seed] - noisy[seed] for seed in clean}

    return statistics.compare(lost("CAdam"), lost("Adam"), names=ARMS, better="lower")


def ablation_summary(results: Results) -> Summary:
    rows, comparisons = [], []
    optimizers = [optimizer for pair in PAIRS for optimizer in pair]
    rates = chosen(results, optimizers, TABLE)
    for pair in PAIRS:
        for label, models in _each_and_mean() if pair == SGDM else _each_and_mean()[:1]:
            comparison = compared(results, pair, rates, TABLE, models)
            paper = ", ".join(f"{name} {PAPER_ABLATION[name]:.2f}" for name in pair) if label == MEAN else ""
            part = _of(results, pair, models, TABLE, rates)
            rows.append(_row(f"{label}: {pair[0]} against {pair[1]}", paper, comparison, part))
            if label == MEAN:
                comparisons.append(comparison)
    verdict = f"{about(results)}Test AUC, {MEAN}: {'; '.join(map(_verdict, comparisons))}."
    return Summary(verdict, rows, _warnings(results, optimizers, TABLE, MODELS))


def streams_of(results: Results) -> list[Condition]:
    return [c for c in (STREAM, *STREAMS) if results.where(condition=c.name)]


def stream_summary(results: Results) -> Summary:
    rows, verdicts = [], []
    for condition in streams_of(results):
        rates = chosen(results, ARMS, condition, STREAMED)
        comparison = compared(results, ARMS, rates, condition, STREAMED)
        rates_text = ", ".join(f"{arm} lr {rates['DeepFM', arm]:g}" for arm in ARMS)
        part = _of(results, ARMS, STREAMED, condition, rates)
        rows.append(_row(f"{condition.name}: AUC over the stream ({rates_text})", "", comparison, part))
        verdicts.append(f"{condition.name.removeprefix('stream, ')}: {verdict_over_seeds(comparison)}")
    ends = [warning for c in streams_of(results) for warning in _warnings(results, ARMS, c, STREAMED)]
    return Summary(f"{about(results)}{'; '.join(verdicts)}.", rows, ends)


# Figures -------------------------------------------------------------------------------------------------------


def _dots(panel: Axes, comparisons: Sequence[Comparison], papers: Sequence[float], colors: Sequence[str]) -> None:
    """Differences with their intervals, one below the other; the paper's as diamonds."""
    for place, (comparison, paper, color) in enumerate(zip(comparisons, papers, colors, strict=True)):
        found = comparison.difference
        if found.count > 1:
            panel.plot([found.low, found.high], [place] * 2, color=color, lw=2)
        panel.plot(found.mean, place, "o", ms=5, color=color)
        panel.plot(paper, place, "D", ms=4, mfc="none", color=palette.TARGET)
    panel.axvline(0, color=palette.MUTED, lw=0.8)
    panel.invert_yaxis()


def _legend(figure: Figure, panel: Axes) -> None:
    panel.plot([], [], "o-", ms=5, color=palette.INK, label="measured, 95% interval")
    panel.plot([], [], "D", ms=4, mfc="none", color=palette.TARGET, label="paper, on all of Criteo")
    figure.legend(fontsize=8, loc="outside upper right", ncols=2)


def criteo_figures(results: Results) -> dict[str, Figure]:
    rates = chosen(results, OPTIMIZERS, TABLE)
    others = [optimizer for optimizer in OPTIMIZERS if optimizer != "Adam"]
    colors = [palette.CADAM if name.startswith("C") else palette.ADAM for name in others]
    figure, axes = panels(2, 3, 10.5, 5.6, sharey=True)
    for panel, (label, models) in zip(axes.flat, _each_and_mean(), strict=True):
        found = [compared(results, (other, "Adam"), rates, TABLE, models) for other in others]
        base = _paper_value(PAPER["Adam"], models)
        _dots(panel, found, [_paper_value(PAPER[other], models) - base for other in others], colors)
        panel.set_title(label)
        panel.set_yticks(range(len(others)), others)
    axes[0, 0].set_ylim(len(others) - 0.5, -0.5)
    for panel in axes[-1]:
        panel.set_xlabel("AUC x 100, less Adam's")
    _legend(figure, axes[0, 0])
    caption = "Test AUC of each optimizer less that of Adam, each at its own learning rate (blue: confidence)"
    return {f"{caption}. Every panel has a scale of its own.": figure}


def noise_figures(results: Results) -> dict[str, Figure]:
    names = _each_and_mean()
    figure, axes = panels(1, 3, 10.5, 3.2, sharey=True)
    for panel, (reading, rates) in zip(axes[0], readings(results).items(), strict=True):
        found = [compared(results, ARMS, rates, TABLE_NOISY, models) for _, models in names]
        papers = [_paper_value(PAPER_NOISY["CAdam"], m) - _paper_value(PAPER_NOISY["Adam"], m) for _, m in names]
        _dots(panel, found, papers, [palette.CADAM] * len(names))
        panel.set(title=reading, xlabel="AUC x 100, CAdam less Adam")
        panel.set_yticks(range(len(names)), [label for label, _ in names])
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    _legend(figure, axes[0, 0])
    return {f"Test AUC of CAdam less that of Adam with {NOISY}, at three choices of learning rates": figure}


def ablation_figures(results: Results) -> dict[str, Figure]:
    names = _each_and_mean()
    rates = chosen(results, [optimizer for pair in PAIRS for optimizer in pair], TABLE)
    figure, axes = panels(1, 3, 10.5, 3.2, sharey=True)
    for panel, pair in zip(axes[0], PAIRS, strict=True):
        found = [compared(results, pair, rates, TABLE, models) for _, models in names]
        if pair[0] in PAPER:
            papers = [_paper_value(PAPER[pair[0]], m) - _paper_value(PAPER[pair[1]], m) for _, m in names]
        else:
            papers = [PAPER_ABLATION[pair[0]] - PAPER_ABLATION[pair[1]], *[np.nan] * len(MODELS)]
        _dots(panel, found, papers, [palette.CADAM] * len(names))
        panel.set(title=f"{pair[0]} less {pair[1]}", xlabel="AUC x 100 gained")
        panel.set_yticks(range(len(names)), [label for label, _ in names])
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    _legend(figure, axes[0, 0])
    return {"What confidence adds to the test AUC, each optimizer at its own learning rate": figure}


def stream_figures(results: Results) -> dict[str, Figure]:
    conditions = streams_of(results)
    figure, axes = panels(1, len(conditions), 10.5, 3.0, sharey=True)
    for panel, condition in zip(axes[0], conditions, strict=True):
        rates = chosen(results, ARMS, condition, STREAMED)
        for arm, color in zip(ARMS, (palette.CADAM, palette.ADAM), strict=True):
            part = results.tests().where(optimizer=arm, condition=condition.name, lr=rates["DeepFM", arm])
            curve: Array = part.curve("windows").mean(0)
            panel.plot(100 * (np.arange(len(curve)) + 0.5) / len(curve), curve, color=color, lw=1.3, label=arm)
        panel.set(title=condition.name.removeprefix("stream, "), xlabel="percent of the stream")
    axes[0, 0].set_ylabel("AUC x 100 of a window")
    axes[0, 0].legend(fontsize=8)
    return {"Prediction along the stream, before learning from it; mean over test seeds": figure}


# Experiments ---------------------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {
    "compute": runs.compute,
    "compute_many": runs.compute_many,
    "side_by_side": runs.on_gpu,
    "version": 1,
    "measure": (
        "AUC x 100: how often a click is ranked above a pass, in percent; more is better, 50 is guessing. The "
        "optimizers of the paper's table differ by hundredths."
    ),
    "cuda": ("full",),
    "takes_data": True,
    "unread": unread,
    "rows": {scale: settings["rows"] for scale, settings in SETTINGS.items()},
}
NOTES = (
    "Made on generated clicks with Criteo's 39 fields and click rate unless --data names Criteo's own train.txt. "
    f"--quick: {SETTINGS['quick']['rows']:,} rows, at most {SETTINGS['quick']['most_ids']} ids a field, hidden layers "
    "of 32, on the CPU: it shows how all of it works and is no evidence about Criteo. --full: 45,840,617 rows "
    "(--rows for fewer), 910,747 ids, the paper's models, batch 10,000, one epoch, on a CUDA device.",
    "Every optimizer is row-lazy on the tables of embeddings: rows outside of the batch are not touched. AdamW decays "
    "by 0.01, on tables the touched rows only; without decay it would be Adam. No L2 penalty.",
    "Seeds change initial weights, the order of the epoch and dropout; the data stays the same, as in the paper.",
    "The sizes that the paper gives for its models (77M...) are megabytes of the saved model, not parameters.",
    "Each learning rate is chosen by validation AUC on one seed, or on three where the best one stood at the end of "
    "the grid and rates beyond it were tried. These seeds are used for nothing else. With and without confidence they, "
    "and the rates, are the same.",
)

TAB_CRITEO = Experiment(
    name="tab-criteo",
    title="Click-through rates: eight optimizers on five models (table 1)",
    shows="Test AUC of DeepFM, WideDeep, DNN, PNN and DCN after one epoch, with each optimizer at its own best lr.",
    claim="CAdam and its AMSGrad variant outperform other optimizers across different models.",
    run_specs=criteo_specs,
    summary=criteo_summary,
    figures=criteo_figures,
    seconds={"quick": 70, "full": 9600},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES,
        "In the paper's table, PNN is best with RAdam (80.96), though CAmsGrad (80.94) is in bold, and the mean "
        "of Yogi's row is 80.54, not 80.52. It reports the best of its grid; here learning rates are chosen on "
        "validation data and other seeds. It speaks of GAUC; Criteo has no users, so AUC is what there can be.",
    ),
    **SHARED,
)
TAB_CRITEO_NOISE = Experiment(
    name="tab-criteo-noise",
    title="Click-through rates: noisy labels (table 2)",
    shows="Test AUC of Adam and CAdam when 1% of the training negatives are shown as clicks.",
    claim="CAdam outperforms Adam both in AUC and in how little it loses (0.12 against 0.39).",
    run_specs=noise_specs,
    summary=noise_summary,
    figures=noise_figures,
    seconds={"quick": 50, "full": 5000},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES,
        "Exactly 1% of the training negatives, the same ones for every optimizer; validation and test are clean.",
        "The paper does not say at which learning rates it learned from noisy data. Its noisy Adam row equals what "
        "others report for clean data at the default learning rate, so all three readings are given. Where two of them "
        "come to the same learning rates, their rows are of the same runs.",
    ),
    **SHARED,
)
TAB_ABLATION_CRITEO = Experiment(
    name="tab-ablation-criteo",
    title="Click-through rates: confidence for other optimizers (ablation table)",
    shows="SGDM, Adam and AMSGrad with and without confidence, mean over the five models.",
    claim="Adding confidence consistently improves performance: CSGDM, CAdam and CAmsGrad beat their counterparts.",
    run_specs=ablation_specs,
    summary=ablation_summary,
    figures=ablation_figures,
    seconds={"quick": 60, "full": 9000},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES,
        "CAdam and CAmsGrad model by model: see tab-criteo, with which this table shares its runs.",
        "SGDM and CSGDM have a grid of their own, 0.1 to 10 (--quick: 0.3 to 30) to begin with: their steps are not "
        "divided by the size of the gradients, so rates up to 5e-3, where the paper's grid ends, were expected to be "
        "too small and were not tried. Their momentum is a moving average: at one lr, a tenth of what torch's SGD adds "
        "up to.",
    ),
    **SHARED,
)
STREAM_CRITEO = Experiment(
    name="stream-criteo",
    title="Click-through rates: predict, then learn",
    shows="A DeepFM that meets clicks in the order of time while they drift, with Adam and with CAdam.",
    claim=(
        "The paper's text trains on data up to each timestamp to simulate online learning; its tables are of a "
        "shuffled split. It has no numbers for this reading."
    ),
    run_specs=stream_specs,
    summary=stream_summary,
    figures=stream_figures,
    seconds={"quick": 25, "full": 3300},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES[:3],
        "Gradual: from one world to another along all rows. Sudden: to and fro by quarters. Hours: between noon and "
        "midnight of seven days. What drifts is who comes and how much half of the fields appeal.",
        "Learning rates are chosen by AUC over the same stream, on tuning seeds: in hindsight, for both alike.",
    ),
    **SHARED,
)
