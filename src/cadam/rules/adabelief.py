"""AdaBelief: Adam whose second moment measures how far the gradient is from its moving average.

    m <- m + (1-b1)(g - m)      s <- b2 s + (1-b2)(g - m)^2 + eps
    mhat = m / (1-b1^t)         shat = s / (1-b2^t)
    step = mhat / (sqrt(shat) + eps)

"AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed Gradients" (https://arxiv.org/abs/2010.07468). As in
the paper, eps is added twice.
"""

from __future__ import annotations

from typing import Any

from .adam import coefficients
from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    """Return the initial buffers."""
    return {"exp_avg": 0.0, "exp_avg_var": 0.0}


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    """Return the step of one element."""
    exp_avg = s.exp_avg + (g - s.exp_avg) * c.weight1
    surprise = g - exp_avg
    exp_avg_var = s.exp_avg_var * c.beta2 + f.square(surprise) * c.weight2 + c.eps
    step = exp_avg * c.correct1 / (f.sqrt(exp_avg_var * c.correct2) + c.eps)
    return Step(step, exp_avg, {"exp_avg": exp_avg, "exp_avg_var": exp_avg_var})


ADABELIEF = Rule(
    name="adabelief",
    doc=__doc__,
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-16, "weight_decay": 0.0},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"exp_avg": "signed", "exp_avg_var": "positive"},
)
