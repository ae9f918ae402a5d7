"""Row updates in JAX equal those of the torch engine, touch no other rows, and are made in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import cadam
import cadam.jax
from cadam.jax import sparse_update
from tests.jax.jax_cases import LR, NAMES, OF_RULES, alignment, largest_difference
from tests.optim.family import FAMILY

ROWS, WIDTH, STEPS = 9, 4, 20


def batches(seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return ids with duplicates but without the last row, and gradients that are multiples of 1/16."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, ROWS - 1, 6), rng.integers(-16, 17, (6, WIDTH)) / 16) for _ in range(STEPS)]


def jitted(optimizer: Any) -> Any:
    return jax.jit(partial(sparse_update.update, optimizer=optimizer), donate_argnums=(0, 1))


@pytest.mark.parametrize("name", NAMES)
def test_rows_move_as_in_the_torch_engine(name: str) -> None:
    cls = {key.lower(): cls for key, cls in FAMILY.items()}[name]
    start = np.random.default_rng(1).uniform(-1, 1, (ROWS, WIDTH)).astype(np.float32)
    theirs = torch.tensor(start)
    buffers, counts = cadam.optim.sparse_update.new_state(theirs, cls), torch.zeros(3, dtype=torch.int64)
    optimizer = getattr(cadam.jax, name)(LR)
    table = jnp.asarray(start)
    state, step = optimizer.init(table), jitted(optimizer)
    for number, (ids, grads) in enumerate(batches(), 1):
        counts.zero_()
        given = torch.tensor(ids), torch.tensor(grads, dtype=torch.float32)
        cadam.optim.sparse_update.update_(theirs, buffers, *given, step=number, optimizer=cls, counts=counts, lr=LR)
        table, state = step(table, state, jnp.asarray(ids), jnp.asarray(grads, jnp.float32))
        assert alignment(state) == pytest.approx(int(counts[0]) / int(counts[1]), rel=1e-6)
    assert largest_difference(table, theirs.numpy()) < 1e-6
    for buffer, value in optax.tree_utils.tree_get(state, "moments").items():
        assert largest_difference(value, buffers[buffer].numpy()) < 1e-6
    assert jnp.array_equal(table[-1], start[-1])  # this row was never looked up


@pytest.mark.parametrize("name", OF_RULES)
def test_every_row_with_one_gradient_is_a_dense_step(name: str) -> None:
    optimizer = getattr(cadam.jax, name)(LR, weight_decay=0.1)
    rng = np.random.default_rng(2)
    table = dense = jnp.asarray(rng.uniform(-1, 1, (ROWS, WIDTH)), jnp.float32)
    state = of_dense = optimizer.init(table)
    for _ in range(3):
        grads = jnp.asarray(rng.integers(-16, 17, (ROWS, WIDTH)) / 16, jnp.float32)
        order = rng.permutation(ROWS)
        table, state = sparse_update.update(table, state, jnp.asarray(order), grads[order], optimizer=optimizer)
        updates, of_dense = optimizer.update(grads, of_dense, dense)
        dense = optax.apply_updates(dense, updates)
    for ours, theirs in zip(*map(jax.tree.leaves, ((table, state), (dense, of_dense))), strict=True):
        assert largest_difference(ours, theirs) < 1e-7


def test_ids_outside_of_the_table_are_ignored() -> None:
    table = jnp.ones((4, 2))
    state = sparse_update.DEFAULT_OPTIMIZER.init(table)
    padded = sparse_update.update(table, state, jnp.array([-1, 2, 4, 2, 99]), jnp.ones((5, 2)))
    alone = sparse_update.update(table, state, jnp.array([2, 2]), jnp.ones((2, 2)))
    for ours, theirs in zip(*map(jax.tree.leaves, (padded, alone)), strict=True):
        assert jnp.array_equal(ours, theirs)
    assert alignment(padded[1]) == 1
    assert jnp.array_equal(padded[0][jnp.array([0, 1, 3])], jnp.ones((3, 2)))


@pytest.mark.parametrize("many", [5, 1000])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "uint64"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_ids_of_any_integer_dtype_update_only_their_rows(dtype: str, many: int, array: Any) -> None:
    """Ids beyond the table, and numbers of rows beyond the range of the dtype, do not wrap around to other rows."""
    table = jnp.ones((many, 2))
    past = np.iinfo(dtype).max if array is np.asarray else min(np.iinfo(dtype).max, 2**32 - 1)
    numbers = np.array([3, 1, 3, 3, 1, past] + [past - 1] * 300, dtype)
    ids = array(numbers)
    after, state = sparse_update.update(
        table, sparse_update.DEFAULT_OPTIMIZER.init(table), ids, jnp.ones((len(ids), 2))
    )
    moved = np.flatnonzero(np.any(np.asarray(after) != 1, axis=1))
    assert set(moved) == {int(i) for i in np.asarray(ids) if 0 <= i < many}
    moment = np.asarray(optax.tree_utils.tree_get(state, "exp_avg"))
    assert set(np.flatnonzero(np.any(moment != 0, axis=1))) == set(moved)


def test_a_numpy_id_beyond_32_bits_is_ignored() -> None:
    table = jnp.ones((4, 2))
    after, _ = sparse_update.update(
        table, sparse_update.DEFAULT_OPTIMIZER.init(table), np.array([2**32 + 1]), jnp.ones((1, 2))
    )
    assert jnp.array_equal(after, table)


def test_numpy_tables_and_states_give_the_same_results() -> None:
    """A checkpoint contains NumPy arrays, and they are used outside of jit."""
    table, ids, grads = jnp.ones((4, 2)), jnp.array([2, 0]), jnp.ones((2, 2))
    state = sparse_update.DEFAULT_OPTIMIZER.init(table)
    ours = sparse_update.update(*jax.tree.map(np.asarray, (table, state, ids, grads)))
    for one, other in zip(*map(jax.tree.leaves, (ours, sparse_update.update(table, state, ids, grads))), strict=True):
        assert jnp.array_equal(one, other)


def test_a_batch_without_ids_is_a_step_that_moves_nothing() -> None:
    table = jnp.ones((4, 2))
    after, state = sparse_update.update(
        table, sparse_update.DEFAULT_OPTIMIZER.init(table), jnp.zeros(0, jnp.int32), jnp.zeros((0, 2))
    )
    assert jnp.array_equal(after, table)
    assert int(optax.tree_utils.tree_get(state, "RuleState").count) == 1


def test_half_precision_sums_and_updates_in_float32() -> None:
    """In bfloat16, 256 + 1 + 1 would be 256 if the numbers were added one by one."""
    optimizer, table = cadam.jax.csgdm(1.0, momentum=0.0), jnp.zeros((2, 1), jnp.bfloat16)
    grads = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)
    table, _ = sparse_update.update(table, optimizer.init(table), jnp.array([1, 1, 1]), grads, optimizer=optimizer)
    assert table.dtype == jnp.bfloat16
    assert float(table[1, 0]) == -258


def test_donated_tables_are_updated_in_place() -> None:
    """The table is not copied: the memory of an update depends on the size of the batch alone."""
    table = jax.ShapeDtypeStruct((100_000, 16), jnp.float32)
    state = jax.eval_shape(sparse_update.DEFAULT_OPTIMIZER.init, table)
    batch = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    memory = jitted(sparse_update.DEFAULT_OPTIMIZER).lower(table, state, *batch).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * 100_000 * 16 * 4
    assert memory.temp_size_in_bytes < 100_000


def test_other_optax_optimizers_update_only_the_rows_of_a_batch() -> None:
    optimizer, table = optax.adam(0.1), jnp.zeros((3, 2))
    table, state = sparse_update.update(
        table, optimizer.init(table), jnp.array([1, 1]), jnp.ones((2, 2)), optimizer=optimizer
    )
    assert table[1] == pytest.approx(-0.1, rel=1e-5)
    assert not jnp.any(table[jnp.array([0, 2])])
    assert state[0].mu[1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("ids", "grads", "message"),
    [
        (jnp.zeros(2), jnp.ones((2, 2)), "array of integers"),
        (jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 2)), "one-dimensional"),
        (jnp.zeros(2, jnp.int32), jnp.ones((3, 2)), r"shape \(2, 2\), got \(3, 2\)"),
    ],
)
def test_mismatched_tables_ids_and_gradients_are_rejected(ids: Any, grads: Any, message: str) -> None:
    table = jnp.ones((4, 2))
    with pytest.raises(ValueError, match=message):
        sparse_update.update(table, sparse_update.DEFAULT_OPTIMIZER.init(table), ids, grads)


# Records of rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cadam", "camsgrad", "csgdm", "clion", "cradam", "cyogi", "cadabelief"])
def test_exact_updates_have_the_result_of_dense_gradients_in_float64(name: str) -> None:
    with jax.enable_x64(True):
        optimizer = getattr(cadam.jax, name)(optax.exponential_decay(0.03, 5, 0.9))
        table = dense = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (ROWS, WIDTH)))
        state, step = sparse_update.init(table, optimizer, sparse_updates="exact"), jitted(optimizer)
        of_dense = optimizer.init(dense)
        for ids, grads in batches():
            whole = np.zeros((ROWS, WIDTH))
            np.add.at(whole, ids[:2], grads[:2])
            updates, of_dense = optimizer.update(jnp.asarray(whole), of_dense, dense)
            dense = optax.apply_updates(dense, updates)
            table, state = step(jnp.copy(table), state, jnp.asarray(ids[:2]), jnp.asarray(grads[:2]))
        assert largest_difference(table, dense) < 1e-12


def test_one_exact_float32_step_from_the_same_state_agrees_to_rounding() -> None:
    """After 3,000 missed steps, results equal those with aged moments computed in float64."""
    optimizer = cadam.jax.cadam(0.03, b1=0.999, b2=0.9999)
    table, ids, grads = jnp.zeros((ROWS, WIDTH)), jnp.array([2]), jnp.full((1, WIDTH), 0.5)
    table, state = sparse_update.update(
        table, sparse_update.init(table, optimizer, sparse_updates="exact"), ids, grads, optimizer=optimizer
    )
    inner = jax.tree.map(lambda x: x + 3000 if x.dtype == jnp.int32 else x, state.optimizer)
    late = state._replace(step=state.step + 3000, optimizer=inner)
    _, late = sparse_update.update(table, late, ids, 0 * grads, optimizer=optimizer)
    found = optax.tree_utils.tree_get(late.optimizer, "moments")
    for buffer, beta, value in (("exp_avg", 0.999, 0.5), ("exp_avg_sq", 0.9999, 0.25)):
        assert found[buffer][2, 0] == pytest.approx((1 - beta) * value * beta**3001, rel=1e-5)


def test_the_mask_begins_as_in_the_torch_engine() -> None:
    start = np.random.default_rng(1).uniform(-1, 1, (ROWS, WIDTH)).astype(np.float32)
    theirs = torch.tensor(start)
    options: dict[str, Any] = {"lr": LR, "confidence_after": 4}
    buffers = cadam.optim.sparse_update.new_state(theirs, **options)
    optimizer = cadam.jax.cadam(LR)
    table = jnp.asarray(start)
    state, step = sparse_update.init(table, optimizer, confidence_after=4), jitted(optimizer)
    for number, (ids, grads) in enumerate(batches(), 1):
        given = torch.tensor(ids), torch.tensor(grads, dtype=torch.float32)
        cadam.optim.sparse_update.update_(theirs, buffers, *given, step=number, **options)
        table, state = step(table, state, jnp.asarray(ids), jnp.asarray(grads, jnp.float32))
    assert largest_difference(table, theirs.numpy()) < 1e-6
    assert state.updates.tolist() == buffers["row_steps"].flatten().tolist()


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (cadam.jax.adam(LR), {"sparse_updates": "exact"}, "needs confidence=True"),
        (cadam.jax.cadam(LR, weight_decay=0.1), {"sparse_updates": "exact"}, "needs weight_decay=0"),
        (cadam.jax.cadabelief(LR, b1=0.9, b2=0.81), {"sparse_updates": "exact"}, "must differ"),
        (optax.adam(LR), {"sparse_updates": "exact"}, "an optimizer of cadam.jax"),
        (cadam.jax.adam(LR), {"confidence_after": 3}, "an optimizer with confidence"),
        (cadam.jax.cadam(LR), {"confidence_after": 3, "sparse_updates": "exact"}, "does not support confidence_after"),
        (cadam.jax.cadam(LR), {"confidence_after": -1}, "an integer from 0"),
        (cadam.jax.cadam(LR), {"sparse_updates": "eager"}, "'lazy' or 'exact'"),
    ],
)
def test_records_that_an_optimizer_does_not_support(optimizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_update.init(jnp.ones((ROWS, WIDTH)), optimizer, **options)


def test_a_state_with_records_is_not_converted() -> None:
    state = sparse_update.init(jnp.ones((ROWS, WIDTH)), sparse_updates="exact")
    optimizer = cadam.CAdam([("table", torch.nn.Parameter(torch.ones(ROWS, WIDTH)))])
    with pytest.raises(ValueError, match="cannot be converted"):
        cadam.jax.to_torch(state, optimizer.state_dict())
    with pytest.raises(ValueError, match="cannot be converted"):
        cadam.jax.from_torch(optimizer.state_dict(), state)
