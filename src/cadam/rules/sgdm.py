"""SGD with momentum.

    m <- momentum * m + w * g        step = m, or with nesterov w * g + momentum * m

By default w = 1 - momentum and m starts at zero: the moving average that Adam keeps, without bias correction, as in the
CAdam paper (https://arxiv.org/abs/2411.19647). If `dampening` is a number, it has the meaning of torch.optim.SGD:
w = 1 - dampening, except for w = 1 in the first step, where m starts as the gradient itself.

Momentum: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964. The choice of momentum and
Nesterov's variant in deep learning: "On the importance of initialization and momentum in deep learning", ICML 2013
(https://proceedings.mlr.press/v28/sutskever13.html).
"""

from __future__ import annotations

from typing import Any

from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    """Return the initial buffer; without momentum there is none."""
    return {"momentum_buffer": 0.0} if o["momentum"] != 0 else {}


def coefficients(t: Any, o: Options, f: Any) -> dict[str, Any]:
    """Return the scalars of step t."""
    momentum, dampening = o["momentum"], o["dampening"]
    if dampening is None:
        weight = 1 - momentum
    else:
        after_first = f.positive(t - 1)
        weight = 1 - dampening * after_first
    c = {"momentum": momentum, "weight": weight}
    return {**c, "ahead": momentum} if o["nesterov"] else c


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    """Return the step of one element."""
    if not hasattr(s, "momentum_buffer"):
        return Step(g, g, {})
    buffer = s.momentum_buffer * c.momentum + g * c.weight
    step = g * c.weight + buffer * c.ahead if hasattr(c, "ahead") else buffer
    return Step(step, buffer, {"momentum_buffer": buffer})


def aging(missed: Any, o: Options, f: Any) -> dict[str, Any]:
    """Return by how much the momentum decays in steps without a gradient."""
    return {"aged": o["momentum"] ** missed} if o["momentum"] != 0 else {}


def age(s: Any, c: Any, f: Any) -> dict[str, Any]:
    """Return the buffer after steps without a gradient."""
    return {"momentum_buffer": s.momentum_buffer * c.aged} if hasattr(s, "momentum_buffer") else {}


def check(o: Options) -> None:
    """Raise ValueError for a dampening out of range, or for Nesterov momentum that is not defined."""
    dampening = o["dampening"]
    if dampening is not None and not (isinstance(dampening, (int, float)) and 0 <= dampening <= 1):
        raise ValueError(f"Invalid dampening value: {dampening!r} (None, or a number in [0, 1])")
    if o["nesterov"] and (o["momentum"] == 0 or dampening not in (None, 0)):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


SGDM = Rule(
    name="sgdm",
    doc=__doc__,
    defaults={"lr": 1e-3, "momentum": 0.9, "dampening": None, "weight_decay": 0.0, "nesterov": False},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"momentum_buffer": "signed"},
    step_independent=True,
    variants=({"nesterov": True}, {"momentum": 0.0}),
    counts_steps=lambda o: bool(o["dampening"]),
    check=check,
    aging=aging,
    age=age,
)
