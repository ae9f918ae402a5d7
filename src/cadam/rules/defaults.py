"""The options that every optimizer shares, the defaults of all options of a rule, and the range of each number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from . import Options, Rule
from .moment_storage import STORAGE_DEFAULTS

COMMON: Mapping[str, Any] = {
    "weight_decay": 0.0,
    "confidence": True,
    "confidence_after": 0,
    "sparse_updates": "lazy",
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": False,
    "state_dtype": None,
    **STORAGE_DEFAULTS,
    "replay": True,
    "stochastic_rounding": False,
    "rounding_seed": 0,
    "track_alignment": True,
}
"""Options of every optimizer in addition to those of its rule, with their defaults.

The default of `confidence` is that of the optimizer's class: False for `Adam`, True for `CAdam`."""

NUMBERS = {
    "lr": "learning rate",
    "weight_decay": "weight_decay value",
    "eps": "epsilon value",
    "momentum": "momentum value",
    "initial_accumulator": "initial_accumulator",
}
"""Options that are one number each, with the term that error messages use for them."""


def defaults(rule: Rule) -> dict[str, Any]:
    """Return the defaults of all options of an optimizer with this rule."""
    return {**rule.defaults, **{k: v for k, v in COMMON.items() if k not in rule.defaults}}


def own_options(rule: Rule) -> list[str]:
    """Return the names of a rule's options without the learning rate and the options that all optimizers share."""
    return [name for name in rule.defaults if name != "lr" and name not in COMMON]


def check_ranges(o: Options, read: Callable[[Any], float | None]) -> None:
    """Check that every number among the options is in its range.

    Args:
        o: Options by name.
        read: Function that returns the value of an option as a float, or None if it cannot be read now.

    Raises:
        ValueError: If a number is out of range.
    """

    def check(value: Any, term: str, option: str, allowed: str, end: float) -> None:
        number = read(value)
        if number is not None and not 0 <= number < end:
            raise ValueError(f"Invalid {term}: {value} ({option} must be {allowed})")

    for name, term in NUMBERS.items():
        if name in o:
            check(o[name], term, name, "a finite number >= 0", math.inf)
    for i, beta in enumerate(o.get("betas", ())):
        check(beta, f"beta parameter at index {i}", f"betas[{i}]", "in [0, 1)", 1)
