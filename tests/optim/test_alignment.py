"""The alignment ratio and explain(): what an optimizer reports, and that reporting does not change the update."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import cadam
from cadam import Ratio
from cadam.engines.selection import ENGINES
from tests.optim.exact import assert_identical
from tests.optim.family import CONFIDENT

HOW: dict[str, dict[str, Any]] = {"default": {}, "reference": {"foreach": False}, "foreach": {"foreach": True}}
over_how = pytest.mark.parametrize("how", HOW)


def rows(table: Tensor, ids: list[int], values: list[list[float]]) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([ids], dtype=torch.int64), torch.tensor(values), table.shape, check_invariants=True
    )


# Counting ----------------------------------------------------------------------------------------------------------


@over_how
def test_aligned_are_the_elements_whose_momentum_and_gradient_agree(how: str) -> None:
    """By hand: with beta1 = 0.9, a small gradient cannot turn a large momentum, and a zero agrees with nothing."""
    param = torch.zeros(4)
    optimizer = cadam.CAdam([param], **HOW[how])
    param.grad = torch.tensor([1.0, 1.0, -1.0, 0.0])
    optimizer.step()
    assert optimizer.alignment().total == Ratio(aligned=3, touched=4, seen=4)
    param.grad = torch.tensor([1.0, -0.5, 0.0, -1.0])
    optimizer.step()
    assert optimizer.alignment().total == Ratio(aligned=3 + 2, touched=8, seen=8)
    assert optimizer.alignment().total.over_all == 5 / 8


@over_how
@pytest.mark.parametrize("cls", [cadam.CAdam, cadam.Adam], ids=["confident", "plain"])
def test_the_ratio_equals_an_independent_count(cls: type[cadam.Optimizer], how: str) -> None:
    """Without the mask, the ratio is the share of the elements that the mask would let move."""
    torch.manual_seed(0)
    param, momentum, aligned = torch.zeros(50, 3), torch.zeros(50, 3), 0
    optimizer = cls([param], **HOW[how])
    for _ in range(6):
        param.grad = torch.randn(50, 3)
        momentum = 0.9 * momentum + 0.1 * param.grad
        aligned += int((momentum * param.grad > 0).sum())
        optimizer.step()
    assert optimizer.alignment().total == Ratio(aligned, 6 * 150, 6 * 150)
    assert 0 < aligned < 6 * 150


@over_how
def test_rows_of_a_table_count_as_touched_and_the_table_as_seen(how: str) -> None:
    """A row that occurs twice counts as one row."""
    table = torch.zeros(10, 2)
    optimizer = cadam.CAdam([table], **HOW[how])
    table.grad = rows(table, [3, 7, 3], [[1.0, 1.0], [1.0, -1.0], [1.0, -1.0]])
    optimizer.step()
    total = optimizer.alignment().total
    assert total == Ratio(aligned=3, touched=4, seen=20)
    assert (total.over_all, total.over_touched) == (0.15, 0.75)
    table.grad = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 2), (10, 2), check_invariants=True)
    optimizer.step()
    assert optimizer.alignment().total == Ratio(aligned=3, touched=4, seen=40)


@over_how
def test_total_groups_and_parameters_add_up(how: str) -> None:
    dense, table, idle, other = torch.zeros(4), torch.zeros(5, 2), torch.zeros(3), torch.zeros(2)
    optimizer = cadam.CAdam(
        [{"params": [("dense", dense), ("table", table)]}, {"params": [("idle", idle), ("other", other)]}], **HOW[how]
    )
    for _ in range(2):
        dense.grad, other.grad = torch.ones(4), torch.tensor([1.0, 0.0])
        table.grad = rows(table, [1], [[1.0, -1.0]])
        optimizer.step()
    alignment = optimizer.alignment()
    assert alignment.parameters == {
        "dense": Ratio(8, 8, 8),
        "table": Ratio(4, 4, 20),
        "idle": Ratio(0, 0, 0),
        "other": Ratio(2, 4, 4),
    }
    assert alignment.groups == (Ratio(12, 12, 28), Ratio(2, 4, 4))
    assert alignment.total == Ratio(14, 16, 32)


def test_complex_parameters_count_real_and_imaginary_parts() -> None:
    param = torch.zeros(3, dtype=torch.complex64)
    optimizer = cadam.CAdam([param])
    param.grad = torch.tensor([1 + 1j, 1 + 0j, 0j])
    optimizer.step()
    assert optimizer.alignment().total == Ratio(3, 6, 6)


def test_parameters_without_gradient_change_nothing() -> None:
    ratios = []
    for idle in (False, True):
        param = torch.zeros(3)
        optimizer = cadam.CAdam([param, torch.zeros(1000)] if idle else [param])
        param.grad = torch.tensor([1.0, 0.0, 1.0])
        optimizer.step()
        ratios.append(optimizer.alignment().total)
    assert ratios[0] == ratios[1] == Ratio(2, 3, 3)


def test_names_are_the_parameters_own_or_their_place() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    assert list(cadam.CAdam(net.named_parameters()).alignment().parameters) == [n for n, _ in net.named_parameters()]
    groups = [{"params": layer.parameters()} for layer in net]
    assert list(cadam.CAdam(groups).alignment().parameters) == ["group0.0", "group0.1", "group1.0", "group1.1"]


def test_the_ratio_is_nan_before_the_first_step() -> None:
    total = cadam.CAdam([torch.zeros(3)]).alignment().total
    assert total == Ratio(0, 0, 0)
    assert math.isnan(total.over_all)
    assert math.isnan(total.over_touched)


@over_how
def test_counts_on_the_device_are_those_that_the_ratio_is_read_from(how: str) -> None:
    params = [Parameter(torch.randn(4)), Parameter(torch.randn(2, 3))]
    optimizer = cadam.CAdam(params, **HOW[how])
    with pytest.raises(RuntimeError, match="track_alignment"):
        optimizer.alignment_counts()
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    total = optimizer.alignment().total
    assert optimizer.alignment_counts().tolist() == [total.aligned, total.touched, total.seen]
    assert total.seen == 30


@over_how
def test_reset_begins_a_new_count(how: str) -> None:
    param = torch.zeros(4)
    optimizer = cadam.CAdam([param], **HOW[how])
    param.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.alignment(reset=True).total == Ratio(4, 4, 4)
    assert optimizer.alignment().total == Ratio(0, 0, 0)
    param.grad = torch.tensor([1.0, 1.0, 0.0, 0.0])
    optimizer.step()
    assert optimizer.alignment().total == Ratio(2, 4, 4)


def test_reading_does_not_reset() -> None:
    param = torch.zeros(4)
    optimizer = cadam.CAdam([param])
    param.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.alignment() == optimizer.alignment()


@over_how
def test_off_switch(how: str) -> None:
    """Counting can be turned off for all parameters or for one group."""
    counted, silent = torch.zeros(4), torch.zeros(5)
    groups = [{"params": [counted]}, {"params": [silent], "track_alignment": False}]
    optimizer = cadam.CAdam(groups, **HOW[how])
    counted.grad, silent.grad = torch.ones(4), torch.ones(5)
    optimizer.step()
    assert optimizer.alignment().groups == (Ratio(4, 4, 4), Ratio(0, 0, 0))
    optimizer.param_groups[0]["track_alignment"] = False
    optimizer.step()
    assert optimizer.alignment().total == Ratio(4, 4, 4)
    optimizer.param_groups[0]["track_alignment"] = True
    optimizer.step()
    assert optimizer.alignment().total == Ratio(8, 8, 8)


@over_how
@pytest.mark.parametrize("cls", [*CONFIDENT.values(), cadam.Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_counting_has_no_effect_on_the_update(cls: type[cadam.Optimizer], dtype: torch.dtype, how: str) -> None:
    """Parameters and state are equal bit for bit, with dense and sparse gradients."""
    made: list[Any] = []
    for track in (True, False):
        torch.manual_seed(0)
        dense, table = torch.randn(7, 3).to(dtype), torch.randn(9, 2).to(dtype)
        optimizer = cls([dense, table], lr=0.1, weight_decay=0.1, track_alignment=track, **HOW[how])
        for _ in range(5):
            dense.grad = torch.randn(7, 3).to(dtype)
            table.grad = rows(table, [1, 8, 1], torch.randn(3, 2).tolist()).to(dtype)
            optimizer.step()
            optimizer.alignment(reset=True)
        made.append([dense, table, [optimizer.state[p] for p in (dense, table)]])
    assert_identical(*made)


def test_counts_of_a_parameter_that_is_replaced_go_with_it() -> None:
    """Growing tables and Gaussian splatting replace a parameter of a group like this, and delete the old state."""
    stays, old = (Parameter(torch.ones(n)) for n in (3, 5))
    optimizer = cadam.CAdam([stays, old])
    group, gone = optimizer.param_groups[0], weakref.ref(old)
    for p in (stays, old):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.alignment_counts().tolist() == [8, 8, 8]
    group["params"][1] = Parameter(torch.ones(2))
    del optimizer.state[old]
    assert optimizer.alignment_counts().tolist() == [3, 3, 3]
    group["params"][1].grad = torch.ones(2)
    del old, p
    optimizer.step()
    gc.collect()
    assert gone() is None
    # Three elements in two steps, and two elements in one step.
    assert optimizer.alignment_counts().tolist() == [8, 8, 8]
    assert optimizer.alignment().total == Ratio(8, 8, 8)


def test_counts_begin_at_zero_where_every_parameter_was_replaced() -> None:
    old, new = Parameter(torch.ones(3)), Parameter(torch.ones(2))
    optimizer = cadam.CAdam([old])
    old.grad, new.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = new
    assert optimizer.alignment_counts().tolist() == [0, 0, 0]
    optimizer.step()
    assert optimizer.alignment_counts().tolist() == [2, 2, 2]


def test_counts_of_a_parameter_that_is_out_for_a_while_stay_as_its_state_does() -> None:
    first, second = (Parameter(torch.ones(n)) for n in (3, 5))
    optimizer = cadam.CAdam([first, second])
    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    del optimizer.param_groups[0]["params"][1]
    optimizer.step()
    assert optimizer.alignment_counts().tolist() == [6, 6, 6]
    optimizer.param_groups[0]["params"].append(second)
    assert optimizer.alignment_counts().tolist() == [11, 11, 11]


def test_counts_are_not_part_of_a_checkpoint() -> None:
    param = torch.zeros(4)
    optimizer = cadam.CAdam([param])
    param.grad = torch.ones(4)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.alignment().total == Ratio(0, 0, 0)
    optimizer.step()
    assert optimizer.alignment().total == Ratio(4, 4, 4)


def test_ratios_add() -> None:
    assert Ratio(1, 2, 3) + Ratio(10, 20, 30) == Ratio(11, 22, 33)
    assert str(Ratio(1, 2, 4)) == "0.250 of all, 0.500 of touched"


# Writing and printing ----------------------------------------------------------------------------------------------


class Writer:
    """A placeholder for TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int | None]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert tag not in self.scalars
        self.scalars[tag] = (scalar_value, global_step)


def stepped() -> cadam.Optimizer:
    """Take one step with a dense parameter, a table, and a parameter without gradient."""
    dense, table = torch.zeros(4), torch.zeros(10, 2)
    optimizer = cadam.CAdam([{"params": [("dense", dense), ("rest", torch.zeros(2))]}, {"params": [("table", table)]}])
    dense.grad, table.grad = torch.tensor([1.0, 1.0, 1.0, 0.0]), rows(table, [3, 4], [[1.0, 1.0], [1.0, 0.0]])
    optimizer.step()
    return optimizer


def test_write_gives_total_and_groups_to_any_writer() -> None:
    writer = Writer()
    stepped().alignment().write(writer, 17)
    assert writer.scalars == {
        "alignment/all/total": (6 / 24, 17),
        "alignment/touched/total": (6 / 8, 17),
        "alignment/all/group0": (3 / 4, 17),
        "alignment/touched/group0": (3 / 4, 17),
        "alignment/all/group1": (3 / 20, 17),
        "alignment/touched/group1": (3 / 4, 17),
    }


def test_write_can_include_parameters_and_leaves_out_those_without_counts() -> None:
    writer = Writer()
    stepped().alignment().write(writer, 3, tag="ratio", parameters=True)
    names = {tag.removeprefix("ratio/all/") for tag in writer.scalars if tag.startswith("ratio/all/")}
    assert names == {"total", "group0", "group1", "parameters/dense", "parameters/table"}
    assert writer.scalars["ratio/touched/parameters/table"] == (3 / 4, 3)


def test_a_parameter_called_total_does_not_hide_the_total() -> None:
    param = torch.zeros(2)
    optimizer = cadam.CAdam([("total", param), ("b", torch.zeros(2))])
    param.grad = torch.ones(2)
    optimizer.step()
    writer = Writer()
    optimizer.alignment().write(writer, 0, parameters=True)
    assert "alignment/all/total" in writer.scalars
    assert len([tag for tag in writer.scalars if tag.startswith("alignment/all/")]) == 2


def test_one_group_is_not_written_twice() -> None:
    param = torch.zeros(2)
    optimizer = cadam.CAdam([param])
    param.grad = torch.ones(2)
    optimizer.step()
    writer = Writer()
    optimizer.alignment().write(writer, 0)
    assert set(writer.scalars) == {"alignment/all/total", "alignment/touched/total"}


def test_alignment_prints_as_a_table() -> None:
    assert str(stepped().alignment()).splitlines() == [
        "parameter      all  touched",
        "dense        0.750    0.750",
        "rest           nan      nan",
        "table        0.150    0.750",
        "group0       0.750    0.750",
        "group1       0.150    0.750",
        "total        0.250    0.750",
    ]


# explain() ---------------------------------------------------------------------------------------------------------


def explained(params: Any, **options: Any) -> dict[str, Any]:
    return {row.name: row for row in cadam.CAdam(params, **options).explain()}


def test_explain_names_an_engine_for_every_parameter_and_why_no_faster_one() -> None:
    dense, table, none = Parameter(torch.zeros(4)), Parameter(torch.zeros(5, 2)), Parameter(torch.zeros(3))
    dense.grad, table.grad = torch.ones(4), rows(table, [1], [[1.0, 1.0]])
    found = explained([("dense", dense), ("table", table), ("none", none)], foreach=False)
    assert {name: row.engine for name, row in found.items()} == {"dense": "eager", "table": "rows", "none": "eager"}
    assert [row.gradient for row in found.values()] == ["dense", "sparse", "none yet, taken as dense"]
    assert found["dense"].passed_over["foreach"].reason == "foreach=False was asked for"
    assert "dense gradients only" in found["table"].passed_over["foreach"].reason
    assert (found["table"].shape, found["table"].dtype) == ((5, 2), torch.float32)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_explain_goes_by_the_last_step_where_gradients_were_set_to_none(moments: str) -> None:
    dense, table = Parameter(torch.zeros(4)), Parameter(torch.zeros(5, 2))
    dense.grad, table.grad = torch.ones(4), rows(table, [1], [[1.0, 1.0]])
    optimizer = cadam.CAdam([("dense", dense), ("table", table)], moments=moments)
    optimizer.step()
    before = [(row.engine, dict(row.passed_over)) for row in optimizer.explain()]
    optimizer.zero_grad()
    found = optimizer.explain()
    assert [(row.engine, dict(row.passed_over)) for row in found] == before
    assert [row.gradient for row in found] == ["none now, dense in the last step", "none now, sparse in the last step"]


def test_explain_foreach() -> None:
    (row,) = explained([torch.zeros(4)], foreach=True).values()
    assert row.engine == "foreach"
    (row,) = explained([torch.zeros(4)], foreach=True, differentiable=True).values()
    assert row.engine == "eager"
    assert "differentiable" in row.passed_over["foreach"].reason


class Odd(Tensor):
    """A tensor subclass that list operations may not support."""


@pytest.mark.parametrize(("made", "engine"), [(lambda x: x, "foreach"), (lambda x: x.as_subclass(Odd), "eager")])
def test_lists_serve_parameters_without_kernels_and_the_reference_serves_subclasses(made: Any, engine: str) -> None:
    """All engines before the default engine of the CPU are listed, each with a reason."""
    with_gaps = made(torch.zeros(4, 2)[:, 0])
    (row,) = explained([with_gaps]).values()
    assert row.engine == engine
    assert list(row.passed_over) == [e.name for e in ENGINES[: [e.name for e in ENGINES].index(engine)]]
    assert all(row.passed_over.values())


def test_explain_takes_the_accelerators_way_elsewhere() -> None:
    """On a device other than the CPU, the reference is never the default."""
    (row,) = explained([torch.zeros(4, device="meta")]).values()
    assert row.engine not in ("eager", "native")
    assert row.device.type == "meta"


def test_explain_has_no_effects() -> None:
    param = torch.zeros(3)
    param.grad = torch.ones(3)
    optimizer = cadam.CAdam([param])
    optimizer.explain()
    assert not optimizer.state
    assert optimizer.alignment().total == Ratio(0, 0, 0)


@pytest.mark.parametrize("steps", [0, 1])
def test_explain_describes_a_complex_parameter_that_gets_another_buffer(steps: int) -> None:
    param = Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = cadam.CAdam([param])
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    (explained,) = optimizer.explain()
    param.grad = torch.ones_like(param)
    optimizer.step()
    (after,) = optimizer.explain()
    assert explained.engine == after.engine == "native"


@over_how
def test_explain_tells_the_truth(how: str) -> None:
    """The explanation is the same before the first gradient, before the first step and after it."""
    dense = [torch.zeros(3), torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.bfloat16)]
    table = torch.zeros(4, 2)
    optimizer = cadam.CAdam([*dense, table], **HOW[how])
    without_gradients = [row.engine for row in optimizer.explain()[:3]]
    for param in dense:
        param.grad = torch.ones_like(param)
    table.grad = rows(table, [1], [[1.0, 1.0]])
    before = str(optimizer.explain())
    assert [row.engine for row in optimizer.explain()[:3]] == without_gradients
    optimizer.step()
    assert str(optimizer.explain()) == before


def test_explain_prints_a_line_for_each_parameter_and_reason() -> None:
    table = torch.zeros(5, 2, dtype=torch.bfloat16)
    table.grad = rows(table, [1], [[1.0, 1.0]]).bfloat16()
    lines = str(cadam.CAdam([("emb", table)], foreach=False).explain()).splitlines()
    assert lines[0] == "emb: [5, 2] bfloat16 cpu, gradient sparse: rows"
    assert len(lines) > 1
    assert all(line.startswith("    not ") and ": " in line for line in lines[1:])


def test_counters_follow_a_parameter_to_another_device() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = cadam.CAdam([p])
    p.grad = torch.ones(3)
    optimizer.step()
    stays = optimizer._counter(p)
    assert optimizer._counter(p) is stays
    assert optimizer._counter(p).tolist() == [3, 3, 3]
    moved = nn.Parameter(torch.ones(3, device="meta"))
    optimizer._counts[moved] = stays
    assert optimizer._counter(moved).device.type == "meta"


def test_parameters_with_the_same_name_get_different_labels() -> None:
    first, second = nn.Linear(4, 2), nn.Linear(2, 1)
    groups = [{"params": list(layer.named_parameters())} for layer in (first, second)]
    optimizer = cadam.CAdam(groups)
    for layer in (first, second):
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
    optimizer.step()
    found = optimizer.alignment()
    assert {name: ratio.seen for name, ratio in found.parameters.items()} == {
        "group0.0.weight": 8,
        "group0.1.bias": 2,
        "group1.0.weight": 2,
        "group1.1.bias": 1,
    }
    assert found.total.seen == 13
    one_group = cadam.CAdam([*first.named_parameters(), *second.named_parameters()])
    assert list(one_group.alignment().parameters) == [
        "group0.0.weight",
        "group0.1.bias",
        "group0.2.weight",
        "group0.3.bias",
    ]


def test_explain_gives_the_reason_where_a_subclass_of_tensor_is_in_the_way() -> None:
    class Odd(Tensor):
        pass

    p = torch.ones(3).as_subclass(Odd).requires_grad_()
    optimizer = cadam.CAdam([p])
    assert "Odd" in optimizer.explain()[0].passed_over["native"].reason
    q = nn.Parameter(torch.ones(3))
    q.grad = torch.ones(3).as_subclass(Odd)
    text = str(cadam.CAdam([q]).explain())
    assert "not native: serves plain gradients only, not Odd" in text
    assert "not cuda" not in text
