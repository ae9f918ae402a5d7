"""Where the coded moments of a table lie in memory: the rows of two buffers side by side, or each buffer apart.

Rows lie far apart: on CUDA it takes as long to reach a few bytes as a hundred. So the moments of a row are reached
together, and so are their scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .base import Item, capturing, fills_memory

SIDE_BY_SIDE = "cuda"
"""The kind of device on which rows lie side by side."""

# What captured CUDA graphs reach.
_in_graphs: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()


def pitch(x: Tensor) -> int | None:
    """How many rows further each row begins: 2 where another buffer has its rows between these.

    None if a row is not contiguous, or begins in another.
    """
    if len(x) < 2:
        return 1 if x.is_contiguous() else None
    found, rest = divmod(x.stride(0), x[0].numel())
    return found if found and not rest and x[0].is_contiguous() else None


def side_by_side(
    state: Mapping[str, Any], param: Tensor, every: Sequence[Sequence[str]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Memory in which these moments of a table lie side by side, and their scales if `every` names these too.

    Empty where they lie so, where those that exist leave no room for a copy, or where a CUDA graph reaches them.
    """
    names = [name for of in every for name in of]
    if all(name in state and state[name].dtype == dtype and not state[name].is_contiguous() for name in names):
        return {}
    exist = any(name in state for name in names)
    if exist and _must_stay(state, names, param.device):
        return {}
    try:
        rooms = [
            torch.empty((len(param), len(of), *shape), dtype=dtype, device=param.device)
            for of, shape in zip(every, (param.shape[1:], (1,)), strict=False)
        ]
    except torch.OutOfMemoryError:
        if exist:
            return {}
        raise
    return dict(zip(names, (part for room in rooms for part in room.unbind(1)), strict=True))


def set_apart(state: dict[str, Any], names: Iterable[str], param: Tensor) -> None:
    """Give those of these that lie side by side memory of their own, unless a CUDA graph reaches them.

    They may come from another device, the gradient may be dense, or one of them may now be that of rows.
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
