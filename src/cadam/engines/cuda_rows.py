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
    for k, i in enumerate(positions):
        item, grad = job.items[i], job.grads[i]
        update_(
            structure,
            item.param,
            item.state,
            grad._indices()[0],
            grad._values(),
            sent.of(k),
            counts=item.counts,
            found_inf=job.found_inf if numbers.stay else None,
            coalesced=grad.is_coalesced(),
            seed=torch.initial_seed() + i if stochastic(job.options) else None,
        )


_NO_WORDS = np.empty(0, np.int64)


def update_(
    structure: Structure,
    param: Tensor,
    state: Mapping[str, Tensor],
    ids: Tensor,
    values: Tensor,
    coefficients: Tensor,
    *,
    counts: Tensor | None = None,
    found_inf: Tensor | None = None,
    coalesced: bool = False,
    seed: int | None = None,
) -> None:
    """Update the rows `ids` of `param` and `state` in place with the row gradients `values`; duplicates are summed.

    `coefficients` begins with a row of what `Numbers` sends: the step, then the coefficients in the structure's
    order, in float64 on the device. `coalesced` promises that the ids are sorted and distinct. A `seed` asks for
    stochastic rounding of a bfloat16 parameter.
    """
    n, rows = ids.numel(), param.shape[0]
    width = param.numel() // rows if rows else 0
    if n == 0 or width == 0:
        if counts is not None:
            counts[2].add_(param.numel() if found_inf is None else (found_inf.squeeze() == 0) * param.numel())
        return
    values, ids = values.contiguous(), ids.contiguous()
    tensors = [param, *(state[name] for name in structure.buffers)]
    how = _launches(
        structure,
        tuple(x.dtype for x in tensors),
        _key_dtype(rows),
        width,
        counts is not None,
        found_inf is not None,
        coalesced,
        seed is not None and param.dtype == torch.bfloat16,
    )
    # All that the kernels' arguments can differ in where the launches are the same.
    kind = (
        param.device,
        rows < 1 << 31,
        ids.dtype,
        values.dtype,
        *[x.data_ptr() % 16 == 0 for x in (ids, values, coefficients, *tensors)],
        None if counts is None else counts.data_ptr() % 16,
        None if found_inf is None else (found_inf.dtype, found_inf.data_ptr() % 16),
        seed is None or abs(seed) < 1 << 31,
    )
    keys = torch.empty(n, dtype=how.key_dtype, device=param.device)
    how.make_keys((-(-n // 1024), 1, 1), kind, ids, keys, _error(param), n, rows)
    order = keys
    if not coalesced:
        keys, order = torch.sort(keys, stable=True)
    tiles, across = -(-n // how.tile), -(-width // how.columns)
    partials = torch.empty((tiles, 2, width), dtype=how.work, device=param.device)
    shared = (coefficients, counts, found_inf, (seed or 0) & (2**63 - 1), n, rows, width)
    how.rows((tiles, across, 1), kind, *tensors, values, keys, order, partials, *shared)
    if tiles > 1:
        how.seams((tiles - 1, across, 1), kind, *tensors, keys, partials, *shared)


@dataclass(frozen=True)
class Launches:
    """The three launches of one update, and how they cut the work."""

    key_dtype: torch.dtype
    work: torch.dtype
    columns: int
    tile: int
    make_keys: Launch
    rows: Launch
    seams: Launch


@cache
def _launches(
    structure: Structure,
    dtypes: tuple[torch.dtype, ...],
    key_dtype: torch.dtype,
    width: int,
    counted: bool,
    guarded: bool,
    coalesced: bool,
    randomly: bool,
) -> Launches:
    from ..kernels.triton_blocks import make_keys

    work = torch.float32
    for dtype in dtypes:
        work = torch.promote_types(work, dtype)
    columns = min(COLUMNS, 1 << (width - 1).bit_length())
    tile = ELEMENTS // columns
    shape = {"TILE": tile, "COLUMNS": columns}
    flags = {"COUNT": counted, "GUARD": guarded, "STOCHASTIC": randomly}
    before = {"WORK": triton_type(work)}
    return Launches(
        key_dtype,
        work,
        columns,
        tile,
        Launch(make_keys, {"BLOCK": 1024}),
        Launch(kernel(structure, "rows"), {**before, "ORDERED": coalesced, **flags, **shape}),
        Launch(kernel(structure, "seams"), {**before, **flags, **shape, "SPAN": SPAN}, 1 if columns <= 16 else 4),
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
