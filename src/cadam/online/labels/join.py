"""The join of events and labels: it decides the outcome of each event once, and the order in which events are learned.

Three objects share the work:

- `StreamClock` owns the time of the stream. It follows the times of the events, never the wall clock.
- `PendingEvents` owns the events that are not resolved yet, and the labels that arrived before their events.
- `LabelJoin` combines them. Its methods yield `Resolved` events, and the learner logs, measures and learns them in
  exactly that order.

When an event is learned depends on `LabelOptions`:

=============================  =======================================================================================
options                        an event is learned
=============================  =======================================================================================
``unmatched="drop"``           once, when its label arrives. Every label is final, and events without one are dropped.
``unmatched="negative"``       once, when its horizon has passed, with its final label, in the order of the events.
                               Learning positives sooner than negatives would bias the model towards one class.
with ``early_positives=True``  as a negative when it arrives, and as a positive when its label arrives. The importance
                               weights of `fake_negatives` remove the bias.
=============================  =======================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from ..data.events import Array, Columns, Labels, as_key_array
from .clock import StreamClock
from .pending import PendingEvents

Unmatched = Literal["drop", "negative"]


class Outcome(IntEnum):
    """The way in which an event was resolved."""

    LABELED = 0
    """A label arrived."""
    ASSUMED_NEGATIVE = 1
    """No label arrived within the horizon, so the label is 0."""
    DROPPED = 2
    """No label arrived within the horizon, and the event is not learned."""


@dataclass(frozen=True)
class Resolved:
    """Events with labels that the join passes to the learner."""

    columns: Columns
    """The columns of the events, with `label` (nan for dropped events)."""
    outcomes: Array
    """The `Outcome` of each event. Dropped events are never mixed with others."""
    is_final: bool = True
    """Whether the outcomes are final. Only then the events are logged and measured."""
    is_learned: bool = True
    """Whether the model is trained on the events."""


@dataclass(frozen=True)
class LabelOptions:
    """How long events wait for their labels, and what happens to events without one.

    Args:
        horizon: how long an event waits for its label, in seconds of the events' time, or in events if they have none.
        unmatched: what happens to an event without a label after the horizon: ``"drop"``, or ``"negative"`` to learn
            it with label 0. The default is ``"negative"`` with a finite horizon, and ``"drop"`` without a horizon.
        early_positives: whether events are learned before their horizon, with importance weights, see
            `fake_negatives`. It needs ``unmatched="negative"``, the log loss, and labels of 0 and 1.
        capacity: how many events can wait; beyond it the oldest expire as if the horizon had passed.
        remember: how many ids of resolved events are remembered to recognize repeated events and labels.
    """

    horizon: float = math.inf
    unmatched: Unmatched | None = None
    early_positives: bool = False
    capacity: int = 1_000_000
    remember: int = 100_000

    def __post_init__(self) -> None:
        if self.unmatched not in (None, "drop", "negative"):
            raise ValueError(f"unmatched must be 'drop' or 'negative', got {self.unmatched!r}")
        if self.unmatched == "negative" and self.horizon == math.inf:
            raise ValueError("unmatched='negative' needs a finite horizon, after which an event counts as negative")
        if self.early_positives and not self.assumes_negative:
            raise ValueError("early_positives needs a finite horizon and unmatched='negative'")

    @property
    def assumes_negative(self) -> bool:
        """Whether an event without a label counts as negative after the horizon."""
        return self.unmatched == "negative" or (self.unmatched is None and self.horizon != math.inf)

    def saved(self) -> dict[str, Any]:
        """Return the options that decide when an event is learned, with the default of `unmatched` filled in."""
        unmatched = "negative" if self.assumes_negative else "drop"
        return {"horizon": self.horizon, "unmatched": unmatched, "early_positives": self.early_positives}


def check_label_options(state: Mapping[str, Any], options: LabelOptions) -> None:
    """Check that the events that wait for their labels in a saved state can continue to wait with these options.

    The horizon and the capacity may change, and events that were dropped without a label may become negatives. With
    other changes, waiting events would be learned twice or never: a label that has arrived is learned at the horizon
    only with ``unmatched="negative"``, and with ``early_positives`` its event was learned before.

    Args:
        state: what `LabelJoin.state_dict` returned.
        options: the options with which the events would wait.

    Raises:
        ValueError: if the options do not fit.
    """
    waiting, saved = len(state["number_of"]["keys"]), state.get("options")
    if not waiting or saved is None:  # older versions saved no options
        return
    new = options.saved()
    loses_labels = saved["unmatched"] == "negative" and new["unmatched"] == "drop"
    if loses_labels or saved["early_positives"] != new["early_positives"]:
        raise ValueError(
            f"{waiting:,} events wait for their labels with {_describe(saved)}; with {_describe(new)}, they would be "
            "learned twice or never"
        )


def _describe(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


class LabelJoin:
    """Joins labels with their events by id."""

    def __init__(self, options: LabelOptions) -> None:
        self.options = options
        self.waits_for_horizon = options.assumes_negative
        """Whether the outcome of an event is decided when its horizon has passed, not when its label arrives."""
        self.pending = PendingEvents(
            options.horizon, options.capacity, options.remember, keeps_labeled=self.waits_for_horizon
        )
        self.clock = StreamClock()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the pending events, and the options with which they wait."""
        return {**self.pending.state_dict(), "options": self.options.saved()}

    def advance_clock(self, times: Array) -> None:
        """Advance the clock of the stream to the times of a batch."""
        self.clock.advance(times, self.pending)

    def split_repeated(self, columns: Columns) -> tuple[Columns, Labels | None]:
        """Separate new events from repeated ones.

        Returns:
            The new events, and the labels of the repeated ones.
        """
        is_new = self.pending.find_new(columns["id"].tolist())
        if is_new is None:
            return columns, None
        labels = None
        if "label" in columns:
            has_label = ~is_new & ~np.isnan(columns["label"])
            labels = Labels(columns["id"][has_label], columns["label"][has_label])
        return {name: values[is_new] for name, values in columns.items()}, labels

    def add_events(self, columns: Columns, labels_of_repeated: Labels | None = None) -> Iterator[Resolved]:
        """Add new events, with or without labels, and yield the events that are resolved by that.

        Args:
            columns: new events.
            labels_of_repeated: labels of events that arrived before, see `split_repeated`.
        """
        if "label" not in columns:
            columns = {**columns, "label": np.full(len(columns["id"]), np.nan, dtype=np.float32)}
        must_wait = np.isnan(columns["label"])
        if self.waits_for_horizon:
            must_wait[:] = True
        if not must_wait.all():
            labeled = columns if not must_wait.any() else {name: values[~must_wait] for name, values in columns.items()}
            self.pending.remember_labeled(labeled["id"].tolist())
            yield _labeled(labeled)
        if labels_of_repeated is not None:
            yield from self.match_labels(self.pending.select_pending(labels_of_repeated))
        if must_wait.any():
            yield from self._add_pending({name: values[must_wait] for name, values in columns.items()})
        if labels_of_repeated is not None:  # an event may be repeated within one batch: its first copy is pending now
            yield from self.match_labels(self.pending.select_pending(labels_of_repeated))

    def _add_pending(self, columns: Columns) -> Iterator[Resolved]:
        """Let new events wait, and join the labels that arrived before them."""
        self.pending.add(columns, self.clock.now)
        if self.options.early_positives:
            negatives = {**columns, "label": np.zeros(len(columns["id"]), dtype=np.float32)}
            yield Resolved(negatives, _outcomes(negatives, Outcome.ASSUMED_NEGATIVE), is_final=False)
            yield from self._early_positives(columns)
        early = self.pending.pop_early_labels(columns["id"].tolist())
        if early is not None:
            yield from self.match_labels(Labels(as_key_array(early[0], "ids"), early[1]))

    def match_labels(self, labels: Labels) -> Iterator[Resolved]:
        """Join finite labels with their pending events, and keep labels whose events have not arrived yet."""
        columns = self.pending.match(labels.ids.tolist(), labels.labels, self.clock.label_arrival)
        if columns is None:
            return
        if not self.waits_for_horizon:
            yield _labeled(columns)
        elif self.options.early_positives:
            yield from self._early_positives(columns)

    def _early_positives(self, columns: Columns) -> Iterator[Resolved]:
        """Yield the positives among events whose label has just become known.

        Raises:
            ValueError: if a label is neither 0 nor 1.
        """
        known = columns["label"][~np.isnan(columns["label"])]
        other = known[(known != 0) & (known != 1)]
        if len(other):
            raise ValueError(f"labels must be 0 or 1 to learn positives early, got {other[0]:g}")
        is_positive = columns["label"] == 1
        if is_positive.any():
            positives = {name: values[is_positive] for name, values in columns.items()}
            yield Resolved(positives, _outcomes(positives, Outcome.LABELED), is_final=False)

    def expire(self) -> Iterator[Resolved]:
        """Yield the events whose horizon has passed. It is called once all labels of a batch have been matched."""
        yield from self._resolve_expired(self.pending.expire(self.clock.now))

    def expire_all(self) -> Iterator[Resolved]:
        """Yield all pending events, because the stream has ended."""
        yield from self._resolve_expired(self.pending.expire_all())

    def _resolve_expired(self, columns: Columns | None) -> Iterator[Resolved]:
        if columns is None:
            return
        if not self.waits_for_horizon:
            yield Resolved(columns, _outcomes(columns, Outcome.DROPPED), is_learned=False)
            return
        outcomes = np.where(np.isnan(columns["label"]), Outcome.ASSUMED_NEGATIVE, Outcome.LABELED).astype(np.int8)
        columns["label"] = np.nan_to_num(columns["label"], nan=0.0)
        yield Resolved(columns, outcomes, is_learned=not self.options.early_positives)


def _labeled(columns: Columns) -> Resolved:
    return Resolved(columns, _outcomes(columns, Outcome.LABELED))


def _outcomes(columns: Columns, outcome: Outcome) -> Array:
    return np.full(len(columns["id"]), outcome, dtype=np.int8)
