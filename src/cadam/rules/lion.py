"""Lion: the sign of an interpolation between momentum and gradient.

    c = m + (1-b1)(g - m)       step = sign(c)       m <- m + (1-b2)(g - m)

Confidence is tested with c, the interpolant whose sign Lion takes. ``c - c`` is zero unless c is not finite:
the sign alone would hide a broken gradient.
"""

from __future__ import annotations

from typing import Any

from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    return {"exp_avg": 0.0}


def coefficients(t: Any, o: Options, f: Any) -> dict[str, Any]:
    beta1, beta2 = o["betas"]
    return {"weight1": 1 - beta1, "weight2": 1 - beta2}


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    ahead = g - s.exp_avg
    interpolant = s.exp_avg + ahead * c.weight1
    exp_avg = s.exp_avg + ahead * c.weight2
    return Step(f.sign(interpolant) + (interpolant - interpolant), interpolant, {"exp_avg": exp_avg})


LION = Rule(
    name="lion",
    defaults={"lr": 1e-4, "betas": (0.9, 0.99), "decoupled_weight_decay": True},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"exp_avg": "signed"},
    timeless=True,
    counts_steps=lambda o: False,
)
