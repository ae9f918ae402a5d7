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
from cadam.engines import again, cuda

engine = cuda.Cuda()
engine.device = "cpu"
engines.ENGINES = (engine, *(e for e in engines.ENGINES if e.name in ("rows", "eager")))
stream, context, capturing, busy, launched = [0], [1], [0], [0], [0]
torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice = (lambda index: stream[0]), (lambda: 0)

word, number = ctypes.c_uint64, ctypes.c_int
KERNELS = []

def bound(self, kind):
    names = ("table", "grads", "coefficients", "stride", "owners", "only", "seed")
    KERNELS.append(self)
    return cuda.Bound(len(KERNELS), 128, 0, names)

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
    table, grads, row, stride, owners, only, seed, *scratch = [word.from_address(arguments[i]).value for i in range(9)]
    assert scratch == [0, 0] and (y, z, bx, by, bz, shared) == (1, 1, 128, 1, 1, 0)
    def memory(address, dtype, count=1 << 16):
        return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)
    kernel = KERNELS[function - 1]
    kernel.kernel[(x, 1, 1)](
        memory(table, torch.int64, 64), memory(grads, torch.int64, 8), memory(row, torch.float64, 16), stride,
        memory(owners, torch.int32, x) if owners else torch.empty(0, dtype=torch.int32), only, None, seed,
        **kernel.constants,
    )
    return 0

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

def made(prepared, cls=cadam.CAdam, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (5, 40, 3)]
    optimizer = cls(params, **options)
    optimizer.prepared = prepared
    return optimizer, params

def step(optimizer, params, seed, without=()):
    # one step; was it a prepared one?
    torch.manual_seed(seed)
    for i, p in enumerate(params):
        p.grad = None if i in without else torch.randn_like(p)
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
