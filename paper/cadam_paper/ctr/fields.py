"""The 39 fields of the Criteo display advertising data set, and the embedding table that all fields share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

INTEGERS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
FIELDS = (*INTEGERS, *CATEGORIES)

OOV = 0
"""The first id of every field, for tokens outside of its vocabulary and for missing categories."""

VOCABULARY = (
    *(44, 99, 122, 41, 220, 112, 80, 69, 92, 6, 27, 37, 72),
    *(1446, 554, 157339, 117822, 306, 18, 11882, 630, 5, 39530, 5131, 156656, 3176),
    *(28, 11043, 148913, 12, 4560, 2003, 5, 154564, 18, 17, 53031, 82, 40955),
)
"""Number of ids per field in the published split x4, including the out-of-vocabulary id.

The vocabulary of a field contains the tokens that occur at least 10 times in the training part.
"""


def offsets(vocabulary: Sequence[int]) -> list[int]:
    """Return the row of the shared embedding table at which each field begins.

    The row of an id is the sum of the id and the offset of its field.
    """
    return [0, *accumulate(vocabulary)][:-1]


def scale_vocabulary(share: float) -> tuple[int, ...]:
    """Return a smaller vocabulary: a share of each field, but at least 100 ids unless the field has fewer.

    Raises:
        ValueError: If the share is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    return tuple(max(min(size, 100), round(size * share)) for size in VOCABULARY)
