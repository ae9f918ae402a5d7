"""The importance weights of early positives make the expected loss that of the real distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cadam.online.labels.fake_negatives import fake_negative_weighted_loss, importance_weights


def test_the_weights_are_those_of_the_paper() -> None:
    probability = np.array([0.04, 0.04, 0.5, 0.5, 0.9, 0.9])
    labels = np.array([1, 0, 1, 0, 1, 0])
    scores = torch.tensor(np.log(probability / (1 - probability)))
    expected = np.where(labels == 1, 1 + probability, (1 - probability) * (1 + probability))
    np.testing.assert_allclose(importance_weights(scores, torch.tensor(labels)).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("rate", [0.01, 0.04, 0.3, 0.7])
def test_the_expected_gradient_is_zero_at_the_real_rate_only(rate: float) -> None:
    """All events are learned as negatives, and a share of them, the rate, also as positives."""
    count = 1000
    labels = torch.cat([torch.zeros(count), torch.ones(round(count * rate))]).double()

    def gradient(probability: float) -> float:
        score = torch.tensor(np.log(probability / (1 - probability)), requires_grad=True)
        fake_negative_weighted_loss(score.expand(len(labels)), labels).backward()
        assert score.grad is not None
        return float(score.grad)

    assert abs(gradient(rate)) < 1e-12
    assert gradient(0.9 * rate) < 0 < gradient(1.1 * rate)


def test_a_weight_multiplies_the_importance_weight() -> None:
    scores, labels, weight = torch.randn(5), torch.tensor([0.0, 1, 0, 1, 0]), torch.rand(5)
    each = [fake_negative_weighted_loss(scores[n : n + 1], labels[n : n + 1]) for n in range(5)]
    expected = (torch.stack(each) * weight).mean()
    torch.testing.assert_close(fake_negative_weighted_loss(scores, labels, weight), expected)
