"""The checks of an optimizer's options: known names, types and ranges.

Messages begin like those of torch.optim, so that code that matches them keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..engines.resolved_group import as_pair, as_scalar, check_flag, check_numbers, check_types
from ..rules import Rule
from ..rules.defaults import check_ranges

FLAGS = (
    "amsgrad",
    "nesterov",
    "maximize",
    "confidence",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
    "row_steps",
    "replay",
    "stochastic_rounding",
    "track_alignment",
)
"""Options that are True or False."""

ALIASES = {
    "alpha": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "epsilon": "eps",
    "l2": "weight_decay",
    "learning_rate": "lr",
    "wd": "weight_decay",
}
"""Names of options in other libraries, with the name of the same option here."""


def describe_unknown(name: str, options: Iterable[str], *, only_if_close: bool = False) -> str | None:
    """Return the message for an unknown option.

    Args:
        name: The unknown name.
        options: The names that exist.
        only_if_close: Return None if no option has a similar name. This is for parameter groups, where users may
            store extra keys.
    """
    options = list(options)
    alias = ALIASES.get(name.lower(), name.lower())
    close = difflib.get_close_matches(alias, options, n=1, cutoff=0.75)
    if not close and only_if_close:
        return None
    suggestion = f"; did you mean {close[0]!r}?" if close else f"; the options are {', '.join(sorted(options))}"
    return f"unknown option {name!r}{suggestion}"


def normalize(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as groups store them: betas as a tuple, numpy numbers as Python's, 1-element tensors as 0-dim."""
    return {name: as_pair(value) if name == "betas" else as_scalar(value) for name, value in options.items()}


def check(rule: Rule, options: Mapping[str, Any]) -> None:
    """Check types and ranges of all options.

    Raises:
        ValueError: If a value is invalid; the message names the option.
        RuntimeError: If options contradict each other in a way for which torch.optim raises RuntimeError.
    """
    check_numbers(options)
    if "betas" in options:
        for name in ("lr", "betas"):  # As in torch: Adam refuses tensors with foreach=True, SGD does not.
            _check_no_tensor_with_foreach(name, options)
    check_ranges(options, _read)
    for name in FLAGS:
        if name in options:
            check_flag(name, options)
    for name in ("foreach", "fused"):
        if options[name] not in (None, True, False):
            raise ValueError(f"Invalid {name} value: {options[name]!r} (None, True or False)")
    seed = options["rounding_seed"]
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"Invalid rounding_seed value: {seed!r} (an integer from 0 to 2**63 - 1)")
    dtype = options["state_dtype"]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"Invalid state_dtype value: {dtype!r} (None or a floating-point torch.dtype)")
    if options["fused"] and options["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`")
    if options["fused"] and options["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    check_types(rule, options)
    rule.check(options)


def _read(value: Any) -> float | None:
    """Return the number, or None for a tensor on a device, since reading it would wait for the device."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.device.type == "cpu" else None
    return float(value)


def _check_no_tensor_with_foreach(name: str, options: Mapping[str, Any]) -> None:
    value = options.get(name)
    label, first = (f"{name}[0]", value[0]) if name == "betas" and value else (name, value)
    if isinstance(first, Tensor) and options["foreach"] and not options["capturable"]:
        raise ValueError(f"{label} as a Tensor is not supported for capturable=False and foreach=True")
