"""The alignment ratio: the share of elements whose momentum and gradient agree in sign.

Engines count aligned elements during the update, on the device. The counters are read only on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ratio:
    """Counts of elements since the last reset.

    Attributes:
        aligned: Elements whose momentum and gradient agreed in sign.
        touched: Elements of gradients, summed over steps; a sparse gradient has only the rows that it contains.
        seen: The number of elements of the parameter times the number of steps.
    """

    aligned: int
    touched: int
    seen: int

    @property
    def over_all(self) -> float:
        """The share of all elements, the ratio of the CAdam paper. NaN before the first step."""
        return self.aligned / self.seen if self.seen else float("nan")

    @property
    def over_touched(self) -> float:
        """The share of the elements that gradients contained. Use this one for embedding tables."""
        return self.aligned / self.touched if self.touched else float("nan")

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.aligned + other.aligned, self.touched + other.touched, self.seen + other.seen)

    def __sub__(self, other: Ratio) -> Ratio:
        return Ratio(self.aligned - other.aligned, self.touched - other.touched, self.seen - other.seen)

    def __str__(self) -> str:
        return f"{self.over_all:.3f} of all, {self.over_touched:.3f} of touched"


class Writer(Protocol):
    """An object with the method `add_scalar` of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Write one value of the curve `tag`."""
        ...


@dataclass(frozen=True)
class Alignment:
    """The alignment ratio of an optimizer, printed as a table.

    Attributes:
        total: The ratio over all parameters.
        groups: The ratio of each parameter group.
        parameters: The ratio of each parameter by its name, in the order of the optimizer.
        replicated: The group number of each parameter that is known to be identical on every rank that has it.
    """

    total: Ratio
    groups: tuple[Ratio, ...]
    parameters: Mapping[str, Ratio]
    replicated: Mapping[str, int] = field(default_factory=dict)

    def over_ranks(self, group: Any = None) -> Alignment:
        """Return the ratio over all ranks of a process group. Every rank must call this method.

        Counts are added, so each shard counts once, and so does a replicated table of `cadam.torchrec`. An ordinary
        optimizer does not know which of its parameters are replicated, for example by DistributedDataParallel; such a
        parameter counts once per rank. Its own ratio is still right. In the total and in its group, however, it weighs
        too much next to sharded parameters (FSDP2); compare the ratios of single parameters in that case.

        Args:
            group: The process group; by default all ranks.
        """
        import torch.distributed as dist

        gathered: list[Alignment] = [self] * dist.get_world_size(group)
        dist.all_gather_object(gathered, self, group)
        zero = Ratio(0, 0, 0)
        replicated = {
            name
            for name in {name for alignment in gathered for name in alignment.replicated}
            if all(name in alignment.replicated for alignment in gathered if name in alignment.parameters)
        }
        parameters: dict[str, Ratio] = {}
        groups = [zero] * max(len(alignment.groups) for alignment in gathered)
        for alignment in gathered:
            for number, ratio in enumerate(alignment.groups):
                groups[number] += ratio
            for name, ratio in alignment.parameters.items():
                if name in replicated and name in parameters:
                    groups[alignment.replicated[name]] -= ratio
                else:
                    parameters[name] = parameters.get(name, zero) + ratio
        return Alignment(sum(groups, zero), tuple(groups), parameters)

    def write(self, writer: Writer, step: int, *, tag: str = "alignment", parameters: bool = False) -> None:
        """Write the ratios to TensorBoard as scalars.

        Args:
            writer: A SummaryWriter.
            step: The global step of the curves.
            tag: The prefix of their names.
            parameters: Whether to write a curve for each parameter too.

        Example:
            >>> optimizer.alignment(reset=True).write(SummaryWriter(), step)
        """
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
    """Return new counters of one parameter: aligned, touched, seen."""
    return torch.zeros(3, dtype=torch.int64, device=device)


def read(counts: Iterable[Tensor | None]) -> list[Ratio]:
    """Read counters with one transfer per device. None counts as zero."""
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
