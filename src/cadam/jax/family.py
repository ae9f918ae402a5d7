"""The family with optax's argument names: each optimizer is a chain of decay, rule and learning rate.

A name with c in front has confidence. From `mu_dtype` on, arguments are given by name, as optax has others in their
places. Arguments that all have:

- learning_rate: a number, or a schedule of optax's.
- mu_dtype: dtype of the first moment; by default the parameter's, and float32 for half precision.
- weight_decay: an L2 penalty, or with ``decoupled_weight_decay`` a shrinking by ``learning_rate * weight_decay``;
  a number or a schedule.
- mask: which parameters decay: a tree of booleans like the parameters, or a function that makes one of them.
- track_alignment: whether the share of elements whose momentum and gradient agree is counted, in every step.

Defaults are those of the classes of `cadam`, so the numbers are the same in every framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformationExtraArgs as Transformation

from ..rules import Rule
from ..rules.adabelief import ADABELIEF
from ..rules.adam import ADAM
from ..rules.lion import LION
from ..rules.radam import RADAM
from ..rules.sgdm import SGDM
from ..rules.yogi import YOGI
from .transform import scale_by_rule

Number = Any  # a float, or an array of one
Rate = Any  # a number, or a schedule of optax's
Recipe = Callable[[bool], Transformation]  # from whether there is confidence
P = ParamSpec("P")


def _both(recipe: Callable[P, Recipe]) -> tuple[Callable[P, Transformation], Callable[P, Transformation]]:
    """The optimizer without confidence and the one with it."""

    @wraps(recipe)
    def plain(*args: P.args, **kwargs: P.kwargs) -> Transformation:
        return recipe(*args, **kwargs)(False)

    @wraps(recipe)
    def confident(*args: P.args, **kwargs: P.kwargs) -> Transformation:
        return recipe(*args, **kwargs)(True)

    name = recipe.__name__.removeprefix("_")
    recipe.__qualname__ = plain.__name__ = plain.__qualname__ = name  # the recipe's for messages about its arguments
    confident.__name__ = confident.__qualname__ = f"c{name}"
    confident.__doc__ = f"{recipe.__doc__} With confidence: elements whose momentum and gradient disagree wait."
    return plain, confident


def _chain(
    rule: Rule,
    learning_rate: Rate,
    weight_decay: Rate,
    mask: Any,
    decoupled_weight_decay: bool,
    confidence: bool,
    **options: Any,
) -> Transformation:
    for name, value in {"learning_rate": learning_rate, "weight_decay": weight_decay}.items():
        if isinstance(value, str) or (isinstance(value, (int, float)) and not 0 <= value < math.inf):
            raise ValueError(f"{name} must be a finite number >= 0, or a schedule, got {value!r}")
    step = scale_by_rule(rule, confidence=confidence, **options)
    rate = optax.scale_by_learning_rate(learning_rate)
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return optax.chain(step, rate)
    decay = _in_float32(optax.add_decayed_weights(weight_decay, mask))
    return optax.chain(step, decay, rate) if decoupled_weight_decay else optax.chain(decay, step, rate)


def _in_float32(inner: optax.GradientTransformation) -> Transformation:
    """`inner`, which sees parameters in half precision as float32 and so computes in it."""

    def wide(p: Any) -> Any:
        return jnp.asarray(p, jnp.result_type(p, jnp.float32))

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return inner.update(updates, state, None if params is None else jax.tree.map(wide, params))

    return Transformation(inner.init, update_fn)


def _adam(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    mu_dtype: Any = None,
    amsgrad: bool = False,
    weight_decay: Rate = 0.0,
    mask: Any = None,
    decoupled_weight_decay: bool = False,
    track_alignment: bool = True,
) -> Recipe:
    """Adam; `amsgrad` takes the maximum of the corrected second moment."""
    return partial(
        _chain,
        ADAM,
        learning_rate,
        weight_decay,
        mask,
        decoupled_weight_decay,
        betas=(b1, b2),
        eps=eps,
        amsgrad=amsgrad,
        mu_dtype=mu_dtype,
        track_alignment=track_alignment,
    )


def _adamw(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    mu_dtype: Any = None,
    weight_decay: Rate = 1e-2,
    mask: Any = None,
    amsgrad: bool = False,
    track_alignment: bool = True,
) -> Recipe:
    """Adam with decoupled weight decay, on every element."""
    return _adam(
        learning_rate,
        b1,
        b2,
        eps,
        mu_dtype=mu_dtype,
        amsgrad=amsgrad,
        weight_decay=weight_decay,
        mask=mask,
        decoupled_weight_decay=True,
        track_alignment=track_alignment,
    )


def _amsgrad(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    mu_dtype: Any = None,
    weight_decay: Rate = 0.0,
    mask: Any = None,
    decoupled_weight_decay: bool = False,
    track_alignment: bool = True,
) -> Recipe:
    """Adam with ``amsgrad=True``."""
    return _adam(
        learning_rate,
        b1,
        b2,
        eps,
        mu_dtype=mu_dtype,
        amsgrad=True,
        weight_decay=weight_decay,
        mask=mask,
        decoupled_weight_decay=decoupled_weight_decay,
        track_alignment=track_alignment,
    )


def _sgdm(
    learning_rate: Rate,
    momentum: Number | None = 0.9,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
    *,
    dampening: Number | None = None,
    weight_decay: Rate = 0.0,
    mask: Any = None,
    decoupled_weight_decay: bool = False,
    track_alignment: bool = True,
) -> Recipe:
    """SGD with momentum: the moving average of the paper, or with ``dampening=0.0`` the sum of `optax.sgd`.

    Without a momentum (0 or None) it is plain SGD.
    """
    return partial(
        _chain,
        SGDM,
        learning_rate,
        weight_decay,
        mask,
        decoupled_weight_decay,
        momentum=0.0 if momentum is None else momentum,
        nesterov=nesterov,
        dampening=dampening,
        mu_dtype=accumulator_dtype,
        track_alignment=track_alignment,
    )


def _lion(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.99,
    *,
    mu_dtype: Any = None,
    weight_decay: Rate = 0.0,
    mask: Any = None,
    decoupled_weight_decay: bool = True,
    track_alignment: bool = True,
) -> Recipe:
    """Lion, with its decoupled weight decay."""
    return partial(
        _chain,
        LION,
        learning_rate,
        weight_decay,
        mask,
        decoupled_weight_decay,
        betas=(b1, b2),
        mu_dtype=mu_dtype,
        track_alignment=track_alignment,
    )


def _radam(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    mu_dtype: Any = None,
    weight_decay: Rate = 0.0,
    mask: Any = None,
    decoupled_weight_decay: bool = False,
    track_alignment: bool = True,
) -> Recipe:
    """RAdam as torch.optim.RAdam computes it: eps is added before the correction."""
    return partial(
        _chain,
        RADAM,
        learning_rate,
        weight_decay,
        mask,
        decoupled_weight_decay,
        betas=(b1, b2),
        eps=eps,
        mu_dtype=mu_dtype,
        track_alignment=track_alignment,
    )


def _yogi(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-3,
    *,
    mu_dtype: Any = None,
    initial_accumulator_value: Number = 1e-6,
    weight_decay: Rate = 0.0,
    mask: Any = None,
    decoupled_weight_decay: bool = False,
    track_alignment: bool = True,
) -> Recipe:
    """Yogi; the second moment starts at `initial_accumulator_value`."""
    return partial(
        _chain,
        YOGI,
        learning_rate,
        weight_decay,
        mask,
        decoupled_weight_decay,
        betas=(b1, b2),
        eps=eps,
        initial_accumulator=initial_accumulator_value,
        mu_dtype=mu_dtype,
        track_alignment=track_alignment,
    )


def _adabelief(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-16,
    *,
    mu_dtype: Any = None,
    weight_decay: Rate = 0.0,
    mask: Any = None,
    decoupled_weight_decay: bool = False,
    track_alignment: bool = True,
) -> Recipe:
    """AdaBelief."""
    return partial(
        _chain,
        ADABELIEF,
        learning_rate,
        weight_decay,
        mask,
        decoupled_weight_decay,
        betas=(b1, b2),
        eps=eps,
        mu_dtype=mu_dtype,
        track_alignment=track_alignment,
    )


adam, cadam = _both(_adam)
adamw, cadamw = _both(_adamw)
amsgrad, camsgrad = _both(_amsgrad)
sgdm, csgdm = _both(_sgdm)
lion, clion = _both(_lion)
radam, cradam = _both(_radam)
yogi, cyogi = _both(_yogi)
adabelief, cadabelief = _both(_adabelief)
