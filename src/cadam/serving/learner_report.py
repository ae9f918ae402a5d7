"""Reports of the learner process: its status for the front processes, and what is due after a checkpoint."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from contextlib import suppress
from typing import Any

from ..online.learner import Learner
from ..online.monitoring.status_page import RecentLoss, page_values, status_message
from .config import ServiceConfig
from .event_log import EventLog, LogUnavailableError
from .log_source import LogSource
from .service_learner import ServiceLearner
from .snapshots import SnapshotPublisher
from .versions import Versions

logger = logging.getLogger("cadam.serving")

STATUS_FILE = "learner.json"
"""The report of the learner to the front processes, in the runtime folder."""
SECONDS_BETWEEN_REPORTS = 0.5


class RollbackRequestedError(Exception):
    """The learner shall continue from an earlier version."""


class StatusFile:
    """A report that writes the metrics of the learner to a file, from which front processes read them.

    Args:
        config: the configuration of the service.
        source: the source of the learner.
        publisher: the snapshots of the learner.
        log: the log, to notice rollbacks.
    """

    def __init__(self, config: ServiceConfig, source: LogSource, publisher: SnapshotPublisher, log: EventLog) -> None:
        self.config, self.source, self.publisher, self.log = config, source, publisher, log
        self.started = time.time()
        self._recent_loss = RecentLoss()
        self._time_of_update, self._covered = -math.inf, -1
        self._has_logged_failure = False

    def __call__(self, learner: ServiceLearner) -> None:
        """Update the file if it is due, or if a new snapshot was published."""
        covered = self.publisher.covered_position(learner)
        seconds = time.monotonic() - self._time_of_update
        if seconds >= SECONDS_BETWEEN_REPORTS or (covered != self._covered and seconds >= SECONDS_BETWEEN_REPORTS / 5):
            self.end(learner)

    def end(self, learner: ServiceLearner) -> None:
        """Update the file now, and raise if a rollback is requested."""
        from prometheus_client.core import GaugeMetricFamily

        self._time_of_update, self._covered = time.monotonic(), self.publisher.covered_position(learner)
        families, point = page_values(learner, self._recent_loss)
        published = self.publisher.published
        gauges = {
            "log_position": ("number of the last log entry that the learner has read", self.source.position),
            "snapshot_bytes": ("size of the published snapshot", self.publisher.bytes),
            "snapshot_time": ("time of the published snapshot", 0 if published is None else published.time),
            "diverged": (
                "whether the model has diverged, so that snapshots are not published",
                self.publisher.is_diverged,
            ),
            "guard_alert": ("whether snapshots are not published because the log loss has risen", learner.is_alert),
            "guard_enabled": ("whether a rise of the log loss is watched", learner.guard is not None),
            "rollbacks": ("number of rollbacks", self.source.generation),
        }
        with suppress(LogUnavailableError):
            gauges |= {"log_bytes": ("size of the event log", self.log.size())}
        for name, (text, value) in gauges.items():
            families.append(GaugeMetricFamily(f"cadam_{name}", text, float(value)))
        if published is not None:
            version = GaugeMetricFamily("cadam_served_version", "1 for the version that is served", labels=["version"])
            version.add_metric([published.version], 1.0)
            families.append(version)
        families += _arm_families(learner)
        message = status_message(self.config.title, self.started, families, point)
        message["covered"] = self._covered
        message["champion"] = str(learner.arm)
        message["challengers"] = [str(each.arm) for each in learner.challengers]
        message["failed"] = [str(each.arm) for each in learner.challengers if each.failure is not None]
        message["promotions"] = learner.promotions
        try:
            path = self.config.runtime_folder() / STATUS_FILE
            new = path.with_name(f".{path.name}.new")
            new.write_text(json.dumps(message))
            os.replace(new, path)
            self._has_logged_failure = False
        except OSError as error:
            if not self._has_logged_failure:
                logger.error("the status of the learner could not be written: %s", error)
            self._has_logged_failure = True
        try:
            if len(self.log.rollbacks()) > len(self.source.rollbacks):
                raise RollbackRequestedError
        except LogUnavailableError:
            pass  # the next report asks again


class Promoter:
    """A report that makes a challenger the champion, on request or when it is better by the verdict of the A/B.

    Args:
        log: the log, which records promotions.
        is_auto: whether a challenger that is better is promoted without a request.
    """

    def __init__(self, log: EventLog, *, is_auto: bool) -> None:
        self.log, self.is_auto = log, is_auto

    def __call__(self, learner: ServiceLearner) -> None:
        """Promote a challenger if it is due.

        While the learner repeats a part of the log after a crash, only promotions that were recorded are applied.
        During an alert of the guard the labels are in doubt, and none is decided.
        """
        try:
            if self.is_auto and not learner.is_alert and (winner := learner.find_winner()) is not None:
                is_repeating = self.log.next_batch(learner.position) is not None
                if not is_repeating:
                    self.log.add_promotion(winner, learner.position)
            learner.apply_promotions(self.log)
        except LogUnavailableError as error:  # the next report tries again
            logger.error("no challenger is promoted: %s", error)


class Housekeeping:
    """A report that keeps versions and deletes old entries of the log after each checkpoint.

    An entry is deleted only if all checkpoints that are kept have learned it. The last such entry stays, which shows
    a rollback to the oldest of them that nothing after it was deleted: numbers of entries are not always consecutive.

    Args:
        config: the configuration of the service.
        source: the source of the learner.
        log: the log.
    """

    def __init__(self, config: ServiceConfig, source: LogSource, log: EventLog) -> None:
        self.config, self.source, self.log = config, source, log
        self.versions = Versions(config.path)
        self._saves = -1
        self._positions: deque[int] = deque(maxlen=config.keep)

    def __call__(self, learner: Learner) -> None:
        """Do what is due after a checkpoint."""
        schedule = learner.schedule
        assert schedule is not None
        if schedule.saves == self._saves or not schedule.last_save_succeeded:
            return
        self._saves = schedule.saves
        self._positions.append(self.source.position)
        path = schedule.store.files()[-1]
        try:
            self.versions.add(path, self.source.position, self.source.generation, learner)
            has_retention = self.config.retain_seconds is not None or self.config.retain_bytes is not None
            if has_retention and len(self._positions) == self._positions.maxlen:
                self.log.delete_old(
                    self._positions[0] - 1, seconds=self.config.retain_seconds, size=self.config.retain_bytes
                )
        except OSError as error:
            logger.error("the version was not kept, or old versions or entries were not deleted: %s", error)

    end = __call__


def _arm_families(learner: ServiceLearner) -> list[Any]:
    """Return the comparison of the champion with its challengers as metric families; none without challengers."""
    from prometheus_client.core import GaugeMetricFamily

    if not learner.challengers:
        return []
    champion = GaugeMetricFamily("cadam_champion", "1 for the optimizer whose model is served", labels=["optimizer"])
    champion.add_metric([str(learner.arm)], 1.0)
    promotions = GaugeMetricFamily("cadam_promotions", "number of promotions", learner.promotions)
    difference = GaugeMetricFamily(
        "cadam_challenger_difference",
        "log loss of a challenger minus that of the champion, in percent of the latter: mean and confidence sequence",
        labels=["optimizer", "value"],
    )
    verdict = GaugeMetricFamily(
        "cadam_challenger_verdict",
        "1 if the challenger is better than the champion, -1 if it is worse, 0 if neither is decided",
        labels=["optimizer"],
    )
    labels = GaugeMetricFamily(
        "cadam_challenger_labels", "labels on which challenger and champion were compared", labels=["optimizer"]
    )
    failed = GaugeMetricFamily("cadam_challenger_failed", "whether a challenger has diverged", labels=["optimizer"])
    for each in learner.challengers:
        name, now = str(each.arm), each.scores.over_time
        for value in ("mean", "low", "high"):
            difference.add_metric([name, value], getattr(now, value))
        verdict.add_metric([name], {"better": 1.0, "worse": -1.0}.get(each.scores.kind, 0.0))
        labels.add_metric([name], each.scores.events)
        failed.add_metric([name], float(each.failure is not None))
    return [champion, promotions, difference, verdict, labels, failed]
