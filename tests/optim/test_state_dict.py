"""State dicts are exchanged with the optimizers of torch and between those of cadam. Invalid ones change nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter
from torch.testing import assert_close

import cadam
from tests.optim.exact import assert_identical, copied
from tests.optim.family import CONFIDENT

Make = Callable[..., torch.optim.Optimizer]
Trained = TypeVar("Trained", bound=torch.optim.Optimizer)
Grads = list[list[Tensor]]

SHAPES = [(4, 3), (5,), ()]


def parameters(dtype: torch.dtype = torch.float64) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradients(steps: int, growing: bool = False, seed: int = 1) -> Grads:
    """Return random gradients, or growing ones, with which the maximum of the second moment is its newest value."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (t + 1.0) ** 2 * torch.ones(shape, dtype=torch.float64)
            if growing
            else torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in SHAPES
        ]
        for t in range(steps)
    ]


def train(optimizer: Trained, grads: Grads, sparse: bool = False) -> Trained:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for now in grads:
        for param, grad in zip(params, now, strict=True):
            param.grad = grad.to(param.dtype).clone()
            if sparse:
                param.grad = param.grad.to_sparse()
        optimizer.step()
    return optimizer


def values(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def snapshot(optimizer: cadam.Optimizer) -> Any:
    """Return parameters, the state with the identity of its tensors, groups, defaults and counters."""
    return (
        values(optimizer),
        {id(p): {name: (id(v), copied(v)) for name, v in s.items()} for p, s in optimizer.state.items()},
        [{k: [id(p) for p in v] if k == "params" else copied(v) for k, v in g.items()} for g in optimizer.param_groups],
        copied(optimizer.defaults),
        str(optimizer.alignment()),
    )


# Between torch and us ----------------------------------------------------------------------------------------------

# Without the mask, so that the two can be compared exactly. SparseAdam adds eps before the correction.
EQUALS: dict[str, tuple[Make, Make]] = {
    "Adam": (torch.optim.Adam, cadam.Adam),
    "Adam-l2": (partial(torch.optim.Adam, weight_decay=0.1), cadam.Adam),
    "Adam-maximize": (partial(torch.optim.Adam, maximize=True, lr=0.02), cadam.Adam),
    "AdamW": (partial(torch.optim.AdamW, betas=(0.8, 0.9)), cadam.AdamW),
    "RAdam": (partial(torch.optim.RAdam, eps=1e-6), cadam.RAdam),
    "RAdam-decoupled": (partial(torch.optim.RAdam, decoupled_weight_decay=True, weight_decay=0.1), cadam.RAdam),
    "SGD": (partial(torch.optim.SGD, lr=0.1), cadam.SGDM),
    "SGD-momentum": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), cadam.SGDM),
    "SGD-dampening": (partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3), cadam.SGDM),
    "SGD-nesterov": (partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), cadam.SGDM),
    "SparseAdam": (partial(torch.optim.SparseAdam, eps=1e-30), cadam.Adam),
}
over_equals = pytest.mark.parametrize("name", EQUALS)


@pytest.mark.parametrize("switch_after", [1, 2, 7])
@over_equals
def test_training_continues_from_a_torch_checkpoint(name: str, switch_after: int) -> None:
    """The run continues as without the switch, with all options of the checkpoint."""
    theirs, ours = EQUALS[name]
    sparse = name == "SparseAdam"
    grads = gradients(12)
    stayed = train(theirs(parameters()), grads, sparse)
    before = train(theirs(parameters()), grads[:switch_after], sparse)
    after = ours([Parameter(p) for p in values(before)])
    after.load_state_dict(before.state_dict())
    train(after, grads[switch_after:], sparse)
    assert_close(values(after), values(stayed), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("switch_after", [1, 2, 7])
@over_equals
def test_training_continues_in_torch(name: str, switch_after: int) -> None:
    theirs, ours = EQUALS[name]
    sparse = name == "SparseAdam"
    grads = gradients(12)
    stayed = train(theirs(parameters()), grads, sparse)
    start = ours(parameters())
    start.load_state_dict(theirs(parameters()).state_dict())  # brings the options
    train(start, grads[:switch_after], sparse)
    after = theirs([Parameter(p) for p in values(start)])
    after.load_state_dict(start.state_dict())
    train(after, grads[switch_after:], sparse)
    # SparseAdam computes in float32 if its step count is a float32 tensor.
    tolerance = 1e-6 if sparse else 1e-12
    assert_close(values(after), values(stayed), rtol=tolerance, atol=1e-15)


@pytest.mark.parametrize("name", [name for name in EQUALS if not name.startswith("SGD")])
def test_step_count_is_exact(name: str) -> None:
    theirs, ours = EQUALS[name]
    before = train(theirs(parameters()), gradients(5), name == "SparseAdam")
    after = ours(parameters())
    after.load_state_dict(before.state_dict())
    assert [state["step"].item() for state in after.state.values()] == [5, 5, 5]
    back = theirs(parameters())
    back.load_state_dict(after.state_dict())
    assert [float(state["step"]) for state in back.state.values()] == [5, 5, 5]


def test_a_large_step_count_is_exact() -> None:
    """float32 represents integers up to 2^24 exactly."""
    before = train(torch.optim.Adam(parameters()), gradients(1)).state_dict()
    for state in before["state"].values():
        state["step"] = torch.tensor(16_777_214.0)
    after = cadam.CAdam(parameters())
    after.load_state_dict(before)
    train(after, gradients(1))
    assert [state["step"].item() for state in after.state.values()] == [16_777_215.0] * 3


def test_the_moving_average_continues_in_torch() -> None:
    """After its first step, SGDM of the paper equals SGD with dampening = momentum."""
    grads = gradients(8)
    stayed = train(cadam.SGDM(parameters(), lr=0.1), grads)
    start = train(cadam.SGDM(parameters(), lr=0.1), grads[:3])
    after = torch.optim.SGD([Parameter(p) for p in values(start)])
    after.load_state_dict(cadam.for_torch(start.state_dict()))
    train(after, grads[3:])
    assert_close(values(after), values(stayed), rtol=1e-12, atol=1e-15)


def test_moving_average_with_nesterov_has_no_counterpart_in_torch() -> None:
    optimizer = cadam.CSGDM([{"params": p} for p in parameters()], nesterov=True)
    with pytest.raises(ValueError, match=r"group 0: torch.optim.SGD has no nesterov=True with a moving average"):
        cadam.for_torch(optimizer.state_dict())


# AMSGrad has two definitions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_amsgrad_continues_where_the_two_definitions_agree(direction: str) -> None:
    grads = gradients(10, growing=True)
    make: dict[str, Make] = {
        "theirs": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
        "ours": partial(cadam.Adam, lr=0.1, amsgrad=True),
    }
    first, second = ("theirs", "ours") if direction == "from torch" else ("ours", "theirs")
    stayed = train(make[first](parameters()), grads)
    before = train(make[first](parameters()), grads[:4])
    after = make[second]([Parameter(p) for p in values(before)])
    saved = before.state_dict()
    after.load_state_dict(saved if direction == "from torch" else cadam.for_torch(saved))
    train(after, grads[4:])
    assert_close(values(after), values(stayed), rtol=1e-12, atol=0)


def test_amsgrad_maximum_is_corrected_once() -> None:
    """torch stores the maximum of v, cadam the maximum of v / (1 - beta2^t). Converted twice, it is the same again."""
    before = train(torch.optim.Adam(parameters(), amsgrad=True, betas=(0.9, 0.95)), gradients(6))
    saved = before.state_dict()
    raw = [state["max_exp_avg_sq"].clone() for state in saved["state"].values()]
    ours = cadam.CAmsGrad(parameters())
    ours.load_state_dict(saved)
    ours.load_state_dict(deepcopy(ours.state_dict()))
    corrected = [state["max_exp_avg_sq"] for state in ours.state.values()]
    assert_close(corrected, [maximum / (1 - 0.95**6) for maximum in raw], rtol=1e-12, atol=0)
    back = cadam.for_torch(ours.state_dict())
    assert_close([state["max_exp_avg_sq"] for state in back["state"].values()], raw, rtol=1e-12, atol=0)
    assert_identical([state["max_exp_avg_sq"] for state in saved["state"].values()], raw)


def test_amsgrad_maximum_of_step_zero_is_zero() -> None:
    """An optimizer whose only step was skipped because of an overflow has a state with a step count of zero."""
    saved = train(torch.optim.Adam(parameters(), amsgrad=True), gradients(1)).state_dict()
    for state in saved["state"].values():
        for value in state.values():
            value.zero_()
    ours = cadam.CAmsGrad(parameters())
    ours.load_state_dict(saved)
    assert all(state["max_exp_avg_sq"].eq(0).all() for state in ours.state.values())


def test_for_torch_does_not_change_its_argument_and_writes_the_options_of_torch() -> None:
    ours = train(cadam.CAmsGrad(parameters()), gradients(2))
    saved = ours.state_dict()
    before = copied(saved)
    written = cadam.for_torch(saved)
    assert_identical(saved, before)
    theirs = torch.optim.Adam(parameters()).state_dict()["param_groups"][0]
    assert set(written["param_groups"][0]) == set(theirs) | {"decoupled_weight_decay"}


# Options that are not loaded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [torch.optim.Adam, cadam.Adam], ids=["torch", "ours"])
def test_loading_never_switches_confidence_off(source: Make) -> None:
    saved = train(source(parameters(), lr=0.1), gradients(3)).state_dict()
    saved["param_groups"][0]["confidence"] = False
    ours = cadam.CAdam(parameters())
    ours.load_state_dict(saved)
    before = values(ours)
    against = [-torch.sign(state["exp_avg"]) * 1e-6 for state in ours.state.values()]
    train(ours, [against])
    assert ours.confidence is True
    assert_identical(values(ours), before)


def test_confident_and_plain_load_each_other() -> None:
    """The state is the same; only the mask differs."""
    saved = train(cadam.CAdam(parameters(), lr=0.1), gradients(3)).state_dict()
    plain = cadam.Adam(parameters())
    plain.load_state_dict(saved)
    assert_identical(plain.state_dict()["state"], saved["state"])


@pytest.mark.parametrize("cls", [cadam.CAmsGrad, cadam.AmsGrad])
def test_amsgrad_stays_on(cls: type[cadam.Optimizer]) -> None:
    """The maximum is taken from the first step after loading on."""
    ours = cls(parameters())
    ours.load_state_dict(train(torch.optim.Adam(parameters()), gradients(3)).state_dict())
    assert ours.param_groups[0]["amsgrad"] is True
    train(ours, gradients(1))
    assert all(state["max_exp_avg_sq"].gt(0).all() for state in ours.state.values())


@pytest.mark.parametrize("cls", [cadam.CAdamW, cadam.AdamW])
def test_decoupled_decay_stays_decoupled(cls: type[cadam.Optimizer]) -> None:
    ours = cls(parameters())
    ours.load_state_dict(train(cadam.Adam(parameters(), weight_decay=0.1), gradients(3)).state_dict())
    group = ours.param_groups[0]
    assert (group["decoupled_weight_decay"], group["weight_decay"]) == (True, 0.1)


def test_options_of_the_computation_come_from_the_state_dict() -> None:
    given: dict[str, Any] = {
        "lr": 0.3,
        "betas": (0.5, 0.6),
        "eps": 1e-3,
        "weight_decay": 0.7,
        "amsgrad": True,
        "maximize": True,
    }
    ours = cadam.CAdam(parameters())
    ours.load_state_dict(torch.optim.Adam(parameters(), **given).state_dict())
    assert {name: ours.param_groups[0][name] for name in given} == given


@pytest.mark.parametrize(
    ("mine", "saved"),
    [
        ({"foreach": True}, {"foreach": False}),
        ({"foreach": False}, {"foreach": True}),
        ({"capturable": True}, {"capturable": False}),
        ({"differentiable": True}, {"differentiable": False}),
        ({"track_alignment": False}, {"track_alignment": True}),
        ({"state_dtype": torch.float64}, {"state_dtype": torch.float32}),
        ({"fused": False}, {"fused": True}),
    ],
    ids=str,
)
def test_how_it_runs_stays(mine: dict[str, Any], saved: dict[str, Any]) -> None:
    state_dict = train(cadam.CAdam(parameters()), gradients(2)).state_dict()
    state_dict["param_groups"][0].update(saved)
    ours = cadam.CAdam(parameters(), **mine)
    ours.load_state_dict(state_dict)
    assert {name: ours.param_groups[0][name] for name in mine} == mine


def test_missing_options_keep_their_values() -> None:
    """Old state dicts lack most options, and their step count is a number."""
    state_dict = train(torch.optim.Adam(parameters(), lr=0.2), gradients(2)).state_dict()
    for group in state_dict["param_groups"]:
        for name in set(group) - {"params", "lr"}:
            del group[name]
    for state in state_dict["state"].values():
        state["step"] = int(state["step"])
    ours = cadam.CAdam(parameters(), betas=(0.7, 0.8), weight_decay=0.1)
    ours.load_state_dict(state_dict)
    group = ours.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.2, (0.7, 0.8), 0.1)
    assert set(ours.defaults) <= set(group)
    train(ours, gradients(1))


def test_unpickled_old_optimizers_get_the_newer_options() -> None:
    ours = train(cadam.CAdam(parameters()), gradients(2))
    old: dict[str, Any] = {"state": ours.state, "param_groups": ours.param_groups, "defaults": ours.defaults}
    for options in (old["defaults"], *old["param_groups"]):
        for name in ("state_dtype", "track_alignment", "fused"):
            del options[name]
    revived = cadam.CAdam.__new__(cadam.CAdam)
    revived.__setstate__(old)
    assert revived.param_groups[0]["track_alignment"] is True
    train(revived, gradients(1))


def test_users_own_tags_are_kept() -> None:
    ours = cadam.CAdam([{"params": parameters(), "initial_lr": 0.5, "table": "users"}])
    other = cadam.CAdam(parameters())
    other.load_state_dict(ours.state_dict())
    assert (other.param_groups[0]["initial_lr"], other.param_groups[0]["table"]) == (0.5, "users")


def test_parameters_without_state_start_from_zero() -> None:
    state_dict = train(torch.optim.Adam(parameters()), gradients(3)).state_dict()
    del state_dict["state"][1]
    ours = cadam.CAdam(parameters())
    ours.load_state_dict(state_dict)
    train(ours, gradients(1))
    assert [ours.state[p]["step"].item() for p in ours.param_groups[0]["params"]] == [4, 1, 4]


def test_groups_and_order_are_matched_by_position() -> None:
    """Groups may be split as in the state dict, with any keys of the user."""
    params = parameters()
    ours = cadam.CAdam([{"params": params[:1]}, {"params": params[1:]}])
    train(ours, gradients(2))
    saved = deepcopy(ours.state_dict())
    renamed = {0: "c", 1: "a", 2: "b"}
    saved["state"] = {renamed[key]: value for key, value in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [renamed[key] for key in group["params"]]
    other = cadam.CAdam([{"params": p} for p in [parameters()[:1], parameters()[1:]]])
    other.load_state_dict(saved)
    assert_identical(other.state_dict()["state"], ours.state_dict()["state"])


# Refused, and nothing changed ------------------------------------------------------------------------------------


def broken(how: str) -> Any:
    """Return a valid state dict of two groups, [(4, 3)] and [(5,), ()], with one defect."""
    params = parameters()
    good = train(torch.optim.Adam([{"params": params[:1]}, {"params": params[1:]}], amsgrad=True), gradients(2))
    d = deepcopy(good.state_dict())
    if how == "fewer groups":
        d["param_groups"].pop()
    elif how == "more groups":
        d["param_groups"].append(d["param_groups"][0])
    elif how == "larger group":
        d["param_groups"][1]["params"].append(7)
    elif how == "group without params":
        del d["param_groups"][1]["params"]
    elif how == "no state":
        del d["state"]
    elif how == "no groups":
        del d["param_groups"]
    elif how == "groups are no list":
        d["param_groups"] = {"0": d["param_groups"][0]}
    elif how == "shape":
        d["state"][2]["exp_avg"] = torch.zeros(2)
    elif how == "shape of the maximum":
        d["state"][2]["max_exp_avg_sq"] = torch.zeros(2)
    elif how == "broadcastable shape":
        d["state"][0]["exp_avg_sq"] = torch.zeros(1, 3)
    elif how == "no moment":
        del d["state"][2]["exp_avg_sq"]
    elif how == "moment is no tensor":
        d["state"][1]["exp_avg"] = 0.5
    elif how == "state is no dict":
        d["state"][1] = [1, 2]
    elif how == "no step":
        del d["state"][2]["step"]
    elif how == "step of two":
        d["state"][2]["step"] = torch.ones(2)
    elif how == "negative step":
        d["state"][2]["step"] = -1
    elif how == "NaN step":
        d["state"][2]["step"] = torch.tensor(float("nan"))
    elif how == "lr":
        d["param_groups"][1]["lr"] = -1
    elif how == "betas":
        d["param_groups"][1]["betas"] = (0.9, 1.0)
    elif how == "eps":
        d["param_groups"][1]["eps"] = float("nan")
    elif how == "maximize":
        d["param_groups"][1]["maximize"] = "no"
    else:
        raise AssertionError(how)
    return d


REFUSED = {
    "fewer groups": "different number of parameter groups: 1, here 2",
    "more groups": "different number of parameter groups: 3, here 2",
    "larger group": "group 1 has 3 parameters there and 2 here",
    "group without params": "group 1 has no 'params'",
    "no state": "not an optimizer's state dict: 'state'",
    "no groups": "not an optimizer's state dict: 'param_groups'",
    "groups are no list": "not an optimizer's state dict: 'param_groups' is dict",
    "shape": r"group 1, parameter 1 \('scale'\): exp_avg has shape \(2,\), the parameter \(\)",
    "shape of the maximum": r"group 1, parameter 1 \('scale'\): max_exp_avg_sq has shape \(2,\)",
    "broadcastable shape": r"group 0, parameter 0 \('weight'\): exp_avg_sq has shape \(1, 3\), the parameter \(4, 3\)",
    "no moment": r"group 1, parameter 1 \('scale'\): no exp_avg_sq in it",
    "moment is no tensor": r"group 1, parameter 0 \('bias'\): exp_avg is a float",
    "state is no dict": r"group 1, parameter 0 \('bias'\): its state is list",
    "no step": r"group 1, parameter 1 \('scale'\): it has no step count",
    "step of two": r"group 1, parameter 1 \('scale'\): step has shape \(2,\)",
    "negative step": r"group 1, parameter 1 \('scale'\): step is -1",
    "NaN step": r"group 1, parameter 1 \('scale'\): step is nan",
    "lr": "group 1: Invalid learning rate: -1",
    "betas": "group 1: Invalid beta parameter at index 1: 1.0",
    "eps": "group 1: Invalid epsilon value: nan",
    "maximize": "group 1: Invalid maximize value: 'no'",
}


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.parametrize("cls", [cadam.CAdam, cadam.CAmsGrad])
def test_state_dicts_that_do_not_fit_are_refused_whole(cls: type[cadam.Optimizer], how: str) -> None:
    weight, bias, scale = parameters()
    ours = cls(
        [
            {"params": [("weight", weight)], "lr": torch.tensor(0.1)},
            {"params": [("bias", bias), ("scale", scale)], "foreach": False},
        ]
    )
    train(ours, gradients(3, seed=2))
    before, invalid = snapshot(ours), broken(how)
    given = copied(invalid)
    with pytest.raises(ValueError, match=REFUSED[how]):
        ours.load_state_dict(invalid)
    assert_identical(snapshot(ours), before)
    assert_identical(invalid, given)
    train(ours, gradients(1))


@pytest.mark.parametrize("nonsense", [None, 5, [1, 2], "state", {"model": {}}], ids=str)
def test_invalid_state_dicts_are_refused(nonsense: Any) -> None:
    ours = train(cadam.CAdam(parameters()), gradients(1))
    before = snapshot(ours)
    with pytest.raises((TypeError, ValueError), match="state dict"):
        ours.load_state_dict(nonsense)
    assert_identical(snapshot(ours), before)


@pytest.mark.parametrize(
    ("entry", "value"),
    [("step", "x"), ("step", [1.0]), ("rounding_seed", "x"), ("rounding_seed", torch.ones(2))],
    ids=str,
)
def test_a_state_that_is_not_a_number_is_refused_by_name(entry: str, value: Any) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    ours = cadam.CAdam([param], moments="int8")
    ours.step()
    saved = ours.state_dict()
    saved["state"][0][entry] = value
    with pytest.raises(ValueError, match=f"group 0, parameter 0: {entry} is "):
        ours.load_state_dict(saved)


def test_a_state_dict_of_a_later_format_is_refused() -> None:
    saved = train(cadam.CAdam(parameters()), gradients(1)).state_dict()
    saved["param_groups"][0]["cadam_format"] += 1
    with pytest.raises(ValueError, match="group 0 has cadam_format 2"):
        cadam.CAdam(parameters()).load_state_dict(saved)


@pytest.mark.parametrize(
    ("source", "target", "missing"),
    [
        (partial(torch.optim.RMSprop), cadam.CAdam, "no exp_avg, exp_avg_sq in it"),
        (partial(torch.optim.SGD, momentum=0.9), cadam.CAdam, "no exp_avg, exp_avg_sq in it"),
        (torch.optim.Adam, cadam.CSGDM, "no momentum_buffer in it"),
        (torch.optim.Adam, cadam.CLion, "exp_avg_sq in it, which lion does not have"),
    ],
    ids=["RMSprop", "SGD", "Adam to CSGDM", "Adam to CLion"],
)
def test_the_state_of_another_rule_is_refused(source: Make, target: Make, missing: str) -> None:
    saved = train(source(parameters()), gradients(2)).state_dict()
    ours = target(parameters())
    with pytest.raises(ValueError, match=f"group 0, parameter 0: {missing}"):
        ours.load_state_dict(saved)
    assert not ours.state


@pytest.mark.parametrize(
    ("source", "target"),
    [(cadam.CLion, cadam.CAdam), (cadam.CAdam, cadam.CLion), (cadam.Adam, cadam.CYogi), (cadam.RAdam, cadam.CAdam)],
)
def test_our_state_of_another_rule_is_refused_by_its_name(
    source: type[cadam.Optimizer], target: type[cadam.Optimizer]
) -> None:
    saved = train(source(parameters()), gradients(2)).state_dict()
    ours = target(parameters())
    with pytest.raises(ValueError, match=f"group 0 is of {source.rule.name}, this optimizer of {target.rule.name}"):
        ours.load_state_dict(saved)
    assert not ours.state


def test_named_parameters_find_their_state_in_any_order() -> None:
    first, second = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    first.grad, second.grad = torch.ones(3), torch.full((3,), 5.0)
    for make in (torch.optim.Adam, cadam.CAdam):
        source = make([("first", first), ("second", second)])
        source.step()
        ours = cadam.CAdam([("second", second), ("first", first)])
        ours.load_state_dict(source.state_dict())
        for param in (first, second):
            assert torch.equal(ours.state[param]["exp_avg"], source.state[param]["exp_avg"])
        assert ours.param_groups[0]["param_names"] == ["second", "first"]
        renamed = cadam.CAdam([("a", second), ("b", first)])  # other names are matched by position, as in torch
        renamed.load_state_dict(source.state_dict())
        assert torch.equal(renamed.state[second]["exp_avg"], source.state[first]["exp_avg"])
        assert renamed.param_groups[0]["param_names"] == ["a", "b"]


def test_parameters_of_the_same_name_keep_their_state() -> None:
    """Two layers have parameters of the same names in one group, and each gets its own state back."""
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    named = [*first.named_parameters(), *second.named_parameters()]
    for number, (_, param) in enumerate(named):
        param.grad = torch.full_like(param, number + 1.0)
    source = cadam.CAdam(named)
    source.step()
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [1, 3, 0, 2]):
        ours = cadam.CAdam([named[place] for place in order])
        ours.load_state_dict(source.state_dict())
        for _, param in named:
            assert torch.equal(ours.state[param]["exp_avg"], source.state[param]["exp_avg"])


def test_two_optimizers_of_torch_continue_as_one() -> None:
    """A single optimizer loads the state of Adam for the dense part and of SparseAdam for the tables."""

    def model() -> torch.nn.ModuleList:
        torch.manual_seed(0)
        return torch.nn.ModuleList([torch.nn.Embedding(7, 3, sparse=True), torch.nn.Linear(3, 1)])

    def learn(layers: torch.nn.ModuleList, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        layers[1](layers[0](torch.tensor([1, 2, 2, 6]))).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    theirs, ours = model(), model()
    dense, tables = torch.optim.Adam(theirs[1].parameters()), torch.optim.SparseAdam(theirs[0].parameters(), lr=0.01)
    learn(theirs, dense, tables)
    ours.load_state_dict(theirs.state_dict())
    one = cadam.Adam([{"params": ours[1].parameters()}, {"params": ours[0].parameters()}])
    one.load_state_dict(cadam.join_state_dicts(dense.state_dict(), tables.state_dict()))
    assert [group["lr"] for group in one.param_groups] == [1e-3, 0.01]
    for _ in range(3):
        learn(theirs, dense, tables)
        learn(ours, one)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# Copies, dtypes and files ----------------------------------------------------------------------------------------


def storages(value: Any) -> set[int]:
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, dict):
        return set().union(*(storages(v) for k, v in value.items() if k != "params"))
    return set().union(*map(storages, value)) if isinstance(value, (list, tuple)) else set()


def test_loading_makes_copies() -> None:
    """Two optimizers that load the same state dict share no tensor with each other or with the source."""
    make = partial(cadam.CAmsGrad, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)))
    source = train(make(parameters()), gradients(3))
    saved = source.state_dict()
    first, second = make(parameters()), make(parameters())
    first.load_state_dict(saved)
    second.load_state_dict(saved)
    held = [storages([list(o.state.values()), o.param_groups]) for o in (source, first, second)]
    assert len(held[0]) == 15  # four tensors for each of three parameters, lr and betas
    assert len(held[0] | held[1] | held[2]) == 45
    kept = copied(second.state_dict())
    train(first, gradients(2, seed=5))
    first.param_groups[0]["lr"].fill_(7.0)
    assert_identical(second.state_dict(), kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_moments_of_half_precision_stay_float32(dtype: torch.dtype) -> None:
    ours = train(cadam.CAmsGrad(parameters(dtype)), gradients(3))
    again = cadam.CAmsGrad(parameters(dtype))
    again.load_state_dict(ours.state_dict())
    assert_identical(again.state_dict()["state"], ours.state_dict()["state"])
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert {state[name].dtype for state in again.state.values() for name in names} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_moments_of_torch_become_float32(dtype: torch.dtype) -> None:
    theirs = train(torch.optim.Adam(parameters(dtype)), gradients(3))
    assert theirs.state[theirs.param_groups[0]["params"][0]]["exp_avg"].dtype == dtype
    ours = cadam.CAdam(parameters(dtype))
    ours.load_state_dict(theirs.state_dict())
    for mine, other in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert_identical(mine["exp_avg"], other["exp_avg"].float())
        assert mine["exp_avg_sq"].dtype == torch.float32


def test_state_dtype_is_the_loaders() -> None:
    wide = train(cadam.CAdam(parameters(torch.float32)), gradients(2))
    narrow = cadam.CAdam(parameters(torch.float32), state_dtype=torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    assert {state["exp_avg"].dtype for state in narrow.state.values()} == {torch.bfloat16}


def test_complex_state_of_torch_loads() -> None:
    start = torch.randn(3, dtype=torch.complex128)
    grads = [torch.randn(3, dtype=torch.complex128) for _ in range(6)]

    def run(optimizer: torch.optim.Optimizer, given: list[Tensor]) -> Tensor:
        (param,) = optimizer.param_groups[0]["params"]
        for grad in given:
            param.grad = grad.clone()
            optimizer.step()
        return param.detach().clone()

    stayed = run(torch.optim.Adam([start.clone()]), grads)
    before = torch.optim.Adam([start.clone()])
    middle = run(before, grads[:3])
    after = cadam.Adam([middle])
    after.load_state_dict(before.state_dict())
    assert_close(run(after, grads[3:]), stayed, rtol=1e-12, atol=0)


@pytest.mark.parametrize("cls", CONFIDENT.values())
@pytest.mark.parametrize("after", [0, 1, 5])
def test_saving_to_a_file_changes_nothing(cls: type[cadam.Optimizer], after: int, tmp_path: Any) -> None:
    grads = gradients(8)
    stayed = train(cls(parameters()), grads)
    before = train(cls(parameters()), grads[:after])
    torch.save(before.state_dict(), tmp_path / "state")
    resumed = cls([Parameter(p) for p in values(before)])
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    train(resumed, grads[after:])
    assert_identical(values(resumed), values(stayed))
    assert_identical(resumed.state_dict(), stayed.state_dict())


def test_a_loaded_state_has_the_memory_layout_of_the_parameter() -> None:
    p = Parameter(torch.ones(2, 3, 4, 4))
    other = torch.optim.Adam([p])
    p.grad = torch.ones_like(p)
    other.step()
    q = Parameter(p.detach().clone().to(memory_format=torch.channels_last))
    q.grad = torch.ones_like(q)
    optimizer = cadam.CAdam([q], fused=True)
    optimizer.load_state_dict(other.state_dict())
    optimizer.step()
    assert optimizer.state[q]["exp_avg"].stride() == q.stride()


DISTRIBUTED: dict[str, tuple[type[torch.optim.Optimizer], type[cadam.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, cadam.CAdam, {}),
    "AMSGrad": (torch.optim.Adam, cadam.CAdam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, cadam.CAdamW, {"weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, cadam.CRAdam, {}),
}


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_distributed_checkpoint_of_torch_is_loaded_by_torchs_own_keys(name: str, tmp_path: Path) -> None:
    """A checkpoint is loaded into a state dict with the keys of the saved one, which `for_torch` provides."""
    torchs: Any
    torchs, ours, given = DISTRIBUTED[name]
    model = torch.nn.Linear(3, 2)
    old = torchs(model.parameters(), lr=0.05, **given)
    for _ in range(3):
        old.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        old.step()
    dcp.state_dict_saver.save({"optimizer": get_optimizer_state_dict(model, old)}, checkpoint_id=tmp_path)

    optimizer = ours(model.parameters(), **given)
    optimizer.zero_grad()  # torch creates the state to load into only if there are no gradients
    saved = {"optimizer": cadam.for_torch(get_optimizer_state_dict(model, optimizer))}
    dcp.state_dict_loader.load(saved, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])

    directly = ours(model.parameters(), **given)
    directly.load_state_dict(old.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.state[model.weight]["step"] == 3
    assert_identical(optimizer.state_dict()["state"], directly.state_dict()["state"])
