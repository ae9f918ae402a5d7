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

_cdata = attrgetter("_cdata")


class Watched:
    """Some tensors, or the gradients they have at the time.

    Attributes:
        addresses: where each lies.
        sizes: how many elements it has.
        kinds: an even number for each device and dtype, one more if it is contiguous; -1 for what is not plain memory:
            no gradient, a sparse one, one yet to be negated.
    """

    def __init__(self, tensors: Sequence[Tensor], grads: bool = False) -> None:
        self.tensors = tensors
        self.grads = grads
        self.handles = np.fromiter(map(_cdata, tensors), np.int64, len(tensors))
        self.columns = np.zeros((3, len(tensors)), np.int64)
        self.addresses, self.sizes, self.kinds = self.columns
        self.look()

    def look(self) -> None:
        """See how things are now."""
        library = _eyes()
        if library is None:
            _ask(self.tensors, self.grads, self.columns)
        else:
            _ask_at_once(library, self.handles, self.grads, self.columns)

    def changed(self, but_addresses: bool = False) -> bool:
        """Look again: is anything not as it was?"""
        columns = self.columns[1:] if but_addresses else self.columns
        before = columns.copy()
        self.look()
        return not np.array_equal(before, columns)


def watched_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Watched:
    """Gradients: through the parameters where these have them, else as they were given."""
    if any(param.grad is not grad for param, grad in zip(params, grads, strict=True)):
        return Watched(grads)
    return Watched(params, grads=True)


def is_plain(tensor: Tensor) -> bool:
    """Does its memory hold its values as they are?"""
    dense = type(tensor) in PLAIN and tensor.layout is torch.strided
    return dense and not tensor.is_neg() and not tensor._is_zerotensor()


def _ask_at_once(library: Library, handles: Numbers, grads: bool, columns: Numbers) -> None:
    pointers = (column.ctypes.data for column in columns)
    library.c.cadam_look(library.torch.ctypes.data, handles.ctypes.data, len(handles), grads, *pointers)


def _ask(tensors: Sequence[Tensor], grads: bool, columns: Numbers) -> None:
    addresses, sizes, kinds = columns
    for i, tensor in enumerate(tensors):
        seen = tensor.grad if grads else tensor
        kinds[i] = -1
        if seen is not None and is_plain(seen):
            addresses[i], sizes[i] = seen.data_ptr(), seen.numel()
            kinds[i] = 2 * _numbers.setdefault((seen.device, seen.dtype), len(_numbers)) + seen.is_contiguous()


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
    handles = np.fromiter(map(_cdata, samples), np.int64, len(samples))
    for grads in (False, True):
        expected, found = np.zeros((2, 3, len(samples)), np.int64)
        _ask(samples, grads, expected)
        _ask_at_once(library, handles, grads, found)
        for columns in (expected, found):
            columns[2] = np.where(columns[2] < 0, -1, columns[2] % 2)  # the numbers of dtypes are each one's own
        if not np.array_equal(expected, found):
            return None
    return library
