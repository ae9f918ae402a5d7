"""Validation of a source and a model against a schema, before the run starts."""

from __future__ import annotations

import inspect

from torch import nn

from .schema import Schema
from .sources import Source
from .sources.records import list_duplicates


class MismatchError(ValueError):
    """The data or the model does not have what the schema requires."""


def check_columns(source: Source, schema: Schema, is_resumed: bool = False, has_label_source: bool = False) -> None:
    """Check that the data has the columns of the schema, as far as its beginning shows.

    The label may be missing if labels come from another source, or if the schema has an id and records may have
    different columns, because it can arrive in a separate record. Sources that cannot show their columns without
    consuming data are not checked. Optional columns are required when a run begins, where they reveal a wrong schema,
    but not when it resumes.

    Raises:
        MismatchError: If a column is missing, or if several columns have the same name.
    """
    columns = source.columns()
    if columns is None:
        return
    needed = schema.column_names()
    if columns.are_complete and (duplicates := list_duplicates(name for name in columns.names if name in needed)):
        raise MismatchError(f"{source.location} has more than one column {duplicates}: rename one of them")
    available = list(dict.fromkeys(columns.names))
    if not available:
        return
    if not columns.are_complete and set(available) <= set(needed) - set(schema.features):
        return  # So far there are only labels.
    if schema.id is not None and (has_label_source or not columns.are_complete):
        needed.remove(schema.target.column)
    optional = {name for name, kind in schema.kinds.items() if kind.optional and is_resumed}
    missing = [name for name in needed if name not in available and name not in optional]
    if missing:
        raise MismatchError(
            f"{source.location} has no column {', '.join(map(repr, missing))}, which the schema requires; it has "
            f"{', '.join(available)}"
        )


def check_arguments(model: nn.Module, schema: Schema, origin: str) -> None:
    """Check that the model can be called with the features of the schema as keyword arguments.

    Args:
        model: The model.
        schema: The schema.
        origin: Where the model comes from, for the error message.

    Raises:
        MismatchError: If the names of the arguments differ.
    """
    try:
        signature = inspect.signature(model.forward)
    except (ValueError, TypeError):
        return  # The method is not written in Python.
    try:
        signature.bind(**dict.fromkeys(schema.features))
    except TypeError as error:
        parameters = ", ".join(signature.parameters) or "no arguments"
        raise MismatchError(
            f"the model of {origin} cannot be called with the features as keyword arguments: its forward takes "
            f"{parameters}, but the schema has {', '.join(schema.features)} ({error})"
        ) from error
