"""The C structs of the compiled library as numpy dtypes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Words: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Arrays of 64-bit words, the form in which C functions receive addresses and sizes."""
