from __future__ import annotations

from cadam_paper import controls, evidence, guide, masking_page
from cadam_paper.masking import RATES


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


def test_the_first_table_of_the_evidence_page_answers_four_situations() -> None:
    rows = guide.table()[2:]
    assert len(rows) == 4
    for row, subject in zip(rows, ("language model", "new items every day", "events", "images"), strict=True):
        assert subject in row
        assert row.count("|") == 5
        assert "then" in row.split("|")[4], "the learning rate to try first"


def test_a_study_names_its_runs_and_cost() -> None:
    (sentence,) = evidence.study_cost("language-models")
    assert sentence.startswith("Cost: 278 runs, ")
    assert "GPU minutes" in sentence
    assert "CPU hours" in evidence.study_cost("masking")[0]
