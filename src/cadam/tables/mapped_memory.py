"""Tensors in memory-mapped files, for the rows of a table that do not fit into memory."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..engines.huge_pages import request_random_access


def mapped_zeros(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros whose memory is a file.

    The operating system keeps the pages that are used in memory and writes the others to the file. The file has no name
    and vanishes with the tensor, so it is not a checkpoint.

    Args:
        folder: The folder of the file. It should be on a disk, not in memory.
        shape: The shape of the tensor, which must have elements.
        dtype: Its dtype.

    Raises:
        OSError: If there is no room for the file. Without the room, writing to the tensor would end the process.
    """
    size = math.prod(shape)
    file, path = tempfile.mkstemp(prefix="cadam-rows-", dir=folder)
    try:
        os.posix_fallocate(file, 0, size * dtype.itemsize)
        x = torch.from_file(path, shared=True, size=size, dtype=dtype, device="cpu").view(*shape)
    except OSError as error:
        needed = size * dtype.itemsize
        raise OSError(error.errno, f"no room for {needed:,} bytes of rows: {error.strerror}", str(folder)) from error
    finally:
        os.close(file)
        os.unlink(path)
    request_random_access(x)
    return x
