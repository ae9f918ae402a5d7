"""Sparse gradients on CUDA: their ids, which may be in bags, sorted by row, and the report of invalid ids.

An id that is not a row of its table is left out. The host does not wait to hear of it: the kernel that makes the sort
keys writes it into memory that the host can see, and the next step of that parameter, or `check_ids` after a
synchronization, raises IndexError.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..base import capturing
from .launch import Launch, keep_for_graphs, mark_in_use

IDS_PER_PROGRAM = 1024
"""Ids for which one program makes sort keys."""
MAX_IDS = 1 << 30
"""Ids that a gradient may have."""


@dataclass(frozen=True)
class Bags:
    """The division of ids into bags, each of which has one gradient.

    Bags are ordered by feature and then by sample; gradients are ordered by sample and then by feature.

    Attributes:
        offsets: Where each bag begins among the ids, and where the last one ends.
        starts: The row at which the table of each feature begins.
        batch: The number of samples.
        first: The first offset.
    """

    offsets: Tensor
    starts: Tensor
    batch: int
    first: int = 0

    @property
    def number(self) -> int:
        """The number of bags."""
        return len(self.starts) * self.batch


@dataclass(frozen=True)
class RowGrad:
    """A gradient with one row of values for each id, or for each bag of ids.

    Attributes:
        ids: The rows of the table.
        values: The gradient rows.
        bags: The bags; None if every id has its own gradient row.
        distinct: Whether the ids are sorted and distinct. Then the rows are updated without sorting.
    """

    ids: Tensor
    values: Tensor
    bags: Bags | None = None
    distinct: bool = False

    @classmethod
    def of(cls, grad: Tensor) -> RowGrad:
        """Convert a sparse tensor."""
        return cls(grad._indices()[0], grad._values(), distinct=grad.is_coalesced())

    def contiguous(self) -> RowGrad:
        """Return the gradient with contiguous tensors."""
        return replace(self, ids=self.ids.contiguous(), values=self.values.contiguous())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of values, ids and, if there are bags, offsets."""
        more = () if self.bags is None else (self.bags.offsets.dtype,)
        return self.values.dtype, self.ids.dtype, *more


@dataclass(frozen=True)
class SortedIds:
    """Row ids in ascending order. Equal ids keep the order in which they came.

    Attributes:
        keys: The ids. An invalid id has become `rows`, and is last, unless there is an `error`.
        order: The original position of each key; None if the ids were sorted and distinct.
        rows: The number of rows of the table.
        sources: The gradient row of each original position; None if it has the same position.
        error: Where the update kernel reports an invalid id; None if the ids were checked.
    """

    keys: Tensor
    order: Tensor | None
    rows: int
    sources: Tensor | None = None
    error: Tensor | None = None

    @classmethod
    def of(
        cls, ids: Tensor, rows: int, error: Tensor, *, distinct: bool = False, bags: Bags | None = None
    ) -> SortedIds:
        """Sort ids.

        Args:
            ids: The ids.
            rows: The number of rows of the table.
            error: Where an invalid id is reported.
            distinct: Whether the ids are already sorted and distinct.
            bags: The bags of the ids.
        """
        if distinct and bags is None:
            return cls(ids, None, rows, error=error)
        n, sources = len(ids), None
        keys = torch.empty(n, dtype=key_dtype(rows), device=ids.device)
        if bags is not None:
            sources = torch.empty(n, dtype=torch.int32, device=ids.device)
        if n:
            kind = _make_keys_kind(ids, rows, error, bags)
            grid = (-(-n // IDS_PER_PROGRAM), 1, 1)
            if bags is None:
                make_keys(False)(grid, kind, ids, keys, error, n, rows)
            else:
                tensors = (ids, bags.offsets, bags.starts, keys, sources, error)
                make_keys(True)(grid, kind, *tensors, n, rows, bags.number, bags.batch, bags.first)
        if distinct:
            return cls(keys, None, rows, sources)
        return cls(*torch.sort(keys, stable=True), rows, sources)


@cache
def make_keys(in_bags: bool) -> Launch:
    """Return the kernel that makes sort keys."""
    from . import device_functions

    function = device_functions.make_bag_keys if in_bags else device_functions.make_keys
    return Launch(function, {"BLOCK": IDS_PER_PROGRAM})


def _make_keys_kind(ids: Tensor, rows: int, error: Tensor, bags: Bags | None) -> Any:
    """Return the kind of the arguments of `make_keys`, see `Launch`."""
    kinds = [kind_of(ids)]
    if bags is not None:
        kinds += [kind_of(bags.offsets), kind_of(bags.starts)]
    return ids.device, rows, kind_of(error), tuple(kinds)


def kind_of(x: Tensor) -> tuple[torch.dtype, bool]:
    """Return the dtype of a tensor and whether it is aligned to 16 bytes."""
    return x.dtype, x.data_ptr() % 16 == 0


def key_dtype(rows: int) -> torch.dtype:
    """Return the narrowest dtype for the numbers up to `rows`. Narrow keys are sorted faster."""
    return torch.int16 if rows < 1 << 15 else torch.int32 if rows < 1 << 31 else torch.int64


# Invalid ids ---------------------------------------------------------------------------------------------------


_errors: MutableMapping[Tensor, tuple[Tensor, set[int]]] = WeakTensorKeyDictionary()
"""For each parameter, two numbers in memory that kernels and the host can see, a flag and an invalid id, and the
streams that use this memory."""


def check_ids(param: Tensor, name: str = "the parameter") -> None:
    """Check whether an earlier step had an invalid id. Does not wait for the device.

    Args:
        param: The parameter.
        name: How the error message refers to it.

    Raises:
        IndexError: An earlier step had an id that is not a row of the parameter.
    """
    error, _ = _errors.get(param, (None, None))
    if error is not None and error[0]:
        invalid = int(error[1])
        error.zero_()
        raise IndexError(
            f"{name}: row id {invalid} of an earlier step is out of range for {param.shape[0]} rows; "
            "it was left out, the other rows of that step were updated"
        )


def error_of(param: Tensor) -> Tensor:
    """Return the memory in which kernels report an invalid id of a parameter."""
    device = param.device
    if param not in _errors:
        error = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        _errors[param] = error, set()
    error, streams = _errors[param]
    keep_for_graphs(error, device)
    if device.type == "cuda" and not capturing(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if stream not in streams:
            mark_in_use(error, device)
            streams.add(stream)
    return error
