"""Advances the runs of a comparison along the encoded stream, in this process or in several.

Each run has a folder in the cache with the score of every judged event so far. Runs stay in the memory of the process
that they belong to, from segment to segment. An interrupted comparison continues from the recorded scores: a run that
has to go further is repeated from its last checkpoint, or from the beginning, and gives the same scores to the bit.
Comparisons that run at the same time may share runs: each run has a lock, and the second comparison reads the scores of
the first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import active_children, connection, get_context, parent_process, resource_tracker
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from ..atomic_write import replace_file
from ..online.data.events import Array
from ..online.data.schema import Schema
from ..online.device import select_device
from ..online.labels.join import LabelOptions
from ..online.learner import Learner
from ..online.models.model_file import OptimizerSpec
from ..online.persistence.random_state import get_random_state, seed_generators, set_random_state
from ..online.run_config import model_builder
from ..online.sparse_checks import disable_sparse_checks
from .stream import JUDGED, EncodedStream, Recorder
from .study import Run, Study

learner_logger = logging.getLogger("cadam.online")

VERSION = 3
"""Increase this number when runs compute something else: scores of other versions are not used."""
SECONDS_PER_EVENT = 2e-5
"""A rough estimate of the time that a run takes per event, to decide whether worker processes are worth starting."""
MIN_SECONDS_FOR_WORKERS = 8.0
CHECKPOINT_SHARE = 0.05
"""Checkpoints may take this share of the time of a run. A run that is repeated loses little if saving is expensive."""
MEMORY_SHARE = 0.5
"""The share of the available memory that the models of all runs may take. Beyond it they are kept in files."""


class CacheError(OSError):
    """A file of the cache cannot be written."""


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn errors of writing into a folder into a `CacheError`. On a full disk, `torch.save` raises a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise CacheError(f"{folder} cannot be written: {str(error).partition(chr(10))[0]}") from error


class RunFiles:
    """The files of one run: its scores, its progress and its last checkpoint.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scores_path, self.progress_path = folder / "scores.f32", folder / "progress.json"
        self.checkpoint_path = folder / "checkpoint.pt"

    def progress(self) -> tuple[int, int]:
        """Return the number of batches that the run has processed, and of scores that it has recorded."""
        try:
            saved = json.loads(self.progress_path.read_text(encoding="utf-8"))
            batches, scores = int(saved["batches"]), int(saved["scores"])
            is_complete = self.scores_path.stat().st_size >= 4 * scores
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0
        return (batches, scores) if is_complete else (0, 0)

    def lock(self) -> FileLock:
        """Return the lock of the run, which is beside its folder, so that it outlives the folder."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder.with_name(f"{self.folder.name}.lock"))

    def append(self, scores: Array, batches: int) -> None:
        """Record further scores, and the number of batches after them."""
        _, count = self.progress()
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.scores_path.open("r+b" if self.scores_path.exists() else "wb") as file:
            file.truncate(4 * count)  # scores beyond the recorded progress are those of an interrupted write
            file.seek(0, os.SEEK_END)
            file.write(np.asarray(scores, dtype=np.float32).tobytes())
        text = json.dumps({"batches": batches, "scores": count + len(scores)})
        replace_file(self.progress_path, text.encode())

    def read(self, start: int, end: int) -> Array:
        """Return recorded scores."""
        return np.fromfile(self.scores_path, np.float32, end - start, offset=4 * start)


class RunCache:
    """The folders of runs in the cache.

    The name of a folder is a hash of everything that the run depends on, and of the versions of cadam and torch.

    Args:
        folder: The cache folder.
        study: The comparison.
    """

    def __init__(self, folder: Path | str, study: Study) -> None:
        import cadam

        self.folder = Path(folder).absolute() / "ab"
        versions = f"version {VERSION}, cadam {cadam.__version__}, torch {torch.__version__}"
        self._key = f"{versions}\n{json.dumps(study.run_settings, sort_keys=True)}"
        self.content = ""
        """A hash of the encoded stream, if the settings of the study do not have one of the data."""

    @property
    def stream_folder(self) -> Path:
        """The folder of the encoded stream."""
        return self.folder / f"stream-{_digest(self._key)}"

    def files(self, run: Run) -> RunFiles:
        """Return the files of a run."""
        return RunFiles(self.folder / f"run-{_digest(f'{self._key}{self.content}, {run!r}')}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Advance:
    """The task of advancing one run to a batch."""

    run: Run
    folder: Path
    stream_folder: Path
    study_settings: str
    """`Study.run_settings` as JSON, by which equal settings are recognized."""
    batch: int
    keeps_in_memory: bool


@dataclass(frozen=True)
class Advanced:
    """The result of a task."""

    run: Run
    batch: int
    seconds: float = 0.0
    failure: str = ""
    """The traceback of an error; empty if there was none."""


class _ActiveRun:
    """A run in memory."""

    def __init__(self, task: Advance) -> None:
        settings = json.loads(task.study_settings)
        more = settings["settings"]
        build, loss = model_builder(
            settings["model"], Schema(**more["schema"]), more, select_device(more.get("device"))
        )
        run, self.recorder, self.batch = task.run, Recorder(), 0
        self.stream = _open_stream(task.stream_folder)
        self.has_diverged = False
        self.seconds = self.seconds_at_save = 0.0
        seed_generators(run.seed)
        model = build()
        optimizer = OptimizerSpec.parse(run.arm).build(model, run.lr)
        is_per_event = settings["batch_size"] == 1
        labels = LabelOptions(**more.get("late labels", {}))
        self.learner = Learner(model, optimizer, loss, labels=labels, per_event=is_per_event, metrics=[self.recorder])
        self.random_state = get_random_state()

    def load(self, path: Path, recorded: int) -> None:
        """Continue from a checkpoint, if there is one, and if scores are recorded up to its batch."""
        try:
            saved = torch.load(path, weights_only=False)
        except FileNotFoundError:
            return
        if saved["batch"] <= recorded:
            self.learner.load_state_dict(saved["learner"])
            self.batch, self.random_state = saved["batch"], saved["learner"]["random"]

    def save(self, path: Path) -> None:
        """Save a checkpoint."""
        part = path.with_suffix(".part")
        torch.save({"batch": self.batch, "learner": self.learner.state_dict()}, part)
        part.replace(path)
        self.seconds_at_save = self.seconds

    def advance(self, batch: int) -> Array:
        """Process batches up to a number of batches, and return the scores of the judged events among them."""
        if batch <= self.batch:
            return np.empty(0, np.float32)
        start, judged = time.perf_counter(), self.stream.judged
        first = 0 if self.batch == 0 else int(judged.ends[self.batch - 1])
        parts: list[Array] = []
        set_random_state(self.random_state)
        while self.batch < batch and not self.has_diverged:
            try:
                if self.batch < self.stream.batches:
                    self.learner.process(self.stream.batch(self.batch))
                else:
                    self.learner.finish()
            except FloatingPointError:
                self.has_diverged = True
            scores = self.recorder.take()[0]
            if self._has_rejected_scores(len(scores)):
                self.has_diverged = True
            if not self.has_diverged:
                parts.append(scores)
            self.batch += 1
        self.batch = batch
        self.random_state = get_random_state()
        scores = np.concatenate(parts) if parts else np.empty(0, np.float32)
        # A run that has diverged predicts nothing from then on.
        missing = int(judged.ends[batch - 1]) - first - len(scores)
        scores = np.concatenate([scores, np.full(missing, np.nan, np.float32)])
        self.seconds += time.perf_counter() - start
        return scores

    def _has_rejected_scores(self, count: int) -> bool:
        """Whether scores that are not finite were rejected in this batch.

        Args:
            count: The number of judged events of this batch that have a score.

        Raises:
            RuntimeError: If the model has not scored some events for another reason.
        """
        ends = self.stream.judged.ends
        expected = int(ends[self.batch]) - (int(ends[self.batch - 1]) if self.batch else 0)
        if count == expected or self.has_diverged:
            return False
        if any(reason.startswith("its score is") for reason in self.learner.rejections.reasons):
            return True
        reasons = ", ".join(self.learner.rejections.reasons)
        raise RuntimeError(f"arms can be compared only on events that the model accepts; it rejects some: {reasons}")


def _open_stream(folder: Path) -> EncodedStream:
    return _open_version(folder, (folder / JUDGED).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _open_version(folder: Path, written: int) -> EncodedStream:
    """Return the stream that was written at a time, in nanoseconds."""
    return EncodedStream(folder)


_active: dict[Path, _ActiveRun] = {}
"""The runs in the memory of this process, by folder."""


def advance_run(task: Advance) -> Advanced:
    """Advance one run in this process, and record its scores, unless another process has recorded them.

    Raises:
        CacheError: If the scores or a checkpoint cannot be written. Other errors are part of the result.
    """
    files = RunFiles(task.folder)
    with _writing(task.folder):
        lock = files.lock()
        lock.acquire()
    try:
        return _advance_locked(task, files)
    finally:
        lock.release()


def _advance_locked(task: Advance, files: RunFiles) -> Advanced:
    recorded, count = files.progress()
    if recorded and count != _open_stream(task.stream_folder).judged.ends[recorded - 1]:
        files.progress_path.unlink()  # not the scores of this stream
        recorded = 0
    if recorded >= task.batch:
        return Advanced(task.run, task.batch)
    start = time.process_time()
    outer_state, threads, level = get_random_state(), torch.get_num_threads(), learner_logger.level
    # A learner's warnings are about one run of many. What matters, such as a run that has diverged, is in the result.
    learner_logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        run = _active.get(task.folder)
        if run is None or run.batch > recorded:
            run = _ActiveRun(task)
            run.load(files.checkpoint_path, recorded)
        run.advance(recorded)  # another process may have recorded these scores
        scores = run.advance(task.batch)
        with _writing(task.folder):
            files.append(scores, task.batch)
            if task.keeps_in_memory:
                _active[task.folder] = run
                _save_if_due(run, files)
            else:
                run.save(files.checkpoint_path)
    except CacheError:
        raise
    except Exception:
        return Advanced(task.run, task.batch, failure=traceback.format_exc())
    finally:
        set_random_state(outer_state)
        torch.set_num_threads(threads)
        learner_logger.setLevel(level)
    return Advanced(task.run, task.batch, time.process_time() - start)


def _save_if_due(run: _ActiveRun, files: RunFiles) -> None:
    """Save a checkpoint if the run since the last one took long enough for its cost."""
    numbers = sum(parameter.numel() for parameter in run.learner.model.parameters())
    cost = 1e-7 * 3 * numbers  # seconds to write weights and moments
    if not run.has_diverged and run.seconds - run.seconds_at_save > max(cost / CHECKPOINT_SHARE, 10.0):
        run.save(files.checkpoint_path)


def forget_runs() -> None:
    """Remove all runs from the memory of this process."""
    _active.clear()


class StudyRunner:
    """Advances the runs of a comparison.

    Each run belongs to one worker process, where its model stays in memory if all models fit.

    Args:
        study: The comparison.
        cache: The folders of the runs.
        workers: The largest number of processes; by default, one per processor, and one on CUDA.
        model_bytes: The size of the parameters of one model.
    """

    def __init__(self, study: Study, cache: RunCache, workers: int | None = None, model_bytes: int = 0) -> None:
        self.study, self.cache = study, cache
        is_on_cpu = "device" not in study.settings
        self.workers = workers or (count_cores() if is_on_cpu else 1)
        self.runs = study.runs()
        self.seconds = 0.0
        """The computing time of all runs in this process and its workers."""
        self._settings = json.dumps(study.run_settings, sort_keys=True)
        self._pools: list[ProcessPoolExecutor] = []
        # Weights, two moments and a gradient.
        self.keeps_in_memory = 4 * model_bytes * len(self.runs) < MEMORY_SHARE * available_memory()

    def forget(self) -> None:
        """Delete the recorded scores of all runs and the encoded stream."""
        self.forget_scores()
        shutil.rmtree(self.cache.stream_folder, ignore_errors=True)

    def forget_scores(self) -> None:
        """Delete the recorded scores of all runs."""
        for run in self.runs:
            shutil.rmtree(self.cache.files(run).folder, ignore_errors=True)

    def delete_checkpoints(self) -> None:
        """Delete the checkpoints, which are not needed once the comparison is complete."""
        for run in self.runs:
            self.cache.files(run).checkpoint_path.unlink(missing_ok=True)

    def advance(self, runs: Sequence[Run], batch: int, events: int) -> Iterator[Advanced]:
        """Advance runs to a number of batches, and yield the results in the order in which they end.

        Args:
            runs: The runs.
            batch: The number of batches.
            events: The number of events that the whole comparison may have to process, for all runs together.
        """
        stream_folder = self.cache.stream_folder
        tasks = [
            Advance(run, self.cache.files(run).folder, stream_folder, self._settings, batch, self.keeps_in_memory)
            for run in runs
        ]
        is_worth_workers = SECONDS_PER_EVENT * events > MIN_SECONDS_FOR_WORKERS
        if self.workers > 1 and len(tasks) > 1 and (self._pools or is_worth_workers):
            results = self._advance_in_workers(tasks)
        else:
            results = map(advance_run, tasks)
        for result in results:
            self.seconds += result.seconds
            yield result

    def _advance_in_workers(self, tasks: Sequence[Advance]) -> Iterator[Advanced]:
        if not self._pools:
            # Forked processes could inherit locked mutexes of torch's threads.
            context = get_context("spawn")
            self._pools = [ProcessPoolExecutor(1, context, _start_worker) for _ in range(self.workers)]
        futures: dict[Future[Advanced], Advance] = {}
        with interrupts_blocked():  # a pool starts its process at the first task
            for task in tasks:
                pool = self._pools[self.runs.index(task.run) % len(self._pools)]
                futures[pool.submit(advance_run, task)] = task
        for future in as_completed(futures):
            task = futures[future]
            try:
                yield future.result()
            except BrokenProcessPool:
                text = "a worker process ended unexpectedly, possibly because memory ran out"
                yield Advanced(task.run, task.batch, failure=text)

    @contextmanager
    def working(self) -> Iterator[None]:
        """End the worker processes, and forget the runs in memory, when the context is left."""
        others = set(active_children())
        try:
            yield
        finally:
            for pool in self._pools:
                pool.shutdown(wait=False, cancel_futures=True)
            if self._pools:
                for process in set(active_children()) - others:
                    process.terminate()
            for pool in self._pools:
                pool.shutdown(wait=True)
            self._pools = []
            forget_runs()


def count_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> float:
    """Return the available memory in bytes; infinite if the system does not tell.

    On Linux it includes the memory in which the system caches files, and which it gives back when a process needs it.
    """
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT until the context is left, and for good in the processes that are started in it.

    A worker ignores SIGINT once it has imported this module. Before that, an interrupt would end it with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first process starts it, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles the interrupt and ends the workers
    disable_sparse_checks()
    os.dup2(2, 1)  # standard output belongs to the command; text that a model prints goes to standard error
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
