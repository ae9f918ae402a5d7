"""Nothing is lost quietly: how much was rejected and why, when that is too much, and what to do about it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..data.kind import Kind
from ..data.schema import Schema
from ..data.sources.line_files import CONVERT_TO_UTF8
from ..metrics.running import LogLoss

if TYPE_CHECKING:
    from ..learner import Learner

logger = logging.getLogger("cadam.online")

MAX_REJECTED = 0.01
FIRST = 10_000
"""Where most of so many events are rejected, nothing good is to come."""
NEAR = 0.02
"""A loss within this share of the best constant's is at it."""
ENOUGH = 2_000
"""Labelled events from which on it is said that a model is no better than a constant."""


class Guard:
    """Stops a learner where too much is rejected, counted from when it started here; a report of the learner's.

    Args:
        most: the share that may be rejected; None: only what is hopeless stops it, most of the first 10,000 events.
        follow: whether the input never ends: then `most` is held against every 10,000 events; without it, more than 1%
            of them is a warning.
    """

    def __init__(self, most: float | None, follow: bool = False) -> None:
        self.most, self.follow = most, follow
        self.began: tuple[int, int] | None = None
        self.looked = False
        self.stopped = ""
        self.since = LogLoss()
        self.next = ENOUGH

    def __call__(self, learner: Learner) -> None:
        if self.began is None:
            self.began = (learner.resumed_at, learner.rejections.at_start)
        if learner.progress.count >= self.next:  # the second half, or more, is what is judged in the end
            self.since, self.next = replace(learner.progress), 2 * learner.progress.count
        events, rejected = learner.events - self.began[0], learner.rejected - self.began[1]
        if events + rejected < FIRST or (self.looked and not self.follow):
            return
        self.looked = True
        if self.follow and self.most is None and rejected > MAX_REJECTED * (events + rejected):
            logger.warning(
                "%s of the last %s events were rejected: %s",
                *(f"{rejected:,}", f"{events + rejected:,}", reasons(learner.rejections.reasons)),
            )
        limit = 0.5 if not self.follow else self.most
        if limit is not None and rejected > limit * (events + rejected):
            self.stopped = f"{rejected:,} of {events + rejected:,} events were rejected"
            learner.stop()
        if self.follow:
            self.began = (learner.events, learner.rejected)

    def constant(self, learner: Learner) -> str:
        """That the model is no better than the best constant, if it is not; over the second half of what it saw."""
        late = learner.progress - self.since
        if late.count < ENOUGH // 2 or late.mean < late.best_constant:
            return ""
        return (
            f"the model is no better than a constant: its log loss was {late.mean:.4f} over the last {late.count:,} "
            f"labelled events, that of the best constant {late.best_constant:.4f}. {self._advice(late)} `cadam ab` "
            "finds the rate"
        )

    def _advice(self, late: LogLoss) -> str:
        """Which way to go with the learning rate.

        One that is too high makes events differ wrongly, so the loss is above that of the mean prediction, or it lets
        the loss rise. One that is too low does not: the mean has not reached that of the labels, or the loss falls.
        """
        best = late.best_constant
        excess, before = late.mean - best, self.since.mean - self.since.best_constant
        if not late.mean <= (1 + NEAR) * late.of_mean or excess > before + NEAR * best:
            return "Try a lower --lr: the loss is clearly above, or got worse."
        if late.of_mean > (1 + NEAR) * best or excess < before:
            return "Try a higher --lr: the model has hardly moved from where it began."
        return "The features may not tell the label."


def share(rejected: float, events: float) -> float:
    """Of all that came."""
    return rejected / max(1, rejected + events)


def reasons(counted: Mapping[str, int], most: int = 3) -> str:
    """The most frequent reasons, for people."""
    top = sorted(counted.items(), key=lambda item: -item[1])[:most]
    more = f" and {len(counted) - most} more reasons" if len(counted) > most else ""
    return "; ".join(f"{count:,} x {reason}" for reason, count in top) + more


def alike(reason: str) -> str:
    """What reasons have in common that differ in the value only."""
    head, colon, rest = reason.partition(": ")
    if not colon:
        return reason
    rest = re.sub(r"'(?:[^'\\]|\\.)*'|\"[^\"]*\"", "'...'", rest)
    return f"{head}: {re.sub(r'^-?[0-9][0-9.e+-]*(?= )|(?<=of )[0-9]+', '...', rest)}"[:200]


def cure(counted: Mapping[str, int], schema: Schema) -> str:
    """What to do about the most frequent reason."""
    if not counted:
        return ""
    reason = max(counted, key=lambda name: counted[name])
    column = reason.partition(": ")[0]
    kind = schema.kinds.get(column)
    if found := re.fullmatch(r"missing field '(.*)'", reason):
        name = found[1]
        for role, field in (("user", schema.user), ("time", schema.time), ("id", schema.id)):
            if field is not None and field.partition(":")[0] == name:
                return f"the {role} is missing in some events, in column {name!r}: give another --{role}, or none"
        if name in schema.kinds:
            optional = schema.features[name].rstrip("?") + "?"
            return f"column {name!r} may be missing: write {optional} in the schema, or --ignore {name}"
        return f"column {name!r} is missing in some events: without it they cannot be used; leave it out of the schema"
    if kind is not None and "is not from 0 to" in reason:
        more = replace(kind, name="hash", size=4 * kind.size)
        return f"column {column!r} has values beyond {kind}: write {more} in the schema: it takes any value"
    if kind is not None and ("not a number" in reason or "not an integer" in reason):
        more = Kind("hash", 1000, 0 if kind.name == "clock" else kind.length, kind.optional)
        return f"column {column!r} holds text but the schema says {kind}: write {more} in the schema, or infer it"
    if "not an integer" in reason or "not a number" in reason:
        return f"column {column!r} holds text: write {column}:text in the schema"
    if "not UTF-8" in reason:
        return f"the data is not UTF-8. {CONVERT_TO_UTF8.format(path='FILE')}"
    if reason.startswith("not readable") and "fields" in reason:
        return (
            "lines do not have as many fields as the first: the separator may be another (see `cadam schema`), or "
            "quoted text has line breaks in it, which must go"
        )
    if "not a time of the format" in reason:
        return f"give the form of the times in {column!r}, as in --time '{column}:%d/%m/%Y %H:%M'"
    return "run `cadam schema` on the data, and look at the reasons"
