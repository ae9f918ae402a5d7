"""A check, before any run, that a stream has the labels that an A/B needs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np

from ..online.data.events import Batch
from .evidence import MAIN_METRIC
from .results import Results
from .run_arm import StreamParts


class LabelCheck:
    """Counts the labels of a stream while its events are counted."""

    def __init__(self) -> None:
        self._counts: list[tuple[int, int]] = []
        """The number of events and of labels after each batch."""
        self._last_event: dict[int, dict[Any, int]] = {0: {}, 1: {}}
        """For each label, the index of the last event with it, by user."""
        self._has_separate_labels = False
        """Whether labels arrive in separate records. The user of such a label is not known here."""

    def update(self, batch: Batch) -> None:
        """Count the labels of a batch."""
        events, labels = self._counts[-1] if self._counts else (0, 0)
        if batch.events is not None:
            if batch.events.labels is not None:
                for label, last_event in self._last_event.items():
                    rows = np.flatnonzero(batch.events.labels == label)
                    column = batch.events.users
                    users: Iterable[Any] = repeat(0) if column is None else column[rows].tolist()
                    last_event.update(zip(users, (events + rows).tolist(), strict=False))
                labels += int((~np.isnan(batch.events.labels)).sum())
            events += len(batch.events)
        if batch.labels is not None:
            self._has_separate_labels = True
            labels += len(batch.labels)
        self._counts.append((events, labels))

    def check(self, uri: str, user: str | None, parts: StreamParts) -> None:
        """Check that learning rates can be chosen and that GAUC can be measured.

        Args:
            uri: The data, for messages.
            user: The column of the user, if there is one.
            parts: The division of the stream.

        Raises:
            ValueError: If the tuning part has too few labels, or if no user has both labels in the measured part.
        """
        labels = next((labels for events, labels in self._counts if events >= parts.tuning), 0)
        if labels <= parts.tuning // 2:
            raise ValueError(
                f"{labels:,} of the first {parts.tuning:,} events of {uri} have a label by then. Learning rates are "
                "chosen there, which needs labels for more than half of the events. Leave out the events before labels "
                "begin, or use data whose labels arrive sooner"
            )
        negative, positive = self._last_event.values()
        has_both = any(min(event, positive.get(user, -1)) >= parts.start for user, event in negative.items())
        if not has_both and not self._has_separate_labels:
            raise ValueError(explain_missing_gauc(uri, user))


def explain_missing_gauc(uri: str, user: str | None) -> str:
    """Return why a stream has no GAUC, and what to do."""
    if user is None:
        return (
            f"all labels of {uri} after its first part are equal: GAUC, which decides the A/B, needs both kinds. Check "
            "--label, or use other data"
        )
    return (
        f"no user of {uri} has both kinds of label after its first part: GAUC, which decides the A/B, compares events "
        f"of one user, by the column {user}. Name another column with --user, or give a --schema without a user to "
        "compare by the AUC of all events together"
    )


def has_gauc(results: Results) -> bool:
    """Return whether any run has a GAUC; also True if no run has a log loss, because then all runs diverged."""
    metrics = [result.outcome.metrics for result in results.tests()]
    has_any_gauc = any(math.isfinite(each[MAIN_METRIC]) for each in metrics)
    return has_any_gauc or not any(math.isfinite(each["log_loss"]) for each in metrics)
