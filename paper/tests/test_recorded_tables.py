"""The tables that pages take from text files of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadam_paper import recorded_tables

TEXT = """python benchmarks/any.py, one seed.

| stream | a | b |
| --- | --- | --- |
| one | 0.5 (12) | -0.1% (0.016) |
| two | 2.5854 (never) | 3 |

| another | table |
| --- | --- |
| 1 | 2 |
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "results" / "cpu"
    folder.mkdir(parents=True)
    monkeypatch.setattr(recorded_tables, "ROOT", tmp_path)
    return folder


def test_a_page_shows_columns_of_the_first_table_without_remarks(root: Path) -> None:
    (root / "any.txt").write_text(TEXT)
    assert recorded_tables.table("any.txt", {"stream": "log loss", "b": "arm"}, {"two": "the second"}) == [
        "| log loss | arm |",
        "| --- | --- |",
        "| one | -0.1% |",
        "| the second | 3 |",
    ]


def test_a_file_without_a_table_is_named(root: Path) -> None:
    (root / "any.txt").write_text("nothing")
    with pytest.raises(ValueError, match=r"any\.txt has no table"):
        recorded_tables.read("any.txt")


def test_a_row_with_a_missing_cell_is_refused(root: Path) -> None:
    (root / "any.txt").write_text(TEXT.replace("| 2.5854 (never) ", ""))
    with pytest.raises(ValueError, match="zip"):
        recorded_tables.read("any.txt")


def test_the_table_of_defaults_marks_the_three_streams_for_tuning() -> None:
    rows = recorded_tables.defaults()[2:]
    assert len(rows) == 13
    assert [row.split(" | ")[0] for row in rows if "(tuning)" in row] == [
        "| flights (tuning)",
        "| clicks (tuning)",
        "| drift (tuning)",
    ]


def test_the_costs_count_the_runs_that_the_files_describe() -> None:
    folder = Path(__file__).parents[2] / "results" / "cpu"
    defaults, tables = ((folder / name).read_text() for name in ("defaults.txt", "confidence_for_tables.txt"))
    assert "seed 0" in defaults
    learners = recorded_tables.defaults()[0].count("|") - 2
    assert f"{13 * learners} runs (13 streams, {learners} learners, one seed)" in recorded_tables.defaults_cost()[0]
    assert "three seeds, each arm at the best of seven fixed rates" in tables
    assert (
        "Cost: 630 runs (5 streams, 6 arms, 7 learning rates, 3 seeds"
        in recorded_tables.confidence_for_tables_cost()[0]
    )


def test_the_sentence_on_the_lowest_losses_counts_the_table() -> None:
    rows = [row.strip("| ").split(" | ") for row in recorded_tables.defaults()[2:] if "(tuning)" not in row]
    lowest = sum(float(cells[1]) < min(map(float, cells[3:])) for cells in rows)
    page = (Path(__file__).parents[2] / "docs" / "streams.md").read_text()
    assert f"has the lowest log loss on {lowest} of ten streams" in page
    assert len(rows) == 10
