"""The optimizers of the arms in JAX: Adam and CAdam of `cadam.jax`, and Adam with two other masks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import cadam.jax
from cadam.rules import RULES

from .arms import ARMS


class MaskedState(NamedTuple):
    """The state of a masked Adam: the moments of Adam, and the key of the random mask."""

    rule: cadam.jax.RuleState
    key: Any


def scale_by_masked_adam(mask: Literal["cautious", "random"], key: Any) -> optax.GradientTransformation:
    r"""Replace gradients by the steps of Adam, multiplied by a mask.

    With the step :math:`u`, first moment :math:`m` and gradient :math:`g` of an array, and the share :math:`a` of its
    elements with :math:`m g > 0`, the masked step is

    - `cautious`: :math:`u / \max(a, 0.001)` where :math:`m g > 0` (Liang et al. 2024,
      https://arxiv.org/abs/2411.16085);
    - `random`: :math:`u` at elements that are chosen at random with probability :math:`a`.

    Args:
        mask: The kind of mask.
        key: The key of the random mask.
    """
    adam = cadam.jax.scale_by_rule(RULES["adam"], confidence=False, track_alignment=False)

    def init(params: Any) -> MaskedState:
        return MaskedState(adam.init(params), key)

    def update(grads: Any, state: MaskedState, params: Any = None) -> tuple[Any, MaskedState]:
        steps, rule = adam.update(grads, state.rule, params)
        following, now = jax.random.split(state.key)
        leaves, tree = jax.tree.flatten(steps)
        keys = tree.unflatten(list(jax.random.split(now, len(leaves))))

        def masked(step: Any, grad: Any, moment: Any, key: Any) -> Any:
            agrees = (moment * grad > 0).astype(step.dtype)
            share = agrees.mean()
            if mask == "cautious":
                return step * agrees / jnp.maximum(share, 1e-3)
            return step * jax.random.bernoulli(key, share, step.shape)

        return jax.tree.map(masked, steps, grads, rule.moments["exp_avg"], keys), MaskedState(rule, following)

    return optax.GradientTransformation(init, update)


def build(name: str, lr: Any, key: Any) -> optax.GradientTransformation:
    """Return the optimizer of an arm.

    Args:
        name: A name of `ARMS`.
        lr: The learning rate, which may be a traced value.
        key: The key of the random mask.
    """
    mask, beta1 = ARMS[name].mask, ARMS[name].beta1
    if mask in ("cautious", "random"):
        return optax.chain(scale_by_masked_adam(mask, key), optax.scale_by_learning_rate(lr))
    optimizer = cadam.jax.cadam if mask == "sign" else cadam.jax.adam
    return optimizer(lr, b1=beta1, track_alignment=False)
