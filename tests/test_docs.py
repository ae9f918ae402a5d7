"""The documentation is true: its code runs, its links lead somewhere, its numbers come out."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

import pytest
import torch

import cadam
from cadam import cli
from cadam.trials import report, runner, statistics
from cadam.trials.archive import Archive
from cadam.trials.experiment import REPEAT_SEEDS, TUNING_SEEDS, Cell, Result, Results, Row
from cadam_paper import catalogue

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_code_runs_as_written(code: str, tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


IMAGES = re.findall(r'<section id="([^"]+)">', (ROOT / "docs" / "images.html").read_text())
REPORTS = [
    pytest.param(page, name, id=f"{page.name}-{name}")
    for page in sorted((ROOT / "docs").glob("*.html"))
    for name in re.findall(r'<section id="([^"]+)">', page.read_text())
]


@pytest.mark.parametrize(("page", "name"), REPORTS)
def test_reports_have_the_numbers_of_the_archive(page: Path, name: str) -> None:
    """The table and the verdict on the page are those that the archive gives."""
    request = archived_request(name)
    text = page.read_text().partition(f'<section id="{name}">')[2].partition("</section>")[0]
    if not request.complete:
        assert f'<p class="warning">{escape(report._state(request))}' in text
        return
    summary = request.experiment.summary(request.results)
    assert report._table(summary.rows) in text
    assert f"<b>Measured:</b> {escape(summary.verdict)}</p>" in text


INTERVAL = re.compile(r"[+-]\d+\.\d\d \[[+-]\d+\.\d\d, [+-]\d+\.\d\d\]")


PUBLISHED = Archive(ROOT / "results")


@cache
def archived(study: str) -> dict[Cell, Result]:
    return {result.cell: result for result in PUBLISHED.study(study).results()}


def archived_request(name: str) -> runner.Request:
    """An experiment as it was archived, with the results that are there."""
    experiment = catalogue.find(name)
    plan = PUBLISHED.plan(experiment)
    assert plan is not None
    request = runner.Request(experiment, plan)
    runner.look_up(request, PUBLISHED.find)
    return request


def in_brackets(values: Mapping[str, float]) -> str:
    return "{difference:+.2f} [{low:+.2f}, {high:+.2f}]".format(**values)


def rows_of(*names: str) -> list[Row]:
    requests = [archived_request(name) for name in names]
    return [row for request in requests for row in request.experiment.summary(request.results).rows]


def across_rates() -> set[str]:
    """What the page says of runs at other rates than their experiment compares: from the cells themselves."""
    tests = Results(list(archived("images").values())).tests()

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
    differences = [statistics.compare(a, b, names=("a", "b"), better="higher").difference for a, b in pairs]
    return {in_brackets({"difference": d.mean, "low": d.low, "high": d.high}) for d in differences}


@pytest.mark.parametrize(
    ("page", "studies", "more"),
    [
        ("README.md", IMAGES, across_rates),
        ("docs/images.md", IMAGES, across_rates),
        ("docs/ctr.md", ["stream-criteo"], set),
    ],
    ids=["README", "images", "ctr"],
)
def test_intervals_in_the_text_come_from_the_archive(
    page: str, studies: Sequence[str], more: Callable[[], set[str]]
) -> None:
    text = " ".join((ROOT / page).read_text().split())
    said = set(INTERVAL.findall(text))
    assert said
    rows = {in_brackets(row.values) for row in rows_of(*studies) if "difference" in row.values}
    assert said <= rows | more()


def test_noise_floors_in_the_text_come_from_the_archive() -> None:
    said = set(re.findall(r"±\d+\.\d\d", (ROOT / "docs" / "images.md").read_text()))
    assert said
    assert said <= {f"±{row.values['noise floor']:.2f}" for row in rows_of(*IMAGES) if "noise floor" in row.values}


CONDITIONS = {"sudden": "sudden 80°", "continuous": "continuous 2°", "image-noise": "noise 40%"}


def result_tables() -> list[str]:
    """The lines of the tables of what came out, as the archive has them."""
    lines = []
    for family in ("", "-resnet", "-densenet"):
        for study, label in CONDITIONS.items():
            rows = {row.what: row for row in rows_of(f"fig-{study}{family}")}
            means = [row for what, row in rows.items() if what.endswith(": mean test accuracy") and "over" not in what]
            name, unit = label.split()[0], label[-1]
            strengths = ", ".join(row.what.split()[1].rstrip(f"{unit}:") for row in means[1:])
            numbers = " | ".join(in_brackets(row.values) for row in means)
            rate = re.search(r"Both at lr ([\d.]+)", verdict_of(f"fig-{study}{family}"))
            assert rate
            floor = f"±{means[-1].values['noise floor']:.2f}"
            lines.append(f"| {name} {strengths}{unit}; {short(rate[1])} | {numbers} | {floor} |")
    for label in CONDITIONS.values():
        rows = [row for row in rows_of("tab-image-rates") if row.what.startswith(f"{label}: mean test accuracy")]
        rates = [re.findall(r"0\.\d+", row.what) for row in rows]
        own = (
            f"{in_brackets(rows[1].values)} at {short(rates[1][0])}" if rows[1:] else f"the same, {short(rates[0][0])}"
        )
        both, floor = in_brackets(rows[0].values), f"±{rows[0].values['noise floor']:.2f}"
        lines.append(f"| {label}; {short(rates[0][1])} | {both} | {own} | {floor} |")
    for row in rows_of("tab-ablation-images"):
        label, pair, rate = re.findall(r"(.+): (\w+ against \w+), lr (.+)", row.what)[0]
        arms = pair.split(" against ")
        numbers = " | ".join(f"{row.values[arm]:.2f}" for arm in arms)
        papers = [float(number) for number in re.findall(r"\d+\.\d+", row.paper)]
        first = label if arms[0] == "CSGDM" else ""
        where = f"{', '.join(arms)}; {short(rate)}"
        lines.append(f"| {first} | {where} | {numbers} | {in_brackets(row.values)} | {papers[0] - papers[1]:+.2f} |")
    return lines


def short(rate: str) -> str:
    return rate if float(rate) >= 0.01 else f"{float(rate):.0e}".replace("e-0", "e-")


def verdict_of(name: str) -> str:
    request = archived_request(name)
    return request.experiment.summary(request.results).verdict


def test_the_tables_of_what_came_out_are_those_of_the_archive() -> None:
    there = [line.strip().replace("**", "") for line in (ROOT / "docs" / "images.md").read_text().splitlines()]
    results = [line for line in there if INTERVAL.search(line) and line.startswith("|")]
    assert sorted(results) == sorted(result_tables())


def test_what_was_run_of_the_image_study_is_what_is_archived() -> None:
    assert what_was_run() in (ROOT / "docs" / "images.md").read_text()


def what_was_run() -> str:
    """The archived cells of the image study by model and condition, and what its experiments lack, as a table."""
    kept = archived("images")
    missing: set[Cell] = set()
    for name, place in catalogue.PLACES.items():
        if place.startswith("cadam_paper.images"):
            request = runner.Request(catalogue.find(name), catalogue.find(name).plan("full"))
            runner.look_up(request, lambda experiment, cell: kept.get(cell))
            missing |= set(request.missing)
    lines = [
        "| model | condition | learning-rate runs | runs | A/A | GPU minutes | lacking of the plan |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in ("VGG-16", "ResNet-18", "DenseNet-121"):
        for condition in ("clean", "sudden", "continuous", "noise"):
            there = Results([r for r in kept.values() if _is_of(r.cell, model, condition)])
            counts = [len(part()) for part in (there.tuning, there.tests, there.repeats)]
            lacking = [cell for cell in missing if _is_of(cell, model, condition)]
            rates = sum(TUNING_SEEDS <= cell.seed < REPEAT_SEEDS for cell in lacking)
            parts = [f"{rates} learning-rate runs, then the runs at these rates"] if rates else []
            parts += [f"{len(lacking) - rates} runs"] if len(lacking) > rates else []
            if condition == "clean" and any(
                c.model == model and TUNING_SEEDS <= c.seed < REPEAT_SEEDS for c in missing
            ):
                parts = ["what the rates of the conditions ask for"]
            what = "without change" if condition == "clean" else condition
            numbers = f"{counts[0]} | {counts[1]} | {counts[2]} | {there.seconds / 60:.1f}"
            lines.append(f"| {model} | {what} | {numbers} | {' and '.join(parts) or 'nothing'} |")
    return "\n".join(lines)


def _is_of(cell: Cell, model: str, condition: str) -> bool:
    return cell.model == model and cell.condition.split()[0] == condition


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
"""What the README calls the cases of `cadam bench`."""


def test_speeds_on_cuda_are_those_of_the_kept_runs() -> None:
    text = "".join((ROOT / "results" / "cuda" / name).read_text() for name in ("dense.txt", "rows.txt"))
    outside: dict[str, list[float]] = {}
    for case, table in re.findall(r"^(\S.*)\n +ms .*\n((?:  .*\n)+)", text, re.MULTILINE):
        (ratio,) = re.findall(r"cadam\.CAdam  .*\) +(\d+\.\d+)", table)
        outside.setdefault(case, []).append(float(ratio))
    graphs: dict[str, dict[str, float]] = {}
    for found in json.loads((ROOT / "results" / "cuda" / "graphs.json").read_text())["results"]:
        graphs.setdefault(found["case"].removeprefix("in a graph: "), {})[found["name"]] = found["milliseconds"]
    said = re.findall(r"^\| (.+) \| .* ?\| ?(.*) \| ?(.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
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


def test_every_command_is_in_the_lab_s_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    names = re.search(r"\{([a-z,]+)\}", capsys.readouterr().out)
    assert names
    commands = (ROOT / "docs" / "lab.md").read_text().split("## Commands")[1].split("```")[1]
    assert sorted(re.findall(r"^cadam (\w+)", commands, re.MULTILINE)) == sorted(names[1].split(","))


def test_every_public_optimizer_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in cadam.__all__:
        thing = getattr(cadam, name)
        if isinstance(thing, type) and issubclass(thing, cadam.Optimizer) and thing is not cadam.Optimizer:
            assert f"`{name}`" in readme


def test_alignment_of_pure_noise() -> None:
    """The README's landmark: 1/2 + asin(sqrt(1 - beta1^2)) / pi."""
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
