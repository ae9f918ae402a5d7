"""The C kernels: all thread counts and instruction sets give the same bits, and no write is out of bounds."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cadam
from cadam.codegen import c_source as c_source
from cadam.codegen.kernel_spec import KernelSpec, kernel_specs
from cadam.engines import selection
from cadam.engines.cpu import dense as native
from cadam.engines.cpu import sparse as cpu_rows
from cadam.engines.step_plan import StepPlan
from cadam.native import build, loader
from cadam.rules import ADAM, RULES, Rule, Step
from cadam.rules.defaults import defaults
from tests.native import sanitizer
from tests.optim.family import KERNEL_SPECS, OF_RULE

AVAILABLE = loader.find_kernel(KernelSpec.of(ADAM, defaults(ADAM)))
pytestmark = pytest.mark.skipif(isinstance(AVAILABLE, loader.UnavailableError), reason=f"no C kernels: {AVAILABLE}")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CHOSEN_AND_EAGER: list[dict[str, Any]] = [{}, {"foreach": False}]
FUSED_AND_EAGER: list[dict[str, Any]] = [{"fused": True}, {"foreach": False}]


def train(spec: str, dtype: torch.dtype, *, sparse: bool, steps: int = 4) -> list[Tensor]:
    """Return parameters and state after a few steps on fixed gradients."""
    rule, options = KERNEL_SPECS[spec]
    generator = torch.Generator().manual_seed(3)
    shapes = [(3000, 12)] if sparse else [(50_021,), (), (0, 3), (64, 65), (7, 3, 5, 5)]
    params = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    optimizer = OF_RULE[rule, True](params, lr=1e-2, weight_decay=1e-2, fused=True, **options)
    for _ in range(steps):
        for p in params:
            if sparse:
                ids = (torch.rand(4000, generator=generator) ** 3 * len(p)).long()
                values = torch.randn(4000, 12, generator=generator).to(dtype)
                p.grad = torch.sparse_coo_tensor(ids[None], values, p.shape, check_invariants=True)
            else:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    state = [optimizer.state[p][name] for p in params for name in optimizer.state[p]]
    return [*(p.detach() for p in params), *state]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", KERNEL_SPECS)
def test_same_bits_for_any_number_of_threads(spec: str, dtype: torch.dtype, sparse: bool, threads: None) -> None:
    torch.set_num_threads(1)
    alone = train(spec, dtype, sparse=sparse)
    torch.set_num_threads(5)
    for a, b in zip(alone, train(spec, dtype, sparse=sparse), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", KERNEL_SPECS)
def test_same_bits_for_any_instruction_set(spec: str, dtype: torch.dtype, sparse: bool) -> None:
    assert not isinstance(AVAILABLE, loader.UnavailableError)
    use = AVAILABLE[0].c.cadam_limit_instruction_set
    best = use(-1)
    if best == 0:
        pytest.skip("this processor has one instruction set only")
    try:
        results = []
        for level in range(best + 1):
            assert use(level) == level
            results.append(train(spec, dtype, sparse=sparse))
    finally:
        use(-1)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_a_second_thread_is_used(threads: None) -> None:
    """After torch.set_num_threads(2), two threads do the work."""
    seen = set()

    def note(begin: int, end: int, context: object) -> None:
        seen.add((begin, end))

    assert not isinstance(AVAILABLE, loader.UnavailableError)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(note)
    parallel_for = ctypes.CFUNCTYPE(
        ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, type(callback), ctypes.c_void_p
    )(AVAILABLE[0].parallel_for)
    for count in (1, 2):
        seen.clear()
        torch.set_num_threads(count)
        parallel_for(0, 1000, 1, callback, None)
        assert len(seen) == count


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Clear the caches of loaded libraries before and after a test; the user's cache is an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = (loader.find_kernel, loader.package_library, selection._warn_once)
    for each in found:
        each.cache_clear()
    yield tmp_path / "cadam"
    for each in found:
        each.cache_clear()


@pytest.fixture
def edited(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate that a rule was edited after the package was compiled. Returns the folder of the user's cache."""
    header, fingerprint = c_source.header() + "/* edited */\n", build.fingerprint("edited")
    monkeypatch.setattr(c_source, "header", lambda: header)
    monkeypatch.setattr(build, "fingerprint", lambda: fingerprint)
    return fresh


def engine_of_a_step() -> cadam.optim.explain.ExplainedParam:
    p = torch.zeros(3, requires_grad=True)
    optimizer = cadam.CAdam([p])
    p.grad = torch.ones(3)
    optimizer.step()
    (row,) = optimizer.explain()
    return row


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fast placeholder for a compiler: it copies the library in use and sets the requested fingerprint."""
    assert not isinstance(AVAILABLE, loader.UnavailableError)
    used, script = AVAILABLE[0].c, tmp_path / "compiler"
    script.write_text(
        f"""#!{sys.executable}
import pathlib, sys
sources, out = sys.argv[1:], pathlib.Path(sys.argv[-1])
stamps = [a for a in sources if a.startswith("-DFINGERPRINT")]
stamp = pathlib.Path({str(tmp_path / "stamp")!r})
if stamps:
    stamp.write_text(stamps[0].split('"')[1])
if "-shared" in sources:
    library = pathlib.Path({used._name!r}).read_bytes()
    out.write_bytes(library.replace({used.cadam_fingerprint()!r}, stamp.read_text().encode()))
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return script


def test_the_library_is_loaded_without_generating_its_sources(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_source, "header", lambda: pytest.fail("the header was generated"))
    assert engine_of_a_step().engine == "native"


def test_after_a_rule_is_edited_the_library_is_compiled_again_once(compiler: Path, edited: Path) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"compiled from other rules, C sources or flags.*compiling the kernels again"
    ):
        assert engine_of_a_step().engine == "native"
    assert {path.suffix for path in edited.iterdir()} - {".lock"} == {".so", ".sha256"}
    for each in (loader.find_kernel, loader.package_library):
        each.cache_clear()  # simulates another process
    compiler.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine_of_a_step().engine == "native"


@pytest.fixture
def damaged(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Truncate the package's library to its first half. Returns the folder of the user's cache."""
    path = tmp_path / "native.so"
    shutil.copy(build.LIBRARY, path)
    shutil.copy(build.checksum_path(build.LIBRARY), build.checksum_path(path))
    os.truncate(path, path.stat().st_size // 2)
    monkeypatch.setattr(build, "LIBRARY", path)
    return fresh


def test_a_damaged_library_is_not_loaded_but_compiled_again(compiler: Path, damaged: Path) -> None:
    with pytest.warns(RuntimeWarning, match="is damaged.*compiling the kernels again"):
        assert engine_of_a_step().engine == "native"
    for each in (loader.find_kernel, loader.package_library):
        each.cache_clear()  # simulates another process
    (kept,) = damaged.glob("*.so")
    content = kept.read_bytes()
    kept.unlink()  # this process has loaded the library already
    kept.write_bytes(content[:1000])
    with pytest.warns(RuntimeWarning, match="compiling the kernels again"):
        assert engine_of_a_step().engine == "native"
    assert build.is_intact(kept)


def test_a_damaged_library_that_cannot_be_compiled_again_is_reported_and_not_loaded(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.warns(RuntimeWarning, match="no fused kernels.*is damaged"):
        assert engine_of_a_step().engine == "foreach"


def test_a_stale_library_that_cannot_be_compiled_again_is_reported_and_not_used(
    edited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.warns(
        RuntimeWarning, match=r"no fused kernels.*other rules, C sources or flags.*\$CC is '/nowhere/cc'"
    ):
        row = engine_of_a_step()
    assert row.engine == "foreach"
    assert "python -m cadam.native.build" in row.passed_over["native"].reason


def test_a_library_without_a_fingerprint_is_compiled_again(
    compiler: Path, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.so"
    shutil.copy(torch._C.__file__, other)
    build.checksum_path(other).write_text(hashlib.sha256(other.read_bytes()).hexdigest())
    monkeypatch.setattr(build, "LIBRARY", other)
    with pytest.warns(RuntimeWarning, match="has no fingerprint.*compiling the kernels again"):
        assert engine_of_a_step().engine == "native"


def test_two_processes_that_find_a_damaged_library_at_once_both_get_a_whole_one(
    compiler: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, fingerprint = c_source.header(), build.fingerprint()
    path = build.cache_path(f"package-{fingerprint}.so")
    path.parent.mkdir()
    path.write_bytes(b"damaged")
    is_intact, both, looked, made = build.is_intact, threading.Barrier(2), threading.local(), []

    def is_intact_at_once(library: Path) -> bool:
        found = is_intact(library)
        if not hasattr(looked, "once"):
            looked.once = True
            both.wait(60)
        return found

    def make(*args: Any, **options: Any) -> Path:
        made.append(args)
        return link(*args, **options)

    link = build.build
    monkeypatch.setattr(build, "is_intact", is_intact_at_once)
    monkeypatch.setattr(build, "build", make)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: loader._compile("package", header, fingerprint), range(2)))
    assert [one.cadam_fingerprint().decode() for one in found] == [fingerprint] * 2
    assert len(made) == 1


def test_of_several_processes_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def make(path: Path) -> None:
        made.append(path)
        time.sleep(0.2)
        path.write_text("made")
        build.checksum_path(path).write_text(hashlib.sha256(path.read_bytes()).hexdigest())

    with ThreadPoolExecutor(4) as pool:  # a lock excludes other threads as it excludes other processes
        found = set(pool.map(lambda _: build.cached("some.so", make), range(4)))
    assert found == set(made) == {tmp_path / "cadam" / "some.so"}
    assert len(made) == 1


def test_a_rule_of_ones_own_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rule = Rule(
        name="halfway",
        defaults={"lr": 0.1, "pull": 0.25},
        state=lambda o: {"average": 0.0},
        coefficients=lambda t, o, f: {"pull": o["pull"]},
        update=lambda g, s, c, f: Step(
            step := s.average + (g - s.average) * c.pull * 0.5, s.average + g * c.pull, {"average": step}
        ),
    )

    class Halfway(cadam.Optimizer):
        pass

    Halfway.rule = rule
    results = []
    for options in FUSED_AND_EAGER:
        p = torch.linspace(-1, 1, 1000, dtype=torch.float64).requires_grad_()
        optimizer = Halfway([p], **options)
        for t in range(5):
            p.grad = torch.sin(torch.arange(1000.0, dtype=torch.float64) * (t + 1))
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-14, atol=1e-14)
    assert len(list((tmp_path / "cadam").glob("halfway-*.so"))) == 1


def test_without_kernels_the_best_torch_way_runs_and_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", Path("nowhere.so"))
    with pytest.warns(RuntimeWarning, match="no fused kernels on cpu.*has no compiled kernels"):
        row = engine_of_a_step()
    assert row.engine == "foreach"
    assert "no compiled kernels" in row.passed_over["native"].reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_of_a_step()  # the warning is given only once
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0: fused=True.*no compiled kernels"):
        cadam.CAdam([p], fused=True).step()


def test_who_asks_for_an_engine_without_kernels_is_not_warned(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", Path("nowhere.so"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"foreach": True}, {"foreach": False}, {"differentiable": True}, {"fused": False}):
            p = torch.zeros(3)
            p.grad = torch.ones(3)
            cadam.CAdam([p], **options).step()  # type: ignore[arg-type]


# Odd memory ---------------------------------------------------------------------------------------------------


def layouts() -> dict[str, Tensor]:
    base = torch.linspace(-1, 1, 240, dtype=torch.float32)
    odd = bytearray(1) + bytearray(base.numpy().tobytes())
    return {
        "transposed": base.clone().view(12, 20).t(),
        "channels last": base.clone().view(2, 3, 8, 5).to(memory_format=torch.channels_last),
        "strided": torch.linspace(-1, 1, 480)[::2],
        "offset": torch.cat([torch.zeros(1), base])[1:],
        "misaligned": torch.frombuffer(odd, dtype=torch.float32, offset=1),
    }


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("other_grad", [False, True])
def test_any_layout_gives_the_reference_result(name: str, other_grad: bool) -> None:
    results = []
    for options in CHOSEN_AND_EAGER:
        p = layouts()[name].requires_grad_()
        optimizer = cadam.CAdam([p], lr=0.1, **options)
        for t in range(4):
            grad = torch.cos(torch.arange(p.numel(), dtype=torch.float32) * (t + 1)).view(p.shape)
            p.grad = grad.clone() if other_grad else torch.empty_like(p).copy_(grad)
            optimizer.step()
        results.append(p.detach().clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_expanded_parameter_is_an_error_not_a_wrong_write() -> None:
    p = torch.zeros(1).expand(5).requires_grad_()
    p.grad = torch.ones(5)
    with pytest.raises(RuntimeError):
        cadam.CAdam([p]).step()


def test_parameters_that_share_memory_take_their_turns() -> None:
    """The second parameter decays what the first has moved; updated together, both would use the old values."""
    results = []
    for options in CHOSEN_AND_EAGER:
        shared = torch.linspace(-1, 1, 100_000)
        params = [shared[:70_000].requires_grad_(), shared[30_000:].requires_grad_()]
        optimizer = cadam.CAdam(params, lr=0.1, weight_decay=5.0, decoupled_weight_decay=True, **options)
        for t in range(3):
            for i, p in enumerate(params):
                p.grad = torch.cos(torch.arange(70_000.0) * (t + 1 + i))
            optimizer.step()
        results.append(shared.detach().clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_a_table_that_grew_is_refused_and_nothing_is_written_out_of_bounds() -> None:
    table = torch.zeros(4, 2)
    update = cadam.optim.sparse_update.RowUpdate(
        table,
        cadam.optim.sparse_update.new_state(table),
        cadam.CAdam,
        cadam.optim.sparse_update.complete(cadam.CAdam, {}),
    )
    update(torch.tensor([1]), torch.ones(1, 2), step=1)
    table.data = torch.zeros(400_000, 2)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(4, 2\), the table \(400000, 2\)"):
        update(torch.tensor([399_999]), torch.ones(1, 2), step=2)
    assert not table.any()
    table.data = torch.zeros(2, 4).t()  # The size is right, but there is not one value per row.
    update(torch.tensor([1]), torch.ones(1, 2), step=2)
    assert table[1].all()
    assert not table[[0, 2, 3]].any()


def test_a_parameter_that_shrank_is_refused() -> None:
    p = torch.zeros(100, requires_grad=True)
    q = torch.zeros(3, requires_grad=True)
    optimizer = cadam.CAdam([q, p])
    for x in (p, q):
        x.grad = torch.ones_like(x)
    optimizer.step()
    before = q.detach().clone()
    p.grad = None
    p.data = p.data[:50]
    p.grad = torch.ones(50)
    with pytest.raises(RuntimeError, match=r"group 0, parameter 1.*no parameter was changed"):
        optimizer.step()
    assert torch.equal(q, before)


@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_ids_out_of_range_are_refused_before_anything_changes(bad: int) -> None:
    table = torch.zeros(10, 4, requires_grad=True)
    dense = torch.zeros(3, requires_grad=True)
    optimizer = cadam.CAdam([("dense", dense), ("table", table)])
    dense.grad = torch.ones(3)
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, bad]]), torch.ones(2, 4), (10, 4), check_invariants=False)
    with pytest.raises(
        IndexError, match=f"'table'.*row id {bad} is out of range for 10 rows; no parameter was changed"
    ):
        optimizer.step()
    assert not dense.any()
    assert not table.any()
    assert optimizer.state[dense]["step"] == 0


@pytest.mark.parametrize("bad", [-1, 50, 2**62, -(2**63)])
@pytest.mark.parametrize("at", [(0, 3), (0, 99_999), (1, 50_000)])
def test_a_bad_id_among_many_is_found_in_every_dimension(bad: int, at: tuple[int, int], threads: None) -> None:
    torch.set_num_threads(2)
    table = torch.zeros(50, 40, 2, requires_grad=True)
    ids = torch.stack([torch.arange(100_000) % 50, torch.arange(100_000) % 40])
    ids[at] = bad
    other = torch.zeros(9, 3, requires_grad=True)
    optimizer = cadam.CAdam([("other", other), ("table", table)], fused=True)
    other.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 3), (9, 3), check_invariants=False)
    for columns in (ids, ids.t().contiguous().t()):
        table.grad = torch.sparse_coo_tensor(columns, torch.ones(100_000, 2), table.shape, check_invariants=False)
        with pytest.raises(IndexError, match=f"'table'.*row id {bad} is out of range for {table.shape[at[0]]} rows"):
            optimizer.step()
    for p in (other, table):
        assert not p.any()
        assert optimizer.state[p]["step"] == 0


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 10, 15, 16, 31, 32, 48, 65])
def test_rows_of_any_width_equal_the_reference(width: int) -> None:
    results = []
    generator = torch.Generator().manual_seed(width)
    ids = (torch.rand(3, 400, generator=generator) ** 2 * 300).long()
    values = torch.randn(3, 400, width, generator=generator, dtype=torch.float64)
    for options in FUSED_AND_EAGER:
        p = torch.ones(300, width, dtype=torch.float64, requires_grad=True)
        optimizer = cadam.CAdam([p], **options)
        for rows, grads in zip(ids, values, strict=True):
            p.grad = torch.sparse_coo_tensor(rows[None], grads, p.shape, check_invariants=True)
            optimizer.step()
        results.append((p.detach(), *optimizer.state[p].values(), optimizer.alignment_counts()))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tables_whose_gradients_have_the_same_ids_are_updated_as_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5000, width, generator=generator).to(dtype) for width in (8, 1, 1)]
    results = []
    for together in (True, False):
        tables = [table.clone().requires_grad_() for table in start]
        optimizers = [cadam.CAdam(group, lr=0.1) for group in ([tables] if together else [[t] for t in tables])]
        for step in range(3):
            random = torch.Generator().manual_seed(step)
            ids = (torch.rand(3000, generator=random) ** 3 * 5000).long()[None]
            other_ids = torch.flip(ids, [1])
            for table, rows in zip(tables, (ids, ids, other_ids), strict=True):
                values = torch.randn(3000, table.shape[1], generator=random).to(dtype)
                table.grad = torch.sparse_coo_tensor(rows, values, table.shape, check_invariants=True)
            for optimizer in optimizers:
                optimizer.step()
        counts = [optimizer.alignment().total for optimizer in optimizers]
        results.append((tables, sum(count.aligned for count in counts), sum(count.touched for count in counts)))
    (tables, aligned, touched), (expected, expected_aligned, expected_touched) = results
    assert all(map(torch.equal, tables, expected))
    assert (aligned, touched) == (expected_aligned, expected_touched)


def test_many_sparse_dimensions() -> None:
    indices = torch.tensor([[0, 1, 0, 2], [3, 0, 3, 1]])
    for values, shape in ((torch.randn(4, 5), (3, 4, 5)), (torch.randn(4), (3, 4))):
        results = []
        for options in CHOSEN_AND_EAGER:
            p = torch.ones(shape, requires_grad=True)
            optimizer = cadam.CAdam([p], **options)
            p.grad = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
            optimizer.step()
            results.append(p.detach())
        torch.testing.assert_close(*results)


class SameGrads:
    """Parameters whose gradients keep their memory. `is_told` is whether the optimizer knows it."""

    def __init__(self, is_told: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [(40, 8), (40, 1), (17, 3), (5,)]
        self.params = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        self.ids = torch.zeros(1, 30, dtype=torch.int64)
        self.values = [torch.zeros(30, width) for width in (8, 1)] + [torch.zeros(17, 3), torch.zeros(5)]
        tables = [
            torch.sparse_coo_tensor(self.ids, v, (40, v.shape[1]), check_invariants=True) for v in self.values[:2]
        ]
        self.grads = [*tables, *self.values[2:]]
        self.optimizer = cadam.CAdam(self.params, lr=0.1)
        self.is_told, self.generator = is_told, generator
        self.last: object = None

    def step(self) -> None:
        self.ids.copy_(torch.randint(0, 40, (1, 30), generator=self.generator))
        for param, grad, values in zip(self.params, self.grads, self.values, strict=True):
            values.copy_(torch.randn(values.shape, generator=self.generator))
            param.grad = grad
        if self.is_told:
            self.last = self.optimizer.step_on_same_grads(self.last)
        else:
            self.optimizer.step()


def change_lr(case: SameGrads) -> None:
    case.optimizer.param_groups[0]["lr"] = 0.01


def take_another_step(case: SameGrads) -> None:
    for param in case.params[1:]:
        param.grad = torch.ones_like(param)
    case.params[0].grad = None
    case.optimizer.step()


def move_state(case: SameGrads) -> None:
    state = case.optimizer.state[case.params[2]]
    state["exp_avg"] = state["exp_avg"].clone().mul_(2)


def load_state(case: SameGrads) -> None:
    case.optimizer.load_state_dict(case.optimizer.state_dict())


def replace_memory(case: SameGrads) -> None:
    case.params[3].data = case.params[3].data * 2


def add_hook(case: SameGrads) -> None:
    def hook(*_: Any) -> None:
        case.params[3].data.zero_()

    case.optimizer.register_step_pre_hook(hook)


@pytest.mark.parametrize("change", [change_lr, take_another_step, move_state, load_state, replace_memory, add_hook])
def test_a_step_on_the_same_gradients_equals_any_other(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[bool] = []
    repeat = StepPlan.repeat

    def counted_repeat(plan: StepPlan) -> bool:
        repeated.append(repeat(plan))
        return repeated[-1]

    monkeypatch.setattr(StepPlan, "repeat", counted_repeat)
    cases = SameGrads(True), SameGrads(False)
    for case in cases:
        for step in range(12):
            if step == 6:
                change(case)
            case.step()
    assert repeated.count(True) >= 5
    for mine, expected in zip(cases[0].params, cases[1].params, strict=True):
        assert torch.equal(mine, expected)
    assert cases[0].optimizer.alignment() == cases[1].optimizer.alignment()


# rows.update_ -------------------------------------------------------------------------------------------------


def test_a_prepared_update_equals_one_at_a_time() -> None:
    """Changed options, and gradients of another dtype, take effect in the next update."""
    table = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    again = table.clone()
    options = cadam.optim.sparse_update.complete(cadam.CAdam, {"lr": 0.05})
    state, other = cadam.optim.sparse_update.new_state(table), cadam.optim.sparse_update.new_state(again)
    prepared = cadam.optim.sparse_update.RowUpdate(table, state, cadam.CAdam, options)
    for step in range(1, 9):
        changed: dict[str, Any] = {"lr": 0.05 / step, "weight_decay": 0.1 * (step > 4)}
        options.update(changed)
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(20, (30,), generator=generator)
        grads = torch.randn(30, 6, generator=generator, dtype=torch.float64 if step % 3 == 0 else torch.float32)
        prepared(ids, grads, step=step)
        cadam.optim.sparse_update.update_(again, other, ids, grads, step=step, **changed)
    assert torch.equal(table, again)
    assert all(torch.equal(state[name], other[name]) for name in state)
    with pytest.raises(IndexError, match="row id 20"):
        prepared(torch.tensor([20]), torch.zeros(1, 6), step=9)
    with pytest.raises(ValueError, match="step is counted from 1"):
        prepared(ids, grads, step=0)


def test_update_on_plain_tensors_equals_the_optimizer() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(50, 8, generator=generator)
    p = table.clone().requires_grad_()
    optimizer = cadam.CAmsGrad([p], lr=0.05)
    state, counts = cadam.optim.sparse_update.new_state(table, cadam.CAmsGrad), torch.zeros(3, dtype=torch.int64)
    for step in range(1, 6):
        ids, grads = torch.randint(50, (30,), generator=generator), torch.randn(30, 8, generator=generator)
        p.grad = torch.sparse_coo_tensor(ids[None], grads, p.shape, check_invariants=True)
        optimizer.step()
        cadam.optim.sparse_update.update_(
            table, state, ids, grads, step=step, optimizer=cadam.CAmsGrad, counts=counts, lr=0.05
        )
    assert torch.equal(table, p)
    for name, buffer in state.items():
        assert torch.equal(buffer, optimizer.state[p][name])
    total = optimizer.alignment().total
    assert counts.tolist() == [total.aligned, total.touched, total.seen]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": torch.tensor([0, 9])}, IndexError, "row id 9 is out of range for 5 rows"),
        ({"ids": torch.tensor([0, -1])}, IndexError, "row id -1"),
        ({"ids": torch.tensor([0, 1], dtype=torch.int32)}, ValueError, "int64"),
        ({"ids": torch.tensor([0.0, 1.0])}, ValueError, "int64"),
        ({"ids": torch.tensor([[0], [1]])}, ValueError, "one-dimensional"),
        ({"grads": torch.ones(2, 3)}, ValueError, r"shape \(2, 4\), got \(2, 3\)"),
        ({"step": 0}, ValueError, "counted from 1"),
        ({"state": {}}, ValueError, "state must have"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"lrr": 1.0}, TypeError, "did you mean 'lr'"),
        ({"ids": [0, 1]}, TypeError, "ids must be a tensor, got list"),
        ({"optimizer": "CAdam"}, TypeError, "must be an optimizer class .* got 'CAdam'"),
        ({"optimizer": torch.optim.Adam}, TypeError, "must be an optimizer class"),
    ],
)
def test_update_refuses_bad_input(change: dict[str, object], error: type[Exception], message: str) -> None:
    table = torch.zeros(5, 4)
    arguments: dict[str, Any] = {
        "state": cadam.optim.sparse_update.new_state(table),
        "ids": torch.tensor([0, 1]),
        "grads": torch.ones(2, 4),
        "step": 1,
        **change,
    }
    with pytest.raises(error, match=message):
        cadam.optim.sparse_update.update_(table, **arguments)
    assert not table.any()


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("width", [1, 2, 10, 33])
def test_the_norm_of_rows_is_that_of_the_summed_rows(dtype: torch.dtype, width: int) -> None:
    c, threads = loader.package_library().c, torch.get_num_threads()
    for n, rows in ((1, 1), (5, 3), (1000, 50), (20_000, 1_000_000), (50_000, 7)):
        generator = torch.Generator().manual_seed(n + width)
        ids = torch.randint(rows, (n,), generator=generator)
        values = torch.randn(n, width, generator=generator).to(dtype)
        summed = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, ids, values.double())
        found = cpu_rows.norm(ids, values, rows)
        assert found is not None
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(found.double(), summed.norm(), rtol=2e-6, atol=0)
        try:
            for level in range(c.cadam_limit_instruction_set(-1) + 1):
                for count in (1, 2):
                    c.cadam_limit_instruction_set(level)
                    torch.set_num_threads(count)
                    assert cpu_rows.norm(ids, values, rows) == found
        finally:
            c.cadam_limit_instruction_set(-1)
            torch.set_num_threads(threads)


def test_the_norm_of_rows_leaves_ids_that_are_no_rows_to_others() -> None:
    for wrong in (-1, 5):
        assert cpu_rows.norm(torch.tensor([0, wrong]), torch.ones(2, 3), 5) is None
    table = torch.nn.Parameter(torch.zeros(5, 3))
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[4, 4, 0]]), torch.full((3, 3), 2.0), (5, 3), check_invariants=False
    )
    assert cadam.clip_grad_norm_(table, 1.0).item() == pytest.approx(60**0.5, rel=1e-6)
    assert not cpu_rows.has_norm(torch.ones(2, 2, dtype=torch.complex64))


def test_new_state_refuses_bad_input() -> None:
    with pytest.raises(TypeError, match="did you mean 'amsgrad'"):
        cadam.optim.sparse_update.new_state(torch.zeros(5, 4), amsgard=True)
    with pytest.raises(ValueError, match=r"floating-point numbers, got torch.int64"):
        cadam.optim.sparse_update.new_state(torch.zeros(5, 4, dtype=torch.int64))


# The sanitizer ------------------------------------------------------------------------------------------------


# Adam has two and three buffers, and SGDM one. The other rules use the same loops, and compiling each takes long.
@pytest.fixture(scope="module", params=[["adam"], pytest.param(["adam", "sgdm"], marks=pytest.mark.slow)], ids="-".join)
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The library and the number of its kernels."""
    sanitizer.runtime()
    rules = [RULES[name] for name in request.param]
    library = build.build(c_source.header(rules), tmp_path_factory.mktemp("asan") / "native.so", sanitizer.FLAGS)
    return library, len(kernel_specs(rules))


@pytest.mark.parametrize("mode", ["clean", "overrun"])
def test_no_wrong_access_under_the_sanitizer(sanitized: tuple[Path, int], mode: str) -> None:
    library, kernels = sanitized
    sanitizer.check(Path(__file__).parents[1] / "native" / "asan_driver.py", library, mode, str(kernels))


FORKED = """
import os, torch, cadam
torch.set_num_threads(2)
params = [torch.nn.Parameter(torch.ones(64)) for _ in range(2000)]
optimizer = cadam.CAdam(params, lr=0.1)
def step():
    for p in params:
        p.grad = torch.ones(64)
    optimizer.step()
step()
child = os.fork()
if not child:
    step()
    os._exit(0 if torch.allclose(params[-1].data, torch.full((64,), 0.8)) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_steps_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0"]


def one_shard(values: Tensor) -> Tensor:
    """Return a DTensor whose only shard is on this process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, init_device_mesh("cpu", (1,)))


@pytest.fixture
def world_of_one() -> Iterator[None]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("kind", ["alone", "complex", "DTensor"])
def test_a_lazily_negated_gradient_keeps_its_sign_next_to_any_other(kind: str) -> None:
    """d/dw of |conj(1 + iw) - (0.2 + 2i)|^2 is a negated view; at w = 0.5 it is positive, and w falls."""
    w = torch.nn.Parameter(torch.tensor([0.5]))
    beside = {
        "alone": torch.ones(1),
        "complex": torch.ones(1, dtype=torch.complex64),
        "DTensor": one_shard(torch.ones(1)),
    }
    other = torch.nn.Parameter(beside[kind])
    (torch.complex(torch.ones(1), w).conj() - (0.2 + 2j)).abs().square().sum().backward()
    other.grad = torch.ones_like(other)
    assert w.grad is not None
    assert w.grad.is_neg()
    optimizer = cadam.CAdam([w, other], lr=0.1)
    optimizer.step()
    assert [row.engine for row in optimizer.explain()] == ["native", "native"]
    torch.testing.assert_close(w.detach(), torch.tensor([0.4]))


def test_a_lazily_negated_gradient_that_covers_its_whole_memory_keeps_its_sign() -> None:
    """The sign is right in the first step, and in a later step whose gradient has the address of the earlier one."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizers = [cadam.CAdam([param], lr=0.1) for param in params]
    memory = torch.ones(4)
    for is_negated in (True, False, True):
        params[0].grad = torch._neg_view(memory) if is_negated else memory
        params[1].grad = -memory if is_negated else memory.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(*params)
