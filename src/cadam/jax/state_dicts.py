"""Conversion of optimizer state between torch and JAX, by the names of the parameters.

The name of a JAX parameter is its path in the tree, joined with dots: ``params["layer"]["weight"]`` is torch's
``layer.weight``. Both optimizers must have the same rule; confidence may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .sparse_update import TableState
from .transform import RuleState

MAXIMUM = "max_exp_avg_sq"


def from_torch(state_dict: Mapping[str, Any], state: Any, *, rename: Callable[[str], str] = str) -> Any:
    """Copy moments and step count from a torch optimizer's state dict into an optax state.

    Args:
        state_dict: State dict of an optimizer of `cadam` or torch.optim that was created with
            ``model.named_parameters()``.
        state: ``optimizer.init(params)``. Parts that do not belong to a rule are returned unchanged.
        rename: Function from the name of a parameter in JAX to its name in torch, if they differ.

    Returns:
        The new optax state.

    Raises:
        ValueError: If a parameter or a moment is missing, or has another shape or step count.

    Example:
        >>> state = cadam.jax.from_torch(torch_optimizer.state_dict(), optimizer.init(params))
    """
    saved = {name: state_dict["state"].get(key) for name, key in _parameter_keys(state_dict).items()}

    def fill(rule_state: RuleState) -> RuleState:
        steps: dict[str, float] = {}

        def moment(buffer: str, path: Any, leaf: Any) -> Any:
            name = rename(_name(path))
            entry = saved.get(name)
            if not entry or entry.get(buffer) is None:
                contents = f"it has {', '.join(entry)}" if entry else f"it has state of {', '.join(map(repr, saved))}"
                raise ValueError(f"the state dict has no {buffer} of {name!r}; {contents}")
            value = entry[buffer].detach().cpu()
            if tuple(value.shape) != leaf.shape:
                raise ValueError(
                    f"{buffer} of {name!r} has shape {tuple(value.shape)} in the state dict and {leaf.shape} in JAX"
                )
            # A state dict without a step count has taken at least one step, since it has moments.
            steps[name] = float(entry.get("step", max(int(rule_state.count), 1)))
            return jnp.array((value.double() if leaf.dtype == jnp.float64 else value.float()).numpy(), leaf.dtype)

        moments = {
            buffer: jax.tree_util.tree_map_with_path(lambda path, leaf, b=buffer: moment(b, path, leaf), tree)
            for buffer, tree in rule_state.moments.items()
        }
        _check_maximum(state_dict, rule_state)
        if len(set(steps.values())) > 1:
            first, other = sorted(steps, key=steps.__getitem__)[:: len(steps) - 1]
            raise ValueError(
                f"an optax state has one step count, but {first!r} has taken {steps[first]:.0f} steps and {other!r} "
                f"{steps[other]:.0f}; use optax.multi_transform with a state for each"
            )
        count = jnp.asarray(next(iter(steps.values()), rule_state.count), jnp.int32)
        return rule_state._replace(count=count, moments=moments)

    _check_is_lazy(state)
    if not any(map(_is_rule_state, jax.tree.leaves(state, is_leaf=_is_rule_state))):
        raise ValueError("the state has no moments of a rule: pass what `init` of an optimizer of cadam.jax returns")
    return jax.tree.map(lambda x: fill(x) if _is_rule_state(x) else x, state, is_leaf=_is_rule_state)


def to_torch(state: Any, state_dict: Mapping[str, Any], *, rename: Callable[[str], str] = str) -> dict[str, Any]:
    """Copy moments and step counts from an optax state into a torch optimizer's state dict.

    Args:
        state: State of an optimizer of `cadam.jax`.
        state_dict: State dict of a torch optimizer that was created with ``model.named_parameters()``; the optimizer
            may be new.
        rename: Function from the name of a parameter in JAX to its name in torch, if they differ.

    Returns:
        The new state dict, for `load_state_dict` of the torch optimizer.

    Raises:
        ValueError: If the state dict does not have a parameter.
    """
    import torch

    _check_is_lazy(state)
    keys = _parameter_keys(state_dict)
    entries: dict[Any, dict[str, Any]] = {}
    for rule_state in filter(_is_rule_state, jax.tree.leaves(state, is_leaf=_is_rule_state)):
        _check_maximum(state_dict, rule_state)
        for buffer, tree in rule_state.moments.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                name = rename(_name(path))
                if name not in keys:
                    raise ValueError(f"the state dict has no parameter {name!r}; it has {', '.join(keys)}")
                entry = entries.setdefault(keys[name], {"step": torch.tensor(float(rule_state.count))})
                dtype = np.float64 if leaf.dtype == jnp.float64 else np.float32
                entry[buffer] = torch.from_numpy(np.array(leaf, dtype))
    return {**state_dict, "state": {**state_dict["state"], **entries}}


def _check_is_lazy(state: Any) -> None:
    """Raise ValueError if a state has records of its rows, which the converted state would lose."""
    if any(isinstance(x, TableState) for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, TableState))):
        raise ValueError(
            "the state of a table with sparse_updates='exact' or confidence_after cannot be converted: torch and JAX "
            "keep the records of its rows in different forms. Convert the state of a table with lazy updates"
        )


def _is_rule_state(x: Any) -> bool:
    return isinstance(x, RuleState)


def _name(path: Any) -> str:
    name: str = jax.tree_util.keystr(path, simple=True, separator=".")
    return name


def _parameter_keys(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key of each parameter in the state dict, by its name."""
    keys: dict[str, Any] = {}
    for number, group in enumerate(state_dict["param_groups"]):
        if "param_names" not in group:
            raise ValueError(
                f"group {number} has no names: construct the torch optimizer with model.named_parameters()"
            )
        keys.update(zip(group["param_names"], group["params"], strict=True))
    return keys


def _check_maximum(state_dict: Mapping[str, Any], rule_state: RuleState) -> None:
    """Raise ValueError if AMSGrad's maximum was computed by torch.optim.

    There it is the maximum of second moments without bias correction, which cannot be converted.
    """
    from ..optim.state_dict import FORMAT_KEY

    if MAXIMUM in rule_state.moments and not all(FORMAT_KEY in group for group in state_dict["param_groups"]):
        raise ValueError(
            "torch.optim.Adam keeps the maximum of the uncorrected second moment, cadam that of the corrected one: "
            "load the state dict into a cadam.AmsGrad first; cadam.for_torch converts in the other direction"
        )
