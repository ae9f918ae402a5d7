"""Computes the runs of a study, in this process or in several, and keeps each result in a file.

Every finished run is a file in the cache folder, so an interrupted study loses only the runs in progress, and the same
command continues with the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..atomic_write import replace_file
from .results import TUNING_SEEDS, Outcome, Provenance, Result, Results, RunSpec
from .study import Study, count_work, run_length, run_specs

VERSION = 1
"""Increase this number when runs compute something else: results of other versions are not used."""
SECONDS_PER_EVENT = 1e-4
"""A rough estimate of the time that a run takes per event, to decide whether worker processes are worth starting."""
MIN_SECONDS_FOR_WORKERS = 10.0


class DamagedResultError(ValueError):
    """A file of the cache that cannot be read."""


class RunCache:
    """The results of runs in a folder, one file per run.

    The name of a file is a hash of the run spec and of the versions of cadam and torch.

    Args:
        folder: The folder, which is created when the first result is saved.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()

    def path(self, spec: RunSpec) -> Path:
        """Return the path of the file for a run."""
        import torch

        import cadam

        versions = f"version {VERSION}, cadam {cadam.__version__}, torch {torch.__version__}"
        name = hashlib.sha256(f"{versions}\n{spec.key()}".encode()).hexdigest()[:40]
        return self.folder / spec.experiment / f"{name}.npz"

    def load(self, spec: RunSpec) -> Result | None:
        """Return the result of a run, or None if there is none.

        Raises:
            DamagedResultError: If there is a file that cannot be read.
        """
        path = self.path(spec)
        try:
            with np.load(path, allow_pickle=False) as file:
                facts = json.loads(str(file["facts"]))
                metrics = dict(zip(facts["metrics"], file["metrics"].tolist(), strict=True))
                curves = {name: file[f"curve {name}"] for name in facts["curves"]}
            result = Result(RunSpec(**facts["spec"]), Outcome(metrics, curves), Provenance(**facts["provenance"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise DamagedResultError(f"{path}: {error}") from error
        if result.spec != spec:
            raise DamagedResultError(f"{path}: contains the result of {result.spec}, not of {spec}")
        return result

    def save(self, result: Result) -> None:
        """Write the result of a run; an existing file is replaced atomically."""
        facts = {
            "spec": asdict(result.spec),
            "metrics": list(result.outcome.metrics),
            "curves": list(result.outcome.curves),
            "provenance": asdict(result.provenance),
        }
        arrays: dict[str, Any] = {f"curve {name}": curve for name, curve in result.outcome.curves.items()}
        arrays["metrics"] = np.array(list(result.outcome.metrics.values()), dtype=np.float64)
        arrays["facts"] = np.array(json.dumps(facts))
        buffer = BytesIO()
        np.savez_compressed(buffer, **arrays)
        path = self.path(result.spec)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, buffer.getvalue())


@dataclass(frozen=True)
class RunEvent:
    """A change in the state of one run."""

    kind: Literal["cached", "computed", "failed", "damaged"]
    """The state of the run; "damaged" means that its file cannot be read and that it is computed again."""
    spec: RunSpec
    result: Result | None = None
    message: str = ""


class StudyRunner:
    """Computes the runs of a study that the cache does not have.

    Args:
        study: The study.
        seeds: The number of seeds.
        cache: The results of earlier runs, to which new results are added.
        force: Whether to compute runs that the cache has.
        workers: The largest number of runs at the same time; by default, one per processor.
        notify: Called with each event, in the process that called `run`.
    """

    def __init__(
        self,
        study: Study,
        seeds: int,
        cache: RunCache,
        *,
        force: bool = False,
        workers: int | None = None,
        notify: Callable[[RunEvent], None] = lambda event: None,
    ) -> None:
        self.study, self.seeds, self.cache, self.force, self.notify = study, seeds, cache, force, notify
        self.workers = workers or count_cores()
        self.failures: dict[RunSpec, str] = {}
        """The tracebacks of failed runs."""
        self._found: dict[RunSpec, Result] = {}

    @property
    def results(self) -> Results:
        """The results so far, in the order of their specs."""
        return Results(list(self._found.values()))

    @property
    def missing(self) -> int:
        """The number of runs without a result."""
        return count_work(self.study, self.seeds)[0] - len(self._found)

    def run(self) -> None:
        """Compute all missing runs.

        A failed run does not stop the others, but runs that depend on its result are not started.

        Raises:
            NoLearningRateError: If an arm diverged at every learning rate.
        """
        with _worker_pool(self.workers) as pool:
            while True:
                specs = run_specs(self.study, self.seeds, self.results)
                new = [spec for spec in specs if spec not in self._found and spec not in self.failures]
                if not new:
                    break
                to_compute = [spec for spec in new if self.force or not self._load(spec)]
                # Seed by seed, so that paired results are shown as early as possible.
                to_compute.sort(key=lambda spec: spec.seed % TUNING_SEEDS)
                if len(to_compute) > 1 and count_workers(self._seconds_left(), self.workers) > 1:
                    events = _compute_in(pool, to_compute, self.cache)
                else:
                    events = (_compute_run(self.cache, spec) for spec in to_compute)
                for event in events:
                    self._record(event)
                # Results follow the order of the specs, whatever the order in which the runs ended.
                self._found = {spec: self._found[spec] for spec in specs if spec in self._found}

    def _load(self, spec: RunSpec) -> bool:
        try:
            result = self.cache.load(spec)
        except DamagedResultError as error:
            self.notify(RunEvent("damaged", spec, message=str(error)))
            return False
        if result is None:
            return False
        self._record(RunEvent("cached", spec, result))
        return True

    def _record(self, event: RunEvent) -> None:
        if event.result is not None:
            self._found[event.spec] = event.result
        else:
            self.failures[event.spec] = event.message
        self.notify(event)

    def _seconds_left(self) -> float:
        passes = count_work(self.study, self.seeds)[1] - sum(map(run_length, self._found))
        return SECONDS_PER_EVENT * (self.study.events or 0) * passes


def count_workers(seconds: float, limit: int) -> int:
    """Return how many processes to use for work of this duration: one if starting others would not pay."""
    return limit if seconds > MIN_SECONDS_FOR_WORKERS else 1


def count_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool whose workers start with the first run; leaving the context ends them and unfinished runs."""
    others = set(active_children())
    # Forked processes could inherit locked mutexes of torch's threads.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.terminate()
        pool.shutdown(wait=True)


def _compute_in(pool: ProcessPoolExecutor, specs: Sequence[RunSpec], cache: RunCache) -> Iterator[RunEvent]:
    """Compute runs in worker processes and yield their events in the order in which they end."""
    futures = {pool.submit(_compute_run, cache, spec): spec for spec in specs}
    for future in as_completed(futures):
        try:
            yield future.result()
        except BrokenProcessPool:
            message = "a worker process ended unexpectedly, possibly because memory ran out"
            yield RunEvent("failed", futures[future], message=message)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles the interrupt and ends the workers
    os.dup2(2, 1)  # standard output belongs to the command; text that a model prints goes to standard error
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _compute_run(cache: RunCache, spec: RunSpec) -> RunEvent:
    from .run_arm import run_arm

    try:
        result = measure_run(run_arm, spec)
        cache.save(result)
    except Exception:
        return RunEvent("failed", spec, message=traceback.format_exc())
    return RunEvent("computed", spec, result)


def measure_run(compute: Callable[[RunSpec], Outcome], spec: RunSpec) -> Result:
    """Compute one run with one thread, and record its duration and peak memory.

    Args:
        compute: The function that computes the outcome.
        spec: The spec of the run.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # without this file, the peak is that of the process since its start
        Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    try:
        outcome = compute(spec)
    finally:
        torch.set_num_threads(threads)
    return Result(spec, outcome, current_provenance(time.perf_counter() - start))


def current_provenance(seconds: float) -> Provenance:
    """Return the provenance of a result that this process has just computed in this many seconds."""
    import torch

    import cadam

    is_on_cuda = torch.cuda.is_available() and torch.cuda.max_memory_reserved() > 0
    memory = torch.cuda.max_memory_reserved() if is_on_cuda else _peak_memory()
    device = torch.cuda.get_device_name() if is_on_cuda else f"CPU, {processor_name()}"
    versions = {"cadam": cadam.__version__, "torch": torch.__version__, "numpy": np.__version__}
    return Provenance(seconds, memory, device, {"python": platform.python_version(), **versions})


def processor_name() -> str:
    """Return the model of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _peak_memory() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
