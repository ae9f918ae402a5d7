"""The C kernels under XLA: that they are called, that they give what XLA alone gives, and where they are not called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import cadam.jax
from cadam.jax import native
from cadam.native import shared_library
from cadam.rules import RULES
from tests.jax.jax_cases import (
    LR,
    OF_RULES,
    alignment,
    arrays,
    followed,
    largest_difference,
    optimizer,
    rule_of,
    trained,
)

pytestmark = pytest.mark.skipif(isinstance(shared_library.package(), str), reason=str(shared_library.package()))

SIZE = 100
GRADS = jax.random.normal(jax.random.key(0), (3, SIZE))


@pytest.fixture(autouse=True)
def all_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of every size go to the kernels."""
    monkeypatch.setattr(native, "LEAST", 1)


def by_xla(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(native, "enabled", False)
        return run()


def calls(tx: Any, params: Any, grads: Any) -> int:
    """How often a step calls C."""
    return jax.jit(tx.update).lower(grads, tx.init(params), params).as_text().count("custom_call @cadam_")


def assert_same(ours: Any, theirs: Any, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """Compilers may fuse a multiplication and an addition or not."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# That they are called --------------------------------------------------------------------------------------


def test_every_rule_is_computed_by_c_whose_step_is_one_of_its_new_moments() -> None:
    assert {name for name in RULES if cadam.jax.explain(RULES[name]) == "C"} == RULES.keys() - {"lion"}
    assert cadam.jax.explain(RULES["lion"]).startswith("XLA: the step of the rule 'lion'")
    for name in OF_RULES:
        assert calls(optimizer(name, {}), GRADS[0], GRADS[0]) == (rule_of(name) != "lion"), name


def test_leaves_that_gain_nothing_are_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    half, params = GRADS[0].astype(jnp.bfloat16), jnp.ones(SIZE)
    assert calls(cadam.jax.cadam(LR), half, half) == 0
    assert calls(cadam.jax.cadam(LR, mu_dtype=jnp.bfloat16), params, params) == 0
    assert calls(cadam.jax.adam(LR, track_alignment=False), params, params) == 0
    assert calls(cadam.jax.cadam(LR, track_alignment=False), params, params) == 1
    monkeypatch.setattr(native, "LEAST", SIZE + 1)
    assert calls(cadam.jax.cadam(LR), params, params) == 0


def test_leaves_go_together_as_far_as_the_cache_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MOST", 60)
    shapes = [(4, 5), (50,), (10,), (), (100,), (3, 4), (40,)]  # 20 | 50 10 | 1 | 100 | 12 40
    params = [jnp.ones(shape) for shape in shapes]
    grads = [jax.random.normal(jax.random.key(i), (5, *shape)) for i, shape in enumerate(shapes)]
    ours = trained(cadam.jax.cadam(LR), params, grads)
    assert calls(cadam.jax.cadam(LR), params, params) == 5
    assert_same(ours, by_xla(lambda: trained(cadam.jax.cadam(LR), params, grads), monkeypatch))


# What they compute -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [True, False], ids=["jitted", "not jitted"])
@pytest.mark.parametrize("name", OF_RULES)
def test_they_agree_with_the_oracle_and_with_xla(name: str, jit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = followed(name, steps=200 if jit else 4)
    ours = trained(optimizer(name, {}), *arrays(run), jit=jit)
    assert largest_difference(ours[0], run.param) < 5e-6
    assert alignment(ours[1]) == pytest.approx(run.alignment, abs=1e-6)
    theirs = by_xla(lambda: trained(optimizer(name, {}), *arrays(run), jit=jit), monkeypatch)
    assert_same(ours, theirs, rtol=1e-5)
    assert alignment(ours[1]) == alignment(theirs[1])


@pytest.mark.parametrize("size", [1, 63, 65, 2**17, 2**17 + 1, 700_001])
def test_every_element_of_a_leaf_is_moved_and_counted_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads and chunks there are."""
    rng = np.random.default_rng(size)
    grads = jnp.asarray(rng.integers(-1, 2, (2, size)), jnp.float32)
    ours = trained(cadam.jax.camsgrad(LR), jnp.ones(size), grads)
    assert_same(ours, by_xla(lambda: trained(cadam.jax.camsgrad(LR), jnp.ones(size), grads), monkeypatch))
    _, first = trained(cadam.jax.cadam(LR), jnp.ones(size), grads[:1])
    assert alignment(first) == pytest.approx(np.count_nonzero(grads[0]) / size, rel=1e-6)


def test_numbers_that_are_not_finite_or_tiny_come_out_as_from_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1e-20, -1e-38, 1e-45, 0.0, -0.0, 3e38])
    grads = jnp.stack([odd, odd[::-1], jnp.ones(9)])
    ours = trained(cadam.jax.cadam(LR), jnp.ones(9), grads)
    assert_same(ours, by_xla(lambda: trained(cadam.jax.cadam(LR), jnp.ones(9), grads), monkeypatch), atol=1e-44)


@pytest.mark.parametrize("jit", [True, False], ids=["jitted", "not jitted"])
def test_a_state_that_is_not_donated_stays_as_it_was(jit: bool) -> None:
    tx = cadam.jax.cadam(LR)
    _, state = trained(tx, jnp.ones(SIZE), GRADS)
    before = jax.tree.map(np.array, state)
    update = jax.jit(tx.update) if jit else tx.update
    first, again = update(GRADS[0], state), update(GRADS[0], state)
    assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(before)))
    assert all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(again)))


def test_a_state_that_is_donated_is_updated_where_it_is() -> None:
    tx = cadam.jax.cadam(LR)

    def places(state: Any) -> list[int]:
        return [m.unsafe_buffer_pointer() for m in jax.tree.leaves(optax.tree_utils.tree_get(state, "moments"))]

    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, grads = jnp.ones(2**16), jnp.ones(2**16)
    state = jax.block_until_ready(tx.init(params))
    before = places(state)
    _, state = jax.jit(step, donate_argnums=(0, 1))(params, state)
    assert places(state) == before


# What JAX and optax do with them ---------------------------------------------------------------------------


def steps(tx: Any, grads: Any = GRADS, params: Any = None) -> tuple[Any, Any]:
    params = jnp.ones(SIZE) if params is None else params
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def moved(rate: Any = LR, grads: Any = GRADS, **options: Any) -> Any:
    return jnp.sum(steps(cadam.jax.cadam(rate, eps=1e-3, **options), grads)[0] ** 2)


RATES, TWO = jnp.array([1e-3, 1e-2]), jnp.stack([GRADS, GRADS * 2])
LABELS = {"a": "ours", "b": "theirs"}

TRANSFORMED: dict[str, Callable[[], Any]] = {
    "grad": lambda: jax.grad(moved, (0, 1))(LR, GRADS),
    "grad of a beta, jitted": lambda: jax.jit(jax.grad(lambda b: moved(b1=b)))(0.9),
    "jvp": lambda: jax.jvp(lambda g: moved(grads=g), (GRADS,), (GRADS,)),
    "second derivative": lambda: jax.grad(jax.grad(lambda s: moved(grads=s * GRADS)))(1.5),
    "vmap over gradients": lambda: jax.vmap(lambda g: steps(cadam.jax.cadam(LR), g))(TWO),
    "vmap over rates, jitted": lambda: jax.jit(jax.vmap(lambda r: steps(cadam.jax.cadam(r))))(RATES),
    "vmap over betas": lambda: jax.vmap(lambda b: steps(cadam.jax.cadam(LR, b1=b)))(jnp.array([0.9, 0.5])),
    "vmap of grad": lambda: jax.vmap(jax.grad(moved))(RATES),
    "grad of vmap": lambda: jax.grad(lambda r: jax.vmap(lambda g: moved(r, g))(TWO).sum())(LR),
    "checkpoint": lambda: jax.grad(jax.checkpoint(lambda g: moved(grads=g)))(GRADS),
    "inject_hyperparams": lambda: steps(optax.inject_hyperparams(cadam.jax.cadam)(LR)),
    "MultiSteps": lambda: steps(optax.MultiSteps(cadam.jax.cadam(LR), 2)),
    "apply_if_finite": lambda: steps(optax.apply_if_finite(cadam.jax.cadam(LR), 3), GRADS.at[1].set(jnp.nan)),
    "multi_transform": lambda: steps(
        optax.multi_transform({"ours": cadam.jax.cadam(LR), "theirs": cadam.jax.csgdm(LR)}, LABELS),
        [{"a": g, "b": -g} for g in GRADS],
        {"a": jnp.ones(SIZE), "b": jnp.ones(SIZE)},
    ),
    "chain and decay": lambda: steps(optax.chain(optax.clip(0.5), cadam.jax.cadam(LR, weight_decay=0.1))),
    "shard_map": lambda: jax.jit(
        jax.shard_map(
            lambda g: steps(cadam.jax.cadam(LR), g),
            mesh=Mesh(np.array(jax.devices()), "x"),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )
    )(GRADS),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_steps_are_those_of_xla(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TRANSFORMED[name]
    assert_same(run(), by_xla(run, monkeypatch), rtol=2e-5)


# Where they are not called ---------------------------------------------------------------------------------


def test_without_the_library_xla_computes_all_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_library, "package", lambda: "there is no compiler")
    native._form.cache_clear()
    native._kernel.cache_clear()
    try:
        assert cadam.jax.explain() == "XLA: there is no compiler"
        assert calls(cadam.jax.cadam(LR), GRADS[0], GRADS[0]) == 0
    finally:
        native._form.cache_clear()
        native._kernel.cache_clear()


def test_switched_off_a_step_can_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "enabled", False)
    assert cadam.jax.explain() == "XLA: cadam.jax.native.enabled is False"
    exported = jax.export.export(jax.jit(lambda g: steps(cadam.jax.cadam(LR), g)[0]))(GRADS)
    assert largest_difference(exported.call(GRADS), np.asarray(steps(cadam.jax.cadam(LR))[0])) < 1e-6


@pytest.mark.parametrize("jit", [True, False], ids=["jitted", "not jitted"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_moments_on_a_mesh_of_one_device_keep_their_sharding(kind: AxisType, jit: bool) -> None:
    """Outside the mesh's context too, where only the arrays know of it."""
    sharding = NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(kind,)), PartitionSpec("x"))
    grads, tx = jax.device_put(GRADS[0], sharding), cadam.jax.cadam(LR)
    _, state = (jax.jit(tx.update) if jit else tx.update)(grads, tx.init(grads))
    moments = jax.tree.leaves(optax.tree_utils.tree_get(state, "moments"))
    assert [moment.sharding for moment in moments] == [sharding] * 2


@pytest.mark.parametrize("dtypes", [("float32", "int32"), ("float64", "float32"), ("float32",)], ids=str)
def test_a_call_that_does_not_fit_is_refused(dtypes: tuple[str, ...]) -> None:
    """A gradient or a buffer of another dtype, or a buffer that is missing, would be read as what it is not."""
    form: Any = native._kernel("sgdm")
    target, kernel = form
    with jax.enable_x64(True):
        given = [jnp.ones(4, dtype) for dtype in dtypes]
        out = [*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[1:]), jax.ShapeDtypeStruct((), jnp.uint32)]
        call = jax.ffi.ffi_call(target, out, input_output_aliases={1: 0} if given[1:] else {})
        with pytest.raises(Exception, match="cadam: XLA calls the C kernels otherwise than they expect"):
            jax.block_until_ready(call(*given, jnp.ones(7, jnp.float32), kernel=np.int64(kernel)))
