"""The reasons for which events are rejected: grouping them, listing them, and suggesting what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ...printable import shell_word
from ..data.kind import Kind
from ..data.schema import Schema
from ..data.sources.line_files import CONVERT_TO_UTF8

MAX_LENGTH = 200
_QUOTED_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"[^\"]*\"")
_LEADING_NUMBER_OR_LENGTH = re.compile(r"^-?[0-9][0-9.e+-]*(?= )|(?<=of )[0-9]+")


def generalize_reason(reason: str) -> str:
    """Replace the values in a reason by dots, so that reasons that differ only in a value are counted together.

    >>> generalize_reason("item: 27 is not from 0 to 19")
    'item: ... is not from 0 to 19'
    """
    head, colon, rest = reason.partition(": ")
    if not colon:
        return reason
    rest = _QUOTED_TEXT.sub("'...'", rest)
    return f"{head}: {_LEADING_NUMBER_OR_LENGTH.sub('...', rest)}"[:MAX_LENGTH]


def format_reasons(counts: Mapping[str, int], limit: int = 3) -> str:
    """List the most frequent reasons with their counts."""
    most_frequent = sorted(counts.items(), key=lambda item: -item[1])[:limit]
    more = f" and {len(counts) - limit} more reasons" if len(counts) > limit else ""
    return "; ".join(f"{count:,} x {reason}" for reason, count in most_frequent) + more


def suggest_fix(counts: Mapping[str, int], schema: Schema) -> str:
    """Suggest what to do about the most frequent reason, or return an empty string if nothing was rejected."""
    if not counts:
        return ""
    reason = max(counts, key=lambda name: counts[name])
    column = reason.partition(": ")[0]
    kind = schema.kinds.get(column)
    if match := re.fullmatch(r"missing field '(.*)'", reason):
        return _suggest_for_missing(match[1], schema)
    if kind is not None and "is not from 0 to" in reason:
        larger = replace(kind, name="hash", size=4 * kind.size)
        return f"column {column!r} has values beyond {kind}: write {larger} in the schema, which accepts any value"
    if kind is not None and ("not a number" in reason or "not an integer" in reason):
        text_kind = Kind("hash", 1000, 0 if kind.name == "clock" else kind.length, kind.optional)
        return f"column {column!r} has text but the schema says {kind}: write {text_kind} in the schema, or infer it"
    if "not an integer" in reason or "not a number" in reason:
        return f"column {column!r} has text: write {column}:text in the schema"
    if "not UTF-8" in reason:
        return f"the data is not UTF-8. {CONVERT_TO_UTF8.format(path='FILE')}"
    if reason.startswith("not readable") and "fields" in reason:
        return (
            "the number of fields differs from that of the first line: use another separator (see `cadam schema`), or "
            "remove line breaks from quoted text"
        )
    if "not a time of the format" in reason:
        return f"give the format of the times in {column!r}, as in --time {shell_word(f'{column}:%d/%m/%Y %H:%M')}"
    if reason.startswith("the file cannot be read"):
        return "write the damaged file again, or remove it"
    return "run `cadam schema` on the data, and look at the reasons"


def _suggest_for_missing(name: str, schema: Schema) -> str:
    for role, field in (("user", schema.user), ("time", schema.time), ("id", schema.id)):
        if field is not None and field.partition(":")[0] == name:
            return f"the {role} is missing in some events, in column {name!r}: give another --{role}, or none"
    if name in schema.kinds:
        optional = schema.features[name].rstrip("?") + "?"
        return f"column {name!r} may be missing: write {optional} in the schema, or --ignore {shell_word(name)}"
    return f"column {name!r}, which is needed, is missing in some events: leave it out of the schema"
