"""The schema of a stream: the columns of an event, their kinds and their roles.

A record that does not fit the schema is rejected with a reason.
"""

from __future__ import annotations

import json
import operator
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...atomic_write import replace_file
from .conversion import Converted, Values, convert
from .events import ROLES, Array, Batch, Events, Labels, Rejected
from .kind import Kind, parse_key, parse_time
from .nested import ABSENT, find_field
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
        decimal: The decimal separator of numbers that are written as text.
    """

    column: str
    comparison: str = ""
    value: str | float = ""
    decimal: str = "."

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
            return convert(values, Kind("number", accepts_booleans=True, decimal=self.decimal), text)
        if isinstance(self.value, str):
            is_equal = [None if value is None else float(_as_json_text(value) == self.value) for value in values]
            labels, problems = convert(is_equal, Kind("number"))
            return (1 - labels if self.comparison == "!=" else labels), problems
        numbers, problems = convert(values, Kind("time", accepts_booleans=True, decimal=self.decimal), text)
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
        weight: The column of the weight of an event in the loss and in metrics, a number of at least 0. None: every
            event has the weight 1.
        negative_rate: The share of the negative events that the data contains, if negatives were downsampled and no
            weight makes up for it. `probabilities` corrects predictions by it.
        lowest: The lowest label.
        highest: The highest label.
        binary: Whether labels must be 0 or 1, as metrics that rank events require.
        separator: The separator between the fields of CSV.
        header: The names of the columns of a CSV file without a header. None: the first line contains the names.
        missing: Texts that stand for a missing value in CSV, in addition to an empty field: by column, as in
            ``{"price": ["NA"]}``, or for all columns, as in ``["NA"]``. The latter excludes a column that the label
            compares with a text.
        decimal: The decimal separator of numbers in CSV, a point or a comma. With a comma, ``1,234`` is 1.234, and a
            number with a point is rejected.

    Raises:
        ValueError: If one of the arguments is not valid.

    Example:
        >>> schema = Schema({"user": "hash:100000", "price": "number?"}, label="click")
        >>> schema.encode([{"user": "ann", "price": 1.5}]).events.features["price"]
        array([1.5])
    """

    features: Mapping[str, str]
    label: str = "label"
    id: str | None = None
    user: str | None = None
    time: str | None = None
    weight: str | None = None
    negative_rate: float = 1.0
    lowest: float = 0.0
    highest: float = 1.0
    binary: bool = False
    separator: str = ","
    header: Sequence[str] | None = None
    missing: Sequence[str] | Mapping[str, Sequence[str]] = ()
    decimal: str = "."
    kinds: dict[str, Kind] = field(init=False, repr=False, compare=False)
    target: Target = field(init=False, repr=False, compare=False)
    roles: dict[str, tuple[str, Kind]] = field(init=False, repr=False, compare=False)
    """The column name and kind of each of id, user, time and weight that the schema has."""

    def __post_init__(self) -> None:
        self._check_types()
        kinds = {}
        if not self.features:
            raise ValueError("a schema needs at least one feature")
        for name, text in self.features.items():
            kinds[name] = replace(Kind.parse(text), decimal=self.decimal)
            if kinds[name].name in ("integer", "text"):
                raise ValueError(
                    f"feature {name!r} has the kind {text!r}, but features are number, category:N, hash:N, id, "
                    "words:N[K] or clock"
                )
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "target", replace(Target.parse(self.label), decimal=self.decimal))
        if self.target.column in kinds:
            raise ValueError(
                f"the label {self.label!r} comes from the column {self.target.column!r}, which therefore cannot be a "
                "feature: remove it from the features"
            )
        roles = {role: parse_key(key) for role, key in (("id", self.id), ("user", self.user)) if key is not None}
        if self.time is not None:
            roles["time"] = parse_time(self.time)
        if self.weight is not None:
            roles["weight"] = (self.weight, Kind("number"))
        if not 0 < self.negative_rate <= 1:
            raise ValueError(f"negative_rate must be a share above 0 and up to 1, got {self.negative_rate}")
        roles = {role: (name, replace(kind, decimal=self.decimal)) for role, (name, kind) in roles.items()}
        object.__setattr__(self, "roles", roles)
        if role := next((role for role, (name, _) in roles.items() if name == self.target.column), None):
            raise ValueError(f"the column {self.target.column!r} is the label, so it cannot also be the {role}")
        if len(self.separator) != 1 or self.separator in '"\r\n':
            raise ValueError(
                f"the separator of CSV must be one character other than quotes and line breaks, got {self.separator!r}"
            )
        if self.decimal not in (".", ",") or self.decimal == self.separator:
            raise ValueError(
                f"the decimal separator must be a point or a comma other than the separator {self.separator!r}, got "
                f"{self.decimal!r}"
            )

    def _check_types(self) -> None:
        """Raise ValueError if an argument has another type than the schema expects, as in a file written by hand."""
        if not isinstance(self.features, Mapping) or not all(isinstance(kind, str) for kind in self.features.values()):
            raise ValueError(f'features must be kinds by name, as in {{"price": "number"}}, got {self.features!r}')
        if "self" in self.features:
            raise ValueError("a feature cannot be called 'self', because features are arguments of a method: rename it")
        for name in ("label", "id", "user", "time", "weight", "separator", "decimal"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name not in ("id", "user", "time", "weight")):
                raise ValueError(f"{name} must be text, got {value!r}")
        for name in ("lowest", "highest", "negative_rate"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not self.lowest <= self.highest:
            raise ValueError(f"lowest must be at most highest, got {self.lowest!r} and {self.highest!r}")
        if not isinstance(self.binary, bool):
            raise ValueError(f"binary must be true or false, got {self.binary!r}")
        if self.header is not None and not _is_list_of_texts(self.header):
            raise ValueError(f"header must be a list of names, got {self.header!r}")
        markers = self.missing.values() if isinstance(self.missing, Mapping) else [self.missing]
        if not all(_is_list_of_texts(texts) for texts in markers):
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
        if not isinstance(content, dict) or "features" not in content:
            raise ValueError(
                f'{path}: a schema must be an object with features, as in {{"features": {{"price": "number"}}}}'
            )
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

    def check_expiry(self) -> None:
        """Raise ValueError if ids expire by time and the schema has no time."""
        for name, kind in self.kinds.items():
            if kind.id_options is not None and kind.id_options.expires_by_time and self.time is None:
                raise ValueError(
                    f"the ids of {name!r} expire after a duration ({kind}), but the schema has no time: give the "
                    "column of the time, or a number of events, as in expire=1e6"
                )

    def missing_markers(self, column: str) -> Sequence[str]:
        """Return the texts that stand for a missing value in a column of CSV, except the empty text."""
        if isinstance(self.missing, Mapping):
            return self.missing.get(column, ())
        return () if column == self.target.column and self.target.compares_text else self.missing

    def probabilities(self, scores: Array) -> Array:
        """Return the probabilities that logits stand for, corrected for downsampled negatives.

        If a share r of the negatives was kept, a model that is trained on the rest predicts q instead of
        p = q / (q + (1 - q) / r). In logits this is a shift by log r. See He et al. (2014), "Practical Lessons from
        Predicting Clicks on Ads at Facebook", section 6.3, https://doi.org/10.1145/2648584.2648589.

        Example:
            >>> Schema({"price": "number"}, negative_rate=0.1).probabilities(np.array([0.0])).round(4)
            array([0.0909])
        """
        logits = np.asarray(scores, dtype=np.float64) + np.log(self.negative_rate)
        probabilities: Array = np.exp(-np.logaddexp(0, -logits))
        return probabilities

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

        absent = self.find_absent(records, columns)
        return self.convert_columns(columns, len(records), where.__getitem__, text=text, show=show, absent=absent)

    def encode(self, records: Sequence[Mapping[str, Any]], *, text: bool = False) -> Batch:
        """Convert records for scoring; label, user and time are ignored.

        If every record has the id, the events keep it, so that labels can arrive later.

        A record that has none of the features is rejected even if all of them may be missing, because its columns must
        have other names.

        Args:
            records: One dict per record.
            text: Whether values are text, see `convert_records`.

        Returns:
            The events and the rejected records. `Rejected.where` is the index of the record.

        Raises:
            TypeError: If `records` is not a list of dicts.
        """
        if isinstance(records, Mapping) or not all(isinstance(record, Mapping) for record in records):
            raise TypeError(
                "pass a list of records, one dict per event (for one event: [event]); got a value of type "
                f"{type(records).__name__} that is not such a list"
            )
        values_by_record = [{name: find_field(record, name) for name in self.features} for record in records]
        rows = [
            row for row, values in enumerate(values_by_record) if any(value is not ABSENT for value in values.values())
        ]
        features = [
            {name: value for name, value in values_by_record[row].items() if value is not ABSENT} for row in rows
        ]
        id_name = self.roles["id"][0] if "id" in self.roles else ""
        ids = [find_field(record, id_name) for record in records] if id_name else [None]
        has_ids = not any(key is ABSENT or key is None for key in ids)
        if has_ids:
            features = [{**values, id_name: ids[row]} for values, row in zip(features, rows, strict=True)]
        relevant = replace(self, id=self.id if has_ids else None, user=None, time=None, weight=None)
        batch = Batch()
        if features or not records:
            batch = relevant.convert_records(features, list(map(str, rows)), text=text)
        reason = f"the event has none of the model's columns ({', '.join(self.features)})"
        for row in set(range(len(records))).difference(rows):
            batch.rejected.append(_reject(reason, str(row), _show(records[row])))
        batch.rejected.sort(key=lambda rejected: int(rejected.where))
        return batch

    def columns_of_records(self, records: Sequence[Mapping[str, Any]], *, text: bool) -> dict[str, list[Any]]:
        """Return the columns of records, with None where a value is missing.

        The fields of nested objects have dotted names, see `find_field`.
        """
        columns: dict[str, list[Any]] = {}
        for name in self.column_names():
            values = [record.get(name) for record in records]
            if "." in name and None in values:
                fields = [find_field(record, name) for record in records]
                values = [None if value is ABSENT else value for value in fields]
            columns[name] = values
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
        absent: Mapping[str, Array] | None = None,
        shared: Collection[str] = (),
    ) -> Batch:
        """Convert columns of raw values to a batch.

        Args:
            columns: The values by name: lists with None where a value is missing, or arrays without missing values. A
                column that is not among them is missing in all rows.
            count: The number of rows.
            where: Returns the position of a row in its source, for rejected records.
            text: Whether numbers are written as text.
            show: Returns the original text of a row, for rejected records.
            absent: For columns that only some records have, a mask of the rows without them.
            shared: Columns whose value all rows of a file share. Rows without other features may be separate labels.

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
        own_columns = {name: values for name, values in columns.items() if name not in shared}
        is_separate = self._find_separate_labels(own_columns, count, label)
        label_problems = {row: reason for row, reason in problems.items() if is_separate[row]}
        arrays |= {role: convert_column(*column) for role, column in self.roles.items() if role != "id"}
        if "weight" in arrays:
            is_negative = np.flatnonzero(arrays["weight"] < 0).tolist()
            add_problems(self.roles["weight"][0], dict.fromkeys(is_negative, "a weight must be at least 0"))
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
            columns_of_roles = {role: array[rows] for role, array in ({"label": label} | arrays).items()}
            batch.events = Events(
                {name: array[rows] for name, array in features.items()}, *map(columns_of_roles.get, ROLES)
            )
            masks = {name: is_event for name in self.optional_columns() if name not in columns}
            masks |= {name: mask & is_event for name, mask in (absent or {}).items() if mask.any()}
            batch.missing_columns = {name: count for name, mask in masks.items() if (count := int(mask.sum()))}
        return batch

    def convert_labels(self, ids: Sequence[Any], values: Sequence[Any], where: Callable[[int], str]) -> Batch:
        """Convert labels that arrive separately from their events.

        Args:
            ids: The ids of the events, raw values of the id column.
            values: Raw values of the column of the label.
            where: Returns the position of a label in its source, for rejected labels.

        Returns:
            The labels and the rejected ones.

        Raises:
            ValueError: If the schema has no id.
        """
        if "id" not in self.roles:
            raise ValueError("labels cannot arrive separately, because the schema has no id")
        name, kind = self.roles["id"]
        keys, problems = convert(ids, kind)
        labels, label_problems = self.target.labels(values, False)
        reasons = {
            row: f"{name}: {problem}" if problem else f"missing field {name!r}" for row, problem in problems.items()
        }
        for row, problem in label_problems.items():
            column = self.target.column
            reasons.setdefault(row, f"{column}: {problem}" if problem else f"missing field {column!r}")
        for row, problem in self._label_problems(labels).items():
            reasons.setdefault(row, f"{self.label}: {problem}")
        is_valid = np.ones(len(ids), dtype=bool)
        is_valid[list(reasons)] = False
        batch = Batch(rejected=[_reject(reasons[row], where(row), _show({name: ids[row]})) for row in sorted(reasons)])
        if is_valid.any():
            batch.labels = Labels(keys[is_valid], labels[is_valid])
        return batch

    def find_absent(
        self, records: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]]
    ) -> dict[str, Array]:
        """Return, for optional columns with missing values, a mask of the records that do not have the column."""
        return {
            name: np.array([find_field(record, name) is ABSENT for record in records], dtype=bool)
            for name in self.optional_columns()
            if None in columns[name]
        }

    def optional_columns(self) -> list[str]:
        """Return the columns whose absence does not reject an event, except labels that may arrive separately."""
        optional = [name for name, kind in self.kinds.items() if kind.optional]
        return optional if self.id is not None else list(dict.fromkeys([*optional, self.target.column]))

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


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def _is_missing(column: Values) -> Array:
    if isinstance(column, DictionaryColumn):
        mask: Array = _is_missing(column.dictionary)[column.indices]
        return mask
    if isinstance(column, TextColumn):
        return column.is_missing
    return np.fromiter((value is None for value in column), dtype=bool, count=len(column))


def _show(record: Mapping[str, Any]) -> str:
    """Return a record as JSON, shortened if it is nested more deeply than Python can print."""
    try:
        return record_as_json(record)
    except (RecursionError, ValueError):
        return reprlib.repr(record)


def record_as_json(record: Mapping[str, Any]) -> str:
    """Return a record as JSON; a value that JSON does not have, such as a date, as its text."""
    return json.dumps(record, ensure_ascii=False, default=lambda value: getattr(value, "tolist", value.__str__)())


def _reject(reason: str, where: str, text: str) -> Rejected:
    return Rejected(reason[:MAX_REJECTED_TEXT], where, text[:MAX_REJECTED_TEXT], len(text.encode(errors="replace")))
