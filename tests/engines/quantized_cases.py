"""Quantized moments in Triton's interpreter: the kernels store the same values as the reference, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cadam
from cadam.engines import row_layout, selection
from cadam.engines.cuda import dense as cuda
from cadam.engines.cuda.dense import Cuda
from cadam.engines.cuda.sparse import CudaRows
from tests.engines import triton_interpreter  # noqa: F401  (patches the interpreter)
from tests.engines.triton_interpreter import run_named

REFERENCE = tuple(engine for engine in selection.ENGINES if engine.name in ("rows", "eager"))
FUSED: tuple[Any, ...] = (Cuda(), CudaRows())
for engine in FUSED:
    engine.device = "cpu"
row_layout.RECORDS_ON = "cpu"


def run(
    engines: Any,
    cls: type[cadam.Optimizer],
    rows: bool,
    shape: tuple[int, ...],
    broken: float = 1.0,
    hot: int = 0,
    taken: float = 0.0,
    coalesced: bool = False,
    **options: Any,
) -> tuple[Any, list[Tensor]]:
    selection.ENGINES = (*engines, *REFERENCE)
    torch.manual_seed(0)
    params: list[Tensor] = [torch.nn.Parameter(torch.randn(shape)) for _ in range(2)]
    optimizer = cls(params, lr=1e-2, **options)
    for step in range(2):
        if step == 1 and taken:
            for param in params:
                optimizer.state[param]["step"].add_(taken)
        for param in params:
            if rows:
                ids = torch.randperm(shape[0])[: shape[0] // 2]
                ids, values = ids.repeat(2), torch.randn(2 * len(ids), *shape[1:]).round(decimals=1)
                if hot:  # all rows, and `hot` further gradients of row 7
                    ids = torch.cat([torch.randperm(shape[0]), torch.full((hot,), 7)])
                    values = torch.randn(len(ids), *shape[1:]).round()
                values *= torch.exp2(torch.randint(-20, 3, shape[1:]).float())
                values.view(-1)[0] *= broken if step == 0 else 1
                param.grad = torch.sparse_coo_tensor(ids[None], values, shape, check_invariants=True)
                if coalesced:
                    param.grad = param.grad.coalesce()
            else:
                param.grad = torch.randn(shape) * torch.exp2(torch.randint(-20, 3, shape[1:]).float())
                param.grad[-1, -1] *= broken if step == 0 else 1
                if step == 1:
                    param.grad.view(-1)[:3] = 0
        optimizer.step()
    return optimizer, params


def compare(cls: type[cadam.Optimizer], rows: bool, shape: tuple[int, ...], **options: Any) -> Any:
    """Compare kernels and reference, and return the optimizer that used the kernels."""
    fused, ours = run(FUSED, cls, rows, shape, **options)
    assert fused.explain()[0].engine == ("cuda-rows" if rows else "cuda"), fused.explain()
    reference, theirs = run((), cls, rows, shape, **options)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, equal_nan=True)
        for name, buffer in fused.state[p].items():
            # The kernels may add in another order.
            if options.get("second_moment") == "row" and buffer.dtype == torch.float32:
                torch.testing.assert_close(buffer, reference.state[q][name], rtol=1e-5, atol=0)
            else:
                torch.testing.assert_close(buffer, reference.state[q][name], rtol=0, atol=0, equal_nan=True)
    assert fused.alignment() == reference.alignment()
    return fused


# The NaN that a GPU computes has all bits set.
ALL_SET = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()


def dense() -> None:
    compare(cadam.CAdam, False, (60, 37), moments="bfloat16", capturable=True)
    compare(cadam.CAdam, False, (60, 37), moments="int8")
    compare(cadam.CLion, False, (4, 256), moments="int8", capturable=True)
    for capturable in (False, True):  # step counts beyond 2**24, which float32 cannot count exactly
        compare(cadam.CAdam, False, (4, 64), moments="int8", capturable=capturable, taken=2.0**24)
    for broken in (float("inf"), ALL_SET, 1e30):  # the square of 1e30 is infinite
        compare(cadam.CAdam, False, (5, 103), moments="int8", broken=broken)
        compare(cadam.CAdam, False, (5, 103), moments="bfloat16", broken=broken)


def huge() -> None:
    """Tensors with separate launches in chunks: three programs have whole chunks, the last one has a partial one."""
    cuda.HUGE, cuda.HUGE_QUANTIZED = 1, cuda.QuantizedProgram(2048, 512, 72)
    compare(cadam.CAdam, False, (16, 500), moments="int8", weight_decay=0.01)


def rows() -> None:
    compare(cadam.CAdam, True, (40, 3), moments="bfloat16")
    compare(cadam.CAdam, True, (40, 16), moments="int8")
    compare(cadam.CAdam, True, (10, 200), moments="int8", second_moment="row")  # wider than a tile
    compare(cadam.CAdaBelief, True, (400, 16), second_moment="row", eps=1e-8)  # several tiles
    compare(cadam.CAdam, True, (40, 1), moments="int8", second_moment="row")  # rows with a single element
    # Tiles that belong to row 7 alone, and tiles of distinct rows.
    compare(cadam.CAdam, True, (200, 16), moments="int8", hot=200)
    compare(cadam.CSGDM, True, (40, 16), moments="int8", capturable=True)
    compare(cadam.CAdam, True, (50, 70), moments="int8", hot=50)  # rows wider than a tile
    compare(cadam.CAdam, True, (50, 70), second_moment="row", hot=50)
    for broken in (float("inf"), ALL_SET):
        compare(cadam.CAdam, True, (40, 16), moments="int8", broken=broken)
        compare(cadam.CAdam, True, (40, 16), moments="int8", coalesced=True, broken=broken)
        compare(cadam.CAdam, True, (40, 16), moments="bfloat16", broken=broken)


def rows_apart() -> None:
    """Buffers that are not side by side in memory, as after loading."""
    row_layout.RECORDS_ON = "elsewhere"
    compare(cadam.CAdam, True, (200, 16), moments="int8", hot=200)
    compare(cadam.CAdam, True, (40, 3), moments="bfloat16", coalesced=True)
    of_odd_widths(together=False)


def records() -> None:
    of_odd_widths(together=True)
    compare(cadam.CAdam, True, (400, 16), moments="int8", second_moment="row", hot=200)  # several tiles
    compare(cadam.CAdam, True, (30,), moments="int8")
    compare(cadam.CAdam, True, (30, 2, 5), moments="int8", second_moment="row")


def of_odd_widths(together: bool) -> None:
    """Records with padding, or buffers with separate strides, for two moments, one moment, and one shared by a row."""
    for number, width in enumerate((3, 10, 70)):
        for cls, second in ((cadam.CAdam, "element"), (cadam.CAdam, "row"), (cadam.CLion, "element")):
            for coalesced in (False, True):
                more: dict[str, Any] = {"coalesced": True} if coalesced else {"hot": 40 * (number % 2)}
                fused = compare(cls, True, (40, width), moments="int8", second_moment=second, **more)
                for param in fused.param_groups[0]["params"]:
                    parts = [x for x in fused.state[param].values() if x.dim()]
                    assert (len({x.untyped_storage().data_ptr() for x in parts}) == 1) == together


def distinct_rows() -> None:
    """Gradients whose ids are known to be distinct, in several tiles."""
    compare(cadam.CAdam, True, (400, 16), moments="int8", coalesced=True)
    compare(cadam.CAdam, True, (400, 16), moments="bfloat16", row_steps=True, coalesced=True, capturable=True)
    compare(cadam.CAdam, True, (40, 103), second_moment="row", coalesced=True)
    compare(cadam.CAdam, True, (60, 70), moments="int8", coalesced=True)  # rows wider than a tile
    compare(cadam.CAdam, True, (60, 64), moments="int8", coalesced=True)  # scales in separate records


def distinct_ids_that_are_no_rows() -> None:
    """Invalid ids are skipped and not counted, whatever the width, and reported once."""
    selection.ENGINES = (*FUSED, *REFERENCE)
    for width in (16, 200):
        param = torch.nn.Parameter(torch.ones(50, width))
        optimizer = cadam.CAdam([param])
        ids = torch.tensor([[-3, 0, 7, 49, 50, 2**40]])
        grad = torch.sparse_coo_tensor(ids, torch.ones(6, width), param.shape, check_invariants=False)
        param.grad = grad._coalesced_(True)
        optimizer.step()
        assert optimizer.explain()[0].engine == "cuda-rows"
        assert (param != 1).any(1).nonzero().flatten().tolist() == [0, 7, 49]
        total = optimizer.alignment().total
        assert (total.aligned, total.touched, total.seen) == (3 * width, 3 * width, 50 * width)
        with pytest.raises(IndexError, match="out of range for 50 rows"):
            optimizer.step()


def row_steps() -> None:
    compare(cadam.CAdam, True, (40, 16), row_steps=True)
    compare(cadam.CAdam, True, (400, 16), moments="int8", row_steps=True, capturable=True)  # several tiles
    compare(cadam.CRAdam, True, (10, 200), second_moment="row", row_steps=True)  # wider than a tile
    # With dampening, the first step has another formula.
    compare(cadam.CSGDM, True, (40, 3), moments="bfloat16", row_steps=True, dampening=0.5)


def exact_updates() -> None:
    """Rows that have missed some steps, in one tile and in several."""
    for moments in ("int8", "bfloat16"):
        exact: dict[str, Any] = {"moments": moments, "sparse_updates": "exact", "taken": 5.0}
        compare(cadam.CAdam, True, (40, 16), **exact)
        compare(cadam.CAdaBelief, True, (40, 6), hot=600, **exact)


def stochastic_rounding() -> None:
    """The noise of bfloat16 parameters depends on `rounding_seed` and the parameter, not on torch's seed."""
    selection.ENGINES = (*FUSED, *REFERENCE)

    def rounded(sparse: bool, torch_seed: int = 0, **options: Any) -> list[Tensor]:
        torch.manual_seed(torch_seed)
        params: list[Tensor] = [torch.nn.Parameter(torch.ones(20, 64, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = cadam.CAdam(params, lr=1e-3, stochastic_rounding=True, **options)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param).to_sparse(1) if sparse else torch.ones_like(param)
            optimizer.step()
        return params

    for sparse in (False, True):
        for moments in ("float32", "int8"):
            first, second = rounded(sparse, moments=moments)
            assert 0.2 < (first < 1).float().mean() < 0.8
            assert not torch.equal(first, second)
            for param, same in zip((first, second), rounded(sparse, torch_seed=1, moments=moments), strict=True):
                assert torch.equal(param, same)
            assert not torch.equal(first, rounded(sparse, moments=moments, rounding_seed=1)[0])


CASES = (
    *(dense, huge, rows, rows_apart, records, distinct_rows, distinct_ids_that_are_no_rows, row_steps),
    exact_updates,
    stochastic_rounding,
)

if __name__ == "__main__":
    run_named({case.__name__: case for case in CASES})
