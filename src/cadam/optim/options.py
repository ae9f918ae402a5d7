"""The options of a parameter group: what they are for, and which values they take.

Messages begin as torch.optim's do, so that code which matches them keeps working.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rules import Rule, moment_storage
from ..rules.defaults import NUMBERS, check_ranges

# Options that say how a step is run, not what it computes: a checkpoint does not change them.
HOW_IT_RUNS = (
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
FLAGS = (
    "amsgrad",
    "nesterov",
    "maximize",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
    "row_steps",
    "replay",
    "stochastic_rounding",
    "track_alignment",
)

# What other libraries call them.
ALIASES = {
    "alpha": "lr",
    "beta1": "betas",
    "beta2": "betas",
    "epsilon": "eps",
    "l2": "weight_decay",
    "learning_rate": "lr",
    "wd": "weight_decay",
}


def unknown(name: str, known: Iterable[str], *, only_if_close: bool = False) -> str | None:
    """What to say about an option nobody knows; None if it looks like a user's own tag and tags are fine."""
    known = list(known)
    alias = ALIASES.get(name.lower(), name.lower())
    close = difflib.get_close_matches(alias, known, n=1, cutoff=0.75)
    if not close and only_if_close:
        return None
    suggestion = f"; did you mean {close[0]!r}?" if close else f"; the options are {', '.join(sorted(known))}"
    return f"unknown option {name!r}{suggestion}"


def switch(variable: str) -> bool:
    """Is this variable of the environment not turned off? Raises ValueError if it says neither."""
    value = os.environ.get(variable, "")
    if value.lower() not in (*ON, *OFF, ""):
        raise ValueError(f"${variable} is {value!r}; it takes {', '.join(OFF)} or {', '.join(ON)}")
    return value.lower() not in OFF


ON, OFF = ("1", "true", "on"), ("0", "false", "off")


def normal(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options as groups keep them: betas as a tuple, numpy's numbers as Python's, tensors of one as 0-dim."""
    return {name: pair(value) if name == "betas" else _scalar(value) for name, value in given.items()}


def pair(betas: Any) -> Any:
    """The two betas: any sequence or array, for who keeps betas in a config; what has no order stays what it is."""
    if isinstance(betas, (str, Mapping, Set)):
        return betas
    try:
        return tuple(_scalar(beta) for beta in betas)
    except TypeError:
        return betas


def _scalar(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1:
        return value.item()
    return value.squeeze() if isinstance(value, Tensor) and value.dim() and value.numel() == 1 else value


def check(rule: Rule, o: Mapping[str, Any]) -> None:
    """Raise ValueError (RuntimeError where torch.optim does) for values out of range, naming the option."""
    for name, what in NUMBERS.items():
        if name in o:
            _one_number(o[name], what, name)
    if "betas" in o:
        _two_numbers(o["betas"])
        for name in ("lr", "betas"):  # torch.optim.Adam refuses these, SGD does not
            _no_tensor_in_lists(name, o)
    check_ranges(o, _known)
    for name in FLAGS:
        if name in o:  # not all rules have all
            _flag(name, o)
    for name in ("foreach", "fused"):
        if o[name] not in (None, True, False):
            raise ValueError(f"Invalid {name} value: {o[name]!r} (None, True or False)")
    dtype = o["state_dtype"]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"Invalid state_dtype value: {dtype!r} (None or a floating-point torch.dtype)")
    if o["fused"] and o["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`")
    if o["fused"] and o["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    moment_storage.check_storage_options(rule.moments, rule.state(o), rule.name, o, rule.counts_steps(o))
    rule.check(o)


def check_kinds(rule: Rule, o: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if what is to be a number is none, or moments cannot be stored so: groups are open to anyone.

    Only that. A number out of range is the user's own then, as in torch.optim, and shows in the parameters.
    """
    try:
        _flag("row_steps", o)
        moment_storage.check_storage_options(rule.moments, rule.state(o), rule.name, o, rule.counts_steps(o))
        for name, what in NUMBERS.items():
            if name in o:
                _one_number(o[name], what, name)
        if "betas" in o:
            _two_numbers(pair(o["betas"]))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; no parameter was changed") from None


def _flag(name: str, o: Mapping[str, Any]) -> None:
    if not isinstance(o[name], bool):
        raise ValueError(f"Invalid {name} value: {o[name]!r} (True or False)")


def _known(value: Any) -> float | None:
    """The number, which is not read from a device: that would wait for it."""
    if isinstance(value, Tensor):
        return float(value.detach()) if value.device.type == "cpu" else None
    return float(value)


def _one_number(value: Any, what: str, option: str) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {option} must be 1-element, got shape {tuple(value.shape)}")
    elif isinstance(_scalar(value), bool) or not isinstance(_scalar(value), Real):
        raise ValueError(f"Invalid {what}: {value!r} ({option} must be a number or a 1-element tensor)")


def _two_numbers(betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas!r} (two numbers in [0, 1), or two 1-element tensors)")
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise ValueError("betas must be either both floats or both Tensors")
    for i, beta in enumerate(betas):
        _one_number(beta, f"beta parameter at index {i}", f"betas[{i}]")


def _no_tensor_in_lists(name: str, o: Mapping[str, Any]) -> None:
    value = o.get(name)
    shown, first = (f"{name}[0]", value[0]) if name == "betas" and value else (name, value)
    if isinstance(first, Tensor) and o["foreach"] and not o["capturable"]:
        raise ValueError(f"{shown} as a Tensor is not supported for capturable=False and foreach=True")
