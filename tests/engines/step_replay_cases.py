"""Test cases for the replayed step, one function each. `test_step_replay.py` runs them with Triton's interpreter.

No device is needed: the interpreter runs the kernels, and functions of this file replace the CUDA driver. The compiled
function that checks and launches is not replaced.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cadam
from cadam.engines import aging, row_layout, selection
from cadam.engines.cuda import dense as cuda
from cadam.engines.cuda import sparse as cuda_rows
from cadam.engines.cuda import step_replay
from cadam.engines.cuda.sparse_grad import Bags
from cadam.native import tensor_snapshot, torch_symbols
from cadam.optim.sparse_update import RowUpdate, complete, new_state
from tests.engines.triton_interpreter import run_named
from tests.lazy_negation import lazily_negated

# A device that is none ------------------------------------------------------------------------------------------

engine, rows_engine = cuda.Cuda(), cuda_rows.CudaRows()
engine.device = rows_engine.device = "cpu"
selection.ENGINES = (engine, rows_engine, *(e for e in selection.ENGINES if e.name in ("rows", "eager")))
cuda_rows.TILE_ELEMENTS = 32  # small tiles, so that a few ids fill several of them and the interpreter is fast


class State:
    """The attributes of the device, as the driver reports them."""

    stream, context, capturing, busy, launched = 0, 1, 0, 0, 0


torch._C._cuda_getCurrentRawStream = lambda device: State.stream
torch._C._cuda_getDevice = lambda: 0

word, number = ctypes.c_uint64, ctypes.c_int
KERNELS: list[Any] = []


def bound(launch: Any, kind: Any) -> step_replay.BoundKernel:
    KERNELS.append(launch)
    return step_replay.BoundKernel(len(KERNELS), 128, 0, given(launch))


def given(launch: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a launch."""
    absent = {"found_inf", *([] if launch.constants.get("COUNT") else ["counts"]), *launch.constants}
    absent |= {"sources"} if launch.constants.get("IN_BAGS") is False else set()
    # The kernel that writes the sort keys reports errors.
    absent |= {"error"} if "order" in launch.kernel.arg_names else set()
    return tuple(name for name in launch.kernel.arg_names if name not in absent)


step_replay.BoundKernel.of = bound  # type: ignore[method-assign]


def get_context(out: Any) -> int:
    out[0] = State.context
    return 0


def is_capturing(stream: int, out: Any) -> int:
    out[0] = State.capturing
    return 0


def copy(to: int, source: int, size: int, stream: int) -> int:
    ctypes.memmove(to, source, size)
    return 0


NUMBERS = {"stride", "tensor_number", "seed", "n", "rows", "width", "bags", "batch", "first"}
TYPES = dict.fromkeys(["table", "grads", "ids", "error", "counts", "order", "offsets", "starts"], torch.int64)
TYPES |= {"keys": torch.int16, "sources": torch.int32, "owners": torch.int32, "coefficients": torch.float64}
TYPES |= {"last_steps": torch.int32, "row_steps": torch.int32}


def launch(
    function: int, x: int, y: int, z: int, bx: int, by: int, bz: int, shared: int, stream: int, args: Any, extra: int
) -> int:
    State.launched += 1
    assert (z, bx, by, bz, shared) == (1, 128, 1, 1, 0)
    kernel = KERNELS[function - 1]
    names = given(kernel)
    *words, first, second = [word.from_address(args[i]).value for i in range(len(names) + 2)]
    assert first == second == 0
    values: dict[str, Any] = dict.fromkeys(n for n in kernel.kernel.arg_names if n not in kernel.constants)
    for name, value in zip(names, words, strict=True):
        values[name] = ctypes.c_int64(value).value if name in NUMBERS else memory(value, TYPES.get(name, torch.float32))
    kernel.kernel[(x, y, z)](**values, **kernel.constants)
    return 0


def memory(address: int, dtype: torch.dtype) -> Tensor:
    """Return a range of memory in the form that the interpreter accepts."""
    if not address:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * 4096).from_address(address), dtype=dtype)


F = ctypes.CFUNCTYPE
P = ctypes.POINTER(word)
FUNCTIONS: list[Any] = [
    F(number, P)(get_context),
    F(number, word, ctypes.POINTER(number))(is_capturing),
    F(number, word)(lambda event: State.busy),
    F(number, word, word)(lambda event, stream: 0),
    F(number, word, word, ctypes.c_size_t, word)(copy),
    F(number, word, *[ctypes.c_uint] * 7, word, P, word)(launch),
]


class Driver(step_replay.Driver):
    def __init__(self) -> None:
        self.functions = np.array([ctypes.cast(f, ctypes.c_void_p).value for f in FUNCTIONS], np.int64)
        self.current_stream = torch._C._cuda_getCurrentRawStream

    def context(self) -> int:
        return State.context

    def event(self) -> tuple[Any, int]:
        return None, 0


step_replay.driver = Driver  # type: ignore[assignment]


# An optimizer that replays its steps, and one that does not -----------------------------------------------------


class Trained:
    """An optimizer, its parameters, and whether it may replay its steps."""

    def __init__(self, replays: bool, params: Sequence[Tensor], **options: Any) -> None:
        self.replays, self.params = replays, list(params)
        self.optimizer = cadam.CAdam(self.params, replay=replays, **options)

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def is_replayed(self) -> bool:
        return self.optimizer.explain().steps == "replayed"

    @property
    def not_replayed(self) -> str:
        return str(self.optimizer.explain().steps)

    def step(self, seed: int, without: Sequence[int] = (), n: int | None = None) -> bool:
        """Take one step with random gradients. Returns whether it was replayed."""
        torch.manual_seed(seed)
        n = 20 + seed % 2 if n is None else n
        shared = torch.randint(0, 50, (1, n))
        for i, p in enumerate(self.params):
            p.grad = None if i in without else torch.randn_like(p)
            if p.dim() == 2 and i not in without:
                ids = shared if len(p[0]) < 5 else torch.randint(0, 50, (1, n)).square() // 50
                p.grad = torch.sparse_coo_tensor(ids, torch.randn(n, len(p[0])), p.shape, check_invariants=False)
        versions = [p._version for p in self.params]
        was_replayed = self.take()
        mine = set(self.group["params"])
        for i, (p, version) in enumerate(zip(self.params, versions, strict=True)):
            assert p._version > version or i in without or p not in mine
        return was_replayed

    def take(self) -> bool:
        """Take one step with the present gradients. Returns whether it was replayed."""
        before = State.launched
        self.optimizer.step()
        return State.launched > before


def made(replays: bool, **options: Any) -> Trained:
    torch.manual_seed(0)
    return Trained(replays, [torch.nn.Parameter(torch.randn(n)) for n in (5, 40, 3)], **options)


def tables(replays: bool, **options: Any) -> Trained:
    """A model with dense parameters and tables, of which two are looked up with the same ids."""
    one = made(replays, **options)
    one.params += [torch.nn.Parameter(torch.randn(50, width)) for width in (3, 1, 5)]
    one.group["params"] += one.params[3:]
    return one


def both(make: Callable[..., Trained] = made, **options: Any) -> tuple[Trained, Trained]:
    return make(True, **options), make(False, **options)


def begin(make: Callable[..., Trained] = made, **options: Any) -> tuple[Trained, Trained]:
    """Return both optimizers after three steps; the second step recorded the third."""
    a, b = both(make, **options)
    for seed in range(3):
        assert a.step(seed) == (seed > 1), a.not_replayed
        assert not b.step(seed)
    return a, b


def assert_same(a: Trained, b: Trained) -> None:
    for p, q in zip(a.params, b.params, strict=True):
        assert torch.equal(p, q)
        for name, value in a.state[p].items():
            assert torch.equal(value, b.state[q][name]), name
    if a.group["track_alignment"]:
        assert a.optimizer.alignment() == b.optimizer.alignment()


# Changes between steps ------------------------------------------------------------------------------------------


def set_option(name: str, value: Any) -> Callable[[Trained], None]:
    return lambda t: t.group.update({name: value})


def new_memory(t: Trained, i: int) -> None:
    t.params[i].data = torch.ones(t.params[i].shape)


def new_buffer_memory(t: Trained, i: int, name: str = "exp_avg") -> None:
    t.state[t.params[i]][name].data = torch.full(t.state[t.params[i]][name].shape, 7.0)


def new_state_of_one(t: Trained) -> None:
    t.state[t.params[1]] = dict(t.state[t.params[1]])


def new_buffer(t: Trained) -> None:
    t.state[t.params[1]]["exp_avg"] = torch.ones(40)


def set_steps(t: Trained, which: Sequence[int]) -> None:
    for i in which:
        t.state[t.params[i]]["step"].fill_(7)


def new_parameter(t: Trained) -> None:
    t.group["params"][1] = torch.nn.Parameter(torch.ones(4))


# The changes after the third step, and whether the fourth step is still replayed.
CHANGES: dict[str, tuple[Callable[[Trained], Any], bool]] = {
    "nothing": (lambda t: None, True),
    "the learning rate": (set_option("lr", 0.5), True),
    "another option": (set_option("betas", (0.5, 0.6)), False),
    "an option that calls for another update": (set_option("weight_decay", 0.5), False),
    "a buffer": (new_buffer, False),
    "the memory of a buffer": (lambda t: new_buffer_memory(t, 1), False),
    "the values of a buffer": (lambda t: t.state[t.params[1]]["exp_avg"].fill_(1), True),
    "the memory of a parameter": (lambda t: new_memory(t, 0), False),
    "a step count": (lambda t: set_steps(t, [1]), False),
    "all step counts": (lambda t: set_steps(t, [0, 1, 2]), False),
    "the memory of a step count": (lambda t: new_buffer_memory(t, 1, "step"), False),
    "a swapped parameter": (
        lambda t: torch.utils.swap_tensors(t.params[0], torch.nn.Parameter(torch.ones(5))),
        False,
    ),
    "the state of a parameter": (new_state_of_one, False),
    "all of the state": (lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()), False),
    "a group": (lambda t: t.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]}), False),
    "a parameter of the group": (new_parameter, False),
    "a hook": (lambda t: t.optimizer.register_step_post_hook(lambda *a: None), True),
}
# Parameters whose coefficients differ are updated by a planned step.
UNEQUAL = ("a step count", "the memory of a step count")

TABLE_CHANGES: dict[str, tuple[Callable[[Trained], Any], bool]] = {
    "the learning rate": (set_option("lr", 0.5), True),
    "another option": (set_option("betas", (0.5, 0.6)), False),
    "the memory of a buffer": (lambda t: new_buffer_memory(t, 3), False),
    "the memory of a table": (lambda t: new_memory(t, 3), False),
    "the values of a table": (lambda t: t.params[3].data.fill_(1), True),
    "all of the state": (lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()), False),
}


def changed_in_between(make: Callable[..., Trained], what: str, change: Callable[[Trained], Any], kept: bool) -> None:
    """Compare an optimizer with replay and one without over three steps, a change and three more steps."""
    a, b = begin(make)
    change(a)
    change(b)
    found = [(a.step(seed), b.step(seed)) for seed in range(3, 6)]
    assert found[0] == (kept, False), (what, found)
    assert found[2] == (what not in UNEQUAL, False), (what, found)
    assert_same(a, b)


def changes() -> None:
    for what, (change, kept) in CHANGES.items():
        changed_in_between(made, what, change, kept)


def changes_with_tables() -> None:
    for what, (change, kept) in TABLE_CHANGES.items():
        changed_in_between(tables, what, change, kept)


def exact_updates_of_tables() -> None:
    """Exact sparse updates are replayed until the table of aging coefficients has to grow, and then recorded again."""
    before, cuda_rows.MIN_AGING_ROWS = cuda_rows.MIN_AGING_ROWS, 0
    aging.MIN_ROWS = 4
    a, b = begin(tables, sparse_updates="exact")
    found = [a.step(seed) for seed in range(3, 12)]
    for seed in range(3, 12):
        b.step(seed)
    # The table was made for up to 5 steps, then for up to 9.
    assert found[:2] == [True, True], found
    assert not found[2], found
    assert any(found[3:]), found
    assert_same(a, b)
    cuda_rows.MIN_AGING_ROWS, aging.MIN_ROWS = before, 1024


def tables_whose_rows_count_their_updates() -> None:
    """The coefficients by count are computed again for other betas, and the step is then recorded again."""
    for options in ({"confidence_after": 3}, {"row_steps": True}, {"confidence_after": 3, "row_steps": True}):
        a, b = begin(tables, **options)
        change = set_option("betas", (0.5, 0.6))
        for t in (a, b):
            assert t.step(3) == t.replays
            change(t)
        found = [(a.step(seed), b.step(seed))[0] for seed in range(4, 9)]
        assert not found[0], found
        assert found[-1], found
        assert_same(a, b)


def gradients_come_and_go() -> None:
    a, b = both()
    found = []
    for seed, without in enumerate([(), (), (), (1,), (1,), (1,), (), (), ()]):
        found.append(a.step(seed, without))
        assert not b.step(seed, without)
    # Once a parameter has missed a step, its coefficients differ from the others.
    assert found == [False, False, True, False, False, True, False, False, False], found
    assert_same(a, b)
    negated = torch._neg_view(torch.randn(40))
    for odd in (torch.randn(80)[::2], lazily_negated(torch.randn(40)), negated):
        a, b = begin()
        assert a.step(3)
        b.step(3)
        for t in (a, b):
            t.params[1].grad = odd
            assert not t.take()
        assert_same(a, b)


def the_device_is_ready() -> None:
    for what, value in (("stream", 5), ("context", 9), ("capturing", 1), ("busy", 600)):
        a, b = begin()
        usual = getattr(State, what)
        setattr(State, what, value)
        assert not a.step(3)
        setattr(State, what, usual)
        b.step(3)
        assert_same(a, b)
    cases: list[dict[str, Any]] = [{"track_alignment": False}, {"weight_decay": 0.1, "maximize": True}]
    for options in (*cases, {"amsgrad": True}):
        a, b = begin(**options)
        for seed in (3, 4):
            assert a.step(seed)
            assert not b.step(seed)
        assert_same(a, b)


# Rows -----------------------------------------------------------------------------------------------------------


def sparse(ids: Sequence[int], width: int = 3) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([ids]), torch.ones(len(ids), width), (50, width), check_invariants=False
    )


def rows_that_are_odd() -> None:
    odd: dict[str, Callable[[], Tensor]] = {
        "coalesced": lambda: sparse([4, 4, 1]).coalesce(),
        "empty": lambda: torch.sparse_coo_tensor(
            torch.empty(1, 0).long(), torch.empty(0, 3), (50, 3), check_invariants=False
        ),
        "dense": lambda: torch.ones(50, 3),
        "two sparse dimensions": lambda: torch.eye(50)[:, :3].to_sparse(),
        "not contiguous": lambda: torch.sparse_coo_tensor(
            torch.tensor([[4, 4]]), torch.ones(3, 2).t(), (50, 3), check_invariants=False
        ),
    }
    for what, make in odd.items():
        a, b = begin(tables)
        for t in (a, b):
            t.params[3].grad = make()
            assert not t.take(), what
        assert_same(a, b)
    for n in (2, 4, 40):  # fewer ids than in the recorded step, which fill one tile, and more, which fill many
        a, b = both(tables)
        for seed in range(5):
            many = n if seed == 3 else 20
            assert a.step(seed, n=many) == (seed > 1)
            assert not b.step(seed, n=many)
        assert_same(a, b)
    for bad in (-1, 50):
        a, b = begin(tables)
        for t in (a, b):
            t.params[3].grad = sparse([7, bad, 7])
            t.take()
            table = t.params[3].clone()
            t.params[3].grad = sparse([7, 8])
            with pytest.raises(IndexError, match=f"row id {bad}"):
                t.take()
            assert torch.equal(table, t.params[3])
            t.take()
        assert_same(a, b)


def updates_of_rows() -> None:
    def updated(replays: bool, in_bags: bool) -> tuple[list[Tensor], list[bool]]:
        torch.manual_seed(0)
        table = torch.randn(50, 3)
        options = complete(cadam.CAdam, {"replay": replays})
        state, counts = new_state(table), torch.zeros(3, dtype=torch.int64)
        update, found = RowUpdate(table, state, cadam.CAdam, options, counts=counts), []
        for step in range(1, 9):
            lengths = torch.randint(0, 4, (4 * 3,))
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            ids, starts = torch.randint(0, 12, (int(lengths.sum()),)), torch.tensor([0, 12, 24, 36])
            grads, before = torch.randn(3, 4, 3), State.launched
            options["lr"] = 0.01 if step < 5 else 0.02
            options["weight_decay"] = 0.1 if step == 7 else 0.0
            assert update.takes_bags(torch.float32)
            if in_bags:
                update.pooled(ids, Bags(offsets, starts, 3), grads, step=step + 5)
            else:
                feature = torch.arange(4).repeat_interleave(lengths.view(4, 3).sum(1))
                sample = torch.arange(3).repeat(4).repeat_interleave(lengths)
                update(ids + starts[feature], grads[sample, feature], step=step + 5)
            found.append(State.launched > before)
        return [table, *state.values(), counts], found

    usual, _ = updated(False, False)
    for in_bags in (False, True):
        tensors, found = updated(True, in_bags)
        assert found == [False, False, True, True, True, True, False, False], found
        assert all(torch.equal(x, y) for x, y in zip(tensors, usual, strict=True))


def updates_of_rows_in_records() -> None:
    """Quantized values, scales and shared moments are in one memory, as on CUDA."""
    storage: dict[str, Any] = {"moments": "int8", "second_moment": "row"}
    row_layout.RECORDS_ON = "cpu"
    TYPES.update(s_exp_avg=torch.uint8, e_exp_avg=torch.uint8)

    def updated(**more: Any) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        table, before = torch.randn(50, 3), State.launched
        state = new_state(table, **storage)
        assert len({x.untyped_storage().data_ptr() for x in state.values() if x.dim()}) == 1
        update = RowUpdate(table, state, cadam.CAdam, complete(cadam.CAdam, {**storage, **more}))
        for step in range(1, 6):
            update(torch.randint(0, 50, (20,)), torch.randn(20, 3), step=step)
        return [table, *state.values()], State.launched - before

    replayed_steps, launched = updated()
    usual, without = updated(replay=False)
    assert launched > 0 == without
    assert all(torch.equal(x, y) for x, y in zip(replayed_steps, usual, strict=True))


def an_option_of_rows_at_the_address_of_the_one_before() -> None:
    def updated(replays: bool) -> list[Tensor]:
        torch.manual_seed(0)
        table, base, more = torch.randn(50, 3), float("0.1"), [0.0, 0.3]
        options = complete(cadam.CAdam, {"weight_decay": 0.1, "replay": replays})
        update = RowUpdate(table, new_state(table), cadam.CAdam, options)
        for step in range(1, 10):
            options["weight_decay"] = base
            options["weight_decay"] += more[step > 6]
            update(torch.randint(0, 50, (20,)), torch.randn(20, 3), step=step)
        return [table, *update.state.values()]

    assert all(torch.equal(x, y) for x, y in zip(updated(True), updated(False), strict=True))


def no_room_for_rows() -> None:
    update = RowUpdate(torch.ones(50, 3), new_state(torch.ones(50, 3)), cadam.CAdam, complete(cadam.CAdam, {}))

    def go(step: int, n: int = 20) -> bool:
        before = State.launched
        update(torch.arange(n) % 50, torch.ones(n, 3), step=step)
        return State.launched > before

    assert [go(step) for step in range(1, 4)] == [False, False, True], update._replay.reason
    ready = update._replay.ready
    assert isinstance(ready, step_replay.CudaStep)
    table = ready.tables[0]
    memory, usual = table.memory, torch.empty

    def empty(size: Any, **options: Any) -> Tensor:
        if options.get("dtype") is torch.int32:
            raise torch.OutOfMemoryError("no room")
        return usual(size, **options)

    torch.empty = empty  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        go(4, 500)
    torch.empty = usual
    assert table.memory is memory  # memory of the same size is reused


# Changes that could go unseen ------------------------------------------------------------------------------------

BASE, NOTHING, MORE = float("0.1"), float("0.0"), [0.0, 0.5]


def an_option_at_the_address_of_the_one_before() -> None:
    """An option's object is freed, and the next one made takes its address."""
    a, b = begin()
    for t in (a, b):
        for seed in range(3, 8):
            t.group["weight_decay"] = BASE
            t.group["weight_decay"] += MORE[seed > 4]
            t.step(seed)
    assert_same(a, b)


def weight_decay_sets_in_at_the_address_of_the_one_before() -> None:
    """Weight decay changes the update itself."""
    a, b = begin()
    assert a.group["weight_decay"] == 0
    for t in (a, b):
        for seed in range(3, 6):
            t.group["weight_decay"] = NOTHING
            t.group["weight_decay"] += MORE[seed > 3]
            t.step(seed)
    plan = a.optimizer._plan
    assert plan is not None
    assert plan.work[0][1][0].group.update.decay != "none"
    assert_same(a, b)


def a_list_of_the_same_parameters_of_which_one_is_replaced_later() -> None:
    a, b = begin()
    for t in (a, b):
        t.group["params"] = list(t.params)
        assert [t.step(seed) for seed in range(3, 6)] == [False, False, t.replays]
        torch.manual_seed(9)
        left, t.params[1] = t.params[1], torch.nn.Parameter(torch.randn(40))
        was = left.detach().clone()
        t.group["params"][1] = t.params[1]
        t.step(6)
        assert torch.equal(left, was)
        assert t.state[t.params[1]]["step"] == 1
    assert_same(a, b)


def interrupted(t: Trained, i: int) -> None:
    """A step that is interrupted before it is planned does not write to the earlier memory of a parameter."""
    old, t.params[i].data = t.params[i].data, torch.ones(t.params[i].shape)
    was, usual = old.clone(), cadam.Optimizer._check_capture

    def stop(self: Any) -> None:
        raise KeyboardInterrupt

    cadam.Optimizer._check_capture = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        t.step(3)
    cadam.Optimizer._check_capture = usual  # type: ignore[method-assign]
    assert not t.step(3)
    assert torch.equal(old, was)


def a_step_that_is_interrupted() -> None:
    a, b = begin()
    for t in (a, b):
        interrupted(t, 0)
    assert_same(a, b)


def an_option_that_changes_and_stays_the_same_object() -> None:
    a, b = begin()
    for t in (a, b):
        t.group["betas"] = [0.9, 0.999]
        for seed in range(3, 8):
            t.group["betas"][0] -= 0.1
            assert not t.step(seed)
    assert "an option" in a.not_replayed
    assert str(a.optimizer.explain().steps).startswith("not replayed")
    assert_same(a, b)


def a_gradient_that_is_a_view_with_an_offset() -> None:
    a, b = begin()
    for t in (a, b):
        torch.manual_seed(3)
        whole = torch.randn(60)
        for p, start in zip(t.params, (50, 7, 1), strict=True):
            p.grad = whole[start : start + len(p)]
        assert t.take() == t.replays
    assert_same(a, b)
    assert a.optimizer.explain().steps == "replayed"


def a_gradient_that_kernels_cannot_read_and_that_stays() -> None:
    """A planned step copies such a gradient. The step after it has the same one, and must copy it, too."""
    gradients = (torch.randn(5, 2)[:, 1], torch._efficientzerotensor((5,)))
    a, b = begin()
    for t in (a, b):
        for gradient in gradients:
            for seed in (1, 2, 3):
                torch.manual_seed(seed)
                for p in t.params:
                    p.grad = torch.randn_like(p)
                t.params[0].grad = gradient
                assert not t.take()
        assert t.step(4) == t.replays
    assert_same(a, b)


def a_group_without_gradients_that_is_gone() -> None:
    class Group(dict[str, Any]):
        pass

    a, b = both()
    for t in (a, b):
        t.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(7))]})
        t.optimizer.param_groups[1] = Group(t.optimizer.param_groups[1])
        assert [t.step(seed) for seed in range(3)] == [False, False, t.replays]
        group = weakref.ref(t.optimizer.param_groups.pop())
        assert group() is not None  # The group is still referenced, because compiled code compares its address.
        assert not t.step(3)
    assert_same(a, b)


def a_group_without_gradients_that_gets_one() -> None:
    a, b = both()
    for t in (a, b):
        t.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(7))]})
        assert [t.step(seed) for seed in range(3)] == [False, False, t.replays]
        frozen = t.optimizer.param_groups[1]["params"][0]
        frozen.grad = torch.ones(7)
        assert not t.step(3)
        assert not torch.equal(frozen, torch.ones(7))
    assert_same(a, b)


def another_list_of_groups() -> None:
    a, b = begin()
    a.optimizer.param_groups = list(a.optimizer.param_groups)
    assert [a.step(seed) for seed in range(3, 8)][::4] == [False, True]
    for seed in range(3, 8):
        b.step(seed)
    assert_same(a, b)


def unseen_where_there_are_tables() -> None:
    a, b = both(tables, weight_decay=0.1)
    for t in (a, b):
        for seed in range(8):
            t.group["weight_decay"] = BASE
            t.group["weight_decay"] += MORE[seed > 5]
            t.step(seed)
    assert_same(a, b)
    a, b = begin(tables)
    for t in (a, b):
        interrupted(t, 3)
    assert_same(a, b)


# How it is made --------------------------------------------------------------------------------------------------


def batches_of_odd_size() -> None:
    """Batches of odd size begin at multiples of 16 bytes."""

    def two_dtypes(replays: bool) -> Trained:
        torch.manual_seed(0)
        sizes = [(5, torch.float64), (3, torch.float32), (4, torch.float64), (2, torch.float64)]
        return Trained(replays, [torch.nn.Parameter(torch.randn(n, dtype=dtype)) for n, dtype in sizes])

    a, b = begin(two_dtypes)
    assert a.step(3)
    b.step(3)
    assert_same(a, b)
    plan = a.optimizer._plan
    assert plan is not None
    ready: Any = plan.replay.ready
    assert len(ready.parts) == 2
    assert all(part.words % 2 == 0 for part in ready.parts)
    assert sum(part.words for part in ready.parts) == ready.device_words.numel()


def turned_off() -> None:
    """Replay is turned off by the environment for a process, or by an option for an optimizer; `explain` says so."""
    a = made(True)
    os.environ["CADAM_REPLAY"] = "0"
    assert not any(a.step(seed) for seed in range(4))
    assert a.not_replayed == "not replayed: CADAM_REPLAY=0 is set"
    os.environ["CADAM_REPLAY"] = "1"
    assert [a.step(seed) for seed in range(4, 7)][-1]
    a.group["replay"] = False
    assert not any(a.step(seed) for seed in range(3))
    assert a.not_replayed == "not replayed: replay=False was asked for"
    options = complete(cadam.CAdam, {})
    update, before = RowUpdate(torch.ones(50, 3), new_state(torch.ones(50, 3)), cadam.CAdam, options), State.launched
    for step in range(1, 4):
        update(torch.arange(20), torch.ones(20, 3), step=step)
    assert State.launched > before
    options["replay"], before = False, State.launched
    for step in range(4, 8):
        update(torch.arange(20), torch.ones(20, 3), step=step)
    assert State.launched == before


def a_symbol_is_missing() -> None:
    known = torch_symbols.torch_symbols()
    for missing in torch_symbols.SYMBOLS[1:]:
        tensor_snapshot._snapshot_library.cache_clear()
        found = partial(replace, known, missing=(missing,))
        tensor_snapshot.torch_symbols = step_replay.torch_symbols = found  # type: ignore[attr-defined, assignment]
        a = made(True)
        assert not any(a.step(seed) for seed in range(3))
        assert missing in a.not_replayed, a.not_replayed


def steps_that_cannot_be_replayed() -> None:
    class NoMemory(Driver):
        def event(self) -> tuple[Any, int]:
            raise torch.OutOfMemoryError("no memory for an event")

    step_replay.driver = NoMemory  # type: ignore[assignment]
    a = made(True)
    assert not any(a.step(seed) for seed in range(4))
    assert a.state[a.params[0]]["step"] == 4
    assert "no memory for an event" in str(a.optimizer.explain())
    step_replay.driver = Driver  # type: ignore[assignment]
    a = made(True)
    a.group["params"] = tuple(a.params)
    assert not any(a.step(seed) for seed in range(4))
    assert "none that another can be like" in a.not_replayed  # only lists are compared with those of the recorded step


def whatever_the_users_defaults_are() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    tensor_snapshot._snapshot_library.cache_clear()
    assert tensor_snapshot.can_snapshot_in_c()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")
    a = made(True)
    for seed in range(5):
        for p in a.params:
            p.grad = torch.ones(p.shape)
        with torch.device("meta"):
            assert a.take() == (seed > 1)


def other_threads_run_while_the_driver_waits() -> None:
    # Recording an event calls `usleep` with its address, and a launch calls a function without effect. Both return 0.
    FUNCTIONS[3], FUNCTIONS[5] = ctypes.CDLL(None).usleep, ctypes.CDLL(None).sched_yield

    class Waiting(Driver):
        def event(self) -> tuple[Any, int]:
            return None, 200_000

    step_replay.driver = Waiting  # type: ignore[assignment]
    a = made(True)
    assert [a.step(seed) for seed in range(2)] == [False, False]
    assert a.is_replayed
    for p in a.params:
        p.grad = torch.ones_like(p)
    ran, done = [0], threading.Event()

    def other() -> None:
        while not done.is_set():
            ran[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=other)
    sys.setswitchinterval(60)  # no thread has to release the lock before the step is over
    thread.start()
    before = ran[0]
    a.optimizer.step()
    found = ran[0] - before
    done.set()
    thread.join()
    assert a.is_replayed
    assert found > 3, found


if __name__ == "__main__":
    run_named({name: case for name, case in globals().items() if callable(case)})
