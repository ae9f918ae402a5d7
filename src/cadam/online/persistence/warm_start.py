"""Models trained elsewhere, with one optimizer or with several, as the state that a learner begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

OPTIONS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize")
"""What is taken over beside moments; not the learning rate, which stays that of the new optimizer."""
NOT_OF_SPARSE_ADAM = {"weight_decay": 0.0, "decoupled_weight_decay": False, "amsgrad": False, "maximize": False}
EXPECTED = (
    "expected {'model': state dict, 'optimizer': state dict or a list of them}, or in several files: a model's state "
    "dict, and each optimizer's"
)


@dataclass(frozen=True)
class Trained:
    """A model's state dict, and those of the optimizers that trained it."""

    model: Mapping[str, Tensor]
    optimizers: list[Mapping[str, Any]]


def read_trained(given: Mapping[str, Any] | Path | str | Sequence[Any]) -> Trained:
    """What was saved: as a dict, a file of it, or several of either. ValueError if no model or two are among them."""
    models: list[Mapping[str, Tensor]] = []
    optimizers: list[Mapping[str, Any]] = []
    for part in [given] if isinstance(given, (Mapping, Path, str)) else given:
        where = "" if isinstance(part, Mapping) else f"{part}: "
        saved = part if isinstance(part, Mapping) else torch.load(part, map_location="cpu", weights_only=True)
        for one in saved if isinstance(saved, (list, tuple)) else [saved]:
            if not isinstance(one, Mapping):
                raise ValueError(f"{where}{EXPECTED}; there is a {type(one).__name__}")
            if "model" in one and not isinstance(one["model"], Tensor):
                models.append(one["model"])
                optimizers += _listed(one.get("optimizer"))
            elif "param_groups" in one:
                optimizers.append(one)
            elif one and all(isinstance(value, Tensor) for value in one.values()):
                models.append(one)
            else:
                keys = ", ".join(map(str, list(one)[:6]))
                raise ValueError(f"{where}{EXPECTED}; its keys are {keys or 'none'}")
    if len(models) != 1:
        raise ValueError(f"{EXPECTED}; there are {len(models)} models")
    return Trained(models[0], optimizers)


def _listed(saved: Any) -> list[Mapping[str, Any]]:
    """One optimizer's state dict, a list of them or a dict of them by name, as a list."""
    if saved is None:
        return []
    if (
        isinstance(saved, Mapping)
        and "param_groups" not in saved
        and all(isinstance(one, Mapping) for one in saved.values())
    ):
        return list(saved.values())
    return list(saved) if isinstance(saved, (list, tuple)) else [saved]


def check_complete(optimizer: Mapping[str, Any], parameters: int) -> None:
    """That one optimizer has moments of all parameters; fewer are half of a job with two."""
    has = sum(len(group["params"]) for group in optimizer.get("param_groups", ()))
    if 0 < has < parameters:
        raise ValueError(
            f"the optimizer ({_kind(optimizer)}) has {has} of the model's {parameters} parameters: give the other one's"
            " state dict too, in a list under 'optimizer' or in a file of its own (--warm-start again)"
        )


def with_options(state_dict: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with these options in every group, in place of its own."""
    return {**state_dict, "param_groups": [{**group, **options} for group in state_dict["param_groups"]]}


# Several optimizers as one ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """What an optimizer had of one parameter: its options, and its moments if it took a step."""

    by: str
    options: Mapping[str, Any]
    state: Any


def join_optimizers(
    optimizers: Sequence[Mapping[str, Any]], model: nn.Module, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The state dict of one optimizer with these `groups` from those of several, parameter by parameter.

    Parameters are told by name, where the state dicts have names (optimizers that were made with
    ``model.named_parameters()``). Else there are two, SparseAdam's for the sparse tables of the model and another for
    the rest, each in the model's order. ValueError says what does not fit.
    """
    names = {param: name for name, param in model.named_parameters()}
    found: dict[str, Saved] = {}
    for number, (one, own) in enumerate(_owned(optimizers, model)):
        by = f"optimizer {number} ({_kind(one)})"
        for group, members in zip(one["param_groups"], own, strict=True):
            for key, name in zip(group["params"], members, strict=True):
                if name not in names.values():
                    raise ValueError(f"{by} has a parameter {name!r}, and the model has none of that name")
                if name in found:
                    raise ValueError(f"{name} is a parameter of {found[name].by} and of {by}: each belongs to one")
                found[name] = Saved(by, _options(group), one["state"].get(key))
    joined_groups, state, place = [], {}, 0
    for number, group in enumerate(groups):
        members = [names[param] for param in group["params"]]
        missing = [name for name in members if name not in found]
        if missing:
            raise ValueError(f"no optimizer has {', '.join(missing)}, which the model has")
        keys = list(range(place, place + len(members)))
        place += len(members)
        options = _agreed([found[name] for name in members], members, number)
        joined_groups.append({**options, "params": keys})
        state.update({key: found[name].state for key, name in zip(keys, members, strict=True) if found[name].state})
    return {"state": state, "param_groups": joined_groups}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    given = {**NOT_OF_SPARSE_ADAM, **{name: group[name] for name in OPTIONS if name in group}}
    return {name: tuple(map(float, value)) if name == "betas" else value for name, value in given.items()}


def _agreed(saved: Sequence[Saved], members: Sequence[str], number: int) -> Mapping[str, Any]:
    """The options of one group's parameters, which must be the same for all."""
    first = saved[0]
    for one, name in zip(saved, members, strict=True):
        for option, value in one.options.items():
            if value != (expected := first.options.get(option, "not there")):
                raise ValueError(
                    f"{option} is {expected} for {members[0]} ({first.by}) and {value} for {name} "
                    f"({one.by}), and both are in group {number} here: give the optimizer a group for each"
                )
    return first.options


def _kind(state_dict: Mapping[str, Any]) -> str:
    """SparseAdam has none of the options that all other optimizers of torch with moments have."""
    return "a dense optimizer" if any("weight_decay" in g for g in state_dict["param_groups"]) else "SparseAdam"


def _owned(
    optimizers: Sequence[Mapping[str, Any]], model: nn.Module
) -> list[tuple[Mapping[str, Any], list[list[str]]]]:
    """Each optimizer with the names of its parameters, by group."""
    for one in optimizers:
        if not isinstance(one, Mapping) or not {"state", "param_groups"} <= one.keys():
            raise ValueError("not an optimizer's state dict: it has no 'state' and 'param_groups'")
    if all("param_names" in group for one in optimizers for group in one["param_groups"]):
        return [(one, [list(group["param_names"]) for group in one["param_groups"]]) for one in optimizers]
    sparse = [one for one in optimizers if _kind(one) == "SparseAdam"]
    if len(optimizers) != 2 or len(sparse) != 1:
        kinds = ", ".join(map(_kind, optimizers))
        raise ValueError(
            f"the optimizers ({kinds}) do not say whose parameters they have: save them with names, as of "
            "torch.optim.Adam(model.named_parameters()), or give SparseAdam's and one other"
        )
    tables = _sparse_tables(model)
    dense = [name for name, _ in model.named_parameters() if name not in tables]
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    return [(one, _in_order(one, tables if one is sparse[0] else dense, shapes)) for one in optimizers]


def _sparse_tables(model: nn.Module) -> list[str]:
    """The tables of the model whose gradients are sparse, in its order."""
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return [name for name, param in model.named_parameters() if id(param) in tables]


def _in_order(one: Mapping[str, Any], names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """The names for the parameters of a state dict without names, one after the other, if the shapes fit."""
    what = "sparse tables" if _kind(one) == "SparseAdam" else "other parameters"
    keys = [key for group in one["param_groups"] for key in group["params"]]
    if len(keys) != len(names):
        raise ValueError(
            f"{_kind(one)} has {len(keys)} parameters, and the model has {len(names)} {what} "
            f"({', '.join(names) or 'none'}): save the optimizers with names, made with model.named_parameters()"
        )
    for key, name in zip(keys, names, strict=True):
        moment = (one["state"].get(key) or {}).get("exp_avg")
        if isinstance(moment, Tensor) and tuple(moment.shape) != shapes[name]:
            raise ValueError(
                f"{_kind(one)} has a moment of shape {tuple(moment.shape)} where {name} has {shapes[name]}: save the "
                "optimizers with names, made with model.named_parameters()"
            )
    by_key = dict(zip(keys, names, strict=True))
    return [[by_key[key] for key in group["params"]] for group in one["param_groups"]]
