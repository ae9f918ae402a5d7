"""The Triton kernels that normalize numbers, with Triton's interpreter and on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.triton_interpreter import needs_triton, on_cuda, run_cases


@needs_triton
def test_the_kernels_compute_what_torch_computes() -> None:
    run_cases(Path(__file__).parent / "number_kernel_cases.py", ["growing", "large", "rare", "infinite"])


@on_cuda
@pytest.mark.parametrize(("sizes", "start"), [([1, 40, 300, 400, 256, 700, 8192], 0), ([64, 2500], 3_000_000)])
def test_the_kernels_compute_the_same_on_cuda(sizes: list[int], start: int) -> None:
    from tests.online.models.number_kernel_cases import check

    check(sizes, "cuda", start)
