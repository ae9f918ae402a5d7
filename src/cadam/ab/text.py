"""Formatting of word lists and durations for people."""

from __future__ import annotations

from collections.abc import Iterable


def join_words(words: Iterable[str]) -> str:
    """Join words with commas and "and", as in "seeds, users and time"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def count(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 seed" and "5 seeds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Format a number of seconds in the unit a person would use."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
