"""The cache: results on the user's disk, one file per run, named by a hash of the run.

The name covers the run spec, the version of its experiment, and the versions of cadam and torch. It does not cover the
code: a change of what an experiment computes must increase its version.

A file is either complete or absent, because it is written beside its final path, flushed to disk and renamed. It has
a checksum of its content, and its name follows from its content, so a file that was truncated, edited or moved to the
path of another file is detected.

Processes that share a cache lock a run before they compute it. The operating system releases the lock when the process
ends, however it ends.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from cadam.atomic_write import replace_file
from cadam.statistics.intervals import Array

from .archive import Archive, DamagedArchiveError
from .experiment import Experiment, Plan, Scale
from .measured_runs import DamagedResultError
from .results import Outcome, Provenance, Result, RunSpec

FORMAT = "cadam run 1"
LOCKS = ".locks"
"""The folder of lock files inside the folder of a cache."""


class RunInProgressError(RuntimeError):
    """Another process is computing the run."""


def identity(experiment: Experiment, spec: RunSpec) -> str:
    """Return the name of a run's file: a hash of the spec and of the versions of its experiment, cadam and torch."""
    import torch

    import cadam

    return _identity(spec, experiment.version, {"cadam": cadam.__version__, "torch": torch.__version__})


def _identity(spec: RunSpec, version: int, versions: Mapping[str, str]) -> str:
    prefix = f"version {version}, cadam {versions['cadam']}, torch {versions['torch']}"
    return hashlib.sha256(f"{prefix}\n{spec.key()}".encode()).hexdigest()[:40]


class Cache:
    """Results in a folder, and in an archive that is only read.

    Args:
        root: The folder.
        archive: The archive in which results are looked up that are not in the folder.
        any_versions: Whether to use results that other versions of cadam or torch computed, as the archive does. This
            allows results from another machine to be copied into the folder and then archived.
    """

    def __init__(self, root: Path | str, archive: Archive | None = None, *, any_versions: bool = False) -> None:
        self.root = Path(root).absolute()
        self.archive = archive
        self.any_versions = any_versions

    def path(self, experiment: Experiment, spec: RunSpec) -> Path:
        """Return the path of the file for a run."""
        return self.root / spec.experiment / f"{identity(experiment, spec)}.json"

    def load(self, experiment: Experiment, spec: RunSpec) -> Result | None:
        """Return the result of a run, or None if neither the folder nor the archive has one.

        Raises:
            DamagedResultError: If there is a file that cannot be read.
        """
        path = self.path(experiment, spec)
        if self.any_versions and not path.exists():
            path = self._path_by_spec.get((spec.key(), experiment.version), path)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return self._archived(experiment, spec)
        except OSError as error:
            raise DamagedResultError(f"{path}: {error}") from error
        result = _read(path, content)
        if result.spec != spec:
            raise DamagedResultError(f"{path}: contains the result of {result.spec}, not of {spec}")
        return result

    @cached_property
    def _path_by_spec(self) -> dict[tuple[str, int], Path]:
        """The path of a result by spec and version, for any version of cadam and torch. Damaged files are omitted."""
        paths = {}
        for path in self.root.glob("*/*.json"):
            with suppress(ValueError, KeyError, TypeError, AttributeError, OSError):
                body = json.loads(path.read_bytes())
                paths[RunSpec(**body["spec"]).key(), body["version"]] = path
        return paths

    def _archived(self, experiment: Experiment, spec: RunSpec) -> Result | None:
        try:
            return self.archive.find(experiment, spec) if self.archive is not None else None
        except DamagedArchiveError as error:
            raise DamagedResultError(str(error)) from error

    def save(self, experiment: Experiment, result: Result) -> Path:
        """Write a result, replace an earlier one, and return the path. The caller must have locked the run."""
        path = self.path(experiment, result.spec)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _write(result, experiment.version), temporary=f".{path.stem}.new")
        return path

    @contextmanager
    def lock(self, name: str, *, wait: bool) -> Iterator[None]:
        """Lock the run with this identity.

        Args:
            name: The identity of the run.
            wait: Whether to wait for another process that has the lock.

        Raises:
            RunInProgressError: If another process has the lock and `wait` is False.
        """
        folder = self.root / LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / name)
        try:
            lock.acquire(timeout=-1 if wait else 0, poll_interval=0.1)
        except Timeout as error:
            raise RunInProgressError(name) from error
        try:
            yield
        finally:
            lock.release()

    def sweep(self) -> list[Path]:
        """Remove the unfinished files of killed processes, and return their paths.

        Files that a running process is writing are kept, because it holds the lock of the run.
        """
        removed = []
        for path in self.root.glob("*/.*.new"):
            name = path.name[1:].partition(".")[0]
            if len(name) < 40 or not set(name) <= set("0123456789abcdef"):
                continue  # not a file of the cache
            with suppress(RunInProgressError), self.lock(name, wait=False):
                path.unlink(missing_ok=True)
                removed.append(path)
        return removed

    def remember(self, experiment: Experiment, plan: Plan) -> None:
        """Store the plan that was requested last, so that a report can show it."""
        path = self.root / experiment.name / "plan.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(experiment.name.encode()).hexdigest()
        with self.lock(name, wait=True):
            replace_file(path, json.dumps(asdict(plan)).encode(), temporary=f".{name}.new")

    def last_plan(self, experiment: Experiment, scale: Scale | None = None) -> Plan | None:
        """Return the plan that was requested last, otherwise the archived plan, otherwise None.

        Args:
            experiment: The experiment.
            scale: The scale that the plan must have; None for any.

        Raises:
            DamagedResultError: If the file of the plan cannot be read.
        """
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


def _write(result: Result, version: int) -> bytes:
    body = {
        "spec": asdict(result.spec),
        "version": version,
        "metrics": {name: _json_number(value) for name, value in result.outcome.metrics.items()},
        "curves": {name: _pack(np.asarray(curve)) for name, curve in result.outcome.curves.items()},
        "provenance": asdict(result.provenance),
    }
    return json.dumps({"format": FORMAT, "checksum": _checksum(body), **body}, indent=1, allow_nan=False).encode()


def _read(path: Path, content: bytes) -> Result:
    try:
        body = json.loads(content)
        if body.pop("format") != FORMAT:
            raise ValueError(f"the format is not {FORMAT!r}")
        if body.pop("checksum") != _checksum(body):
            raise ValueError("the checksum does not match the content")
        spec, provenance = RunSpec(**body["spec"]), Provenance(**body["provenance"])
        if _identity(spec, body["version"], provenance.versions) != path.stem:
            raise ValueError("the name of the file does not match its content")
        metrics = {name: float(value) for name, value in body["metrics"].items()}
        curves = {name: _unpack(packed) for name, packed in body["curves"].items()}
        return Result(spec, Outcome(metrics, curves), provenance)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error) as error:
        raise DamagedResultError(f"{path}: {error}") from error


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: as text if it is not finite."""
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
