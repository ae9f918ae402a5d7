"""The names and options of the arms of the study, without importing JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..harness.control_arms import Mask


@dataclass(frozen=True)
class Arm:
    """One optimizer of the study.

    Attributes:
        mask: The elements that Adam's update is applied to: all, those whose momentum and gradient agree in sign, the
            same ones with a larger step ("cautious"), or as many at random.
        pull: Strength of the L2 penalty on the distance from the initial weights (Kumar et al. 2023,
            https://arxiv.org/abs/2308.11958). Its gradient is added to that of the loss.
        beta1: Decay rate of the first moment, for arms without a mask or with CAdam's.
    """

    mask: Mask = "none"
    pull: float = 0.0
    beta1: float = 0.9


ARMS: Mapping[str, Arm] = {
    "Adam": Arm(),
    "CAdam": Arm("sign"),
    "cautious Adam": Arm("cautious"),
    "Adam with a random mask": Arm("random"),
    "Adam with beta1 0.95": Arm(beta1=0.95),
    "Adam, L2 toward the start 1e-3": Arm(pull=1e-3),
    "Adam, L2 toward the start 1e-2": Arm(pull=1e-2),
    "CAdam, L2 toward the start 1e-3": Arm("sign", pull=1e-3),
}
