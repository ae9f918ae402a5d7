"""Gradient clipping by the total norm of dense and sparse gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..engines.cpu import sparse as cpu_sparse
from ..engines.cuda import sparse as cuda_sparse
from ..engines.sparse_reference import sum_duplicates

DistinctRows: TypeAlias = dict[tuple[Any, ...], tuple[Tensor, Tensor]]
"""The distinct rows of some ids, and the index of each id among them. Tables often share their ids."""
SHORT = 4
"""Up to this number of rows per id, summing into every row of a CUDA table is faster than sorting the ids."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients by their total norm, like `torch.nn.utils.clip_grad_norm_`, but also sparse ones.

    A sparse gradient enters the norm with its duplicate rows summed in at least float32, as the optimizer will sum
    them. Rows that it does not contain are not counted as zeros, which matters for negative `norm_type` only.

    Args:
        parameters: The parameters whose gradients are clipped together.
        max_norm: The largest allowed norm.
        norm_type: The order of the norm; ``inf`` for the maximum.
        error_if_nonfinite: Whether to raise an error if the norm is infinite or NaN.
        foreach: Passed to `torch.nn.utils.get_total_norm`.

    Returns:
        The total norm before clipping.

    Example:
        >>> loss.backward()
        >>> cadam.clip_grad_norm_(model.parameters(), max_norm=1.0)
        >>> optimizer.step()
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    distinct: DistinctRows = {}
    values = [_values_with_norm(grad, norm_type, distinct) for grad in grads]
    values = [value for value in values if value.numel()]  # An empty tensor has no infinity norm.
    norm = torch.nn.utils.get_total_norm(values, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    for grad in grads:
        clipped = grad._values() if grad.is_sparse else grad
        clipped.mul_(factor.to(grad.device))
    return norm


def _values_with_norm(grad: Tensor, norm_type: float, distinct: DistinctRows) -> Tensor:
    """Return a tensor with the norm of the gradient: its summed rows, or a single element that is the norm."""
    if not grad.is_sparse:
        return grad
    dtype, count = torch.promote_types(grad.dtype, torch.float32), grad._nnz()
    if grad.sparse_dim() != 1 or grad.is_complex() or grad.is_coalesced() or count == 0:
        return sum_duplicates(grad, dtype)[1]
    ids, values, rows = grad._indices()[0], grad._values().reshape(count, -1), grad.shape[0]
    if norm_type == 2 and cuda_sparse.has_norm(values):
        return cuda_sparse.norm(ids, values, rows).view(1)
    if norm_type == 2 and cpu_sparse.has_norm(values) and (norm := cpu_sparse.norm(ids, values, rows)) is not None:
        return norm.view(1)
    values = values.to(dtype)
    if not grad.is_cuda and rows > count:  # Coalescing would take three times as long.
        key = ids.data_ptr(), ids.stride(), count
        if key not in distinct:
            distinct[key] = torch.unique(ids, return_inverse=True)
        ids, rows = distinct[key][1], len(distinct[key][0])
    # The optimizer raises the error for an id that is out of range. Here it must not write out of bounds.
    ids = ids.clamp(0, rows - 1)
    if grad.is_cuda:
        return _sum_without_waiting(ids, values, rows)
    return values.new_zeros(rows, values.shape[1]).index_add_(0, ids, values)


def _sum_without_waiting(ids: Tensor, values: Tensor, rows: int) -> Tensor:
    """Sum the values of each row in a way that is reproducible and that a CUDA graph can capture.

    Coalescing cannot be captured, because the host waits for the number of distinct rows.
    """
    if rows > SHORT * len(ids):
        ids, order = ids.sort(stable=True)
        ids, values, rows = F.pad((ids[1:] != ids[:-1]).cumsum(0), (1, 0)), values[order], len(ids)
    sums: Tensor = torch.ops.aten.embedding_dense_backward(values, ids, rows, -1, False)
    return sums
