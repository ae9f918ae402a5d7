"""Times the contenders of a case, and shows the times.

The contenders of a case take turns in random order, so that a disturbance affects all of them. The results are medians,
their ratios to a peer, and their share of the speed limit: the time that the memory traffic of the step takes.
"""

from __future__ import annotations

import gc
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .cases import Case, Contender

MAX_SPREAD = 2
"""Ratio of the 90th percentile to the minimum above which a result counts as unsteady."""
MIN_LIMIT_ELEMENTS = 1_000_000
"""The time of a step over fewer elements is mostly overhead, so it is not compared with the speed limit."""
MakeLimit = Callable[[int], Contender]
"""A function that builds the contender that only moves the bytes of a step over a number of elements."""


@dataclass
class Result:
    """The times of one contender in one case."""

    case: str
    name: str
    milliseconds: float
    """The median."""
    low: float
    """The minimum."""
    high: float
    """The 90th percentile."""
    ratio: float
    """The time of the case's peer divided by the time of this contender."""
    share: float | None = None
    """The time of the speed limit divided by the time of this contender."""
    extra_megabytes: float | None = None
    """Peak memory that the step allocates."""

    @property
    def is_unsteady(self) -> bool:
        """Whether the times vary so much that the median is not reliable."""
        return self.high > MAX_SPREAD * self.low


# Timing --------------------------------------------------------------------------------------------------------


def measure(case: Case, device: str, make_limit: MakeLimit | None) -> list[Result]:
    """Time the contenders of a case.

    Every round has its own random order, so that no contender always runs after the one that evicts the caches.

    Args:
        case: the case.
        device: `cpu` or `cuda`.
        make_limit: builds the contender of the speed limit, which runs in the same rounds. None: leave it out.

    Returns:
        One result per contender.
    """
    contenders = case.contenders()
    if make_limit is not None and case.elements > MIN_LIMIT_ELEMENTS:
        contenders.append(make_limit(case.elements))
    for contender in contenders:  # the first steps compile kernels and allocate the state
        for _ in range(3):
            contender.prepare()
            contender.step()
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    order = random.Random(0)
    for _ in range(case.rounds):
        for contender in order.sample(contenders, len(contenders)):
            contender.prepare()
            gc.collect(0)  # otherwise this contender might collect the garbage of the one before
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(case.repeat):
                contender.step()
            _synchronize(device)
            times[contender.name].append((time.perf_counter() - start) * 1e3 / case.repeat)
    medians = {name: statistics.median(values) for name, values in times.items()}
    results = []
    for contender in contenders:
        name, values = contender.name, sorted(times[contender.name])
        high = values[int(0.9 * (len(values) - 1))]
        share = medians["limit"] / medians[name] if "limit" in medians else None
        memory = _extra_megabytes(contender, device)
        ratio = medians[case.peer] / medians[name]
        results.append(Result(case.name, name, medians[name], values[0], high, ratio, share, memory))
    del contenders, contender  # their tensors must be freed before the next case
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return results


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _extra_megabytes(contender: Contender, device: str) -> float | None:
    """Measure the peak memory that a step allocates, in megabytes. None if the system does not report it."""
    contender.prepare()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak of the resident memory
        before = _memory_kilobytes("VmRSS")
        contender.step()
        return max(0.0, (_memory_kilobytes("VmHWM") - before) / 1e3)
    except OSError:
        return None


def _memory_kilobytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field)))


# Reporting -----------------------------------------------------------------------------------------------------


def describe_machine(device: str) -> dict[str, Any]:
    """Collect the hardware and the versions that the results depend on."""
    versions = {}
    for package in ("torch", "triton", "numpy", "deepspeed", "pytorch_optimizer", "timm"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "device": device,
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


def print_results(results: list[Result]) -> None:
    """Print the results of one case as a table."""
    print(f"\n{results[0].case}\n{'':34}      ms  (min to p90)         ratio   limit   extra MB")
    for result in results:
        share = "       " if result.share is None else f"{result.share:7.2f}"
        extra = "" if result.extra_megabytes is None else f"{result.extra_megabytes:10.1f}"
        span = f"({result.low:.2f} to {result.high:.2f})"
        mark = "  unsteady" if result.is_unsteady else ""
        print(f"  {result.name:32} {result.milliseconds:8.2f}  {span:18} {result.ratio:7.2f} {share} {extra}{mark}")
    sys.stdout.flush()


def draw(results: list[Result], path: str) -> None:
    """Draw the ratios to the peer as bars, with one panel per case."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    by_case: dict[str, list[Result]] = {}
    for result in results:
        if result.name != "limit":
            by_case.setdefault(result.case, []).append(result)
    cases = {case: members for case, members in by_case.items() if len(members) > 1}
    heights = [len(members) for members in cases.values()]
    size = (8, 0.3 * sum(heights) + 0.9 * len(cases))
    figure, panels = plt.subplots(
        len(cases), 1, figsize=size, height_ratios=heights, layout="constrained", squeeze=False
    )
    for panel, (case, members) in zip(panels[:, 0], cases.items(), strict=True):
        colors = ["#2a6f97" if result.name.startswith("cadam.") else "0.7" for result in members]
        panel.barh([result.name for result in members], [result.ratio for result in members], color=colors)
        panel.axvline(1, color="0.3", lw=0.8, ls=":")
        panel.invert_yaxis()
        panel.set_title(f"{case}: times faster than its peer", fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
