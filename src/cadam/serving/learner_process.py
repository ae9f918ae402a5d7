"""The learner process: learns from the event log, saves checkpoints and publishes snapshots of the model.

    python -m cadam.serving.learner_process CONFIG

CONFIG is a `ServiceConfig` as JSON. The process ends when its standard input is closed.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint_files import DamagedCheckpointError, expect_valid_content, read_tree
from ..online.device import select_device
from ..online.models.model_file import UsageError
from ..online.persistence.checkpoint_schedule import CheckpointOptions
from ..online.persistence.checkpoints import list_checkpoints, read_newest
from ..online.persistence.random_state import seed_generators
from ..online.run_config import model_builder
from ..online.sparse_checks import disable_sparse_checks
from .arms import ALPHA, Arm, Challenger, RecordingLearner
from .config import ServiceConfig
from .event_log import EventLog, open_log
from .guard import Guard
from .learner_report import (
    SECONDS_BETWEEN_REPORTS,
    Housekeeping,
    Promoter,
    RollbackRequestedError,
    StatusFile,
)
from .log_source import LogSource
from .processes import prepare_process, watch_parent
from .service_learner import ServiceLearner
from .snapshots import SnapshotPublisher
from .versions import Versions

logger = logging.getLogger("cadam.serving")

SECONDS_TO_WAIT_FOR_FOLDER = 20.0
"""The time to wait for the learner of an earlier service to release the checkpoint folder."""


def build_learner(config: ServiceConfig) -> ServiceLearner:
    """Build the learner of a service in its initial state.

    A service without checkpoints gets the model of the run `start_from`, if there is one. Later the run may have been
    migrated or deleted, and its model must not be read again.
    """
    build, loss = model_builder(config.model, config.schema(), config.settings, select_device(config.device))
    labels = config.label_options()
    checkpoint = CheckpointOptions(config.path, seconds=config.checkpoint_seconds, keep=config.keep)
    guard = None if config.guard_seconds is None else Guard(config.guard_seconds)

    def build_parts(arm: Arm) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        seed_generators(config.seed)  # all arms start from the same weights
        model = build()
        return model, arm.build(model), loss

    arm, *others = config.arms()
    alpha = ALPHA / max(1, len(others))  # Bonferroni's correction for several challengers
    challengers = [Challenger(each, RecordingLearner(*build_parts(each), labels=labels), alpha) for each in others]
    learner = ServiceLearner(
        arm, *build_parts(arm), challengers=challengers, labels=labels, checkpoint=checkpoint, guard=guard
    )
    if config.start_from is not None and not list_checkpoints(config.path):
        _, state = read_newest(Path(config.start_from))
        learner.warm_start({"model": state["model"], "optimizer": state["optimizer"]}, arm.spec.options)
        for challenger in challengers:
            challenger.start_like(learner)
    return learner


def restore(learner: ServiceLearner, config: ServiceConfig, log: EventLog) -> None:
    """Load the newest checkpoint, or the version of a rollback that was requested after it was saved.

    If that version no longer exists, the newest checkpoint is loaded, because a learner that ends would find the same
    when it is started again.
    """
    rollbacks = log.rollbacks()
    assert learner.checkpoints is not None
    newest = learner.checkpoints.load_newest()
    if newest is None:
        return
    path, state = newest
    saves = state["counts"]["saves"]
    is_rollback = bool(rollbacks) and rollbacks[-1].number > state["source"]["rollback"]
    if is_rollback:
        try:
            path = Versions(config.path).find(rollbacks[-1].version)
            state = read_tree(path)
        except (UsageError, DamagedCheckpointError) as error:
            logger.error("the rollback is not possible, and %s stays in use: %s", path.name, error)
            is_rollback = False
    with expect_valid_content(path):
        learner.load_state_dict(state)
    learner.resumed = True
    assert learner.schedule is not None
    learner.schedule.saves = saves
    logger.info("%s %s at %d events", "rolled back to" if is_rollback else "resumed from", path.name, learner.events)
    if is_rollback:
        learner.schedule.make_due()
        learner.promotions = max([0, *(promotion.number for promotion in log.promotions())])
        if learner.guard is not None:
            learner.guard.clear()


def learn(config: ServiceConfig, set_stop: Callable[[Callable[[], None]], None]) -> None:
    """Learn from the log until the learner is stopped or a rollback is requested.

    Args:
        config: the configuration.
        set_stop: is called with the function that stops the learner.
    """
    log = open_log(config.path, is_durable=False)
    learner: ServiceLearner | None = None
    try:
        learner = _wait_for_folder(config)
        set_stop(learner.stop)
        rollbacks = log.rollbacks()
        source = LogSource(
            log,
            config.schema(),
            batch_size=config.batch_size,
            patience=min(0.1, config.refresh_seconds),
            rollbacks=rollbacks,
        )
        restore(learner, config, log)
        publisher = SnapshotPublisher(source, config, Versions(config.path))
        if not learner.resumed and publisher.published is not None:  # left by another service in this folder
            publisher.path.unlink()
            publisher.published = None
        status = StatusFile(config, source, publisher, log)
        learner.reports += [Promoter(log, is_auto=config.promotes_automatically), publisher, status]
        learner.reports += [Housekeeping(config, source, log)]
        try:
            learner.run(source)
        except FloatingPointError as error:
            publisher.is_diverged = True
            _wait_for_rollback(error, learner, status)
    finally:
        if learner is not None:
            learner.close()
        log.close()


def _wait_for_rollback(error: FloatingPointError, learner: ServiceLearner, status: StatusFile) -> None:
    """Report that the model has diverged until a rollback is requested, or until the learner is stopped."""
    logger.error("%s. Learning stops until a rollback; the last good version stays in use", error)
    while not learner.is_stop_requested:
        status.end(learner)
        time.sleep(SECONDS_BETWEEN_REPORTS)


def _wait_for_folder(config: ServiceConfig) -> ServiceLearner:
    """Build the learner, and wait for a while if the learner of an earlier service is still ending."""
    deadline = time.monotonic() + SECONDS_TO_WAIT_FOR_FOLDER
    while True:
        try:
            return build_learner(config)
        except RuntimeError as error:
            if "another process" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    (text,) = sys.argv[1:] if arguments is None else arguments
    config = ServiceConfig.from_json(text)
    prepare_process("learner")
    disable_sparse_checks()
    torch.set_num_threads(config.threads)
    stop: list[Callable[[], None]] = []
    has_ended = False

    def end(*_: Any) -> None:
        nonlocal has_ended
        has_ended = True
        for function in stop:
            function()

    signal.signal(signal.SIGTERM, end)
    watch_parent(end)

    def set_stop(function: Callable[[], None]) -> None:
        stop[:] = [function]
        if has_ended:
            function()

    while not has_ended:
        try:
            learn(config, set_stop)
        except RollbackRequestedError:
            logger.info("a rollback was requested")
        except UsageError as error:
            logger.error("%s", error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
