"""RAdam: Adam that waits with its denominator until the second moment can be trusted.

    rho_inf = 2/(1-b2) - 1      rho_t = rho_inf - 2 t b2^t / (1-b2^t)
    step = mhat                                                while rho_t <= 5
    step = mhat * r_t * sqrt(1-b2^t) / (sqrt(v) + eps)         after
    r_t = sqrt( (rho_t-4)(rho_t-2) rho_inf / ((rho_inf-4)(rho_inf-2) rho_t) )

As in torch.optim.RAdam, eps is added before the correction of v. The branch is two scalars, `plain` and
`adaptive`, of which one is zero; while `plain` rules, a one in eps keeps the unused quotient finite.
"""

from __future__ import annotations

from typing import Any

from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


def coefficients(t: Any, o: Options, f: Any) -> dict[str, Any]:
    beta1, beta2 = o["betas"]
    rest = 1 - beta2**t
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2**t / rest
    ready = f.positive(rho - 5)
    # Both bounds are out of reach once rho > 5; before, they only keep the unused value finite.
    below = f.maximum((rho_inf - 4) * (rho_inf - 2) * rho, 1.0)
    rectify = f.sqrt(f.maximum((rho - 4) * (rho - 2) * rho_inf, 0.0) / below)
    correct1 = 1 / (1 - beta1**t)
    return {
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "plain": correct1 * (1 - ready),
        "adaptive": correct1 * ready * rectify * f.sqrt(rest),
        "eps": o["eps"] + (1 - ready),
    }


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    exp_avg = s.exp_avg + (g - s.exp_avg) * c.weight1
    exp_avg_sq = s.exp_avg_sq * c.beta2 + f.square(g) * c.weight2
    step = exp_avg * c.plain + exp_avg * c.adaptive / (f.sqrt(exp_avg_sq) + c.eps)
    return Step(step, exp_avg, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})


RADAM = Rule(
    name="radam",
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"exp_avg": "signed", "exp_avg_sq": "positive"},
)
