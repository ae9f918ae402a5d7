"""The family as optax optimizers: the rules of `cadam.rules`, run by JAX. Does not import torch.

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

from . import family, sparse_update
from .family import *  # noqa: F403
from .state_dicts import from_torch, to_torch
from .transform import RuleState, scale_by_rule

__all__ = ["RuleState", "from_torch", "scale_by_rule", "sparse_update", "to_torch"]
__all__ += family.__all__
