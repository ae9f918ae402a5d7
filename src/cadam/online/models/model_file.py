"""A model and its optimizer as a command line names them: FILE.py:FUNCTION, and a name with options."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import cadam

from ...optim.options import describe_unknown
from ..data.schema import Schema
from ..data.validation import check_arguments

NOT_HERE = ("params", "lr", "differentiable", "state_dtype")
"""Options of an optimizer that a command line does not give in its name."""
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


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of the family as a command line names it: NAME, or NAME:OPTION=VALUE:..."""

    kind: type[cadam.Optimizer]
    options: dict[str, Any]

    @classmethod
    def of(cls, text: str) -> OptimizerSpec:
        """Read from text, in which the name may be in any case. Raises UsageError where there is no such optimizer."""
        name, *given = (part.strip() for part in text.split(":"))
        kind = _class_of(name)
        usual = {p.name: p.default for p in inspect.signature(kind).parameters.values() if p.name not in NOT_HERE}
        options: dict[str, Any] = {}
        for one in given:
            option, equals, value = (part.strip() for part in one.partition("="))
            if not equals:
                raise UsageError(f"{text}: expected OPTION=VALUE after a colon, as in CAdam:moments=int8, got {one!r}")
            if option == "lr":
                raise UsageError(f"{text}: the learning rate is given by --lr")
            if option not in usual:
                raise UsageError(f"{text}: {describe_unknown(option, usual)}")
            if option in options:
                raise UsageError(f"{text}: {option} is there twice")
            options[option] = _like(usual[option], _value(value))
        made = cls(kind, dict(sorted(options.items())))
        try:
            made._try()
        except (ValueError, TypeError, RuntimeError) as error:
            raise UsageError(f"{text}: {error}") from error
        return made

    def __str__(self) -> str:
        return ":".join([self.kind.__name__, *(f"{option}={value}" for option, value in self.options.items())])

    def _try(self) -> None:
        """Take a step with a table and a dense parameter: what cannot be is refused by the constructor, or there."""
        model = nn.ModuleList(nn.Embedding(2, 2, sparse=sparse, _weight=torch.zeros(2, 2)) for sparse in (True, False))
        optimizer = self.build(model, 1e-3)
        sum(table(torch.tensor([0])).sum() for table in model).backward()
        optimizer.step()

    def build(self, model: nn.Module, lr: float) -> cadam.Optimizer:
        """A new optimizer for a model."""
        return self.kind(model.named_parameters(), lr=lr, **self.options)


def _class_of(name: str) -> type[cadam.Optimizer]:
    classes = [kind for known in cadam.__all__ if isinstance(kind := getattr(cadam, known), type)]
    family = {kind.__name__.lower(): kind for kind in classes if issubclass(kind, cadam.Optimizer)}
    del family["optimizer"]  # the base of all
    if name.lower() not in family:
        names = ", ".join(sorted(kind.__name__ for kind in family.values()))
        raise UsageError(f"no optimizer {name!r}; there are {names}")
    return family[name.lower()]


def _value(text: str) -> Any:
    """A number, True, a tuple or the like as Python writes it; anything else is a word."""
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _like(usual: Any, value: Any) -> Any:
    """A value as the default has it, if it can be: a float, or a tuple of them. What cannot is refused later."""
    if isinstance(usual, float) and type(value) is int:
        return float(value)
    if isinstance(usual, tuple) and isinstance(value, (tuple, list)):
        return tuple(float(one) if type(one) is int else one for one in value)
    return value
