"""The prepared step: taken where nothing but gradients and numbers changed, the same bits as the usual way.

There is no device here: Triton's interpreter runs the kernels, and functions of this file stand for the CUDA driver.
The compiled function that prepares and launches is the real one.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from test_cuda import interpreted

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


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_a_prepared_step_is_the_usual_one_whatever_changes_in_between() -> None:
    lines = [PRETENDED]
    for what, (change, expected) in CHANGES.items():
        lines.append(f"""
a, b = made(True), made(False)
for seed in range(3):
    assert step(*a, seed) == (seed > 1) and not step(*b, seed)
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
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
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
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_a_prepared_step_with_tables_is_the_usual_one() -> None:
    lines = [PRETENDED]
    for what, (change, expected) in TABLE_CHANGES.items():
        lines.append(f"""
a, b = tables(True), tables(False)
for seed in range(3):
    assert step(*a, seed) == (seed > 1), a[0]._plan.unprepared
    assert not step(*b, seed)
for o, ps in (a, b):
    {change}
for seed in range(3, 6):
    prepared = step(*a, seed), step(*b, seed)
    if seed == 3:
        assert prepared == ({expected}, False), ({what!r}, prepared)
assert prepared == (True, False), ({what!r}, prepared)
same(a, b)
""")
    done = interpreted("".join(lines))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
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


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
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
    done = interpreted(PRETENDED + source)
    assert done.returncode == 0, done.stderr
