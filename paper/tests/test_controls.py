from __future__ import annotations

from pathlib import Path

import pytest
from simulated_controls import SimulatedControls

from cadam.statistics.comparison import Better
from cadam.statistics.intervals import Interval
from cadam_paper import controls, evidence, guide, masking_page, published
from cadam_paper.harness import runner
from cadam_paper.harness.experiment import Experiment, Plan
from cadam_paper.masking import RATES

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence.md"
CONTROLS = ("fig-rates-clicks-controls", "fig-rates-controls", "fig-rates-resnet-controls")
"""The experiments on control arms that need a GPU."""


def test_every_study_has_adam_and_cadam_and_missing_controls_are_dashes() -> None:
    lines = controls.lines()
    assert all(controls.CADAM in line.differences for line in lines)
    table = controls.table()
    assert len(table) == 2 + len(lines)
    dashes = sum(row.count("| – ") for row in table)
    assert dashes == sum(len(controls.ARMS) - len(line.differences) for line in lines)
    with_controls = [line for line in lines if len(line.differences) == len(controls.ARMS)]
    assert any(line.study.startswith("GPT 3M") for line in with_controls)


def test_the_page_on_the_mechanism_has_every_task_and_rate() -> None:
    assert len(masking_page.harm_table()) == 2 + 2 * 5
    assert len(masking_page.row_table()) == 2 + len(RATES)
    assert len(masking_page.answer()) == 5


def test_the_first_table_of_the_evidence_page_answers_five_situations() -> None:
    rows = guide.table()[2:]
    subjects = ("language model", "new items every day", "events", "images", "many tasks in turn")
    for row, subject in zip(rows, subjects, strict=True):
        assert subject in row
        assert row.count("|") == 5
        assert "then" in row.split("|")[4], "the learning rate to try first"


def test_the_sentence_before_the_table_names_the_studies_without_control_arms() -> None:
    check_the_sentence()


def check_the_sentence() -> None:
    (sentence,) = controls.missing()
    lacking = {each.study: each for each in controls.lines() if len(each.differences) < len(controls.ARMS)}
    assert sentence.startswith(f"{len(lacking)} of {len(controls.lines())} rows")
    on_gpu, partly = 0, 0
    for name, each in lacking.items():
        if each.from_controls:
            partly += 1
            assert set(controls.ARMS) - each.differences.keys() == {controls.LONG}
        elif name.startswith(tuple(controls.ON_GPU)):
            on_gpu += 1
            assert set(each.differences) == {controls.CADAM}, "all three control arms are missing"
        else:
            assert set(each.differences) == {controls.CADAM}
            assert name.removeprefix(controls.STREAM_PREFIX) in sentence
    assert (f"The {on_gpu} " in sentence) == (on_gpu > 0)
    assert (f" {partly} row{'s lack' if partly > 1 else ' lacks'} only {controls.LONG}" in sentence) == (partly > 0)


def test_a_condition_has_control_arms_as_soon_as_all_its_runs_are_archived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if other conditions of the experiment are incomplete."""
    experiments = {name: SimulatedControls(name) for name in CONTROLS}
    clicks, vgg, _ = experiments.values()

    class Archive:
        def plan(self, experiment: Experiment) -> Plan:
            return experiments[experiment.name].request.plan

    def load(name: str) -> runner.Request:
        return experiments[name].request if name in experiments else published.load(name)

    monkeypatch.setattr(controls, "archive", Archive)
    monkeypatch.setattr(controls, "load", load)

    def with_controls() -> list[str]:
        check_the_sentence()
        on_gpu = tuple(controls.ON_GPU)
        return [each.study for each in controls.lines() if each.from_controls and each.study.startswith(on_gpu)]

    before = {each.study: each for each in controls.lines()}
    assert with_controls() == []
    vgg.compute()
    clicks.compute(but=1)
    assert with_controls() == ["VGG-16, sudden 80°"]
    (first,) = (each for each in controls.lines() if each.study == "VGG-16, sudden 80°")
    assert set(first.differences) == {controls.CADAM, controls.CAUTIOUS, controls.RANDOM}
    assert first.differences[controls.CADAM] == before[first.study].differences[controls.CADAM]
    assert first.differences[controls.CAUTIOUS].count == 3
    assert first.from_controls[controls.CAUTIOUS].mean == pytest.approx(19, abs=2)
    clicks.compute()
    assert with_controls() == ["VGG-16, sudden 80°", "DeepFM, generated clicks, drift, gradual"]
    for experiment in experiments.values():
        while experiment.request.missing:
            experiment.compute()
    assert len(with_controls()) == 13
    assert "built" not in controls.missing()[0]
    complete = [each for each in controls.lines() if each.study.startswith(controls.CLICKS)]
    assert all(len(each.differences) == len(controls.ARMS) for each in complete)


def line(better: Better, **differences: float) -> controls.Line:
    """A study of ten seeds whose intervals have a half-width of 1."""
    intervals = {arm: Interval(mean, mean - 1, mean + 1, 10) for arm, mean in differences.items()}
    against = {arm: interval for arm, interval in intervals.items() if arm != controls.CADAM}
    return controls.Line("study", "unit", 0.0, intervals, against, better)


def test_clear_differences_are_counted_by_direction_before_and_after_correction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    studies = [line("higher", CAdam=9, cautious=1.1), line("lower", CAdam=9, cautious=-9), line("lower", CAdam=0.5)]
    monkeypatch.setattr(controls, "lines", lambda: studies)
    _, _, _, _, cadam, cautious, *names = controls.answer()
    assert "- cautious better than Adam: study" in names
    assert "- random mask better than Adam: none" in names
    assert "- CAdam better than cautious: study" in names
    assert cadam == "| CAdam | 2 | 1 (1) | 1 (1) |  |  |", "the third study has no control arm"
    assert cautious == "| cautious | 2 | 1 (2) | 0 (0) | 1 (2) | 0 (0) |"


def test_every_published_control_arm_is_counted() -> None:
    studies = [each for each in controls.lines() if each.from_controls]
    rows = [row.split(" | ") for row in controls.answer()[4:8]]
    assert controls.answer()[0].startswith(f"{len(studies)} studies ")
    for row, arm in zip(rows, controls.ARMS, strict=True):
        assert int(row[1]) == sum(arm in each.differences for each in studies)
        bold = sum(
            "**" in published.format_interval(each.differences[arm]) for each in studies if arm in each.differences
        )
        assert sum(int(cell.partition("(")[2].rstrip(")")) for cell in row[2:4]) == bold


def test_the_conclusions_on_the_masks_follow_from_the_counts() -> None:
    studies = [each for each in controls.lines() if each.from_controls]
    for each in studies:
        if controls.LONG in each.differences:
            side = 1 if each.better == "higher" else -1
            assert side * each.differences[controls.LONG].mean < 0, "a longer momentum gains nowhere"
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ") for row in controls.answer()[4:8]}
    assert rows[controls.CAUTIOUS][5].startswith("0 "), "the rescaled mask is clearly ahead of CAdam nowhere"
    answer = controls.answer()
    assert "- CAdam better than cautious: none" in answer, "no study separates the two masks"
    assert "- random mask better than Adam: 100,000 film ratings" in answer
    (over_random,) = [each for each in answer if each.startswith("- CAdam better than random mask: ")]
    assert over_random.endswith("; flights; 100,000 film ratings; forest cover; baseball")
    assert "clicks" not in over_random
    clicks = {each.study.rpartition(", ")[2]: each for each in studies if "generated clicks" in each.study}
    assert len(clicks) == 5
    gains = clicks["gradual"].differences
    assert f"{gains[controls.RANDOM].mean:.2f} of {gains[controls.CADAM].mean:.2f} points" in EVIDENCE.read_text()
    assert gains[controls.CADAM].mean == max(each.differences[controls.CADAM].mean for each in clicks.values())
    assert sum(each.study.startswith(controls.STREAM_PREFIX) for each in studies) == 5
    for each in studies:
        if each.study.endswith(("film ratings", "electricity prices")):
            assert each.differences[controls.RANDOM].mean > 0.5 * each.differences[controls.CADAM].mean


def test_a_study_names_its_runs_and_cost() -> None:
    (sentence,) = evidence.study_cost("language-models")
    assert sentence.startswith("Cost: 278 runs, ")
    assert "GPU minutes" in sentence
    assert "CPU hours" in evidence.study_cost("masking")[0]
