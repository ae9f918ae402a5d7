"""The status page of a running learner, with /metrics for Prometheus and /healthz.

A separate process answers HTTP requests (`status_server.py`), so that clients cannot slow down the learner or make it
fail.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..metrics.log_loss import LogLoss
from . import prometheus_metrics

if TYPE_CHECKING:
    from ..learner import Learner

logger = logging.getLogger("cadam.online")

SERVER = Path(__file__).with_name("status_server.py")
RECENT_LABELS = 10_000
"""The number of labeled events over which the page compares the model with the best constant."""


def parse_address(text: str, option: str = "--status") -> tuple[str, int]:
    """Parse PORT, HOST:PORT or [IPV6]:PORT. Without a host, only this machine can connect.

    Args:
        text: the address.
        option: the option that it was given to, for the error message.

    Raises:
        ValueError: if the text has another form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{option} should be [HOST:]PORT, as in 8000 or 0.0.0.0:8000; got {text!r}")
    return host, int(port)


class StatusServer:
    """Starts the server process and sends it what the page shows. Sending never blocks the learner."""

    def __init__(self, address: str, title: str) -> None:
        prometheus_metrics.check_installed()
        host, port = parse_address(address)
        self.title, self.started = title, time.time()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
                listener.listen(128)
            except OSError as error:
                raise ValueError(f"--status {address}: {error.strerror or error}; give another HOST:PORT") from error
            bound_host, bound_port = listener.getsockname()[:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}/"
            # The learner binds the port, so that it can report an address that is in use before it starts learning.
            command = [sys.executable, "-I", str(SERVER), str(listener.fileno())]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        assert self.process.stdin is not None
        self._pipe = self.process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self.unsent, self._has_ended = b"", False
        logger.info("status page: %s", self.url)
        if not ipaddress.ip_address(bound_host).is_loopback:
            logger.warning("everyone who can reach this machine can read the status page: it has no password")

    def send(self, families: Iterable[Any], point: Mapping[str, float]) -> None:
        """Send metrics to the server, unless it has not read the previous message yet.

        Args:
            families: all metrics, as Prometheus metric families.
            point: values for the curves of the page.
        """
        if not self._flush():
            return
        message = status_message(self.title, self.started, families, point)
        self.unsent = json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> bool:
        """Write as much to the pipe as fits, and return whether everything has been sent."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self._pipe, self.unsent) :]
        except BlockingIOError:
            return False
        except OSError as error:
            logger.error("the status page has ended; learning continues without it: %s", error)
            self._has_ended, self.unsent = True, b""
        return not self._has_ended

    def close(self) -> None:
        """End the server process."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
            self.process.terminate()
            self.process.wait()


def status_message(title: str, started: float, families: Iterable[Any], point: Mapping[str, float]) -> dict[str, Any]:
    """Return what the status page shows, in the form that `status_server.Status.add` reads.

    Args:
        title: the title of the page.
        started: when the learner was started, in seconds since 1970.
        families: all metrics, as Prometheus metric families.
        point: values for the curves of the page.
    """
    families = list(families)
    return {
        "metrics": prometheus_metrics.to_text(families),
        "status": {"title": title, "started": started, "samples": prometheus_metrics.to_samples(families)},
        "point": {name: value if math.isfinite(value) else None for name, value in point.items()},
    }


class RecentLoss:
    """The log loss of the last labeled events since the process started, computed from snapshots of the total.

    Args:
        labels: the number of labeled events. The window has up to 1% more, or one batch if batches are larger.
    """

    def __init__(self, labels: int = RECENT_LABELS) -> None:
        self.labels = labels
        self._snapshots: deque[LogLoss] = deque()

    def advance(self, learner: Learner) -> LogLoss:
        """Return the loss of the last labeled events."""
        total, snapshots = learner.log_loss, self._snapshots
        if not snapshots:
            snapshots.append(replace(total) if learner.resumed_at else LogLoss())
        while len(snapshots) > 1 and total.count - snapshots[1].count >= self.labels:
            snapshots.popleft()
        recent = total - snapshots[0]
        if total.count - snapshots[-1].count >= self.labels / 100:
            snapshots.append(replace(total))
        return recent


class StatusPage:
    """A report that shows the metrics of a learner on a status page.

    Args:
        address: PORT or HOST:PORT. Without a host, only this machine can connect.
        title: the title of the page.
        seconds: the time between two updates.

    Raises:
        ValueError: if the address is invalid or in use.
    """

    def __init__(self, address: str, title: str, seconds: float = 1.0) -> None:
        self.server, self.seconds = StatusServer(address, title), seconds
        self._recent_loss = RecentLoss()
        self._time_of_update = -math.inf

    def __call__(self, learner: Learner) -> None:
        """Update the page if it is due."""
        if time.monotonic() - self._time_of_update >= self.seconds:
            self.end(learner)

    def end(self, learner: Learner) -> None:
        """Update the page now."""
        self._time_of_update = time.monotonic()
        self.server.send(*page_values(learner, self._recent_loss))

    def close(self) -> None:
        """End the server process."""
        self.server.close()


def page_values(learner: Learner, recent_loss: RecentLoss) -> tuple[list[Any], dict[str, float]]:
    """Return the metric families of a learner and a point for the curves of the page."""
    recent = recent_loss.advance(learner)
    values = {**learner.metrics(), **learner.health()}
    values |= {"recent_labeled": recent.count, "recent_log_loss": recent.mean}
    values["recent_best_constant"] = recent.best_constant
    return prometheus_metrics.families(learner, values), _curve_point(learner, values)


def _curve_point(learner: Learner, values: Mapping[str, float]) -> dict[str, float]:
    """Collect values for the curves: mostly sums, from which the page computes means between two points."""
    loss, alignment = learner.log_loss, learner.total_alignment()
    return {
        "events": learner.events,
        "labeled": loss.count,
        "positives": loss.positives,
        "loss": loss.loss,
        "aligned": alignment.aligned,
        "touched": alignment.touched,
        "gauc": values.get("gauc_by_impressions/window", math.nan),
        "calibration": values.get("calibration/window", math.nan),
    }
