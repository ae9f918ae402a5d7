"""The optimizer classes and everything built around `torch.optim.Optimizer`."""

from importlib import import_module
from typing import Any

_SUBMODULES = ("ddp", "sparse_update")
"""Modules that can be used as attributes after `import cadam`."""


def __getattr__(name: str) -> Any:
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f".{name}", __name__)
