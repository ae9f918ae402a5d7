"""The coefficients of a step: plain numbers, or tensors where the step must not wait for the device.

Numbers are the fast way. Tensors are used where the step count or an option lives in one that must not be
read: `capturable`, `differentiable`, torch.compile. There everything is computed in float64 on 0-dim tensors:
in float32, ``1 - beta2**t`` is off by 1e-5 in the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rules import Options
from ..rules.update import ScalarFunctions as ScalarFunctions
from ..rules.update import Update


def stay_on_device(options: Options) -> bool:
    """Must the step count and the options stay tensors?"""
    return options["capturable"] or options["differentiable"] or torch.compiler.is_compiling()


def as_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with tensors on the CPU read out as numbers."""
    return {
        name: value if type(value) in _NUMBERS else read(value)
        for name, value in options.items()
        if name not in _PARAMETERS
    }


_NUMBERS = {float, int, bool, type(None)}
_PARAMETERS = {"params", "param_names"}
"""Entries of a parameter group that list its parameters: reading them would make a step quadratic in their number."""


def read(value: Any) -> Any:
    """The numbers of a tensor on the CPU, an array or a sequence of such; anything else as it is."""
    if isinstance(value, (tuple, list)):
        return tuple(read(v) for v in value)
    if isinstance(value, (np.ndarray, np.generic)) or (isinstance(value, Tensor) and value.device.type == "cpu"):
        return value.item() if math.prod(value.shape) == 1 else tuple(value.tolist())
    return value


def exact(step: Tensor) -> Tensor:
    """A copy of the step count in float64 (float32 where the device has no float64)."""
    dtype = torch.float32 if step.device.type == "mps" else torch.float64
    return step.detach().to(dtype, copy=True)


def of_steps(update: Update, options: Options, grad_scale: Tensor | None) -> Callable[[Tensor], dict[str, Any]]:
    """The coefficients by step count. As numbers they are worked out once for all parameters that have the same."""
    if stay_on_device(options):
        return lambda step: update.coefficients(exact(step), options, ScalarFunctions, grad_scale)
    numbers, scale = as_numbers(options), None if grad_scale is None else read(grad_scale)

    @cache
    def known(step: float) -> dict[str, Any]:
        return update.coefficients(step, numbers, ScalarFunctions, scale)

    return lambda step: known(step.item())


def of_step(update: Update, options: Options, step: Tensor, grad_scale: Tensor | None) -> dict[str, Any]:
    """The coefficients of one parameter's step."""
    return of_steps(update, options, grad_scale)(step)
