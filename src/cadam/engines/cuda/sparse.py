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
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...codegen.kernel_spec import KernelSpec
from ...rules.update import ScalarFunctions
from .. import row_layout
from ..base import KernelBatch, ParamSlot, Refusal, capturing
from ..moment_state import has_row_moments
from ..resolved_group import ResolvedGroup
from .launch import (
    TYPES,
    CudaEngine,
    Launch,
    StepNumbers,
    Stream,
    begins_early,
    keep,
    kernel,
    kernel_refusal,
    mark_in_use,
    missing_requirement,
    overflowed,
    stochastic,
    storage_refusal,
    triton_type,
)

ELEMENTS = 1024  # of one tile, as a rule: sorted ids times columns
COLUMNS = 128  # at most, of one tile
WIDEST = 1024  # columns of rows that share something, which are all in one tile
WIDE = 64  # columns of rows that have tiles of their own where moments are coded or shared
SPAN = 32  # tiles whose parts of a row are added at a time
KEYS = 1024  # ids that one program makes keys of
LONGEST = 1 << 30  # ids in one gradient


class Tile(NamedTuple):
    """What one program does, and with what."""

    elements: int
    warps: int = 4
    registers: int = 80
    """More would leave room for fewer programs at a time."""
    parts: int = 1
    """Of a row, of which a thread has four columns each: the more, the less is done twice."""

    @classmethod
    def of(cls, spec: KernelSpec, width: int, distinct: bool) -> Tile:
        if not spec.storages or width < WIDE:
            return cls(ELEMENTS)
        if not distinct:
            return cls(2048, registers=96, parts=4)
        return cls(1024, 2, registers=128, parts=2) if "int8" in spec.storages else cls(ELEMENTS)


# By parameter, memory of the host that the kernels see (was there a bad id, and which?) and the streams that use it.
_errors: MutableMapping[Tensor, tuple[Tensor, set[int]]] = WeakTensorKeyDictionary()


class CudaRows(CudaEngine):
    name = "cuda-rows"
    sparse = True
    takes_row_grads = True

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        width = slot.param.shape[1:].numel()
        if width > WIDEST:
            return Refusal.unsupported(
                f"has {slot.storage} for rows of up to {WIDEST} elements, and these have {width}"
            )
        return storage_refusal(slot, rows=True)

    def input_refusal(self, group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Refusal | None:
        assert grad is not None
        if grad.sparse_dim() != 1:
            return Refusal.unsupported(
                f"serves gradients with one sparse dimension, and this one has {grad.sparse_dim()}"
            )
        if grad.dtype not in TYPES:
            return Refusal.unsupported(f"has no kernels for gradients in {grad.dtype}")
        if not slot.param.is_contiguous():
            return Refusal.unsupported("the parameter is not contiguous")
        if grad._nnz() > LONGEST:
            return Refusal.unsupported(f"serves up to {LONGEST} ids at a time")
        if slot.row_steps is not None and StepTable.settled(group) is None:
            return Refusal.unsupported(
                f"has row_steps=True for coefficients that do not change after {StepTable.LONGEST:,} steps"
            )
        return kernel_refusal(group, slot, rows=True)

    def check(self, jobs: Sequence[KernelBatch]) -> None:
        for job in jobs:
            for slot in job.slots:
                check_ids(slot.param, slot.name)

    def run(self, jobs: Sequence[KernelBatch]) -> None:
        for job in jobs:
            if overflowed(job):
                continue
            self.update(job, [RowGrad.of(grad) for grad in job.grads])

    def update(self, job: KernelBatch, grads: Sequence[RowGrad]) -> None:
        """Count the step of every slot and update it, with these gradients."""
        batches: list[RowBatch] = job.memo.get(self.name) or RowBatch.split(job, [grad.dtypes for grad in grads])
        for batch in batches:
            with Stream.on(batch.device):
                _step(job, batch, grads)
        if not capturing(batches[0].device):
            job.memo[self.name] = batches


@dataclass
class RowBatch:
    """The tables of a job that are on one device."""

    positions: list[int]
    """Which of the job's slots they are."""
    slots: list[ParamSlot]
    specs: list[KernelSpec]
    """Of each table: they may share moments by row or not."""
    numbers: StepNumbers
    by_step: StepTable | None
    """Where rows count their own steps."""
    dtypes: list[tuple[torch.dtype, ...]]
    """Of each gradient: of its values, its ids and, if these are in bags, the offsets of these."""

    @classmethod
    def split(cls, job: KernelBatch, dtypes: Sequence[tuple[torch.dtype, ...]]) -> list[RowBatch]:
        by_device: dict[torch.device, list[int]] = {}
        for i, slot in enumerate(job.slots):
            by_device.setdefault(slot.param.device, []).append(i)
        batches = []
        for device, positions in by_device.items():
            with Stream.on(device):
                slots = [job.slots[i] for i in positions]
                specs = [_kernel_spec(job.group, slot) for slot in slots]
                numbers = StepNumbers(slots, job.group, specs[0], device)
                by_step = StepTable(device) if specs[0].row_steps else None
            batches.append(cls(positions, slots, specs, numbers, by_step, [dtypes[i] for i in positions]))
        return batches

    @property
    def device(self) -> torch.device:
        return self.slots[0].param.device

    @property
    def params(self) -> list[Tensor]:
        return [slot.param for slot in self.slots]

    @property
    def state(self) -> list[Tensor]:
        """Buffers, step counts and alignment counters of all of them."""
        more = [tensor for slot in self.slots for tensor in (*slot.state.values(), *slot.scales.values(), slot.step)]
        more += [slot.row_steps for slot in self.slots if slot.row_steps is not None]
        return more + [slot.counts for slot in self.slots if slot.counts is not None]


def _kernel_spec(group: ResolvedGroup, slot: ParamSlot) -> KernelSpec:
    """That of a table: it may share second moments by row or, where a row is one element, not."""
    spec = group.sparse_kernel_spec
    if has_row_moments(slot) or "row" not in spec.storages:
        return spec
    return KernelSpec.of(group.update.rule, {**group.numbers, "second_moment": "element"}, rows=True)


class StepTable:
    """The rule's coefficients by step count, on the device: a row for each, until they change no more.

    Row 0 has the number of the last one.
    """

    LONGEST = 1 << 22

    def __init__(self, device: torch.device) -> None:
        self.device, self.rows = device, torch.empty(0, device=device)
        self.known: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def settled(cls, group: ResolvedGroup) -> int | None:
        """From which step on the coefficients stay the same in float32; None if that is too far off."""
        later = cls._numbers(group, 2.0**50)
        for power in range(8, cls.LONGEST.bit_length()):
            if cls._numbers(group, 2.0**power) == later:
                return 1 << power
        return None

    @staticmethod
    def _numbers(group: ResolvedGroup, t: float) -> tuple[float, ...]:
        values = group.update.rule.coefficients(t, group.numbers, ScalarFunctions).values()
        return tuple(np.float32(value).item() for value in values)

    def of(self, group: ResolvedGroup) -> Tensor:
        """The table for these options."""
        known = tuple(self._numbers(group, t) for t in (1.0, 2.0, 1000.0))
        if known != self.known:
            last = self.settled(group) or self.LONGEST
            steps = torch.arange(last + 1, dtype=torch.float64, device=self.device)
            values = group.update.rule.coefficients(steps, group.numbers, ScalarFunctions).values()
            columns = [v if isinstance(v, Tensor) else torch.full_like(steps, v) for v in values]
            self.rows = torch.stack(columns, 1).float()
            self.rows[0, 0] = last
            self.known = known
        return self.rows


def _step(job: KernelBatch, batch: RowBatch, grads: Sequence[RowGrad]) -> None:
    numbers, device = batch.numbers, batch.device
    keep(numbers, device)
    numbers.stream.follow([numbers.steps])
    by_step = None if batch.by_step is None else batch.by_step.of(job.group)
    keep(by_step, device)
    grads = [grads[i].contiguous() for i in batch.positions]
    known: dict[Any, Sorted] = {}
    # The first table waits for its coefficients when it has read its rows: all else must be there before them.
    early = numbers.stay and job.found_inf is None and begins_early(device)
    _sorted(batch.slots[0], grads[0], known)
    sent = numbers.advance(job, _NO_WORDS, early)
    for k, (i, slot, grad) in enumerate(zip(batch.positions, batch.slots, grads, strict=True)):
        row_layout.stay_for_graphs(slot)
        update_(
            batch.specs[k],
            slot.param,
            tensors_of(slot, by_step),
            _sorted(slot, grad, known),
            grad.values,
            sent.of(k),
            counts=slot.counts,
            found_inf=job.found_inf if numbers.stay else None,
            seed=slot.seed if slot.storage else torch.initial_seed() + i if stochastic(job.group) else None,
            randomly=stochastic(job.group),
            early=early and k == 0,
        )
    torch.autograd.graph.increment_version([param for param in batch.params if not param.is_inference()])


def _sorted(slot: ParamSlot, grad: RowGrad, known: dict[Any, Sorted]) -> Sorted:
    """Its ids in order. Tables that are looked up with the same ids, as in a factorization machine, share one sort."""
    ids, rows = grad.ids, len(slot.param)
    same = (ids.data_ptr(), len(ids), rows, grad.distinct)
    if same not in known:
        known[same] = Sorted.of(ids, rows, error_of(slot.param), distinct=grad.distinct, bags=grad.bags)
    return known[same]


def tensors_of(slot: ParamSlot, by_step: Tensor | None = None) -> dict[str, Tensor]:
    """The buffers as kernels call them, their scales and, where rows count their own steps, those and their table."""
    found = {f"s_{name}": buffer for name, buffer in slot.state.items()}
    found |= {f"e_{name}": scales for name, scales in slot.scales.items()}
    if by_step is not None and slot.row_steps is not None:
        found |= {"row_steps": slot.row_steps, "by_step": by_step}
    return found


_NO_WORDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Bags:
    """How ids fall into bags, of which each has one gradient: those of all samples for the first feature come first.

    The gradients are in the order sample by sample, and feature by feature in each.
    """

    offsets: Tensor
    """Where each bag begins among the ids, and where the last one ends."""
    starts: Tensor
    """By feature, the row at which its table begins."""
    batch: int
    """Samples."""
    first: int = 0
    """What the first offset is."""

    @property
    def number(self) -> int:
        return len(self.starts) * self.batch


@dataclass(frozen=True)
class RowGrad:
    """A gradient of some rows: for each id a row of values, or for each bag of ids."""

    ids: Tensor
    values: Tensor
    bags: Bags | None = None
    distinct: bool = False
    """Are the ids sorted and distinct? Then each row is moved as it comes: two of one row would race."""

    @classmethod
    def of(cls, grad: Tensor) -> RowGrad:
        """A sparse gradient."""
        return cls(grad._indices()[0], grad._values(), distinct=grad.is_coalesced())

    def contiguous(self) -> RowGrad:
        return replace(self, ids=self.ids.contiguous(), values=self.values.contiguous())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        more = () if self.bags is None else (self.bags.offsets.dtype,)
        return self.values.dtype, self.ids.dtype, *more


@dataclass(frozen=True)
class Sorted:
    """Row ids in ascending order; among equal ones, those that came first are first."""

    keys: Tensor
    """The ids; one that is no row of the table became `rows`, and comes last, unless there is an `error`."""
    order: Tensor | None
    """Where each came from; None if they were in order, and distinct."""
    rows: int
    sources: Tensor | None = None
    """In the order in which they came, the gradient of each; None if that is the order of the gradients too."""
    error: Tensor | None = None
    """What gets a note of an id that is no row, if nobody has looked yet."""

    @classmethod
    def of(cls, ids: Tensor, rows: int, error: Tensor, *, distinct: bool = False, bags: Bags | None = None) -> Sorted:
        """`error` gets a note of an id that is no row. `distinct` promises that the ids are sorted, too."""
        if distinct and bags is None:
            return cls(ids, None, rows, error=error)
        n, sources = len(ids), None
        keys = torch.empty(n, dtype=key_dtype(rows), device=ids.device)
        if bags is not None:
            sources = torch.empty(n, dtype=torch.int32, device=ids.device)
        if n:
            kind = _keys_kind(ids, rows, error, bags)
            grid = (-(-n // KEYS), 1, 1)
            if bags is None:
                make_keys(False)(grid, kind, ids, keys, error, n, rows)
            else:
                where = (bags.offsets, bags.starts, keys, sources, error, n, rows, bags.number, bags.batch, bags.first)
                make_keys(True)(grid, kind, ids, *where)
        if distinct:
            return cls(keys, None, rows, sources)
        return cls(*torch.sort(keys, stable=True), rows, sources)


@cache
def make_keys(in_bags: bool) -> Launch:
    from . import device_functions

    return Launch(device_functions.make_bag_keys if in_bags else device_functions.make_keys, {"BLOCK": KEYS})


def _keys_kind(ids: Tensor, rows: int, error: Tensor, bags: Bags | None) -> Any:
    """All that the arguments of the kernel that makes the keys can differ in."""
    given = [kind_of(error), kind_of(ids)]
    if bags is not None:
        given += [kind_of(bags.offsets), kind_of(bags.starts)]
    return ids.device, rows, given[0], tuple(given[1:])


def kind_of(x: Tensor) -> tuple[torch.dtype, bool]:
    return x.dtype, x.data_ptr() % 16 == 0


def update_(
    spec: KernelSpec,
    param: Tensor,
    state: Mapping[str, Tensor],
    ids: Sorted,
    values: Tensor,
    coefficients: Tensor,
    *,
    counts: Tensor | None = None,
    found_inf: Tensor | None = None,
    seed: int | None = None,
    randomly: bool = False,
    early: bool = False,
) -> None:
    """Update the rows `ids` of `param` and `state` in place with the row gradients `values`; duplicates are summed.

    `coefficients` begins with a row of what `StepNumbers` sends: the step, then the coefficients in the spec's
    order, in float64 on the device. `state` is what `tensors_of` gives; the `seed` is that of coded moments and of a
    bfloat16 parameter that is rounded `randomly`. `early`: the last kernel on this stream makes the coefficients, lets
    the next one begin and makes nothing else that is read here.
    """
    n, rows = len(ids.keys), param.shape[0]
    width = param.numel() // rows if rows else 0
    if n == 0 or width == 0:
        if counts is not None:
            counts[2].add_(param.numel() if found_inf is None else (found_inf.squeeze() == 0) * param.numel())
        return
    how, kind = launches_for(
        spec,
        param,
        state,
        values.dtype,
        aligned=(values.data_ptr() % 16 == 0, coefficients.data_ptr() % 16 == 0),
        unchecked=None if ids.error is None else ids.keys,
        distinct=ids.order is None,
        in_bags=ids.sources is not None,
        counts=counts,
        found_inf=found_inf,
        seed=seed,
        randomly=randomly,
        early=early,
    )
    tensors = [param, *state.values()]
    keys, order = ids.keys, ids.order
    tiles, across = how.cut.grid(n, width)
    distinct = order is None
    partials = None if distinct else torch.empty((tiles, 2, width), dtype=how.work, device=param.device)
    shared = (coefficients, counts, found_inf, (seed or 0) & (2**63 - 1), n, rows, width)
    how.rows((tiles, across, 1), kind, *tensors, values, keys, order, ids.sources, ids.error, partials, *shared)
    if tiles > 1 and not distinct:
        how.seams((tiles - 1, across, 1), kind, *tensors, keys, partials, *shared)


def launches_for(
    spec: KernelSpec,
    param: Tensor,
    state: Mapping[str, Tensor],
    values: torch.dtype,
    *,
    aligned: tuple[bool, bool] = (True, True),
    unchecked: Tensor | None = None,
    distinct: bool = False,
    in_bags: bool = False,
    counts: Tensor | None = None,
    found_inf: Tensor | None = None,
    seed: int | None = None,
    randomly: bool = False,
    early: bool = False,
) -> tuple[Launches, Any]:
    """The launches for such tensors, and all that their arguments can differ in where the launches are the same.

    `aligned`: do the values and the coefficients lie at multiples of 16 bytes? `unchecked`: ids that serve as keys.
    """
    tensors = [param, *state.values()]
    rows = param.shape[0]
    width = param.numel() // rows
    how = _launches(
        spec,
        tuple(x.dtype for x in tensors),
        width,
        Strides.of(spec, state),
        counts is not None,
        found_inf is not None,
        distinct,
        in_bags,
        randomly and param.dtype == torch.bfloat16,
        early,
    )
    kind = (
        param.device,
        rows < 1 << 31,
        key_dtype(rows) if unchecked is None else kind_of(unchecked),
        values,
        *aligned,
        *[x.data_ptr() % 16 == 0 for x in tensors],
        None if counts is None else counts.data_ptr() % 16,
        None if found_inf is None else (found_inf.dtype, found_inf.data_ptr() % 16),
        seed is None or abs(seed) < 1 << 31,
    )
    return how, kind


def has_norm(values: Tensor) -> bool:
    """Can `norm` serve row gradients like these?"""
    served = values.is_cuda and values.dtype in TYPES and len(values) <= LONGEST
    return served and missing_requirement(values.device) is None


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
    within((tiles, across, 1), kind, values, keys, order, None, partials, squares, n, rows, width)
    if tiles > 1:
        over((tiles - 1, across, 1), (kind, tiles * across % 4), keys, partials, squares[tiles:], n, rows, width)
    return squares.sum().sqrt()


@dataclass(frozen=True)
class Cut:
    """How the work is cut into tiles: so many sorted ids times so many columns each."""

    tile: int
    columns: int
    even: bool
    """Is the width a multiple of the columns?"""

    @classmethod
    def of(cls, width: int, most: int = COLUMNS, elements: int = ELEMENTS) -> Cut:
        columns = min(most, 1 << (width - 1).bit_length())
        return cls(max(1, elements // columns), columns, width % columns == 0)

    def grid(self, n: int, width: int) -> tuple[int, int]:
        return -(-n // self.tile), -(-width // self.columns)

    @property
    def constants(self) -> dict[str, int]:
        return {"TILE": self.tile, "COLUMNS": self.columns, "EVEN": self.even}


@cache
def _square_launches(work: torch.dtype, cut: Cut) -> tuple[Launch, Launch]:
    from .device_functions import row_squares, seam_squares

    kind = {"WORK": triton_type(work)}
    return (
        Launch(row_squares, {**kind, "DISTINCT": False, "IN_BAGS": False, **cut.constants}),
        Launch(seam_squares, {**kind, **cut.constants, "SPAN": SPAN}, seam_warps(cut)),
    )


def seam_warps(cut: Cut, whole: bool = False) -> int:
    """Of the kernel that sums over tiles, which has one row to do, or a part of it unless rows must be `whole`."""
    return 1 if cut.columns <= (64 if whole else 16) else 4


class Strides(NamedTuple):
    """How many elements further the next row begins. All buffers of a kind have the same, see `codes.lie_alike`."""

    codes: int
    scales: int
    shared: int
    by_four: bool
    """Do all codes begin at a multiple of four of them?"""

    @classmethod
    def of(cls, spec: KernelSpec, state: Mapping[str, Tensor]) -> Strides:
        stored = dict(zip(spec.storages, spec.buffers, strict=False))  # one buffer of each kind
        codes = [state[f"s_{name}"] for name in spec.quantized_buffers]
        by_four = all(x.data_ptr() % (4 * x.itemsize) == 0 for x in codes)
        scales = state[f"e_{stored['int8']}"].stride(0) if "int8" in stored else 1
        shared = state[f"s_{stored['row']}"].stride(0) if "row" in stored else 1
        return cls(codes[0].stride(0) if codes else 1, scales, shared, by_four)

    @property
    def constants(self) -> dict[str, int]:
        return {"CODES": self.codes, "SCALES": self.scales, "SHARED": self.shared, "BY_FOUR": self.by_four}


@dataclass(frozen=True)
class Launches:
    """The two launches of one update, and how they cut the work."""

    work: torch.dtype
    cut: Cut
    rows: Launch
    seams: Launch


@cache
def _launches(
    spec: KernelSpec,
    dtypes: tuple[torch.dtype, ...],
    width: int,
    strides: Strides,
    counted: bool,
    guarded: bool,
    distinct: bool,
    in_bags: bool,
    randomly: bool,
    early: bool,
) -> Launches:
    work = torch.float32
    for dtype in dtypes:
        work = torch.promote_types(work, dtype)
    most = WIDEST if spec.storages or spec.row_steps else COLUMNS
    tile = Tile.of(spec, width, distinct)
    cut = Cut.of(width, most, tile.elements)
    flags = {"COUNT": counted, "GUARD": guarded, "STOCHASTIC": randomly}
    before, after = {"WORK": triton_type(work)}, {**cut.constants, **strides.constants}
    return Launches(
        work,
        cut,
        Launch(
            kernel(spec, "rows"),
            {**before, "DISTINCT": distinct, "IN_BAGS": in_bags, "EARLY": early, **flags, **after, "PARTS": tile.parts},
            tile.warps,
            tile.registers,
            early,
        ),
        Launch(
            kernel(spec, "seams"),
            {**before, "EARLY": early, **flags, **after, "SPAN": SPAN},
            seam_warps(cut, bool(spec.storages)),
            early=early,
        ),
    )


def check_ids(param: Tensor, name: str = "the parameter") -> None:
    """Raise IndexError if a step of this parameter had an id that is no row of it. Does not wait for the device."""
    error, _ = _errors.get(param, (None, None))
    if error is not None and error[0]:
        bad = int(error[1])
        error.zero_()
        raise IndexError(
            f"{name}: row id {bad} of an earlier step is out of range for {param.shape[0]} rows; "
            "it was left out, the other rows of that step were updated"
        )


def error_of(param: Tensor) -> Tensor:
    device = param.device
    if param not in _errors:
        error = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        _errors[param] = error, set()
    error, streams = _errors[param]
    keep(error, device)
    if device.type == "cuda" and not capturing(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if stream not in streams:
            mark_in_use(error, device)
            streams.add(stream)
    return error


def key_dtype(rows: int) -> torch.dtype:
    """The narrowest dtype that holds the rows and one more: the narrower, the faster the sort."""
    return torch.int16 if rows < 1 << 15 else torch.int32 if rows < 1 << 31 else torch.int64
