"""Training runs on one GPU: steps that are replayed as CUDA graphs, and several runs that proceed concurrently."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from .experiment import Finished
from .results import Outcome, RunSpec

WARM_UP = 3
"""Number of eager calls before a graph is captured, in which kernels are compiled and algorithms are selected.

These calls are ordinary training steps."""


class Captured:
    """A function without arguments and result that is replayed as a CUDA graph after `WARM_UP` eager calls.

    Args:
        function: The function.
        stream: The stream that it runs on.
        generators: The random number generators that it uses, other than the default one of the device.
    """

    def __init__(
        self, function: Callable[[], None], stream: torch.cuda.Stream, generators: Sequence[torch.Generator] = ()
    ) -> None:
        self.function, self.stream, self.generators = function, stream, generators
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Call the function, or replay its graph."""
        with torch.cuda.stream(self.stream):
            if self.graph is None and self.calls < WARM_UP:
                self.calls += 1
                self.function()
                return
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                for generator in self.generators:
                    self.graph.register_generator_state(generator)
                # Capture on the stream of the run. cuBLAS has one workspace per stream, and graphs captured on the
                # same stream would share it while they run concurrently.
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self.function()
            self.graph.replay()


class Advancing(Hashable, Protocol):
    """A training run that is computed in small parts."""

    def advance(self) -> bool:
        """Perform the next part; return False at the end of the run."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work of this run."""

    def release(self) -> None:
        """Free the memory of the run."""


AnyRun = TypeVar("AnyRun", bound=Advancing)


def on_gpu(spec: RunSpec) -> bool:
    """Return whether a run is computed on a GPU."""
    return bool(spec.settings["device"] == "cuda")


def device_of(spec: RunSpec) -> torch.device:
    """Return the device of a run.

    Raises:
        RuntimeError: If this is a CUDA device, and torch does not find one.
    """
    if on_gpu(spec) and not torch.cuda.is_available():
        raise RuntimeError(f"{spec} needs a CUDA device, and torch does not find one; --quick runs on the CPU")
    return torch.device(spec.settings["device"])


def run_concurrently(runs: Iterable[AnyRun], lanes: int) -> Iterator[tuple[AnyRun, float]]:
    """Advance up to `lanes` runs in turn, and start the next run whenever one ends.

    Yields:
        Each finished run and its cost in seconds. Time during which several runs proceed is divided equally among them.
    """
    queue = iter(runs)
    seconds: dict[AnyRun, float] = {}
    mark = time.perf_counter()

    def divide_time() -> None:
        nonlocal mark
        now = time.perf_counter()
        for run in seconds:
            seconds[run] += (now - mark) / len(seconds)
        mark = now

    while True:
        while len(seconds) < lanes:
            divide_time()
            following = next(queue, None)
            if following is None:
                break
            seconds[following] = 0.0
        if not seconds:
            return
        ended = [run for run in seconds if not run.advance()]
        for run in ended:
            run.synchronize()
            divide_time()
            yield run, seconds.pop(run)
            mark = time.perf_counter()


def compute_specs(
    specs: Iterable[RunSpec],
    start: Callable[[RunSpec], AnyRun],
    outcome: Callable[[RunSpec, AnyRun], Outcome],
    lanes: int,
) -> Iterator[Finished]:
    """Compute several runs concurrently on one GPU, and yield each as soon as it is finished.

    Args:
        specs: The specs of the runs; one is taken whenever a lane is free.
        start: Returns the run of a spec.
        outcome: Returns the measurements of a finished run.
        lanes: The number of runs that proceed at once.
    """
    spec_of: dict[AnyRun, RunSpec] = {}

    def started() -> Iterator[AnyRun]:
        for spec in specs:
            run = start(spec)
            spec_of[run] = spec
            yield run

    for run, seconds in run_concurrently(started(), lanes):
        spec = spec_of.pop(run)
        measured = outcome(spec, run)
        run.release()
        yield Finished(spec, measured, seconds)
