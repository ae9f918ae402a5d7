"""Inference of a schema from a sample of the data."""

from __future__ import annotations

from dataclasses import replace

from ..schema import Schema, Target
from ..sources.sample import Sample
from ..sources.uri import PLACEHOLDER_SCHEMA, open_source
from .columns import Column, analyze_column, text_column
from .diagnostics import find_warnings
from .features import decide_feature
from .report import CannotInferError, ColumnDecision, InferredSchema
from .roles import ColumnOptions, Columns, check_names, find_id, find_label, find_time, find_user


def take_sample(uri: str) -> Sample:
    """Return a sample of the source that a URI names.

    Raises:
        SamplingError: If no sample can be taken.
    """
    return open_source(uri, PLACEHOLDER_SCHEMA).sample()


def infer_schema(sample: Sample, options: ColumnOptions, location: str = "the data") -> InferredSchema:
    """Infer a schema from a sample.

    Args:
        sample: Some rows of the data.
        options: The options of the user about columns.
        location: The name of the data, for messages.

    Returns:
        The schema, the decision about each column with its reason, and warnings.

    Raises:
        CannotInferError: If the data does not determine the schema; the message says which option to give.
    """
    columns = {
        name: analyze_column(name, values, sample.is_text, name in sample.time_columns)
        for name, values in sample.columns.items()
    }
    check_names(columns, options, sample, location)
    if options.label is not None and options.label not in columns:
        requested = Target.parse(options.label)
        if requested.compares_text and requested.column in columns and columns[requested.column].missing_markers:
            columns[requested.column] = text_column(requested.column, sample.columns[requested.column])
    label, reason = find_label(columns, options.label, sample, location)
    target = Target.parse(label)
    time, user = find_time(columns, options, target), find_user(columns, options, target, sample.total)
    id_ = find_id(columns, options, target, user)
    decisions: dict[str, ColumnDecision] = {}
    for name, column in columns.items():
        if name == target.column:
            decision = ColumnDecision(name, "label", reason)
        elif name in options.ignore:
            decision = ColumnDecision(name, "", "--ignore")
        elif name == id_.column:
            decision = ColumnDecision(name, "id", id_.reason)
        else:
            decision = decide_feature(column, sample.total, name == user.column, options.uses_ids)
            if name == time.column:
                decision = replace(decision, reason=f"time of the event ({time.reason}); {decision.reason}")
            elif name == user.column:
                decision = replace(decision, reason=f"user ({user.reason}); {decision.reason}")
        decisions[name] = _add_missing_share(decision, column, has_id=id_.value is not None)
    features = {name: use.kind for name, use in decisions.items() if use.kind not in ("", "label", "id")}
    if not features:
        reasons = "; ".join(f"{use.column}: {use.reason}" for use in list(decisions.values())[:5])
        raise CannotInferError(f"{location} has no column from which to predict {label!r}: {reasons}")
    missing = _missing_markers(columns, {*features, id_.column, user.column, time.column}, target)
    roles = (id_.value, user.value, time.value)
    schema = Schema(features, label, *roles, separator=sample.separator, header=sample.header, missing=missing)
    warnings = sample.warnings + find_warnings(
        schema, columns, sample, options.ignore
    )  # The sample has decimal points.
    dropped = [use.column for use in decisions.values() if not use.kind and use.column not in options.ignore]
    if dropped:
        names = ", ".join(map(repr, dropped[:10])) + (f" and {len(dropped) - 10} more" if len(dropped) > 10 else "")
        warnings.append(f"columns were left out: {names}. To use one, write it in schema.json and give --schema")
    schema = replace(schema, decimal=sample.decimal)
    return InferredSchema(schema, list(decisions.values()), f"{location}: {sample.description}", warnings)


def _missing_markers(columns: Columns, used: set[str | None], target: Target) -> dict[str, list[str]] | tuple[()]:
    """Return the texts that stand for a missing value, by column.

    A marker that was found in one column applies to all columns that are not text, because their sample may have had no
    missing values. In text it may be a value, as NA is a country. The label has only the markers of the same column.
    """
    everywhere = sorted({marker for column in columns.values() for marker in column.missing_markers})
    markers = {
        name: everywhere
        for name, column in columns.items()
        if name in used and column.type not in ("text", "list") and name != target.column
    }
    markers[target.column] = sorted(columns[target.column].missing_markers)
    return {name: texts for name, texts in markers.items() if texts} or ()


def _add_missing_share(decision: ColumnDecision, column: Column, has_id: bool) -> ColumnDecision:
    """Return the decision with the fraction of missing values in its reason."""
    if not column.missing or not column.present:
        return decision
    reason = f"{decision.reason}, {column.missing / len(column.values):.1%} missing"
    if decision.kind == "label":
        consequence = "these events wait for their labels" if has_id else "these events are never learned from"
        reason += f" ({column.missing:,} of {len(column.values):,} labels): {consequence}"
    return replace(decision, reason=reason)
