"""RAdam: Adam that uses its denominator only once the variance of the second moment is bounded.

    rho_inf = 2/(1-b2) - 1      rho_t = rho_inf - 2 t b2^t / (1-b2^t)
    step = mhat                                                if rho_t <= 5
    step = mhat * r_t * sqrt(1-b2^t) / (sqrt(v) + eps)         otherwise
    r_t = sqrt( (rho_t-4)(rho_t-2) rho_inf / ((rho_inf-4)(rho_inf-2) rho_t) )

"On the Variance of the Adaptive Learning Rate and Beyond" (https://arxiv.org/abs/1908.03265).

As in torch.optim.RAdam, eps is added before the bias correction of v. The branch is written with two coefficients,
`plain` and `adaptive`, of which one is always zero. While `plain` is in use, 1 is added to eps so that the unused
quotient stays finite.
"""

from __future__ import annotations

from typing import Any

from .adam import age, aging
from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    """Return the initial buffers."""
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


def coefficients(t: Any, o: Options, f: Any) -> dict[str, Any]:
    """Return the scalars of step t."""
    beta1, beta2 = o["betas"]
    debias2 = 1 - beta2**t
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2**t / debias2
    is_adaptive = f.positive(rho - 5)
    # Neither maximum changes anything once rho > 5. Before, they keep the unused value finite.
    denominator = f.maximum((rho_inf - 4) * (rho_inf - 2) * rho, 1.0)
    rectify = f.sqrt(f.maximum((rho - 4) * (rho - 2) * rho_inf, 0.0) / denominator)
    correct1 = 1 / (1 - beta1**t)
    return {
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "plain": correct1 * (1 - is_adaptive),
        "adaptive": correct1 * is_adaptive * rectify * f.sqrt(debias2),
        "eps": o["eps"] + (1 - is_adaptive),
    }


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    """Return the step of one element."""
    exp_avg = s.exp_avg + (g - s.exp_avg) * c.weight1
    exp_avg_sq = s.exp_avg_sq * c.beta2 + f.square(g) * c.weight2
    step = exp_avg * c.plain + exp_avg * c.adaptive / (f.sqrt(exp_avg_sq) + c.eps)
    return Step(step, exp_avg, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})


RADAM = Rule(
    name="radam",
    doc=__doc__,
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"exp_avg": "signed", "exp_avg_sq": "positive"},
    aging=aging,
    age=age,
)
