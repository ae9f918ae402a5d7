"""SGD with momentum.

    m <- momentum * m + w * g        step = m, or with nesterov w * g + momentum * m

By default w = 1 - momentum and m starts at zero: the moving average that Adam keeps, without bias correction,
as in the paper. A dampening given as a number has torch.optim.SGD's meaning: w = 1 - dampening, but 1 in the first
step, where m starts as g itself.
"""

from __future__ import annotations

from typing import Any

from .base import Options, Rule, Step


def state(o: Options) -> dict[str, float]:
    return {"momentum_buffer": 0.0} if o["momentum"] != 0 else {}


def coefficients(t: Any, o: Options, f: Any) -> dict[str, Any]:
    momentum, dampening = o["momentum"], o["dampening"]
    if dampening is None:
        weight = 1 - momentum
    else:
        later = f.positive(t - 1)
        weight = 1 - dampening * later
    c = {"momentum": momentum, "weight": weight}
    return {**c, "ahead": momentum} if o["nesterov"] else c


def update(g: Any, s: Any, c: Any, f: Any) -> Step:
    if not hasattr(s, "momentum_buffer"):
        return Step(g, g, {})
    buffer = s.momentum_buffer * c.momentum + g * c.weight
    step = g * c.weight + buffer * c.ahead if hasattr(c, "ahead") else buffer
    return Step(step, buffer, {"momentum_buffer": buffer})


def check(o: Options) -> None:
    dampening = o["dampening"]
    if dampening is not None and not (isinstance(dampening, (int, float)) and 0 <= dampening <= 1):
        raise ValueError(f"Invalid dampening value: {dampening!r} (None, or a number in [0, 1])")
    if o["nesterov"] and (o["momentum"] == 0 or dampening not in (None, 0)):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


SGDM = Rule(
    name="sgdm",
    defaults={"lr": 1e-3, "momentum": 0.9, "dampening": None, "nesterov": False},
    state=state,
    coefficients=coefficients,
    update=update,
    moments={"momentum_buffer": "signed"},
    timeless=True,
    variants=({"nesterov": True}, {"momentum": 0.0}),
    counts_steps=lambda o: bool(o["dampening"]),
    check=check,
)
