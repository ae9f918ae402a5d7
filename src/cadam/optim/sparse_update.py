"""Sparse updates of plain tensors, for code that keeps its own embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..engines import moment_state
from ..engines.base import Engine, KernelBatch, ParamSlot
from ..engines.cuda.sparse_grad import Bags, RowGrad, check_ids
from ..engines.replay import ReplayController, TrackedContainers
from ..engines.resolved_group import ResolvedGroup
from ..engines.selection import check_requested_engine, choose
from ..engines.sparse_reference import check_step_count
from ..rules import Rule
from ..rules.moment_storage import SEED
from ..rules.sparse_updates import AGING_OPTIONS, aging_options
from .classes import CAdam
from .optimizer import Optimizer

_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


def new_state(table: Tensor, optimizer: type[Optimizer] = CAdam, **options: Any) -> dict[str, Tensor]:
    """Return the optimizer state of a table, for `update_`.

    Quantized moments consist of several tensors; keep all of them. Give each table another `rounding_seed` for
    independent rounding noise. On CUDA several tensors may share one memory; torch.save needs `.contiguous()` copies.

    Args:
        table: The table, with rows first.
        optimizer: The optimizer class.
        options: Options of the optimizer that differ from their defaults. Pass the same ones to `update_`.

    Returns:
        The buffers by name. They start at zero and are at least float32, unless the options say otherwise.

    Raises:
        ValueError: If the options are invalid or do not support this table.
    """
    _check_is_table(table)
    o = complete(optimizer, options)
    refusal = moment_state.storage_refusal(table, o, None)
    if refusal is not None:
        raise ValueError(refusal.reason)
    dtype = torch.promote_types(table.dtype, torch.float32)
    dtype = torch.bfloat16 if o["moments"] == "bfloat16" else o["state_dtype"] or dtype
    state: dict[str, Tensor] = {}
    moment_state.complete_state(state, table, optimizer.rule, o, dtype, rows=True)
    state.pop(AGING_OPTIONS, None)  # `RowUpdate` knows the options
    return state


@torch.no_grad()
def update_(
    table: Tensor,
    state: Mapping[str, Tensor],
    ids: Tensor,
    grads: Tensor,
    *,
    step: int,
    optimizer: type[Optimizer] = CAdam,
    counts: Tensor | None = None,
    **options: Any,
) -> None:
    """Update the rows `ids` of a table in place. No other row is read or written.

    With ``sparse_updates="exact"``, rows make up for the steps that they missed with the options of this call, so the
    options of the rule, such as ``betas``, must be the same in all calls. `RowUpdate` supports changes.

    Args:
        table: The table, with rows first.
        state: Its state, from `new_state`; updated in place.
        ids: Row numbers in any order, one-dimensional. The gradients of repeated ids are summed.
        grads: One row of gradients for each id.
        step: The number of this step, counted from 1; the bias correction depends on it.
        optimizer: The optimizer class.
        counts: An int64 tensor with three elements, to which the numbers of aligned, touched and seen elements are
            added.
        options: Options of the optimizer that differ from their defaults, such as ``lr``.

    Raises:
        ValueError: If a tensor has the wrong shape, dtype or device.
        IndexError: If an id is out of range. On CUDA, the error is raised by a later update of the table.

    Example:
        >>> table = torch.zeros(1000, 16)
        >>> state = cadam.sparse_update.new_state(table)
        >>> ids, grads = torch.tensor([3, 7, 3]), torch.randn(3, 16)
        >>> cadam.sparse_update.update_(table, state, ids, grads, step=1, lr=0.01)
    """
    o = {**complete(optimizer, options), "track_alignment": counts is not None}
    RowUpdate(table, state, optimizer, o, counts=counts)(ids, grads, step=step)


class RowUpdate:
    """A function that updates one table again and again, faster than `update_`.

    Table, state and options are checked once; later calls check only what can change.

    Args:
        table: The table, with rows first.
        state: Its state, from `new_state`; updated in place.
        optimizer: The optimizer class.
        options: All options, from `complete`. Changes of this dict, such as a new learning rate, count from the next
            update on.
        counts: Alignment counters, as for `update_`.
        name: How error messages refer to the table.

    Example:
        >>> update = RowUpdate(table, state, cadam.CAdam, complete(cadam.CAdam, {"lr": 0.01}))
        >>> update(ids, grads, step=1)
    """

    def __init__(
        self,
        table: Tensor,
        state: Mapping[str, Tensor],
        optimizer: type[Optimizer],
        options: Mapping[str, Any],
        *,
        counts: Tensor | None = None,
        name: str = "the table",
    ) -> None:
        _check_table(table, state, optimizer.rule, options)
        if counts is not None and not (counts.dtype == torch.int64 and counts.shape == (3,) and counts.is_contiguous()):
            raise ValueError(
                f"counts must be a contiguous tensor of three int64, got {counts.dtype}, shape {tuple(counts.shape)}"
            )
        if counts is not None and counts.device != table.device:
            raise ValueError(f"counts is on {counts.device}, the table on {table.device}")
        self.table, self.state, self.options, self.counts = table, dict(state), options, counts
        self.name = name
        self._optimizer = optimizer
        self._group = ResolvedGroup.resolve(optimizer.rule, options, label=name)
        self._aging: tuple[float, ...] = ()
        self.adopt_options()
        self._batches: dict[Any, tuple[Engine, KernelBatch]] = {}
        self._takes_bags: dict[torch.dtype, bool] = {}
        self._last: KernelBatch | None = None
        self._replay = ReplayController()
        self._containers = TrackedContainers([options], {}) if type(options) is dict else None

    @torch.no_grad()
    def __call__(self, ids: Tensor, grads: Tensor, *, step: int) -> None:
        """Update the rows `ids`, each with its row of `grads`; `step` is counted from 1."""
        _check_rows(self.table, ids, grads, step)
        self._update(RowGrad(ids, grads.resolve_neg()), step)

    def takes_bags(self, dtype: torch.dtype) -> bool:
        """Whether `pooled` can be used with gradients of this dtype."""
        if dtype not in self._takes_bags:
            engine, _ = self._batch(RowGrad(_NO_IDS, _NO_IDS.to(dtype)))
            self._takes_bags[dtype] = engine.takes_row_grads
        return self._takes_bags[dtype]

    @torch.no_grad()
    def pooled(self, ids: Tensor, bags: Bags, grads: Tensor, *, step: int) -> None:
        """Update the rows `ids` with the gradients of the bags that contain them; `takes_bags` must be True.

        Nothing is checked here: the ids must be rows of the table, and the offsets of the bags must ascend.
        """
        self._update(RowGrad(ids, grads.resolve_neg(), bags), step)

    def _update(self, grad: RowGrad, step: int) -> None:
        recorded = self._replay.ready
        if recorded is not None and recorded.update_rows(grad, step):
            return
        _check_table(self.table, self.state, self._optimizer.rule, self.options)
        engine, batch = self._batch(grad)
        slot = batch.slots[0]
        slot.step.fill_(step - 1)
        if slot.last_steps is not None:
            self._catch_up(step - 1)
        if engine.takes_row_grads:
            check_step_count(slot)
            check_ids(self.table, self.name)
            engine.update(batch, [grad])
            self._record(engine, batch)
            return
        batch.grads = [self._sparse(grad)]
        try:
            engine.check([batch])
            engine.run([batch])
        finally:
            batch.grads = ()

    def adopt_options(self) -> None:
        """Use the present options also for the steps that rows have missed, as after loading a state."""
        if self._group.row_update.ages:
            self._aging = aging_options(self._optimizer.rule, self.options)

    def _catch_up(self, step: int) -> None:
        """Before the options of the rule change, let all rows make up for the steps that they missed."""
        rule = self._optimizer.rule
        aging = aging_options(rule, self._group.numbers)
        if aging != self._aging:
            moment_state.catch_up_in_place(self.state, rule, self._aging, step, self._group.numbers)
            self._aging = aging

    def _record(self, engine: Engine, batch: KernelBatch) -> None:
        """Record the update for replay if the next one is going to be like it."""
        if batch is not self._last:
            self._last, self._replay.ready = batch, None
        containers = self._containers
        if containers is not None:
            self._replay.after_step([(engine, [batch])], lambda: containers)

    def _sparse(self, grad: RowGrad) -> Tensor:
        ids = grad.ids.reshape(1, -1)
        return torch.sparse_coo_tensor(ids, grad.values, self.table.shape, check_invariants=False)

    def _batch(self, grad: RowGrad) -> tuple[Engine, KernelBatch]:
        """Return the engine for a gradient of this type, and a batch with the table and its own step count."""
        rule = self._optimizer.rule
        refreshed = self._group.refresh(self.name)
        if refreshed is None:
            refreshed = ResolvedGroup.resolve(rule, self.options, label=self.name)
            self._batches.clear()
        self._group = refreshed
        key = grad.dtypes, self.table.dtype, self.table.stride()
        if key not in self._batches:
            buffers = {name: self.state[name] for name in rule.state(self.options)}
            storage = moment_state.slot_storage(self.state, rule, self.options)
            slot = ParamSlot(self.table, buffers, _new_step(), self.counts, self.name, **storage)
            example = self._sparse(RowGrad(grad.ids[:0], grad.values.new_empty(0, *self.table.shape[1:])))
            choice = choose(refreshed, slot, example)
            check_requested_engine(refreshed, slot, choice)
            self._batches[key] = choice.engine, KernelBatch(refreshed, [slot])
        engine, batch = self._batches[key]
        batch.group = refreshed
        return engine, batch


def complete(optimizer: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of an optimizer class, with defaults for those that are not passed.

    Raises:
        TypeError: If the class is not an optimizer of this package, or an option is unknown.
        ValueError: If an option has an invalid value.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TypeError(f"optimizer must be an optimizer class of cadam, such as cadam.CAdam, got {optimizer!r}")
    o = optimizer.options_of(**options)
    if o["differentiable"]:
        raise ValueError("differentiable=True: rows are updated in place, which autograd does not support")
    return o


def _new_step() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def _check_is_table(table: Tensor) -> None:
    if not isinstance(table, Tensor):
        raise TypeError(f"table must be a tensor, got {type(table).__name__}")
    if not table.is_floating_point() or table.dim() == 0:
        raise ValueError(f"table must have rows of floating-point numbers, got {table.dtype}, {tuple(table.shape)}")


def _check_table(table: Tensor, state: Mapping[str, Tensor], rule: Rule, o: Mapping[str, Any]) -> None:
    _check_is_table(table)
    shapes = moment_state.state_shapes(table, rule, o)
    if set(state) != set(shapes):
        raise ValueError(
            f"state must have {sorted(shapes)}, got {sorted(state)}: pass the options of new_state here too"
        )
    for name, tensor in state.items():
        if name == SEED:
            continue
        if tensor.device != table.device:
            raise ValueError(f"{name} is on {tensor.device}, the table on {table.device}")
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, the table {tuple(table.shape)}"
                + (f": it must be {tuple(shapes[name])}" if shapes[name] != table.shape else "")
            )


def _check_rows(table: Tensor, ids: Tensor, grads: Tensor, step: int) -> None:
    for name, value in (("ids", ids), ("grads", grads)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"ids must be a one-dimensional int64 tensor, got {ids.dtype}, shape {tuple(ids.shape)}")
    if grads.shape != (len(ids), *table.shape[1:]):
        expected = (len(ids), *table.shape[1:])
        raise ValueError(f"grads must have a row for each id, shape {expected}, got {tuple(grads.shape)}")
    if step < 1:
        raise ValueError(f"step is counted from 1, got {step}")
    for name, tensor in {"ids": ids, "grads": grads}.items():
        if tensor.device != table.device:
            raise ValueError(f"{name} is on {tensor.device}, the table on {table.device}")
