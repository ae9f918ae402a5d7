"""Yogi: Adam whose second moment changes by at most (1-b2) g^2 in a step, so that it cannot shrink quickly.

    m <- m + (1-b1)(g - m)      v <- v - (1-b2) sign(v - g^2) g^2
    mhat = m / (1-b1^t)         vhat = v / (1-b2^t)
    step = mhat / (sqrt(vhat) + eps)

"Adaptive Methods for Nonconvex Optimization", NeurIPS 2018
(https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization). v starts at `initial_accumulator`.
"""

from __future__ import annotations

from typing import Any

from .adam import coefficients
from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    """Return the initial buffers."""
    return {"exp_avg": 0.0, "exp_avg_sq": o["initial_accumulator"]}


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    """Return the step of one element."""
    exp_avg = s.exp_avg + (g - s.exp_avg) * c.weight1
    square = f.square(g)
    exp_avg_sq = s.exp_avg_sq - f.sign(s.exp_avg_sq - square) * square * c.weight2
    step = exp_avg * c.correct1 / (f.sqrt(exp_avg_sq * c.correct2) + c.eps)
    return Step(step, exp_avg, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})


def aging(missed: Any, o: Options, f: Any) -> dict[str, Any]:
    """Return by how much the first moment decays in steps without a gradient."""
    return {"aged1": o["betas"][0] ** missed}


def age(s: Any, c: Any, f: Any) -> dict[str, Any]:
    """Return the buffers after steps without a gradient: the second moment does not change, as it changes by g^2."""
    return {"exp_avg": s.exp_avg * c.aged1, "exp_avg_sq": s.exp_avg_sq}


YOGI = Rule(
    name="yogi",
    doc=__doc__,
    defaults={"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3, "initial_accumulator": 1e-6, "weight_decay": 0.0},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"exp_avg": "signed", "exp_avg_sq": "positive"},
    aging=aging,
    age=age,
)
