"""What an event must have: names and kinds of its fields. Whatever is not like that is rejected with a reason."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, overload

import numpy as np

from ...atomic_write import replace_file
from .events import Array, Batch, Events, Labels, Rejected
from .text_columns import Reading, Texts
from .text_columns import Unreadable as Unreadable

LONGEST_TEXT = 1024
LONGEST_NUMBER = 100
KEPT = 4096
TRUTH = {"true": "1", "True": "1", "false": "0", "False": "0"}
LARGEST = 1e19
"""Of numbers: a gradient is a multiple of them, and its square must not be infinite as float32, else its weight would
stand still for ever."""
EXACT = 2**53  # up to here a float is exactly the whole number that was meant
_INTEGER = re.compile(r"(0|-?[1-9][0-9]{0,18})(\.0+)?")
_KIND = re.compile(r"(number|category|hash|integer|text)(?::(\d+))?(?:\[(\d+)\])?(\?)?")
_CLOCK = re.compile(r"clock(?::(.+?))?(\?)?")
_WORDS = re.compile(r"[^\s|,;\[\]{}()\"']+")
UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""Of times that are numbers: how many make a second."""
HOURS, DAYS = 24, 7


@dataclass(frozen=True)
class Kind:
    """One field's kind.

    ``number``: a float32 between -1e19 and 1e19. ``category:N``: an integer from 0 to N - 1. ``hash:N``: an integer or
    a text, hashed to one of N places. The text of an integer, such as "5" or "5.0" but not "05", is that integer; true
    is 1 and false is 0, as text too. With ``[K]`` after it, a list of K such values. ``clock``, or ``clock:FORM``: a
    time, see `Schema.time`, as its hour (0 to 23) and 24 plus its day of the week (24, Monday, to 30). Ids and users
    are ``integer`` or ``text``.

    With ``?`` at the end the value may be missing: a number is then nan; of the others a missing one has place 0, and
    the rest move up by one (N counts place 0, too). A list with ``?`` may be shorter than K, its end is then missing,
    or longer, then its first K count; text is taken for a list of its words.
    """

    name: str
    size: int = 0
    length: int = 0
    optional: bool = False
    form: str = ""

    @classmethod
    def of(cls, text: str) -> Kind:
        if match := _CLOCK.fullmatch(text):
            form, optional = match.groups()
            return cls("clock", HOURS + DAYS + bool(optional), 2, bool(optional), _form(form or ""))
        match = _KIND.fullmatch(text)
        if match is None:
            raise ValueError(
                f"unknown kind {text!r}: number, category:N, hash:N or clock, with [K] for a list of K, and ? at the "
                "end where values may be missing"
            )
        name, size, length, optional = match.groups()
        if (size is not None and int(size) > bool(optional)) != (name in ("category", "hash")):
            least = "above 1 with ?" if optional else "above 0"
            raise ValueError(f"kind {text!r}: category and hash need a size {least}, as in category:1000, others none")
        return cls(name, int(size or 0), int(length or 0), bool(optional))

    def __str__(self) -> str:
        if self.name == "clock":
            return f"clock{f':{self.form}' if self.form else ''}{'?' * self.optional}"
        size, length = f":{self.size}" if self.size else "", f"[{self.length}]" if self.length else ""
        return f"{self.name}{size}{length}{'?' * self.optional}"

    @property
    def dtype(self) -> Any:
        return {"number": np.float32, "time": np.float64, "text": object}.get(self.name, np.int64)


def _form(text: str) -> str:
    """A form of times: empty or one of `UNITS` for numbers, ``iso``, or as strptime has it."""
    if text not in ("", "iso", *UNITS) and "%" not in text:
        raise ValueError(f"unknown form of times {text!r}: {', '.join(UNITS)}, iso, or as in %d/%m/%Y %H:%M")
    return text


@dataclass(frozen=True)
class Target:
    """What the label is made of: a column as it is, or whether it compares so with a value."""

    column: str
    compare: str = ""
    value: str | float = ""

    @classmethod
    def of(cls, text: str) -> Target:
        """From ``click``, ``rating>=4``, ``status==sold`` and the like."""
        match = re.fullmatch(r"(.+?)\s*(>=|<=|==|!=|>|<)\s*(.+)", text)
        if match is None:
            return cls(text)
        column, compare, value = match.groups()
        try:
            return cls(column, compare, float(value))
        except ValueError:
            if compare not in ("==", "!="):
                raise ValueError(f"label {text!r}: {value!r} is not a number; text can only be == or !=") from None
            return cls(column, compare, value.strip("'\""))

    @property
    def compares_text(self) -> bool:
        return bool(self.compare) and isinstance(self.value, str)

    def labels(self, values: Sequence[Any] | Array, text: bool) -> tuple[Array, dict[int, str]]:
        """Labels from the column's values, as `convert` gives them."""
        if not self.compare:
            return convert(_clicked(values, text), Kind("number"), text)
        if isinstance(self.value, str):
            same = [None if v is None else float(_plain_text(v) == self.value) for v in values]
            array, bad = convert(same, Kind("number"))
            return (1 - array if self.compare == "!=" else array), bad
        numbers, bad = convert(_clicked(values, text), Kind("time"), text)
        with np.errstate(invalid="ignore"):
            found = COMPARE[self.compare](numbers, self.value).astype(np.float32)
        found[np.isnan(numbers)] = np.nan
        return found, bad


COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def _plain_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, (bool, np.bool_)) else str(value)


class RejectedError(Exception):
    """Why a value is rejected."""


@dataclass(frozen=True)
class Schema:
    """The fields of an event.

    Args:
        features: kind of each feature by name, see `Kind`; the names are the model's arguments.
        label: the field of the label, a number from `lowest` to `highest`, true or false; it may be missing, and come
            later. ``rating>=4`` or ``status==sold`` makes a label of a field, with >=, <=, >, <, == and !=.
        id: the field of the event's id, ``name`` for integers or ``name:text``; None: events are numbered, and
            labels can only come with them.
        user: the field of the user, as with id.
        time: the field of the time: ``name`` for a number (seconds), or ``name:FORM``, where the form is ms, us or ns
            for other numbers, iso for text such as 2013-01-31T10:00:00Z, or as strptime has it, %d/%m/%Y %H:%M. Times
            without a zone are UTC.
        binary: whether labels have to be 0 or 1, as the metrics that rank events need them.
        separator: between the fields of CSV.
        header: the names of the columns of CSV whose first line is data; None: the first line names them.
        missing: what is written in CSV where a value is missing, beside nothing: by column, as in
            ``{"price": ["NA"]}``, or in all columns, ``["NA"]``, but for one that the label compares with a text.
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

    def __post_init__(self) -> None:
        kinds = {}
        if not self.features:
            raise ValueError("a schema needs at least one feature")
        for name, text in self.features.items():
            kinds[name] = Kind.of(text)
            if kinds[name].name in ("integer", "text"):
                raise ValueError(f"feature {name!r} is of kind {text!r}: number, category:N or hash:N are for features")
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "target", Target.of(self.label))
        for key in (self.id, self.user):
            if key is not None:
                _key(key)
        if self.time is not None:
            _time(self.time)
        if len(self.separator) != 1:
            raise ValueError(f"the separator of CSV is one character, got {self.separator!r}")
        markers = self.missing.values() if isinstance(self.missing, Mapping) else [self.missing]
        if any(isinstance(one, str) for one in markers):
            raise ValueError(
                f'missing is a list of texts, or one by column, as in {{"price": ["NA"]}}: {self.missing!r}'
            )

    @classmethod
    def read(cls, path: Path | str) -> Schema:
        """A schema from a JSON file with the fields of this class; ``ignored`` is for people, and not looked at."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f'{path}: a schema is an object, as in {{"features": {{"price": "number"}}}}')
        content.pop("ignored", None)
        unknown = content.keys() - {part.name for part in fields(cls) if part.init}
        if unknown:
            raise ValueError(f"{path}: unknown fields {', '.join(sorted(unknown))}")
        try:
            return cls(**content)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def settings(self) -> dict[str, Any]:
        """What `Schema(**settings)` makes it of, without what is as by default."""
        given = {part.name: (part.default, getattr(self, part.name)) for part in fields(self) if part.init}
        return {name: value for name, (default, value) in given.items() if default is MISSING or value != default}

    def write(self, path: Path | str, **more: Any) -> None:
        """A JSON file that `read` takes; `more` is put beside."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), self.text(**more).encode())

    def text(self, **more: Any) -> str:
        """What `write` puts in the file."""
        return json.dumps({**self.settings(), **more}, indent=2, ensure_ascii=False) + "\n"

    # From records, one dict an event -------------------------------------------------------------------------

    def records(
        self,
        records: Sequence[Mapping[str, Any]],
        where: Sequence[str],
        *,
        text: bool = False,
        raw: Sequence[str | bytes] | None = None,
    ) -> Batch:
        """A batch from records; `where` says where each is. With `text` numbers are written as text, empty is missing.

        A record with the id and a label, but none of the features, is a label on its own.
        """
        values = self.values(records, text=text)
        return self.columns(values, len(records), where.__getitem__, text=text, raw=_text_of(records, raw))

    def encode(self, records: Sequence[Mapping[str, Any]], *, text: bool = False) -> Batch:
        """Events to be scored, not learnt from: label, id, user and time are not needed and not looked at.

        One that has none of the features is rejected, even where all may be missing: its names are others. Where a
        rejected one is, is its number.
        """
        known = [row for row, record in enumerate(records) if any(name in record for name in self.features)]
        given = [{name: records[row].get(name) for name in self.features} for row in known]
        alone = replace(self, id=None, user=None, time=None)
        batch = alone.records(given, list(map(str, known)), text=text) if given or not records else Batch()
        if len(known) < len(records):
            reason = f"none of the model's columns ({', '.join(self.features)}) is in the event"
            others = sorted(set(range(len(records))).difference(known))
            batch.rejected = [_rejected(reason, str(row), _shown(records[row])) for row in others] + batch.rejected
            batch.rejected.sort(key=lambda one: int(one.where))
        return batch

    def values(self, records: Sequence[Mapping[str, Any]], *, text: bool) -> dict[str, list[Any]]:
        """The columns of records: None where a value is missing."""
        values = {name: [record.get(name) for record in records] for name in self.fields()}
        if text:
            for name, column in values.items():
                nothing = {"", *self.blanks(name)}
                values[name] = [None if value in nothing else value for value in column]
        return values

    def blanks(self, column: str) -> Sequence[str]:
        """What is written in a column of CSV where a value is missing, beside nothing."""
        if isinstance(self.missing, Mapping):
            return self.missing.get(column, ())
        return () if column == self.target.column and self.target.compares_text else self.missing

    def fields(self) -> list[str]:
        named = [_key(name)[0] for name in (self.id, self.user) if name is not None]
        times = [_time(self.time)[0]] if self.time is not None else []
        return list(dict.fromkeys([*self.features, self.target.column, *named, *times]))

    # From columns --------------------------------------------------------------------------------------------

    def columns(
        self,
        values: Mapping[str, Sequence[Any] | Array],
        count: int,
        where: Callable[[int], str],
        *,
        text: bool = False,
        raw: Callable[[int], str] | None = None,
    ) -> Batch:
        """A batch from columns: lists with None where a value is missing, or arrays without missing values."""
        missing: list[Any] = [None] * count
        bad: dict[int, str] = {}

        def note(name: str, problems: Mapping[int, str], needed: bool) -> None:
            for row, problem in problems.items():
                if problem or needed:
                    bad.setdefault(row, f"{name}: {problem}" if problem else f"missing field {name!r}")

        def column(name: str, kind: Kind) -> Array:
            array, problems = convert(values.get(name, missing), kind, text)
            note(name, problems, needed=True)
            return array

        ids = users = time = None
        if self.id is not None:
            name, kind = _key(self.id)
            ids = column(name, kind)
        label, problems = self.target.labels(values.get(self.target.column, missing), text)
        note(self.target.column, problems, needed=False)
        with np.errstate(invalid="ignore"):
            outside = np.flatnonzero((label < self.lowest) | (label > self.highest))
        for row in outside.tolist():
            bad.setdefault(row, f"{self.label}: {label[row]} is not from {self.lowest:g} to {self.highest:g}")
        if self.binary:
            for row in np.flatnonzero((label != 0) & (label != 1) & ~np.isnan(label)).tolist():
                bad.setdefault(row, f"{self.label}: {label[row]} is not 0 or 1, which the metrics need")
        alone = self._labels_alone(values, count, label) if self.id is not None else np.zeros(count, dtype=bool)
        label_rejected = {row: reason for row, reason in bad.items() if alone[row]}
        if self.user is not None:
            name, kind = _key(self.user)
            users = column(name, kind)
        if self.time is not None:
            time = column(*_time(self.time))
        features = {name: column(name, kind) for name, kind in self.kinds.items()}
        # What a label on its own lacks is no fault of it.
        bad = {**{row: reason for row, reason in bad.items() if not alone[row]}, **label_rejected}
        show = raw or (lambda row: _shown({name: v[row] for name, v in values.items()}))
        rejected = [_rejected(bad[row], where(row), show(row)) for row in sorted(bad)]
        good = np.ones(count, dtype=bool)
        good[list(bad)] = False
        rows = slice(None) if good.all() and not alone.any() else good & ~alone
        labels = before = None
        if ids is not None and (good & alone).any():
            labels = Labels(ids[good & alone], label[good & alone])
            before = np.cumsum(good & ~alone)[good & alone]
        events = None
        if isinstance(rows, slice) or rows.any():
            events = Events(
                {name: array[rows] for name, array in features.items()},
                label[rows],
                None if ids is None else ids[rows],
                None if users is None else users[rows],
                None if time is None else time[rows],
            )
        return Batch(events if events is not None and len(events) else None, labels, rejected, events_before=before)

    def batches(
        self, values: Mapping[str, Sequence[Any] | Array], count: int, where: Callable[[int], str], size: int
    ) -> list[Batch]:
        """The same columns as batches of `size` events, converted at one go; rejected goes with the first.

        If there are labels on their own, each batch has `size` rows instead, so that labels stay near their place.
        """
        whole = self.columns(values, count, where)
        if whole.labels is not None:
            return [
                self.columns(
                    {name: column[start : start + size] for name, column in values.items()},
                    min(size, count - start),
                    lambda row, start=start: where(start + row),  # type: ignore[misc]
                )
                for start in range(0, count, size)
            ]
        if whole.events is None:
            return [whole]
        cuts = range(0, len(whole.events), size)
        parts = [Batch(whole.events.take(slice(start, start + size))) for start in cuts]
        parts[0].rejected = whole.rejected
        return parts

    def _labels_alone(self, values: Mapping[str, Sequence[Any] | Array], count: int, label: Array) -> Array:
        """Which rows have a label and none of the features."""
        alone = ~np.isnan(label)
        named = {_key(name)[0] for name in (self.id, self.user) if name is not None}
        for name in self.features:
            if not alone.any():
                break
            if name in values and name not in named:
                column = values[name]
                if isinstance(column, np.ndarray) and column.dtype != object:
                    return np.zeros(count, dtype=bool)
                alone &= _is_missing(column)
        return alone if set(self.features) - named else np.zeros(count, dtype=bool)


def _is_missing(column: Sequence[Any] | Array) -> Array:
    if isinstance(column, Repeated):
        found: Array = _is_missing(column.distinct)[column.places]
        return found
    if isinstance(column, Texts):
        return column.missing
    return np.fromiter((value is None for value in column), dtype=bool, count=len(column))


def _key(text: str) -> tuple[str, Kind]:
    """Name and kind of an id: ``name``, ``name:integer`` or ``name:text``."""
    name, _, kind = text.partition(":")
    if not name or kind not in ("", "integer", "text"):
        raise ValueError(f"{text!r} should be a field's name, with :text after it if it is not an integer")
    return name, Kind(kind or "integer")


def _time(text: str) -> tuple[str, Kind]:
    """Name and kind of the time: ``name`` or ``name:FORM``."""
    name, _, form = text.partition(":")
    return name, Kind("time", form=_form(form))


def _text_of(records: Sequence[Mapping[str, Any]], raw: Sequence[str | bytes] | None) -> Callable[[int], str]:
    def show(row: int) -> str:
        if raw is None:
            return _shown(dict(records[row]))
        text = raw[row]
        return text.decode(errors="replace") if isinstance(text, bytes) else text

    return show


def _shown(record: Mapping[str, Any]) -> str:
    """A record for people; of one that is nested deeper than Python can show, the outside."""
    try:
        return str(record)
    except RecursionError:
        return reprlib.repr(record)


def _rejected(reason: str, where: str, text: str) -> Rejected:
    return Rejected(reason[:KEPT], where, text[:KEPT], len(text.encode(errors="replace")))


# Values --------------------------------------------------------------------------------------------------------


def _clicked(labels: Sequence[Any] | Array, text: bool) -> Sequence[Any] | Array:
    """Labels with 1 for true and 0 for false; as text these are as JSON or Python writes them."""
    if isinstance(labels, Texts):
        return replace(labels, truths=True)
    if text:
        return [TRUTH.get(value, value) if isinstance(value, str) else value for value in labels]
    if isinstance(labels, np.ndarray) or bool not in set(map(type, labels)):
        return labels
    return [int(value) if isinstance(value, bool) else value for value in labels]


@dataclass(frozen=True)
class Repeated(Sequence[Any]):
    """Values of which few differ, such as text in a column: each is converted once."""

    distinct: Sequence[Any]
    places: Array
    """Of each row: where its value is among them."""

    @classmethod
    def of(cls, values: list[Any]) -> Repeated | None:
        """None where that would save nothing."""
        if len(values) < 64 or not set(map(type, values)) <= {str, type(None)}:
            return None
        distinct = dict.fromkeys(values)
        if not cls.saves(len(distinct), len(values)):
            return None
        place = {value: place for place, value in enumerate(distinct)}
        return cls(tuple(distinct), np.fromiter(map(place.__getitem__, values), np.int64, len(values)))

    @staticmethod
    def saves(distinct: int, count: int) -> bool:
        """Whether each value comes twice or more, on average."""
        return 2 * distinct <= count

    def by_row(self, problems: Mapping[int, str]) -> dict[int, str]:
        """The problems of distinct values, by the rows that have them."""
        is_bad = np.zeros(len(self.distinct), dtype=bool)
        is_bad[list(problems)] = True
        rows = np.flatnonzero(is_bad[self.places]) if problems else ()
        return {int(row): problems[int(self.places[row])] for row in rows}

    def __iter__(self) -> Iterator[Any]:
        return map(self.distinct.__getitem__, self.places.tolist())

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, row: int) -> Any: ...
    @overload
    def __getitem__(self, row: slice) -> Repeated: ...
    def __getitem__(self, row: int | slice) -> Any:
        if not isinstance(row, slice):
            return self.distinct[self.places[row]]
        there, places = np.unique(self.places[row], return_inverse=True)  # only those are converted
        if isinstance(self.distinct, Texts):
            return Repeated(self.distinct.rows(there), places)
        return Repeated(tuple(map(self.distinct.__getitem__, there.tolist())), places)


def convert(values: Sequence[Any] | Array, kind: Kind, text: bool = False) -> tuple[Array, dict[int, str]]:
    """Values as an array of their kind, and the rows that are not of it with the reason; '' if the value is missing.

    Rows that are not of their kind have some value of the right type: nan for numbers, 0 or '' for others.
    """
    if isinstance(values, Texts):
        if (found := _from_texts(values, kind, text)) is not None:
            return found
        values = list(_clicked(list(values), text)) if values.truths else list(values)
    if isinstance(values, list):
        values = Repeated.of(values) or values
    if isinstance(values, Repeated):
        array, problems = convert(values.distinct, kind, text)
        return array[values.places], values.by_row(problems)
    if kind.name == "clock":
        return _clock(values, kind, text)
    if kind.length:
        return _lists(values, kind, text)
    if kind.optional:
        return _optional(values, kind, text)
    if kind.form:
        return _moments(values, kind, text)
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OU":
        fast = _from_array(values, kind)
    else:
        values = list(values)
        if kind.name == "hash" and any(issubclass(one, str) for one in set(map(type, values))):
            values = [_meant(value) for value in values]
        fast = _from_plain(_read_numbers(values, kind) if text else values, kind)
    if fast is not None:
        return fast
    array = np.zeros(len(values), dtype=kind.dtype)
    if kind.name == "text":
        array[:] = ""
    elif kind.name in ("number", "time"):
        array[:] = math.nan
    bad: dict[int, str] = {}
    whole: dict[int, int] = {}
    if kind.name == "hash":  # integers at one go
        whole = {row: value for row, value in enumerate(values) if type(value) is int and _fits(value)}
        array[list(whole)] = _hashed(np.fromiter(whole.values(), np.int64, len(whole)), kind.size)
    for row, value in enumerate(values):
        if row in whole:
            continue
        if value is None:
            bad[row] = ""
            continue
        try:
            array[row] = _value(value, kind, text)
        except RejectedError as problem:
            bad[row] = str(problem)
    return array, bad


READINGS = {
    "hash": Reading.HASH,
    "category": Reading.INTEGER,
    "integer": Reading.INTEGER,
    "number": Reading.NUMBER,
    "time": Reading.NUMBER,
}


def _from_texts(values: Texts, kind: Kind, text: bool) -> tuple[Array, dict[int, str]] | None:
    """Plain values by compiled code, and a look at each of the others; None where it takes a look at all."""
    if kind.name not in READINGS or kind.length or kind.form:
        return None
    size = kind.size - kind.optional
    if (found := values.read(READINGS[kind.name], size)) is None:
        return None
    array, fine = found
    if kind.name == "number":
        fine &= np.abs(array) <= LARGEST
    elif kind.name == "category":
        fine &= (array >= 0) & (array < size)
    array = array.astype(kind.dtype, copy=False)
    if kind.optional and kind.name != "number":
        array += 1
    if fine.all():
        return array, {}
    rest = np.flatnonzero(~fine)
    looked_at: Sequence[Any] | Array = [values[row] for row in rest.tolist()]
    if values.truths:
        looked_at = _clicked(looked_at, text)
    array[rest], problems = convert(looked_at, kind, text)
    return array, {int(rest[row]): problem for row, problem in problems.items()}


def _from_plain(values: list[Any], kind: Kind) -> tuple[Array, dict[int, str]] | None:
    """A list of plain numbers at one go; None if it takes a look at each."""
    types = set(map(type, values))
    if kind.name in ("number", "time") and types <= {int, float}:
        try:
            return _from_array(np.array(values, dtype=np.float64), kind)
        except OverflowError:
            return None
    if kind.name in ("integer", "category", "hash") and types == {int}:
        try:
            return _from_array(np.array(values, dtype=np.int64), kind)
        except OverflowError:
            return None
    return None


def _from_array(values: Array, kind: Kind) -> tuple[Array, dict[int, str]] | None:
    """An array at one go; None if some value is not of the kind."""
    if values.ndim != 1:
        return None
    if kind.name in ("number", "time") and values.dtype.kind in "iufb":
        if kind.name == "time":
            array = values.astype(np.float64)
            return (array, {}) if np.isfinite(array).all() else None
        return (values.astype(np.float32), {}) if (np.abs(values.astype(np.float64)) <= LARGEST).all() else None
    if kind.name in ("integer", "category", "hash") and values.dtype.kind in "iu":
        if values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
            return None
        if kind.name == "category" and len(values) and (values.min() < 0 or values.max() >= kind.size):
            return None
        array = values.astype(np.int64, copy=False)
        return (_hashed(array, kind.size) if kind.name == "hash" else array), {}
    return None


def _optional(values: Sequence[Any] | Array, kind: Kind, text: bool) -> tuple[Array, dict[int, str]]:
    """Values some of which may be missing; nan is missing, too."""
    plain = replace(kind, optional=False, size=max(kind.size - 1, 0))
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        missing = np.isnan(values)
    elif isinstance(values, np.ndarray) and values.dtype.kind != "O":
        missing = np.zeros(len(values), dtype=bool)
    else:
        missing = np.fromiter((v is None or v != v for v in values), bool, len(values))
    if missing.any():
        there = next((v for v, gone in zip(values, missing.tolist(), strict=True) if not gone), 0)  # in their place
        if isinstance(values, np.ndarray):
            values = np.where(missing, there, values)
        else:
            values = [there if gone else v for v, gone in zip(values, missing.tolist(), strict=True)]
    array, bad = convert(values, plain, text)
    if kind.name != "number":
        array = array + 1
    array[missing] = np.nan if kind.name == "number" else 0
    return array, {row: problem for row, problem in bad.items() if not missing[row]}


def _clock(values: Sequence[Any] | Array, kind: Kind, text: bool) -> tuple[Array, dict[int, str]]:
    seconds, bad = convert(values, Kind("time", form=kind.form), text)
    known = ~np.isnan(seconds)
    array = np.zeros((len(seconds), 2), dtype=np.int64)
    whole = seconds[known].astype(np.int64)
    array[known] = np.stack([whole // 3600 % HOURS, HOURS + (whole // 86400 + 3) % DAYS], 1) + kind.optional
    if kind.optional:
        bad = {row: problem for row, problem in bad.items() if problem}
    return array, bad


def _moments(values: Sequence[Any] | Array, kind: Kind, text: bool) -> tuple[Array, dict[int, str]]:
    """Seconds since 1970 from times of a form; a date or time that Python has is one of any."""
    if kind.form in UNITS:
        numbers, bad = convert(values, Kind("time"), text)
        return numbers / UNITS[kind.form], bad
    array, bad = np.full(len(values), math.nan), {}
    known: dict[Any, float | str] = {None: ""}
    for row, value in enumerate(values):
        if isinstance(value, Unreadable):
            bad[row] = value.reason
            continue
        if value not in known:
            known[value] = _moment(value, kind.form)
        if isinstance(found := known[value], str):
            bad[row] = found
        else:
            array[row] = found
    return array, bad


def _moment(value: Any, form: str) -> float | str:
    """Seconds since 1970, or why there are none."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        try:
            written = str(value).strip()
            value = datetime.fromisoformat(written) if form == "iso" else datetime.strptime(written, form)
        except ValueError:
            return f"{str(value)[:40]!r} is no time of the form {form}"
    return float((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())


def _lists(values: Sequence[Any] | Array, kind: Kind, text: bool) -> tuple[Array, dict[int, str]]:
    single = replace(kind, length=0)
    bad: dict[int, str] = {}
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == kind.length:
        flat: Sequence[Any] | Array = values.reshape(-1)
        count = len(values)
    else:
        flat, count = [], len(values)
        filler = [None] * kind.length
        for row, value in enumerate(values):
            if kind.optional and not isinstance(value, Unreadable):
                value = _filled(value, kind.length)
            elif text and isinstance(value, str):
                value = value.split()
            if isinstance(value, (list, tuple, np.ndarray)) and len(value) == kind.length:
                flat.extend(value)
                continue
            flat.extend(filler)
            if value is None:
                bad[row] = ""
            elif isinstance(value, Unreadable):
                bad[row] = value.reason
            else:
                size = f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
                bad[row] = f"{size}, not a list of {kind.length}"
    array, problems = convert(flat, single, text)
    for place, problem in problems.items():
        bad.setdefault(place // kind.length, problem or f"no value at {place % kind.length}")
    return array.reshape(count, kind.length), bad


def _filled(value: Any, length: int) -> Any:
    """A list of the length, or what is none: text as its words, short ones filled with what is missing."""
    if value is None:
        value = []
    elif isinstance(value, str):
        value = _WORDS.findall(value)
    if not isinstance(value, (list, tuple, np.ndarray)):
        return value
    return [*value[:length], *[None] * (length - len(value))]


def _value(value: Any, kind: Kind, text: bool) -> Any:
    """One value of the kind; `RejectedError` says what is wrong with it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Unreadable):
        raise RejectedError(value.reason)
    if kind.name == "text" or (kind.name == "hash" and isinstance(value, str)):
        return _text(value, kind)
    if isinstance(value, str):
        if not text:
            advice = "; the schema can say name:text" if kind.name == "integer" else ""
            raise RejectedError(f"text {value[:40]!r}, not a number{advice}")
        value = _read_number(value, kind)
    if kind.name in ("number", "time"):
        return _number(value, kind)
    if isinstance(value, bool) and kind.name in ("category", "hash"):
        value = int(value)
    if isinstance(value, float):
        if not value.is_integer():
            raise RejectedError(f"{value} is not a whole number")
        if abs(value) > EXACT:
            raise RejectedError(f"{value:.0f} as a float, which cannot tell whole numbers of this size apart")
        value = int(value)
    if type(value) is not int:
        raise RejectedError(f"{reprlib.repr(value)[:40]} is a {type(value).__name__}, not an integer")
    if not _fits(value):
        raise RejectedError("an integer of more than 64 bits")
    if kind.name == "category" and not 0 <= value < kind.size:
        raise RejectedError(f"{value} is not from 0 to {kind.size - 1}")
    return int(_hashed(np.array([value]), kind.size)[0]) if kind.name == "hash" else value


def _fits(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _meant(value: Any) -> Any:
    """The integer that a text means, or the value: CSV has text where JSON has integers, whole floats and truths."""
    if not isinstance(value, str):
        return value
    if match := _INTEGER.fullmatch(TRUTH.get(value, value)):
        whole = int(match[1])
        if abs(whole) <= EXACT if match[2] else _fits(whole):
            return whole
    return value


def _text(value: Any, kind: Kind) -> Any:
    if type(value) is int and kind.name == "text" and abs(value) < 2**63:
        value = str(value)
    if not isinstance(value, str):
        raise RejectedError(f"a {type(value).__name__}, not text")
    if len(value) > LONGEST_TEXT:
        raise RejectedError(f"text of {len(value)} characters, more than {LONGEST_TEXT}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise RejectedError("text with half a surrogate pair, which is no valid Unicode") from None
    if kind.name == "text":
        return value
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") % kind.size


def _read_numbers(values: list[Any], kind: Kind) -> list[Any]:
    """A list of plain numbers written as text, at one go; the list itself if it takes a look at each."""
    if kind.name in ("text", "hash") or set(map(type, values)) != {str}:
        return values
    together = "".join(values)
    if not together.isascii() or "_" in together or max(map(len, values)) > LONGEST_NUMBER:
        return values
    try:
        return list(map(float if kind.name in ("number", "time") else int, values))
    except ValueError:
        return values


def _read_number(value: str, kind: Kind) -> int | float:
    """A number written in ASCII; underscores and the digits of other scripts, which Python reads, are none here."""
    if len(value) > LONGEST_NUMBER:
        raise RejectedError(f"text of {len(value)} characters, not a number")
    if value.isascii() and "_" not in value:
        if kind.name not in ("number", "time"):
            try:
                return int(value)
            except ValueError:
                pass  # 3.0 is how pandas writes the integers of a column with gaps
        try:
            return float(value)
        except ValueError:
            pass
    raise RejectedError(f"text {value[:40]!r}, not a number")


def _number(value: Any, kind: Kind) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RejectedError(f"a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise RejectedError("an integer too large for a number") from None
    if not math.isfinite(number):
        raise RejectedError(f"{number} is not finite")
    if kind.name == "number" and abs(number) > LARGEST:
        raise RejectedError(f"{number} is too large: of {LARGEST:g} and more the square is not finite as float32")
    return number


def _hashed(values: Array, size: int) -> Array:
    """Integers to places from 0 to size - 1, well mixed (the finalizer of splitmix64)."""
    mixed = values.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    places: Array = (mixed % np.uint64(size)).astype(np.int64)
    return places
