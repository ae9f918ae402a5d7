"""Identifiers in the archive of results whose wording differs from the vocabulary of the code.

The archive (results/*.parquet) is never rewritten, so a name that was stored with a result keeps its spelling. Names
that have a better wording today are defined here; `display_condition` returns the wording for tables and figures.
"""

from __future__ import annotations

MASKED_SHARE = "waiting"
"""Metric of the experiment `theorem`: the share of elementwise updates that CAdam masked."""

UNCHANGED = "as it is"
"""Condition of the experiments on real streams: the events without any simulated change."""

LABEL_NOISE = "with a fifth of the labels wrong"
"""Condition of the experiments on real streams: 20% of the labels are flipped."""

_FEATURE_CHANGE = "with a change of "

STREAM_AS_RECORDED = "stream, as it comes"
"""Condition of the CTR experiments on a user's Criteo file, read in the order of its rows."""


def feature_change(feature: str) -> str:
    """Return the condition of a real stream in which the values of a feature are permuted at two points in time."""
    return f"{_FEATURE_CHANGE}{feature}"


def display_condition(condition: str) -> str:
    """Return the wording of a stored condition for tables and figures."""
    if condition.startswith(_FEATURE_CHANGE):
        return f"sudden shift of {condition.removeprefix(_FEATURE_CHANGE)}"
    return {UNCHANGED: "unchanged", LABEL_NOISE: "20% label noise"}.get(condition, condition)
