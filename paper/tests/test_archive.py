"""The archive: rows are added at the end, looked up by spec and version, and never changed."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tables import begins_with
from walks import WALK, make_spec

from cadam_paper.harness import runner
from cadam_paper.harness.archive import Archive, DamagedArchiveError
from cadam_paper.harness.cache import Cache
from cadam_paper.harness.experiment import Plan
from cadam_paper.harness.results import Outcome, Provenance, Result, RunSpec

CELL = make_spec("CAdam", 0.1, 3, depth=2)


def result(spec: RunSpec = CELL, loss: float = 0.1 + 0.2) -> Result:
    curves = {
        "double": np.array([[0.1, -0.0], [np.nan, 5e-324]]),
        "half": np.array([0.1, np.inf, 6e-8], np.float16),
        "counts": np.arange(4, dtype=np.int64),
    }
    versions = {"cadam": "0.1", "torch": "2.0", "numpy": "1.0", "python": "3.0"}
    provenance = Provenance(0.5, 1000, "CPU", versions, "abc", False)
    return Result(spec, Outcome({"loss": loss, "worst": math.inf, "lost": math.nan}, curves), provenance)


def assert_same(found: Result | None, expected: Result) -> None:
    assert found is not None
    assert found.spec == expected.spec
    assert found.provenance == expected.provenance
    assert found.outcome.metrics.keys() == expected.outcome.metrics.keys()
    for name, value in expected.outcome.metrics.items():
        assert np.float64(found.outcome.metrics[name]).tobytes() == np.float64(value).tobytes()
    assert found.outcome.curves.keys() == expected.outcome.curves.keys()
    for name, curve in expected.outcome.curves.items():
        got = found.outcome.curves[name]
        assert (got.dtype, got.shape, got.tobytes()) == (curve.dtype, curve.shape, curve.tobytes())


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    found = Archive(tmp_path)
    found.add(WALK, [result(), result(make_spec("Adam", 0.1, 3, depth=2))])
    return found


def test_archived_results_are_read_to_the_last_bit(archive: Archive) -> None:
    assert_same(archive.find(WALK, CELL), result())
    assert archive.find(WALK, make_spec("CAdam", 0.1, 4, depth=2)) is None


def test_another_version_of_the_experiment_is_another_result(archive: Archive) -> None:
    later = dataclasses.replace(WALK, version=2)
    assert archive.find(later, CELL) is None
    archive.add(later, [result(loss=7.0)])
    assert_same(archive.find(later, CELL), result(loss=7.0))
    assert_same(archive.find(WALK, CELL), result())


def test_a_later_row_replaces_an_earlier_one_that_stays_in_the_file(archive: Archive) -> None:
    before = archive.study("walk").table
    archive.add(WALK, [result(loss=5.0)])
    assert_same(archive.find(WALK, CELL), result(loss=5.0))
    assert begins_with(archive.study("walk").table, before)
    assert [r.outcome.metrics["loss"] for r in archive.study("walk").results()] == [0.1 + 0.2, 5.0]


def test_results_may_have_new_metrics(archive: Archive) -> None:
    spec = make_spec("CAdam", 0.1, 9)
    new = dataclasses.replace(result(spec), outcome=Outcome({"auc": 0.5}))
    archive.add(WALK, [new])
    assert_same(archive.find(WALK, spec), new)
    assert_same(archive.find(WALK, CELL), result())


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
def test_an_empty_curve_keeps_its_dimensions(archive: Archive, shape: tuple[int, int]) -> None:
    spec = make_spec("CAdam", 0.1, 9)
    new = dataclasses.replace(result(spec), outcome=Outcome({}, {"table": np.ones(shape)}))
    archive.add(WALK, [new])
    assert_same(archive.find(WALK, spec), new)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome({"last loss": 1.0}), "snake_case"),
        (Outcome({"seed": 1.0}), "'seed'"),
        (Outcome({}, {"deep": np.zeros((2, 2, 2))}), "'deep'"),
        (Outcome({}, {"half": np.zeros(3)}), "curve_half"),
    ],
)
def test_results_without_a_column_type_are_rejected_and_nothing_is_written(
    archive: Archive, outcome: Outcome, message: str
) -> None:
    before = (archive.root / "walk.parquet").read_bytes()
    with pytest.raises(ValueError, match=message):
        archive.add(WALK, [dataclasses.replace(result(make_spec("Adam", 1, 1)), outcome=outcome)])
    assert (archive.root / "walk.parquet").read_bytes() == before


def test_a_write_that_fails_leaves_the_old_file(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (archive.root / "walk.parquet").read_bytes()

    def full(file: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        archive.add(WALK, [result(loss=5.0)])
    assert {path.name for path in archive.root.iterdir()} == {".lock", "walk.parquet"}
    assert (archive.root / "walk.parquet").read_bytes() == before


def test_the_error_names_a_damaged_file(archive: Archive) -> None:
    (archive.root / "walk.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DamagedArchiveError, match=r"walk\.parquet"):
        Archive(archive.root).find(WALK, CELL)


def test_without_pyarrow_the_error_names_the_package(archive: Archive) -> None:
    code = (
        f"import sys; sys.modules['pyarrow'] = None\nfrom cadam_paper.harness.archive import Archive\n"
        f"Archive({str(archive.root)!r}).study('walk').table"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install pyarrow" in found.stderr


def test_archived_results_are_not_computed_again(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of any version of torch are used. With `force` they are computed again."""
    request = runner.Request(WALK, Plan("quick", 2))
    specs = WALK.run_specs(request.plan, request.results)
    archive.add(WALK, [result(spec) for spec in specs])
    log = tmp_path / "log"
    monkeypatch.setenv("LAB_TEST_LOG", str(log))
    cache = Cache(tmp_path / "cache", archive)
    runner.run([request], cache, jobs=1, notify=lambda event: None)
    assert request.complete
    assert not log.exists()
    assert runner.read(cache, WALK, Plan("quick", 2)).results[0].outcome.metrics["loss"] == 0.1 + 0.2
    runner.run([request], cache, jobs=1, force=True, notify=lambda event: None)
    assert len(log.read_text().splitlines()) == len(specs)


def test_simultaneous_writers_lose_no_rows(tmp_path: Path) -> None:
    """A lock ensures that only one process at a time reads the file, adds rows and replaces it."""
    code = (
        "import sys; sys.path[:0] = {path!r}\n"
        "from test_archive import Archive, WALK, make_spec, result\n"
        "for seed in range({first}, {first} + 6):\n"
        "    Archive({root!r}).add(WALK, [result(make_spec('Adam', 0.1, seed))])\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code.format(path=sys.path, first=100 * n, root=str(tmp_path))])
        for n in range(3)
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    assert len(Archive(tmp_path).study("walk")) == 18


@pytest.mark.parametrize("column", ["settings", "version", "device"])
def test_the_error_names_a_missing_column(archive: Archive, column: str) -> None:
    path = archive.root / "walk.parquet"
    pq.write_table(pq.read_table(path).drop_columns([column]), path)
    with pytest.raises(DamagedArchiveError, match=column):
        Archive(archive.root).find(WALK, CELL)
