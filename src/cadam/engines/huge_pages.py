"""Memory for the state of the optimizer."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

PAGE = 4096
LARGE, LARGE_OF_ROWS = 1 << 25, 1 << 22  # bytes from which huge pages are worth asking for
MADV_HUGEPAGE = 14  # as in linux/mman.h


def filled_like(param: Tensor, value: float | complex, dtype: torch.dtype) -> Tensor:
    """A tensor that lies in memory as `param` does, filled with `value`.

    Rows of a large table lie far apart, and finding each in small pages costs as much as reading it. So the system
    is asked to put large tensors in huge pages; where it does not, nothing but speed is lost.
    """
    return _filled(torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).detach(), value, LARGE)


def filled(shape: Sequence[int], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same for what rows have one of, which is reached as the rows are."""
    return _filled(torch.empty(tuple(shape), dtype=dtype, device=device), value, LARGE_OF_ROWS)


def _filled(x: Tensor, value: float | complex, large: int) -> Tensor:
    if type(x) is Tensor and x.device.type == "cpu" and x.nbytes >= large:
        _ask_for_huge_pages(x)
    return x.fill_(value)


def _ask_for_huge_pages(x: Tensor) -> None:
    madvise = _madvise()
    if madvise is not None:
        start = -(-x.data_ptr() // PAGE) * PAGE
        end = (x.data_ptr() + x.nbytes) // PAGE * PAGE
        madvise(start, end - start, MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
