"""The 39 fields of Criteo's display advertising data, and the one table that holds the ids of them all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

INTEGERS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
FIELDS = (*INTEGERS, *CATEGORIES)

OOV = 0
"""The first id of every field stands for all that its vocabulary does not have, and for missing categories."""

VOCABULARY = (
    *(44, 99, 122, 41, 220, 112, 80, 69, 92, 6, 27, 37, 72),
    *(1446, 554, 157339, 117822, 306, 18, 11882, 630, 5, 39530, 5131, 156656, 3176),
    *(28, 11043, 148913, 12, 4560, 2003, 5, 154564, 18, 17, 53031, 82, 40955),
)
"""How many ids each field has in the published split x4 (tokens seen at least 10 times), out-of-vocabulary included."""


def offsets(vocabulary: Sequence[int]) -> list[int]:
    """Where each field starts in the one table: id i of field f is row offsets(vocabulary)[f] + i."""
    return [0, *accumulate(vocabulary)][:-1]


def scaled(share: float) -> tuple[int, ...]:
    """A smaller vocabulary for quick runs: that share of the large fields; fields of up to 100 ids stay whole."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    return tuple(max(min(size, 100), round(size * share)) for size in VOCABULARY)
