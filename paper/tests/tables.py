"""Comparison of tables of results, to check that the archive never changes rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def begins_with(after: pa.Table, before: pa.Table) -> bool:
    """Return whether the first rows of a table are those of an earlier one; NaN equals NaN."""
    return after.num_rows >= before.num_rows and all(
        _same(after.column(name).slice(0, before.num_rows).combine_chunks(), before.column(name).combine_chunks())
        for name in before.schema.names
    )


def _same(after: pa.Array, before: pa.Array) -> bool:
    if pa.types.is_list(before.type):
        return after.value_lengths().equals(before.value_lengths()) and _same(after.flatten(), before.flatten())
    if not pa.types.is_floating(before.type):
        return bool(after.equals(before))
    values = [(array.is_valid().to_numpy(False), array.fill_null(0).to_numpy()) for array in (after, before)]
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(*values, strict=True))
