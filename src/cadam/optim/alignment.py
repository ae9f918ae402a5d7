"""The alignment ratio: the share of elements whose momentum and gradient agree in sign.

The engines count inside the update, on the device. Nothing is read until somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ratio:
    """Counts since the last reset: elements aligned, touched by a gradient, and seen (all, each step)."""

    aligned: int
    touched: int
    seen: int

    @property
    def over_all(self) -> float:
        """Share of all elements, the paper's ratio. NaN before the first step."""
        return self.aligned / self.seen if self.seen else float("nan")

    @property
    def over_touched(self) -> float:
        """Share of the elements that a gradient touched: the one to read for embedding tables."""
        return self.aligned / self.touched if self.touched else float("nan")

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.aligned + other.aligned, self.touched + other.touched, self.seen + other.seen)

    def __sub__(self, other: Ratio) -> Ratio:
        return Ratio(self.aligned - other.aligned, self.touched - other.touched, self.seen - other.seen)

    def __str__(self) -> str:
        return f"{self.over_all:.3f} of all, {self.over_touched:.3f} of touched"


class Writer(Protocol):
    """Anything with TensorBoard's add_scalar."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any: ...


@dataclass(frozen=True)
class Alignment:
    """The ratio in total, per parameter group and per parameter (by name, in the optimizer's order)."""

    total: Ratio
    groups: tuple[Ratio, ...]
    parameters: Mapping[str, Ratio]
    replicated: Mapping[str, int] = field(default_factory=dict)
    """Parameters that are known to be the same on every rank that has them, with the number of their group."""

    def over_ranks(self, group: Any = None) -> Alignment:
        """The same over all ranks of a process group (by default of all there are); every one of them must call it.

        Counts are added up, so shards count once each. A replicated table of `cadam.torchrec` counts once too. Of an
        ordinary optimizer's parameters nobody knows which are replicated (by DistributedDataParallel, say): each of
        those counts once for each rank. That leaves its own ratio as it is; but beside shards, as those of FSDP2, it
        weighs too much in the total and in its group, so compare the ratios of single parameters there.
        """
        import torch.distributed as dist

        gathered: list[Alignment] = [self] * dist.get_world_size(group)
        dist.all_gather_object(gathered, self, group)
        nothing = Ratio(0, 0, 0)
        once = {
            name
            for name in {name for of_rank in gathered for name in of_rank.replicated}
            if all(name in of_rank.replicated for of_rank in gathered if name in of_rank.parameters)
        }
        parameters: dict[str, Ratio] = {}
        groups = [nothing] * max(len(of_rank.groups) for of_rank in gathered)
        for of_rank in gathered:
            for number, ratio in enumerate(of_rank.groups):
                groups[number] += ratio
            for name, ratio in of_rank.parameters.items():
                if name in once and name in parameters:
                    groups[of_rank.replicated[name]] -= ratio
                else:
                    parameters[name] = parameters.get(name, nothing) + ratio
        return Alignment(sum(groups, nothing), tuple(groups), parameters)

    def write(self, writer: Writer, step: int, *, tag: str = "alignment", parameters: bool = False) -> None:
        """Write the ratios as scalars: total and groups, with `parameters` also each parameter's."""
        ratios = {"total": self.total}
        if len(self.groups) > 1:
            ratios.update({f"group{i}": ratio for i, ratio in enumerate(self.groups)})
        if parameters:
            ratios.update({f"parameters/{name}": ratio for name, ratio in self.parameters.items()})
        for name, ratio in ratios.items():
            if ratio.seen:
                writer.add_scalar(f"{tag}/all/{name}", ratio.over_all, step)
            if ratio.touched:
                writer.add_scalar(f"{tag}/touched/{name}", ratio.over_touched, step)

    def __str__(self) -> str:
        groups = [(f"group{number}", ratio) for number, ratio in enumerate(self.groups)]
        rows = [*self.parameters.items(), *(groups if len(groups) > 1 else []), ("total", self.total)]
        width = max(len(name) for name in ("parameter", *(name for name, _ in rows)))
        lines = [f"{'parameter':{width}}      all  touched"]
        for name, ratio in rows:
            lines.append(f"{name:{width}}  {ratio.over_all:7.3f}  {ratio.over_touched:7.3f}")
        return "\n".join(lines)


def new_counts(device: torch.device) -> Tensor:
    """Counters of one parameter: aligned, touched, seen."""
    return torch.zeros(3, dtype=torch.int64, device=device)


def read(counts: Iterable[Tensor | None]) -> list[Ratio]:
    """Fetch counters, with one transfer per device; None reads as nothing seen."""
    counters = list(counts)
    ratios = [Ratio(0, 0, 0)] * len(counters)
    by_device: dict[torch.device, list[int]] = {}
    for i, counter in enumerate(counters):
        if counter is not None:
            by_device.setdefault(counter.device, []).append(i)
    for positions in by_device.values():
        rows = torch.stack([c for i in positions if (c := counters[i]) is not None]).tolist()
        for i, row in zip(positions, rows, strict=True):
            ratios[i] = Ratio(*row)
    return ratios
