"""Export of generated clicks in the format of Criteo's train.txt.

A line has tab-separated columns: the label, 13 integers and 26 hexadecimal categories. Preprocessing such a file
returns the generated rows, except for the numbering of the ids: every id has a unique token, and the out-of-vocabulary
id is written as an empty column or as a token that occurs once.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch

from cadam.statistics.intervals import Array

from .data import key, keyed
from .fields import FIELDS, INTEGERS, OOV, offsets
from .generator import Generated

CHUNK = 50_000
"""Number of rows that are written at once."""
MAX_INTEGER_IDS = 341
"""Largest vocabulary of an integer field. With more ids, the integers would not fit into eight digits."""
_EMPTY = 20
"""The purpose of the random bits that select the columns to leave empty (see `data.key`)."""


def bucket(value: int) -> int:
    """Return the bucket of an integer: floor((ln x)^2) for x > 2, otherwise x itself."""
    return math.floor(math.log(value) ** 2) if value > 2 else value


def unbucket(category: int) -> int:
    """Return the smallest integer of a bucket."""
    value = category if category <= 2 else math.floor(math.exp(math.sqrt(category)))
    while bucket(value) < category:
        value += 1
    return value


def write(
    clicks: Generated, path: Path, rows: int | None = None, report: Callable[[int], None] = lambda written: None
) -> None:
    """Write generated clicks in the order of time, compressed if the name ends in .gz.

    Args:
        clicks: The generated clicks.
        path: The file to write.
        rows: Number of rows to write; None for all.
        report: Called with the number of rows written so far.

    Raises:
        ValueError: If the vocabulary of an integer field is too large for the format.
    """
    if max(clicks.vocabulary[: len(INTEGERS)]) > MAX_INTEGER_IDS:
        raise ValueError(
            f"an integer field can have at most {MAX_INTEGER_IDS} ids in this format, got {clicks.vocabulary}"
        )
    rows = clicks.rows if rows is None else min(rows, clicks.rows)
    cpu, start = torch.device("cpu"), 0
    with _open(path) as file:
        for batch in clicks.stream(CHUNK, device=cpu):
            ids, labels = batch.ids[: rows - start], batch.labels[: rows - start]
            file.write(_lines(clicks, start, ids.numpy(), labels.numpy()))
            start += len(ids)
            report(start)
            if start == rows:
                break


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "wb", compresslevel=1)) if path.suffix == ".gz" else path.open("wb")


def _lines(clicks: Generated, start: int, ids: Array, labels: Array) -> bytes:
    """Return the text of some rows.

    Every column is first written as eight characters, with zero bytes as padding. Then the zero bytes are removed.

    Args:
        clicks: The generated clicks.
        start: The number of the first row.
        ids: The ids of the rows.
        labels: The labels of the rows.
    """
    numbers = np.arange(start, start + len(ids))
    empty = keyed(key(clicks.seed, _EMPTY), torch.from_numpy(numbers)).numpy()[:, None] >> np.arange(len(FIELDS)) & 1
    absent = ids == np.array(offsets(clicks.vocabulary)) + OOV
    absent[:, : len(INTEGERS)] = False
    texts = _texts(tuple(clicks.vocabulary))[ids]
    at_row, at_field = absent.nonzero()
    unique_tokens = _tokens(at_field, (1 << 31) + numbers[at_row])
    texts[at_row, at_field] = np.where(empty[at_row, at_field], 0, unique_tokens)
    zero = ids[:, : len(INTEGERS)] == np.array(offsets(clicks.vocabulary)[: len(INTEGERS)]) + 1
    texts[:, : len(INTEGERS)][zero & (empty[:, : len(INTEGERS)] == 1)] = 0  # preprocessing reads a missing integer as 0

    lines = np.empty((len(ids), 2 + 9 * len(FIELDS)), np.uint8)
    lines[:, 0] = ord("0") + labels.astype(np.uint8)
    fields = lines[:, 1:-1].reshape(len(ids), len(FIELDS), 9)
    fields[:, :, 0] = ord("\t")
    fields[:, :, 1:] = texts.view(np.uint8).reshape(len(ids), len(FIELDS), 8)
    lines[:, -1] = ord("\n")
    content: bytes = lines[lines != 0].tobytes()
    return content


@lru_cache(maxsize=2)
def _texts(vocabulary: tuple[int, ...]) -> Array:
    """Return the token of every id of the table, as eight bytes padded with zeros."""
    parts = []
    for column, size in enumerate(vocabulary):
        if column < len(INTEGERS):
            values = [unbucket(max(number - 1, 0)) for number in range(size)]
            parts.append(np.array([str(value) for value in values], "S8").view(np.uint64))
        else:
            parts.append(_tokens(np.full(size, column), np.arange(size)))
    return np.concatenate(parts)


def _tokens(fields: Array, numbers: Array) -> Array:
    """Return eight hexadecimal digits for numbers below 2**32, distinct within each field."""
    values = (numbers * 0x9E3779B1 + fields * 0x85EBCA6B) & 0xFFFFFFFF
    texts: Array = _hexadecimal()[values >> 16] | _hexadecimal()[values & 0xFFFF] << np.uint64(32)
    return texts


@lru_cache(maxsize=1)
def _hexadecimal() -> Array:
    """Return the four hexadecimal digits of every number below 65536, as the bytes of a little-endian integer."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8).astype(np.uint64)
    numbers = np.arange(1 << 16)
    characters = [digits[numbers >> (12 - 4 * digit) & 15] << np.uint64(8 * digit) for digit in range(4)]
    texts: Array = np.bitwise_or.reduce(characters)
    return texts
