"""Clipping by the norm of all gradients together, dense and sparse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .engines.rows import summed


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ that takes sparse gradients too, in the same total norm.

    A sparse gradient counts with its duplicates summed, in float32 at the least, as the optimizer will sum them.
    Returns the total norm before clipping.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    sums = [_summed(grad) for grad in grads]
    sums = [grad for grad in sums if grad.numel()]  # an empty one has no infinity norm
    norm = torch.nn.utils.get_total_norm(sums, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        values.mul_(factor.to(grad.device))
    return norm


def _summed(grad: Tensor) -> Tensor:
    """The values whose norm counts."""
    if not grad.is_sparse:
        return grad
    return summed(grad, torch.promote_types(grad.dtype, torch.float32))[1]
