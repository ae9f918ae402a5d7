"""The numbers on the pages and in the reports are those of the archive."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from markupsafe import escape

from cadam.statistics import comparison
from cadam_paper import figure_files, judged_streams, pages, published, recorded_tables
from cadam_paper.harness import report
from cadam_paper.harness.page import page_templates
from cadam_paper.harness.results import Results
from cadam_paper.harness.summary import Row

ROOT = Path(__file__).parents[2]

IMAGES = re.findall(r'<section id="([^"]+)">', (ROOT / "docs" / "reports" / "images.html").read_text())
REPORTS = [
    pytest.param(page, name, id=f"{page.name}-{name}")
    for page in sorted((ROOT / "docs" / "reports").glob("*.html"))
    for name in re.findall(r'<section id="([^"]+)">', page.read_text())
]


@pytest.mark.parametrize(("page", "name"), REPORTS)
def test_reports_have_the_numbers_of_the_archive(page: Path, name: str) -> None:
    """The table and the verdict of a report are computed again from the archive."""
    request = published.load(name)
    text = page.read_text().partition(f'<section id="{name}">')[2].partition("</section>")[0]
    if not request.complete:
        assert f'<p class="warning">{escape(report.describe_state(request))}' in text
        return
    summary = request.experiment.summary(request.results)
    macros = page_templates().get_template("macros.html.j2").module
    assert str(macros.table(summary.rows)) in text  # type: ignore[attr-defined]
    assert f"<b>Measured:</b> {escape(summary.verdict)}</p>" in text


INTERVAL = re.compile(r"[+-]\d+\.\d\d \[[+-]\d+\.\d\d, [+-]\d+\.\d\d\]")


def in_brackets(values: Mapping[str, float]) -> str:
    return "{difference:+.2f} [{low:+.2f}, {high:+.2f}]".format(**values)


def rows_of(*names: str) -> list[Row]:
    requests = [published.load(name) for name in names]
    return [row for request in requests for row in request.experiment.summary(request.results).rows]


def across_rates() -> set[str]:
    """Return the differences on the page that no experiment contains, because they compare different learning rates."""
    plan = published.load("fig-image-noise").plan
    archived = published.archive().study("images").results()
    tests = Results([result for result in archived if result.spec.seed in plan.test_seeds()])

    def runs(model: str, condition: str, optimizer: str, lr: float, metric: str = "accuracy") -> dict[int, float]:
        return tests.where(model=model, condition=condition, optimizer=optimizer, lr=lr).metric(metric)

    pairs = []
    for model in ("VGG-16", "ResNet-18", "DenseNet-121"):
        pairs.append((runs(model, "clean", "Adam", 3e-4), runs(model, "clean", "Adam", 1e-4)))
    for model, lr in (("VGG-16", 1e-4), ("VGG-16", 3e-4), ("ResNet-18", 1e-4), ("DenseNet-121", 1e-4)):
        noisy = runs(model, "noise 40", "CAdam", lr, "last_accuracy")
        pairs.append((noisy, runs(model, "clean", "Adam", 3e-4, "last_accuracy")))
    for condition in ("continuous 2", "noise 40"):
        pairs.append((runs("VGG-16", condition, "CAdam", 3e-4), runs("VGG-16", condition, "CAdam", 1e-4)))
    differences = [comparison.compare(a, b, names=("a", "b"), better="higher").difference for a, b in pairs]
    return {in_brackets({"difference": d.mean, "low": d.low, "high": d.high}) for d in differences}


@pytest.mark.parametrize(
    ("page", "studies", "more"),
    [
        ("docs/images.md", IMAGES, across_rates),
        ("docs/ctr.md", ["tab-criteo", "tab-criteo-noise", "tab-ablation-criteo"], set),
    ],
    ids=["images", "ctr"],
)
def test_intervals_in_the_text_come_from_the_archive(
    page: str, studies: Sequence[str], more: Callable[[], set[str]]
) -> None:
    text = " ".join(pages.MARKED.sub("", (ROOT / page).read_text()).split())
    intervals = set(INTERVAL.findall(text))
    assert intervals
    rows = {in_brackets(row.values) for row in rows_of(*studies) if "difference" in row.values}
    assert intervals <= rows | more()


ANY_INTERVAL = re.compile(r"[+-]\d+\.\d+%? \[[+-]\d+\.\d+%?, [+-]\d+\.\d+%?\]")


@pytest.mark.parametrize(
    "page", ["language_models", "continual", "mechanism", "streams", "evidence", "rates", "claims"]
)
def test_intervals_of_the_other_pages_are_all_generated(page: str) -> None:
    """The text around the generated tables has no intervals, so that all of them are those of the archive."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    assert pages.MARKED.search(text)
    assert not ANY_INTERVAL.findall(" ".join(pages.MARKED.sub("", text).split()))


def test_numbers_in_the_text_on_streams_come_from_the_results() -> None:
    text = " ".join((ROOT / "docs" / "streams.md").read_text("utf-8").split())
    actions = [result["verdicts"][0]["action"] for result in judged_streams.verdicts().values()]
    assert (len(actions), actions.count("switch"), actions.count("stay")) == (8, 6, 0)
    assert "decides six of eight streams for CAdam" in text
    assert "and none for Adam" in text
    leads = [
        -period for period in judged_streams.verdicts("evidence_streams_full.json")["forest"]["pairs"][0]["periods"]
    ]
    assert len(leads) == 20
    first, later = math.floor(min(leads[:3])), math.ceil(max(leads[3:]))
    assert f"at least {first}% in the first three of 20 periods, and at most {later}% in all later ones" in text
    rows = {row["stream"]: row for row in recorded_tables.read("defaults.txt")}["baseball"]
    loss, *others = (float(rows[name].split()[0]) for name in ("cadam run", "VW", "VW, FTRL", "river", "river, FTRL"))
    assert f"On baseball the lead is {min(others) - loss:.4f}." in text


def test_numbers_in_the_text_on_the_mechanism_come_from_the_results() -> None:
    text = " ".join((ROOT / "docs" / "mechanism.md").read_text("utf-8").split())
    rows = recorded_tables.read("confidence_for_tables.txt")
    cadam, without = ([float(row[arm].split("%")[0]) for row in rows] for arm in ("CAdam", "tables without confidence"))
    assert len(rows) == 5
    assert max(cadam) < 0
    assert "was ahead of Adam on all five" in text
    late, exact = ([float(row[a].split("%")[0]) for row in rows] for a in ("confidence_after=100", "exact updates"))
    assert all(a < b for a, b in zip(cadam, without, strict=True))
    assert "and ahead of models whose tables have no mask" in text
    assert sum(a < b - 0.05 for a, b in zip(cadam, late, strict=True)) == 3
    assert all(a < b + 0.05 for a, b in zip(cadam, late, strict=True))
    assert "gains less than the full mask on three streams" in text
    assert sum(a < b for a, b in zip(exact, cadam, strict=True)) == 4
    assert "gain more than lazy ones** on four streams" in text
    turnover = judged_streams.verdicts()["turnover"]
    assert turnover["events"] == 600_000
    assert -0.1 < turnover["pairs"][0]["difference"] < 0
    assert "On 600,000 events of the first stream, the gain of CAdam over Adam is below 0.1%" in text


def test_noise_floors_in_the_text_come_from_the_archive() -> None:
    floors = set(re.findall(r"±\d+\.\d\d", (ROOT / "docs" / "images.md").read_text()))
    assert floors
    assert floors <= {f"±{row.values['noise floor']:.2f}" for row in rows_of(*IMAGES) if "noise floor" in row.values}


def test_tables_on_pages_are_those_of_the_archive(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "generated", "agrees"),
    [
        ("| +0.13 | 6 of 8 |", "| +0.14 | 6 of 8 |", True),
        ("| -0.00 |", "| +0.00 |", True),
        ("| +0.13 |", "| +0.15 |", False),
        ("| +0.13 |", "| -0.13 |", False),
        ("| 0.1 |", "| 0.10 |", False),
        ("| 6 of 8 |", "| 7 of 8 |", False),
        ("| 0.13 |", "| **0.13** |", False),
        ("| 0.13 |", "| 0.13 |\n| 0.13 |", False),
    ],
)
def test_only_the_last_digit_of_a_decimal_number_may_depend_on_the_processor(
    page: str, generated: str, agrees: bool
) -> None:
    assert pages.agree(page, generated) == agrees


def test_check_prints_the_lines_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"ROOT": tmp_path, "PAGES": ["page.md"], "TABLES": {"numbers": lambda: ["| 1.28 |"]}}.items():
        monkeypatch.setattr(pages, name, value)
    monkeypatch.setattr(figure_files, "FIGURES", {})
    page = tmp_path / "page.md"
    page.write_text("Text.\n<!-- table: numbers -->\n| 1.24 |\n<!-- end -->\n")
    assert pages.main(["--check"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert {"-| 1.24 |", "+| 1.28 |"} <= set(lines)
    assert "Text." not in "".join(lines)
    assert pages.main([]) == pages.main(["--check"]) == 0


def test_the_command_reference_does_not_depend_on_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cadam.cli.commands.entry_points", lambda **selection: [])
    assert "\n".join(pages.TABLES["commands"]()) in (ROOT / "docs" / "cli.md").read_text("utf-8")


def test_the_page_lists_runs_as_unknown_exactly_if_claims_lack_them() -> None:
    page, claims = ((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("evidence", "claims"))
    rows = [row.split(" | ") for row in claims.splitlines() if row.startswith("| ") and " | table " in row]
    unknown = page.partition("## What is not known")[2].partition("## Limits")[0]
    for command, table in {"tab-criteo ": 1, "tab-criteo-noise ": 2, "tab-ablation-criteo ": 4}.items():
        verdicts = [row[-1] for row in rows if f"table {table}" in row[1] and "Criteo" in row[0]]
        assert verdicts, table
        assert any("not run" in verdict for verdict in verdicts) == (command in unknown), command
