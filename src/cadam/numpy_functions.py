"""The functions that a rule's `coefficients` may call on numpy arrays, to compute many steps at once."""

from __future__ import annotations

from typing import Any

import numpy as np


class NumpyFunctions:
    """The functions of `cadam.rules.update.ScalarFunctions`, on numpy arrays."""

    sqrt = staticmethod(np.sqrt)
    maximum = staticmethod(np.maximum)

    @staticmethod
    def positive(x: Any) -> Any:
        """Return 1 where x > 0, else 0."""
        return np.where(x > 0, 1.0, 0.0)
