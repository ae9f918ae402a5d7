from __future__ import annotations

import numpy as np
import pytest
import torch

import cadam
from cadam_paper import masking
from cadam_paper.harness.experiment import Plan
from cadam_paper.harness.results import Results


def test_the_direction_is_that_of_the_step_that_the_optimizer_takes() -> None:
    weight = torch.zeros(50, requires_grad=True)
    optimizer = cadam.CAdam([weight], lr=0.1)
    for step in range(1, 6):
        before = weight.detach().clone()
        weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        state = optimizer.state[weight]
        masked = masking._is_masked(state["exp_avg"], weight.grad)
        expected = -0.1 * masking._direction(state, optimizer.param_groups[0], step)
        expected[masked] = 0
        torch.testing.assert_close(weight.detach() - before, expected)
    assert masked.any()


def test_the_harmful_share_counts_negative_effects_of_kept_and_masked_elements_apart() -> None:
    effects = masking._Effects(2)
    effects.add(0, torch.tensor([3.0, -1.0, -6.0]), torch.tensor([False, False, True]))
    effects.add(1, torch.tensor([2.0]), torch.tensor([True]))
    kept, masked = effects.shares()
    assert kept[0] == 0.25
    assert np.isnan(kept[1])
    assert masked.tolist() == [1.0, 0.0]
    assert effects.metrics() == {"harmful_kept": 0.25, "harmful_masked": 0.75}


def test_corrupted_examples_agree_less_and_high_rates_make_the_masked_update_harmful(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masking, "STEPS", 100)
    noisy = masking.compute(masking.spec(masking.NOISY, 1e-3, 0)).metrics
    assert noisy["clean"] > noisy["corrupted"]
    low, high = (masking.compute(masking.spec(masking.STEADY, lr, 0)).metrics for lr in (1e-3, 1e-1))
    assert low["harmful_masked"] < 0.3 < high["harmful_masked"]


def test_the_specs_have_every_condition_at_every_rate_and_seed() -> None:
    specs = masking.run_specs(Plan("quick", 3), Results([]))
    assert len(set(specs)) == len(specs) == 3 * 4 * len(masking.RATES)
