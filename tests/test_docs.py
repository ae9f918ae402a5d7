"""The code of the documentation runs, its links exist, and its numbers are those of the results."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import cadam
from tests.documented import MARKS, NOTEBOOKS, PAGES, ROOT, Block, anchors, blocks, cells, has_work, links, prose, run

NOT_RUN = [block for page in PAGES for block in blocks(page) if block.skip_reason]


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
        pytest.param(block, id=block.name, marks=pytest.mark.skip(reason=f"{block.name}: {block.skip_reason}"))
        for block in NOT_RUN
    ],
)
def test_blocks_that_are_not_run_are_listed_with_a_reason(block: Block) -> None:
    """These tests are skipped, so that the list of skipped tests has all blocks that are not run."""


def test_marks_of_blocks_are_known_and_lead_somewhere() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.marks.keys() <= set(MARKS), block.name
            assert block.skip_reason != "", f"{block.name}: the reason of the mark is empty"
            if "tested in" in block.marks:
                assert (ROOT / block.marks["tested in"]).exists(), block.name
    assert not [page for page in PAGES if re.search(r"^```py$|^```bash$|^```shell$", page.read_text(), re.MULTILINE)]


def test_a_block_that_fails_fails_its_page(tmp_path: Path) -> None:
    """Marks decide whether a block is a file, skipped or slow. The error names a block that fails."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: made.py -->\n<!-- skip: the next block imports it -->\n```python\nx = 1\nprint(__file__)\n```\n\n"
        "<!-- skip: no -->\n```sh\nfalse\n```\n\n"
        "<!-- slow -->\n```sh\npython -c 'import made, sys; sys.exit(made.x)'\n```\n"
    )
    assert run(page, tmp_path, slow=False).returncode == 0
    done = run(page, tmp_path, slow=True)
    assert done.returncode == 1
    assert "page.md:14 ended with 1" in done.stderr
    assert blocks(page)[1].skip_reason == "no"


def test_a_block_after_a_directive_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```{warning}\nA sentence.\n```\n\n<!-- slow -->\n```python\nx = 1\n```\n")
    assert [(block.code, block.marks) for block in blocks(page)] == [("x = 1\n", {"slow": ""})]


def test_a_page_has_prose_and_cells_of_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A head\n\nOne two `three four` five. Six [seven](x.md) eight!\nNine.\n\n- ten\n- eleven\n\n"
        "| a `b` | 1.2 |\n| --- | --- |\n| [the c](y.md) | dd \\| e |\n\n"
        "```sh\nno no\n```\n<!-- no -->\n<!-- table: made -->\n- made\n\n| cell |\n<!-- end -->\n"
    )
    assert prose(page) == ["A head", "One two code five. Six seven eight! Nine.", "ten", "eleven", "made"]
    assert cells(page) == ["a code", "the c", r"dd \| e", "cell"]
    assert links(page) == ["x.md", "y.md"]
    assert anchors(page) == {"a-head"}


# Links ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), target
        # Anchors of classes are made by Sphinx, which warns if one is missing.
        assert not anchor or anchor.startswith("cadam.") or anchor in anchors(there), target


def test_every_page_is_in_the_navigation_once() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    named = Counter(name for part in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for name in part.split())
    pages = [page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in (*PAGES[1:], *NOTEBOOKS)]
    assert {name: named[name] for name in pages if name != "index"} == {n: 1 for n in pages if n != "index"}


def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img|source)\b[^>]* (?:src|href)=\"([^\"]+)\"", page.read_text())
        assert not [url for url in fetched if re.match(r"(https?:)?//", url)], page.name
    assert "CAdam" in (tmp_path / "searchindex.js").read_text()


# Numbers and names ---------------------------------------------------------------------------------------------

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
"""The names that the page on speed has for the cases of `benchmarks.peers`."""
REPLAYED_SPEEDS = {
    "one tensor of 537M": ("one tensor of 2**28 elements", "1 x 2**28"),
    "161 tensors, 37M": ("161 tensors of ResNet-50", "161 (ResNet-50)"),
    "2,000 tiny tensors": ("2,000 tiny tensors", "2000 x 16"),
}
"""Cases whose step is replayed, and their names in the two kinds of tables of results/cuda/replay.txt."""


def test_speeds_on_cuda_are_those_of_the_kept_runs() -> None:
    outside: dict[str, list[float]] = {}
    for case, table in re.findall(
        r"^(\S.*)\n +ms .*\n((?:  .*\n)+)", cuda_results("dense.txt", "sparse.txt"), re.MULTILINE
    ):
        (ratio,) = re.findall(r"cadam\.CAdam  .*\) +(\d+\.\d+)", table)
        outside.setdefault(case, []).append(float(ratio))
    for case, (header, row) in REPLAYED_SPEEDS.items():
        replay = cuda_results("replay.txt")
        ratios = re.findall(
            rf"^{re.escape(header)}.*?CAdam, replay .*?\) +(\d+\.\d+)$", replay, re.MULTILINE | re.DOTALL
        )
        ratios += re.findall(rf"^{re.escape(row)} +new  .* (\d+\.\d+)x fused$", replay, re.MULTILINE)
        outside[case] = [float(ratio) for ratio in ratios]
    graphs: dict[str, dict[str, float]] = {}
    for found in json.loads((ROOT / "results" / "cuda" / "graphs.json").read_text())["results"]:
        graphs.setdefault(found["case"].removeprefix("in a graph: "), {})[found["name"]] = found["milliseconds"]
    timed = r"^([^\n]+): [\d,]+ elements.*?^(torch Adam fused): ([\d.]+) us.*?^(cadam\.CAdam): ([\d.]+) us"
    for case, peer, torchs, ours, cadams in re.findall(
        timed, cuda_results("graph_nodes.txt"), re.MULTILINE | re.DOTALL
    ):
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


def test_the_verdicts_on_simulations_are_those_of_the_kept_runs() -> None:
    page = (ROOT / "docs" / "ab_statistics.md").read_text().splitlines()
    output = (ROOT / "results" / "cpu" / "error_rates.txt").read_text()
    rates = output[: output.index("--batches 80")].splitlines()
    kept = [row for row in rates if re.match(r"\|.*( of 400 |\d% \|$)", row) and " of 200 " not in row]
    assert len(kept) == 14
    assert set(kept) <= set(page)
    streams = (ROOT / "results" / "cpu" / "ab_streams.txt").read_text()
    row = r"^\| (.+), CAdam \| (\w+).* \| (.+%) \| (.+%) \| (.+%) \| ([\d,]+) \| \d+ \|$"
    measured = {
        (name, action, difference, recent, hindsight, "" if events in ("20,000", "100,000") else events)
        for name, action, difference, recent, hindsight, events in re.findall(row, streams, re.MULTILINE)
    }
    row = r"^\| (\w+), [\d,]+ \|[^|]+\|[^|]+\| (\w+), ([^,;|]+%)(?:, after ([\d,]+) events)?.* \| (.+%) \| (.+%) \|$"
    shown = {
        (name, action, difference, recent, hindsight, events)
        for name, action, difference, events, recent, hindsight in re.findall(row, "\n".join(page), re.MULTILINE)
    }
    assert len(shown) == 10
    assert shown == measured


def cuda_results(*names: str) -> str:
    return "".join((ROOT / "results" / "cuda" / name).read_text() for name in names)


def figure(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def test_every_public_optimizer_is_in_the_table_of_classes() -> None:
    page = (ROOT / "docs" / "swap.md").read_text()
    for name in cadam.__all__:
        thing = getattr(cadam, name)
        if isinstance(thing, type) and issubclass(thing, cadam.Optimizer) and thing is not cadam.Optimizer:
            assert f"`{name}`" in page


def test_the_readme_is_short_with_its_tables_and_code() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 100
    assert len(readme.split()) <= 700
    for picture in re.findall(r"!\[(.*?)\]\((.*?)\)", readme):
        assert picture[0]
        assert (ROOT / picture[1]).read_text().startswith("<svg")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_code_fit_a_narrow_screen(page: Path) -> None:
    assert [line for block in blocks(page) for line in block.code.splitlines() if len(line) > 80] == []


def test_formulas_of_docstrings_become_latex() -> None:
    specification = importlib.util.spec_from_file_location("site_settings", ROOT / "docs" / "conf.py")
    assert specification is not None
    assert specification.loader is not None
    pytest.importorskip("myst_parser")
    settings = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(settings)
    assert settings.latex("m <- b1 * m     step = mhat / (sqrt(vhat) + eps)") == (
        r"m \leftarrow  \beta_1\, m \qquad \text{ step } = \hat{m} / (\sqrt{\hat{v}} + \epsilon)"
    )


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


def test_the_codes_and_paths_that_a_run_has_are_on_the_pages() -> None:
    codes = (ROOT / "docs" / "cli.md").read_text("utf-8")
    (interrupted,) = [line for line in codes.splitlines() if line.startswith("| 130 |")]
    assert "`cadam run` ends with 0" in interrupted
    monitoring = ROOT / "src" / "cadam" / "online" / "monitoring"
    server = "".join(path.read_text("utf-8") for path in monitoring.glob("*.py"))
    online = (ROOT / "docs" / "online.md").read_text("utf-8")
    paths = re.findall(r'path == "(/[^"]*)"', server)
    assert len(paths) == 4
    assert [path for path in paths if f"| `{path}` |" not in online] == []
