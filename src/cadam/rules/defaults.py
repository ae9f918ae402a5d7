"""The options that every optimizer has, the defaults of all options of a rule, and the range of each number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from . import Options, Rule
from .moment_storage import USUAL

# Options of every optimizer, beside those of its rule.
COMMON: Mapping[str, Any] = {
    "weight_decay": 0.0,
    "decoupled_weight_decay": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "state_dtype": None,
    **USUAL,
    "replay": True,
    "stochastic_rounding": False,
    "track_alignment": True,
}

# Those that are one number each, as messages call them.
NUMBERS = {
    "lr": "learning rate",
    "weight_decay": "weight_decay value",
    "eps": "epsilon value",
    "momentum": "momentum value",
    "initial_accumulator": "initial_accumulator",
}


def defaults(rule: Rule) -> dict[str, Any]:
    """All options of an optimizer with this rule."""
    return {**rule.defaults, **{k: v for k, v in COMMON.items() if k not in rule.defaults}}


def check_ranges(o: Options, known: Callable[[Any], float | None]) -> None:
    """Raise ValueError for a number out of range; `known` tells its value, or None where it cannot be known."""

    def check(value: Any, what: str, option: str, allowed: str, end: float) -> None:
        number = known(value)
        if number is not None and not 0 <= number < end:
            raise ValueError(f"Invalid {what}: {value} ({option} must be {allowed})")

    for name, what in NUMBERS.items():
        if name in o:
            check(o[name], what, name, "a finite number >= 0", math.inf)
    for i, beta in enumerate(o.get("betas", ())):
        check(beta, f"beta parameter at index {i}", f"betas[{i}]", "in [0, 1)", 1)
