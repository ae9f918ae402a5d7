"""A schema from a sample: what each column is, and why; what is odd about the data."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import numpy as np

from ...metrics.auc import auc
from ..events import Array
from ..schema import LONGEST_TEXT, UNITS, Kind, Schema, Target, convert
from .sampling import SEPARATORS, Sample, dumped

USER = {"user", "users", "uid", "userid", "member", "customer", "visitor", "viewer", "用户", "用户id", "会员"}
TIME = {
    "time", "timestamp", "ts", "date", "datetime", "at", "when", "created", "day", "hour", "epoch",
    "时间", "日期", "时间戳",
}  # fmt: skip
ID = {"id", "ids", "uuid", "guid", "key", "编号"}
EVENT = {"id", "event", "impression", "request", "row", "record", "uuid", "guid", "log"}
LABEL = {"label", "click", "clicked", "clicks", "target", "y", "converted", "conversion", "is_click", "点击", "标签"}
CODE = ID | {"code", "zip", "zipcode", "postcode", "type", "category", "class", "month", "hour", "day", "weekday", "no"}
THING = {
    "item", "movie", "film", "product", "sku", "article", "advertiser", "ad", "adgroup", "campaign", "creative",
    "banner", "publisher", "site", "page", "video", "song", "track", "album", "artist", "author", "book", "game", "app",
    "store", "shop", "seller", "merchant", "vendor", "brand", "restaurant", "hotel", "channel", "playlist", "genre",
    "category", "subcategory", "topic", "tag", "group", "cluster", "segment", "city", "country", "region", "state",
    "location", "place", "venue", "device", "browser", "session", "account", "query", "keyword", "商品", "品牌", "广告",
}  # fmt: skip
"""What ids name: a column whose name ends in one of these has ids, unless it is an amount."""
AMOUNT = {
    "price", "amount", "count", "num", "number", "qty", "quantity", "age", "distance", "duration", "score", "length",
    "size", "temperature", "temp", "lat", "lon", "latitude", "longitude", "rate", "ratio", "cost", "bid", "income",
    "balance", "views", "seconds", "minutes", "weight", "height", "width", "价格", "数量", "年龄",
}  # fmt: skip
NOTHING = {"NA", "N/A", "n/a", "null", "NULL", "None", "nan", "NaN", "NAN", "\\N", "?", "-", "#N/A"}
"""What is written where a value is missing."""
TRUTH = ({"true", "false"}, {"yes", "no"}, {"y", "n"}, {"t", "f"}, {"on", "off"})
POSITIVE = {"true", "yes", "y", "t", "on"}
DONE = {
    "positive", "pos", "success", "won", "win", "sold", "bought", "buy", "purchase", "purchased", "paid", "accepted",
    "approved", "churned", "fraud", "spam", "liked", "like", "watched", "installed", "subscribed", "good",
}  # fmt: skip
NEGATIVE = {"not", "no", "non", "never", "negative", "neg", "un", "false", "none", "skip", "skipped", "without"}
"""Words of a value by which it looks like the positive one of two, or the negative."""
FORMS = (
    "%Y-%m-%d %H:%M:%S", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y/%m/%d",
    "%d/%m/%Y %H:%M:%S", "%d/%m/%Y %H:%M", "%d/%m/%Y", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%m/%d/%Y",
    "%m/%d/%Y %I:%M:%S %p", "%m/%d/%Y %I:%M %p",
    "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d.%m.%Y", "%d-%m-%Y %H:%M:%S", "%d-%m-%Y %H:%M", "%d-%m-%Y",
    "%d-%b-%Y %H:%M:%S", "%d-%b-%Y", "%d %b %Y %H:%M:%S", "%d %b %Y", "%b %d, %Y", "%a %b %d %H:%M:%S %Y",
    "%a, %d %b %Y %H:%M:%S %Z", "%d/%b/%Y:%H:%M:%S %z", "%Y年%m月%d日 %H:%M:%S", "%Y年%m月%d日",
)  # fmt: skip
DIGITS = {8: ("%Y%m%d", "%y%m%d%H"), 10: ("%Y%m%d%H",), 12: ("%Y%m%d%H%M",), 14: ("%Y%m%d%H%M%S",)}
SINCE, UNTIL = 473_385_600, 4_102_444_800  # 1985 and 2100, in seconds: numbers between may be times
FEW = 100
REPEATED = 50
"""An integer is a category if it has at most `FEW` values, or each comes so often on average, among `MANY`."""
MANY = 20_000
UNIQUE = 0.9
"""From this share of distinct values on a column is nearly unique: it says nothing about the next event."""
OFTEN = 0.75
"""Up to this share of distinct values integers repeat often enough to be ids."""
MOSTLY = 0.9
"""From this share of numbers on, text among them is said."""
LEAKS = 0.9
"""A column that alone predicts the label with this AUC probably knows it."""
MOST_PLACES = 10_000_000
WORDS = 16
"""Words of a text, or values of a list, that count at most."""


class CannotInferError(ValueError):
    """What is not clear from the data, and what to give."""


@dataclass(frozen=True)
class Choice:
    """What becomes of a column: its kind, or none if it is left out; and why."""

    column: str
    kind: str
    reason: str


@dataclass
class Inferred:
    """The schema, a choice per column, and what is odd."""

    schema: Schema
    choices: list[Choice]
    how: str
    warnings: list[str] = field(default_factory=list)

    def ignored(self) -> dict[str, str]:
        return {choice.column: choice.reason for choice in self.choices if not choice.kind}

    def lines(self, width: int = 100) -> list[str]:
        """The table, for people."""
        rows = [("column", "kind", "why"), *((c.column, c.kind or "left out", c.reason) for c in self.choices)]
        first, second = (min(40, max(_wide(row[i]) for row in rows)) + 2 for i in (0, 1))
        lines = [self.how, ""]
        for name, kind, why in rows:
            head = _padded(name, first) + _padded(kind, second)
            wrapped = textwrap.wrap(why, max(30, width - first - second)) or [""]
            lines += [head + wrapped[0], *(" " * (first + second) + more for more in wrapped[1:])]
        lines.append("")
        for warning in self.warnings:
            lines += textwrap.wrap(f"beware: {warning}", width, subsequent_indent="        ")
        return lines


def _wide(text: str) -> int:
    """Columns of a terminal: Chinese and the like take two each."""
    import unicodedata

    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _padded(text: str, width: int) -> str:
    return text + " " * max(1, width - _wide(text))


# Columns -------------------------------------------------------------------------------------------------------


@dataclass
class Column:
    """What there is to know of a column's values."""

    name: str
    values: list[Any]
    form: str
    """integer, float, bool, text, list, time, nested or nothing."""
    counts: Counter[Any]
    missing: int
    time_form: str = ""
    blanks: frozenset[str] = frozenset()
    """What is written where a value is missing."""
    texts: Counter[str] = field(default_factory=Counter)
    """Texts in a column that is numbers else."""

    @property
    def known(self) -> int:
        return len(self.values) - self.missing

    @property
    def distinct(self) -> int:
        return len(self.counts)

    @property
    def unique(self) -> bool:
        return self.known >= 50 and self.distinct > UNIQUE * self.known

    def estimated(self, total: int | None) -> int:
        """Distinct values of the whole, by the guaranteed-error estimator: sqrt(total / seen) f1 + those seen more
        than once, where f1 came once. Of a stream that grows, as if it were ten times as long."""
        whole = 10 * len(self.values) if total is None else total
        once = sum(1 for count in self.counts.values() if count == 1)
        scale = math.sqrt(max(1.0, whole / max(1, len(self.values))))
        return min(whole, round(self.distinct - once + scale * once))


def tokens(name: str) -> list[str]:
    """The words of a column's name, in lower case: userId, user_id and USER-ID have two."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+", name)]


def is_named(name: str, words: set[str]) -> bool:
    return name.lower() in words or bool(words & set(tokens(name)))


def is_amount(name: str) -> bool:
    return is_named(name, AMOUNT)


def is_code(name: str) -> bool:
    """Whether integers under this name name something: user_id, zip or movie, but not item_price."""
    *_, last = [word for word in tokens(name) if not word.isdigit()] or [""]
    thing = name.lower() in THING or last in THING or last.removesuffix("s") in THING
    return is_named(name, CODE | USER) or last == "id" or (thing and not is_amount(name))


def look_at(name: str, values: list[Any], text: bool, is_time: bool = False) -> Column:
    """What a column's values are."""
    listed = any(isinstance(v, (list, tuple, np.ndarray)) for v in values[:1000])
    if any(isinstance(v, dict) for v in values[:1000]):
        return Column(name, values, "nested", Counter(), sum(v is None for v in values))
    if listed:
        inside = Counter(x for v in values if isinstance(v, (list, tuple, np.ndarray)) for x in v if _hashable(x))
        return Column(name, values, "list", inside, sum(v is None for v in values))
    values = [None if v is None or v != v else v for v in values]
    counts: Counter[Any] = Counter(values)
    missing = counts.pop(None, 0)
    if not counts:
        return Column(name, values, "nothing", counts, missing)
    if is_time:
        return Column(name, values, "time", counts, missing)
    types = set(map(type, counts))
    if types <= {date, datetime}:
        return Column(name, values, "time", counts, missing, "iso")
    if types == {bool}:
        return Column(name, values, "bool", counts, missing)
    if types <= {int, float, bool, np.int64, np.float64, np.float32} or not types & {str}:
        whole = types <= {int, bool} or all(float(v).is_integer() for v in counts)
        return _number_column(Column(name, values, "integer" if whole else "float", counts, missing))
    return _text_column(name, values, counts, missing, text)


def _as_written(name: str, values: list[Any]) -> Column:
    """A column that is compared with a text: whatever is written there is a value, "None" too."""
    counts: Counter[Any] = Counter(values)
    return Column(name, values, "text", counts, counts.pop(None, 0))


def _hashable(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _text_column(name: str, values: list[Any], counts: Counter[Any], missing: int, text: bool) -> Column:
    written = [str(v) for v in counts]
    blanks = frozenset(v for v in written if v in NOTHING)
    rest = [v for v in written if v not in blanks]
    column = Column(name, values, "text", counts, missing)
    if not rest:
        return replace(column, form="nothing")
    numbers = _floats(rest) if text else None
    form, time_form = "text", ""
    if numbers is not None:
        form = "integer" if all(re.fullmatch(r"-?\d+(\.0+)?", v) for v in rest) else "float"
    elif any(set(map(str.lower, rest)) <= pair for pair in TRUTH):
        form = "bool"
    elif found := _time_form(rest):
        form, time_form = "time", found
    if form != "text" and blanks and text:
        values = [None if v in blanks else v for v in values]
        missing += sum(counts[v] for v in blanks)
        counts = Counter({v: n for v, n in counts.items() if v not in blanks})
        column = replace(column, values=values, counts=counts, missing=missing, blanks=blanks)
    if form == "text":
        return replace(column, texts=_texts_among_numbers(counts, blanks, text))
    column = replace(column, form=form, time_form=time_form)
    return _number_column(column) if numbers is not None else column


def _texts_among_numbers(counts: Counter[Any], blanks: frozenset[str], text: bool) -> Counter[str]:
    """The texts of a column that is nearly all numbers; none if it is not."""
    rest = [v for v in counts if str(v) not in blanks]
    bad = convert([str(v) if text else v for v in rest], Kind("time"), text)[1]
    found = Counter({str(rest[row]): counts[rest[row]] for row in bad})
    return found if found.total() <= (1 - MOSTLY) * sum(counts[v] for v in rest) else Counter()


def _floats(written: Sequence[str]) -> list[float] | None:
    """As numbers that a schema takes; None if one is none."""
    array, bad = convert(list(written), Kind("time"), text=True)
    return None if bad else array.tolist()


def _number_column(column: Column) -> Column:
    """Numbers that are times: by name or because they rise, and by where they lie."""
    numbers = [float(v) for v in column.counts]
    named = is_named(column.name, TIME)
    rises = len(numbers) > 1 and all(a <= b for a, b in pairwise(numbers))  # counted in the order of the rows
    if not named and not rises:
        return column
    if column.form == "integer" and named:
        written = [str(v).removesuffix(".0") for v in column.counts]
        lengths = {len(v) for v in written}
        if len(lengths) == 1 and (length := lengths.pop()) in DIGITS:
            for form in DIGITS[length]:
                if _all_parse(written, form):
                    return replace(column, form="time", time_form=form)
    for unit, scale in UNITS.items():
        if all(SINCE <= v / scale < UNTIL for v in numbers):
            return replace(column, form="time", time_form="" if unit == "s" else unit)
    return column


def _time_form(written: Sequence[str]) -> str:
    if not all(re.search(r"\d", v) for v in written[:100]) or max(map(len, written)) > 40:
        return ""
    for form in ("iso", *FORMS):
        if _all_parse(written, form):
            return form
    return ""


def _all_parse(written: Sequence[str], form: str) -> bool:
    if convert(list(written[:20]), Kind("time", form=form))[1]:
        return False
    # Days before months, or months before days, differ only in some: look at more.
    return not convert(list(written[:: max(1, len(written) // 5000)]), Kind("time", form=form))[1]


def places(distinct: int) -> int:
    """Places of a table for so many values: room enough that few share one, and that new ones find theirs."""
    wanted = distinct * (64 if distinct <= 10_000 else 16 if distinct <= 100_000 else 4)
    digits: int = 10 ** max(0, len(str(wanted)) - 2)
    return min(MOST_PLACES, max(100, -(-wanted // digits) * digits))


# Choices -------------------------------------------------------------------------------------------------------


def feature(column: Column, total: int | None, named: bool = False) -> Choice:
    """The kind of a feature, or why it is left out; `named`: its integers are known to name something."""
    name, estimated = column.name, column.estimated(total)

    def left(why: str) -> Choice:
        return Choice(name, "", why)

    def hashed(why: str, length: str = "") -> Choice:
        return Choice(name, f"hash:{places(estimated)}{length}?", why)

    about = f"{column.distinct:,} values" if estimated == column.distinct else f"about {estimated:,} values"
    if column.form == "nothing":
        return left("no value at all")
    if column.form == "nested":
        return left("nested objects: write their fields as columns of their own")
    if column.form == "list":
        return _list(column, about, hashed)
    if column.distinct == 1:
        only = dumped(next(iter(column.counts)))
        return left(f"constant: always {only[:40]}") if not column.missing else hashed("one value, or missing")
    if column.form == "time":
        form = f":{column.time_form}" if column.time_form else ""
        return Choice(name, f"clock{form}?", f"time ({column.time_form or 'seconds'}): hour and day of the week")
    if column.form == "bool":
        return hashed("true or false")
    if column.form == "float":
        return Choice(name, "number?", f"numbers{_range(column)}")
    if column.form == "integer":
        return _integer(column, about, estimated, total, named or is_code(name), left, hashed)
    if column.texts:
        return hashed(f"numbers, but {_texts(column)}; {about}")
    words = _mean_words(column)
    if words >= 3 and column.distinct > FEW:
        return hashed(f"text of {words:.0f} words on average, {about}: words hashed", f"[{WORDS}]")
    if separated := _separated(column):
        return hashed(f"lists, {separated} between, {about}", f"[{WORDS}]")
    if column.unique:
        return left(f"nearly unique: {column.distinct:,} values in {column.known:,} rows say nothing of the next")
    if max(len(str(v)) for v in column.counts) > LONGEST_TEXT:
        return left(f"text of more than {LONGEST_TEXT} characters")
    return hashed(f"text, {about}: hashed with room to spare")


def _integer(
    column: Column,
    about: str,
    estimated: int,
    total: int | None,
    coded: bool,
    left: Callable[..., Choice],
    hashed: Callable[..., Choice],
) -> Choice:
    rows = len(column.values) if total is None else total
    if column.unique and coded:
        return left(f"nearly unique: {column.distinct:,} values in {column.known:,} rows say nothing of the next")
    if coded:
        return hashed(f"integers that name something, {about}: hashed with room to spare")
    if column.distinct <= 2:
        return hashed("two values")
    amount = is_amount(column.name)
    if not amount and (column.distinct <= FEW or (estimated <= MANY and rows >= REPEATED * estimated)):
        return hashed(f"integers that repeat, {about}: a category")
    return Choice(column.name, "number?", f"integers{_range(column)}" + (", an amount by name" if amount else ""))


def _list(column: Column, about: str, hashed: Callable[..., Choice]) -> Choice:
    lengths = Counter(len(v) for v in column.values if v is not None)
    longest = max(lengths)
    numbers = all(isinstance(x, (int, float)) for x in column.counts)
    if not column.counts:
        return Choice(column.name, "", "empty lists")
    if numbers and len(lengths) == 1 and not all(float(x).is_integer() for x in column.counts):
        return Choice(column.name, f"number[{longest}]?", f"lists of {longest} numbers")
    if not all(isinstance(x, (int, str)) for x in column.counts):
        return Choice(column.name, f"number[{min(WORDS, longest)}]?", f"lists of up to {longest} numbers")
    most = f", the first {WORDS} count" if longest > WORDS else ""
    return hashed(f"lists of up to {longest}, {about} in them{most}", f"[{min(WORDS, longest)}]")


def _range(column: Column) -> str:
    numbers = [float(v) for v in column.counts]
    return f" from {min(numbers):.6g} to {max(numbers):.6g}"


def _mean_words(column: Column) -> float:
    some = [str(v) for v in list(column.counts)[:2000]]
    return sum(len(v.split()) for v in some) / len(some)


def _separated(column: Column) -> str:
    """What is between the values of lists that are written as text."""
    some = [str(v) for v in list(column.counts)[:2000]]
    for mark in "|;,":
        parts = [p for v in some for p in v.split(mark)]
        if sum(mark in v for v in some) > 0.3 * len(some) and len(set(parts)) < 0.5 * len(parts):
            return mark
    return ""


# The whole -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wishes:
    """What the user has said: the label, columns for id, user and time, and those to leave out."""

    label: str | None = None
    user: str | None = None
    time: str | None = None
    id: str | None = None
    ignore: tuple[str, ...] = ()


def infer(sample: Sample, wishes: Wishes, place: str = "the data") -> Inferred:
    """A schema for the sample. `CannotInferError` says what to give where the data leaves it open."""
    columns = {
        name: look_at(name, values, sample.text, name in sample.times) for name, values in sample.columns.items()
    }
    for given in (*wishes.ignore, *filter(None, (wishes.user, wishes.time, wishes.id))):
        if given.partition(":")[0] not in columns:
            raise CannotInferError(
                f"{place} has no column {given!r}{_near(given, columns)}; it has {_names(columns)}"
                f"{_why_names(columns, sample)}"
            )
    if wishes.label is not None and wishes.label not in columns:
        wanted = Target.of(wishes.label)
        if wanted.compares_text and wanted.column in columns and columns[wanted.column].blanks:
            columns[wanted.column] = _as_written(wanted.column, sample.columns[wanted.column])
    label, why_label = _label(columns, wishes.label, sample, place)
    target = Target.of(label)
    choices = {target.column: Choice(target.column, "label", why_label)}
    time, why_time = _time(columns, wishes, target)
    user, why_user = _user(columns, wishes, target)
    key, why_key = _id(columns, wishes, target, user)
    warnings = list(sample.warnings)
    features: dict[str, str] = {}
    for name, column in columns.items():
        if name in choices:
            continue
        if name in wishes.ignore:
            choices[name] = Choice(name, "", "by --ignore")
            continue
        if key is not None and name == key.partition(":")[0]:
            choices[name] = Choice(name, "id", why_key)
            continue
        of_user = user is not None and name == user.partition(":")[0]
        chosen = feature(column, sample.total, named=of_user)
        if chosen.kind:
            features[name] = chosen.kind
        role = ""
        if of_user:
            role = f"user ({why_user}); "
        if time is not None and name == time.partition(":")[0]:
            role = f"time of the event ({why_time}); "
        choices[name] = replace(chosen, reason=role + chosen.reason)
    if not features:
        raise CannotInferError(f"{place} has no column to predict {label!r} from: {_reasons(choices)}")
    blanks = _blanks(columns, {*features, *(part.partition(":")[0] for part in (key, user, time) if part)}, target)
    schema = Schema(features, label, key, user, time, separator=sample.separator, header=sample.header, missing=blanks)
    warnings += _odd(schema, columns, sample)
    ordered = [_with_missing(choices[name], columns[name], key) for name in columns]
    return Inferred(schema, ordered, f"{place}: {sample.how}", warnings)


def _blanks(columns: dict[str, Column], used: set[str], target: Target) -> dict[str, list[str]] | tuple[()]:
    """What is written where a value is missing, by column.

    What is missing in one is so in all that hold no text: their sample may have had no gap. In text it is a value, as
    NA is a country; and a label has only what was found in its own column.
    """
    everywhere = sorted({blank for column in columns.values() for blank in column.blanks})
    found = {name: everywhere for name in columns if name in used and columns[name].form not in ("text", "list")}
    found[target.column] = sorted(columns[target.column].blanks)
    return {name: blanks for name, blanks in found.items() if blanks} or ()


def _with_missing(choice: Choice, column: Column, key: str | None) -> Choice:
    """A choice that says how much of its column is missing."""
    if not column.missing or not column.known:
        return choice
    said = f"{choice.reason}, {column.missing / len(column.values):.1%} missing"
    if choice.kind == "label":
        what = "such events wait for one" if key is not None else "such events are never learnt from"
        said += f" ({column.missing:,} of {len(column.values):,} labels): {what}"
    return replace(choice, reason=said)


def _names(columns: dict[str, Column]) -> str:
    names = list(columns)
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")


def _near(name: str, columns: dict[str, Column]) -> str:
    """The column that may have been meant."""
    close = get_close_matches(name.lower(), map(str.lower, columns), 1)
    meant = [column for column in columns if [column.lower()] == close]
    return f" (did you mean {meant[0]!r}?)" if meant else ""


def _why_names(columns: dict[str, Column], sample: Sample) -> str:
    """Why columns may be called otherwise than somebody thinks."""
    said = ""
    if sample.header is not None:
        said += f". The file has no header, so its columns are called c1 to c{len(columns)}"
    if sample.text and len(columns) == 1:
        said += (
            f". Only one column was found, separated by {SEPARATORS[sample.separator]}: between columns there may be "
            f"{', '.join(SEPARATORS.values())}"
        )
    return said


def _reasons(choices: dict[str, Choice]) -> str:
    return "; ".join(f"{choice.column}: {choice.reason}" for choice in list(choices.values())[:5])


def _label(columns: dict[str, Column], wanted: str | None, sample: Sample, place: str) -> tuple[str, str]:
    """The label, as a schema has it, and why."""
    if wanted is None:
        named = [name for name in columns if name.lower() in LABEL or set(tokens(name)) & {"label", "click", "clicked"}]
        fit = [name for name in named if columns[name].distinct == 2]
        if len(fit) != 1:
            raise CannotInferError(
                f"which column of {place} is to be predicted? Give --label NAME, or --label 'NAME>=4'; there are "
                f"{_names(columns)}{_why_names(columns, sample)}"
            )
        label, why = _binary(columns[fit[0]])
        return label, f"by its name; {why}"
    target = Target.of(wanted) if wanted not in columns else Target(wanted)
    if target.column not in columns:
        raise CannotInferError(
            f"{place} has no column {target.column!r} for the label{_near(target.column, columns)}; it has "
            f"{_names(columns)}{_why_names(columns, sample)}"
        )
    column = columns[target.column]
    if not column.counts:
        raise CannotInferError(f"--label {wanted}: column {target.column!r} is empty in what was looked at")
    if not target.compare:
        return _binary(column)
    labels, bad = target.labels(column.values, sample.text)
    if any(bad.values()):
        shown = dumped(column.values[next(row for row, why in bad.items() if why)])
        raise CannotInferError(
            f"--label {wanted}: column {target.column!r} holds {shown!r}, which is no number. Texts are compared with "
            f"==, as in --label '{target.column}=={dumped(_positive(column))}'"
        )
    known = labels[~np.isnan(labels)]
    if len(known) and known.min() == known.max():
        raise CannotInferError(f"--label {wanted}: it is always {known[0]:g} in what was looked at{_values(column)}")
    return wanted, f"--label; 1 in {known.mean():.1%}"


def _binary(column: Column) -> tuple[str, str]:
    """The label of a column that has two values."""
    name, counts = column.name, column.counts
    shares = {str(value).lower(): n / max(1, column.known) for value, n in counts.items()}
    if column.distinct == 1:
        raise CannotInferError(f"--label {name}: it is always {dumped(next(iter(counts)))}; there is nothing to learn")
    if column.form in ("integer", "float") and column.distinct == 2:
        low, high = sorted(counts, key=float)
        share = counts[high] / column.known
        if (float(low), float(high)) == (0, 1):
            return name, f"0 or 1; 1 in {share:.1%}"
        if float(low) <= 0 < float(high):
            return f"{name}>0", f"{low} or {high}; {high} in {share:.1%}"
    if column.form == "bool" and set(shares) <= {"true", "false"}:
        return name, f"true or false; true in {shares.get('true', 0):.1%}"
    if column.form == "bool":
        positive = next(value for value in counts if str(value).lower() in POSITIVE)
        return f"{name}=={positive}", f"{positive} in {counts[positive] / column.known:.1%}"
    if column.form in ("integer", "float"):
        middle = sorted(map(float, counts))[len(counts) // 2]
        raise CannotInferError(
            f"--label {name}: a label is 0 or 1{_values(column)}. Say what counts as 1, as in "
            f"--label '{name}>={middle:g}'"
        )
    raise CannotInferError(
        f"--label {name}: a label is 0 or 1{_values(column)}. Say what counts as 1, as in "
        f"--label '{name}=={dumped(_positive(column))}'"
    )


def _positive(column: Column) -> Any:
    """The value that looks like the positive one: by its words, else the rarest."""

    def rank(value: Any) -> tuple[bool, bool, int]:
        words = set(tokens(str(value)))
        return bool(words & NEGATIVE), not words & (POSITIVE | LABEL | DONE), column.counts[value]

    return min(column.counts, key=rank)


def _values(column: Column) -> str:
    if column.form in ("integer", "float") and column.distinct > 5:
        return f"; it has {column.distinct:,} values{_range(column)}"
    return f"; it has {', '.join(dumped(v)[:30] for v in list(column.counts)[:5])}" + ", ..." * (column.distinct > 5)


def _keyed(column: Column) -> str:
    """A column as an id or a user: with :text if it is not integers."""
    whole = column.form == "integer" and not any("." in str(v) for v in list(column.counts)[:1000])
    if ":" in column.name:
        raise CannotInferError(f"column {column.name!r} has a colon in its name, and cannot be an id, user or time")
    return column.name if whole else f"{column.name}:text"


def _user(columns: dict[str, Column], wishes: Wishes, target: Target) -> tuple[str | None, str]:
    if wishes.user is not None:
        name, _, kind = wishes.user.partition(":")
        return (wishes.user if kind else _keyed(columns[name])), "--user"
    for column in columns.values():
        named = is_named(column.name, USER) and tokens(column.name)[-1:] not in (["agent"], ["age"], ["name"])
        if named and column.name not in (target.column, *wishes.ignore) and column.form in ("integer", "text"):
            if column.missing or (column.unique and column.known > 1000) or column.distinct < 2:
                continue
            return _keyed(column), "by its name"
    return None, ""


def _time(columns: dict[str, Column], wishes: Wishes, target: Target) -> tuple[str | None, str]:
    if wishes.time is not None:
        name, _, form = wishes.time.partition(":")
        column = columns[name]
        if column.form != "time" and not form and column.form not in ("integer", "float"):
            some = dumped(next(iter(column.counts), ""))
            raise CannotInferError(
                f"--time {name}: times such as {some!r} are of no form that is known; give the form as in "
                f"--time '{name}:%d/%m/%Y %H:%M'"
            )
        form = form or column.time_form
        return f"{name}:{form}" if form else name, "--time"
    found = [c for c in columns.values() if c.form == "time" and c.name not in (target.column, *wishes.ignore)]
    found = [c for c in found if not c.missing and ":" not in c.name and c.distinct > 1]
    if not found:
        return None, ""
    best = max(found, key=lambda column: (_sorted(column), is_named(column.name, TIME)))
    why = "its values are times" + (", in order" if _sorted(best) > 0.999 else "")
    return (f"{best.name}:{best.time_form}" if best.time_form else best.name), why


def _sorted(column: Column) -> float:
    """How many neighbours are in order."""
    seconds = _seconds(column)
    return float((np.diff(seconds) >= 0).mean()) if len(seconds) > 1 else 1.0


def _seconds(column: Column) -> Array:
    text = any(isinstance(v, str) for v in column.values[:100])
    array = convert(column.values, Kind("time", form=column.time_form), text)[0]
    return array[~np.isnan(array)]


def _id(columns: dict[str, Column], wishes: Wishes, target: Target, user: str | None) -> tuple[str | None, str]:
    """An id is of use where labels come later: where some are missing."""
    if wishes.id is not None:
        name, _, kind = wishes.id.partition(":")
        return (wishes.id if kind else _keyed(columns[name])), "--id: labels that come later are joined by it"
    if not columns[target.column].missing:
        return None, ""
    for column in columns.values():
        if column.name in (target.column, *wishes.ignore) or column.form not in ("integer", "text") or column.missing:
            continue
        if user is not None and column.name == user.partition(":")[0]:
            continue
        if (
            is_named(column.name, EVENT)
            and column.distinct >= 0.5 * column.known
            and _once_each(column, columns[target.column])
        ):
            return _keyed(column), "by its name: some labels are missing, and may come later with it"
    return None, ""


def _once_each(column: Column, label: Column) -> bool:
    """Whether no two events share an id; a label that comes later has that of its event."""
    events = [v for v, clicked in zip(column.values, label.values, strict=True) if clicked is None]
    return len(set(events)) == len(events) and all(count <= 2 for count in column.counts.values())


# What is odd ---------------------------------------------------------------------------------------------------


def _odd(schema: Schema, columns: dict[str, Column], sample: Sample) -> list[str]:
    found = []
    for column in columns.values():
        other = column.time_form.replace("%d/%m/", "%m/%d/")
        if other != column.time_form and _all_parse([str(v) for v in column.counts], other):
            found.append(
                f"in {column.name!r} days and months cannot be told apart: {column.time_form} was taken; write {other} "
                "in the schema if months come first"
            )
    if schema.time is not None:
        column = columns[schema.time.partition(":")[0]]
        if (order := _sorted(column)) < 0.999:
            found.append(
                f"time is not sorted: {1 - order:.1%} of the rows of {column.name!r} are earlier than the one before. "
                "Sort the data by time, since it is learnt from in the order of the file"
            )
    if schema.user is None:
        found.append(
            "no column names the user: GAUC is then the AUC of all events together. Give --user NAME if one does"
        )
    elif columns[schema.user.partition(":")[0]].missing:
        found.append(f"the user is missing in some rows of {schema.user.partition(':')[0]!r}, which will be rejected")
    found += [said for name in schema.features if (said := _doubt(columns[name], schema.kinds[name], sample.total))]
    found += _leaks(schema, columns, sample)
    return found


def _doubt(column: Column, kind: Kind, total: int | None) -> str:
    """Where a column may be otherwise than it was taken: numbers that are ids, numbers with some text among them."""
    if column.texts:
        some = ", ".join(repr(text) for text in list(column.texts)[:3])
        return (
            f"{column.name} is hashed, since {_texts(column)}. If it is a number, write number? in the schema, and the "
            f'texts under "missing": [{some}{", ..." if len(column.texts) > 3 else ""}]'
        )
    repeats = column.distinct <= OFTEN * column.known
    if kind.name == "number" and column.form == "integer" and repeats and not is_amount(column.name):
        return (
            f"{column.name} is taken as a number; if it is an id, write hash:{places(column.estimated(total))}? in the "
            "schema"
        )
    return ""


def _texts(column: Column) -> str:
    return f"{column.texts.total():,} of {column.known:,} values are text, e.g. {next(iter(column.texts))[:30]!r}"


def _leaks(schema: Schema, columns: dict[str, Column], sample: Sample) -> list[str]:
    """Features that alone tell the label: by the mean label of each value in one half, the AUC on the other."""
    target = schema.target
    labels = target.labels(columns[target.column].values, sample.text)[0]
    known = np.flatnonzero(~np.isnan(labels))
    if len(known) < 200:
        return []
    known = known[:: max(1, len(known) // 20_000)]
    truth = labels[known]
    if not set(np.unique(truth)) <= {0.0, 1.0}:
        return []
    found = []
    for name in schema.features:
        column = columns[name]
        if column.form == "list":
            continue
        score = _alone([column.values[row] for row in known.tolist()], truth, column.form in ("integer", "float"))
        if score >= LEAKS:
            found.append(
                f"column {name!r} alone predicts the label with an AUC of {score:.3f}: if it is not known before the "
                f"label is, it leaks it; leave it out with --ignore {name}"
            )
    return found


def _alone(values: Sequence[Any], truth: Array, numbers: bool) -> float:
    train, test = np.arange(len(truth)) % 2 == 0, np.arange(len(truth)) % 2 == 1
    if len(np.unique(truth[test])) < 2:
        return 0.5
    _, code = np.unique(np.array([str(v) for v in values], dtype=object).astype(str), return_inverse=True)
    counts, clicked = (
        np.bincount(code[train], minlength=code.max() + 1),
        np.bincount(code[train], truth[train], minlength=code.max() + 1),
    )
    mean = truth[train].mean()
    scores = ((clicked + mean) / (counts + 1))[code]
    best = float(auc(scores[test], truth[test]))
    if numbers:
        order = np.array([math.nan if v is None else float(v) for v in values])
        order = np.where(np.isnan(order), np.nanmedian(order) if not np.isnan(order).all() else 0, order)
        straight = float(auc(order[test], truth[test]))
        best = max(best, straight, 1 - straight)
    return best
