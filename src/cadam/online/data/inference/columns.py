"""Analysis of the sampled values of one column: their type, distinct values, missing values and format of times."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from itertools import pairwise
from typing import Any

import numpy as np

from ..conversion import convert
from ..kind import UNITS, Kind
from . import word_lists as words

NEARLY_UNIQUE = 0.9
"""From this fraction of distinct values on, a column is nearly unique and does not help to predict new events."""
NEVER_REPEATING = 0.999
"""From this fraction of distinct values in the sample on, a column of a stream that grows is nearly unique."""
MOSTLY_NUMBERS = 0.9
"""From this fraction of numbers on, texts in a column are reported as exceptions."""


@dataclass
class Column:
    """The sampled values of a column and the facts that were derived from them."""

    name: str
    values: list[Any]
    type: str
    """One of integer, float, bool, text, list, time, nested and empty."""
    counts: Counter[Any]
    """How often each value occurs, without missing values; for lists, how often each element occurs."""
    missing: int
    time_format: str = ""
    missing_markers: frozenset[str] = frozenset()
    """The texts that stand for a missing value in this column."""
    texts: Counter[str] = field(default_factory=Counter)
    """The texts in a column that otherwise contains numbers."""

    @property
    def present(self) -> int:
        """The number of values that are not missing."""
        return len(self.values) - self.missing

    @property
    def distinct(self) -> int:
        """The number of distinct values."""
        return len(self.counts)

    def is_nearly_unique(self, total: int | None) -> bool:
        """Whether almost every value occurs only once in all data.

        The number of distinct values is estimated from the values that occur once (f1) and twice (f2) in the sample, as
        distinct + f1 (f1 - 1) / (2 (f2 + 1)) (Chao 1984, https://www.jstor.org/stable/4615964, bias-corrected). The
        guaranteed-error estimator of `estimate_distinct` cannot tell an id that occurs ten times from a unique one.

        Args:
            total: The number of rows of all data. None: the stream grows, and only values that never repeat are unique.
        """
        if self.present < 50:
            return False
        if total is None:
            return self.distinct > NEVER_REPEATING * self.present
        frequencies = Counter(self.counts.values())
        once, twice = frequencies[1], frequencies[2]
        present = self.present * max(1.0, total / len(self.values))
        is_complete = total <= len(self.values)
        estimate = self.distinct if is_complete else self.distinct + once * (once - 1) / (2 * (twice + 1))
        return min(estimate, present) > NEARLY_UNIQUE * present

    @property
    def is_numeric(self) -> bool:
        """Whether the values are numbers."""
        return self.type in ("integer", "float")

    def estimate_distinct(self, total: int | None) -> int:
        """Estimate the number of distinct values of all data with the guaranteed-error estimator.

        If f1 values occur once in the sample, the estimate is sqrt(total / sampled) * f1 plus the number of values that
        occur more often (Charikar et al., https://doi.org/10.1145/335168.335230).

        Args:
            total: The number of rows of all data. None: the stream grows, and ten times the sample is assumed.
        """
        rows = 10 * len(self.values) if total is None else total
        once = sum(1 for count in self.counts.values() if count == 1)
        scale = math.sqrt(max(1.0, rows / max(1, len(self.values))))
        return min(rows, round(self.distinct - once + scale * once))


def split_words(name: str) -> list[str]:
    """Split the name of a column into words in lower case: userId, user_id and words.USER-ID have two words each."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+", name)]


def has_word(name: str, candidates: set[str]) -> bool:
    """Whether a name is one of the words or contains one of them."""
    return name.lower() in candidates or bool(candidates & set(split_words(name)))


def is_amount(name: str) -> bool:
    """Whether the name of a column suggests that its numbers are amounts."""
    return has_word(name, words.AMOUNT)


def is_identifier(name: str) -> bool:
    """Whether a name, such as user_id, zip or movie but not item_price, suggests that integers are ids."""
    *_, last = [word for word in split_words(name) if not word.isdigit()] or [""]
    is_entity = name.lower() in words.ENTITY or last in words.ENTITY or last.removesuffix("s") in words.ENTITY
    return has_word(name, words.CODE | words.USER) or last == "id" or (is_entity and not is_amount(name))


def is_row_number(column: Column) -> bool:
    """Whether a column is the index that pandas and R write: it has no name, and its integers count the rows."""
    if not re.fullmatch(r"(Unnamed: \d+)?", column.name.strip()) or column.type != "integer" or column.missing:
        return False
    numbers = np.array([float(value) for value in column.values])
    return len(numbers) > 1 and float((np.diff(numbers) == 1).mean()) > 0.99


def format_value(value: Any) -> str:
    """Return a value as text for messages."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def analyze_column(name: str, values: list[Any], is_text: bool, is_time: bool = False) -> Column:
    """Determine the type of a column.

    Args:
        name: The name of the column, which may indicate its meaning.
        values: The sampled values, None where one is missing.
        is_text: Whether numbers are written as text.
        is_time: Whether the data itself declares that the values are times.
    """
    if any(isinstance(value, dict) for value in values[:1000]):
        return Column(name, values, "nested", Counter(), sum(value is None for value in values))
    if any(isinstance(value, (list, tuple, np.ndarray)) for value in values[:1000]):
        lists = [value for value in values if isinstance(value, (list, tuple, np.ndarray))]
        elements = Counter(element for list_ in lists for element in list_ if isinstance(element, (str, int, float)))
        return Column(name, values, "list", elements, sum(value is None for value in values))
    values = [None if value is None or value != value else value for value in values]
    column = text_column(name, values)
    types = set(map(type, column.counts))
    if not column.counts:
        return replace(column, type="empty")
    if is_time:
        return replace(column, type="time")
    if types <= {date, datetime}:
        return replace(column, type="time", time_format="iso")
    if types == {bool}:
        return replace(column, type="bool")
    if types <= {int, float, bool, np.int64, np.float64, np.float32} or str not in types:
        is_whole = types <= {int, bool} or all(float(value).is_integer() for value in column.counts)
        return _detect_numeric_time(replace(column, type="integer" if is_whole else "float"))
    return _analyze_text(column, is_text)


def text_column(name: str, values: list[Any]) -> Column:
    """Return a column of texts that are not converted: "None", for example, is a value and not a missing one."""
    counts: Counter[Any] = Counter(values)
    return Column(name, values, "text", counts, counts.pop(None, 0))


def _analyze_text(column: Column, is_text: bool) -> Column:
    texts = [str(value) for value in column.counts]
    markers = frozenset(text for text in texts if text in words.MISSING_MARKERS)
    rest = [text for text in texts if text not in markers]
    if not rest:
        return replace(column, type="empty")
    type_, time_format = "text", ""
    is_numeric = is_text and not convert(rest, Kind("time"), text=True)[1]
    if is_numeric:
        type_ = "integer" if all(re.fullmatch(r"-?\d+(\.0+)?", text) for text in rest) else "float"
    elif any(set(map(str.lower, rest)) <= pair for pair in words.BOOLEANS):
        type_ = "bool"
    elif time_format := _detect_time_format(rest):
        type_ = "time"
    if type_ == "text":
        return replace(column, texts=_find_texts_among_numbers(column.counts, markers, is_text))
    if markers and is_text:
        column = replace(
            column,
            values=[None if value in markers else value for value in column.values],
            missing=column.missing + sum(column.counts[marker] for marker in markers),
            counts=Counter({value: count for value, count in column.counts.items() if value not in markers}),
            missing_markers=markers,
        )
    column = replace(column, type=type_, time_format=time_format)
    return _detect_numeric_time(column) if is_numeric else column


def _find_texts_among_numbers(counts: Counter[Any], markers: frozenset[str], is_text: bool) -> Counter[str]:
    """Return the texts of a column that otherwise contains numbers; none if there are many texts."""
    rest = [value for value in counts if str(value) not in markers]
    problems = convert([str(value) if is_text else value for value in rest], Kind("time"), is_text)[1]
    texts = Counter({str(rest[index]): counts[rest[index]] for index in problems})
    is_exception = texts.total() <= (1 - MOSTLY_NUMBERS) * sum(counts[value] for value in rest)
    return texts if is_exception else Counter()


def _detect_numeric_time(column: Column) -> Column:
    """Recognize numbers as times if the name says so or if they increase, and if their size fits a recent time."""
    numbers = [float(value) for value in column.counts]
    is_named = has_word(column.name, words.TIME)
    is_increasing = len(numbers) > 1 and all(a <= b for a, b in pairwise(numbers))  # Counts keep the order of the rows.
    if not is_named and not is_increasing:
        return column
    if column.type == "integer" and is_named:
        digits = [str(value).removesuffix(".0") for value in column.counts]
        lengths = {len(text) for text in digits}
        for time_format in words.DIGIT_FORMATS.get(lengths.pop(), ()) if len(lengths) == 1 else ():
            if fits_time_format(digits, time_format):
                return replace(column, type="time", time_format=time_format)
    for unit, scale in UNITS.items():
        if all(words.EARLIEST_TIME <= number / scale < words.LATEST_TIME for number in numbers):
            return replace(column, type="time", time_format="" if unit == "s" else unit)
    return column


def _detect_time_format(texts: Sequence[str]) -> str:
    """Return the format of times that fits all texts, empty if there is none."""
    if not all(re.search(r"\d", text) for text in texts[:100]) or max(map(len, texts)) > 40:
        return ""
    formats = ("iso", *words.TIME_FORMATS)
    return next((time_format for time_format in formats if fits_time_format(texts, time_format)), "")


def fits_time_format(texts: Sequence[str], time_format: str) -> bool:
    """Whether texts are times of a format."""
    kind = Kind("time", time_format=time_format)
    if convert(list(texts[:20]), kind)[1]:
        return False
    # Formats with the day before or after the month differ only for days after the 12th, so more texts are needed.
    return not convert(list(texts[:: max(1, len(texts) // 5000)]), kind)[1]
