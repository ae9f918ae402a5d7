"""The state of a front process: the model in use, the requests that wait, and the last report of the learner."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..online.data.schema import Schema
from ..online.models.model_file import UsageError, is_log_loss
from ..online.monitoring import status_server
from ..online.run_config import SCHEMA_FILE, model_builder
from .config import ServiceConfig
from .event_log import EventLog, LogUnavailableError, Rollback, open_log
from .learner_report import STATUS_FILE
from .request_batcher import RequestBatcher
from .snapshots import NotReadyError, ServedModel
from .versions import Versions, request_rollback

logger = logging.getLogger("cadam.serving")

POLL_SECONDS = 0.02
"""The pause between two checks for a new snapshot."""
SECONDS_BETWEEN_STATUS_READS = 0.25
SECONDS_UNTIL_SILENT = 10.0
"""If the learner has not reported for longer, it is considered not to run."""


class FrontState:
    """The state of a front process, with a thread that follows the learner.

    Args:
        config: the configuration of the service.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.config, self.schema = config, config.schema()
        build, loss = model_builder(config.model, self.schema, config.settings)
        self.has_probability = is_log_loss(loss)
        runtime = config.runtime_folder()
        self.model = ServedModel(runtime, build)
        self.batcher = RequestBatcher(
            self.schema,
            self.model,
            lambda: open_log(config.path),
            has_probability=self.has_probability,
            adds_time=Schema.read(config.path / SCHEMA_FILE).time is None,
            limits=config.limits,
        )
        self.status = status_server.Status()
        self.page = Path(status_server.__file__).with_name("status.html").read_text(encoding="utf-8")
        self.staleness = 0.0
        """The age in seconds of the oldest label that the model in use has not learned; 0 if there is none."""
        self._status_path = runtime / STATUS_FILE
        self._covered = 0
        self._stop = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        """Load the snapshot, if there is one, and start the threads."""
        self.model.refresh()
        self.batcher.start()
        self._follower.start()

    def close(self) -> None:
        """End the threads, after the requests that wait were answered."""
        self._stop.set()
        self.batcher.close()
        self.batcher.join(timeout=self.config.limits.seconds)

    def is_alive(self) -> bool:
        """Whether all threads run."""
        return self.batcher.is_alive() and self._follower.is_alive()

    def learner_is_running(self) -> bool:
        """Whether the learner has reported recently."""
        return bool(self.status.metrics) and self.status.seconds_silent < SECONDS_UNTIL_SILENT

    # Versions -----------------------------------------------------------------------------------------------------

    def list_versions(self) -> list[dict[str, Any]]:
        """Return the versions, oldest first."""
        return [asdict(version) for version in Versions(self.config.path).list()]

    def roll_back(self, name: str) -> Rollback:
        """Let the learner continue from a version or tag.

        Raises:
            UsageError: if there is no such version, or if entries of the log after it were deleted.
            LogUnavailableError: if the log cannot be written.
        """
        return request_rollback(self.config.path, name)

    def promote(self, name: str) -> str:
        """Let a challenger become the champion, and return its full name.

        Args:
            name: its name, as ``Adam:lr=0.003``, or the part before a colon if no other challenger has it.

        Raises:
            UsageError: if there is no such challenger, or if it has failed.
            NotReadyError: if the learner has not reported its challengers yet.
            LogUnavailableError: if the log cannot be written.
        """
        if not self.status.last_message:
            raise NotReadyError("the learner has not reported its challengers yet: it is starting")
        log = open_log(self.config.path)
        try:
            challengers = self._next_challengers(log)
            matches = [each for each in challengers if f"{each}:".lower().startswith(f"{name}:".lower())]
            if len(matches) != 1:
                names = ", ".join(challengers) or "none"
                raise UsageError(f"{len(matches)} challengers are called {name!r}; the challengers: {names}")
            [challenger] = matches
            if challenger in self.status.last_message.get("failed", []):
                raise UsageError(f"{challenger} has failed and cannot become the champion")
            log.add_promotion(challenger)
        finally:
            log.close()
        return challenger

    def _next_challengers(self, log: EventLog) -> list[str]:
        """Return the challengers after the promotions that the learner has not reported yet."""
        report = self.status.last_message
        champion, challengers = report.get("champion"), list[str](report.get("challengers", []))
        for promotion in log.promotions(report.get("promotions", 0)):
            if champion is not None and promotion.challenger in challengers:
                challengers[challengers.index(promotion.challenger)], champion = champion, promotion.challenger
        return challengers

    # The learner --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Load new snapshots and reports of the learner until `close` is called."""
        log: EventLog | None = None
        time_of_read, file_time = -math.inf, 0
        while not self._stop.wait(POLL_SECONDS):
            try:
                self.model.refresh()
                if time.monotonic() - time_of_read < SECONDS_BETWEEN_STATUS_READS:
                    continue
                time_of_read = time.monotonic()
                if self._status_path.exists() and (changed := self._status_path.stat().st_mtime_ns) != file_time:
                    file_time = changed
                    self._read_status()
                log = log or open_log(self.config.path)
                self.staleness = self._compute_staleness(log)
            except LogUnavailableError as error:
                logger.warning("%s", error)
            except Exception:  # the next round tries again
                logger.exception("following the learner failed")

    def _read_status(self) -> None:
        self.status.add(self._status_path.read_bytes())
        self._covered = self.status.last_message["covered"]

    def _compute_staleness(self, log: EventLog) -> float:
        """Return the age of the oldest label that is not in the model in use."""
        info = self.model.info
        if info is None:
            return 0.0
        oldest = log.oldest_label_time(max(self._covered, info.position))
        return 0.0 if oldest is None else max(0.0, time.time() - oldest)
