"""Sparse gradients on CUDA: from raw ids and row gradients to the updated table, without waiting for the device.

The ids are sorted, the gradients of each row summed in the order in which they came, and the row is moved at once.
Work is cut into tiles of the sorted ids, so that an id with many thousands of duplicates is no longer than any other;
sums that reach over tiles are finished by a second kernel. There are no atomics between gradients: the result is
the same in every run, whether or not torch.use_deterministic_algorithms asks for it.

An id that is no row of the table writes nothing. Nobody waits to hear of it: the kernel notes it in memory that the
host can see, and the next step of that parameter raises IndexError, as does `check_ids` after a synchronization.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..rules import Options
from ..update import Update
from . import scalars
from .cuda import (
    TYPES,
    Launch,
    Numbers,
    Stream,
    capturing,
    keep,
    kernel,
    lacking,
    overflowed,
    refusal,
    stochastic,
    triton_type,
)
from .job import Item, Job
from .source import Structure

ELEMENTS = 2048  # of one tile: sorted ids times columns
COLUMNS = 128  # at most, of one tile
SPAN = 32  # tiles whose parts of a row are added at a time
LONGEST = 1 << 30  # ids in one gradient

# By parameter, memory of the host that the kernels see: was there a bad id, and which?
_errors: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


class CudaRows:
    name = "cuda-rows"
    fused = True
    by_chance = True
    skips_overflow = True
    looks = False
    traceable = False
    device = "cuda"

    def refuses(self, update: Update, item: Item, grad: Tensor | None, options: Options) -> str | None:
        if grad is None or not grad.is_sparse:
            return "serves sparse gradients only"
        if grad.sparse_dim() != 1:
            return f"serves gradients with one sparse dimension, and this one has {grad.sparse_dim()}"
        if grad.dtype not in TYPES:
            return f"has no kernels for gradients in {grad.dtype}"
        if not item.param.is_contiguous():
            return "the parameter is not contiguous"
        if grad._nnz() > LONGEST:
            return f"serves up to {LONGEST} ids at a time"
        return refusal(item, options, self.device)

    def stale(self, jobs: Sequence[Job]) -> bool:
        return any(
            _layout(item, grad) != job.memo.get(f"layout {i}") for job in jobs for i, (item, grad) in enumerate(job)
        )

    def check(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            for i, (item, grad) in enumerate(job):
                check_ids(item.param, item.name)
                job.memo[f"layout {i}"] = _layout(item, grad)

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if overflowed(job):
                continue
            by_device: dict[torch.device, list[int]] = {}
            for i, item in enumerate(job.items):
                by_device.setdefault(item.param.device, []).append(i)
            for device, positions in by_device.items():
                with Stream.on(device):
                    _step(job, device, positions)


def _layout(item: Item, grad: Tensor) -> Any:
    """What the kernels take for granted. The ids are looked at by the kernels, the addresses in every step."""
    tensors = (item.param, *item.state.values())
    same = [x.nbytes for x in tensors], [x.is_contiguous() for x in tensors], [x.dtype for x in tensors]
    return same, item.param.shape, grad.shape, grad.dtype, grad.sparse_dim()


def _step(job: Job, device: torch.device, positions: list[int]) -> None:
    structure: Structure | None = job.memo.get("structure")
    if structure is None:
        structure = job.memo["structure"] = Structure.of(job.update.rule, scalars.plain(job.options))
    numbers: Numbers | None = job.memo.get(f"rows {device}")
    if numbers is None:
        numbers = Numbers([job.items[i] for i in positions], job.options, structure, device)
        if not capturing(device):
            job.memo[f"rows {device}"] = numbers
    keep(numbers, device)
    numbers.stream.follow([numbers.steps])
    sent = numbers.advance(job, _NO_WORDS)
    known: dict[Any, tuple[Tensor, Sorted]] = {}
    for k, i in enumerate(positions):
        item, grad = job.items[i], job.grads[i]
        ids, rows = grad._indices()[0].contiguous(), item.param.shape[0]
        # Tables that are looked up with the same ids, as in a factorization machine, share one sort.
        same = (ids.data_ptr(), len(ids), rows, grad.is_coalesced())
        if same not in known:
            known[same] = ids, Sorted.of(ids, rows, _error(item.param), grad.is_coalesced())
        update_(
            structure,
            item.param,
            item.state,
            known[same][1],
            grad._values(),
            sent.of(k),
            counts=item.counts,
            found_inf=job.found_inf if numbers.stay else None,
            seed=torch.initial_seed() + i if stochastic(job.options) else None,
        )


_NO_WORDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Sorted:
    """Row ids in ascending order; among equal ones, those that came first are first."""

    keys: Tensor
    """The ids; one that is no row of the table became `rows`, and comes last."""
    order: Tensor | None
    """Where each came from; None if they were in order."""
    rows: int

    @classmethod
    def of(cls, ids: Tensor, rows: int, error: Tensor, coalesced: bool = False) -> Sorted:
        """`error` gets a note of an id that is no row. `coalesced` promises that the ids are sorted and distinct."""
        n = len(ids)
        keys = torch.empty(n, dtype=_key_dtype(rows), device=ids.device)
        if n:
            kind = (ids.device, ids.dtype, keys.dtype, rows < 1 << 31, ids.data_ptr() % 16, error.data_ptr() % 16)
            _make_keys()((-(-n // 1024), 1, 1), kind, ids, keys, error, n, rows)
        if coalesced:
            return cls(keys, None, rows)
        return cls(*torch.sort(keys, stable=True), rows)


@cache
def _make_keys() -> Launch:
    from ..kernels.triton_blocks import make_keys

    return Launch(make_keys, {"BLOCK": 1024})


def update_(
    structure: Structure,
    param: Tensor,
    state: Mapping[str, Tensor],
    ids: Sorted,
    values: Tensor,
    coefficients: Tensor,
    *,
    counts: Tensor | None = None,
    found_inf: Tensor | None = None,
    seed: int | None = None,
) -> None:
    """Update the rows `ids` of `param` and `state` in place with the row gradients `values`; duplicates are summed.

    `coefficients` begins with a row of what `Numbers` sends: the step, then the coefficients in the structure's
    order, in float64 on the device. A `seed` asks for stochastic rounding of a bfloat16 parameter.
    """
    n, rows = len(ids.keys), param.shape[0]
    width = param.numel() // rows if rows else 0
    if n == 0 or width == 0:
        if counts is not None:
            counts[2].add_(param.numel() if found_inf is None else (found_inf.squeeze() == 0) * param.numel())
        return
    values = values.contiguous()
    tensors = [param, *(state[name] for name in structure.buffers)]
    how = _launches(
        structure,
        tuple(x.dtype for x in tensors),
        width,
        counts is not None,
        found_inf is not None,
        ids.order is None,
        seed is not None and param.dtype == torch.bfloat16,
    )
    # All that the kernels' arguments can differ in where the launches are the same.
    kind = (
        param.device,
        rows < 1 << 31,
        ids.keys.dtype,
        values.dtype,
        *[x.data_ptr() % 16 == 0 for x in (values, coefficients, *tensors)],
        None if counts is None else counts.data_ptr() % 16,
        None if found_inf is None else (found_inf.dtype, found_inf.data_ptr() % 16),
        seed is None or abs(seed) < 1 << 31,
    )
    keys, order = ids.keys, ids.keys if ids.order is None else ids.order
    tiles, across = how.cut.grid(n, width)
    partials = torch.empty((tiles, 2, width), dtype=how.work, device=param.device)
    shared = (coefficients, counts, found_inf, (seed or 0) & (2**63 - 1), n, rows, width)
    how.rows((tiles, across, 1), kind, *tensors, values, keys, order, partials, *shared)
    if tiles > 1:
        how.seams((tiles - 1, across, 1), kind, *tensors, keys, partials, *shared)


def has_norm(values: Tensor) -> bool:
    """Can `norm` serve row gradients like these?"""
    served = values.is_cuda and values.dtype in TYPES and len(values) <= LONGEST
    return served and lacking(values.device) is None


def norm(ids: Tensor, values: Tensor, rows: int) -> Tensor:
    """The Euclidean norm of row gradients, duplicates summed, in float32 at the least. It stays on the device.

    Ids that are no rows do not count. The result is the same in every run.
    """
    n, width = values.shape
    device, work = values.device, torch.promote_types(values.dtype, torch.float32)
    if n == 0 or width == 0:
        return torch.zeros((), dtype=work, device=device)
    found = Sorted.of(ids.contiguous(), rows, torch.empty(2, dtype=torch.int64, device=device))
    keys, order, values = found.keys, found.order, values.contiguous()
    cut = Cut.of(width)
    tiles, across = cut.grid(n, width)
    within, over = _square_launches(work, cut)
    kind = (device, rows < 1 << 31, keys.dtype, values.dtype, values.data_ptr() % 16 == 0, width)
    partials = torch.empty((tiles, 2, width), dtype=work, device=device)
    squares = torch.empty(2 * tiles - 1, across, dtype=work, device=device)
    within((tiles, across, 1), kind, values, keys, order, partials, squares, n, rows, width)
    if tiles > 1:
        over((tiles - 1, across, 1), (kind, tiles * across % 4), keys, partials, squares[tiles:], n, rows, width)
    return squares.sum().sqrt()


@dataclass(frozen=True)
class Cut:
    """How the work is cut into tiles: so many sorted ids times so many columns each."""

    tile: int
    columns: int

    @classmethod
    def of(cls, width: int) -> Cut:
        columns = min(COLUMNS, 1 << (width - 1).bit_length())
        return cls(ELEMENTS // columns, columns)

    def grid(self, n: int, width: int) -> tuple[int, int]:
        return -(-n // self.tile), -(-width // self.columns)

    @property
    def constants(self) -> dict[str, int]:
        return {"TILE": self.tile, "COLUMNS": self.columns}

    @property
    def warps(self) -> int:
        """Of the kernel that sums over tiles, which has one row to do."""
        return 1 if self.columns <= 16 else 4


@cache
def _square_launches(work: torch.dtype, cut: Cut) -> tuple[Launch, Launch]:
    from ..kernels.triton_blocks import row_squares, seam_squares

    kind = {"WORK": triton_type(work)}
    return (
        Launch(row_squares, {**kind, "ORDERED": False, **cut.constants}),
        Launch(seam_squares, {**kind, **cut.constants, "SPAN": SPAN}, cut.warps),
    )


@dataclass(frozen=True)
class Launches:
    """The two launches of one update, and how they cut the work."""

    work: torch.dtype
    cut: Cut
    rows: Launch
    seams: Launch


@cache
def _launches(
    structure: Structure,
    dtypes: tuple[torch.dtype, ...],
    width: int,
    counted: bool,
    guarded: bool,
    ordered: bool,
    randomly: bool,
) -> Launches:
    work = torch.float32
    for dtype in dtypes:
        work = torch.promote_types(work, dtype)
    cut = Cut.of(width)
    flags = {"COUNT": counted, "GUARD": guarded, "STOCHASTIC": randomly}
    before = {"WORK": triton_type(work)}
    return Launches(
        work,
        cut,
        Launch(kernel(structure, "rows"), {**before, "ORDERED": ordered, **flags, **cut.constants}),
        Launch(kernel(structure, "seams"), {**before, **flags, **cut.constants, "SPAN": SPAN}, cut.warps),
    )


def check_ids(param: Tensor, name: str = "the parameter") -> None:
    """Raise IndexError if a step of this parameter had an id that is no row of it. Does not wait for the device."""
    error = _errors.get(param)
    if error is not None and error[0]:
        bad = int(error[1])
        error.zero_()
        raise IndexError(
            f"{name}: row id {bad} of an earlier step is out of range for {param.shape[0]} rows; "
            "it was left out, the other rows of that step were updated"
        )


def _error(param: Tensor) -> Tensor:
    error = _errors.get(param)
    if error is None:
        error = _errors[param] = torch.zeros(2, dtype=torch.int64, pin_memory=param.device.type == "cuda")
    keep(error, param.device)
    return error


def _key_dtype(rows: int) -> torch.dtype:
    """The narrowest dtype that holds the rows and one more: the narrower, the faster the sort."""
    return torch.int16 if rows < 1 << 15 else torch.int32 if rows < 1 << 31 else torch.int64
