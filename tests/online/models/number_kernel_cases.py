"""The Triton kernels that normalize numbers compute the ranks, bins and samples of the operations of torch."""

from __future__ import annotations

import numpy as np
import torch

from tests.engines.triton_interpreter import run_named

from cadam.online.models.inputs import BINS, MAX_SHIFT, SLOT_STRIDE, NumberNormalizer  # isort: skip
from cadam.online.models.number_kernels import add_numbers, rank_numbers  # isort: skip

COLUMNS = 3


def batches(sizes: list[int], device: str) -> list[torch.Tensor]:
    """Return numbers with missing ones, equal ones and integers."""
    random = np.random.default_rng(0)
    parts = []
    for size in sizes:
        numbers = np.stack([random.normal(size=size), random.integers(0, 9, size), random.lognormal(size=size)], 1)
        numbers[random.random(size) < 0.2, 0] = np.nan
        parts.append(torch.from_numpy(numbers).to(device))
    return parts


def check(sizes: list[int], device: str = "cpu", start: int = 0) -> None:
    """Compare the kernels with torch's operations on the CPU, batch by batch."""
    layer, starts = NumberNormalizer(COLUMNS), torch.arange(COLUMNS) * (BINS + 1)
    layer.count += start
    if start:
        layer.sample.copy_(torch.randn(layer.sample.shape, dtype=torch.float64).sort(1).values)
    sample, count = layer.sample.to(device, copy=True), layer.count.to(device, copy=True)
    for numbers in batches(sizes, device):
        expected = layer.normalize(numbers.cpu(), starts, torch.float64)
        found = rank_numbers(numbers, sample, count, starts.to(device), torch.float64, BINS)
        torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-13, atol=1e-13)
        assert torch.equal(found[1].cpu(), expected[1])
        layer.add(numbers.cpu())
        add_numbers(numbers, sample, count, SLOT_STRIDE, MAX_SHIFT)
        assert torch.equal(sample.cpu(), layer.sample)
        assert torch.equal(count.cpu(), layer.count)


def growing() -> None:
    check([1, 400, 640, 3])


def large() -> None:
    check([2500], start=100_000)


def rare() -> None:
    check([64, 64, 64], start=3_000_000)


def infinite() -> None:
    numbers = torch.tensor([[float("inf"), 1.0, -float("inf")]], dtype=torch.float64)
    layer, starts = NumberNormalizer(COLUMNS), torch.arange(COLUMNS)
    expected = layer.normalize(numbers, starts, torch.float32)
    found = rank_numbers(numbers, layer.sample, layer.count, starts, torch.float32, BINS)
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)
    assert torch.equal(found[1], expected[1])


CASES = {"growing": growing, "large": large, "rare": rare, "infinite": infinite}

if __name__ == "__main__":
    run_named(CASES)
