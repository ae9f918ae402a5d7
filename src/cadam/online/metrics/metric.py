"""The interfaces of metrics.

A learner updates a `Metric` with labeled predictions. `StreamMetrics` computes `WindowMetric` and `SummedMetric`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..data.events import Array

if TYPE_CHECKING:
    from .summed import Sums


class Metric(Protocol):
    """A metric that a learner updates with every prediction whose label has become known."""

    def update(self, scores: Array, labels: Array, users: Array | None, time: Array) -> None:
        """Add labeled predictions, in the order in which they were labeled.

        If the method has another parameter `weights`, it gets the weights of events that have them.
        """

    def results(self) -> Mapping[str, float]:
        """Return the current values by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the values depend on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""


def accepts_weights(metric: Metric) -> bool:
    """Whether a metric takes the weights of events into account."""
    return "weights" in inspect.signature(metric.update).parameters


@dataclass(frozen=True)
class WindowMetric:
    """A metric that needs all events of a window at once, such as the AUC.

    `StreamMetrics` reports its value for the last window, and averages over windows.
    """

    outputs: Mapping[str, str]
    """The names of the values that it computes, and their descriptions."""
    averaged: tuple[str, ...]
    """The outputs that are averaged over windows."""
    compute: Callable[[Array, Array, Array | None], Mapping[str, float]]
    """Computes the values from scores, boolean labels and users."""
    needs_users: bool = False


@dataclass(frozen=True)
class SummedMetric:
    """A metric that follows from sums over events, such as the log loss, and is exact over the whole stream."""

    outputs: Mapping[str, str]
    """The names of the values that it computes, and their descriptions."""
    compute: Callable[[Sums], Mapping[str, float]]
    """Computes the values from the sums over at least one event."""
    needs_users: ClassVar[bool] = False
