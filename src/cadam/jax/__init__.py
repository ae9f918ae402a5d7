"""The family as optax optimizers: the rules of `cadam.rules`, run by JAX. Imports no torch.

optimizer = cadam.jax.cadam(1e-3)
state = optimizer.init(params)
updates, state = optimizer.update(grads, state, params)
params = optax.apply_updates(params, updates)
optax.tree_utils.tree_get(state, "alignment")
"""

try:
    import jax  # noqa: F401
    import optax  # noqa: F401
except ImportError as error:
    raise ImportError(f"cadam.jax needs JAX and optax ({error}): pip install 'cadam[jax]'") from error

from . import sparse_update
from .family import (
    adabelief,
    adam,
    adamw,
    amsgrad,
    cadabelief,
    cadam,
    cadamw,
    camsgrad,
    clion,
    cradam,
    csgdm,
    cyogi,
    lion,
    radam,
    sgdm,
    yogi,
)
from .state_dicts import from_torch, to_torch
from .transform import RuleState, scale_by_rule

__all__ = [
    "RuleState",
    "adabelief",
    "adam",
    "adamw",
    "amsgrad",
    "cadabelief",
    "cadam",
    "cadamw",
    "camsgrad",
    "clion",
    "cradam",
    "csgdm",
    "cyogi",
    "from_torch",
    "lion",
    "radam",
    "scale_by_rule",
    "sgdm",
    "sparse_update",
    "to_torch",
    "yogi",
]
