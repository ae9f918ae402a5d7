"""The published split x4: ten stratified folds, shuffled with seed 2018; fold 0 tests, 1 validates, 2 to 9 train."""

from __future__ import annotations

import numpy as np

from cadam.statistics.intervals import Array

from .data import Part

FOLDS, SEED = 10, 2018
PARTS: dict[Part, tuple[int, ...]] = {"test": (0,), "validation": (1,), "train": tuple(range(2, FOLDS))}


def folds(labels: Array, seed: int = SEED) -> Array:
    """The fold of every row, as scikit-learn's StratifiedKFold(10, shuffle=True, random_state=seed) gives it.

    Classes are taken in the order in which they first appear; each deals its rows to the folds evenly, going on where
    the class before stopped, in a shuffled order.
    """
    if len(labels) < FOLDS:
        raise ValueError(f"{len(labels)} rows are too few for {FOLDS} folds")
    random = np.random.RandomState(seed)
    fold_of = np.empty(len(labels), np.uint8)
    first = int(labels[0])
    dealt = 0
    for label in (first, 1 - first):
        places = labels == label
        rows = int(places.sum())
        # row i of all rows sorted by class would go to fold i % 10: so many of this class go to each fold
        counts = [(dealt + rows - 1 - fold) // FOLDS - (dealt - 1 - fold) // FOLDS for fold in range(FOLDS)]
        deal = np.repeat(np.arange(FOLDS, dtype=np.uint8), counts)
        random.shuffle(deal)
        fold_of[places] = deal
        dealt += rows
    return fold_of


def rows_of(part: Part, fold_of: Array) -> Array:
    """The rows of a part, fold after fold as the published split has them."""
    return np.concatenate([np.flatnonzero(fold_of == fold).astype(np.uint32) for fold in PARTS[part]])
