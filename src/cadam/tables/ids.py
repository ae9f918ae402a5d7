"""Conversion of integers and texts to ids of 64 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..native.loader import package_library

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
"""A one-dimensional, contiguous array of ids."""


def convert_ids(ids: Any) -> tuple[Ids, tuple[int, ...]]:
    """Convert integers or texts to ids.

    An integer is its own id; -1 and 2**64 - 1 have the same bits and are the same id. The id of a text is the hash of
    its UTF-8 encoding: FNV-1a, then the finalizer of splitmix64, as in feature hashing.

    Args:
        ids: A tensor or an array of integers, an array of texts, another object that numpy can convert to one of them,
            such as a column of pandas, or a possibly nested sequence of integers or of texts.

    Returns:
        The ids in one dimension, and the shape of the argument.

    Raises:
        TypeError: If the values are neither integers nor texts.
        ValueError: If an integer does not fit into 64 bits, a text cannot be encoded, or nested sequences have
            different lengths.
    """
    if isinstance(ids, Tensor):
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.layout != torch.strided:
            raise TypeError(f"ids must be integers or texts, got a tensor of {ids.dtype}, {ids.layout}")
        if ids.dtype != torch.uint64:
            ids = ids.to(torch.int64)
        array = ids.detach().cpu().contiguous().numpy()
        return array.view(np.uint64).reshape(-1), tuple(ids.shape)
    if isinstance(ids, np.ma.MaskedArray) and ids.mask.any():
        raise TypeError("ids must be integers or texts, got a masked array with missing values: give these an id")
    values = np.asarray(ids) if hasattr(ids, "__array__") else _as_array(ids)
    shape = values.shape
    if values.dtype.kind in "iu":
        wide = np.uint64 if values.dtype.kind == "u" else np.int64
        return np.ascontiguousarray(values, wide).view(np.uint64).reshape(-1), shape
    if values.dtype.kind in "mM":  # numpy converts them to integers if they are in nanoseconds
        raise TypeError(f"ids must be integers or texts, got an array of {values.dtype}")
    flat = values.reshape(-1).tolist()
    if not flat:
        return np.zeros(0, np.uint64), shape
    if all(isinstance(value, str) for value in flat):
        return _hash_texts(flat), shape
    if not all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in flat):
        kinds = sorted({type(value).__name__ for value in flat})
        raise TypeError(f"ids must be all integers or all texts, got {', '.join(kinds)}")
    for value in flat:
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"the id {value} does not fit into 64 bits")
    return np.array([int(value) % (1 << 64) for value in flat], np.uint64), shape


def _as_array(ids: Any) -> np.ndarray[Any, Any]:
    """Return an array of objects, in which integers beyond 64 bits and texts of any length stay as they are."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise TypeError(f"ids must be a tensor, an array or a sequence, got {type(ids).__name__}")
    try:
        array = np.array(ids, dtype=object)
    except ValueError as error:
        raise ValueError(f"nested sequences of ids must have equal lengths: {error}") from None
    if any(isinstance(value, list | tuple) for value in array.reshape(-1)):
        raise ValueError("nested sequences of ids must have equal lengths; pad them with an id of your choice")
    _check_nesting(ids, array.ndim)
    return array


def _check_nesting(ids: Any, depth: int) -> None:
    """Raise TypeError if numpy took a single value for a sequence, such as the bytes of a scalar of pyarrow."""
    if depth < 2:
        return
    for value in ids:
        if not isinstance(value, list | tuple | range | np.ndarray | Tensor):
            raise TypeError(f"ids must be all integers or all texts, got {type(value).__name__}")
        _check_nesting(value, depth - 1)


def _hash_texts(texts: list[str]) -> Ids:
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise ValueError(f"the id {error.object!r:.80} cannot be encoded as UTF-8: {error.reason}") from None
    data = np.frombuffer(b"".join(encoded) or b"\0", np.uint8)
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    hashes = np.empty(len(encoded), np.uint64)
    package_library().c.cadam_hash_texts(data.ctypes.data, ends.ctypes.data, len(encoded), hashes.ctypes.data)
    return hashes
