"""`--status`: a status page, /metrics and /healthz while a learner runs, answered by a process of its own."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import prometheus_metrics

if TYPE_CHECKING:
    from ..learner import Learner

logger = logging.getLogger("cadam.online")

HELP = "a status page, /metrics for Prometheus and /healthz at [HOST:]PORT (default host: 127.0.0.1)"
SERVER = Path(__file__).with_name("status_server.py")


def address_of(text: str) -> tuple[str, int]:
    """Host and port from PORT, HOST:PORT or [IPV6]:PORT. Without a host only this machine is served."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--status should be [HOST:]PORT, as in 8000 or 0.0.0.0:8000; got {text!r}")
    return host, int(port)


class StatusServer:
    """Serves what it is told last. Telling never waits: what cannot be sent now is left for the next time."""

    def __init__(self, address: str, title: str) -> None:
        prometheus_metrics.check_installed()
        host, port = address_of(address)
        self.title, self.started = title, time.time()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((host, port))
                listening.listen(128)
            except OSError as error:
                raise ValueError(f"--status {address}: {error.strerror or error}; give another HOST:PORT") from error
            at = listening.getsockname()
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{at[1]}/"
            command = [sys.executable, "-I", SERVER, str(listening.fileno()), at[0]]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listening.fileno()])
        assert self.process.stdin is not None
        self.pipe = self.process.stdin.fileno()
        os.set_blocking(self.pipe, False)
        self.unsent, self.ended = b"", False
        logger.info("status page: %s", self.url)
        if not ipaddress.ip_address(at[0]).is_loopback:
            logger.warning("whoever reaches this machine can read the status page: it asks for no password")

    def tell(self, families: Any, point: Mapping[str, Any], **status: Any) -> None:
        """Let the page show these metrics; `point` is for its curves."""
        if not self._send():
            return
        families = list(families)
        told = {"title": self.title, "started": self.started, "samples": prometheus_metrics.samples(families), **status}
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in point.items()}
        content = {"metrics": prometheus_metrics.text(families), "status": told, "point": finite}
        self.unsent = json.dumps(content).encode() + b"\n"
        self._send()

    def _send(self) -> bool:
        """As much as can be sent now; whether more may come."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self.pipe, self.unsent) :]
        except BlockingIOError:
            return False
        except OSError as error:
            logger.error("the status page has ended, learning goes on without: %s", error)
            self.ended, self.unsent = True, b""
        return not self.ended

    def close(self) -> None:
        """End the server."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
            self.process.terminate()
            self.process.wait()


class StatusPage:
    """A report: the learner's numbers on the status page, each `seconds`."""

    def __init__(self, address: str, title: str, seconds: float = 1.0) -> None:
        self.server, self.seconds, self.told = StatusServer(address, title), seconds, -math.inf

    def __call__(self, learner: Learner) -> None:
        if time.monotonic() - self.told >= self.seconds:
            self.end(learner)

    def end(self, learner: Learner) -> None:
        self.told = time.monotonic()
        numbers = {**learner.metrics(), **learner.health()}
        self.server.tell(prometheus_metrics.families(learner, numbers), _point(learner, numbers))

    def close(self) -> None:
        self.server.close()


def _point(learner: Learner, numbers: Mapping[str, float]) -> dict[str, float]:
    """What the curves are drawn from: sums, so that the page can show what happened between two points."""
    progress, total = learner.progress, learner.total_alignment()
    return {
        "events": learner.events,
        "labelled": progress.count,
        "positives": progress.positives,
        "loss": progress.loss,
        "aligned": total.aligned,
        "touched": total.touched,
        "gauc": numbers.get("gauc_by_impressions/window", math.nan),
        "calibration": numbers.get("calibration/window", math.nan),
    }
