"""Tables and figures of docs/evidence.md, which combines all archived studies to answer whether CAdam helps.

`pages` inserts the results of these functions into the page. All numbers are computed from the archive, except those
that the paper reports. A *pair* is an optimizer with confidence and the same optimizer without, each evaluated over a
grid of learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from cadam.ab.report import palette
from cadam.ab.study import Study
from cadam.statistics.comparison import Comparison, Kind, compare
from cadam.statistics.intervals import Interval

from . import judged_streams
from .archive_names import LABEL_NOISE, UNCHANGED, display_condition
from .ctr import rates as click_rates
from .ctr import study as click_study
from .harness.panels import panels
from .harness.rate_pairs import Pair
from .harness.rates import RateCurve
from .harness.results import Result
from .harness.summary import Row
from .harness.verdict import kind_names
from .images import rates as image_rates
from .images import study as images
from .language_models import page as language_models
from .published import (
    archive,
    difference_of,
    find_row,
    find_rows,
    format_interval,
    format_rate,
    is_complete,
    is_significant_among,
    load,
    load_full_scale,
    table_header,
    table_row,
)
from .stream_tables import STREAMS, best_rate_ratios

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 100.0
"""Factor from the archived GAUC, a number between 0 and 1, to points."""
IMAGE_CURVES = {
    "fig-rates": image_rates.Curves("vgg", images.ARMS),
    "fig-rates-amsgrad": image_rates.Curves("vgg", ("CAmsGrad", "AmsGrad")),
    "fig-rates-sgdm": image_rates.Curves("vgg", ("CSGDM", "SGDM")),
    "fig-rates-resnet": image_rates.Curves("resnet", images.ARMS),
}
"""Experiments that evaluate a pair of optimizers on images over learning rates."""
FIGURE_OF = {"sudden": "fig-sudden", "continuous": "fig-continuous", "noise": "fig-image-noise"}
"""The experiment on VGG-16 for each condition. The names for other models have the model as a suffix."""
CLICK_CURVES = "fig-rates-clicks"
"""The experiment that evaluates Adam and CAdam on clicks over learning rates."""
OWN, BASELINES, FIRST_FIFTH, TUNED = "own best", "the baseline's, by 10 epochs", "first fifth", "tuning runs"
"""The ways in which studies choose learning rates."""
ACCURACY, AUC, GAUC = "points of accuracy", "points of AUC", "points of GAUC"


# Findings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The difference between a treatment and its baseline in one study, under one condition."""

    unit: str
    study: str
    condition: str
    difference: Interval
    kind: Kind
    rates: str
    """The way in which the learning rates were chosen."""
    paper: float | None = None
    """The difference that the paper reports, if any."""
    treatment: str = "CAdam"

    @property
    def is_ahead(self) -> bool:
        """Whether the interval over seeds lies above 0."""
        return self.difference.low > 0


@cache
def image_pairs(name: str = "fig-rates") -> dict[str, Pair]:
    """Return the pair of an image experiment by condition, for the conditions whose runs are all archived."""
    request = load_full_scale(name)
    return image_rates.pairs(request.results, IMAGE_CURVES[name], request.missing)


MODELS = {"VGG-16": "fig-rates", "ResNet-18": "fig-rates-resnet"}
"""The experiments that evaluate Adam and CAdam on images over learning rates, by model."""


@cache
def adam_pairs() -> dict[tuple[str, str], Pair]:
    """Return the pairs of CAdam and Adam on images by (model, condition)."""
    return {(model, label): pair for model, name in MODELS.items() for label, pair in image_pairs(name).items()}


@cache
def all_image_pairs() -> dict[str, Pair]:
    """Return all pairs on images. The keys name model, optimizer without confidence and condition."""
    return {
        f"{images.MODELS[curves.family]['full']}, {curves.arms[1]}, {label}": pair
        for name, curves in IMAGE_CURVES.items()
        for label, pair in image_pairs(name).items()
    }


@cache
def click_pairs() -> dict[str, Pair]:
    """Return the pair of CAdam and Adam on clicks by condition."""
    return click_rates.pairs(load(CLICK_CURVES).results)


@cache
def findings() -> tuple[Finding, ...]:
    """Return every comparison of the archived studies on images, clicks and real streams."""
    return (*_image_findings(), *_click_findings(), *_stream_findings())


def _image_findings() -> Iterable[Finding]:
    for name, curves in IMAGE_CURVES.items():
        study = f"{images.MODELS[curves.family]['full']}, {curves.arms[0]}"
        for label, pair in image_pairs(name).items():
            yield _finding_of_pair(ACCURACY, study, label, pair, curves.arms[0])
    for condition in images.CONDITIONS.values():
        label = condition.label(condition.reference)
        for treatment, baseline in images.PAIRS:
            row = find_row("tab-ablation-images", f"{label}: {treatment} against {baseline}")
            without, confident = images.PAPER[condition.name, baseline]
            paper = confident - without
            yield _finding_of_row(ACCURACY, f"VGG-16, {treatment}", label, row, BASELINES, paper, treatment=treatment)
        for family in ("resnet", "densenet"):
            row = find_row(f"{FIGURE_OF[condition.name]}-{family}", f"{label}: mean test accuracy")
            yield _finding_of_row(ACCURACY, f"{images.MODELS[family]['full']}, CAdam", label, row, BASELINES)


def _click_findings() -> Iterable[Finding]:
    for condition, pair in click_pairs().items():
        yield _finding_of_pair(AUC, "DeepFM, generated clicks", condition, pair)
    for treatment, baseline, table in MODEL_PAIRS:
        row = find_row(table, f"mean of the models: {treatment} against {baseline}")
        paper = click_study.PAPER_ABLATION[treatment] - click_study.PAPER_ABLATION[baseline]
        yield _finding_of_row(AUC, f"five models, {treatment}", "no drift", row, TUNED, paper, treatment=treatment)
    paper = float(np.subtract(click_study.PAPER_NOISY["CAdam"], click_study.PAPER_NOISY["Adam"]).mean())
    yield _finding_of_row(AUC, "five models, CAdam", "no drift, 1% noise", noisy_clicks(), TUNED, paper)


MODEL_PAIRS = (
    ("CAdam", "Adam", "tab-criteo"),
    ("CAmsGrad", "AmsGrad", "tab-criteo"),
    ("CSGDM", "SGDM", "tab-ablation-criteo"),
)
"""Treatment, baseline and experiment of the comparisons on five models and generated clicks."""


def noisy_clicks() -> Row:
    """Return CAdam against Adam over five models with 1% label noise, each at its best rate of the tuning runs."""
    return find_row("tab-criteo-noise", "lr best on noisy data: mean of the models")


def _stream_findings() -> Iterable[Finding]:
    for name, label in STREAMS.items():
        if is_complete(f"rates-{name}"):
            row = find_row(f"rates-{name}", "GAUC by impressions: each at its own best rate")
            yield _finding_of_row(GAUC, label, UNCHANGED, row, OWN, scale=POINTS)
        if is_complete(f"ab-{name}"):
            for row in find_rows(f"ab-{name}", suffix=": GAUC by impressions (higher is better)"):
                condition = row.label.partition(":")[0]
                yield _finding_of_row(GAUC, label, condition, row, FIRST_FIFTH, scale=POINTS)


def _finding_of_pair(unit: str, study: str, condition: str, pair: Pair, treatment: str = "CAdam") -> Finding:
    own = pair.at_own_rates
    return Finding(unit, study, condition, own.difference, own.kind, OWN, pair.paper_margin, treatment)


def _finding_of_row(
    unit: str,
    study: str,
    condition: str,
    row: Row,
    rates: str,
    paper: float | None = None,
    scale: float = 1.0,
    treatment: str = "CAdam",
) -> Finding:
    assert row.verdict_kind is not None
    return Finding(unit, study, condition, difference_of(row, scale), row.verdict_kind, rates, paper, treatment)


# Summary -------------------------------------------------------------------------------------------------------

KIND_NAMES = kind_names("ahead", "behind")


def answer() -> list[str]:
    """Return the summary of the page: whether CAdam helps, in five numbered paragraphs."""
    drifting, stationary = clicks_by_drift()
    streams = unchanged_streams()
    ahead = [finding for finding in streams if finding.is_ahead]
    shifting = len(drifting) + len(streams)
    above = compare_above(adam_pairs())
    at_fixed_rates = len(above) + len(click_pairs())
    always_ahead = all(
        _smallest_gain(pair) > 0 for name, pair in click_pairs().items() if not name.startswith("no drift")
    )
    at_every_rate = ", and its mean is ahead at every learning rate that was run" if always_ahead else ""
    own_rates = all(finding.rates == OWN for finding in streams)
    chosen = "with each optimizer at its own best rate" if own_rates else "at rates chosen early in the stream"
    small = sum(mean < 0.1 for mean in _means(streams))
    return [
        f"1. **Yes, if images change.** On CIFAR-10 images that are rotated during training, CAdam gains "
        f"{_gains_under_shift()} points of accuracy over Adam. Accuracy is averaged over epochs, and each optimizer "
        f"has its own best learning rate. {_significance_under_shift()}{_last_epoch_under_shift()}",
        f"2. **Not clearly, if data do not change.** {_gains_without_shift()}{_gains_without_drift(stationary)}.",
        f"3. **Mostly, on event streams.** On {len(ahead)} of {len(streams)} real streams the GAUC of CAdam is higher, "
        f"by {_range(_means(ahead), 2)} points, {chosen}. On {small} of them the gain is below 0.1 points. Over seeds, "
        f"{_count_significant_gains(streams, shifting) or 'none'} of the gains are clear after correction for "
        f"{shifting} comparisons. Over users and time, the gain is clear on {_clear_streams(streams)}. On generated "
        f"clicks with drift CAdam gains {_range(_means(drifting))} points of AUC{at_every_rate}. Of these "
        f"{len(drifting)} gains, {_count_ahead(drifting)} are clear, and "
        f"{_count_significant_gains(drifting, shifting) or 'none'} after correction.",
        "4. **Yes, if the learning rate is too high.** On images at three times Adam's best rate, CAdam is ahead by "
        f"{_range(_means(above))} points of accuracy, because it loses less than Adam at such rates. The gain is clear "
        f"in {count_significant(above, at_fixed_rates)[0]} of {len(above)} cases after correction for {at_fixed_rates} "
        "comparisons.",
        f"5. **Start at Adam's learning rate, then try three times that rate.** {_describe_best_rates()}",
    ]


SHIFTS = ("sudden", "continuous")
"""The prefixes of the conditions in which images are rotated during training."""


def _is_ahead(comparison: Comparison) -> bool:
    return comparison.kind == "better"


def _describe_best_rates() -> str:
    """Compare CAdam's best learning rates with Adam's on images, clicks and real streams."""
    pairs = [*adam_pairs().values(), *click_pairs().values()]
    ratios = [pair.treatment.best() / pair.baseline.best() for pair in pairs]
    return (
        f"On images and clicks, CAdam's best rate was {_describe_ratios(ratios)}. On real streams it was "
        f"{_describe_ratios(list(best_rate_ratios().values()))}."
    )


def _describe_ratios(ratios: Sequence[float]) -> str:
    """Count the cases in which CAdam's best rate equals, exceeds or is below Adam's."""
    same, higher, lower = sum(r == 1 for r in ratios), [r for r in ratios if r > 1], sum(r < 1 for r in ratios)
    text = f"equal to Adam's in {same} of {len(ratios)} cases and {_range(higher, 0)} times as high in {len(higher)}"
    return text + (f", and lower in {lower}" if lower else "")


def other_optimizers() -> list[str]:
    """Summarize the effect of confidence on SGDM and AmsGrad on images."""
    pairs = [pair for pair in all_image_pairs().values() if pair.baseline.arm != "Adam"]
    own, same = [pair.at_own_rates for pair in pairs], [pair.at(pair.baseline.best()) for pair in pairs]
    gains = [mean for mean in _means(own) if mean > 0]
    significant = sum(
        _is_ahead(comparison) and is_significant_among(comparison.difference, len(own)) for comparison in own
    )
    higher = sum(pair.treatment.best() > pair.baseline.best() for pair in pairs)
    return [
        f"With confidence, the mean accuracy of SGDM and AmsGrad on VGG-16 is higher in {len(gains)} of {len(own)} "
        f"cases, by {_range(gains)} points, each optimizer at its own best rate. The gain is clear in "
        f"{_count_kinds(own)[0]} cases, and after correction for {len(own)} comparisons in {significant or 'none'} "
        f"(three seeds). The best rate is higher with confidence in {higher} cases. With both at the best rate of the "
        f"optimizer without confidence, {_count_kinds(same)[0]} of {len(same)} are clearly ahead and "
        f"{_count_kinds(same)[1] or 'none'} behind."
    ]


def _gains_under_shift() -> str:
    """Give the range of clear gains on rotated images by model."""
    gains: dict[str, list[float]] = {}
    for (model, label), pair in adam_pairs().items():
        if label.startswith(SHIFTS) and _is_ahead(pair.at_own_rates):
            gains.setdefault(model, []).append(pair.at_own_rates.difference.mean)
    return " and ".join(f"{_range(means)} ({model})" for model, means in gains.items())


def _significance_under_shift() -> str:
    """Return a sentence on the gains on rotated images that remain significant after correction, unless all do."""
    gains = [
        pair.at_own_rates
        for (_, label), pair in adam_pairs().items()
        if label.startswith(SHIFTS) and _is_ahead(pair.at_own_rates)
    ]
    significant = sum(map(_is_significant_on_images, gains))
    if significant == len(gains):
        return ""
    corrected = f"after correction for {len(adam_pairs())} comparisons"
    return f"Of these {len(gains)} gains, {significant} are significant {corrected}. "


def _last_epoch_under_shift() -> str:
    """Compare the last epoch on rotated images, with the rates that are best in the mean over epochs."""
    comparisons = {key: _compare_epochs(*key, slice(-1, None)) for key in adam_pairs() if key[1].startswith(SHIFTS)}
    clear = [
        f"{model}, {label} {format_interval(comparison.difference)}"
        for (model, label), comparison in comparisons.items()
        if comparison.kind != "inconclusive"
    ]
    if not clear:
        return "In the last epoch alone, no clear difference between Adam and CAdam was measured."
    return f"In the last epoch alone, these differences are clear: {'; '.join(clear)}."


def _compare_epochs(model: str, label: str, epochs: slice) -> Comparison:
    """Compare CAdam with Adam in the mean over some epochs, each at its best rate in the mean over all epochs."""
    pair = adam_pairs()[model, label]
    runs = load(MODELS[model]).results.tests().where(condition=str(image_rates.CONDITIONS[label]))
    means = []
    for curve in (pair.treatment, pair.baseline):
        of_arm = runs.where(optimizer=curve.arm, lr=curve.best())
        means.append({run.spec.seed: float(run.outcome.curves["test_accuracy"][epochs].mean()) for run in of_arm})
    return compare(*means, names=images.ARMS, better="higher")


WINDOWS = {
    "epochs 1 to 10": slice(0, 10),
    "11 to 20": slice(10, 20),
    "21 to 30": slice(20, 30),
    "30 alone": slice(-1, None),
}


def gain_by_epoch() -> list[str]:
    """Return the table of gains on images by window of epochs."""
    rows, largest_first = table_header("model", "condition", *WINDOWS), 0
    for model, label in adam_pairs():
        differences = [_compare_epochs(model, label, window).difference for window in WINDOWS.values()]
        rows.append(table_row(model, label, *map(format_interval, differences)))
        largest_first += differences[0].mean == max(difference.mean for difference in differences)
    text = f"In {largest_first} of {len(adam_pairs())} cases the gain is largest in the first ten epochs."
    return [f"{text} CAdam minus Adam in points of accuracy, each at its best rate over all seeds:", "", *rows]


def gain_at_common_rates() -> list[str]:
    """Compare pairs whose seeds chose different rates, with one rate for all seeds of an optimizer instead."""
    texts, excess = [], []
    for name, pair in _all_pairs().items():
        curves = (pair.treatment, pair.baseline)
        if all(len(set(curve.rate_by_seed().values())) == 1 for curve in curves):
            continue
        values = (curve.values[curve.best()] for curve in curves)
        common = compare(*values, names=(pair.treatment.arm, pair.baseline.arm), better="higher")
        texts.append(f"{name}: {format_interval(common.difference)}")
        excess.append(pair.at_own_rates.difference.mean - common.difference.mean)
    if not texts:
        return ["All seeds chose the same learning rates."]
    larger = [value for value in excess if value > 0]
    count = f"{len(larger)} of {len(excess)} cases"
    effect = f" This makes the gain in the table larger in {count}, by {_range(larger)} points."
    return [
        "If two rates perform almost equally well, seeds choose different ones, and the result is slightly worse than "
        f"with either rate.{effect if larger else ''} With one best rate for all seeds: {'; '.join(texts)}."
    ]


def _clear_streams(streams: Sequence[Finding]) -> str:
    """Count and name the streams on which the gain is clear over seeds, users and time."""
    names = [finding.study for finding in streams if finding.kind == "better"]
    return f"{len(names)} of them" + (f" ({', '.join(names)})" if names else "")


def _gains_without_shift() -> str:
    """Describe the gains on images that are not rotated."""
    own = {key: pair.at_own_rates for key, pair in adam_pairs().items() if not key[1].startswith(SHIFTS)}
    ahead = {key: comparison for key, comparison in own.items() if _is_ahead(comparison)}
    if not ahead:
        return "No clear difference was measured on images that are not rotated"
    texts = [
        f"{model} gains {comparison.difference.mean:.1f} points of accuracy "
        f"{'' if label.startswith('without') else 'with '}{label.replace('noise', 'label noise of')}"
        for (model, label), comparison in ahead.items()
    ]
    uncertain = [f"the gain of {model}" for (model, _), c in ahead.items() if not _is_significant_on_images(c)]
    subject = "these gains" if len(uncertain) == len(ahead) else " and ".join(uncertain)
    caveat = f". Among {len(adam_pairs())} comparisons, {subject} may be due to chance" if uncertain else ""
    return f"On images that are not rotated, {' and '.join(texts)}{caveat}"


def _gains_without_drift(stationary: Sequence[Finding]) -> str:
    """Describe the gains on clicks without drift, as a continuation of `_gains_without_shift`."""
    ahead = [finding for finding in stationary if finding.is_ahead]
    if not ahead:
        return ", and none on clicks without drift"
    significant = any(is_significant_among(finding.difference, len(stationary)) for finding in ahead)
    caveat = "" if significant else ", which may also be due to chance"
    count = f"{len(ahead)} of {len(stationary)} studies"
    return f". On clicks without drift CAdam gains {_range(_means(ahead), 2)} points of AUC in {count}{caveat}"


def _is_significant_on_images(comparison: Comparison) -> bool:
    """Whether a difference is significant among all comparisons of Adam and CAdam on images."""
    return is_significant_among(comparison.difference, len(adam_pairs()))


def _smallest_gain(pair: Pair) -> float:
    """Return the smallest difference over all learning rates, with the same rate for both optimizers."""
    return min(pair.at(rate).difference.mean for rate in pair.baseline.rates)


def clicks_by_drift() -> tuple[list[Finding], list[Finding]]:
    """Return the findings of CAdam on generated clicks: those with drift, and those without."""
    clicks = [finding for finding in findings() if finding.unit == AUC and finding.treatment == "CAdam"]
    stationary = [finding for finding in clicks if finding.condition.startswith("no drift")]
    return [finding for finding in clicks if finding not in stationary], stationary


def unchanged_streams() -> list[Finding]:
    """Return one finding per real stream without simulated changes, preferably with each arm at its own best rate."""
    by_stream: dict[str, Finding] = {}
    for finding in findings():
        if finding.unit == GAUC and finding.condition == UNCHANGED:
            by_stream.setdefault(finding.study, finding)  # the finding at the own best rates comes first
    return list(by_stream.values())


def _range(values: Sequence[float], digits: int = 1) -> str:
    """Format the range of values, as in "1.1 to 3.9"."""
    if not values:
        return "no"
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _signed_range(values: Sequence[float]) -> str:
    """Format the range of differences with two digits and their signs."""
    low, high = (f"{value:+.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# Recommendations -----------------------------------------------------------------------------------------------


def switch_table() -> list[str]:
    """Return the table that recommends for each situation whether to switch from Adam to CAdam."""
    rows = table_header("your situation", "switch?", "expected gain, CAdam minus Adam", "evidence")
    streams, (drifting, _) = unchanged_streams(), clicks_by_drift()
    shifting = len(streams) + len(drifting)
    rows.append(
        table_row(
            "a recommender or click stream with drift",
            "try it in an A/B",
            f"{_signed_range(_means(drifting))} points of AUC on generated clicks; "
            f"{_signed_range(_means(streams))} points of GAUC on real streams, median {median(_means(streams)):+.2f}",
            f"kinds of drift on generated clicks: clearly ahead in {_gains_in_words(drifting, shifting)}; real "
            f"streams: clearly ahead over seeds in {_gains_in_words(streams, shifting)}, also over users and time on "
            f"{_clear_streams(streams)}",
        )
    )
    noisy = [finding for finding in findings() if finding.unit == GAUC and finding.condition == LABEL_NOISE]
    rows.append(
        table_row(
            "an event stream with label noise",
            "try it in an A/B",
            f"{_signed_range(_means(noisy))} points of GAUC with 20% label noise",
            "real streams, at rates chosen on the first fifth: clearly ahead over seeds in "
            f"{_gains_in_words(noisy, len(noisy))}, also over users and time on {_clear_streams(noisy)}; the gain is "
            f"larger than without label noise on {_count_larger_gains(noisy)} of them",
        )
    )
    situations = {
        "images with sudden shift: rotated by 80° after each epoch": "sudden 80°",
        "images with continuous shift: rotated by 2° after each step": "continuous 2°",
        "images with label noise": "noise 40%",
        "images without change": "without change",
    }
    for situation, label in situations.items():
        rows.append(_image_row(situation, label))
    rows.append(_stationary_click_row())
    for situation, rate, compare_at in (
        ("a learning rate that may be too high and cannot be tuned", "2 to 4 times Adam's best rate", compare_above),
        ("a learning rate that may be too low", "the next rate below Adam's best", compare_below),
    ):
        on_images, on_clicks = compare_at(adam_pairs()), compare_at(click_pairs())
        count = len(on_images) + len(on_clicks)
        image_advice, click_advice = advise(on_images, count), advise(on_clicks, count)
        advice = image_advice
        if image_advice != click_advice:
            advice = f"{image_advice} for images, {click_advice} for clicks"
        rows.append(
            table_row(
                situation,
                advice,
                f"{_signed_range(_means(on_images))} points of accuracy, {_signed_range(_means(on_clicks))} of AUC, "
                f"at {rate}",
                f"{' and '.join(MODELS)}: {_count_in_words(on_images, count)}; "
                f"DeepFM: {_count_in_words(on_clicks, count)}",
            )
        )
    return rows


def switch_summary() -> list[str]:
    """Return the table of the README: advice in six situations, without intervals.

    A difference on images, clicks and text counts as clear if it is significant after correction for the number of
    comparisons in its row, or for all comparisons on images where each optimizer has its own rate.
    """
    shifted = [p.at_own_rates for (_, label), p in adam_pairs().items() if label in ("sudden 80°", "continuous 2°")]
    steady = [p.at_own_rates for (_, label), p in adam_pairs().items() if label in ("without change", "noise 40%")]
    significant = sum(map(_is_significant_on_images, shifted))
    text = language_models.comparisons("lm-shift", "loss")["CAdamW"]
    _, still_clicks = clicks_by_drift()
    clear_steady = sum(map(_is_significant_on_images, steady)) + sum(
        is_significant_among(finding.difference, len(still_clicks)) for finding in still_clicks
    )
    high = [*compare_above(adam_pairs()), *compare_above(click_pairs())]
    low = compare_below(adam_pairs())
    for_cadam, for_adam, _, judged = judged_streams.count_decided()
    undecided = judged - for_cadam - for_adam
    gains = [-difference for difference in judged_streams.differences()]
    tuned_steady: list[Comparison | Finding] = [*steady, *still_clicks]
    return [
        *table_header("your situation", "advice", "CAdam compared with Adam", "how sure"),
        table_row(
            "images that begin to rotate",
            "switch if accuracy during training counts",
            f"accuracy {_signed_range(_means(shifted))} points, mean of 30 epochs",
            f"clear in {significant} of {len(shifted)} cases; in the last epoch, in none",
        ),
        table_row(
            "a language model on changing text",
            "try it if loss during training counts",
            f"loss {-text.difference.mean:.2f} bits per byte lower; cautious AdamW gains as much",
            "one small model: clear during training, not at its end",
        ),
        table_row(
            "an event stream that drifts",
            "compare on your stream",
            f"log loss {min(gains):.2f}% to {max(gains):.2f}% lower, median {median(gains):.2f}%",
            f"better on {for_cadam} of {judged} streams ({judged_streams.count_small()} by less than "
            f"{Study.matters}%), {f'worse on {for_adam}, ' if for_adam else ''}undecided or equal on {undecided}",
        ),
        table_row(
            "images or clicks without shift",
            "keep Adam",
            f"accuracy or AUC {_signed_range(_means(tuned_steady))} points",
            f"clear in {clear_steady} of {len(tuned_steady)} cases",
        ),
        table_row(
            "a learning rate that is too high",
            "lower it; image models: switch if you cannot",
            f"accuracy or AUC {_signed_range(_means(high))} points",
            _count_improved(high),
        ),
        table_row(
            "a learning rate that is too low",
            "raise it, or keep Adam",
            f"accuracy {_signed_range(_means(low))} points",
            _count_improved(low),
        ),
    ]


def _stationary_click_row() -> str:
    """Return the row of `switch_table` for clicks without drift."""
    _, stationary = clicks_by_drift()
    texts = []
    for finding in stationary:
        noise = finding.condition.removeprefix("no drift").replace(",", " with")
        texts.append(f"{finding.study.partition(',')[0]}{noise} {format_interval(finding.difference)}")
    uncertain = {
        finding.study.partition(",")[0]: None
        for finding in stationary
        if finding.is_ahead and not is_significant_among(finding.difference, len(stationary))
    }
    caveat = f"each at its own best rate{_chance_caveat(uncertain, len(stationary))}"
    advice = _advise_at_own_rates(stationary, len(stationary))
    return table_row("clicks without drift", advice, f"{', '.join(texts)} points of AUC", caveat)


def _chance_caveat(names: Iterable[str], comparisons: int) -> str:
    """Say which gains may be due to chance, given the number of comparisons."""
    subject = " and ".join(names)
    return f"; {subject} may be due to chance, given {comparisons} comparisons" if subject else ""


def switch_legend() -> list[str]:
    """Explain the recommendations of `switch_table` and how accuracy is measured."""
    return [
        "*Yes* and *no*: at least half of the cases are clearly ahead, or behind, after the Bonferroni correction for "
        "all comparisons of the row; even without correction, no case is clear in the other direction. The "
        f"four rows of images are corrected for {len(adam_pairs())} comparisons together. *Unclear*: fewer than half "
        "of the cases are clear, or they contradict each other. *No need to*: no case is clear after the correction, "
        "although each optimizer has its best rate. *Try it in an A/B*: ahead in our studies, but by a small margin, "
        f"or not clearly for other users and times. Accuracy is the mean over 30 epochs. {_last_epoch_under_shift()}"
    ]


def _count_larger_gains(noisy: Sequence[Finding]) -> int:
    """Count the streams whose gain is larger with label noise than without, at rates chosen in the same way."""
    unchanged = {f.study: f for f in findings() if f.condition == UNCHANGED and f.rates == FIRST_FIFTH}
    return sum(finding.difference.mean > unchanged[finding.study].difference.mean for finding in noisy)


def compare_above(pairs: Mapping[Any, Pair]) -> list[Comparison]:
    """Compare each pair at about three times the baseline's best learning rate."""
    return [pair.at(pair.baseline.nearest_to_triple(pair.baseline.best())) for pair in pairs.values()]


def compare_below(pairs: Mapping[Any, Pair]) -> list[Comparison]:
    """Compare each pair at the next learning rate below the baseline's best."""
    comparisons = []
    for pair in pairs.values():
        rates = pair.baseline.rates
        comparisons.append(pair.at(rates[max(rates.index(pair.baseline.best()) - 1, 0)]))
    return comparisons


def _means(differences: Sequence[Comparison | Finding]) -> list[float]:
    return [each.difference.mean for each in differences]


def _count_ahead(differences: Sequence[Finding]) -> int:
    return sum(finding.is_ahead for finding in differences)


def _count_significant_gains(differences: Sequence[Finding], among: int) -> int:
    """Count the gains over seeds that are significant as some of `among` comparisons."""
    return sum(f.is_ahead and is_significant_among(f.difference, among) for f in differences)


def _gains_in_words(differences: Sequence[Finding], among: int) -> str:
    """Format the number of clear gains over seeds, before and after correction for `among` comparisons."""
    return (
        f"{_count_ahead(differences)} of {len(differences)} ({_count_significant_gains(differences, among)} after "
        f"correction for {among} comparisons)"
    )


def _count_kinds(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    """Count the comparisons in which the treatment is clearly ahead, and those in which it is clearly behind."""
    kinds = [comparison.kind for comparison in comparisons]
    return kinds.count("better"), kinds.count("worse")


def _count_improved(comparisons: Sequence[Comparison]) -> str:
    """Count the comparisons in which the treatment is better, or worse if these are more, and the clear ones."""
    means, (ahead, behind) = _means(comparisons), count_significant(comparisons, len(comparisons))
    better, worse = (sum(sign * mean > 0 for mean in means) for sign in (1, -1))
    sides = sorted([(better, "better", ahead), (worse, "worse", behind)], reverse=True)
    (count, word, clear), (_, other, other_clear) = sides
    text = f"{word} in {count} of {len(means)} cases, clearly in {clear}"
    return text + (f"; clearly {other} in {other_clear}" if other_clear else "")


def count_significant(comparisons: Sequence[Comparison], among: int) -> tuple[int, int]:
    """Count the comparisons that the treatment clearly wins or loses, as some of `among` comparisons."""
    return _count_kinds([one for one in comparisons if is_significant_among(one.difference, among)])


def _count_in_words(comparisons: Sequence[Comparison], among: int) -> str:
    (ahead, behind), (sure_ahead, sure_behind) = _count_kinds(comparisons), count_significant(comparisons, among)
    return (
        f"clearly ahead in {ahead}, behind in {behind} of {len(comparisons)} "
        f"({sure_ahead} and {sure_behind} after correction for {among} comparisons)"
    )


def advise(differences: Sequence[Comparison | Finding], among: int) -> str:
    """Recommend CAdam ("yes"), Adam ("no") or neither ("unclear") from the comparisons of one situation.

    Args:
        differences: The comparisons. A difference is positive if CAdam is better.
        among: The number of comparisons to correct for.

    Returns:
        "yes" if at least half of the differences are significantly positive after correction and no interval lies below
        0, even without correction; "no" if the same is true in the other direction; else "unclear".
    """
    clear = [each.difference for each in differences if is_significant_among(each.difference, among)]
    ahead, behind = sum(difference.mean > 0 for difference in clear), sum(difference.mean < 0 for difference in clear)
    if 2 * ahead >= len(differences) and all(each.difference.high >= 0 for each in differences):
        return "yes"
    if 2 * behind >= len(differences) and all(each.difference.low <= 0 for each in differences):
        return "no"
    return "unclear"


def _advise_at_own_rates(differences: Sequence[Comparison | Finding], among: int) -> str:
    """Recommend as `advise` does, but say "no need to" if no difference is clear after correction."""
    is_any_clear = any(is_significant_among(each.difference, among) for each in differences)
    return advise(differences, among) if is_any_clear else "no need to"


def _image_row(situation: str, label: str) -> str:
    """Return the row of `switch_table` for images under one condition, with the result of each model."""
    own = {model: pair.at_own_rates for (model, condition), pair in adam_pairs().items() if condition == label}
    ahead = [model for model, comparison in own.items() if _is_ahead(comparison)]
    uncertain = [model for model in ahead if not _is_significant_on_images(own[model])]
    advice = _advise_at_own_rates(list(own.values()), len(adam_pairs()))
    results = ", ".join(f"{model} {format_interval(comparison.difference)}" for model, comparison in own.items())
    caveat = _chance_caveat(uncertain, len(adam_pairs()))
    return table_row(situation, advice, f"{results} points of accuracy", f"{label}, each at its own best rate{caveat}")


# Learning rates ------------------------------------------------------------------------------------------------


def masked_share() -> list[str]:
    """Describe the share of elements that CAdam masks at its best learning rates."""
    shares = []
    for name, pair in image_pairs().items():
        runs = load("fig-rates").results.where(
            optimizer="CAdam", condition=str(image_rates.CONDITIONS[name]), lr=pair.treatment.best()
        )
        shares += [100 * (1 - aligned) for aligned in runs.metric("alignment").values()]
    low, high = _means(compare_below(adam_pairs())), _means(compare_above(adam_pairs()))
    return [
        f"At its best rate CAdam masks {_range(shares, 0)}% of all elements in an average step. On images its mean is "
        f"below Adam's in {sum(mean < 0 for mean in low)} of {len(low)} cases at the next rate below Adam's best, and "
        f"above it in {sum(mean > 0 for mean in high)} of {len(high)} at about three times Adam's best. A comparison "
        "at one rate for both therefore says as much about the rate as about the optimizers."
    ]


def _all_pairs() -> dict[str, Pair]:
    """Return all pairs on images and clicks by study."""
    return all_image_pairs() | {f"DeepFM, Adam, {label}": pair for label, pair in click_pairs().items()}


def rate_table() -> list[str]:
    """Return the table of best learning rates and of the rates that perform nearly as well."""
    rows = table_header(
        "study",
        "best rate, without C",
        "best rate, with C",
        "difference, each at its best rate",
        "difference, both at the best rate without C",
        "difference, both at 2 to 4 times that rate",
        "good rates, without C",
        "good rates, with C",
    )
    for name, pair in _all_pairs().items():
        base = pair.baseline
        best, near = base.best(), image_rates.NEAR if name in all_image_pairs() else click_rates.NEAR
        rows.append(
            table_row(
                name,
                format_rate(best),
                format_rate(pair.treatment.best()),
                format_interval(pair.at_own_rates.difference),
                format_interval(pair.at(best).difference),
                format_interval(pair.at(base.nearest_to_triple(best)).difference),
                *(_format_tolerance(curve, near) for curve in (base, pair.treatment)),
            )
        )
    return rows


def _format_tolerance(curve: RateCurve, near: float) -> str:
    """Format the range of learning rates whose metric is within `near` of the best."""
    low, high = curve.tolerance(near)
    if low == high:
        return f"{format_rate(low)} only"
    last = ", the highest that was run" if high == curve.rates[-1] else ""
    return f"{format_rate(low)} to {format_rate(high)}{last}"


def noise_floors() -> list[str]:
    """Describe the noise floor: the difference between two sets of Adam runs that differ only in their seeds."""
    accuracy = [
        find_row(FIGURE_OF[c.name], f"{c.label(c.reference)}: mean test accuracy").values["noise floor"]
        for c in images.CONDITIONS.values()
    ]
    auc = [row.values["noise floor"] for row in find_rows("stream-criteo", "stream")]
    return [
        "**The noise floor.** Two sets of three Adam runs differ only in their seeds. In 95% of the cases, they differ "
        f"by less than {_range(accuracy)} points of accuracy on VGG-16, and {_range(auc)} points of AUC on clicks with "
        "drift. The comparisons above are more precise because their seeds are paired. Still, a gain below the "
        "noise floor is small."
    ]


def rates_of_paper_margins() -> list[str]:
    """Return the table of the learning rates at which our differences equal the paper's."""
    rows = table_header(
        "study", "the paper's margin", "our margin equals it at rate", "best rate without", "accuracy gained there"
    )
    for name, pair in _all_pairs().items():
        if pair.paper_margin is None or not name.startswith("VGG-16"):
            continue
        rate, base = pair.rate_at_paper_margin, pair.baseline
        rate_text, gain = "none that was run", ""
        if rate is not None:
            rate_text = f"{rate:.1e}".replace("e-0", "e-")
            gain = f"{base.at(base.best()).mean - base.interpolate(rate):.1f}"
        rows.append(table_row(name, f"{pair.paper_margin:+.2f}", rate_text, format_rate(base.best()), gain))
    return rows


# All findings --------------------------------------------------------------------------------------------------


def finding_table() -> list[str]:
    """Return the table of all findings, which are also the numbers of the forest plot."""
    rows = table_header("study", "condition", "rates", "difference", "unit", "the paper's", "verdict")
    for finding in findings():
        paper = "" if finding.paper is None else f"{finding.paper:+.2f}"
        verdict = KIND_NAMES[finding.kind]
        if finding.unit == GAUC and finding.kind == "inconclusive" and finding.is_ahead:
            verdict = "ahead over seeds, undecided over time"
        rows.append(
            table_row(
                finding.study,
                display_condition(finding.condition),
                finding.rates,
                format_interval(finding.difference),
                finding.unit,
                paper,
                verdict,
            )
        )
    return rows


AXIS_LIMITS = {ACCURACY: 5.5, AUC: 1.2, GAUC: 3.0}
"""Limits of the axes of the forest plot. Values beyond them are drawn at the limit, with the number beside them."""


def forest() -> Figure:
    """Draw the forest plot: one line for each finding, one panel for each unit."""
    units = {unit: [finding for finding in findings() if finding.unit == unit] for unit in (ACCURACY, AUC, GAUC)}
    sizes = [len(of_unit) for of_unit in units.values()]
    figure, axes = panels(3, 1, 9.5, 0.23 * sum(sizes) + 2.2, gridspec_kw={"height_ratios": sizes})
    for panel, (unit, of_unit) in zip(axes[:, 0], units.items(), strict=True):
        _forest_panel(panel, unit, of_unit)
    return figure


RATE_SUFFIXES = {OWN: "", BASELINES: ", baseline's rate", FIRST_FIFTH: ", first fifth", TUNED: ", tuning runs"}
"""Suffixes of the labels in the forest plot that name how the learning rates were chosen."""


def _forest_panel(axes: Axes, unit: str, of_unit: Sequence[Finding]) -> None:
    limit = AXIS_LIMITS[unit]
    colors = {"better": palette.CADAM, "worse": palette.ADAM}
    axes.axvline(0, color=palette.MUTED, lw=0.8)
    for y, finding in enumerate(of_unit):
        d, color = finding.difference, colors.get(finding.kind, palette.TARGET)
        if math.isfinite(d.low):
            axes.plot([max(d.low, -limit), min(d.high, limit)], [y, y], "-", color=color, lw=1.6)
        marker = "o" if abs(d.mean) <= limit else (">" if d.mean > 0 else "<")
        fill = "full" if finding.rates == OWN else "none"
        for end, arrow in ((d.low, "<"), (d.high, ">")):
            if abs(end) > limit >= abs(d.mean):
                axes.plot([math.copysign(limit, end)], [y], arrow, color=color, ms=4)
        axes.plot([max(-limit, min(limit, d.mean))], [y], marker, color=color, ms=5, fillstyle=fill)
        if finding.paper is not None:
            axes.plot([min(finding.paper, limit)], [y], "d", color=palette.INK, ms=4, fillstyle="none")
        axes.annotate(
            f"{d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]",
            (1.01, y),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            va="center",
            color=palette.INK,
        )
    axes.set(xlim=(-1.05 * limit, 1.05 * limit), ylim=(len(of_unit) - 0.4, -0.6), xlabel=f"with minus without, {unit}")
    labels = [f"{f.study}: {display_condition(f.condition)}{RATE_SUFFIXES[f.rates]}" for f in of_unit]
    axes.set_yticks(range(len(of_unit)), labels, fontsize=7)


# Cost ----------------------------------------------------------------------------------------------------------


def cost_table() -> list[str]:
    """Return the table of GPU minutes and CPU hours by study."""
    rows = table_header("study", "runs", "GPU minutes", "CPU hours")
    totals = [0, 0.0, 0.0]
    for path in sorted(archive().root.glob("*.parquet")):
        results = archive().study(path.stem).results()
        gpu, cpu = _seconds(results, on_gpu=True), _seconds(results, on_gpu=False)
        rows.append(table_row(path.stem, f"{len(results):,}", _format_amount(gpu / 60), _format_amount(cpu / 3600)))
        totals = [totals[0] + len(results), totals[1] + gpu, totals[2] + cpu]
    rows.append(
        table_row("**all**", f"{totals[0]:,}", _format_amount(totals[1] / 60), _format_amount(totals[2] / 3600))
    )
    return rows


def study_cost(name: str) -> list[str]:
    """Return one sentence with the number of archived runs of some studies, and what they cost.

    Args:
        name: The names of the studies, separated by commas.
    """
    results = [result for study in name.split(",") for result in archive().study(study).results()]
    gpu, cpu = _seconds(results, on_gpu=True) / 60, _seconds(results, on_gpu=False) / 3600
    amounts = [f"{_format_amount(gpu)} GPU minutes (NVIDIA H200)"] if gpu else []
    amounts += [f"{_format_amount(cpu)} CPU hours"] if cpu else []
    return [f"Cost: {len(results):,} runs, {' and '.join(amounts)}."]


def _seconds(results: Iterable[Result], *, on_gpu: bool) -> float:
    return sum(r.provenance.seconds for r in results if r.provenance.device.startswith("CPU") != on_gpu)


def _format_amount(value: float) -> str:
    if value == 0:
        return ""
    return "under 0.1" if value < 0.05 else f"{value:.1f}"


# Figures -------------------------------------------------------------------------------------------------------


def rate_figure(name: str) -> Figure:
    """Draw the figure of an experiment over learning rates."""
    request = load(name)
    (figure,) = request.experiment.figures(request.results).values()
    return figure


def pair_numbers(pairs: Mapping[str, Pair]) -> list[str]:
    """List every number of some pairs, to detect that a figure of them is outdated."""
    return [f"{name}: {pair}" for name, pair in pairs.items()]


def image_pair_numbers(name: str) -> list[str]:
    """List every number of an experiment on images over learning rates."""
    return pair_numbers(image_pairs(name))
