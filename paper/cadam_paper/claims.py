"""The table of the paper's claims in docs/claims.md: the paper's numbers, our numbers and a verdict for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cadam.statistics.comparison import compare
from cadam.statistics.intervals import Interval

from . import evidence, published
from .ctr import study as click_study
from .harness.rate_pairs import Pair
from .harness.summary import Row
from .images import study as images
from .published import difference_of, find_row, find_rows, format_interval, load, table_header, table_row

CONFIRMED, PARTLY, REFUTED, UNDECIDED = "confirmed", "partly", "not confirmed", "undecided"
"""Verdicts on claims."""
PRIVATE = "cannot be tested here"
"""Verdict on a claim about data that the authors did not publish."""
NO_CLAIM = "no claim"
"""Verdict on a number that the paper shows without a claim about it."""


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    claim: str
    section: str
    """The section, figure or table of the paper that makes the claim."""
    paper: str
    """The number that the paper gives."""
    ours: str
    """The measured numbers."""
    verdict: str


def table() -> list[str]:
    """Return the table of all claims."""
    header = table_header("claim", "in the paper", "its number", "our number", "verdict")
    return [*header, *(table_row(c.claim, c.section, c.paper, c.ours, c.verdict) for c in claims())]


def _counts() -> dict[str, int]:
    """Return the number of claims by verdict."""
    counts = dict.fromkeys((CONFIRMED, PARTLY, UNDECIDED, REFUTED, PRIVATE, NO_CLAIM), 0)
    for claim in claims():
        (kind,) = (kind for kind in counts if claim.verdict.startswith(kind))
        counts[kind] += 1
    return counts


def readme_line() -> list[str]:
    """Return the item of the README about the paper, with the number of claims that were confirmed."""
    counts = _counts()
    open_count = sum(counts[kind] for kind in (UNDECIDED, PRIVATE, NO_CLAIM))
    return [
        "- **The paper:** [every figure and table again](docs/paper.md). "
        f"Of {sum(counts.values())} [claims](docs/claims.md), {counts[CONFIRMED]} are confirmed, "
        f"{counts[PARTLY]} partly, {counts[REFUTED]} are not, {open_count} undecided or untestable"
    ]


def count_verdicts() -> list[str]:
    """Return the sentence that counts the verdicts."""
    counts = _counts()
    names = {PARTLY: "partly confirmed", NO_CLAIM: "without a claim"}
    texts = [f"{count} {names.get(kind, kind)}" for kind, count in counts.items() if count]
    return [f"**Of {sum(counts.values())} statements: {', '.join(texts)}.**"]


def claims() -> list[Claim]:
    """Return all claims of the paper in its order."""
    return [*_numerical(), *_vgg(), *_larger_models(), *_clicks(), *_production(), *_ablation(), *_theory()]


def judge(rows: Sequence[Row]) -> str:
    """Return the verdict on a claim from its comparisons.

    The claim is confirmed if the treatment is better in all rows, partly confirmed if it is better in some, not
    confirmed if it is worse in some and better in none, and undecided otherwise.
    """
    better, worse = ([row for row in rows if row.verdict_kind == kind] for kind in ("better", "worse"))
    small = sum(abs(row.values["difference"]) < row.values.get("noise floor", 0.0) for row in better)
    floor = f"; {'below' if len(better) == 1 else f'{small} below'} the noise floor" if small else ""
    if len(better) == len(rows):
        return f"{CONFIRMED}{floor}"
    if better:
        return f"{PARTLY}: better in {len(better)} of {len(rows)}, worse in {len(worse)}{floor}"
    return f"{REFUTED}: worse in {len(worse)} of {len(rows)}" if worse else UNDECIDED


def _count_better(rows: Sequence[Row], word: str) -> str:
    return f"{word} in {sum(row.verdict_kind == 'better' for row in rows)} of {len(rows)}"


def _list_by_condition(rows: Sequence[Row]) -> str:
    """List the differences of rows, each after the condition that its label starts with."""
    return "; ".join(f"{_condition(row)} {format_interval(difference_of(row))}" for row in rows)


def _condition(row: Row) -> str:
    return row.label.partition(":")[0]


def _at_own_rates(condition: str) -> str:
    """Give the difference of Adam and CAdam on VGG-16 under a condition, each at its own best learning rate."""
    return f"each at its own best rate {format_interval(evidence.image_pairs()[condition].at_own_rates.difference)}"


def _pairs_of(rows: Sequence[Row], name: str) -> dict[str, Pair]:
    """Return the learning-rate curves under the conditions of these rows, as far as they were run."""
    pairs = evidence.image_pairs(name) if name in evidence.IMAGE_CURVES else {}
    return {label: pair for label, pair in pairs.items() if label in map(_condition, rows)}


def _judge_with_own_rates(rows: Sequence[Row], name: str) -> str:
    """Judge a claim at the baseline's rate and, where learning-rate curves exist, at the optimizers' own best rates."""
    pairs = _pairs_of(rows, name)
    ahead = sum(pair.at_own_rates.kind == "better" for pair in pairs.values())
    if not pairs:
        return judge(rows)
    return f"{judge(rows)} at that rate; at its own best rate better in {ahead} of {len(pairs)}"


def _list_own_rates(rows: Sequence[Row], name: str) -> str:
    """List the differences at the optimizers' own best rates, or return an empty text if there are no curves."""
    pairs = _pairs_of(rows, name)
    listed = "; ".join(f"{label} {format_interval(pair.at_own_rates.difference)}" for label, pair in pairs.items())
    return f"; each at its own best rate: {listed}" if listed else ""


def _numerical() -> Iterable[Claim]:
    first = find_rows("fig-shift", suffix=": the paper's run")
    starts = find_rows("fig-shift", suffix=": random starts")
    yield Claim(
        "Follows a moving minimum with lower regret, for both losses and all three kinds of shift",
        "fig. 2, app. C.1",
        "lower in 6 of 6 panels",
        f"{_count_better(first, 'lower')} from the paper's starting point; "
        f"{_count_better(starts, 'lower')} over random starting points",
        judge([*first, *starts]),
    )
    ends = find_rows("fig-noise", "log10 of the final loss")
    paths = find_rows("fig-noise", "log10 of the length of the path")
    yield Claim(
        "Smoother paths and lower loss on four noisy landscapes",
        "fig. 3",
        "none given",
        f"final loss {_count_better(ends, 'lower')}; path {_count_better(paths, 'shorter')}",
        judge([*ends, *paths]),
    )
    exact = find_rows("fig-no-noise", "log10 of the final loss")
    yield Claim(
        "The landscapes without noise, for comparison",
        "app. B.1",
        "none given",
        f"final loss {_count_better(exact, 'lower')}",
        NO_CLAIM,
    )


COMMON_RATE = "both at the rate chosen for Adam by 10 epochs"
"""Text that introduces differences at the learning rate that tuning runs of 10 epochs chose for Adam."""


def _vgg() -> Iterable[Claim]:
    sudden = [find_row("fig-sudden", f"sudden {angle}°: mean test accuracy") for angle in (20, 40, 60, 80)]
    yield Claim(
        "Sudden shift: ahead of Adam at every angle",
        "fig. 4; table 4 at 80°",
        "+0.98 at 80°",
        f"{COMMON_RATE}: {_list_by_condition(sudden)}; at 80°, {_at_own_rates('sudden 80°')}",
        judge(sudden),
    )
    gain = find_row("fig-sudden", "CAdam's gain at 20 to 80° against that at 0°")
    yield Claim(
        "The gap is larger than without rotation",
        "fig. 4",
        "none given",
        format_interval(difference_of(gain)),
        judge([gain]),
    )
    alignment_row = find_row("fig-sudden-detail", "CAdam: alignment")
    yield Claim(
        "The alignment ratio falls at a sudden shift, then recovers",
        "fig. 4, right",
        "falls",
        f"before a shift; highest, lowest after it: {alignment_row.measured}",
        f"{PARTLY}: it {alignment_row.verdict}",
    )
    recovery = [find_row("fig-sudden", f"sudden {angle}°: steps to recover") for angle in (20, 40, 60, 80)]
    yield Claim(
        "Accuracy drops more slowly and recovers faster",
        "fig. 4, right",
        "none given",
        f"steps to recover: {_list_by_condition(recovery)}; the drop itself was not measured",
        judge(recovery),
    )
    faster = [find_row("fig-continuous", f"CAdam's gain at 4° against that at {base}°") for base in ("0", "0.5")]
    speeds = [
        find_row("fig-continuous", f"continuous {speed}°: mean test accuracy") for speed in ("0.5", "1", "2", "4")
    ]
    yield Claim(
        "Continuous shift: the gain grows with the rotation speed",
        "fig. 5, left",
        "none given",
        f"{COMMON_RATE}: {_list_by_condition(speeds)}; gain at 4° minus gain at 0.5°: "
        f"{format_interval(difference_of(faster[1]))}",
        f"{PARTLY}: larger at 4° than at 0.5°, but largest at 2°" if judge(faster) == CONFIRMED else judge(faster),
    )
    yield Claim(
        "Ahead of Adam at 2° per step",
        "table 4",
        "+4.52",
        f"{COMMON_RATE}: {format_interval(difference_of(speeds[2]))}; {_at_own_rates('continuous 2°')}",
        f"{judge([speeds[2]])} at that rate; our gain is smaller",
    )
    at_own_rates = evidence.image_pairs()["noise 40%"].at_own_rates
    levels = [find_row("fig-image-noise", f"noise {level}%: mean test accuracy") for level in (10, 20, 30, 40)]
    yield Claim(
        "Label noise: ahead of Adam at every level",
        "fig. 5, right; table 4 at 40%",
        "+3.34 at 40%",
        f"{COMMON_RATE}: {_list_by_condition(levels)}; at 40%, {_at_own_rates('noise 40%')}",
        f"{judge(levels)} at that rate; {evidence.KIND_NAMES[at_own_rates.kind]} at 40% at its own best rate",
    )
    alignment = _alignment()
    yield Claim(
        "The more label noise, the fewer parameters are updated",
        "sec. 3.2",
        "falls",
        "share updated at 0, 10, 20, 30, 40%: " + ", ".join(f"{value:.3f}" for value in alignment),
        CONFIRMED if all(np.diff(alignment) < 0) else f"{REFUTED}: it does not decrease monotonically",
    )
    same = find_row("fig-image-noise", "CAdam at 40% against Adam at 0%")
    best = _noisy_against_clean()
    yield Claim(
        "With 40% label noise, CAdam's final accuracy is that of Adam without noise",
        "sec. 3.2",
        "comparable",
        f"both at 1e-4: {format_interval(difference_of(same))}; each at its best rate: {format_interval(best)}",
        f"{REFUTED} at the best rates" if best.high < 0 else UNDECIDED,
    )


def _alignment() -> list[float]:
    """Return CAdam's mean alignment ratio by level of label noise, at the learning rate of the figure."""
    tests = load("fig-image-noise").results.tests().where(optimizer="CAdam")
    condition = images.CONDITIONS["noise"]
    by_level = [tests.where(condition=str(condition.make(level))) for level in condition.strengths["full"]]
    return [float(np.mean(list(results.metric("alignment").values()))) for results in by_level]


def _noisy_against_clean() -> Interval:
    """Compare the last epoch of CAdam with 40% label noise with Adam without noise, each at its own best rate."""
    pairs, results = evidence.image_pairs(), load("fig-rates").results.tests()
    noisy, clean = pairs["noise 40%"].treatment, pairs["without change"].baseline

    def last(condition: str, arm: str, rate: float) -> dict[int, float]:
        return results.where(condition=condition, optimizer=arm, lr=rate).metric("last_accuracy")

    first, second = last("noise 40", "CAdam", noisy.best()), last("clean", "Adam", clean.best())
    return compare(first, second, names=images.ARMS, better="higher").difference


def _larger_models() -> Iterable[Claim]:
    conditions = [(c.label(c.reference), evidence.FIGURE_OF[c.name]) for c in images.CONDITIONS.values()]
    for family in ("resnet", "densenet"):
        rows = [find_row(f"{figure}-{family}", f"{label}: mean test accuracy") for label, figure in conditions]
        rates = f"fig-rates-{family}"
        yield Claim(
            f"{images.MODELS[family]['full']}: ahead under sudden shift, continuous shift and label noise",
            "app. B.2",
            "none given",
            f"{COMMON_RATE}: {_list_by_condition(rows)}{_list_own_rates(rows, rates)}; other strengths were not run",
            _judge_with_own_rates(rows, rates),
        )


OTHER_CLICKS = "generated clicks instead of Criteo's: "
"""Text that introduces numbers measured on generated clicks."""


def _clicks() -> Iterable[Claim]:
    rows = [find_row("tab-criteo", f"mean of the models: {pair}") for pair in _PAIRS]
    yield Claim(
        "Criteo: CAdam and CAmsGrad beat the other optimizers across models",
        "table 1",
        "AUC 80.94 and 80.96; Adam 80.92, AmsGrad 80.94",
        f"{OTHER_CLICKS}{_list_by_pair(rows)}; mean of five models: {_rank_optimizers()}",
        judge(rows),
    )
    both = find_row("tab-criteo", "mean of the models: CAmsGrad against CAdam")
    yield Claim(
        "CAmsGrad is not consistently better than CAdam",
        "sec. 3.3",
        "better on average by 0.02",
        f"{OTHER_CLICKS}{format_interval(difference_of(both))}; better on {_count_models_won(both)} of 5 models",
        f"{REFUTED}: better" if judge([both]) == CONFIRMED else CONFIRMED,
    )
    floor = rows[0].values["noise floor"]
    yield Claim(
        "A gain of 0.05 points on Criteo is not trivial",
        "sec. 3.3",
        "0.05; its own table has 0.02 for CAdam over Adam",
        f"{OTHER_CLICKS}two sets of Adam runs with different seeds differ by up to {floor:.2f}, mean of five models",
        f"{UNDECIDED}: {'below' if floor > 0.05 else 'above'} the noise floor",
    )
    tuned, default = evidence.noisy_clicks(), find_row("tab-criteo-noise", "default lr 0.001: mean of the models")
    lost = find_row("tab-criteo-noise", "lost by noise")
    yield Claim(
        "Criteo with 1% of the negatives flipped: CAdam is ahead and loses less",
        "table 2",
        "80.82 against 80.53; loses 0.12 against 0.39",
        f"{OTHER_CLICKS}mean of five models, each at the rate best in tuning runs "
        f"{format_interval(difference_of(tuned))}; both at 1e-3 {format_interval(difference_of(default))}; "
        f"AUC lost by noise, CAdam minus Adam, {format_interval(difference_of(lost))}",
        f"{judge([tuned, lost])}, on other data",
    )


_PAIRS = ("CAdam against Adam", "CAmsGrad against AmsGrad")


def _rank_optimizers() -> str:
    """List the mean AUC of all optimizers, the best first."""
    means: dict[str, float] = {}
    for row in find_rows("tab-criteo", "mean of the models"):
        means |= {name: row.values[name] for name in row.label.partition(": ")[2].split(" against ")}
    return ", ".join(f"{name} {means[name]:.2f}" for name in sorted(means, key=means.__getitem__, reverse=True))


def _list_by_pair(rows: Sequence[Row]) -> str:
    """List the differences of rows, each after the names of the compared optimizers."""
    return "; ".join(f"{row.label.partition(': ')[2]} {format_interval(difference_of(row))}" for row in rows)


def _count_models_won(row: Row) -> int:
    """Count the models on which the first optimizer of a row has the higher AUC."""
    first, second = row.label.partition(": ")[2].split(" against ")
    return sum(row.values[f"{first} on {m}"] > row.values[f"{second} on {m}"] for m in click_study.MODELS)


def _production() -> Iterable[Claim]:
    streams = evidence.unchanged_streams()
    ahead = sum(finding.is_ahead for finding in streams)
    clear = sum(finding.kind == "better" for finding in streams)
    yield Claim(
        "In production, GAUC rises in all of seven scenarios",
        "table 3",
        "+0.10 to +0.49 points; +0.30 on average (its columns: +0.26)",
        f"on public streams instead: ahead over seeds in {ahead} of {len(streams)}, over seeds, users and time in "
        f"{clear}",
        PRIVATE,
    )
    yield Claim("0.1 points of GAUC are worth 15 million dollars a year", "sec. 3.4", "$15M", "", PRIVATE)
    yield Claim("Gross merchandise volume rises substantially", "abstract", "none given", "", PRIVATE)
    yield Claim("Runs stably in production", "sec. 3.4", "16 scenarios, nine months", "", PRIVATE)


def _ablation() -> Iterable[Claim]:
    for treatment, baseline in (("CSGDM", "SGDM"), ("CAmsGrad", "AmsGrad")):
        rows, papers, rates = [], [], f"fig-rates-{baseline.lower()}"
        for condition in images.CONDITIONS.values():
            label = condition.label(condition.reference)
            rows.append(find_row("tab-ablation-images", f"{label}: {treatment} against {baseline}"))
            without, confident = images.PAPER[condition.name, baseline]
            papers.append(f"{confident - without:+.2f}")
        yield Claim(
            f"Confidence helps {baseline}: sudden shift, continuous shift, label noise",
            "table 4",
            ", ".join(papers),
            f"both at the rate chosen for {baseline} by 10 epochs: "
            f"{_list_by_condition(rows)}{_list_own_rates(rows, rates)}",
            _judge_with_own_rates(rows, rates),
        )
    rows = find_rows("tab-ablation-criteo", "mean of the models")
    yield Claim(
        "Confidence helps all three on Criteo",
        "table 4",
        "SGDM +0.55, Adam +0.02, AmsGrad +0.02",
        f"{OTHER_CLICKS}{_list_by_pair(rows)}",
        judge(rows),
    )
    lion = find_row("fig-shift", "CLion against Lion")
    yield Claim(
        "It may help other momentum optimizers, such as Lion",
        "sec. 3.5",
        "future work",
        f"moving minimum: better in {lion.values['better']:.0f} of {lion.values['problems']:.0f} problems; "
        "no networks were trained",
        f"{PARTLY}, on toy problems",
    )


def _theory() -> Iterable[Claim]:
    sentence = published.summary("theorem").verdict.partition(".")[0]
    yield Claim(
        "Converges at Adam's rate, without noise in the gradients",
        "theorem 4.3",
        "T grows as gamma to the -4",
        f"{sentence[0].lower()}{sentence[1:]}",
        CONFIRMED if ": 0 violations" in sentence else REFUTED,
    )
    pairs = evidence.adam_pairs().values()
    higher = sum(pair.treatment.best() > pair.baseline.best() for pair in pairs)
    yield Claim(
        "A drop-in replacement without tuning: no new hyperparameter",
        "sec. 1, 6",
        "same rate for both",
        f"no new hyperparameter; CAdam's best rate is above Adam's in {higher} of {len(pairs)} cases "
        f"({' and '.join(evidence.MODELS)})",
        PARTLY if higher else CONFIRMED,
    )
