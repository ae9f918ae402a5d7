"""Row updates on plain tensors, for those who keep their own embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..engines import quantization
from ..engines.base import Engine, KernelBatch, ParamSlot, ReplayController, TrackedContainers
from ..engines.cuda.sparse import Bags, RowGrad, check_ids
from ..engines.selection import check_requested_engine, choose
from ..rules import Rule
from ..rules.moment_storage import SEED
from ..rules.update import Update
from .classes import CAdam
from .optimizer import Optimizer

_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


def new_state(table: Tensor, optimizer: type[Optimizer] = CAdam, **given: Any) -> dict[str, Tensor]:
    """The buffers that `update_` needs beside a table: zeros, in float32 at the least unless the options say otherwise.

    Moments that are coded, or shared by a row, have more than one tensor: keep all that this returns. Their rounding
    goes by torch.manual_seed. On CUDA they may lie in one memory, of which torch.save wants `.contiguous()` copies.
    """
    _check_is_table(table)
    o = complete(optimizer, given)
    refusal = quantization.storage_refusal(table, o, None)
    if refusal is not None:
        raise ValueError(refusal.reason)
    dtype = torch.promote_types(table.dtype, torch.float32)
    dtype = torch.bfloat16 if o["moments"] == "bfloat16" else o["state_dtype"] or dtype
    state: dict[str, Tensor] = {}
    quantization.complete(state, table, optimizer.rule, o, dtype, rows=True)
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
    **given: Any,
) -> None:
    """Update the rows of `table` that `ids` name, in place; no other row is read or written.

    Args:
        table: the parameter, rows first.
        state: its buffers by name, as `new_state` makes them; updated in place.
        ids: row numbers, one-dimensional, in any order; repeated ones have their gradients summed.
        grads: a row of gradient for each id.
        step: which step this is, counted from 1 (bias correction goes by it).
        optimizer: a class of the catalogue, or your own.
        counts: an int64 tensor of three, to which aligned, touched and seen elements are added.
        given: the optimizer's options, such as ``lr``.
    """
    o = {**complete(optimizer, given), "track_alignment": counts is not None}
    RowUpdate(table, state, optimizer, o, counts=counts)(ids, grads, step=step)


class RowUpdate:
    """`update_` for a table that is updated again and again: table and state are checked once, later their shapes.

    Args:
        table: as for `update_`.
        state: its buffers, as for `update_`.
        optimizer: a class of the catalogue, or your own.
        options: all its options, as `complete` gives them. They are looked at in every update, as those of a
            parameter group are: a learning rate changed there counts from then on.
        counts: as for `update_`.
        name: how errors call the table.
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
            raise ValueError(f"counts must be three int64 in a row, got {counts.dtype}, shape {tuple(counts.shape)}")
        if counts is not None and counts.device != table.device:
            raise ValueError(f"counts is on {counts.device}, the table on {table.device}")
        self.table, self.state, self.options, self.counts = table, dict(state), options, counts
        self.name = name
        self._optimizer = optimizer
        self._jobs: dict[Any, tuple[Engine, KernelBatch]] = {}
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
        """Can it be given gradients of whole bags, in this dtype?"""
        if dtype not in self._takes_bags:
            engine, _ = self._job(RowGrad(_NO_IDS, _NO_IDS.to(dtype)))
            self._takes_bags[dtype] = engine.takes_row_grads
        return self._takes_bags[dtype]

    @torch.no_grad()
    def pooled(self, ids: Tensor, bags: Bags, grads: Tensor, *, step: int) -> None:
        """Update the rows `ids` with the gradients of the bags that they are in, which `takes_bags` must allow.

        The ids must be rows of their tables, and the offsets of the bags must ascend: here nobody looks.
        """
        self._update(RowGrad(ids, grads.resolve_neg(), bags), step)

    def _update(self, grad: RowGrad, step: int) -> None:
        ready = self._replay.ready
        if ready is not None and ready.update_rows(grad, step):
            return
        _check_table(self.table, self.state, self._optimizer.rule, self.options)
        engine, batch = self._job(grad)
        batch.slots[0].step.fill_(step - 1)
        if engine.takes_row_grads:
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

    def _record(self, engine: Engine, batch: KernelBatch) -> None:
        """Have the next update ready, if it is going to be like this one."""
        if batch is not self._last:
            self._last, self._replay.ready = batch, None
        containers = self._containers
        if containers is not None:
            self._replay.after_step([(engine, [batch])], lambda: containers)

    def _sparse(self, grad: RowGrad) -> Tensor:
        ids = grad.ids.reshape(1, -1)
        return torch.sparse_coo_tensor(ids, grad.values, self.table.shape, check_invariants=False)

    def _job(self, grad: RowGrad) -> tuple[Engine, KernelBatch]:
        """The engine for such a gradient and its batch, with a step count of its own."""
        update = Update.of(self._optimizer.rule, self._optimizer.confidence, self.options)
        kind = update, grad.dtypes, self.table.dtype, self.table.stride()
        if kind not in self._jobs:
            rule = self._optimizer.rule
            buffers = {name: self.state[name] for name in rule.state(self.options)}
            stored = quantization.storage(self.state, rule, self.options)
            slot = ParamSlot(self.table, buffers, _no_steps(), self.counts, self.name, **stored)
            example = self._sparse(RowGrad(grad.ids[:0], grad.values.new_empty(0, *self.table.shape[1:])))
            choice = choose(update, slot, example, self.options)
            check_requested_engine(slot, choice, self.options)
            self._jobs[kind] = choice.engine, KernelBatch(update, self.options, [slot])
        return self._jobs[kind]


def complete(optimizer: type[Optimizer], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of an optimizer class, some of them given; raises for unknown ones and bad values."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TypeError(f"optimizer must be a class of the catalogue, such as cadam.CAdam, got {optimizer!r}")
    o = optimizer.options_of(**given)
    if o["differentiable"]:
        raise ValueError("differentiable=True: rows are updated in place, autograd cannot look through that")
    return o


def _no_steps() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def _check_is_table(table: Tensor) -> None:
    if not isinstance(table, Tensor):
        raise TypeError(f"table must be a tensor, got {type(table).__name__}")
    if not table.is_floating_point() or table.dim() == 0:
        raise ValueError(f"table must have rows of floating-point numbers, got {table.dtype}, {tuple(table.shape)}")


def _check_table(table: Tensor, state: Mapping[str, Tensor], rule: Rule, o: Mapping[str, Any]) -> None:
    _check_is_table(table)
    shapes = quantization.shapes(table, rule, o)
    if set(state) != set(shapes):
        raise ValueError(
            f"state must have {sorted(shapes)}, got {sorted(state)}: give the options of new_state here too"
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
