"""Every claim of the paper, its number, ours and what that comes to, from the archive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cadam.ab.results import Results
from cadam.ab.summary import Row
from cadam.statistics.comparison import compare
from cadam.statistics.intervals import Interval

from . import evidence, published
from .ctr import study as click_study
from .harness.rate_pairs import Pair
from .images import study as images
from .published import head, in_brackets, interval, line, lines, request, row

CONFIRMED, PARTLY, REFUTED, UNDECIDED = "confirmed", "partly", "not confirmed", "undecided"
PRIVATE = "cannot be tested here"


@dataclass(frozen=True)
class Claim:
    """A claim, where it stands, what number it has, what came out here, and what that makes of it."""

    claim: str
    place: str
    paper: str
    ours: str
    verdict: str


def table() -> list[str]:
    top = head("claim", "in the paper", "its number", "ours", "verdict")
    return [*top, *(line(c.claim, c.place, c.paper, c.ours, c.verdict) for c in claims())]


def claims() -> list[Claim]:
    return [*_numerical(), *_vgg(), *_larger_models(), *_clicks(), *_production(), *_ablation(), *_theory()]


def judged(rows: Sequence[Row]) -> str:
    """Confirmed where all lines have the treatment better, and so on."""
    won, lost = ([each for each in rows if each.verdict_kind == kind] for kind in ("better", "worse"))
    small = sum(abs(each.values["difference"]) < each.values.get("noise floor", 0.0) for each in won)
    floor = f"; {'below' if len(won) == 1 else f'{small} below'} the noise floor" if small else ""
    if len(won) == len(rows):
        return f"{CONFIRMED}{floor}"
    if won:
        return f"{PARTLY}: better in {len(won)} of {len(rows)}, worse in {len(lost)}{floor}"
    return f"{REFUTED}: worse in {len(lost)} of {len(rows)}" if lost else UNDECIDED


def _count(rows: Sequence[Row], word: str) -> str:
    return f"{word} in {sum(found.verdict_kind == 'better' for found in rows)} of {len(rows)}"


def _at(rows: Sequence[Row]) -> str:
    """Differences, each behind the condition that its line begins with."""
    return "; ".join(f"{_condition(each)} {in_brackets(interval(each))}" for each in rows)


def _condition(row: Row) -> str:
    return row.label.partition(":")[0]


def _own(condition: str, name: str = "fig-rates") -> str:
    return f"each at its own best rate {in_brackets(evidence.image_pairs(name)[condition].own.difference)}"


def _claimed(found: Sequence[Row], name: str) -> dict[str, Pair]:
    """The curves over rates under the conditions of these lines, as far as they were run."""
    pairs = evidence.image_pairs(name) if name in evidence.IMAGE_CURVES else {}
    return {label: pair for label, pair in pairs.items() if label in map(_condition, found)}


def _judged_twice(found: Sequence[Row], name: str) -> str:
    """What comes out at the baseline's rate and, where curves over rates were run, with each at its own."""
    pairs = _claimed(found, name)
    ahead = sum(pair.own.kind == "better" for pair in pairs.values())
    if not pairs:
        return judged(found)
    return f"{judged(found)} at that rate; at its own best rate better in {ahead} of {len(pairs)}"


def _own_rates(found: Sequence[Row], name: str) -> str:
    """The same for all conditions that were run over rates; nothing if none was."""
    said = "; ".join(f"{label} {in_brackets(pair.own.difference)}" for label, pair in _claimed(found, name).items())
    return f"; each at its own best rate: {said}" if said else ""


def _numerical() -> Iterable[Claim]:
    first, starts = lines("fig-shift", end=": the paper's run"), lines("fig-shift", end=": random starts")
    yield Claim(
        "Follows a moving minimum with lower regret, for both losses and all three kinds of change",
        "fig. 2, app. C.1",
        "lower in 6 of 6 panels",
        f"{_count(first, 'lower')} from the paper's start; {_count(starts, 'lower')} over random starts",
        judged([*first, *starts]),
    )
    ends = lines("fig-noise", "log10 of the loss at the end")
    paths = lines("fig-noise", "log10 of the length of the path")
    yield Claim(
        "Smoother paths and lower loss on four noisy landscapes",
        "fig. 3",
        "none given",
        f"final loss {_count(ends, 'lower')}; path {_count(paths, 'shorter')}",
        judged([*ends, *paths]),
    )
    calm = lines("fig-no-noise", "log10 of the loss at the end")
    yield Claim(
        "The same landscapes without noise, for comparison", "app. B.1", "none given", _count(calm, "lower"), "no claim"
    )


TEN = "both at the rate chosen for Adam by 10 epochs"


def _vgg() -> Iterable[Claim]:
    sudden = [row("fig-sudden", f"sudden {angle}°: mean test accuracy") for angle in (20, 40, 60, 80)]
    yield Claim(
        "Images that jump: ahead of Adam at every angle",
        "fig. 4; table 4 at 80°",
        "+0.98 at 80°",
        f"{TEN}: {_at(sudden)}; at 80°, {_own('sudden 80°')}",
        judged(sudden),
    )
    gain = row("fig-sudden", "CAdam's gain at 20 to 80° against that at 0°")
    yield Claim(
        "The gap is larger than without rotation", "fig. 4", "none given", in_brackets(interval(gain)), judged([gain])
    )
    falls = row("fig-sudden-detail", "CAdam: alignment")
    yield Claim(
        "The alignment ratio falls when images turn, then recovers",
        "fig. 4, right",
        "falls",
        f"before; highest, lowest after a turn: {falls.measured}",
        f"{PARTLY}: it {falls.verdict}",
    )
    recovery = [row("fig-sudden", f"sudden {angle}°: steps to recover") for angle in (20, 40, 60, 80)]
    yield Claim(
        "Accuracy drops more slowly and recovers faster",
        "fig. 4, right",
        "none given",
        f"steps to recover: {_at(recovery)}; the drop itself was not measured",
        judged(recovery),
    )
    faster = [row("fig-continuous", f"CAdam's gain at 4° against that at {base}°") for base in ("0", "0.5")]
    speeds = [row("fig-continuous", f"continuous {speed}°: mean test accuracy") for speed in ("0.5", "1", "2", "4")]
    yield Claim(
        "Images that turn at every step: the gain grows with the speed",
        "fig. 5, left",
        "none given",
        f"{TEN}: {_at(speeds)}; gain at 4° minus gain at 0.5°: {in_brackets(interval(faster[1]))}",
        f"{PARTLY}: larger at 4° than at 0.5°, but largest at 2°" if judged(faster) == CONFIRMED else judged(faster),
    )
    yield Claim(
        "Ahead of Adam at 2° per step",
        "table 4",
        "+4.52",
        f"{TEN}: {in_brackets(interval(speeds[2]))}; {_own('continuous 2°')}",
        f"{judged([speeds[2]])} at that rate; ours is smaller",
    )
    own = evidence.image_pairs()["noise 40%"].own
    levels = [row("fig-image-noise", f"noise {level}%: mean test accuracy") for level in (10, 20, 30, 40)]
    yield Claim(
        "Noisy labels: ahead of Adam at every level",
        "fig. 5, right; table 4 at 40%",
        "+3.34 at 40%",
        f"{TEN}: {_at(levels)}; at 40%, {_own('noise 40%')}",
        f"{judged(levels)} at that rate; {evidence.KINDS_SAID[own.kind]} at 40% at its own best rate",
    )
    alignment = _alignment()
    yield Claim(
        "The more noise, the fewer parameters are updated",
        "sec. 3.2",
        "falls",
        "share updated at 0, 10, 20, 30, 40%: " + ", ".join(f"{value:.3f}" for value in alignment),
        CONFIRMED if all(np.diff(alignment) < 0) else f"{REFUTED}: it does not fall steadily",
    )
    same = row("fig-image-noise", "CAdam at 40% against Adam at 0%")
    best = _noisy_against_clean()
    yield Claim(
        "With 40% noise CAdam ends where Adam does without noise",
        "sec. 3.2",
        "comparable",
        f"both at 1e-4: {in_brackets(interval(same))}; each at its best rate: {in_brackets(best)}",
        f"{REFUTED} at the best rates" if best.high < 0 else UNDECIDED,
    )


def _alignment() -> list[float]:
    """CAdam's mean alignment ratio by level of noise, at the rate of the figure."""
    tests = request("fig-image-noise").results.tests().where(optimizer="CAdam")
    condition = images.CONDITIONS["noise"]
    found = [tests.where(condition=str(condition.make(level))) for level in condition.strengths["full"]]
    return [float(np.mean(list(part.metric("alignment").values()))) for part in found]


def _noisy_against_clean() -> Interval:
    """The last epoch of CAdam with 40% noise minus that of Adam without, each at its own best rate."""
    pairs, results = evidence.image_pairs(), request("fig-rates").results.tests()
    noisy, clean = pairs["noise 40%"].treatment, pairs["without change"].baseline

    def last(condition: str, arm: str, rate: float) -> dict[int, float]:
        return Results(list(results)).where(condition=condition, optimizer=arm, lr=rate).metric("last_accuracy")

    first, second = last("noise 40", "CAdam", noisy.best()), last("clean", "Adam", clean.best())
    return compare(first, second, names=images.ARMS, better="higher").difference


def _larger_models() -> Iterable[Claim]:
    conditions = [(c.label(c.reference), evidence.FIGURE_OF[c.name]) for c in images.CONDITIONS.values()]
    for family in ("resnet", "densenet"):
        found = [row(f"{figure}-{family}", f"{label}: mean test accuracy") for label, figure in conditions]
        rates = f"fig-rates-{family}"
        yield Claim(
            f"{images.MODELS[family]['full']}: ahead under jumps, steady turning and noise",
            "app. B.2",
            "none given",
            f"{TEN}: {_at(found)}{_own_rates(found, rates)}; other strengths were not run",
            _judged_twice(found, rates),
        )


OTHER_CLICKS = "generated clicks, not Criteo's: "


def _clicks() -> Iterable[Claim]:
    found = [row("tab-criteo", f"mean of the models: {pair}") for pair in _PAIRS]
    yield Claim(
        "Criteo: CAdam and CAmsGrad beat the other optimizers across models",
        "table 1",
        "AUC 80.94 and 80.96; Adam 80.92, AmsGrad 80.94",
        f"{OTHER_CLICKS}{_against(found)}; mean of five models: {_ranked()}",
        judged(found),
    )
    both = row("tab-criteo", "mean of the models: CAmsGrad against CAdam")
    yield Claim(
        "CAmsGrad is not consistently better than CAdam",
        "sec. 3.3",
        "better on average by 0.02",
        f"{OTHER_CLICKS}{in_brackets(interval(both))}; better on {_models_won(both)} of 5 models",
        f"{REFUTED}: better" if judged([both]) == CONFIRMED else CONFIRMED,
    )
    floor = found[0].values["noise floor"]
    yield Claim(
        "A gain of 0.05 points on Criteo is not trivial",
        "sec. 3.3",
        "0.05; its own table has 0.02 for CAdam over Adam",
        f"{OTHER_CLICKS}Adam and Adam under other seeds differ by up to {floor:.2f}, mean of five models",
        f"{UNDECIDED}: {'below' if floor > 0.05 else 'above'} the noise floor",
    )
    own, default = evidence.noisy_clicks(), row("tab-criteo-noise", "default lr 0.001: mean of the models")
    lost = row("tab-criteo-noise", "lost by noise")
    yield Claim(
        "Criteo with 1% of negatives flipped: CAdam is ahead and loses less",
        "table 2",
        "80.82 against 80.53; loses 0.12 against 0.39",
        f"{OTHER_CLICKS}mean of five models, each at the rate best in tuning runs {in_brackets(interval(own))}; "
        f"both at 1e-3 {in_brackets(interval(default))}; "
        f"CAdam's loss by noise minus Adam's {in_brackets(interval(lost))}",
        f"{judged([own, lost])}, on other data",
    )


_PAIRS = ("CAdam against Adam", "CAmsGrad against AmsGrad")


def _ranked() -> str:
    """The mean AUC of all optimizers, the best first."""
    means: dict[str, float] = {}
    for each in lines("tab-criteo", "mean of the models"):
        means |= {name: each.values[name] for name in each.label.partition(": ")[2].split(" against ")}
    return ", ".join(f"{name} {means[name]:.2f}" for name in sorted(means, key=means.__getitem__, reverse=True))


def _against(rows: Sequence[Row]) -> str:
    """Differences, each behind what was compared."""
    return "; ".join(f"{each.label.partition(': ')[2]} {in_brackets(interval(each))}" for each in rows)


def _models_won(found: Row) -> int:
    first, second = found.label.partition(": ")[2].split(" against ")
    return sum(found.values[f"{first} on {m}"] > found.values[f"{second} on {m}"] for m in click_study.MODELS)


def _production() -> Iterable[Claim]:
    streams = evidence.as_they_are()
    ahead = [each for each in streams if each.ahead]
    agreed = sum(each.kind == "better" for each in streams)
    yield Claim(
        "In production, GAUC rises in all of seven scenarios",
        "table 3",
        "+0.10 to +0.49 points; +0.30 on average (its columns: +0.26)",
        f"public streams as a stand-in: ahead over seeds in {len(ahead)} of {len(streams)}, "
        f"over seeds, users and time in {agreed}",
        PRIVATE,
    )
    yield Claim("0.1 points of GAUC are worth 15 million dollars a year", "sec. 3.4", "$15M", "", PRIVATE)
    yield Claim("Gross merchandise volume rises substantially", "abstract", "none given", "", PRIVATE)
    yield Claim("Runs stably in production", "sec. 3.4", "16 scenarios, nine months", "", PRIVATE)


def _ablation() -> Iterable[Claim]:
    for treatment, baseline in (("CSGDM", "SGDM"), ("CAmsGrad", "AmsGrad")):
        found, papers, rates = [], [], f"fig-rates-{baseline.lower()}"
        for condition in images.CONDITIONS.values():
            label = condition.label(condition.reference)
            found.append(row("tab-ablation-images", f"{label}: {treatment} against {baseline}"))
            without, confident = images.PAPER[condition.name, baseline]
            papers.append(f"{confident - without:+.2f}")
        yield Claim(
            f"Confidence helps {baseline}: jumps, steady turning, noise",
            "table 4",
            ", ".join(papers),
            f"both at the rate chosen for {baseline} by 10 epochs: {_at(found)}{_own_rates(found, rates)}",
            _judged_twice(found, rates),
        )
    found = lines("tab-ablation-criteo", "mean of the models")
    yield Claim(
        "Confidence helps all three on Criteo",
        "table 4",
        "SGDM +0.55, Adam +0.02, AmsGrad +0.02",
        f"{OTHER_CLICKS}{_against(found)}",
        judged(found),
    )
    lion = row("fig-shift", "CLion against Lion")
    yield Claim(
        "It may help other momentum optimizers, such as Lion",
        "sec. 3.5",
        "future work",
        f"moving minimum: better in {lion.values['better']:.0f} of {lion.values['problems']:.0f} problems; "
        "no networks were trained",
        f"{PARTLY}, on toy problems",
    )


def _theory() -> Iterable[Claim]:
    held = published.summary("theorem").verdict.partition(".")[0]
    yield Claim(
        "Converges at Adam's rate, without noise in the gradients",
        "theorem 4.3",
        "T grows as gamma to the -4",
        f"{held[0].lower()}{held[1:]}",
        CONFIRMED if ": 0 breaches" in held else REFUTED,
    )
    pairs = evidence.adam_pairs().values()
    higher = sum(pair.treatment.best() > pair.baseline.best() for pair in pairs)
    yield Claim(
        "A drop-in without tuning: no new hyperparameter",
        "sec. 1, 6",
        "same rate for both",
        f"no new hyperparameter; CAdam's best rate is above Adam's in {higher} of {len(pairs)} cases "
        f"({' and '.join(evidence.MODELS)})",
        PARTLY if higher else CONFIRMED,
    )
