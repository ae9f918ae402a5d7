"""Whether a stream has the labels that an A/B needs: known before any run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np

from cadam.ab.results import Results

from ..online.data.events import Batch
from .runs import Parts
from .study import MAIN


class Labelled:
    """What was seen of the labels of a stream while it was counted."""

    def __init__(self) -> None:
        self.known: list[tuple[int, int]] = []
        """After each batch: how many events there were, and how many labels."""
        self.last: dict[int, dict[Any, int]] = {0: {}, 1: {}}
        """The last event of each user with either label."""
        self.late = False
        """Whether labels come on their own: whose they are is then not known here."""

    def note(self, batch: Batch) -> None:
        events, labels = self.known[-1] if self.known else (0, 0)
        if batch.events is not None:
            if batch.events.labels is not None:
                for kind, last in self.last.items():
                    places = np.flatnonzero(batch.events.labels == kind)
                    users = batch.events.users
                    whose: Iterable[Any] = repeat(0) if users is None else users[places].tolist()
                    last.update(zip(whose, (events + places).tolist(), strict=False))
                labels += int((~np.isnan(batch.events.labels)).sum())
            events += len(batch.events)
        if batch.labels is not None:
            self.late = True
            labels += len(batch.labels)
        self.known.append((events, labels))

    def check(self, uri: str, user: str | None, parts: Parts) -> None:
        """ValueError where learning rates could not be chosen, or no GAUC measured."""
        labels = next((labels for events, labels in self.known if events >= parts.tuning), 0)
        if labels <= parts.tuning // 2:
            raise ValueError(
                f"{labels:,} of the first {parts.tuning:,} events of {uri} have a label by then: learning rates are "
                "chosen there, which takes labels for more than half. Leave out the events before labels begin, or "
                "compare where they come sooner"
            )
        first, second = self.last.values()
        both = any(min(place, second.get(whose, -1)) >= parts.start for whose, place in first.items())
        if not both and not self.late:
            raise ValueError(no_gauc(uri, user))


def no_gauc(uri: str, user: str | None) -> str:
    """That there is no GAUC of a stream, and what to do."""
    if user is None:
        return (
            f"all labels of {uri} after its first part are alike: GAUC, which decides the A/B, needs both kinds. Check "
            "--label, or give other data"
        )
    return (
        f"no user of {uri} has both kinds of label after its first part: GAUC, which decides the A/B, compares events "
        f"of one user, by the column {user}. Name another column with --user, or give a --schema without a user for "
        "the AUC of all events together"
    )


def has_gauc(results: Results) -> bool:
    """Whether the GAUC of any run exists, or none has a log loss either: then all diverged."""
    tests = [result.outcome.metrics for result in results.tests()]
    return any(math.isfinite(one[MAIN]) for one in tests) or not any(math.isfinite(one["log_loss"]) for one in tests)
