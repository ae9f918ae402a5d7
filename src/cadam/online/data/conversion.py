"""Conversion of values."""

from __future__ import annotations

import numpy as np

from .events import Array


def mix_splitmix64(values: Array) -> Array:
    """Apply the finalizer of splitmix64 to an array of unsigned 64-bit integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    mixed: Array = values ^ (values >> np.uint64(31))
    return mixed
