"""The documentation is true: its code runs, its links lead somewhere, its numbers come out."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import pytest
import torch

import cadam
from cadam.statistics import comparison
from cadam.trials import report
from cadam.trials.experiment import Results, Row
from cadam_paper import pages, published
from tests.documented import MARKS, NOTEBOOKS, PAGES, ROOT, Block, blocks, has_work, run
from tests.written import AVOIDED, anchors, links, prose, sentences, words

NOT_RUN = [block for page in PAGES for block in blocks(page) if block.elsewhere]


@pytest.mark.parametrize(
    "page", [page for page in (*PAGES, *NOTEBOOKS) if has_work(page, slow=False)], ids=lambda page: page.name
)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    done = run(page, tmp_path, slow=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if has_work(page, slow=True)], ids=lambda page: page.name)
def test_every_block_of_the_page_runs_slow_ones_too(page: Path, tmp_path: Path) -> None:
    done = run(page, tmp_path, slow=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.name, marks=pytest.mark.skip(reason=f"{block.name}: {block.elsewhere}"))
        for block in NOT_RUN
    ],
)
def test_blocks_that_are_not_run_are_listed_with_a_reason(block: Block) -> None:
    """Never called: the list of skipped tests is the list of these blocks."""


def test_marks_of_blocks_are_known_and_lead_somewhere() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.marks.keys() <= set(MARKS), block.name
            assert block.elsewhere != "", f"{block.name}: why is it skipped?"
            if "tested in" in block.marks:
                assert (ROOT / block.marks["tested in"]).exists(), block.name
    assert not [page for page in PAGES if re.search(r"^```py$|^```bash$|^```shell$", page.read_text(), re.MULTILINE)]


def test_a_block_that_fails_fails_its_page(tmp_path: Path) -> None:
    """Blocks go by their marks: saved as a file, skipped, slow; one that fails is named."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: made.py -->\n```python\nx = 1\n```\n\n<!-- skip: no -->\n```sh\nfalse\n```\n\n"
        "<!-- slow -->\n```sh\npython -c 'import made, sys; sys.exit(made.x)'\n```\n"
    )
    assert run(page, tmp_path, slow=False).returncode == 0
    done = run(page, tmp_path, slow=True)
    assert done.returncode == 1
    assert "page.md:12 ended with 1" in done.stderr
    assert blocks(page)[1].elsewhere == "no"


def test_prose_is_counted_by_sentences_without_code_and_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A head\n\nOne two `three four` five. Six [seven](x.md) eight!\nNine.\n\n- ten\n- eleven\n\n| no | no |\n\n"
        "```sh\nno no\n```\n<!-- no -->\n"
    )
    assert list(sentences(prose(page))) == [
        "A head", "One two code five.", "Six seven eight!", "Nine.", "ten", "eleven",
    ]  # fmt: skip
    assert links(page) == ["x.md"]
    assert anchors(page) == {"a-head"}


# Prose ---------------------------------------------------------------------------------------------------------

LONGEST = 35
"""Words of a sentence."""


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    long = [f"{len(words(s))} words: {s}" for s in sentences(prose(page)) if len(words(s)) > LONGEST]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_words_are_those_of_the_glossary(page: Path) -> None:
    text = " ".join(prose(page)).lower()
    found = [f"{word!r}: say {instead}" for word, instead in AVOIDED.items() if re.search(rf"\b{word}\b", text)]
    assert not found


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert sum(len(words(sentence)) for sentence in sentences(prose(ROOT / "README.md"))) <= 900


# Links ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_in_the_navigation_once() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    named = Counter(name for part in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for name in part.split())
    pages = [page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in (*PAGES[1:], *NOTEBOOKS)]
    assert {name: named[name] for name in pages if name != "index"} == {n: 1 for n in pages if n != "index"}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img|source)\b[^>]* (?:src|href)=\"([^\"]+)\"", page.read_text())
        assert not [url for url in fetched if re.match(r"(https?:)?//", url)], page.name
    assert "CAdam" in (tmp_path / "searchindex.js").read_text()


# Reports and numbers -------------------------------------------------------------------------------------------

IMAGES = re.findall(r'<section id="([^"]+)">', (ROOT / "docs" / "reports" / "images.html").read_text())
REPORTS = [
    pytest.param(page, name, id=f"{page.name}-{name}")
    for page in sorted((ROOT / "docs" / "reports").glob("*.html"))
    for name in re.findall(r'<section id="([^"]+)">', page.read_text())
]


@pytest.mark.parametrize(("page", "name"), REPORTS)
def test_reports_have_the_numbers_of_the_archive(page: Path, name: str) -> None:
    """The table and the verdict on the page are those that the archive gives."""
    request = published.request(name)
    text = page.read_text().partition(f'<section id="{name}">')[2].partition("</section>")[0]
    if not request.complete:
        assert f'<p class="warning">{escape(report._state(request))}' in text
        return
    summary = request.experiment.summary(request.results)
    assert report._table(summary.rows) in text
    assert f"<b>Measured:</b> {escape(summary.verdict)}</p>" in text


INTERVAL = re.compile(r"[+-]\d+\.\d\d \[[+-]\d+\.\d\d, [+-]\d+\.\d\d\]")


def in_brackets(values: Mapping[str, float]) -> str:
    return "{difference:+.2f} [{low:+.2f}, {high:+.2f}]".format(**values)


def rows_of(*names: str) -> list[Row]:
    requests = [published.request(name) for name in names]
    return [row for request in requests for row in request.experiment.summary(request.results).rows]


def across_rates() -> set[str]:
    """What the page says of runs at other rates than their experiment compares: from the cells themselves."""
    plan = published.request("fig-image-noise").plan
    archived = published.archive().study("images").results()
    tests = Results([result for result in archived if result.cell.seed in plan.test_seeds()])

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
    said = set(INTERVAL.findall(text))
    assert said
    rows = {in_brackets(row.values) for row in rows_of(*studies) if "difference" in row.values}
    assert said <= rows | more()


def test_noise_floors_in_the_text_come_from_the_archive() -> None:
    said = set(re.findall(r"±\d+\.\d\d", (ROOT / "docs" / "images.md").read_text()))
    assert said
    assert said <= {f"±{row.values['noise floor']:.2f}" for row in rows_of(*IMAGES) if "noise floor" in row.values}


def test_tables_on_pages_are_those_of_the_archive(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["--check"]) == 0, capsys.readouterr().err


SPEEDS = {
    "one huge tensor, against torch's fused Adam": "one tensor of 537M",
    "a network's tensors (200 of 26M in all; 161 of 37M)": "161 tensors, 37M",
    "2,000 tiny tensors": "2,000 tiny tensors",
    "the dense tensors of a DeepFM": "DeepFM, dense gradients",
    "a table of 1M x 16, 260,000 ids, against SparseAdam": "rows 1M x 16, fields ids",
    "1M x 16, half of the ids among a hundred rows": "rows 1M x 16, hot ids",
    "1M x 16, ids spread evenly": "rows 1M x 16, uniform ids",
    "1M x 10, the skew of real ids (Zipf)": "rows 1M x 10, zipf ids",
    "1M x 16 with nine of ten ids one and the same": "rows 1M x 16, skewed ids",
    "a table of 50M x 16": "rows 50M x 16, fields ids",
}
"""What the page on speed calls the cases of `cadam bench`."""


def test_speeds_on_cuda_are_those_of_the_kept_runs() -> None:
    text = "".join((ROOT / "results" / "cuda" / name).read_text() for name in ("dense.txt", "rows.txt"))
    outside: dict[str, list[float]] = {}
    for case, table in re.findall(r"^(\S.*)\n +ms .*\n((?:  .*\n)+)", text, re.MULTILINE):
        (ratio,) = re.findall(r"cadam\.CAdam  .*\) +(\d+\.\d+)", table)
        outside.setdefault(case, []).append(float(ratio))
    graphs: dict[str, dict[str, float]] = {}
    for found in json.loads((ROOT / "results" / "cuda" / "graphs.json").read_text())["results"]:
        graphs.setdefault(found["case"].removeprefix("in a graph: "), {})[found["name"]] = found["milliseconds"]
    later = (ROOT / "results" / "cuda" / "graph_nodes.txt").read_text()
    timed = r"^([^\n]+): [\d,]+ elements.*?^(torch Adam fused): ([\d.]+) us.*?^(cadam\.CAdam): ([\d.]+) us"
    for case, peer, torchs, ours, cadams in re.findall(timed, later, re.MULTILINE | re.DOTALL):
        graphs[case] = {f"{peer}, in a graph": float(torchs), ours: float(cadams)}
    said = re.findall(r"^\| (.+) \| .* ?\| ?(.*) \| ?(.*) \|$", (ROOT / "docs" / "speed.md").read_text(), re.MULTILINE)
    columns = {name: (first, second) for name, first, second in said if name in SPEEDS}
    assert columns.keys() == SPEEDS.keys()
    for name, case in SPEEDS.items():
        ends = dict.fromkeys(figure(end) for end in (min(outside[case]), max(outside[case]))) if case in outside else ()
        times = graphs.get(case, {})
        peer = times.get("torch Adam fused, in a graph", times.get("torch SparseAdam", math.nan))
        in_graph = figure(peer / times["cadam.CAdam"]) if times else ""
        assert (columns[name][0].split(",")[0].strip(), columns[name][1].strip()) == (" to ".join(ends), in_graph), name


def figure(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def test_every_public_optimizer_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in cadam.__all__:
        thing = getattr(cadam, name)
        if isinstance(thing, type) and issubclass(thing, cadam.Optimizer) and thing is not cadam.Optimizer:
            assert f"`{name}`" in readme


def test_alignment_of_pure_noise() -> None:
    """The landmark of docs/alignment.md: 1/2 + asin(sqrt(1 - beta1^2)) / pi."""
    p = torch.zeros(20_000, requires_grad=True)
    optimizer = cadam.CAdam([p])
    generator = torch.Generator().manual_seed(0)
    for step in range(120):
        if step == 60:  # past the start, where momentum is a short average
            optimizer.alignment(reset=True)
        p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    expected = 0.5 + math.asin(math.sqrt(1 - 0.9**2)) / math.pi
    assert optimizer.alignment().total.over_all == pytest.approx(expected, abs=2e-3)
    assert f"{expected:.2f}" == "0.64"


def test_what_is_not_known_is_what_the_claims_say_was_not_run() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| ") and " | table " in row]
    unknown = page.partition("## What is not known")[2].partition("## Limits")[0]
    for command, table in {"tab-criteo ": 1, "tab-criteo-noise ": 2, "tab-ablation-criteo ": 4}.items():
        verdicts = [row[-1] for row in rows if f"table {table}" in row[1] and "Criteo" in row[0]]
        assert verdicts, table
        assert any("not run" in verdict for verdict in verdicts) == (command in unknown), command


def test_the_codes_and_paths_that_a_run_has_are_on_the_pages() -> None:
    codes = (ROOT / "docs" / "cli.md").read_text("utf-8")
    (interrupted,) = [line for line in codes.splitlines() if line.startswith("| 130 |")]
    assert "`cadam run` ends with 0" in interrupted
    server = (ROOT / "src" / "cadam" / "online" / "status_server.py").read_text("utf-8")
    online = (ROOT / "docs" / "online.md").read_text("utf-8")
    paths = re.findall(r'path == "(/[^"]*)"', server)
    assert len(paths) == 4
    assert [path for path in paths if f"| `{path}` |" not in online] == []
