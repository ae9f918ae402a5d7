"""How well a stream is predicted: AUC, GAUC, log loss, normalised entropy and calibration.

Scores are logits, labels 0 or 1, users whole numbers or text (slower). What is exact, and over what:

- `measure` is exact over the events it is given, and so is each window of `StreamMetrics`: AUC and GAUC go by ranks,
  ties counting half, never by bins.
- Log loss, normalised entropy and calibration are sums, and exact over all events so far in constant memory.
- AUC and GAUC over all events need all events: no constant memory holds them. While the stream flows they are given as
  the mean of the windows (`auc/mean_of_windows`), which is another number than the AUC over everything, since it never
  compares events of different windows. `recompute` gives that one from the prediction log, afterwards and exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.events import Array
from ..persistence.logs import NEEDS
from .auc import auc, log_loss
from .running import entropy

RANKED = ("auc", "gauc_by_impressions", "gauc_by_user")
"""Metrics that compare events with each other."""
SUMMED = ("log_loss", "normalised_entropy", "calibration", "click_rate")
"""Metrics that follow from sums over events."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "auc": ("auc",),
    "gauc": ("gauc_by_impressions", "gauc_by_user", "users_of_both_classes", "users_of_one_class"),
    "log_loss": ("log_loss",),
    "normalised_entropy": ("normalised_entropy",),
    "calibration": ("calibration", "click_rate"),
}
"""What one may ask for, and the metrics it stands for."""


@dataclass(frozen=True)
class UserAuc:
    """The AUC of every user who has both classes, and GAUC: its mean over users in either weighting."""

    users: Array
    auc: Array
    impressions: Array
    """Events of each of these users."""
    one_class: int
    """Users left out because all their labels are the same."""
    one_class_impressions: int

    @property
    def by_impressions(self) -> float:
        """Each user weighs as much as they have events: the paper's GAUC."""
        return float(self.auc @ self.impressions / self.impressions.sum()) if len(self.auc) else math.nan

    @property
    def by_user(self) -> float:
        """Each user weighs the same."""
        return float(self.auc.mean()) if len(self.auc) else math.nan


def user_auc(scores: Array, labels: Array, users: Array) -> UserAuc:
    """AUC within each user, exactly: ties count half. All are nan if a score is.

    One sort of (user, place of the score, label), packed into one integer each, puts every user's events in a row;
    counts of clicks and passes along it give twice the number of pairs in the right order, as an integer.
    """
    score, label, user = np.asarray(scores), np.asarray(labels, dtype=bool), np.asarray(users)
    if not score.shape == label.shape == user.shape or score.ndim != 1:
        raise ValueError(
            f"scores, labels and users must be of one length, got shapes {score.shape}, {label.shape}, {user.shape}"
        )
    if len(score) == 0:
        return UserAuc(user, np.empty(0), np.empty(0, dtype=np.int64), 0, 0)
    if len(score) >= 2**31:
        raise ValueError(f"at most 2**31 - 1 events at once, got {len(score)}")
    names, code = _codes(user)
    key = (code << 32) | (_places(score) << 1) | label
    key.sort()
    tie = _starts(key >> 1)
    first = _starts(key[tie] >> 32)
    clicks = np.add.reduceat(key & 1, tie)
    passes = np.diff(tie, append=len(key)) - clicks
    below = np.cumsum(passes) - passes
    below -= np.repeat(below[first], np.diff(first, append=len(tie)))
    pairs = np.add.reduceat(clicks * (2 * below + passes), first)
    clicks, passes = np.add.reduceat(clicks, first), np.add.reduceat(passes, first)
    both = (clicks > 0) & (passes > 0)
    impressions = clicks + passes
    value = pairs[both] / (2 * clicks[both] * passes[both])
    if np.isnan(score).any():
        value = np.full_like(value, math.nan)
    present = names(key[tie[first]] >> 32)
    return UserAuc(
        present[both], value, impressions[both], int((~both).sum()), int(len(score) - impressions[both].sum())
    )


def _places(score: Array) -> Array:
    """The place of each score among the different ones, from 0."""
    order = np.argsort(score)
    ordered = score[order]
    places = np.empty(len(score), dtype=np.int64)
    places[order] = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
    return places


def _starts(values: Array) -> Array:
    """Where a run of equal values begins."""
    starts: Array = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return starts


def _codes(user: Array) -> tuple[Any, Array]:
    """Users as whole numbers below 2**31, and the function that turns those back."""
    if user.dtype.kind in "iu":
        low, high = int(user.min()), int(user.max())
        if high - low < 2**31:
            return lambda code: (code + low).astype(user.dtype), (user - user.dtype.type(low)).astype(np.int64)
    names, code = np.unique(user, return_inverse=True)
    return lambda code: names[code], code.astype(np.int64)


def clicks(labels: Array, for_what: str) -> Array:
    """Labels as booleans; an error if they are anything but 0 and 1."""
    other = labels[(labels != 0) & (labels != 1)]
    if len(other):
        raise ValueError(f"labels must be 0 or 1 for {for_what}; there is {other[0]:g}")
    return labels.astype(bool)


# One stretch of events -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """What the summed metrics follow from. Sums of stretches add up to those of the whole."""

    events: float = 0.0
    clicks: float = 0.0
    loss: float = 0.0
    predicted: float = 0.0
    """The sum of the predicted probabilities."""

    @classmethod
    def of(cls, scores: Array, labels: Array) -> Sums:
        logits = np.asarray(scores, dtype=np.float64)
        if len(logits) == 0:
            return cls()
        with np.errstate(invalid="ignore"):  # a nan stays one: the numbers below show it
            predicted = np.exp(-np.logaddexp(0, -logits)).sum()
            loss = len(logits) * log_loss(logits, labels)
        return cls(len(logits), float(np.sum(labels)), loss, float(predicted))

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)))

    def times(self, factor: float) -> Sums:
        return Sums(*(factor * number for number in self.numbers()))

    def numbers(self) -> tuple[float, float, float, float]:
        return self.events, self.clicks, self.loss, self.predicted

    def metrics(self) -> dict[str, float]:
        """Log loss; the same over that of the best constant; predicted over actual clicks; share of clicks."""
        if self.events == 0:
            return dict.fromkeys(SUMMED, math.nan)
        rate, loss = self.clicks / self.events, self.loss / self.events
        constant = entropy(rate)
        return {
            "log_loss": loss,
            "normalised_entropy": loss / constant if constant > 0 else math.nan,
            "calibration": self.predicted / self.clicks if self.clicks else math.nan,
            "click_rate": rate,
        }


def measure(scores: Array, labels: Array, users: Array | None = None) -> dict[str, float]:
    """Every metric over these events, exactly. Without users there is no GAUC."""
    labels = clicks(np.asarray(labels), "these metrics")
    ranked = {"auc": auc(np.asarray(scores), labels)}
    if users is not None:
        within = user_auc(scores, labels, users)
        ranked |= {
            "gauc_by_impressions": within.by_impressions,
            "gauc_by_user": within.by_user,
            "users_of_both_classes": float(len(within.users)),
            "users_of_one_class": float(within.one_class),
        }
    return {**ranked, **Sums.of(scores, labels).metrics()}


def recompute(log: Path | str) -> dict[str, float]:
    """Every metric over a prediction log, exactly: all predictions whose label is known or was assumed."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(NEEDS) from error
    table = pq.read_table(log)
    if table.num_rows == 0:
        raise ValueError(f"{log} holds no predictions")
    table = table.filter(table["label"].is_valid())
    columns = {name: table[name].to_numpy() for name in ("score", "label", "user") if name in table.column_names}
    return measure(columns["score"], columns["label"], columns.get("user"))


# A stream ------------------------------------------------------------------------------------------------------


class StreamMetrics:
    """Metrics of a stream as it flows: of the last full window, decayed over windows, and in all.

    They do not depend on how the events came in batches, and a stream that goes on from `state_dict` has the same
    numbers to the bit. Fewer than `window` events are kept between updates, whatever the length of the stream.

    `half_life`, in events, is how far back a window counts half in the decayed metrics; by default ten windows. AUC
    and GAUC of windows are averaged by their events; a window in which they do not exist (one class) is left out.
    `kinds` says which are wanted, by the names in `KINDS`; by default all.
    """

    def __init__(
        self, window: int = 10_000, half_life: float | None = None, kinds: Sequence[str] = tuple(KINDS)
    ) -> None:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ValueError(f"no metric {', '.join(unknown) or 'is named'}; there are {', '.join(KINDS)}")
        self.kinds = tuple(kinds)
        if window < 1:
            raise ValueError(f"window must be at least 1 event, got {window}")
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life must be more than 0 events, got {half_life}")
        self.window = window
        self.half_life = 10.0 * window if half_life is None else float(half_life)
        self._held: dict[str, Array] = {}
        self._last: dict[str, float] = {}
        self._total, self._decayed = Sums(), Sums()
        self._means = {name: [0.0, 0.0, 0.0, 0.0] for name in RANKED}
        """For each: events and weighted sum of the windows, in all and decayed."""

    def update(self, scores: Array, labels: Array, users: Array | None = None, time: Array | None = None) -> None:
        """Take in events in the order they were predicted."""
        columns = _columns(scores, labels, users, time, for_what=", ".join(self.kinds))
        if "gauc" in self.kinds and "users" not in columns and self.kinds != tuple(KINDS):
            raise ValueError("gauc needs to know the users, and the events have none")
        if self._held and set(columns) != set(self._held):
            raise ValueError(f"this stream has {', '.join(self._held)}; now it came with {', '.join(columns)}")
        held = {name: np.concatenate([self._held[name], new]) if self._held else new for name, new in columns.items()}
        whole = len(held["scores"]) // self.window * self.window
        for start in range(0, whole, self.window):
            self._close({name: column[start : start + self.window] for name, column in held.items()})
        self._held = {name: column[whole:].copy() for name, column in held.items()}

    def _close(self, events: Mapping[str, Array]) -> None:
        """Take a full window into the totals."""
        users, factor = events.get("users"), 0.5 ** (self.window / self.half_life)
        self._last = measure(events["scores"], events["labels"], users)
        if "time" in events:
            self._last["time"] = float(events["time"][-1])
        sums = Sums.of(events["scores"], events["labels"])
        self._total, self._decayed = self._total + sums, self._decayed.times(factor) + sums
        for name, (events_in_all, sum_in_all, events_decayed, sum_decayed) in self._means.items():
            value = self._last.get(name, math.nan)
            n, s = (0.0, 0.0) if math.isnan(value) else (float(self.window), self.window * value)
            self._means[name] = [
                events_in_all + n,
                sum_in_all + s,
                factor * events_decayed + n,
                factor * sum_decayed + s,
            ]

    def results(self) -> dict[str, float]:
        """Numbers by name, as `auc/window`: metric and stretch. The total counts the unfinished window too."""
        wanted = {"events", "time", *(name for kind in self.kinds for name in KINDS[kind])}
        return {name: value for name, value in self._results() if name.partition("/")[0] in wanted}

    def _results(self) -> Iterator[tuple[str, float]]:
        unfinished = Sums.of(self._held["scores"], self._held["labels"]) if self._held else Sums()
        total = self._total + unfinished
        yield "events/total", total.events
        for name, value in self._last.items():
            yield f"{name}/window", value
        for name, (events_in_all, sum_in_all, events_decayed, sum_decayed) in self._means.items():
            if name in self._last:
                yield f"{name}/decayed", sum_decayed / events_decayed if events_decayed else math.nan
                yield f"{name}/mean_of_windows", sum_in_all / events_in_all if events_in_all else math.nan
        for name, value in self._decayed.metrics().items():
            yield f"{name}/decayed", value
        for name, value in total.metrics().items():
            yield f"{name}/total", value

    def state_dict(self) -> dict[str, Any]:
        """Everything the numbers follow from: plain numbers, and the unfinished window as arrays."""
        return {
            "window": self.window,
            "half_life": self.half_life,
            "held": {name: column.copy() for name, column in self._held.items()},
            "last": dict(self._last),
            "total": list(self._total.numbers()),
            "decayed": list(self._decayed.numbers()),
            "means": {name: list(numbers) for name, numbers in self._means.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; window and half-life must be the saved ones."""
        for name, own in (("window", self.window), ("half_life", self.half_life)):
            if state[name] != own:
                raise ValueError(f"{name} is {own} here and {state[name]} in the state: make it the same")
        self._held = {name: np.array(column) for name, column in state["held"].items()}
        self._last = dict(state["last"])
        self._total, self._decayed = Sums(*state["total"]), Sums(*state["decayed"])
        self._means = {name: list(numbers) for name, numbers in state["means"].items()}


def _columns(scores: Array, labels: Array, users: Array | None, time: Array | None, for_what: str) -> dict[str, Array]:
    """The events as arrays of one length; an error names what does not fit."""
    given = {"scores": scores, "labels": labels, "users": users, "time": time}
    columns = {name: np.asarray(values) for name, values in given.items() if values is not None}
    lengths = {name: column.shape for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or columns["scores"].ndim != 1:
        raise ValueError(f"scores, labels, users and time must be of one length, got {lengths}")
    columns["labels"] = clicks(columns["labels"], for_what)
    if "users" in columns and columns["users"].dtype.kind not in "iuOU":
        raise TypeError(f"users must be whole numbers or text, got {columns['users'].dtype}")
    return columns
