"""The control arms: Adam with other masks than CAdam's, and with a longer momentum, for dense and sparse gradients.

They show what the agreement in sign contributes. A random mask of the same share tests whether it is enough to skip
updates, a rescaled mask ("cautious") whether smaller steps are what helps, and a larger beta1 whether it is averaging
over more gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cadam.online.models.model_file import OptimizerSpec

Mask = Literal["none", "sign", "cautious", "random"]
MIN_SHARE = 1e-3
"""Lower bound on the share of agreeing elements by which the cautious mask divides, as in timm."""


@dataclass(frozen=True)
class ControlArm:
    """An optimizer that is compared with Adam and CAdam.

    Attributes:
        mask: The elements that are updated, see `mask_factor`.
        beta1: Decay rate of the first moment.
    """

    mask: Mask
    beta1: float = 0.9


CAUTIOUS, RANDOM, LONG_MOMENTUM = "cautious Adam", "Adam with a random mask", "Adam with beta1 0.95"
CONTROL_ARMS: Mapping[str, ControlArm] = {
    CAUTIOUS: ControlArm("cautious"),
    RANDOM: ControlArm("random"),
    LONG_MOMENTUM: ControlArm("none", beta1=0.95),
}


def mask_factor(mask: Mask, moment: Tensor, gradient: Tensor, generator: torch.Generator | None) -> Tensor:
    r"""Return the factor of each element of an update.

    With the first moment :math:`m`, the gradient :math:`g`, and the share :math:`a` of elements with :math:`m g > 0`,
    the factor is

    - `none`: 1, which is Adam;
    - `sign`: 1 where :math:`m g > 0` and 0 elsewhere, which is CAdam;
    - `cautious`: :math:`1 / \max(a, 0.001)` where :math:`m g > 0` (Liang et al. 2024,
      https://arxiv.org/abs/2411.16085, as in timm);
    - `random`: 1 at elements that are chosen at random with probability :math:`a`.
    """
    if mask == "none":
        return torch.ones_like(gradient)
    agrees = (moment * gradient > 0).to(moment.dtype)
    if mask == "cautious":
        return agrees / agrees.mean().clamp(min=MIN_SHARE)
    if mask == "random":
        drawn = torch.rand(agrees.shape, device=agrees.device, generator=generator)
        return (drawn < agrees.mean()).to(agrees.dtype)
    return agrees


class MaskedAdam(torch.optim.Optimizer):
    """Adam whose update is multiplied by a mask, as an independent implementation in tensor operations.

    For a sparse gradient, only the rows in the gradient are read and updated, as with the lazy updates of `cadam.Adam`.
    The share of agreeing elements is then computed over these rows.

    Args:
        params: Parameters.
        lr: The learning rate.
        betas: Decay rates of the first and second moment.
        eps: Added to the root of the second moment.
        mask: The kind of mask.
        generator: Source of the random mask.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        mask: Mask = "none",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.mask: Mask = mask
        self.generator = generator
        self._agreeing, self._touched = torch.zeros((), dtype=torch.int64), 0

    @property
    def agreement(self) -> float:
        """The share of updated elements whose momentum and gradient agreed in sign, over all steps."""
        return float(self._agreeing) / self._touched if self._touched else 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        rows: Any = slice(None)
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, gradient = gradient.indices()[0], gradient.values()
        (beta1, beta2), step = group["betas"], state["step"]
        first = state["exp_avg"][rows].lerp(gradient, 1 - beta1)
        second = (state["exp_avg_sq"][rows] * beta2).addcmul(gradient, gradient, value=1 - beta2)
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = first, second
        self._agreeing += (first * gradient > 0).sum()
        self._touched += gradient.numel()
        update = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + group["eps"])
        factor = mask_factor(self.mask, first, gradient, self.generator)
        parameter[rows] = parameter[rows] - group["lr"] * (update * factor)


def build(name: str, model: nn.Module, lr: float, seed: int) -> torch.optim.Optimizer:
    """Return the optimizer of an arm for a model.

    Args:
        name: A name of `CONTROL_ARMS`, or an optimizer of cadam, as `OptimizerSpec` reads it.
        model: The model.
        lr: The learning rate.
        seed: Seed of the random mask.
    """
    if name not in CONTROL_ARMS:
        return OptimizerSpec.parse(name).build(model, lr)
    arm, generator = CONTROL_ARMS[name], torch.Generator().manual_seed(seed)
    return MaskedAdam(model.parameters(), lr, (arm.beta1, 0.999), mask=arm.mask, generator=generator)


def agreement(optimizer: Any) -> float:
    """Return the share of updated elements whose momentum and gradient agreed in sign."""
    return optimizer.agreement if isinstance(optimizer, MaskedAdam) else optimizer.alignment().total.over_touched
