"""The published split x4 of the Criteo data set (BARS benchmark, https://openbenchmark.github.io/BARS).

There are ten stratified folds, shuffled with seed 2018: fold 0 is the test part, fold 1 the validation part, and folds
2 to 9 are the training part.
"""

from __future__ import annotations

import numpy as np

from cadam.statistics.intervals import Array

from .data import Part

FOLDS, SEED = 10, 2018
PARTS: dict[Part, tuple[int, ...]] = {"test": (0,), "validation": (1,), "train": tuple(range(2, FOLDS))}


def folds(labels: Array, seed: int = SEED) -> Array:
    """Return the fold of every row, equal to scikit-learn's StratifiedKFold(10, shuffle=True, random_state=seed).

    The classes are processed in the order of their first occurrence. The rows of a class are distributed evenly over
    the folds, starting at the fold where the previous class stopped, and shuffled.
    """
    if len(labels) < FOLDS:
        raise ValueError(f"{len(labels)} rows are too few for {FOLDS} folds")
    random = np.random.RandomState(seed)
    fold_of = np.empty(len(labels), np.uint8)
    first = int(labels[0])
    assigned = 0
    for label in (first, 1 - first):
        of_class = labels == label
        rows = int(of_class.sum())
        # scikit-learn sorts all rows by class and assigns row i to fold i % 10. The counts below are the numbers of
        # rows of this class in each fold under that assignment.
        counts = [(assigned + rows - 1 - fold) // FOLDS - (assigned - 1 - fold) // FOLDS for fold in range(FOLDS)]
        folds_of_class = np.repeat(np.arange(FOLDS, dtype=np.uint8), counts)
        random.shuffle(folds_of_class)
        fold_of[of_class] = folds_of_class
        assigned += rows
    return fold_of


def rows_of(part: Part, fold_of: Array) -> Array:
    """Return the row numbers of a part in the order of the published split, which is fold by fold."""
    return np.concatenate([np.flatnonzero(fold_of == fold).astype(np.uint32) for fold in PARTS[part]])
