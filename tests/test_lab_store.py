"""Cells: found by what they depend on, whole or not there, and never believed when damaged."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import lab_experiments
import numpy as np
import pytest
from lab_experiments import WALK, make_cell

import cadam
from cadam.lab import code
from cadam.lab.experiment import Cell, Cost, Outcome, Result
from cadam.lab.store import DamagedCellError, Store, identity

COST = Cost(0.5, 1000, "CPU", {"python": "3"})
CELL = make_cell("CAdam", 0.1, 3, depth=2)


def result(cell: Cell = CELL) -> Result:
    curves = {
        "double": np.array([[0.1, -0.0], [np.nan, 5e-324]]),
        "single": np.arange(3, dtype=np.float32) / 3,
        "counts": np.arange(4, dtype=np.int64),
        "empty": np.zeros((0, 2)),
    }
    return Result(cell, Outcome({"loss": 0.1 + 0.2, "worst": math.inf, "lost": math.nan}, curves), COST)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cells")


def test_what_is_saved_is_loaded_to_the_bit(store: Store) -> None:
    store.save(WALK, result())
    loaded = store.load(WALK, CELL)
    assert loaded is not None
    assert loaded.cell == CELL
    assert loaded.cost == COST
    for name, value in result().outcome.metrics.items():
        assert np.float64(loaded.outcome.metrics[name]).tobytes() == np.float64(value).tobytes()
    for name, curve in result().outcome.curves.items():
        found = loaded.outcome.curves[name]
        assert (found.dtype, found.shape, found.tobytes()) == (curve.dtype, curve.shape, curve.tobytes())


def test_a_cell_that_was_not_saved_is_none(store: Store) -> None:
    store.save(WALK, result())
    assert store.load(WALK, make_cell("CAdam", 0.1, 4, depth=2)) is None


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
def test_every_part_of_a_cell_names_its_file(change: dict[str, object]) -> None:
    assert identity(WALK, dataclasses.replace(CELL, **change)) != identity(WALK, CELL)  # type: ignore[arg-type]


def test_the_order_of_settings_and_the_kind_of_a_number_do_not_matter() -> None:
    a = Cell("walk", "", "", "Adam", 1, "", 0, {"a": [1, 2], "b": 2})
    b = Cell("walk", "", "", "Adam", 1.0, "", 0, {"b": 2, "a": (1, 2)})
    assert a == b
    assert identity(WALK, a) == identity(WALK, b)


def test_settings_that_are_not_json_are_refused() -> None:
    with pytest.raises(ValueError, match="plain JSON"):
        Cell("walk", "", "", "Adam", 1, "", 0, {"a": object()})


SOURCE = '''
"""A module."""
from typing import TYPE_CHECKING, TypedDict
if TYPE_CHECKING:
    import fractions
class Options(TypedDict):
    size: int
class More(Options):
    shape: int
class Kept:
    size: int = 1
def f(x: int) -> int:  # a comment
    """What it does."""
    return x + 1
'''


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (SOURCE.replace("# a comment", "# another"), True),
        (SOURCE.replace("What it does", "What it did"), True),
        (SOURCE.replace("x + 1", "(x +\n        1)"), True),
        (SOURCE.replace("x: int", "x: Options"), True),
        (SOURCE.replace("-> int", "-> float"), True),
        (SOURCE.replace("import fractions", "import decimal"), True),
        (SOURCE.replace("    size: int\nclass More", "    size: int\n    colour: str\nclass More"), True),
        (SOURCE.replace("shape: int", "shape: str"), True),
        (SOURCE.replace("size: int = 1", "size: int = 2"), False),
        (SOURCE.replace("(x: int)", "(x: int = 3)"), False),
        (SOURCE.replace("if TYPE_CHECKING:", "if not TYPE_CHECKING:"), False),
        (SOURCE.replace("x + 1", "x + 2"), False),
        (SOURCE.replace("return x + 1", "pass"), False),
    ],
)
def test_only_code_that_does_something_else_makes_a_new_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, same: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    experiment = dataclasses.replace(WALK, sources=["lab_source_under_test"])
    names = []
    for text in (SOURCE, changed):
        (tmp_path / "lab_source_under_test.py").write_text(text)
        code.fingerprint.cache_clear()
        names.append(identity(experiment, CELL))
    code.fingerprint.cache_clear()
    assert (names[0] == names[1]) == same


def test_what_a_step_computes_is_part_of_every_cell_and_how_it_runs_is_not() -> None:
    covered = {path for module in code.OPTIMIZERS for path in code.files(module)}
    package = Path(cadam.__file__).parent
    assert {package / f"{name}.py" for name in ("catalog", "defaults", "options", "update")} <= covered
    assert set((package / "rules").glob("*.py")) <= covered
    assert not covered & {*(package / "engines").rglob("*"), *(package / "codegen").rglob("*")}


def test_a_source_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="lab_experimets"):
        identity(dataclasses.replace(WALK, sources=["lab_experimets"]), CELL)


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


def other_code(path: Path) -> None:
    content = json.loads(path.read_bytes())
    content["code"] = "0" * 64
    path.write_text(json.dumps(content))


def not_a_cell(path: Path) -> None:
    path.write_text("[1, 2]")


def a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def renamed(path: Path) -> None:
    store = Store(path.parent.parent)
    other = store.save(WALK, result(make_cell("Adam", 0.1, 3, depth=2)))
    other.replace(path)


@pytest.mark.parametrize(
    "damage", [cut, empty, nested, folder, other_metric, other_curve, other_code, not_a_cell, a_bit, renamed]
)
def test_a_damaged_file_is_not_believed(store: Store, damage: Callable[[Path], None]) -> None:
    path = store.save(WALK, result())
    damage(path)
    with pytest.raises(DamagedCellError, match=path.name):
        store.load(WALK, CELL)


def test_nothing_is_left_when_a_save_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        store.save(WALK, result())
    assert [path.name for path in (store.root / "walk").iterdir()] == []


def test_a_curve_must_hold_numbers(store: Store) -> None:
    wrong = Result(CELL, Outcome({}, {"names": np.array(["a"])}), COST)
    with pytest.raises(TypeError, match="numbers"):
        store.save(WALK, wrong)


def test_results_are_picked_by_fields_and_settings() -> None:
    results = lab_experiments.Results([result(), result(make_cell("CAdam", 0.1, 4, depth=1))])
    assert len(results.where(depth=2)) == 1
    assert results.metric("loss") == {3: 0.1 + 0.2, 4: 0.1 + 0.2}
    with pytest.raises(ValueError, match="two results with seed 3"):
        lab_experiments.Results([result(), result()]).metric("loss")
