"""The page of evidence: what it says follows from the results, and what is drawn is what the archive has."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cadam.ab.results import Results
from cadam.ab.summary import Row
from cadam.statistics.comparison import Comparison, Kind, compare
from cadam.statistics.intervals import Interval
from cadam_paper import claims, evidence, published, stream_tables
from cadam_paper.harness.rate_pairs import Pair
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
    assert claims.judged([compared(kind) for kind in kinds]) == verdict


def test_a_gain_below_the_noise_floor_is_said_to_be_one() -> None:
    assert claims.judged([compared("better", 1.0, 1.5)]) == "confirmed; below the noise floor"
    assert (
        claims.judged([compared("better", 1.0, 1.5), compared("better", 2.0, 1.5)])
        == "confirmed; 1 below the noise floor"
    )


def test_every_claim_has_a_verdict_and_what_cannot_be_tested_says_so() -> None:
    found = claims.claims()
    assert len(found) == len({claim.claim for claim in found}) >= 25
    assert all(claim.verdict and claim.place and claim.paper for claim in found)
    assert all(claim.ours or claim.verdict == claims.PRIVATE for claim in found)


def test_findings_are_of_every_archived_study_on_data() -> None:
    found = evidence.findings()
    assert {each.unit for each in found} == {evidence.ACCURACY, evidence.AUC, evidence.GAUC}
    archived = [label for name, label in stream_tables.STREAMS.items() if published.is_archived(f"ab-{name}")]
    assert {each.study for each in evidence.as_they_are()} == set(archived)
    assert {each.condition for each in found if each.study == "VGG-16, CAdam"} == set(evidence.image_pairs())
    assert all(math.isfinite(each.difference.mean) and each.rates in evidence.CHOSEN for each in found)


def test_each_stream_counts_once_at_its_own_best_rates_where_those_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def finding(study: str, rates: str, mean: float) -> evidence.Finding:
        gap = Interval(mean, mean - 1, mean + 1, 3)
        return evidence.Finding(evidence.GAUC, study, "as it is", gap, "inconclusive", rates)

    found = (
        finding("a", evidence.OWN, 1),
        finding("a", evidence.FIRST_FIFTH, 9),
        finding("b", evidence.FIRST_FIFTH, 2),
    )
    monkeypatch.setattr(evidence, "findings", lambda: found)
    assert [each.difference.mean for each in evidence.as_they_are()] == [1, 2]


def test_a_difference_that_holds_alone_need_not_hold_among_several() -> None:
    def found(*gaps: float) -> Comparison:
        return compare(dict(enumerate(gaps)), dict.fromkeys(range(5), 0.0), names=("CAdam", "Adam"), better="higher")

    barely, clearly = found(0.1, 0.5, 1.0, 1.5, 1.9), found(0.8, 0.9, 1.0, 1.1, 1.2)
    assert barely.kind == clearly.kind == "better"
    assert evidence.holds_among(barely, 1)
    assert not evidence.holds_among(barely, 4)
    assert evidence.holds_among(clearly, 4)


def test_only_what_holds_among_all_comparisons_on_images_is_a_yes() -> None:
    rows = [line.split(" | ") for line in evidence.switch()]
    every = evidence.adam_pairs()
    for label in evidence.image_pairs():
        (found,) = [specs for specs in rows if specs[3].startswith(f"{label}, each at its own best rate")]
        own = [pair.own for (_, of), pair in every.items() if of == label]
        clear = [each.kind == "better" and evidence.holds_among(each, len(every)) for each in own]
        assert (found[1] == "yes") == any(clear), label
        assert (found[1] == "no need to") == (not any(clear)), label
        unsure = [each.kind == "better" and not sure for each, sure in zip(own, clear, strict=True)]
        assert ("may be chance" in found[3]) == any(unsure), label
        assert all(f"{each.difference.mean:+.2f}" in found[2] for each in own)


def test_the_first_sentence_speaks_of_images_that_turn_alone() -> None:
    for model, name in evidence.MODELS.items():
        gains = [evidence.image_pairs(name)[label].own.difference.mean for label in ("sudden 80°", "continuous 2°")]
        assert f"{min(gains):.1f} to {max(gains):.1f} ({model})" in evidence.answer()[0]


def test_the_gains_of_sgdm_and_amsgrad_are_counted() -> None:
    """Against the findings, which have the same intervals by another way."""
    found = [
        each.difference
        for each in evidence.findings()
        if each.unit == evidence.ACCURACY and each.rates == evidence.OWN and each.treatment != "CAdam"
    ]
    gains = [each.mean for each in found if each.mean > 0]
    (said,) = evidence.others()
    assert f"by {min(gains):.1f} to {max(gains):.1f} points" in said
    assert f"in {len(gains)} of {len(found)} cases" in said
    assert f"Clearly so in {sum(each.low > 0 for each in found)}," in said


def test_windows_of_epochs_make_up_the_mean_over_all_and_the_last_one_is_the_last_epoch() -> None:
    for (model, label), pair in evidence.adam_pairs().items():
        runs = published.request(evidence.MODELS[model]).results.tests()
        here = runs.where(condition=str(rates.CONDITIONS[label]))

        def gap(metric: str, pair: Pair = pair, here: Results = here) -> float:
            arms = (pair.treatment, pair.baseline)
            means = [np.mean([*here.where(optimizer=x.arm, lr=x.best()).metric(metric).values()]) for x in arms]
            return float(means[0] - means[1])

        *parts, last = [evidence._over(model, label, window).difference.mean for window in evidence.WINDOWS.values()]
        assert np.mean(parts) == pytest.approx(gap("accuracy"), abs=1e-4)
        assert last == pytest.approx(gap("last_accuracy"), abs=1e-4)


def test_a_figure_of_other_numbers_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "docs/img/evidence-forest.png"
    assert evidence.is_current(path)
    monkeypatch.setitem(evidence.FIGURES, path, (evidence.forest, lambda: ["| other |"]))
    assert not evidence.is_current(path)


def test_a_figure_shows_runs_away_from_the_best_rates_too() -> None:
    pair = evidence.image_pairs()["without change"]
    lowest, before = pair.baseline.rates[0], evidence.drawn({"a": pair})
    assert lowest != pair.baseline.best()
    changed = {**pair.baseline.values, lowest: dict.fromkeys(pair.baseline.seeds, 1.0)}
    other = replace(pair, baseline=replace(pair.baseline, values=changed))
    assert evidence.drawn({"a": other}) != before


def test_advice_needs_most_comparisons_and_none_against() -> None:
    def found(*gaps: float) -> Comparison:
        return compare(dict(enumerate(gaps)), dict.fromkeys(range(3), 0.0), names=("CAdam", "Adam"), better="higher")

    ahead, behind, unclear = found(1, 1.1, 0.9), found(-1, -1.1, -0.9), found(-1, 0, 1)
    assert evidence.advised([ahead, ahead, unclear]) == "yes"
    assert evidence.advised([behind, behind, unclear]) == "no"
    assert evidence.advised([ahead, unclear]) == evidence.advised([ahead, ahead, behind]) == "unclear"
