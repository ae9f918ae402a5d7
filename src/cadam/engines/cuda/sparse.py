"""The engine for sparse gradients on CUDA: from raw ids and gradient rows to the updated embedding table.

An update has four phases:

1. Sort: a kernel turns the ids into keys, which torch sorts together with their positions. The sort is stable.
2. Segment: the sorted ids are divided into tiles of a fixed number of ids. A segment of equal ids is one row.
3. Reduce: each tile sums the gradient rows of its segments in the order of the ids. So an id with many thousands of
   duplicates takes no longer than as many different ids.
4. Update: a row whose segment lies in one tile is updated at once. The sum of a segment that spans tiles is completed,
   and its row updated, by a second kernel.

Gradients are summed without atomic operations, so the result is the same in every run, whether or not
torch.use_deterministic_algorithms asks for that. The host does not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...codegen.kernel_spec import KernelSpec
from ...rules.sparse_updates import MAX_STEP
from ...rules.update import ScalarFunctions
from .. import row_layout
from ..aging import aging_refusal, aging_table, max_missed
from ..base import KernelBatch, ParamSlot, Refusal, capturing
from ..moment_state import has_row_moments
from ..resolved_group import ResolvedGroup
from ..sparse_reference import check_step_count
from .launch import (
    TYPES,
    CudaEngine,
    Launch,
    StepNumbers,
    Stream,
    keep_for_graphs,
    kernel,
    kernel_refusal,
    missing_requirement,
    overflowed,
    rounds_stochastically,
    storage_refusal,
    supports_early_launch,
    triton_type,
)
from .sparse_grad import MAX_IDS, RowGrad, SortedIds, check_ids, error_of, key_dtype, kind_of

TILE_ELEMENTS = 1024
"""Number of elements of a tile (ids times columns), unless moments are quantized or shared by a row."""
MAX_TILE_COLUMNS = 128
"""Maximum number of columns of a tile, unless kernels need whole rows."""
MAX_ROW_WIDTH = 1024
"""Maximum number of columns if a row must be in one tile, see `KernelSpec.needs_whole_rows`."""
WIDE_ROW = 64
"""Rows with quantized or shared moments have special tiles if they have at least this number of columns."""
SPAN = 32
"""Number of tiles that are summed at once for a segment that spans several tiles."""
MIN_AGING_ROWS = 1 << 17
"""Rows of a table of aging coefficients, unless it needs fewer or more. A recorded step ends when the table grows."""
_NO_WORDS = np.empty(0, np.int64)


class CudaRows(CudaEngine):
    """Sparse gradients on CUDA, by Triton kernels."""

    name = "cuda-rows"
    sparse = True
    takes_row_grads = True

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        """Refuse rows that are too wide for one tile."""
        width = slot.param.shape[1:].numel()
        if width > MAX_ROW_WIDTH:
            return Refusal.unsupported(
                f"has {slot.storage} for rows of up to {MAX_ROW_WIDTH} elements, and these have {width}"
            )
        return storage_refusal(slot, rows=True)

    def input_refusal(self, group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Refusal | None:
        """Refuse gradients with several sparse dimensions, too many ids, or dtypes without kernels."""
        assert grad is not None
        if grad.sparse_dim() != 1:
            return Refusal.unsupported(
                f"serves gradients with one sparse dimension, and this one has {grad.sparse_dim()}"
            )
        if grad.dtype not in TYPES:
            return Refusal.unsupported(f"has no kernels for gradients in {grad.dtype}")
        if not slot.param.is_contiguous():
            return Refusal.unsupported("the parameter is not contiguous")
        width = slot.param.shape[1:].numel()
        if slot.row_updates is not None and width > MAX_ROW_WIDTH:
            return Refusal.unsupported(
                f"has confidence_after for rows of up to {MAX_ROW_WIDTH} elements, and these have {width}"
            )
        if grad._nnz() > MAX_IDS:
            return Refusal.unsupported(f"serves up to {MAX_IDS} ids at a time")
        if slot.row_steps is not None and CoefficientTable.last_step(group) is None:
            return Refusal.unsupported(
                f"has row_steps=True for coefficients that do not change after {CoefficientTable.MAX_STEPS:,} steps"
            )
        return aging_refusal(group, slot) or kernel_refusal(group, slot, rows=True)

    def check(self, jobs: Sequence[KernelBatch]) -> None:
        """Raise IndexError if an earlier step had an invalid id, and OverflowError after too many exact steps."""
        for job in jobs:
            for slot in job.slots:
                check_step_count(slot)
                check_ids(slot.param, slot.name)

    def run(self, jobs: Sequence[KernelBatch]) -> None:
        """Update all batches with their sparse gradients."""
        for job in jobs:
            if overflowed(job):
                continue
            self.update(job, [RowGrad.of(grad) for grad in job.grads])

    def update(self, job: KernelBatch, grads: Sequence[RowGrad]) -> None:
        """Count a step of every slot and update it with these gradients."""
        batches: list[RowBatch] = job.memo.get(self.name) or RowBatch.split(job, [grad.dtypes for grad in grads])
        for batch in batches:
            with Stream.on(batch.device):
                _step(job, batch, grads)
        if not capturing(batches[0].device):
            job.memo[self.name] = batches


@dataclass
class RowBatch:
    """The tables of a job on one device.

    Attributes:
        positions: The positions of the tables among the slots of the job.
        slots: The tables with their state.
        specs: The kernel of each table: rows may share second moments in some tables only.
        numbers: The step counts and coefficients.
        coefficient_table: The coefficients by step count, if rows count their own steps.
        aging_tables: The aging coefficients of exact sparse updates.
        dtypes: The dtypes of each gradient: of its values, its ids and, if there are bags, their offsets.
    """

    positions: list[int]
    slots: list[ParamSlot]
    specs: list[KernelSpec]
    numbers: StepNumbers
    coefficient_table: CoefficientTable | None
    aging_tables: AgingTables
    dtypes: list[tuple[torch.dtype, ...]]

    @classmethod
    def split(cls, job: KernelBatch, dtypes: Sequence[tuple[torch.dtype, ...]]) -> list[RowBatch]:
        """Divide the tables of a job by device."""
        by_device: dict[torch.device, list[int]] = {}
        for i, slot in enumerate(job.slots):
            by_device.setdefault(slot.param.device, []).append(i)
        batches = []
        for device, positions in by_device.items():
            with Stream.on(device):
                slots = [job.slots[i] for i in positions]
                specs = [_kernel_spec(job.group, slot) for slot in slots]
                numbers = StepNumbers(slots, job.group, specs[0], device)
                table = CoefficientTable(device) if specs[0].row_step_coefficients else None
            aging_tables = AgingTables(device)
            batches.append(cls(positions, slots, specs, numbers, table, aging_tables, [dtypes[i] for i in positions]))
        return batches

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return self.slots[0].param.device

    @property
    def params(self) -> list[Tensor]:
        """The tables."""
        return [slot.param for slot in self.slots]

    @property
    def state(self) -> list[Tensor]:
        """Buffers, scales, step counts and alignment counters of all tables."""
        state = [tensor for slot in self.slots for tensor in (*slot.state.values(), *slot.scales.values(), slot.step)]
        state += [slot.row_counts for slot in self.slots if slot.row_counts is not None]
        state += [slot.last_steps for slot in self.slots if slot.last_steps is not None]
        return state + [slot.counts for slot in self.slots if slot.counts is not None]


def _kernel_spec(group: ResolvedGroup, slot: ParamSlot) -> KernelSpec:
    """Return the kernel of a table. A table with one column does not share second moments."""
    spec = group.sparse_kernel_spec
    if has_row_moments(slot) or "row" not in spec.storages:
        return spec
    return KernelSpec.of(group.update.rule, {**group.numbers, "second_moment": "element"}, rows=True)


class CoefficientTable:
    """The coefficients by step count, on the device, for tables whose rows count their own steps.

    They are those of the rule with `row_steps`, and the threshold of the mask with `confidence_after`. There is a row
    for each step count, until the coefficients do not change any more in float32. Row 0 contains the number of the last
    row.
    """

    MAX_STEPS = 1 << 22

    def __init__(self, device: torch.device) -> None:
        self.device, self.rows = device, torch.empty(0, device=device)
        self._samples: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def last_step(cls, group: ResolvedGroup) -> int | None:
        """Return a step after which the coefficients do not change in float32; None if there are too many steps."""
        after = int(group.numbers["confidence_after"])
        if not group.sparse_kernel_spec.row_steps:
            return after
        limit = cls._at(group, 2.0**50)
        for power in range(8, cls.MAX_STEPS.bit_length()):
            if cls._at(group, 2.0**power) == limit:
                return max(1 << power, after)
        return None

    @staticmethod
    def _at(group: ResolvedGroup, step: float) -> tuple[float, ...]:
        values = group.update.rule.coefficients(step, group.numbers, ScalarFunctions).values()
        return tuple(np.float32(value).item() for value in values)

    @staticmethod
    def _columns(group: ResolvedGroup, steps: Tensor) -> list[Tensor]:
        """Return the coefficients of these steps, in the order of the kernel."""
        spec = group.sparse_kernel_spec
        c: dict[str, Any] = dict.fromkeys(spec.row_step_coefficients)
        if spec.row_steps:
            c |= group.update.rule.coefficients(steps, group.numbers, ScalarFunctions)
        if spec.counts_updates:
            c["threshold"] = torch.where(steps < group.numbers["confidence_after"], math.nan, 0.0)
        return [v if isinstance(v, Tensor) else torch.full_like(steps, v) for v in c.values()]

    def of(self, group: ResolvedGroup) -> Tensor:
        """Return the table for these options, which is computed again if samples of it have changed."""
        samples = tuple(self._at(group, step) for step in (1.0, 2.0, 1000.0))
        if samples != self._samples:
            last = self.last_step(group) or self.MAX_STEPS
            steps = torch.arange(last + 1, dtype=torch.float64, device=self.device)
            self.rows = torch.stack(self._columns(group, steps), 1).float()
            self.rows[0, 0] = last
            self._samples = samples
        return self.rows


class AgingTables:
    """The aging coefficients of exact sparse updates on one device, a table for each dtype of the arithmetic.

    Row k + 1 of a table has the coefficients for k missed steps. Row 0 contains the number of the last row.

    Attributes:
        device: The device.
        tables: The tables by dtype.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tables: dict[torch.dtype, Tensor] = {}
        self._sources: dict[torch.dtype, np.ndarray[Any, Any]] = {}

    def of(self, group: ResolvedGroup, slot: ParamSlot, step: float) -> Tensor | None:
        """Return the table for a step of a parameter; None if its sparse updates are lazy."""
        if slot.last_steps is None:
            return None
        dtype = slot.work_dtype
        source = aging_table(group, max(step, MIN_AGING_ROWS), dtype)
        if self._sources.get(dtype) is not source:
            table = np.concatenate([np.full_like(source[:1], len(source)), source])
            self.tables[dtype], self._sources[dtype] = torch.from_numpy(table).to(self.device), source
        return self.tables[dtype]

    def last_step(self, group: ResolvedGroup, slot: ParamSlot) -> int | None:
        """Return the last step for which the present table is large enough; None if sparse updates are lazy."""
        if slot.last_steps is None:
            return None
        rows = len(self._sources[slot.work_dtype])
        most = max_missed(group, slot.work_dtype)
        return MAX_STEP if most is not None and rows > most else rows


def _step(job: KernelBatch, batch: RowBatch, grads: Sequence[RowGrad]) -> None:
    numbers, device = batch.numbers, batch.device
    keep_for_graphs(numbers, device)
    numbers.stream.follow([numbers.steps])
    table = None if batch.coefficient_table is None else batch.coefficient_table.of(job.group)
    keep_for_graphs(table, device)
    grads = [grads[i].contiguous() for i in batch.positions]
    sorted_ids: dict[Any, SortedIds] = {}
    # The first update begins early and waits only for its coefficients, so everything else must be ready before these.
    early = numbers.on_device and job.found_inf is None and supports_early_launch(device)
    _sort(batch.slots[0], grads[0], sorted_ids)
    sent = numbers.advance(job, _NO_WORDS, early)
    steps = numbers.counts
    stochastic = rounds_stochastically(job.group)
    for k, (slot, grad) in enumerate(zip(batch.slots, grads, strict=True)):
        row_layout.stay_for_graphs(slot)
        update_(
            batch.specs[k],
            slot.param,
            tensors_of(slot, table, None if steps is None else batch.aging_tables.of(job.group, slot, float(steps[k]))),
            _sort(slot, grad, sorted_ids),
            grad.values,
            sent.of(k),
            counts=slot.counts,
            found_inf=job.found_inf if numbers.on_device else None,
            seed=slot.seed,
            stochastic=stochastic,
            early=early and k == 0,
        )
    torch.autograd.graph.increment_version([param for param in batch.params if not param.is_inference()])


def _sort(slot: ParamSlot, grad: RowGrad, sorted_ids: dict[Any, SortedIds]) -> SortedIds:
    """Sort the ids of a gradient. Tables with the same ids, as in a factorization machine, share one sort."""
    ids, rows = grad.ids, len(slot.param)
    key = (ids.data_ptr(), len(ids), rows, grad.distinct)
    if key not in sorted_ids:
        sorted_ids[key] = SortedIds.of(ids, rows, error_of(slot.param), distinct=grad.distinct, bags=grad.bags)
    return sorted_ids[key]


def tensors_of(
    slot: ParamSlot, coefficient_table: Tensor | None = None, aging_coefficients: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the state of a table by the kernels' argument names: buffers, scales, and steps of rows."""
    tensors = {f"s_{name}": buffer for name, buffer in slot.state.items()}
    tensors |= {f"e_{name}": scales for name, scales in slot.scales.items()}
    if coefficient_table is not None and slot.row_counts is not None:
        tensors |= {"row_steps": slot.row_counts, "by_step": coefficient_table}
    if aging_coefficients is not None and slot.last_steps is not None:
        tensors |= {"last_steps": slot.last_steps, "by_missed": aging_coefficients}
    return tensors


def update_(
    spec: KernelSpec,
    param: Tensor,
    state: Mapping[str, Tensor],
    ids: SortedIds,
    values: Tensor,
    coefficients: Tensor,
    *,
    counts: Tensor | None = None,
    found_inf: Tensor | None = None,
    seed: int = 0,
    stochastic: bool = False,
    early: bool = False,
) -> None:
    """Update rows of a table and its state in place. The gradients of duplicate ids are summed.

    Args:
        spec: The kernel.
        param: The table.
        state: The state, as `tensors_of` returns it.
        ids: The sorted ids.
        values: The gradient rows.
        coefficients: A tensor on the device that begins with the step and the coefficients in the order of the spec,
            in float64, as `StepNumbers` sends them.
        counts: The alignment counters.
        found_inf: A tensor that is nonzero if a gradient overflowed; then nothing is updated.
        seed: The seed of quantized moments, or of a bfloat16 table that is rounded stochastically.
        stochastic: Whether a bfloat16 table is rounded stochastically.
        early: Whether the previous kernel computes the coefficients and lets this one begin early. It must not write
            anything else that is read here.
    """
    n, rows = len(ids.keys), param.shape[0]
    width = param.numel() // rows if rows else 0
    if n == 0 or width == 0:
        if counts is not None:
            counts[2].add_(param.numel() if found_inf is None else (found_inf.squeeze() == 0) * param.numel())
        return
    launches, kind = find_launches(
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
        stochastic=stochastic,
        early=early,
    )
    tensors = [param, *state.values()]
    tiles, across = launches.tile.grid(n, width)
    distinct = ids.order is None
    partials = None if distinct else torch.empty((tiles, 2, width), dtype=launches.work, device=param.device)
    common = (coefficients, counts, found_inf, seed, n, rows, width)
    gradient = (values, ids.keys, ids.order, ids.sources, ids.error, partials)
    launches.within_tiles((tiles, across, 1), kind, *tensors, *gradient, *common)
    if tiles > 1 and not distinct:
        launches.across_tiles((tiles - 1, across, 1), kind, *tensors, ids.keys, partials, *common)


def find_launches(
    spec: KernelSpec,
    param: Tensor,
    state: Mapping[str, Tensor],
    grad_dtype: torch.dtype,
    *,
    aligned: tuple[bool, bool] = (True, True),
    unchecked: Tensor | None = None,
    distinct: bool = False,
    in_bags: bool = False,
    counts: Tensor | None = None,
    found_inf: Tensor | None = None,
    seed: int = 0,
    stochastic: bool = False,
    early: bool = False,
) -> tuple[SparseLaunches, Any]:
    """Return the launches of an update, and the kind of their arguments (see `Launch`).

    Args:
        spec: The kernel.
        param: The table.
        state: The state, as `tensors_of` returns it.
        grad_dtype: The dtype of the gradient values.
        aligned: Whether the values and the coefficients are aligned to 16 bytes.
        unchecked: Ids that are used as keys without having been checked.
        distinct: Whether the ids are sorted and distinct.
        in_bags: Whether the ids are in bags.
        counts: The alignment counters.
        found_inf: The overflow flag.
        seed: The seed of stochastic rounding.
        stochastic: Whether a bfloat16 table is rounded stochastically.
        early: Whether the kernel begins early.
    """
    tensors = [param, *state.values()]
    rows = param.shape[0]
    launches = _make_launches(
        spec,
        tuple(x.dtype for x in tensors),
        param.numel() // rows,
        RowStrides.of(spec, state),
        counts is not None,
        found_inf is not None,
        distinct,
        in_bags,
        stochastic and param.dtype == torch.bfloat16,
        early,
    )
    kind = (
        param.device,
        rows < 1 << 31,
        key_dtype(rows) if unchecked is None else kind_of(unchecked),
        grad_dtype,
        *aligned,
        *[x.data_ptr() % 16 == 0 for x in tensors],
        None if counts is None else counts.data_ptr() % 16,
        None if found_inf is None else (found_inf.dtype, found_inf.data_ptr() % 16),
        abs(seed) < 1 << 31,
    )
    return launches, kind


# Norm ----------------------------------------------------------------------------------------------------------


def has_norm(values: Tensor) -> bool:
    """Whether `norm` supports sparse gradients with such values."""
    is_supported = values.is_cuda and values.dtype in TYPES and len(values) <= MAX_IDS
    return is_supported and missing_requirement(values.device) is None


def norm(ids: Tensor, values: Tensor, rows: int) -> Tensor:
    """Compute the Euclidean norm of a sparse gradient with duplicate ids summed, without waiting for the device.

    Invalid ids do not count. The result is the same in every run.

    Args:
        ids: The ids.
        values: The gradient rows.
        rows: The number of rows of the table.

    Returns:
        The norm on the device, at least in float32.
    """
    n, width = values.shape
    device, work = values.device, torch.promote_types(values.dtype, torch.float32)
    if n == 0 or width == 0:
        return torch.zeros((), dtype=work, device=device)
    sorted_ids = SortedIds.of(ids.contiguous(), rows, torch.empty(2, dtype=torch.int64, device=device))
    keys, order, values = sorted_ids.keys, sorted_ids.order, values.contiguous()
    tile = TileShape.of(width)
    tiles, across = tile.grid(n, width)
    within, over = _square_launches(work, tile)
    kind = (device, rows < 1 << 31, keys.dtype, values.dtype, values.data_ptr() % 16 == 0, width)
    partials = torch.empty((tiles, 2, width), dtype=work, device=device)
    squares = torch.empty(2 * tiles - 1, across, dtype=work, device=device)
    within((tiles, across, 1), kind, values, keys, order, None, partials, squares, n, rows, width)
    if tiles > 1:
        over((tiles - 1, across, 1), (kind, tiles * across % 4), keys, partials, squares[tiles:], n, rows, width)
    return squares.sum().sqrt()


@cache
def _square_launches(work: torch.dtype, tile: TileShape) -> tuple[Launch, Launch]:
    """Return the kernels that sum the squares of rows within a tile, and of rows that span tiles."""
    from .device_functions import row_squares, spanning_row_squares

    constants = {"WORK": triton_type(work)}
    return (
        Launch(row_squares, {**constants, "DISTINCT": False, "IN_BAGS": False, **tile.constants}),
        Launch(spanning_row_squares, {**constants, **tile.constants, "SPAN": SPAN}, _warps_across_tiles(tile)),
    )


# Launches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileShape:
    """The part of the sorted gradient rows that one program works on.

    Attributes:
        ids: Sorted ids of a tile.
        columns: Columns of a tile, a power of two.
        is_even: Whether the width of a row is a multiple of the columns.
    """

    ids: int
    columns: int
    is_even: bool

    @classmethod
    def of(cls, width: int, max_columns: int = MAX_TILE_COLUMNS, elements: int | None = None) -> TileShape:
        """Choose the tile for rows of this width."""
        columns = min(max_columns, 1 << (width - 1).bit_length())
        return cls(max(1, (elements or TILE_ELEMENTS) // columns), columns, width % columns == 0)

    def grid(self, n: int, width: int) -> tuple[int, int]:
        """Return the number of tiles for n ids, and across the width of a row."""
        return -(-n // self.ids), -(-width // self.columns)

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the kernels."""
        return {"TILE": self.ids, "COLUMNS": self.columns, "EVEN": self.is_even}


class ProgramResources(NamedTuple):
    """The size and the resources of a program."""

    elements: int
    """Elements of a tile."""
    warps: int = 4
    """Warps of a program."""
    registers: int = 80
    """Registers of a thread. With more registers, fewer programs run at the same time."""
    parts: int = 1
    """Groups of four columns that a thread has in a row. More groups mean less repeated work for each row."""

    @classmethod
    def of(cls, spec: KernelSpec, width: int, distinct: bool) -> ProgramResources:
        """Choose the resources for a kernel and rows of this width."""
        if not spec.storages or width < WIDE_ROW:
            return cls(TILE_ELEMENTS)
        if not distinct:
            return cls(2048, registers=96, parts=4)
        return cls(1024, 2, registers=128, parts=2) if "int8" in spec.storages else cls(TILE_ELEMENTS)


class RowStrides(NamedTuple):
    """The distance between two rows, in elements, for each kind of buffer of a table.

    All buffers of a kind have the same distance; `moment_state.has_uniform_row_strides` checks that.
    """

    quantized: int
    """The distance between the rows of quantized buffers."""
    scales: int
    """The distance between the scales of two rows."""
    row_moments: int
    """The distance between the shared moments of two rows."""
    is_aligned: bool
    """Whether all quantized buffers are aligned to four values."""

    @classmethod
    def of(cls, spec: KernelSpec, state: Mapping[str, Tensor]) -> RowStrides:
        """Return the strides of a table's state."""
        buffer_of = dict(zip(spec.storages, spec.buffers, strict=False))  # one buffer for each storage
        quantized = [state[f"s_{name}"] for name in spec.quantized_buffers]
        is_aligned = all(x.data_ptr() % (4 * x.itemsize) == 0 for x in quantized)
        scales = state[f"e_{buffer_of['int8']}"].stride(0) if "int8" in buffer_of else 1
        row_moments = state[f"s_{buffer_of['row']}"].stride(0) if "row" in buffer_of else 1
        return cls(quantized[0].stride(0) if quantized else 1, scales, row_moments, is_aligned)

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the kernels."""
        return {
            "QUANTIZED_STRIDE": self.quantized,
            "SCALES_STRIDE": self.scales,
            "ROW_MOMENT_STRIDE": self.row_moments,
            "ALIGNED_BY_FOUR": self.is_aligned,
        }


@dataclass(frozen=True)
class SparseLaunches:
    """The two launches of an update.

    Attributes:
        work: The dtype of the arithmetic.
        tile: The tiles into which the work is divided.
        within_tiles: Sums gradients, and updates the rows whose ids are in one tile.
        across_tiles: Updates the rows whose ids span tiles.
    """

    work: torch.dtype
    tile: TileShape
    within_tiles: Launch
    across_tiles: Launch


@cache
def _make_launches(
    spec: KernelSpec,
    dtypes: tuple[torch.dtype, ...],
    width: int,
    strides: RowStrides,
    counted: bool,
    guarded: bool,
    distinct: bool,
    in_bags: bool,
    stochastic: bool,
    early: bool,
) -> SparseLaunches:
    work = torch.float32
    for dtype in dtypes:
        work = torch.promote_types(work, dtype)
    resources = ProgramResources.of(spec, width, distinct)
    max_columns = MAX_ROW_WIDTH if spec.needs_whole_rows else MAX_TILE_COLUMNS
    tile = TileShape.of(width, max_columns, resources.elements)
    flags = {"COUNT": counted, "GUARD": guarded, "STOCHASTIC": stochastic}
    before, after = {"WORK": triton_type(work)}, {**tile.constants, **strides.constants}
    gradient = {"DISTINCT": distinct, "IN_BAGS": in_bags}
    return SparseLaunches(
        work,
        tile,
        Launch(
            kernel(spec, "rows"),
            {**before, **gradient, "EARLY": early, **flags, **after, "PARTS": resources.parts},
            resources.warps,
            resources.registers,
            early,
        ),
        Launch(
            kernel(spec, "spanning_rows"),
            {**before, "EARLY": early, **flags, **after, "SPAN": SPAN},
            _warps_across_tiles(tile, bool(spec.storages)),
            early=early,
        ),
    )


def _warps_across_tiles(tile: TileShape, needs_whole_rows: bool = False) -> int:
    """Return the warps of a program that completes one row, or a part of it unless rows must be whole."""
    return 1 if tile.columns <= (64 if needs_whole_rows else 16) else 4
