"""Computation of the runs that neither the cache nor the archive has, in this process or in worker processes.

A process locks a run, checks again that no other process has stored it, computes it and stores it. Any number of
processes can therefore share a cache. If the command is killed, only the runs in progress are lost, and the same
command continues with the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Literal, TypeAlias

from cadam.ab.runner import count_cores

from .archive import Archive
from .cache import Cache, RunInProgressError, identity
from .experiment import OWN_DATA, Experiment, Finished, Plan
from .learning_rates import NoLearningRateError
from .measured_runs import DamagedResultError, current_provenance, measure_run
from .results import TUNING_SEEDS, Provenance, Result, Results, RunSpec
from .time_limit import TimeLimit

EventKind = Literal["start", "stored", "computed", "computed elsewhere", "failed", "damaged"]

MIN_SECONDS_FOR_WORKERS = 10.0
"""Worker processes are started only for work that takes longer than this."""


@dataclass(frozen=True)
class Event:
    """A change in the state of one run.

    "stored" means that the result existed before, "computed elsewhere" that another process computed it in the
    meantime, and "damaged" that the stored result cannot be read.
    """

    kind: EventKind
    experiment: Experiment
    spec: RunSpec
    result: Result | None = None
    message: str = ""


Notify = Callable[[Event], None]
"""Function that is called with each event, for example to show the progress."""


def ignore(event: Event) -> None:
    """Do nothing with an event."""


@dataclass
class Request:
    """An experiment with a plan, and its results so far."""

    experiment: Experiment
    plan: Plan
    results: Results = field(default_factory=Results)
    missing: Sequence[RunSpec] = ()
    failed: dict[RunSpec, str] = field(default_factory=dict)
    """The tracebacks of failed runs."""
    unknown: str = ""
    """The reason why the run specs cannot be listed, for example because data has to be read first."""

    @property
    def complete(self) -> bool:
        """Whether there is a result for every run."""
        return not self.missing and not self.unknown


def look_up(request: Request, find: Callable[[Experiment, RunSpec], Result | None]) -> None:
    """Set the results and the missing runs of a request.

    An experiment with several phases, such as tuning and testing, lists the runs of a phase only when all earlier runs
    have results. The missing runs are therefore those of the first incomplete phase.

    Args:
        request: The request.
        find: Returns the stored result of a run, or None.
    """
    results: dict[RunSpec, Result] = {}
    while True:
        specs = list(dict.fromkeys(request.experiment.run_specs(request.plan, Results(list(results.values())))))
        new = [spec for spec in specs if spec not in results]
        for spec in new:
            result = find(request.experiment, spec)
            if result is not None:
                results[spec] = result
        request.missing = [spec for spec in new if spec not in results]
        request.results = Results([results[spec] for spec in specs if spec in results])
        if request.missing or not new:
            return


def later_specs(request: Request, example: Result) -> list[RunSpec]:
    """Estimate the runs of later phases by assuming that every missing run has the outcome of an example.

    Args:
        request: A request with missing runs.
        example: The result of any of its runs.

    Returns:
        The specs of the later phases, or an empty list if they cannot be estimated, because the example diverged or
        because it does not have a metric of other runs.
    """
    results = {result.spec: result for result in request.results}
    new = list(request.missing)
    count = len(results) + len(new)
    while new:
        results |= {spec: replace(example, spec=spec) for spec in new}
        try:
            specs = request.experiment.run_specs(request.plan, Results(list(results.values())))
        except (NoLearningRateError, KeyError):
            return []
        new = [spec for spec in dict.fromkeys(specs) if spec not in results]
    return list(results)[count:]


def read(cache: Cache, experiment: Experiment, plan: Plan, notify: Notify = ignore) -> Request:
    """Return an experiment with its stored results. A damaged result is reported and counts as missing."""
    request = Request(experiment, plan)

    def find(experiment: Experiment, spec: RunSpec) -> Result | None:
        return _load(cache, experiment, spec, notify)

    look_up(request, find)
    return request


Events: TypeAlias = Iterator[tuple[Request, Event]]


def run(
    requests: Sequence[Request],
    cache: Cache,
    *,
    jobs: int | None = None,
    force: bool = False,
    notify: Notify,
    limit: TimeLimit | None = None,
) -> None:
    """Compute the missing runs of several experiments, and update the requests with the results.

    Args:
        requests: The experiments and their plans.
        cache: The cache of results.
        jobs: The number of worker processes; None starts them if that saves time.
        force: Whether to compute runs again that have a stored result.
        notify: Called with each event.
        limit: No run is started that is unlikely to end within this limit; None for no limit.
    """
    limit = limit or TimeLimit()
    _commit()
    cache.sweep()
    results: dict[str, Result] = {}
    submitted: set[str] = set()
    reported: set[tuple[str, RunSpec]] = set()

    def find(experiment: Experiment, spec: RunSpec) -> Result | None:
        name = identity(experiment, spec)
        if name not in results and not force:
            result = _load(cache, experiment, spec, notify)
            if result is not None:
                results[name] = result
        if name in results and (experiment.name, spec) not in reported:
            reported.add((experiment.name, spec))
            notify(Event("stored", experiment, spec, results[name]))
        return results.get(name)

    for request in requests:
        cache.remember(request.experiment, request.plan)
        if request.plan.data:
            os.environ[OWN_DATA] = request.plan.data
    with _worker_list(cache) as workers:
        while True:
            work = []
            for request in requests:
                look_up(request, find)
                # Runs are computed seed by seed, including those of the A/A test, so that an interrupted experiment
                # can still be reported with fewer seeds.
                for spec in sorted(request.missing, key=lambda spec: spec.seed % TUNING_SEEDS):
                    name = identity(request.experiment, spec)
                    if name not in submitted:
                        submitted.add(name)
                        work.append(Work(request, spec))
            if not work or limit.has_refused:
                return
            shared, separate = [w for w in work if w.is_shared], [w for w in work if not w.is_shared]
            count = jobs if jobs is not None else count_jobs(separate)
            if count > 1:
                workers += [_start_worker(cache) for _ in range(min(count, len(separate)) - len(workers))]
            if workers:
                one_by_one = _in_workers(separate, workers, force, limit)
            else:
                one_by_one = _in_process(separate, cache, force, limit)
            for request, event in chain(_on_device(shared, cache, force, limit), one_by_one):
                if event.result is not None:
                    results[identity(event.experiment, event.spec)] = event.result
                    reported.add((event.experiment.name, event.spec))
                elif event.kind == "failed":
                    request.failed[event.spec] = event.message
                notify(event)


@dataclass(frozen=True)
class Work:
    """A run to compute, and the request that needs it."""

    request: Request
    spec: RunSpec

    @property
    def is_shared(self) -> bool:
        """Whether the run is computed on a device together with others."""
        experiment = self.request.experiment
        return experiment.side_by_side is not None and experiment.side_by_side(self.spec)


def count_jobs(work: Sequence[Work]) -> int:
    """Return the number of processes to use: one per core, or a single one if starting workers takes too long."""
    totals = {id(w.request): len(w.request.missing) + len(w.request.results) for w in work}
    seconds = sum(w.request.experiment.estimate(w.request.plan) / totals[id(w.request)] for w in work)
    return min(count_cores(), len(work)) if seconds > MIN_SECONDS_FOR_WORKERS else 1


def resolve(cache: Cache, experiment: Experiment, spec: RunSpec, *, force: bool, wait: bool) -> Event:
    """Return the stored result of a run, or compute and store it.

    Args:
        cache: The cache.
        experiment: The experiment.
        spec: The run.
        force: Whether to compute the run even if it has a stored result.
        wait: Whether to wait for another process that is computing the run.

    Raises:
        RunInProgressError: If another process is computing the run and `wait` is False.
    """
    with cache.lock(identity(experiment, spec), wait=wait):
        if not force:
            stored = _load(cache, experiment, spec, ignore)
            if stored is not None:
                return Event("computed elsewhere", experiment, spec, stored)
        try:
            _commit()  # read before the run, because the code may change while it is computed
            result = measure_run(experiment.compute, spec)
            cache.save(experiment, replace(result, provenance=with_commit(result.provenance)))
        except Exception:
            return Event("failed", experiment, spec, message=traceback.format_exc())
        # Load the result again, so that this process uses exactly what a later one reads.
        return Event("computed", experiment, spec, cache.load(experiment, spec))


COMMIT = "CADAM_COMMIT"
"""The environment variable with the commit of sources that are not in a repository; a final `+` means changed code."""


def with_commit(provenance: Provenance) -> Provenance:
    """Return the provenance with the commit that the code runs from."""
    commit, is_dirty = _commit()
    return replace(provenance, commit=commit, dirty=is_dirty)


@lru_cache
def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of the code and whether the code differs from it; None if the code is not in a repository."""
    if name := os.environ.get(COMMIT):
        return name.removesuffix("+"), name.endswith("+")
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        # An installed package may be inside the repository of another project, whose commit means nothing here.
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True).stdout
        if Path(__file__).resolve() != Path(top.strip(), "paper", "cadam_paper", "harness", "runner.py").resolve():
            return None, None
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        status = [*git, "status", "--porcelain", ":/src", ":/paper"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit, bool(changed.stdout.strip())


def _load(cache: Cache, experiment: Experiment, spec: RunSpec, notify: Notify) -> Result | None:
    try:
        return cache.load(experiment, spec)
    except DamagedResultError as error:
        notify(Event("damaged", experiment, spec, message=str(error)))
        return None


def _in_process(work: Sequence[Work], cache: Cache, force: bool, limit: TimeLimit) -> Events:
    """Compute one run after the other in this process. Runs that another process is computing are awaited last."""
    waiting = deque((item, False) for item in work)
    while waiting and limit.allows_start():
        item, was_busy = waiting.popleft()
        experiment = item.request.experiment
        yield item.request, Event("start", experiment, item.spec)
        limit.begin(item.spec)
        try:
            yield item.request, resolve(cache, experiment, item.spec, force=force, wait=was_busy)
        except RunInProgressError:
            waiting.append((item, True))
        finally:
            limit.finish(item.spec)


def _on_device(work: Sequence[Work], cache: Cache, force: bool, limit: TimeLimit) -> Events:
    """Compute runs that share a device, in this process. Each is locked when it starts and stored when it ends."""
    for compute_many in dict.fromkeys(item.request.experiment.compute_many for item in work):
        if compute_many is None:
            raise ValueError("an experiment with side_by_side must have compute_many")
        sharing = [item for item in work if item.request.experiment.compute_many is compute_many]
        queue = _DeviceQueue(deque(sharing), cache, force, limit)
        while queue.waiting and not limit.has_refused:
            try:
                for finished in compute_many(queue.start_runs()):
                    queue.store(finished)
                    yield from queue.take_events()
            except Exception:
                queue.fail(traceback.format_exc())
            finally:
                queue.release()
            yield from queue.take_events()
        yield from _in_process(queue.busy, cache, force, limit)


@dataclass
class _DeviceQueue:
    """The runs that wait for a device, and those that are in progress on it."""

    waiting: deque[Work]
    cache: Cache
    force: bool
    limit: TimeLimit
    busy: list[Work] = field(default_factory=list)
    """Runs that another process is computing."""
    locked: dict[RunSpec, tuple[Work, ExitStack]] = field(default_factory=dict)
    """Runs in progress, with their locks."""
    events: list[tuple[Request, Event]] = field(default_factory=list)

    def start_runs(self) -> Iterator[RunSpec]:
        """Lock and yield the next waiting runs, except those that another process is computing or has computed."""
        while self.waiting and self.limit.allows_start():
            item = self.waiting.popleft()
            experiment, spec, lock = item.request.experiment, item.spec, ExitStack()
            try:
                lock.enter_context(self.cache.lock(identity(experiment, spec), wait=False))
            except RunInProgressError:
                self.busy.append(item)
                continue
            stored = None if self.force else _load(self.cache, experiment, spec, ignore)
            if stored is not None:
                lock.close()
                self.events.append((item.request, Event("computed elsewhere", experiment, spec, stored)))
                continue
            self.locked[spec] = item, lock
            self.limit.begin(spec)
            self.events.append((item.request, Event("start", experiment, spec)))
            yield spec

    def store(self, finished: Finished) -> None:
        """Store a finished run and release its lock."""
        item, lock = self.locked.pop(finished.spec)
        self.limit.finish(finished.spec)
        experiment = item.request.experiment
        with lock:
            provenance = with_commit(current_provenance(finished.seconds))
            self.cache.save(experiment, Result(finished.spec, finished.outcome, provenance))
            stored = self.cache.load(experiment, finished.spec)
        self.events.append((item.request, Event("computed", experiment, finished.spec, stored)))

    def fail(self, message: str) -> None:
        """Report all runs in progress as failed."""
        for item, _ in self.locked.values():
            experiment = item.request.experiment
            self.events.append((item.request, Event("failed", experiment, item.spec, message=message)))

    def release(self) -> None:
        """Release all locks."""
        for _, lock in self.locked.values():
            lock.close()
        self.locked.clear()

    def take_events(self) -> Events:
        """Yield the events since the last call."""
        events, self.events = self.events, []
        yield from events


@dataclass
class _Worker:
    """A worker process, the connection to it, and the run that it is computing."""

    process: SpawnProcess
    pipe: Connection
    cache: Cache
    item: Work | None = None


@contextmanager
def _worker_list(cache: Cache) -> Iterator[list[_Worker]]:
    """Yield an empty list for worker processes. All processes in the list are stopped when the context ends."""
    workers: list[_Worker] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()
        cache.sweep()


def _in_workers(work: Sequence[Work], workers: list[_Worker], force: bool, limit: TimeLimit) -> Events:
    """Compute runs in worker processes, with at most `Experiment.parallel` concurrent runs of one experiment."""
    waiting = deque((item, False) for item in work)
    while True:
        for worker in workers:
            if worker.item is not None or not waiting or not limit.allows_start():
                continue
            following = _take_next(waiting, workers)
            if following is not None:
                worker.item, was_busy = following
                experiment, spec = worker.item.request.experiment, worker.item.spec
                limit.begin(spec)
                yield worker.item.request, Event("start", experiment, spec)
                worker.pipe.send((experiment, spec, force, was_busy))
        active = [worker for worker in workers if worker.item is not None]
        if not active:
            return
        ready = connection.wait([worker.pipe for worker in active])
        for worker in (worker for worker in active if worker.pipe in ready):
            item, worker.item = worker.item, None
            assert item is not None
            limit.finish(item.spec)
            try:
                event = worker.pipe.recv()
            except EOFError:
                worker.process.join()
                message = f"its process ended with exit code {worker.process.exitcode}"
                event = Event("failed", item.request.experiment, item.spec, message=message)
                workers[workers.index(worker)] = _start_worker(worker.cache)
            if event is None:
                waiting.append((item, True))
            else:
                yield item.request, event


def _take_next(waiting: deque[tuple[Work, bool]], workers: Sequence[_Worker]) -> tuple[Work, bool] | None:
    """Remove and return the first waiting run whose experiment allows another concurrent run."""
    running = [worker.item.request.experiment.name for worker in workers if worker.item is not None]
    for index, (item, was_busy) in enumerate(waiting):
        experiment = item.request.experiment
        if experiment.parallel is None or running.count(experiment.name) < experiment.parallel:
            del waiting[index]
            return item, was_busy
    return None


def _start_worker(cache: Cache) -> _Worker:
    context = get_context("spawn")
    parent_end, worker_end = context.Pipe()
    archive = None if cache.archive is None else cache.archive.root
    process = context.Process(target=_work, args=(worker_end, cache.root, archive), daemon=True)
    process.start()
    worker_end.close()
    return _Worker(process, parent_end, cache)


def _work(pipe: Connection, root: Path, archive: Path | None) -> None:
    """Resolve runs in a worker process as it receives them, until the connection closes or the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.dup2(2, 1)  # standard output belongs to the command, so text that a run prints goes to standard error
    cache = Cache(root, None if archive is None else Archive(archive))
    while True:
        try:
            experiment, spec, force, wait = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(resolve(cache, experiment, spec, force=force, wait=wait))
        except RunInProgressError:
            pipe.send(None)


def _exit_with_parent() -> None:
    """Wait for the parent process to end, and then end this worker."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
