"""Metrics of a stream of predictions and labels, over windows and over the whole stream.

Scores are logits, labels are 0 or 1, and users are integers or strings (slower). Which values are exact:

- `measure` is exact over the events it gets, and so is the last window of `StreamMetrics`.
- Log loss, normalized entropy and calibration follow from sums, so they are exact over the whole stream in constant
  memory.
- AUC and GAUC over the whole stream would need all events in memory. While the stream runs, `StreamMetrics` reports the
  mean over windows (`auc/mean_of_windows`). It differs from the AUC over all events, because events of different
  windows are never compared. `recompute` computes the exact value from the prediction log.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from ... import sources_and_metrics
from ...checkpoint_files import check_like
from ..data.events import Array, concatenate_columns
from ..persistence.prediction_log import PYARROW_REQUIRED
from .metric import SummedMetric, WindowMetric
from .summed import Sums

METRICS: dict[str, WindowMetric | SummedMetric] = {
    name: resolve_name(path) for name, path in sources_and_metrics.METRICS.items()
}
"""All metrics by the name that users give. `cadam.sources_and_metrics` has their modules."""


def as_clicks(labels: Array, purpose: str) -> Array:
    """Convert labels to booleans.

    Args:
        labels: the labels.
        purpose: what needs the labels, for the error message.

    Raises:
        ValueError: if a label is neither 0 nor 1.
    """
    other = labels[(labels != 0) & (labels != 1)]
    if len(other):
        raise ValueError(f"labels must be 0 or 1 for {purpose}, got {other[0]:g}")
    return labels.astype(bool)


def measure(scores: Array, labels: Array, users: Array | None = None, weights: Array | None = None) -> dict[str, float]:
    """Compute every metric over events, exactly.

    Args:
        scores: logits.
        labels: 0 or 1.
        users: the user of each event; without users there is no GAUC.
        weights: the weight of each event in the log loss, the normalized entropy and the calibration.

    Returns:
        The values by name.

    Raises:
        ValueError: if a label is neither 0 nor 1, or if the arrays differ in length.

    Example::

        measure(np.array([0.3, -1.2, 2.0]), np.array([0, 0, 1]))["auc"]
    """
    labels, scores = as_clicks(np.asarray(labels), "these metrics"), np.asarray(scores)
    return _measure(scores, labels, users, Sums.of(scores, labels, weights))


def recompute(log: Path | str) -> dict[str, float]:
    """Compute every metric over a prediction log, exactly.

    Args:
        log: the folder of a prediction log. All predictions whose label is known or assumed count.

    Raises:
        ValueError: if the log is empty.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(PYARROW_REQUIRED) from error
    table = pq.read_table(log)
    if table.num_rows == 0:
        raise ValueError(f"{log} contains no predictions")
    table = table.filter(table["label"].is_valid())
    columns = {
        name: table[name].to_numpy() for name in ("score", "label", "user", "weight") if name in table.column_names
    }
    return measure(columns["score"], columns["label"], columns.get("user"), columns.get("weight"))


def _measure(scores: Array, labels: Array, users: Array | None, sums: Sums) -> dict[str, float]:
    """Compute every metric over events whose sums are known."""
    values: dict[str, float] = {}
    for metric in _window_metrics():
        if users is not None or not metric.needs_users:
            values.update(metric.compute(scores, labels, users))
    return {**values, **_summed_values(sums)}


def _window_metrics() -> list[WindowMetric]:
    return [metric for metric in METRICS.values() if isinstance(metric, WindowMetric)]


def _summed_values(sums: Sums) -> dict[str, float]:
    """Compute all summed metrics; they are nan without events."""
    values: dict[str, float] = {}
    for metric in METRICS.values():
        if isinstance(metric, SummedMetric):
            values.update(metric.compute(sums) if sums.events else dict.fromkeys(metric.outputs, math.nan))
    return values


class StreamMetrics:
    """Metrics of a stream: over the last full window, decayed over windows, and over the whole stream.

    The values do not depend on how events are grouped into batches, and a stream that continues from `state_dict` has
    the same values to the bit. Fewer than `window` events are kept in memory between updates.

    Args:
        window: events per window.
        half_life: the number of events after which a window has half of its weight in the decayed metrics; ten windows
            by default. AUC and GAUC are averaged over windows, weighted by events; windows with only one class, in
            which they are undefined, are left out.
        kinds: names of metrics from `cadam.sources_and_metrics.METRICS`; all of them by default.

    Example::

        learner = Learner(model, optimizer, loss, metrics=[StreamMetrics(window=10_000)])
        learner.run(source).metrics()["auc/window"]
    """

    def __init__(
        self, window: int = 10_000, half_life: float | None = None, kinds: Sequence[str] = tuple(METRICS)
    ) -> None:
        unknown = [kind for kind in kinds if kind not in METRICS]
        if unknown or not kinds:
            raise ValueError(f"no metric {', '.join(unknown) or 'is named'}; there are {', '.join(METRICS)}")
        self.kinds = tuple(kinds)
        if window < 1:
            raise ValueError(f"window must be at least 1 event, got {window}")
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life must be more than 0 events, got {half_life}")
        self.window = window
        self.half_life = 10.0 * window if half_life is None else float(half_life)
        self._parts: list[dict[str, Array]] = []
        """The columns of the events of the unfinished window, as they were added."""
        self._count = 0
        """The number of these events."""
        self._last_window: dict[str, float] = {}
        self._total, self._decayed = Sums(), Sums()
        self._window_sums = {name: [0.0, 0.0, 0.0, 0.0] for metric in _window_metrics() for name in metric.averaged}
        """For each averaged value: events and weighted sum over all windows, then both with decay."""

    def update(
        self,
        scores: Array,
        labels: Array,
        users: Array | None = None,
        time: Array | None = None,
        weights: Array | None = None,
    ) -> None:
        """Add events in the order in which they were predicted.

        Args:
            scores: logits.
            labels: 0 or 1.
            users: the user of each event.
            time: the time of each event.
            weights: the weight of each event in the log loss, the normalized entropy and the calibration. AUC and GAUC
                are not weighted.

        Raises:
            ValueError: if a label is neither 0 nor 1, if users are missing, or if the columns differ from those before.
        """
        columns = _columns(scores, labels, users, time, weights, purpose=", ".join(self.kinds))
        selected = [kind for kind in self.kinds if self.kinds != tuple(METRICS)]
        for kind in selected:
            if "users" not in columns and METRICS[kind].needs_users:
                raise ValueError(f"{kind} needs to know the users, and the events have none")
        if self._parts and columns.keys() != self._parts[0].keys():
            raise ValueError(f"this stream had {', '.join(self._parts[0])}; now it has {', '.join(columns)}")
        self._parts.append({name: column.copy() for name, column in columns.items()})
        self._count += len(columns["scores"])
        if self._count < self.window:
            return
        events, end = self._unfinished, self._count // self.window * self.window
        for start in range(0, end, self.window):
            self._add_window({name: column[start : start + self.window] for name, column in events.items()})
        self._unfinished = {name: column[end:].copy() for name, column in events.items()}

    @property
    def _unfinished(self) -> dict[str, Array]:
        """The columns of the events of the unfinished window; empty before the first event."""
        return concatenate_columns(self._parts) if self._parts else {}

    @_unfinished.setter
    def _unfinished(self, columns: dict[str, Array]) -> None:
        self._parts, self._count = [columns] if columns else [], len(columns.get("scores", ()))

    def _add_window(self, events: Mapping[str, Array]) -> None:
        """Add a full window to the totals."""
        decay = 0.5 ** (self.window / self.half_life)
        sums = Sums.of(events["scores"], events["labels"], events.get("weights"))
        self._last_window = _measure(events["scores"], events["labels"], events.get("users"), sums)
        if "time" in events:
            self._last_window["time"] = float(events["time"][-1])
        self._total, self._decayed = self._total + sums, self._decayed.scaled(decay) + sums
        for name, (count, total, decayed_count, decayed_total) in self._window_sums.items():
            value = self._last_window.get(name, math.nan)
            n, s = (0.0, 0.0) if math.isnan(value) else (float(self.window), self.window * value)
            self._window_sums[name] = [count + n, total + s, decay * decayed_count + n, decay * decayed_total + s]

    def results(self) -> dict[str, float]:
        """Return the values by name, as in ``auc/window``. The totals include the unfinished window."""
        selected = {"events", "time", *(name for kind in self.kinds for name in METRICS[kind].outputs)}
        return {name: value for name, value in self._all_results() if name.partition("/")[0] in selected}

    def _all_results(self) -> Iterator[tuple[str, float]]:
        rest = self._unfinished
        total = self._total + (Sums.of(rest["scores"], rest["labels"], rest.get("weights")) if rest else Sums())
        yield "events/total", total.events
        for name, value in self._last_window.items():
            yield f"{name}/window", value
        for name, (count, weighted_sum, decayed_count, decayed_sum) in self._window_sums.items():
            if name in self._last_window:
                yield f"{name}/decayed", decayed_sum / decayed_count if decayed_count else math.nan
                yield f"{name}/mean_of_windows", weighted_sum / count if count else math.nan
        for name, value in _summed_values(self._decayed).items():
            yield f"{name}/decayed", value
        for name, value in _summed_values(total).items():
            yield f"{name}/total", value

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the values depend on."""
        return {
            "window": self.window,
            "half_life": self.half_life,
            "unfinished": {name: column.copy() for name, column in self._unfinished.items()},
            "last_window": dict(self._last_window),
            "total": list(astuple(self._total)),
            "decayed": list(astuple(self._decayed)),
            "window_sums": {name: list(numbers) for name, numbers in self._window_sums.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: if window or half-life differ from the saved ones.
        """
        for name, value in (("window", self.window), ("half_life", self.half_life)):
            if state[name] != value:
                raise ValueError(f"{name} is {value} here and {state[name]} in the state: they must be equal")
        sums = {name: self._window_sums.get(name, []) for name in state["window_sums"]}
        example = {
            "total": list(astuple(self._total)),
            "decayed": list(astuple(self._decayed)),
            "window_sums": sums,
            "last_window": dict.fromkeys(state["last_window"], 0.0),
            "unfinished": dict.fromkeys(state["unfinished"], np.empty(0)),
        }
        check_like(state, example, "metrics")
        self._unfinished = {name: np.array(column) for name, column in state["unfinished"].items()}
        self._last_window = dict(state["last_window"])
        self._total, self._decayed = Sums(*state["total"]), Sums(*state["decayed"])
        self._window_sums |= {name: list(numbers) for name, numbers in state["window_sums"].items()}


def _columns(
    scores: Array, labels: Array, users: Array | None, time: Array | None, weights: Array | None, purpose: str
) -> dict[str, Array]:
    """Convert events to arrays and check them."""
    values = {"scores": scores, "labels": labels, "users": users, "time": time, "weights": weights}
    columns = {name: np.asarray(column) for name, column in values.items() if column is not None}
    shapes = {name: column.shape for name, column in columns.items()}
    if len(set(shapes.values())) != 1 or columns["scores"].ndim != 1:
        raise ValueError(f"scores, labels, users and time must have the same length, got {shapes}")
    columns["labels"] = as_clicks(columns["labels"], purpose)
    if "users" in columns and columns["users"].dtype.kind not in "iuOU":
        raise TypeError(f"users must be integers or strings, got {columns['users'].dtype}")
    return columns
