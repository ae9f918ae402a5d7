"""The published results in results/: they are complete, never change, and the current code reproduces them."""

from __future__ import annotations

import base64
import io
import json
import subprocess
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
from tables import begins_with

from cadam_paper import catalog
from cadam_paper.harness import archive as archives
from cadam_paper.harness.archive import Archive
from cadam_paper.harness.experiment import metric_name
from cadam_paper.harness.measured_runs import measure_run
from cadam_paper.harness.results import RunSpec

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results"
LAST_COMMIT_WITH_JSON = "f09aa8e9cfb1167e36070801e3df73b209161bbd"
"""The last commit in which every result was a separate JSON file."""

STUDIES = sorted(path.stem for path in PUBLISHED.glob("*.parquet"))


def test_no_published_study_was_removed() -> None:
    names = git("ls-tree", "--name-only", "HEAD", "results/").decode().split()
    assert {Path(name).stem for name in names if name.endswith(".parquet")} <= set(STUDIES)


def git(*arguments: str) -> bytes:
    process = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    if process.returncode:
        pytest.skip(f"needs the repository's history: {process.stderr.decode().strip()}")
    return process.stdout


@pytest.mark.parametrize("study", STUDIES)
def test_earlier_rows_of_a_study_never_change(study: str) -> None:
    """Each version of the file in the history, and the current file, begins with the rows of the previous version."""
    name = f"results/{study}.parquet"
    commits = git("log", "--format=%H", "-3", "--", name).decode().split()
    versions = [git("show", f"{commit}:{name}") for commit in reversed(commits)] + [(ROOT / name).read_bytes()]
    tables = [pq.read_table(io.BytesIO(content)) for content in versions]
    for before, after in pairwise(tables):
        assert begins_with(after, before)


@once
def former_json_files() -> dict[RunSpec, dict[str, Any]]:
    """Return the contents of the former JSON files by spec."""
    content = git("archive", LAST_COMMIT_WITH_JSON, "results/kept")
    results = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        for member in files:
            file = files.extractfile(member) if member.name.endswith(".json") else None
            body = json.load(file) if file is not None and not member.name.endswith("plan.json") else None
            if body is not None:
                results[RunSpec(**body["cell"])] = body
    return results


def test_the_archive_contains_every_result_of_the_former_json_files() -> None:
    kept = former_json_files()
    assert len(kept) == 811
    archived = {
        r.spec: r for name in {spec.experiment for spec in kept} for r in Archive(PUBLISHED).study(name).results()
    }
    for spec, body in kept.items():
        result = archived[spec]
        assert result.outcome.metrics.keys() == {metric_name(name) for name in body["metrics"]}
        for name, value in body["metrics"].items():
            assert np.float64(result.outcome.metrics[metric_name(name)]).tobytes() == np.float64(value).tobytes()
        assert result.outcome.curves.keys() == {metric_name(name) for name in body["curves"]}
        for name, packed in body["curves"].items():
            raw = zlib.decompress(base64.b64decode(packed["data"]))
            curve = result.outcome.curves[metric_name(name)]
            assert (curve.dtype.str, list(curve.shape), curve.tobytes()) == (packed["dtype"], packed["shape"], raw)
        cost, provenance = body["cost"], result.provenance
        assert (provenance.code, provenance.commit, provenance.dirty) == (body["code"], None, None)
        assert (provenance.seconds, provenance.peak_memory, provenance.device, provenance.versions) == (
            cost["seconds"],
            cost["peak_memory"],
            cost["device"],
            cost["versions"],
        )


def test_results_with_the_hash_of_later_code_are_marked() -> None:
    """docs/images.md and docs/streams.md contain these numbers."""
    images = [r for r in Archive(PUBLISHED).study("images").results() if r.provenance.code is not None]
    stamped = [r.spec.model for r in images if r.provenance.restamped]
    assert (stamped.count("VGG-16") + stamped.count("ResNet-18"), stamped.count("DenseNet-121")) == (396, 21)
    fresh = [r.spec.model for r in images if not r.provenance.restamped]
    assert (fresh.count("VGG-16"), fresh.count("DenseNet-121"), len(fresh)) == (6, 27, 33)


def test_every_published_row_has_its_provenance() -> None:
    for study in STUDIES:
        for result in Archive(PUBLISHED).study(study).results():
            assert (result.provenance.commit is None) != (result.provenance.code is None), result.spec
            assert result.provenance.seconds > 0
            assert result.provenance.versions.keys() == set(archives.VERSION_COLUMNS)


RECOMPUTED = [
    pytest.param(name, position, id=f"{name}-{position}")
    for name, count in (("fig-shift", 3), ("fig-no-noise", 1), ("theorem", 3))
    for position in range(count)
]


@pytest.mark.parametrize(("name", "position"), RECOMPUTED)
def test_published_results_are_reproduced(name: str, position: int) -> None:
    """Some cheap runs are computed again and agree within the tolerance of their experiment."""
    experiment = catalog.find(name)
    results = sorted(Archive(PUBLISHED).study(name).results(), key=lambda r: r.provenance.seconds)
    published = results[position * len(results) // 12]
    outcome = measure_run(experiment.compute, published.spec).outcome
    assert experiment.tolerance > 0
    assert outcome.metrics.keys() == published.outcome.metrics.keys()
    for metric, value in published.outcome.metrics.items():
        assert outcome.metrics[metric] == pytest.approx(value, rel=experiment.tolerance, abs=1e-12, nan_ok=True), metric


def test_the_tables_can_be_opened_with_pandas_columns() -> None:
    table = pq.read_table(PUBLISHED / "images.parquet")
    assert {"model", "optimizer", "lr", "condition", "seed", "accuracy", "seconds", "device", "commit"} <= set(
        table.schema.names
    )
    assert pa.types.is_floating(table.schema.field("accuracy").type)
