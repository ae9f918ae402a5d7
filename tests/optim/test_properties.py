"""Properties that hold for all gradients. Hypothesis draws examples, the same ones in every run."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

import cadam
from tests.engines.engines_under_test import DENSE, ENGINES, ROWS, served
from tests.optim.family import CONFIDENT, FAMILY, PAIRS, buffers, gradient, parameter, same_bits, sparse
from tests.optim.oracle import Oracle

Examples = Callable[[Callable[..., Any]], Callable[..., Any]]
# Multiples of 1/16, including zero: exact in float16 and bfloat16, as are their halves and sums.
SIXTEENTHS = st.integers(-32, 32).map(lambda n: n / 16)
NON_ZERO = st.integers(1, 32).map(lambda n: n / 16) | st.integers(-32, -1).map(lambda n: n / 16)
SIZES = {"lr": 0.1, "weight_decay": 0.1}
PLAIN = served(plain=True)
DENSE_PLAIN = served((DENSE,), plain=True)


def examples(n: int) -> Examples:
    return settings(
        max_examples=n, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


def histories(
    elements: st.SearchStrategy[float] = SIXTEENTHS, min_steps: int = 1, max_width: int = 5
) -> st.SearchStrategy[np.ndarray]:
    """Draw gradients of some steps for some elements, as an array (steps, elements)."""
    shapes = st.tuples(st.integers(min_steps, 6), st.integers(1, max_width))
    return shapes.flatmap(lambda shape: npst.arrays(np.float64, shape, elements=elements, fill=st.nothing()))


def start(n: int) -> np.ndarray:
    """Return different nonzero first values of n elements."""
    return np.linspace(-1.0, 1.3, n) if n > 1 else np.array([0.7])


def each(engines: list[tuple[str, str]] = PLAIN) -> Iterator[tuple[str, str]]:
    """Yield the engines and layouts. A failure names the engine and the layout."""
    for engine, layout in engines:
        note(f"{engine}, {layout}")
        yield engine, layout


def make(
    cls: type[cadam.Optimizer], params: Sequence[Tensor], engine: str = "eager", **options: Any
) -> cadam.Optimizer:
    return cls(params, **{"lr": 0.1, **options, **ENGINES[engine].options})


def run(optimizer: cadam.Optimizer, param: Tensor, grads: Any, layout: str = DENSE) -> None:
    for grad in grads:
        param.grad = gradient(layout, grad, param)
        optimizer.step()


def assert_same(a: tuple[cadam.Optimizer, Tensor], b: tuple[cadam.Optimizer, Tensor]) -> None:
    """Assert that parameter and buffers are equal bit for bit."""
    assert same_bits(a[1], b[1]), (a[1], b[1])
    mine, others = buffers(*a), buffers(*b)
    assert set(mine) == set(others)
    for name, buffer in mine.items():
        assert same_bits(buffer, others[name]), name


# The update of an element depends on the element alone --------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
@examples(8)
@given(grads=histories(), data=st.data())
def test_an_element_does_not_depend_on_others(name: str, grads: np.ndarray, data: st.DataObject) -> None:
    """An element alone takes the same steps, bit for bit. A mask that is rescaled by its mean would break this."""
    width = grads.shape[1]
    at = data.draw(st.integers(0, width - 1))
    for engine, layout in each():
        together, alone = parameter(start(width), torch.float32), parameter(start(width)[at : at + 1], torch.float32)
        first, second = make(FAMILY[name], [together], engine, **SIZES), make(FAMILY[name], [alone], engine, **SIZES)
        run(first, together, grads, layout)
        run(second, alone, grads[:, at : at + 1], layout)
        assert same_bits(together[at : at + 1], alone)
        for key, buffer in buffers(first, together).items():
            assert same_bits(buffer[at : at + 1], buffers(second, alone)[key]), key


@pytest.mark.parametrize("name", FAMILY)
@examples(5)
@given(grads=histories(max_width=40), data=st.data())
def test_splitting_a_tensor_changes_nothing(name: str, grads: np.ndarray, data: st.DataObject) -> None:
    """Several parameters, some of them empty, get the same bits as one parameter with all elements."""
    width = grads.shape[1]
    cuts = sorted(data.draw(st.lists(st.integers(0, width), max_size=3)))
    for engine, _ in each(DENSE_PLAIN):
        whole = parameter(start(width), torch.float32)
        parts = [torch.nn.Parameter(part.clone()) for part in torch.tensor_split(whole.detach(), cuts)]
        one, several = make(FAMILY[name], [whole], engine, **SIZES), make(FAMILY[name], parts, engine, **SIZES)
        run(one, whole, grads)
        for grad in grads:
            for part, piece in zip(parts, np.split(grad, cuts), strict=True):
                part.grad = gradient(DENSE, piece, part)
            several.step()
        assert same_bits(whole, torch.cat([*parts]))
        for key, buffer in buffers(one, whole).items():
            assert same_bits(buffer, torch.cat([several.state[part][key] for part in parts])), key
        assert one.alignment().total == several.alignment().total


@pytest.mark.parametrize(("engine", "layout"), PLAIN)
@pytest.mark.parametrize("name", FAMILY)
def test_a_complex_parameter_is_its_real_and_imaginary_parts(name: str, engine: str, layout: str) -> None:
    """Each part has its own moments and mask, like a real parameter with twice as many elements."""
    rng = np.random.default_rng(5)
    parts = parameter(rng.standard_normal((4, 2, 2)), torch.float32)
    whole = torch.nn.Parameter(torch.view_as_complex(parts.detach().clone()))
    real, joint = make(FAMILY[name], [parts], engine, **SIZES), make(FAMILY[name], [whole], engine, **SIZES)
    for _ in range(6):
        grad = torch.tensor(rng.integers(-32, 33, (4, 2, 2)) / 16, dtype=torch.float32)
        run(real, parts, [grad], layout)
        run(joint, whole, [torch.view_as_complex(grad)], layout)
    assert same_bits(torch.view_as_real(whole.detach()), parts)
    for key, buffer in buffers(joint, whole).items():
        assert same_bits(torch.view_as_real(buffer), buffers(real, parts)[key]), key
    assert joint.alignment().total == real.alignment().total


@pytest.mark.parametrize(("engine", "layout"), PLAIN)
def test_a_lazily_conjugated_gradient_equals_the_conjugate(engine: str, layout: str) -> None:
    grad = torch.tensor([1 + 2j, 3 - 4j])
    params = [torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)) for _ in range(2)]
    for param, each in zip(params, (grad.conj(), grad.conj().resolve_conj()), strict=True):
        run(make(cadam.CAdam, [param], engine), param, [each], layout)
    assert grad.conj().is_conj()
    assert same_bits(*(torch.view_as_real(param.detach()) for param in params))


# Confidence -----------------------------------------------------------------------------------------------


def without_beta1(cls: type[cadam.Optimizer]) -> dict[str, Any]:
    if "momentum" in cls.rule.defaults:
        return {"momentum": 0.0}
    return {"betas": (0.0, cls.rule.defaults["betas"][1])}


def assert_equals_the_plain_rule(name: str, grads: np.ndarray, **options: Any) -> None:
    for engine, layout in each():
        runs = []
        for cls in PAIRS[name]:
            param = parameter(start(grads.shape[1]), torch.float32)
            runs.append((make(cls, [param], engine, **options), param))
            run(*runs[-1], grads, layout)
        if engine != "foreach":
            assert_same(*runs)
        elif "AdaBelief" not in name:  # AdaBelief takes so large steps that they hide small differences
            # Without a mask, one operation multiplies and adds with a single rounding.
            torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", PAIRS)
@examples(5)
@given(grads=histories(NON_ZERO))
def test_equals_the_plain_rule_where_gradients_keep_their_sign(name: str, grads: np.ndarray) -> None:
    assert_equals_the_plain_rule(name, np.abs(grads) * np.sign(grads[0]))


@pytest.mark.parametrize("name", PAIRS)
@examples(6)
@given(grads=histories(NON_ZERO))
def test_equals_the_plain_rule_without_momentum(name: str, grads: np.ndarray) -> None:
    """With beta1 = 0 the momentum is the gradient, and agrees with itself unless it is zero."""
    assert_equals_the_plain_rule(name, grads, **without_beta1(PAIRS[name][0]))


@pytest.mark.parametrize("name", CONFIDENT)
@examples(5)
@given(grads=histories(SIXTEENTHS | st.just(0.0)))
def test_a_zero_gradient_moves_nothing(name: str, grads: np.ndarray) -> None:
    """At every step, whatever the momentum. With eps = 0 the masked step is 0/0."""
    cls = CONFIDENT[name]
    for options in ({}, {"eps": 0.0}) if "eps" in cls.rule.defaults else ({},):
        for engine, layout in each():
            param = parameter(start(grads.shape[1]), torch.float32)
            optimizer = make(cls, [param], engine, **options, weight_decay=0.0)
            for grad in grads:
                before = param.detach().clone()
                run(optimizer, param, [grad], layout)
                assert same_bits(param[grad == 0], before[grad == 0])
                assert param.isfinite().all()
                assert all(buffer.isfinite().all() for buffer in buffers(optimizer, param).values())


@pytest.mark.parametrize("name", FAMILY)
@examples(6)
@given(grads=histories())
def test_the_alignment_counters_are_exact(name: str, grads: np.ndarray) -> None:
    """The counters of aligned, touched and seen elements equal those from the oracle's moments."""
    cls = FAMILY[name]
    fixed = {k: v for k, v in cls.fixed.items() if k != "decoupled_weight_decay"}
    for engine, layout in each():
        param = parameter(start(grads.shape[1]))
        oracle = Oracle(cls.rule.name, param.detach().numpy(), confidence=cls.confidence, lr=0.1, **fixed)
        optimizer = make(cls, [param], engine, weight_decay=0.0)
        for t, grad in enumerate(grads):
            oracle.step(grad)
            run(optimizer, param, [grad], layout)
            if t == 2:
                optimizer.alignment(reset=True)
                oracle.aligned = oracle.touched = oracle.seen = 0
        total = optimizer.alignment().total
        assert (total.aligned, total.touched, total.seen) == (oracle.aligned, oracle.touched, oracle.seen)


# Direction and scale --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
@examples(6)
@given(grads=histories())
def test_minimising_is_maximising_the_negative(name: str, grads: np.ndarray) -> None:
    for engine, layout in each():
        runs = []
        for sign in (1, -1):
            param = parameter(start(grads.shape[1]), torch.float32)
            runs.append((make(FAMILY[name], [param], engine, maximize=sign < 0, **SIZES), param))
            run(*runs[-1], sign * grads, layout)
        assert_same(*runs)


@pytest.mark.parametrize("name", FAMILY)
@examples(4)
@given(grads=histories())
def test_gradients_are_divided_by_the_gradient_scale(name: str, grads: np.ndarray) -> None:
    """Scaling gradients and `grad_scale` by a power of two, as GradScaler does, gives the same bits."""
    for engine, layout in each():
        runs = []
        for scale in (1.0, 1024.0):
            param = parameter(start(grads.shape[1]), torch.float32)
            optimizer = make(FAMILY[name], [param], engine, **SIZES)
            optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
            runs.append((optimizer, param))
            run(*runs[-1], scale * grads, layout)
        assert_same(*runs)


# Checkpoints ----------------------------------------------------------------------------------------------


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FAMILY)
@examples(3)
@given(grads=histories(min_steps=2), data=st.data())
def test_saving_and_loading_changes_nothing(
    name: str, dtype: torch.dtype, grads: np.ndarray, data: st.DataObject
) -> None:
    """A run that stops after any step and resumes with a new optimizer has the same bits."""
    stop = data.draw(st.integers(0, len(grads)))
    for engine, layout in each():
        param = parameter(start(grads.shape[1]), dtype)
        optimizer = make(FAMILY[name], [param], engine, **SIZES)
        run(optimizer, param, grads[:stop], layout)
        saved = through_a_file({"param": param.detach(), "optimizer": optimizer.state_dict()})
        run(optimizer, param, grads[stop:], layout)

        resumed = torch.nn.Parameter(saved["param"])
        # Learning rate and decay differ, and are replaced by those of the checkpoint.
        fresh = make(FAMILY[name], [resumed], engine, lr=0.5, weight_decay=0.3)
        fresh.load_state_dict(saved["optimizer"])
        run(fresh, resumed, grads[stop:], layout)
        assert_same((optimizer, param), (fresh, resumed))
        assert optimizer.state[param]["step"] == fresh.state[resumed]["step"]


# Broken gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "layout"), served())
@pytest.mark.parametrize("name", FAMILY)
def test_a_broken_gradient_shows(name: str, engine: str, layout: str) -> None:
    """NaN or infinity leaves the parameter non-finite, masked or not, at any step; other elements are still updated."""
    for bad, before in product((math.nan, math.inf, -math.inf), (0, 1, 8)):
        param = parameter([0.5, 0.5, 0.5], torch.float32)
        optimizer = make(FAMILY[name], [param], engine)
        run(optimizer, param, [[1.0, -1.0, 1.0]] * before, layout)
        run(optimizer, param, [[bad, bad, 1.0]], layout)
        assert not param[:2].isfinite().any(), f"{bad} after {before} good gradients: {param}"
        assert param[2].isfinite()
        run(optimizer, param, [[1.0, 0.0, 1.0]], layout)
        assert not param[:2].isfinite().any(), f"{bad} was forgotten: {param}"


# Rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
@examples(6)
@given(steps=st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=3))
def test_rows_not_in_the_gradient_are_untouched(name: str, steps: list[list[int]]) -> None:
    """The bits of such rows and their buffers stay the same, whatever their momentum and the weight decay."""
    for engine, _ in each(served((ROWS,))):
        param = parameter(np.linspace(-1, 1, 12).reshape(6, 2), torch.float32)
        optimizer = make(FAMILY[name], [param], engine, **SIZES)
        run(optimizer, param, [np.ones((6, 2))], ROWS)  # gives every row a momentum
        for ids in steps:
            before = {"param": param.detach().clone(), **{k: v.clone() for k, v in buffers(optimizer, param).items()}}
            param.grad = sparse([(i,) for i in ids], np.full((len(ids), 2), 0.75), param)
            optimizer.step()
            absent = [i for i in range(6) if i not in ids]
            for key, tensor in {"param": param, **buffers(optimizer, param)}.items():
                assert same_bits(tensor[absent], before[key][absent]), key


@pytest.mark.parametrize("name", FAMILY)
@examples(6)
@given(grads=histories())
def test_a_sparse_gradient_with_every_row_is_a_dense_one(name: str, grads: np.ndarray) -> None:
    for engine in {engine for engine, layout in PLAIN if layout == ROWS}:
        runs = []
        for layout in (DENSE, ROWS):
            param = parameter(start(grads.shape[1]), torch.float32)
            runs.append((make(FAMILY[name], [param], engine, **SIZES), param))
            run(*runs[-1], grads, layout)
        assert_same(*runs)
