"""The report: all numbers come from the results, and a browser shows the file without errors."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from walks import TUNED, WALK, make_spec

from cadam.ab.report import palette
from cadam.statistics.comparison import Kind
from cadam_paper import catalog
from cadam_paper.harness import report, runner
from cadam_paper.harness.cache import Cache
from cadam_paper.harness.experiment import Plan
from cadam_paper.harness.results import Outcome
from cadam_paper.harness.runner import Request
from cadam_paper.harness.summary import Row, Summary

HEADING = report.Heading("Walks", ("Where they lead.",))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path / "specs")
    runner.run([Request(e, Plan("quick", 3)) for e in (WALK, TUNED)], cache, jobs=1, notify=lambda event: None)
    return cache


def page(cache: Cache, seeds: int = 3) -> str:
    return report.page([runner.read(cache, experiment, Plan("quick", seeds)) for experiment in (WALK, TUNED)], HEADING)


def test_the_same_results_give_the_same_page(cache: Cache) -> None:
    assert page(cache) == page(cache)


def test_a_changed_result_changes_the_page(cache: Cache) -> None:
    before = page(cache)
    spec = make_spec("CAdam", 0.1, 1)
    old = cache.load(WALK, spec)
    assert old is not None
    moved = {**old.outcome.metrics, "loss": old.outcome.metrics["loss"] + 3.0}
    walk = {"walk": -old.outcome.curves["walk"]}
    cache.save(WALK, dataclasses.replace(old, outcome=Outcome(moved, walk)))
    after = page(cache)
    mean = float(_verdict(before)) + 1.0
    assert float(_verdict(after)) == pytest.approx(mean, abs=2e-6)


def test_memory_is_the_total_if_runs_shared_a_device(cache: Cache) -> None:
    request = runner.read(cache, WALK, Plan("quick", 3))
    assert re.search(r"at most \d+ MB each;", report.page([request], HEADING))
    request.experiment = dataclasses.replace(WALK, side_by_side=lambda spec: spec.seed == 1)
    assert re.search(r"at most \d+ MB at once;", report.page([request], HEADING))


def _verdict(text: str) -> str:
    found = re.search(r"mean loss is ([\d.]+)\.", text)
    assert found
    return found[1]


def test_the_order_is_figure_verdict_table_command_versions(cache: Cache) -> None:
    section = page(cache).partition('<section id="walk">')[2].partition("</section>")[0]
    parts = [
        "<svg",
        "The paper:",
        "Measured:",
        "<details><summary>All numbers</summary>",
        "<table>",
        "cadam reproduce walk --quick",
        "torch 2",
    ]
    places = [section.index(part) for part in parts]
    assert places == sorted(places)


def test_an_incomplete_experiment_shows_no_numbers(cache: Cache) -> None:
    text = page(cache, seeds=4)
    section = text.partition('<section id="walk">')[2].partition("</section>")[0]
    assert "Incomplete: 6 of at least 8 runs" in section
    assert "cadam reproduce walk --quick --seeds 4" in section
    assert "<table>" not in section
    assert "mean loss is" not in section


class Ids(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src") and not (value or "").startswith(("#", "data:")):
                self.outside.append(value or "")
            if name in ("href", "xlink:href") and (value or "").startswith("#"):
                self.references.append((value or "")[1:])


def test_ids_are_unique_and_nothing_is_fetched(cache: Cache) -> None:
    text = page(cache)
    parser = Ids()
    parser.feed(text)
    assert len(parser.ids) == len(set(parser.ids))
    assert set(parser.references) <= set(parser.ids)
    assert parser.outside == []
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(parser.ids)
    assert "<script" not in text


def test_figures_use_the_colors_of_the_page(cache: Cache) -> None:
    drawing = page(cache).partition("<figure>")[2].partition("</svg>")[0]
    assert f"var(--c{palette.CADAM[1:]})" in drawing
    assert f"var(--c{palette.PAPER[1:]})" in drawing
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) == set(), "a colour that stays the same on a dark page"


def test_texts_of_experiments_are_escaped(cache: Cache) -> None:
    wicked = dataclasses.replace(WALK, title="<b>", notes=["<script>alert(1)</script>"])
    text = report.page([runner.read(cache, wicked, Plan("quick", 3))], HEADING)
    assert "<script>" not in text
    assert "&lt;b&gt;" in text


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_browser_shows_the_page_without_errors(cache: Cache, tmp_path: Path, colours: str) -> None:
    file, shot = tmp_path / "report.html", tmp_path / "shot.png"
    file.write_text(page(cache), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if colours == 'dark' else 1}"
    common = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", scheme]
    call = [str(BROWSER), *common, "--enable-logging=stderr", "--window-size=800,1200"]
    seen = subprocess.run([*call, f"--screenshot={shot}", str(file)], capture_output=True, text=True, timeout=60)
    assert seen.returncode == 0
    assert "CONSOLE" not in seen.stderr
    from matplotlib.image import imread

    image = imread(shot)
    corner, total = image[2, 2, :3].mean(), image.std()
    assert (corner > 0.9) if colours == "light" else (corner < 0.15)
    assert total > 0.02, "an empty page"
    built = subprocess.run([*call, "--dump-dom", str(file)], capture_output=True, text=True, timeout=60)
    assert built.stdout.count("<figure>") == 2
    assert built.stdout.count("<table>") == 2


def test_measures_are_defined_before_they_are_used(cache: Cache) -> None:
    """The explanation is in the section, above the verdict, and the notes are folded."""
    told = dataclasses.replace(WALK, measure="A loss: less is better.", notes=["A slip."])
    text = report.page([runner.read(cache, told, Plan("quick", 3))] * 2, HEADING)
    overview, _, section = text.partition("<section")
    assert "Where they lead." in overview
    assert section.index("A loss: less is better.") < section.index("Measured:")
    assert re.search(r"<details[^>]*><summary>[^<]+</summary>\s*<ul><li>A slip\.</li></ul></details>", section)
    assert "cost" not in section.partition("<table>")[2].partition("</table>")[0]


@pytest.mark.parametrize("name", catalog.EXPERIMENTS)
def test_every_experiment_explains_its_measures(name: str) -> None:
    assert catalog.find(name).measure.endswith(".")


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_on_a_phone_a_wide_figure_can_be_scrolled(cache: Cache, tmp_path: Path) -> None:
    """Only figures are wider than the window; they scroll, and a hint says so."""
    file = tmp_path / "report.html"
    ask = (
        "<script>addEventListener('load',()=>{const box=document.querySelector('figure div'),"
        "hint=getComputedStyle(document.querySelector('.hint')).display;"
        "document.title=[document.documentElement.scrollWidth<=innerWidth,box.scrollWidth>box.clientWidth,hint]})"
        "</script>"
    )
    seen = {}
    for width in (500, 1200):  # headless Chromium has no narrower window
        file.write_text(page(cache) + ask, encoding="utf-8")
        call = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
        call += [f"--window-size={width},800", "--dump-dom", str(file)]
        built = subprocess.run(call, capture_output=True, text=True, timeout=60)
        seen[width] = re.findall(r"<title>(.*?)</title>", built.stdout)[0]
    assert seen == {500: "true,true,block", 1200: "true,false,none"}


def test_the_page_begins_with_verdicts_that_lead_to_their_sections(cache: Cache) -> None:
    compared = dataclasses.replace(WALK, summary=lambda results: Summary("It is.", ROWS))
    requests = [runner.read(cache, experiment, Plan("quick", 3)) for experiment in (compared, TUNED)]
    text = report.page(requests, HEADING)
    overview = text.partition("<section")[0]
    first = overview.partition("<tbody>")[2].partition("</tr>")[0]
    assert re.findall(r'<span class="chip (\w+)">([^<]+)</span>', first) == [
        ("better", "1 better"),
        ("inconclusive", "1 undecided"),
    ]
    assert '<a href="#walk">' in first
    assert re.findall(r'<g class="(\w+)"', first) == ["better", "inconclusive"], (
        "the row by log loss is not the main one"
    )
    low, high = (float(x) for x in re.findall(r'<line x1="([\d.]+)" x2="([\d.]+)" y1="6"', first)[0])
    assert (low, high) == pytest.approx((100 + 95 / 4, 100 + 3 * 95 / 4), abs=0.06), "0 is at 100, 4 at 195"
    assert overview.index("<nav>") < overview.index("<h1>")


def row(what: str, low: float, high: float, kind: Kind) -> Row:
    values = {"difference": (low + high) / 2, "low": low, "high": high}
    return Row(what, "", "", f"[{low}, {high}]", 3, 1.0, kind, values=values, verdict_kind=kind)


ROWS = [
    row("clean: accuracy", 1.0, 3.0, "better"),
    row("clean: log loss", -9.0, 9.0, "inconclusive"),
    row("noise: accuracy", -4.0, 4.0, "inconclusive"),
]


def test_a_page_of_one_experiment_has_no_table_of_contents(cache: Cache) -> None:
    text = report.page([runner.read(cache, WALK, Plan("quick", 3))], HEADING)
    assert "<nav>" not in text
    assert 'class="overview"' not in text
