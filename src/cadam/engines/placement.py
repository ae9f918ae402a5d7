"""Where the coded moments of a table lie in memory: all that a row has in one place, or each buffer apart.

Rows lie far apart: on CUDA it takes as long to reach a few bytes as a hundred. So a row has one record, in bytes:

- the codes of each moment. Those of one byte are padded to a multiple of 4, since kernels read four at a time;
- with codes of one byte, the float32 numbers that the row shares, then the scale of each moment, padded likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..moments import scale_of
from .base import Item, capturing, fills_memory

SIDE_BY_SIDE = "cuda"
"""The kind of device on which rows have records."""

# What captured CUDA graphs reach.
_in_graphs: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()


def row_stride(x: Tensor) -> int | None:
    """How many elements further each row begins. None if a row is not contiguous, or begins in another."""
    if len(x) < 2:
        return x.shape[1:].numel() if x.is_contiguous() else None
    return x.stride(0) if x[0].is_contiguous() and x.stride(0) >= x[0].numel() else None


def side_by_side(
    state: Mapping[str, Any], param: Tensor, coded: Sequence[str], shared: Sequence[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Memory for a record of each row of a table, all zeros: by name, the part of each moment and of its scales.

    `coded` are the moments that have codes of this dtype, `shared` those of which a row has one number in float32.
    Empty where they lie so, where those that exist leave no room for a copy, or where a CUDA graph reaches them.
    """
    width, unit = param.shape[1:].numel() * dtype.itemsize, 4 if dtype == torch.uint8 else dtype.itemsize
    parts = dict.fromkeys(coded, (dtype, param.shape[1:], -(-width // unit) * unit))
    parts |= dict.fromkeys(shared, (torch.float32, torch.Size([1] * (param.dim() - 1)), 4))
    if dtype == torch.uint8:
        parts |= dict.fromkeys(map(scale_of, coded), (dtype, torch.Size([1]), 1))
    size = -(-sum(room for _, _, room in parts.values()) // unit) * unit
    if _is_record({name: state.get(name) for name in parts}, [kind for kind, _, _ in parts.values()], size):
        return {}
    exist = any(name in state for name in parts)
    if exist and _must_stay(state, parts, param.device):
        return {}
    try:
        memory = torch.zeros((len(param), size), dtype=torch.uint8, device=param.device)
    except torch.OutOfMemoryError:
        if exist:
            return {}
        raise
    found, start = {}, 0
    for name, (kind, shape, room) in parts.items():
        part = memory[:, start : start + shape.numel() * kind.itemsize]
        found[name] = part.view(kind).view(len(param), *shape)
        start += room
    return found


def _is_record(parts: Mapping[str, Any], dtypes: Sequence[torch.dtype], size: int) -> bool:
    """Do these tensors lie in one memory, and each in records of this size?"""
    if any(x is None or x.dtype != dtype for x, dtype in zip(parts.values(), dtypes, strict=True)):
        return False
    memories = {x.untyped_storage()._cdata for x in parts.values()}
    return len(memories) == 1 and all(x.stride(0) * x.itemsize == size for x in parts.values())


def savable(state: Any) -> Any:
    """The state of a parameter as torch.save takes it: it refuses bytes and floats in one memory, as in a record."""
    if not isinstance(state, Mapping):
        return state
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
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


def stay_for_graphs(item: Item) -> None:
    """Have coded moments stay where they are, if a CUDA graph is being captured: it is going to reach them there."""
    if item.moments != "float32" and capturing(item.param.device):
        _in_graphs.update(dict.fromkeys((*item.state.values(), *item.scales.values()), True))


def _must_stay(state: Mapping[str, Any], names: Iterable[str], device: torch.device) -> bool:
    """Is there a graph, or one being captured, that reaches some of these?"""
    return capturing(device) or any(state[name] in _in_graphs for name in names if name in state)
