"""Moments between torch and JAX, by the names of the parameters.

A parameter of JAX is called by its keys, joined with dots: ``params["layer"]["weight"]`` is ``layer.weight``, as torch
calls it. Both sides must run the same rule, with or without confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .transform import RuleState

MAXIMUM = "max_exp_avg_sq"


def from_torch(state_dict: Mapping[str, Any], state: Any, *, rename: Callable[[str], str] = str) -> Any:
    """A copy of an optax state with the moments and the step count of a torch optimizer's state dict.

    Args:
        state_dict: of an optimizer of `cadam` or torch.optim that was given ``model.named_parameters()``.
        state: ``optimizer.init(params)``; what is not of a rule stays as it is.
        rename: from the name of a parameter here to its name there, if they differ.
    """
    saved = {name: state_dict["state"].get(key) for name, (key, _) in _parameters(state_dict).items()}

    def filled(of_rule: RuleState) -> RuleState:
        steps: dict[str, float] = {}

        def moment(buffer: str, path: Any, leaf: Any) -> Any:
            name = rename(_name(path))
            entry = saved.get(name)
            if not entry or entry.get(buffer) is None:
                there = f"it has {', '.join(entry)}" if entry else f"there are {', '.join(map(repr, saved))}"
                raise ValueError(f"the state dict has no {buffer} of {name!r}; {there}")
            value = entry[buffer].detach().cpu()
            if tuple(value.shape) != leaf.shape:
                raise ValueError(f"{buffer} of {name!r} has shape {tuple(value.shape)} there and {leaf.shape} here")
            steps[name] = float(entry.get("step", max(int(of_rule.count), 1)))  # a buffer is there after a step
            return jnp.array((value.double() if leaf.dtype == jnp.float64 else value.float()).numpy(), leaf.dtype)

        moments = {
            buffer: jax.tree_util.tree_map_with_path(lambda path, leaf, b=buffer: moment(b, path, leaf), tree)
            for buffer, tree in of_rule.moments.items()
        }
        _check_maximum(state_dict, of_rule)
        if len(set(steps.values())) > 1:
            first, other = sorted(steps, key=steps.__getitem__)[:: len(steps) - 1]
            raise ValueError(
                f"one step count is needed, but {first!r} has taken {steps[first]:.0f} steps and {other!r} "
                f"{steps[other]:.0f}; use optax.multi_transform with a state for each"
            )
        count = jnp.asarray(next(iter(steps.values()), of_rule.count), jnp.int32)
        return of_rule._replace(count=count, moments=moments)

    if not any(map(_is_of_rule, jax.tree.leaves(state, is_leaf=_is_of_rule))):
        raise ValueError("the state has no moments of a rule: pass what `init` of an optimizer of cadam.jax returns")
    return jax.tree.map(lambda x: filled(x) if _is_of_rule(x) else x, state, is_leaf=_is_of_rule)


def to_torch(state: Any, state_dict: Mapping[str, Any], *, rename: Callable[[str], str] = str) -> dict[str, Any]:
    """A copy of a torch optimizer's state dict with the moments and step counts of an optax state.

    Args:
        state: of an optimizer of `cadam.jax`.
        state_dict: of a torch optimizer that was given ``model.named_parameters()``; it may be new.
        rename: from the name of a parameter here to its name there, if they differ.
    """
    import torch

    parameters = _parameters(state_dict)
    entries: dict[Any, dict[str, Any]] = {}
    for of_rule in filter(_is_of_rule, jax.tree.leaves(state, is_leaf=_is_of_rule)):
        _check_maximum(state_dict, of_rule)
        for buffer, tree in of_rule.moments.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                name = rename(_name(path))
                if name not in parameters:
                    raise ValueError(f"the state dict has no parameter {name!r}; it has {', '.join(parameters)}")
                entry = entries.setdefault(parameters[name][0], {"step": torch.tensor(float(of_rule.count))})
                dtype = np.float64 if leaf.dtype == jnp.float64 else np.float32
                entry[buffer] = torch.from_numpy(np.array(leaf, dtype))
    return {**state_dict, "state": {**state_dict["state"], **entries}}


def _is_of_rule(x: Any) -> bool:
    return isinstance(x, RuleState)


def _name(path: Any) -> str:
    name: str = jax.tree_util.keystr(path, simple=True, separator=".")
    return name


def _parameters(state_dict: Mapping[str, Any]) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """By its name, the key of each parameter and its group."""
    named = {}
    for number, group in enumerate(state_dict["param_groups"]):
        if "param_names" not in group:
            raise ValueError(
                f"group {number} has no names: construct the torch optimizer with model.named_parameters()"
            )
        named.update({name: (key, group) for name, key in zip(group["param_names"], group["params"], strict=True)})
    return named


def _check_maximum(state_dict: Mapping[str, Any], of_rule: RuleState) -> None:
    """Raise if AMSGrad's maximum would change its meaning: torch.optim takes it of the raw second moment."""
    from ..optim.state_dict import FORMAT_KEY

    if MAXIMUM in of_rule.moments and not all(FORMAT_KEY in group for group in state_dict["param_groups"]):
        raise ValueError(
            "torch.optim.Adam's maximum is that of another quantity: go through a cadam.AmsGrad, which loads its "
            "state dict, and cadam.for_torch, which writes one"
        )
