"""Adam, with AMSGrad as an option.

    m <- m + (1-b1)(g - m)      v <- b2 v + (1-b2) g^2
    mhat = m / (1-b1^t)         vhat = v / (1-b2^t)
    step = mhat / (sqrt(vhat) + eps)

"Adam: A Method for Stochastic Optimization" (https://arxiv.org/abs/1412.6980).

AMSGrad replaces vhat by its running maximum: "On the Convergence of Adam and Beyond", ICLR 2018
(https://arxiv.org/abs/1904.09237). Here the maximum is taken of the bias-corrected second moment; torch.optim.Adam
takes it of the uncorrected one.
"""

from __future__ import annotations

from typing import Any

from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    """Return the initial buffers."""
    moments = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    return {**moments, "max_exp_avg_sq": 0.0} if o["amsgrad"] else moments


def coefficients(t: Any, o: Options, f: Any) -> dict[str, Any]:
    """Return the scalars of step t."""
    beta1, beta2 = o["betas"]
    return {
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "correct1": 1 / (1 - beta1**t),
        "correct2": 1 / (1 - beta2**t),
        "eps": o["eps"],
    }


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    """Return the step of one element."""
    exp_avg = s.exp_avg + (g - s.exp_avg) * c.weight1
    exp_avg_sq = s.exp_avg_sq * c.beta2 + f.square(g) * c.weight2
    new = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    vhat = exp_avg_sq * c.correct2
    if hasattr(s, "max_exp_avg_sq"):
        vhat = new["max_exp_avg_sq"] = f.maximum(s.max_exp_avg_sq, vhat)
    return Step(exp_avg * c.correct1 / (f.sqrt(vhat) + c.eps), exp_avg, new)


def aging(missed: Any, o: Options, f: Any) -> dict[str, Any]:
    """Return by how much both moments decay in steps without a gradient."""
    beta1, beta2 = o["betas"]
    return {"aged1": beta1**missed, "aged2": beta2**missed}


def age(s: Any, c: Any, f: Any) -> dict[str, Any]:
    """Return the buffers after steps without a gradient.

    AMSGrad's maximum does not change: while the second moment decays, its bias correction decreases too.
    """
    aged = {"exp_avg": s.exp_avg * c.aged1, "exp_avg_sq": s.exp_avg_sq * c.aged2}
    return {**aged, "max_exp_avg_sq": s.max_exp_avg_sq} if hasattr(s, "max_exp_avg_sq") else aged


ADAM = Rule(
    name="adam",
    doc=__doc__,
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"exp_avg": "signed", "exp_avg_sq": "positive", "max_exp_avg_sq": "maximum"},
    optional_buffers=frozenset({"max_exp_avg_sq"}),
    variants=({"amsgrad": True},),
    aging=aging,
    age=age,
)
