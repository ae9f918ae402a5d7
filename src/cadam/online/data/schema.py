"""The schema of a stream: the columns of an event, their kinds and their roles.

A record that does not fit the schema is rejected with a reason.
"""

from __future__ import annotations

import json
import operator
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...atomic_write import replace_file
from .conversion import Converted, Values, convert
from .events import Array, Batch, Events, Labels, Rejected
from .kind import Kind, parse_key, parse_time
from .text_columns import DictionaryColumn, TextColumn

MAX_REJECTED_TEXT = 4096
"""The most characters that are kept of a rejected record and of its reason."""
_OPERATORS = (operator.ge, operator.le, operator.eq, operator.ne, operator.gt, operator.lt)
COMPARISONS = dict(zip((">=", "<=", "==", "!=", ">", "<"), _OPERATORS, strict=True))


@dataclass(frozen=True)
class Target:
    """The definition of the label: a column, or the comparison of a column with a value.

    Args:
        column: The name of the column.
        comparison: One of `COMPARISONS`, empty if the label is the column itself.
        value: The number or text that the column is compared with.
    """

    column: str
    comparison: str = ""
    value: str | float = ""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target that a schema writes as ``click``, ``rating>=4`` or ``status==sold``.

        Raises:
            ValueError: If a text is compared for order.
        """
        match = re.fullmatch(r"(.+?)\s*(>=|<=|==|!=|>|<)\s*(.+)", text)
        if match is None:
            return cls(text)
        column, comparison, value = match.groups()
        try:
            return cls(column, comparison, float(value))
        except ValueError:
            if comparison not in ("==", "!="):
                raise ValueError(
                    f"label {text!r}: {value!r} is not a number, and text can only be compared with == or !="
                ) from None
            return cls(column, comparison, value.strip("'\""))

    @property
    def compares_text(self) -> bool:
        """Whether the label is the result of comparing a column with a text."""
        return bool(self.comparison) and isinstance(self.value, str)

    def labels(self, values: Values, text: bool) -> Converted:
        """Return the labels of a column of values, and the problems of rows without a label, as `convert` does."""
        if not self.comparison:
            return convert(values, Kind("number", accepts_booleans=True), text)
        if isinstance(self.value, str):
            is_equal = [None if value is None else float(_as_json_text(value) == self.value) for value in values]
            labels, problems = convert(is_equal, Kind("number"))
            return (1 - labels if self.comparison == "!=" else labels), problems
        numbers, problems = convert(values, Kind("time", accepts_booleans=True), text)
        with np.errstate(invalid="ignore"):
            labels = COMPARISONS[self.comparison](numbers, self.value).astype(np.float32)
        labels[np.isnan(numbers)] = np.nan
        return labels, problems


def _as_json_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, (bool, np.bool_)) else str(value)


@dataclass(frozen=True)
class Schema:
    """The columns of an event.

    Args:
        features: The kind of each feature by name (see `Kind`). The names are the arguments of the model.
        label: The column of the label: a number from `lowest` to `highest`, or a boolean. It may be missing and arrive
            later. ``rating>=4`` or ``status==sold`` derives the label from a column; the comparisons are >=, <=, >, <,
            == and !=.
        id: The column of the event's id, ``name`` for integers or ``name:text``. None: events are numbered, and labels
            cannot arrive separately.
        user: The column of the user, written like `id`.
        time: The column of the time: ``name`` for a number of seconds, or ``name:FORMAT``. The format is ms, us or ns
            for numbers in another unit, iso for text such as 2013-01-31T10:00:00Z, or a format of strptime such as
            %d/%m/%Y %H:%M. Times without a zone are UTC.
        lowest: The lowest label.
        highest: The highest label.
        binary: Whether labels must be 0 or 1, as metrics that rank events require.
        separator: The separator between the fields of CSV.
        header: The names of the columns of a CSV file without a header. None: the first line contains the names.
        missing: Texts that stand for a missing value in CSV, in addition to an empty field: by column, as in
            ``{"price": ["NA"]}``, or for all columns, as in ``["NA"]``. The latter excludes a column that the label
            compares with a text.

    Raises:
        ValueError: If one of the arguments is not valid.

    Example:
        >>> schema = Schema({"user": "hash:100000", "price": "number?"}, label="click")
        >>> schema.encode([{"user": "ann", "price": 1.5}]).events.features["price"]
        array([1.5], dtype=float32)
    """

    features: Mapping[str, str]
    label: str = "label"
    id: str | None = None
    user: str | None = None
    time: str | None = None
    lowest: float = 0.0
    highest: float = 1.0
    binary: bool = False
    separator: str = ","
    header: Sequence[str] | None = None
    missing: Sequence[str] | Mapping[str, Sequence[str]] = ()
    kinds: dict[str, Kind] = field(init=False, repr=False, compare=False)
    target: Target = field(init=False, repr=False, compare=False)
    roles: dict[str, tuple[str, Kind]] = field(init=False, repr=False, compare=False)
    """The column name and kind of each of id, user and time that the schema has."""

    def __post_init__(self) -> None:
        kinds = {}
        if not self.features:
            raise ValueError("a schema needs at least one feature")
        for name, text in self.features.items():
            kinds[name] = Kind.parse(text)
            if kinds[name].name in ("integer", "text"):
                raise ValueError(
                    f"feature {name!r} has the kind {text!r}, but features are number, category:N or hash:N"
                )
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "target", Target.parse(self.label))
        roles = {role: parse_key(key) for role, key in (("id", self.id), ("user", self.user)) if key is not None}
        if self.time is not None:
            roles["time"] = parse_time(self.time)
        object.__setattr__(self, "roles", roles)
        if len(self.separator) != 1:
            raise ValueError(f"the separator of CSV must be one character, got {self.separator!r}")
        markers = self.missing.values() if isinstance(self.missing, Mapping) else [self.missing]
        if any(isinstance(texts, str) for texts in markers):
            raise ValueError(
                f'missing must be a list of texts, or a list per column as in {{"price": ["NA"]}}, got {self.missing!r}'
            )

    @classmethod
    def read(cls, path: Path | str) -> Schema:
        """Read a schema from a JSON file.

        Args:
            path: A file with the arguments of this class. An additional entry ``ignored`` is a note for readers.

        Raises:
            ValueError: If the file does not contain a valid schema.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f'{path}: a schema must be an object, as in {{"features": {{"price": "number"}}}}')
        content.pop("ignored", None)
        unknown = content.keys() - {part.name for part in fields(cls) if part.init}
        if unknown:
            raise ValueError(f"{path}: unknown fields {', '.join(sorted(unknown))}")
        try:
            return cls(**content)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def settings(self) -> dict[str, Any]:
        """Return the arguments of this schema that differ from the defaults."""
        arguments = {part.name: (part.default, getattr(self, part.name)) for part in fields(self) if part.init}
        return {name: value for name, (default, value) in arguments.items() if default is MISSING or value != default}

    def write(self, path: Path | str, **notes: Any) -> None:
        """Write a JSON file that `read` accepts, with further entries for readers."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), self.to_json(**notes).encode())

    def to_json(self, **notes: Any) -> str:
        """Return the content of the file that `write` writes."""
        return json.dumps({**self.settings(), **notes}, indent=2, ensure_ascii=False) + "\n"

    def column_names(self) -> list[str]:
        """Return the names of all columns that the schema uses."""
        role_columns = [name for name, _ in self.roles.values()]
        return list(dict.fromkeys([*self.features, self.target.column, *role_columns]))

    def missing_markers(self, column: str) -> Sequence[str]:
        """Return the texts that stand for a missing value in a column of CSV, except the empty text."""
        if isinstance(self.missing, Mapping):
            return self.missing.get(column, ())
        return () if column == self.target.column and self.target.compares_text else self.missing

    # Conversion of records, which are dicts ----------------------------------------------------------------------

    def convert_records(
        self, records: Sequence[Mapping[str, Any]], where: Sequence[str], *, text: bool = False
    ) -> Batch:
        """Convert records to a batch.

        A record that has the id and a label but none of the features is a label that arrives separately.

        Args:
            records: One dict per record.
            where: The position of each record in its source, for rejected records.
            text: Whether values are text, as in CSV: numbers are written as text, and an empty text is missing.

        Returns:
            The events, separate labels and rejected records.
        """
        columns = self.columns_of_records(records, text=text)

        def show(row: int) -> str:
            return _show(dict(records[row]))

        return self.convert_columns(columns, len(records), where.__getitem__, text=text, show=show)

    def encode(self, records: Sequence[Mapping[str, Any]], *, text: bool = False) -> Batch:
        """Convert records for scoring; label, id, user and time are ignored.

        A record that has none of the features is rejected even if all of them may be missing, because its columns must
        have other names.

        Args:
            records: One dict per record.
            text: Whether values are text, see `convert_records`.

        Returns:
            The events and the rejected records. `Rejected.where` is the index of the record.
        """
        rows = [row for row, record in enumerate(records) if any(name in record for name in self.features)]
        features = [{name: records[row].get(name) for name in self.features} for row in rows]
        features_only = replace(self, id=None, user=None, time=None)
        batch = Batch()
        if features or not records:
            batch = features_only.convert_records(features, list(map(str, rows)), text=text)
        reason = f"the event has none of the model's columns ({', '.join(self.features)})"
        for row in set(range(len(records))).difference(rows):
            batch.rejected.append(_reject(reason, str(row), _show(records[row])))
        batch.rejected.sort(key=lambda rejected: int(rejected.where))
        return batch

    def columns_of_records(self, records: Sequence[Mapping[str, Any]], *, text: bool) -> dict[str, list[Any]]:
        """Return the columns of records, with None where a value is missing."""
        columns = {name: [record.get(name) for record in records] for name in self.column_names()}
        if text:
            for name, values in columns.items():
                markers = {"", *self.missing_markers(name)}
                columns[name] = [None if value in markers else value for value in values]
        return columns

    # Conversion of columns ---------------------------------------------------------------------------------------

    def convert_columns(
        self,
        columns: Mapping[str, Values],
        count: int,
        where: Callable[[int], str],
        *,
        text: bool = False,
        show: Callable[[int], str] | None = None,
    ) -> Batch:
        """Convert columns of raw values to a batch.

        Args:
            columns: The values by name: lists with None where a value is missing, or arrays without missing values.
            count: The number of rows.
            where: Returns the position of a row in its source, for rejected records.
            text: Whether numbers are written as text.
            show: Returns the original text of a row, for rejected records.

        Returns:
            The events, separate labels and rejected records.
        """
        all_missing: list[Any] = [None] * count
        problems: dict[int, str] = {}

        def add_problems(name: str, new_problems: Mapping[int, str], is_required: bool = True) -> None:
            for row, problem in new_problems.items():
                if problem:
                    problems.setdefault(row, f"{name}: {problem}")
                elif is_required:
                    problems.setdefault(row, f"missing field {name!r}")

        def convert_column(name: str, kind: Kind) -> Array:
            array, new_problems = convert(columns.get(name, all_missing), kind, text)
            add_problems(name, new_problems)
            return array

        arrays = {"id": convert_column(*self.roles["id"])} if "id" in self.roles else {}
        label, new_problems = self.target.labels(columns.get(self.target.column, all_missing), text)
        add_problems(self.target.column, new_problems, is_required=False)
        add_problems(self.label, self._label_problems(label))
        is_separate = self._find_separate_labels(columns, count, label)
        label_problems = {row: reason for row, reason in problems.items() if is_separate[row]}
        arrays |= {role: convert_column(*column) for role, column in self.roles.items() if role != "id"}
        features = {name: convert_column(name, kind) for name, kind in self.kinds.items()}
        # A separate label has no other columns, so only problems of its id and label count.
        problems = {row: reason for row, reason in problems.items() if not is_separate[row]} | label_problems

        show = show or (lambda row: _show({name: values[row] for name, values in columns.items()}))
        batch = Batch(rejected=[_reject(problems[row], where(row), show(row)) for row in sorted(problems)])
        is_valid = np.ones(count, dtype=bool)
        is_valid[list(problems)] = False
        is_label, is_event = is_valid & is_separate, is_valid & ~is_separate
        if is_label.any():
            batch.labels = Labels(arrays["id"][is_label], label[is_label])
            batch.events_before = np.cumsum(is_event)[is_label]
        if is_event.any():
            rows = slice(None) if is_event.all() else is_event  # A slice does not copy the arrays.
            ids, users, time = (arrays[role][rows] if role in arrays else None for role in ("id", "user", "time"))
            batch.events = Events(
                {name: array[rows] for name, array in features.items()}, label[rows], ids, users, time
            )
        return batch

    def _label_problems(self, label: Array) -> dict[int, str]:
        """Return the problems of labels that are out of range or not binary; nan is a missing label."""
        with np.errstate(invalid="ignore"):
            is_outside = (label < self.lowest) | (label > self.highest)
        is_wrong = is_outside | ((label != 0) & (label != 1) & ~np.isnan(label)) if self.binary else is_outside
        valid_range, valid_values = f"from {self.lowest:g} to {self.highest:g}", "0 or 1, which the metrics require"
        return {
            row: f"{label[row]} is not {valid_range if is_outside[row] else valid_values}"
            for row in np.flatnonzero(is_wrong).tolist()
        }

    def _find_separate_labels(self, columns: Mapping[str, Values], count: int, label: Array) -> Array:
        """Return a mask of the rows that have a label and none of the features, if the schema has an id."""
        no_row = np.zeros(count, dtype=bool)
        features = set(self.features) - {name for role, (name, _) in self.roles.items() if role != "time"}
        if self.id is None or not features:
            return no_row
        is_separate = ~np.isnan(label)
        for name in features.intersection(columns):
            if not is_separate.any():
                break
            values = columns[name]
            if isinstance(values, np.ndarray) and values.dtype != object:
                return no_row
            is_separate &= _is_missing(values)
        return is_separate


def _is_missing(column: Values) -> Array:
    if isinstance(column, DictionaryColumn):
        mask: Array = _is_missing(column.dictionary)[column.indices]
        return mask
    if isinstance(column, TextColumn):
        return column.is_missing
    return np.fromiter((value is None for value in column), dtype=bool, count=len(column))


def _show(record: Mapping[str, Any]) -> str:
    """Return a record as text, shortened if it is nested more deeply than Python can print."""
    try:
        return str(record)
    except RecursionError:
        return reprlib.repr(record)


def _reject(reason: str, where: str, text: str) -> Rejected:
    return Rejected(reason[:MAX_REJECTED_TEXT], where, text[:MAX_REJECTED_TEXT], len(text.encode(errors="replace")))
