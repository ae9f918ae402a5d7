"""The cache: results on the user's disk, a file each, named by a hash of what was computed.

The name covers the spec, the version of its experiment, and the versions of cadam and torch. Editing code changes none
of them: whoever changes what an experiment computes raises its version.

A file is either whole or not there: it is written beside its place, flushed to the disk and renamed. It carries a
checksum of its content, and its name follows from its content, so a file that was cut short, edited or put in another
file's place is found out.

Processes that share a cache claim a spec before they compute it: a lock on one byte of the file `.claims`, at a place
given by the spec's hash. The system releases it when the process ends, however it ends.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cadam.ab.results import Outcome, Provenance, Result, RunSpec
from cadam.atomic_write import replace_file
from cadam.statistics.intervals import Array

from .archive import Archive, DamagedResultsError
from .experiment import Experiment, Plan, Scale

FORMAT = "cadam spec 2"


class DamagedResultError(ValueError):
    """A file of the cache that cannot be believed."""


class RunInProgressError(RuntimeError):
    """A spec that another process is computing."""


def identity(experiment: Experiment, spec: RunSpec) -> str:
    """The name of a spec's file: a hash of the spec, its experiment's version, and the versions of cadam and torch."""
    import torch

    import cadam

    return _identity(spec, experiment.version, {"cadam": cadam.__version__, "torch": torch.__version__})


def _identity(spec: RunSpec, version: int, versions: Mapping[str, str]) -> str:
    by = f"version {version}, cadam {versions['cadam']}, torch {versions['torch']}"
    return hashlib.sha256(f"{by}\n{spec.key()}".encode()).hexdigest()[:40]


class Cache:
    """The results under one folder, and behind them those of an archive, which is never written here.

    With `any_versions`, results that other versions of cadam or torch computed count too, as they do in the archive:
    so what another machine has computed can be published here.
    """

    def __init__(self, root: Path | str, archive: Archive | None = None, *, any_versions: bool = False) -> None:
        self.root = Path(root).absolute()
        self.archive = archive
        self.any_versions = any_versions

    def path(self, experiment: Experiment, spec: RunSpec) -> Path:
        return self.root / spec.experiment / f"{identity(experiment, spec)}.json"

    def load(self, experiment: Experiment, spec: RunSpec) -> Result | None:
        """The result of a spec, or None if neither the cache nor the archive has one."""
        path = self.path(experiment, spec)
        if self.any_versions and not path.exists():
            path = self._by_cell.get((spec.key(), experiment.version), path)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return self._archived(experiment, spec)
        except OSError as error:
            raise DamagedResultError(f"{path}: {error}") from error
        result = _read(path, content)
        if result.spec != spec:
            raise DamagedResultError(f"{path}: holds {result.spec}, not {spec}")
        return result

    @cached_property
    def _by_cell(self) -> dict[tuple[str, int], Path]:
        """Where the result of each spec and version is, whatever computed it; a damaged file is nowhere."""
        found = {}
        for path in self.root.glob("*/*.json"):
            with suppress(ValueError, KeyError, TypeError, AttributeError, OSError):
                body = json.loads(path.read_bytes())
                found[RunSpec(**body["spec"]).key(), body["version"]] = path
        return found

    def _archived(self, experiment: Experiment, spec: RunSpec) -> Result | None:
        try:
            return self.archive.find(experiment, spec) if self.archive is not None else None
        except DamagedResultsError as error:
            raise DamagedResultError(str(error)) from error

    def save(self, experiment: Experiment, result: Result) -> Path:
        """Cache a result, in the place of an older one if there is one. The caller has claimed the spec."""
        path = self.path(experiment, result.spec)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _write(result, experiment.version), temporary=f".{path.stem}.new")
        return path

    @contextmanager
    def claim(self, name: str, *, wait: bool) -> Iterator[None]:
        """Lock the run of this identity. Without `wait`, raise `RunInProgressError` if another process has it."""
        place, claims = int(name[:15], 16), _claims(self.root)
        try:
            fcntl.lockf(claims, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, place)
        except (BlockingIOError, PermissionError) as error:
            raise RunInProgressError(name) from error
        try:
            yield
        finally:
            fcntl.lockf(claims, fcntl.LOCK_UN, 1, place)

    def sweep(self) -> list[Path]:
        """Remove what a killed process left half-written; what a living one is writing stays."""
        removed = []
        for path in self.root.glob("*/.*.new"):
            name = path.name[1:].partition(".")[0]
            if len(name) < 40 or not set(name) <= set("0123456789abcdef"):
                continue  # not the cache's
            try:
                with self.claim(name, wait=False):
                    path.unlink(missing_ok=True)
                    removed.append(path)
            except RunInProgressError:
                continue
        return removed

    # What was last asked for, so that a report shows it. No results in it.

    def remember(self, experiment: Experiment, plan: Plan) -> None:
        path = self.root / experiment.name / "plan.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(experiment.name.encode()).hexdigest()
        with self.claim(name, wait=True):
            replace_file(path, json.dumps(asdict(plan)).encode(), temporary=f".{name}.new")

    def last_plan(self, experiment: Experiment, scale: Scale | None = None) -> Plan | None:
        """What was last asked for here, at this scale if one is given; where nothing was, what the archive holds."""
        path = self.root / experiment.name / "plan.json"
        try:
            plan = Plan.of(json.loads(path.read_text()))
        except FileNotFoundError:
            plan = None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedResultError(f"{path}: {error}; run `cadam reproduce {experiment.name}` again") from error
        if self.archive is not None and (plan is None or scale not in (None, plan.scale)):
            plan = self.archive.plan(experiment)
        return None if plan is None or scale not in (None, plan.scale) else plan


_claims_open: dict[Path, int] = {}


def _claims(root: Path) -> int:
    """The file of claims, opened once in a process: closing it anywhere would release all that the process holds."""
    file = _claims_open.get(root)
    if file is None or os.fstat(file).st_nlink == 0:
        root.mkdir(parents=True, exist_ok=True)
        file = _claims_open[root] = os.open(root / ".claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return file


# The file ------------------------------------------------------------------------------------------------------


def _write(result: Result, version: int) -> bytes:
    body = {
        "spec": asdict(result.spec),
        "version": version,
        "metrics": {name: _number(value) for name, value in result.outcome.metrics.items()},
        "curves": {name: _pack(np.asarray(curve)) for name, curve in result.outcome.curves.items()},
        "provenance": asdict(result.provenance),
    }
    return json.dumps({"format": FORMAT, "checksum": _checksum(body), **body}, indent=1, allow_nan=False).encode()


def _read(path: Path, content: bytes) -> Result:
    try:
        body = json.loads(content)
        if body.pop("format") != FORMAT:
            raise ValueError(f"not in the format {FORMAT!r}")
        if body.pop("checksum") != _checksum(body):
            raise ValueError("the checksum does not fit the content")
        spec, provenance = RunSpec(**body["spec"]), Provenance(**body["provenance"])
        if _identity(spec, body["version"], provenance.versions) != path.stem:
            raise ValueError("the name of the file does not fit its content")
        metrics = {name: float(value) for name, value in body["metrics"].items()}
        curves = {name: _unpack(packed) for name, packed in body["curves"].items()}
        return Result(spec, Outcome(metrics, curves), provenance)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error) as error:
        raise DamagedResultError(f"{path}: {error}") from error


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _number(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _pack(curve: Array) -> dict[str, Any]:
    if curve.dtype.kind not in "biuf":
        raise TypeError(f"a curve must be an array of numbers, got dtype {curve.dtype}")
    plain = np.ascontiguousarray(curve, curve.dtype.newbyteorder("<"))
    data = base64.b64encode(zlib.compress(plain.tobytes(), 9)).decode()
    return {"dtype": plain.dtype.str, "shape": list(curve.shape), "data": data}


def _unpack(packed: Mapping[str, Any]) -> Array:
    raw = zlib.decompress(base64.b64decode(packed["data"], validate=True))
    curve: Array = np.frombuffer(raw, np.dtype(packed["dtype"])).reshape(packed["shape"])
    return curve
