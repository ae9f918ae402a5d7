"""Tables of the coefficients by which compiled kernels age the moments of a row (`sparse_updates="exact"`).

When a row appears again, its moments first decay by the steps that it missed. The kernel looks the coefficients up by
the number of missed steps. They converge, so a table ends where they no longer change, or earlier, where it covers
all steps so far.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from ..numpy_functions import NumpyFunctions
from ..rules import Rule
from ..rules.sparse_updates import MAX_STEP, aging_options, read_aging_options
from .base import ParamSlot, Refusal
from .resolved_group import ResolvedGroup

MIN_ROWS = 1024
"""A table has more entries than this, so that it rarely grows, unless its coefficients stop changing earlier."""


def aging_refusal(group: ResolvedGroup, slot: ParamSlot) -> Refusal | None:
    """Return why the aging table of a parameter cannot be built, or None if it can be, or is not needed."""
    if slot.last_steps is None or max_missed(group, slot.work_dtype) is not None:
        return None
    return Refusal.unsupported(f"has sparse_updates='exact' for moments that decay within {MAX_STEP:,} steps")


def max_missed(group: ResolvedGroup, dtype: torch.dtype) -> int | None:
    """Return a number of missed steps from which on the aging coefficients are constant.

    Returns None if they still change at `MAX_STEP` missed steps.
    """
    rule = group.update.rule
    return _max_missed(rule, aging_options(rule, group.numbers), dtype == torch.float64)


@cache
def _max_missed(rule: Rule, numbers: tuple[float, ...], is_double: bool) -> int | None:
    limit = _aging_coefficients(rule, numbers, np.array([2.0**50]), is_double)
    for power in range(4, MAX_STEP.bit_length()):
        if np.array_equal(_aging_coefficients(rule, numbers, np.array([2.0**power]), is_double), limit):
            return 1 << power
    return None


def aging_table(group: ResolvedGroup, step: float, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Return the aging coefficients for every number of steps that a row may have missed before this step.

    Args:
        group: The resolved options of the parameter's group.
        step: The number of the step that is about to be taken.
        dtype: The dtype of the arithmetic.

    Returns:
        An array whose entry n has the coefficients for n missed steps. Rows that missed more steps use the last entry.
    """
    rule = group.update.rule
    most = max_missed(group, dtype)
    assert most is not None
    enough = max(MIN_ROWS, 1 << int(step).bit_length())
    return _aging_rows(rule, aging_options(rule, group.numbers), min(enough, most), dtype == torch.float64)


@lru_cache(maxsize=64)
def _aging_rows(rule: Rule, numbers: tuple[float, ...], most: int, is_double: bool) -> np.ndarray[Any, Any]:
    return _aging_coefficients(rule, numbers, np.arange(most + 1, dtype=np.float64), is_double)


def _aging_coefficients(
    rule: Rule, numbers: tuple[float, ...], missed: np.ndarray[Any, np.dtype[np.float64]], is_double: bool
) -> np.ndarray[Any, Any]:
    """Return the aging coefficients: a row for each number of missed steps, columns in the order of the kernel."""
    values = rule.aging(missed, read_aging_options(rule, numbers), NumpyFunctions).values()
    columns = [np.broadcast_to(np.asarray(value, np.float64), missed.shape) for value in values]
    table = np.stack(columns, 1) if columns else np.zeros((len(missed), 0))
    return np.ascontiguousarray(table, np.float64 if is_double else np.float32)
