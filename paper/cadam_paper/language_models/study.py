"""Language models: CAdamW, AdamW and three control arms over learning rates, on text that changes or does not.

Every arm has a grid of learning rates, which is extended until its best rate is not at an end. Arms are
compared at their own best rates, and the rate of each seed is chosen on the other seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cadam.ab.report import palette
from cadam.statistics.intervals import Array, interval

from ..harness import rate_pairs
from ..harness.cuda_runs import on_gpu
from ..harness.experiment import Experiment, Plan, Scale
from ..harness.panels import panels
from ..harness.rates import RateCurve, compare_at_best_rates, draw, next_rates, tolerance_row
from ..harness.results import Results, RunSpec
from ..harness.summary import Row, Summary, comparison_row
from ..harness.verdict import verdict_over_seeds
from . import runs, stream
from .corpus import DEBIAN, STANDARD_LIBRARY
from .optimizers import ARMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "AdamW"
COLORS = dict(zip(("CAdamW", *(arm for arm in ARMS if arm != "CAdamW")), palette.SERIES, strict=False))
METRICS = {
    "loss": "mean over the pass",
    "held_out": "held-out text after the pass",
}
"""Descriptions of the compared metrics, in bits per byte."""
GRIDS: dict[str, tuple[float, ...]] = {
    "tiny GPT": (3e-3, 1e-2, 3e-2),
    "GPT 3M": (5e-4, 1e-3, 2e-3, 4e-3),
    "GPT 10M": (1e-3, 2e-3, 4e-3),
    "GPT 50M": (5e-4, 1e-3, 2e-3),
}
"""Learning rates by model, before the extension. The large models have fewer, because a run takes 45 s or more."""
STEPS = {"tiny GPT": 120, "GPT 3M": 2000, "GPT 10M": 6600, "GPT 50M": 6600}
"""Number of steps by model: ten bytes per parameter for 3M and 10M. 50M sees the whole corpus, two bytes for each."""
SETTINGS: dict[Scale, dict[str, Any]] = {
    "quick": {"device": "cpu", "batch": 8, "context": 64, "bfloat16": False, "compiled": False},
    "full": {"device": "cuda", "batch": 64, "context": 256, "bfloat16": True, "compiled": True},
}
NEAR = 0.01
"""A learning rate counts as near the best if it loses at most this many bits per byte."""
CAPTION = (
    "Mean loss over the pass in bits per byte, by learning rate, with 95% intervals over seeds; a ring marks the best "
    "rate."
)


@dataclass(frozen=True)
class Condition:
    """A condition of the study.

    Attributes:
        name: What changes in the text, as a name of `stream`.
        schedule: The schedule of the learning rate.
        model: The model at full scale.
        arms: The optimizers.
    """

    name: str
    schedule: str = "constant"
    model: str = "GPT 3M"
    arms: Sequence[str] = tuple(ARMS)

    @property
    def treatments(self) -> list[str]:
        """All arms but the baseline."""
        return [arm for arm in self.arms if arm != BASELINE]


def _specs(plan: Plan, condition: Condition, arm: str, grid: Sequence[float]) -> list[RunSpec]:
    is_quick = plan.scale == "quick"
    model, data = ("tiny GPT", STANDARD_LIBRARY.name) if is_quick else (condition.model, DEBIAN.name)
    settings = {**SETTINGS[plan.scale], "steps": STEPS[model], "schedule": condition.schedule}
    return [
        RunSpec("language-models", model, data, arm, rate, condition.name, seed, settings)
        for seed in plan.test_seeds()
        for rate in grid
    ]


def run_specs(plan: Plan, results: Results, condition: Condition) -> list[RunSpec]:
    """List the runs of all arms at every rate and seed; the runs of the first seed come first."""
    specs: list[RunSpec] = []
    grid = GRIDS["tiny GPT" if plan.scale == "quick" else condition.model]
    for arm in condition.arms:
        specs += rate_pairs.extended_specs(
            grid,
            partial(_specs, plan, condition, arm),
            lambda of_arm, arm=arm: [_curve(of_arm, arm, "loss")],  # type: ignore[misc]
            results.where(optimizer=arm),
            partial(next_rates, ratio=2),
        )
    return sorted(specs, key=lambda spec: spec.seed)


def _curve(results: Results, arm: str, metric: str) -> RateCurve:
    return RateCurve.of(results, arm, metric, "lower")


def summary(results: Results, condition: Condition) -> Summary:
    """Compare each arm with AdamW at their own best rates, by the loss over the pass and on held-out text."""
    rows: list[Row] = []
    warnings, verdicts = [], []
    for metric, description in METRICS.items():
        baseline = _curve(results, BASELINE, metric)
        for arm in condition.treatments:
            comparison = compare_at_best_rates(_curve(results, arm, metric), baseline)
            rows.append(comparison_row(f"{description}: {arm}", "", comparison, results.seconds, digits=4))
            if metric == "loss":
                verdicts.append(f"{arm} {comparison.difference:+.4f} ({verdict_over_seeds(comparison)})")
    if condition.name == stream.MIXED and condition.schedule == "constant":
        rows += [_speedup_row(results, arm) for arm in condition.treatments]
    for arm in condition.arms:
        curve = _curve(results, arm, "loss")
        rows.append(tolerance_row("loss", curve, NEAR))
        if curve.best_is_at_an_end:
            warnings.append(f"the best rate of {arm}, {curve.best():g}, is at an end of its grid")
    return Summary(
        f"Bits per byte over the pass minus those of {BASELINE}, each at its own best rate: {'; '.join(verdicts)}.",
        rows,
        warnings,
    )


def speedups(results: Results, arm: str) -> list[float]:
    """Return, by seed, the number of AdamW's steps divided by the steps that an arm needs to reach the same loss.

    Both arms run at their best rates. The loss to reach is AdamW's mean loss over the last twentieth of the pass, and
    an arm reaches it when its mean over a twentieth of the pass is as low. It is 0 if the arm never reaches it.
    """
    best = {name: _curve(results, name, "loss").best() for name in (arm, BASELINE)}
    ratios = []
    for seed in _curve(results, BASELINE, "loss").seeds:
        of_arm, of_baseline = (
            results.where(optimizer=name, lr=best[name], seed=seed).curve("loss")[0].astype(float)
            for name in (arm, BASELINE)
        )
        window = max(1, len(of_arm) // 20)
        smooth = np.convolve(of_arm, np.full(window, 1 / window), mode="valid")
        reached = np.flatnonzero(smooth <= of_baseline[-window:].mean())
        ratios.append(len(of_arm) / (reached[0] + window) if len(reached) else 0.0)
    return ratios


def _speedup_row(results: Results, arm: str) -> Row:
    ratios = interval(speedups(results, arm))
    values = {"speedup": ratios.mean, "low": ratios.low, "high": ratios.high}
    return Row(
        f"steps of {BASELINE} divided by steps to the same loss: {arm}",
        "",
        f"{ratios.mean:.2f}",
        f"{ratios:.2f}" if ratios.count > 1 else "",
        ratios.count,
        0.0,
        values=values,
    )


def figures(results: Results, condition: Condition) -> Mapping[str, Figure]:
    """Draw the loss of all arms over learning rates, and over the pass at their best rates."""
    curves = {arm: _curve(results, arm, "loss") for arm in condition.arms}
    by_rate, axes = panels(1, 1, 6.4, 4.2)
    draw(axes[0, 0], {COLORS[arm]: curve for arm, curve in curves.items()})
    axes[0, 0].set(xlabel="learning rate", ylabel="bits per byte, mean over the pass", title=condition.name)
    axes[0, 0].legend(fontsize=8)

    by_step, axes = panels(1, 1, 8, 3.8)
    for arm, curve in curves.items():
        losses: Array = results.where(optimizer=arm, lr=curve.best()).curve("loss").astype(float).mean(0)
        progress = 100 * (np.arange(len(losses)) + 0.5) / len(losses)
        axes[0, 0].plot(progress, losses, color=COLORS[arm], lw=1.2, label=f"{arm}, {curve.best():g}")
    axes[0, 0].set(xlabel="percent of the pass", ylabel="bits per byte", yscale="log")
    axes[0, 0].legend(fontsize=8)
    return {
        CAPTION: by_rate,
        "Loss over the pass, each arm at its best learning rate; mean over seeds": by_step,
    }


def _experiment(name: str, title: str, shows: str, condition: Condition, seconds: float = 360) -> Experiment:
    arms = ", ".join(condition.arms)
    return Experiment(
        name=name,
        title=f"Language model, {title} ({condition.model})",
        shows=f"{arms} over learning rates, {shows}.",
        claim="The paper has no language models; it names them as a limitation.",
        run_specs=partial(run_specs, condition=condition),
        compute=runs.compute,
        compute_many=runs.compute_many,
        side_by_side=on_gpu,
        summary=partial(summary, condition=condition),
        figures=partial(figures, condition=condition),
        seconds={"quick": 60, "full": seconds},
        seeds={"quick": 2, "full": 3},
        data=DEBIAN,
        quick_data=STANDARD_LIBRARY,
        cuda=("full",),
        weight=_steps,
        measure=(
            "Bits per byte: mean cross-entropy of the next byte, on text that the model has not seen yet; lower is "
            "better. Held-out text: 1% of each domain, after the pass."
        ),
        notes=(
            "--quick trains a tiny model on Python's standard library on the CPU. It demonstrates the experiment and "
            "is not evidence. --full trains a byte-level GPT on one pass over manuals and source code in eight "
            f"domains: {STEPS[condition.model]:,} batches of 64 examples of 256 bytes.",
            "AdamW with betas 0.9 and 0.95, weight decay 0.1 on matrices, gradients clipped to norm 1, and a linear "
            "warm-up over 2% of the steps; the same for every arm. Betas and weight decay are not tuned.",
            "Cautious AdamW divides the masked update by the share of elements that are not masked. The random mask "
            "keeps the same share of elements of each tensor, chosen at random.",
            "In the comparison at the best rates, the rate of each seed is chosen on the other seeds. The best rate is "
            "chosen by the same loss that is compared.",
            "On CUDA, attention adds up gradients in no fixed order, so a repeated run differs slightly.",
        ),
    )


def _steps(spec: RunSpec) -> float:
    return float(spec.settings["steps"])


LARGE: dict[str, Any] = {"model": "GPT 10M", "arms": ("AdamW", "CAdamW")}
CONTROLS: dict[str, Any] = {**LARGE, "arms": (*LARGE["arms"], "cautious AdamW", "AdamW with a random mask")}
"""The control arms of the 10M model are separate experiments, which use the runs of the two main arms again."""
_IN_EVERY_BATCH = "with all domains in every batch"
_IN_TURN = "when the kind of text changes seven times"

MIXED = _experiment("lm-mixed", "domains mixed", _IN_EVERY_BATCH, Condition(stream.MIXED))
SHIFT = _experiment("lm-shift", "one domain after the other", _IN_TURN, Condition(stream.SHIFT))
NOISE = _experiment(
    "lm-noise",
    "20% of the targets random",
    "with label noise; the loss is measured on true targets",
    Condition(stream.noisy(0.2)),
)
COSINE = _experiment(
    "lm-cosine",
    "domains mixed, cosine schedule",
    "with a schedule that ends at a tenth of the rate",
    Condition(stream.MIXED, "cosine"),
)
MIXED_10M = _experiment("lm-mixed-10m", "domains mixed", _IN_EVERY_BATCH, Condition(stream.MIXED, **LARGE), 850)
SHIFT_10M = _experiment("lm-shift-10m", "one domain after the other", _IN_TURN, Condition(stream.SHIFT, **LARGE), 850)
MIXED_10M_CONTROLS = _experiment(
    "lm-mixed-10m-controls", "domains mixed, control arms", _IN_EVERY_BATCH, Condition(stream.MIXED, **CONTROLS), 1700
)
SHIFT_10M_CONTROLS = _experiment(
    "lm-shift-10m-controls",
    "one domain after the other, control arms",
    _IN_TURN,
    Condition(stream.SHIFT, **CONTROLS),
    1700,
)
XLARGE: dict[str, Any] = {**LARGE, "model": "GPT 50M"}
MIXED_50M = _experiment("lm-mixed-50m", "domains mixed", _IN_EVERY_BATCH, Condition(stream.MIXED, **XLARGE), 4000)
SHIFT_50M = _experiment("lm-shift-50m", "one domain after the other", _IN_TURN, Condition(stream.SHIFT, **XLARGE), 4000)
