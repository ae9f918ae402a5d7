"""The kinds of features: how the values of a column become inputs of the model."""

from __future__ import annotations

from collections import Counter

from ..conversion import MAX_TEXT_LENGTH, split_text
from ..nested import MAX_DEPTH, MAX_FIELDS
from .columns import Column, format_value, is_amount, is_identifier, is_row_number
from .report import ColumnDecision

FEW_VALUES = 100
"""Integers with at most this many distinct values are categories."""
REPETITIONS = 50
"""Integers are also categories if each value occurs this often on average and there are at most `MANY_VALUES`."""
MANY_VALUES = 20_000
MAX_BUCKETS = 10_000_000
MAX_ELEMENTS = 16
"""Longer lists are histories, of which the last `MAX_HISTORY` elements are used."""
MAX_HISTORY = 50
MIN_WORDS = 3
"""From this mean number of words on, texts are used as bags of words."""
MAX_WORDS = 64
"""The most words of a text that are used."""
MIN_IDS = 1_000
"""With `uses_ids`, columns of ids or text with at least this estimated number of values have the kind `id`."""
MIN_ID_ROWS = 100_000
"""The smallest limit of rows of the kind `id`."""
SAMPLED_TEXTS = 20_000
"""The number of texts whose words are counted."""


def decide_feature(column: Column, total: int | None, is_user: bool = False, uses_ids: bool = False) -> ColumnDecision:
    """Choose the kind of a feature, or leave the column out.

    Args:
        column: The column.
        total: The number of rows of all data, None if the stream grows.
        is_user: Whether the column contains the users, so that integers are ids, and even nearly unique ones are used.
        uses_ids: Whether columns of many ids have the kind `id`, which gives each of them a row, instead of `hash`.
    """
    name, estimate = column.name, column.estimate_distinct(total)
    count = f"{column.distinct:,} values" if estimate == column.distinct else f"about {estimate:,} values"
    buckets = f"hash:{choose_buckets(estimate)}"

    def left_out(reason: str) -> ColumnDecision:
        return ColumnDecision(name, "", reason)

    def hashed(reason: str) -> ColumnDecision:
        return ColumnDecision(name, f"{buckets}?", reason)

    def identified(reason: str) -> ColumnDecision:
        if not uses_ids or estimate < MIN_IDS:
            return hashed(f"{reason}, hashed")
        rows = max(MIN_ID_ROWS, choose_buckets(estimate) if estimate > MIN_ID_ROWS else 4 * estimate)
        return ColumnDecision(name, f"id:max={rows}?", f"{reason}, each with its own row")

    is_unique = column.is_nearly_unique(total)
    unique = f"nearly unique: {column.distinct:,} values in {column.present:,} rows do not help to predict other events"
    if column.type == "empty":
        return left_out("no values")
    if is_row_number(column):
        return left_out("the row numbers that pandas and R write")
    if column.type == "nested":
        return left_out(
            f"objects with more than {MAX_FIELDS} different fields, or of more than {MAX_DEPTH} levels; write the "
            "dotted names of the fields to use in the schema"
        )
    if column.type == "list":
        return _decide_list(column, count, buckets)
    if column.distinct == 1:
        value = format_value(next(iter(column.counts)))[:40]
        return hashed("one value, or missing") if column.missing else left_out(f"constant: always {value}")
    if column.type == "time":
        suffix = f":{column.time_format}" if column.time_format else ""
        reason = f"hour and day of the week (time format: {column.time_format or 'seconds'})"
        return ColumnDecision(name, f"clock{suffix}?", reason)
    if column.type == "bool":
        return hashed("true or false")
    if column.type == "float":
        return ColumnDecision(name, "number?", f"numbers {value_range(column)}")
    if column.type == "integer":
        if is_user or is_identifier(name):
            return left_out(unique) if is_unique and not is_user else identified(f"integer ids, {count}")
        if column.distinct <= 2:
            return hashed("two values")
        rows = len(column.values) if total is None else total
        is_frequent = estimate <= MANY_VALUES and rows >= REPETITIONS * estimate
        if is_amount(name):
            return ColumnDecision(name, "number?", f"integers {value_range(column)}, an amount by its name")
        if column.distinct <= FEW_VALUES or is_frequent:
            return hashed(f"integers that repeat, {count}, used as categories")
        return ColumnDecision(name, "number?", f"integers {value_range(column)}")
    if column.texts:
        return hashed(f"numbers, but {describe_texts(column)}; {count}, hashed")
    texts = [str(value) for value in list(column.counts)[:2000]]
    if sum(len(text.split()) for text in texts) >= MIN_WORDS * len(texts) and column.distinct > FEW_VALUES:
        return _decide_words(column)
    if separator := _find_list_separator(texts):
        longest = max(text.count(separator) + 1 for text in texts)
        reason = f"lists separated by {separator}, {count}, hashed"
        return ColumnDecision(name, f"{buckets}{_list_length(longest, MAX_ELEMENTS)}?", reason + _describe_cut(longest))
    if is_unique and not is_user:
        return left_out(unique)
    if max(len(str(value)) for value in column.counts) > MAX_TEXT_LENGTH:
        return left_out(f"text of more than {MAX_TEXT_LENGTH} characters")
    return identified(f"text, {count}")


def choose_buckets(distinct: int) -> int:
    """Return the number of buckets for a number of values: enough that few values, also new ones, share a bucket."""
    buckets = distinct * (64 if distinct <= 10_000 else 16 if distinct <= 100_000 else 4)
    unit: int = 10 ** max(0, len(str(buckets)) - 2)
    return min(MAX_BUCKETS, max(100, -(-buckets // unit) * unit))


def value_range(column: Column) -> str:
    """Return the range of a column of numbers as text."""
    numbers = [float(value) for value in column.counts]
    return f"from {min(numbers):.6g} to {max(numbers):.6g}"


def describe_texts(column: Column) -> str:
    """Return how many values of a column of numbers are text, with an example."""
    example = next(iter(column.texts))[:30]
    return f"{column.texts.total():,} of {column.present:,} values are text, e.g. {example!r}"


def _decide_list(column: Column, count: str, buckets: str) -> ColumnDecision:
    lengths = Counter(len(value) for value in column.values if value is not None)
    longest = max(lengths)
    length = min(MAX_ELEMENTS, longest)
    if not column.counts:
        return ColumnDecision(column.name, "", "empty lists")
    is_numeric = all(isinstance(element, (int, float)) for element in column.counts)
    if is_numeric and len(lengths) == 1 and not all(float(element).is_integer() for element in column.counts):
        return ColumnDecision(column.name, f"number[{longest}]?", f"lists of {longest} numbers")
    if not all(isinstance(element, (int, str)) for element in column.counts):
        return ColumnDecision(column.name, f"number[{length}]?", f"lists of up to {longest} numbers")
    kind = f"{buckets}{_list_length(longest, longest)}?"
    return ColumnDecision(column.name, kind, f"lists of up to {longest} elements, {count}{_describe_cut(longest)}")


def _list_length(longest: int, short_length: int) -> str:
    """Return the length of a list as a kind writes it: `short_length`, or the last elements of a history."""
    return f"[{short_length}]" if longest <= MAX_ELEMENTS else f"[last {min(longest, MAX_HISTORY)}]"


def _describe_cut(longest: int) -> str:
    return f", of which the last {MAX_HISTORY} are used" if longest > MAX_HISTORY else ""


def _decide_words(column: Column) -> ColumnDecision:
    """Use texts as bags of words. Most texts keep all of their words."""
    texts = [split_text(str(value)) for value in list(column.counts)[:SAMPLED_TEXTS]]
    lengths = sorted(map(len, texts))
    vocabulary = len({word for words in texts for word in words})
    length = max(1, min(MAX_WORDS, lengths[int(0.95 * (len(lengths) - 1))]))
    reason = f"text of {sum(lengths) / len(lengths):.0f} words on average, {vocabulary:,} words, hashed"
    return ColumnDecision(column.name, f"words:{choose_buckets(vocabulary)}[{length}]?", reason)


def _find_list_separator(texts: list[str]) -> str:
    """Return the separator if texts are lists whose elements repeat, else an empty text."""
    for separator in "|;,":
        elements = [element for text in texts for element in text.split(separator)]
        is_frequent = sum(separator in text for text in texts) > 0.3 * len(texts)
        if is_frequent and len(set(elements)) < 0.5 * len(elements):
            return separator
    return ""
