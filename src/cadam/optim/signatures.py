"""Signatures and docstrings of the optimizer classes, built from the defaults of their rules.

A class of the family does not define a constructor. `add_constructor` gives it one whose signature names every option
with its type and default, so that `inspect.signature`, `help` and configuration libraries such as jsonargparse and
Hydra see all of them. Options in the rule's `defaults` can be passed by position, in the order of torch.optim; the
others are keyword-only. Type checkers do not run code: they read the same signatures from ``classes.pyi``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..rules import Rule
from ..rules.family import Member

Number = float | Tensor
Betas = tuple[Number, Number]

PARAMS = "An iterable of parameters, of (name, parameter) pairs, or of dicts with ``params`` and options of the group."

OPTIONS: dict[str, tuple[Any, str]] = {
    "lr": (Number, "Learning rate."),
    "betas": (Betas, "Decay rates of the first and the second moment, in [0, 1)."),
    "eps": (float, "Term added to the denominator for numerical stability."),
    "momentum": (float, "Decay rate of the momentum; 0 is SGD without momentum."),
    "dampening": (
        float | None,
        "None for the moving average of the CAdam paper, or the dampening of torch.optim.SGD in [0, 1].",
    ),
    "nesterov": (bool, "Whether to use Nesterov momentum."),
    "initial_accumulator": (float, "Initial value of the second moment."),
    "amsgrad": (bool, "Whether to divide by the running maximum of the bias-corrected second moment."),
    "weight_decay": (
        Number,
        "L2 penalty added to the gradient, or decoupled weight decay with `decoupled_weight_decay`. Sparse gradients "
        "decay only the rows they contain.",
    ),
    "decoupled_weight_decay": (
        bool,
        "Whether weight decay multiplies the parameter by ``1 - lr * weight_decay`` instead of changing the gradient.",
    ),
    "confidence": (
        bool,
        "Whether an element moves only where momentum and gradient agree in sign. Groups may differ: "
        '``{"params": tables, "confidence": False}``.',
    ),
    "confidence_after": (
        int,
        "The number of the update of a table's row with which its confidence mask begins; before, the row moves as "
        "without confidence. For sparse gradients; other parameters are masked from the first step on. It needs 4 "
        "bytes per row.",
    ),
    "sparse_updates": (
        str,
        '``"lazy"``: the moments of a row that a batch does not contain stay as they are, as in '
        'torch.optim.SparseAdam. ``"exact"``: they decay, so that the result is that of dense gradients. It needs '
        "confidence, no weight decay, and 4 bytes per row.",
    ),
    "foreach": (
        bool | None,
        "True requires the foreach engine, False the reference engine; None chooses for each parameter.",
    ),
    "maximize": (bool, "Whether to maximize the objective."),
    "capturable": (
        bool,
        "Whether step count and learning rate stay on the device, so that a CUDA graph can capture the step.",
    ),
    "differentiable": (bool, "Whether autograd can differentiate through the step."),
    "fused": (
        bool | None,
        "True requires a fused engine, False forbids it; None chooses the fastest engine that supports the parameter.",
    ),
    "state_dtype": (
        torch.dtype | None,
        "Dtype of the moments; by default the parameter's, but at least float32.",
    ),
    "moments": (
        str,
        'Storage of the moments: ``"float32"``, ``"bfloat16"`` or ``"int8"`` (one byte and a shared scale). The latter '
        "two use stochastic rounding, see `rounding_seed`; arithmetic stays float32.",
    ),
    "second_moment": (
        str,
        '``"element"``, or ``"row"`` for one second moment per row of a table: the mean of the row\'s squares. '
        "Parameters with dense gradients always have one per element.",
    ),
    "row_steps": (
        bool,
        "Whether the bias correction of a table's row counts the updates of that row instead of all steps.",
    ),
    "replay": (
        bool,
        "Whether a CUDA step that repeats the previous one is replayed with a single call. CADAM_REPLAY=0 turns replay "
        "off for the whole process.",
    ),
    "stochastic_rounding": (
        bool,
        "Whether bfloat16 parameters are rounded stochastically, so that small steps are not lost; on CUDA only.",
    ),
    "rounding_seed": (
        int,
        "Seed of stochastic rounding. The noise depends on it, on the position of the parameter in the optimizer and "
        "on the step, not on torch.manual_seed, so replicas stay equal. A parameter that has state keeps its seed.",
    ),
    "track_alignment": (bool, "Whether to count aligned elements; `alignment()` returns their share."),
}
"""Type and description of every option, by name."""


def signature(rule: Rule, defaults: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature of a constructor.

    Args:
        rule: Rule whose options can be passed by position.
        defaults: The default of every option, in order.
    """
    parameters = [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Any),
    ]
    for kind, names in (
        (inspect.Parameter.POSITIONAL_OR_KEYWORD, [name for name in defaults if name in rule.defaults]),
        (inspect.Parameter.KEYWORD_ONLY, [name for name in defaults if name not in rule.defaults]),
    ):
        for name in names:
            annotation = OPTIONS[name][0] if name in OPTIONS else Any
            parameters.append(inspect.Parameter(name, kind, default=defaults[name], annotation=annotation))
    return inspect.Signature(parameters, return_annotation=None)


def docstring(member: Member, confidence: bool) -> str:
    """Return the docstring of the class of a member of the family, without or with confidence."""
    options = {name: OPTIONS[name][1] if name in OPTIONS else "Option of the rule." for name in member.all_defaults}
    name = f"C{member.name}" if confidence else member.name
    example = f"optimizer = cadam.{name}(model.named_parameters(), lr={member.all_defaults['lr']})"
    return member.docstring(confidence, {"params": PARAMS, **options}, example)


def add_constructor(cls: type, initialize: Callable[..., None], rule: Rule, defaults: Mapping[str, Any]) -> None:
    """Give an optimizer class an ``__init__`` that names every option.

    Args:
        cls: The class.
        initialize: Function of self, the parameters and the options by name that does the work.
        rule: The rule of the class.
        defaults: The default of every option.
    """
    constructor_signature = signature(rule, defaults)

    def constructor(*args: Any, **options: Any) -> None:
        initialize(**constructor_signature.bind(*args, **options).arguments)

    constructor.__name__ = "__init__"
    constructor.__qualname__ = f"{cls.__qualname__}.__init__"
    constructor.__module__ = cls.__module__
    constructor.__signature__ = constructor_signature  # type: ignore[attr-defined]
    constructor.__annotations__ = {
        parameter.name: parameter.annotation
        for parameter in constructor_signature.parameters.values()
        if parameter.name != "self"
    } | {"return": type(None)}
    cls.__init__ = constructor  # type: ignore[misc]
