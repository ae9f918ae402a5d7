"""The kinds of values that a schema declares for its columns."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HOURS, WEEKDAYS = 24, 7
UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""The units of times that are written as numbers: how many of each make a second."""
MAX_SIZE = 2**32
"""The largest number of categories or buckets: compiled code stores row numbers in 32 bits."""
_KIND = re.compile(r"(number|category|hash|words|integer|text)(?::(\d+))?(?:\[(last )?(\d+)\])?\??")
_CLOCK = re.compile(r"clock(?::(.+?))?\??")


@dataclass(frozen=True)
class Kind:
    """The kind of the values of one column.

    A schema writes kinds as text:

    - ``number``: a float64 between -1e19 and 1e19.
    - ``category:N``: an integer from 0 to N - 1.
    - ``hash:N``: an integer or a text, hashed to one of N buckets. The text of an integer, such as "5" or "5.0" but not
      "05", is hashed like that integer. True is hashed like 1 and false like 0, also as text.
    - ``clock`` or ``clock:FORMAT``: a time (see `Schema.time` for the formats). The model gets two categories: the hour
      (0 to 23), and 24 plus the day of the week (24 is Monday).
    - ``words:N[K]``: a text, whose first K words are hashed to N buckets. Words are runs of letters, digits and
      underscores of any script, in lower case. If there are fewer than K words, the rest is 0, as for missing values.
    - ``integer`` and ``text``: only for ids and users.

    With ``[K]`` at the end, a value is a list of K such values.

    With ``?`` at the end, the value may be missing. A missing number is nan. For the other kinds a missing value is 0,
    and all other values move up by one, so N includes the missing value. A list may then have fewer than K values, of
    which the rest is missing, or more, of which the first K are used, or the last K with ``[last K]``. A text counts as
    the list of its words.

    Args:
        name: The kind without its parameters, ``time`` for the time of an event.
        size: The N of ``category:N``, ``hash:N`` and ``words:N``.
        length: The K of a list, 0 if the value is not a list.
        optional: Whether the value may be missing.
        time_format: The format of a time, see `Schema.time`.
        accepts_booleans: Whether true and false are accepted as the numbers 1 and 0, as in labels.
        keeps_last: Whether the last K values of a longer list are used, rather than the first K.
        decimal: The decimal separator of numbers that are written as text: a point or a comma.
    """

    name: str
    size: int = 0
    length: int = 0
    optional: bool = False
    time_format: str = ""
    accepts_booleans: bool = False
    keeps_last: bool = False
    decimal: str = field(default=".", compare=False)  # A model does not depend on how numbers are written.

    @classmethod
    def parse(cls, text: str) -> Kind:
        """Return the kind that a schema writes as `text`.

        Raises:
            ValueError: If the text does not describe a kind.
        """
        optional = text.endswith("?")
        if match := _CLOCK.fullmatch(text):
            return cls("clock", HOURS + WEEKDAYS + optional, 2, optional, check_time_format(match[1] or ""))
        match = _KIND.fullmatch(text)
        if match is None:
            raise ValueError(
                f"unknown kind {text!r}: use number, category:N, hash:N, words:N[K] or clock, followed by [K] for a "
                "list of K values, or [last K] for the last K values of a list, and by ? if values may be missing"
            )
        name, size, last, length = match.groups()
        kind = cls(name, int(size or 0), int(length or 0), optional, keeps_last=bool(last))
        if (size is not None and int(size) > kind.zero_is_missing) != (name in ("category", "hash", "words")):
            minimum = "above 1" if kind.zero_is_missing else "above 0"
            raise ValueError(
                f"kind {text!r}: category, hash and words need a size {minimum}, as in category:1000; other kinds have "
                "none"
            )
        if kind.size > MAX_SIZE or kind.length > MAX_SIZE:
            raise ValueError(f"kind {text!r}: sizes must be at most {MAX_SIZE:,}")
        if name == "words" and not kind.length:
            raise ValueError(f"kind {text!r} needs the largest number of words, as in words:{size}[32]")
        if last and not optional:
            raise ValueError(f"kind {text!r} needs ? at its end, because the lists may be shorter")
        return kind

    def __str__(self) -> str:
        if self.name == "clock":
            return f"clock{f':{self.time_format}' if self.time_format else ''}{'?' * self.optional}"
        size, last = f":{self.size}" if self.size else "", "last " if self.keeps_last else ""
        length = f"[{last}{self.length}]" if self.length else ""
        return f"{self.name}{size}{length}{'?' * self.optional}"

    @property
    def dtype(self) -> Any:
        """The numpy type of converted values."""
        return {"number": np.float64, "time": np.float64, "text": object}.get(self.name, np.int64)

    @property
    def zero_is_missing(self) -> bool:
        """Whether a converted value of 0 stands for a missing value, in kinds that are not numbers."""
        return self.optional or self.name == "words"

    @property
    def is_float(self) -> bool:
        """Whether converted values are floats."""
        return self.name in ("number", "time")


def check_time_format(text: str) -> str:
    """Return a format of times: empty or one of `UNITS` for numbers, ``iso``, or a format of strptime.

    Raises:
        ValueError: If the text is none of these.
    """
    if text not in ("", "iso", *UNITS) and "%" not in text:
        raise ValueError(
            f"unknown format of times {text!r}: use {', '.join(UNITS)}, iso, or one such as %d/%m/%Y %H:%M"
        )
    return text


def parse_key(text: str) -> tuple[str, Kind]:
    """Return the column name and the kind of an id or user, from ``name``, ``name:integer`` or ``name:text``."""
    name, _, kind = text.rpartition(":") if text.endswith((":integer", ":text")) else (text, "", "")
    if not name or (":" in name and not kind):
        raise ValueError(f"{text!r} must be the name of a column, followed by :text if its values are not integers")
    return name, Kind(kind or "integer")


def parse_time(text: str) -> tuple[str, Kind]:
    """Return the column name and the kind of the time, from ``name`` or ``name:FORMAT``."""
    name, _, time_format = text.partition(":")
    return name, Kind("time", time_format=check_time_format(time_format))
