"""The archive: published results in the repository, one Parquet file per study, with where each row comes from.

A row is a result. Its columns: the spec (`experiment` to `seed`, and `settings` as JSON), `version` of the experiment,
a column for each metric, `curve_NAME` for each curve as a list, and the provenance (`seconds` to `restamped`). A row
counts as computed when spec and version match, whatever version of torch computed it. Rows are added at the end and
never change; where two are of one spec and version, the later one supersedes the earlier.

`plans.json` beside the files says which experiments were archived, and at which scale.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cadam.ab.results import Outcome, Provenance, Result, RunSpec
from cadam.atomic_write import replace_file
from cadam.statistics.intervals import Array

from .experiment import Experiment, Plan

if TYPE_CHECKING:
    import pyarrow as pa

PLANS = "plans.json"
CURVE = "curve_"
CELL = ("experiment", "model", "data", "optimizer", "lr", "condition", "seed", "settings")
VERSIONS = ("cadam", "torch", "numpy", "python")
PROVENANCE = ("seconds", "peak_memory", "device", *VERSIONS, "commit", "dirty", "code", "restamped")
NEEDS = "reading them takes pyarrow: pip install pyarrow"


class DamagedResultsError(ValueError):
    """A file of the archive that cannot be read."""


class Archive:
    """The published results under one folder."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self._studies: dict[str, Study] = {}

    def study(self, name: str) -> Study:
        """The rows of one study, read once."""
        if name not in self._studies:
            self._studies[name] = Study(self.root / f"{name}.parquet")
        return self._studies[name]

    def find(self, experiment: Experiment, spec: RunSpec) -> Result | None:
        """The result of a spec as this version of the experiment gives it, or None if there is none."""
        return self.study(spec.experiment).find(spec, experiment.version)

    def add(self, experiment: Experiment, results: Iterable[Result]) -> int:
        """Add results at the end of their studies' files, each replaced in one go. How many rows are new."""
        by_study: dict[str, list[Result]] = {}
        for result in results:
            by_study.setdefault(result.spec.experiment, []).append(result)
        with self._alone():
            for name, found in by_study.items():
                self._studies.pop(name, None)  # another process may have added to it since it was read
                self.study(name).add(experiment.version, found)
                del self._studies[name]
        return sum(map(len, by_study.values()))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one process write at a time: reading a file, adding to it and replacing it belong together."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def plan(self, experiment: Experiment) -> Plan | None:
        """What was archived of an experiment, if anything was."""
        plans = self._plans()
        return Plan.of(plans[experiment.name]) if experiment.name in plans else None

    def remember(self, experiment: Experiment, plan: Plan) -> None:
        with self._alone():
            plans = {**self._plans(), experiment.name: asdict(plan)}
            text = "".join(f" {json.dumps(name)}: {json.dumps(plans[name])},\n" for name in sorted(plans))
            replace_file(self.root / PLANS, ("{\n" + text.removesuffix(",\n") + "\n}\n").encode())

    def _plans(self) -> dict[str, Any]:
        path = self.root / PLANS
        try:
            plans: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise DamagedResultsError(f"{path}: {error}") from error
        return plans


class Study:
    """The rows of one Parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def table(self) -> pa.Table | None:
        """All rows, or None if there is no such file."""
        if not self.path.exists():
            return None
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ModuleNotFoundError(f"{self.path}: {NEEDS}") from error
        try:
            table = pq.read_table(self.path, memory_map=False)
        except (pa.ArrowException, OSError) as error:
            raise DamagedResultsError(f"{self.path}: {error}") from error
        if missing := [name for name in (*CELL, "version", *PROVENANCE) if name not in table.schema.names]:
            raise DamagedResultsError(f"{self.path}: no column {', '.join(missing)}")
        for field in table.schema:
            known = field.name in (*CELL, "version", *PROVENANCE)
            if not known and not field.name.startswith(CURVE) and not pa.types.is_floating(field.type):
                raise DamagedResultsError(f"{self.path}: the metric {field.name} holds {field.type}, not numbers")
            if field.name.startswith(CURVE) and b"dtype" not in (field.metadata or {}):
                raise DamagedResultsError(
                    f"{self.path}: {field.name} lacks its dtype: was the file written by another tool?"
                )
        return table

    @cached_property
    def _places(self) -> dict[tuple[str, int], int]:
        """Where the result of each spec and version is; of two the later one."""
        if self.table is None:
            return {}
        rows = self.table.select([*CELL, "version"]).to_pylist()
        try:
            return {(_spec(row).key(), row["version"]): place for place, row in enumerate(rows)}
        except (ValueError, TypeError) as error:
            raise DamagedResultsError(f"{self.path}: {error}") from error

    def __len__(self) -> int:
        return 0 if self.table is None else self.table.num_rows

    def results(self) -> list[Result]:
        """Every result that is not superseded, whatever its version."""
        return [self._result(place) for place in sorted(self._places.values())]

    def find(self, spec: RunSpec, version: int) -> Result | None:
        place = self._places.get((spec.key(), version))
        return None if place is None else self._result(place)

    def _result(self, place: int) -> Result:
        assert self.table is not None
        row = self.table.slice(place, 1)
        metrics, curves = {}, {}
        for field in row.schema:
            value = row.column(field.name)[0]
            if not value.is_valid or field.name in (*CELL, "version", *PROVENANCE):
                continue
            if field.name.startswith(CURVE):
                curves[field.name.removeprefix(CURVE)] = _curve(value, field.metadata)
            else:
                metrics[field.name] = value.as_py()
        facts = row.select([*CELL, *PROVENANCE]).to_pylist()[0]
        versions = {name: facts.pop(name) for name in VERSIONS}
        known = {field.name: facts[field.name] for field in fields(Provenance) if field.name != "versions"}
        provenance = Provenance(**known, versions={name: text for name, text in versions.items() if text is not None})
        return Result(_spec(facts), Outcome(metrics, curves), provenance)

    def add(self, version: int, results: Sequence[Result]) -> None:
        """Write the file anew with more rows behind those it has."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = _table(version, results)
        if self.table is not None:
            known = {field.name: _kind(field) for field in self.table.schema}
            for field in table.schema:
                if (kind := known.get(field.name, _kind(field))) != _kind(field):
                    raise ValueError(f"{self.path}: the column {field.name} holds {kind}, not {_kind(field)}")
            table = pa.concat_tables([self.table, table], promote_options="default")
        sink = pa.BufferOutputStream()
        texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
        pq.write_table(table, sink, compression="zstd", compression_level=19, use_dictionary=texts)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, sink.getvalue().to_pybytes())


def _spec(row: Mapping[str, Any]) -> RunSpec:
    return RunSpec(**{name: row[name] for name in CELL if name != "settings"}, settings=json.loads(row["settings"]))


def _kind(field: pa.Field) -> tuple[str, ...]:
    """What a column holds."""
    metadata = field.metadata or {}
    return str(field.type), *(metadata[key].decode() for key in (b"dtype", b"ndim") if key in metadata)


def _curve(value: Any, metadata: Mapping[bytes, bytes]) -> Array:
    """A list, or a list of lists, as the array it was."""
    dtype = np.dtype(metadata[b"dtype"].decode())
    if metadata[b"ndim"] == b"2":
        rows = np.array(value.as_py(), dtype)
        return rows if rows.ndim == 2 else rows.reshape(0, 0)  # no rows: how wide they would be is not known
    array: Array = value.values.to_numpy(zero_copy_only=False)
    return array.astype(dtype)


def _table(version: int, results: Sequence[Result]) -> pa.Table:
    """New rows. Half precision is written as float32, which every reader knows; a column says what it was."""
    import pyarrow as pa

    columns: dict[str, pa.Array] = {}
    schema: list[pa.Field] = []

    def add(name: str, kind: pa.DataType, values: list[Any], metadata: Mapping[str, str] | None = None) -> None:
        if name in columns:
            raise ValueError(f"two columns would be called {name!r}: rename the metric")
        columns[name] = pa.array(values, kind)
        schema.append(pa.field(name, kind, metadata=metadata))

    specs = [{**asdict(r.spec), "settings": json.dumps(r.spec.settings, sort_keys=True)} for r in results]
    kinds = {"lr": pa.float64(), "seed": pa.int64()}
    for name in CELL:
        add(name, kinds.get(name, pa.string()), [spec[name] for spec in specs])
    add("version", pa.int64(), [version] * len(results))
    for name in dict.fromkeys(name for r in results for name in r.outcome.metrics):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.startswith(CURVE):
            raise ValueError(f"a metric's name must be snake_case and not begin with {CURVE}, got {name!r}")
        add(name, pa.float64(), [r.outcome.metrics.get(name) for r in results])
    for name in dict.fromkeys(name for r in results for name in r.outcome.curves):
        curves = [r.outcome.curves.get(name) for r in results]
        shapes = {(str(curve.dtype), curve.ndim) for curve in curves if curve is not None}
        if len(shapes) != 1 or not 1 <= (ndim := next(iter(shapes))[1]) <= 2:
            raise ValueError(f"the curve {name!r} must have one dtype and one or two dimensions, has {sorted(shapes)}")
        dtype = next(iter(shapes))[0]
        number = pa.from_numpy_dtype("float32" if dtype == "float16" else dtype)
        kind = pa.list_(pa.field("element", number))  # as Parquet calls it
        values = [None if curve is None else curve.tolist() for curve in curves]
        add(
            f"{CURVE}{name}",
            kind if ndim == 1 else pa.list_(pa.field("element", kind)),
            values,
            {"dtype": dtype, "ndim": str(ndim)},
        )
    kinds = {"seconds": pa.float64(), "peak_memory": pa.int64(), "dirty": pa.bool_(), "restamped": pa.bool_()}
    for name in PROVENANCE:
        if name in VERSIONS:
            add(name, pa.string(), [r.provenance.versions.get(name) for r in results])
        else:
            add(name, kinds.get(name, pa.string()), [getattr(r.provenance, name) for r in results])
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(schema))
