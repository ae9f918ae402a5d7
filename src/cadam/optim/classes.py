"""The family: a rule, confidence or not, and the usual defaults. A name with C in front has confidence.

The constructors take what torch.optim's take, in the same order; `Optimizer` says what the options mean. Each names
all of them, for whoever looks at its signature: type checkers, configuration libraries, command lines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rules import adabelief, adam, lion, radam, sgdm, yogi
from .optimizer import Optimizer

Number = float | Tensor
Betas = tuple[Number, Number]


def _own(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor out of its `locals()`."""
    return {name: value for name, value in given.items() if name not in ("self", "__class__")}


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
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        moments: str = "float32",
        second_moment: str = "element",
        row_steps: bool = False,
        replay: bool = True,
        stochastic_rounding: bool = False,
        track_alignment: bool = True,
    ) -> None:
        super().__init__(**_own(locals()))


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
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        state_dtype: torch.dtype | None = None,
        moments: str = "float32",
        second_moment: str = "element",
        row_steps: bool = False,
        replay: bool = True,
        stochastic_rounding: bool = False,
        track_alignment: bool = True,
    ) -> None:
        super().__init__(**_own(locals()))


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
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        moments: str = "float32",
        second_moment: str = "element",
        row_steps: bool = False,
        replay: bool = True,
        stochastic_rounding: bool = False,
        track_alignment: bool = True,
    ) -> None:
        super().__init__(**_own(locals()))


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
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        moments: str = "float32",
        second_moment: str = "element",
        row_steps: bool = False,
        replay: bool = True,
        stochastic_rounding: bool = False,
        track_alignment: bool = True,
    ) -> None:
        super().__init__(**_own(locals()))


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
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        moments: str = "float32",
        second_moment: str = "element",
        row_steps: bool = False,
        replay: bool = True,
        stochastic_rounding: bool = False,
        track_alignment: bool = True,
    ) -> None:
        super().__init__(**_own(locals()))


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
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        moments: str = "float32",
        second_moment: str = "element",
        row_steps: bool = False,
        replay: bool = True,
        stochastic_rounding: bool = False,
        track_alignment: bool = True,
    ) -> None:
        super().__init__(**_own(locals()))


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
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        moments: str = "float32",
        second_moment: str = "element",
        row_steps: bool = False,
        replay: bool = True,
        stochastic_rounding: bool = False,
        track_alignment: bool = True,
    ) -> None:
        super().__init__(**_own(locals()))


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
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None,
        moments: str = "float32",
        second_moment: str = "element",
        row_steps: bool = False,
        replay: bool = True,
        stochastic_rounding: bool = False,
        track_alignment: bool = True,
    ) -> None:
        super().__init__(**_own(locals()))


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
