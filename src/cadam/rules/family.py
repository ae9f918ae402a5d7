"""The optimizers of the family: a rule and its usual defaults under a well-known name.

Each entry of `FAMILY` becomes two optimizers in every framework, one without and one with confidence: the classes
`cadam.Adam` and `cadam.CAdam`, the optax optimizers `cadam.jax.adam` and `cadam.jax.cadam`, and the Keras optimizers
`cadam.keras.Adam` and `cadam.keras.CAdam`. An optimizer with confidence moves an element only where momentum and
gradient agree in sign.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import Rule
from .adabelief import ADABELIEF
from .adam import ADAM
from .defaults import defaults
from .lion import LION
from .radam import RADAM
from .sgdm import SGDM
from .yogi import YOGI


@dataclass(frozen=True)
class Member:
    """An optimizer of the family.

    Attributes:
        name: Name of its class without confidence; "C" is put in front of it for the class with confidence.
        rule: Its rule.
        defaults: Defaults that differ from those of the rule.
        fixed: Options that define the optimizer, such as AMSGrad's maximum: they cannot have another value.
        summary: First line of the docstring, if it differs from that of the rule.
    """

    name: str
    rule: Rule
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""

    @property
    def all_defaults(self) -> dict[str, Any]:
        """The default of every option, in the order of the constructor."""
        return {**defaults(self.rule), **self.defaults, **self.fixed}

    def docstring(self, confidence: bool, arguments: Mapping[str, str], example: str) -> str:
        """Return the docstring of the optimizer: what it computes, with formula and papers, and its arguments.

        Args:
            confidence: Whether the optimizer has confidence.
            arguments: Description of every argument of the constructor, by name.
            example: A line of code that creates the optimizer.
        """
        paragraphs = [self.summary, self.rule.doc.strip()]
        if confidence:
            paragraphs[:0] = [f"{self.name} with confidence: {CONFIDENCE}", MASK]
            paragraphs.append(PAPER)
        described = [
            textwrap.fill(f"{name}: {text}", 118, initial_indent=4 * " ", subsequent_indent=8 * " ")
            for name, text in arguments.items()
        ]
        paragraphs += ["\n".join(["Args:", *described]), f"Example:\n    >>> {example}"]
        return "\n\n".join(filter(None, paragraphs)) + "\n"


CONFIDENCE = "an element moves only where momentum and gradient agree in sign."
MASK = "    p <- p - lr * step      only where sign(momentum) = sign(g), and neither is 0"
"""The update with confidence in the notation of the rules, for docstrings."""
PAPER = """\
Confidence is introduced in "CAdam: Confidence-Based Optimization for Online Learning"
(https://arxiv.org/abs/2411.19647)."""

FAMILY = (
    Member("Adam", ADAM),
    Member(
        "AdamW",
        ADAM,
        defaults={"weight_decay": 1e-2},
        fixed={"decoupled_weight_decay": True},
        summary="AdamW: Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101).",
    ),
    Member(
        "AmsGrad",
        ADAM,
        fixed={"amsgrad": True},
        summary="AMSGrad: Adam with ``amsgrad=True`` (https://arxiv.org/abs/1904.09237).",
    ),
    Member("SGDM", SGDM),
    Member("Lion", LION),
    Member("RAdam", RADAM),
    Member("Yogi", YOGI),
    Member("AdaBelief", ADABELIEF),
)
