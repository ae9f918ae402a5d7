"""What a program that looks at the constructors finds: type hints, every option by its name, and its default."""

from __future__ import annotations

import inspect
import typing

import pytest
import torch

import cadam
from tests.optim.family import FAMILY

CATALOGUE = {name: cls for name, cls in FAMILY.items() if name in cadam.__all__}
TORCHS: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGDM": torch.optim.SGD,
    "RAdam": torch.optim.RAdam,
}


def parameters(cls: type[torch.optim.Optimizer]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(cls, eval_str=True).parameters)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_option_is_a_parameter_of_the_constructor_with_its_default(name: str) -> None:
    found = parameters(CATALOGUE[name])
    assert {key: one.default for key, one in found.items() if key != "params"} == CATALOGUE[name].options_of()
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values())


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_parameter_of_the_constructor_has_a_type(name: str) -> None:
    hints = typing.get_type_hints(CATALOGUE[name].__init__)
    assert set(hints) == {*parameters(CATALOGUE[name]), "return"}
    assert hints["fused"] == bool | None
    assert hints["state_dtype"] == torch.dtype | None


@pytest.mark.parametrize("name", [*TORCHS, *(f"C{name}" for name in TORCHS)])
def test_the_constructors_take_what_torchs_take_in_its_order(name: str) -> None:
    ours, theirs = parameters(CATALOGUE[name]), parameters(TORCHS[name.removeprefix("C")])
    assert set(theirs) <= set(ours)
    by_place = [key for key, one in theirs.items() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(by_place)] == by_place
    assert all(ours[key].kind == theirs[key].kind for key in theirs)


def test_pydantic_checks_the_arguments() -> None:
    pydantic = pytest.importorskip("pydantic")
    construct = pydantic.validate_call(config={"arbitrary_types_allowed": True})(cadam.CAdam.__init__)
    optimizer = cadam.CAdam.__new__(cadam.CAdam)
    construct(optimizer, [torch.ones(2)], lr=0.5)
    assert optimizer.defaults["lr"] == 0.5
    with pytest.raises(pydantic.ValidationError):
        construct(optimizer, [torch.ones(2)], amsgrad="perhaps")
