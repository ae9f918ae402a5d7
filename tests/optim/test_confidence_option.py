"""`confidence` as an option of a parameter group."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import cadam

from .family import CONFIDENT


def _param() -> torch.nn.Parameter:
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(6, 4))


def _set_grad(param: torch.nn.Parameter, seed: int, sparse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    if not sparse:
        param.grad = torch.randn(6, 4, generator=generator)
        return
    ids = torch.randint(6, (1, 5), generator=generator)
    param.grad = torch.sparse_coo_tensor(
        ids, torch.randn(5, 4, generator=generator), (6, 4), check_invariants=False, is_coalesced=False
    )


ENGINES = [{"fused": True}, {"fused": False, "foreach": True}, {"fused": False, "foreach": False}]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("name", CONFIDENT)
def test_each_group_has_its_own_confidence(name: str, engine: dict[str, Any], sparse: bool) -> None:
    plain_class = getattr(cadam, name.removeprefix("C"))
    masked, unmasked, expected_masked, expected_unmasked = (_param() for _ in range(4))
    mixed = CONFIDENT[name]([{"params": [masked]}, {"params": [unmasked], "confidence": False}], lr=0.1, **engine)
    separate = [
        CONFIDENT[name]([expected_masked], lr=0.1, **engine),
        plain_class([expected_unmasked], lr=0.1, **engine),
    ]
    for seed in range(20):
        for param in (masked, unmasked, expected_masked, expected_unmasked):
            _set_grad(param, seed, sparse)
        for optimizer in (mixed, *separate):
            optimizer.step()
    assert torch.equal(masked, expected_masked)
    assert torch.equal(unmasked, expected_unmasked)
    assert not torch.equal(masked, unmasked)


def test_a_class_without_confidence_takes_it_as_an_option() -> None:
    ours, expected = _param(), _param()
    optimizers = cadam.Adam([ours], lr=0.1, confidence=True), cadam.CAdam([expected], lr=0.1)
    for seed in range(20):
        for param in (ours, expected):
            _set_grad(param, seed, sparse=False)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_change_between_steps_counts_in_the_next_step(sparse: bool) -> None:
    changed, expected = _param(), _param()
    ours = cadam.CAdam([changed], lr=0.1)
    masked: cadam.Optimizer = cadam.CAdam([expected], lr=0.1)
    for seed in range(6):
        for param in (changed, expected):
            _set_grad(param, seed, sparse)
        if seed == 3:
            ours.param_groups[0]["confidence"] = False
            unmasked = cadam.Adam([expected], lr=0.1)
            unmasked.load_state_dict(masked.state_dict())
            masked = unmasked
        ours.step()
        masked.step()
    assert torch.equal(changed, expected)


def test_loading_keeps_the_confidence_of_each_group() -> None:
    first, second = _param(), _param()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "confidence": False}]
    saved = cadam.CAdam([{"params": [_param()]}, {"params": [_param()]}]).state_dict()
    optimizer = cadam.CAdam(groups)
    optimizer.load_state_dict(saved)
    assert [group["confidence"] for group in optimizer.param_groups] == [True, False]


def test_an_optimizer_pickled_without_the_option_gets_that_of_its_class() -> None:
    optimizer = cadam.Adam([_param()])
    state = copy.deepcopy(optimizer.__getstate__())
    del state["defaults"]["confidence"], state["param_groups"][0]["confidence"]
    restored = cadam.Adam.__new__(cadam.Adam)
    restored.__setstate__(state)
    assert restored.param_groups[0]["confidence"] is False


def test_a_value_that_is_not_a_boolean_is_refused_before_the_step() -> None:
    with pytest.raises(ValueError, match="Invalid confidence value: 'no'"):
        cadam.CAdam([_param()], confidence="no")  # type: ignore[arg-type]
    param = _param()
    optimizer = cadam.CAdam([param])
    _set_grad(param, 0, sparse=False)
    optimizer.param_groups[0]["confidence"] = 0.5
    with pytest.raises(ValueError, match=r"group 0: Invalid confidence value: 0\.5"):
        optimizer.step()


def test_the_state_for_torch_has_no_confidence() -> None:
    state = cadam.for_torch(cadam.CAdam([_param()]).state_dict())
    assert "confidence" not in state["param_groups"][0]
