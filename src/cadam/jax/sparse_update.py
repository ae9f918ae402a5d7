"""Sparse updates of embedding tables: only the rows that a batch looked up are read and written.

    optimizer = cadam.jax.cadam(1e-2)
    state = optimizer.init(table)
    step = jax.jit(partial(sparse_update.update, optimizer=optimizer), donate_argnums=(0, 1))
    table, state = step(table, state, ids, grads)

If table and state are donated, XLA updates both in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .family import cadam

DEFAULT_OPTIMIZER = cadam(1e-3)


def update(
    table: jax.Array,
    state: Any,
    ids: jax.Array,
    grads: jax.Array,
    *,
    optimizer: optax.GradientTransformation = DEFAULT_OPTIMIZER,
) -> tuple[jax.Array, Any]:
    """Take one step on the rows `ids` of a table. Other rows and their moments do not change, and do not decay.

    Bias correction uses the step count of the whole table, as in torch.optim.SparseAdam. The alignment in the state is
    the share of aligned elements among the rows of this batch.

    Args:
        table: The parameter, with one row per id.
        state: ``optimizer.init(table)``, or the state that the previous update returned.
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
    row_grads = jnp.where(is_row.reshape(-1, *[1] * (table.ndim - 1)), row_grads, 0)
    # Unused entries get distinct indices beyond the table, because `unique_indices=True` below requires distinct ones.
    index = jnp.where(is_row, index, rows + jnp.arange(count, dtype=index.dtype))

    def read(x: Any) -> Any:
        return x.at[index].get(mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=True)

    def write(x: Any, values: Any) -> Any:
        return x.at[index].set(values.astype(x.dtype), mode="drop", indices_are_sorted=True, unique_indices=True)

    is_like_table = optax.tree_utils.tree_map_params(
        optimizer, lambda _: True, state, transform_non_params=lambda x: jax.tree.map(lambda _: False, x)
    )
    old_state = jax.tree.map(lambda like_table, x: read(x) if like_table else x, is_like_table, state)
    old_rows = read(table)
    steps, new_rows = optax.with_extra_args_support(optimizer).update(
        row_grads, old_state, old_rows, touched=jnp.sum(is_row) * (table.size // max(rows, 1))
    )
    new_state = jax.tree.map(
        lambda like_table, x, new: write(x, new) if like_table else new, is_like_table, state, new_rows
    )
    return write(table, optax.apply_updates(old_rows, steps)), new_state


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
