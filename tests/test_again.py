"""The prepared step: taken where nothing but gradients and numbers changed, the same bits as the usual way.

There is no device here: Triton's interpreter runs the kernels, and functions of this file stand for the CUDA driver.
The compiled function that prepares and launches is the real one.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from test_cuda import interpreted, needs_triton

from cadam.engines.cpu.library import UnavailableError
from cadam.engines.cuda import dense as cuda

PRETENDED = """
import ctypes, torch, cadam
from torch import Tensor
from types import SimpleNamespace
from cadam import engines
from cadam.engines import again, cuda, cuda_rows

engine, rows_engine = cuda.Cuda(), cuda_rows.CudaRows()
engine.device = rows_engine.device = "cpu"
engines.ENGINES = (engine, rows_engine, *(e for e in engines.ENGINES if e.name in ("rows", "eager")))
cuda_rows.ELEMENTS = 32  # so that a few ids fill several tiles, and the interpreter is done soon
stream, context, capturing, busy, launched = [0], [1], [0], [0], [0]
torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice = (lambda index: stream[0]), (lambda: 0)

word, number = ctypes.c_uint64, ctypes.c_int
KERNELS = []

def bound(self, kind):
    absent = {"found_inf", *([] if self.constants.get("COUNT") else ["counts"])}
    absent |= {"sources"} if self.constants.get("IN_BAGS") is False else set()
    KERNELS.append(self)
    return cuda.Bound(
        len(KERNELS), 128, 0, tuple(n for n in self.kernel.arg_names if n not in self.constants and n not in absent)
    )

cuda.Launch.bound = bound

class View:
    # memory at an address, as the interpreter takes it
    def __init__(self, address, dtype):
        self.address, self.dtype = address, dtype
    def data_ptr(self):
        return self.address

def get_context(out):
    out[0] = context[0]
    return 0

def is_capturing(stream, out):
    out[0] = capturing[0]
    return 0

def copy(to, source, size, stream):
    ctypes.memmove(to, source, size)
    return 0

def launch(function, x, y, z, bx, by, bz, shared, stream, arguments, extra):
    launched[0] += 1
    assert (z, bx, by, bz, shared) == (1, 128, 1, 1, 0)
    kernel = KERNELS[function - 1]
    names = bound(kernel, None).names
    KERNELS.pop()
    *words, first, second = [word.from_address(arguments[i]).value for i in range(len(names) + 2)]
    assert first == second == 0
    values = dict.fromkeys(n for n in kernel.kernel.arg_names if n not in kernel.constants)
    for name, value in zip(names, words):
        values[name] = ctypes.c_int64(value).value if name in NUMBERS else memory(value, TYPES.get(name, torch.float32))
    kernel.kernel[(x, y, z)](**values, **kernel.constants)
    return 0

NUMBERS = {"stride", "only", "seed", "n", "rows", "width", "bags", "batch", "first"}
TYPES = dict.fromkeys(["table", "grads", "ids", "error", "counts", "order", "offsets", "starts"], torch.int64)
TYPES |= {"keys": torch.int16, "sources": torch.int32, "owners": torch.int32, "coefficients": torch.float64}

def memory(address, dtype):
    if not address:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * 4096).from_address(address), dtype=dtype)

F = ctypes.CFUNCTYPE
P = ctypes.POINTER(word)
FUNCTIONS = [
    F(number, P)(get_context),
    F(number, word, ctypes.POINTER(number))(is_capturing),
    F(number, word)(lambda event: busy[0]),
    F(number, word, word)(lambda event, stream: 0),
    F(number, word, word, ctypes.c_size_t, word)(copy),
    F(number, word, *[ctypes.c_uint] * 7, word, P, word)(launch),
]

class Driver(again.Driver):
    def __init__(self):
        import numpy
        self.functions = numpy.array([ctypes.cast(f, ctypes.c_void_p).value for f in FUNCTIONS], numpy.int64)
        self.current_stream = torch._C._cuda_getCurrentRawStream
    def context(self):
        return context[0]
    def event(self):
        return None, 0

again.driver = Driver

def tables(prepared, **options):
    # a model with dense parameters and tables, of which two are looked up with the same ids
    optimizer, params = made(prepared, **options)
    params += [torch.nn.Parameter(torch.randn(50, width)) for width in (3, 1, 5)]
    for p in params[3:]:
        optimizer.param_groups[0]["params"].append(p)
    return optimizer, params

def made(prepared, cls=cadam.CAdam, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (5, 40, 3)]
    optimizer = cls(params, **options)
    optimizer.prepared = prepared
    return optimizer, params

def step(optimizer, params, seed, without=(), n=None):
    # one step; was it a prepared one?
    torch.manual_seed(seed)
    n = 20 + seed % 2 if n is None else n
    shared = torch.randint(0, 50, (1, n))
    for i, p in enumerate(params):
        p.grad = None if i in without else torch.randn_like(p)
        if p.dim() == 2 and i not in without:
            ids = shared if len(p[0]) < 5 else torch.randint(0, 50, (1, n)).square() // 50
            p.grad = torch.sparse_coo_tensor(ids, torch.randn(n, len(p[0])), p.shape)
    before, versions = launched[0], [p._version for p in params]
    optimizer.step()
    mine = set(optimizer.param_groups[0]["params"])
    assert all(p._version > v for i, (p, v) in enumerate(zip(params, versions)) if i not in without and p in mine)
    if not optimizer.prepared:
        optimizer._plan.again, optimizer._plan.preparations = None, 60
    return launched[0] > before

def same(a, b):
    for p, q in zip(a[1], b[1]):
        assert torch.equal(p, q)
        for name, value in a[0].state[p].items():
            assert torch.equal(value, b[0].state[q][name]), name
    if a[0].param_groups[0]["track_alignment"]:
        assert a[0].alignment() == b[0].alignment()
"""

CHANGES = {
    "nothing": ("pass", True),
    "the learning rate": ("o.param_groups[0]['lr'] = 0.5", True),
    "another option": ("o.param_groups[0]['betas'] = (0.5, 0.6)", False),
    "an option that calls for another update": ("o.param_groups[0]['weight_decay'] = 0.5", False),
    "a buffer": ("o.state[ps[1]]['exp_avg'] = torch.ones(40)", False),
    "the memory of a buffer": ("o.state[ps[1]]['exp_avg'].data = torch.ones(40)", False),
    "the values of a buffer": ("o.state[ps[1]]['exp_avg'].fill_(1)", True),
    "the memory of a parameter": ("ps[0].data = torch.ones(5)", False),
    "a step count": ("o.state[ps[1]]['step'].fill_(7)", False),
    "all step counts": ("[o.state[p]['step'].fill_(7) for p in ps]", False),
    "the memory of a step count": ("o.state[ps[1]]['step'].data = torch.tensor(7.0)", False),
    "a swapped parameter": ("torch.utils.swap_tensors(ps[0], torch.nn.Parameter(torch.ones(5)))", False),
    "the state of a parameter": ("o.state[ps[1]] = dict(o.state[ps[1]])", False),
    "all of the state": ("o.load_state_dict(o.state_dict())", False),
    "a group": ("o.add_param_group({'params': [torch.nn.Parameter(torch.ones(2))]})", False),
    "a parameter of the group": ("o.param_groups[0]['params'][1] = torch.nn.Parameter(torch.ones(4))", False),
    "a hook": ("o.register_step_post_hook(lambda *a: None)", True),
}

UNEQUAL = ("a step count", "the memory of a step count")  # parameters with coefficients of their own go the usual way


def changed_in_between(make: str, changes: dict[str, tuple[str, bool]]) -> None:
    """Three steps, a change, three more, prepared and not: is the fourth a prepared one, and all the same?"""
    lines = [PRETENDED]
    for what, (change, expected) in changes.items():
        lines.append(f"""
a, b = {make}(True), {make}(False)
for seed in range(3):
    assert step(*a, seed) == (seed > 1), a[0]._plan.unprepared
    assert not step(*b, seed)
for o, ps in (a, b):
    {change}
for seed in range(3, 6):
    prepared = step(*a, seed), step(*b, seed)
    if seed == 3:
        assert prepared == ({expected}, False), ({what!r}, prepared)
assert prepared == ({what not in UNEQUAL}, False), ({what!r}, prepared)
same(a, b)
""")
    done = interpreted("".join(lines))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@needs_triton
def test_a_prepared_step_is_the_usual_one_whatever_changes_in_between() -> None:
    changed_in_between("made", CHANGES)


@needs_triton
def test_gradients_that_come_and_go_are_noticed() -> None:
    source = """
a, b = made(True), made(False)
found = []
for seed, without in enumerate([(), (), (), (1,), (1,), (1,), (), (), ()]):
    found.append(step(*a, seed, without))
    assert not step(*b, seed, without)
# Once a parameter has missed a step, it has coefficients of its own.
assert found == [False, False, True, False, False, True, False, False, False], found
same(a, b)
for odd in (torch.randn(80)[::2], torch._neg_view(torch.randn(40))):
    a, b = made(True), made(False)
    assert [(step(*a, seed), step(*b, seed))[0] for seed in range(4)] == [False, False, True, True]
    before = launched[0]
    for o, ps in (a, b):
        ps[1].grad = odd
        o.step()
    assert launched[0] == before
    same(a, b)
"""
    done = interpreted(PRETENDED + source)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_the_device_has_to_be_ready_for_a_prepared_step() -> None:
    source = """
for what, value in ((stream, 5), (context, 9), (capturing, 1), (busy, 600)):
    a, b = made(True), made(False)
    for seed in range(3):
        assert step(*a, seed) == (seed > 1)
        step(*b, seed)
    usual, what[0] = what[0], value
    assert not step(*a, 3)
    what[0] = usual
    step(*b, 3)
    same(a, b)
for options in ({"track_alignment": False}, {"weight_decay": 0.1, "maximize": True}, {"amsgrad": True}):
    a, b = made(True, **options), made(False, **options)
    assert [step(*a, seed) for seed in range(5)] == [False, False, True, True, True]
    for seed in range(5):
        step(*b, seed)
    same(a, b)
"""
    done = interpreted(PRETENDED + source)
    assert done.returncode == 0, done.stderr


TABLE_CHANGES = {
    "the learning rate": ("o.param_groups[0]['lr'] = 0.5", True),
    "another option": ("o.param_groups[0]['betas'] = (0.5, 0.6)", False),
    "the memory of a buffer": ("o.state[ps[3]]['exp_avg'].data = torch.ones(50, 3)", False),
    "the memory of a table": ("ps[3].data = torch.ones(50, 3)", False),
    "the values of a table": ("ps[3].data.fill_(1)", True),
    "all of the state": ("o.load_state_dict(o.state_dict())", False),
}


@pytest.mark.slow
@needs_triton
def test_a_prepared_step_with_tables_is_the_usual_one() -> None:
    changed_in_between("tables", TABLE_CHANGES)


@pytest.mark.slow
@needs_triton
def test_gradients_of_rows_that_are_not_as_before_are_noticed() -> None:
    source = """
def sparse(ids, width=3):
    ids = torch.tensor(ids)
    return torch.sparse_coo_tensor(ids.reshape(1, -1), torch.ones(len(ids), width), (50, width))

ODD = {
    "coalesced": lambda: sparse([4, 4, 1]).coalesce(),
    "empty": lambda: torch.sparse_coo_tensor(torch.empty(1, 0).long(), torch.empty(0, 3), (50, 3)),
    "dense": lambda: torch.ones(50, 3),
    "two sparse dimensions": lambda: torch.eye(50)[:, :3].to_sparse(),
    "not contiguous": lambda: torch.sparse_coo_tensor(torch.tensor([[4, 4]]), torch.ones(3, 2).t(), (50, 3)),
}
for what, odd in ODD.items():
    a, b = tables(True), tables(False)
    for seed in range(3):
        step(*a, seed)
        step(*b, seed)
    before = launched[0]
    for o, ps in (a, b):
        ps[3].grad = odd()
        o.step()
    assert launched[0] == before, what
    same(a, b)

for n in (2, 4, 40):  # fewer and more ids than before: one tile and many
    a, b = tables(True), tables(False)
    for seed in range(5):
        many = n if seed == 3 else 20
        assert step(*a, seed, n=many) == (seed > 1) and not step(*b, seed, n=many)
    same(a, b)

for bad in (-1, 50):
    a, b = tables(True), tables(False)
    for o, ps in (a, b):
        for seed in range(3):
            step(o, ps, seed)
        ps[3].grad = sparse([7, bad, 7])
        o.step()
        table = ps[3].clone()
        ps[3].grad = sparse([7, 8])
        try:
            o.step()
            raise SystemExit("the bad id was not told")
        except IndexError as error:
            assert f"row id {bad}" in str(error), error
        assert torch.equal(table, ps[3])
        o.step()
    same(a, b)
"""
    done = interpreted(PRETENDED + source)
    assert done.returncode == 0, done.stderr


ROWS_UNSEEN = """
def updated(prepared):
    torch.manual_seed(0)
    table, options, base = torch.randn(50, 3), complete(cadam.CAdam, {"weight_decay": 0.1}), float("0.1")
    more = [0.0, 0.3]
    update, found = RowUpdate(table, new_state(table), cadam.CAdam, options), []
    for step in range(1, 10):
        options["weight_decay"] = base
        options["weight_decay"] += more[step > 6]  # at the address of the one before
        before = launched[0]
        update(torch.randint(0, 50, (20,)), torch.randn(20, 3), step=step)
        found.append(launched[0] > before)
        if not prepared:
            update._prepared.again = None
    return table, *update.state.values()

for x, y in zip(updated(True), updated(False)):
    assert torch.equal(x, y)

update = RowUpdate(torch.ones(50, 3), new_state(torch.ones(50, 3)), cadam.CAdam, complete(cadam.CAdam, {}))
def go(step, n=20):
    before = launched[0]
    update(torch.arange(n) % 50, torch.ones(n, 3), step=step)
    return launched[0] > before
assert [go(step) for step in range(1, 4)] == [False, False, True], update._prepared.unprepared
table = update._prepared.again.tables[0]
memory, usual = table.memory, torch.empty
def empty(size, **options):
    if options.get("dtype") is torch.int32:
        raise torch.OutOfMemoryError("no room")
    return usual(size, **options)
torch.empty = empty
try:
    go(4, 500)
    raise SystemExit("there was room")
except torch.OutOfMemoryError:
    pass
torch.empty = usual
assert table.memory is memory  # as large as the sums that go with it
"""


@pytest.mark.slow
@needs_triton
def test_a_prepared_update_of_rows_is_the_usual_one() -> None:
    source = """
from cadam.rows import Bags, RowUpdate, complete, new_state

def updated(prepared, in_bags):
    torch.manual_seed(0)
    table = torch.randn(50, 3)
    options = complete(cadam.CAdam, {})
    state, counts = new_state(table), torch.zeros(3, dtype=torch.int64)
    update, found = RowUpdate(table, state, cadam.CAdam, options, counts=counts), []
    for step in range(1, 9):
        lengths = torch.randint(0, 4, (4 * 3,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids, starts = torch.randint(0, 12, (int(lengths.sum()),)), torch.tensor([0, 12, 24, 36])
        grads, before = torch.randn(3, 4, 3), launched[0]
        options["lr"] = 0.01 if step < 5 else 0.02
        options["weight_decay"] = 0.1 if step == 7 else 0.0
        assert update.takes_bags(torch.float32)
        if in_bags:
            update.pooled(ids, Bags(offsets, starts, 3), grads, step=step + 5)
        else:
            feature = torch.arange(4).repeat_interleave(lengths.view(4, 3).sum(1))
            sample = torch.arange(3).repeat(4).repeat_interleave(lengths)
            update(ids + starts[feature], grads[sample, feature], step=step + 5)
        found.append(launched[0] > before)
        if not prepared:
            update._prepared.again = None
    return table, *state.values(), counts, found

for one in (updated(True, False), updated(True, True)):
    *tensors, found = one
    assert found == [False, False, True, True, True, True, False, False], found
    for x, y in zip(tensors, updated(False, False)):
        assert torch.equal(x, y)
"""
    done = interpreted(PRETENDED + source + ROWS_UNSEEN)
    assert done.returncode == 0, done.stderr


UNSEEN = {
    # An option's object is freed, and the next one made takes its address.
    "an option at the address of the one before": """
begin(a, b)
for found in (a, b):
    for seed in range(3, 8):
        g = found[0].param_groups[0]
        g["weight_decay"] = base
        g["weight_decay"] += more[seed > 4]
        step(*found, seed)
same(a, b)
""",
    # The update itself is another one then.
    "weight decay sets in at the address of the one before": """
begin(a, b)
assert a[0].param_groups[0]["weight_decay"] == 0
for found in (a, b):
    for seed in range(3, 6):
        g = found[0].param_groups[0]
        g["weight_decay"] = nothing
        g["weight_decay"] += more[seed > 3]
        step(*found, seed)
assert a[0]._plan.kept[0].job.update.decay != "none"
same(a, b)
""",
    "a list of the same parameters, of which one is replaced later": """
begin(a, b)
for found in (a, b):
    o, ps = found
    o.param_groups[0]["params"] = list(ps)
    used = [step(*found, seed) for seed in range(3, 5)]
    torch.manual_seed(9)
    left, ps[1] = ps[1], torch.nn.Parameter(torch.randn(40))
    was = left.detach().clone()
    o.param_groups[0]["params"][1] = ps[1]
    step(*found, 6)
    assert torch.equal(left, was) and o.state[ps[1]]["step"] == 1
assert used == [False, False]
same(a, b)
""",
    "a step that is interrupted on its way to the usual one": """
begin(a, b)
def stop(self):
    raise KeyboardInterrupt

for found in (a, b):
    o, ps = found
    old, ps[0].data = ps[0].data, torch.ones(5)
    was, usual = old.clone(), type(o)._refuse_capture
    type(o)._refuse_capture = stop
    try:
        step(*found, 3)
        raise SystemExit("not interrupted")
    except KeyboardInterrupt:
        pass
    type(o)._refuse_capture = usual
    assert not step(*found, 3) and torch.equal(old, was)
same(a, b)
""",
    "an option that changes and stays the same object": """
begin(a, b)
for found in (a, b):
    o, ps = found
    o.param_groups[0]["betas"] = [0.9, 0.999]
    for seed in range(3, 8):
        o.param_groups[0]["betas"][0] -= 0.1
        assert not step(*found, seed)
assert "an option" in str(a[0]._plan.unprepared) and "Steps are not prepared" in str(a[0].explain())
same(a, b)
""",
    "a gradient that is a view with an offset": """
begin(a, b)
for o, ps in (a, b):
    torch.manual_seed(3)
    whole, before = torch.randn(60), launched[0]
    for p, start in zip(ps, (50, 7, 1)):
        p.grad = whole[start : start + len(p)]
    o.step()
    assert (launched[0] > before) == o.prepared
same(a, b)
assert str(a[0].explain()).endswith("Steps are prepared")
""",
    "a group without gradients that is gone": """
class Group(dict):
    pass

for o, ps in (a, b):
    o.add_param_group({"params": [torch.nn.Parameter(torch.ones(7))]})
    o.param_groups[1] = Group(o.param_groups[1])
    assert [step(o, ps, seed) for seed in range(3)] == [False, False, o.prepared]
    group = weakref.ref(o.param_groups.pop())
    assert (group() is not None) == o.prepared  # the compiled function is going to look at it
    assert not step(o, ps, 3)
same(a, b)
""",
    "a group without gradients that gets one": """
for o, ps in (a, b):
    o.add_param_group({"params": [torch.nn.Parameter(torch.ones(7))]})
    assert [step(o, ps, seed) for seed in range(3)] == [False, False, o.prepared]
    frozen = o.param_groups[1]["params"][0]
    frozen.grad = torch.ones(7)
    assert not step(o, ps, 3) and not torch.equal(frozen, torch.ones(7))
same(a, b)
""",
    "another list of groups": """
begin(a, b)
a[0].param_groups = list(a[0].param_groups)
assert [step(*a, seed) for seed in range(3, 8)][::4] == [False, True]
[step(*b, seed) for seed in range(3, 8)]
same(a, b)
""",
}


QUICK = [
    "weight decay sets in at the address of the one before",
    "a list of the same parameters, of which one is replaced later",
    "a step that is interrupted on its way to the usual one",
    "a group without gradients that is gone",
]


@needs_triton
@pytest.mark.parametrize("cases", [QUICK, pytest.param(set(UNSEEN) - set(QUICK), marks=pytest.mark.slow)])
def test_changes_that_could_go_unseen_are_seen(cases: Collection[str]) -> None:
    begin = """
import weakref

base, nothing, more = float("0.1"), float("0.0"), [0.0, 0.5]

def begin(a, b):
    for seed in range(3):
        assert step(*a, seed) == (seed > 1) and not step(*b, seed)
"""
    lines = [PRETENDED, begin]
    lines += [f"print({what!r})\na, b = made(True), made(False)\n{UNSEEN[what]}" for what in cases]
    done = interpreted("".join(lines))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
def test_batches_of_odd_size_begin_at_multiples_of_16_bytes() -> None:
    source = """
def two_dtypes(prepared):
    torch.manual_seed(0)
    sizes = [(5, torch.float64), (3, torch.float32), (4, torch.float64), (2, torch.float64)]
    params = [torch.nn.Parameter(torch.randn(n, dtype=dtype)) for n, dtype in sizes]
    optimizer = cadam.CAdam(params)
    optimizer.prepared = prepared
    return optimizer, params

a, b = two_dtypes(True), two_dtypes(False)
for seed in range(4):
    assert step(*a, seed) == (seed > 1) and not step(*b, seed)
same(a, b)
prepared = a[0]._plan.again
assert len(prepared.numbers) == 2 and all(c.words % 2 == 0 for c in prepared.numbers)
assert sum(c.words for c in prepared.numbers) == prepared.sent.numel()
"""
    done = interpreted(PRETENDED + source)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_a_step_that_cannot_be_prepared_is_taken_all_the_same() -> None:
    source = """
class NoMemory(Driver):
    def event(self):
        raise torch.OutOfMemoryError("no memory for an event")

again.driver = NoMemory
a = made(True)
assert not any(step(*a, seed) for seed in range(4))
assert a[0].state[a[1][0]]["step"] == 4
assert "no memory for an event" in str(a[0].explain())
again.driver = Driver

a = made(True)
a[0].param_groups[0]["params"] = tuple(a[1])
assert not any(step(*a, seed) for seed in range(4))
assert "not in lists" in a[0]._plan.unprepared

torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
for found in (again.eyes, again.layout):
    found.cache_clear()
    assert found() is not None
torch.set_default_dtype(torch.float32)
torch.set_default_device("cpu")
a = made(True)
for seed in range(5):
    for p in a[1]:
        p.grad = torch.ones(p.shape)
    before = launched[0]
    with torch.device("meta"):
        a[0].step()
    assert (launched[0] > before) == (seed > 1)
"""
    done = interpreted(PRETENDED + source)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_other_threads_run_while_the_driver_waits() -> None:
    source = """
import sys, threading, time

# To record an event takes as long as its address says, a launch does nothing: both return 0.
FUNCTIONS[3], FUNCTIONS[5] = ctypes.CDLL(None).usleep, ctypes.CDLL(None).sched_yield

class Waiting(Driver):
    def event(self):
        return None, 200_000

again.driver = Waiting
a = made(True)
assert [step(*a, seed) for seed in range(2)] == [False, False]
for p in a[1]:
    p.grad = torch.ones_like(p)
ran, done = [0], []
def other():
    while not done:
        ran[0] += 1
        time.sleep(0.001)
thread = threading.Thread(target=other)
sys.setswitchinterval(60)  # nobody has to give the lock away
thread.start()
before = ran[0]
assert a[0]._plan.again.step(a[0].param_groups, a[0].state)
found = ran[0] - before
done.append(True)
thread.join()
assert found > 3, found
"""
    done = interpreted(PRETENDED + source)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@needs_triton
def test_changes_that_could_go_unseen_are_seen_where_there_are_tables() -> None:
    source = """
base, more = float("0.1"), [0.0, 0.5]
a, b = tables(True, weight_decay=0.1), tables(False, weight_decay=0.1)
for found in (a, b):
    for seed in range(8):
        g = found[0].param_groups[0]
        g["weight_decay"] = base
        g["weight_decay"] += more[seed > 5]
        step(*found, seed)
same(a, b)

def stop(self):
    raise KeyboardInterrupt

a, b = tables(True), tables(False)
for o, ps in (a, b):
    for seed in range(3):
        step(o, ps, seed)
    old, ps[3].data = ps[3].data, torch.ones(50, 3)
    was, usual = old.clone(), type(o)._refuse_capture
    type(o)._refuse_capture = stop
    try:
        step(o, ps, 3)
        raise SystemExit("not interrupted")
    except KeyboardInterrupt:
        pass
    type(o)._refuse_capture = usual
    assert not step(o, ps, 3) and torch.equal(old, was)
same(a, b)
"""
    done = interpreted(PRETENDED + source)
    assert done.returncode == 0, done.stderr


def triton_s(packed: tuple[int, ...] = (4, 1, 128), kinds: str = "*fp32 i32 i64 constexpr", **changed: Any) -> Any:
    """What Triton says of a compiled kernel; None: nothing."""
    about = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": False}
    metadata = SimpleNamespace(**{name: value for name, value in (about | changed).items() if value is not None})
    src = SimpleNamespace(signature=dict(zip("abcd", kinds.split(), strict=False)))
    return SimpleNamespace(name="k", function=7, packed_metadata=packed, metadata=metadata, src=src)


def test_a_kernel_is_launched_as_it_is_only_if_all_is_known_of_it() -> None:
    assert cuda.Bound.of(triton_s()) == cuda.Bound(7, 128, 128, ("a", "b", "c"))
    for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"):
        with pytest.raises(UnavailableError, match=f"more than usual: 1 blocks, .'{name}'"):
            cuda.Bound.of(triton_s(**{name: 1}))
        with pytest.raises(UnavailableError, match=f"without .'{name}'"):
            cuda.Bound.of(triton_s(**{name: None}))
    with pytest.raises(UnavailableError, match="2 blocks"):
        cuda.Bound.of(triton_s((4, 2, 128)))
    with pytest.raises(UnavailableError, match="says other things"):
        cuda.Bound.of(triton_s((4, 1, 128, 0)))
    with pytest.raises(UnavailableError, match="b: fp32"):
        cuda.Bound.of(triton_s(kinds="*fp32 fp32"))


@needs_triton
@pytest.mark.parametrize(("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.7.1", True), ("3.8.0", False)])
def test_versions_of_triton_whose_launches_are_known(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    assert cuda._direct.__wrapped__() == known
