"""Nested objects: the field ``id`` of the object ``user`` is a column with the dotted name ``user.id``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

MAX_DEPTH = 8
"""Objects that are nested more deeply are not offered as features."""

MAX_LISTED_DEPTH = 100
"""The number of levels of which the names are listed to validate a schema."""
MAX_FIELDS = 100
"""Objects with more different fields than this are not flattened: they are probably maps from ids to values."""
ABSENT = object()
"""The result of `find_field` if a record has no such field."""


def find_field(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column in a record, or `ABSENT`.

    A field whose own name is `user.id` takes precedence over the field `id` of the object `user`.
    """
    if name in record:
        return record[name]
    for position, character in enumerate(name):
        if character == "." and isinstance(inner := record.get(name[:position]), Mapping):
            value = find_field(inner, name[position + 1 :])
            if value is not ABSENT:
                return value
    return ABSENT


def flatten(record: Mapping[str, Any], depth: int = MAX_DEPTH, unflattened: Collection[str] = ()) -> dict[str, Any]:
    """Return the columns of a record, with dotted names for the fields of nested objects.

    Args:
        record: The record.
        depth: The number of levels; deeper objects are returned as they are.
        unflattened: The names of objects that are returned as they are.
    """
    columns: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and depth > 1 and name not in unflattened:
            for inner, inner_value in flatten(value, depth - 1).items():
                columns.setdefault(f"{name}.{inner}", inner_value)
        else:
            columns[name] = value
    return columns


def flatten_records(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Flatten records, except objects with more than `MAX_FIELDS` different fields."""
    fields: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.items():
            if isinstance(value, Mapping) and len(fields.setdefault(name, set())) <= MAX_FIELDS:
                fields[name].update(flatten(value, MAX_DEPTH - 1))
    unflattened = {name for name, names in fields.items() if len(names) > MAX_FIELDS}
    return [flatten(record, unflattened=unflattened) for record in records]
