"""Bad input raises an error that names the argument, its value and the allowed values, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.testing import assert_close

import cadam
from cadam.engines.cuda.step_replay import disabled_reason
from cadam.engines.replay import is_replay_enabled
from tests.optim.exact import assert_identical, copied

NAN, INF = float("nan"), float("inf")


def parameter(*shape: int) -> Parameter:
    return Parameter(torch.ones(shape or (3,)))


# Options ---------------------------------------------------------------------------------------------------------

NOT_TWO: list[Any] = [0.9, (0.9,), (0.9, 0.99, 0.999), None, "ab", {}, {0.9, 0.99}]
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"lr": bad}, "Invalid learning rate: .*lr must be a finite number >= 0") for bad in (-1, -1e-9, NAN, INF, -INF)),
    *(({"lr": torch.tensor(bad)}, "Invalid learning rate: .*lr must be") for bad in (-1.0, NAN, INF)),
    *(({"lr": bad}, "Invalid learning rate: .*lr must be a number") for bad in ("0.1", None, True, [0.1], 1j)),
    *(({"lr": np.array(bad)}, "Invalid learning rate: .*lr must be a number") for bad in (True, "0.1", [0.1, 0.2])),
    ({"lr": torch.tensor([0.1, 0.2])}, r"Tensor lr must be 1-element, got shape \(2,\)"),
    ({"lr": torch.empty(0)}, r"Tensor lr must be 1-element, got shape \(0,\)"),
    *(
        ({"betas": (bad, 0.9)}, r"Invalid beta parameter at index 0: .*in \[0, 1\)")
        for bad in (1.0, -0.1, 1.5, NAN, INF)
    ),
    *(
        ({"betas": (0.9, bad)}, r"Invalid beta parameter at index 1: .*in \[0, 1\)")
        for bad in (1.0, -0.1, 1.5, NAN, INF)
    ),
    ({"betas": (torch.tensor(0.9), torch.tensor(1.0))}, "Invalid beta parameter at index 1: .*"),
    *(({"betas": bad}, "Invalid betas: .*two numbers") for bad in NOT_TWO),
    ({"betas": ("0.9", "0.99")}, "Invalid beta parameter at index 0: '0.9'"),
    ({"betas": (0.9, torch.tensor(0.99))}, "betas must be either both floats or both Tensors"),
    *(({"eps": bad}, "Invalid epsilon value: .*eps must be a finite number >= 0") for bad in (-1e-8, NAN, INF)),
    ({"eps": None}, "Invalid epsilon value: None"),
    *(({"weight_decay": bad}, "Invalid weight_decay value: .*finite number >= 0") for bad in (-0.1, NAN, INF)),
    ({"weight_decay": "0"}, "Invalid weight_decay value: '0'"),
    *(
        ({name: 1}, f"Invalid {name} value: 1 .*True or False")
        for name in ("amsgrad", "maximize", "capturable", "differentiable")
    ),
    *(({name: "x"}, f"Invalid {name} value: 'x'") for name in ("decoupled_weight_decay", "replay", "track_alignment")),
    ({"foreach": "yes"}, "Invalid foreach value: 'yes' .*None, True or False"),
    ({"fused": "yes"}, "Invalid fused value: 'yes' .*None, True or False"),
    *(({"state_dtype": bad}, "Invalid state_dtype value") for bad in ("float32", torch.int64, torch.complex64, 32)),
]
OTHER_BAD_OPTIONS: list[tuple[type[cadam.Optimizer], dict[str, Any], str]] = [
    *((cadam.CSGDM, {"momentum": bad}, "Invalid momentum value: .*") for bad in (-0.1, NAN, INF, None, "0.9")),
    *((cadam.CSGDM, {"dampening": bad}, "Invalid dampening value: .*") for bad in (-0.1, 1.5, NAN, "0")),
    (cadam.CSGDM, {"nesterov": True, "momentum": 0}, "Nesterov momentum requires a momentum and zero dampening"),
    (cadam.CSGDM, {"nesterov": True, "dampening": 0.5}, "Nesterov momentum requires a momentum and zero dampening"),
    *((cadam.CYogi, {"initial_accumulator": bad}, "Invalid initial_accumulator") for bad in (-1.0, NAN, INF, "0")),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=str)
def test_bad_options_of_the_constructor(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cadam.CAdam([parameter()], **options)


@pytest.mark.parametrize(("cls", "options", "message"), OTHER_BAD_OPTIONS, ids=str)
def test_bad_options_of_other_rules(cls: type[cadam.Optimizer], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls([parameter()], **options)


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=str)
def test_bad_options_of_a_group(options: dict[str, Any], message: str) -> None:
    optimizer = cadam.CAdam([parameter()])
    before = copied([optimizer.param_groups, optimizer.defaults])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter()], **options})
    assert_identical([optimizer.param_groups, optimizer.defaults], before)


NUMBERS = [0, 1, np.float64(0.1), np.float32(0.1), np.int64(1), np.array(0.1), np.array([0.1]), torch.tensor(0.1)]


@pytest.mark.parametrize("when", ["constructor", "group", "later"])
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_every_type_of_number_can_be_a_learning_rate(number: Any, when: str) -> None:
    param = parameter()
    param.grad = torch.ones(3)
    group = {"params": [param], **({"lr": number} if when == "group" else {})}
    optimizer = cadam.CAdam([group], **({"lr": number} if when == "constructor" else {}))
    if when == "later":
        optimizer.param_groups[0]["lr"] = number
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 1.0 - np.asarray(number).item()))


class Config:
    """A sequence that is neither a list nor a tuple, like those of configuration libraries."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> float:
        return self.values[index]


PAIRS: list[Any] = [[0.8, 0.9], Config(0.8, 0.9), np.array([0.8, 0.9]), torch.tensor([0.8, 0.9], dtype=torch.float64)]


@pytest.mark.parametrize("when", ["constructor", "group"])
@pytest.mark.parametrize("betas", [*PAIRS, (np.float64(0.8), np.array(0.9))], ids=lambda betas: type(betas).__name__)
def test_any_two_numbers_in_order_are_betas(betas: Any, when: str) -> None:
    moved = []
    for each in ((0.8, 0.9), betas):
        param = parameter()
        group = {"params": [param], **({"betas": each} if when == "group" else {})}
        given: dict[str, Any] = {"betas": each} if when == "constructor" else {}
        optimizer = cadam.CAdam([group], **given)
        for slope in (1.0, -0.5, -2.0):
            param.grad = torch.full((3,), slope)
            optimizer.step()
        kept = optimizer.param_groups[0]["betas"]
        assert type(kept) is tuple
        assert all(type(beta) is float or (isinstance(beta, Tensor) and beta.shape == ()) for beta in kept)
        moved.append(param.detach())
    assert_identical(moved[0], moved[1])


def test_betas_of_a_state_dict_may_come_from_a_config() -> None:
    optimizer = cadam.CAdam([parameter()])
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(betas=[0.5, 0.6], lr=np.array(0.1))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_zero_betas_and_eps_are_allowed() -> None:
    (group,) = cadam.CAdam([parameter()], betas=(0, 0.0), eps=0).param_groups
    assert (group["betas"], group["eps"]) == ((0, 0), 0)


@pytest.mark.parametrize("cls", [cadam.CAdam, cadam.AdamW])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("certainty", "; the options are amsgrad, betas"),
        ("Lr", "; did you mean 'lr'"),
        ("learning_rate", "; did you mean 'lr'"),
        ("beta1", "; did you mean 'betas'"),
        ("weight_decy", "; did you mean 'weight_decay'"),
    ],
)
def test_unknown_options_of_the_constructor_are_refused_with_a_suggestion(
    cls: type[cadam.Optimizer], given: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=f"{cls.__name__}: unknown option '{given}'{meant}"):
        cls([parameter()], **{given: 0.1})


@pytest.mark.parametrize(("value", "on"), [("0", False), ("False", False), ("off", False), ("1", True), ("", True)])
def test_replay_can_be_turned_off_by_several_values_of_the_environment_variable(
    value: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CADAM_REPLAY", value)
    cadam.CAdam([parameter()])
    assert is_replay_enabled() is on
    assert (disabled_reason([{}]) is None) is on


def test_an_unknown_value_of_the_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADAM_REPLAY", "maybe")
    with pytest.raises(ValueError, match="CADAM_REPLAY is 'maybe'; it takes 0, false, off or 1, true, on"):
        cadam.CAdam([parameter()])
    assert "'maybe'" in str(disabled_reason([{}]))


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}], ids=["default", "foreach", "eager"])
@pytest.mark.parametrize("made", [list, np.array, lambda betas: torch.tensor(betas, dtype=torch.float64)])
def test_betas_between_steps_may_be_any_two_numbers(made: Any, how: dict[str, Any]) -> None:
    found = []
    for kind in (tuple, made):
        p = torch.ones(3)
        optimizer = cadam.CAdam([p], lr=0.1, **how)
        for step in range(5):
            p.grad = torch.tensor([1.0, -1.0, 0.5]) * (step + 1)
            if step in (2, 3):
                optimizer.param_groups[0]["betas"] = kind((0.5, 0.9 + 0.01 * step))
            optimizer.step()
        found.append(p)
    assert torch.equal(*found)


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"capturable": True}], ids=["default", "foreach", "capturable"])
@pytest.mark.filterwarnings("ignore:cadam. no fused kernels")
def test_a_step_on_fake_tensors_of_a_device_that_torch_was_not_built_for(how: dict[str, Any]) -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA")
    with FakeTensorMode():
        p = Parameter(torch.zeros(3, 4, device="cuda"))
        optimizer = cadam.CAdam([p], **how)
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert {name: tuple(value.shape) for name, value in optimizer.state[p].items()} == {
        "step": (),
        "exp_avg": (3, 4),
        "exp_avg_sq": (3, 4),
    }


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="CAdam: unknown option 'learning_rate'; did you mean 'lr'"):
        cadam.CAdam.options_of(learning_rate=0.1)
    with pytest.raises(TypeError, match="CAdam: unknown option 'certainty'; the options are amsgrad, betas"):
        cadam.CAdam.options_of(certainty=True)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("beta", "betas"), ("weightdecay", "weight_decay"), ("param", "params"), ("learning_rate", "lr")],
)
def test_misspelt_options_of_a_group(given: str, meant: str) -> None:
    """They may be keys of the user, so they are kept with a warning."""
    with pytest.warns(UserWarning, match=f"parameter group 1: unknown option '{given}'; did you mean '{meant}'"):
        optimizer = cadam.CAdam([{"params": [parameter()]}, {"params": [parameter()], given: 0.1}])
    assert optimizer.param_groups[1][given] == 0.1
    assert {name: optimizer.param_groups[1][name] for name in optimizer.defaults} == optimizer.defaults


@pytest.mark.parametrize("tag", ["initial_lr", "swa_lr", "max_lr", "lr_scale", "layer", "name"])
@pytest.mark.filterwarnings("error")
def test_tags_of_users_in_a_group_are_ignored(tag: str) -> None:
    optimizer = cadam.CAdam([{"params": [parameter()], tag: 0.1}])
    assert optimizer.param_groups[0][tag] == 0.1


@pytest.mark.parametrize(
    ("cls", "option", "value"),
    [
        (cadam.CAdamW, "decoupled_weight_decay", False),
        (cadam.AdamW, "decoupled_weight_decay", False),
        (cadam.CAmsGrad, "amsgrad", False),
        (cadam.AmsGrad, "amsgrad", False),
    ],
)
def test_the_options_that_define_a_class_are_fixed(cls: type[cadam.Optimizer], option: str, value: Any) -> None:
    message = f"{cls.__name__} .*{option}={not value}; got {value}"
    with pytest.raises(ValueError, match=message):
        cls([parameter()], **{option: value})
    optimizer = cls([parameter()], **{option: not value})
    before = copied(optimizer.param_groups)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter()], option: value})
    assert_identical(optimizer.param_groups, before)


def test_fused_insists_on_a_fused_engine() -> None:
    """If no fused engine supports a parameter, the error has its name and the reason, and nothing is updated."""
    params = [torch.ones(3), torch.ones(4, 2)[:, 0]]
    optimizer = cadam.CAdam([{"params": params[:1], "fused": None}, {"params": params[1:]}], fused=True)
    for param in params:
        param.grad = torch.ones_like(param)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="group 1, parameter 0: fused=True, but no fused engine can serve it: "):
        optimizer.step()
    assert_identical(snapshot(optimizer), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fused": True, "foreach": True}, "`fused` and `foreach` cannot be `True` together"),
        ({"fused": True, "differentiable": True}, "`fused` does not support `differentiable`"),
    ],
    ids=str,
)
def test_options_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        cadam.CAdam([parameter()], **options)


# Parameters ------------------------------------------------------------------------------------------------------

TWICE = parameter()
BAD_PARAMETERS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nothing": (lambda: [], ValueError, "empty parameter list"),
    "no generator output": (lambda: iter([]), ValueError, "empty parameter list"),
    "a tensor": (parameter, TypeError, "params argument given to the optimizer should be an iterable"),
    "a number": (lambda: [1.0], TypeError, "optimizer can only optimize Tensors, but one of the params is float"),
    "not a leaf": (lambda: [parameter() * 2], ValueError, "can't optimize a non-leaf Tensor"),
    "sparse": (lambda: [torch.ones(3).to_sparse()], ValueError, "parameter 0 has layout torch.sparse_coo"),
    "compressed": (lambda: [torch.ones(3, 3).to_sparse_csr()], ValueError, "parameter 0 has layout torch.sparse_csr"),
    "duplicates across groups": (
        lambda: [{"params": [TWICE]}, {"params": [TWICE]}],
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    "names for some": (lambda: [("a", parameter()), parameter()], ValueError, "with/without names"),
}


@pytest.mark.parametrize("what", BAD_PARAMETERS)
def test_bad_parameters_of_the_constructor(what: str) -> None:
    make, kind, message = BAD_PARAMETERS[what]
    with pytest.raises(kind, match=message):
        cadam.CAdam(make())


def snapshot(optimizer: cadam.Optimizer) -> Any:
    """Return everything that a refused call must not change."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return copied(
        [
            params,
            [id(p) for p in params],
            [optimizer.state.get(p, {}) for p in params],
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            optimizer.defaults,
            str(optimizer.alignment()),
        ]
    )


KNOWN = parameter()
GROUPS: dict[str, tuple[Callable[[], Any], type[Exception] | tuple[type[Exception], ...], str]] = {
    "not a dict": (lambda: [parameter()], TypeError, "param_group must be a dict"),
    "no params": (lambda: {"lr": 0.1}, (ValueError, KeyError), "params"),
    "a set": (lambda: {"params": {parameter()}}, TypeError, "optimizer parameters need to be organized in ordered"),
    "lr": (lambda: {"params": [parameter()], "lr": -1}, ValueError, "Invalid learning rate: -1"),
    "sparse": (lambda: {"params": torch.ones(2).to_sparse()}, ValueError, "layout torch.sparse_coo"),
    "known": (lambda: {"params": [KNOWN]}, ValueError, "some parameters appear in more than one parameter group"),
    "named": (lambda: {"params": [("a", parameter())]}, ValueError, "with/without names"),
}


@pytest.mark.parametrize("what", GROUPS)
def test_a_refused_group_does_not_change_the_optimizer(what: str) -> None:
    make, kind, message = GROUPS[what]
    optimizer = cadam.CAdam([KNOWN], lr=0.1)
    KNOWN.grad = torch.ones(3)
    optimizer.step()
    before = snapshot(optimizer)
    with pytest.raises(kind, match=message):
        optimizer.add_param_group(make())
    assert_identical(snapshot(optimizer), before)
    optimizer.add_param_group({"params": [parameter(2)]})
    optimizer.step()
    assert optimizer.state[KNOWN]["step"] == 2


TWICE_GIVEN: dict[str, Callable[[Parameter], Any]] = {
    "list": lambda p: [p, p],
    "apart": lambda p: [p, parameter(2), p],
    "generator": lambda p: (each for each in (p, p)),
    "names": lambda p: [("a", p), ("b", p)],
    "group": lambda p: [{"params": [p, p]}],
    "group's generator": lambda p: [{"params": (each for each in (p, p))}],
}


@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("given", TWICE_GIVEN)
def test_a_parameter_that_is_given_twice_is_moved_once(given: str, how: dict[str, Any]) -> None:
    """torch also warns, but updates such a parameter twice with the same gradient."""
    twice, once = parameter(), parameter()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = cadam.CAdam(TWICE_GIVEN[given](twice), lr=0.1, **how)
    alone = cadam.CAdam([once], lr=0.1, **how)
    for slope in (1.0, -2.0, 0.5, 0.5):
        twice.grad, once.grad = torch.full((3,), slope), torch.full((3,), slope)
        optimizer.step()
        alone.step()
    assert_identical([twice, optimizer.state[twice]], [once, alone.state[once]])
    assert optimizer.alignment().total == alone.alignment().total
    assert_identical(optimizer.alignment_counts(), alone.alignment_counts())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.state[twice]["step"] == 5


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": True, "capturable": True}], ids=str)
def test_parameters_that_share_memory_move_one_after_the_other(how: dict[str, Any], sparse: bool) -> None:
    moved = []
    for options in ({"foreach": False}, how):
        memory = torch.arange(8.0)
        params = [memory[:4], memory[2:6], memory[4:], memory[1::2]]
        optimizer = cadam.CAdam(params, lr=0.1, **options)
        for slope in (1.0, -2.0, -1.0):
            for i, param in enumerate(params):
                grad = torch.full_like(param, slope + i)
                param.grad = grad.to_sparse() if sparse else grad
            optimizer.step()
        moved.append(memory)
    assert_close(moved[0], moved[1])


@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "later step"])
@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}], ids=str)
@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", "0.1"), ("lr", None), ("weight_decay", "0.1"), ("eps", "1e-8"), ("betas", ("0.9", "0.99")), ("betas", 0.9)],
)
def test_values_that_are_not_numbers_are_refused_at_any_time(
    option: str, value: Any, how: dict[str, Any], steps: int
) -> None:
    param, other = parameter(), parameter(2)
    optimizer = cadam.CAdam([{"params": [other]}, {"params": [param]}], **how)
    param.grad, other.grad = torch.ones(3), torch.ones(2)
    for _ in range(steps):
        optimizer.step()
    before = copied([param, other, dict(optimizer.state)])
    optimizer.param_groups[1][option] = value
    with pytest.raises(ValueError, match=r"group 1: Invalid .*; no parameter was changed"):
        optimizer.step()
    assert_identical([param, other, dict(optimizer.state)], before)


@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}], ids=str)
def test_options_of_a_group_without_gradients_do_not_matter(how: dict[str, Any]) -> None:
    param, idle = parameter(), parameter()
    optimizer = cadam.CAdam([{"params": [param]}, {"params": [idle]}], lr=0.1, **how)
    optimizer.param_groups[1].update(betas=(1.0, 1.0))
    for step in range(3):
        param.grad = torch.ones(3)
        optimizer.param_groups[1].update(betas=(1.0, 1.0 - step / 10))
        optimizer.step()
    assert_close(param.detach(), torch.full((3,), 0.7))
    assert idle not in optimizer.state


@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta", *["cuda"] * torch.backends.cuda.is_built()])
def test_fake_tensors_are_stepped(device: str, how: dict[str, Any]) -> None:
    """Tools that estimate memory use such tensors, which have shapes and dtypes but no values."""
    with FakeTensorMode():
        param = Parameter(torch.ones(2, 3, dtype=torch.bfloat16, device=device))
        optimizer = cadam.CAdam([param], **how)
        for _ in range(3):
            param.grad = torch.ones_like(param)
            optimizer.step()
        exp_avg = optimizer.state[param]["exp_avg"]
    assert (exp_avg.shape, exp_avg.dtype, exp_avg.device) == (param.shape, torch.float32, param.device)


def test_the_error_for_fused_names_only_applicable_engines() -> None:
    param = torch.ones(3, 2)[:, 0]
    param.grad = torch.ones(3)
    optimizer = cadam.CAdam([param], fused=True)
    with pytest.raises(RuntimeError, match="no fused engine can serve it: native ") as caught:
        optimizer.step()
    assert "cuda" not in str(caught.value)
    assert "foreach" not in str(caught.value)


def test_the_given_group_is_not_written_into() -> None:
    group = {"params": [parameter()], "lr": 0.5}
    cadam.CAdam([group])
    assert list(group) == ["params", "lr"]


def test_an_optimizer_without_a_rule() -> None:
    with pytest.raises(TypeError, match="Optimizer has no rule"):
        cadam.Optimizer([parameter()])


# Gradients -------------------------------------------------------------------------------------------------------


class Loose(Parameter):
    """A parameter that accepts any gradient. torch.nn.Parameter refuses most bad ones, depending on the version."""

    held: Tensor | None = None

    @property
    def grad(self) -> Tensor | None:
        return self.held

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.held = value


BAD_GRADIENTS: dict[str, tuple[Tensor, str]] = {
    "shape": (torch.ones(2, 2), r"the gradient has shape \(2, 2\), the parameter \(4, 3\)"),
    "shape of the same size": (torch.ones(3, 4), r"the gradient has shape \(3, 4\), the parameter \(4, 3\)"),
    "shape of sparse": (torch.ones(4, 4).to_sparse(), r"the gradient has shape \(4, 4\), the parameter \(4, 3\)"),
    "device": (torch.ones(4, 3, device="meta"), "the gradient is on meta, the parameter on cpu"),
    "layout": (torch.ones(4, 3).to_sparse_csr(), "the gradient has layout torch.sparse_csr; dense and sparse_coo"),
    "complex": (torch.ones(4, 3, dtype=torch.complex64), "the gradient has dtype torch.complex64, the parameter"),
}
HOW: dict[str, dict[str, Any]] = {
    "default": {},
    "reference": {"foreach": False},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True},
}


@pytest.mark.parametrize("steps", [0, 3], ids=["first step", "later step"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bad", BAD_GRADIENTS)
def test_a_bad_last_gradient_changes_nothing(bad: str, how: str, steps: int) -> None:
    """Nothing is updated although the other gradients are good, and later steps work."""
    invalid, message = BAD_GRADIENTS[bad]
    good, table, last = parameter(5), parameter(6, 2), Loose(torch.ones(4, 3))
    optimizer = cadam.CAdam([{"params": [good, table]}, {"params": [last], "lr": 0.1}], **HOW[how])

    def give_gradients() -> None:
        good.grad, last.grad = torch.randn(5), torch.randn(4, 3)
        table.grad = torch.sparse_coo_tensor(
            torch.tensor([[1, 4, 1]]), torch.randn(3, 2), (6, 2), check_invariants=True
        )

    for _ in range(steps):
        give_gradients()
        optimizer.step()
    give_gradients()
    last.grad = invalid
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=f"group 1, parameter 0: {message}.*; no parameter was changed"):
        optimizer.step()
    assert_identical(snapshot(optimizer), before)
    give_gradients()
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in (good, table, last)] == [steps + 1] * 3


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_may_change_their_dtype(dtype: torch.dtype, how: str) -> None:
    """The dtype may also change from step to step."""
    dtypes = [dtype, torch.bfloat16, torch.float16, torch.float32, torch.float64, dtype]
    param, same = Loose(torch.ones(4, dtype=dtype)), Loose(torch.ones(4, dtype=dtype))
    optimizers = [cadam.CAdam([p], lr=0.1, **HOW[how]) for p in (param, same)]
    for other in dtypes:
        param.grad = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=other)
        same.grad = param.grad.to(dtype)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(param.detach(), same.detach())


UNMOVED = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", UNMOVED, ids=str)
def test_frozen_parameters_may_have_any_dtype(dtype: torch.dtype, how: dict[str, Any]) -> None:
    """Quantized models have such parameters, which are saved and loaded with the others."""
    frozen, param = Parameter(torch.ones(2, 3).to(dtype), requires_grad=False), parameter()
    optimizer = cadam.CAdam([("frozen", frozen), ("trained", param)], lr=0.1, **how)
    for _ in range(2):
        param.grad = torch.ones(3)
        optimizer.step()
    assert list(optimizer.state) == [param]
    assert_close(param.detach(), torch.full((3,), 0.8))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert_identical(optimizer.state_dict(), saved)
    engine, passed_over = optimizer.explain()[0].engine, optimizer.explain()[0].passed_over
    assert (engine, list(passed_over)) == ("none", ["any"])


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later step"])
@pytest.mark.parametrize("dtype", UNMOVED, ids=str)
def test_gradients_of_parameters_that_cannot_be_updated_are_refused(dtype: torch.dtype, steps: int) -> None:
    frozen, param = Loose(torch.ones(2).to(dtype), requires_grad=False), parameter()
    optimizer = cadam.CAdam([("trained", param), ("frozen", frozen)])
    param.grad = torch.ones(3)
    for _ in range(steps):
        optimizer.step()
    frozen.grad = torch.ones(2).to(dtype)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=rf"parameter 1 \('frozen'\): a parameter of dtype {dtype} cannot be"):
        optimizer.step()
    assert_identical(snapshot(optimizer), before)


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later step"])
def test_a_gradient_of_another_shape_is_refused_by_name(steps: int) -> None:
    layer = torch.nn.Linear(3, 2)
    optimizer = cadam.CAdam(layer.named_parameters())
    for _ in range(steps):
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    layer.weight.grad = torch.ones(2, 3)
    layer.weight.data = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0 \('weight'\): the gradient has shape"):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later step"])
def test_sparse_gradients_are_not_differentiable(steps: int) -> None:
    good, table = torch.ones(3), torch.ones(4, 2)
    optimizer = cadam.CAdam([good, table], differentiable=True)
    for _ in range(steps):
        good.grad, table.grad = torch.ones(3), torch.ones(4, 2)
        optimizer.step()
    good.grad, table.grad = torch.ones(3), torch.ones(4, 2).to_sparse()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="parameter 1: differentiable=True does not support sparse gradients"):
        optimizer.step()
    assert_identical(snapshot(optimizer), before)


def test_a_closure_that_raises_changes_nothing() -> None:
    param = parameter()
    param.grad = torch.ones(3)
    optimizer = cadam.CAdam([param])
    optimizer.step()
    before = snapshot(optimizer)

    def closure() -> Tensor:
        raise ArithmeticError("no loss")

    with pytest.raises(ArithmeticError, match="no loss"):
        optimizer.step(closure)
    assert_identical(snapshot(optimizer), before)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("how", HOW)
def test_a_gradient_that_is_not_finite_shows(how: str, bad: float) -> None:
    """As in torch.optim, it is not an error, but the mask must not hide it. The other elements are fine."""
    param, table = torch.ones(3), torch.ones(3)
    optimizer = cadam.CAdam([param, table], **HOW[how])
    param.grad = torch.tensor([1.0, bad, -1.0])
    table.grad = param.grad.to_sparse()
    optimizer.step()
    for moved in (param, table):
        assert moved.isfinite().tolist() == [True, False, True]


def test_an_option_that_becomes_nan_reaches_the_parameter() -> None:
    """Values that a scheduler writes are not checked at every step, but a NaN reaches the parameter."""
    param = parameter()
    param.grad = torch.ones(3)
    optimizer = cadam.CAdam([param])
    optimizer.param_groups[0]["lr"] = NAN
    optimizer.step()
    assert param.isnan().all()


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=["default", "reference"])
def test_a_new_shape_is_refused_with_nothing_changed(options: dict[str, Any]) -> None:
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = cadam.CAdam([p], **options)
    p.grad = torch.ones(4, 2)
    optimizer.step()
    p.grad = None
    p.data = torch.ones(2, 5)
    p.grad = torch.ones(2, 5)
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0.*shape \(4, 2\).*no parameter was changed"):
        optimizer.step()
    assert optimizer.state[p]["step"].item() == 1


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), nn.Linear(2, 2).parameters], ids=["module", "method"])
def test_params_of_a_wrong_type_are_refused_with_a_hint(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"pass model.parameters\(\)"):
        cadam.CAdam(wrong)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=["default", "fused", "reference"])
def test_state_on_another_device_is_refused_with_nothing_changed(options: dict[str, Any], sparse: bool) -> None:
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = cadam.CAdam([p], **options)
    grad = torch.ones(4, 2).to_sparse(1) if sparse else torch.ones(4, 2)
    for _ in range(3):
        p.grad = grad
        optimizer.step()
    before = p.detach().clone()
    # Simulates that the model was moved to another device.
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].to("meta")
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0.*exp_avg is on meta, .* on cpu .*; no parameter was"):
        optimizer.step()
    assert torch.equal(p, before)
    assert (
        optimizer.explain()[0]
        .passed_over[f"native{'-rows' * sparse}"]
        .reason.startswith("fused=None" if "foreach" in options else "exp_avg is on meta")
    )


def test_state_that_an_option_of_the_group_needs_is_checked() -> None:
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = cadam.CAdam([{"params": [p], "amsgrad": True}])
    p.grad = torch.ones(4, 2)
    optimizer.step()
    optimizer.state[p]["max_exp_avg_sq"] = torch.ones(4, 2, device="meta")
    with pytest.raises(RuntimeError, match="its state max_exp_avg_sq is on meta"):
        optimizer.step()


def test_state_that_is_no_tensor_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = cadam.CAdam([p])
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = None
    with pytest.raises(RuntimeError, match="its state exp_avg is None, not a tensor"):
        optimizer.step()


def test_a_note_of_any_kind_in_a_group_is_the_users_own() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = cadam.CAdam([p], lr=0.1)
    for step in range(6):
        optimizer.param_groups[0]["importance"] = torch.rand(3)
        p.grad = torch.ones(3)
        optimizer.step()
        assert optimizer.state[p]["step"] == step + 1


def test_foreach_with_differentiable_is_refused() -> None:
    p = torch.ones(3, requires_grad=True)
    optimizer = cadam.CAdam([p], foreach=True, differentiable=True)
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="foreach=True was asked for, but differentiable=True needs the eager"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))
