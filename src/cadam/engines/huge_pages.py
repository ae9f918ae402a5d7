"""Memory for optimizer state, in huge pages where the operating system provides them.

The rows of a large table are far apart in memory. With pages of 4 KB, looking up the page of a row takes as long as
reading the row. So the system is asked to use huge pages for large tensors; if it refuses, only speed is lost.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

PAGE = 4096
LARGE = 1 << 25
"""Size in bytes from which huge pages are requested for a tensor."""
LARGE_PER_ROW = 1 << 22
"""Size in bytes from which huge pages are requested for a tensor with one value for each row."""
MADV_HUGEPAGE = 14  # as in linux/mman.h
MADV_RANDOM = 1


def filled_like(param: Tensor, value: float | complex, dtype: torch.dtype) -> Tensor:
    """Return a tensor with the shape and memory layout of `param`, filled with `value`."""
    return _fill(torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).detach(), value, LARGE)


def filled(shape: Sequence[int], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of this shape, filled with `value`, for values that belong to the rows of a table."""
    return _fill(torch.empty(tuple(shape), dtype=dtype, device=device), value, LARGE_PER_ROW)


def _fill(x: Tensor, value: float | complex, large: int) -> Tensor:
    if type(x) is Tensor and x.device.type == "cpu" and x.nbytes >= large:
        _advise(x, MADV_HUGEPAGE)
    return x.fill_(value)


def request_random_access(x: Tensor) -> None:
    """Ask the operating system not to read pages of a mapped file ahead, because rows are far apart."""
    _advise(x, MADV_RANDOM)


def _advise(x: Tensor, advice: int) -> None:
    madvise = _madvise()
    if madvise is not None:
        start = -(-x.data_ptr() // PAGE) * PAGE
        end = (x.data_ptr() + x.nbytes) // PAGE * PAGE
        madvise(start, end - start, advice)


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
