"""Conversion of raw values to arrays of the kinds that a schema declares, and feature hashing."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any

import numpy as np

from .events import Array
from .kind import HOURS, MISSING_ID, UNITS, WEEKDAYS, Kind
from .text_columns import DictionaryColumn, ParseAs, TextColumn, UnreadableValue

Values = Sequence[Any] | Array | TextColumn | DictionaryColumn
"""A column of raw values. A list has None where a value is missing, and an array has no missing values."""
Converted = tuple[Array, dict[int, str]]
"""Converted values, and the problem of each row that could not be converted (empty if its value is missing)."""

MAX_TEXT_LENGTH = 1024
MAX_DIGITS = 100
MAX_NUMBER = 1e19
"""The largest number. Gradients are multiples of features, and an infinite squared gradient (in float32) would make a
second moment infinite, after which its weight would never change again."""
MAX_EXACT_FLOAT = 2**53
"""Up to this number, every integer has an exact float64."""
BOOLEANS = {"true": "1", "True": "1", "TRUE": "1", "false": "0", "False": "0", "FALSE": "0"}
"""How JSON, Python and R write booleans, and the numbers they stand for."""
_INTEGER = re.compile(r"(0|-?[1-9][0-9]{0,18})(\.0+)?")
_ELEMENT = re.compile(r"[^\s|,;\[\]{}()\"']+")
"""An element of a list that is written as text."""
_ELEMENT_WITH_COMMA = re.compile(r"[^\s|;\[\]{}()\"']+")
_WORD = re.compile(r"\w+")
"""A word of a text of the kind `words`."""
_SWAPPED = str.maketrans(".,", ",.")
HASHED = ("hash", "id")
"""The kinds that accept integers and texts."""
_PARSE_AS = {
    "hash": ParseAs.HASH,
    "id": ParseAs.HASH,
    "category": ParseAs.INTEGER,
    "integer": ParseAs.INTEGER,
    "number": ParseAs.NUMBER,
    "time": ParseAs.NUMBER,
}


class RejectedError(Exception):
    """A value cannot be converted; the message is the reason."""


def convert(values: Values, kind: Kind, text: bool = False) -> Converted:
    """Convert a column of values.

    Args:
        values: The raw values.
        kind: The kind to convert to.
        text: Whether numbers are written as text.

    Returns:
        The array of converted values, and the reasons of the rows that could not be converted. The reason is empty if
        the value is missing. Such rows contain nan (numbers), 0 or an empty text.
    """
    if isinstance(values, TextColumn):
        if (parsed := _convert_with_compiled_code(values, kind, text)) is not None:
            return parsed
        values = list(values)
    if isinstance(values, list):
        values = DictionaryColumn.encode(values) or values
    if isinstance(values, DictionaryColumn):
        array, problems = convert(values.dictionary, kind, text)
        return array[values.indices], values.problems_by_row(problems)
    if kind.name == "clock":
        return _convert_clock(values, kind, text)
    if kind.name == "words":
        return _convert_words(values, kind)
    if kind.length:
        return _convert_lists(values, kind, text)
    if kind.optional:
        return _convert_optional(values, kind, text)
    if kind.time_format in UNITS:
        numbers, problems = convert(values, replace(kind, time_format=""), text)
        return numbers / UNITS[kind.time_format], problems
    if kind.time_format:
        return _convert_one_by_one(values, kind, text)
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OU":
        converted = _convert_array(values, kind)
    else:
        values = list(values)
        if kind.name in HASHED and any(issubclass(type_, str) for type_ in set(map(type, values))):
            has_comma = text and kind.decimal == ","
            values = [_integer_of_text(value, has_comma) for value in values]
        converted = _convert_plain_list(values, kind)
    return _convert_one_by_one(values, kind, text) if converted is None else converted


# Columns -------------------------------------------------------------------------------------------------------


def _convert_with_compiled_code(values: TextColumn, kind: Kind, text: bool) -> Converted | None:
    """Convert plain values with compiled code and the others in Python; None if there is no compiled code for it."""
    if kind.name not in _PARSE_AS or kind.length or kind.time_format:
        return None
    size = 0 if kind.name == "id" else kind.size - kind.optional
    has_comma = text and kind.decimal == ","
    # Numbers get a decimal point for the compiled code. Values that it cannot parse are read below in their own form.
    source = values.swap_points_and_commas() if has_comma and kind.name not in HASHED else values
    if (parsed := source.parse(_PARSE_AS[kind.name], size, kind.accepts_booleans)) is None:
        return None
    array, is_valid = parsed
    if has_comma and kind.name in HASHED:
        is_valid &= ~values.contains(".,")
    if kind.name == "number":
        is_valid &= np.abs(array) <= MAX_NUMBER
    elif kind.name == "category":
        is_valid &= (array >= 0) & (array < size)
    array = array.astype(kind.dtype, copy=False)
    if kind.optional and kind.name not in ("number", "id"):
        array += 1
    if is_valid.all():
        return array, {}
    rows = np.flatnonzero(~is_valid)
    array[rows], problems = convert([values[row] for row in rows.tolist()], kind, text)
    return array, {int(rows[index]): problem for index, problem in problems.items()}


def _convert_plain_list(values: list[Any], kind: Kind) -> Converted | None:
    """Convert a list of Python numbers, or return None if some value has another type."""
    types = set(map(type, values))
    if not types <= {int, float} and not (kind.accepts_booleans and types <= {int, float, bool}):
        return None
    try:
        return _convert_array(np.array(values), kind)
    except OverflowError:
        return None


def _convert_array(values: Array, kind: Kind) -> Converted | None:
    """Convert an array of numbers, or return None if some value is not of the kind."""
    if values.ndim != 1:
        return None
    if kind.is_float and values.dtype.kind in "iufb":
        floats = values.astype(np.float64)
        is_valid = np.isfinite(floats) if kind.name == "time" else np.abs(floats) <= MAX_NUMBER
        return (floats.astype(kind.dtype), {}) if is_valid.all() else None
    if kind.name in ("integer", "category", *HASHED) and values.dtype.kind in "iu":
        if values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
            return None
        if kind.name == "category" and len(values) and (values.min() < 0 or values.max() >= kind.size):
            return None
        integers = values.astype(np.int64, copy=False)
        if kind.name == "id" and (integers == MISSING_ID).any():
            return None
        return (hash_integers(integers, kind.size) if kind.name == "hash" else integers), {}
    return None


def _convert_one_by_one(values: Values, kind: Kind, text: bool) -> Converted:
    placeholder = {"text": "", "number": math.nan, "time": math.nan}.get(kind.name, 0)
    array = np.full(len(values), placeholder, dtype=kind.dtype)
    problems: dict[int, str] = {}
    for row, value in enumerate(values):
        if value is None:
            problems[row] = ""
            continue
        try:
            array[row] = _convert_value(value, kind, text)
        except RejectedError as problem:
            problems[row] = str(problem)
    return array, problems


def _convert_optional(values: Values, kind: Kind, text: bool) -> Converted:
    """Convert values that may be missing; nan counts as missing."""
    has_offset = kind.name not in ("number", "id")
    required = replace(kind, optional=False, size=kind.size - 1 if has_offset and kind.size else kind.size)
    if isinstance(values, np.ndarray):
        missing = values != values
    else:
        missing = np.fromiter((value is None or value != value for value in values), bool, len(values))
    if missing.any():
        # Missing values are replaced by one that is present, so that the column may still be converted as a whole.
        present = 0 if missing.all() else values[int(np.argmin(missing))]
        if isinstance(values, np.ndarray):
            values = np.where(missing, present, values)
        else:
            pairs = zip(values, missing.tolist(), strict=True)
            values = [present if is_missing else value for value, is_missing in pairs]
    array, problems = convert(values, required, text)
    if has_offset:
        array = array + 1
    if missing.any():
        array[missing] = {"number": np.nan, "id": MISSING_ID}.get(kind.name, 0)
    return array, {row: problem for row, problem in problems.items() if not missing[row]}


def _convert_clock(values: Values, kind: Kind, text: bool) -> Converted:
    """Convert times to the category of their hour and the category of their day of the week."""
    seconds, problems = convert(values, Kind("time", time_format=kind.time_format, decimal=kind.decimal), text)
    is_valid = ~np.isnan(seconds)
    array = np.zeros((len(seconds), 2), dtype=np.int64)
    valid = seconds[is_valid].astype(np.int64)
    hours, weekdays = valid // 3600 % HOURS, (valid // 86400 + 3) % WEEKDAYS  # 1970 began on a Thursday.
    array[is_valid] = np.stack([hours, HOURS + weekdays], 1) + kind.optional
    if kind.optional:
        problems = {row: problem for row, problem in problems.items() if problem}
    return array, problems


def _convert_lists(values: Values, kind: Kind, text: bool) -> Converted:
    problems: dict[int, str] = {}
    flat: Values
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == kind.length:
        flat = values.reshape(-1)
    else:
        flat = []
        for row, value in enumerate(values):
            if kind.optional and not isinstance(value, UnreadableValue):
                value = _fit_length(value, kind, text)
            elif text and isinstance(value, str):
                value = value.split()
            if isinstance(value, (list, tuple, np.ndarray)) and len(value) == kind.length:
                flat.extend(value)
                continue
            flat.extend([None] * kind.length)
            if value is None:
                problems[row] = ""
            elif isinstance(value, UnreadableValue):
                problems[row] = value.reason
            elif isinstance(value, (list, tuple)):
                problems[row] = f"a list of {len(value)} values, not of {kind.length}"
            else:
                problems[row] = f"a value of type {type(value).__name__} is not a list of {kind.length} values"
    array, element_problems = convert(flat, replace(kind, length=0), text)
    for index, problem in element_problems.items():
        problems.setdefault(index // kind.length, problem or f"the value at index {index % kind.length} is missing")
    return array.reshape(len(values), kind.length), problems


def _fit_length(value: Any, kind: Kind, text: bool) -> Any:
    """Cut a list, or the elements of a text, to a length, or fill it with None; other values are returned unchanged."""
    if value is None:
        value = []
    elif isinstance(value, str):
        has_comma = text and kind.decimal == "," and kind.is_float
        value = (_ELEMENT_WITH_COMMA if has_comma else _ELEMENT).findall(value)
    if not isinstance(value, (list, tuple, np.ndarray)):
        return value
    used = value[-kind.length :] if kind.keeps_last else value[: kind.length]
    return [*used, *[None] * (kind.length - len(value))]


def split_text(text: str) -> list[str]:
    """Return the words of a text in lower case: runs of letters, digits and underscores of any script."""
    return _WORD.findall(text.lower())


def _convert_words(values: Values, kind: Kind) -> Converted:
    """Convert texts to the buckets of their first words. Numbers and booleans count as the texts that CSV has."""
    problems: dict[int, str] = {}
    lists: list[list[str]] = []
    for row, value in enumerate(values):
        words: list[str] = []
        if isinstance(value, (str, int, float, np.generic)) and value == value:
            words = split_text(str(value))[: kind.length]
        elif isinstance(value, UnreadableValue):
            problems[row] = value.reason
        elif value is not None and not isinstance(value, float):
            problems[row] = f"a value of type {type(value).__name__} is not text"
        elif not kind.optional:
            problems[row] = ""
        lists.append([word[:MAX_TEXT_LENGTH] for word in words])
    array, _ = _convert_lists(lists, Kind("hash", kind.size, kind.length, optional=True), text=True)
    return array, problems


# Single values -------------------------------------------------------------------------------------------------


def _convert_value(value: Any, kind: Kind, text: bool) -> Any:
    """Convert one value, or raise `RejectedError`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, UnreadableValue):
        raise RejectedError(value.reason)
    if kind.time_format:
        return _parse_timestamp(value, kind.time_format)
    if kind.name == "text" or (kind.name in HASHED and isinstance(value, str)):
        return _convert_text(value, kind)
    if isinstance(value, str):
        if not text:
            advice = "; for text, write NAME:text in the schema" if kind.name == "integer" else ""
            raise RejectedError(f"text {value[:40]!r} is not a number{advice}")
        value = _parse_number(BOOLEANS.get(value, value) if kind.accepts_booleans else value, kind)
    if kind.is_float:
        return _convert_number(value, kind)
    if isinstance(value, bool) and kind.name in ("category", *HASHED):
        value = int(value)
    if isinstance(value, float):
        if not value.is_integer():
            raise RejectedError(f"{value} is not an integer")
        if abs(value) > MAX_EXACT_FLOAT:
            raise RejectedError(f"{value:.0f} is a float, and floats of this size do not represent every integer")
        value = int(value)
    if type(value) is not int:
        raise RejectedError(f"{reprlib.repr(value)[:40]} has the type {type(value).__name__} and is not an integer")
    if kind.name == "category" and not 0 <= value < kind.size:
        raise RejectedError(f"{reprlib.repr(value)} is not from 0 to {kind.size - 1}")
    if not _fits_int64(value) or (kind.name == "id" and value == MISSING_ID):
        if kind.name in HASHED:
            return _convert_text(value, kind)
        raise RejectedError("the integer is not from -2^63 to 2^63 - 1; for such ids, write NAME:text in the schema")
    return int(hash_integers(np.array([value]), kind.size)[0]) if kind.name == "hash" else value


def _parse_timestamp(value: Any, time_format: str) -> float:
    """Return the seconds since 1970; datetime objects are accepted with every format."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        text = str(value).strip()
        try:
            value = datetime.fromisoformat(text) if time_format == "iso" else datetime.strptime(text, time_format)
        except ValueError:
            raise RejectedError(f"{str(value)[:40]!r} is not a time of the format {time_format}") from None
    return float((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())


def _fits_int64(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _integer_of_text(value: Any, has_comma: bool) -> Any:
    """Return the integer that a text stands for, else the value itself. `has_comma` is whether "5,0" is 5.

    In CSV all values are text. The text of an integer, of a float without a fraction or of a boolean is hashed like the
    value itself, so that a model that learned from CSV gives the same scores for JSON.
    """
    if not isinstance(value, str):
        return value
    text = value.translate(_SWAPPED) if has_comma else value
    if match := _INTEGER.fullmatch(BOOLEANS.get(text, text)):
        integer = int(match[1])
        if abs(integer) <= MAX_EXACT_FLOAT if match[2] else _fits_int64(integer):
            return integer
    return value


def _convert_text(value: Any, kind: Kind) -> Any:
    """Return a text, or its hash. Integers count as the texts that CSV has."""
    if type(value) is int and abs(value) < 10**MAX_DIGITS:
        value = str(value)
    if not isinstance(value, str):
        raise RejectedError(f"a value of type {type(value).__name__} is not text")
    if len(value) > MAX_TEXT_LENGTH:
        raise RejectedError(f"text of {len(value)} characters is longer than {MAX_TEXT_LENGTH}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise RejectedError("the text contains half a surrogate pair, which is not valid Unicode") from None
    if kind.name == "id":
        return hash_id(encoded)
    return value if kind.name == "text" else hash_text(encoded, kind.size)


def _parse_number(value: str, kind: Kind) -> int | float:
    """Parse a number in ASCII. Python also reads underscores and digits of other scripts, which are rejected here."""
    if len(value) > MAX_DIGITS:
        raise RejectedError(f"text of {len(value)} characters is not a number")
    if kind.decimal == "," and "." in value:
        raise RejectedError(f"text {value[:40]!r} is not a number with a decimal comma")
    if value.isascii() and "_" not in value:
        # Integers may also be written as floats: pandas writes 3.0 in a column with missing values.
        for parse in (float,) if kind.is_float else (int, float):
            with suppress(ValueError):
                return parse(value.replace(",", ".") if kind.decimal == "," else value)
    raise RejectedError(f"text {value[:40]!r} is not a number")


def _convert_number(value: Any, kind: Kind) -> float:
    if not isinstance(value, (int, float)) or (isinstance(value, bool) and not kind.accepts_booleans):
        raise RejectedError(f"a value of type {type(value).__name__} is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise RejectedError("the integer is too large for a float") from None
    if not math.isfinite(number):
        raise RejectedError(f"{number} is not finite")
    if kind.name == "number" and abs(number) > MAX_NUMBER:
        raise RejectedError(f"{number} is too large: the square of a number above {MAX_NUMBER:g} overflows float32")
    return number


# Feature hashing -----------------------------------------------------------------------------------------------
# The compiled code in native/src/text_parsing.c computes the same hashes.


def hash_text(text: bytes, buckets: int) -> int:
    """Hash the UTF-8 encoding of a text to a bucket from 0 to `buckets` - 1: FNV-1a, then the finalizer of splitmix64.

    The finalizer is needed because the low bits of FNV-1a depend only on the low bits of the text's bytes.
    """
    return int(_hash64(text) % np.uint64(buckets))


def hash_id(text: bytes) -> int:
    """Hash the UTF-8 encoding of a text to an id of 64 bits with a sign, which is never `MISSING_ID`."""
    return max(int(_hash64(text).astype(np.int64)), MISSING_ID + 1)


def _hash64(text: bytes) -> np.uint64:
    hashed: np.uint64 = mix_splitmix64(np.array([fnv1a(text)], np.uint64))[0]
    return hashed


def fnv1a(data: bytes) -> int:
    """Return the 64-bit FNV-1a hash (http://www.isthe.com/chongo/tech/comp/fnv/)."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def hash_integers(values: Array, buckets: int) -> Array:
    """Hash integers to buckets from 0 to `buckets` - 1 with the finalizer of splitmix64."""
    hashed: Array = (mix_splitmix64(values.astype(np.uint64)) % np.uint64(buckets)).astype(np.int64)
    return hashed


def mix_splitmix64(values: Array) -> Array:
    """Apply the finalizer of splitmix64 (https://doi.org/10.1145/2714064.2660195) to unsigned 64-bit integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    mixed: Array = values ^ (values >> np.uint64(31))
    return mixed
