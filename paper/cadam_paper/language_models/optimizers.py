"""The arms of the study: AdamW and CAdamW of this library, and control arms that mask updates in other ways.

The controls answer what the sign agreement contributes. A random mask of the same share tests whether skipping updates
is enough, and a rescaled mask ("cautious") tests whether the smaller steps are what helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cadam

from ..harness.control_arms import Mask, mask_factor


@dataclass(frozen=True)
class Arm:
    """One optimizer of the study.

    Attributes:
        kind: The name of an optimizer of `cadam`, or the mask of a `MaskedAdamW`.
        beta1: Decay rate of the first moment.
    """

    kind: str
    beta1: float = 0.9


ARMS: Mapping[str, Arm] = {
    "AdamW": Arm("AdamW"),
    "CAdamW": Arm("CAdamW"),
    "cautious AdamW": Arm("cautious"),
    "AdamW with a random mask": Arm("random"),
    "AdamW with beta1 0.95": Arm("AdamW", beta1=0.95),
}
BETA2 = 0.95
WEIGHT_DECAY = 0.1
"""Decoupled weight decay of matrices. Vectors are not decayed."""


class MaskedAdamW(torch.optim.Optimizer):
    """AdamW whose update is multiplied by a mask, as an independent implementation in tensor operations.

    The masks are those of `mask_factor`. Without a mask it is AdamW (Loshchilov and Hutter 2019,
    https://arxiv.org/abs/1711.05101), with the mask `sign` CAdamW.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate, as a tensor on the device of the parameters.
        betas: Decay rates of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        mask: The kind of mask.
        generator: Source of the random mask, on the device of the parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        mask: Mask = "none",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.mask: Mask = mask
        self.generator = generator
        self.steps = torch.zeros((), device=lr.device)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; every parameter must have a gradient."""
        self.steps += 1
        for group in self.param_groups:
            parameters = group["params"]
            gradients = [parameter.grad for parameter in parameters]
            first, second = ([self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
            beta1, beta2 = group["betas"]
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            denominators = torch._foreach_div(second, 1 - beta2**self.steps)
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["eps"])
            updates = torch._foreach_div(first, denominators)
            if self.mask != "none":
                torch._foreach_mul_(updates, self._masks(first, gradients))
            torch._foreach_mul_(updates, -group["lr"] / (1 - beta1**self.steps))
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates)

    def _masks(self, first: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Return the factor of each element of each update."""
        return [mask_factor(self.mask, *pair, self.generator) for pair in zip(first, gradients, strict=True)]


def build(arm: str, model: torch.nn.Module, lr: Tensor, seed: int) -> torch.optim.Optimizer:
    """Return the optimizer of an arm for a model.

    Args:
        arm: A name of `ARMS`.
        model: The model. Its matrices are decayed, its vectors are not.
        lr: The learning rate, a tensor that the training step changes in place.
        seed: Seed of the random mask.
    """
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    kind, betas = ARMS[arm].kind, (ARMS[arm].beta1, BETA2)
    if hasattr(cadam, kind):
        optimizer: torch.optim.Optimizer = getattr(cadam, kind)(groups, lr=lr, betas=betas, capturable=lr.is_cuda)
        return optimizer
    generator = torch.Generator(lr.device).manual_seed(seed)
    return MaskedAdamW(groups, lr, betas, mask=kind, generator=generator)  # type: ignore[arg-type]
