"""Identifiers in the archive of results whose wording differs from the vocabulary of the code.

The archive (results/*.parquet) is never rewritten, so the names that were stored with a result must keep their
spelling. Names that have a better wording today are defined here once; `display_condition` gives the wording for
tables.
"""

from __future__ import annotations

MASKED_SHARE = "waiting"
"""Metric of the experiment `theorem`: the share of elementwise updates that CAdam masked."""

UNCHANGED = "as it is"
"""Condition of the A/B on a real stream: the events without any simulated change."""

_DISPLAY = {
    UNCHANGED: "unchanged",
    "with a fifth of the labels wrong": "20% label noise",
}


def display_condition(condition: str) -> str:
    """Return the wording of a stored condition for tables and figures."""
    return _DISPLAY.get(condition, condition)
