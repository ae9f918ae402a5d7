"""What the engines see of tensors between two steps: asked for at once in C, or one by one in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cadam.native import tensor_snapshot
from cadam.native.tensor_snapshot import CHANGED, MOVED, Watched

WAYS = ["at once", "one by one"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "one by one":
        monkeypatch.setattr(tensor_snapshot, "compiled_look", lambda: None)
    elif tensor_snapshot.compiled_look() is None:
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
def test_a_change_of_any_tensor_is_seen(change: str, threads: bool, way: str) -> None:
    tensors = [torch.zeros(3, 3) for _ in range(2000)]
    watched = Watched(tensors, threads=threads)
    assert not watched.look()
    CHANGES[change](tensors[1234])
    assert watched.look() == NEWS[change]
    assert not watched.look()
    assert watched.addresses.tolist() == [x.data_ptr() for x in tensors]
    assert watched.sizes.tolist() == [x.numel() for x in tensors]


def test_a_change_of_dtype_is_seen(way: str) -> None:
    tensor = torch.zeros(3, 3)
    watched = Watched([tensor])
    tensor.data = torch.zeros(3, 3, dtype=torch.float64)
    assert watched.look() & CHANGED


def test_gradients_are_seen_through_their_parameters(way: str) -> None:
    params = [torch.zeros(4, requires_grad=True) for _ in range(5)]
    params[0].grad = torch.ones(4)
    params[1].grad = torch.ones(8)[::2]
    params[2].grad = torch._neg_view(torch.ones(4))
    params[3].grad = torch.sparse_coo_tensor(torch.tensor([[1]]), [1.0], (4,), check_invariants=True)
    own, grads = Watched(params), Watched(params, grads=True)
    assert grads.addresses[:2].tolist() == [params[0].grad.data_ptr(), params[1].grad.data_ptr()]
    assert (grads.kinds == -1).tolist() == [False, False, True, True, True]
    assert grads.kinds[0] == own.kinds[0]
    assert grads.kinds[1] == own.kinds[1] - 1
    params[4].grad = torch.ones(4)
    grads.look()
    assert grads.kinds[4] == own.kinds[4]
    assert grads.addresses[4] == params[4].grad.data_ptr()
    params[0].grad = None
    grads.look()
    assert grads.kinds[0] == -1


def test_a_tensor_that_is_yet_to_be_negated_is_not_plain(way: str) -> None:
    tensor, memory = torch.ones(4), torch.ones(4)
    watched = Watched([tensor, torch._neg_view(memory)])
    assert (watched.kinds == -1).tolist() == [False, True]
    tensor.data = torch._neg_view(tensor.data)
    assert watched.look() & CHANGED
    assert (watched.kinds == -1).all()


def test_a_gradient_made_of_zeros_without_memory_is_not_plain(way: str) -> None:
    param = torch.zeros(4, requires_grad=True)
    param.grad = torch._efficientzerotensor((4,))
    assert Watched([param], grads=True).kinds.tolist() == [-1]
