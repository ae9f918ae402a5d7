"""Clipping by the norm of all gradients together, dense and sparse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..engines.cpu import sparse as cpu_rows
from ..engines.cuda import sparse as cuda_rows
from ..engines.sparse_reference import sum_duplicates

Found: TypeAlias = dict[tuple[Any, ...], tuple[Tensor, Tensor]]
"""The rows that ids name and the place of each id among them: tables often share their ids."""
SHORT = 4
"""A table on CUDA has at most so many rows for each id of its gradient where a sum for every row beats a sort."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` that takes sparse gradients too, in the same total norm.

    A sparse gradient counts with its duplicates summed, in float32 at the least, as the optimizer will sum them; rows
    that it does not name are not counted as zeros, which only a negative `norm_type` would notice.
    Returns the total norm before clipping.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    found: Found = {}
    sums = [_summed(grad, norm_type, found) for grad in grads]
    sums = [grad for grad in sums if grad.numel()]  # an empty one has no infinity norm
    norm = torch.nn.utils.get_total_norm(sums, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        values.mul_(factor.to(grad.device))
    return norm


def _summed(grad: Tensor, norm_type: float, found: Found) -> Tensor:
    """Values with the norm that counts: the sums, rows of zeros among them, or a single one that is their norm."""
    if not grad.is_sparse:
        return grad
    dtype, count = torch.promote_types(grad.dtype, torch.float32), grad._nnz()
    if grad.sparse_dim() != 1 or grad.is_complex() or grad.is_coalesced() or count == 0:
        return sum_duplicates(grad, dtype)[1]
    ids, values, rows = grad._indices()[0], grad._values().reshape(count, -1), grad.shape[0]
    if norm_type == 2 and cuda_rows.has_norm(values):
        return cuda_rows.norm(ids, values, rows).view(1)
    if norm_type == 2 and cpu_rows.has_norm(values) and (norm := cpu_rows.norm(ids, values, rows)) is not None:
        return norm.view(1)
    values = values.to(dtype)
    if not grad.is_cuda and rows > count:  # coalesce takes three times as long
        key = ids.data_ptr(), ids.stride(), count
        if key not in found:
            found[key] = torch.unique(ids, return_inverse=True)
        ids, rows = found[key][1], len(found[key][0])
    # Whoever made an id that is no row hears of it from the optimizer; here it must not write beside the sums.
    ids = ids.clamp(0, rows - 1)
    if grad.is_cuda:
        return _without_waiting(ids, values, rows)
    return values.new_zeros(rows, values.shape[1]).index_add_(0, ids, values)


def _without_waiting(ids: Tensor, values: Tensor, rows: int) -> Tensor:
    """Sums that a CUDA graph can hold, the same in every run.

    Coalescing waits for the device to hear how many rows there are.
    """
    if rows > SHORT * len(ids):
        ids, order = ids.sort(stable=True)
        ids, values, rows = F.pad((ids[1:] != ids[:-1]).cumsum(0), (1, 0)), values[order], len(ids)
    sums: Tensor = torch.ops.aten.embedding_dense_backward(values, ids, rows, -1, False)
    return sums
