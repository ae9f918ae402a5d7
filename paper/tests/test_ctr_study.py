"""The CTR experiments: their run specs, their summaries of simulated results, and small real runs from end to end."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cadam.ab.report.figures import svg
from cadam.cli import main
from cadam_paper import catalog
from cadam_paper.ctr import criteo_writer, preprocess, runs, study
from cadam_paper.harness import report, runner
from cadam_paper.harness.cache import Cache
from cadam_paper.harness.experiment import OWN_DATA, Experiment, Plan, Scale
from cadam_paper.harness.results import REPEAT_SEEDS, TUNING_SEEDS, Outcome, Provenance, Result, Results, RunSpec

NAMES = [
    name
    for name, location in catalog.EXPERIMENTS.items()
    if location.startswith("cadam_paper.ctr") and not name.endswith("-controls")
]
TABLES = ["tab-criteo", "tab-criteo-noise", "tab-ablation-criteo"]
COST = Provenance(1.0, 1, "none", {})
Gain = Callable[[RunSpec], float]


def simulated_outcome(spec: RunSpec, gain: Gain) -> Outcome:
    """Return an AUC that depends on the learning rate, the model and the seed. Confidence adds `gain`."""
    grid = (study.SGDM_GRIDS if "SGDM" in spec.optimizer else study.GRIDS)[
        "quick" if spec.settings["device"] == "cpu" else "full"
    ]
    auc = 75 - abs(math.log(spec.lr / grid[3 if spec.model == "PNN" else 1])) + 0.3 * math.sin(spec.seed)
    if spec.optimizer.startswith("C"):
        auc += gain(spec)
    parts = ("stream",) if spec.settings["reading"] == "stream" else ("validation", "test")
    metrics = {f"{part}_auc": auc + (part == "test") for part in parts}
    if spec.lr == max(grid) and TUNING_SEEDS <= spec.seed < REPEAT_SEEDS and "test" in parts:
        metrics["test_auc"] += 50  # learning rates must not be chosen by the test AUC
    return Outcome(metrics, {"loss": np.ones(9), "windows": np.linspace(60, auc, 12)})


def results_of(experiment: Experiment, plan: Plan, gain: Gain) -> Results:
    request = runner.Request(experiment, plan)
    runner.look_up(request, lambda _, spec: Result(spec, simulated_outcome(spec, gain), COST))
    assert request.complete
    return request.results


def gains(spec: RunSpec) -> float:
    return 1 + 0.1 * math.cos(spec.seed)


@pytest.mark.parametrize("scale", ["quick", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_summarizes_and_draws_its_results(name: str, scale: Scale) -> None:
    experiment = catalog.find(name)
    request = runner.Request(experiment, experiment.plan(scale))
    request.results = results_of(experiment, request.plan, gains)
    summary = experiment.summary(request.results)
    labels = (": C", "stream", "each at its own best rate")
    rows = [row for row in summary.rows if row.verdict_kind and "against C" not in row.label]
    confident = [row for row in rows if any(label in row.label for label in labels)]
    assert len(confident) >= 3
    assert all(row.verdict_kind == "better" for row in confident)
    assert "worse" not in summary.verdict
    assert summary.verdict.startswith("Not the paper's setting: ")
    assert ("small models on generated clicks, 20,000 rows" in summary.verdict) == (scale == "quick")
    assert not summary.warnings
    figures = report.draw(experiment, request)
    assert len(figures) == 1
    assert all(len(svg(figure, name, caption)) < 150_000 for caption, figure in figures.items())


def test_a_worse_result_is_reported_as_worse() -> None:
    for name in TABLES:
        experiment = catalog.find(name)
        verdict = experiment.summary(results_of(experiment, Plan("full", 3), lambda spec: -gains(spec))).verdict
        assert "CAdam worse" in verdict
        assert "better" not in verdict


def test_table_one_has_the_papers_grid_for_every_optimizer_and_model() -> None:
    experiment = catalog.find("tab-criteo")
    tuning = experiment.run_specs(Plan("full", 3), Results())
    assert len(tuning) == 5 * 8 * 5
    assert {spec.lr for spec in tuning} == {2e-4, 5e-4, 1e-3, 2e-3, 5e-3}
    assert {spec.model for spec in tuning} == set(study.MODELS)
    results = results_of(experiment, Plan("full", 3), gains)
    assert len(results) == 200 + 8 * 5 * 3 + 2 * 5 * 3
    assert {r.spec.lr for r in results.tests().where(model="PNN")} == {2e-3}
    assert {r.spec.lr for r in results.tests().where(model="DNN")} == {5e-4}
    assert {r.spec.settings["rows"] for r in results} == {45_840_617}
    assert {r.spec.settings["batch"] for r in results} == {10_000}


def test_rows_contain_the_numbers_of_the_paper() -> None:
    rows = {}
    for name in TABLES:
        experiment = catalog.find(name)
        for row in experiment.summary(results_of(experiment, Plan("full", 3), gains)).rows:
            rows[name, row.label] = row
    assert rows["tab-criteo", "mean of the models: CAdam against Adam"].reference == "CAdam 80.94, Adam 80.92"
    assert rows["tab-criteo", "PNN: CAmsGrad against AmsGrad"].reference == "CAmsGrad 80.94, AmsGrad 80.92"
    assert rows["tab-criteo", "mean of the models: Yogi against Adam"].reference == "Yogi 80.54, Adam 80.92"
    noisy = rows["tab-criteo-noise", "lr best on noisy data: DCN: CAdam against Adam"]
    assert noisy.reference == "CAdam 80.77, Adam 80.51"
    sgdm = rows["tab-ablation-criteo", "mean of the models: CSGDM against SGDM"]
    assert sgdm.reference == "CSGDM 77.71, SGDM 77.16"
    assert sgdm.values["difference"] == pytest.approx(1, abs=0.1)
    assert sgdm.seeds == 3
    assert "±" in sgdm.noise_floor


def test_noisy_data_is_evaluated_at_three_choices_of_learning_rates() -> None:
    """If the best rate on noisy data differs from that on clean data, the three choices give three different rates."""
    experiment = catalog.find("tab-criteo-noise")

    def gain(spec: RunSpec) -> float:
        return 5.0 * (spec.settings["noise"] > 0 and spec.lr == 5e-3)

    results = results_of(experiment, Plan("full", 3), gain)
    noisy = results.tests().where(condition=study.NOISY, optimizer="CAdam", model="DNN")
    assert {r.spec.lr for r in noisy} == {5e-4, 1e-3, 5e-3}
    assert {r.spec.settings["noise"] for r in noisy} == {0.01}
    summary = experiment.summary(results)
    kinds = {row.label: row.verdict_kind for row in summary.rows}
    assert kinds["lr best on noisy data: DNN: CAdam against Adam"] == "better"
    assert kinds["lr best on clean data: DNN: CAdam against Adam"] == "equivalent"
    assert kinds["default lr 0.001: DNN: CAdam against Adam"] == "equivalent"
    tried = results.tuning().where(condition=study.NOISY, optimizer="CAdam", model="DNN")
    assert {r.spec.lr for r in tried} == {
        *study.GRIDS["full"],
        2e-2,
    }  # the best rate was the last of the grid, which was extended
    assert not summary.warnings


def test_a_grid_is_extended_until_the_best_rate_is_inside() -> None:
    experiment = catalog.find("tab-ablation-criteo")

    def gain(spec: RunSpec, best: float) -> float:
        """Change the best rate of CSGDM on the DNN to `best`, and let one run at the rate 300 fail."""
        mine = (spec.optimizer, spec.model) == ("CSGDM", "DNN")
        fails = spec.lr == 300 and spec.seed == TUNING_SEEDS + 1
        return abs(math.log(spec.lr / 0.3)) - abs(math.log(spec.lr / best)) - 50 * fails if mine else 0.0

    for best, grown in ((200.0, {30.0, 100.0, 300.0, 1000.0}), (1e9, {30.0, 100.0, 300.0, 1000.0})):
        results = results_of(experiment, Plan("full", 3), partial(gain, best=best))
        mine = results.where(optimizer="CSGDM", model="DNN")
        assert {r.spec.lr for r in mine.tuning()} == {*study.SGDM_GRIDS["full"], *grown}
        assert {r.spec.lr for r in mine.tests()} == {100.0 if best == 200 else 1000.0}, "300 fails on the second seed"
        assert len(mine.tuning()) == 3 * (len(study.SGDM_GRIDS["full"]) + len(grown)), "three seeds choose"
        both = results.tuning().where(model="DNN")
        seeds_and_rates = [[(r.spec.lr, r.spec.seed) for r in both.where(optimizer=arm)] for arm in study.SGDM]
        assert seeds_and_rates[0] == seeds_and_rates[1], "SGDM is tuned as CSGDM is"
        others = results.tuning().where(optimizer="CSGDM", model="DCN")
        assert [r.spec.lr for r in others] == list(study.SGDM_GRIDS["full"])
        warnings = experiment.summary(results).warnings
        assert any("at an end of the grid" in warning for warning in warnings) == (best > 1000)


def test_the_cost_of_a_row_is_that_of_its_runs() -> None:
    experiment = catalog.find("tab-criteo-noise")
    results = results_of(experiment, Plan("full", 3), lambda c: 5.0 * (c.settings["noise"] > 0 and c.lr == 5e-3))
    seconds = {row.label: row.seconds for row in experiment.summary(results).rows}
    for reading in ("lr best on clean data", "default lr 0.001", "lr best on noisy data"):
        assert seconds[f"{reading}: DNN: CAdam against Adam"] == 2 * 3
        assert seconds[f"{reading}: mean of the models: CAdam against Adam"] == 2 * 3 * 5
    assert seconds["lost by noise, mean of the models, lr best on clean data"] == 2 * 2 * 3 * 5


def test_only_the_complete_criteo_file_is_the_papers_setting() -> None:
    spec = study.spec(Plan("full", 1), "DNN", "Adam", 1e-3, study.TABLE, 0)

    def about(rows: str, lines: int | None) -> str:
        data = f"a file of Criteo's format, train.txt, all lines, {rows} rows, sha256 0"
        other = replace(spec, data=data, settings={**spec.settings, "source": "file", "rows": lines})
        return study.describe_data(Results([Result(other, Outcome({}), COST)]))

    whole = about("45,840,617", None)
    assert whole.startswith(
        "On a file of Criteo's format, train.txt, all lines, 45,840,617 rows, sha256 0: the paper's"
    )
    assert "if the file is Criteo's original" in whole  # a generated file can have as many rows
    assert about("2,000", None).startswith("Not the paper's setting: a file of Criteo's format, train.txt")
    assert about("145,840,617", None).startswith("Not the paper's setting: a file of Criteo's format, train.txt")


def test_a_mean_over_models_counts_a_divergence() -> None:
    experiment = catalog.find("tab-criteo")
    bad = results_of(experiment, Plan("full", 3), lambda c: math.nan if (c.model, c.seed) == ("DCN", 1) else 1.0)
    row = next(row for row in experiment.summary(bad).rows if row.label == "mean of the models: CAdam against Adam")
    assert row.verdict == "not comparable: CAdam diverged in 1 of 3, Adam in 0"


def test_experiments_share_runs_and_compute_them_in_the_same_way() -> None:
    experiments = [catalog.find(name) for name in NAMES]
    assert {experiment.compute for experiment in experiments} == {runs.compute}
    assert len({experiment.version for experiment in experiments}) == 1
    specs = {name: {r.spec for r in results_of(catalog.find(name), Plan("full", 3), gains)} for name in NAMES}
    alone = specs["tab-ablation-criteo"] - specs["tab-criteo"]
    assert {spec.optimizer for spec in alone} == {"SGDM", "CSGDM"}
    assert {c.condition for c in specs["tab-criteo-noise"] - specs["tab-criteo"]} == {study.NOISY}


def test_other_data_gives_another_run_spec() -> None:
    one, other = (study.spec(Plan("quick", 1, rows=rows), "DNN", "Adam", 1e-3, study.TABLE, 0) for rows in (None, 3000))
    assert one.data != other.data
    assert "3,000 rows" in other.data
    with pytest.raises(ValueError, match="the run needs 'something else'"):
        runs.compute(replace(one, data="something else"))


# Real runs -----------------------------------------------------------------------------------------------------

CONDITIONS = [study.TABLE, study.TABLE_NOISY, study.STREAMS[1]]


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_a_run_gives_the_same_outcome_each_time(condition: study.Condition) -> None:
    spec = study.spec(Plan("quick", 1, rows=4000), "DeepFM", "CAdam", 1e-2, condition, 0)
    first, again = runs.compute(spec), runs.compute(spec)
    assert first.metrics == again.metrics
    assert all(np.array_equal(first.curves[name], again.curves[name]) for name in first.curves)
    assert 55 < first.metrics[condition.result] < 85
    assert first.metrics[condition.tuned_by] > 55


def test_a_stream_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(study.GRIDS, "quick", (5e-3, 2e-2))
    experiment = catalog.find("stream-criteo")
    request = runner.Request(experiment, experiment.plan("quick", 2, rows=1500))
    runner.run([request], Cache(tmp_path), jobs=1, notify=lambda event: None)
    assert request.complete
    summary = experiment.summary(request.results)
    assert len(summary.rows) == 3
    assert "generated clicks, 1,500 rows" in summary.verdict
    assert Cache(tmp_path).last_plan(experiment) == request.plan


def test_the_users_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run specs identify the file by the hash of its content. A run with a changed file raises an error."""
    monkeypatch.setattr(runs, "load_criteo", runs.load_criteo.__wrapped__)
    path = tmp_path / "train.txt"
    criteo_writer.write(runs.generated(2500, 40, "none"), path)
    plan = Plan("quick", 1, str(path), 2000)
    spec = study.spec(plan, "DNN", "CAdam", 1e-2, study.TABLE, 0)
    assert "sha256" in spec.data
    assert str(tmp_path) not in spec.key()
    monkeypatch.delenv(OWN_DATA, raising=False)
    with pytest.raises(ValueError, match=f"set {OWN_DATA}"):
        runs.compute(spec)
    monkeypatch.setenv(OWN_DATA, str(path))
    outcome = runs.compute(spec)
    assert math.isfinite(outcome.metrics["test_auc"])
    streamed = study.stream_specs(plan, Results())
    assert {c.condition for c in streamed} == {"stream, as it comes"}
    monkeypatch.setattr(preprocess, "made_by", lambda: "other code")
    assert study.spec(plan, "DNN", "CAdam", 1e-2, study.TABLE, 0) == spec, (
        "the version that preprocessed the file is part of the spec"
    )
    criteo_writer.write(replace(runs.generated(2500, 40, "none"), seed=7), path)
    assert study.spec(plan, "DNN", "CAdam", 1e-2, study.TABLE, 0).data != spec.data
    with pytest.raises(ValueError, match="but the data is"):
        runs.compute(spec)


def test_an_optimizer_that_diverges_everywhere_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(study.GRIDS, "quick", (1e30,))
    command = ["reproduce", "stream-criteo", "--rows", "1000", "--jobs", "1", "--cache", str(tmp_path)]
    for _ in range(2):
        assert main.main(command) == 1
        assert "CAdam on DeepFM diverged at every learning rate of its grid" in capsys.readouterr().err
    assert main.main(["list", "--cache", str(tmp_path)]) == 0
    assert "unknown: CAdam on DeepFM diverged at every learning rate of its grid" in capsys.readouterr().out


def test_list_and_report_do_not_read_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the preprocessed ids were deleted, the command that restores them is printed. Then the results are shown."""
    monkeypatch.setitem(study.GRIDS, "quick", (5e-3, 2e-2))
    monkeypatch.delenv(OWN_DATA, raising=False)
    path, cache = tmp_path / "my train.txt", f"--cache={tmp_path / 'store'}"
    criteo_writer.write(runs.generated(2500, 40, "none"), path)
    run = ["reproduce", "stream-criteo", "--data", str(path), "--rows", "1500", "--seeds", "1", "--jobs", "1", cache]
    assert main.main(run) == 0
    listing, page = ["list", cache], ["report", cache, f"--output={tmp_path / 'report.html'}"]
    assert [main.main(listing), main.main(page)] == [0, 0]
    assert "done (quick, 1 seeds)" in capsys.readouterr().out

    numbers = tmp_path / "my train.txt.cache"
    shutil.rmtree(numbers)
    runs.load_criteo.cache_clear()
    assert [main.main(listing), main.main(page), main.main([*page, "stream-criteo"])] == [0, 4, 4]
    told = capsys.readouterr()
    advice = f"cadam criteo '{path}' --rows 1500"
    assert str(numbers / "first-1500") in told.out
    assert f"run `{advice}`" in told.out
    assert advice in told.err
    assert not numbers.exists()

    assert main.main(["criteo", str(path), "--rows", "1500"]) == 0
    assert [main.main(listing), main.main(page)] == [0, 0]
    assert "done (quick, 1 seeds)" in capsys.readouterr().out


def test_reading_the_users_file_can_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "train.txt"
    criteo_writer.write(runs.generated(2500, 40, "none"), path)
    monkeypatch.setattr(preprocess, "_encode", stopped)
    command = ["reproduce", "stream-criteo", "--data", str(path), f"--cache={tmp_path / 'store'}"]
    assert main.main(command) == 130
    assert "interrupted: " in capsys.readouterr().err


def test_a_plan_of_fewer_rows_takes_less_time() -> None:
    experiment = catalog.find("tab-criteo")
    whole = experiment.estimate(experiment.plan("full"))
    assert whole == experiment.seconds["full"]
    assert experiment.estimate(experiment.plan("full", rows=4_584_062)) == pytest.approx(whole / 10, rel=1e-3)
    assert experiment.estimate(experiment.plan("quick", rows=60_000)) == 3 * experiment.seconds["quick"]
    assert experiment.estimate(experiment.plan("full", 6, "train.txt")) == 2 * whole


def test_own_data_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = f"--cache={tmp_path / 'store'}"
    assert main.main(["reproduce", "fig-shift", "--data", str(tmp_path), cache]) == 2
    assert "fig-shift" in capsys.readouterr().err
    assert main.main(["reproduce", "tab-criteo", "--data", str(tmp_path / "none.txt"), cache]) == 3
    assert "none.txt" in capsys.readouterr().err
    assert main.main(["reproduce", "tab-criteo", "--data", str(tmp_path), cache]) == 3
    assert "train.txt" in capsys.readouterr().err
    assert main.main(["reproduce", "tab-criteo", "--rows", "5", cache]) == 2
    assert "rows must be at least 10" in capsys.readouterr().err
    plan = Plan("quick", 3, "/my data/train.txt", 5000)
    again = report.command(catalog.find("tab-criteo"), plan)
    assert again == "cadam reproduce tab-criteo --quick --data '/my data/train.txt' --rows 5000"
