"""Sparse updates of embedding tables: only the rows that a batch looked up are read and written.

    optimizer = cadam.jax.cadam(1e-2)
    state = optimizer.init(table)
    step = jax.jit(partial(sparse_update.update, optimizer=optimizer), donate_argnums=(0, 1))
    table, state = step(table, state, ids, grads)

If table and state are donated, XLA updates both in place. By default, the moments of rows that a batch does not contain
stay as they are. `init` makes a state with other options::

    state = sparse_update.init(table, optimizer, sparse_updates="exact")        # the result of dense gradients
    state = sparse_update.init(table, optimizer, confidence_after=1000)         # the mask begins later
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..rules.sparse_updates import SPARSE_UPDATES, check_confidence_after
from .family import cadam
from .transform import RuleState

DEFAULT_OPTIMIZER = cadam(1e-3)


class TableState(NamedTuple):
    """The state of a table whose rows have records, from `init`.

    Attributes:
        optimizer: State of the optimizer.
        step: Number of steps taken, an int32.
        last_steps: Step of each row's last update, if sparse updates are exact, else None.
        updates: Number of updates of each row, if the confidence mask begins later, else None.
        confidence_after: Number of the update of a row with which its mask begins, or None.
    """

    optimizer: Any
    step: jax.Array
    last_steps: jax.Array | None
    updates: jax.Array | None
    confidence_after: jax.Array | None


def init(
    table: jax.Array,
    optimizer: optax.GradientTransformation = DEFAULT_OPTIMIZER,
    *,
    sparse_updates: str = "lazy",
    confidence_after: int = 0,
) -> Any:
    """Return the state of a table for `update`.

    Args:
        table: The parameter, with one row per id.
        optimizer: The optimizer, one of `cadam.jax` unless both options have their defaults.
        sparse_updates: ``"lazy"``: the moments of rows that a batch does not contain stay as they are. ``"exact"``:
            they decay, so that the result is that of dense gradients. It needs confidence, no weight decay, and 4 bytes
            per row.
        confidence_after: Number of the update of a row with which its confidence mask begins; before, the row moves as
            without confidence. It needs 4 bytes per row.

    Returns:
        ``optimizer.init(table)`` with the defaults, else a `TableState`.

    Raises:
        ValueError: If a value is invalid, or the optimizer does not support the options.
    """
    state = optimizer.init(table)
    if sparse_updates not in SPARSE_UPDATES:
        raise ValueError(f"Invalid sparse_updates value: {sparse_updates!r} ('lazy' or 'exact')")
    check_confidence_after(confidence_after)
    is_exact, counts_updates = sparse_updates == "exact", confidence_after > 1
    if not is_exact and not counts_updates:
        return state
    if is_exact and counts_updates:
        raise ValueError(
            "sparse_updates='exact' does not support confidence_after: the dense algorithm moves rows without a mask "
            "in every step"
        )
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, RuleState))
    if not any(isinstance(part, RuleState) for part in parts):
        raise ValueError("sparse_updates='exact' and confidence_after need an optimizer of cadam.jax")
    records = jnp.zeros(table.shape[:1], jnp.int32)
    new_state = TableState(
        state,
        jnp.zeros([], jnp.int32),
        records if is_exact else None,
        records if counts_updates else None,
        jnp.asarray(confidence_after, jnp.int32) if counts_updates else None,
    )
    # Optimizers that do not support the options raise an error, without computing anything.
    no_ids, no_grads = jnp.zeros(0, jnp.int32), jnp.zeros((0, *table.shape[1:]), table.dtype)
    jax.eval_shape(lambda: update(table, new_state, no_ids, no_grads, optimizer=optimizer))
    return new_state


def update(
    table: jax.Array,
    state: Any,
    ids: jax.Array,
    grads: jax.Array,
    *,
    optimizer: optax.GradientTransformation = DEFAULT_OPTIMIZER,
) -> tuple[jax.Array, Any]:
    """Take one step on the rows `ids` of a table. Other rows do not change.

    Their moments do not decay either, unless `init` made the state for exact updates: then moments make up for the
    steps that their row missed when it appears again.

    Bias correction uses the step count of the whole table, as in torch.optim.SparseAdam. The alignment in the state is
    the share of aligned elements among the rows of this batch.

    Args:
        table: The parameter, with one row per id.
        state: ``optimizer.init(table)``, the result of `init`, or the state that the previous update returned.
        ids: Row numbers in any order; the gradients of repeated ids are summed. Ids outside of the table are ignored,
            so a batch can be padded with -1.
        grads: One row of gradient for each id.
        optimizer: The optimizer that created the state: one of `cadam.jax`, or an optax optimizer that treats each
            element separately.

    Returns:
        The new table and the new state.

    Raises:
        ValueError: If table, ids and grads do not have matching shapes and dtypes.
    """
    _check(table, ids, grads)
    table, state = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (table, state))
    rows, count = table.shape[0], len(ids)
    row_grads = grads.astype(jnp.result_type(grads, jnp.float32))
    ids = _signed_ids(ids, rows)
    index = jnp.where((ids >= 0) & (ids < rows), ids, rows)
    if count:
        index, group = jnp.unique(index, size=count, fill_value=rows, return_inverse=True)
        row_grads = jax.ops.segment_sum(row_grads, group, count)
    is_row = index < rows
    by_row = (-1, *[1] * (table.ndim - 1))
    row_grads = jnp.where(is_row.reshape(by_row), row_grads, 0)
    # Unused entries get distinct indices beyond the table, because `unique_indices=True` below requires distinct ones.
    index = jnp.where(is_row, index, rows + jnp.arange(count, dtype=index.dtype))

    def read(x: Any) -> Any:
        return x.at[index].get(mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=True)

    def write(x: Any, values: Any) -> Any:
        return x.at[index].set(values.astype(x.dtype), mode="drop", indices_are_sorted=True, unique_indices=True)

    extra: dict[str, Any] = {"touched": jnp.sum(is_row) * (table.size // max(rows, 1))}
    records = state if isinstance(state, TableState) else None
    if records is not None:
        state, records = records.optimizer, records._replace(step=records.step + 1)
        if records.last_steps is not None:
            extra["missed"] = (records.step - 1 - read(records.last_steps)).reshape(by_row)
            now = jnp.full(count, records.step, jnp.int32)
            records = records._replace(last_steps=write(records.last_steps, now))
        if records.updates is not None:
            updates = read(records.updates) + 1
            extra["is_masked"] = (updates >= records.confidence_after).reshape(by_row)
            records = records._replace(updates=write(records.updates, updates))
    is_like_table = optax.tree_utils.tree_map_params(
        optimizer, lambda _: True, state, transform_non_params=lambda x: jax.tree.map(lambda _: False, x)
    )
    old_state = jax.tree.map(lambda like_table, x: read(x) if like_table else x, is_like_table, state)
    old_rows = read(table)
    steps, new_rows = optax.with_extra_args_support(optimizer).update(row_grads, old_state, old_rows, **extra)
    new_state = jax.tree.map(
        lambda like_table, x, new: write(x, new) if like_table else new, is_like_table, state, new_rows
    )
    new_table = write(table, optax.apply_updates(old_rows, steps))
    return new_table, new_state if records is None else records._replace(optimizer=new_state)


def _signed_ids(ids: Any, rows: int) -> jax.Array:
    """Return ids as signed integers of at least 32 bits, so that numbers beyond the table can be represented."""
    if isinstance(
        ids, np.ndarray
    ):  # without x64, JAX would truncate 64 bits to 32 and an invalid id could become valid
        ids = np.clip(ids.astype(np.int64), -1, rows)
    return jnp.asarray(ids, jnp.int64 if ids.dtype.itemsize == 8 and jax.config.jax_enable_x64 else jnp.int32)


def _check(table: Any, ids: Any, grads: Any) -> None:
    if jnp.ndim(table) == 0 or not jnp.issubdtype(table.dtype, jnp.floating):
        raise ValueError(f"table must have rows of floating-point numbers, got {table.dtype}, {jnp.shape(table)}")
    if jnp.ndim(ids) != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"ids must be a one-dimensional array of integers, got {ids.dtype}, shape {jnp.shape(ids)}")
    if jnp.shape(grads) != (len(ids), *table.shape[1:]):
        expected = (len(ids), *table.shape[1:])
        raise ValueError(f"grads must have a row for each id, shape {expected}, got {jnp.shape(grads)}")
