"""The stream of clicks on which the benchmarks of the learner run: 13 numbers and 26 categories, in Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cadam.online import Schema

NUMBERS, CATEGORIES, ROWS_PER_CATEGORY = 13, 26, 10_000


def click_schema() -> Schema:
    """Return the schema of the clicks. Their label comes with them."""
    numbers = {f"n{i}": "number" for i in range(NUMBERS)}
    return Schema({**numbers, **{f"c{i}": f"hash:{ROWS_PER_CATEGORY}" for i in range(CATEGORIES)}}, label="click")


def write_clicks(path: Path, count: int) -> None:
    """Write clicks with skewed categories as text and numbers with outliers."""
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {f"n{i}": random.lognormal(size=count) for i in range(NUMBERS)}
    for i in range(CATEGORIES):
        ids = (10 ** (1 + 4 * i / CATEGORIES) * random.random(count) ** 3).astype(np.int64)
        values, codes = np.unique(ids, return_inverse=True)
        columns[f"c{i}"] = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), [f"{v:08x}" for v in values])
    columns["click"] = (random.random(count) < 0.25).astype(np.int8)
    pq.write_table(pa.table(columns), path)
