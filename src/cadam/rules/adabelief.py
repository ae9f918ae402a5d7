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


def aging(missed: Any, o: Options, f: Any) -> dict[str, Any]:
    """Return the scalars of k steps without a gradient.

    In the j-th of them the surprise is -b1^j m, so after k steps the variance is::

        b2^k s + (1-b2) m^2 sum_j b2^(k-j) b1^(2j) + eps sum_j b2^(k-j)        for j from 1 to k

    Both are geometric series. The first has this closed form only if b2 and b1^2 differ, see `check`.
    """
    beta1, beta2 = o["betas"]
    aged1, aged2, ratio = beta1**missed, beta2**missed, beta1 * beta1
    return {
        "aged1": aged1,
        "aged2": aged2,
        "surprises": (1 - beta2) * ratio * (aged2 - aged1 * aged1) / (beta2 - ratio),
        "floor": o["eps"] * (1 - aged2) / (1 - beta2),
    }


def age(s: Any, c: Any, f: Any) -> dict[str, Any]:
    """Return the buffers after steps without a gradient."""
    exp_avg_var = s.exp_avg_var * c.aged2 + f.square(s.exp_avg) * c.surprises + c.floor
    return {"exp_avg": s.exp_avg * c.aged1, "exp_avg_var": exp_avg_var}


def check(o: Options) -> None:
    """Raise ValueError for exact sparse updates with betas for which `aging` would divide by almost zero."""
    if o["sparse_updates"] == "exact" and abs(o["betas"][1] - o["betas"][0] ** 2) < 1e-3:
        raise ValueError(f"sparse_updates='exact': betas {o['betas']}: betas[1] must differ from betas[0]**2 by 0.001")


ADABELIEF = Rule(
    name="adabelief",
    doc=__doc__,
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-16, "weight_decay": 0.0},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"exp_avg": "signed", "exp_avg_var": "positive"},
    check=check,
    aging=aging,
    age=age,
)
