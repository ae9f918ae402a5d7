"""The HTTP interface of a service, an ASGI application.

Every answer is JSON, except the status page and the metrics. Errors have the form ``{"error": ..., "details": [...]}``.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ..online.data.sources.records import reject_duplicate_names
from ..online.models.model_file import UsageError
from ..online.monitoring.status_server import HEADERS, LOCAL_HOSTS
from .front_state import FrontState
from .openapi import describe
from .request_batcher import RETRY_SECONDS, RequestError, unavailable
from .snapshots import NotReadyError

OPEN_PATHS = ("/healthz", "/readyz")
"""Paths that need no token, for the health checks of a load balancer."""
ENDPOINTS = ("/predict", "/feedback", "/learn", "/rollback", "/promote", "/versions", "/model", "/metrics", *OPEN_PATHS)
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

T = TypeVar("T")

REQUESTS = Counter("cadam_requests", "requests by path and status", ["path", "status"])
SECONDS = Histogram("cadam_request_seconds", "time to answer a request", ["path"], buckets=BUCKETS)
STALENESS = Gauge(
    "cadam_staleness_seconds",
    "age of the oldest label that the served model has not learned; 0 if there is none",
    multiprocess_mode="livemax",
)
WAITING = Gauge("cadam_waiting", "events and labels that wait for an answer", multiprocess_mode="livesum")


class JsonResponse(Response):
    """A JSON answer that browsers neither store nor interpret."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return json.dumps(content).encode()


def error_response(error: RequestError) -> Response:
    """Return the answer of a failed request."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return JsonResponse({"error": error.message, "details": error.details}, error.status, headers)


class Api:
    """The endpoints of a service.

    Args:
        state: what the front process knows.
        token: the token that requests must carry. By default it is read from the file that the configuration names.
    """

    def __init__(self, state: FrontState, token: str | None = None) -> None:
        self.state, self.config, self.limits = state, state.config, state.config.limits
        self._token = token or state.config.token()
        # A request has no field for a time that the service sets itself.
        schema = state.schema if state.batcher.time_column is None else replace(state.schema, time=None)
        self._openapi = describe(
            schema, self.limits, has_token=self._token is not None, has_probability=state.has_probability
        )

    def app(self) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """Build the application."""
        routes = [
            Route("/predict", self.predict, methods=["POST"]),
            Route("/feedback", self.feedback, methods=["POST"]),
            Route("/learn", self.learn, methods=["POST"]),
            Route("/rollback", self.rollback, methods=["POST"]),
            Route("/promote", self.promote, methods=["POST"]),
            Route("/versions", self.versions),
            Route("/model", self.model),
            Route("/healthz", self.health),
            Route("/readyz", self.ready),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/status.json", self.status),
            Route("/", self.page),
        ]
        handlers: Any = {HTTPException: _http_error, RequestError: _request_error}
        inner = Starlette(routes=routes, exception_handlers=handlers)

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await inner(scope, receive, send)
                return
            await self._guard(inner, scope, receive, send)

        return guarded

    async def _guard(self, inner: Starlette, scope: Scope, receive: Receive, send: Send) -> None:
        """Check host, origin and token before anything is read, add headers, and measure the request."""
        start = time.perf_counter()
        status = 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        refused = self._refuse(Request(scope))
        if refused is not None:
            await refused(scope, receive, send_with_headers)
        else:
            await inner(scope, receive, send_with_headers)
        path = scope["path"] if scope["path"] in ENDPOINTS else "other"
        REQUESTS.labels(path, str(status)).inc()
        SECONDS.labels(path).observe(time.perf_counter() - start)

    def _refuse(self, request: Request) -> Response | None:
        """Return the answer to a request that is not allowed, None if it is."""
        if self._token is not None:
            # Not `request.url.path`: in old versions of Starlette, the Host header can change it.
            if request.scope["path"] in OPEN_PATHS or self._is_authorized(request):
                return None
            message = "send the token of the service: Authorization: Bearer TOKEN"
            # A browser asks for a password, as which the token is accepted, so that people can read the status page.
            answer = JsonResponse({"error": message, "details": []}, 401, {"WWW-Authenticate": 'Basic realm="cadam"'})
            return answer
        host = request.headers.get("host", "localhost").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self.config.has_local_address and name not in LOCAL_HOSTS:
            # A website could let its own name resolve to 127.0.0.1, to use the service in a visitor's browser.
            message = f"the host {name!r} is not this machine: behind a proxy, the service needs --token-file"
            return JsonResponse({"error": message, "details": []}, 403)
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host:
            return JsonResponse({"error": "requests of other websites are refused", "details": []}, 403)
        return None

    def _is_authorized(self, request: Request) -> bool:
        """Whether the request has the token: as a bearer token, or in a GET request as the password of basic auth."""
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        candidate = ""
        if scheme.lower() == "bearer":
            candidate = credentials.strip()
        elif scheme.lower() == "basic" and request.method in ("GET", "HEAD"):
            try:
                candidate = base64.b64decode(credentials, validate=True).decode("latin-1").partition(":")[2]
            except ValueError:
                return False
        assert self._token is not None
        return hmac.compare_digest(candidate.encode(), self._token.encode())

    # Endpoints ----------------------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        """Predict events."""
        return await self._submit("predict", request)

    async def feedback(self, request: Request) -> Response:
        """Accept labels of events."""
        return await self._submit("feedback", request)

    async def learn(self, request: Request) -> Response:
        """Predict and learn events with labels."""
        return await self._submit("learn", request)

    async def _submit(self, kind: Literal["predict", "learn", "feedback"], request: Request) -> Response:
        content = await self._read_json(request)
        records = content if isinstance(content, list) else [content]
        if not records or not all(isinstance(record, dict) for record in records):
            what = "label" if kind == "feedback" else "event"
            raise RequestError(400, f"send one {what} as a JSON object, or a list of at least one")
        if len(records) > self.limits.events:
            raise RequestError(413, f"the request has {len(records)} entries, more than {self.limits.events}")
        WAITING.set(self.state.batcher.waiting)
        return JsonResponse(await self.state.batcher.submit(kind, records))

    async def _read_json(self, request: Request) -> Any:
        """Read the body of a request within the limits."""
        too_large = RequestError(413, f"the body has more than {self.limits.body} bytes")
        try:
            if int(request.headers.get("content-length", "0")) > self.limits.body:
                raise too_large
        except ValueError:
            raise RequestError(400, "the Content-Length is not a number") from None
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.limits.body:
                        raise too_large
        except ClientDisconnect:
            raise RequestError(400, "the client has disconnected") from None
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {self.limits.seconds:g} seconds") from None
        try:
            return _DECODER.decode(body.decode())
        except UnicodeDecodeError:
            raise RequestError(400, "the body is not UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not valid JSON: {error}") from None

    async def rollback(self, request: Request) -> Response:
        """Let the learner continue from an earlier version."""
        hint = 'send the name or tag of a version, as in {"version": "1200"}'
        rollback = await self._change(request, "version", hint, self.state.roll_back)
        return JsonResponse({"version": rollback.version, "skipped_labels": [rollback.position + 1, rollback.until]})

    async def promote(self, request: Request) -> Response:
        """Let a challenger become the champion."""
        hint = 'send the name of a challenger, as in {"challenger": "Adam:lr=0.003"}'
        return JsonResponse({"champion": await self._change(request, "challenger", hint, self.state.promote)})

    async def _change(self, request: Request, field: str, hint: str, change: Callable[[str], T]) -> T:
        """Call a function with the only field of a request, which names what to change to."""
        content = await self._read_json(request)
        if not isinstance(content, dict) or not isinstance(content.get(field), str) or len(content) != 1:
            raise RequestError(400, hint)
        try:
            return await asyncio.to_thread(change, content[field])
        except UsageError as error:
            raise RequestError(404, str(error)) from None
        except (OSError, NotReadyError) as error:
            raise unavailable(str(error)) from None

    async def versions(self, request: Request) -> Response:
        """List the versions."""
        return JsonResponse({"versions": await asyncio.to_thread(self.state.list_versions)})

    async def model(self, request: Request) -> Response:
        """Describe the model in use."""
        info = self.state.model.info
        if info is None:
            raise unavailable("the learner is starting")
        return JsonResponse(
            {
                "version": info.version,
                "age_seconds": round(time.time() - info.time, 3),
                "staleness_seconds": self.state.staleness,
                "steps": info.steps,
                "events": info.events,
                "learned": info.learned,
                "model": self.config.model if ":" not in self.config.model else "own",
                "champion": self.state.status.last_message.get("champion"),
                "schema": self.state.schema.settings(),
            }
        )

    async def health(self, request: Request) -> Response:
        """Answer that the process is alive, unless the thread that answers requests has died."""
        if not self.state.is_alive():
            raise unavailable("a thread of the process has ended")
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Answer whether predictions are possible."""
        if self.state.model.info is None:
            raise unavailable("the learner is starting")
        return JsonResponse({"status": "ok", "learner": "ok" if self.state.learner_is_running() else "silent"})

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of the learner and of all front processes."""
        STALENESS.set(self.state.staleness)
        registry = REGISTRY
        if _shares_metrics():
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        own = f"# TYPE cadam_learner_up gauge\ncadam_learner_up {int(self.state.learner_is_running())}\n"
        text = generate_latest(registry) + self.state.status.metrics + own.encode()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """Return the description of this interface."""
        return JsonResponse(self._openapi)

    async def status(self, request: Request) -> Response:
        """Return what the status page shows."""
        return Response(self.state.status.page_data(), media_type="application/json")

    async def page(self, request: Request) -> Response:
        """Return the status page."""
        return HTMLResponse(self.state.page)


def _shares_metrics() -> bool:
    """Whether the metrics of all fronts are in the folder that the supervisor has made for them.

    If its files were deleted, each front still has its own metrics.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return folder is not None and os.path.exists(os.path.join(folder, f"counter_{os.getpid()}.db"))


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=reject_duplicate_names, parse_constant=_reject_constant)
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method."""
    assert isinstance(error, HTTPException)
    content = {"error": f"{error.detail}: see /openapi.json", "details": []}
    return JsonResponse(content, error.status_code, error.headers)


async def _request_error(request: Request, error: Exception) -> Response:
    """Answer a request that failed."""
    assert isinstance(error, RequestError)
    return error_response(error)
