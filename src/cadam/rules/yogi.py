"""Yogi: Adam whose second moment changes by a bounded amount, so that it cannot forget quickly.

v <- v - (1-b2) sign(v - g^2) g^2, starting at `initial_accumulator`; all else is Adam's.
"""

from __future__ import annotations

from typing import Any

from .adam import coefficients
from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    return {"exp_avg": 0.0, "exp_avg_sq": o["initial_accumulator"]}


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    exp_avg = s.exp_avg + (g - s.exp_avg) * c.weight1
    square = f.square(g)
    exp_avg_sq = s.exp_avg_sq - f.sign(s.exp_avg_sq - square) * square * c.weight2
    step = exp_avg * c.correct1 / (f.sqrt(exp_avg_sq * c.correct2) + c.eps)
    return Step(step, exp_avg, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})


YOGI = Rule(
    name="yogi",
    defaults={"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3, "initial_accumulator": 1e-6},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"exp_avg": "signed", "exp_avg_sq": "positive"},
)
