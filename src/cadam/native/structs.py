"""The C structs of the compiled library as numpy structured dtypes.

native/src/structs.h explains the fields. A test compares the offsets of all fields with those of the C compiler.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Words: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Arrays of 64-bit integers, the form in which C functions receive addresses and sizes."""

Records: TypeAlias = np.ndarray[Any, np.dtype[np.void]]
"""Arrays of one of the structured dtypes of this module."""

MAX_BUFFERS = 4
"""Maximum number of state buffers of a parameter."""
MAX_COEFFICIENTS = 32
"""Maximum number of coefficients of a kernel."""
MAX_QUANTIZED = 2
"""Maximum number of quantized state buffers of a parameter."""
MAX_QUANTIZED_WIDTH = 1024
"""Maximum number of elements in a row of a table with quantized moments."""


def _struct(*fields: str, **special: Any) -> np.dtype[np.void]:
    """Return a dtype of 64-bit integers, with other types for the fields in `special`."""
    return np.dtype([(field, special.get(field, np.int64)) for field in fields])


_STATE = (np.int64, MAX_BUFFERS)
_SCALES = (np.int64, MAX_QUANTIZED)

DENSE_TENSOR = _struct(
    *("param", "grad", "state", "step", "counts", "elements", "kernel", "dtype", "coefficient_set", "scales"),
    *("seed", "moments"),
    state=_STATE,
    scales=_SCALES,
)
SPARSE_TABLE = _struct(
    *("param", "state", "step", "counts", "rows", "width", "kernel", "dtype", "scales", "seed", "moments"),
    *("row_moments", "row_steps", "set_of", "coefficient_sets", "last_count", "grad_dtype", "aging", "max_missed"),
    state=_STATE,
    scales=_SCALES,
)
EVENT_PARAMETER = _struct("param", "state", "counts", "rows", "width", state=_STATE)
EVENT_MODEL = _struct(
    *("linear", "table", "bias", "slopes", "vectors"),
    *("kernel", "entries", "fields", "numbers", "field_of", "alike_from", "bin_starts", "bins"),
    *("count", "sample", "sample_size", "slot_stride", "max_shift"),
    **dict.fromkeys(("linear", "table", "bias", "slopes", "vectors"), EVENT_PARAMETER),
)
EVENT_BATCH = _struct("n", "rows", "weights", "numbers", "labels", "c", "scores")
INPUT_LAYER = _struct(
    *("table", "linear", "bias", "slopes", "vectors", "dtype", "width", "has_pairs"),
    *("id_features", "entries", "fields", "numbers", "lengths", "is_list", "zero_is_missing", "starts", "sizes"),
    *("bin_starts", "bins", "count", "sample", "sample_size", "slot_stride", "max_shift", "normals"),
)
INPUT_BATCH = _struct(
    *("n", "is_training", "columns", "rows", "weights", "scaled", "embedded", "sums", "terms"),
    *("embedded_grads", "term_grads", "table_grads", "linear_grads", "vector_grads", "slope_grads", "bias_grad"),
)
TEXT_LINES = _struct(
    *("data", "line_begin", "line_end", "n", "begin", "end", "quoted", "status", "columns", "stride"),
    *("fields", "column_of", "separator", "names", "name_ends"),
)
TEXT_VALUES = _struct(
    *("data", "begin", "end", "quoted", "n", "quoting", "parse_as", "buckets", "accepts_booleans"),
    *("out", "is_parsed"),
)
TRACKED_CONTAINER = _struct("object", "is_dict", "count", "expected")
REPLAY_PART = _struct(
    *("fixed_tensors", "fixed", "fixed_addresses", "fixed_sizes", "fixed_kinds"),
    *("count", "grads", "grad_sizes", "grad_kinds", "steps", "columns", "coefficients", "is_sparse"),
)
REPLAY_LAUNCH = _struct("function", "blocks_x", "blocks_y", "threads", "shared_bytes", "arguments")
REPLAY_STEP = _struct(
    *("torch", "python", "cuda", "containers", "container", "parts", "part", "launches", "launch"),
    *("context", "host", "words", "slots", "slot", "events", "device"),
)
TABLE_ROW = _struct("id", "last_seen", "frequency", "used_in", id=np.uint64, frequency=np.uint32, used_in=np.uint32)
ID_INDEX = _struct("slots", "bits", "rows", "row_count", "first_free", "free_count", "time", "step")
ID_SKETCH = _struct("counters", "bits", "added", "window", "threshold")
ID_BATCH = _struct("n", "ids", "rows", "misses", "new_ids", "new_counts", "new_rows", "new_count", "refused")
ID_FEATURE = _struct(
    *("index", "sketch", "batch", "has_missing", "missing_id", "row_limit", "record_count", "start", "table_rows"),
    *("length", "stride", "first_unused", "is_full", "admitted"),
    batch=ID_BATCH,
)
ROW_MEMORY = _struct("data", "bytes", "value")

STRUCTS = {
    "dense_tensor": DENSE_TENSOR,
    "sparse_table": SPARSE_TABLE,
    "event_parameter": EVENT_PARAMETER,
    "event_model": EVENT_MODEL,
    "event_batch": EVENT_BATCH,
    "input_layer": INPUT_LAYER,
    "input_batch": INPUT_BATCH,
    "text_lines": TEXT_LINES,
    "text_values": TEXT_VALUES,
    "tracked_container": TRACKED_CONTAINER,
    "replay_part": REPLAY_PART,
    "replay_launch": REPLAY_LAUNCH,
    "replay_step": REPLAY_STEP,
    "table_row": TABLE_ROW,
    "id_index": ID_INDEX,
    "id_sketch": ID_SKETCH,
    "id_batch": ID_BATCH,
    "id_feature": ID_FEATURE,
    "row_memory": ROW_MEMORY,
}
"""All dtypes by the names of their C structs."""
