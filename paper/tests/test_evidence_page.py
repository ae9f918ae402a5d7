"""The pages evidence.md, rates.md and claims.md: their sentences, tables and figures follow from the archive."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from cadam.statistics.comparison import Comparison, Kind, compare
from cadam.statistics.intervals import Interval
from cadam_paper import claims, evidence, figure_files, published, stream_tables
from cadam_paper.harness.rate_pairs import Pair
from cadam_paper.harness.results import Results
from cadam_paper.harness.summary import Row
from cadam_paper.images import rates


def compared(kind: Kind, difference: float = 1.0, floor: float = 0.0) -> Row:
    values = {"difference": difference, "noise floor": floor}
    return Row("", "", "", "", 3, 0.0, verdict_kind=kind, values=values)


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [
        (["better", "better"], "confirmed"),
        (["better", "inconclusive"], "partly: better in 1 of 2, worse in 0"),
        (["better", "worse", "inconclusive"], "partly: better in 1 of 3, worse in 1"),
        (["worse", "inconclusive"], "not confirmed: worse in 1 of 2"),
        (["inconclusive"], "undecided"),
    ],
)
def test_a_claim_is_judged_by_all_of_its_comparisons(kinds: list[Kind], verdict: str) -> None:
    assert claims.judge([compared(kind) for kind in kinds]) == verdict


def test_a_gain_below_the_noise_floor_is_marked() -> None:
    assert claims.judge([compared("better", 1.0, 1.5)]) == "confirmed; below the noise floor"
    assert (
        claims.judge([compared("better", 1.0, 1.5), compared("better", 2.0, 1.5)])
        == "confirmed; 1 below the noise floor"
    )


def test_every_claim_has_a_verdict() -> None:
    found = claims.claims()
    assert len(found) == len({claim.claim for claim in found}) >= 25
    assert all(claim.verdict and claim.section and claim.paper for claim in found)
    assert all(claim.ours or claim.verdict == claims.PRIVATE for claim in found)


def test_findings_are_of_every_archived_study_on_data() -> None:
    found = evidence.findings()
    assert {each.unit for each in found} == {evidence.ACCURACY, evidence.AUC, evidence.GAUC}
    archived = [label for name, label in stream_tables.STREAMS.items() if published.is_complete(f"ab-{name}")]
    assert {each.study for each in evidence.unchanged_streams()} == set(archived)
    assert {each.condition for each in found if each.study == "VGG-16, CAdam"} == set(evidence.image_pairs())
    assert all(math.isfinite(each.difference.mean) and each.rates in evidence.RATE_SUFFIXES for each in found)


def test_each_stream_counts_once_and_prefers_the_own_best_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def finding(study: str, rates: str, mean: float) -> evidence.Finding:
        gap = Interval(mean, mean - 1, mean + 1, 3)
        return evidence.Finding(evidence.GAUC, study, "as it is", gap, "inconclusive", rates)

    found = (
        finding("a", evidence.OWN, 1),
        finding("a", evidence.FIRST_FIFTH, 9),
        finding("b", evidence.FIRST_FIFTH, 2),
    )
    monkeypatch.setattr(evidence, "findings", lambda: found)
    assert [each.difference.mean for each in evidence.unchanged_streams()] == [1, 2]


def test_a_difference_may_lose_its_significance_among_several_comparisons() -> None:
    def found(*gaps: float) -> Comparison:
        return compare(dict(enumerate(gaps)), dict.fromkeys(range(5), 0.0), names=("CAdam", "Adam"), better="higher")

    barely, clearly = found(0.1, 0.5, 1.0, 1.5, 1.9), found(0.8, 0.9, 1.0, 1.1, 1.2)
    assert barely.kind == clearly.kind == "better"
    assert published.is_significant_among(barely.difference, 1)
    assert not published.is_significant_among(barely.difference, 4)
    assert published.is_significant_among(clearly.difference, 4)


def test_switching_is_advised_on_images_only_if_a_gain_is_significant_among_all_comparisons() -> None:
    rows = [line.split(" | ") for line in evidence.switch_table()]
    every = evidence.adam_pairs()
    for label in evidence.image_pairs():
        (found,) = [specs for specs in rows if specs[3].startswith(f"{label}, each at its own best rate")]
        own = [pair.at_own_rates for (_, of), pair in every.items() if of == label]
        clear = [each.kind == "better" and published.is_significant_among(each.difference, len(every)) for each in own]
        assert (found[1] == "yes") == any(clear), label
        assert (found[1] == "no need to") == (not any(clear)), label
        unsure = [each.kind == "better" and not sure for each, sure in zip(own, clear, strict=True)]
        assert ("may be due to chance" in found[3]) == any(unsure), label
        assert all(f"{each.difference.mean:+.2f}" in found[2] for each in own)


def test_the_first_paragraph_gives_the_gains_under_sudden_and_continuous_shift() -> None:
    for model, name in evidence.MODELS.items():
        gains = [
            evidence.image_pairs(name)[label].at_own_rates.difference.mean for label in ("sudden 80°", "continuous 2°")
        ]
        assert f"{min(gains):.1f} to {max(gains):.1f} ({model})" in evidence.answer()[0]


def test_the_gains_of_sgdm_and_amsgrad_are_those_of_the_findings() -> None:
    """The findings contain the same intervals, but are computed in another way."""
    found = [
        each.difference
        for each in evidence.findings()
        if each.unit == evidence.ACCURACY and each.rates == evidence.OWN and each.treatment != "CAdam"
    ]
    gains = [each.mean for each in found if each.mean > 0]
    (text,) = evidence.other_optimizers()
    assert f"by {min(gains):.1f} to {max(gains):.1f} points" in text
    assert f"in {len(gains)} of {len(found)} cases" in text
    assert f"clear in {sum(each.low > 0 for each in found)} cases" in text


def test_windows_of_epochs_cover_all_epochs_and_the_last_window_is_the_last_epoch() -> None:
    for (model, label), pair in evidence.adam_pairs().items():
        runs = published.load(evidence.MODELS[model]).results.tests()
        here = runs.where(condition=str(rates.CONDITIONS[label]))

        def gap(metric: str, pair: Pair = pair, here: Results = here) -> float:
            arms = (pair.treatment, pair.baseline)
            means = [np.mean([*here.where(optimizer=x.arm, lr=x.best()).metric(metric).values()]) for x in arms]
            return float(means[0] - means[1])

        *parts, last = [
            evidence._compare_epochs(model, label, window).difference.mean for window in evidence.WINDOWS.values()
        ]
        assert np.mean(parts) == pytest.approx(gap("accuracy"), abs=1e-4)
        assert last == pytest.approx(gap("last_accuracy"), abs=1e-4)


def test_a_figure_of_other_numbers_is_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "docs/img/evidence-forest.svg"
    assert figure_files.is_current(path)
    monkeypatch.setitem(figure_files.FIGURES, path, (evidence.forest, lambda: ["| other |"]))
    assert not figure_files.is_current(path)


def test_a_figure_with_another_label_is_outdated(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "docs/img/mechanism.svg"
    assert figure_files.is_current(path)
    draw, numbers = figure_files.FIGURES[path]

    def draw_with_another_label() -> Figure:
        figure = draw()
        figure.axes[-1].set_xlabel("steps of the optimizer")
        return figure

    monkeypatch.setitem(figure_files.FIGURES, path, (draw_with_another_label, numbers))
    assert not figure_files.is_current(path)


def test_labels_of_an_image_are_its_texts_without_the_numbers_at_ticks() -> None:
    image = '<svg><text x="1">step</text><text>\u22121</text><text>0.5</text><g><text y="2">Adam</text></g></svg>'
    assert figure_files.labels(image) == ["Adam", "step"]


def test_the_fingerprint_of_a_figure_ignores_digits_that_depend_on_the_processor() -> None:
    def fingerprints(*texts: str) -> set[str]:
        return {figure_files.fingerprint([f"Interval({text})"]) for text in texts}

    assert len(fingerprints("70.49999999999999", "70.5")) == 1
    assert len(fingerprints("60.99999999999999", "61.0")) == 1
    assert len(fingerprints("-0.00", "+0.00", "-1.4e-17")) == 1
    assert len(fingerprints("70.5", "70.501", "-70.5")) == 3


def test_the_fingerprint_of_a_figure_covers_all_learning_rates() -> None:
    pair = evidence.image_pairs()["without change"]
    lowest, before = pair.baseline.rates[0], evidence.pair_numbers({"a": pair})
    assert lowest != pair.baseline.best()
    changed = {**pair.baseline.values, lowest: dict.fromkeys(pair.baseline.seeds, 1.0)}
    other = replace(pair, baseline=replace(pair.baseline, values=changed))
    assert evidence.pair_numbers({"a": other}) != before


def test_advice_needs_half_of_the_comparisons_after_correction_and_none_against() -> None:
    def found(*gaps: float) -> Comparison:
        return compare(dict(enumerate(gaps)), dict.fromkeys(range(3), 0.0), names=("CAdam", "Adam"), better="higher")

    ahead, behind, unclear = found(1, 1.01, 0.99), found(-1, -1.01, -0.99), found(-1, 0, 1)
    assert evidence.advise([ahead, unclear], 13) == "yes"
    assert evidence.advise([behind, unclear], 13) == "no"
    assert evidence.advise([ahead, unclear, unclear], 13) == evidence.advise([ahead, ahead, behind], 13) == "unclear"
    barely, barely_behind = found(1, 1.4, 0.6), found(-1, -1.4, -0.6)
    assert barely.kind == "better"
    assert barely_behind.kind == "worse"
    assert evidence.advise([barely, barely], 1) == "yes"
    assert evidence.advise([barely, barely], 13) == "unclear", "not clear after correction"
    assert evidence.advise([ahead, barely_behind], 13) == "unclear", "one is behind without correction"


def test_counts_are_corrected_for_the_number_of_comparisons() -> None:
    def gain(half_width: float) -> Comparison:
        gaps = dict(enumerate((1 - half_width / 2.5, 1.0, 1 + half_width / 2.5)))
        return compare(gaps, dict.fromkeys(range(3), 0.0), names=("CAdam", "Adam"), better="higher")

    sure, barely = gain(0.1), gain(0.9)
    assert barely.kind == "better"
    assert evidence.count_significant([sure, barely], among=1) == (2, 0)
    assert evidence.count_significant([sure, barely], among=13) == (1, 0)


def test_the_advice_on_learning_rates_follows_from_the_corrected_counts() -> None:
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1] for line in evidence.switch_table()}
    for situation, compare_at in (
        ("a learning rate that may be too high and cannot be tuned", evidence.compare_above),
        ("a learning rate that may be too low", evidence.compare_below),
    ):
        groups = {"images": compare_at(evidence.adam_pairs()), "clicks": compare_at(evidence.click_pairs())}
        count = sum(map(len, groups.values()))
        for name, comparisons in groups.items():
            ahead, behind = evidence.count_significant(comparisons, count)
            expected = "yes" if 2 * ahead >= len(comparisons) else "no" if 2 * behind >= len(comparisons) else "unclear"
            assert f"{expected} for {name}" in rows[situation]
