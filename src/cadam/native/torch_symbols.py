"""The functions of libtorch that the compiled library calls, found by name: its C API and one function of C++.

The kernels require only torch's threads. The other functions are optional: they let compiled code take a snapshot of
many tensors at once. Where one is missing, Python reads the tensors instead, which takes longer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .structs import Words

REQUIRED_SYMBOL = "torch_parallel_for"

SYMBOLS = (
    REQUIRED_SYMBOL,
    "aoti_torch_get_layout",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_numel",
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
    "aoti_torch_get_device_index",
    "aoti_torch_is_contiguous",
    "_ZN2at6native6is_negERKNS_6TensorE",  # bool at::native::is_neg(const at::Tensor &); the C API has no such function
)
"""The functions in the order of the struct torch_functions of native/src/structs.h."""


@dataclass(frozen=True)
class TorchSymbols:
    """The addresses of torch's functions, and the names of those that this version of torch does not have."""

    addresses: Words
    """Addresses in the order of `SYMBOLS`; 0 for a missing function."""
    missing: tuple[str, ...]


@cache
def torch_symbols() -> TorchSymbols:
    """Find the functions in torch's shared library."""
    addresses = [_address(name) for name in SYMBOLS]
    missing = tuple(name for name, address in zip(SYMBOLS, addresses, strict=True) if not address)
    return TorchSymbols(np.array(addresses, np.int64), missing)


def _address(name: str) -> int:
    """Return the address of a function of libtorch_cpu, or 0 if there is none."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            return ctypes.cast(ctypes.CDLL(str(path))[name], ctypes.c_void_p).value or 0
        except (AttributeError, OSError):
            return 0
    return 0
