"""The family as optax optimizers: each is a chain of weight decay, rule and learning rate.

They are created from `cadam.rules.family.FAMILY`: `adam` and `cadam` (with confidence), `adamw` and `cadamw`, and so
on. Arguments have optax's names, and the defaults are those of the classes of `cadam`, so results are the same in every
framework. Type checkers read the signatures from ``family.pyi``, which ``python tools/write_stubs.py`` generates.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformationExtraArgs as Transformation

from ..rules.defaults import own_options
from ..rules.family import FAMILY, Member
from .transform import scale_by_rule

POSITIONAL = ("learning_rate", "b1", "b2", "eps", "momentum", "nesterov", "accumulator_dtype")
"""Arguments that can be passed by position, in optax's order. For the other positions, optax has arguments that the
family does not have (such as `eps_root`), so everything else is keyword-only."""

ARGUMENTS = {
    "learning_rate": "A number or an optax schedule.",
    "b1": "Decay rate of the first moment, in [0, 1).",
    "b2": "Decay rate of the second moment, in [0, 1).",
    "eps": "Term added to the denominator for numerical stability.",
    "momentum": "Decay rate of the momentum; 0 or None is SGD without momentum.",
    "nesterov": "Whether to use Nesterov momentum.",
    "dampening": "None for the moving average of the CAdam paper, or the dampening of torch.optim.SGD; 0 is optax.sgd.",
    "amsgrad": "Whether to divide by the running maximum of the bias-corrected second moment.",
    "initial_accumulator_value": "Initial value of the second moment.",
    "accumulator_dtype": "Dtype of the momentum; by default the parameter's, but at least float32.",
    "mu_dtype": "Dtype of the first moment; by default the parameter's, but at least float32.",
    "weight_decay": "L2 penalty, or decoupled weight decay with `decoupled_weight_decay`; a number or a schedule.",
    "mask": "The parameters that decay: a tree of booleans like the parameters, or a function that returns one.",
    "decoupled_weight_decay": "Whether weight decay is decoupled: ``learning_rate * weight_decay * param``.",
    "track_alignment": "Whether to count the elements whose momentum and gradient agree; see `RuleState.alignment`.",
}
"""Description of every argument of the optimizers."""


def _arguments(member: Member) -> dict[str, Any]:
    """Return the default of every argument of a member, by optax's names."""
    defaults = member.all_defaults
    arguments: dict[str, Any] = {"learning_rate": inspect.Parameter.empty}
    for name in own_options(member.rule):
        if name == "betas":
            arguments |= dict(zip(("b1", "b2"), defaults["betas"], strict=True))
        elif name not in member.fixed:
            arguments[_OPTAX_NAMES.get(name, name)] = defaults[name]
    arguments["accumulator_dtype" if "momentum" in arguments else "mu_dtype"] = None
    arguments |= {"weight_decay": defaults["weight_decay"], "mask": None}
    if "decoupled_weight_decay" not in member.fixed:
        arguments["decoupled_weight_decay"] = defaults["decoupled_weight_decay"]
    return {**arguments, "track_alignment": True}


_OPTAX_NAMES = {"initial_accumulator": "initial_accumulator_value"}
_TYPES = {"nesterov": bool, "amsgrad": bool, "decoupled_weight_decay": bool, "track_alignment": bool}


def _signature(member: Member) -> inspect.Signature:
    arguments = _arguments(member)
    positional = [name for name in POSITIONAL if name in arguments]
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if name in positional else inspect.Parameter.KEYWORD_ONLY,
            default=arguments[name],
            annotation=_TYPES.get(name, Any),
        )
        for name in [*positional, *(name for name in arguments if name not in positional)]
    ]
    return inspect.Signature(parameters, return_annotation=Transformation)


def _optimizer(member: Member, confidence: bool) -> Callable[..., Transformation]:
    """Return the function that makes an optax optimizer of a member of the family."""
    signature = _signature(member)

    def make(*args: Any, **kwargs: Any) -> Transformation:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{make.__name__}() {error}") from None
        bound.apply_defaults()
        return _chain(member, confidence, **bound.arguments)

    make.__name__ = make.__qualname__ = f"{'c' if confidence else ''}{member.name.lower()}"
    make.__signature__ = signature  # type: ignore[attr-defined]
    make.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    make.__annotations__["return"] = Transformation
    arguments = {name: ARGUMENTS.get(name, "Option of the rule.") for name in signature.parameters}
    example = f"optimizer = cadam.jax.{make.__name__}(learning_rate={member.all_defaults['lr']})"
    make.__doc__ = member.docstring(confidence, arguments, example)
    return make


def _chain(
    member: Member,
    confidence: bool,
    *,
    learning_rate: Any,
    weight_decay: Any,
    mask: Any,
    mu_dtype: Any = None,
    accumulator_dtype: Any = None,
    decoupled_weight_decay: bool | None = None,
    track_alignment: bool,
    **arguments: Any,
) -> Transformation:
    """Return the chain of weight decay, rule and learning rate."""
    for name, value in {"learning_rate": learning_rate, "weight_decay": weight_decay}.items():
        if isinstance(value, str) or (isinstance(value, (int, float)) and not 0 <= value < math.inf):
            raise ValueError(f"{name} must be a finite number >= 0, or a schedule, got {value!r}")
    step = scale_by_rule(
        member.rule,
        confidence=confidence,
        mu_dtype=mu_dtype or accumulator_dtype,
        track_alignment=track_alignment,
        **_rule_options(member, arguments),
    )
    rate = optax.scale_by_learning_rate(learning_rate)
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return optax.chain(step, rate)
    decay = _in_float32(optax.add_decayed_weights(weight_decay, mask))
    if decoupled_weight_decay is None:
        decoupled_weight_decay = member.fixed["decoupled_weight_decay"]
    return optax.chain(step, decay, rate) if decoupled_weight_decay else optax.chain(decay, step, rate)


def _rule_options(member: Member, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the rule from arguments with optax's names."""
    names = {optax_name: name for name, optax_name in _OPTAX_NAMES.items()}
    options = {names.get(name, name): value for name, value in arguments.items() if name not in ("b1", "b2")}
    if "b1" in arguments:
        options["betas"] = (arguments["b1"], arguments["b2"])
    if options.get("momentum", 0.0) is None:
        options["momentum"] = 0.0
    fixed = {name: value for name, value in member.fixed.items() if name in own_options(member.rule)}
    return {**options, **fixed}


def _in_float32(inner: optax.GradientTransformation) -> Transformation:
    """Return a transformation that passes half-precision parameters to `inner` as float32."""

    def widen(p: Any) -> Any:
        return jnp.asarray(p, jnp.result_type(p, jnp.float32))

    def update_fn(updates: Any, state: Any, params: Any = None, *, missed: Any = None, **extra: Any) -> Any:
        if missed is not None:
            raise ValueError(
                "sparse_updates='exact' needs weight_decay=0: the dense algorithm decays rows that a batch does not "
                "contain, before their lookup"
            )
        return inner.update(updates, state, None if params is None else jax.tree.map(widen, params))

    return Transformation(inner.init, update_fn)


__all__ = []
for _member in FAMILY:
    for _confidence in (False, True):
        _make = _optimizer(_member, _confidence)
        globals()[_make.__name__] = _make
        __all__ += [_make.__name__]
