"""Names that changed with version 0.2: states that have the old ones are loaded, options warn for one release."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STATE = {
    "set aside": "rejected",
    "optimizer's name": "optimizer_name",
    "total alignment": "total_alignment",
    "with ids": "with_ids",
    "options of tables": "options_of_tables",
    "rates of tables": "rates_of_tables",
}
_COUNTS = {"poisoned": "rejected"}
_LABELS = {"strange_labels": "orphan_labels"}


def upgraded(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a learner, or a rank's part of it, under the names of today."""
    state = _renamed(state, _STATE)
    pending = dict(state["pending"])
    pending["counts"] = _renamed(pending["counts"], _LABELS)
    return {**state, "counts": _renamed(state["counts"], _COUNTS), "pending": pending}


def _renamed(entries: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in entries.items()}


def renamed_option(new: str, value: Any, old: str, given: Any) -> Any:
    """The value of an option, which may still be given under its old name."""
    if given is None:
        return value
    if value is not None:
        raise TypeError(f"{old} is the old name of {new}: give only the new one")
    warnings.warn(f"{old} is now called {new}", DeprecationWarning, stacklevel=3)
    return given


def renamed_attribute(owner: object, name: str, names: Mapping[str, str]) -> Any:
    """An attribute under its old name, for `__getattr__`."""
    if name not in names:
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)
    warnings.warn(f"{name} is now called {names[name]}", DeprecationWarning, stacklevel=3)
    return getattr(owner, names[name])


def rename_file(old: Path, new: Path) -> None:
    """Give a file that an older version wrote the name of today."""
    if old.exists() and not new.exists():
        new.parent.mkdir(parents=True, exist_ok=True)
        os.replace(old, new)
