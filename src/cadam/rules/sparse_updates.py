"""The options `sparse_updates` and `confidence_after` of tables with sparse gradients.

`sparse_updates` says what happens to the moments of a table's row in steps whose batch does not contain it:

- ``lazy``: nothing, as in torch.optim.SparseAdam. The moments stay as they were until the row appears again.
- ``exact``: they decay, as in the dense algorithm. Each row stores the step of its last update. When it appears again,
  its moments first make up for the steps that it missed (`Rule.age`), so the result is that of dense gradients.

Exact updates need confidence: an element whose gradient is zero is masked, so a row that was missed has not moved.
Without confidence, or with weight decay, the dense algorithm moves such rows, and a lookup would have to know that.

`confidence_after` is the number of the update of a row with which its confidence mask begins. Before, the row moves as
without confidence: a rare row has too few gradients for its momentum to mean much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .base import Options, Rule
from .defaults import defaults, own_options

SPARSE_UPDATES = ("lazy", "exact")
"""The values of the option."""
LAST_STEPS = "row_last_steps"
"""State key of the step of each row's last update."""
AGING_OPTIONS = "row_aging_options"
"""State key of the rule's options that the rows have aged by since their last updates, see `aging_options`."""
MAX_STEP = 1 << 24
"""The step count up to which float32 counts exactly."""
MAX_CONFIDENCE_AFTER = 1 << 22
"""The largest value of `confidence_after`: kernels look the mask up by the number of updates."""


def counts_updates(o: Options) -> bool:
    """Whether the confidence mask depends on the number of updates of a row, which the state then counts."""
    return bool(o["confidence"] and o["confidence_after"] > 1)


def check_confidence_after(value: Any) -> None:
    """Raise ValueError unless the value is the number of an update that kernels can look up."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_CONFIDENCE_AFTER:
        raise ValueError(
            f"Invalid confidence_after value: {value!r} (the number of a row's update, an integer from 0 to "
            f"{MAX_CONFIDENCE_AFTER:,})"
        )


def check_sparse_updates(rule: Rule, o: Options) -> None:
    """Check both options and that all others allow exact updates.

    Raises:
        ValueError: If a value is invalid, or exact updates are not possible.
    """
    after = o["confidence_after"]
    check_confidence_after(after)
    if after and not o["confidence"]:
        raise ValueError(
            f"confidence_after={after} needs confidence=True: without it there is no mask that could begin"
        )
    if o["sparse_updates"] not in SPARSE_UPDATES:
        raise ValueError(f"Invalid sparse_updates value: {o['sparse_updates']!r} ('lazy' or 'exact')")
    if o["sparse_updates"] == "lazy":
        return
    problem = _problem(rule, o)
    if problem is not None:
        raise ValueError(f"sparse_updates='exact' {problem}")


def _problem(rule: Rule, o: Options) -> str | None:
    if rule.age is None:
        return f"needs a rule that says how its state ages without a gradient (Rule.age), and {rule.name!r} does not"
    if not o["confidence"]:
        return "needs confidence=True: without the mask, the dense algorithm moves rows that a batch does not contain"
    if counts_updates(o):
        return "does not support confidence_after: the dense algorithm moves rows without a mask in every step"
    if not isinstance(o["weight_decay"], (int, float)) or o["weight_decay"] != 0:
        return (
            "needs weight_decay=0: the dense algorithm decays rows that a batch does not contain, before their lookup"
        )
    if o["second_moment"] != "element":
        return "needs second_moment='element': dense gradients have no second moment of a row"
    for name in ("row_steps", "capturable", "differentiable"):
        if o[name]:
            return f"does not support {name}=True"
    if any(not isinstance(x, (int, float, type(None))) for x in _values(rule, o)):
        return "needs the options of the rule as plain numbers, not as tensors"
    return None


def _values(rule: Rule, o: Options) -> list[Any]:
    values = [o[name] for name in own_options(rule)]
    return [x for value in values for x in (value if isinstance(value, (tuple, list)) else (value,))]


def aging_options(rule: Rule, o: Options) -> tuple[float, ...]:
    """Return the values of the rule's own options as numbers, in the order of its defaults; None as NaN."""
    return tuple(math.nan if value is None else float(value) for value in _values(rule, o))


def read_aging_options(rule: Rule, numbers: Sequence[float]) -> dict[str, Any]:
    """Return all options of a rule: its own from the result of `aging_options`, defaults for the others."""
    o, rest = defaults(rule), [None if math.isnan(x) else x for x in numbers]
    for name in own_options(rule):
        count = len(o[name]) if isinstance(o[name], tuple) else 0
        taken, rest = rest[: count or 1], rest[count or 1 :]
        o[name] = tuple(taken) if count else taken[0]
    return o
