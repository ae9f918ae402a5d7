"""Rows and sentences about many comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cadam.statistics.comparison import KINDS, Comparison, Kind

from .summary import Row
from .verdict import ONE_SEED


def tally(comparisons: Sequence[Comparison], unit: str, better: str, worse: str) -> str:
    """Count the comparisons by verdict, as in "lower in 3 of 8 problems, higher in 0, undecided in 5".

    Args:
        comparisons: The comparisons.
        unit: The plural noun for what is compared.
        better: The word for comparisons in which the arm is better.
        worse: The word for comparisons in which the arm is worse.
    """
    kinds, seeds = [c.kind for c in comparisons], max(c.seeds for c in comparisons)
    if seeds == 1 and all(c.random for c in comparisons):
        return ONE_SEED
    won, lost = kinds.count("better"), kinds.count("worse")
    total = len(kinds)
    few_seeds = f" ({seeds} seeds; --full for more)" if seeds == 2 else ""
    below = sum(c.is_below_floor for c in comparisons)
    below_floor = f"; {below} of these {won + lost} below the noise floor" if below else ""
    undecided = total - won - lost
    return f"{better} in {won} of {total} {unit}, {worse} in {lost}, undecided in {undecided}{few_seeds}{below_floor}"


def family_row(label: str, comparisons: Mapping[str, Comparison], seconds: float) -> Row:
    """Return one row for many problems: those on which the arm is better or worse, and the number of each verdict."""
    by_kind: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
    for name, comparison in comparisons.items():
        by_kind[comparison.kind].append(name)
    seeds = max(c.seeds for c in comparisons.values())
    counts = ", ".join(f"{kind} {len(names)}" for kind, names in by_kind.items())
    decided: tuple[Kind, ...] = ("better", "worse")
    measured = "; ".join(f"{kind} in {', '.join(by_kind[kind])}" for kind in decided if by_kind[kind])
    values = {str(kind): float(len(names)) for kind, names in by_kind.items()}
    values["problems"] = float(len(comparisons))
    measured = measured or f"{len(comparisons)} problems"
    return Row(label, "", measured, "", seeds, seconds, ONE_SEED if seeds == 1 else counts, values=values)
