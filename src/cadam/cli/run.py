"""The command `cadam run`: learns from a stream, saves checkpoints and resumes from them.

`run` has four steps: `prepare` opens the source and builds the learner, `restore` loads the newest checkpoint or a warm
start, `Learner.run` is the loop, and `finish` reports the result and chooses the exit code.
"""

from __future__ import annotations

import argparse
import logging
import math
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..checkpoint_files import DamagedCheckpointError, check_like, expect_valid_content
from ..online import run_config
from ..online.data.label_source import open_with_labels
from ..online.data.limit import LimitedSource
from ..online.data.schema import Schema
from ..online.data.sources import Source, open_source, resolve_uri
from ..online.data.validation import check_columns
from ..online.labels.batch_growth import BatchGrowth
from ..online.labels.join import LabelOptions
from ..online.learner import Learner
from ..online.metrics.metric import Metric
from ..online.metrics.stream import METRICS, StreamMetrics
from ..online.models.model_file import LOG_LOSS, OptimizerSpec, UsageError, accepts_weight
from ..online.monitoring.baseline_check import BaselineCheck
from ..online.monitoring.console import Console
from ..online.monitoring.drift import DriftMonitor
from ..online.monitoring.prometheus_file import PrometheusFile
from ..online.monitoring.reject_limit import DEFAULT_MAX_REJECTED, RejectLimit, rejected_share
from ..online.monitoring.rejection_reasons import format_reasons, suggest_fix
from ..online.monitoring.status_page import StatusPage
from ..online.monitoring.tensorboard import TensorBoard
from ..online.per_event import CHUNK_SIZE, WEIGHTED, PerEventTraining
from ..online.persistence.checkpoint_schedule import CheckpointOptions
from ..online.persistence.checkpoints import list_checkpoints, read_newest_header
from ..online.persistence.prediction_log import LogOptions
from ..online.persistence.random_state import seed_generators
from ..online.sparse_checks import disable_sparse_checks
from ..online.stop_signals import stop_on_signals
from ..online.training_step import ModelOutputError, default_threads
from ..printable import printable, shell_word
from ..rules.moment_storage import STORAGE_DEFAULTS
from . import writable_paths
from .arguments import OWN_MODEL_BATCH_SIZE, check_label_arguments
from .exit_codes import DONE, FAILED, NO_PACKAGE, USAGE, fail, interrupt_code

logger = logging.getLogger("cadam.online")

MAX_THREADS = 1024
"""The largest number of threads. OpenMP ends the process if it cannot create as many as it was asked for."""


MAX_TUNED_PARAMETERS = 10_000_000
"""The learning rate of larger models is not tuned unless `--lr auto` is given.

Ten copies of a model of this size, with two moments per parameter, take 1.2 GB.
"""


@dataclass(frozen=True)
class Job:
    """A run that is ready to start: the options of the command and the objects built from them."""

    options: argparse.Namespace
    """The options as they were parsed. They are not changed."""
    config: run_config.RunConfig
    """The data, the schema and the model."""
    checkpoint: Path
    """The folder of the checkpoints."""
    lr: float
    """The learning rate; if it is tuned, the first one."""
    optimizer: OptimizerSpec
    learner: Learner
    source: Source
    read_size: int
    """The largest number of events that are read at once."""
    schema: Schema
    """The schema of the events. With `--metrics`, labels must be 0 or 1."""
    reject_limit: RejectLimit
    """Stops the learner when too many events are rejected."""
    baseline_check: BaselineCheck
    """Warns if the model is not better than a constant."""

    @property
    def is_hopeless(self) -> bool:
        """Whether the run was stopped because too many events of a finite stream were rejected."""
        return bool(self.reject_limit.stop_reason) and not self.options.follow


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logger.setLevel(logging.WARNING if options.quiet else logging.INFO)
    disable_sparse_checks()
    try:
        job = prepare(options)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        return fail("run", error, NO_PACKAGE if isinstance(error, ImportError) else USAGE)
    except KeyboardInterrupt as error:
        return fail("run", "interrupted before anything was done", interrupt_code(error))
    learner = job.learner
    try:
        with stop_on_signals(learner):
            restore(job)
            limit = None if options.events is None else max(0, options.events - learner.events)
            source = _RestoredSource(job, limit)
            if not learner.resumed:
                job.config.write(job.checkpoint)
            logger.info("%s", _describe_optimizer(job))
            learner.run(source, events=options.events)
    except UsageError as error:
        return fail("run", error, USAGE)
    except KeyboardInterrupt as error:
        message = f"interrupted at {learner.events:,} events; earlier checkpoints are kept"
        return fail("run", message, interrupt_code(error))
    except BrokenPipeError:  # the reader of the console has closed it
        learner.save()
        raise
    except (FloatingPointError, DamagedCheckpointError, ModelOutputError, RuntimeError, ValueError, OSError) as error:
        return fail("run", f"failed at {learner.events:,} events: {error}", FAILED)
    finally:
        learner.close()
    return finish(job, has_new_events=source.has_produced or limit == 0)


# Preparation ---------------------------------------------------------------------------------------------------


def prepare(options: argparse.Namespace) -> Job:
    """Check the options, open the source and build the learner.

    Args:
        options: the options of the command.

    Returns:
        The job. Nothing has been written yet.

    Raises:
        ValueError: the options are invalid or do not fit the data; also RuntimeError and OSError.
        ImportError: a package that an option needs is missing.
    """
    _check_numbers(options)
    label_options = LabelOptions(
        options.horizon, options.unmatched, early_positives=options.early_positives, capacity=options.capacity
    )
    uri = run_config.data_uri(options)
    checkpoint = options.checkpoint or Path("runs", run_config.short_name(uri))
    saved_optimizer = str(read_newest_header(checkpoint).get("optimizer_name", "CAdam"))
    optimizer = OptimizerSpec.parse(options.optimizer or saved_optimizer)
    metrics = _metrics(options)
    config = run_config.read_config(options, checkpoint, options.quiet)
    is_growing = options.batch_size is None and not config.has_own_model
    growth = BatchGrowth() if is_growing else None
    batch_size = options.batch_size or (growth.last if growth is not None else OWN_MODEL_BATCH_SIZE)
    _check_paths(options, checkpoint)

    schema = replace(config.schema, binary=True) if metrics or options.early_positives else config.schema
    needs_users = [kind for metric in metrics for kind in metric.kinds if METRICS[kind].needs_users]
    if needs_users and schema.user is None:
        raise UsageError(f"--metrics {needs_users[0]}: the schema names no user")
    # Per-event training reads many events at once: the compiled loop then learns from them one by one.
    read_size = CHUNK_SIZE if batch_size == 1 and options.horizon == math.inf else batch_size
    patience = None if math.isinf(options.patience) else options.patience
    source = open_source(uri, schema, batch_size=read_size, follow=options.follow, patience=patience)
    check_columns(source, schema, bool(list_checkpoints(checkpoint)), has_label_source=options.labels is not None)
    if options.labels is not None:
        labels_uri = resolve_uri(options.labels)
        source = open_with_labels(
            source, labels_uri, schema, batch_size=read_size, follow=options.follow, patience=patience
        )

    if schema.weight is not None and not accepts_weight(config.loss):
        raise UsageError("the schema names a weight, so the loss must take it: def loss(scores, labels, weight)")
    probabilities = schema.probabilities if schema.negative_rate != 1 else None
    log = None if options.log is None else LogOptions(options.log, probabilities=probabilities)
    seed_generators(options.seed)
    model = config.build_model()
    lr, is_tuned = _learning_rate(options.lr, batch_size, config.has_own_model, model)
    if options.compile and (is_tuned or not config.has_own_model):
        raise UsageError("--compile is for your own model with a fixed learning rate, as in --lr 0.001")
    torch.set_num_threads(options.threads or default_threads(model, batch_size))
    left_out = [name for name, reason in config.left_out(checkpoint).items() if reason != "--ignore"]
    reject_limit, baseline_check = RejectLimit(options.max_rejected, options.follow), BaselineCheck(left_out)
    learner = Learner(
        model,
        optimizer.build(model, lr),
        config.loss,
        labels=label_options,
        batch_growth=growth,
        per_event=batch_size == 1,
        tune_rate=is_tuned,
        initialize_bias=not (config.has_own_model or batch_size == 1 or options.early_positives),
        compile=options.compile,
        metrics=list[Metric](metrics),
        checkpoint=CheckpointOptions(checkpoint, options.every, keep=options.keep),
        log=log,
        rejected=options.rejected,
        drift=DriftMonitor(),
        reports=[*_reports(options), reject_limit, baseline_check],
    )
    if schema.weight is not None and isinstance(learner.per_event, PerEventTraining):
        learner.per_event = WEIGHTED
    if config.device is not None:
        logger.info("the model is on %s", config.device)
    if batch_size == 1 or ": " in learner.training_mode:  # a colon precedes the reason why compiled code is not used
        logger.info("learning: %s", learner.training_mode)
    return Job(
        options, config, checkpoint, lr, optimizer, learner, source, read_size, schema, reject_limit, baseline_check
    )


def _learning_rate(
    option: float | str | None, batch_size: int, has_own_model: bool, model: nn.Module
) -> tuple[float, bool]:
    """Return the first learning rate, and whether it is tuned.

    By default it is tuned for ready-made models that learn in batches and are not large.

    Raises:
        UsageError: if tuning is asked for and not possible.
    """
    default = 1e-3 if has_own_model else 3e-3
    if isinstance(option, float):
        return option, False
    if option is None:
        parameters = sum(param.numel() for param in model.parameters())
        is_large = parameters > MAX_TUNED_PARAMETERS
        if is_large and not has_own_model and batch_size > 1:
            logger.info(
                "the learning rate is fixed, because the model has %s parameters, and tuning needs up to ten copies of "
                "it; --lr auto tunes it nevertheless",
                f"{parameters:,}",
            )
        return default, not has_own_model and batch_size > 1 and not is_large
    if batch_size == 1:
        raise UsageError("--lr auto needs --batch-size 2 or more; give a fixed learning rate, as in --lr 0.003")
    first = option.removeprefix("auto").removeprefix(":")
    return float(first) if first else default, True


def _check_numbers(options: argparse.Namespace) -> None:
    """Raise UsageError for values that argparse accepts but the run cannot use."""
    if math.isnan(options.patience) or options.patience < 0:
        raise UsageError(f"--patience must be a number of seconds or inf, got {options.patience:g}")
    for option, number in {"--events": options.events, "--batch-size": options.batch_size}.items():
        if number is not None and number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}")
    if options.threads is not None and options.threads > MAX_THREADS:
        raise UsageError(f"--threads must be at most {MAX_THREADS}, got {options.threads}")
    if not -(2**63) <= options.seed < 2**64:
        raise UsageError(f"--seed must have at most 64 bits, got {options.seed}")
    check_label_arguments(options)


def _check_paths(options: argparse.Namespace, checkpoint: Path) -> None:
    """Check that every folder and file that the run will write can be written."""
    folders = {"--checkpoint": checkpoint, "--log": options.log, "--tensorboard": options.tensorboard}
    for option, folder in folders.items():
        if folder is not None:
            writable_paths.check_folder(folder, option)
    for option, file in {"--rejected": options.rejected, "--prometheus": options.prometheus}.items():
        if file is not None:
            writable_paths.check_file(file, option)


def _metrics(options: argparse.Namespace) -> list[StreamMetrics]:
    if options.metrics is None:
        return []
    kinds = [kind.strip().replace("-", "_").replace(" ", "_") for kind in options.metrics.split(",")]
    return [StreamMetrics(options.window, kinds=kinds)]


def _reports(options: argparse.Namespace) -> list[Callable[[Learner], None]]:
    """Build what reports progress: the console, TensorBoard, a Prometheus file and the status page."""
    reports: list[Callable[[Learner], None]] = [] if options.quiet else [Console(seconds=options.seconds, legend=True)]
    if options.tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("--tensorboard needs TensorBoard: pip install tensorboard") from error
        reports.append(TensorBoard(SummaryWriter(str(options.tensorboard))))
    if options.prometheus:
        reports.append(PrometheusFile(options.prometheus))
    if options.status:
        reports.append(StatusPage(options.status, printable(f"cadam run: {options.data or options.place}")))
    return reports


# Checkpoints and warm starts -----------------------------------------------------------------------------------


def restore(job: Job) -> None:
    """Load the newest checkpoint if there is one, else the files of `--warm-start`.

    The learning rate, if it was given, and the optimizer options of the command replace those of the checkpoint. If it
    was not given, a rate that was fixed remains so.

    Args:
        job: the job, whose learner is changed.

    Raises:
        UsageError: the checkpoint, the warm start or an existing log does not fit the command.
    """
    learner, options = job.learner, job.options
    newest = None if learner.checkpoints is None else learner.checkpoints.load_newest()
    warm_start_files = ", ".join(map(str, options.warm_start or ()))
    if newest is not None:
        path, state = newest
        if options.lr is None and state.get("rate_tuning") is None:
            learner.fix_rate()
        with _checkpoint_errors(job, compare_config=True), expect_valid_content(path):
            _check_metrics(state["metrics"][1:], job)
            is_rate_kept = options.lr is None or learner.rate_tuning is not None
            new_rate = {} if is_rate_kept else {"lr": job.lr}
            optimizer_state = job.optimizer.update_options(state["optimizer"], **new_rate)
            for candidate in ((state.get("rate_tuning") or {}).get("candidates") or {}).values():
                candidate["optimizer"] = job.optimizer.update_options(candidate["optimizer"])
            learner.load_state_dict({**state, "optimizer": optimizer_state})
        learner.resumed = True
        if warm_start_files:
            logger.warning("--warm-start %s is ignored: the run resumes from a checkpoint", warm_start_files)
        logger.info("resumed from %s at %d events", path, learner.events)
        if str(options.lr).startswith("auto:"):
            logger.warning("--lr %s: the search continues at the rate of the checkpoint", options.lr)
        if state.get("rate_tuning") is not None and learner.rate_tuning is None:
            logger.warning(
                "the learning rate is no longer tuned; it stays %.2g", learner.optimizer.param_groups[0]["lr"]
            )
        _log_changed_options(learner, state["optimizer"]["param_groups"])
    elif warm_start_files:
        if job.optimizer.group_options:
            raise UsageError("--warm-start takes an --optimizer with options of all parameters only, without @")
        try:
            learner.warm_start(options.warm_start, job.optimizer.options)
        except (ValueError, RuntimeError, LookupError, TypeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise UsageError(f"--warm-start {warm_start_files} does not fit: {_shorten(error)}") from error
    if learner.log is not None:
        try:
            learner.log.check_folder()
        except FileExistsError as error:
            raise UsageError(f"--log: {error}") from error


class _RestoredSource(LimitedSource):
    """The source of a run, which resumes at the position of the checkpoint.

    The position is the last part of a checkpoint to be restored. Once it fits, the folder's description of the run is
    updated to this command.
    """

    def __init__(self, job: Job, limit: int | None) -> None:
        super().__init__(job.source, limit, job.read_size)
        self.job = job

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), run_config.SCHEMA_KEY: self.job.config.schema.settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with _checkpoint_errors(self.job):
            super().load_state_dict({name: value for name, value in state.items() if name != run_config.SCHEMA_KEY})
            if self.rest is not None and self.rest.events is not None:
                check_like(self.rest.events.features, dict.fromkeys(self.job.schema.features, np.empty(0)), "rest")
        self.job.config.write(self.job.checkpoint)


@contextmanager
def _checkpoint_errors(job: Job, compare_config: bool = False) -> Iterator[None]:
    """Turn errors of loading a checkpoint into a UsageError.

    With `compare_config`, the message says how the model of the command differs from that of the checkpoint. For a
    custom model the message of torch is added, because it names the parameters.
    """
    try:
        yield
    except (UsageError, DamagedCheckpointError):
        raise
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        difference = job.config.describe_difference(job.checkpoint) if compare_config else ""
        reasons = [difference] if difference else []
        if not difference or job.config.has_own_model:
            reasons.append(_shorten(error))
        raise UsageError(
            f"the checkpoint in {job.checkpoint} does not fit this command: {': '.join(reasons)}; "
            "use the options of the first run, or start again with another --checkpoint"
        ) from error


def _shorten(error: Exception) -> str:
    """Put the message of an error on one line of limited length. Messages of torch can have many lines."""
    return textwrap.shorten(str(error), 400, placeholder=" ...")


def _log_changed_options(learner: Learner, saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Log a warning for each optimizer option that differs from the checkpoint."""
    for group, saved in zip(learner.optimizer.param_groups, saved_groups, strict=True):
        for name, value in group.items():
            old = saved.get(name, STORAGE_DEFAULTS.get(name, value))
            if name not in ("params", "param_names") and old != value:
                label = "the learning rate" if name == "lr" else name
                logger.warning("%s was %s until now and changes to %s", label, _format(old), _format(value))


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_metrics(saved: Sequence[Mapping[str, Any]], job: Job) -> None:
    """Check that `--metrics` and `--window` fit the checkpoint. Which metrics are shown may change."""
    options, checkpoint = job.options, f"the checkpoint in {job.checkpoint}"
    if saved and (options.metrics is None or options.window != saved[0]["window"]):
        names = options.metrics or f"A,B with any of {', '.join(METRICS)}"
        raise UsageError(
            f"{checkpoint} has metrics: give --metrics {names} and --window {saved[0]['window']}, or another "
            "--checkpoint to start again"
        )
    if not saved and options.metrics is not None:
        raise UsageError(
            f"{checkpoint} has no metrics: leave out --metrics, or give another --checkpoint to start again"
        )


# The result ----------------------------------------------------------------------------------------------------


def finish(job: Job, has_new_events: bool) -> int:
    """Report how the run ended.

    Args:
        job: the job, whose learner has run.
        has_new_events: whether the source produced any event, or none was asked for.

    Returns:
        The exit code.
    """
    learner, options = job.learner, job.options
    if job.is_hopeless or (not learner.events and not learner.pending.early):
        _delete_checkpoints(learner)
    if learner.resumed and not has_new_events and not learner.stopped:
        message = (
            f"the checkpoint in {job.checkpoint} is at the end of the data ({learner.events:,} events), so nothing "
            "new was read; give another --checkpoint to start again"
        )
        return fail("run", message, DONE if learner.learned else FAILED)
    if failure := _find_failure(learner):
        return fail("run", failure, FAILED)
    if job.reject_limit.stop_reason:
        advice = "the checkpoint is saved, and the same command resumes from there"
        if job.is_hopeless:
            advice = "no checkpoint was kept: once the cause is fixed, the same command reads everything again"
        return _fail_by_rejections(job, f"stopped: {job.reject_limit.stop_reason}; {advice}")
    if not options.quiet:
        _print_summary(job)
    return _check_reject_file(learner, _check_rejected_share(job))


def _delete_checkpoints(learner: Learner) -> None:
    """Delete the checkpoints of a run that could use no event, so that the next run reads everything again."""
    if learner.checkpoints is not None:
        for path in learner.checkpoints.files():
            path.unlink(missing_ok=True)


def _find_failure(learner: Learner) -> str:
    """Describe what failed during the run; empty if nothing did."""
    if learner.schedule is not None and not learner.schedule.last_save_succeeded:
        has_older = learner.checkpoints is not None and learner.checkpoints.files()
        advice = (
            "resumes from the one before it" if has_older else "starts from the beginning, because there is no other"
        )
        return f"the last checkpoint, at {learner.events:,} events, could not be written; the same command {advice}"
    if learner.log is not None and learner.log.unwritten_rows:
        return (
            f"{learner.log.unwritten_rows:,} rows of the prediction log could not be written; they are in the "
            "checkpoint, and the same command writes them once there is space"
        )
    if learner.learned or learner.stopped:
        return ""
    if learner.rejected and not learner.events:
        reasons = "" if learner.reject_file is None else f"; the reasons are in {learner.reject_file.path}"
        return f"nothing was learned: none of {learner.rejected:,} events could be used{reasons}"
    if learner.join.waits_for_horizon and learner.events == len(learner.pending) > 0:
        return (
            f"nothing was learned: all {learner.events:,} events wait for their horizon, because the time from the "
            "first to the last of them is shorter than --horizon"
        )
    if learner.events:
        return f"nothing was learned: there were {learner.events:,} events, and none of them got a label"
    return "nothing was learned: there were no events"


def _fail_by_rejections(job: Job, message: str) -> int:
    """Print a message about rejected events, their reasons and what to do about them; return the exit code."""
    learner = job.learner
    reasons = format_reasons(learner.rejections.reasons)
    file = "" if learner.reject_file is None else f". {_written_rejects(learner)} are in {learner.reject_file.path}"
    code = fail("run", f"{message}. Reasons: {reasons}{file}", FAILED)
    print(printable(f"what to do: {suggest_fix(learner.rejections.reasons, job.schema)}"), file=sys.stderr)
    return code


def _written_rejects(learner: Learner) -> str:
    """Describe how many of the rejected events are in the reject file: all, unless the disk was full."""
    lost = 0 if learner.reject_file is None else learner.reject_file.lost
    return f"All but {lost:,}" if lost else "All"


def _check_reject_file(learner: Learner, code: int) -> int:
    """Return FAILED, with a message, if this run could not write rejected events to their file; else `code`."""
    file = learner.reject_file
    if file is None or not (lost := file.lost - file.lost_at_start):
        return code
    return fail("run", f"{lost:,} of {learner.rejected:,} rejected events could not be written to {file.path}", FAILED)


def _print_summary(job: Job) -> None:
    """Print the last line of a successful run, and a warning if the model predicts no better than a constant."""
    learner = job.learner
    if job.config.loss is LOG_LOSS and (warning := job.baseline_check.warning(learner)):
        print(f"warning: {warning}", file=sys.stderr)
    if learner.rate_tuning is not None and learner.rate_tuning.is_new:
        print(
            f"warning: {learner.rate_tuning.labeled:,} labeled events are too few to tune the learning rate, and the "
            "saved model may have learned hardly anything. Give a fixed rate, as in --lr 0.003",
            file=sys.stderr,
        )
    print(_describe_optimizer(job), file=sys.stderr)
    end = "the stream has ended" if job.options.events is None else "done"
    is_saved = learner.checkpoints is not None and learner.checkpoints.files()
    print(
        f"{'stopped' if learner.stopped else end} at {learner.events:,} events{_unlearned_events(job)}; "
        + (f"the checkpoint is in {printable(job.checkpoint)}" if is_saved else "there is nothing to save yet"),
        file=sys.stderr,
    )


def _describe_optimizer(job: Job) -> str:
    """Describe the optimizer and its present learning rate."""
    tuning = job.learner.rate_tuning
    rate = f"{job.learner.optimizer.param_groups[0]['lr']:.2g}"
    if tuning is not None:
        changes = f"{tuning.switches} change{'' if tuning.switches == 1 else 's'}"
        rate += f" (tuned, {changes})" if tuning.labeled else " at first (tuned while the run learns)"
    return f"optimizer {job.optimizer}, learning rate {rate}"


def _unlearned_events(job: Job) -> str:
    """Describe the events that were not learned from: rejected, waiting for a label, or without one."""
    learner = job.learner
    text = ""
    if learner.rejected:
        share = rejected_share(learner.rejected, learner.events)
        text = f", and {learner.rejected:,} rejected ({share:.2%}: {format_reasons(learner.rejections.reasons)})"
    waiting, counts = len(learner.pending), learner.pending.counts
    if counts.repeated_events:
        text += f"; {counts.repeated_events:,} had the id of an earlier event and were not learned from again"
    if job.schema.id is not None:
        reason = "their horizon" if learner.join.waits_for_horizon else "a label"
        return f"{text}; {waiting:,} wait for {reason}" if waiting else text
    unlabeled = waiting + counts.crowded_out + (0 if learner.join.waits_for_horizon else counts.expired)
    return f"{text}; {unlabeled:,} had no label and were not learned from" if unlabeled else text


def _check_rejected_share(job: Job) -> int:
    """Return FAILED, with advice, if a finite stream had more rejected events than `--max-rejected`."""
    learner, options = job.learner, job.options
    limit = DEFAULT_MAX_REJECTED if options.max_rejected is None else options.max_rejected
    if options.follow or rejected_share(learner.rejected, learner.events) <= limit:
        return DONE
    code = _fail_by_rejections(job, f"more than {limit:.1%} of the events were rejected")
    schema = f"the schema is {options.schema or job.checkpoint / run_config.SCHEMA_FILE}; "
    print(
        f"{'' if job.config.has_own_model else schema}once schema or data are fixed, remove the checkpoints "
        f"(rm {shell_word(job.checkpoint)}/checkpoint-*): the same command then reads everything again",
        file=sys.stderr,
    )
    return code
