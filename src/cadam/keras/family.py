"""The family as Keras optimizer classes, created from `cadam.rules.family.FAMILY`.

Arguments have the names and the order that Keras gives them. Type checkers read the signatures from ``family.pyi``,
which ``python tools/write_stubs.py`` generates.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras

from ..rules.defaults import own_options
from ..rules.family import FAMILY, Member
from .optimizer import KERAS_NAMES, Optimizer

ORDER = ("learning_rate", "weight_decay", "beta_1", "beta_2", "epsilon", "momentum", "nesterov")
"""The order of the arguments in Keras; other arguments follow."""

ARGUMENTS = {
    "learning_rate": "A number, or a Keras learning rate schedule.",
    "weight_decay": "Decoupled weight decay; None turns it off.",
    "beta_1": "Decay rate of the first moment, in [0, 1).",
    "beta_2": "Decay rate of the second moment, in [0, 1).",
    "epsilon": "Term added to the denominator for numerical stability.",
    "momentum": "Decay rate of the momentum; 0 is SGD without momentum.",
    "nesterov": "Whether to use Nesterov momentum.",
    "dampening": "None for the moving average of the CAdam paper, or the dampening of torch.optim.SGD.",
    "amsgrad": "Whether to divide by the running maximum of the bias-corrected second moment.",
    "initial_accumulator_value": "Initial value of the second moment.",
    "kwargs": "Arguments of every Keras optimizer, such as `weight_decay` (decoupled), `clipnorm` and `use_ema`.",
}
"""Description of every argument of the optimizers."""


def _signature(member: Member) -> inspect.Signature:
    """Return the signature of the constructor of a member of the family."""
    defaults = member.all_defaults
    arguments: dict[str, Any] = {"learning_rate": defaults["lr"]}
    if "weight_decay" in member.defaults:
        arguments["weight_decay"] = defaults["weight_decay"]
    for name in own_options(member.rule):
        if name == "betas":
            arguments |= dict(zip(("beta_1", "beta_2"), defaults["betas"], strict=True))
        elif name not in member.fixed:
            arguments[KERAS_NAMES.get(name, name)] = defaults[name]
    ordered = [*(name for name in ORDER if name in arguments), *(name for name in arguments if name not in ORDER)]
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name in ordered:
        default = arguments[name]
        annotation: Any = Any if name == "learning_rate" or default is None else type(default)
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
        )
    parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD, annotation=Any))
    return inspect.Signature(parameters, return_annotation=None)


def _class(member: Member, confidence: bool, base: type[Optimizer]) -> type[Optimizer]:
    """Return the optimizer class of a member of the family."""
    signature = _signature(member)

    def constructor(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        self, learning_rate = arguments.pop("self"), arguments.pop("learning_rate")
        keras_arguments = arguments.pop("kwargs")
        if "weight_decay" in arguments:
            keras_arguments["weight_decay"] = arguments.pop("weight_decay")
        Optimizer.__init__(self, learning_rate, arguments, keras_arguments)

    name = f"{'C' if confidence else ''}{member.name}"
    constructor.__name__, constructor.__qualname__ = "__init__", f"{name}.__init__"
    constructor.__signature__ = signature  # type: ignore[attr-defined]
    arguments = {key: ARGUMENTS.get(key, "Option of the rule.") for key in signature.parameters if key != "self"}
    example = f'model.compile(optimizer=cadam.keras.{name}(), loss="binary_crossentropy")'
    attributes = {
        "__module__": __name__,
        "__doc__": member.docstring(confidence, arguments, example),
        "__init__": constructor,
        "rule": member.rule,
        "confidence": confidence,
        "fixed": {option: value for option, value in member.fixed.items() if option in own_options(member.rule)},
    }
    return keras.saving.register_keras_serializable(package="cadam")(type(name, (base,), attributes))


__all__ = []
for _member in FAMILY:
    _base = Optimizer
    for _confidence in (False, True):
        _base = _class(_member, _confidence, _base)
        globals()[_base.__name__] = _base
        __all__ += [_base.__name__]
