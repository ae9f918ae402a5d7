"""State dicts that are exchanged with torch.optim.

The names of the buffers are those of torch (step, exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer), so the state
dicts of most optimizers fit in both directions. Four things differ:

- torch casts moments to the dtype of the parameter when it loads them; here they keep their dtype, which is float32 for
  parameters in half precision.
- torch's max_exp_avg_sq is the maximum of the uncorrected second moment, here it is that of the bias-corrected one.
  `FORMAT_KEY` in a group marks state of this package; without it, the maximum is converted. `for_torch` converts back.
- Quantized moments (`cadam.rules.moment_storage`) are loaded unchanged. If the optimizer has another storage, its next
  step converts them, rounded to the nearest value. `for_torch` dequantizes them.
- A state dict that does not fit is refused before anything changes.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ..engines import moment_state
from ..engines.resolved_group import EXECUTION_OPTIONS
from ..rules import RULES, Rule, moment_storage
from . import options

FORMAT_KEY = "cadam_format"
FORMAT = 1
RULE_KEY = "cadam_rule"
"""The key of the entry of a parameter group that names the rule which made the state."""
MAXIMUM = "max_exp_avg_sq"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""If a state has one of these buffers and the optimizer's rule does not use it, the state was made by another rule."""
TORCH_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
PACKAGE_ENTRIES = (
    FORMAT_KEY,
    RULE_KEY,
    "rounding_seed",
    *(name for name in EXECUTION_OPTIONS if name not in TORCH_OPTIONS),
)
"""Entries of a group that torch.optim does not have."""

State = dict[Any, Any]
"""The state of each parameter. Hooks may add entries with other keys."""
Groups = list[dict[str, Any]]


def read(
    state_dict: Mapping[str, Any],
    groups: Groups,
    rule: Rule,
    fixed: Mapping[str, Any],
    new_step: Callable[[float, Tensor, Mapping[str, Any]], Tensor],
    buffer_dtype: Callable[[Tensor, Mapping[str, Any]], torch.dtype],
) -> tuple[Groups, State]:
    """Return the groups and the state that an optimizer loads from a state dict, as copies.

    Args:
        state_dict: The state dict of this package or of torch.optim.
        groups: The present groups of the optimizer.
        rule: Its rule.
        fixed: The options that define its class.
        new_step: Function that makes a step count from a number, a parameter and its group.
        buffer_dtype: Function that returns the dtype of a parameter's buffers.

    Raises:
        ValueError: If the state dict does not fit; the message names the group and the parameter.
    """
    saved_groups = _checked_groups(state_dict, groups)
    saved_state = state_dict["state"]
    new_groups: Groups = []
    new_state: State = {}
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        saved_rule = saved.get(RULE_KEY, rule.name)
        if saved_rule != rule.name:
            raise ValueError(
                f"the state dict does not fit: group {number} is of {saved_rule}, this optimizer of {rule.name}"
            )
        if saved.get(FORMAT_KEY, FORMAT) != FORMAT:
            raise ValueError(
                f"the state dict does not fit: group {number} has {FORMAT_KEY} {saved[FORMAT_KEY]!r}, and this version "
                f"reads {FORMAT}: use the version of cadam that saved it"
            )
        mine = _merge(group, saved, fixed)
        try:
            options.check(rule, mine)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"the state dict does not fit: group {number}: {error}") from error
        new_groups.append(mine)
        for position, (param, key) in enumerate(zip(group["params"], _order_by_name(saved, group), strict=True)):
            entry = saved_state.get(key)
            if not entry:
                continue
            where = f"group {number}, parameter {describe(group, position)}"
            by_row = FORMAT_KEY in saved or mine["second_moment"] == "row"
            entry = _check_entry(entry, param, rule, mine, where, by_row=by_row)
            if not entry:
                continue
            step = new_step(float(entry.pop("step")), param, mine)
            if MAXIMUM in entry and FORMAT_KEY not in saved and step > 0:
                entry[MAXIMUM] = entry[MAXIMUM] / (1 - float(mine["betas"][1]) ** float(step))
            new_state[param] = {"step": step}
            for name, value in entry.items():
                new_state[param][name] = _copy_value(name, value, param, rule, mine, buffer_dtype)
    param_keys = {key for saved in saved_groups for key in saved["params"]}
    notes = {key: deepcopy(value) for key, value in saved_state.items() if key not in param_keys}
    return new_groups, {**new_state, **notes}


def for_torch(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict in the form of torch.optim, without the options that torch does not have.

    It is needed for AMSGrad, whose maximum is converted; for the moving average of SGDM, which torch writes as
    ``dampening = momentum``; for quantized or shared moments; and for torch.distributed.checkpoint, which expects the
    keys that were saved. torch.optim loads any other state dict unchanged.

    Args:
        state_dict: The state dict of an optimizer of this package.

    Raises:
        ValueError: If torch has no such optimizer.

    Example:
        >>> torch.optim.Adam(model.parameters()).load_state_dict(cadam.for_torch(optimizer.state_dict()))
    """
    groups, state = [], dict(state_dict["state"])
    for number, saved in enumerate(state_dict["param_groups"]):
        removed = (*PACKAGE_ENTRIES, "fused") if saved.get(RULE_KEY) == "radam" else PACKAGE_ENTRIES
        group = {k: v for k, v in saved.items() if k not in removed}  # torch.optim has no fused RAdam.
        groups.append(group)
        if group.get("dampening", 0) is None:
            if group["nesterov"]:
                raise ValueError(f"group {number}: torch.optim.SGD has no nesterov=True with a moving average")
            group["dampening"] = group["momentum"]
        for key in saved["params"]:
            entry = state[key] = moment_state.to_float32_state(state.get(key), RULES.get(saved.get(RULE_KEY, "")))
            if entry and MAXIMUM in entry and FORMAT_KEY in saved:
                correction = 1 - float(group["betas"][1]) ** float(entry["step"])
                state[key] = {**entry, MAXIMUM: entry[MAXIMUM] * correction}
    return {"state": state, "param_groups": groups}


def join_state_dicts(*state_dicts: Mapping[str, Any]) -> dict[str, Any]:
    """Join the state dicts of several optimizers into one, with their groups in this order.

    It serves code that used one optimizer for dense parameters and another one for tables: a CAdam with the same groups
    loads the moments of both.

    Args:
        state_dicts: State dicts of this package or of torch.optim.

    Example:
        >>> optimizer = cadam.CAdam([{"params": dense}, {"params": tables}])
        >>> optimizer.load_state_dict(cadam.join_state_dicts(adam.state_dict(), sparse_adam.state_dict()))
    """
    groups: Groups = []
    state: State = {}
    for each in state_dicts:
        start = sum(len(group["params"]) for group in groups)
        keys = [key for group in each["param_groups"] for key in group["params"]]
        number = {key: start + i for i, key in enumerate(keys)}
        groups += [{**group, "params": [number[key] for key in group["params"]]} for group in each["param_groups"]]
        state.update({number.get(key, key): value for key, value in each["state"].items()})
    return {"state": state, "param_groups": groups}


def describe(group: Mapping[str, Any], position: int) -> str:
    """Return the label of a parameter in messages: its position and, if it has one, its name."""
    names = group.get("param_names")
    return f"{position} ({names[position]!r})" if names else str(position)


def _checked_groups(state_dict: Mapping[str, Any], groups: Groups) -> Groups:
    for key, kind in (("state", Mapping), ("param_groups", list)):
        if not isinstance(state_dict.get(key), kind):
            keys = ", ".join(map(str, list(state_dict)[:6]))
            kind_name = type(state_dict.get(key)).__name__
            raise ValueError(f"not an optimizer's state dict: {key!r} is {kind_name} (its keys are {keys})")
    saved: Groups = deepcopy(state_dict["param_groups"])
    if len(saved) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved)}, here {len(groups)}"
        )
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if "params" not in other:
            raise ValueError(f"not an optimizer's state dict: group {number} has no 'params'")
        if len(other["params"]) != len(group["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {number} has {len(other['params'])} parameters there and {len(group['params'])} here"
            )
    return saved


def _merge(group: Mapping[str, Any], saved: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group with saved options, but with its own execution options and those that define the class."""
    merged = {**group, **saved}
    merged.update(options.normalize({name: merged[name] for name in ("lr", "betas") if name in merged}))
    merged.update({k: group[k] for k in EXECUTION_OPTIONS if k in group})
    merged.update(fixed)
    merged.update({k: group[k] for k in ("params", "param_names") if k in group}, **{FORMAT_KEY: FORMAT})
    return merged


def _order_by_name(saved: Mapping[str, Any], group: Mapping[str, Any]) -> list[Any]:
    """Return the saved parameters in the order of the group: by name if both have the same names, else unchanged.

    Parameters with the same name keep their order.
    """
    saved_names, names = saved.get("param_names"), group.get("param_names")
    params: list[Any] = saved["params"]
    if saved_names and names and sorted(saved_names) == sorted(names):
        by_name = defaultdict[str, deque[Any]](deque)
        for name, param in zip(saved_names, params, strict=True):
            by_name[name].append(param)
        return [by_name[name].popleft() for name in names]
    return params


def _check_entry(
    entry: Any, param: Tensor, rule: Rule, group: Mapping[str, Any], where: str, *, by_row: bool
) -> dict[str, Any]:
    """Return the saved state of one parameter, with its step count.

    Args:
        entry: The saved state.
        param: The parameter.
        rule: The rule of the optimizer.
        group: The parameter's group after loading.
        where: The label of the parameter in messages.
        by_row: Whether second moments in it may be shared by a row.

    Raises:
        ValueError: If the state does not fit the parameter.
    """

    def refuse(problem: str) -> ValueError:
        return ValueError(f"the state dict does not fit: {where}: {problem}")

    if not isinstance(entry, Mapping):
        raise refuse(f"its state is {type(entry).__name__}, not a dict")
    values = {name: value for name, value in entry.items() if value is not None}
    if not values:
        return {}
    needed = rule.state(group)
    missing = [name for name in needed if name not in values and name not in rule.optional_buffers]
    if missing:
        has, needs = ", ".join(values), ", ".join(needed)
        raise refuse(f"no {', '.join(missing)} in it (it has {has}); {rule.name} needs {needs}")
    foreign = [name for name in MOMENTS if name in values and name not in needed]
    if foreign:
        raise refuse(f"{', '.join(foreign)} in it, which {rule.name} does not have: it belongs to another optimizer")
    if "step" not in values and not rule.step_independent:
        raise refuse(f"it has no step count, which {rule.name} needs")
    step = values.setdefault("step", 1.0)
    if isinstance(step, Tensor) and step.numel() != 1:
        raise refuse(f"step has shape {tuple(step.shape)}, not one element")
    if not isinstance(step, (Tensor, int, float)):
        raise refuse(f"step is {step!r}, not a number")
    if not 0 <= float(step) < math.inf:
        raise refuse(f"step is {float(step)}")
    seed = values.get(moment_storage.SEED, 0)
    if not (isinstance(seed, int) or (isinstance(seed, Tensor) and seed.numel() == 1 and seed.dtype == torch.int64)):
        raise refuse(f"{moment_storage.SEED} is {seed!r}, not an integer")
    for name in needed:
        value = values.get(name, param)
        if not isinstance(value, Tensor) or hasattr(value, "to_local") != hasattr(param, "to_local"):
            raise refuse(f"{name} is a {type(value).__name__}, the parameter a {type(param).__name__}")
        shared = (
            by_row
            and moment_state.can_be_row_moment(rule.moments.get(name))
            and value.shape == moment_state.row_shape(param)
        )
        if value.shape != param.shape and not shared:
            raise refuse(f"{name} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")
    problem = moment_state.saved_state_mismatch(values, param, rule, group)
    if problem is not None:
        raise refuse(problem)
    return values


def _copy_value(
    name: str,
    value: Any,
    param: Tensor,
    rule: Rule,
    group: Mapping[str, Any],
    buffer_dtype: Callable[[Tensor, Mapping[str, Any]], torch.dtype],
) -> Any:
    """Return a copy of a saved value: buffers in the dtype of the state, on the device of the parameter."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    if name == moment_storage.SEED:
        return value.detach().cpu().clone()
    kept = name not in (*rule.state(group), MAXIMUM) or value.dtype == torch.uint8 or value.shape != param.shape
    dtype = value.dtype if kept else buffer_dtype(param, group)
    if name in rule.state(group) and value.shape != param.shape and group["second_moment"] != "row":
        # The second moment was shared by a row in the checkpoint, and here it is not.
        value, dtype = value.expand(param.shape), buffer_dtype(param, group)
    if value.shape == param.shape and not hasattr(param, "to_local"):  # Use the memory layout of the parameter.
        like = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
        return like.copy_(value.detach())
    return value.detach().to(device=param.device, dtype=dtype, copy=True)
