"""The result of schema inference, and its report for the user."""

from __future__ import annotations

import textwrap
import unicodedata
from dataclasses import dataclass, field

from ....printable import printable
from ..schema import Schema


class CannotInferError(ValueError):
    """The data does not determine the schema; the message says which option to give."""


@dataclass(frozen=True)
class ColumnDecision:
    """The use of one column: its kind or its role (empty if the column is left out), and the reason."""

    column: str
    kind: str
    reason: str


@dataclass
class InferredSchema:
    """A schema, the decision about each column, and warnings about the data."""

    schema: Schema
    decisions: list[ColumnDecision]
    description: str
    """The data and how much of it was sampled."""
    warnings: list[str] = field(default_factory=list)

    def ignored(self) -> dict[str, str]:
        """Return the columns that are left out, with the reasons."""
        return {decision.column: decision.reason for decision in self.decisions if not decision.kind}

    def lines(self, width: int = 100) -> list[str]:
        """Return the lines of the report: a table of the columns, and the warnings.

        Args:
            width: The number of characters per line.
        """
        rows = [("column", "kind", "reason")]
        rows += [
            (printable(decision.column), printable(decision.kind or "left out"), printable(decision.reason))
            for decision in self.decisions
        ]
        first, second = (min(40, max(_display_width(row[index]) for row in rows)) + 2 for index in (0, 1))
        lines = [printable(self.description), ""]
        for name, kind, reason in rows:
            wrapped = textwrap.wrap(reason, max(30, width - first - second)) or [""]
            lines.append(_pad(name, first) + _pad(kind, second) + wrapped[0])
            lines += [" " * (first + second) + line for line in wrapped[1:]]
        lines.append("")
        for warning in self.warnings:
            lines += textwrap.wrap(printable(f"warning: {warning}"), width, subsequent_indent=" " * 9)
        return lines


def _display_width(text: str) -> int:
    """Return the number of terminal columns of a text: Chinese and similar characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _pad(text: str, width: int) -> str:
    return text + " " * max(1, width - _display_width(text))
