"""The optimizers of cadam.jax against the float64 oracle, also inside the transformations of JAX and optax."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import cadam
import cadam.jax
from cadam.jax import transform
from cadam.jax_arrays import step_coefficients
from cadam.rules import RULES, Rule, Step
from cadam.rules.defaults import defaults
from cadam.rules.update import ScalarFunctions, Update
from tests.jax.jax_cases import (
    LR,
    NAMES,
    OF_RULES,
    RULE_OF,
    alignment,
    arrays,
    followed,
    is_confident,
    is_decoupled,
    largest_difference,
    optimizer,
    rule_of,
    trained,
    variants,
)
from tests.optim.family import FAMILY

FLOAT32, FLOAT64 = 5e-6, 1e-12


# The mathematics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options", "decay"), list(variants()))
def test_200_jitted_steps_agree_with_the_oracle(name: str, options: dict[str, Any], decay: str) -> None:
    run = followed(name, options, decay)
    params, state = trained(optimizer(name, options, decay), *arrays(run))
    assert largest_difference(params, run.param) < FLOAT32
    assert alignment(state) == pytest.approx(run.alignment, abs=1e-6)
    moments = optax.tree_utils.tree_get(state, "moments")
    assert moments.keys() == run.oracle.state.keys()
    for buffer, value in moments.items():
        scale = max(1.0, float(np.abs(run.oracle.state[buffer]).max()))
        assert largest_difference(value, run.oracle.state[buffer]) < FLOAT32 * scale, buffer
    assert int(optax.tree_utils.tree_get(state, "RuleState").count) == len(run.grads)


@pytest.mark.parametrize("name", OF_RULES)
def test_steps_that_are_not_jitted_agree_with_the_oracle(name: str) -> None:
    run = followed(name)
    params, state = trained(optimizer(name, {}), *arrays(run), jit=False)
    assert largest_difference(params, run.param) < FLOAT32
    assert alignment(state) == pytest.approx(run.alignment, abs=1e-6)


@pytest.mark.parametrize(("name", "options", "decay"), [case for case in variants() if "=" in case.id])
def test_float64_agrees_with_the_oracle_to_its_rounding(name: str, options: dict[str, Any], decay: str) -> None:
    run = followed(name, options, decay)
    with jax.enable_x64(True):
        params, state = trained(optimizer(name, options, decay), *arrays(run, jnp.float64))
    assert params.dtype == jnp.float64
    assert largest_difference(params, run.param) < FLOAT64
    assert alignment(state) == pytest.approx(run.alignment, abs=1e-6)


@pytest.mark.parametrize("name", OF_RULES)
def test_bfloat16_is_rounded_once_a_step(name: str) -> None:
    """Each step equals that of a float32 parameter with the same value, rounded; moments are float32."""
    decay = "decoupled" if is_confident(name) else "l2"
    run, tx = followed(name), optimizer(name, {}, decay)
    params, grads = arrays(run, jnp.bfloat16)
    state = tx.init(params)
    step = jax.jit(lambda p, s, g: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, s, p)))
    for grad in grads[:20]:
        wide, of_wide = step(params.astype(jnp.float32), state, grad.astype(jnp.float32))
        params, state = step(params, state, grad)
        assert params.dtype == jnp.bfloat16
        assert jnp.array_equal(params, wide.astype(jnp.bfloat16))
        assert all(map(jnp.array_equal, jax.tree.leaves(state), jax.tree.leaves(of_wide)))
    assert all(m.dtype == jnp.float32 for m in jax.tree.leaves(optax.tree_utils.tree_get(state, "moments")))


@pytest.mark.parametrize(
    ("b2", "given"), [(0.95, "arrays"), (0.999, "numbers"), (0.999, "arrays"), (0.9999, "numbers")]
)
@pytest.mark.parametrize("name", RULES)
def test_coefficients_keep_their_digits(name: str, b2: float, given: str) -> None:
    """In float32, ``1 - 0.9999**t`` would have an error of 1e-4, and RAdam would end its warm-up at another step."""
    rule = RULES[name]
    o = {**defaults(rule), **({"betas": (0.9, b2)} if "betas" in rule.defaults else {}), "lr": -1.0}
    update = Update.of(rule, True, o)
    traced: Any = jax.tree.map(jnp.asarray, o["betas"]) if given == "arrays" and "betas" in o else o.get("betas")
    ours = jax.jit(lambda count: step_coefficients(update, count, {**o, "betas": traced} if "betas" in o else o))
    for t in (1, 2, 4, 5, 6, 7, 100, 1024, 1025, 5000):
        exact = dict(o)
        if given == "arrays" and "betas" in o:
            exact["betas"] = tuple(float(beta) for beta in traced)
        expected = update.coefficients(float(t), exact, ScalarFunctions)
        for key, value in ours(jnp.int32(t)).items():
            tolerance = 1e-3 if name == "radam" and key == "adaptive" and given == "arrays" else 2e-6
            assert float(value) == pytest.approx(expected[key], rel=tolerance), (key, t)


def test_a_nan_shows_in_the_parameter() -> None:
    tx = cadam.jax.cadam(0.1)
    params, grads = jnp.ones(2), jnp.array([[1.0, 1.0], [jnp.nan, 1.0]])
    params, _ = trained(tx, params, grads)
    assert jnp.isnan(params[0])
    assert not jnp.isnan(params[1])


def test_a_user_defined_rule_runs() -> None:
    def update(g: Any, s: Any, c: Any, f: Any) -> Step:
        square = s.square_avg * c.alpha + g * g * c.rest
        return Step(g / (f.sqrt(square / c.seen) + c.eps), g, {"square_avg": square})

    rule = Rule(
        name="rms",
        defaults={"lr": 1e-2, "alpha": 0.5, "eps": 1.0},
        state=lambda o: {"square_avg": 0.0},
        coefficients=lambda t, o, f: {
            "alpha": o["alpha"],
            "rest": 1 - o["alpha"],
            "eps": o["eps"] + (t - t),
            "seen": 1 - o["alpha"] ** t,
        },
        update=update,
    )
    tx = optax.chain(cadam.jax.scale_by_rule(rule, alpha=0.75), optax.scale(-0.5))
    params, state = trained(tx, jnp.zeros(1), jnp.full((1, 1), 2.0))
    assert float(params[0]) == pytest.approx(-0.5 * 2 / 3)
    assert alignment(state) == 1


# Transformations of JAX -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_RULES)
def test_vmap_trains_each_model_as_if_alone(name: str) -> None:
    run, tx = followed(name), optimizer(name, {})
    starts, grads = arrays(run)
    params, state = jax.vmap(lambda p, g: trained(tx, p, g), in_axes=(0, 1))(starts, grads)
    assert largest_difference(params, run.param) < FLOAT32
    assert float(jnp.mean(optax.tree_utils.tree_get(state, "alignment"))) == pytest.approx(run.alignment, abs=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", OF_RULES)
def test_vmap_gives_the_same_bits_in_every_dtype(name: str, dtype: str) -> None:
    run, tx = followed(name, steps=20), optimizer(name, {})
    with jax.enable_x64(dtype == "float64"):
        start, grads = arrays(run, dtype)
        whole, _ = trained(tx, start, grads)
        rows, _ = jax.vmap(lambda p, g: trained(tx, p, g), in_axes=(0, 1))(start, grads)
    assert rows.dtype == whole.dtype == dtype
    assert largest_difference(rows, whole) <= (1e-15 if dtype == "float64" else 0)


@pytest.mark.parametrize("jit", [True, False], ids=["jitted", "not jitted"])
def test_large_leaves_updated_one_after_the_other_give_the_same_results(
    jit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = cadam.jax.cadam(LR)
    grads = {name: jax.random.normal(jax.random.key(i), (3, 4, 40 + i)) for i, name in enumerate("abc")}
    params = jax.tree.map(lambda g: jnp.ones(g.shape[1:]), grads)
    alone = trained(tx, params, grads, jit=jit)
    monkeypatch.setattr(transform, "SEQUENTIAL_SIZE", 164)  # "a" is below this size, and "c" waits for "b"
    waiting = trained(tx, params, grads, jit=jit)
    for ours, theirs in zip(*map(jax.tree.leaves, (waiting, alone)), strict=True):
        assert largest_difference(ours, theirs) < 1e-7
    mapped, _ = jax.vmap(lambda p, g: trained(tx, p, g), in_axes=(0, 1))(params, grads)
    assert all(map(jnp.allclose, jax.tree.leaves(mapped), jax.tree.leaves(alone[0])))
    monkeypatch.setattr(transform, "count_true", lambda aligned: jnp.uint32(2**32 - 1))  # more than any leaf has
    impossible, _ = trained(tx, params, grads, jit=jit)
    assert {name: bool(jnp.isnan(p).all()) for name, p in impossible.items()} == {"a": False, "b": False, "c": True}


@pytest.mark.parametrize("name", OF_RULES)
def test_nested_trees_agree_with_the_oracle(name: str) -> None:
    run = followed(name)
    (start, grads), tx = arrays(run), optimizer(name, {})

    def nested(x: Any) -> Any:
        return {"layer": [{"w": x[..., :1, :]}, (x[..., 1, 0], None)], "rest": x[..., 1, 1:]}

    params, state = trained(tx, nested(start), nested(grads))
    expected = nested(run.param)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    assert all(
        largest_difference(a, e) < FLOAT32 for a, e in zip(*map(jax.tree.leaves, (params, expected)), strict=True)
    )
    assert alignment(state) == pytest.approx(run.alignment, abs=1e-6)


SHARDED = """
import jax, numpy as np, optax, cadam.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.jax.jax_cases import OF_RULES, alignment, arrays, followed, largest_difference, optimizer, trained
assert jax.device_count() == 4
cadam.jax.transform.SEQUENTIAL_SIZE = 1  # leaves are updated one after the other
mesh = Mesh(np.array(jax.devices()), "d")
for name in OF_RULES:
    run = followed(name, steps=20, shape=(2, 64))
    start, grads = arrays(run)
    start = jax.device_put(start, NamedSharding(mesh, PartitionSpec(None, "d")))
    grads = jax.device_put(grads, NamedSharding(mesh, PartitionSpec(None, None, "d")))
    (params, other), state = trained(optimizer(name, {}), (start, start), (grads, grads))
    for each in jax.tree.leaves((params, other, optax.tree_utils.tree_get(state, "moments"))):
        assert len(each.sharding.device_set) == 4 and not each.sharding.is_fully_replicated, name
    assert max(largest_difference(each, run.param) for each in (params, other)) < 5e-6, name
    assert abs(alignment(state) - run.alignment) < 1e-6, name
print("same")
"""


def test_parameters_sharded_over_four_devices_agree_with_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, timeout=300)
    assert done.stdout == "same\n", done.stderr


def test_a_restored_checkpoint_continues_like_an_uninterrupted_run() -> None:
    """The leaves of the result are NumPy arrays, in a tree of the same structure."""
    tx, grads = cadam.jax.cadamw(LR), jax.random.normal(jax.random.key(0), (6, 5))
    stayed, _ = trained(tx, jnp.ones(5), grads)
    carry = trained(tx, jnp.ones(5), grads[:3])
    leaves, tree = jax.tree.flatten(carry)
    params, state = jax.tree.unflatten(tree, [np.asarray(leaf) for leaf in leaves])
    for grad in np.asarray(grads[3:]):
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    assert largest_difference(params, stayed) < 1e-7


def test_a_step_can_be_differentiated() -> None:
    """Meta-learning of learning rates differentiates steps, as with optax."""

    def after(rate: Any, tx: Any) -> Any:
        params, _ = trained(tx(rate), jnp.ones(3), jnp.ones((4, 3)))
        return params.sum()

    for ours, theirs in ((cadam.jax.adam, optax.adam), (cadam.jax.cadam, optax.adam)):
        assert float(jax.grad(after)(0.1, ours)) == pytest.approx(float(jax.grad(after)(0.1, theirs)), rel=1e-5)


GRADS = jax.random.normal(jax.random.key(0), (3, 100))


def test_a_step_can_be_exported() -> None:
    def train(grads: Any) -> Any:
        return trained(cadam.jax.cadam(LR), jnp.ones(100), grads)[0]

    exported = jax.export.export(jax.jit(train))(GRADS)
    assert largest_difference(exported.call(GRADS), train(GRADS)) < 1e-6


@pytest.mark.parametrize("jit", [True, False], ids=["jitted", "not jitted"])
def test_a_state_that_is_not_donated_is_not_changed(jit: bool) -> None:
    tx = cadam.jax.cadam(LR)
    _, state = trained(tx, jnp.ones(100), GRADS)
    before = jax.tree.map(np.array, state)
    update = jax.jit(tx.update) if jit else tx.update
    first, again = update(GRADS[0], state), update(GRADS[0], state)
    assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(before)))
    assert all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(again)))


@pytest.mark.parametrize("jit", [True, False], ids=["jitted", "not jitted"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_moments_on_a_mesh_of_one_device_keep_their_sharding(kind: AxisType, jit: bool) -> None:
    sharding = NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(kind,)), PartitionSpec("x"))
    grads, tx = jax.device_put(GRADS[0], sharding), cadam.jax.cadam(LR)
    _, state = (jax.jit(tx.update) if jit else tx.update)(grads, tx.init(grads))
    moments = jax.tree.leaves(optax.tree_utils.tree_get(state, "moments"))
    assert [moment.sharding for moment in moments] == [sharding] * 2


def test_importing_cadam_jax_does_not_import_torch() -> None:
    code = "import sys, cadam.jax; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# Combination with optax ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_RULES)
def test_in_a_chain(name: str) -> None:
    run = followed(name)
    start, grads = arrays(run)
    tx = optax.chain(optax.clip(1.0), optimizer(name, {}), optax.scale(1.0))
    params, state = trained(tx, start, grads)
    assert largest_difference(params, run.param) < FLOAT32
    assert alignment(state) == pytest.approx(run.alignment, abs=1e-6)


@pytest.mark.parametrize("name", OF_RULES)
def test_in_multi_transform(name: str) -> None:
    run = followed(name)
    start, grads = arrays(run)
    tx = optax.multi_transform({"ours": optimizer(name, {}), "still": optax.set_to_zero()}, {"a": "ours", "b": "still"})
    params, state = trained(tx, {"a": start, "b": start}, {"a": grads, "b": grads})
    assert largest_difference(params["a"], run.param) < FLOAT32
    assert jnp.array_equal(params["b"], start)
    assert alignment(state) == pytest.approx(run.alignment, abs=1e-6)


@pytest.mark.parametrize("name", OF_RULES)
def test_in_inject_hyperparams(name: str) -> None:
    """All options, including betas and momentum, are arrays. A rate that is set in the state takes effect at once."""
    run = followed(name)
    start, grads = arrays(run)
    tx = optax.inject_hyperparams(getattr(cadam.jax, name))(LR, **({"weight_decay": 0.0} if "adamw" in name else {}))
    params, state = trained(tx, start, grads)
    assert largest_difference(params, run.param) < FLOAT32
    assert alignment(state) == pytest.approx(run.alignment, abs=1e-6)
    state.hyperparams["learning_rate"] = jnp.zeros(())
    updates, _ = tx.update(grads[0], state, params)
    assert not jnp.any(updates)


@pytest.mark.parametrize("name", OF_RULES)
def test_in_multi_steps(name: str) -> None:
    """Two gradients make one step, and the step count is the number of steps."""
    run = followed(name)
    start, grads = arrays(run)
    twice = jnp.stack([grads * 2, jnp.zeros_like(grads)], 1).reshape(-1, *start.shape)
    params, state = trained(optax.MultiSteps(optimizer(name, {}), 2), start, twice)
    assert largest_difference(params, run.param) < FLOAT32
    assert alignment(state) == pytest.approx(run.alignment, abs=1e-6)


@pytest.mark.parametrize("name", OF_RULES)
def test_in_apply_if_finite(name: str) -> None:
    """A gradient that is not finite changes nothing."""
    run = followed(name)
    start, grads = arrays(run)
    broken = jnp.concatenate([grads[:7], jnp.full_like(grads[:1], jnp.nan), grads[7:]])
    params, state = trained(optax.apply_if_finite(optimizer(name, {}), 3), start, broken)
    assert largest_difference(params, run.param) < FLOAT32
    assert alignment(state) == pytest.approx(run.alignment, abs=1e-6)


def test_parameters_without_gradients_are_not_counted() -> None:
    """Such parameters are masked ones, those of another optimizer, and None."""
    params = {"a": jnp.ones(2), "b": jnp.ones(6), "c": None}
    grads = {"a": jnp.ones(2), "b": jnp.zeros(6), "c": None}
    for tx in (
        optax.masked(cadam.jax.cadam(LR), {"a": True, "b": False, "c": None}),
        optax.multi_transform({"x": cadam.jax.cadam(LR), "y": optax.sgd(LR)}, {"a": "x", "b": "y", "c": None}),
    ):
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
        assert alignment(state) == 1
    two = optax.multi_transform({"x": cadam.jax.cadam(LR), "y": cadam.jax.clion(LR)}, {"a": "x", "b": "y", "c": None})
    _, state = two.update(grads, two.init(params), params)
    found = optax.tree_utils.tree_get_all_with_path(state, "alignment")
    assert [float(share) for _, share in found] == [1, 0]


def test_a_schedule_and_a_mask_of_the_decay() -> None:
    """Rates are those of optax's schedule, counted from 0. Parameters outside of the mask do not decay."""
    schedule = optax.piecewise_constant_schedule(0.5, {1: 0.5})
    tx = cadam.jax.cadamw(schedule, weight_decay=0.1, mask={"w": True, "b": False})
    params = {"w": jnp.ones(1), "b": jnp.ones(1)}
    params, _ = trained(tx, params, {"w": jnp.zeros((2, 1)), "b": jnp.zeros((2, 1))})
    assert float(params["w"][0]) == pytest.approx((1 - 0.5 * 0.1) * (1 - 0.25 * 0.1))
    assert float(params["b"][0]) == 1


def test_the_first_moment_has_the_dtype_of_mu_dtype() -> None:
    params = jnp.ones(3)
    for tx in (cadam.jax.cadam(LR, mu_dtype=jnp.bfloat16), cadam.jax.csgdm(LR, accumulator_dtype="bfloat16")):
        _, state = trained(tx, params, jnp.ones((2, 3)))
        moments = list(optax.tree_utils.tree_get(state, "moments").values())
        assert [m.dtype for m in moments] == [jnp.bfloat16, jnp.float32][: len(moments)]


def test_parameters_are_not_needed_without_decay() -> None:
    tx = cadam.jax.cadam(0.1)
    updates, _ = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    assert updates == pytest.approx(-0.1, rel=1e-6)


def test_moments_are_trees_like_the_parameters() -> None:
    """tree_map_params of optax, which shardings of a state are derived with, finds the moments."""
    tx, params = cadam.jax.cadam(LR), {"a": jnp.ones(2), "b": jnp.ones(3)}
    named = optax.tree_utils.tree_map_params(tx, lambda _, name: name, tx.init(params), {"a": "x", "b": "y"})
    assert optax.tree_utils.tree_get(named, "moments") == {
        "exp_avg": {"a": "x", "b": "y"},
        "exp_avg_sq": {"a": "x", "b": "y"},
    }


def test_without_tracking_nothing_is_counted() -> None:
    _, state = trained(cadam.jax.cadam(LR, track_alignment=False), jnp.ones(2), jnp.ones((3, 2)))
    assert alignment(state) == 0


@pytest.mark.parametrize("shape", [(), (0,), (5,), (31,), (32,), (3, 40), (33, 16), (2, 64), (70, 1)], ids=str)
def test_every_element_counts_once(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    grads = jnp.asarray(rng.integers(-1, 2, (1, *shape)), jnp.float32)
    _, state = trained(cadam.jax.cadam(LR), jnp.ones(shape), grads)
    assert alignment(state) == pytest.approx(np.count_nonzero(grads) / max(grads.size, 1), rel=1e-6)


# The family ------------------------------------------------------------------------------------------------

CLASSES: dict[str, Any] = {name.lower(): cls for name, cls in FAMILY.items()}


def test_the_family_has_the_names_and_defaults_of_the_torch_classes() -> None:
    assert set(NAMES) == CLASSES.keys()
    assert set(NAMES) <= set(cadam.jax.__all__)
    for name, cls in CLASSES.items():
        assert (RULES[rule_of(name)], is_confident(name)) == (cls.rule, cls.confidence)
        theirs = {k: p.default for k, p in inspect.signature(cls).parameters.items()}
        ours = {k: p.default for k, p in inspect.signature(getattr(cadam.jax, name)).parameters.items()}
        if "betas" in theirs:
            assert (ours["b1"], ours["b2"]) == theirs["betas"], name
        for option in ("eps", "momentum", "dampening", "nesterov", "weight_decay", "track_alignment"):
            assert ours.get(option) == theirs.get(option), (name, option)
        assert ours.get("initial_accumulator_value") == theirs.get("initial_accumulator")
        assert ours.get("decoupled_weight_decay", is_decoupled(name)) == theirs["decoupled_weight_decay"]
    assert RULE_OF.keys() == {name for name in NAMES if not is_confident(name)}


def test_invalid_parameters_and_arguments_are_rejected() -> None:
    with pytest.raises(TypeError, match="real floating-point arrays, got complex64"):
        cadam.jax.cadam(LR).init({"w": jnp.ones(2, jnp.complex64)})
    with pytest.raises(TypeError, match=r"^cadam\(\) got an unexpected keyword argument 'eps_root'"):
        cadam.jax.cadam(LR, eps_root=1e-8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'beta1'; it has betas, eps, amsgrad"):
        cadam.jax.scale_by_rule(RULES["adam"], beta1=0.9)
    with pytest.raises(TypeError, match=r"a rule is needed, such as cadam.rules.RULES\['adam'\], got 'lion'"):
        cadam.jax.scale_by_rule("lion")  # type: ignore[arg-type]
    for rate in (-1e-3, float("nan"), "1e-3"):
        with pytest.raises(
            ValueError, match=f"learning_rate must be a finite number >= 0, or a schedule, got {rate!r}"
        ):
            cadam.jax.cadam(rate)
    with pytest.raises(ValueError, match="Nesterov momentum requires"):
        cadam.jax.csgdm(LR, momentum=0.0, nesterov=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b1": 1.5}, r"beta parameter at index 0: 1.5 \(betas\[0\] must be in \[0, 1\)\)"),
        ({"b2": 1.0}, r"beta parameter at index 1: 1.0"),
        ({"b2": -0.1}, r"beta parameter at index 1: -0.1"),
        ({"eps": -1e-8}, r"epsilon value: -1e-08 \(eps must be a finite number >= 0\)"),
        ({"eps": math.nan}, r"epsilon value: nan"),
    ],
)
def test_numbers_out_of_range_are_rejected_at_construction(options: dict[str, Any], message: str) -> None:
    """The torch classes reject the same numbers."""
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        cadam.jax.cadam(LR, **options)


@pytest.mark.parametrize("name", [name for name in NAMES if "sgdm" not in name])
def test_only_learning_rate_betas_and_eps_are_positional(name: str) -> None:
    """optax has other options in later positions, such as eps_root, so passing these by position would be ambiguous."""
    by_place = [
        p.name for p in inspect.signature(getattr(cadam.jax, name)).parameters.values() if p.kind != p.KEYWORD_ONLY
    ]
    assert by_place == ["learning_rate", "b1", "b2", "eps"][: 3 if "lion" in name else 4]


def test_sgdm_without_a_momentum_is_optax_sgd() -> None:
    grads = jnp.array([[1.0, -2.0], [3.0, 0.5]])
    ours, _ = trained(cadam.jax.sgdm(0.1, momentum=None), jnp.ones(2), grads)
    theirs, _ = trained(optax.sgd(0.1, momentum=None), jnp.ones(2), grads)
    assert largest_difference(ours, theirs) < 1e-7


def test_alignment_of_pure_noise() -> None:
    """The ratio is 1/2 + asin(sqrt(1 - beta1^2)) / pi, as with torch."""
    grads = jax.random.normal(jax.random.key(0), (60, 20_000))
    _, state = trained(cadam.jax.cadam(LR), jnp.zeros(20_000), grads)
    assert alignment(state) == pytest.approx(0.5 + math.asin(math.sqrt(1 - 0.9**2)) / math.pi, abs=0.02)
