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
_ID = re.compile(r"id(?::([^\[\]?]+))?(?:\[(last )?(\d+)\])?\??")
_CLOCK = re.compile(r"clock(?::(.+?))?\??")

MISSING_ID = -(2**63)
"""The value of the kind `id` for a missing id. The integer -2**63 itself is converted like a text."""
SHARED_ID_ROW = 1
"""The row of a feature of the kind `id` that ids without a row share. The row before it is for missing ids."""
DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""The units of durations, in seconds."""


@dataclass(frozen=True)
class IdOptions:
    """The options of the kind ``id``, written as ``max=1e6,expire=30d,admit=3,evict=lfu``.

    Args:
        max_rows: The largest number of ids that have a row at the same time.
        expire: After how long without an event an id loses its row: in seconds if `expires_by_time`, else in events of
            the stream. None: never.
        expires_by_time: Whether `expire` is a duration.
        admit: The number of events after which an id gets a row.
        evict: The ids that make room when all rows are in use: ``lru`` (least recently used), ``lfu`` (least frequently
            used) or ``none``.
    """

    max_rows: int = 1_000_000
    expire: int | None = None
    expires_by_time: bool = False
    admit: int = 1
    evict: str = "lru"

    @classmethod
    def parse(cls, text: str) -> IdOptions:
        """Return the options that a schema writes as `text`.

        Raises:
            ValueError: If an option is unknown, given twice or out of range.
        """
        options: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in ("max", "expire", "admit", "evict"):
                raise ValueError(
                    f"options of id are max=N, expire=N or a duration, admit=N and evict=lru, got {part!r}"
                )
            if name in options:
                raise ValueError(f"the option {name} of id is given twice")
            options[name] = value
        expire = options.get("expire", "")
        unit = DURATIONS.get(expire[-1:])
        longest = 2**53 // (unit or 1)
        evict = options.get("evict", cls.evict)
        if evict not in ("lru", "lfu", "none"):
            raise ValueError(f"evict must be lru, lfu or none, got {evict!r}")
        return cls(
            _parse_count(options.get("max", str(cls.max_rows)), "max", 2**31 - 1),
            None if not expire else _parse_count(expire[:-1] if unit else expire, "expire", longest) * (unit or 1),
            unit is not None,
            _parse_count(options.get("admit", "1"), "admit", 65_535),
            evict,
        )

    def __str__(self) -> str:
        parts = [f"max={self.max_rows}"] if self.max_rows != IdOptions.max_rows else []
        if self.expire is not None:
            parts.append(f"expire={self.expire}{'s' * self.expires_by_time}")
        parts += [f"admit={self.admit}"] if self.admit != 1 else []
        parts += [f"evict={self.evict}"] if self.evict != IdOptions.evict else []
        return ",".join(parts)


def _parse_count(text: str, name: str, largest: int) -> int:
    """Return a positive integer, which may be written as 1e6."""
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 1 <= number <= largest or number != int(number):
        raise ValueError(f"{name} must be an integer from 1 to {largest:,}, as in {name}=1e6, got {text!r}")
    return int(number)


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
    - ``id`` or ``id:OPTIONS``: an integer or a text that the model gets as an integer of 64 bits, see `IdOptions`. The
      ready-made models give each id a row, and take the rows of ids back that are not seen any more. An integer is its
      own id; texts, and integers outside of 64 bits with a sign, are hashed to 64 bits. Integers in texts count as
      integers, as for ``hash:N``.
    - ``integer`` and ``text``: only for ids and users of events.

    With ``[K]`` at the end, a value is a list of K such values.

    With ``?`` at the end, the value may be missing. A missing number is nan. For the other kinds a missing value is 0,
    and all other values move up by one, so N includes the missing value. A list may then have fewer than K values, of
    which the rest is missing, or more, of which the first K are used, or the last K with ``[last K]``. A text counts as
    the list of its words.

    Args:
        name: The kind without its parameters, ``time`` for the time of an event.
        size: The N of ``category:N``, ``hash:N`` and ``words:N``; the number of rows of ``id``, with one for missing
            ids and one that ids without a row share.
        length: The K of a list, 0 if the value is not a list.
        optional: Whether the value may be missing.
        time_format: The format of a time, see `Schema.time`.
        accepts_booleans: Whether true and false are accepted as the numbers 1 and 0, as in labels.
        keeps_last: Whether the last K values of a longer list are used, rather than the first K.
        id_options: The options of the kind ``id``, None for the others.
        decimal: The decimal separator of numbers that are written as text: a point or a comma.
    """

    name: str
    size: int = 0
    length: int = 0
    optional: bool = False
    time_format: str = ""
    accepts_booleans: bool = False
    keeps_last: bool = False
    id_options: IdOptions | None = None
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
        if match := _ID.fullmatch(text):
            return cls._parse_id(text, match[1] or "", bool(match[2]), int(match[3] or 0))
        match = _KIND.fullmatch(text)
        if match is None:
            raise ValueError(
                f"unknown kind {text!r}: use number, category:N, hash:N, id, words:N[K] or clock, followed by [K] for "
                "a list of K values, or [last K] for the last K values of a list, and by ? if values may be missing"
            )
        name, size, last, length = match.groups()
        kind = cls(name, int(size or 0), int(length or 0), optional, keeps_last=bool(last))
        if (size is not None and int(size) > kind.zero_is_missing) != (name in ("category", "hash", "words")):
            minimum = "above 1" if kind.zero_is_missing else "above 0"
            raise ValueError(
                f"kind {text!r}: category, hash and words need a size {minimum}, as in category:1000; other kinds have "
                "none"
            )
        if kind.size > MAX_SIZE:
            raise ValueError(f"kind {text!r}: sizes must be at most {MAX_SIZE:,}")
        if name == "words" and not kind.length:
            raise ValueError(f"kind {text!r} needs the largest number of words, as in words:{size}[32]")
        kind._check_list(text)
        return kind

    @classmethod
    def _parse_id(cls, text: str, options: str, keeps_last: bool, length: int) -> Kind:
        try:
            id_options = IdOptions.parse(options)
        except ValueError as error:
            raise ValueError(f"kind {text!r}: {error}") from None
        size = id_options.max_rows + SHARED_ID_ROW + 1
        kind = cls("id", size, length, text.endswith("?"), keeps_last=keeps_last, id_options=id_options)
        kind._check_list(text)
        return kind

    def _check_list(self, text: str) -> None:
        if self.length > MAX_SIZE:
            raise ValueError(f"kind {text!r}: sizes must be at most {MAX_SIZE:,}")
        if self.keeps_last and not self.optional:
            raise ValueError(f"kind {text!r} needs ? at its end, because the lists may be shorter")

    def __str__(self) -> str:
        if self.name == "clock":
            return f"clock{f':{self.time_format}' if self.time_format else ''}{'?' * self.optional}"
        parameter = str(self.size or "") if self.id_options is None else str(self.id_options)
        size, last = f":{parameter}" if parameter else "", "last " if self.keeps_last else ""
        length = f"[{last}{self.length}]" if self.length else ""
        return f"{self.name}{size}{length}{'?' * self.optional}"

    @property
    def dtype(self) -> Any:
        """The numpy type of converted values."""
        return {"number": np.float64, "time": np.float64, "text": object}.get(self.name, np.int64)

    @property
    def zero_is_missing(self) -> bool:
        """Whether the row 0 of a feature stands for a missing value, in kinds that are not numbers."""
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
