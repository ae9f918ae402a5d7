"""The confidence mask: an element moves only where momentum and gradient have the same sign.

The mask is that of "CAdam: Confidence-Based Optimization for Online Learning" (https://arxiv.org/abs/2411.19647). It
does not rescale the elements that remain, and the moments of masked elements are updated like all others.
"""

from __future__ import annotations

from typing import Any


def agreement(momentum: Any, gradient: Any, f: Any) -> Any:
    """Return a value that is positive where momentum and gradient agree in sign.

    It is zero where one of them is zero. The product of both would underflow for small values, so only the sign of the
    gradient is used. A NaN in the momentum stays NaN.

    Args:
        momentum: The momentum after the gradient was added to it.
        gradient: The gradient.
        f: The function set of the engine that runs the update.
    """
    return momentum * f.sign(gradient)


def mask(agreement: Any, step: Any, f: Any) -> Any:
    """Return the step, or 0 where `agreement` is zero or negative. Where it is NaN, the step is not masked."""
    return f.mask(agreement, step)
