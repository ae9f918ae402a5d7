"""The contract of an update rule: the mathematics of one element, written once over plain operators.

A rule does not know where it runs. Engines call its functions with tensors, arrays or recorded symbols
(`cadam.codegen.trace`), so a rule may only use ``+ - * /`` and the functions of `f`: ``f.sqrt``, ``f.square``,
``f.sign`` and ``f.maximum``, and in `coefficients` also ``**`` and ``f.positive`` (1 where its argument is positive,
else 0). It must not branch on values. A branch on the buffers or coefficients that exist
(``hasattr(s, "max_exp_avg_sq")``) is fine.

Use ``f.square`` for the square that enters a second moment: with ``second_moment="row"`` it is the mean square of the
row instead of the square of the element.

Weight decay, the confidence mask and the step are the same for every rule; they are in `cadam.rules.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Options = Mapping[str, Any]
"""The options of a parameter group, by name."""


@dataclass(frozen=True)
class Step:
    """The result of a rule for one element.

    Attributes:
        step: Direction of the step; the parameter changes by ``-lr * step``.
        momentum: The value whose sign the confidence mask compares with the sign of the gradient.
        state: New value of each buffer, by name.
    """

    step: Any
    momentum: Any
    state: dict[str, Any]


def _accept_any(options: Options) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Rule:
    """One update rule, such as Adam.

    Attributes:
        name: Name in messages and in generated kernels; a Python identifier.
        defaults: The options of the rule with their defaults, in the order of the constructor's positional arguments;
            ``lr`` must be one of them. It may contain common options (`cadam.rules.defaults.COMMON`), such as
            ``weight_decay``, to change their defaults or to make them positional.
        state: Function of the options that returns the initial value of each buffer, by name.
        coefficients: Function of the step number (counted from 1), the options and the function set `f` that returns
            the scalars that `update` uses, by name.
        update: Function of the gradient `g`, the buffers `s`, the coefficients `c` and the function set `f` that
            returns the `Step` of one element.
        optional_buffers: Buffers that may start in the middle of a run, so that a checkpoint without them can still be
            loaded.
        step_independent: Whether the update depends on the step number in the first step at most, so that a checkpoint
            without a step count can still be loaded.
        variants: Option values that add or remove buffers or coefficients. A kernel is compiled for each.
        moments: The kind of each buffer, which quantized storage needs to know: ``signed`` for first moments,
            ``positive`` for second moments, ``maximum`` for a running maximum of second moments.
        counts_steps: Function of the options that returns whether any coefficient depends on the step number.
        check: Function of the options that raises ValueError for options that contradict each other.
        aging: Function of the number of missed steps, the options and the function set `f` that returns the scalars
            that `age` uses, by name. The names must differ from those of `coefficients`.
        age: Function of the buffers `s`, the scalars `c` of `aging` and the function set `f` that returns the buffers
            after the missed steps: steps in which the gradient was zero. None if the rule does not support
            ``sparse_updates="exact"``. The confidence mask keeps the parameter itself in place in these steps.
        doc: Description with the formula and the paper, which the optimizers of this rule show in their docstrings.

    Example:
        SGD without momentum::

            Rule(
                name="sgd",
                defaults={"lr": 1e-3},
                state=lambda o: {},
                coefficients=lambda t, o, f: {},
                update=lambda g, s, c, f: Step(step=g, momentum=g, state={}),
            )
    """

    name: str
    defaults: Options
    state: Callable[[Options], dict[str, float]]
    coefficients: Callable[[Any, Options, Any], dict[str, Any]]
    update: Callable[[Any, Any, Any, Any], Step]
    optional_buffers: frozenset[str] = frozenset()
    step_independent: bool = False
    variants: tuple[Options, ...] = ()
    moments: Mapping[str, str] = field(default_factory=dict)
    counts_steps: Callable[[Options], bool] = lambda options: True
    check: Callable[[Options], None] = _accept_any
    aging: Callable[[Any, Options, Any], dict[str, Any]] = lambda missed, options, f: {}
    age: Callable[[Any, Any, Any], dict[str, Any]] | None = None
    doc: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"a rule's name must be an identifier, as kernels are named after it; got {self.name!r}")
        if "lr" not in self.defaults:
            raise ValueError(f"the rule {self.name!r} needs a default for 'lr'")
        for buffer, kind in self.moments.items():
            if kind not in ("signed", "positive", "maximum"):
                raise ValueError(f"the rule {self.name!r}: {buffer} is {kind!r}, not signed, positive or maximum")
