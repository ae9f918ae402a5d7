"""State dicts: reading what torch.optim wrote, and writing what it can read.

The names are torch's own (step, exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer), so for most optimizers
a state dict simply fits in both directions. Four things need care:

- torch casts moments to the parameter's dtype when it loads; ours keep their own (float32 for half parameters).
- torch's max_exp_avg_sq is the maximum of the raw second moment, ours of the corrected one. `FORMAT_KEY` in a
  group says that the state is ours; without it the maximum is converted. `for_torch` converts back.
- Quantized moments (`cadam.rules.moment_storage`) are loaded as they are; where the optimizer stores them otherwise,
  the next step converts them, rounded to the nearest. `for_torch` decodes them.
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
"""What a group's state was made by. With and without confidence a rule is the same one."""
MAXIMUM = "max_exp_avg_sq"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of rules that always keep them
TORCHS = ("foreach", "fused", "capturable", "differentiable")
OURS = (FORMAT_KEY, RULE_KEY, *(name for name in EXECUTION_OPTIONS if name not in TORCHS))  # not options of torch's

State = dict[Any, Any]  # by parameter; other keys are notes that hooks left there
Groups = list[dict[str, Any]]


def read(
    state_dict: Mapping[str, Any],
    groups: Groups,
    rule: Rule,
    fixed: Mapping[str, Any],
    new_step: Callable[[float, Tensor, Mapping[str, Any]], Tensor],
    buffer_dtype: Callable[[Tensor, Mapping[str, Any]], torch.dtype],
) -> tuple[Groups, State]:
    """The groups and state that an optimizer with these `groups` takes over; copies, nothing is changed.

    `fixed` are the options that the optimizer's class stands for. Raises ValueError, naming group and
    parameter, if the state dict does not fit.
    """
    saved_groups = _checked_groups(state_dict, groups)
    saved_state = state_dict["state"]
    new_groups: Groups = []
    new_state: State = {}
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        by = saved.get(RULE_KEY, rule.name)
        if by != rule.name:
            raise ValueError(f"the state dict does not fit: group {number} is of {by}, this optimizer of {rule.name}")
        mine = _merged(group, saved, fixed)
        try:
            options.check(rule, mine)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"the state dict does not fit: group {number}: {error}") from error
        new_groups.append(mine)
        for position, (param, key) in enumerate(zip(group["params"], _in_order(saved, group), strict=True)):
            entry = saved_state.get(key)
            if not entry:
                continue
            where = f"group {number}, parameter {describe(group, position)}"
            by_row = FORMAT_KEY in saved or mine["second_moment"] == "row"
            entry = _fitting(entry, param, rule, mine, where, by_row=by_row)
            if not entry:
                continue
            step = new_step(float(entry.pop("step")), param, mine)
            if MAXIMUM in entry and FORMAT_KEY not in saved and step > 0:
                entry[MAXIMUM] = entry[MAXIMUM] / (1 - float(mine["betas"][1]) ** float(step))
            new_state[param] = {"step": step}
            for name, value in entry.items():
                new_state[param][name] = _adopted(name, value, param, rule, mine, buffer_dtype)
    of_params = {key for saved in saved_groups for key in saved["params"]}
    notes = {key: deepcopy(value) for key, value in saved_state.items() if key not in of_params}
    return new_groups, {**new_state, **notes}


def for_torch(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of one of our state dicts as torch.optim writes it, without the options it does not know.

    Needed for AMSGrad, whose maximum is converted to torch's, for the moving average of SGDM, which torch writes as
    ``dampening = momentum``, for moments that are not one float32 an element, and for torch.distributed.checkpoint,
    which wants the keys of what was saved; any other state dict torch loads as it is.
    """
    groups, state = [], dict(state_dict["state"])
    for number, saved in enumerate(state_dict["param_groups"]):
        ours = (*OURS, "fused") if saved.get(RULE_KEY) == "radam" else OURS  # torch has no fused RAdam
        group = {k: v for k, v in saved.items() if k not in ours}
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
    """The state dicts of several optimizers as that of a single one with the groups of all, in this order.

    For those who have had one optimizer for dense parameters and another for tables: a CAdam with the same groups
    loads the moments of both.
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
    """A parameter as messages name it: by its name if it has one."""
    names = group.get("param_names")
    return f"{position} ({names[position]!r})" if names else str(position)


def _checked_groups(state_dict: Mapping[str, Any], groups: Groups) -> Groups:
    for key, kind in (("state", Mapping), ("param_groups", list)):
        if not isinstance(state_dict.get(key), kind):
            keys = ", ".join(map(str, list(state_dict)[:6]))
            found = type(state_dict.get(key)).__name__
            raise ValueError(f"not an optimizer's state dict: {key!r} is {found} (its keys are {keys})")
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


def _merged(group: Mapping[str, Any], saved: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The saved options over ours; how a step runs, and what the class stands for, stays ours."""
    merged = {**group, **saved}
    merged.update(options.normalize({name: merged[name] for name in ("lr", "betas") if name in merged}))
    merged.update({k: group[k] for k in EXECUTION_OPTIONS if k in group})
    merged.update(fixed)
    merged.update({k: group[k] for k in ("params", "param_names") if k in group}, **{FORMAT_KEY: FORMAT})
    return merged


def _in_order(saved: Mapping[str, Any], group: Mapping[str, Any]) -> list[Any]:
    """The saved parameters in the order of ours: by name where both have the same names, else as they come.

    The first of a name that several have is the first of that name here, and so on.
    """
    theirs, ours = saved.get("param_names"), group.get("param_names")
    params: list[Any] = saved["params"]
    if theirs and ours and sorted(theirs) == sorted(ours):
        by_name = defaultdict[str, deque[Any]](deque)
        for name, param in zip(theirs, params, strict=True):
            by_name[name].append(param)
        return [by_name[name].popleft() for name in ours]
    return params


def _fitting(
    entry: Any, param: Tensor, rule: Rule, group: Mapping[str, Any], where: str, *, by_row: bool
) -> dict[str, Any]:
    """The saved state of one parameter, with its step, if it fits; ValueError if not.

    `by_row`: may rows share their second moments in it?
    """

    def refuse(problem: str) -> ValueError:
        return ValueError(f"the state dict does not fit: {where}: {problem}")

    if not isinstance(entry, Mapping):
        raise refuse(f"its state is {type(entry).__name__}, not a dict")
    given = {name: value for name, value in entry.items() if value is not None}
    if not given:
        return {}
    needed = rule.state(group)
    missing = [name for name in needed if name not in given and name not in rule.optional_buffers]
    if missing:
        has, needs = ", ".join(given), ", ".join(needed)
        raise refuse(f"no {', '.join(missing)} in it (it has {has}); {rule.name} needs {needs}")
    foreign = [name for name in MOMENTS if name in given and name not in needed]
    if foreign:
        raise refuse(f"{', '.join(foreign)} in it, which {rule.name} does not keep: it is of another optimizer")
    if "step" not in given and not rule.step_independent:
        raise refuse(f"it has no step count, which {rule.name} needs")
    step = given.setdefault("step", 1.0)
    if isinstance(step, Tensor) and step.numel() != 1:
        raise refuse(f"step has shape {tuple(step.shape)}, not one element")
    if not 0 <= float(step) < math.inf:
        raise refuse(f"step is {float(step)}")
    for name in needed:
        value = given.get(name, param)
        if not isinstance(value, Tensor) or hasattr(value, "to_local") != hasattr(param, "to_local"):
            raise refuse(f"{name} is a {type(value).__name__}, the parameter a {type(param).__name__}")
        shared = (
            by_row
            and moment_state.can_be_row_moment(rule.moments.get(name))
            and value.shape == moment_state.row_shape(param)
        )
        if value.shape != param.shape and not shared:
            raise refuse(f"{name} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")
    problem = moment_state.saved_state_mismatch(given, param, rule, group)
    if problem is not None:
        raise refuse(problem)
    return given


def _adopted(
    name: str,
    value: Any,
    param: Tensor,
    rule: Rule,
    group: Mapping[str, Any],
    buffer_dtype: Callable[[Tensor, Mapping[str, Any]], torch.dtype],
) -> Any:
    """A copy of one saved value: buffers in their own dtype on the parameter's device, others as they are."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    if name == moment_storage.SEED:
        return value.detach().cpu().clone()
    kept = name not in (*rule.state(group), MAXIMUM) or value.dtype == torch.uint8 or value.shape != param.shape
    dtype = value.dtype if kept else buffer_dtype(param, group)
    if name in rule.state(group) and value.shape != param.shape and group["second_moment"] != "row":
        value, dtype = value.expand(param.shape), buffer_dtype(param, group)  # rows shared it, and shall not any more
    if value.shape == param.shape and not hasattr(param, "to_local"):  # laid out as the parameter is
        like = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
        return like.copy_(value.detach())
    return value.detach().to(device=param.device, dtype=dtype, copy=True)
