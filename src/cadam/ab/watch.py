"""`cadam ab --serve`: how far a comparison is, and what its arms have reached so far."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from cadam.online.monitoring.prometheus_metrics import GAUGES
from cadam.online.monitoring.status_page import StatusServer

from ..trials.console import Progress
from ..trials.runner import Event, Request
from ..trials.scoreboard import Scoreboard
from .study import AS_IT_IS, Study

if TYPE_CHECKING:
    from prometheus_client.core import Metric

HEARTBEAT = 5.0  # seconds: a run may take minutes, and there is nothing to tell before it ends
METRICS = {
    "gauc_by_impressions": "gauc_by_impressions",
    "log_loss": "log_loss",
    "calibration": "calibration",
    "alignment_over_touched": "alignment",
}
"""Of the learner's metrics those that a run of an arm has, with their names there."""


class Watch:
    """The status page of a comparison; a context, at whose end the page goes."""

    def __init__(self, address: str, study: Study, request: Request, left_out: Mapping[str, int]) -> None:
        self.study, self.request, self.left_out = study, request, left_out
        self.progress = Progress([request])
        self.board = Scoreboard(request.experiment.name, "", study.arms, {}, AS_IT_IS)
        self.running: set[str] = set()
        self.speed = self.constant = float("nan")
        self.lock, self.over = threading.Lock(), threading.Event()
        self.server = StatusServer(address, f"cadam ab: {request.experiment.title}")

    def __enter__(self) -> Watch:
        self.tell()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        with self.lock:
            self.server.close()

    def _beat(self) -> None:
        while not self.over.wait(HEARTBEAT):
            self.tell()

    def __call__(self, event: Event) -> None:
        """Take note of what happened to a run."""
        with self.lock:
            self.progress.note(event)
            (self.running.add if event.kind == "start" else self.running.discard)(event.cell.key())
            self.board.note(event)
            if event.result is not None and not event.cell.settings["tuning"]:
                metrics = event.result.outcome.metrics
                self.constant = metrics["log_loss"] / metrics["normalised_entropy"]
                self.speed = self.study.events["full"] / max(event.result.provenance.seconds, 1e-9)
        self.tell()

    def tell(self) -> None:
        with self.lock:
            if not self.over.is_set():
                self.server.tell(self.families(), {})

    def families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        name = self.request.experiment.name
        counts = {"computed": self.progress.computed[name], "failed": self.progress.failed[name]}
        for what, count in counts.items():
            yield CounterMetricFamily(f"cadam_ab_cells_{what}", f"runs that were {what}, since it began", value=count)
        gauges = {
            "ab_cells": ("runs that the comparison needs, or about so", self.progress.total(self.request)),
            "ab_cells_done": ("runs that are there", self.progress.done[name]),
            "ab_cells_running": ("runs at work", len(self.running)),
            "ab_seconds_left": ("seconds that are left, about", self.progress.left()),
            "events": ("events of the stream", self.study.events["full"]),
            "events_a_second": ("events a second in the last run that ended", self.speed),
            "best_constant": (GAUGES["best_constant"], self.constant),
        }
        for gauge, (help, value) in gauges.items():
            yield GaugeMetricFamily(f"cadam_{gauge}", help, value=value)
        rejected = GaugeMetricFamily("cadam_rejected", "rejected events", labels=["reason"])
        for reason, count in self.left_out.items():
            rejected.add_metric([reason], count)
        yield rejected
        runs = {arm: [seed[arm] for seed in self.board.metrics.values() if arm in seed] for arm in self.study.arms}
        seeds = GaugeMetricFamily("cadam_ab_seeds", "runs of an arm that its means are over", labels=["arm"])
        for arm, found in runs.items():
            seeds.add_metric([arm], len(found))
        yield seeds
        for metric, own in METRICS.items():
            family = GaugeMetricFamily(f"cadam_{metric}", f"{GAUGES[metric]}, mean over seeds", labels=["arm"])
            for arm, found in runs.items():
                if found:
                    family.add_metric([arm], float(np.mean([one[own] for one in found])))
            yield family
