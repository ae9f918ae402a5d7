"""Warnings about data that schema inference found suspicious."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ....printable import shell_word
from ...metrics.auc import auc
from ..events import Array
from ..kind import Kind
from ..schema import Schema
from ..sources.sample import Sample
from .columns import MOSTLY_NUMBERS, Column, fits_time_format, is_amount
from .features import choose_buckets, describe_texts
from .roles import Columns, find_best_time, sorted_share
from .word_lists import MISSING_MARKERS

LEAK_AUC = 0.9
"""A column that predicts the label alone with at least this AUC probably contains the label."""
REPEATING = 0.75
"""Up to this fraction of distinct values, integers repeat often enough to be ids."""
MIN_LEAK_EVENTS, MAX_LEAK_EVENTS = 200, 20_000
"""The number of labeled events that the check for leaks needs, and the most that it uses."""
MIN_COPIES = 0.05
"""The share of rows that are copies of earlier rows from which a warning is given."""
COPIED_LABELS = 0.9
"""If rows repeat by chance, this share of their positive labels does not repeat with them."""
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
_NUMBER_WITH_COMMA = re.compile(r"[-+]?(\d+,\d+|\d{1,3}(,\d{3})+(\.\d+)?)")
_NUMBER_WITH_SIGN = re.compile(r"[-+]?[$€£¥₹] ?[-+]?\d[\d.,]*|[-+]?\d[\d.,]* ?[$€£¥₹%]")


def find_warnings(schema: Schema, columns: Columns, sample: Sample, ignored: Collection[str] = ()) -> list[str]:
    """Return warnings about times, users, doubtful kinds and features that reveal the label.

    Args:
        schema: The inferred schema.
        columns: All columns of the sample.
        sample: The sample.
        ignored: The columns that the user leaves out.
    """
    unused = {schema.target.column, *ignored}
    warnings = []
    for column in columns.values():
        other = column.time_format.replace("%d/%m/", "%m/%d/")
        if other != column.time_format and fits_time_format([str(value) for value in column.counts], other):
            warnings.append(
                f"the days and months in {column.name!r} cannot be distinguished: {column.time_format} is assumed; "
                f"write {other} in the schema if months come first"
            )
    time = columns[schema.roles["time"][0]] if schema.time is not None else find_best_time(columns, unused)
    if time is not None:
        if time.missing:
            consequence = "these events will be rejected"
            if schema.time is None:
                consequence = (
                    "it is not used as the time of the event, because events without a time are rejected. Fill in the "
                    f"missing times, or give --time {shell_word(time.name)} to use it and reject these events"
                )
            share = time.missing / len(time.values)
            warnings.append(f"{share:.1%} of the rows of {time.name!r} have no time: {consequence}")
        if (share := sorted_share(time)) < 0.999:
            warnings.append(
                f"the time is not sorted: {1 - share:.1%} of the rows of {time.name!r} are earlier than the row "
                "before. Sort the data by time, because it is learned from in the order of the file"
            )
    if schema.user is None:
        warnings.append(
            "there is no column of users, so GAUC equals the AUC of all events. Give --user NAME if there is one"
        )
    elif columns[user := schema.roles["user"][0]].missing:
        warnings.append(f"the user is missing in some rows of {user!r}, which will be rejected")
    doubts = [
        _find_written_numbers(column, sample)
        or (_find_doubt(column, schema.kinds[name], sample.total) if name in schema.features else "")
        for name, column in columns.items()
        if name not in unused
    ]
    labels = schema.target.labels(columns[schema.target.column].values, sample.is_text)[0]
    copies = _find_copies(columns, schema.target.column, labels)
    if copies.any():
        warnings.append(
            f"{copies.mean():.1%} of the rows are copies of earlier rows, with their labels. If events were recorded "
            "twice, remove the copies: a model that has learned a row knows the label of its copy"
        )
    leaks = _find_leaks(schema, columns, labels, copies)
    return warnings + [doubt for doubt in doubts if doubt] + leaks


def _find_copies(columns: Columns, target: str, labels: Array) -> Array:
    """Return which rows are copies of earlier rows; none if rows seem to repeat by chance, or if few do.

    If rows repeat because they have few different values, their labels differ. If events were recorded twice, the label
    of a row is that of the row before it with the same values. Positive labels are compared, because rare ones make
    labels agree by chance.
    """
    values = [
        [repr(value) for value in column.values] if column.type in ("list", "nested") else column.values
        for name, column in columns.items()
        if name != target
    ]
    copies = np.zeros(len(labels), dtype=bool)
    label_before: dict[tuple[Any, ...], float] = {}
    positives = repeated_positives = 0
    for row, key in enumerate(zip(*values, strict=True)):
        label = float(labels[row])
        if key in label_before:
            copies[row] = label == label_before[key]
            positives += label > 0
            repeated_positives += label > 0 and bool(copies[row])
        label_before[key] = label
    is_by_chance = repeated_positives < COPIED_LABELS * positives or not positives
    return np.zeros_like(copies) if is_by_chance or copies.mean() < MIN_COPIES else copies


def _find_doubt(column: Column, kind: Kind, total: int | None) -> str:
    """Return a warning if the kind of a column may be wrong, else an empty text."""
    if column.texts:
        texts = ", ".join(repr(text) for text in list(column.texts)[:3]) + (", ..." if len(column.texts) > 3 else "")
        return (
            f"{column.name!r} is hashed because {describe_texts(column)}. If it is a number, write number? in the "
            f'schema and the texts under "missing": [{texts}]'
        )
    is_repeating = column.distinct <= REPEATING * column.present
    if kind.name == "number" and column.type == "integer" and is_repeating and not is_amount(column.name):
        buckets = choose_buckets(column.estimate_distinct(total))
        return f"{column.name!r} is used as a number; if it is an id, write hash:{buckets}? in the schema"
    return ""


def _find_written_numbers(column: Column, sample: Sample) -> str:
    """Return a warning if texts look like numbers with a comma, a currency sign or a percent sign, else an empty text.

    Commas in files with another separator are checked when the sample is taken.
    """
    if column.type != "text":
        return ""
    counts = {str(value): count for value, count in column.counts.items() if str(value) not in MISSING_MARKERS}
    with_sign = [text for text in counts if _NUMBER_WITH_SIGN.fullmatch(text)]
    with_comma = [text for text in counts if sample.separator == "," and _NUMBER_WITH_COMMA.fullmatch(text)]
    numbers = {*with_sign, *with_comma, *(text for text in counts if _NUMBER.fullmatch(text))}
    if not with_sign and not with_comma:
        return ""
    if sum(counts[text] for text in numbers) < MOSTLY_NUMBERS * sum(counts.values()):
        return ""
    form = "a currency or percent sign" if with_sign else "a decimal comma or a separator of thousands"
    if not sample.is_text:
        advice = "Store them as numbers"
    elif with_sign:
        advice = "Remove the sign from the data"
    else:
        advice = (
            "Write them with a decimal point and without separators of thousands. Decimal commas "
            '("decimal": "," in schema.json) need another separator of columns, such as a semicolon'
        )
    example = (with_sign or with_comma)[0]
    return f"values such as {example!r} of {column.name!r} look like numbers with {form}, but are text. {advice}"


def _find_leaks(schema: Schema, columns: Columns, labels: Array, copies: Array) -> list[str]:
    """Return warnings about features that alone predict the label almost perfectly.

    Copies of rows are left out if enough others remain, because any unique value predicts the label of its copy.
    """
    rows = np.flatnonzero(~np.isnan(labels))
    if (~copies[rows]).sum() >= MIN_LEAK_EVENTS:
        rows = rows[~copies[rows]]
    if len(rows) < MIN_LEAK_EVENTS:
        return []
    rows = rows[:: max(1, len(rows) // MAX_LEAK_EVENTS)]
    labels = labels[rows]
    if not set(np.unique(labels)) <= {0.0, 1.0}:
        return []
    warnings = []
    for name in schema.features:
        column = columns[name]
        if column.type == "list":
            continue
        score = _single_feature_auc([column.values[row] for row in rows.tolist()], labels, column.is_numeric)
        if score >= LEAK_AUC:
            warnings.append(
                f"column {name!r} alone predicts the label with an AUC of {score:.3f}: if it is known only after the "
                f"label, it reveals the label; leave it out with --ignore {shell_word(name)}"
            )
    return warnings


def _single_feature_auc(values: Sequence[Any], labels: Array, is_numeric: bool) -> float:
    """Return the AUC of one feature on every second event.

    The score of an event is the mean label of its value in the other half of the events, smoothed by one event with the
    mean label. If the values are numbers, the value itself is also tried as a score, in both directions.
    """
    is_test = np.arange(len(labels)) % 2 == 1
    if len(np.unique(labels[is_test])) < 2:
        return 0.5
    _, codes = np.unique(np.array([str(value) for value in values], dtype=object).astype(str), return_inverse=True)
    train_codes, train_labels = codes[~is_test], labels[~is_test]
    counts = np.bincount(train_codes, minlength=codes.max() + 1)
    positives = np.bincount(train_codes, train_labels, minlength=codes.max() + 1)
    scores = ((positives + train_labels.mean()) / (counts + 1))[codes]
    best = float(auc(scores[is_test], labels[is_test]))
    if is_numeric:
        numbers = np.array([math.nan if value is None else float(value) for value in values])
        median = np.nanmedian(numbers) if not np.isnan(numbers).all() else 0
        numbers = np.where(np.isnan(numbers), median, numbers)
        direct = float(auc(numbers[is_test], labels[is_test]))
        best = max(best, direct, 1 - direct)
    return best
