"""The whole update of one element: decay, rule, confidence, step. Written once, for every engine.

g <- g / grad_scale                 (gradient scaling)
g <- -g                             (maximize)
g <- g + weight_decay * p           (coupled decay: takes part in moments and mask)
rule: moments, step, momentum
step <- 0 where momentum and g disagree in sign or one is zero      (confidence)
p <- p * (1 - lr * weight_decay)    (decoupled decay: every element, masked or not)
p <- p - lr * step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import Options, Rule


class Scalars:
    """The functions that a rule's `coefficients` may call, on numbers and on tensors."""

    @staticmethod
    def sqrt(x: Any) -> Any:
        return x.sqrt() if hasattr(x, "sqrt") else math.sqrt(x)

    @staticmethod
    def maximum(x: Any, y: float) -> Any:
        return x.clamp_min(y) if hasattr(x, "clamp_min") else max(x, y)

    @staticmethod
    def positive(x: Any) -> Any:
        """1 where x > 0, else 0."""
        return (x > 0).to(x.dtype) if hasattr(x, "to") else float(x > 0)


class Named:
    """Values by name, as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Moved:
    """One element after its update. `alignment` is positive where momentum and gradient agree in sign."""

    param: Any
    state: dict[str, Any]
    alignment: Any


@dataclass(frozen=True)
class Update:
    """The update that a group's options ask for; equal updates are the same arithmetic."""

    rule: Rule
    confidence: bool
    maximize: bool = False
    decay: str = "none"  # or "l2", "decoupled", "both"
    unscale: bool = False
    aligned: bool = True  # is the alignment wanted, even without confidence?

    @classmethod
    def of(cls, rule: Rule, confidence: bool, o: Options, *, unscale: bool = False) -> Update:
        # What is no plain number, such as a tensor, may change unnoticed, so it always counts as a decay.
        decays = not isinstance(o["weight_decay"], (int, float)) or o["weight_decay"] != 0
        kind = "decoupled" if o["decoupled_weight_decay"] else "l2"
        return cls(rule, confidence, o["maximize"], kind if decays else "none", unscale, o["track_alignment"])

    @property
    def general(self) -> Update:
        """The update that covers every option of the rule by its coefficients, for engines that compile one kernel.

        Confidence is on; a compiled kernel holds where ``alignment <= threshold``, and no number is <= NaN.
        """
        return Update(self.rule, confidence=True, decay="both", unscale=True)

    @property
    def neutral(self) -> dict[str, float]:
        """The scalars of `general` beyond those of this update."""
        return {"l2": 0.0, "shrink": 1.0, "unscale": 1.0, "threshold": 0.0 if self.confidence else math.nan}

    def general_coefficients(self, t: Any, o: Options, f: Any, grad_scale: Any = None) -> dict[str, Any]:
        """The scalars with which `general` computes this update, neutral where an option is off."""
        c = {**self.neutral, **self.coefficients(t, o, f, grad_scale)}
        if self.maximize:
            c["unscale"] = -c["unscale"]
        return c

    def coefficients(self, t: Any, o: Options, f: Any, grad_scale: Any = None) -> dict[str, Any]:
        """Every scalar that one step needs, by name."""
        c = {**self.rule.coefficients(t, o, f), "lr": o["lr"]}
        if self.decay == "l2":
            c["l2"] = o["weight_decay"]
        if self.decay == "decoupled":
            c["shrink"] = 1 - o["lr"] * o["weight_decay"]
        if self.unscale:
            c["unscale"] = 1 / grad_scale
        return c

    def __call__(self, p: Any, g: Any, state: Mapping[str, Any], coefficients: Mapping[str, Any], f: Any) -> Moved:
        """Move the element `p` with gradient `g`; `f` are the functions of the engine that runs it."""
        c, s = Named(coefficients), Named(state)
        if self.unscale:
            g = g * c.unscale
        if self.maximize:
            g = -g
        if self.decay == "l2":
            g = g + p * c.l2
        if self.decay == "both":
            g = g + f.scaled(p, c.l2)  # no decay must not make a NaN of an infinite parameter
        moved = self.rule.update(g, s, c, f)
        alignment, step = None, moved.step
        if self.confidence or self.aligned:
            # Never the product m * g: it underflows. A NaN in the momentum stays one here, and is not masked.
            alignment = moved.momentum * f.sign(g)
        if self.confidence:
            step = f.hold(alignment, step)
        if self.decay in ("decoupled", "both"):
            p = p * c.shrink
        return Moved(p - step * c.lr, moved.state, alignment)
