"""Row updates on plain tensors, for those who keep their own embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import engines, options
from .catalog import CAdam
from .memory import filled_like
from .optimizer import Optimizer
from .update import Update


def new_state(table: Tensor, optimizer: type[Optimizer] = CAdam, **given: Any) -> dict[str, Tensor]:
    """The buffers that `update_` needs beside a table: zeros, in float32 at the least."""
    o = {**options.defaults(optimizer.rule), **given, **optimizer.fixed}
    dtype = o["state_dtype"] or torch.promote_types(table.dtype, torch.float32)
    return {name: filled_like(table, start, dtype) for name, start in optimizer.rule.state(o).items()}


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
    """`update_` for a table that is updated again and again: table and state are checked once.

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
        _check_table(table, state, optimizer.rule.state(options))
        if counts is not None and not (counts.dtype == torch.int64 and counts.shape == (3,) and counts.is_contiguous()):
            raise ValueError(f"counts must be three int64 in a row, got {counts.dtype}, shape {tuple(counts.shape)}")
        if counts is not None and counts.device != table.device:
            raise ValueError(f"counts is on {counts.device}, the table on {table.device}")
        self.table, self.state, self.options, self.counts = table, dict(state), options, counts
        self._optimizer = optimizer
        self._item = engines.Item(table, self.state, torch.zeros(()), counts, name)
        self._jobs: dict[tuple[Update, torch.dtype], tuple[engines.Engine, engines.Job]] = {}

    @torch.no_grad()
    def __call__(self, ids: Tensor, grads: Tensor, *, step: int) -> None:
        """Update the rows `ids`, each with its row of `grads`; `step` is counted from 1."""
        _check_rows(self.table, ids, grads, step)
        grad = torch.sparse_coo_tensor(ids.reshape(1, -1), grads, self.table.shape, check_invariants=False)
        update = Update.of(self._optimizer.rule, self._optimizer.confidence, self.options)
        found = self._jobs.get((update, grads.dtype))
        if found is None:
            engine = engines.choose(update, self._item, grad, self.options).engine
            found = engine, engines.Job(update, self.options, [self._item])
            self._jobs[update, grads.dtype] = found
        engine, job = found
        self._item.step.fill_(step - 1)
        job.grads = [grad]
        try:
            engine.check([job])
            engine.run([job])
        finally:
            job.grads = ()


def complete(optimizer: type[Optimizer], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of an optimizer class, some of them given; raises for unknown ones and bad values."""
    known = options.defaults(optimizer.rule)
    for name in given:
        if name not in known:
            raise TypeError(f"update_: {options.unknown(name, known)}")
    o = {**known, **given, **optimizer.fixed}
    options.check(optimizer.rule, o)
    return o


def _check_table(table: Tensor, state: Mapping[str, Tensor], needed: Mapping[str, float]) -> None:
    if not table.is_floating_point() or table.dim() == 0:
        raise ValueError(f"table must have rows of floating-point numbers, got {table.dtype}, {tuple(table.shape)}")
    if set(state) != set(needed):
        raise ValueError(f"state must have {sorted(needed)}, got {sorted(state)} (see new_state)")
    for name, tensor in state.items():
        if tensor.device != table.device:
            raise ValueError(f"{name} is on {tensor.device}, the table on {table.device}")
        if tensor.shape != table.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the table {tuple(table.shape)}")


def _check_rows(table: Tensor, ids: Tensor, grads: Tensor, step: int) -> None:
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
