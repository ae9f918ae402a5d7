"""The optimizers with confidence in timm's registry, under names that timm does not have."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

import cadam
from cadam.timm import register

OURS = {
    "confidentadam": cadam.CAdam,
    "confidentadamw": cadam.CAdamW,
    "confidentamsgrad": cadam.CAmsGrad,
    "confidentsgdm": cadam.CSGDM,
    "confidentlion": cadam.CLion,
    "confidentradam": cadam.CRAdam,
    "confidentyogi": cadam.CYogi,
    "confidentadabelief": cadam.CAdaBelief,
}


@dataclass(frozen=True)
class OptimInfo:
    """The description of an optimizer in timm's registry."""

    name: str
    opt_class: type
    description: str
    has_eps: bool
    has_momentum: bool
    has_betas: bool


class Registry:
    """The part of timm's registry that is used."""

    def __init__(self) -> None:
        self.known: dict[str, OptimInfo] = {}

    def register(self, info: OptimInfo) -> None:
        self.known[info.name] = info


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Return the registry of a module that replaces timm."""
    package, optim, factory = (ModuleType(n) for n in ("timm", "timm.optim", "timm.optim._optim_factory"))
    made: Any = Registry()
    optim.OptimInfo = OptimInfo  # type: ignore[attr-defined]
    factory.default_registry = made  # type: ignore[attr-defined]
    for module in (package, optim, factory):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found: Registry = made
    return found


def test_every_optimizer_with_confidence_is_registered(registry: Registry) -> None:
    assert register() == OURS
    assert {name: info.opt_class for name, info in registry.known.items()} == OURS
    assert not any("_" in name for name in OURS), "timm reads what is before an underscore as a prefix"


def test_the_registry_knows_the_options_of_an_optimizer(registry: Registry) -> None:
    register()
    takes = {name: (info.has_eps, info.has_momentum, info.has_betas) for name, info in registry.known.items()}
    assert takes["confidentadam"] == (True, False, True)
    assert takes["confidentsgdm"] == (False, True, False)
    assert takes["confidentlion"] == (False, False, True)


def test_without_timm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(ImportError, match="pip install timm"):
        register()


def test_timm_creates_a_registered_optimizer_by_name() -> None:
    optim: Any = pytest.importorskip("timm.optim", reason="timm is not installed")
    before = set(optim.list_optimizers())
    assert not before & register().keys()
    for name, expected in OURS.items():
        made: Any = optim.create_optimizer_v2(torch.nn.Linear(3, 1), name, lr=0.01, weight_decay=0.1)
        assert type(made) is expected
        groups: Any = made.param_groups  # type: ignore[attr-defined,unused-ignore]
        assert {group["weight_decay"] for group in groups} == {0.0, 0.1}
    assert optim.get_optimizer_class("cadamw", bind_defaults=False) is not cadam.CAdamW
