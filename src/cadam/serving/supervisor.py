"""The supervisor: starts the processes of a service, and starts them again if they die."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from ..online.models.model_file import UsageError
from ..online.persistence.checkpoints import list_checkpoints
from .config import SERVICE_LOCK_FILE, TOKEN_VARIABLE, ServiceConfig

logger = logging.getLogger("cadam.serving")

SECONDS_TO_END = 30.0
"""The time that a process may take to end before it is killed: the learner writes a checkpoint."""
SECONDS_FOR_READINESS = 1.0
SECONDS_BETWEEN_CHECKS = 0.05
STABLE_SECONDS = 10.0
"""A process that has run for longer is restarted at once if it dies."""
MAX_RESTART_SECONDS = 30.0
LISTEN_BACKLOG = 2048


class Child:
    """A process that is restarted when it dies; after a quick death it is restarted after a pause that doubles.

    Args:
        name: its name, for messages.
        command: the command.
        descriptors: open files that the process inherits.
        metrics: the folder of its metrics, if it writes any.
        token: the token of the service, if the process needs it.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        descriptors: tuple[int, ...] = (),
        metrics: Path | None = None,
        token: str | None = None,
    ) -> None:
        self.name, self.command, self.descriptors, self.metrics = name, command, descriptors, metrics
        self.environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
        if metrics is not None:
            self.environment["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        if token is not None:
            self.environment[TOKEN_VARIABLE] = token
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self._started, self._pause, self._next_start = 0.0, 0.0, 0.0

    def start(self) -> None:
        """Start the process. It ends when its standard input is closed, also if this process is killed."""
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            pass_fds=self.descriptors,
            env=self.environment,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone
        )

    def check(self) -> None:
        """Start the process again if it has died and its pause is over."""
        if self.process is not None and self.process.poll() is None:
            return
        now = time.monotonic()
        if self.process is not None:
            code, pid, self.process = self.process.returncode, self.process.pid, None
            if self.metrics is not None:  # prometheus_client sums and compares the gauges of living processes only
                for path in self.metrics.glob(f"gauge_live*_{pid}.db"):
                    path.unlink(missing_ok=True)
            is_stable = now - self._started > STABLE_SECONDS
            self._pause = 0.0 if is_stable else min(MAX_RESTART_SECONDS, max(0.2, 2 * self._pause))
            self._next_start = now + self._pause
            logger.error("the %s has ended with code %d and is started again in %.1f s", self.name, code, self._pause)
            self.restarts += 1
        if now >= self._next_start:
            self.start()

    def end(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            logger.error("the %s does not end and is killed", self.name)
            self.process.kill()
            self.process.wait()


class Supervisor:
    """Runs a service until it is stopped.

    Args:
        config: the configuration.
        host: the address to listen on.
        port: the port; 0 for any free one.
        workers: the number of front processes.

    Raises:
        UsageError: if the address is in use, or another service runs in the folder.
    """

    def __init__(self, config: ServiceConfig, host: str, port: int, workers: int = 1) -> None:
        self._lock = FileLock(config.path / SERVICE_LOCK_FILE)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise UsageError(f"another cadam serve runs in {config.folder}: stop it first") from None
        self.config, self._stop = config, threading.Event()
        self._runtime = config.runtime_folder()
        was_killed = any(self._runtime.iterdir())  # a service that is stopped deletes the folder
        try:
            self._listener = _listen(host, port, SECONDS_TO_END if was_killed else 0)
        except OSError as error:
            self._lock.release()
            raise UsageError(f"{host}:{port}: {error.strerror or error}; give another --address") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._listener.getsockname()[1]}/"
        if not list_checkpoints(config.path):  # what is left there belongs to a service that was deleted
            shutil.rmtree(self._runtime)
            self._runtime = config.runtime_folder()
        metrics = self._runtime / "metrics"
        shutil.rmtree(metrics, ignore_errors=True)
        metrics.mkdir()
        descriptor = self._listener.fileno()
        token = config.token()  # read once: all fronts have the same one, also those that are started again
        text = config.to_json()

        def command(module: str, *arguments: str) -> list[str]:
            return [sys.executable, "-m", f"cadam.serving.{module}", text, *arguments]

        self.learner = Child("learner", command("learner_process"))
        self.fronts = [
            Child(f"front {number}", command("front", str(descriptor)), (descriptor,), metrics, token)
            for number in range(1, workers + 1)
        ]

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Run the service until `stop` is called.

        Args:
            on_ready: Is called once, when the service can answer predictions.
        """
        children = [self.learner, *self.fronts]
        try:
            for child in children:
                child.start()
            is_ready = False
            while not self._stop.wait(SECONDS_BETWEEN_CHECKS):
                for child in children:
                    child.check()
                if not is_ready and self._answers_ready():
                    is_ready = True
                    on_ready()
        finally:
            self._listener.close()
            for child in (*self.fronts, self.learner):  # the learner also learns what the fronts have just accepted
                child.end()
            shutil.rmtree(self._runtime, ignore_errors=True)
            self._lock.release()

    def _answers_ready(self) -> bool:
        """Whether a front has a snapshot of the model to predict with."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}readyz", timeout=SECONDS_FOR_READINESS):
                return True
        except OSError:  # nothing listens yet, or the status is 503
            return False

    def stop(self) -> None:
        """Let `run` end."""
        self._stop.set()

    def stop_on_signals(self) -> None:
        """Stop the service when this process receives SIGTERM or SIGINT."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)


def _listen(host: str, port: int, patience: float) -> socket.socket:
    """Open a listening socket. While the fronts of a killed service still have the address, wait up to `patience`."""
    deadline = time.monotonic() + patience
    while True:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(LISTEN_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(SECONDS_BETWEEN_CHECKS)
