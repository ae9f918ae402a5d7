"""Clients of a service, synchronous and asynchronous. They need httpx, and neither torch nor the rest of cadam.

Events without an id get one before they are sent, so that a request can be repeated safely if its answer was lost.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

RETRIED_STATUSES = (502, 503, 504)


class ServiceError(Exception):
    """The service has refused a request.

    Args:
        status: the HTTP status.
        message: the reason.
        details: for each event or label at fault: its index, the column and the reason.
    """

    def __init__(self, status: int, message: str, details: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message, self.details = status, message, list(details)


@dataclass(frozen=True)
class Prediction:
    """The prediction of an event.

    Args:
        id: the id of the event, for its label.
        score: the output of the model.
        probability: the probability of a positive label; None if the model was not trained with the log loss.
        model_version: the version of the model.
    """

    id: int | str
    score: float
    probability: float | None
    model_version: str


@dataclass(frozen=True)
class Retries:
    """The number of attempts and the pauses of a request, if the service cannot be reached or is overloaded.

    Args:
        attempts: the number of attempts in total.
        pause: the pause before the second attempt in seconds. It doubles, and varies at random.
        longest_pause: the longest pause.
    """

    attempts: int = 5
    pause: float = 0.1
    longest_pause: float = 5.0

    def seconds(self, attempt: int, response: httpx.Response | None) -> float:
        """Return the pause after an attempt, counted from 0; a Retry-After of the service is respected."""
        asked: str = response.headers.get("retry-after", "") if response is not None else ""
        planned = min(self.longest_pause, self.pause * 2**attempt) * random.uniform(0.5, 1)
        return float(max(planned, min(float(asked), self.longest_pause)) if asked.isdigit() else planned)


class _Requests:
    """The requests of both clients, and the meaning of their answers."""

    def __init__(self, url: str, token: str | None, id_column: str, retries: Retries, timeout: float) -> None:
        self.id_column, self.retries = id_column, retries
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.options: dict[str, Any] = {"base_url": url, "headers": headers, "timeout": timeout}

    def with_ids(self, events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            dict(event) if _has_value(event, self.id_column) else {**event, self.id_column: uuid.uuid4().hex}
            for event in events
        ]

    @staticmethod
    def labels(labels: Mapping[Any, Any]) -> list[dict[str, Any]]:
        return [{"id": key, "label": value} for key, value in labels.items()]

    @staticmethod
    def predictions(answer: Mapping[str, Any]) -> list[Prediction]:
        version = answer["model_version"]
        return [Prediction(p["id"], p["score"], p.get("probability"), version) for p in answer["predictions"]]

    def is_last(self, attempt: int) -> bool:
        return attempt + 1 >= self.retries.attempts

    @staticmethod
    def content(response: httpx.Response) -> Any:
        if response.is_success:
            return response.json()
        try:
            answer = response.json()
            raise ServiceError(response.status_code, answer["error"], answer["details"])
        except (ValueError, LookupError, TypeError):  # the answer of a proxy
            raise ServiceError(response.status_code, response.text[:200]) from None


def _has_value(event: Mapping[str, Any], name: str) -> bool:
    """Whether an event has a value in a column. In the column ``user.id`` it may be that of a nested object."""
    return event.get(name) is not None or any(
        character == "." and isinstance(inner := event.get(name[:end]), Mapping) and _has_value(inner, name[end + 1 :])
        for end, character in enumerate(name)
    )


class Client:
    """A client of a service.

    Args:
        url: the address of the service.
        token: the token of the service, if it needs one.
        id_column: the column of the event's id: ``event_id`` unless the schema names another one.
        retries: how often requests are repeated.
        timeout: the longest wait for an answer in seconds.

    Example::

        with Client("http://127.0.0.1:8000") as client:
            [prediction] = client.predict([{"item": "a17", "price": 2.5}])
            client.feedback({prediction.id: 1})
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        id_column: str = "event_id",
        retries: Retries | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._requests = _Requests(url, token, id_column, retries or Retries(), timeout)
        self._client = httpx.Client(**self._requests.options)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def predict(self, events: Iterable[Mapping[str, Any]]) -> list[Prediction]:
        """Predict events, which wait for their labels from then on.

        Raises:
            ServiceError: if the service refuses the events. Then it has used none of them.
            httpx.TransportError: if the service cannot be reached.
        """
        return self._requests.predictions(self._post("/predict", self._requests.with_ids(events)))

    def learn(self, events: Iterable[Mapping[str, Any]]) -> list[Prediction]:
        """Send labeled events for training, and return their earlier predictions. Raises the errors of `predict`."""
        return self._requests.predictions(self._post("/learn", self._requests.with_ids(events)))

    def feedback(self, labels: Mapping[Any, Any]) -> dict[str, Any]:
        """Send labels by the ids of their events. Raises the errors of `predict`.

        Returns:
            How many labels were accepted, and the ids of those that were repeated or whose event is unknown so far.
        """
        answer: dict[str, Any] = self._post("/feedback", self._requests.labels(labels))
        return answer

    def model(self) -> dict[str, Any]:
        """Return the version in use, its age, and the schema."""
        answer: dict[str, Any] = self._send("GET", "/model", None)
        return answer

    def _post(self, path: str, content: list[dict[str, Any]]) -> Any:
        return self._send("POST", path, content)

    def _send(self, method: str, path: str, content: Any) -> Any:
        attempt = 0
        while True:
            response = None
            try:
                response = self._client.request(method, path, json=content)
                if response.status_code not in RETRIED_STATUSES or self._requests.is_last(attempt):
                    return self._requests.content(response)
            except httpx.TransportError:
                if self._requests.is_last(attempt):
                    raise
            time.sleep(self._requests.retries.seconds(attempt, response))
            attempt += 1


class AsyncClient:
    """A client of a service for asyncio. The arguments and methods are those of `Client`.

    Example::

        async with AsyncClient("http://127.0.0.1:8000") as client:
            [prediction] = await client.predict([{"item": "a17", "price": 2.5}])
            await client.feedback({prediction.id: 1})
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        id_column: str = "event_id",
        retries: Retries | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._requests = _Requests(url, token, id_column, retries or Retries(), timeout)
        self._client = httpx.AsyncClient(**self._requests.options)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def predict(self, events: Iterable[Mapping[str, Any]]) -> list[Prediction]:
        """Predict events; see `Client.predict`."""
        return self._requests.predictions(await self._send("POST", "/predict", self._requests.with_ids(events)))

    async def learn(self, events: Iterable[Mapping[str, Any]]) -> list[Prediction]:
        """Learn events with labels; see `Client.learn`."""
        return self._requests.predictions(await self._send("POST", "/learn", self._requests.with_ids(events)))

    async def feedback(self, labels: Mapping[Any, Any]) -> dict[str, Any]:
        """Send labels by the ids of their events; see `Client.feedback`."""
        answer: dict[str, Any] = await self._send("POST", "/feedback", self._requests.labels(labels))
        return answer

    async def model(self) -> dict[str, Any]:
        """Return the version in use, its age, and the schema."""
        answer: dict[str, Any] = await self._send("GET", "/model", None)
        return answer

    async def _send(self, method: str, path: str, content: Any) -> Any:
        attempt = 0
        while True:
            response = None
            try:
                response = await self._client.request(method, path, json=content)
                if response.status_code not in RETRIED_STATUSES or self._requests.is_last(attempt):
                    return self._requests.content(response)
            except httpx.TransportError:
                if self._requests.is_last(attempt):
                    raise
            await asyncio.sleep(self._requests.retries.seconds(attempt, response))
            attempt += 1
