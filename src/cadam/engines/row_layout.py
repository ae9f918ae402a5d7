"""Where the coded moments of a table lie in memory: all that a row has in one place, or each buffer apart.

Rows lie far apart: on CUDA it takes as long to reach a few bytes as a hundred. So a row has one record, in bytes:

- the codes of each moment. Those of one byte are padded to a multiple of 4, since kernels read four at a time;
- with codes of one byte, the float32 numbers that the row shares, then the scale of each moment, padded likewise.

Where the codes of a row fill lines of the cache, the rest has a record of its own: codes that reach into one line more
take longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..rules.moment_storage import scale_name
from .base import ParamSlot, capturing, fills_memory

LINE = 128  # bytes of a line of the GPU's cache
RECORDS_ON = "cuda"
"""The kind of device on which rows have records."""

# What captured CUDA graphs reach.
_in_graphs: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()


def row_stride(x: Tensor) -> int | None:
    """How many elements further each row begins. None if a row is not contiguous, or begins in another."""
    if len(x) < 2:
        return x.shape[1:].numel() if x.is_contiguous() else None
    return x.stride(0) if x[0].is_contiguous() and x.stride(0) >= x[0].numel() else None


def new_records(
    state: Mapping[str, Any], param: Tensor, coded: Sequence[str], shared: Sequence[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Memory for a record of each row of a table, all zeros: by name, the part of each moment and of its scales.

    `coded` are the moments that have codes of this dtype, `shared` those of which a row has one number in float32.
    Empty where they lie so, where those that exist leave no room for a copy, or where a CUDA graph reaches them.
    """
    records = _records(param, coded, shared, dtype)
    if all(record.holds(state) for record in records):
        return {}
    names = [name for record in records for name in record.parts]
    exist = any(name in state for name in names)
    if exist and _must_stay(state, names, param.device):
        return {}
    try:
        memories = [torch.zeros((len(param), r.size), dtype=torch.uint8, device=param.device) for r in records]
    except torch.OutOfMemoryError:
        if exist:
            return {}
        raise
    found = {}
    for record, memory in zip(records, memories, strict=True):
        start = 0
        for name, (kind, shape, room) in record.parts.items():
            part = memory[:, start : start + shape.numel() * kind.itemsize]
            found[name] = part.view(kind).view(len(param), *shape)
            start += room
    return found


class Record(NamedTuple):
    """What a row has in one place."""

    parts: dict[str, tuple[torch.dtype, torch.Size, int]]
    """By name, dtype and shape of a part, and the bytes that it takes."""
    unit: int
    """Bytes that the size is a multiple of."""

    @property
    def size(self) -> int:
        return -(-sum(room for _, _, room in self.parts.values()) // self.unit) * self.unit

    def holds(self, state: Mapping[str, Any]) -> bool:
        """Do its parts lie in one memory, and each in records of this size?"""
        found = [(state.get(name), kind) for name, (kind, _, _) in self.parts.items()]
        if any(x is None or x.dtype != kind or x.stride(0) * x.itemsize != self.size for x, kind in found):
            return False
        return len({x.untyped_storage()._cdata for x, _ in found if x is not None}) == 1


def _records(param: Tensor, coded: Sequence[str], shared: Sequence[str], dtype: torch.dtype) -> list[Record]:
    """One, or two where codes fill whole lines of the cache: nothing is to come between them."""
    unit = 4 if dtype == torch.uint8 else dtype.itemsize
    room = -(-param.shape[1:].numel() * dtype.itemsize // unit) * unit
    codes = dict.fromkeys(coded, (dtype, param.shape[1:], room))
    more = dict.fromkeys(shared, (torch.float32, torch.Size([1] * (param.dim() - 1)), 4))
    if dtype == torch.uint8:
        more |= dict.fromkeys(map(scale_name, coded), (dtype, torch.Size([1]), 1))
    if more and len(coded) * room % LINE == 0:
        return [Record(codes, unit), Record(more, 4 if shared else 1)]
    return [Record({**codes, **more}, unit)]


def savable(state: Any) -> Any:
    """The state of a parameter as torch.save takes it: it refuses bytes and floats in one memory, as in a record."""
    if not isinstance(state, Mapping):
        return state
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor) and x.layout is torch.strided}
    records = {x.untyped_storage()._cdata for x in tensors.values() if x.dtype == torch.uint8}
    floats = {name: x for name, x in tensors.items() if records and x.dtype != torch.uint8}
    shared = {name: x.contiguous() for name, x in floats.items() if x.untyped_storage()._cdata in records}
    return {**state, **shared} if shared else state


def set_apart(state: dict[str, Any], names: Iterable[str], param: Tensor) -> None:
    """Give those of these that lie in records memory of their own, unless a CUDA graph reaches them.

    They may come from another device, the gradient may be dense, or they may be stored otherwise now.
    """
    found = [name for name in names if name in state]
    if _must_stay(state, found, param.device):
        return
    for name in found:
        buffer = state[name]
        if not fills_memory(buffer):
            alike = param if buffer.shape == param.shape else buffer
            state[name] = torch.empty_like(alike, dtype=buffer.dtype, requires_grad=False).copy_(buffer)


def stay_for_graphs(slot: ParamSlot) -> None:
    """Have coded moments stay where they are, if a CUDA graph is being captured: it is going to reach them there."""
    if slot.moments != "float32" and capturing(slot.param.device):
        _in_graphs.update(dict.fromkeys((*slot.state.values(), *slot.scales.values()), True))


def _must_stay(state: Mapping[str, Any], names: Iterable[str], device: torch.device) -> bool:
    """Is there a graph, or one being captured, that reaches some of these?"""
    return capturing(device) or any(state[name] in _in_graphs for name in names if name in state)
