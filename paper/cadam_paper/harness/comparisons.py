"""Tables and sentences over many comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cadam.ab.summary import Row
from cadam.ab.verdict import ONE_SEED
from cadam.statistics.comparison import KINDS, Comparison


def tally(comparisons: Sequence[Comparison], what: str, better: str, worse: str) -> str:
    """How comparisons came out, none left out, as in "lower in 3 of 8 problems, higher in 0, undecided in 5"."""
    kinds, seeds = [c.kind for c in comparisons], max(c.seeds for c in comparisons)
    if seeds == 1 and all(c.random for c in comparisons):
        return ONE_SEED
    won, lost = kinds.count("better"), kinds.count("worse")
    few = f" ({seeds} seeds; --full for more)" if seeds == 2 else ""
    total = len(kinds)
    small = sum(c.is_below_floor for c in comparisons)
    less = f"; {small} of these {won + lost} below the noise floor" if small else ""
    return f"{better} in {won} of {total} {what}, {worse} in {lost}, undecided in {total - won - lost}{few}{less}"


def family_row(what: str, comparisons: Mapping[str, Comparison], seconds: float) -> Row:
    """Many problems in one line: where the arm is better and where worse, and how many of each kind there are."""
    kinds: tuple[str, ...] = KINDS
    places = {kind: [name for name, c in comparisons.items() if c.kind == kind] for kind in kinds}
    seeds = max(c.seeds for c in comparisons.values())
    counts = ", ".join(f"{kind} {len(names)}" for kind, names in places.items())
    named = "; ".join(f"{kind} in {', '.join(places[kind])}" for kind in ("better", "worse") if places[kind])
    return Row(
        what,
        "",
        named or f"{len(comparisons)} problems",
        "",
        seeds,
        seconds,
        ONE_SEED if seeds == 1 else counts,
        values={**{kind: float(len(names)) for kind, names in places.items()}, "problems": float(len(comparisons))},
    )
