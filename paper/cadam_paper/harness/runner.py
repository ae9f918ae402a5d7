"""Computes the specs that cache and archive lack, in this process or in several, and tells what happens as it happens.

Each spec is claimed, looked up once more, computed and stored by one and the same process, so that any number of runs
can share a cache. Killing a run loses the specs in work and nothing else; running again goes on from there.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import threading
import time
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

from cadam.ab.results import TUNING_SEEDS, Provenance, Result, Results, RunSpec
from cadam.statistics.learning_rates import NoLearningRateError

from .archive import Archive
from .cache import Cache, DamagedResultError, RunInProgressError, identity
from .experiment import OWN_DATA, Experiment, Finished, Plan

Kind = Literal["start", "found", "computed", "elsewhere", "failed", "damaged"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a spec. `elsewhere`: another process computed it meanwhile."""

    kind: Kind
    experiment: Experiment
    spec: RunSpec
    result: Result | None = None
    message: str = ""


Tell = Callable[[Event], None]


@dataclass
class Request:
    """An experiment as it is asked for, and what is known of it."""

    experiment: Experiment
    plan: Plan
    results: Results = field(default_factory=Results)
    missing: Sequence[RunSpec] = ()
    failed: dict[RunSpec, str] = field(default_factory=dict)
    unknown: str = ""
    """Why its specs cannot be named, such as data that has to be read through first."""

    @property
    def complete(self) -> bool:
        return not self.missing and not self.unknown


def look_up(request: Request, find: Callable[[Experiment, RunSpec], Result | None]) -> None:
    """Fill in the request's results and the specs that are still missing, phase by phase."""
    found: dict[RunSpec, Result] = {}
    while True:
        specs = request.experiment.run_specs(request.plan, Results(list(found.values())))
        new = [spec for spec in dict.fromkeys(specs) if spec not in found]
        for spec in new:
            result = find(request.experiment, spec)
            if result is not None:
                found[spec] = result
        request.missing = [spec for spec in new if spec not in found]
        request.results = Results([found[spec] for spec in dict.fromkeys(specs) if spec in found])
        if request.missing or not new:
            return


def to_come(request: Request, example: Result) -> list[RunSpec]:
    """What an experiment will name after the specs that it has named, should these come out like the example."""
    found = {result.spec: result for result in request.results}
    new = list(request.missing)
    named = len(found) + len(new)
    while new:
        found |= {spec: replace(example, spec=spec) for spec in new}
        try:
            specs = request.experiment.run_specs(request.plan, Results(list(found.values())))
        except NoLearningRateError:  # the example has diverged
            return []
        new = [spec for spec in dict.fromkeys(specs) if spec not in found]
    return list(found)[named:]


def read(cache: Cache, experiment: Experiment, plan: Plan, tell: Tell = lambda event: None) -> Request:
    """What there is of an experiment. A damaged spec is told and counts as missing."""
    request = Request(experiment, plan)

    def find(experiment: Experiment, spec: RunSpec) -> Result | None:
        return _load(cache, experiment, spec, tell)

    look_up(request, find)
    return request


Events: TypeAlias = Iterator[tuple[Request, Event]]


def run(requests: Sequence[Request], cache: Cache, *, jobs: int | None = None, force: bool = False, tell: Tell) -> None:
    """Compute what is missing, and with `force` what is there too. Requests are filled in.

    With `jobs` as None, worker processes are started where that pays.
    """
    _commit()
    cache.sweep()
    known: dict[str, Result] = {}
    asked: set[str] = set()
    told: set[tuple[str, RunSpec]] = set()

    def find(experiment: Experiment, spec: RunSpec) -> Result | None:
        name = identity(experiment, spec)
        if name not in known and not force:
            result = _load(cache, experiment, spec, tell)
            if result is not None:
                known[name] = result
        if name in known and (experiment.name, spec) not in told:
            told.add((experiment.name, spec))
            tell(Event("found", experiment, spec, known[name]))
        return known.get(name)

    for request in requests:
        cache.remember(request.experiment, request.plan)
        if request.plan.data:
            os.environ[OWN_DATA] = request.plan.data
    with _workers(cache) as workers:
        while True:
            work = []
            for request in requests:
                look_up(request, find)
                # Seed by seed, those of A/A too: an experiment that is stopped can be reported with fewer of them.
                for spec in sorted(request.missing, key=lambda spec: spec.seed % TUNING_SEEDS):
                    name = identity(request.experiment, spec)
                    if name not in asked:
                        asked.add(name)
                        work.append(Work(request, spec))
            if not work:
                return
            together, alone = [w for w in work if w.side_by_side], [w for w in work if not w.side_by_side]
            count = jobs if jobs is not None else jobs_for(alone)
            if count > 1:
                workers += [_start_worker(cache) for _ in range(min(count, len(alone)) - len(workers))]
            one_by_one = _in_workers(alone, workers, force) if workers else _here(alone, cache, force)
            for request, event in chain(_together(together, cache, force), one_by_one):
                if event.result is not None:
                    known[identity(event.experiment, event.spec)] = event.result
                    told.add((event.experiment.name, event.spec))
                elif event.kind == "failed":
                    request.failed[event.spec] = event.message
                tell(event)


@dataclass(frozen=True)
class Work:
    """A spec to compute, for the request that needs it."""

    request: Request
    spec: RunSpec

    @property
    def side_by_side(self) -> bool:
        """Is it computed beside others?"""
        experiment = self.request.experiment
        return experiment.side_by_side is not None and experiment.side_by_side(self.spec)


def jobs_for(work: Sequence[Work]) -> int:
    """As many processes as there are cores, if there is more to do than starting them takes."""
    specs = {id(w.request): len(w.request.missing) + len(w.request.results) for w in work}
    expected = sum(w.request.experiment.estimate(w.request.plan) / specs[id(w.request)] for w in work)
    return min(cores(), len(work)) if expected > 10 else 1


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def settle(cache: Cache, experiment: Experiment, spec: RunSpec, *, force: bool, wait: bool) -> Event:
    """Bring one spec about: find it done, or compute and cache it. `RunInProgressError` if another process is at it."""
    with cache.claim(identity(experiment, spec), wait=wait):
        if not force:
            done = _load(cache, experiment, spec, lambda event: None)
            if done is not None:
                return Event("elsewhere", experiment, spec, done)
        try:
            result = measure(experiment, spec)
            cache.save(experiment, result)
        except Exception:
            return Event("failed", experiment, spec, message=traceback.format_exc())
        # What was stored is what counts: hand on what a later run will read.
        return Event("computed", experiment, spec, cache.load(experiment, spec))


def measure(experiment: Experiment, spec: RunSpec) -> Result:
    """Compute a spec on one thread, and what it took."""
    import torch

    _commit()  # of the code that computes, before it has had time to change
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    _forget_peak()
    start = time.perf_counter()
    try:
        outcome = experiment.compute(spec)
    finally:
        torch.set_num_threads(threads)
    return Result(spec, outcome, provenance(time.perf_counter() - start))


def provenance(seconds: float) -> Provenance:
    """Where something comes from that was computed just now."""
    import numpy as np
    import torch

    import cadam

    on_cuda = torch.cuda.is_available() and torch.cuda.max_memory_reserved() > 0
    memory = torch.cuda.max_memory_reserved() if on_cuda else _peak()
    device = torch.cuda.get_device_name() if on_cuda else f"CPU, {processor()}"
    versions = {"cadam": cadam.__version__, "torch": torch.__version__, "numpy": np.__version__}
    commit, dirty = _commit()
    return Provenance(seconds, memory, device, {"python": platform.python_version(), **versions}, commit, dirty)


COMMIT = "CADAM_COMMIT"
"""The environment variable that names the commit of sources copied out of a repository; `+` behind a dirty one."""


@lru_cache
def _commit() -> tuple[str | None, bool | None]:
    """The commit that the package runs from, and whether its code differs from it; None where there is none."""
    if named := os.environ.get(COMMIT):
        return named.removesuffix("+"), named.endswith("+")
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        # Is this the repository of the project, or does the package lie in some other project's tree?
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True).stdout
        if Path(__file__).resolve() != Path(top.strip(), "paper", "cadam_paper", "harness", "runner.py").resolve():
            return None, None
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        look = [*git, "status", "--porcelain", ":/src", ":/paper"]
        changed = subprocess.run(look, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit, bool(changed.stdout.strip())


def processor() -> str:
    """The model of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak is then that of the whole process


def _peak() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _load(cache: Cache, experiment: Experiment, spec: RunSpec, tell: Tell) -> Result | None:
    try:
        return cache.load(experiment, spec)
    except DamagedResultError as error:
        tell(Event("damaged", experiment, spec, message=str(error)))
        return None


# Order of work -------------------------------------------------------------------------------------------------


def _here(work: Sequence[Work], cache: Cache, force: bool) -> Events:
    """One spec after the other, in this process. Cells that another process is at come last; those are waited for."""
    waiting = deque((item, False) for item in work)
    while waiting:
        item, tried = waiting.popleft()
        experiment = item.request.experiment
        yield item.request, Event("start", experiment, item.spec)
        try:
            yield item.request, settle(cache, experiment, item.spec, force=force, wait=tried)
        except RunInProgressError:
            waiting.append((item, True))


def _together(work: Sequence[Work], cache: Cache, force: bool) -> Events:
    """Cells that share a device, in this process. Each is claimed when its turn comes and stored once it is done."""
    ways = dict.fromkeys(item.request.experiment.compute_many for item in work)
    for compute_many in ways:
        if compute_many is None:
            raise ValueError("an experiment that says which specs run side by side must offer compute_many")
        sharing = [item for item in work if item.request.experiment.compute_many is compute_many]
        device = _Device(deque(sharing), cache, force)
        while device.waiting:
            try:
                for finished in compute_many(device.turns()):
                    device.keep(finished)
                    yield from device.news()
            except Exception:
                device.fail(traceback.format_exc())
            finally:
                device.release()
            yield from device.news()
        yield from _here(device.busy, cache, force)


@dataclass
class _Device:
    """The specs that wait for a device, and those it is at."""

    waiting: deque[Work]
    cache: Cache
    force: bool
    busy: list[Work] = field(default_factory=list)
    """Cells that another process is at."""
    held: dict[RunSpec, tuple[Work, ExitStack]] = field(default_factory=dict)
    """Cells in work, with their claims."""
    events: list[tuple[Request, Event]] = field(default_factory=list)

    def turns(self) -> Iterator[RunSpec]:
        """The specs as they get their turn; what another process has done meanwhile is left out."""
        while self.waiting:
            item = self.waiting.popleft()
            experiment, spec, claim = item.request.experiment, item.spec, ExitStack()
            try:
                claim.enter_context(self.cache.claim(identity(experiment, spec), wait=False))
            except RunInProgressError:
                self.busy.append(item)
                continue
            done = None if self.force else _load(self.cache, experiment, spec, lambda event: None)
            if done is not None:
                claim.close()
                self.events.append((item.request, Event("elsewhere", experiment, spec, done)))
                continue
            self.held[spec] = item, claim
            self.events.append((item.request, Event("start", experiment, spec)))
            yield spec

    def keep(self, finished: Finished) -> None:
        item, claim = self.held.pop(finished.spec)
        experiment = item.request.experiment
        with claim:
            self.cache.save(experiment, Result(finished.spec, finished.outcome, provenance(finished.seconds)))
            stored = self.cache.load(experiment, finished.spec)
        self.events.append((item.request, Event("computed", experiment, finished.spec, stored)))

    def fail(self, message: str) -> None:
        """Whatever was in work is lost."""
        for item, _ in self.held.values():
            experiment = item.request.experiment
            self.events.append((item.request, Event("failed", experiment, item.spec, message=message)))

    def release(self) -> None:
        for _, claim in self.held.values():
            claim.close()
        self.held.clear()

    def news(self) -> Events:
        """What happened since the last time."""
        events, self.events = self.events, []
        yield from events


@dataclass
class _Worker:
    """A process, the line to it, and the work it is at."""

    process: SpawnProcess
    line: Connection
    cache: Cache
    item: Work | None = None


@contextmanager
def _workers(cache: Cache) -> Iterator[list[_Worker]]:
    """Room for workers. Leaving it in any way ends them: an unfinished spec is lost, a finished one is stored."""
    workers: list[_Worker] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.line.close()
        cache.sweep()


def _in_workers(work: Sequence[Work], workers: list[_Worker], force: bool) -> Events:
    """Several specs at once, each worker one at a time; no experiment more at once than it allows."""
    waiting = deque((item, False) for item in work)
    while True:
        for worker in workers:
            following = _next(waiting, workers) if worker.item is None else None
            if following is not None:
                worker.item, tried = following
                experiment, spec = worker.item.request.experiment, worker.item.spec
                yield worker.item.request, Event("start", experiment, spec)
                worker.line.send((experiment, spec, force, tried))
        busy = [worker for worker in workers if worker.item is not None]
        if not busy:
            return
        ready = connection.wait([worker.line for worker in busy])
        for worker in (worker for worker in busy if worker.line in ready):
            item, worker.item = worker.item, None
            assert item is not None
            try:
                event = worker.line.recv()
            except EOFError:
                worker.process.join()
                message = f"its process ended with exit code {worker.process.exitcode}"
                event = Event("failed", item.request.experiment, item.spec, message=message)
                workers[workers.index(worker)] = _start_worker(worker.cache)
            if event is None:
                waiting.append((item, True))
            else:
                yield item.request, event


def _next(waiting: deque[tuple[Work, bool]], workers: Sequence[_Worker]) -> tuple[Work, bool] | None:
    """Take the first spec whose experiment may run once more now."""
    running = [worker.item.request.experiment.name for worker in workers if worker.item is not None]
    for position, (item, tried) in enumerate(waiting):
        experiment = item.request.experiment
        if experiment.parallel is None or running.count(experiment.name) < experiment.parallel:
            del waiting[position]
            return item, tried
    return None


def _start_worker(cache: Cache) -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    archive = None if cache.archive is None else cache.archive.root
    process = context.Process(target=_work, args=(theirs, cache.root, archive), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours, cache)


def _work(line: Connection, root: Path, archive: Path | None) -> None:
    """What a worker does: settle the specs it is sent, until the line closes or its parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a spec prints is no output of the command
    cache = Cache(root, None if archive is None else Archive(archive))
    while True:
        try:
            experiment, spec, force, wait = line.recv()
        except EOFError:
            return
        try:
            line.send(settle(cache, experiment, spec, force=force, wait=wait))
        except RunInProgressError:
            line.send(None)


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
