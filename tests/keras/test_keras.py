"""The Keras optimizers on the backend of KERAS_BACKEND, and that all backends agree.

They need Keras, which `make test-keras` installs in a separate environment, and are run on each backend.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.documented import blocks
from tests.optim.oracle import Oracle

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ["JAX_PLATFORMS"] = "cpu"
# The folder of these tests can be imported as a package `keras`, which has no keras.ops.
pytest.importorskip("keras.ops", reason="Keras is not installed: make test-keras")

import keras
from keras import ops

import cadam.keras

ROOT = Path(__file__).parents[2]
LR = 1e-3
NAMES = [name for name in cadam.keras.__all__ if name != "Optimizer"]
BACKENDS = [name for name in ("jax", "torch", "tensorflow") if find_spec(name)]


def oracle(name: str, start: np.ndarray, **options: Any) -> Oracle:
    cls = getattr(cadam.keras, name)
    return Oracle(cls.rule.name, start, confidence=cls.confidence, lr=LR, **{**options, **cls.fixed})


def grads(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-16, 17, (steps, 2, 3)) / 16


def start() -> np.ndarray:
    return np.random.default_rng(9).uniform(-1, 1, (2, 3)).astype(np.float32)


def applied(optimizer: Any, values: np.ndarray, dtype: str = "float32") -> tuple[np.ndarray, Any]:
    """Return a variable after a step with each gradient. On JAX the step is compiled and stateless, as in `fit`."""
    variable = keras.Variable(start(), dtype=dtype)
    if keras.backend.backend() != "jax":
        for grad in values:
            optimizer.apply([ops.convert_to_tensor(grad.astype(np.float32))], [variable])
        return ops.convert_to_numpy(ops.cast(variable, "float32")), variable

    import jax

    optimizer.build([variable])
    step = jax.jit(optimizer.stateless_apply)
    params, state = [variable.value], [each.value for each in optimizer.variables]
    for grad in values:
        params, state = step(state, [grad.astype(np.float32)], params)
    for each, value in zip([variable, *optimizer.variables], [*params, *state], strict=True):
        each.assign(value)
    return ops.convert_to_numpy(ops.cast(variable, "float32")), variable


def difference(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_agrees_with_the_oracle(name: str) -> None:
    optimizer = getattr(cadam.keras, name)(LR, **({"weight_decay": None} if name.endswith("AdamW") else {}))
    one = oracle(name, start())
    before = 0
    for grad in grads(40):
        before = one.aligned
        one.step(grad)
    param, variable = applied(optimizer, grads(40))
    assert difference(param, one.param) < 5e-6
    assert optimizer.alignment == pytest.approx((one.aligned - before) / 6, abs=1e-6)
    for buffer, value in one.state.items():
        assert difference(ops.convert_to_numpy(optimizer._buffers[0][buffer]), value) < 5e-6
    assert int(optimizer.iterations) == 40
    assert variable.shape == (2, 3)


@pytest.mark.parametrize("name", ["CAdam", "CSGDM", "CLion"])
def test_weight_decay_shrinks_every_element(name: str) -> None:
    one = oracle(name, start(), decay="decoupled", weight_decay=0.1)
    for grad in grads(20):
        one.step(grad)
    param, _ = applied(getattr(cadam.keras, name)(LR, weight_decay=0.1), grads(20))
    assert difference(param, one.param) < 5e-6


def test_adamw_decays_by_default_and_excluded_variables_do_not() -> None:
    assert cadam.keras.CAdamW().weight_decay == cadam.keras.AdamW().weight_decay == 0.01
    assert cadam.keras.CAdam().weight_decay is None
    optimizer, one = cadam.keras.CAdamW(0.5), np.ones(1, np.float32)
    variables = [keras.Variable(one, name="kernel"), keras.Variable(one, name="bias")]
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply([ops.zeros(1), ops.zeros(1)], variables)
    kernel, bias = (float(ops.convert_to_numpy(variable)[0]) for variable in variables)
    assert kernel == pytest.approx(0.995)
    assert bias == 1


def test_gradients_are_clipped_before_the_rule_sees_them() -> None:
    one = oracle("CSGDM", start())
    for grad in grads(10):
        one.step(np.clip(grad, -0.25, 0.25))
    param, _ = applied(cadam.keras.CSGDM(LR, clipvalue=0.25), grads(10))
    assert difference(param, one.param) < 1e-6


def test_accumulated_gradients_make_one_step() -> None:
    one = oracle("CAdam", start())
    for grad in grads(10):
        one.step(grad)
    halves = np.stack([grads(10) * 2, np.zeros((10, 2, 3))], 1).reshape(-1, 2, 3)
    param, _ = applied(cadam.keras.CAdam(LR, gradient_accumulation_steps=2), halves)
    assert difference(param, one.param) < 5e-6


def test_a_loss_scale_is_taken_out_of_the_gradients() -> None:
    plain, _ = applied(cadam.keras.CAdam(LR), grads(10))
    fixed, _ = applied(cadam.keras.CAdam(LR, loss_scale_factor=8.0), grads(10) * 8)
    assert difference(fixed, plain) == 0
    scaled = keras.optimizers.LossScaleOptimizer(cadam.keras.CAdam(LR), initial_scale=4.0)
    broken = np.concatenate([grads(10)[:3] * 4, np.full((1, 2, 3), np.inf), grads(10)[3:] * 2])
    dynamic, _ = applied(scaled, broken)
    assert difference(dynamic, plain) == 0  # the infinite gradient halved the scale and had no other effect


def test_the_moving_average_is_that_of_keras() -> None:
    optimizer = cadam.keras.CAdam(0.1, use_ema=True, ema_momentum=0.5)
    variable = keras.Variable(np.ones(1, np.float32))
    seen = []
    for _ in range(3):
        optimizer.apply([ops.ones(1)], [variable])
        seen.append(float(ops.convert_to_numpy(variable)[0]))
    optimizer.finalize_variable_values([variable])
    expected = (seen[0] + seen[1]) / 4 + seen[2] / 2
    assert float(ops.convert_to_numpy(variable)[0]) == pytest.approx(expected, rel=1e-6)


def test_half_precision_is_rounded_once_a_step() -> None:
    optimizer = cadam.keras.CAdam(LR)
    param, variable = applied(optimizer, grads(1), "bfloat16")
    one = oracle(
        "CAdam", np.asarray(ops.convert_to_numpy(ops.cast(keras.Variable(start(), dtype="bfloat16"), "float32")))
    )
    one.step(grads(1)[0])
    rounded = ops.cast(ops.cast(ops.convert_to_tensor(one.param.astype(np.float32)), "bfloat16"), "float32")
    assert keras.backend.standardize_dtype(variable.dtype) == "bfloat16"
    assert difference(param, ops.convert_to_numpy(rounded)) == 0
    assert keras.backend.standardize_dtype(optimizer._buffers[0]["exp_avg"].dtype) == "float32"


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_makes_the_same_optimizer(name: str) -> None:
    cls = getattr(cadam.keras, name)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    unusual = {"beta_1": 0.8, "epsilon": 0.25, "momentum": 0.5, "dampening": 0.5, "initial_accumulator_value": 0.125}
    own = {k: v for k, v in unusual.items() if k in cls().get_config()}
    optimizer = cls(schedule, clipnorm=2.0, weight_decay=0.5, **own)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is cls
    assert again.get_config() == optimizer.get_config()
    assert again._options == optimizer._options
    with pytest.raises(ValueError, match="not recognized"):
        cls(lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"beta_1": 1.5}, r"beta parameter at index 0: 1.5"), ({"epsilon": -1e-8}, r"epsilon value: -1e-08")],
)
def test_numbers_out_of_range_are_rejected(options: dict[str, Any], message: str) -> None:
    """The torch classes reject the same values."""
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        cadam.keras.CAdam(**options)


def test_the_alignment_is_that_of_the_last_step_alone() -> None:
    """Variables without a gradient and empty ones do not count; before the first step the ratio is 0."""
    optimizer = cadam.keras.CAdam(0.1)
    assert optimizer.alignment == 0
    three, one, empty = variables = [keras.Variable(np.ones(size, np.float32)) for size in (3, 1, 0)]
    optimizer.apply([ops.ones(3), ops.zeros(1), ops.ones(0)], variables)
    assert optimizer.alignment == pytest.approx(3 / 4)
    optimizer.apply([ops.ones(1), ops.ones(0)], [one, empty])
    assert optimizer.alignment == 1
    optimizer.apply([ops.convert_to_tensor([1.0, 0.0, 0.0]), ops.ones(0)], [three, empty])
    assert optimizer.alignment == pytest.approx(1 / 3)


POLICIES = ["mixed_float16", "mixed_bfloat16", "float16"]


@pytest.mark.parametrize("policy", POLICIES)
def test_half_precision_trains_and_is_saved(policy: str, tmp_path: Path) -> None:
    """With `mixed_float16`, Keras wraps the optimizer in a LossScaleOptimizer."""
    keras.config.set_dtype_policy(policy)
    try:
        model = net()
        model.compile(optimizer=cadam.keras.CAdam(1e-2), loss="mse")
        losses = model.fit(*data(), epochs=5, batch_size=16, shuffle=False, verbose=0).history["loss"]
        assert losses[-1] < losses[0]
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    finally:
        keras.config.set_dtype_policy("float32")
    inner = loaded.inner_optimizer if policy == "mixed_float16" else loaded
    assert type(inner) is cadam.keras.CAdam
    assert {keras.backend.standardize_dtype(b.dtype) for b in inner._buffers[0].values()} == {"float32"}
    assert inner.alignment == pytest.approx(getattr(model.optimizer, "inner_optimizer", model.optimizer).alignment)


def test_gradients_of_tables_move_every_row() -> None:
    """TensorFlow gives the looked-up rows of a table as slices; the moments of other rows decay all the same."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(4, 2), keras.layers.Flatten()])
    model.compile(optimizer=cadam.keras.CAdam(1e-2), loss="mse")
    for ids in ([1, 2, 2], [3, 3, 3]):
        model.fit(np.array(ids)[:, None], np.ones((3, 2), np.float32), batch_size=3, verbose=0)
    moment = np.abs(ops.convert_to_numpy(model.optimizer._buffers[0]["exp_avg"]))
    assert np.array_equal(moment.min(1) > 0, [False, True, True, True])
    assert model.optimizer.alignment == pytest.approx(1 / 4)


def net() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    rng = np.random.default_rng(3)
    model.set_weights([rng.uniform(-0.5, 0.5, w.shape).astype(np.float32) for w in model.get_weights()])
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(4).standard_normal((64, 5)).astype(np.float32)
    return x, x[:, :2].sum(1, keepdims=True)


def fitted(model: Any, epochs: int) -> Any:
    model.fit(*data(), epochs=epochs, batch_size=16, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("name", ["CAdam", "CSGDM"])
def test_a_loaded_model_continues_like_the_saved_one(name: str, tmp_path: Path) -> None:
    stayed, model = net(), net()
    for each in (stayed, model):
        each.compile(optimizer=getattr(cadam.keras, name)(1e-2, weight_decay=1e-3, clipnorm=1.0), loss="mse")
    fitted(stayed, 4)
    fitted(model, 2).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is getattr(cadam.keras, name)
    assert int(loaded.optimizer.iterations) == 8
    fitted(loaded, 2)
    assert 0 < loaded.optimizer.alignment < 1
    assert loaded.optimizer.alignment == pytest.approx(stayed.optimizer.alignment, abs=1e-6)
    for ours, theirs in zip(loaded.get_weights(), stayed.get_weights(), strict=True):
        assert difference(ours, theirs) < 1e-7


ACROSS = """
import sys, numpy as np
sys.path[:0] = {path!r}
from tests.keras import test_keras as t; import cadam.keras
out = {{}}
for name in t.NAMES:
    out[name], _ = t.applied(getattr(cadam.keras, name)(t.LR), t.grads(50))
model = t.net()
model.compile(optimizer=cadam.keras.CAdam(1e-2), loss="mse")
for number, weight in enumerate(t.fitted(model, 5).get_weights()):
    out[f"fit{{number}}"] = weight
np.savez(sys.argv[1], **out)
"""


def test_backends_agree(tmp_path: Path) -> None:
    """All backends agree on fifty steps of every optimizer, and on a model that is fitted for twenty steps."""
    code = ACROSS.format(path=sys.path)
    results = {}
    for backend in BACKENDS:
        file = tmp_path / f"{backend}.npz"
        done = subprocess.run(
            [sys.executable, "-c", code, str(file)],
            env={**os.environ, "KERAS_BACKEND": backend},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        results[backend] = np.load(file)
    assert {"jax", "torch"} <= results.keys()
    for backend, values in results.items():
        for name in results["jax"].files:
            assert difference(values[name], results["jax"][name]) < 1e-5, (backend, name)


def test_torch_is_imported_only_on_the_torch_backend() -> None:
    code = "import sys, cadam.keras; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "KERAS_BACKEND": "jax"}, timeout=120)
    assert done.returncode == 0


def test_code_of_the_page(tmp_path: Path) -> None:
    (code,) = (block.code for block in blocks(ROOT / "docs" / "keras.md") if block.language == "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_example_learns(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "keras_recommender.py"), "--steps", "200", "--rows", "100"]
    done = subprocess.run(
        [*command, "--save", str(tmp_path / "model.keras")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", done.stdout))
    assert last < first < 0.7
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize("option", [{"confidence_after": 5}, {"sparse_updates": "exact"}])
def test_options_of_sparse_updates_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="option of sparse updates"):
        cadam.keras.CAdam(learning_rate=0.1, **option)
