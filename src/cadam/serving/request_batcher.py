"""The thread that answers requests of a front process: it validates, predicts and writes to the log.

Requests that arrive while the thread is busy are taken together: they share one conversion, one forward pass, and one
transaction of the log, which is on disk before any of them is answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..online.data.nested import ABSENT, find_field
from ..online.data.schema import Schema
from ..printable import printable
from .config import Limits, without_label
from .event_log import Entry, EventLog, LogUnavailableError
from .snapshots import NotReadyError, ServedModel

logger = logging.getLogger("cadam.serving")

MAX_ID_LENGTH = 200
MAX_EVENTS_TOGETHER = 4_096
"""Requests are taken together up to this number of events and labels."""
MAX_NAMES = 20
"""At most this number of unknown columns is named in an answer, and ten times as many in the log of a process."""
RETRY_SECONDS = 1
"""The number of seconds after which a client that got status 503 should try again."""

Record = dict[str, Any]


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: the HTTP status.
        message: what was wrong and what to do.
        details: for each event or label at fault: its index, the column and the reason.
    """

    def __init__(self, status: int, message: str, details: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.status, self.message, self.details = status, message, list(details)


def unavailable(message: str) -> RequestError:
    """Return the error of a request that may succeed later."""
    return RequestError(503, message)


@dataclass
class Request:
    """A request that waits for its answer.

    Args:
        kind: what the client asked for.
        records: the events, or labels as ``{"id": ..., "label": ...}``.
        deadline: when the request is given up if it still waits, on the clock `time.monotonic`.
        answer: is called with the answer, or with an error, in the thread of the batcher.
    """

    kind: Literal["predict", "learn", "feedback"]
    records: list[Record]
    deadline: float
    answer: Callable[[Any], None]
    entries: list[Entry] = field(default_factory=list)
    """The entries that the request writes to the log."""
    response: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SentEvent:
    """An event of a request.

    Args:
        owner: the number of the request, and the index of the event in it.
        record: the event without its label.
        body: the record as JSON, for the log; None if it cannot be written as JSON.
        label: the label, None if the event has none.
    """

    owner: tuple[int, int]
    record: Record
    body: str | None
    label: Any


class RequestBatcher(threading.Thread):
    """Answers requests in batches.

    Args:
        schema: the schema of the events, with an id.
        model: the model to predict with.
        open_log: opens the log; it is called in the thread, because a connection belongs to one thread.
        has_probability: whether scores are logits, from which the schema computes probabilities.
        adds_time: whether events get the time of the request, because their schema has no time. What a client sends in
            this column is replaced: one wrong time would change how long all other events wait for their labels.
        limits: the limits of the service.
    """

    def __init__(
        self,
        schema: Schema,
        model: ServedModel,
        open_log: Callable[[], EventLog],
        *,
        has_probability: bool,
        adds_time: bool,
        limits: Limits,
    ) -> None:
        super().__init__(name="requests", daemon=True)
        self.schema, self.model, self.has_probability, self.limits = schema, model, has_probability, limits
        self.event_schema = without_label(schema)
        self.id_column, self.id_kind = schema.roles["id"]
        self.time_column = schema.roles["time"][0] if adds_time else None
        self.label_column = schema.target.column
        names = schema.column_names()
        self._known_fields = {*names, *(name[:end] for name in names for end, c in enumerate(name) if c == ".")}
        self._logged_fields: set[str] = set()
        self._open_log = open_log
        self._log: EventLog | None = None
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.waiting = 0
        """The number of events and labels that wait for an answer."""

    # Methods for the event loop -----------------------------------------------------------------------------------

    async def submit(self, kind: Literal["predict", "learn", "feedback"], records: list[Record]) -> dict[str, Any]:
        """Answer a request.

        Raises:
            RequestError: if the request is invalid, or if it cannot be answered now.
        """
        with self._lock:
            if self.waiting + len(records) > max(self.limits.waiting, len(records)):
                raise unavailable("too many requests are waiting")
            self.waiting += len(records)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[str, Any]] = loop.create_future()

        def resolve(outcome: Any) -> None:
            if future.done():  # the client has disconnected
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        def answer(outcome: Any) -> None:
            loop.call_soon_threadsafe(resolve, outcome)

        self._queue.put(Request(kind, records, time.monotonic() + self.limits.seconds, answer))
        return await future

    def close(self) -> None:
        """Let the thread end after the requests that wait."""
        self._queue.put(None)

    # Methods of the thread ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Answer requests until `close` is called."""
        while (first := self._queue.get()) is not None:
            requests, has_ended = [first], False
            count = len(first.records)
            while count < MAX_EVENTS_TOGETHER:
                try:
                    request = self._queue.get_nowait()
                except queue.Empty:
                    break
                if request is None:
                    has_ended = True
                    break
                requests.append(request)
                count += len(request.records)
            self._answer(requests)
            with self._lock:
                self.waiting -= count
            if has_ended:
                return

    def _answer(self, requests: Sequence[Request]) -> None:
        """Answer requests together; a request that fails does not affect the others."""
        outcomes: dict[int, Any] = {}
        now = time.monotonic()
        for request in requests:
            if request.deadline < now:
                outcomes[id(request)] = unavailable(f"the request has waited for {self.limits.seconds:g} seconds")
        active = [request for request in requests if id(request) not in outcomes]
        try:
            self._process(active, outcomes)
        except (LogUnavailableError, NotReadyError) as error:
            if isinstance(error, LogUnavailableError):
                logger.warning("%s", error)
            outcomes |= {id(request): unavailable(str(error)) for request in active}
        except Exception as error:  # a defect must neither end the thread nor leave a client without an answer
            logger.exception("requests failed")
            outcomes |= {
                id(request): RequestError(500, f"internal error: {type(error).__name__}") for request in active
            }
        for request in requests:
            request.answer(outcomes.get(id(request), request.response))

    def _process(self, requests: Sequence[Request], outcomes: dict[int, Any]) -> None:
        """Prepare the entries and responses of requests, and write the entries to the log."""
        self._prepare_events([request for request in requests if request.kind != "feedback"], outcomes)
        self._prepare_labels([request for request in requests if request.kind == "feedback"], outcomes)
        valid = [request for request in requests if id(request) not in outcomes]
        if not valid:
            return
        if self._log is None:
            self._log = self._open_log()
        self._log.append(entry for request in valid for entry in request.entries)
        for request in valid:
            self._complete(request)

    def _complete(self, request: Request) -> None:
        """Add to a response what is known once the entries are in the log."""
        assert self._log is not None
        request.response["repeated"] = [entry.id for entry in request.entries if not entry.number]
        if request.kind == "learn":
            labels = [entry for entry in request.entries if entry.kind == "label"]
            request.response["repeated"] = [entry.id for entry in labels if not entry.number]
        if request.kind != "predict":
            labels = [entry for entry in request.entries if entry.kind == "label"]
            request.response["accepted"] = sum(entry.number > 0 for entry in labels)
        if request.kind == "feedback":
            new = [entry.id for entry in request.entries if entry.number]
            request.response["unknown"] = self._log.find_unknown(new)

    # Events -------------------------------------------------------------------------------------------------------

    def _prepare_events(self, requests: Sequence[Request], outcomes: dict[int, Any]) -> None:
        """Convert and predict the events of requests, and prepare their entries and responses."""
        problems: dict[tuple[int, int], str] = {}
        now = time.time()
        events = self._collect_events(requests, problems, now)
        self._check_labels(requests, events, problems)
        batch = self.event_schema.convert_records(
            [event.record for event in events], list(map(str, range(len(events))))
        )
        rejected_rows = {int(rejected.where): rejected.reason for rejected in batch.rejected}
        for row, reason in rejected_rows.items():
            problems.setdefault(events[row].owner, reason)
        valid = [event for row, event in enumerate(events) if row not in rejected_rows]
        version, scores, ids = None, np.empty(0), []
        if batch.events is not None:
            assert batch.events.ids is not None
            ids = batch.events.ids.tolist()
            info, scores = self._predict(batch.events.features)
            version = None if info is None else info.version
        probabilities = self.schema.probabilities(scores)
        predictions = list(zip(valid, ids, scores.tolist(), probabilities.tolist(), strict=True))
        for event, key, score, _ in predictions:
            if problem := check_id(key):
                problems.setdefault(event.owner, f"{self.id_column}: {problem}")
            elif event.body is None:
                problems.setdefault(event.owner, "the event has a number that is not finite, or is nested too deeply")
            elif not math.isfinite(score):
                problems.setdefault(event.owner, "the model has no finite score for this event")
        failed = self._fail(requests, problems, outcomes)
        for number, request in enumerate(requests):
            request.response = {"model_version": version, "predictions": []}
            unknown = set().union(*request.records) - self._known_fields
            if unknown and number not in failed:
                request.response["warnings"] = self._warn_about(sorted(unknown))
        for event, key, score, probability in predictions:
            number, _ = event.owner
            if number in failed:
                continue
            request = requests[number]
            assert event.body is not None
            request.entries.append(Entry("event", key, event.body, now, score, version))
            if request.kind == "learn":
                request.entries.append(Entry("label", key, json.dumps(event.label), now))
            prediction: Record = {"id": key, "score": score}
            if self.has_probability:
                prediction["probability"] = probability
            request.response["predictions"].append(prediction)

    def _warn_about(self, names: list[str]) -> list[str]:
        """Log columns that the schema does not have, each once, and return warnings about them for an answer."""
        warnings = [f"the schema has no column {printable(name[:MAX_ID_LENGTH])!r}: it is not used" for name in names]
        for name, warning in zip(names, warnings, strict=True):
            if name not in self._logged_fields and len(self._logged_fields) < 10 * MAX_NAMES:
                self._logged_fields.add(name)
                logger.warning("a request has an unknown column: %s", warning)
        more = len(warnings) - MAX_NAMES
        return [*warnings[:MAX_NAMES], *([f"the schema does not have {more:,} more columns"] if more > 0 else [])]

    def _collect_events(
        self, requests: Sequence[Request], problems: dict[tuple[int, int], str], now: float
    ) -> list[SentEvent]:
        """Return the events of requests, with an id and a time; those that have no feature are problems."""
        events: list[SentEvent] = []
        for number, request in enumerate(requests):
            for index, sent in enumerate(request.records):
                if not self._has_feature(sent):
                    names = ", ".join(self.schema.features)
                    problems[number, index] = f"the event has none of the model's columns ({names})"
                    continue
                record = dict(sent)
                label = find_field(record, self.label_column)
                record.pop(self.label_column, None)
                if find_field(record, self.id_column) in (ABSENT, None):
                    record[self.id_column] = self._new_id()
                if self.time_column is not None:
                    record[self.time_column] = now
                body = _as_json(record)
                events.append(SentEvent((number, index), record, body, None if label is ABSENT else label))
        return events

    def _has_feature(self, record: Mapping[str, Any]) -> bool:
        return any(find_field(record, name) is not ABSENT for name in self.schema.features)

    def _new_id(self) -> int | str:
        return uuid.uuid4().hex if self.id_kind.name == "text" else uuid.uuid4().int >> 65

    def _check_labels(
        self, requests: Sequence[Request], events: Sequence[SentEvent], problems: dict[tuple[int, int], str]
    ) -> None:
        """Check the labels of events that will be learned."""
        labeled = [event for event in events if requests[event.owner[0]].kind == "learn"]
        if labeled:
            ids = [find_field(event.record, self.id_column) for event in labeled]
            batch = self.schema.convert_labels(ids, [event.label for event in labeled], str)
            for rejected in batch.rejected:
                problems.setdefault(labeled[int(rejected.where)].owner, rejected.reason)

    def _predict(self, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Compute scores. If the model refuses the batch, events are predicted one by one; nan if it refuses one."""
        try:
            return self.model.scores(features)
        except NotReadyError:
            raise
        except Exception as error:
            logger.warning("the model refused a batch: %s: %s", type(error).__name__, error)
        count = len(next(iter(features.values())))
        scores = np.full(count, np.nan, dtype=np.float32)
        info = self.model.info
        for row in range(count):
            try:
                info, score = self.model.scores({name: values[row : row + 1] for name, values in features.items()})
                scores[row] = score[0]
            except Exception:
                continue
        return info, scores

    # Labels -------------------------------------------------------------------------------------------------------

    def _prepare_labels(self, requests: Sequence[Request], outcomes: dict[int, Any]) -> None:
        """Convert labels that arrive separately."""
        owners = [(number, index) for number, request in enumerate(requests) for index in range(len(request.records))]
        if not owners:
            return
        items = [record for request in requests for record in request.records]
        problems = {
            owner: f"{sorted(item.keys() - {'id', 'label'})[0]}: a label has the fields id and label only"
            for owner, item in zip(owners, items, strict=True)
            if item.keys() - {"id", "label"}
        }
        batch = self.schema.convert_labels(
            [item.get("id") for item in items], [item.get("label") for item in items], str
        )
        rejected_rows = {int(rejected.where): rejected.reason for rejected in batch.rejected}
        for row, reason in rejected_rows.items():
            problems.setdefault(owners[row], self._as_api_names(reason))
        rows = [row for row in range(len(items)) if row not in rejected_rows]
        keys = [] if batch.labels is None else batch.labels.ids.tolist()
        for row, key in zip(rows, keys, strict=True):
            if problem := check_id(key):
                problems.setdefault(owners[row], f"id: {problem}")
        failed = self._fail(requests, problems, outcomes)
        now = time.time()
        for row, key in zip(rows, keys, strict=True):
            if owners[row][0] not in failed:
                request = requests[owners[row][0]]
                request.entries.append(Entry("label", key, json.dumps(items[row]["label"]), now))

    def _as_api_names(self, reason: str) -> str:
        """Replace the names of columns in a reason by the names of the fields of a label."""
        for column, name in ((self.id_column, "id"), (self.schema.label, "label"), (self.label_column, "label")):
            if reason == f"missing field {column!r}":
                return f"missing field {name!r}"
            if reason.startswith(f"{column}: "):
                return f"{name}: {reason.removeprefix(f'{column}: ')}"
        return reason

    # Errors -------------------------------------------------------------------------------------------------------

    def _fail(
        self, requests: Sequence[Request], problems: Mapping[tuple[int, int], str], outcomes: dict[int, Any]
    ) -> set[int]:
        """Set the errors of requests with problems, and return their numbers. A request is accepted as a whole."""
        failed = {number for number, _ in problems}
        for number in failed:
            details = [
                {"index": index, **self._describe(reason)}
                for (owner, index), reason in sorted(problems.items())
                if owner == number
            ]
            first = details[0]
            place = f"index {first['index']}: " if len(requests[number].records) > 1 else ""
            outcomes[id(requests[number])] = RequestError(
                422, f"{place}{first['error']}; nothing of this request was used", details[:100]
            )
        return failed

    def _describe(self, reason: str) -> dict[str, Any]:
        """Return a reason and the column at fault."""
        names: Iterable[str] = (*self.schema.column_names(), self.schema.label, "id", "label")
        column = next((n for n in names if reason == f"missing field {n!r}" or reason.startswith(f"{n}: ")), None)
        return {"column": column, "error": reason}


def _as_json(record: Record) -> str | None:
    """Return a record as JSON, None if that is not possible. Text that is not valid Unicode is escaped."""
    try:
        return json.dumps(record, allow_nan=False)  # JSON has no infinity, but Python reads it from 1e999
    except (ValueError, RecursionError):
        return None


def check_id(key: int | str) -> str:
    """Return what is wrong with an id; empty if nothing is."""
    if isinstance(key, int):
        return ""
    if not key:
        return "the id is empty"
    if len(key) > MAX_ID_LENGTH:
        return f"the id has {len(key)} characters, more than {MAX_ID_LENGTH}"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "the id is not valid Unicode"
    return ""
