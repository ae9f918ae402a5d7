"""Row-sparse updates of embedding tables: only the rows that a batch looked up are read and written.

    optimizer = cadam.jax.cadam(1e-2)
    state = optimizer.init(table)
    step = jax.jit(partial(rows.update, optimizer=optimizer), donate_argnums=(0, 1))
    table, state = step(table, state, ids, grads)

With both donated, the table and its moments are updated in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .family import cadam

DEFAULT = cadam(1e-3)


def update(
    table: jax.Array,
    state: Any,
    ids: jax.Array,
    grads: jax.Array,
    *,
    optimizer: optax.GradientTransformation = DEFAULT,
) -> tuple[jax.Array, Any]:
    """The table and its state after a step on the rows `ids`; no other row moves, decays or ages.

    Bias correction goes by the one step count of the table, as in torch.optim.SparseAdam. The alignment ratio in the
    state is that of the rows touched.

    Args:
        table: the parameter, rows first.
        state: ``optimizer.init(table)``, or what the last update returned.
        ids: row numbers in any order; repeated ones have their gradients summed. Those that are no row of the table
            are left out, so a batch can be padded with -1.
        grads: a row of gradient for each id.
        optimizer: the one that made the state, ``cadam(1e-3)`` by default: of the family, or another of optax's that
            treats elements one by one.
    """
    _check(table, ids, grads)
    table, state = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (table, state))
    rows, many = table.shape[0], len(ids)
    wide = grads.astype(jnp.result_type(grads, jnp.float32))
    ids = _as_numbers(ids, rows)
    where = jnp.where((ids >= 0) & (ids < rows), ids, rows)
    if many:
        where, place = jnp.unique(where, size=many, fill_value=rows, return_inverse=True)
        wide = jax.ops.segment_sum(wide, place, many)
    is_row = where < rows
    wide = jnp.where(is_row.reshape(-1, *[1] * (table.ndim - 1)), wide, 0)
    where = jnp.where(is_row, where, rows + jnp.arange(many, dtype=where.dtype))  # distinct, and out of the table

    def read(x: Any) -> Any:
        return x.at[where].get(mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=True)

    def written(x: Any, values: Any) -> Any:
        return x.at[where].set(values.astype(x.dtype), mode="drop", indices_are_sorted=True, unique_indices=True)

    is_table = optax.tree_utils.tree_map_params(
        optimizer, lambda _: True, state, transform_non_params=lambda x: jax.tree.map(lambda _: False, x)
    )
    old_rows = jax.tree.map(lambda of_table, x: read(x) if of_table else x, is_table, state)
    old = read(table)
    steps, new_rows = optax.with_extra_args_support(optimizer).update(
        wide, old_rows, old, touched=jnp.sum(is_row) * (table.size // max(rows, 1))
    )
    new_state = jax.tree.map(lambda of_table, x, new: written(x, new) if of_table else new, is_table, state, new_rows)
    return written(table, optax.apply_updates(old, steps)), new_state


def _as_numbers(ids: Any, rows: int) -> jax.Array:
    """Ids of 32 bits at the least and signed, so that they count beyond the table. A wrapped one is no row."""
    if isinstance(ids, np.ndarray):  # without x64, JAX would cut 64 bits to 32
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
