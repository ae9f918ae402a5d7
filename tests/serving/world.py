"""A service in one process, whose log is written by the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cadam.online import models
from cadam.online.data.schema import Schema
from cadam.online.run_config import RunConfig
from cadam.serving.config import ServiceConfig
from cadam.serving.event_log import URI_FILE, Entry, open_log
from cadam.serving.learner_process import build_learner, restore
from cadam.serving.learner_report import Housekeeping, Promoter
from cadam.serving.log_source import LogSource
from cadam.serving.service_learner import ServiceLearner
from cadam.serving.snapshots import ServedModel, SnapshotPublisher
from cadam.serving.versions import Versions

SCHEMA = Schema({"item": "category:10"}, label="click")


class World:
    """A service in one process, and a stream in which items below 5 are clicked and others are not."""

    def __init__(self, folder: Path, log_uri: str | None = None, **options: Any) -> None:
        if log_uri is not None:
            (folder / URI_FILE).write_text(log_uri)
        RunConfig("", SCHEMA, "linear", lambda: models.build("linear", SCHEMA), torch.nn.BCEWithLogitsLoss(), {}).write(
            folder
        )
        self.config = ServiceConfig(
            *(str(folder), "linear", {}), **{"lr": 0.05, "batch_size": 200, "checkpoint_seconds": 1e9, **options}
        )
        self.log, self.random, self.count = (
            open_log(self.config.path, is_durable=False, creates=True),
            np.random.default_rng(0),
            0,
        )
        self.served = ServedModel(self.config.runtime_folder(), lambda: models.build("linear", self.config.schema()))

    def stream(self, count: int, flipped: bool = False) -> None:
        entries = []
        for item in self.random.integers(10, size=count).tolist():
            click = int((self.random.random() < (0.9 if item < 5 else 0.1)) != flipped)
            self.count += 1
            key = f"e{self.count}"
            entries += [*self.event(key, item), Entry("label", key, str(click), self.count)]
        self.log.append(entries)

    def event(self, key: str, item: int = 0) -> list[Entry]:
        """The entry of an event."""
        body = json.dumps({"item": item, "event_id": key, "received_at": self.count})
        return [Entry("event", key, body, self.count)]

    def learn(self) -> ServiceLearner:
        """Learn the log to its end and publish, as a new learner process would."""
        learner = build_learner(self.config)
        try:
            rollbacks = self.log.rollbacks()
            restore(learner, self.config, self.log)
            source = LogSource(
                self.log, self.config.schema(), batch_size=self.config.batch_size, follow=False, rollbacks=rollbacks
            )
            publisher = SnapshotPublisher(source, self.config, Versions(self.config.path))
            housekeeping = Housekeeping(self.config, source, self.log)
            learner.reports += [Promoter(self.log, is_auto=self.config.promotes_automatically), publisher]
            learner.run(source)
            housekeeping(learner)
        finally:
            learner.close()
        self.served.refresh()
        return learner

    def loss(self) -> float:
        """The log loss of the served version on the true labels."""
        missing = {name: np.zeros(10, np.int64) for name in self.config.schema().features if name != "item"}
        scores = self.served.scores({"item": np.arange(10), **missing})[1].astype(np.float64)
        rates = np.where(np.arange(10) < 5, 0.9, 0.1)
        return float(np.mean(rates * np.logaddexp(0, -scores) + (1 - rates) * np.logaddexp(0, scores)))
