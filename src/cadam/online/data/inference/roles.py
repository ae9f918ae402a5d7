"""The roles of columns: which column is the label, the user, the time and the id of an event."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from ....printable import shell_word
from ..conversion import convert
from ..kind import Kind
from ..schema import Target
from ..sources.line_sampling import SEPARATORS
from ..sources.sample import Sample
from .columns import Column, format_value, has_word, split_words
from .features import value_range
from .report import CannotInferError
from .word_lists import EVENT, LABEL, NEGATIVE, NOT_A_USER, POSITIVE, TIME, TRUE, USER

Columns = Mapping[str, Column]

FEW_MISSING = 0.05
"""Up to this fraction of missing values, a column of times is probably meant to be the time of the event."""


@dataclass(frozen=True)
class ColumnOptions:
    """The options of the user about columns.

    Args:
        label: The column of the label, or a comparison such as ``rating>=4``.
        user: The column of the user, with ``:text`` if its values are text.
        time: The column of the time, with ``:FORMAT`` if the format is not recognized.
        id: The column of the event's id, with ``:text`` if its values are text.
        ignore: The columns to leave out.
        uses_ids: Whether columns of many ids have the kind `id` instead of `hash`.
    """

    label: str | None = None
    user: str | None = None
    time: str | None = None
    id: str | None = None
    ignore: tuple[str, ...] = ()
    uses_ids: bool = False


@dataclass(frozen=True)
class Role:
    """A role as the schema writes it, such as ``at:ms`` (None if no column has it), and the reason for the choice."""

    value: str | None
    reason: str = ""
    column: str | None = None


def check_names(columns: Columns, options: ColumnOptions, sample: Sample, location: str) -> None:
    """Raise `CannotInferError` if an option names a column that does not exist."""
    for name in (*options.ignore, *filter(None, (options.user, options.time, options.id))):
        if name not in columns and (name in options.ignore or name.partition(":")[0] not in columns):
            raise CannotInferError(f"{location} has no column {name!r}{_describe_columns(name, columns, sample)}")


def find_label(columns: Columns, option: str | None, sample: Sample, location: str) -> tuple[str, str]:
    """Return the label as the schema writes it, and the reason.

    Raises:
        CannotInferError: If the label is not clear; the message suggests an option.
    """
    if option is None:
        named = [
            column
            for name, column in columns.items()
            if name.lower() in LABEL or set(split_words(name)) & {"label", "click", "clicked"}
        ]
        candidates = [column for column in named if column.distinct == 2]
        if len(candidates) != 1:
            raise CannotInferError(
                f"the column of {location} that is to be predicted is not clear: give --label NAME, or --label "
                f"'NAME>=4'{_describe_columns('', columns, sample)}"
            )
        label, reason = _binary_label(candidates[0])
        return label, f"by its name; {reason}"
    target = Target(option) if option in columns else Target.parse(option)
    if target.comparison == "" and Target.parse(option).comparison:
        raise CannotInferError(f"--label {option}: the column {option!r} is named like a comparison; rename it")
    if target.column not in columns:
        advice = _describe_columns(target.column, columns, sample)
        raise CannotInferError(f"{location} has no column {target.column!r} for the label{advice}")
    column = columns[target.column]
    if column.type == "list":
        raise CannotInferError(f"--label {option}: column {target.column!r} contains lists, but a label is one value")
    if not column.counts:
        raise CannotInferError(f"--label {option}: column {target.column!r} is empty in the sample")
    if not target.comparison:
        return _binary_label(column)
    labels, problems = target.labels(column.values, sample.is_text)
    if any(problems.values()):
        example = format_value(column.values[next(row for row, problem in problems.items() if problem)])
        raise CannotInferError(
            f"--label {option}: column {target.column!r} contains {example!r}, which is not a number. Compare text "
            f"with ==, as in --label {shell_word(f'{target.column}=={format_value(_likely_positive(column))}')}"
        )
    present = labels[~np.isnan(labels)]
    if len(present) and present.min() == present.max():
        raise CannotInferError(f"--label {option}: it is always {present[0]:g} in the sample{_describe_values(column)}")
    return option, f"--label; 1 in {present.mean():.1%}"


def _binary_label(column: Column) -> tuple[str, str]:
    """Return the label of a column with two values, and the reason."""
    name, counts = column.name, column.counts

    def share(value: Any) -> str:
        return f"{value} in {counts[value] / max(1, column.present):.1%}"

    if column.distinct == 1:
        value = format_value(next(iter(counts)))
        raise CannotInferError(f"--label {name}: it is always {value}, so there is nothing to learn")
    if column.is_numeric and column.distinct == 2:
        low, high = sorted(counts, key=float)
        if (float(low), float(high)) == (0, 1):
            return name, f"0 or 1; {share(high)}"
        if float(low) <= 0 < float(high):
            return f"{name}>0", f"{low} or {high}; {share(high)}"
    if column.type == "bool":
        positive = next((value for value in counts if str(value).lower() in TRUE), None)
        if {str(value).lower() for value in counts} <= {"true", "false"}:
            shown = "true in 0.0%" if positive is None else share(positive).lower()
            return name, f"true or false; {shown}"
        return f"{name}=={positive}", share(positive)
    if column.is_numeric:
        median = sorted(map(float, counts))[len(counts) // 2]
        example = f"{name}>={median:g}"
    else:
        example = f"{name}=={format_value(_likely_positive(column))}"
    raise CannotInferError(
        f"--label {name}: a label is 0 or 1{_describe_values(column)}. Say which values count as 1, as in "
        f"--label {shell_word(example)}"
    )


def _likely_positive(column: Column) -> Any:
    """Return the value that is most likely the positive outcome: by its words, else the rarest."""

    def rank(value: Any) -> tuple[bool, bool, int]:
        words = set(split_words(str(value)))
        return bool(words & NEGATIVE), not words & (TRUE | LABEL | POSITIVE), column.counts[value]

    return min(column.counts, key=rank)


def _describe_values(column: Column) -> str:
    if column.is_numeric and column.distinct > 5:
        return f"; the column has {column.distinct:,} values {value_range(column)}"
    values = [format_value(value)[:30] for value in list(column.counts)[:5]]
    return f"; the column has {', '.join(values)}{', ...' if column.distinct > 5 else ''}"


def _describe_columns(name: str, columns: Columns, sample: Sample) -> str:
    """Return the end of an error message: the most similar column, all columns, and why names may be unexpected."""
    text = ""
    similar = get_close_matches(name.lower(), map(str.lower, columns), 1)
    if matches := [column for column in columns if [column.lower()] == similar]:
        text += f" (did you mean {matches[0]!r}?)"
    names = list(columns)
    text += f"; the columns are {', '.join(names[:30])}"
    if len(names) > 30:
        text += f" and {len(names) - 30} more"
    if sample.header is not None:
        text += f". The file has no header, so its columns are called c1 to c{len(columns)}"
    if sample.is_text and len(columns) == 1:
        text += (
            f". Only one column was found, separated by {SEPARATORS[sample.separator]}; supported separators are "
            f"{', '.join(SEPARATORS.values())}"
        )
    return text


def find_user(columns: Columns, options: ColumnOptions, target: Target, total: int | None) -> Role:
    """Return the user: the column of the option, else a complete column with a typical name."""
    if options.user is not None:
        return Role(*_as_key(options.user, columns, "--user"))
    for column in columns.values():
        is_named = has_word(column.name, USER) and split_words(column.name)[-1] not in NOT_A_USER
        if not is_named or column.name in (target.column, *options.ignore) or column.type not in ("integer", "text"):
            continue
        if column.missing or (column.is_nearly_unique(total) and column.present > 1000) or column.distinct < 2:
            continue
        return Role(*_as_key(column.name, columns, "by its name"))
    return Role(None)


def find_time(columns: Columns, options: ColumnOptions, target: Target) -> Role:
    """Return the time: the column of the option, else the complete column of times that is best sorted.

    Raises:
        CannotInferError: If the format of the option's column is not recognized.
    """
    if options.time is not None:
        name, _, time_format = options.time.partition(":")
        if name not in columns:
            raise CannotInferError(f"--time {options.time}: a column with a colon in its name cannot be the time")
        column = columns[name]
        if column.type != "time" and not time_format and not column.is_numeric:
            example = format_value(next(iter(column.counts), ""))
            if exception := _find_exception(column):
                raise CannotInferError(
                    f"--time {name}: {format_value(exception)!r} is not a time, but others such as {example!r} are; "
                    f"give --time {shell_word(f'{name}:iso')} to reject such events"
                )
            raise CannotInferError(
                f"--time {name}: the format of times such as {example!r} is not recognized; give it as in "
                f"--time {shell_word(f'{name}:%d/%m/%Y %H:%M')}"
            )
        return Role(_with_format(name, time_format or column.time_format), "--time", name)
    # Events without a time are rejected, so a column with missing values is used only if --time says so.
    best = find_best_time(columns, (target.column, *options.ignore), max_missing=0)
    if best is None:
        return Role(None)
    reason = f"its values are {'sorted ' if sorted_share(best) > 0.999 else ''}times"
    return Role(_with_format(best.name, best.time_format), reason, best.name)


def _find_exception(column: Column) -> str:
    """Return the first text that prevents a column from being times in ISO 8601; empty if too many texts do."""
    texts = [str(value) for value in list(column.counts)[:10_000]]
    problems = convert(texts, Kind("time", time_format="iso"))[1]
    return texts[min(problems)] if 0 < len(problems) <= FEW_MISSING * len(texts) else ""


def find_best_time(columns: Columns, excluded: Collection[str], max_missing: float = FEW_MISSING) -> Column | None:
    """Return the column of times that is best sorted among those with at most a fraction of missing values."""
    candidates = [
        column
        for column in columns.values()
        if column.type == "time" and column.name not in excluded
        if column.missing <= max_missing * len(column.values) and ":" not in column.name and column.distinct > 1
    ]
    return max(candidates, key=lambda column: (sorted_share(column), has_word(column.name, TIME)), default=None)


def _with_format(name: str, time_format: str) -> str:
    return f"{name}:{time_format}" if time_format else name


def sorted_share(column: Column) -> float:
    """Return the fraction of neighboring times that are in order."""
    is_text = any(isinstance(value, str) for value in column.values[:100])
    seconds = convert(column.values, Kind("time", time_format=column.time_format), is_text)[0]
    seconds = seconds[~np.isnan(seconds)]
    return float((np.diff(seconds) >= 0).mean()) if len(seconds) > 1 else 1.0


def find_id(columns: Columns, options: ColumnOptions, target: Target, user: Role) -> Role:
    """Return the id: the column of the option, else one with a typical name if some labels are missing.

    Without missing labels, all labels come with their events, and an id is not needed.
    """
    if options.id is not None:
        return Role(*_as_key(options.id, columns, "--id: labels that arrive later refer to it"))
    label = columns[target.column]
    if not label.missing:
        return Role(None)
    for column in columns.values():
        if column.name in (target.column, user.column, *options.ignore) or column.missing:
            continue
        if column.type not in ("integer", "text") or not has_word(column.name, EVENT):
            continue
        if column.distinct >= 0.5 * column.present and _identifies_events(column, label):
            reason = "by its name: some labels are missing and may arrive later with this id"
            return Role(*_as_key(column.name, columns, reason))
    return Role(None)


def _identifies_events(column: Column, label: Column) -> bool:
    """Whether no two unlabeled events share an id. A label that arrives later repeats the id of its event."""
    events = [id_ for id_, value in zip(column.values, label.values, strict=True) if value is None]
    return len(set(events)) == len(events) and all(count <= 2 for count in column.counts.values())


def _as_key(text: str, columns: Columns, reason: str) -> tuple[str, str, str]:
    """Return the id or user as a schema writes it (with a suffix if it is text), the reason and the column."""
    column = columns.get(text) or columns[text.partition(":")[0]]
    if text != column.name:
        return text, reason, column.name
    values = [str(value) for value in list(column.counts)[:1000]]
    # Keys of integers are signed, so the unsigned integers of 64 bits that many hash functions return are text.
    is_large = any(value.isdecimal() and int(value) >= 2**63 for value in values)
    is_integer = column.type == "integer" and not is_large and not any("." in value for value in values)
    suffix = (":integer" if ":" in column.name else "") if is_integer else ":text"
    return column.name + suffix, reason, column.name
