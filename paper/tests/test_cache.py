"""The cache: results are looked up by spec, files are complete or absent, and damaged files are detected."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from walks import WALK, make_spec

import cadam
from cadam_paper.harness import runner
from cadam_paper.harness.cache import Cache, identity
from cadam_paper.harness.experiment import Plan
from cadam_paper.harness.measured_runs import DamagedResultError
from cadam_paper.harness.results import Outcome, Provenance, Result, Results, RunSpec
from cadam_paper.harness.runner import Request

PROVENANCE = Provenance(
    0.5, 1000, "CPU", {"python": "3", "cadam": cadam.__version__, "torch": torch.__version__}, "abc", False
)
CELL = make_spec("CAdam", 0.1, 3, depth=2)


def result(spec: RunSpec = CELL) -> Result:
    curves = {
        "double": np.array([[0.1, -0.0], [np.nan, 5e-324]]),
        "single": np.arange(3, dtype=np.float32) / 3,
        "counts": np.arange(4, dtype=np.int64),
        "empty": np.zeros((0, 2)),
    }
    return Result(spec, Outcome({"loss": 0.1 + 0.2, "worst": math.inf, "lost": math.nan}, curves), PROVENANCE)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "specs")


def test_saved_results_are_loaded_to_the_last_bit(cache: Cache) -> None:
    cache.save(WALK, result())
    loaded = cache.load(WALK, CELL)
    assert loaded is not None
    assert loaded.spec == CELL
    assert loaded.provenance == PROVENANCE
    for name, value in result().outcome.metrics.items():
        assert np.float64(loaded.outcome.metrics[name]).tobytes() == np.float64(value).tobytes()
    for name, curve in result().outcome.curves.items():
        found = loaded.outcome.curves[name]
        assert (found.dtype, found.shape, found.tobytes()) == (curve.dtype, curve.shape, curve.tobytes())


def test_results_of_other_versions_count_only_with_any_versions(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {**PROVENANCE.versions, "torch": "1.0"}
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "1.0")
        cache.save(WALK, dataclasses.replace(result(), provenance=dataclasses.replace(PROVENANCE, versions=versions)))
    (cache.root / CELL.experiment / "plan.json").write_text("{}")
    assert cache.load(WALK, CELL) is None
    found = Cache(cache.root, any_versions=True).load(WALK, CELL)
    assert found is not None
    assert found.provenance.versions["torch"] == "1.0"
    assert Cache(cache.root, any_versions=True).load(dataclasses.replace(WALK, version=9), CELL) is None


def test_a_run_that_was_not_saved_has_no_result(cache: Cache) -> None:
    cache.save(WALK, result())
    assert cache.load(WALK, make_spec("CAdam", 0.1, 4, depth=2)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"data": "other"},
        {"optimizer": "Adam"},
        {"lr": 0.2},
        {"condition": "other"},
        {"seed": 4},
        {"settings": {"depth": 3}},
        {"settings": {"depth": 2, "width": 1}},
    ],
    ids=str,
)
def test_every_field_of_a_spec_changes_the_name_of_its_file(change: dict[str, object]) -> None:
    assert identity(WALK, dataclasses.replace(CELL, **change)) != identity(WALK, CELL)  # type: ignore[arg-type]


def test_the_order_of_settings_and_the_kind_of_a_number_do_not_matter() -> None:
    a = RunSpec("walk", "", "", "Adam", 1, "", 0, {"a": [1, 2], "b": 2})
    b = RunSpec("walk", "", "", "Adam", 1.0, "", 0, {"b": 2, "a": (1, 2)})
    assert a == b
    assert identity(WALK, a) == identity(WALK, b)


def test_settings_that_are_not_json_are_rejected() -> None:
    with pytest.raises(ValueError, match="plain JSON"):
        RunSpec("walk", "", "", "Adam", 1, "", 0, {"a": object()})


def nested(path: Path) -> None:
    path.write_text("[" * 200_000)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_metric(path: Path) -> None:
    content = json.loads(path.read_bytes())
    content["metrics"]["loss"] = 0.0
    path.write_text(json.dumps(content))


def other_curve(path: Path) -> None:
    content = json.loads(path.read_bytes())
    content["curves"]["double"]["data"] = content["curves"]["single"]["data"]
    path.write_text(json.dumps(content))


def other_version(path: Path) -> None:
    content = json.loads(path.read_bytes())
    content["version"] = 2
    path.write_text(json.dumps(content))


def not_a_run(path: Path) -> None:
    path.write_text("[1, 2]")


def a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def renamed(path: Path) -> None:
    cache = Cache(path.parent.parent)
    other = cache.save(WALK, result(make_spec("Adam", 0.1, 3, depth=2)))
    other.replace(path)


@pytest.mark.parametrize(
    "damage", [cut, empty, nested, folder, other_metric, other_curve, other_version, not_a_run, a_bit, renamed]
)
def test_a_damaged_file_is_an_error(cache: Cache, damage: Callable[[Path], None]) -> None:
    path = cache.save(WALK, result())
    damage(path)
    with pytest.raises(DamagedResultError, match=path.name):
        cache.load(WALK, CELL)


def test_a_failed_save_leaves_no_files(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        cache.save(WALK, result())
    assert [path.name for path in (cache.root / "walk").iterdir()] == []


def test_a_curve_must_be_numeric(cache: Cache) -> None:
    wrong = Result(CELL, Outcome({}, {"names": np.array(["a"])}), PROVENANCE)
    with pytest.raises(TypeError, match="numbers"):
        cache.save(WALK, wrong)


def test_results_are_filtered_by_fields_and_settings() -> None:
    results = Results([result(), result(make_spec("CAdam", 0.1, 4, depth=1))])
    assert len(results.where(depth=2)) == 1
    assert results.metric("loss") == {3: 0.1 + 0.2, 4: 0.1 + 0.2}
    with pytest.raises(ValueError, match="seed 3"):
        Results([result(), result()]).metric("loss")


MODULE = '''
"""An experiment."""
from dataclasses import replace
from walks import WALK as OTHER, make_spec, compute as walk
def compute(spec):
    outcome = walk(spec)
    print("computed one")
    return outcome
EXPERIMENT = replace(OTHER, compute=compute, version=1)
'''


@pytest.mark.parametrize(
    ("name", "change", "again"),
    [
        ("walk_one", ("computed one", "one more spec is done"), False),
        ("walk_one", ("outcome", "found"), False),
        ("walk_two", ("", ""), False),
        ("walk_one", ("version=1", "version=2"), True),
    ],
    ids=["a message is reworded", "a variable is renamed", "the module is moved", "the version is raised"],
)
def test_only_a_new_version_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: tuple[str, str], again: bool
) -> None:
    monkeypatch.setenv("LAB_TEST_LOG", str(tmp_path / "log"))
    counts = []
    for module, text in (("walk_one", MODULE), (name, MODULE.replace(*change))):
        (tmp_path / f"{module}.py").write_text(text)
        experiment = runpy.run_path(str(tmp_path / f"{module}.py"))["EXPERIMENT"]
        request = Request(experiment, Plan("quick", 2))
        runner.run([request], Cache(tmp_path / "specs"), jobs=1, notify=lambda event: None)
        assert request.complete
        counts.append(len((tmp_path / "log").read_text().splitlines()))
    assert counts == [4, 8 if again else 4]


@pytest.mark.parametrize("package", ["cadam", "torch"])
def test_another_version_of_cadam_or_torch_is_another_file(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(WALK, CELL)
    monkeypatch.setattr(f"{package}.__version__", "0.0")
    assert identity(WALK, CELL) != before
