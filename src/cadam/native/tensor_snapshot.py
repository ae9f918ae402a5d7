"""Snapshots of where tensors are in memory, how large they are and what kind of tensor they are.

Gradients move from step to step, and nothing keeps users from replacing the memory of a parameter or a state buffer.
So a step compares the tensors with the snapshot of the step before. Asking torch about thousands of tensors from
Python takes longer than their step; compiled code asks through functions of libtorch, where they are available.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from .loader import Library, UnavailableError, package_library
from .structs import Words
from .torch_symbols import torch_symbols

PLAIN = (Tensor, torch.nn.Parameter)
"""The tensor types whose memory holds their values. Other subclasses may keep their values elsewhere."""

MOVED = 1
"""A tensor has another address than before."""
CHANGED = 2
"""A tensor has another size or kind than before."""

_handle = attrgetter("_cdata")
_handle_of_grad = attrgetter("grad._cdata")


class TensorSnapshot:
    """The memory of some tensors, or of the gradients they have at the time.

    Attributes:
        tensors: The tensors, or the parameters whose gradients are meant.
        of_grads: Whether the snapshot is of the gradients.
        addresses: The address of each tensor's first element.
        sizes: The number of elements.
        kinds: An even number for each device and dtype, plus one if the tensor is contiguous; -1 if the memory does
            not hold the values: for a missing or sparse gradient, or a lazily negated tensor.
        handles: The addresses of torch's own tensor objects, which the C API takes.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        of_grads: bool = False,
        threads: bool = False,
        swappable: Iterable[Tensor] | None = None,
    ) -> None:
        """Take the first snapshot.

        Args:
            tensors: The tensors, or the parameters whose gradients are meant.
            of_grads: Whether to look at the gradients of the tensors instead.
            threads: Whether torch's threads take part, which is good while they are awake and slow otherwise.
            swappable: The tensors that `torch.utils.swap_tensors` may replace, which makes their handles invalid, so
                that they are read again for every snapshot. None means all tensors. To the others, such as optimizer
                state, the snapshot keeps a weak reference: `swap_tensors` refuses tensors that have one.
        """
        self.tensors = tensors
        self.of_grads = of_grads
        self._columns = np.full((3, len(tensors)), -2)
        self.addresses, self.sizes, self.kinds = self._columns
        self.handles = np.zeros(len(tensors), np.int64)
        self._library = _snapshot_library()
        if self._library is not None:
            # Reading the address of a numpy array takes longer than the snapshot of a tensor, so it is read once.
            addresses = (column.ctypes.data for column in self._columns)
            torch_functions = self._library.torch.ctypes.data
            self._arguments = (
                torch_functions,
                self.handles.ctypes.data,
                len(tensors),
                threads,
                not of_grads,
                *addresses,
            )
        self._positions: slice | Words = slice(None)
        self._swappable = tensors
        if self._library is not None and swappable is not None:
            self.read_handles()
            ids = set(map(id, swappable))
            self._positions = np.array([i for i, tensor in enumerate(tensors) if id(tensor) in ids], np.int64)
            self._swappable = [tensors[i] for i in self._positions]
            self._weak_references = [weakref.ref(tensor) for tensor in tensors if id(tensor) not in ids]
        self.update()

    def update(self) -> int:
        """Take the snapshot again.

        Returns:
            The kinds of changes since the last snapshot: MOVED, CHANGED, their combination, or 0.
        """
        if self._library is None:
            return _describe_in_python(self.tensors, self.of_grads, self._columns)
        self.read_handles()
        return int(self._library.c.cadam_snapshot_tensors(*self._arguments))

    def read_handles(self) -> None:
        """Read the handles of swappable tensors, or of the gradients, again."""
        tensors = self._swappable
        try:
            handles = np.fromiter(map(_handle_of_grad if self.of_grads else _handle, tensors), np.int64, len(tensors))
        except AttributeError:  # a gradient is missing
            grads = [tensor.grad for tensor in tensors]
            handles = np.array([0 if grad is None else grad._cdata for grad in grads], np.int64)
        self.handles[self._positions] = handles


def snapshot_grads(params: Sequence[Tensor], grads: Sequence[Tensor], threads: bool = False) -> TensorSnapshot:
    """Take a snapshot of gradients: of `param.grad` where these are the gradients, else of the given tensors."""
    if any(param.grad is not grad for param, grad in zip(params, grads, strict=True)):
        return TensorSnapshot(grads, threads=threads)
    return TensorSnapshot(params, of_grads=True, threads=threads)


def align_layouts(
    addresses: Words, suspects: Iterable[int], grads: Sequence[Tensor], params: Sequence[Tensor]
) -> tuple[Words, list[Tensor]]:
    """Copy gradients whose elements are not in the same order in memory as those of their parameters.

    Args:
        addresses: The addresses of all gradients.
        suspects: The indices of gradients that may have to be copied.
        grads: All gradients.
        params: Their parameters.

    Returns:
        The addresses with those of the copies, and the copies, which must be kept until the step is done.
    """
    addresses, copies = addresses.copy(), []
    for i in suspects:
        grad, param = grads[i], params[i]
        if not is_plain(grad) or grad.stride() != param.stride() or grad.data_ptr() % grad.element_size():
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
            copies.append(grad)
        addresses[i] = grad.data_ptr()
    return addresses, copies


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory of a tensor holds its values."""
    dense = type(tensor) in PLAIN and tensor.layout is torch.strided
    return dense and not tensor.is_neg() and not tensor._is_zerotensor()


def can_snapshot_in_c() -> bool:
    """Whether compiled code takes the snapshots."""
    return _snapshot_library() is not None


_kind_numbers: dict[tuple[torch.device, torch.dtype], int] = {}


def _describe_in_python(tensors: Sequence[Tensor], of_grads: bool, columns: Words) -> int:
    """Take a snapshot without compiled code, and return the kinds of changes, like `TensorSnapshot.update`."""
    before = columns.copy()
    addresses, sizes, kinds = columns
    for i, param in enumerate(tensors):
        tensor = param.grad if of_grads else param
        addresses[i], sizes[i], kinds[i] = 0, 0, -1
        if tensor is not None and is_plain(tensor):
            addresses[i], sizes[i] = tensor.data_ptr(), tensor.numel()
            number = _kind_numbers.setdefault((tensor.device, tensor.dtype), len(_kind_numbers))
            kinds[i] = 2 * number + tensor.is_contiguous()
    moved = not np.array_equal(before[0], addresses)
    return MOVED * moved | CHANGED * (not np.array_equal(before[1:], columns[1:]))


@cache
def _snapshot_library() -> Library | None:
    """Return the library if torch has the functions that snapshots need and `_cdata` is the handle they expect."""
    if torch_symbols().missing:
        return None
    try:
        library = package_library()
    except UnavailableError:
        return None
    with torch.device("cpu"), torch.inference_mode(False):  # independent of the user's defaults
        sample = torch.zeros(5, 3)[1:]
        negated = torch._neg_view(sample)
    handles, columns = np.array([sample._cdata, negated._cdata]), np.zeros((3, 2), np.int64)
    library.c.cadam_snapshot_tensors(
        library.torch.ctypes.data, handles.ctypes.data, 2, False, False, *(column.ctypes.data for column in columns)
    )
    addresses, sizes, kinds = columns.tolist()
    is_right = (addresses[0], sizes[0], kinds[1]) == (sample.data_ptr(), sample.numel(), -1) and kinds[0] >= 0
    return library if is_right else None
