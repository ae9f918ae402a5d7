"""The options that every optimizer has, and the defaults of all options of a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .rules import Rule

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
    "moments": "float32",
    "second_moment": "element",
    "row_steps": False,
    "prepared": True,
    "stochastic_rounding": False,
    "track_alignment": True,
}


def defaults(rule: Rule) -> dict[str, Any]:
    """All options of an optimizer with this rule."""
    return {**rule.defaults, **{k: v for k, v in COMMON.items() if k not in rule.defaults}}
