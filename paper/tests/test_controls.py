from __future__ import annotations

from cadam_paper import controls, masking_page
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
