"""The options of a parameter group, resolved once into the form that engines use.

A parameter group is a dict that users may edit between two steps. Reading it again in every engine, for every
parameter, took longer than small steps themselves. So the options are resolved once, when a step is planned:
`ResolvedGroup.resolve` checks their types, reads tensors on the CPU as plain numbers, and finds the update and the
kernel that they ask for. `ResolvedGroup.refresh` compares the dict with the resolved values before each later step.

Coefficients are plain numbers wherever possible. With `capturable`, `differentiable` and torch.compile, the step count
or an option is a tensor that must not be read on the host; coefficients are then computed in float64 on 0-dim tensors,
because in float32 the expression ``1 - beta2**t`` is off by 1e-5 in the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache, cached_property
from numbers import Real
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codegen.kernel_spec import KernelSpec
from ..numpy_functions import NumpyFunctions
from ..rules import Rule, moment_storage
from ..rules.defaults import NUMBERS, defaults
from ..rules.sparse_updates import aging_options, check_sparse_updates
from ..rules.update import ScalarFunctions, Update

EXECUTION_OPTIONS = (
    "confidence",
    "confidence_after",
    "sparse_updates",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "state_dtype",
    "moments",
    "second_moment",
    "row_steps",
    "replay",
    "stochastic_rounding",
    "track_alignment",
)
"""Options that loading a checkpoint keeps: confidence, sparse updates, and how a step is executed and stored."""

_IMMUTABLE = (float, int, bool, type(None), str, torch.dtype)


@dataclass(frozen=True)
class ResolvedGroup:
    """The options of one parameter group, as plain values.

    Attributes:
        source: The parameter group that the options were read from.
        update: The arithmetic that the options ask for.
        kernel_spec: The compiled kernel for dense parameters that the options ask for.
        options: Every option by name, with the value in the group.
        numbers: Every option by name, with tensors on the CPU, arrays and lists read as plain numbers and tuples.
        is_fixed: Whether no option can change its value without being replaced, as a tensor or a list can.
    """

    source: Mapping[str, Any]
    update: Update
    kernel_spec: KernelSpec
    options: Mapping[str, Any]
    numbers: Mapping[str, Any]
    is_fixed: bool

    @classmethod
    def resolve(
        cls, rule: Rule, group: Mapping[str, Any], *, unscale: bool = False, label: str = "options"
    ) -> ResolvedGroup:
        """Check and read the options of a group.

        Args:
            rule: The rule of the optimizer.
            group: The parameter group, or any mapping with all options.
            unscale: Whether gradients are divided by a gradient scale in the step.
            label: How error messages refer to the group.

        Raises:
            ValueError: If an option has the wrong type, or the storage options contradict each other.
        """
        options = {name: group[name] for name in defaults(rule)}
        try:
            check_types(rule, options)
        except ValueError as error:
            raise ValueError(f"{label}: {error}; no parameter was changed") from None
        numbers = {name: read_number(value) for name, value in options.items()}
        return cls(
            group,
            Update.of(rule, options["confidence"], options, unscale=unscale),
            KernelSpec.of(rule, numbers),
            options,
            numbers,
            not any(map(_may_change_in_place, options.values())),
        )

    def refresh(self, label: str = "options") -> ResolvedGroup | None:
        """Return the group with the options as they are now, or None if they ask for another update or kernel.

        Returns this very object if nothing has changed. A new learning rate, as set by a scheduler in every step, does
        not resolve the other options again.
        """
        source, options = self.source, self.options
        values = list(map(source.__getitem__, options))
        if self.is_fixed:
            if all(map(is_, values, options.values())):
                return self
            changed = dict(zip(options, values, strict=True))
            lr = changed["lr"]
            if type(lr) is float and all(map(is_, ({**changed, "lr": options["lr"]}).values(), options.values())):
                return replace(self, options=changed, numbers={**self.numbers, "lr": lr})
        new = self.resolve(self.update.rule, source, unscale=self.update.unscale, label=label)
        return new if new._plan_key == self._plan_key else None

    @property
    def _plan_key(self) -> Any:
        """Everything that the choice of engines and the form of the state depend on."""
        aging = aging_options(self.update.rule, self.numbers) if self.row_update.ages else None
        return self.update, self.kernel_spec, [self.options[name] for name in EXECUTION_OPTIONS], aging

    @cached_property
    def row_update(self) -> Update:
        """The arithmetic for the rows of a table."""
        return replace(self.update, ages=self.options["sparse_updates"] == "exact")

    @cached_property
    def sparse_kernel_spec(self) -> KernelSpec:
        """The compiled kernel for embedding tables, whose rows may share second moments and count their own steps."""
        return KernelSpec.of(self.update.rule, self.numbers, rows=True)

    @property
    def keeps_scalars_on_device(self) -> bool:
        """Whether step counts and coefficients must stay tensors, because the host must not read them."""
        options = self.options
        return options["capturable"] or options["differentiable"] or torch.compiler.is_compiling()

    def coefficients(self, grad_scale: Tensor | None = None) -> Callable[[Tensor], dict[str, Any]]:
        """Return a function that computes the coefficients of `update` from a step count.

        Plain numbers are computed once for all parameters that have the same step count.
        """
        update = self.update
        if self.keeps_scalars_on_device:
            return lambda step: update.coefficients(to_float64(step), self.options, ScalarFunctions, grad_scale)
        scale = read_number(grad_scale)

        @cache
        def at(step: float) -> dict[str, Any]:
            return update.coefficients(step, self.numbers, ScalarFunctions, scale)

        return lambda step: at(step.item())

    def kernel_coefficients(self, step: Any, grad_scale: float | None = None) -> dict[str, Any]:
        """Return the coefficients of the compiled kernels at one step count, or at an array of step counts."""
        functions = NumpyFunctions if isinstance(step, np.ndarray) else ScalarFunctions
        return self.update.general_coefficients(step, self.numbers, functions, grad_scale)


def read_number(value: Any) -> Any:
    """Return a tensor on the CPU, an array, or a list of them as plain numbers, and anything else unchanged."""
    if isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(read_number, value))
    if isinstance(value, (np.ndarray, np.generic)) or (isinstance(value, Tensor) and value.device.type == "cpu"):
        return value.item() if math.prod(value.shape) == 1 else tuple(value.tolist())
    return value


def to_float64(step: Tensor) -> Tensor:
    """Return a copy of a step count in float64, or in float32 on devices without float64."""
    dtype = torch.float32 if step.device.type == "mps" else torch.float64
    return step.detach().to(dtype, copy=True)


def _may_change_in_place(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_may_change_in_place, value))
    return not isinstance(value, _IMMUTABLE)


# Types of options --------------------------------------------------------------------------------------------------


def check_types(rule: Rule, options: Mapping[str, Any]) -> None:
    """Check the types of the options before a step, since users may write anything into a parameter group.

    Ranges are not checked: as in torch.optim, a number that is out of range shows in the parameters.

    Raises:
        ValueError: If a number is not a number, or the storage options contradict each other.
    """
    check_flag("row_steps", options)
    check_flag("confidence", options)
    check_sparse_updates(rule, options)
    moment_storage.check_storage_options(
        rule.moments, rule.state(options), rule.name, options, rule.counts_steps(options)
    )
    check_numbers(options)


def check_flag(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless the option is True or False."""
    if not isinstance(options[name], bool):
        raise ValueError(f"Invalid {name} value: {options[name]!r} (True or False)")


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise ValueError unless every option in `NUMBERS` is one number and `betas`, if there is one, is two."""
    for name, term in NUMBERS.items():
        if name in options:
            _check_number(options[name], term, name)
    if "betas" not in options:
        return
    betas = as_pair(options["betas"])
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas!r} (two numbers in [0, 1), or two 1-element tensors)")
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise ValueError("betas must be either both floats or both Tensors")
    for i, beta in enumerate(betas):
        _check_number(beta, f"beta parameter at index {i}", f"betas[{i}]")


def _check_number(value: Any, term: str, option: str) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {option} must be 1-element, got shape {tuple(value.shape)}")
    elif isinstance(as_scalar(value), bool) or not isinstance(as_scalar(value), Real):
        raise ValueError(f"Invalid {term}: {value!r} ({option} must be a number or a 1-element tensor)")


def as_pair(betas: Any) -> Any:
    """Return a sequence or array of betas as a tuple, and unordered collections unchanged."""
    if isinstance(betas, (str, Mapping, Set)):
        return betas
    try:
        return tuple(as_scalar(beta) for beta in betas)
    except TypeError:
        return betas


def as_scalar(value: Any) -> Any:
    """Return a one-element array as a Python number and a one-element tensor as a 0-dim tensor."""
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1:
        return value.item()
    return value.squeeze() if isinstance(value, Tensor) and value.dim() and value.numel() == 1 else value
