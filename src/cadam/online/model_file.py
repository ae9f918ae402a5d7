"""A model and its optimizer as a command line names them: FILE.py:FUNCTION, a name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import cadam

from .schema import Schema
from .validation import check_arguments

LOG_LOSS = nn.functional.binary_cross_entropy_with_logits


class UsageError(ValueError):
    """Invalid usage: what was given is named, and what to give instead."""


def load(place: str) -> tuple[ModuleType, Callable[[], Any]]:
    """The module and the function that FILE:FUNCTION names."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not file:
        raise UsageError(f"{place!r} should be a file and a function in it, as in model.py:build")
    if not path.is_file():
        raise UsageError(f"{file} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file")
    sys.path.insert(0, str(path.parent.resolve()))  # its neighbours can be imported, as with `python FILE`
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    build = getattr(module, name, None)
    if not callable(build):
        raise UsageError(f"{file} has no function {name!r}")
    return module, build


def model_of(place: str, build: Callable[[], Any], schema: Schema) -> nn.Module:
    """A new model, which can be called with the features of the schema."""
    model = build()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{place} gave a {type(model).__name__}, not a torch.nn.Module")
    check_arguments(model, schema, place)
    return model


def class_of(name: str) -> type[cadam.Optimizer]:
    """An optimizer of the family by name, in any case."""
    classes = [kind for known in cadam.__all__ if isinstance(kind := getattr(cadam, known), type)]
    family = {kind.__name__.lower(): kind for kind in classes if issubclass(kind, cadam.Optimizer)}
    del family["optimizer"]  # the base of all
    if name.lower() not in family:
        names = ", ".join(sorted(kind.__name__ for kind in family.values()))
        raise UsageError(f"no optimizer {name!r}; there are {names}")
    return family[name.lower()]


def optimizer_of(name: str, model: nn.Module, lr: float) -> cadam.Optimizer:
    """A new optimizer of the family for a model."""
    made: cadam.Optimizer = class_of(name)(model.named_parameters(), lr=lr)
    return made
