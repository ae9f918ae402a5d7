"""The image experiments: their cells, what they say of made-up results, and a small real one from end to end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cadam.lab import catalogue, report, runner
from cadam.lab.experiment import Cell, Cost, Experiment, Outcome, Plan, Result, Results
from cadam.lab.images import runs, study
from cadam.lab.images.train import Record
from cadam.lab.store import Store

NAMES = [name for name, place in catalogue.PLACES.items() if place.startswith("cadam.lab.images")]
COST = Cost(1.0, 1, "none", {})
Gain = Callable[[Cell], float]


def made_up(cell: Cell, gain: Gain) -> Outcome:
    """An outcome whose accuracy depends on the learning rate and the seed, and gains by confidence what is told."""
    grid = (study.SGDM_GRIDS if "SGDM" in cell.optimizer else study.GRIDS)[_scale(cell)]
    epochs, steps = cell.settings["epochs"], 440 // cell.settings["window"]
    accuracy = 70 - 3 * abs(math.log(cell.lr / grid[len(grid) // 2])) + 0.3 * math.sin(cell.seed)
    if cell.optimizer.startswith("C"):
        accuracy += gain(cell)
    curve = np.linspace(0.5, 0.7, epochs * steps).astype(np.float16)
    return Outcome(
        {"accuracy": accuracy, "last accuracy": accuracy + 1, "loss": 1.0, "alignment": 0.6, "recovery": 90 - accuracy},
        {
            "test accuracy": np.full(epochs, accuracy, np.float32),
            "recovery": np.ones(epochs - 1, np.int32),
            "loss": curve,
            "accuracy": curve,
            "alignment": curve,
        },
    )


def _scale(cell: Cell) -> str:
    return "quick" if cell.settings["device"] == "cpu" else "full"


def results_of(experiment: Experiment, plan: Plan, gain: Gain) -> Results:
    request = runner.Request(experiment, plan)
    runner.look_up(request, lambda _, cell: Result(cell, made_up(cell, gain), COST))
    assert request.complete
    return request.results


@pytest.mark.parametrize("scale", ["quick", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_says_and_draws_what_its_cells_hold(name: str, scale: study.Scale) -> None:
    experiment = catalogue.find(name)
    request = runner.Request(experiment, experiment.plan(scale))
    request.results = results_of(experiment, request.plan, lambda cell: 2 + 0.1 * math.cos(cell.seed))
    summary = experiment.summary(request.results)
    assert all("better" in row.verdict for row in summary.rows if "alignment" not in row.what)
    assert "worse" not in summary.verdict
    assert summary.verdict.startswith("A rehearsal, not the paper's run") == (scale == "quick")
    assert not summary.warnings
    figures = report.draw(experiment, request)
    assert figures
    assert all("<svg" in report.svg(figure, name, caption) for caption, figure in figures.items())


def test_a_loss_is_said_to_be_one() -> None:
    experiment = catalogue.find("fig-continuous")
    results = results_of(experiment, experiment.plan("full"), lambda cell: -1 - 0.1 * math.cos(cell.seed))
    assert "less accurate at continuous 0°, continuous 0.5°" in experiment.summary(results).verdict
    table = catalogue.find("tab-ablation-images")
    results = results_of(table, table.plan("full"), lambda cell: -1 - 0.1 * math.cos(cell.seed))
    assert "higher in 0 of 9" in table.summary(results).verdict


def test_the_paper_stands_beside_the_ablation() -> None:
    table = catalogue.find("tab-ablation-images")
    rows = table.summary(results_of(table, table.plan("full"), lambda cell: 0.0)).rows
    papers = {(row.what.split()[0], row.what.split(": ")[1].split()[2].rstrip(",")): row.paper for row in rows}
    assert papers["sudden", "SGDM"] == "CSGDM 75.99, SGDM 74.83"
    assert papers["continuous", "Adam"] == "CAdam 69.13, Adam 64.61"
    assert papers["noise", "AmsGrad"] == "CAmsGrad 77.20, AmsGrad 74.28"
    assert len(rows) == 9


def test_both_arms_use_the_rate_that_is_best_for_adam() -> None:
    experiment = catalogue.find("fig-sudden")
    plan = experiment.plan("full")
    tuning = experiment.cells(plan, Results())
    assert {cell.optimizer for cell in tuning} == {"Adam", "CAdam"}
    assert {cell.lr for cell in tuning} == {1e-5, 3e-5, 1e-4, 3e-4, 1e-3}
    better_low = {1e-5: 9.0}
    results = results_of(experiment, plan, lambda cell: better_low.get(cell.lr, 0.0))
    tests = results.tests()
    assert {result.cell.lr for result in tests} == {1e-4}
    assert {result.cell.condition for result in tests} == {"clean", *(f"sudden {s}" for s in (20, 40, 60, 80))}
    assert not {r.cell.seed for r in results.tuning()} & {r.cell.seed for r in tests}
    assert "CAdam's own best is 1e-05" in experiment.summary(results).verdict


def test_experiments_that_share_cells_compute_them_in_the_same_way() -> None:
    experiments = [catalogue.find(name) for name in NAMES]
    assert {experiment.compute for experiment in experiments} == {runs.compute}
    assert len({tuple(experiment.sources) for experiment in experiments}) == 1


def test_experiments_share_cells() -> None:
    cells = {
        name: {r.cell for r in results_of(catalogue.find(name), Plan("full", 3), lambda cell: 0.0)} for name in NAMES
    }
    assert cells["fig-sudden-detail"] < cells["fig-sudden"]
    clean = {cell for cell in cells["fig-sudden"] if cell.condition == "clean"}
    assert len(clean) == 6
    assert clean < cells["fig-continuous"]
    assert clean < cells["fig-image-noise"]
    assert len(set().union(*(cells[name] for name in ("fig-sudden", "fig-continuous", "fig-image-noise")))) == 117


# From a run to its outcome -------------------------------------------------------------------------------------


def test_recovery_is_counted_from_the_shift() -> None:
    steps = 80
    accuracy = np.full(3 * steps, 0.8)
    accuracy[steps : steps + 30] = 0.2  # recovers after 30 steps
    accuracy[2 * steps :] = 0.5  # never does
    assert runs.recovery_steps(accuracy, steps).tolist() == [30, steps]
    assert runs.recovery_steps(np.full(2 * steps, 0.8), steps).tolist() == [0]


def test_a_run_that_left_the_numbers_has_no_accuracy() -> None:
    cell = study.cell(Plan("quick", 1), "vgg", "Adam", 1e-2, study.streams.CLEAN, 0)
    record = Record(np.array([1.0, np.nan] * 4), np.full(8, 0.5), np.full(8, 0.6), np.full(2, 0.1))
    metrics = runs.outcome(cell, record, 4).metrics
    assert math.isnan(metrics["accuracy"])
    assert metrics["alignment"] == pytest.approx(0.6)
    fine = runs.outcome(cell, Record(np.ones(8), *(getattr(record, n) for n in list(vars(record))[1:])), 4).metrics
    assert fine["accuracy"] == pytest.approx(10)


def test_a_gpu_cell_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.torch.cuda, "is_available", lambda: False)
    cell = study.cell(Plan("full", 1), "vgg", "Adam", 1e-3, study.streams.CLEAN, 0)
    with pytest.raises(RuntimeError, match=r"needs a CUDA device.*--quick runs on the CPU"):
        runs.compute(cell)


# From end to end -----------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(study.SETTINGS, "quick", {**study.SETTINGS["quick"], "epochs": 2, "batch": 128})
    monkeypatch.setitem(study.GRIDS, "quick", (1e-2, 3e-2))


def run(names: list[str], store: Store) -> tuple[list[runner.Request], list[runner.Event]]:
    requests = [runner.Request(catalogue.find(name), catalogue.find(name).plan("quick", 1)) for name in names]
    events: list[runner.Event] = []
    runner.run(requests, store, jobs=1, tell=events.append)
    return requests, events


def computed(events: list[runner.Event]) -> list[Cell]:
    return [event.cell for event in events if event.kind == "computed"]


@pytest.mark.usefixtures("short")
def test_a_small_study_from_end_to_end(tmp_path: Path) -> None:
    names = ["fig-sudden", "fig-sudden-detail", "fig-image-noise-resnet"]
    requests, events = run(names, Store(tmp_path))
    assert not [event.message for event in events if event.kind == "failed"]
    assert all(request.complete for request in requests)
    assert len(computed(events)) == len(set(computed(events)))
    again = run(names, Store(tmp_path))[1]
    assert not computed(again)
    assert "fig-sudden-detail" in report.page(requests)
    accuracy = [r.outcome.metrics["accuracy"] for r in requests[0].results.where(condition="clean")]
    assert min(accuracy) > 50


@pytest.mark.usefixtures("short")
def test_side_by_side_stores_each_run_when_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: killed on the way, only what was in work is lost, and nothing that was done is done again."""
    monkeypatch.setattr(runs, "LANES", 2)
    experiment = catalogue.find("fig-sudden-detail")
    together = Experiment(**{**vars(experiment), "side_by_side": _always, "compute_many": _until_killed})
    monkeypatch.setattr(catalogue, "find", lambda name: together)
    with pytest.raises(KeyboardInterrupt):
        run([together.name], Store(tmp_path))
    stored = set((tmp_path / "images").glob("*.json"))
    assert len(stored) == 2
    alone = Experiment(**{**vars(experiment), "side_by_side": _always, "compute_many": runs.compute_many})
    monkeypatch.setattr(catalogue, "find", lambda name: alone)
    requests, events = run([alone.name], Store(tmp_path))
    assert requests[0].complete
    assert len(computed(events)) == len(requests[0].results) - 2
    assert stored < set((tmp_path / "images").glob("*.json"))
    for result in requests[0].results:
        assert np.array_equal(result.outcome.curves["loss"], experiment.compute(result.cell).curves["loss"])


def _always(cell: Cell) -> bool:
    return True


def _until_killed(cells: Iterator[Cell]) -> Iterator[study.runs.Finished]:
    for number, finished in enumerate(runs.compute_many(cells)):
        if number == 2:
            raise KeyboardInterrupt
        yield finished


@pytest.mark.usefixtures("short")
def test_a_failure_side_by_side_costs_the_cells_in_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = catalogue.find("fig-sudden-detail")
    broken = Experiment(**{**vars(experiment), "side_by_side": _always, "compute_many": _fails_at_first})
    monkeypatch.setattr(catalogue, "find", lambda name: broken)
    _fails_at_first.calls = 0  # type: ignore[attr-defined]
    requests, events = run([broken.name], Store(tmp_path))
    failed = [event for event in events if event.kind == "failed"]
    assert len(failed) == 1
    assert "told to fail" in failed[0].message
    assert set(requests[0].failed) == {failed[0].cell}
    assert len(computed(events)) == len(requests[0].results) == 3


def _fails_at_first(cells: Iterator[Cell]) -> Iterator[study.runs.Finished]:
    _fails_at_first.calls += 1  # type: ignore[attr-defined]
    if _fails_at_first.calls == 1:  # type: ignore[attr-defined]
        next(cells)
        raise RuntimeError("told to fail")
    yield from runs.compute_many(cells)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([0.6] * 10, "stays"),
        ([0.7, 0.5, *[0.6] * 8], "rises and falls"),
        ([0.5, *[0.6] * 9], "falls"),
        ([0.7, *[0.6] * 9], "rises"),
    ],
)
def test_what_alignment_does_at_shifts(after: list[float], verdict: str) -> None:
    experiment = catalogue.find("fig-sudden-detail")
    plan = experiment.plan("quick")
    results = results_of(experiment, plan, lambda cell: 2 + 0.1 * math.cos(cell.seed))

    def shaped(result: Result) -> Result:
        first, others = np.full(100, 0.6), np.tile([*after, *[0.6] * 90], result.cell.settings["epochs"] - 1)
        curves = {**result.outcome.curves, "alignment": np.concatenate([first, others])}
        return dataclasses.replace(result, outcome=Outcome(result.outcome.metrics, curves))

    rows = experiment.summary(Results([shaped(result) for result in results])).rows
    assert [row.verdict for row in rows if "alignment" in row.what] == [verdict] * 2
