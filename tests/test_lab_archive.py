"""The archive: rows that are added, found by cell and version, and never changed."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import subprocess
import sys
import tarfile
import zlib
from functools import cache as once
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lab_experiments import WALK, make_cell

from cadam.lab import archive as archives
from cadam.lab import catalogue, runner
from cadam.lab.archive import Archive, DamagedResultsError
from cadam.lab.cache import Cache
from cadam.lab.experiment import Cell, Outcome, Plan, Provenance, Result, metric_name

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "results"
BEFORE = "f09aa8e9cfb1167e36070801e3df73b209161bbd"
"""The last commit that kept results as a file each."""
CELL = make_cell("CAdam", 0.1, 3, depth=2)


def result(cell: Cell = CELL, loss: float = 0.1 + 0.2) -> Result:
    curves = {
        "double": np.array([[0.1, -0.0], [np.nan, 5e-324]]),
        "half": np.array([0.1, np.inf, 6e-8], np.float16),
        "counts": np.arange(4, dtype=np.int64),
    }
    versions = {"cadam": "0.1", "torch": "2.0", "numpy": "1.0", "python": "3.0"}
    provenance = Provenance(0.5, 1000, "CPU", versions, "abc", False)
    return Result(cell, Outcome({"loss": loss, "worst": math.inf, "lost": math.nan}, curves), provenance)


def assert_same(found: Result | None, expected: Result) -> None:
    assert found is not None
    assert found.cell == expected.cell
    assert found.provenance == expected.provenance
    assert found.outcome.metrics.keys() == expected.outcome.metrics.keys()
    for name, value in expected.outcome.metrics.items():
        assert np.float64(found.outcome.metrics[name]).tobytes() == np.float64(value).tobytes()
    assert found.outcome.curves.keys() == expected.outcome.curves.keys()
    for name, curve in expected.outcome.curves.items():
        got = found.outcome.curves[name]
        assert (got.dtype, got.shape, got.tobytes()) == (curve.dtype, curve.shape, curve.tobytes())


def begins_with(after: pa.Table, before: pa.Table) -> bool:
    """Are the first rows of a table those of an earlier one, nan where they had nan?"""
    return after.num_rows >= before.num_rows and all(
        _same(after.column(name).slice(0, before.num_rows).combine_chunks(), before.column(name).combine_chunks())
        for name in before.schema.names
    )


def _same(after: pa.Array, before: pa.Array) -> bool:
    if pa.types.is_list(before.type):
        return after.value_lengths().equals(before.value_lengths()) and _same(after.flatten(), before.flatten())
    if not pa.types.is_floating(before.type):
        return bool(after.equals(before))
    values = [(array.is_valid().to_numpy(False), array.fill_null(0).to_numpy()) for array in (after, before)]
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(*values, strict=True))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    found = Archive(tmp_path)
    found.add(WALK, [result(), result(make_cell("Adam", 0.1, 3, depth=2))])
    return found


def test_what_is_added_is_found_to_the_bit(archive: Archive) -> None:
    assert_same(archive.find(WALK, CELL), result())
    assert archive.find(WALK, make_cell("CAdam", 0.1, 4, depth=2)) is None


def test_another_version_of_the_experiment_is_another_result(archive: Archive) -> None:
    later = dataclasses.replace(WALK, version=2)
    assert archive.find(later, CELL) is None
    archive.add(later, [result(loss=7.0)])
    assert_same(archive.find(later, CELL), result(loss=7.0))
    assert_same(archive.find(WALK, CELL), result())


def test_a_correction_supersedes_and_leaves_the_earlier_row(archive: Archive) -> None:
    before = archive.study("walk").table
    archive.add(WALK, [result(loss=5.0)])
    assert_same(archive.find(WALK, CELL), result(loss=5.0))
    assert begins_with(archive.study("walk").table, before)
    assert [r.outcome.metrics["loss"] for r in archive.study("walk").results()] == [0.1 + 0.2, 5.0]


def test_results_may_bring_new_metrics(archive: Archive) -> None:
    cell = make_cell("CAdam", 0.1, 9)
    new = dataclasses.replace(result(cell), outcome=Outcome({"auc": 0.5}))
    archive.add(WALK, [new])
    assert_same(archive.find(WALK, cell), new)
    assert_same(archive.find(WALK, CELL), result())


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome({"last loss": 1.0}), "snake_case"),
        (Outcome({"seed": 1.0}), "'seed'"),
        (Outcome({}, {"deep": np.zeros((2, 2, 2))}), "'deep'"),
        (Outcome({}, {"half": np.zeros(3)}), "curve_half"),
    ],
)
def test_what_has_no_column_is_refused_and_nothing_is_written(archive: Archive, outcome: Outcome, message: str) -> None:
    before = (archive.root / "walk.parquet").read_bytes()
    with pytest.raises(ValueError, match=message):
        archive.add(WALK, [dataclasses.replace(result(make_cell("Adam", 1, 1)), outcome=outcome)])
    assert (archive.root / "walk.parquet").read_bytes() == before


def test_a_write_that_fails_leaves_the_old_file(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (archive.root / "walk.parquet").read_bytes()

    def full(file: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        archive.add(WALK, [result(loss=5.0)])
    assert [path.name for path in archive.root.iterdir()] == ["walk.parquet"]
    assert (archive.root / "walk.parquet").read_bytes() == before


def test_a_damaged_file_is_named(archive: Archive) -> None:
    (archive.root / "walk.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DamagedResultsError, match=r"walk\.parquet"):
        Archive(archive.root).find(WALK, CELL)


def test_without_pyarrow_it_says_what_to_install(archive: Archive) -> None:
    code = (
        f"import sys; sys.modules['pyarrow'] = None\nfrom cadam.lab.archive import Archive\n"
        f"Archive({str(archive.root)!r}).study('walk').table"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install pyarrow" in found.stderr


def test_archived_results_are_not_computed_again(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever version of torch computed them; `force` computes them all the same."""
    request = runner.Request(WALK, Plan("quick", 2))
    cells = WALK.cells(request.plan, request.results)
    archive.add(WALK, [result(cell) for cell in cells])
    log = tmp_path / "log"
    monkeypatch.setenv("LAB_TEST_LOG", str(log))
    cache = Cache(tmp_path / "cache", archive)
    runner.run([request], cache, jobs=1, tell=lambda event: None)
    assert request.complete
    assert not log.exists()
    assert runner.read(cache, WALK, Plan("quick", 2)).results[0].outcome.metrics["loss"] == 0.1 + 0.2
    runner.run([request], cache, jobs=1, force=True, tell=lambda event: None)
    assert len(log.read_text().splitlines()) == len(cells)


# What is published ---------------------------------------------------------------------------------------------


STUDIES = sorted(path.stem for path in PUBLISHED.glob("*.parquet"))


def git(*arguments: str) -> bytes:
    found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    if found.returncode:
        pytest.skip(f"needs the repository's history: {found.stderr.decode().strip()}")
    return found.stdout


@pytest.mark.parametrize("study", STUDIES)
def test_earlier_rows_of_a_study_never_change(study: str) -> None:
    """Each version of the file in the history, and the one on the disk, begins with the rows of the one before."""
    name = f"results/{study}.parquet"
    commits = git("log", "--format=%H", "-3", "--", name).decode().split()
    versions = [git("show", f"{commit}:{name}") for commit in reversed(commits)] + [(ROOT / name).read_bytes()]
    tables = [pq.read_table(io.BytesIO(content)) for content in versions]
    for before, after in pairwise(tables):
        assert begins_with(after, before)


@once
def kept_before() -> dict[Cell, dict[str, Any]]:
    """The results that were a file each, by their cell."""
    content = git("archive", BEFORE, "results/kept")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        for member in files:
            file = files.extractfile(member) if member.name.endswith(".json") else None
            body = json.load(file) if file is not None and not member.name.endswith("plan.json") else None
            if body is not None:
                found[Cell(**body["cell"])] = body
    return found


def test_the_archive_has_the_values_of_every_result_that_was_a_file() -> None:
    kept = kept_before()
    assert len(kept) == 811
    archived = {
        r.cell: r for name in {cell.experiment for cell in kept} for r in Archive(PUBLISHED).study(name).results()
    }
    for cell, body in kept.items():
        found = archived[cell]
        assert found.outcome.metrics.keys() == {metric_name(name) for name in body["metrics"]}
        for name, value in body["metrics"].items():
            assert np.float64(found.outcome.metrics[metric_name(name)]).tobytes() == np.float64(value).tobytes()
        assert found.outcome.curves.keys() == {metric_name(name) for name in body["curves"]}
        for name, packed in body["curves"].items():
            raw = zlib.decompress(base64.b64decode(packed["data"]))
            curve = found.outcome.curves[metric_name(name)]
            assert (curve.dtype.str, list(curve.shape), curve.tobytes()) == (packed["dtype"], packed["shape"], raw)
        cost, provenance = body["cost"], found.provenance
        assert (provenance.code, provenance.commit, provenance.dirty) == (body["code"], None, None)
        assert (provenance.seconds, provenance.peak_memory, provenance.device, provenance.versions) == (
            cost["seconds"],
            cost["peak_memory"],
            cost["device"],
            cost["versions"],
        )


def test_it_says_which_results_carry_the_hash_of_later_code() -> None:
    """As docs/images.md and docs/ab.md count them."""
    images = [r for r in Archive(PUBLISHED).study("images").results() if r.provenance.code is not None]
    stamped = [r.cell.model for r in images if r.provenance.restamped]
    assert (stamped.count("VGG-16") + stamped.count("ResNet-18"), stamped.count("DenseNet-121")) == (396, 21)
    fresh = [r.cell.model for r in images if not r.provenance.restamped]
    assert (fresh.count("VGG-16"), fresh.count("DenseNet-121"), len(fresh)) == (6, 27, 33)


def test_every_published_row_says_where_it_comes_from() -> None:
    for study in STUDIES:
        for found in Archive(PUBLISHED).study(study).results():
            assert (found.provenance.commit is None) != (found.provenance.code is None), found.cell
            assert found.provenance.seconds > 0
            assert found.provenance.versions.keys() == set(archives.VERSIONS)


RECOMPUTED = [
    pytest.param(name, place, id=f"{name}-{place}")
    for name, count in (("fig-shift", 3), ("fig-no-noise", 1), ("theorem", 3))
    for place in range(count)
]


@pytest.mark.parametrize(("name", "place"), RECOMPUTED)
def test_published_results_come_out_again(name: str, place: int) -> None:
    """Some cheap cells, computed anew by the code as it is, within the tolerance that the experiment states."""
    experiment = catalogue.find(name)
    results = sorted(Archive(PUBLISHED).study(name).results(), key=lambda r: r.provenance.seconds)
    published = results[place * len(results) // 12]
    found = runner.measure(experiment, published.cell).outcome
    assert experiment.tolerance > 0
    assert found.metrics.keys() == published.outcome.metrics.keys()
    for metric, value in published.outcome.metrics.items():
        assert found.metrics[metric] == pytest.approx(value, rel=experiment.tolerance, abs=1e-12, nan_ok=True), metric


def test_the_tables_can_be_opened_with_pandas_columns() -> None:
    table = pq.read_table(PUBLISHED / "images.parquet")
    assert {"model", "optimizer", "lr", "condition", "seed", "accuracy", "seconds", "device", "commit"} <= set(
        table.schema.names
    )
    assert pa.types.is_floating(table.schema.field("accuracy").type)
