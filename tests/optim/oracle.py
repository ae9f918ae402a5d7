"""The result that every optimizer must compute, one element at a time, in float64.

Written from the definitions, in their textbook form, with plain numbers and plain `if`s. It shares no code with the
package and imports nothing but numpy, so that an error would have to be made twice to go unnoticed.

A new rule needs a function here: from the gradient `g`, the element's buffers `s` (changed in place), the step `t`
counted from 1 and the options `o`, it returns a `Move`. `RULES` then names it, with its defaults and starting buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

Buffers = dict[str, float]
Options = Mapping[str, Any]


class Move(NamedTuple):
    """A rule's wish for one element: ``p -= lr * step``, if `momentum` agrees with the gradient.

    `clear` says by how much the rule's own decisions (signs it takes) were clear of a tie, relative to what was
    compared: rounding cannot turn a decision that is clear by more than it.
    """

    step: float
    momentum: float
    clear: float = math.inf


def adam(g: float, s: Buffers, t: int, o: Options) -> Move:
    b1, b2 = o["betas"]
    s["exp_avg"] = b1 * s["exp_avg"] + (1 - b1) * g
    s["exp_avg_sq"] = b2 * s["exp_avg_sq"] + (1 - b2) * g**2
    mhat = s["exp_avg"] / (1 - b1**t)
    vhat = s["exp_avg_sq"] / (1 - b2**t)
    if o["amsgrad"]:
        s["max_exp_avg_sq"] = max(s["max_exp_avg_sq"], vhat)
        vhat = s["max_exp_avg_sq"]
    return Move(mhat / (math.sqrt(vhat) + o["eps"]), s["exp_avg"])


def sgdm(g: float, s: Buffers, t: int, o: Options) -> Move:
    momentum, dampening = o["momentum"], o["dampening"]
    if momentum == 0:
        return Move(g, g)
    if dampening is None:  # the paper: Adam's moving average
        weight = 1 - momentum
    elif t == 1:  # torch: the buffer starts as the gradient
        weight = 1.0
    else:
        weight = 1 - dampening
    s["momentum_buffer"] = momentum * s["momentum_buffer"] + weight * g
    if o["nesterov"]:
        return Move(weight * g + momentum * s["momentum_buffer"], s["momentum_buffer"])
    return Move(s["momentum_buffer"], s["momentum_buffer"])


def lion(g: float, s: Buffers, t: int, o: Options) -> Move:
    b1, b2 = o["betas"]
    interpolant = b1 * s["exp_avg"] + (1 - b1) * g
    compared = b1 * abs(s["exp_avg"]) + (1 - b1) * abs(g)
    s["exp_avg"] = b2 * s["exp_avg"] + (1 - b2) * g
    return Move(sign(interpolant), interpolant, abs(interpolant) / compared if compared else math.inf)


def radam(g: float, s: Buffers, t: int, o: Options) -> Move:
    b1, b2 = o["betas"]
    s["exp_avg"] = b1 * s["exp_avg"] + (1 - b1) * g
    s["exp_avg_sq"] = b2 * s["exp_avg_sq"] + (1 - b2) * g**2
    mhat = s["exp_avg"] / (1 - b1**t)
    rho_inf = 2 / (1 - b2) - 1
    rho = rho_inf - 2 * t * b2**t / (1 - b2**t)
    if rho <= 5:
        return Move(mhat, s["exp_avg"])
    r = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
    adaptive = math.sqrt(1 - b2**t) / (math.sqrt(s["exp_avg_sq"]) + o["eps"])
    return Move(mhat * r * adaptive, s["exp_avg"])


def yogi(g: float, s: Buffers, t: int, o: Options) -> Move:
    b1, b2 = o["betas"]
    old = s["exp_avg_sq"]
    s["exp_avg"] = b1 * s["exp_avg"] + (1 - b1) * g
    s["exp_avg_sq"] = old - (1 - b2) * sign(old - g**2) * g**2
    mhat = s["exp_avg"] / (1 - b1**t)
    vhat = s["exp_avg_sq"] / (1 - b2**t)
    clear = abs(old - g**2) / max(old, g**2) if g != 0 else math.inf
    return Move(mhat / (math.sqrt(vhat) + o["eps"]), s["exp_avg"], clear)


def adabelief(g: float, s: Buffers, t: int, o: Options) -> Move:
    b1, b2 = o["betas"]
    s["exp_avg"] = b1 * s["exp_avg"] + (1 - b1) * g
    s["exp_avg_var"] = b2 * s["exp_avg_var"] + (1 - b2) * (g - s["exp_avg"]) ** 2 + o["eps"]
    mhat = s["exp_avg"] / (1 - b1**t)
    shat = s["exp_avg_var"] / (1 - b2**t)
    return Move(mhat / (math.sqrt(shat) + o["eps"]), s["exp_avg"])


def sign(x: float) -> float:
    return 1.0 if x > 0 else -1.0 if x < 0 else 0.0


class Rule(NamedTuple):
    element: Callable[[float, Buffers, int, Options], Move]
    start: Callable[[Options], Buffers]
    defaults: Options


def _moments(o: Options) -> Buffers:
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


RULES = {
    "adam": Rule(
        adam,
        lambda o: {**_moments(o), "max_exp_avg_sq": 0.0} if o["amsgrad"] else _moments(o),
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False},
    ),
    "sgdm": Rule(
        sgdm,
        lambda o: {"momentum_buffer": 0.0} if o["momentum"] != 0 else {},
        {"lr": 1e-3, "momentum": 0.9, "dampening": None, "nesterov": False},
    ),
    "lion": Rule(lion, lambda o: {"exp_avg": 0.0}, {"lr": 1e-4, "betas": (0.9, 0.99)}),
    "radam": Rule(radam, _moments, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}),
    "yogi": Rule(
        yogi,
        lambda o: {"exp_avg": 0.0, "exp_avg_sq": o["initial_accumulator"]},
        {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3, "initial_accumulator": 1e-6},
    ),
    "adabelief": Rule(
        adabelief,
        lambda o: {"exp_avg": 0.0, "exp_avg_var": 0.0},
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-16},
    ),
}

DECAYS = ("none", "l2", "decoupled")


class Oracle:
    """One tensor that is updated by one rule. `param`, `state` and the three counters are those after the last step.

    `clear` is the smallest relative distance of any decision from a tie so far; see `Move`.
    """

    def __init__(
        self,
        rule: str,
        param: np.ndarray,
        *,
        confidence: bool,
        decay: str = "none",
        weight_decay: float = 0.0,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        if rule not in RULES:
            raise KeyError(
                f"rule {rule!r} has no oracle: write its element in tests/core/oracle.py and add it to RULES"
            )
        self.element, start, defaults = RULES[rule]
        unknown = sorted(set(options) - set(defaults))
        if unknown or decay not in DECAYS:
            raise KeyError(f"the oracle of {rule!r} does not know {unknown or decay}: add it in tests/core/oracle.py")
        self.options = {**defaults, **options}
        self.confidence, self.maximize = confidence, maximize
        self.decay, self.weight_decay = decay, weight_decay
        self.param = np.array(param, dtype=np.float64)
        self.state = {name: np.full(self.param.shape, value) for name, value in start(self.options).items()}
        self.t = self.aligned = self.touched = self.seen = 0
        self.clear = math.inf
        self._largest = np.zeros(self.param.shape)

    def step(self, grad: np.ndarray) -> None:
        """Take one step with a gradient for every element."""
        self._move((index, float(grad[index])) for index in np.ndindex(self.param.shape))

    def step_rows(self, ids: Iterable[tuple[int, ...]], values: np.ndarray) -> None:
        """Take one step with gradients of the rows `ids` only. The gradients of a row that occurs twice are added."""
        rows: dict[tuple[int, ...], np.ndarray] = {}
        for row, value in zip(ids, np.asarray(values, dtype=np.float64), strict=True):
            rows[row] = rows.get(row, 0.0) + value
        self._move(
            ((*row, *index), float(value[index])) for row, value in rows.items() for index in np.ndindex(value.shape)
        )

    def _move(self, grads: Iterable[tuple[tuple[int, ...], float]]) -> None:
        self.t += 1
        self.seen += self.param.size
        for index, grad in grads:
            self.touched += 1
            buffers = {name: float(buffer[index]) for name, buffer in self.state.items()}
            self.param[index] = self._element(float(self.param[index]), grad, buffers, index)
            for name, value in buffers.items():
                self.state[name][index] = value

    def _element(self, p: float, g: float, s: Buffers, index: tuple[int, ...]) -> float:
        lr = self.options["lr"]
        if self.maximize:
            g = -g
        if self.decay == "l2":
            g = g + self.weight_decay * p
        step, momentum, clear = self.element(g, s, self.t, self.options)
        agree = (momentum > 0 and g > 0) or (momentum < 0 and g < 0)
        self.aligned += agree
        if self.decay == "decoupled":
            p = p * (1 - lr * self.weight_decay)
        if agree or not self.confidence:
            p = p - lr * step
        self._largest[index] = max(self._largest[index], abs(g))
        if g != 0:
            clear = min(clear, abs(g) / self._largest[index], abs(momentum) / self._largest[index])
        self.clear = min(self.clear, clear)
        return p
