"""Tensors that are looked at in every step: where they lie, how large they are, of what kind.

Gradients move, and nothing keeps a user from replacing what a parameter or a buffer points to. Asking torch about
thousands of tensors from Python takes longer than their step, so a compiled function asks for all of them at once;
where there is none, Python does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .errors import UnavailableError
from .library import Library, package_library
from .structs import Words
from .torch_symbols import torch_symbols

PLAIN = (Tensor, torch.nn.Parameter)
"""The tensor types whose memory holds their values. Other subclasses may keep their values elsewhere."""

MOVED, CHANGED = 1, 2  # another address; another size or kind


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
        self.compiled = compiled_look()
        if self.compiled is not None:
            self.objects = _objects(tensors)
            self.arguments = self.compiled.arguments(self.objects, grads, threads, self.columns)
        self.look()

    def look(self) -> int:
        """See how things are now; what is new: MOVED, CHANGED, both or neither."""
        if self.compiled is None:
            return _ask(self.tensors, self.grads, self.columns)
        return int(self.compiled.library.c.cadam_snapshot_tensors(*self.arguments))


def watched_grads(params: Sequence[Tensor], grads: Sequence[Tensor], threads: bool = False) -> Watched:
    """Gradients: through the parameters where these have them, else as they were given."""
    if any(param.grad is not grad for param, grad in zip(params, grads, strict=True)):
        return Watched(grads, threads=threads)
    return Watched(params, grads=True, threads=threads)


def lay_out(
    addresses: Words, suspects: Iterable[int], grads: Sequence[Tensor], params: Sequence[Tensor]
) -> tuple[Words, list[Tensor]]:
    """Where gradients lie, as their parameters do, and copies: of those `suspects` that lie otherwise."""
    addresses, copies = addresses.copy(), []
    for i in suspects:
        grad, param = grads[i], params[i]
        if not is_plain(grad) or grad.stride() != param.stride() or grad.data_ptr() % grad.element_size():
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
            copies.append(grad)
        addresses[i] = grad.data_ptr()
    return addresses, copies


def is_plain(tensor: Tensor) -> bool:
    """Does its memory hold its values as they are?"""
    dense = type(tensor) in PLAIN and tensor.layout is torch.strided
    return dense and not tensor.is_neg() and not tensor._is_zerotensor()


def _objects(tensors: Sequence[Tensor]) -> Words:
    return np.fromiter(map(id, tensors), np.int64, len(tensors))


@dataclass(frozen=True)
class CompiledLook:
    """The compiled function that asks for all at once."""

    library: Library
    place: int
    """Where in a Python tensor, counted in bytes, torch's own tensor is."""

    def arguments(self, objects: Words, grads: bool, threads: bool, columns: Words) -> tuple[int, ...]:
        """What the function wants. The arrays, and the tensors, must live as long as it is called."""
        pointers = (column.ctypes.data for column in columns)
        torch = self.library.torch.ctypes.data
        return torch, objects.ctypes.data, self.place, len(objects), grads, threads, *pointers


def _ask(tensors: Sequence[Tensor], grads: bool, columns: Words) -> int:
    """The same in Python."""
    before = columns.copy()
    addresses, sizes, kinds = columns
    for i, tensor in enumerate(tensors):
        seen = tensor.grad if grads else tensor
        addresses[i], sizes[i], kinds[i] = 0, 0, -1
        if seen is not None and is_plain(seen):
            addresses[i], sizes[i] = seen.data_ptr(), seen.numel()
            kinds[i] = 2 * _kinds.setdefault((seen.device, seen.dtype), len(_kinds)) + seen.is_contiguous()
    moved = not np.array_equal(before[0], addresses)
    return MOVED * moved | CHANGED * (not np.array_equal(before[1:], columns[1:]))


_kinds: dict[tuple[torch.device, torch.dtype], int] = {}


@cache
def compiled_look() -> CompiledLook | None:
    """The compiled function, if torch has what it calls and it sees in some samples what is there to see."""
    if torch_symbols().missing:
        return None
    try:
        library = package_library()
    except UnavailableError:
        return None
    with torch.device("cpu"), torch.inference_mode(False):  # whatever the user's default is
        return _tried(library)


def _tried(library: Library) -> CompiledLook | None:
    samples = [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float64).t(), *torch.zeros(3, 4).unbind()]
    samples.append(torch.nn.Parameter(torch.zeros(5)))
    for sample in (samples[0], samples[1], samples[-1]):
        sample.grad = torch.ones_like(sample)
    samples[2].grad = torch._neg_view(torch.ones(4))
    samples[3].grad = torch.ones(4).to_sparse()
    samples += [torch._neg_view(torch.ones(2)), torch._efficientzerotensor((2,))]
    place = _place(samples)
    if place is None:
        return None
    found, objects = CompiledLook(library, place), _objects(samples)
    for grads in (False, True):
        expected, seen = np.full((2, 3, len(samples)), -2)
        _ask(samples, grads, expected)
        library.c.cadam_snapshot_tensors(*found.arguments(objects, grads, False, seen))
        plain = expected[2] >= 0
        if not np.array_equal(plain, seen[2] >= 0) or not np.array_equal(expected[:2, plain], seen[:2, plain]):
            return None
        if (expected[2] % 2 != seen[2] % 2).any():  # the numbers of dtypes are each one's own
            return None
    return found


def _place(samples: Sequence[Tensor]) -> int | None:
    """Where Python tensors keep torch's own: right after the head that all Python objects have, or a word later."""
    head, word = object.__basicsize__, ctypes.sizeof(ctypes.c_void_p)
    for place in (head, head + word):
        if all(ctypes.c_int64.from_address(id(x) + place).value == x._cdata for x in samples):
            return place
    return None
