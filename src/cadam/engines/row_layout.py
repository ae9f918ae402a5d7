"""The memory layout of a table's quantized moments: one record for each row, or one tensor for each buffer.

The rows that a step updates are far apart in memory. On CUDA it takes as long to read a few bytes as a hundred, so a
row keeps its moments in one record of bytes:

- the quantized values of each moment. int8 values are padded to a multiple of 4 bytes, because kernels read four at a
  time;
- with int8 values, the float32 moments that the row shares, then the scale of each moment, padded in the same way.

Where the quantized values of a row fill whole cache lines, the rest has its own record: if the values reached into one
more cache line, reading them would take longer than reading a second record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..rules.moment_storage import scale_name
from .base import ParamSlot, capturing, fills_memory

CACHE_LINE = 128
"""Bytes of a cache line of the GPU."""
RECORDS_ON = "cuda"
"""The type of device on which rows have records."""

_used_by_graphs: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
"""The state tensors whose addresses are part of a captured CUDA graph."""


def row_stride(x: Tensor) -> int | None:
    """Return the distance between two rows in elements, or None if rows overlap or are not contiguous."""
    if len(x) < 2:
        return x.shape[1:].numel() if x.is_contiguous() else None
    return x.stride(0) if x[0].is_contiguous() and x.stride(0) >= x[0].numel() else None


def new_records(
    state: Mapping[str, Any], param: Tensor, quantized: Sequence[str], row_moments: Sequence[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Allocate a record for each row of a table, filled with zeros.

    Args:
        state: The state of the table, which may have some of the buffers.
        param: The table.
        quantized: The names of the quantized moments.
        row_moments: The names of the moments of which a row has one float32 number.
        dtype: The dtype of quantized values.

    Returns:
        The part of each moment and of its scales by name. Empty if the state has such records, if there is not enough
        memory to copy the existing buffers, or if a CUDA graph uses their addresses.
    """
    records = _records(param, quantized, row_moments, dtype)
    if all(record.is_layout_of(state) for record in records):
        return {}
    names = [name for record in records for name in record.parts]
    has_buffers = any(name in state for name in names)
    if has_buffers and _must_stay(state, names, param.device):
        return {}
    try:
        memories = [torch.zeros((len(param), r.size), dtype=torch.uint8, device=param.device) for r in records]
    except torch.OutOfMemoryError:
        if has_buffers:
            return {}
        raise
    parts = {}
    for record, memory in zip(records, memories, strict=True):
        start = 0
        for name, (part_dtype, shape, size) in record.parts.items():
            part = memory[:, start : start + shape.numel() * part_dtype.itemsize]
            parts[name] = part.view(part_dtype).view(len(param), *shape)
            start += size
    return parts


class Record(NamedTuple):
    """The layout of one record: the values of a row that are stored next to each other."""

    parts: dict[str, tuple[torch.dtype, torch.Size, int]]
    """The dtype, shape and size in bytes of each part by name."""
    alignment: int
    """The size of the record is a multiple of this number of bytes."""

    @property
    def size(self) -> int:
        """The size of the record in bytes."""
        return -(-sum(size for _, _, size in self.parts.values()) // self.alignment) * self.alignment

    def is_layout_of(self, state: Mapping[str, Any]) -> bool:
        """Whether the tensors of a state are views into one storage that has this layout."""
        tensors = [(state.get(name), dtype) for name, (dtype, _, _) in self.parts.items()]
        if any(x is None or x.dtype != dtype or x.stride(0) * x.itemsize != self.size for x, dtype in tensors):
            return False
        return len({x.untyped_storage()._cdata for x, _ in tensors if x is not None}) == 1


def _records(param: Tensor, quantized: Sequence[str], row_moments: Sequence[str], dtype: torch.dtype) -> list[Record]:
    """Return the layout of one record, or of two where the quantized values fill whole cache lines."""
    alignment = 4 if dtype == torch.uint8 else dtype.itemsize
    size = -(-param.shape[1:].numel() * dtype.itemsize // alignment) * alignment
    values = dict.fromkeys(quantized, (dtype, param.shape[1:], size))
    rest = dict.fromkeys(row_moments, (torch.float32, torch.Size([1] * (param.dim() - 1)), 4))
    if dtype == torch.uint8:
        rest |= dict.fromkeys(map(scale_name, quantized), (dtype, torch.Size([1]), 1))
    if rest and len(quantized) * size % CACHE_LINE == 0:
        return [Record(values, alignment), Record(rest, 4 if row_moments else 1)]
    return [Record({**values, **rest}, alignment)]


def savable(state: Any) -> Any:
    """Return a state that torch.save accepts.

    torch.save refuses tensors of different dtypes in one storage, so parts of records are copied.
    """
    if not isinstance(state, Mapping):
        return state
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor) and x.layout is torch.strided}
    records = {x.untyped_storage()._cdata for x in tensors.values() if x.dtype == torch.uint8}
    floats = {name: x for name, x in tensors.items() if records and x.dtype != torch.uint8}
    in_records = {name: x.contiguous() for name, x in floats.items() if x.untyped_storage()._cdata in records}
    return {**state, **in_records} if in_records else state


def move_out_of_records(state: dict[str, Any], names: Iterable[str], param: Tensor) -> None:
    """Copy buffers from records to their own memory, unless a CUDA graph uses their addresses.

    This is needed when records are no longer used: the state was loaded from another device, the gradient became dense,
    or the options changed.
    """
    present = [name for name in names if name in state]
    if _must_stay(state, present, param.device):
        return
    for name in present:
        buffer = state[name]
        if not fills_memory(buffer):
            like = param if buffer.shape == param.shape else buffer
            state[name] = torch.empty_like(like, dtype=buffer.dtype, requires_grad=False).copy_(buffer)


def stay_for_graphs(slot: ParamSlot) -> None:
    """Keep quantized moments at their addresses if a CUDA graph that uses them is being captured."""
    if slot.moments != "float32" and capturing(slot.param.device):
        _used_by_graphs.update(dict.fromkeys((*slot.state.values(), *slot.scales.values()), True))


def _must_stay(state: Mapping[str, Any], names: Iterable[str], device: torch.device) -> bool:
    """Whether a CUDA graph that was captured, or is being captured, uses the addresses of some buffers."""
    return capturing(device) or any(state[name] in _used_by_graphs for name in names if name in state)
