"""Clipping by the norm of all gradients together, dense and sparse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ that takes sparse gradients too, in the same total norm.

    A sparse gradient counts with its duplicates summed, as the optimizer will sum them, and is left coalesced
    in ``.grad``. Returns the total norm before clipping.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads: list[Tensor] = []
    for p in parameters:
        if p.grad is None:
            continue
        if p.grad.layout == torch.sparse_coo:
            if not p.grad.is_coalesced():
                p.grad = p.grad.coalesce()
            grads.append(p.grad._values())
        else:
            grads.append(p.grad)
    grads = [grad for grad in grads if grad.numel()]  # an empty one has no infinity norm
    norm = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    return norm
