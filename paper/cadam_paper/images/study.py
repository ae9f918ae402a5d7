"""The image experiments of the paper: figures 4 and 5, table 4 (ablation) and the figures of the appendix.

The conditions are sudden shift (rotation at each epoch), continuous shift (rotation at each step) and label noise, each
at several strengths. As in the paper, both optimizers of a pair use the learning rate that is best for the optimizer
without confidence. This rate is chosen on tuning seeds at the strength of table 4, which is called the reference
strength, and is used at all strengths. Strength 0 means no change of the data. Conditions with the same learning rate
share the runs of strength 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cadam.ab.report import palette
from cadam.statistics import comparison as statistics
from cadam.statistics.comparison import KINDS, Better, Comparison
from cadam.statistics.intervals import Array, Interval, interval

from ..harness.comparisons import tally
from ..harness.cuda_runs import on_gpu
from ..harness.experiment import Experiment, Plan, Scale
from ..harness.learning_rates import RateChoice, choose_lr
from ..harness.panels import panels
from ..harness.results import Results, RunSpec, tuning_seeds
from ..harness.summary import Row, Summary, comparison_row
from ..harness.verdict import floor_qualifier, verdict_over_seeds
from . import runs, streams
from .data import CIFAR10, DIGITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARMS = ("CAdam", "Adam")
PAIRS = (("CSGDM", "SGDM"), ARMS, ("CAmsGrad", "AmsGrad"))
"""Pairs of optimizers: with confidence, and without."""
COLORS = {"CAdam": palette.CADAM, "Adam": palette.ADAM}


@dataclass(frozen=True)
class Condition:
    """A kind of change with its strengths at each scale. Learning rates are chosen at the `reference` strength."""

    name: str
    make: Callable[[float], streams.Stream]
    """Returns the stream with a strength of the change."""
    unit: str
    """The unit of the strengths."""
    reference: float
    strengths: Mapping[Scale, tuple[float, ...]]
    axis: str
    """The label of an axis of strengths."""

    def label(self, strength: float) -> str:
        """Return the name of the condition at a strength, such as "sudden 80°"."""
        return f"{self.name} {strength:g}{self.unit}"


CONDITIONS = {
    condition.name: condition
    for condition in (
        Condition(
            "sudden",
            streams.sudden,
            "°",
            80,
            {"quick": (0, 60, 80), "full": (0, 20, 40, 60, 80)},
            "degrees of rotation per epoch",
        ),
        Condition(
            "continuous",
            streams.continuous,
            "°",
            2,
            {"quick": (0, 1, 2), "full": (0, 0.5, 1, 2, 4)},
            "degrees of rotation per step",
        ),
        Condition(
            "noise",
            streams.noisy,
            "%",
            40,
            {"quick": (0, 20, 40), "full": (0, 10, 20, 30, 40)},
            "percent of batches with random labels",
        ),
    )
}
PAPER = {
    ("sudden", "SGDM"): (74.83, 75.99),
    ("sudden", "Adam"): (75.07, 76.05),
    ("sudden", "AmsGrad"): (75.00, 75.78),
    ("continuous", "SGDM"): (67.19, 69.08),
    ("continuous", "Adam"): (64.61, 69.13),
    ("continuous", "AmsGrad"): (61.22, 66.35),
    ("noise", "SGDM"): (76.38, 77.61),
    ("noise", "Adam"): (73.86, 77.20),
    ("noise", "AmsGrad"): (74.28, 77.20),
}
"""Accuracies of VGG in table 4 of the paper, without and with confidence, by condition and optimizer."""
MEASURES = {
    "accuracy": "mean test accuracy",
    "last_accuracy": "test accuracy of the last epoch",
    "recovery": "steps to recover from a shift",
}
"""Descriptions of the compared metrics."""
DETAIL = 60.0
DETAIL_STEPS = (1400, 2300)
"""Rotation in degrees and range of steps that the right part of figure 4 shows. An epoch has about 390 steps."""

MODELS: dict[str, dict[Scale, str]] = {
    "vgg": {"quick": "small VGG", "full": "VGG-16"},
    "resnet": {"quick": "small ResNet", "full": "ResNet-18"},
    "densenet": {"quick": "small DenseNet", "full": "DenseNet-121"},
}
DATA: dict[Scale, str] = {"quick": DIGITS.name, "full": CIFAR10.name}
GRIDS: dict[Scale, tuple[float, ...]] = {"quick": (1e-3, 3e-3, 1e-2, 3e-2), "full": (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)}
SGDM_GRIDS: dict[Scale, tuple[float, ...]] = {"quick": (0.1, 0.3, 1.0), "full": (0.003, 0.01, 0.03, 0.1, 0.3)}
SETTINGS: dict[Scale, dict[str, Any]] = {
    "quick": {
        "epochs": 4,
        "batch": 64,
        "weight_decay": 5e-4,
        "device": "cpu",
        "precision": "float32",
        "compiled": False,
    },
    "full": {
        "epochs": 30,
        "batch": 128,
        "weight_decay": 5e-4,
        "device": "cuda",
        "precision": "bfloat16",
        "compiled": True,
    },
}
TUNING_EPOCHS: dict[Scale, int] = {"quick": 4, "full": 10}
"""Number of epochs of the runs that choose a learning rate."""
TUNING_RUNS = {("vgg", "full"): 3}
"""Number of tuning runs per learning rate, where it is more than one.

Seeds change the accuracy about as much as neighboring rates do, so VGG has three. The other models are more expensive:
three runs per rate would be half of their total cost.
"""
FEWER_RATES = {("densenet", "full"): (1e-4, 3e-4, 1e-3)}
"""Learning rates of models with a smaller grid.

DenseNet-121 is the most expensive model, so it has fewer rates, and they are tuned only for Adam.
"""
WINDOWS: dict[Scale, int] = {"quick": 1, "full": 10}
"""Number of steps that one point of a stored curve averages. The runs of `FIG_SUDDEN_DETAIL` store every step."""


# Runs ---------------------------------------------------------------------------------------------------------


def spec(
    plan: Plan, family: str, optimizer: str, lr: float, stream: streams.Stream, seed: int, **settings: Any
) -> RunSpec:
    """Return the spec of one run.

    Args:
        plan: The plan of the experiment.
        family: The family of models, a key of `MODELS`.
        optimizer: The name of the optimizer.
        lr: The learning rate.
        stream: The change of the data.
        seed: The seed of the run.
        **settings: Settings that differ from those of the scale.
    """
    condition = str(stream)
    window = 1 if condition == str(streams.sudden(DETAIL)) else WINDOWS[plan.scale]
    settings = {**SETTINGS[plan.scale], "window": window, **settings}
    model = MODELS[family][plan.scale]
    return RunSpec("images", model, DATA[plan.scale], optimizer, lr, condition, seed, settings)


def strengths(condition: Condition, family: str, scale: Scale) -> tuple[float, ...]:
    """Return the strengths at which a model is run: all for VGG, only 0 and the reference for the others."""
    return condition.strengths[scale] if family == "vgg" else (0, condition.reference)


def tuning_specs(plan: Plan, family: str, condition: Condition, arms: Sequence[str]) -> list[RunSpec]:
    """Return the runs that choose the learning rates of some optimizers, at the reference strength of a condition."""
    stream, specs = condition.make(condition.reference), []
    fewer = FEWER_RATES.get((family, plan.scale))
    for arm in arms:
        if fewer and arm != "Adam":
            continue
        grid = fewer or (SGDM_GRIDS if "SGDM" in arm else GRIDS)[plan.scale]
        epochs, seeds = TUNING_EPOCHS[plan.scale], tuning_seeds(TUNING_RUNS.get((family, plan.scale), 1))
        specs += [spec(plan, family, arm, lr, stream, seed, epochs=epochs) for lr in grid for seed in seeds]
    return specs


def choose_rate(results: Results, condition: Condition, arm: str) -> RateChoice:
    """Choose the best learning rate of an optimizer at the reference strength of a condition."""
    return choose_lr(arm, _tuning(results, condition, arm).metric_by_rate("accuracy"), "higher")


def _tuning(results: Results, condition: Condition, arm: str) -> Results:
    return results.tuning().where(optimizer=arm, condition=str(condition.make(condition.reference)))


def _tuned_arms(results: Results, condition: Condition, arms: Sequence[str]) -> list[str]:
    """Return the optimizers that have tuning runs under a condition."""
    return [arm for arm in arms if len(_tuning(results, condition, arm))]


def condition_specs(plan: Plan, results: Results, family: str, name: str) -> list[RunSpec]:
    """Return the runs of one condition: first the tuning runs, then also those at the chosen rate.

    Both optimizers run at Adam's best rate at each strength. Adam also runs with repeat seeds at the reference strength
    to estimate the noise floor.
    """
    condition = CONDITIONS[name]
    tuning = tuning_specs(plan, family, condition, ARMS)
    if not results.has(tuning):
        return tuning
    lr = choose_rate(results, condition, "Adam").lr
    tests = [
        spec(plan, family, arm, lr, condition.make(strength), seed)
        for strength in strengths(condition, family, plan.scale)
        for arm in ARMS
        for seed in plan.test_seeds()
    ]
    return [*tuning, *tests, *_repeats(plan, family, "Adam", lr, condition)]


def _repeats(plan: Plan, family: str, arm: str, lr: float, condition: Condition) -> list[RunSpec]:
    stream = condition.make(condition.reference)
    return [spec(plan, family, arm, lr, stream, seed) for seed in plan.repeat_seeds()]


def detail_specs(plan: Plan, results: Results) -> list[RunSpec]:
    """Return the runs at 60 degrees, and the runs at the reference strength from which the noise floor is estimated."""
    condition = CONDITIONS["sudden"]
    tuning = tuning_specs(plan, "vgg", condition, ARMS)
    if not results.has(tuning):
        return tuning
    lr = choose_rate(results, condition, "Adam").lr
    runs_to_test = [*((arm, DETAIL) for arm in ARMS), ("Adam", condition.reference)]
    tests = [
        spec(plan, "vgg", arm, lr, condition.make(strength), seed)
        for arm, strength in runs_to_test
        for seed in plan.test_seeds()
    ]
    return [*tuning, *tests, *_repeats(plan, "vgg", "Adam", lr, condition)]


def ablation_specs(plan: Plan, results: Results) -> list[RunSpec]:
    """Return the runs of each optimizer with and without confidence, at the rate that is best without confidence.

    As long as the tuning runs, from which this rate is chosen, have no results, only the tuning runs are returned.
    """
    bases = [base for _, base in PAIRS]
    tuning = [spec for c in CONDITIONS.values() for spec in tuning_specs(plan, "vgg", c, bases)]
    if not results.has(tuning):
        return tuning
    specs = list(tuning)
    for condition in CONDITIONS.values():
        stream = condition.make(condition.reference)
        for pair in PAIRS:
            lr = choose_rate(results, condition, pair[1]).lr
            specs += [spec(plan, "vgg", arm, lr, stream, seed) for arm in pair for seed in plan.test_seeds()]
            specs += _repeats(plan, "vgg", pair[1], lr, condition)
    return specs


def rates_specs(plan: Plan, results: Results, family: str) -> list[RunSpec]:
    """Return the tuning runs of both optimizers, and then also Adam at its best rate and CAdam at both best rates."""
    tuning = [spec for condition in CONDITIONS.values() for spec in tuning_specs(plan, family, condition, ARMS)]
    if not results.has(tuning):
        return tuning
    specs = list(tuning)
    for condition in CONDITIONS.values():
        stream, rates = condition.make(condition.reference), own_rates(results, condition)
        arms_and_rates = dict.fromkeys([("Adam", rates["Adam"]), ("CAdam", rates["Adam"]), ("CAdam", rates["CAdam"])])
        specs += [spec(plan, family, arm, lr, stream, seed) for arm, lr in arms_and_rates for seed in plan.test_seeds()]
        specs += _repeats(plan, family, "Adam", rates["Adam"], condition)
    return specs


def own_rates(results: Results, condition: Condition) -> dict[str, float]:
    """Return the best learning rate of each optimizer under a condition."""
    return {arm: choose_rate(results, condition, arm).lr for arm in ARMS}


# Tables -------------------------------------------------------------------------------------------------


def compare_arms(
    results: Results, condition: Condition, strength: float, pair: tuple[str, str] = ARMS, metric: str = "accuracy"
) -> Comparison:
    """Compare a pair of optimizers at one strength of a condition.

    The comparison includes the noise floor of the baseline at the reference strength of the condition. It has no noise
    floor at strength 0, because several conditions share these runs.
    """
    arm, baseline = (by_seed(results, condition, strength, name, metric) for name in pair)
    better: Better = "lower" if metric == "recovery" else "higher"
    comparison = statistics.compare(arm, baseline, names=pair, better=better)
    return replace(comparison, noise=noise_floor(results, condition, pair[1], metric)) if strength else comparison


def by_seed(
    results: Results, condition: Condition, strength: float, arm: str, metric: str = "accuracy"
) -> dict[int, float]:
    """Return a metric of an optimizer at one strength by test seed."""
    return results.tests().where(condition=str(condition.make(strength)), optimizer=arm).metric(metric)


def noise_floor(results: Results, condition: Condition, baseline: str, metric: str) -> Interval:
    """Estimate the A/A noise floor: the difference between the baseline's test seeds and its repeat seeds.

    It is measured at the reference strength of the condition.
    """
    of_baseline = results.where(condition=str(condition.make(condition.reference)), optimizer=baseline)
    first, second = (
        [value for value in part.metric(metric).values() if np.isfinite(value)]
        for part in (of_baseline.tests(), of_baseline.repeats())
    )
    return statistics.noise_floor(first, second)


def gain_by_seed(results: Results, condition: Condition, at: Sequence[float]) -> dict[int, float]:
    """Return the accuracy of CAdam minus that of Adam, averaged over some strengths, by seed."""
    cadam, adam = means_by_seed(results, condition, at)
    return {seed: cadam[seed] - adam[seed] for seed in cadam}


def means_by_seed(
    results: Results, condition: Condition, at: Sequence[float], metric: str = "accuracy"
) -> tuple[dict[int, float], dict[int, float]]:
    """Return a metric of CAdam and of Adam, averaged over some strengths, by seed."""
    cadam, adam = ([by_seed(results, condition, strength, arm, metric) for strength in at] for arm in ARMS)
    return _mean(cadam), _mean(adam)


def _mean(values: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {seed: float(np.mean([each[seed] for each in values])) for seed in values[0]}


def mean_rows(results: Results, condition: Condition, at: Sequence[float]) -> list[Row]:
    """Return rows that compare the optimizers in the mean over some strengths."""
    rows = []
    for metric, paper in (("accuracy", "CAdam higher"), ("last_accuracy", "")):
        comparison = statistics.compare(*means_by_seed(results, condition, at, metric), names=ARMS, better="higher")
        label = f"{condition.name}, mean over {_range(condition, at)}: {MEASURES[metric]}"
        rows.append(_row(label, paper, comparison, results.tests()))
    return rows


def claim_row(results: Results, condition: Condition, at: Sequence[float]) -> Row:
    """Return the row that tests what the paper claims about a condition at several strengths of the change.

    For label noise, the claim compares CAdam at the reference strength with Adam without noise; otherwise it compares
    the gain of CAdam with change and without.
    """
    changed = [strength for strength in at if strength]
    tests = results.tests()
    if condition.name == "noise":
        names = f"CAdam at {condition.reference:g}%", "Adam at 0%"
        comparison = statistics.compare(
            by_seed(results, condition, condition.reference, "CAdam", "last_accuracy"),
            by_seed(results, condition, 0, "Adam", "last_accuracy"),
            names=names,
            better="higher",
        )
        comparison = replace(comparison, noise=noise_floor(results, condition, "Adam", "last_accuracy"))
        return _row(f"{names[0]} against {names[1]}, test accuracy of the last epoch", "comparable", comparison, tests)
    return gain_row(results, condition, changed if condition.name == "sudden" else changed[-1:], 0)


def gain_row(results: Results, condition: Condition, at: Sequence[float], base: float) -> Row:
    """Return a row that compares CAdam's gain at some strengths with its gain at the strength `base`."""
    names = f"gain at {_range(condition, at)}", f"gain at {base:g}{condition.unit}"
    comparison = statistics.compare(
        gain_by_seed(results, condition, at), gain_by_seed(results, condition, [base]), names=names, better="higher"
    )
    label = f"CAdam's {names[0]} against that at {base:g}{condition.unit}, in mean test accuracy"
    row = _row(label, "larger", comparison, results.tests())
    return replace(row, verdict=verdict_over_seeds(comparison).describe("larger", "smaller"))


def _range(condition: Condition, at: Sequence[float]) -> str:
    return " to ".join(f"{s:g}" for s in dict.fromkeys((at[0], at[-1]))) + condition.unit


def _row(label: str, paper: str, comparison: Comparison, results: Results) -> Row:
    return comparison_row(label, paper, comparison, results.seconds, digits=2)


def _paper(condition: Condition, strength: float, family: str, pair: tuple[str, str]) -> str:
    if family == "vgg" and strength == condition.reference:
        without, with_confidence = PAPER[condition.name, pair[1]]
        return f"{pair[0]} {with_confidence:.2f}, {pair[1]} {without:.2f}"
    return f"{pair[0]} higher" if strength else ""


def _tuning_warnings(results: Results, condition: Condition, arms: Sequence[str]) -> list[str]:
    choices = [choose_rate(results, condition, arm) for arm in _tuned_arms(results, condition, arms)]
    return [f"{condition.name}: {each.warning}" for each in choices if each.warning]


def _own_rate(results: Results, condition: Condition) -> str:
    """Describe the learning rate of the runs, and CAdam's own best rate if it differs."""
    adam = choose_rate(results, condition, "Adam")
    if not _tuned_arms(results, condition, ["CAdam"]):
        return f"Both at lr {adam.lr:g}, the best for Adam, as in the paper; CAdam's own best rate was not determined."
    cadam = choose_rate(results, condition, "CAdam")
    if adam.lr == cadam.lr:
        return f"Both at lr {adam.lr:g}, the best rate of the grid for both."
    return (
        f"Both at lr {adam.lr:g}, the best for Adam, as in the paper; CAdam's own best is {cadam.lr:g} (tuning seeds: "
        f"{cadam.means[cadam.lr]:.2f} there, {cadam.means[adam.lr]:.2f} at {adam.lr:g}, where Adam has "
        f"{adam.means[adam.lr]:.2f})."
    )


def _describe_by_verdict(comparisons: Sequence[Comparison], labels: Sequence[str]) -> str:
    groups: dict[tuple[str, str], list[str]] = {}
    for kind in KINDS:
        for comparison, label in zip(comparisons, labels, strict=True):
            if comparison.kind == kind:
                words = replace(verdict_over_seeds(comparison), detail="").describe("more accurate", "less accurate")
                groups.setdefault((words, floor_qualifier(comparison)), []).append(label)
    parts = [f"{words} at {', '.join(names)}{less}" for (words, less), names in groups.items()]
    return f"CAdam against Adam, mean test accuracy over epochs: {'; '.join(parts)}."


def disclaimer(results: Results) -> str:
    """Return a warning if the results are not from the paper's models and data, otherwise an empty text."""
    spec = results[0].spec
    if spec.data == CIFAR10.name:
        return ""
    return f"Not the paper's setting: {spec.model} on {spec.data}. The numbers cannot be compared with the paper's. "


def condition_summary(results: Results, family: str, name: str) -> Summary:
    """Summarize the comparison of Adam and CAdam under one condition, by strength."""
    condition, tests = CONDITIONS[name], results.tests()
    at = _strengths(results, condition)
    comparisons = [compare_arms(results, condition, strength) for strength in at]
    labels = [condition.label(strength) for strength in at]
    rows = []
    for strength, label, comparison in zip(at, labels, comparisons, strict=True):
        part = tests.where(condition=str(condition.make(strength)))
        row_label = f"{label}: {MEASURES['accuracy']}"
        rows.append(_row(row_label, _paper(condition, strength, family, ARMS), comparison, part))
    for metric in ("last_accuracy", "recovery"):
        for strength in at:
            if metric == "recovery" and (name != "sudden" or not strength):
                continue
            part = tests.where(condition=str(condition.make(strength)))
            rows.append(
                _row(
                    f"{condition.label(strength)}: {MEASURES[metric]}",
                    "CAdam sooner" if metric == "recovery" else "",
                    compare_arms(results, condition, strength, metric=metric),
                    part,
                )
            )
    text = _describe_by_verdict(comparisons, labels)
    claim = claim_row(results, condition, at)
    combined = [claim]
    changed = [strength for strength in at if strength]
    if len(changed) > 1:
        combined = [*mean_rows(results, condition, changed), claim]
        text += f" Over {_range(condition, changed)} together: {combined[0].verdict} ({combined[0].interval})."
        if name == "continuous":
            combined.append(gain_row(results, condition, changed[-1:], changed[0]))
    rows[len(at) : len(at)] = combined
    text += f" {claim.label}: {claim.verdict} ({claim.interval})."
    verdict = f"{disclaimer(results)}{text} {_own_rate(results, condition)}"
    return Summary(verdict, rows, _tuning_warnings(results, condition, ARMS))


def _strengths(results: Results, condition: Condition) -> list[float]:
    """Return the strengths of a condition that the results contain."""
    conditions = {result.spec.condition for result in results.tests()}
    return [s for s in condition.strengths["full"] if str(condition.make(s)) in conditions]


def detail_summary(results: Results) -> Summary:
    """Summarize the recovery from sudden shifts, and the alignment ratios before and after shifts."""
    condition = CONDITIONS["sudden"]
    part = results.tests().where(condition=str(condition.make(DETAIL)))
    recovery = compare_arms(results, condition, DETAIL, metric="recovery")
    accuracy = compare_arms(results, condition, DETAIL)
    rows = [
        _row(f"{condition.label(DETAIL)}: {MEASURES['recovery']}", "CAdam sooner", recovery, part),
        _row(f"{condition.label(DETAIL)}: {MEASURES['accuracy']}", "CAdam higher", accuracy, part),
    ]
    for arm in ARMS:
        before, highest, lowest = _around_shifts(part, arm)
        movements = [
            word for word, happens in (("rises", highest > 1.02 * before), ("falls", lowest < 0.98 * before)) if happens
        ]
        rows.append(
            Row(
                f"{arm}: alignment before shifts; highest and lowest in the tenth of an epoch after them",
                "falls at shifts",
                f"{before:.3f}; {highest:.3f}, {lowest:.3f}",
                "",
                len(part.where(optimizer=arm)),
                part.where(optimizer=arm).seconds,
                " and ".join(movements) or "stays",
                values={"before": before, "highest": highest, "lowest": lowest},
            )
        )
    verdict = f"{disclaimer(results)}Recovery: {verdict_over_seeds(recovery)}. {_own_rate(results, condition)}"
    return Summary(verdict, rows, _tuning_warnings(results, condition, ARMS))


def _around_shifts(results: Results, arm: str) -> tuple[float, float, float]:
    """Return the alignment ratio around shifts, averaged over seeds and shifts.

    Returns:
        The mean over the tenth of an epoch before a shift, and the largest and smallest value in the tenth after it.
    """
    curve = results.where(optimizer=arm).curve("alignment").astype(float)
    epochs = curve.reshape(len(curve), results[0].spec.settings["epochs"], -1)
    near = max(2, epochs.shape[2] // 10)
    before, after = epochs[:, :-1, -near:].mean(), epochs[:, 1:, :near].mean((0, 1))
    return float(before), float(after.max()), float(after.min())


def ablation_summary(results: Results) -> Summary:
    """Compare each optimizer with and without confidence at the reference strength of each condition."""
    rows, warnings, comparisons = [], [], []
    for condition in CONDITIONS.values():
        bases = [base for _, base in PAIRS]
        warnings += _tuning_warnings(results, condition, bases)
        for pair in PAIRS:
            comparison = compare_arms(results, condition, condition.reference, pair)
            part = results.tests().where(condition=str(condition.make(condition.reference)))
            both = Results([r for r in part if r.spec.optimizer in pair])
            lr = choose_rate(results, condition, pair[1]).lr
            label = f"{condition.label(condition.reference)}: {pair[0]} against {pair[1]}, lr {lr:g}"
            rows.append(_row(label, _paper(condition, condition.reference, "vgg", pair), comparison, both))
            comparisons.append(comparison)
    counts = tally(comparisons, "comparisons", "higher", "lower")
    verdict = f"{disclaimer(results)}Mean test accuracy with confidence, against without: {counts}."
    return Summary(verdict, rows, warnings)


def compare_at_rates(
    results: Results, condition: Condition, rates: Mapping[str, float], metric: str = "accuracy"
) -> Comparison:
    """Compare CAdam with Adam at the reference strength and at the given learning rates."""
    at_rates = Results([r for r in results if r.spec.lr == rates[r.spec.optimizer]])
    return compare_arms(at_rates, condition, condition.reference, metric=metric)


def rates_summary(results: Results) -> Summary:
    """Compare CAdam with Adam at Adam's best learning rate and at CAdam's own."""
    rows, warnings, labels = [], [], []
    at_common_rate, at_own_rates = [], []
    for condition in CONDITIONS.values():
        rates = own_rates(results, condition)
        label = condition.label(condition.reference)
        part = results.tests().where(condition=str(condition.make(condition.reference)))
        for lr in dict.fromkeys((rates["Adam"], rates["CAdam"])):
            for metric in ("accuracy", "last_accuracy"):
                comparison = compare_at_rates(results, condition, {**rates, "CAdam": lr}, metric)
                words = f"{label}: {MEASURES[metric]}, CAdam at lr {lr:g}, Adam at {rates['Adam']:g}"
                rows.append(_row(words, "", comparison, part))
        at_common_rate.append(compare_at_rates(results, condition, dict.fromkeys(ARMS, rates["Adam"])))
        at_own_rates.append(compare_at_rates(results, condition, rates))
        labels.append(label)
        warnings += _tuning_warnings(results, condition, ARMS)
    verdict = (
        f"{disclaimer(results)}Each at its own best rate: {_describe_by_verdict(at_own_rates, labels)} "
        f"Both at Adam's: {_describe_by_verdict(at_common_rate, labels)}"
    )
    return Summary(verdict, rows, warnings)


# Figures -------------------------------------------------------------------------------------------------------


def _shade(panel: Axes, x: Sequence[float], values: Array, arm: str, **style: Any) -> None:
    """Draw the mean of several runs and shade their range."""
    color = COLORS[arm]
    panel.plot(x, values.mean(0), color=color, lw=1.3, label=arm, **style)
    if len(values) > 1:
        panel.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.18, lw=0)


def condition_figures(results: Results, name: str) -> dict[str, Figure]:
    """Draw the accuracy by strength, by learning rate and by epoch, and the alignment ratio by step."""
    condition, tests = CONDITIONS[name], results.tests()
    at = _strengths(results, condition)
    scale, axes = panels(1, 2, 10.5, 3.6)
    strength_panel, rate_panel = axes[0]
    for arm in reversed(ARMS):
        means = [
            interval(list(tests.where(optimizer=arm, condition=str(condition.make(s))).metric("accuracy").values()))
            for s in at
        ]
        errors = [mean.half_width if mean.count > 1 else 0.0 for mean in means]
        strength_panel.errorbar(
            at, [mean.mean for mean in means], errors, fmt="o-", ms=4, capsize=3, color=COLORS[arm], label=arm
        )
    for arm in _tuned_arms(results, condition, ARMS[::-1]):
        chosen = choose_rate(results, condition, arm)
        rate_panel.plot(list(chosen.means), list(chosen.means.values()), "o-", ms=4, color=COLORS[arm], label=arm)
    used = choose_rate(results, condition, "Adam").lr
    rate_panel.axvline(used, color=palette.TARGET, lw=1, ls=":")
    rate_panel.set_xscale("log")
    strength_panel.set(xlabel=condition.axis, ylabel="mean test accuracy, %")
    rate_panel.set(xlabel="learning rate (dotted: used)", title=f"Tuning seeds, {condition.label(condition.reference)}")
    strength_panel.legend(fontsize=8)

    curves, grid = panels(2, len(at), max(10.5, 2.3 * len(at)), 4.6, sharey="row")
    for column, strength in zip(grid.T, at, strict=True):
        part = tests.where(condition=str(condition.make(strength)))
        for arm in reversed(ARMS):
            of_arm = part.where(optimizer=arm)
            accuracy, alignment = of_arm.curve("test_accuracy"), of_arm.curve("alignment").astype(float)
            epochs = accuracy.shape[1]
            _shade(column[0], range(1, 1 + epochs), accuracy, arm)
            alignment = _thin(alignment, 120)
            _shade(column[1], np.linspace(0, epochs, alignment.shape[1], endpoint=False).tolist(), alignment, arm)
        column[0].set_title(condition.label(strength))
        column[1].set_xlabel("epoch")
        if name == "sudden" and strength:
            for epoch in range(1, epochs):
                column[1].axvline(epoch, color=palette.TARGET, lw=0.5, ls=":")
    grid[0, 0].set_ylabel("test accuracy, %")
    grid[1, 0].set_ylabel("alignment ratio")
    grid[0, 0].legend(fontsize=8, loc="lower right")
    marks = " Dotted lines mark the shifts." if name == "sudden" else ""
    return {
        "Mean test accuracy by strength of the change, with 95% intervals, and by learning rate": scale,
        f"Test accuracy by epoch and alignment ratio by step; mean and range over seeds.{marks}": curves,
    }


def _thin(curve: Array, points: int) -> Array:
    """Average each row of a curve to about `points` values."""
    window = max(1, curve.shape[1] // points)
    return np.stack([runs.average_windows(row, window) for row in curve])


def detail_figures(results: Results) -> dict[str, Figure]:
    """Draw the alignment ratio, accuracy and loss by step around sudden shifts."""
    part = results.tests().where(condition=str(streams.sudden(DETAIL)))
    epochs = part[0].spec.settings["epochs"]
    total = part.curve("loss").shape[1]
    length = total // epochs
    start, end = DETAIL_STEPS if total > DETAIL_STEPS[1] else (length // 2, total)
    figure, axes = panels(3, 1, 9, 6.5, sharex=True)
    for panel, name in zip(axes[:, 0], ("alignment", "accuracy", "loss"), strict=True):
        for shift in range(length, end, length):
            if shift >= start:
                panel.axvline(shift, color=palette.TARGET, lw=1, ls="--")
        for arm in reversed(ARMS):
            curve = part.where(optimizer=arm).curve(name)[:, start:end].astype(float)
            window = max(1, curve.shape[1] // 150)
            smooth = _thin(curve, 150)
            _shade(panel, (start + window * (np.arange(smooth.shape[1]) + 0.5)).tolist(), smooth, arm)
        panel.set_ylabel({"alignment": "alignment ratio", "accuracy": "batch accuracy, %", "loss": "loss"}[name])
    axes[-1, 0].set_xlabel("step")
    axes[0, 0].legend(fontsize=8)
    return {f"A sudden shift of {DETAIL:g} degrees per epoch (dashed lines); mean and range over seeds": figure}


def ablation_figures(results: Results) -> dict[str, Figure]:
    """Draw the gain from confidence for each optimizer and condition."""
    figure, axes = panels(1, len(CONDITIONS), 10.5, 3.4)
    for panel, condition in zip(axes[0], CONDITIONS.values(), strict=True):
        for x, pair in enumerate(PAIRS):
            difference = compare_arms(results, condition, condition.reference, pair).difference
            without, with_confidence = PAPER[condition.name, pair[1]]
            _draw_difference(panel, x, difference, label=None if x else "measured")
            panel.plot(x, with_confidence - without, "D", color=palette.TARGET, label=None if x else "paper")
        panel.axhline(0, color=palette.MUTED, lw=0.8)
        panel.set_xticks(range(len(PAIRS)), [arm for arm, _ in PAIRS])
        panel.set_title(condition.label(condition.reference))
    axes[0, 0].set_ylabel("points of accuracy gained")
    axes[0, 0].legend(fontsize=8)
    return {"Gain in mean test accuracy from confidence, with 95% intervals, and the paper's gain": figure}


def rates_figures(results: Results) -> dict[str, Figure]:
    """Draw the gain of CAdam at Adam's best learning rate and at its own."""
    figure, axes = panels(1, len(CONDITIONS), 10.5, 3.4, sharey=True)
    for panel, condition in zip(axes[0], CONDITIONS.values(), strict=True):
        best = own_rates(results, condition)
        for x, rates in enumerate((dict.fromkeys(ARMS, best["Adam"]), best)):
            _draw_difference(panel, x, compare_at_rates(results, condition, rates).difference)
        panel.axhline(0, color=palette.MUTED, lw=0.8)
        names = [f"both at Adam's rate,\n{best['Adam']:g}", f"each at its own,\n{best['CAdam']:g} and {best['Adam']:g}"]
        panel.set_xticks(range(2), names)
        panel.set(title=condition.label(condition.reference), xlim=(-0.5, 1.5))
    axes[0, 0].set_ylabel("points of accuracy gained")
    return {"Gain in mean test accuracy of CAdam over Adam, with 95% intervals": figure}


def _draw_difference(panel: Axes, x: int, difference: Interval, **style: Any) -> None:
    """Draw a difference and its interval."""
    if difference.count > 1:
        panel.plot([x] * 2, [difference.low, difference.high], color=palette.CADAM, lw=2)
    panel.plot(x, difference.mean, "o", color=palette.CADAM, **style)


# Experiments ---------------------------------------------------------------------------------------------------


def _epochs(spec: RunSpec) -> float:
    return float(spec.settings["epochs"])


SHARED: dict[str, Any] = {
    "compute": runs.compute,
    "compute_many": runs.compute_many,
    "side_by_side": on_gpu,
    "version": 1,
    "cuda": ("full",),
    "data": CIFAR10,
    "quick_data": DIGITS,
    "weight": _epochs,
    "measure": (
        "Mean test accuracy: test accuracy in percent, averaged over epochs; higher is better. Steps to recover: the "
        "number of steps after a shift until the accuracy is back at 95% of its value before; fewer is better."
    ),
}
NOTES = (
    "--quick uses small models on scikit-learn's digits, on the CPU. It demonstrates the experiment and is not "
    "evidence about CIFAR-10. --full uses CIFAR-10 on a CUDA device: batch size 128, 30 epochs (10 to choose a "
    "learning rate), weight decay 5e-4, bfloat16.",
    "Each epoch has 390 batches in a new random order. The 80 remaining images, different ones each time, are omitted.",
    "Learning rates are chosen by the mean accuracy on the same 10,000 test images that results are measured on, "
    "without a validation set. Only the seeds differ: tuning seeds (three with --full for VGG-16, otherwise one) are "
    "not used for results. Both optimizers use the best rate of the one without confidence, as in the paper; for "
    "DenseNet-121 it is chosen from three rates.",
    "Test images get the current rotation. Images are rotated with bilinear interpolation and black corners; the paper "
    "does not describe its rotation.",
)
_NOTES_BY_STRENGTH = (
    "The A/A noise floor is measured at the strength at which learning rates are chosen, and is shown in all rows.",
    "The rows of strength 0 are runs without change, at the learning rate of this condition. Conditions with different "
    "learning rates have different runs of strength 0.",
)
_CLAIMS = {
    "sudden": (
        "Sudden shift: images rotated at every epoch",
        "CAdam consistently outperforms Adam across rotation speeds, and by more than without rotation.",
    ),
    "continuous": (
        "Continuous shift: images rotated at every step",
        "As the rotation speed increases, the advantage of CAdam over Adam becomes more pronounced.",
    ),
    "noise": (
        "Label noise: batches with random labels",
        "CAdam consistently outperforms Adam; by the end of training, its accuracy with 40% noise is comparable to "
        "Adam's without noise.",
    ),
}


def _experiment(name: str, family: str, condition: str, seconds: Mapping[Scale, float]) -> Experiment:
    title, claim = _CLAIMS[condition]
    shown, figure = MODELS[family]["full"], "fig. 4" if condition == "sudden" else "fig. 5"
    return Experiment(
        name=name,
        title=f"{title}, {shown} ({figure if family == 'vgg' else 'appendix'})",
        shows=f"Test accuracy of Adam and CAdam, {shown} on CIFAR-10, by strength of the change.",
        claim=claim,
        run_specs=partial(condition_specs, family=family, name=condition),
        summary=partial(condition_summary, family=family, name=condition),
        figures=partial(condition_figures, name=condition),
        seconds=seconds,
        seeds={"quick": 3 if family == "vgg" else 2, "full": 3},
        notes=(*NOTES, *_NOTES_BY_STRENGTH),
        **SHARED,
    )


FIG_SUDDEN = _experiment("fig-sudden", "vgg", "sudden", {"quick": 12, "full": 580})
FIG_CONTINUOUS = _experiment("fig-continuous", "vgg", "continuous", {"quick": 12, "full": 580})
FIG_IMAGE_NOISE = _experiment("fig-image-noise", "vgg", "noise", {"quick": 12, "full": 580})
FIG_SUDDEN_RESNET = _experiment("fig-sudden-resnet", "resnet", "sudden", {"quick": 12, "full": 460})
FIG_CONTINUOUS_RESNET = _experiment("fig-continuous-resnet", "resnet", "continuous", {"quick": 12, "full": 460})
FIG_IMAGE_NOISE_RESNET = _experiment("fig-image-noise-resnet", "resnet", "noise", {"quick": 12, "full": 460})
FIG_SUDDEN_DENSENET = _experiment("fig-sudden-densenet", "densenet", "sudden", {"quick": 18, "full": 1200})
FIG_CONTINUOUS_DENSENET = _experiment("fig-continuous-densenet", "densenet", "continuous", {"quick": 18, "full": 1200})
FIG_IMAGE_NOISE_DENSENET = _experiment("fig-image-noise-densenet", "densenet", "noise", {"quick": 18, "full": 1200})

FIG_SUDDEN_DETAIL = Experiment(
    name="fig-sudden-detail",
    title="Sudden shift step by step, VGG-16 (fig. 4, right)",
    shows="Alignment ratio, accuracy and loss by step, with images rotated by 60 degrees at every epoch.",
    claim=(
        "When the images are rotated, the alignment ratio falls and recovers; CAdam's accuracy drops more slowly and "
        "recovers faster than Adam's."
    ),
    run_specs=detail_specs,
    summary=detail_summary,
    figures=detail_figures,
    seconds={"quick": 8, "full": 300},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES,
        "The A/A noise floor is measured at 80 degrees, as for the rest of the figure.",
        "A run has recovered from a shift when its accuracy, averaged over a twentieth of an epoch, is back at 95% of "
        "its value before.",
    ),
    **SHARED,
)
TAB_ABLATION = Experiment(
    name="tab-ablation-images",
    title="Confidence for other optimizers, VGG-16 (table 4)",
    shows="SGDM, Adam and AMSGrad with and without confidence under the three conditions.",
    claim="Adding confidence consistently improves performance: CSGDM, CAdam and CAmsGrad beat their counterparts.",
    run_specs=ablation_specs,
    summary=ablation_summary,
    figures=ablation_figures,
    seconds={"quick": 35, "full": 1700},
    seeds={"quick": 3, "full": 3},
    notes=(
        *NOTES,
        "The paper does not state the learning rates of SGDM. The grid here is "
        f"{SGDM_GRIDS['full'][0]:g} to {SGDM_GRIDS['full'][-1]:g}. The momentum of SGDM is a moving average, so its "
        "steps are ten times shorter than those of torch.optim.SGD.",
    ),
    **SHARED,
)


def _rates(name: str, family: str, seconds: Mapping[Scale, float]) -> Experiment:
    return Experiment(
        name=name,
        title=f"Each optimizer at its own best learning rate, {MODELS[family]['full']}",
        shows="CAdam against Adam under the three conditions, both at Adam's best rate and each at its own.",
        claim="The paper runs both at the rate that is best for Adam; it has no numbers for other rates.",
        run_specs=partial(rates_specs, family=family),
        summary=rates_summary,
        figures=rates_figures,
        seconds=seconds,
        seeds={"quick": 3 if family == "vgg" else 2, "full": 3},
        notes=(*NOTES, "CAdam also runs at its own best learning rate, which is chosen in the same way."),
        **SHARED,
    )


TAB_RATES = _rates("tab-image-rates", "vgg", {"quick": 30, "full": 850})
TAB_RATES_RESNET = _rates("tab-image-rates-resnet", "resnet", {"quick": 25, "full": 1060})
