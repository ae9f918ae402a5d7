"""A report of all metrics to a text file for Prometheus."""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from . import prometheus_metrics

if TYPE_CHECKING:
    from ..learner import Learner

logger = logging.getLogger("cadam.online")


class PrometheusFile:
    """Writes every metric of a learner to a text file for the textfile collector of Prometheus's node exporter.

    The file is replaced atomically. If it cannot be written, this is logged once and learning continues.

    Args:
        path: the file.
        seconds: the time between two updates.
    """

    def __init__(self, path: Path | str, seconds: float = 10.0) -> None:
        prometheus_metrics.check_installed()
        self.path, self.seconds = Path(path), seconds
        self._time_of_write, self._has_logged_failure = -math.inf, False
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, learner: Learner) -> None:
        """Update the file if it is due."""
        if time.monotonic() - self._time_of_write >= self.seconds:
            self.end(learner)

    def end(self, learner: Learner) -> None:
        """Update the file now."""
        self._time_of_write = time.monotonic()
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            new.write_text(prometheus_metrics.to_text(prometheus_metrics.families(learner)))
            os.replace(new, self.path)
            self._has_logged_failure = False
        except OSError as error:
            if not self._has_logged_failure:
                logger.error("%s cannot be written: %s", self.path, error)
            self._has_logged_failure = True
