"""A step uses everything that the user has changed since the step before.

As in torch.optim, users may change options, state, gradients and parameters. Every test compares the optimizer with a
new one that is created from the current values.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import cadam
from cadam.engines.step_plan import StepPlan
from cadam.native import tensor_snapshot
from tests.optim.exact import assert_identical, present

HOW: dict[str, dict[str, Any]] = {
    "default": {},
    "reference": {"foreach": False},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True},
}


class Trained:
    """An optimizer with two groups after some steps: a weight and a table, and a bias without gradient."""

    def __init__(self, how: str, steps: int = 3) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.weight, self.table, self.bias = (Parameter(self.randn(s)) for s in [(4, 3), (6, 2), (5,)])
        groups = [{"params": [self.weight]}, {"params": [self.table, self.bias], "lr": 0.03}]
        self.optimizer: cadam.Optimizer = cadam.CAdam(groups, lr=0.1, **HOW[how])
        for _ in range(steps):
            self.give_gradients()
            self.optimizer.step()

    def randn(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def give_gradients(self) -> None:
        self.weight.grad = self.randn((4, 3))
        self.table.grad = torch.sparse_coo_tensor(
            torch.tensor([[5, 2, 5]]), self.randn((3, 2)), (6, 2), check_invariants=True
        )

    def reborn(self) -> Trained:
        """Return a copy of all values, with a new optimizer."""
        other = Trained.__new__(Trained)
        other.generator = self.generator.clone_state()
        listed = [p for group in self.optimizer.param_groups for p in group["params"]]
        params = {p: Parameter(p.detach().clone()) for p in (self.weight, self.table, self.bias, *listed)}
        for old, new in params.items():
            new.grad = None if old.grad is None else old.grad.clone()
        other.weight, other.table, other.bias = (params[p] for p in (self.weight, self.table, self.bias))
        groups = [
            {k: [params[p] for p in v] if k == "params" else deepcopy(v) for k, v in group.items()}
            for group in self.optimizer.param_groups
        ]
        other.optimizer = cadam.CAdam(groups)
        for old, new in params.items():
            if old in self.optimizer.state:
                other.optimizer.state[new] = deepcopy(self.optimizer.state[old])
        return other

    def everything(self) -> Any:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return params, [dict(self.optimizer.state.get(p, {})) for p in params]


CHANGES: dict[str, Callable[[Trained], Any]] = {}


def change(function: Callable[[Trained], Any]) -> Callable[[Trained], Any]:
    CHANGES[function.__name__] = function
    return function


def set_option(name: str, value: Any) -> None:
    def apply(t: Trained) -> None:
        t.optimizer.param_groups[0][name] = value

    CHANGES[f"{name}={value!r}"] = apply


set_option("lr", 0.5)
set_option("lr", torch.tensor(0.5, dtype=torch.float64))
set_option("betas", (0.5, 0.6))
set_option("eps", 0.1)
set_option("weight_decay", 0.3)
set_option("maximize", True)
set_option("amsgrad", True)
set_option("foreach", True)
set_option("foreach", False)
set_option("capturable", True)
set_option("track_alignment", False)
CHANGES["nothing"] = lambda t: None


@change
def decoupled_decay(t: Trained) -> None:
    t.optimizer.param_groups[0].update(weight_decay=0.3, decoupled_weight_decay=True)


@change
def group_replaced(t: Trained) -> None:
    t.optimizer.param_groups[0] = {**t.optimizer.param_groups[0], "lr": 0.7}


@change
def groups_swapped(t: Trained) -> None:
    t.optimizer.param_groups.reverse()


@change
def group_added(t: Trained) -> None:
    extra = Parameter(torch.ones(2))
    extra.grad = torch.ones(2)
    t.optimizer.add_param_group({"params": [extra], "lr": 0.2})


@change
def parameter_appended(t: Trained) -> None:
    extra = Parameter(torch.ones(2))
    extra.grad = torch.ones(2)
    t.optimizer.param_groups[0]["params"].append(extra)


@change
def parameter_removed(t: Trained) -> None:
    t.optimizer.param_groups[1]["params"] = [t.table]


@change
def moment_replaced(t: Trained) -> None:
    t.optimizer.state[t.weight]["exp_avg"] = torch.full((4, 3), -3.0)


@change
def moment_written(t: Trained) -> None:
    t.optimizer.state[t.weight]["exp_avg_sq"].fill_(9.0)


@change
def moment_data_replaced(t: Trained) -> None:
    t.optimizer.state[t.weight]["exp_avg"].data = torch.full((4, 3), -3.0)


@change
def step_replaced(t: Trained) -> None:
    t.optimizer.state[t.weight]["step"] = torch.tensor(100.0)


@change
def step_written(t: Trained) -> None:
    t.optimizer.state[t.table]["step"].fill_(50.0)


@change
def state_of_one_dropped(t: Trained) -> None:
    del t.optimizer.state[t.weight]


@change
def state_cleared(t: Trained) -> None:
    t.optimizer.state.clear()


@change
def moment_dropped(t: Trained) -> None:
    del t.optimizer.state[t.weight]["exp_avg"]


@change
def state_loaded(t: Trained) -> None:
    t.optimizer.load_state_dict(deepcopy(t.optimizer.state_dict()))


@change
def gradient_appears(t: Trained) -> None:
    t.bias.grad = torch.ones(5)


@change
def gradient_disappears(t: Trained) -> None:
    t.weight.grad = None


@change
def gradient_becomes_sparse(t: Trained) -> None:
    t.weight.grad = torch.ones(4, 3).to_sparse(1)


@change
def gradient_becomes_dense(t: Trained) -> None:
    t.table.grad = torch.ones(6, 2)


@change
def gradient_with_other_strides(t: Trained) -> None:
    t.weight.grad = torch.arange(12.0).reshape(3, 4).t() - 5


@change
def gradient_shared(t: Trained) -> None:
    t.weight.grad = torch.ones(1, 1).expand(4, 3)


@change
def data_replaced(t: Trained) -> None:
    t.weight.data = torch.full((4, 3), 2.0)


@change
def data_with_other_strides(t: Trained) -> None:
    t.weight.data = torch.arange(12.0).reshape(3, 4).t()


@change
def data_in_double(t: Trained) -> None:
    t.weight.grad = None
    t.weight.data = t.weight.data.double()
    t.weight.grad = torch.ones(4, 3, dtype=torch.float64)


@change
def everything_frozen(t: Trained) -> None:
    for p in (t.weight, t.table, t.bias):
        p.requires_grad_(False)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_counts_in_the_next_step(what: str, how: str) -> None:
    if how == "foreach" and what.startswith("lr=tensor"):
        pytest.skip("torch and we refuse a tensor lr with foreach, unless it is capturable")
    trained = Trained(how)
    trained.give_gradients()
    CHANGES[what](trained)
    reborn = trained.reborn()
    for _ in range(3):
        trained.optimizer.step()
        reborn.optimizer.step()
        assert_identical(trained.everything(), reborn.everything())
        if what != "gradient_disappears":
            trained.weight.grad, reborn.weight.grad = (present(t.weight.grad) * 0.5 for t in (trained, reborn))


@pytest.mark.parametrize("how", HOW)
def test_engines_agree_through_all_changes(how: str) -> None:
    """A run through many of the changes gives the same result with each engine, except for rounding."""

    def run(which: str) -> list[Tensor]:
        trained = Trained(which)
        for name in CHANGES:
            if name in ("data_in_double", "group_added", "parameter_appended", "parameter_removed", "groups_swapped"):
                continue
            if name.startswith(("foreach", "capturable")):
                continue
            trained.give_gradients()
            CHANGES[name](trained)
            trained.optimizer.step()
        return [p.detach() for p in (trained.weight, trained.table, trained.bias)]

    torch.testing.assert_close(run(how), run("reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_gradients_that_alternate(how: str) -> None:
    """Gradients alternate between present and absent, dense and sparse; only steps with a gradient are counted."""
    trained = Trained(how, steps=0)
    for i in range(12):
        trained.give_gradients()
        if i % 2:
            trained.weight.grad = None
        if i % 3 == 0:
            trained.table.grad = present(trained.table.grad).to_dense()
        reborn = trained.reborn()
        trained.optimizer.step()
        reborn.optimizer.step()
        assert_identical(trained.everything(), reborn.everything())
    assert trained.optimizer.state[trained.weight]["step"] == 6
    assert trained.optimizer.state[trained.table]["step"] == 12


@pytest.mark.parametrize("how", HOW)
def test_a_step_lets_go_of_the_gradients(how: str) -> None:
    trained = Trained(how)
    for _ in range(2):
        trained.give_gradients()
        dense, sparse = weakref.ref(trained.weight.grad), weakref.ref(trained.table.grad)
        trained.optimizer.step()
        trained.weight.grad = trained.table.grad = None
        assert dense() is None
        assert sparse() is None


def test_a_step_lets_go_of_complex_gradients() -> None:
    p = Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = cadam.CAdam([p])
    p.grad = torch.ones_like(p)
    grad = weakref.ref(p.grad)
    optimizer.step()
    p.grad = None
    assert grad() is None


# After an error, and behind the optimizer's back --------------------------------------------------------------------


def one_row(row: int) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[row]]), torch.ones(1, 2), (5, 2), check_invariants=False)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_step_that_raised_leaves_no_gradients_behind(transposed: bool) -> None:
    weight, table = Parameter(torch.zeros(3, 2)), Parameter(torch.zeros(5, 2))
    if transposed:
        weight.data = torch.zeros(2, 3).t()
    optimizer = cadam.CAdam([weight, table], lr=0.1)
    weight.grad, table.grad = torch.full((3, 2), -1.0), one_row(7)
    with pytest.raises(IndexError):
        optimizer.step()
    for step in range(1, 4):
        weight.grad, table.grad = torch.ones(3, 2), one_row(2)
        optimizer.step()
        assert torch.allclose(weight.data, torch.full((3, 2), -0.1 * step))


def test_a_refusal_is_repeated() -> None:
    p = Parameter(torch.ones(4))
    optimizer = cadam.CAdam([p])
    p.grad = torch.ones(4)
    optimizer.step()
    p.data, p.grad = torch.full((8,), 5.0), None
    p.grad = torch.ones(8)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="its state exp_avg has shape"):
            optimizer.step()
    assert (p == 5).all()


@pytest.mark.parametrize("how", ["default", "reference"])
def test_swapped_tensors_are_seen(how: str) -> None:
    p, other = Parameter(torch.ones(4)), Parameter(torch.full((4,), 5.0))
    optimizer = cadam.CAdam([p], lr=0.1, **HOW[how])
    p.grad = torch.ones(4)
    optimizer.step()
    p.grad = None
    torch.utils.swap_tensors(p, other)
    p.grad = torch.ones(4)
    optimizer.step()
    assert torch.allclose(p.data, torch.full((4,), 4.9))
    assert torch.allclose(other.data, torch.full((4,), 0.9))


@pytest.mark.parametrize("how", ["default", "reference"])
def test_swapped_state_is_seen_or_swapping_it_is_refused(how: str) -> None:
    """The compiled snapshot keeps weak references to the state, which `swap_tensors` does not allow."""
    p = Parameter(torch.ones(4))
    optimizer = cadam.CAdam([p], lr=0.1, **HOW[how])
    p.grad = torch.ones(4)
    optimizer.step()
    state, new = optimizer.state[p]["exp_avg"], torch.full((4,), 7.0)
    if how == "default" and tensor_snapshot.can_snapshot_in_c():
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(state, new)
        return
    torch.utils.swap_tensors(state, new)
    optimizer.step()
    assert torch.allclose(optimizer.state[p]["exp_avg"], torch.full((4,), 6.4))


def test_an_option_that_needs_another_kernel_gets_it() -> None:
    results = []
    for fused in (None, False):
        p = Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = cadam.CSGDM([p], lr=0.1, fused=fused)
        for step in range(4):
            optimizer.param_groups[0]["nesterov"] = step >= 2
            p.grad = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64) * (step + 1)
            optimizer.step()
        results.append(p.detach())
    first, second = results
    assert torch.allclose(first, second, rtol=1e-13)


class Scaled(Tensor):
    """A tensor subclass that interprets its memory in its own way."""


def test_a_gradient_of_a_tensor_subclass_is_not_read_as_memory() -> None:
    p = Parameter(torch.zeros(3))
    optimizer = cadam.CAdam([p])
    p.grad = torch.ones(3).as_subclass(Scaled)
    optimizer.step()
    (row,) = optimizer.explain()
    assert row.engine == "eager"
    assert "plain gradients only, not Scaled" in row.passed_over["native"].reason


def test_shared_memory_for_the_step_count_is_noticed() -> None:
    p = Parameter(torch.ones(3))
    optimizer = cadam.CAdam([p])
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
        for value in optimizer.state[p].values():
            value.share_memory_()
    assert optimizer.state[p]["step"].item() == 3


def test_a_buffer_in_another_dtype_is_noticed() -> None:
    p = Parameter(torch.ones(64))
    optimizer = cadam.CAdam([p])
    for step in range(3):
        p.grad = torch.ones(64)
        optimizer.step()
        if step == 0:
            optimizer.state[p]["exp_avg"].data = optimizer.state[p]["exp_avg"].data.bfloat16()
    assert optimizer.explain()[0].engine != "native"


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}], ids=["default", "foreach", "eager"])
def test_a_complex_parameter_moves_like_torchs_and_only_moved_memory_makes_a_new_plan(
    how: dict[str, Any],
) -> None:
    """The engines work on its real view, which the plan keeps: it must notice when the parameter is moved in memory."""
    found = []
    for cls, options in ((cadam.Adam, how), (torch.optim.Adam, {"foreach": False})):
        params = [Parameter(torch.full((3,), 1.0 + i, dtype=dtype)) for i, dtype in enumerate((torch.complex64,) * 2)]
        params.append(Parameter(torch.ones(4)))
        optimizer: Any = cls(params, lr=0.1, **options)
        plans = []
        for step in range(6):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, (1 + step) * (1 - 2j if p.is_complex() else -1))
                if i == 1 and step == 2:
                    p.grad = None
            if step == 4:
                params[0].data = params[0].data.clone()
                optimizer.state[params[1]]["exp_avg"].data = torch.full((3,), 0.5 + 0j)
            optimizer.step()
            plans.append(getattr(optimizer, "_plan", None))
        found.append([p.detach() for p in params])
        if cls is cadam.Adam:
            changed = [now is not then for then, now in itertools.pairwise(plans)]
            assert changed == [False, False, False, True, False], "only step 4 moves memory"
    torch.testing.assert_close(*found)


def test_a_step_on_a_complex_parameter_keeps_no_gradient_alive() -> None:
    p = Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = cadam.CAdam([p])
    for _ in range(3):
        p.grad = torch.ones_like(p)
        seen = weakref.ref(p.grad)
        optimizer.step()
        p.grad = None
        assert seen() is None


@pytest.mark.parametrize(
    "note", [3, "text", None, [1], torch.ones(2).to_sparse(), {"a": 1}], ids=lambda note: type(note).__name__
)
def test_notes_of_the_users_own_in_the_state_of_a_complex_parameter_change_nothing(note: Any) -> None:
    found = []
    for noted in (False, True):
        p = Parameter(torch.ones(3, dtype=torch.complex64))
        optimizer = cadam.CAdam([p], lr=0.1)
        for step in range(4):
            p.grad = torch.full_like(p, (1 + step) * (1 - 2j))
            if noted:
                optimizer.state[p]["note"] = note
            optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)


def test_a_module_with_complex_parameters_can_be_swapped_to_another_dtype_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch refuses to swap a tensor that a view holds on to."""
    module = torch.nn.Module()
    module.weight = p = Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = cadam.CAdam([p], lr=0.1)

    def step() -> None:
        p.grad = torch.full_like(p, 1 - 2j)
        optimizer.step()
        p.grad = None

    step()
    step()
    monkeypatch.setattr("torch.__future__._swap_module_params_on_conversion", True)
    module.to(torch.complex128)
    assert module.weight is p
    before = p.detach().clone()
    step()
    assert p.dtype == torch.complex128
    torch.testing.assert_close(torch.view_as_real(before - p.detach()), torch.tensor([[0.1, -0.1]] * 3).double())


# The work of planning ------------------------------------------------------------------------------------------------


def count_calls(function: Callable[[], object]) -> int:
    """Return the number of Python functions that are called."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_the_work_for_named_tables_grows_with_their_number_and_not_with_its_square(moments: str) -> None:
    def calls(tables: int) -> tuple[int, int]:
        named = [(f"table.{i}", torch.nn.Parameter(torch.zeros(10, 2))) for i in range(tables)]
        for _, table in named:
            table.grad = torch.ones(10, 2).to_sparse(1)
        optimizer = cadam.CAdam(named, moments=moments)
        return count_calls(optimizer.step), count_calls(optimizer.step)

    calls(2)  # the first steps import modules
    few, many = calls(20), calls(200)
    assert all(after < 12 * before for before, after in zip(few, many, strict=True)), (few, many)


def test_a_changing_set_of_gradients_makes_no_new_plan_and_no_slot_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[StepPlan] = []
    slots: list[Tensor] = []
    make_plan, make_slot = StepPlan.__init__, cadam.Optimizer._slot

    def new_plan(plan: StepPlan, *args: Any) -> None:
        plans.append(plan)
        make_plan(plan, *args)

    def new_slot(optimizer: cadam.Optimizer, param: Tensor, *args: Any) -> Any:
        slots.append(param)
        return make_slot(optimizer, param, *args)

    monkeypatch.setattr(StepPlan, "__init__", new_plan)
    monkeypatch.setattr(cadam.Optimizer, "_slot", new_slot)
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(60)]
    optimizer = cadam.CAdam(params)
    for step in range(12):
        for i, param in enumerate(params):
            param.grad = torch.ones(3) if (i + step) % 3 else None
        optimizer.step()
    assert len(plans) == 1
    assert len(slots) == len(params)
