"""Names that changed with version 0.2: states that have the old ones are loaded, options warn for one release."""

from __future__ import annotations

import os
import re
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


# Metrics -------------------------------------------------------------------------------------------------------

OLD_TO_NEW: dict[str, str] = {
    "set aside": "rejected",
    "strange labels": "orphan_labels",
    "repeated events": "repeated_events",
    "repeated labels": "repeated_labels",
    "late labels": "late_labels",
    "crowded out": "crowded_out",
    "mean label": "mean_label",
    "best constant": "best_constant",
    "log loss": "log_loss",
    "normalised entropy": "normalised_entropy",
    "click rate": "click_rate",
    "gauc by impressions": "gauc_by_impressions",
    "gauc by user": "gauc_by_user",
    "users of both classes": "users_of_both_classes",
    "users of one class": "users_of_one_class",
    "mean of windows": "mean_of_windows",
    "user auc": "user_auc",
    "user impressions": "user_impressions",
    "events a second": "events_a_second",
    "lag in seconds": "lag_in_seconds",
    "failed checkpoints": "failed_checkpoints",
    "alignment, all": "alignment_over_all",
    "alignment, touched": "alignment_over_touched",
}
"""Names that stand alone, and the parts of those that are made of a metric and a stretch, as `log loss/total`."""

_OF_PARAMETER = re.compile(r"alignment of (.*), (all|touched)")


def new_name(name: str) -> str:
    """What a metric of this old name is called now; names that did not change stay."""
    if match := _OF_PARAMETER.fullmatch(name):
        return f"alignment_over_{match[2]}/{match[1]}"
    return "/".join(OLD_TO_NEW.get(part, part) for part in name.split("/"))


class Metrics(dict[str, float]):
    """Metrics by name. An old name still finds its metric, with a warning."""

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(new_name(name)))

    def copy(self) -> Metrics:
        return Metrics(self)

    def __missing__(self, name: str) -> float:
        new = new_name(name)
        if new == name or new not in self:
            raise KeyError(name)
        warnings.warn(f"the metric {name!r} is now called {new!r}", DeprecationWarning, stacklevel=2)
        return self[new]
