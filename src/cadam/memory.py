"""Memory for the state of the optimizer."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
PAGE = 4096
LARGE = 1 << 25  # bytes from which huge pages are worth asking for
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # as in linux/mman.h


def filled_like(param: Tensor, value: float | complex, dtype: torch.dtype) -> Tensor:
    """A tensor that lies in memory as `param` does, filled with `value`.

    Rows of a large table lie far apart, and finding each in small pages costs as much as reading it. So the system
    is asked to put large tensors in huge pages; where it does not, nothing but speed is lost.
    """
    buffer = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).detach()
    _advise(buffer, MADV_HUGEPAGE)
    return buffer.fill_(value)


def move_to_huge_pages(table: Tensor) -> None:
    """Ask the system to put memory that is in use already into huge pages, for the same reason.

    Linux 6.1 and later copy it at once, a page at a time; earlier ones do so by and by.
    """
    _advise(table, MADV_HUGEPAGE)
    _advise(table, MADV_COLLAPSE)


def _advise(x: Tensor, advice: int) -> None:
    madvise = _madvise()
    if madvise is not None and type(x) in PLAIN and x.device.type == "cpu" and x.nbytes >= LARGE:
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
