"""Models and optimizers as a command line names them: FILE.py:FUNCTION, and a name with options."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import cadam

from ...engines.resolved_group import EXECUTION_OPTIONS
from ...optim.options import describe_unknown
from ..data.schema import Schema
from ..data.validation import check_arguments

EXCLUDED_OPTIONS = ("params", "lr", "differentiable", "state_dtype")
"""Options of an optimizer that cannot be given on the command line after its name."""
LOG_LOSS = nn.functional.binary_cross_entropy_with_logits


def is_log_loss(loss: Any) -> bool:
    """Whether a loss is the log loss of torch, also as a module or with further arguments."""
    return isinstance(loss, nn.BCEWithLogitsLoss) or getattr(loss, "func", loss) is LOG_LOSS


def accepts_weight(loss: Any) -> bool:
    """Whether a loss has a parameter `weight` for the weights of events."""
    parameters = inspect.signature(loss).parameters
    return "weight" in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


class UsageError(ValueError):
    """A command or a call that cannot be executed. The message says what to give instead."""


def is_model_file(model: str) -> bool:
    """Whether a model is given as FILE.py:FUNCTION, and not by the name of a ready-made model."""
    return ":" in model


def load_function(location: str) -> tuple[ModuleType, Callable[[], Any]]:
    """Import the file of FILE.py:FUNCTION.

    Returns:
        The module and the function.

    Raises:
        UsageError: if the file or the function does not exist, or if the file cannot be parsed.
    """
    file, _, name = location.rpartition(":")
    path = Path(file)
    if not file:
        raise UsageError(f"{location!r} should be a file and a function in it, as in model.py:build")
    if not path.is_file():
        raise UsageError(f"{file} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file")
    # As with `python FILE`, the file can import other files of its folder.
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UsageError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{file} has no function {name!r}")
    return module, function


def imported_files(file: Path) -> list[Path]:
    """Return the files in the folder of a model file that it imports, directly or through each other, without itself.

    They are found by the import statements in the code, so imports with a computed name are not found.
    """
    file = file.resolve()
    folder, files, queue = file.parent, {file}, [file]
    while queue:
        importer = queue.pop()
        for name in _imported_names(importer, folder):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):  # the packages that contain the module are executed, too
                module = folder.joinpath(*parts[:end])
                for path in (module.with_name(f"{module.name}.py"), module / "__init__.py"):
                    if path not in files and path.is_file():
                        files.add(path)
                        queue.append(path)
    return sorted(files - {file})


def _imported_names(importer: Path, folder: Path) -> Iterator[str]:
    """Yield the full names of everything that a file in a folder imports; some of them may not be modules."""
    try:
        tree = ast.parse(importer.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = importer.relative_to(folder).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = [*parents, *([node.module] if node.module else [])]
            yield from (
                ".".join([*base, *names]) for names in ([], *([alias.name] for alias in node.names)) if base or names
            )


def build_from_function(location: str, function: Callable[[], Any], schema: Schema) -> nn.Module:
    """Build a model with a user's function, and check that it accepts the features of the schema.

    Raises:
        UsageError: if the function fails, or does not return a torch.nn.Module.
    """
    try:
        model = function()
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{location} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{location} returned a {type(model).__name__}, not a torch.nn.Module")
    check_arguments(model, schema, location)
    return model


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of cadam with options, as in ``CAdam`` or ``CAdam:moments=int8:weight_decay=0.01``.

    An option may be limited to some parameters by a pattern for their names, as in ``CAdam:confidence@*.bias=False``.
    They then form a parameter group.
    """

    kind: type[cadam.Optimizer]
    options: dict[str, Any]
    group_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The options of the parameters whose names match a pattern, as in `fnmatch`. A later pattern takes precedence."""

    @classmethod
    @cache
    def parse(cls, text: str) -> OptimizerSpec:
        """Parse NAME or NAME:OPTION=VALUE:... or NAME:OPTION@PATTERN=VALUE:...; the case of the name does not matter.

        Raises:
            UsageError: if there is no such optimizer, or if an option or its value is invalid.
        """
        name, *assignments = (part.strip() for part in text.split(":"))
        kind = _class_by_name(name)
        defaults = {
            parameter.name: parameter.default
            for parameter in inspect.signature(kind).parameters.values()
            if parameter.name not in EXCLUDED_OPTIONS
        }
        options: dict[str, Any] = {}
        group_options: dict[str, dict[str, Any]] = {}
        for assignment in assignments:
            target, equals, value = (part.strip() for part in assignment.partition("="))
            option, is_limited, pattern = (part.strip() for part in target.partition("@"))
            given = group_options.setdefault(pattern, {}) if is_limited else options
            if not equals:
                raise UsageError(
                    f"{text}: expected OPTION=VALUE after a colon, as in CAdam:moments=int8, got {assignment!r}"
                )
            if option == "lr":
                raise UsageError(f"{text}: the learning rate is given by --lr")
            if option not in defaults:
                raise UsageError(f"{text}: {describe_unknown(option, defaults)}")
            if option in given:
                raise UsageError(f"{text}: {target} is given twice")
            given[option] = _convert_like(defaults[option], _parse_value(value))
        spec = cls(kind, dict(sorted(options.items())), group_options)
        try:
            spec._validate()
        except (ValueError, TypeError, RuntimeError) as error:
            raise UsageError(f"{text}: {error}") from error
        return spec

    def __str__(self) -> str:
        parts = [f"{option}={value}" for option, value in self.options.items()]
        for pattern, options in self.group_options.items():
            parts += [f"{option}@{pattern}={value}" for option, value in options.items()]
        return ":".join([self.kind.__name__, *parts])

    def _validate(self) -> None:
        """Check the values of the options.

        The constructor checks each value. Whether the execution options (such as foreach) allow the others is only
        known when a step selects its engine, so then a step is taken with one sparse and one dense parameter.
        """
        model = nn.ModuleList(nn.Embedding(2, 2, sparse=sparse, _weight=torch.zeros(2, 2)) for sparse in (True, False))
        for options in ({}, *self.group_options.values()):
            together = {**self.options, **options}
            optimizer = self.kind(model.named_parameters(), lr=1e-3, **together)
            if together.keys() & set(EXECUTION_OPTIONS):
                sum(table(torch.tensor([0])).sum() for table in model).backward()
                optimizer.step()

    def build(self, model: nn.Module, lr: float) -> cadam.Optimizer:
        """Create the optimizer for all parameters of a model.

        Raises:
            UsageError: if no name of a parameter matches a pattern.
        """
        named = dict(model.named_parameters())
        for pattern in self.group_options:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise UsageError(f"{self}: no parameter matches {pattern!r}; there are {', '.join(named)}")
        members: dict[tuple[str, ...], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named.items():
            members.setdefault(self._patterns(name), []).append((name, parameter))
        groups = [{"params": each, **self._options(each[0][0])} for each in members.values()]
        return self.kind(groups, lr=lr, **self.options)

    def update_options(self, state_dict: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Copy the state dict of an optimizer that was built like this one, with the options of this one.

        Args:
            state_dict: The state dict.
            **more: Further options of all groups.

        Raises:
            ValueError: If parameters of one group match different patterns.
        """
        groups = []
        for group in state_dict["param_groups"]:
            names = group.get("param_names", [""])
            if len(set(map(self._patterns, names))) > 1 or (self.group_options and "param_names" not in group):
                raise ValueError(f"the saved optimizer has other groups of parameters than {self}")
            groups.append({**group, **more, **self._options(names[0])})
        return {**state_dict, "param_groups": groups}

    def _patterns(self, name: str) -> tuple[str, ...]:
        """Return the patterns that the name of a parameter matches."""
        return tuple(pattern for pattern in self.group_options if fnmatchcase(name, pattern))

    def _options(self, name: str) -> dict[str, Any]:
        """Return the options of the parameter with this name."""
        options = dict(self.options)
        for pattern in self._patterns(name):
            options |= self.group_options[pattern]
        return options


def _class_by_name(name: str) -> type[cadam.Optimizer]:
    exported = [getattr(cadam, public_name) for public_name in cadam.__all__]
    classes = {
        kind.__name__.lower(): kind
        for kind in exported
        if isinstance(kind, type) and issubclass(kind, cadam.Optimizer) and kind is not cadam.Optimizer
    }
    if name.lower() not in classes:
        names = ", ".join(sorted(kind.__name__ for kind in classes.values()))
        raise UsageError(f"no optimizer {name!r}; there are {names}")
    return classes[name.lower()]


def _parse_value(text: str) -> Any:
    """Parse a Python literal; any other text is a string."""
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _convert_like(default: Any, value: Any) -> Any:
    """Convert integers to floats if the default is a float or a tuple of floats. Wrong types are rejected later."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple) and isinstance(value, (tuple, list)):
        return tuple(float(entry) if type(entry) is int else entry for entry in value)
    return value
