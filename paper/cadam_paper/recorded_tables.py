"""Tables of the documentation whose numbers were written by scripts of benchmarks/ to text files in results/cpu.

These files are Markdown tables with notes, and the first line of each is the command that wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .published import ROOT, table_header, table_row

DEFAULTS_COLUMNS = {
    "stream": "stream",
    "cadam run": "cadam run",
    "earlier, 256": "earlier default",
    "VW": "Vowpal Wabbit",
    "VW, FTRL": "its FTRL",
    "river": "river",
    "river, FTRL": "its FTRL",
}
"""The columns of results/cpu/defaults.txt that the page shows, and their titles there."""
TABLES_COLUMNS = {
    "stream": "log loss relative to Adam, each at its best rate",
    "CAdam": "CAdam",
    "tables without confidence": "tables without confidence",
    "confidence_after=100": "tables, from the 100th update of a row on",
    "exact updates": "exact updates",
}
"""The columns of results/cpu/confidence_for_tables.txt that the page shows, and their titles there."""
TABLES_RATES, TABLES_SEEDS = 7, 3
"""Numbers of learning rates and of seeds with which each arm of results/cpu/confidence_for_tables.txt was run."""
STREAM_LABELS = {
    "turnover": "new items all the time (simulated)",
    "movielens": "film ratings",
    "stationary": "users and items without drift (simulated)",
}
"""Labels of streams whose names in a text file need an explanation."""


def read(file: str) -> list[dict[str, str]]:
    """Return the rows of the first table in a text file of results/cpu, by the titles of its columns.

    Raises:
        ValueError: If the file has no table, or a row has another number of cells than the header.
    """
    lines = (ROOT / "results" / "cpu" / file).read_text("utf-8").splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("| ")), None)
    if start is None:
        raise ValueError(f"results/cpu/{file} has no table")
    end = next((number for number in range(start, len(lines)) if not lines[number].startswith("|")), len(lines))
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end])
    return [dict(zip(header, row, strict=True)) for row in rows]


def table(file: str, columns: Mapping[str, str], labels: Mapping[str, str] | None = None) -> Sequence[str]:
    """Return some columns of the table in a text file, without the remarks in brackets that follow the numbers.

    Args:
        file: The name of the file in results/cpu.
        columns: The titles of the columns in the file, and their titles on the page.
        labels: Labels for the entries of the first column, where they differ.
    """
    lines = table_header(*columns.values())
    for row in read(file):
        first, *others = (row[name] for name in columns)
        numbers = (re.sub(r" \([^)]*\)$", "", cell) for cell in others)
        lines.append(table_row((labels or {}).get(first, first), *numbers))
    return lines


def defaults() -> list[str]:
    """Return the table of `cadam run` without options against Vowpal Wabbit and river."""
    return list(table("defaults.txt", DEFAULTS_COLUMNS))


def defaults_cost() -> list[str]:
    """Return one sentence on the runs of the table of `cadam run` without options."""
    streams, learners = len(read("defaults.txt")), len(DEFAULTS_COLUMNS) - 1
    count = streams * learners
    return [f"Cost: {count} runs ({streams} streams, {learners} learners, one seed). Their time was not recorded."]


def confidence_for_tables() -> list[str]:
    """Return the table of CAdam with and without confidence for embedding tables."""
    return list(table("confidence_for_tables.txt", TABLES_COLUMNS, STREAM_LABELS))


def confidence_for_tables_cost() -> list[str]:
    """Return one sentence on the runs of the table of confidence for embedding tables."""
    rows = read("confidence_for_tables.txt")
    arms = len(rows[0]) - 1
    count = len(rows) * arms * TABLES_RATES * TABLES_SEEDS
    return [
        f"Cost: {count} runs ({len(rows)} streams, {arms} arms, {TABLES_RATES} learning rates, {TABLES_SEEDS} seeds). "
        "Their time was not recorded."
    ]
