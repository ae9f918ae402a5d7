"""Lion: the sign of an interpolation between momentum and gradient.

    c = m + (1-b1)(g - m)       step = sign(c)       m <- m + (1-b2)(g - m)

"Symbolic Discovery of Optimization Algorithms" (https://arxiv.org/abs/2302.06675).

The confidence mask compares the gradient with c, the interpolation whose sign Lion takes.
"""

from __future__ import annotations

from typing import Any

from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    """Return the initial buffer."""
    return {"exp_avg": 0.0}


def coefficients(t: Any, o: Options, f: Any) -> dict[str, Any]:
    """Return the scalars, which are the same at every step."""
    beta1, beta2 = o["betas"]
    return {"weight1": 1 - beta1, "weight2": 1 - beta2}


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    """Return the step of one element."""
    difference = g - s.exp_avg
    interpolation = s.exp_avg + difference * c.weight1
    exp_avg = s.exp_avg + difference * c.weight2
    # The sign of infinity is 1, which would hide an infinite gradient. Adding c - c turns the step into NaN then.
    step = f.sign(interpolation) + (interpolation - interpolation)
    return Step(step, interpolation, {"exp_avg": exp_avg})


def aging(missed: Any, o: Options, f: Any) -> dict[str, Any]:
    """Return by how much the moment decays in steps without a gradient."""
    return {"aged2": o["betas"][1] ** missed}


def age(s: Any, c: Any, f: Any) -> dict[str, Any]:
    """Return the buffer after steps without a gradient."""
    return {"exp_avg": s.exp_avg * c.aged2}


LION = Rule(
    name="lion",
    doc=__doc__,
    defaults={"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "decoupled_weight_decay": True},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"exp_avg": "signed"},
    step_independent=True,
    counts_steps=lambda o: False,
    aging=aging,
    age=age,
)
