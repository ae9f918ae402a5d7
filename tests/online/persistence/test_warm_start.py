"""A warm start from SparseAdam and Adam gives each moment to its parameter."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer, SparseAdam

from cadam import CAdam
from cadam.online import DamagedCheckpointError, Learner
from tests.cli.test_run import HERE, run
from tests.online.data.test_sources import write_jsonl
from tests.online.streams import Small, build, events, learner, table

LOSS = nn.functional.binary_cross_entropy_with_logits
TABLES = ("users.weight", "items.weight")


def trained(*, names: bool = False, steps: int = 10, **dense: Any) -> tuple[Small, SparseAdam, Adam]:
    """A model with SparseAdam for its tables and Adam for the rest, as is usual."""
    model = build()
    parts: list[list[Any]] = [[], []]
    for name, param in model.named_parameters():
        parts[name not in TABLES].append((name, param) if names else param)
    sparse, adam = SparseAdam(parts[0], lr=0.01), Adam(parts[1], lr=0.01, **dense)
    for start in range(steps):
        batch = events(32, seed=start)
        score = model(**{name: torch.from_numpy(v) for name, v in batch.features.items()})
        sparse.zero_grad()
        adam.zero_grad()
        LOSS(score, torch.from_numpy(batch.labels)).backward()
        sparse.step()
        adam.step()
    return model, sparse, adam


def check_taken_over(ours: Learner, model: nn.Module, *optimizers: Optimizer) -> None:
    states = {param: state for one in optimizers for param, state in one.state.items()}
    assert len(states) == 4
    for new, old in zip(ours.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(new, old)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours.optimizer.state[new][moment], states[old][moment])
        assert float(ours.optimizer.state[new]["step"]) == float(states[old]["step"]) == 10


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("form", ["a list", "a dict", "files"])
def test_a_warm_start_loads_sparse_adam_and_adam_in_any_order(
    form: str, order: int, names: bool, tmp_path: Path
) -> None:
    model, *optimizers = trained(names=names)
    states = [one.state_dict() for one in optimizers[::order]]
    given: Any = {"model": model.state_dict(), "optimizer": states}
    if form == "a dict":
        given["optimizer"] = {"one": states[0], "other": states[1]}
    elif form == "files":
        given = []
        for number, state in enumerate([states[0], model.state_dict(), states[1]]):
            torch.save(state, tmp_path / f"{number}.pt")
            given.append(tmp_path / f"{number}.pt")
    ours = learner(build(seed=1))
    ours.warm_start(given)
    check_taken_over(ours, model, *optimizers)
    assert ours.optimizer.param_groups[0]["lr"] == 0.01
    ours.learn(events(32))
    assert {float(state["step"]) for state in ours.optimizer.state.values()} == {11}


def test_separate_groups_keep_the_options_of_each_optimizer() -> None:
    model, *optimizers = trained(weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    new = build(seed=1)
    named = dict(new.named_parameters())
    dense = {"params": [(name, p) for name, p in named.items() if name not in TABLES], "lr": 0.5}
    tables = {"params": [(name, named[name]) for name in reversed(TABLES)]}
    ours = Learner(new, CAdam([dense, tables]), LOSS)
    ours.warm_start({"model": model.state_dict(), "optimizer": [one.state_dict() for one in optimizers]})
    check_taken_over(ours, model, *optimizers)
    first, second = ours.optimizer.param_groups
    assert (first["betas"], first["eps"], first["weight_decay"], first["lr"]) == ((0.8, 0.9), 1e-6, 0.1, 0.5)
    assert (second["betas"], second["eps"], second["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.0)


def _state(**changes: Any) -> dict[str, Any]:
    model, sparse, adam = trained(**changes)
    states = [sparse.state_dict(), adam.state_dict()]
    return {"model": model.state_dict(), "optimizer": deepcopy(states)}


def without_a_table(given: dict[str, Any]) -> None:
    given["optimizer"][0]["param_groups"][0]["params"] = [0]


def another_shape(given: dict[str, Any]) -> None:
    given["optimizer"][0]["state"][1]["exp_avg"] = torch.zeros(3, 4)


def another_optimizer(given: dict[str, Any]) -> None:
    given["optimizer"][1]["state"][0] = {"momentum_buffer": torch.zeros(1, 5)}


def three(given: dict[str, Any]) -> None:
    given["optimizer"].append(given["optimizer"][1])


def no_optimizer(given: dict[str, Any]) -> None:
    given["optimizer"][1] = {"weights": 1}


def two_models(given: dict[str, Any]) -> None:
    given["optimizer"][1] = given["model"]


def twice(given: dict[str, Any]) -> None:
    given["optimizer"][1] = given["optimizer"][0]


def stranger(given: dict[str, Any]) -> None:
    given["optimizer"][0]["param_groups"][0]["param_names"][0] = "tables.weight"


@pytest.mark.parametrize(
    ("options", "change", "says"),
    [
        ({"weight_decay": 0.1}, None, "weight_decay is 0.0 for users.weight .*a group for each"),
        ({"betas": (0.5, 0.9)}, None, r"betas is \(0.9, 0.999\) for users.weight"),
        ({}, without_a_table, r"SparseAdam has 1 parameters, and the model has 2 sparse tables \(users.weight, items"),
        ({}, another_shape, r"a moment of shape \(3, 4\) where items.weight has \(20, 4\)"),
        ({}, another_optimizer, "no exp_avg, exp_avg_sq in it"),
        ({}, three, "save them with names"),
        ({}, no_optimizer, "not an optimizer's state dict"),
        ({}, two_models, "not an optimizer's state dict"),
        ({"names": True}, twice, "users.weight is a parameter of optimizer 0 .* and of optimizer 1"),
        ({"names": True}, stranger, "has a parameter 'tables.weight', and the model has none of that name"),
    ],
)
def test_a_warm_start_that_does_not_fit_raises_and_changes_nothing(
    options: dict[str, Any], change: Any, says: str
) -> None:
    given = _state(**options)
    if change is not None:
        change(given)
    ours = learner(build(seed=1))
    before = [param.detach().clone() for param in ours.model.parameters()]
    with pytest.raises(ValueError, match=says):
        ours.warm_start(given)
    assert all(torch.equal(a, b) for a, b in zip(before, ours.model.parameters(), strict=True))
    assert not ours.optimizer.state


@pytest.mark.parametrize(("which", "says"), [(0, "SparseAdam"), (1, "a dense optimizer")])
def test_a_warm_start_with_one_of_two_optimizers_asks_for_the_other(which: int, says: str) -> None:
    model, *optimizers = trained()
    ours = learner()
    before = deepcopy(ours.model.state_dict())
    with pytest.raises(ValueError, match=f"{says}.* has 2 of the model's 4 parameters"):
        ours.warm_start({"model": model.state_dict(), "optimizer": optimizers[which].state_dict()})
    assert all(torch.equal(value, before[name]) for name, value in ours.model.state_dict().items())


@pytest.mark.parametrize("change", ["shape", "missing", "more"])
def test_a_model_that_does_not_fit_does_not_change_any_weight(change: str) -> None:
    ours = learner()
    before = {name: value.clone() for name, value in ours.model.state_dict().items()}
    given = {name: value + 1 for name, value in before.items()}
    last = list(given)[-1]
    if change == "shape":
        given[last] = torch.zeros(77)
    elif change == "missing":
        del given[last]
    else:
        given["another"] = torch.zeros(1)
    with pytest.raises(RuntimeError):
        ours.warm_start({"model": given})
    assert all(torch.equal(value, before[name]) for name, value in ours.model.state_dict().items())


def test_the_command_warm_starts_from_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    write_jsonl(tmp_path / "a.jsonl", table(64))
    model, *optimizers = trained()
    words: list[object] = []
    for number, state in enumerate([model.state_dict(), *(one.state_dict() for one in optimizers)]):
        torch.save(state, tmp_path / f"{number}.pt")
        words += ["--warm-start", tmp_path / f"{number}.pt"]
    folder = tmp_path / "state"
    arguments = ("--data", f"jsonl:{tmp_path / 'a.jsonl'}", "--checkpoint", folder, "--batch-size", 64, "--quiet")
    assert run(*arguments, *words) == 0
    after = learner(checkpoint=folder)
    assert after.resume()
    assert {float(entry["step"]) for entry in after.optimizer.state.values()} == {11}
    after.close()


@pytest.mark.parametrize("content", [b"", b"not torch", b"PK\x03\x04 cut"])
def test_a_warm_start_from_a_file_that_torch_cannot_read_names_the_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.pt is not a file of torch\.save"):
        learner().warm_start(path)


def test_a_warm_start_reads_a_checkpoint_of_a_learner(tmp_path: Path) -> None:
    first = learner(checkpoint=tmp_path)
    first.learn(events(100))
    path = first.save()
    first.close()
    assert path is not None
    second = learner(build(seed=9))
    second.warm_start(path)
    for ours, saved in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, saved)
        assert torch.equal(second.optimizer.state[ours]["exp_avg"], first.optimizer.state[saved]["exp_avg"])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match=path.name):
        second.warm_start(path)
