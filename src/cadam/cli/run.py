"""The command `cadam run`: one learner in production."""

from __future__ import annotations

import argparse
import logging
import math
import os
import pickle
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..online import run_config
from ..online.data.limit import LimitedSource
from ..online.data.schema import Schema
from ..online.data.sources import Source, open_source
from ..online.data.validation import check_columns, check_uri
from ..online.learner import Learner
from ..online.metrics.running import Metric
from ..online.metrics.stream import KINDS, StreamMetrics
from ..online.models.model_file import LOG_LOSS, OptimizerSpec, UsageError
from ..online.monitoring import reject_limit, status_page
from ..online.monitoring.reports import Console, Prometheus, Scalars
from ..online.per_event import CHUNK
from ..online.persistence.checkpoints import DamagedCheckpointError
from ..online.persistence.warm_start import with_options
from ..rules.moment_storage import STORAGE_DEFAULTS
from . import writable_paths
from .exit_codes import DONE, FAILED, INTERRUPTED, NO_PACKAGE, USAGE

logger = logging.getLogger("cadam.online")


def run(options: argparse.Namespace) -> int:
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("cadam.online").setLevel(logging.WARNING if options.quiet else logging.INFO)
    try:
        learner, source, asked = prepare(options)
        watch = reject_limit.Guard(options.max_rejected, options.follow)
        learner.reports.append(watch)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"cadam run: {error}", file=sys.stderr)
        return NO_PACKAGE if isinstance(error, ImportError) else USAGE
    except KeyboardInterrupt:
        print("cadam run: interrupted before anything was done", file=sys.stderr)
        return INTERRUPTED
    try:
        with stopping(learner):
            begin(learner, options, asked)
            left = None if options.events is None else max(0, options.events - learner.events)
            portion = Resumed(source, left, options.checkpoint, asked)
            if not learner.resumed:
                asked.write(options.checkpoint)
            learner.run(portion, events=options.events)
    except UsageError as error:
        print(f"cadam run: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"cadam run: interrupted at {learner.events:,} events; what was saved before stays", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads the console any more
        learner.save()
        raise
    except (FloatingPointError, DamagedCheckpointError, RuntimeError, ValueError, OSError) as error:
        print(f"cadam run: failed at {learner.events:,} events: {error}", file=sys.stderr)
        return FAILED
    finally:
        learner.close()
    hopeless = bool(watch.stopped) and not options.follow
    if hopeless or (not learner.events and not learner.pending.early):
        _forget(learner)
    nothing_new = learner.resumed and not portion.has_produced and left != 0
    if nothing_new and not learner.stopped:
        print(
            f"cadam run: the state in {options.checkpoint} is at the end of the data ({learner.events:,} events); "
            "nothing new was read; give another --checkpoint to start anew",
            file=sys.stderr,
        )
        return DONE if learner.learned else FAILED
    if not learner.saving.saved:
        print(
            f"cadam run: the last checkpoint, at {learner.events:,} events, could not be written; the same command "
            "goes on from the one before it",
            file=sys.stderr,
        )
        return FAILED
    if learner.log is not None and learner.log.unwritten:
        print(
            f"cadam run: {learner.log.unwritten:,} rows of the prediction log could not be written; they are in the "
            "checkpoint, and the same command writes them once there is room",
            file=sys.stderr,
        )
        return FAILED
    useless = _useless(learner)
    if useless and not learner.stopped:
        print(f"cadam run: {useless}", file=sys.stderr)
        return FAILED
    if watch.stopped:
        again = (
            "nothing was kept: once it is mended, the same command reads all anew"
            if hopeless
            else ("the state is saved, and the same command goes on from here")
        )
        _say_rejected(f"stopped: {watch.stopped}; {again}", learner, source)
        return FAILED
    if not options.quiet:
        why = "stopped" if learner.stopped else "the stream has ended" if options.events is None else "done"
        if constant := watch.constant(learner) if learner.training.loss is LOG_LOSS else "":
            print(f"beware: {constant}", file=sys.stderr)
        print(
            f"{why} at {learner.events:,} events{_lost(learner, source.schema)}; the state is in {options.checkpoint}",
            file=sys.stderr,
        )
    most = reject_limit.MAX_REJECTED if options.max_rejected is None else options.max_rejected
    if reject_limit.share(learner.rejected, learner.events) > most:
        if options.follow:
            return DONE
        _say_rejected(f"more than {most:.1%} of the events were rejected", learner, source)
        where = (
            "" if ":" in asked.model else f"the schema is {options.schema or options.checkpoint / run_config.SCHEMA}; "
        )
        print(
            f"{where}once schema or data are mended, remove the state (rm {shlex.quote(str(options.checkpoint))}/"
            "checkpoint-*): the same command then reads everything anew",
            file=sys.stderr,
        )
        return FAILED
    return DONE


def _lost(learner: Learner, schema: Schema) -> str:
    """What became of events that were not learnt from, for the last line."""
    said = ""
    if learner.rejected:
        share = reject_limit.share(learner.rejected, learner.events)
        said = f", and {learner.rejected:,} rejected ({share:.2%}: {reject_limit.reasons(learner.rejections.reasons)})"
    waiting, lost = len(learner.pending), learner.pending.counts
    if schema.id is not None:
        return f"{said}; {waiting:,} wait for a label" if waiting else said
    waiting += lost.crowded_out + (lost.expired if learner.join.unmatched == "drop" else 0)
    if waiting:
        said += f"; {waiting:,} had no label and were never learnt from"
    return said


def _say_rejected(what: str, learner: Learner, source: Any) -> None:
    """That too much was rejected, why, and the cure."""
    counted = learner.rejections.reasons
    cure = reject_limit.cure(counted, source.schema)
    where = "" if learner.reject_file is None else f". All are in {learner.reject_file.path}"
    print(
        f"cadam run: {what}. Reasons: {reject_limit.reasons(counted)}{where}\nwhat to do: {cure}",
        file=sys.stderr,
    )


def _forget(learner: Learner) -> None:
    """Let a run of which no event could be used leave no state: once schema or data are mended, all is read anew."""
    if learner.checkpoints is not None:
        for path in learner.checkpoints.files():
            path.unlink(missing_ok=True)


def _useless(learner: Learner) -> str | None:
    """Why nothing was learnt from a stream that has ended, if nothing was."""
    if learner.learned:
        return None
    if learner.rejected and not learner.events:
        where = "" if learner.reject_file is None else f"; their reasons are in {learner.reject_file.path}"
        return f"nothing was learnt: none of {learner.rejected:,} events could be used{where}"
    if learner.events:
        return f"nothing was learnt: {learner.events:,} events came, and no label that was waited for"
    return "nothing was learnt: there were no events"


def batch_size(own: bool) -> int:
    """How many events `cadam run` takes at one go unless told: of a model of one's own, and of a ready-made one."""
    return 1024 if own else 256


def prepare(options: argparse.Namespace) -> tuple[Learner, Any, run_config.Given]:
    """The learner and the source that the options ask for, and what its folder is to say of them."""
    if math.isnan(options.patience) or options.patience < 0:
        raise UsageError(f"--patience must be seconds or inf, got {options.patience:g}")
    if options.events is not None and options.events < 1:
        raise UsageError(f"--events must be at least 1, got {options.events}")
    if options.unmatched == "negative" and options.horizon == math.inf:
        raise UsageError("--unmatched negative needs --horizon, which says when an event counts as negative")
    uri = run_config.data_of(options)
    check_uri(uri)
    optimizer = OptimizerSpec.of(options.optimizer)
    kinds = _kinds(options)
    if options.checkpoint is None:
        options.checkpoint = Path("runs", run_config.stem(uri))
    asked = run_config.read(options, options.checkpoint, options.quiet)
    schema = asked.schema
    if options.lr is None:
        options.lr = 1e-3 if ":" in asked.model else 3e-3
    if options.batch_size is None:
        options.batch_size = batch_size(own=":" in asked.model)
    if options.metrics is not None:
        schema = replace(schema, binary=True)
    _check_places(options)
    patience = None if math.isinf(options.patience) else options.patience
    one_by_one = options.batch_size == 1
    size = CHUNK if one_by_one and options.horizon == math.inf else options.batch_size
    source = open_source(uri, schema, batch_size=size, follow=options.follow, patience=patience)
    check_columns(source, schema)
    if "gauc" in kinds and schema.user is None:
        raise UsageError("--metrics gauc: the schema names no user")
    metrics: list[Metric] = [StreamMetrics(options.window, kinds=kinds)] if kinds else []
    torch.manual_seed(options.seed)
    model = asked.build()
    learner = Learner(
        model,
        optimizer.build(model, options.lr),
        asked.loss,
        horizon=options.horizon,
        unmatched=options.unmatched,
        one_by_one=one_by_one,
        metrics=metrics,
        checkpoint=options.checkpoint,
        checkpoint_every=options.every,
        keep=options.keep,
        log=options.log,
        rejected=options.rejected,
        reports=_reports(options),
    )
    if one_by_one:
        logger.info("learning: %s", learner.learning)
    return learner, source, asked


@contextmanager
def _fitting(checkpoint: Path, asked: run_config.Given | None = None) -> Iterator[None]:
    """What does not fit the state is invalid usage: said by model and schema where those `asked` for are others."""
    try:
        yield
    except (ValueError, RuntimeError, KeyError, FileNotFoundError) as error:
        other = "" if asked is None else asked.other_than(checkpoint)
        if not other or (asked is not None and ":" in asked.model):  # torch knows more of a model of one's own
            other = f"{other}{': ' if other else ''}{_in_one_line(error)}"
        raise UsageError(
            f"the state in {checkpoint} does not fit this command: {other}; "
            "give the same options as before, or another --checkpoint to start anew"
        ) from error


def _in_one_line(error: Exception) -> str:
    """What torch says in many lines, and not all of it."""
    return textwrap.shorten(str(error), 400, placeholder=" ...")


class Resumed(LimitedSource):
    """A portion of a source that goes on from a state. Once all of the state fits, the folder says what is learnt."""

    def __init__(self, source: Source, events: int | None, checkpoint: Path, asked: run_config.Given) -> None:
        super().__init__(source, events)
        self.checkpoint, self.asked = checkpoint, asked

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with _fitting(self.checkpoint):
            super().load_state_dict(state)
        self.asked.write(self.checkpoint)


def begin(learner: Learner, options: argparse.Namespace, asked: run_config.Given) -> None:
    """Go on from the checkpoint, with the learning rate and options that are asked for; else begin, or take over."""
    found = None if learner.checkpoints is None else learner.checkpoints.newest()
    given_options = OptimizerSpec.of(options.optimizer).options
    if found is not None:
        path, state = found
        _check_metrics(state["metrics"][1:], options)
        now = with_options(state["optimizer"], {"lr": options.lr, **given_options})
        with _fitting(options.checkpoint, asked):
            learner.load_state_dict({**state, "optimizer": now})
        learner.resumed = True
        if options.warm_start:
            logger.warning("--warm-start %s is for a first run and not looked at: there is a state", _files(options))
        logger.info("resumed from %s at %d events", path, learner.events)
        _say_changes(learner, state["optimizer"]["param_groups"])
    elif options.warm_start:
        try:
            learner.warm_start(options.warm_start, given_options)
        except (ValueError, RuntimeError, LookupError, TypeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise UsageError(f"--warm-start {_files(options)} does not fit: {_in_one_line(error)}") from error
    if learner.log is not None:
        try:
            learner.log.check()
        except FileExistsError as error:
            raise UsageError(f"--log: {error}") from error


def _say_changes(learner: Learner, saved: Sequence[Mapping[str, Any]]) -> None:
    """Which of the optimizer's options are others than in the state."""
    for group, before in zip(learner.optimizer.param_groups, saved, strict=True):
        for name, value in group.items():
            was = before.get(name, STORAGE_DEFAULTS.get(name, value))
            if name not in ("params", "param_names") and was != value:
                what = "the learning rate" if name == "lr" else name
                logger.warning("%s was %s until here and is %s from now on", what, _short(was), _short(value))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _files(options: argparse.Namespace) -> str:
    return ", ".join(map(str, options.warm_start))


def _check_metrics(saved: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """That --metrics and --window are those of the state; which metrics are shown may change."""
    where, anew = f"the state in {options.checkpoint}", "or another --checkpoint to start anew"
    if saved and (options.metrics is None or options.window != saved[0]["window"]):
        shown = options.metrics or f"A,B with any of {', '.join(KINDS)}"
        raise UsageError(f"{where} has metrics: give --metrics {shown} and --window {saved[0]['window']}, {anew}")
    if not saved and options.metrics is not None:
        raise UsageError(f"{where} has no metrics: leave out --metrics, {anew.replace('or', 'or give', 1)}")


def _check_places(options: argparse.Namespace) -> None:
    """That all that is to be written can be."""
    for name in ("checkpoint", "log", "tensorboard"):
        if (folder := getattr(options, name)) is not None:
            writable_paths.check_folder(folder, f"--{name}")
    for name in ("rejected", "prometheus"):
        if (file := getattr(options, name)) is not None:
            writable_paths.check_file(file, f"--{name}")


def _kinds(options: argparse.Namespace) -> list[str]:
    """The kinds of --metrics."""
    if options.metrics is None:
        return []
    kinds = [kind.strip().replace("-", "_").replace(" ", "_") for kind in options.metrics.split(",")]
    StreamMetrics(options.window, kinds=kinds)  # says what is wrong with them
    return kinds


def _reports(options: argparse.Namespace) -> list[Callable[[Learner], None]]:
    reports: list[Callable[[Learner], None]] = [] if options.quiet else [Console(seconds=options.seconds, legend=True)]
    if options.tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("--tensorboard needs TensorBoard: pip install tensorboard") from error
        reports.append(Scalars(SummaryWriter(str(options.tensorboard))))
    if options.prometheus:
        reports.append(Prometheus(options.prometheus))
    if options.status:
        reports.append(status_page.StatusPage(options.status, f"cadam run: {options.data or options.place}"))
    return reports


@contextmanager
def stopping(learner: Learner) -> Iterator[None]:
    """SIGTERM and SIGINT let the learner finish its batch; a second one does what it usually does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, frame: FrameType | None) -> None:
        for signalled, handler in before.items():
            signal.signal(signalled, handler)
        learner.stop()
        # Not by print: the signal may have come in the middle of one.
        os.write(2, f"\n{signal.Signals(number).name}: finishing the batch\n".encode())

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
