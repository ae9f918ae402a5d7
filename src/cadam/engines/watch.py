"""Tensors that are looked at in every step: where they lie, how large they are, of what kind.

Gradients move, and nothing keeps a user from replacing what a parameter or a buffer points to. Asking torch about
thousands of tensors from Python takes longer than their step, so a compiled function asks for all of them at once;
where there is none, Python does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from .library import Library, Numbers, UnavailableError, catalogue

PLAIN = (Tensor, torch.nn.Parameter)
MOVED, CHANGED = 1, 2  # another address; another size or kind

_cdata = attrgetter("_cdata")


class Watched:
    """Some tensors, or the gradients they have at the time.

    Attributes:
        addresses: where each lies.
        sizes: how many elements it has.
        kinds: an even number for each device and dtype, one more if it is contiguous; -1 for what is not plain memory:
            no gradient, a sparse one, one yet to be negated.
    """

    def __init__(self, tensors: Sequence[Tensor], grads: bool = False, threads: bool = False) -> None:
        """`threads` lets torch's threads take part: good where they are awake, slow where they must be woken."""
        self.tensors = tensors
        self.grads = grads
        self.columns = np.full((3, len(tensors)), -2)
        self.addresses, self.sizes, self.kinds = self.columns
        self.library = _eyes()
        if self.library is not None:
            self.handles = _handles(tensors)
            self.arguments = _arguments(self.library, self.handles, grads, threads, self.columns)
        self.look()

    def look(self) -> int:
        """See how things are now; what is new: MOVED, CHANGED, both or neither."""
        if self.library is None:
            return _ask(self.tensors, self.grads, self.columns)
        return int(self.library.c.cadam_look(*self.arguments))


def watched_grads(params: Sequence[Tensor], grads: Sequence[Tensor], threads: bool = False) -> Watched:
    """Gradients: through the parameters where these have them, else as they were given."""
    if any(param.grad is not grad for param, grad in zip(params, grads, strict=True)):
        return Watched(grads, threads=threads)
    return Watched(params, grads=True, threads=threads)


def is_plain(tensor: Tensor) -> bool:
    """Does its memory hold its values as they are?"""
    dense = type(tensor) in PLAIN and tensor.layout is torch.strided
    return dense and not tensor.is_neg() and not tensor._is_zerotensor()


def _handles(tensors: Sequence[Tensor]) -> Numbers:
    return np.fromiter(map(_cdata, tensors), np.int64, len(tensors))


def _arguments(library: Library, handles: Numbers, grads: bool, threads: bool, columns: Numbers) -> tuple[int, ...]:
    """What the compiled function wants. The arrays must live as long as it is called."""
    pointers = (column.ctypes.data for column in columns)
    return library.torch.ctypes.data, handles.ctypes.data, len(handles), grads, threads, *pointers


def _ask(tensors: Sequence[Tensor], grads: bool, columns: Numbers) -> int:
    """The same in Python."""
    before = columns.copy()
    addresses, sizes, kinds = columns
    for i, tensor in enumerate(tensors):
        seen = tensor.grad if grads else tensor
        addresses[i], sizes[i], kinds[i] = 0, 0, -1
        if seen is not None and is_plain(seen):
            addresses[i], sizes[i] = seen.data_ptr(), seen.numel()
            kinds[i] = 2 * _numbers.setdefault((seen.device, seen.dtype), len(_numbers)) + seen.is_contiguous()
    moved = not np.array_equal(before[0], addresses)
    return MOVED * moved | CHANGED * (not np.array_equal(before[1:], columns[1:]))


_numbers: dict[tuple[torch.device, torch.dtype], int] = {}


@cache
def _eyes() -> Library | None:
    """The library whose function asks for all at once, if it sees in some samples what is there to see."""
    try:
        library = catalogue()
    except UnavailableError:
        return None
    samples = [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float64).t(), *torch.zeros(3, 4).unbind()]
    for sample in samples[:2]:
        sample.grad = torch.ones_like(sample)
    samples[2].grad = torch._neg_view(torch.ones(4))
    samples[3].grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (4,), check_invariants=False)
    handles = _handles(samples)
    for grads in (False, True):
        expected, found = np.full((2, 3, len(samples)), -2)
        _ask(samples, grads, expected)
        library.c.cadam_look(*_arguments(library, handles, grads, False, found))
        plain = expected[2] >= 0
        if not np.array_equal(plain, found[2] >= 0) or not np.array_equal(expected[:2, plain], found[:2, plain]):
            return None
        if (expected[2] % 2 != found[2] % 2).any():  # the numbers of dtypes are each one's own
            return None
    return library
