"""Coefficients of many steps at once, on the host: what a rule's `coefficients` may call on arrays of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np


class OnHost:
    """As `update.Scalars`, on arrays."""

    sqrt = staticmethod(np.sqrt)
    maximum = staticmethod(np.maximum)

    @staticmethod
    def positive(x: Any) -> Any:
        """1 where x > 0, else 0."""
        return np.where(x > 0, 1.0, 0.0)
