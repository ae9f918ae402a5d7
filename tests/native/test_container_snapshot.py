"""Snapshots of dicts and lists, compared by compiled code or in Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from cadam.native import container_snapshot
from cadam.native.container_snapshot import ContainerSnapshot
from cadam.native.loader import UnavailableError


@pytest.fixture(params=["C", "Python"], autouse=True)
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":

        def unavailable() -> None:
            raise UnavailableError("not in this test")

        monkeypatch.setattr(container_snapshot, "package_library", unavailable)


def containers() -> tuple[dict[str, Any], list[Any], defaultdict[str, Any]]:
    state: defaultdict[str, Any] = defaultdict(dict)
    state["p"] = {"step": 1.5}
    return {"lr": 0.1, "betas": (0.9, 0.99)}, [[1], [2]], state


CHANGES: dict[str, Callable[[dict[str, Any], list[Any], Any], Any]] = {
    "a value is replaced": lambda group, params, state: group.update(betas=(0.8, 0.99)),
    "a value is added": lambda group, params, state: group.update(decay=0.1),
    "a value is removed": lambda group, params, state: group.pop("betas"),
    "an entry of a list is replaced": lambda group, params, state: params.__setitem__(1, [2]),
    "an entry of a list is added": lambda group, params, state: params.append(1),
    "a list is emptied": lambda group, params, state: params.clear(),
    "a new key of a defaultdict": lambda group, params, state: state["q"],
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: str) -> None:
    group, params, state = containers()
    snapshot = ContainerSnapshot([group, params, state], ignored_keys=["lr"])
    assert snapshot.is_unchanged()
    CHANGES[change](group, params, state)
    assert not snapshot.is_unchanged()


def test_ignored_keys_may_change_and_a_container_can_be_tracked_again() -> None:
    group, params, state = containers()
    snapshot = ContainerSnapshot([group, params, state], ignored_keys=["lr"])
    group["lr"] = 0.5
    assert snapshot.is_unchanged()
    group["betas"] = (0.5, 0.5)
    snapshot.track(0, group)
    assert snapshot.is_unchanged()


def test_an_object_that_was_deleted_and_made_again_at_its_address_is_noticed() -> None:
    params = [object()]
    snapshot = ContainerSnapshot([params])
    for _ in range(3):
        params[0] = object()
        assert not snapshot.is_unchanged()
