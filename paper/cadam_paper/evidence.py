"""Does CAdam help? The answer of all archived studies together: in sentences, as tables and as a forest plot.

`pages` puts what is made here into docs/evidence.md. Nothing on that page is a number that was typed in, but for the
paper's own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from cadam.ab.report import palette
from cadam.ab.results import Result
from cadam.ab.summary import Row
from cadam.ab.verdict import kind_names
from cadam.statistics.comparison import Comparison, Kind, compare
from cadam.statistics.intervals import Interval, t_quantile

from .ctr import rates as click_rates
from .ctr import study as click_study
from .harness.rate_pairs import Pair
from .harness.rates import RateCurve
from .harness.rates import draw as draw_curves
from .images import rates as image_rates
from .images import study as images
from .published import ROOT, archive, head, in_brackets, interval, is_archived, line, lines, part, request, row, short
from .stream_tables import STREAMS, times_adams

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 100.0
"""GAUC is archived as a share and written in points."""
IMAGE_CURVES = {
    "fig-rates": image_rates.Curves("vgg", images.ARMS),
    "fig-rates-amsgrad": image_rates.Curves("vgg", ("CAmsGrad", "AmsGrad")),
    "fig-rates-sgdm": image_rates.Curves("vgg", ("CSGDM", "SGDM")),
    "fig-rates-resnet": image_rates.Curves("resnet", images.ARMS),
}
FIGURE_OF = {"sudden": "fig-sudden", "continuous": "fig-continuous", "noise": "fig-image-noise"}
"""The paper's figure of each condition, for VGG-16; those of the other models have its name and theirs."""
CLICK_CURVES = "fig-rates-clicks"
OWN, BASELINES, FIRST_FIFTH, TUNED = "own best", "the baseline's, by 10 epochs", "first fifth", "tuning runs"
ACCURACY, AUC, GAUC = "points of accuracy", "points of AUC", "points of GAUC"


# What was found ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A treatment minus its baseline in one study, under one condition."""

    unit: str
    study: str
    condition: str
    difference: Interval
    kind: Kind
    rates: str
    """How learning rates were chosen."""
    paper: float | None = None
    treatment: str = "CAdam"

    @property
    def ahead(self) -> bool:
        """Does the interval over seeds lie above 0?"""
        return self.difference.low > 0


@cache
def image_pairs(name: str = "fig-rates") -> dict[str, Pair]:
    """Curves over rates, by condition: of those of which the archive has every run."""
    found = part(name)
    return image_rates.pairs(found.results, IMAGE_CURVES[name], found.missing)


MODELS = {"VGG-16": "fig-rates", "ResNet-18": "fig-rates-resnet"}
"""The models of which Adam and CAdam were run over rates, and where."""


@cache
def adam_pairs() -> dict[tuple[str, str], Pair]:
    """The curves of CAdam and Adam on images, by model and condition."""
    return {(model, label): pair for model, name in MODELS.items() for label, pair in image_pairs(name).items()}


@cache
def image_curves() -> dict[str, Pair]:
    """All pairs of curves on images, by model, optimizer without confidence and condition."""
    return {
        f"{images.MODELS[what.family]['full']}, {what.arms[1]}, {label}": pair
        for name, what in IMAGE_CURVES.items()
        for label, pair in image_pairs(name).items()
    }


@cache
def click_pairs() -> dict[str, Pair]:
    return click_rates.pairs(request(CLICK_CURVES).results)


@cache
def findings() -> tuple[Finding, ...]:
    """All comparisons of archived studies on data, none left out."""
    return (*_on_images(), *_on_clicks(), *_on_streams())


def _on_images() -> Iterable[Finding]:
    for name, what in IMAGE_CURVES.items():
        study = f"{images.MODELS[what.family]['full']}, {what.arms[0]}"
        for label, pair in image_pairs(name).items():
            yield _of(ACCURACY, study, label, pair.own, OWN, pair.margin, what.arms[0])
    for condition in images.CONDITIONS.values():
        label = condition.label(condition.reference)
        for treatment, baseline in images.PAIRS:
            found = row("tab-ablation-images", f"{label}: {treatment} against {baseline}")
            without, confident = images.PAPER[condition.name, baseline]
            paper = confident - without
            yield _from(ACCURACY, f"VGG-16, {treatment}", label, found, BASELINES, paper, treatment=treatment)
        for family in ("resnet", "densenet"):
            found = row(f"{FIGURE_OF[condition.name]}-{family}", f"{label}: mean test accuracy")
            yield _from(ACCURACY, f"{images.MODELS[family]['full']}, CAdam", label, found, BASELINES)


def _on_clicks() -> Iterable[Finding]:
    for condition, pair in click_pairs().items():
        yield _of(AUC, "DeepFM, generated clicks", condition, pair.own, OWN, pair.margin)
    for treatment, baseline, table in MODEL_PAIRS:
        found = row(table, f"mean of the models: {treatment} against {baseline}")
        paper = click_study.PAPER_ABLATION[treatment] - click_study.PAPER_ABLATION[baseline]
        yield _from(AUC, f"five models, {treatment}", "no drift", found, TUNED, paper, treatment=treatment)
    paper = float(np.subtract(click_study.PAPER_NOISY["CAdam"], click_study.PAPER_NOISY["Adam"]).mean())
    yield _from(AUC, "five models, CAdam", "no drift, 1% noise", noisy_clicks(), TUNED, paper)


MODEL_PAIRS = (
    ("CAdam", "Adam", "tab-criteo"),
    ("CAmsGrad", "AmsGrad", "tab-criteo"),
    ("CSGDM", "SGDM", "tab-ablation-criteo"),
)
"""What was compared on five models and generated clicks, and in which study."""


def noisy_clicks() -> Row:
    """CAdam against Adam over five models with 1% noise, each at the rate best in tuning runs."""
    return row("tab-criteo-noise", "lr best on noisy data: mean of the models")


def _on_streams() -> Iterable[Finding]:
    for name, label in STREAMS.items():
        if is_archived(f"rates-{name}"):
            found = row(f"rates-{name}", "GAUC by impressions: each at its own best rate")
            yield _from(GAUC, label, "as it is", found, OWN, scale=POINTS)
        if is_archived(f"ab-{name}"):
            for found in lines(f"ab-{name}", end=": GAUC by impressions (higher is better)"):
                condition = found.label.partition(":")[0]
                yield _from(GAUC, label, condition, found, FIRST_FIFTH, scale=POINTS)


def _of(
    unit: str,
    study: str,
    condition: str,
    found: Comparison,
    rates: str,
    paper: float | None,
    treatment: str = "CAdam",
) -> Finding:
    return Finding(unit, study, condition, found.difference, found.kind, rates, paper, treatment)


def _from(
    unit: str,
    study: str,
    condition: str,
    found: Row,
    rates: str,
    paper: float | None = None,
    scale: float = 1.0,
    treatment: str = "CAdam",
) -> Finding:
    assert found.verdict_kind is not None
    return Finding(unit, study, condition, interval(found, scale), found.verdict_kind, rates, paper, treatment)


# The answer ----------------------------------------------------------------------------------------------------

KINDS_SAID = kind_names("ahead", "behind")


def answer() -> list[str]:
    """Does CAdam help? In five sentences."""
    pairs = adam_pairs()
    high = _above(pairs)
    clicks, calm = clicks_by_drift()
    streams = as_they_are()
    ahead = [each for each in streams if each.ahead]
    drift = _span([each.difference.mean for each in clicks])
    clear = sum(each.ahead for each in clicks)
    everywhere = all(_gains(pair) > 0 for name, pair in click_pairs().items() if not name.startswith("no drift"))
    always = ", and its mean is ahead at every rate that was run" if everywhere else ""
    gains = _span([each.difference.mean for each in ahead], 2)
    own_rates = (
        "each at its own best rate" if all(each.rates == OWN for each in streams) else "at rates chosen early on"
    )
    return [
        f"1. **Yes, where the data change.** On CIFAR-10 images that turn, CAdam gains {_turning()} points of "
        f"accuracy over Adam, in the mean over epochs, each at its own best learning rate{_surely()}. "
        f"{_in_the_last_epoch()}",
        f"2. **Little elsewhere, as far as we saw.** {_elsewhere()}{_calm(calm)}.",
        f"3. **On event streams it is mostly ahead.** On generated clicks that drift it gains {drift} points of AUC, "
        f"clearly in {clear} of {len(clicks)} kinds of drift{always}. On {len(ahead)} of {len(streams)} real streams "
        f"its GAUC is higher by {gains} points over seeds, {own_rates}. Over users and time as well that is certain on "
        f"{_certain(streams)}; on {sum(each.difference.mean < 0.1 for each in streams)} the gain is below 0.1 points.",
        "4. **On images the gain grows with the learning rate.** At three times Adam's best rate CAdam is ahead by "
        f"{_span(_means(high))} points of accuracy: above all, it loses less than Adam where the rate is too high.",
        f"5. **Start at Adam's rate, then try three times that.** {_best_rates()}",
    ]


TURNING = ("sudden", "continuous")
"""How the conditions begin in which images turn."""


def _ahead(found: Comparison) -> bool:
    return found.kind == "better"


def _best_rates() -> str:
    """How CAdam's best rate compares with Adam's."""
    pairs = [*adam_pairs().values(), *click_pairs().values()]
    return (
        f"CAdam's best rate was {_said_of([pair.treatment.best() / pair.baseline.best() for pair in pairs])} on images "
        f"and clicks; on real streams it was {_said_of(list(times_adams().values()))}."
    )


def _said_of(times: Sequence[float]) -> str:
    """How CAdam's best rates compare with Adam's."""
    same, higher, lower = sum(t == 1 for t in times), [t for t in times if t > 1], sum(t < 1 for t in times)
    said = f"Adam's in {same} of {len(times)} cases and {_span(higher, 0)} times that in {len(higher)}"
    return said + (f", and lower in {lower}" if lower else "")


def others() -> list[str]:
    """What confidence does for other optimizers on images."""
    pairs = [pair for pair in image_curves().values() if pair.baseline.arm != "Adam"]
    own, same = [pair.own for pair in pairs], [pair.at(pair.baseline.best()) for pair in pairs]
    gains = [mean for mean in _means(own) if mean > 0]
    held = sum(_ahead(each) and holds_among(each, len(own)) for each in own)
    higher = sum(pair.treatment.best() > pair.baseline.best() for pair in pairs)
    return [
        f"With confidence SGDM and AmsGrad are ahead in the mean in {len(gains)} of {len(own)} cases on VGG-16, by "
        f"{_span(gains)} points of accuracy, each at its own best rate. Clearly so in {_kinds(own)[0]}, and after "
        f"correction for {len(own)} comparisons in {held or 'none'} (three seeds). That rate is higher with confidence "
        f"in {higher} cases. With both at the best rate of the one without, {_kinds(same)[0]} of {len(same)} are "
        f"clearly ahead and {_kinds(same)[1] or 'none'} behind."
    ]


def _turning() -> str:
    """How much is gained on images that turn, by model."""
    gains: dict[str, list[float]] = {}
    for (model, label), pair in adam_pairs().items():
        if label.startswith(TURNING) and _ahead(pair.own):
            gains.setdefault(model, []).append(pair.own.difference.mean)
    return " and ".join(f"{_span(means)} ({model})" for model, means in gains.items())


def _surely() -> str:
    """How many of these gains hold as one of all comparisons, where not all do."""
    gains = [pair.own for (_, label), pair in adam_pairs().items() if label.startswith(TURNING) and _ahead(pair.own)]
    held = sum(map(_holds, gains))
    if held == len(gains):
        return ""
    return f"; {held} of these {len(gains)} gains hold after correction for {len(adam_pairs())} comparisons"


def _in_the_last_epoch() -> str:
    """What is left at the end of training on images that turn, each at its best rate in the mean over epochs."""
    found = {key: _over(*key, slice(-1, None)) for key in adam_pairs() if key[1].startswith(TURNING)}
    clear = [
        f"{model}, {label} {in_brackets(one.difference)}"
        for (model, label), one in found.items()
        if one.kind != "inconclusive"
    ]
    if not clear:
        return "In the last epoch alone no clear difference between Adam and CAdam was seen."
    return f"In the last epoch alone a clear difference was seen here: {'; '.join(clear)}."


def _over(model: str, label: str, epochs: slice) -> Comparison:
    """CAdam minus Adam in the mean over some epochs, each at its best rate in the mean over all."""
    pair = adam_pairs()[model, label]
    runs = request(MODELS[model]).results.tests().where(condition=str(image_rates.CONDITIONS[label]))
    means = []
    for curve in (pair.treatment, pair.baseline):
        mine = runs.where(optimizer=curve.arm, lr=curve.best())
        means.append({one.spec.seed: float(one.outcome.curves["test_accuracy"][epochs].mean()) for one in mine})
    return compare(*means, names=images.ARMS, better="higher")


WINDOWS = {
    "epochs 1 to 10": slice(0, 10),
    "11 to 20": slice(10, 20),
    "21 to 30": slice(20, 30),
    "30 alone": slice(-1, None),
}


def when() -> list[str]:
    """In which epochs the gain on images comes."""
    rows, early = head("model", "condition", *WINDOWS), 0
    for model, label in adam_pairs():
        found = [_over(model, label, window).difference for window in WINDOWS.values()]
        rows.append(line(model, label, *map(in_brackets, found)))
        early += found[0].mean == max(each.mean for each in found)
    said = f"In {early} of {len(adam_pairs())} cases the gain is largest in the first ten epochs."
    return [f"{said} CAdam minus Adam, points of accuracy, each at its best rate for all seeds:", "", *rows]


def ties() -> list[str]:
    """Where seeds chose different rates for one optimizer, what comes out at one rate for all seeds of each."""
    said, excess = [], []
    for name, pair in _curves().items():
        both = (pair.treatment, pair.baseline)
        if all(len(set(curve.chosen().values())) == 1 for curve in both):
            continue
        values = (curve.values[curve.best()] for curve in both)
        fixed = compare(*values, names=(pair.treatment.arm, pair.baseline.arm), better="higher")
        said.append(f"{name}: {in_brackets(fixed.difference)}")
        excess.append(pair.own.difference.mean - fixed.difference.mean)
    if not said:
        return ["All seeds chose the same rates."]
    larger = [each for each in excess if each > 0]
    by = f" That makes the gain of the table larger in {len(larger)} of {len(excess)} cases, by {_span(larger)} points."
    return [
        "Where two rates do almost equally well, seeds choose different ones, and the choice is a little worse than "
        f"either.{by if larger else ''} At each optimizer's best rate for all seeds: {'; '.join(said)}."
    ]


def _certain(streams: Sequence[Finding]) -> str:
    """On how many streams the gain is clear over seeds, users and time, and on which."""
    names = [each.study for each in streams if each.kind == "better"]
    return f"{len(names)} of them" + (f" ({', '.join(names)})" if names else "")


def _elsewhere() -> str:
    """What came out on images that do not turn."""
    still = {key: pair.own for key, pair in adam_pairs().items() if not key[1].startswith(TURNING)}
    ahead = {key: found for key, found in still.items() if _ahead(found)}
    if not ahead:
        return "No clear difference was found on images that do not turn"
    said = [
        f"{model} gains {found.difference.mean:.1f} points of accuracy {'' if label.startswith('without') else 'with '}"
        f"{label}"
        for (model, label), found in ahead.items()
    ]
    unsure = [f"{model}'s" for (model, _), found in ahead.items() if not _holds(found)]
    which = "that" if len(unsure) == len(ahead) else " and ".join(unsure)
    chance = f". With {len(adam_pairs())} comparisons made, {which} may be chance" if unsure else ""
    return f"Where images do not turn, {' and '.join(said)}{chance}"


def _calm(calm: Sequence[Finding]) -> str:
    """What came out on clicks that do not drift."""
    ahead = [each for each in calm if each.ahead]
    if not ahead:
        return ", nor on clicks that do not drift"
    gains, counted = _span([each.difference.mean for each in ahead], 2), f"{len(ahead)} of {len(calm)} studies"
    chance = "" if any(holds_among(each, len(calm)) for each in ahead) else ", which may be chance as well"
    return f". On clicks that do not drift {gains} points of AUC were gained in {counted}{chance}"


def holds_among(found: Comparison | Finding, comparisons: int) -> bool:
    """Does a difference hold as one of so many (Bonferroni): does its interval at 1 - 0.05 / number exclude 0?"""
    d = found.difference
    wider = t_quantile(1 - 0.05 / comparisons, d.count - 1) / t_quantile(0.95, d.count - 1)
    return abs(d.mean) > wider * d.half_width


def _holds(found: Comparison) -> bool:
    """As one of all that were made with Adam and CAdam on images."""
    return holds_among(found, len(adam_pairs()))


def _gains(pair: Pair) -> float:
    """The least difference at any rate for both."""
    return min(pair.at(rate).difference.mean for rate in pair.baseline.rates)


def clicks_by_drift() -> tuple[list[Finding], list[Finding]]:
    """CAdam on generated clicks: those that drift, and those that do not."""
    clicks = [each for each in findings() if each.unit == AUC and each.treatment == "CAdam"]
    calm = [each for each in clicks if each.condition.startswith("no drift")]
    return [each for each in clicks if each not in calm], calm


def as_they_are() -> list[Finding]:
    """The real streams, nothing done to them: each once, with each arm at its own best rate where that was run."""
    found: dict[str, Finding] = {}
    for each in findings():
        if each.unit == GAUC and each.condition == "as it is":
            found.setdefault(each.study, each)
    return list(found.values())


def _span(values: Sequence[float], digits: int = 1) -> str:
    """As in "1.1 to 3.9"."""
    if not values:
        return "no"
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def switch() -> list[str]:
    """Should I switch? By situation."""
    rows = head("your situation", "switch?", "what to expect, CAdam minus Adam", "evidence")
    pairs = adam_pairs()
    streams, (drifting, _) = as_they_are(), clicks_by_drift()
    ahead = [each for each in streams if each.ahead]
    rows.append(
        line(
            "a recommender or click stream that drifts",
            "try it in an A/B",
            f"{_signed([each.difference.mean for each in drifting])} points of AUC on generated clicks; "
            f"{_signed([each.difference.mean for each in streams])} points of GAUC on real streams, median "
            f"{median(each.difference.mean for each in streams):+.2f}",
            f"generated clicks: clearly ahead in {sum(each.ahead for each in drifting)} of {len(drifting)} kinds of "
            f"drift; real streams: clearly ahead over seeds in {len(ahead)} of {len(streams)}, over users and time as "
            f"well on {_certain(streams)}",
        )
    )
    wrong = [each for each in findings() if each.unit == GAUC and each.condition.endswith("labels wrong")]
    rows.append(
        line(
            "an event stream with many wrong labels",
            "try it in an A/B",
            f"{_signed([each.difference.mean for each in wrong])} points of GAUC with a fifth of the labels wrong",
            f"real streams, at rates chosen on the first fifth: clearly ahead over seeds in "
            f"{sum(each.ahead for each in wrong)} of {len(wrong)}, over users and time as well on {_certain(wrong)}; "
            f"the gain is larger than without wrong labels on {_larger(wrong)}",
        )
    )
    situations = {
        "images that jump: rotated by 80° at each epoch": "sudden 80°",
        "images that turn: rotated by 2° at each step": "continuous 2°",
        "images with wrong labels": "noise 40%",
        "images that do not change": "without change",
    }
    for situation, name in situations.items():
        rows.append(_on_every_model(situation, name))
    rows.append(_on_calm_clicks())
    for situation, where, at in (
        ("a rate that may be too high and cannot be tuned", "2 to 4 times Adam's best rate", _above),
        ("a rate that may be too low", "the next rate below Adam's best", _below),
    ):
        on_images, on_clicks = at(pairs), at(click_pairs())
        rows.append(
            line(
                situation,
                _for_both(advised(on_images), advised(on_clicks)),
                f"{_signed(_means(on_images))} points of accuracy, {_signed(_means(on_clicks))} of AUC, at {where}",
                f"{' and '.join(MODELS)}: {_counted(on_images)} cases; DeepFM: {_counted(on_clicks)}",
            )
        )
    return rows


def _on_calm_clicks() -> str:
    _, calm = clicks_by_drift()
    said = []
    for each in calm:
        noise = each.condition.removeprefix("no drift").replace(",", " with")
        said.append(f"{each.study.partition(',')[0]}{noise} {in_brackets(each.difference)}")
    sure = any(holds_among(each, len(calm)) for each in calm)
    unsure = {each.study.partition(",")[0]: None for each in calm if each.ahead and not sure}
    chance = f"; {' and '.join(unsure)} may be chance, as {len(calm)} comparisons were made" if unsure else ""
    to_do, how = "yes" if sure else "no need to", f"each at its own best rate{chance}"
    return line("clicks that do not drift", to_do, f"{', '.join(said)} points of AUC", how)


def _for_both(images: str, clicks: str) -> str:
    return images if images == clicks else f"{images} for images, {clicks} for clicks"


def advice() -> list[str]:
    """What the words of that table mean, and what accuracy is."""
    return [
        f"*Yes*: clearly ahead in most cases, or after correction for all {len(adam_pairs())} comparisons on images. "
        "*Try it in an A/B*: ahead in our studies, but by little, or not surely so for other users and times. "
        "*No need to*: no gain, or one that may be chance. Accuracy is the mean over 30 epochs. "
        f"{_in_the_last_epoch()}"
    ]


def _larger(wrong: Sequence[Finding]) -> str:
    """On how many streams the gain is larger than on the stream as it is, at rates chosen in the same way."""
    usual = {each.study: each for each in findings() if each.condition == "as it is" and each.rates == FIRST_FIFTH}
    return f"{sum(each.difference.mean > usual[each.study].difference.mean for each in wrong)} of them"


def _above(pairs: Mapping[Any, Pair]) -> list[Comparison]:
    """The differences at about three times the baseline's best rate."""
    return [pair.at(pair.baseline.above(pair.baseline.best())) for pair in pairs.values()]


def _below(pairs: Mapping[Any, Pair]) -> list[Comparison]:
    """The differences at the next rate below the baseline's best."""
    found = []
    for pair in pairs.values():
        rates = pair.baseline.rates
        found.append(pair.at(rates[max(rates.index(pair.baseline.best()) - 1, 0)]))
    return found


def _means(found: Sequence[Comparison]) -> list[float]:
    return [each.difference.mean for each in found]


def _kinds(found: Sequence[Comparison]) -> tuple[int, int]:
    """In how many comparisons the treatment is clearly ahead, and clearly behind."""
    kinds = [each.kind for each in found]
    return kinds.count("better"), kinds.count("worse")


def advised(found: Sequence[Comparison]) -> str:
    """What to do where most comparisons say one thing, and none the contrary."""
    ahead, behind = _kinds(found)
    return (
        "yes" if 2 * ahead > len(found) and not behind else "no" if 2 * behind > len(found) and not ahead else "unclear"
    )


def _counted(found: Sequence[Comparison]) -> str:
    ahead, behind = _kinds(found)
    return f"clearly ahead in {ahead}, behind in {behind} of {len(found)}"


def _on_every_model(situation: str, label: str) -> str:
    """The row of images under one condition: what to do, and what came out for each model."""
    own = {model: pair.own for (model, of), pair in adam_pairs().items() if of == label}
    ahead = [model for model, found in own.items() if _ahead(found)]
    unsure = [model for model in ahead if not _holds(own[model])]
    to_do = "yes" if len(unsure) < len(ahead) else "no need to"
    if any(found.kind == "worse" for found in own.values()):
        to_do = "unclear" if ahead else "no"
    said = ", ".join(f"{model} {in_brackets(found.difference)}" for model, found in own.items())
    chance = f"; {' and '.join(unsure)} may be chance, as {len(adam_pairs())} comparisons were made" if unsure else ""
    return line(situation, to_do, f"{said} points of accuracy", f"{label}, each at its own best rate{chance}")


def _signed(values: Sequence[float]) -> str:
    low, high = (f"{value:+.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# Rates ---------------------------------------------------------------------------------------------------------


def skipped() -> list[str]:
    """How many elements CAdam leaves alone, at its best rates."""
    shares = []
    for name, pair in image_pairs().items():
        runs = request("fig-rates").results.where(
            optimizer="CAdam", condition=str(image_rates.CONDITIONS[name]), lr=pair.treatment.best()
        )
        shares += [100 * (1 - share) for share in runs.metric("alignment").values()]
    return [
        f"At its best rate CAdam skips {_span(shares, 0)}% of all elements in an average step. On images it is behind "
        "Adam at low rates and ahead at high ones. A comparison at one rate for both says as much about the rate as "
        "about the optimizers."
    ]


def _curves() -> dict[str, Pair]:
    """All pairs of curves over rates, by study."""
    return image_curves() | {f"DeepFM, Adam, {label}": pair for label, pair in click_pairs().items()}


def rate_table() -> list[str]:
    """Best rates and how far one may be off, for every pair of curves."""
    rows = head(
        "study",
        "best rate without confidence",
        "with",
        "each at its own best",
        "both at the best without",
        "both at 2 to 4 times that",
        f"within {image_rates.NEAR:g} point of accuracy or {click_rates.NEAR:g} of AUC of its best, without",
        "with",
    )
    for name, pair in _curves().items():
        base = pair.baseline
        best, near = base.best(), image_rates.NEAR if name in image_curves() else click_rates.NEAR
        rows.append(
            line(
                name,
                short(best),
                short(pair.treatment.best()),
                in_brackets(pair.own.difference),
                in_brackets(pair.at(best).difference),
                in_brackets(pair.at(base.above(best)).difference),
                *(_tolerated(curve, near) for curve in (base, pair.treatment)),
            )
        )
    return rows


def _tolerated(curve: RateCurve, near: float) -> str:
    """The rates that do nearly as well as the best."""
    low, high = curve.tolerance(near)
    if low == high:
        return f"{short(low)} only"
    return f"{short(low)} to {short(high)}{', the highest that was run' if high == curve.rates[-1] else ''}"


def drawn(pairs: Mapping[str, Pair]) -> list[str]:
    """Every number of some curves, to tell whether a figure of them is current."""
    return [f"{name}: {pair}" for name, pair in pairs.items()]


def _drawn_of(name: str) -> list[str]:
    return drawn(image_pairs(name))


def floors() -> list[str]:
    """How far apart Adam and Adam under other seeds may be: what a gain has to be measured against."""
    accuracy = [
        row(FIGURE_OF[c.name], f"{c.label(c.reference)}: mean test accuracy").values["noise floor"]
        for c in images.CONDITIONS.values()
    ]
    auc = [each.values["noise floor"] for each in lines("stream-criteo", "stream")]
    return [
        "**The noise floor.** Adam against itself, three seeds each, differs by less than "
        f"{_span(accuracy)} points of accuracy on VGG-16 and {_span(auc)} points of AUC on drifting clicks, 95% of the "
        "time. Paired seeds make the comparisons above sharper than that. Still, a smaller gain is small."
    ]


def explanations() -> list[str]:
    """Which rate would explain the paper's margins, and how good a rate that is."""
    rows = head("study", "the paper's margin", "ours has it at the rate", "best rate without", "which is better by")
    for name, pair in _curves().items():
        if pair.margin is None or not name.startswith("VGG-16"):
            continue
        at, base = pair.explains, pair.baseline
        if at is None:
            found = ("none that was run", "")
        else:
            found = f"{at:.1e}".replace("e-0", "e-"), f"{base.at(base.best()).mean - base.between(at):.1f}"
        rows.append(line(name, f"{pair.margin:+.2f}", found[0], short(base.best()), found[1]))
    return rows


# Everything that was found -------------------------------------------------------------------------------------


def all_findings() -> list[str]:
    """The numbers of the forest plot."""
    rows = head("study", "condition", "rates", "difference", "unit", "the paper's", "verdict")
    for each in findings():
        paper = "" if each.paper is None else f"{each.paper:+.2f}"
        said = KINDS_SAID[each.kind]
        if each.unit == GAUC and each.kind == "inconclusive" and each.ahead:
            said = "ahead over seeds, undecided over time"
        rows.append(line(each.study, each.condition, each.rates, in_brackets(each.difference), each.unit, paper, said))
    return rows


REACH = {ACCURACY: 5.5, AUC: 1.2, GAUC: 3.0}
"""How far the axes of the forest plot go; what lies beyond is drawn at their end, with its number beside it."""


def forest() -> Figure:
    """All findings, a line each, by unit."""
    units = {unit: [each for each in findings() if each.unit == unit] for unit in (ACCURACY, AUC, GAUC)}
    sizes = [len(found) for found in units.values()]
    figure, axes = palette.panels(3, 1, 9.5, 0.23 * sum(sizes) + 2.2, gridspec_kw={"height_ratios": sizes})
    for panel, (unit, found) in zip(axes[:, 0], units.items(), strict=True):
        _forest_panel(panel, unit, found)
    return figure


CHOSEN = {OWN: "", BASELINES: ", baseline's rate", FIRST_FIFTH: ", first fifth", TUNED: ", tuning runs"}
"""How rates were chosen, in a word or two behind a line of the forest plot."""


def _forest_panel(axes: Axes, unit: str, found: Sequence[Finding]) -> None:
    reach = REACH[unit]
    colors = {"better": palette.CADAM, "worse": palette.ADAM}
    axes.axvline(0, color=palette.MUTED, lw=0.8)
    for place, each in enumerate(found):
        d, color = each.difference, colors.get(each.kind, palette.TARGET)
        if math.isfinite(d.low):
            axes.plot([max(d.low, -reach), min(d.high, reach)], [place, place], "-", color=color, lw=1.6)
        marker = "o" if abs(d.mean) <= reach else (">" if d.mean > 0 else "<")
        filled = "full" if each.rates == OWN else "none"
        for end, arrow in ((d.low, "<"), (d.high, ">")):
            if abs(end) > reach >= abs(d.mean):
                axes.plot([math.copysign(reach, end)], [place], arrow, color=color, ms=4)
        axes.plot([max(-reach, min(reach, d.mean))], [place], marker, color=color, ms=5, fillstyle=filled)
        if each.paper is not None:
            axes.plot([min(each.paper, reach)], [place], "d", color=palette.INK, ms=4, fillstyle="none")
        axes.annotate(
            f"{d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            va="center",
            color=palette.INK,
        )
    axes.set(xlim=(-1.05 * reach, 1.05 * reach), ylim=(len(found) - 0.4, -0.6), xlabel=f"with minus without, {unit}")
    labels = [f"{each.study}: {each.condition}{CHOSEN[each.rates]}" for each in found]
    axes.set_yticks(range(len(found)), labels, fontsize=7)


# Cost ----------------------------------------------------------------------------------------------------------


def costs() -> list[str]:
    """GPU minutes and CPU hours by study."""
    rows = head("study", "runs", "GPU minutes", "CPU hours")
    totals = [0, 0.0, 0.0]
    for path in sorted(archive().root.glob("*.parquet")):
        results = archive().study(path.stem).results()
        gpu, cpu = _seconds(results, on_gpu=True), _seconds(results, on_gpu=False)
        rows.append(line(path.stem, f"{len(results):,}", _amount(gpu / 60), _amount(cpu / 3600)))
        totals = [totals[0] + len(results), totals[1] + gpu, totals[2] + cpu]
    rows.append(line("**all**", f"{totals[0]:,}", _amount(totals[1] / 60), _amount(totals[2] / 3600)))
    return rows


def _seconds(results: Iterable[Result], *, on_gpu: bool) -> float:
    return sum(r.provenance.seconds for r in results if r.provenance.device.startswith("CPU") != on_gpu)


def _amount(value: float) -> str:
    return "" if value == 0 else "under 0.1" if value < 0.05 else f"{value:.1f}"


# Figures -------------------------------------------------------------------------------------------------------


def rate_figure(name: str) -> Figure:
    found = request(name)
    (figure,) = found.experiment.figures(found.results).values()
    return figure


PLAIN = {
    "without change": "nothing changes",
    "sudden": "images jump",
    "continuous": "images turn",
    "noise": "wrong labels",
}
"""The conditions of the image study in a word or two."""


def first_figure() -> Figure:
    """The README's: accuracy over learning rates, and nothing else."""
    figure, axes = palette.panels(1, len(image_pairs()), 10, 2.9)
    for panel, (name, pair) in zip(axes[0], image_pairs().items(), strict=True):
        draw_curves(panel, {palette.CADAM: pair.treatment, palette.ADAM: pair.baseline})
        panel.set_title(next(plain for start, plain in PLAIN.items() if name.startswith(start)), fontsize=13)
        panel.minorticks_off()
        panel.set_xticks(pair.baseline.rates, [f"{rate:.0e}".replace("e-0", "e-") for rate in pair.baseline.rates])
        panel.set_xlabel("learning rate", fontsize=11)
    axes[0, 0].set_ylabel("mean test accuracy, %", fontsize=11)
    axes[0, 0].legend(loc="lower center", fontsize=11)
    return figure


def fingerprint(lines: Sequence[str]) -> str:
    """Of the numbers that a figure is drawn from; it stands in the file, which shows whether that is current."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


FIGURES: Mapping[str, tuple[Callable[[], Figure], Callable[[], list[str]]]] = {
    "docs/img/readme.png": (first_figure, lambda: drawn(image_pairs())),
    **{
        f"docs/img/evidence-{file}.png": (partial(rate_figure, name), partial(_drawn_of, name))
        for file, name in {"rates": "fig-rates", "sgdm": "fig-rates-sgdm", "resnet": "fig-rates-resnet"}.items()
    },
    "docs/img/evidence-clicks.png": (partial(rate_figure, CLICK_CURVES), lambda: drawn(click_pairs())),
    "docs/img/evidence-forest.png": (forest, all_findings),
}
"""By file: what draws it, and the numbers that it shows."""


def is_current(path: str) -> bool:
    """Was a figure drawn from the numbers that the archive has now?"""
    file, table = ROOT / path, FIGURES[path][1]
    return file.exists() and fingerprint(table()).encode() in file.read_bytes()


def draw(path: str) -> None:
    import matplotlib

    make, table = FIGURES[path]
    with matplotlib.rc_context(palette.STYLE):
        make().savefig(ROOT / path, dpi=110, metadata={"Source": fingerprint(table())})
