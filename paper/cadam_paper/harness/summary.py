"""The summary of results: rows of a table, verdicts, recommendations and warnings.

A summary is computed once from the results. Console, JSON and page render it. The A/B and the experiments of the paper
share these types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cadam.statistics.comparison import Comparison, Kind

from .verdict import Recommendation, Verdict, verdict_over_seeds


@dataclass(frozen=True)
class Row:
    """One row of the table of results.

    The texts are for people; `values` has the same numbers by name, for JSON.
    """

    label: str
    reference: str
    """The value that a paper reports for this row; empty if there is none."""
    measured: str
    interval: str
    seeds: int
    seconds: float
    verdict: str = ""
    noise_floor: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    verdict_kind: Kind | None = None
    """The kind of the verdict; None for a row that compares nothing."""
    conflicting: bool = False


@dataclass(frozen=True)
class Summary:
    """The conclusions from all results of a study."""

    verdict: str
    """The verdict in one or two sentences."""
    rows: Sequence[Row]
    warnings: Sequence[str] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """The verdicts by condition, if there is more to them than the rows say."""
    recommendations: Sequence[Recommendation] = ()
    """One recommendation per arm, if the study is an A/B of a user."""


def comparison_row(label: str, reference: str, comparison: Comparison, seconds: float, digits: int = 3) -> Row:
    """Return a comparison over seeds as a row of the table."""
    c, spec = comparison, f".{digits}f"
    values = {
        c.arm: c.mean,
        c.baseline: c.baseline_mean,
        "difference": c.difference.mean,
        "low": c.difference.low,
        "high": c.difference.high,
        f"{c.arm} diverged": float(c.diverged),
        f"{c.baseline} diverged": float(c.baseline_diverged),
    }
    floor = ""
    if c.noise is not None:
        values |= {"noise floor": c.floor, "A/A difference": c.noise.mean}
        seen = f"{abs(c.noise.mean):{spec}} seen"
        floor = seen if math.isnan(c.floor) else f"±{c.floor:{spec}} ({seen})"
    return Row(
        label,
        reference,
        f"{c.arm} {c.mean:{spec}}, {c.baseline} {c.baseline_mean:{spec}}",
        "none: all diverged" if c.difference.count == 0 else f"{c.difference:+{spec}}",
        c.seeds,
        seconds,
        str(verdict_over_seeds(c)),
        floor,
        values,
        c.kind,
    )
