"""The archive: published results in the repository, one Parquet file per study.

A row is a result. Its columns are the run spec (`experiment` to `seed`, and `settings` as JSON), the `version` of the
experiment, one column per metric, a list `curve_NAME` per curve, and the provenance (`seconds` to `restamped`). A row
is used as the result of a run if spec and version match; the version of torch that computed it does not matter. Rows
are added at the end and never change. If two rows have the same spec and version, the later one is used.

The file `plans.json` beside the Parquet files says which experiments were archived, and at which scale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from cadam.atomic_write import replace_file
from cadam.statistics.intervals import Array

from .experiment import Experiment, Plan
from .results import Outcome, Provenance, Result, RunSpec

if TYPE_CHECKING:
    import pyarrow as pa

PLANS = "plans.json"
CURVE_PREFIX = "curve_"
SPEC_COLUMNS = ("experiment", "model", "data", "optimizer", "lr", "condition", "seed", "settings")
VERSION_COLUMNS = ("cadam", "torch", "numpy", "python")
PROVENANCE_COLUMNS = ("seconds", "peak_memory", "device", *VERSION_COLUMNS, "commit", "dirty", "code", "restamped")
FIXED_COLUMNS = (*SPEC_COLUMNS, "version", *PROVENANCE_COLUMNS)
"""All columns that are neither metrics nor curves."""
PYARROW_ADVICE = "reading them needs pyarrow: pip install pyarrow"
"""End of the message about an archive that cannot be read without pyarrow."""


class DamagedArchiveError(ValueError):
    """A file of the archive that cannot be read."""


class Archive:
    """The published results in a folder.

    Args:
        root: The folder.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self._studies: dict[str, Study] = {}

    def study(self, name: str) -> Study:
        """Return the rows of one study; its file is read once."""
        if name not in self._studies:
            self._studies[name] = Study(self.root / f"{name}.parquet")
        return self._studies[name]

    def find(self, experiment: Experiment, spec: RunSpec) -> Result | None:
        """Return the result of a run at the current version of its experiment, or None if it is not archived."""
        return self.study(spec.experiment).find(spec, experiment.version)

    def add(self, experiment: Experiment, results: Iterable[Result]) -> int:
        """Add results at the end of the files of their studies, and return how many rows were added."""
        by_study: dict[str, list[Result]] = {}
        for result in results:
            by_study.setdefault(result.spec.experiment, []).append(result)
        with self._lock():
            for name, new in by_study.items():
                self._studies.pop(name, None)  # another process may have added rows since the file was read
                self.study(name).add(experiment.version, new)
                del self._studies[name]
        return sum(map(len, by_study.values()))

    def _lock(self) -> FileLock:
        """Return a lock that keeps other processes from writing while a file is read, extended and replaced."""
        self.root.mkdir(parents=True, exist_ok=True)
        return FileLock(self.root / ".lock")

    def plan(self, experiment: Experiment) -> Plan | None:
        """Return the plan at which an experiment was archived, or None if it was not."""
        plans = self._plans()
        return Plan.of(plans[experiment.name]) if experiment.name in plans else None

    def remember(self, experiment: Experiment, plan: Plan) -> None:
        """Store the plan at which an experiment was archived."""
        with self._lock():
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
            raise DamagedArchiveError(f"{path}: {error}") from error
        return plans


class Study:
    """The rows of one Parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def table(self) -> pa.Table | None:
        """All rows, or None if there is no file.

        Raises:
            DamagedArchiveError: If the file cannot be read or has other columns.
        """
        if not self.path.exists():
            return None
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ModuleNotFoundError(f"{self.path}: {PYARROW_ADVICE}") from error
        try:
            table = pq.read_table(self.path, memory_map=False)
        except (pa.ArrowException, OSError) as error:
            raise DamagedArchiveError(f"{self.path}: {error}") from error
        if missing := [name for name in FIXED_COLUMNS if name not in table.schema.names]:
            raise DamagedArchiveError(f"{self.path}: the columns {', '.join(missing)} are missing")
        for field in table.schema:
            is_curve = field.name.startswith(CURVE_PREFIX)
            if field.name not in FIXED_COLUMNS and not is_curve and not pa.types.is_floating(field.type):
                raise DamagedArchiveError(f"{self.path}: the metric {field.name} has type {field.type}, not float")
            if is_curve and b"dtype" not in (field.metadata or {}):
                raise DamagedArchiveError(
                    f"{self.path}: the curve {field.name} has no dtype; another program may have written the file"
                )
        return table

    @cached_property
    def _row_index(self) -> dict[tuple[str, int], int]:
        """The index of the last row for each spec and version."""
        if self.table is None:
            return {}
        rows = self.table.select([*SPEC_COLUMNS, "version"]).to_pylist()
        try:
            return {(_read_spec(row).key(), row["version"]): index for index, row in enumerate(rows)}
        except (ValueError, TypeError) as error:
            raise DamagedArchiveError(f"{self.path}: {error}") from error

    def __len__(self) -> int:
        return 0 if self.table is None else self.table.num_rows

    def results(self) -> list[Result]:
        """Return the results of all versions, without rows that a later row replaces."""
        return [self._result(index) for index in sorted(self._row_index.values())]

    def find(self, spec: RunSpec, version: int) -> Result | None:
        """Return the result of a run at a version, or None if there is none."""
        index = self._row_index.get((spec.key(), version))
        return None if index is None else self._result(index)

    def _result(self, index: int) -> Result:
        assert self.table is not None
        row = self.table.slice(index, 1)
        metrics, curves = {}, {}
        for field in row.schema:
            value = row.column(field.name)[0]
            if not value.is_valid or field.name in FIXED_COLUMNS:
                continue
            if field.name.startswith(CURVE_PREFIX):
                curves[field.name.removeprefix(CURVE_PREFIX)] = _read_curve(value, field.metadata)
            else:
                metrics[field.name] = value.as_py()
        facts = row.select([*SPEC_COLUMNS, *PROVENANCE_COLUMNS]).to_pylist()[0]
        versions = {name: facts.pop(name) for name in VERSION_COLUMNS}
        others = {field.name: facts[field.name] for field in fields(Provenance) if field.name != "versions"}
        provenance = Provenance(**others, versions={name: text for name, text in versions.items() if text is not None})
        return Result(_read_spec(facts), Outcome(metrics, curves), provenance)

    def add(self, version: int, results: Sequence[Result]) -> None:
        """Write the file again with more rows at its end.

        Raises:
            ValueError: If a column has another type than in the file.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = _make_table(version, results)
        if self.table is not None:
            types = {field.name: _type_of(field) for field in self.table.schema}
            for field in table.schema:
                if (before := types.get(field.name, _type_of(field))) != _type_of(field):
                    raise ValueError(f"{self.path}: the column {field.name} has type {before}, not {_type_of(field)}")
            table = pa.concat_tables([self.table, table], promote_options="default")
        sink = pa.BufferOutputStream()
        texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
        pq.write_table(table, sink, compression="zstd", compression_level=19, use_dictionary=texts)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, sink.getvalue().to_pybytes())


def _read_spec(row: Mapping[str, Any]) -> RunSpec:
    values = {name: row[name] for name in SPEC_COLUMNS if name != "settings"}
    return RunSpec(**values, settings=json.loads(row["settings"]))


def _type_of(field: pa.Field) -> tuple[str, ...]:
    """Return the type of a column, with the dtype and the dimensions of a curve."""
    metadata = field.metadata or {}
    return str(field.type), *(metadata[key].decode() for key in (b"dtype", b"ndim") if key in metadata)


def _read_curve(value: Any, metadata: Mapping[bytes, bytes]) -> Array:
    """Convert a list, or a list of lists, to the array that was archived."""
    dtype = np.dtype(metadata[b"dtype"].decode())
    if metadata[b"ndim"] == b"2":
        rows = np.array(value.as_py(), dtype)
        return rows if rows.ndim == 2 else rows.reshape(0, 0)  # an empty list does not contain the width
    array: Array = value.values.to_numpy(zero_copy_only=False)
    return array.astype(dtype)


def _make_table(version: int, results: Sequence[Result]) -> pa.Table:
    """Return results as rows of the archive.

    Curves of dtype float16 are written as float32, because not every Parquet reader supports float16. The metadata of
    the column contain the original dtype.
    """
    import pyarrow as pa

    columns: dict[str, pa.Array] = {}
    schema: list[pa.Field] = []

    def add(name: str, kind: pa.DataType, values: list[Any], metadata: Mapping[str, str] | None = None) -> None:
        if name in columns:
            raise ValueError(f"two columns would have the name {name!r}: rename the metric")
        columns[name] = pa.array(values, kind)
        schema.append(pa.field(name, kind, metadata=metadata))

    specs = [{**asdict(r.spec), "settings": json.dumps(r.spec.settings, sort_keys=True)} for r in results]
    types = {"lr": pa.float64(), "seed": pa.int64()}
    for name in SPEC_COLUMNS:
        add(name, types.get(name, pa.string()), [spec[name] for spec in specs])
    add("version", pa.int64(), [version] * len(results))
    for name in dict.fromkeys(name for r in results for name in r.outcome.metrics):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.startswith(CURVE_PREFIX):
            raise ValueError(f"a metric's name must be snake_case and not begin with {CURVE_PREFIX}, got {name!r}")
        add(name, pa.float64(), [r.outcome.metrics.get(name) for r in results])
    for name in dict.fromkeys(name for r in results for name in r.outcome.curves):
        curves = [r.outcome.curves.get(name) for r in results]
        shapes = {(str(curve.dtype), curve.ndim) for curve in curves if curve is not None}
        if len(shapes) != 1 or not 1 <= (ndim := next(iter(shapes))[1]) <= 2:
            raise ValueError(f"the curve {name!r} must have one dtype and one or two dimensions, has {sorted(shapes)}")
        dtype = next(iter(shapes))[0]
        number = pa.from_numpy_dtype("float32" if dtype == "float16" else dtype)
        kind = pa.list_(pa.field("element", number))  # the Parquet format prescribes this name
        if ndim == 2:
            kind = pa.list_(pa.field("element", kind))
        values = [None if curve is None else curve.tolist() for curve in curves]
        add(f"{CURVE_PREFIX}{name}", kind, values, {"dtype": dtype, "ndim": str(ndim)})
    types = {"seconds": pa.float64(), "peak_memory": pa.int64(), "dirty": pa.bool_(), "restamped": pa.bool_()}
    for name in PROVENANCE_COLUMNS:
        if name in VERSION_COLUMNS:
            add(name, pa.string(), [r.provenance.versions.get(name) for r in results])
        else:
            add(name, types.get(name, pa.string()), [getattr(r.provenance, name) for r in results])
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(schema))
