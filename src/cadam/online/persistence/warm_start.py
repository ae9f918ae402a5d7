"""Warm start: a learner begins with a model that was trained elsewhere, and with the state of its optimizers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...checkpoint_files import read_tree
from .checkpoints import CHECKPOINT_NAME

OPTIONS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize")
"""Options that a warm start copies from a saved optimizer. The learning rate stays that of the new optimizer."""
SPARSE_ADAM_DEFAULTS = {"weight_decay": 0.0, "decoupled_weight_decay": False, "amsgrad": False, "maximize": False}
"""Options that SparseAdam does not have, with the values that describe its behavior."""
EXPECTED = (
    "expected {'model': state dict, 'optimizer': state dict or a list of them}, or in several files: a model's state "
    "dict, and each optimizer's"
)

Saved: TypeAlias = Mapping[str, Any] | Path | str | Sequence[Any]
"""A trained model as a dict, as a file written by `torch.save`, or as several of either."""


@dataclass(frozen=True)
class TrainedModel:
    """The state dicts of a model and of the optimizers that trained it."""

    model: Mapping[str, Tensor]
    optimizers: list[Mapping[str, Any]]


def warm_start(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Saved, options: Mapping[str, Any] | None = None
) -> None:
    """Load a trained model and the state of its optimizers, or change nothing and raise.

    Args:
        model: receives the weights.
        optimizer: receives the moments and options. Its learning rates do not change.
        saved: the trained model, see `read_trained`.
        options: options of the optimizer that take precedence over the saved ones.

    Raises:
        ValueError: if the optimizers do not fit.
        RuntimeError: if the model does not fit.
    """
    trained = read_trained(saved)
    groups = optimizer.param_groups
    states = trained.optimizers
    if len(states) > 1:
        states = [join_optimizers(states, model, groups)]
    elif states:
        check_complete(states[0], sum(len(group["params"]) for group in groups))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    learning_rates = [group["lr"] for group in groups]
    try:
        model.load_state_dict(trained.model)
        for state in states:
            optimizer.load_state_dict(with_options(state, options or {}))
    except Exception:
        # torch loads the weights that fit before it raises for those that do not.
        model.load_state_dict(weights)
        raise
    for group, lr in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = lr


def read_trained(saved: Saved) -> TrainedModel:
    """Read a trained model.

    Args:
        saved: a dict ``{"model": state dict, "optimizer": state dict or several}``, a file of such a dict, or a
            sequence of dicts and files that contains exactly one model. A checkpoint of a learner is such a file.

    Raises:
        ValueError: if there is not exactly one model, or if something is neither a model nor an optimizer.
    """
    models: list[Mapping[str, Tensor]] = []
    optimizers: list[Mapping[str, Any]] = []
    for part in [saved] if isinstance(saved, (Mapping, Path, str)) else saved:
        origin = "" if isinstance(part, Mapping) else f"{part}: "
        content = part if isinstance(part, Mapping) else _read_file(Path(part))
        for state in content if isinstance(content, (list, tuple)) else [content]:
            if not isinstance(state, Mapping):
                raise ValueError(f"{origin}{EXPECTED}; got a {type(state).__name__}")
            if "model" in state and not isinstance(state["model"], Tensor):
                models.append(state["model"])
                optimizers += _as_list(state.get("optimizer"))
            elif "param_groups" in state:
                optimizers.append(state)
            elif state and all(isinstance(value, Tensor) for value in state.values()):
                models.append(state)
            else:
                keys = ", ".join(map(str, list(state)[:6]))
                raise ValueError(f"{origin}{EXPECTED}; got a dict with the keys {keys or '(none)'}")
    if len(models) != 1:
        raise ValueError(f"{EXPECTED}; got {len(models)} models")
    return TrainedModel(models[0], optimizers)


def _read_file(path: Path) -> Any:
    """Read a file of `torch.save` without running code, or a checkpoint of a learner.

    Raises:
        ValueError: if the file is neither.
    """
    if CHECKPOINT_NAME.fullmatch(path.name):
        return read_tree(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError) as error:
        size = path.stat().st_size
        reason = "it is empty" if not size else str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a file of torch.save that is safe to read: {reason}") from error


def _as_list(saved: Any) -> list[Mapping[str, Any]]:
    """Convert one optimizer's state dict, a list of them, or a dict of them by name to a list."""
    if saved is None:
        return []
    if isinstance(saved, (list, tuple)):
        return list(saved)
    is_dict_of_optimizers = (
        isinstance(saved, Mapping)
        and "param_groups" not in saved
        and all(isinstance(state, Mapping) for state in saved.values())
    )
    return list(saved.values()) if is_dict_of_optimizers else [saved]


def check_complete(optimizer: Mapping[str, Any], parameters: int) -> None:
    """Raise if one of two optimizers is missing, that is, if the state covers only some of the model's parameters.

    Raises:
        ValueError: if the optimizer has fewer parameters than the model.
    """
    count = sum(len(group["params"]) for group in optimizer.get("param_groups", ()))
    if 0 < count < parameters:
        raise ValueError(
            f"the optimizer ({_kind(optimizer)}) has {count} of the model's {parameters} parameters: give the state "
            "dict of the other optimizer too, in a list under 'optimizer' or in another file (--warm-start again)"
        )


def with_options(state_dict: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an optimizer's state dict and replace options in every group."""
    return {**state_dict, "param_groups": [{**group, **options} for group in state_dict["param_groups"]]}


@dataclass(frozen=True)
class SavedParameter:
    """The options and the state that a saved optimizer has for one parameter."""

    owner: str
    """The saved optimizer, as error messages name it."""
    options: Mapping[str, Any]
    state: Any
    """The moments; None if the optimizer has not taken a step with this parameter."""


def join_optimizers(
    optimizers: Sequence[Mapping[str, Any]], model: nn.Module, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Combine the state dicts of several optimizers into the state dict of one.

    Parameters are identified by name if the state dicts contain names, which is the case if the optimizers were
    created with ``model.named_parameters()``. Otherwise there must be two optimizers: SparseAdam for the sparse tables
    of the model and another one for all other parameters, each in the order of the model.

    Args:
        optimizers: the state dicts.
        model: the model whose parameters the optimizers have trained.
        groups: the parameter groups of the new optimizer.

    Raises:
        ValueError: if a parameter is missing, unknown or in two optimizers, or if the options of the parameters of one
            new group differ.
    """
    names = {param: name for name, param in model.named_parameters()}
    saved: dict[str, SavedParameter] = {}
    for number, (state_dict, names_by_group) in enumerate(_with_names(optimizers, model)):
        owner = f"optimizer {number} ({_kind(state_dict)})"
        for group, members in zip(state_dict["param_groups"], names_by_group, strict=True):
            for key, name in zip(group["params"], members, strict=True):
                if name not in names.values():
                    raise ValueError(f"{owner} has a parameter {name!r}, and the model has none of that name")
                if name in saved:
                    raise ValueError(f"{name} is a parameter of {saved[name].owner} and of {owner}: it may be in one")
                saved[name] = SavedParameter(owner, _options(group), state_dict["state"].get(key))
    joined_groups: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    start = 0
    for number, group in enumerate(groups):
        members = [names[param] for param in group["params"]]
        missing = [name for name in members if name not in saved]
        if missing:
            raise ValueError(f"no optimizer has {', '.join(missing)}, which the model has")
        keys = range(start, start + len(members))
        start += len(members)
        joined_groups.append({**_common_options(members, saved, number), "params": list(keys)})
        state.update({key: saved[name].state for key, name in zip(keys, members, strict=True) if saved[name].state})
    return {"state": state, "param_groups": joined_groups}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {**SPARSE_ADAM_DEFAULTS, **{name: group[name] for name in OPTIONS if name in group}}
    if "betas" in options:
        options["betas"] = tuple(map(float, options["betas"]))
    return options


def _common_options(members: Sequence[str], saved: Mapping[str, SavedParameter], number: int) -> Mapping[str, Any]:
    """Return the options of the parameters of group `number`, which must be the same for all of them."""
    first = saved[members[0]]
    for name in members:
        for option, value in saved[name].options.items():
            if value != (expected := first.options.get(option, "missing")):
                raise ValueError(
                    f"{option} is {expected} for {members[0]} ({first.owner}) and {value} for {name} "
                    f"({saved[name].owner}), and both are in group {number} here: give the optimizer a group for each"
                )
    return first.options


def _kind(state_dict: Mapping[str, Any]) -> str:
    """Describe the kind of a saved optimizer. SparseAdam is the only one without the option weight_decay."""
    return "a dense optimizer" if any("weight_decay" in g for g in state_dict["param_groups"]) else "SparseAdam"


def _with_names(
    optimizers: Sequence[Mapping[str, Any]], model: nn.Module
) -> list[tuple[Mapping[str, Any], list[list[str]]]]:
    """Pair each optimizer with the names of its parameters, by group."""
    for state_dict in optimizers:
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("not an optimizer's state dict: it has no 'state' and 'param_groups'")
    if all("param_names" in group for state_dict in optimizers for group in state_dict["param_groups"]):
        return [
            (state_dict, [list(group["param_names"]) for group in state_dict["param_groups"]])
            for state_dict in optimizers
        ]
    sparse = [state_dict for state_dict in optimizers if _kind(state_dict) == "SparseAdam"]
    if len(optimizers) != 2 or len(sparse) != 1:
        kinds = ", ".join(map(_kind, optimizers))
        raise ValueError(
            f"it is unknown which parameters the optimizers ({kinds}) have: save them with names, as in "
            "torch.optim.Adam(model.named_parameters()), or give SparseAdam and one other optimizer"
        )
    tables = _sparse_tables(model)
    dense = [name for name, _ in model.named_parameters() if name not in tables]
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    return [
        (state_dict, _names_in_order(state_dict, tables if state_dict is sparse[0] else dense, shapes))
        for state_dict in optimizers
    ]


def _sparse_tables(model: nn.Module) -> list[str]:
    """List the names of the embedding tables with sparse gradients, in the order of the model."""
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return [name for name, param in model.named_parameters() if id(param) in tables]


def _names_in_order(
    state_dict: Mapping[str, Any], names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> list[list[str]]:
    """Assign names to the parameters of a state dict without names, in order, and check the shapes of the moments."""
    kind_of_parameters = "sparse tables" if _kind(state_dict) == "SparseAdam" else "other parameters"
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(keys) != len(names):
        raise ValueError(
            f"{_kind(state_dict)} has {len(keys)} parameters, and the model has {len(names)} {kind_of_parameters} "
            f"({', '.join(names) or 'none'}): save the optimizers with names, made with model.named_parameters()"
        )
    for key, name in zip(keys, names, strict=True):
        moment = (state_dict["state"].get(key) or {}).get("exp_avg")
        if isinstance(moment, Tensor) and tuple(moment.shape) != shapes[name]:
            raise ValueError(
                f"{_kind(state_dict)} has a moment of shape {tuple(moment.shape)} where {name} has {shapes[name]}: "
                "save the optimizers with names, made with model.named_parameters()"
            )
    by_key = dict(zip(keys, names, strict=True))
    return [[by_key[key] for key in group["params"]] for group in state_dict["param_groups"]]
