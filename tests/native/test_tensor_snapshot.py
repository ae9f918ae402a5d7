"""Snapshots of tensors between two steps, taken by compiled code or in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cadam.native import tensor_snapshot
from cadam.native.tensor_snapshot import CHANGED, MOVED, TensorSnapshot
from tests.lazy_negation import lazily_negated

LANGUAGES = ["C", "Python"]


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(tensor_snapshot, "_snapshot_library", lambda: None)
    elif not tensor_snapshot.can_snapshot_in_c():
        pytest.skip("no compiled kernels")
    return str(request.param)


def swap_memory(x: Tensor) -> None:
    x.data = x.detach().clone()


def transpose(x: Tensor) -> None:
    x.data = x.data.t()


def shrink(x: Tensor) -> None:
    x.data = x.data[:2]


CHANGES: dict[str, Callable[[Tensor], None]] = {"memory": swap_memory, "strides": transpose, "size": shrink}
NEWS = {"memory": MOVED, "strides": CHANGED, "size": CHANGED}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("threads", [False, True])
def test_a_change_of_any_tensor_is_seen(change: str, threads: bool, language: str) -> None:
    tensors = [torch.zeros(3, 3) for _ in range(2000)]
    snapshot = TensorSnapshot(tensors, threads=threads)
    assert not snapshot.update()
    CHANGES[change](tensors[1234])
    assert snapshot.update() == NEWS[change]
    assert not snapshot.update()
    assert snapshot.addresses.tolist() == [x.data_ptr() for x in tensors]
    assert snapshot.sizes.tolist() == [x.numel() for x in tensors]


def test_a_change_of_dtype_is_seen(language: str) -> None:
    tensor = torch.zeros(3, 3)
    snapshot = TensorSnapshot([tensor])
    tensor.data = torch.zeros(3, 3, dtype=torch.float64)
    assert snapshot.update() & CHANGED


def test_gradients_are_seen_through_their_parameters(language: str) -> None:
    params = [torch.zeros(4, requires_grad=True) for _ in range(5)]
    params[0].grad = torch.ones(4)
    params[1].grad = torch.ones(8)[::2]
    params[2].grad = lazily_negated(torch.ones(4))
    params[3].grad = torch.sparse_coo_tensor(torch.tensor([[1]]), [1.0], (4,), check_invariants=True)
    own, grads = TensorSnapshot(params), TensorSnapshot(params, of_grads=True)
    assert grads.addresses[:2].tolist() == [params[0].grad.data_ptr(), params[1].grad.data_ptr()]
    assert (grads.kinds == -1).tolist() == [False, False, True, True, True]
    assert grads.kinds[0] == own.kinds[0]
    assert grads.kinds[1] == own.kinds[1] - 1
    params[4].grad = torch.ones(4)
    grads.update()
    assert grads.kinds[4] == own.kinds[4]
    assert grads.addresses[4] == params[4].grad.data_ptr()
    params[0].grad = None
    grads.update()
    assert grads.kinds[0] == -1


def test_a_lazily_negated_tensor_is_not_plain(language: str) -> None:
    tensor = torch.ones(4)
    snapshot = TensorSnapshot([tensor, lazily_negated(torch.ones(4)), lazily_negated(torch.ones(1))])
    assert (snapshot.kinds == -1).tolist() == [False, True, True]
    tensor.data = lazily_negated(tensor.data)
    assert snapshot.update() & CHANGED
    assert (snapshot.kinds == -1).all()


def test_a_gradient_made_of_zeros_without_memory_is_not_plain(language: str) -> None:
    param = torch.zeros(4, requires_grad=True)
    param.grad = torch._efficientzerotensor((4,))
    assert TensorSnapshot([param], of_grads=True).kinds.tolist() == [-1]


def test_a_swapped_tensor_is_seen_and_others_cannot_be_swapped(language: str) -> None:
    param, state = torch.zeros(3), torch.zeros(3)
    snapshot = TensorSnapshot([param, state], swappable=[param])
    torch.utils.swap_tensors(param, torch.ones(5))
    assert snapshot.update() & CHANGED
    assert snapshot.sizes.tolist() == [5, 3]
    if language == "C":
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(state, torch.ones(5))


def test_a_lazily_negated_gradient_that_covers_its_whole_memory_is_seen(language: str) -> None:
    param = torch.zeros(4, requires_grad=True)
    grad = param.grad = torch.ones(4)
    snapshot = TensorSnapshot([param], of_grads=True)
    assert snapshot.kinds[0] >= 0
    param.grad = torch._neg_view(grad)
    assert snapshot.update() & CHANGED
    assert snapshot.kinds.tolist() == [-1]


def test_a_parameter_that_becomes_its_own_lazy_negative_is_seen(language: str) -> None:
    param = torch.ones(4)
    snapshot = TensorSnapshot([param])
    param.data = torch._neg_view(param.data)
    assert snapshot.update() & CHANGED


def test_a_gradient_that_becomes_lazily_negated_at_the_same_address_is_seen(language: str) -> None:
    memory = torch.view_as_real(torch.ones(1, dtype=torch.complex64))
    param = torch.zeros(1, requires_grad=True)
    param.grad = memory[:, 1]
    snapshot = TensorSnapshot([param], of_grads=True)
    address = param.grad.data_ptr()
    param.grad = torch.view_as_complex(memory).conj().imag
    assert (param.grad.data_ptr(), param.grad.is_neg()) == (address, True)
    assert snapshot.update() & CHANGED
    assert snapshot.kinds.tolist() == [-1]
