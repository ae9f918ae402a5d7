"""The update of one element around a rule: weight decay, confidence mask and step, written once for every engine.

    moments <- moments after the steps that the row missed      exact sparse updates
    g <- g / grad_scale                 gradient scaling
    g <- -g                             maximize
    g <- g + weight_decay * p           coupled (L2) weight decay; it takes part in the moments and in the mask
    step, momentum, moments <- rule(g)
    step <- 0 where momentum and g disagree in sign, or one of them is zero         confidence mask
    p <- p * (1 - lr * weight_decay)    decoupled weight decay (https://arxiv.org/abs/1711.05101), not masked
    p <- p - lr * step

The mask is in `confidence`. Moments are always updated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from . import Options, Rule, confidence


class ScalarFunctions:
    """The functions that a rule's `coefficients` may call, for Python numbers and torch tensors."""

    @staticmethod
    def sqrt(x: Any) -> Any:
        """Return the square root of x."""
        return x.sqrt() if hasattr(x, "sqrt") else math.sqrt(x)

    @staticmethod
    def maximum(x: Any, y: float) -> Any:
        """Return the larger of x and the number y."""
        return x.clamp_min(y) if hasattr(x, "clamp_min") else max(x, y)

    @staticmethod
    def positive(x: Any) -> Any:
        """Return 1 where x > 0, else 0."""
        return (x > 0).to(x.dtype) if hasattr(x, "to") else float(x > 0)


@dataclass(frozen=True)
class UpdateResult:
    """One element after its update.

    Attributes:
        param: New value of the parameter.
        state: New value of each buffer, by name.
        alignment: Positive where momentum and gradient agree in sign; None if it was not computed.
    """

    param: Any
    state: dict[str, Any]
    alignment: Any


@dataclass(frozen=True)
class Update:
    """The update of one element under the options of a parameter group. Equal updates do the same arithmetic.

    Attributes:
        rule: The rule that computes moments and step.
        confidence: Whether elements are masked where momentum and gradient disagree in sign.
        maximize: Whether the objective is maximized.
        decay: ``none``, ``l2``, ``decoupled``, or ``both`` for the general update of compiled kernels.
        unscale: Whether gradients are divided by a gradient scale first.
        tracks_alignment: Whether the alignment is computed even without confidence.
        ages: Whether the moments first make up for the steps that the row missed, by the rule's `age`.
    """

    rule: Rule
    confidence: bool
    maximize: bool = False
    decay: str = "none"
    unscale: bool = False
    tracks_alignment: bool = True
    ages: bool = False

    @classmethod
    def of(cls, rule: Rule, confidence: bool, o: Options, *, unscale: bool = False) -> Update:
        """Return the update that the options of a group ask for."""
        # The value of a tensor may change between steps, so a tensor always counts as weight decay.
        decays = not isinstance(o["weight_decay"], (int, float)) or o["weight_decay"] != 0
        kind = "decoupled" if o["decoupled_weight_decay"] else "l2"
        return cls(rule, confidence, o["maximize"], kind if decays else "none", unscale, o["track_alignment"])

    @property
    def general(self) -> Update:
        """The update that covers every option of the rule by its coefficients, so that one kernel serves all of them.

        It always has the mask. A compiled kernel masks where ``alignment <= threshold``; a threshold of NaN turns the
        mask off, since no comparison with NaN is true.
        """
        return Update(self.rule, confidence=True, decay="both", unscale=True, ages=self.ages)

    @property
    def neutral_coefficients(self) -> dict[str, float]:
        """Values that turn the features of `general` off that this update does not have; NaN turns the mask off."""
        return {"l2": 0.0, "shrink": 1.0, "unscale": 1.0, "threshold": 0.0 if self.confidence else math.nan}

    def general_coefficients(self, t: Any, o: Options, f: Any, grad_scale: Any = None) -> dict[str, Any]:
        """Return all coefficients with which `general` computes this update; `unscale` has the sign of `maximize`."""
        c = {**self.neutral_coefficients, **self.coefficients(t, o, f, grad_scale)}
        if self.maximize:
            c["unscale"] = -c["unscale"]
        return c

    def coefficients(self, t: Any, o: Options, f: Any, grad_scale: Any = None) -> dict[str, Any]:
        """Return every scalar that one step needs, by name.

        Args:
            t: Number of the step, counted from 1.
            o: Options of the parameter group.
            f: Function set for scalars, such as `ScalarFunctions`.
            grad_scale: Factor by which the gradients are too large, if `unscale` is set.
        """
        c = {**self.rule.coefficients(t, o, f), "lr": o["lr"]}
        if self.decay == "l2":
            c["l2"] = o["weight_decay"]
        if self.decay == "decoupled":
            c["shrink"] = 1 - o["lr"] * o["weight_decay"]
        if self.unscale:
            c["unscale"] = 1 / grad_scale
        return c

    def __call__(
        self, p: Any, g: Any, state: Mapping[str, Any], coefficients: Mapping[str, Any], f: Any
    ) -> UpdateResult:
        """Update one element.

        Args:
            p: Parameter.
            g: Gradient.
            state: Buffers of the rule, by name.
            coefficients: Scalars of this step, from `coefficients` or `general_coefficients`.
            f: Function set of the engine that runs the update.
        """
        c, s = SimpleNamespace(**coefficients), SimpleNamespace(**state)
        if self.ages and self.rule.age is not None:
            s = SimpleNamespace(**self.rule.age(s, c, f))
        if self.unscale:
            g = g * c.unscale
        if self.maximize:
            g = -g
        if self.decay == "l2":
            g = g + p * c.l2
        if self.decay == "both":
            g = g + f.scaled(p, c.l2)  # 0 * infinity is NaN; `scaled` is 0 wherever the factor is 0
        result = self.rule.update(g, s, c, f)
        alignment, step = None, result.step
        if self.confidence or self.tracks_alignment:
            alignment = confidence.agreement(result.momentum, g, f)
        if self.confidence:
            step = confidence.mask(alignment, step, f)
        if self.decay in ("decoupled", "both"):
            p = p * c.shrink
        return UpdateResult(p - step * c.lr, result.state, alignment)
