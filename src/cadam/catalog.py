"""The family: a rule, confidence or not, and the usual defaults. A name with C in front has confidence.

The constructors take what torch.optim's take, in the same order; the remaining options are `Optimizer`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from .optimizer import Optimizer
from .rules import adabelief, adam, lion, radam, sgdm, yogi

if TYPE_CHECKING:
    from typing_extensions import Unpack

Number = float | Tensor
Betas = tuple[Number, Number]


class Decay(TypedDict, total=False):
    """Options of every optimizer that follow the rule's own; `Optimizer` says what they mean."""

    foreach: bool | None
    maximize: bool
    capturable: bool
    differentiable: bool
    fused: bool | None
    state_dtype: torch.dtype | None
    prepared: bool
    stochastic_rounding: bool
    track_alignment: bool


class Common(Decay, total=False):
    decoupled_weight_decay: bool


class Adam(Optimizer):
    """Adam as torch.optim.Adam computes it; `amsgrad` takes the maximum of the corrected second moment."""

    rule = adam.ADAM
    confidence = False

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Number = 0.0,
        amsgrad: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, **common)


class AdamW(Adam):
    """Adam with decoupled weight decay, as torch.optim.AdamW."""

    fixed = {"decoupled_weight_decay": True}

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Number = 1e-2,
        amsgrad: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **common)


class AmsGrad(Adam):
    """Adam(amsgrad=True)."""

    fixed = {"amsgrad": True}

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Number = 0.0,
        amsgrad: bool = True,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **common)


class SGDM(Optimizer):
    """SGD with momentum. By default the moving average of the paper; pass `dampening` for torch.optim.SGD's."""

    rule = sgdm.SGDM
    confidence = False

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        momentum: float = 0.9,
        dampening: float | None = None,
        weight_decay: Number = 0.0,
        nesterov: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            **common,
        )


class Lion(Optimizer):
    """Lion, with its decoupled weight decay."""

    rule = lion.LION
    confidence = False

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: Number = 0.0,
        decoupled_weight_decay: bool = True,
        **common: Unpack[Decay],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            **common,
        )


class RAdam(Optimizer):
    """RAdam as torch.optim.RAdam computes it."""

    rule = radam.RADAM
    confidence = False

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Number = 0.0,
        decoupled_weight_decay: bool = False,
        **common: Unpack[Decay],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            **common,
        )


class Yogi(Optimizer):
    """Yogi."""

    rule = yogi.YOGI
    confidence = False

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-2,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-3,
        initial_accumulator: float = 1e-6,
        weight_decay: Number = 0.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            initial_accumulator=initial_accumulator,
            weight_decay=weight_decay,
            **common,
        )


class AdaBelief(Optimizer):
    """AdaBelief."""

    rule = adabelief.ADABELIEF
    confidence = False

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-16,
        weight_decay: Number = 0.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **common)


class CAdam(Adam):
    """Adam with confidence: an element moves only where momentum and gradient agree in sign."""

    confidence = True


class CAdamW(AdamW):
    """AdamW with confidence. The decay acts on every element, waiting or not."""

    confidence = True


class CAmsGrad(AmsGrad):
    """CAdam(amsgrad=True)."""

    confidence = True


class CSGDM(SGDM):
    """SGDM with confidence."""

    confidence = True


class CLion(Lion):
    """Lion with confidence, tested with the interpolant that Lion takes the sign of."""

    confidence = True


class CRAdam(RAdam):
    """RAdam with confidence."""

    confidence = True


class CYogi(Yogi):
    """Yogi with confidence."""

    confidence = True


class CAdaBelief(AdaBelief):
    """AdaBelief with confidence."""

    confidence = True
