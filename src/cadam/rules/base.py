"""What a rule is: the mathematics of one element, written once over plain operators.

A rule never sees where it runs. The engines call the same two functions with tensors, or with symbols
whose operations they record, so a rule may only use ``+ - * /`` and the functions of `f`
(``f.sqrt``, ``f.square``, ``f.sign``, ``f.maximum``; in `coefficients` also ``**`` and ``f.positive``),
and no ``if`` on values.
``f.square`` is for what goes into a second moment: where that is kept by row, it is the mean of the row's squares.
An ``if`` on which buffers or coefficients there are (``hasattr(s, "max_exp_avg_sq")``) is fine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """What a rule makes of one element: the parameter moves by ``-lr * step``.

    `momentum` is what confidence compares with the gradient; `state` holds the new value of each buffer.
    """

    step: Any
    momentum: Any
    state: dict[str, Any]


def _nothing_to_check(options: Options) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Rule:
    """One update rule.

    - `name`: how it is called in messages.
    - `defaults`: its options and their defaults; ``lr`` is one of them. ``weight_decay`` and
      ``decoupled_weight_decay`` may be given to change the default kind of decay.
    - `state`: from the options, the names of its buffers and the value each starts at.
    - `coefficients`: from the step `t` (counted from 1) and the options, the scalars that the update uses.
    - `update`: from the gradient `g`, the buffers `s` and the coefficients `c`, the `Step` of one element.
    - `late`: buffers that may start in the middle of a run, so that a checkpoint without them still fits.
    - `timeless`: the update does not depend on `t` beyond the first step, so that a checkpoint
      without a step count still fits.
    - `variants`: options under which it has other buffers or coefficients than by default.
    - `moments`: what kind of moment each buffer is, for storages other than float32: ``signed`` (first moments),
      ``positive`` (second moments) or ``maximum`` (the largest second moment so far).
    - `counts_steps`: from the options, whether any coefficient depends on `t`.
    - `check`: raises ValueError for options that do not go together.
    """

    name: str
    defaults: Options
    state: Callable[[Options], dict[str, float]]
    coefficients: Callable[[Any, Options, Any], dict[str, Any]]
    update: Callable[[Any, Any, Any, Any], Step]
    late: frozenset[str] = frozenset()
    timeless: bool = False
    variants: tuple[Options, ...] = ()
    moments: Mapping[str, str] = field(default_factory=dict)
    counts_steps: Callable[[Options], bool] = lambda options: True
    check: Callable[[Options], None] = _nothing_to_check

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a rule's name must be an identifier, as kernels are named after it; got {self.name!r}")
        if "lr" not in self.defaults:
            raise ValueError(f"the rule {self.name!r} needs a default for 'lr'")
        for buffer, kind in self.moments.items():
            if kind not in ("signed", "positive", "maximum"):
                raise ValueError(f"the rule {self.name!r}: {buffer} is {kind!r}, not signed, positive or maximum")
