"""Names of metrics before version 0.2, and what they are now: for results and states that have them."""

from __future__ import annotations

import re
import warnings

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

    def __missing__(self, name: str) -> float:
        new = new_name(name)
        if new == name or new not in self:
            raise KeyError(name)
        warnings.warn(f"the metric {name!r} is now called {new!r}", DeprecationWarning, stacklevel=2)
        return self[new]
