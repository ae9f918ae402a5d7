"""Functions of torch that compiled code calls, by their addresses.

The C kernels require torch's threads alone. The other symbols are optional: with them, a compiled function looks at
many tensors at once. Python does that too where one is missing, and takes longer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .structs import Words

REQUIRED = "torch_parallel_for"

# In the order of native/src/torch_tensors.h. Two are C++ functions by their linker names.
SYMBOLS = {
    "libtorch_cpu": (
        REQUIRED,
        "aoti_torch_is_defined",
        "aoti_torch_get_layout",
        "aoti_torch_get_data_ptr",
        "aoti_torch_get_numel",
        "aoti_torch_get_dtype",
        "aoti_torch_get_device_type",
        "aoti_torch_get_device_index",
        "aoti_torch_is_contiguous",
        "_ZN2at6native6is_negERKNS_6TensorE",
    ),
    "libc10": ("_ZNK3c1010TensorImpl4gradEv",),
}


@dataclass(frozen=True)
class Symbols:
    addresses: Words
    """In the order of SYMBOLS; 0 for one that is missing."""
    missing: tuple[str, ...]


@cache
def torch_symbols() -> Symbols:
    """What this torch has of them."""
    found = {name: address(library, name) for library, names in SYMBOLS.items() for name in names}
    missing = tuple(name for name, where in found.items() if not where)
    return Symbols(np.array(list(found.values()), np.int64), missing)


def address(library: str, name: str) -> int:
    """Where a function of one of torch's own libraries is; 0 if there is none."""
    for path in (Path(torch.__file__).parent / "lib").glob(f"{library}.*"):
        try:
            return ctypes.cast(ctypes.CDLL(str(path))[name], ctypes.c_void_p).value or 0
        except (AttributeError, OSError):
            return 0
    return 0
