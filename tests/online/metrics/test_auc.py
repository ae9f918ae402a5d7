"""AUC and log loss: equal to their definitions, and to scikit-learn's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from cadam.online.metrics.auc import auc
from cadam.online.metrics.log_loss import log_loss


def pairwise_interactions(scores: np.ndarray, labels: np.ndarray) -> float:
    above = scores[labels][:, None] > scores[~labels]
    equal = scores[labels][:, None] == scores[~labels]
    return float((above + 0.5 * equal).mean())


@given(st.lists(st.tuples(st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 1e-45, 2.0, np.inf]), st.booleans()), min_size=2))
def test_auc_counts_pairs(events: list[tuple[float, bool]]) -> None:
    scores, labels = np.array([s for s, _ in events], np.float32), np.array([c for _, c in events])
    if labels.all() or not labels.any():
        assert math.isnan(auc(scores, labels))
    else:
        assert auc(scores, labels) == pytest.approx(pairwise_interactions(scores, labels), abs=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("values", [50, 1_000_000_000], ids=["ties", "few ties"])
def test_auc_equals_that_of_scikit_learn(dtype: type, values: int) -> None:
    random = np.random.default_rng(1)
    labels = random.random(100_000) < 0.25
    scores: np.ndarray = (random.integers(0, values, 100_000) / values + 0.1 * labels).astype(dtype)
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_any_nonzero_label_is_positive() -> None:
    scores, labels = np.array([0.1, 0.7, 0.4, 0.4]), np.array([0, 1, 1, 0])
    expected = auc(scores, labels.astype(bool))
    assert expected == 3.5 / 4
    assert auc(scores, labels) == auc(scores, labels.astype(np.float32)) == expected
    assert auc(torch.tensor(scores), torch.tensor(labels)) == expected


def test_a_nan_score_makes_the_auc_nan() -> None:
    assert math.isnan(auc(np.array([1.0, math.nan]), np.array([True, False])))
    assert math.isnan(auc(np.array([1.0, 2.0, 3.0]), np.array([0, 1, math.nan])))
    assert math.isnan(log_loss(np.array([1.0, math.nan]), np.array([True, False])))
    assert math.isnan(log_loss(np.array([1.0, 2.0]), np.array([0, math.nan])))


def test_tensors_may_need_gradients_and_be_bfloat16() -> None:
    scores, labels = torch.tensor([1.0, 3.0, 2.0], requires_grad=True), torch.tensor([0, 1, 1])
    assert auc(scores, labels) == auc(scores.bfloat16(), labels.bfloat16()) == 1
    assert log_loss(scores.bfloat16(), labels) == log_loss(scores, labels)


def test_scores_and_labels_of_different_length_raise() -> None:
    with pytest.raises(ValueError, match=r"equally long, got \(2,\), \(3,\)"):
        auc(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match=r"equally long, got \(2, 1\), \(2, 1\)"):
        log_loss(np.zeros((2, 1)), np.zeros((2, 1)))


def test_log_loss_of_logits() -> None:
    logits, labels = np.array([0.3, -2.0, 800.0]), np.array([True, False, True])
    p = 1 / (1 + np.exp(-logits[:2]))
    assert log_loss(logits, labels) == pytest.approx((-np.log(p[0]) - np.log(1 - p[1])) / 3)
    assert log_loss(np.array([math.inf, -math.inf]), np.array([1, 0])) == 0
    assert log_loss(np.array([math.inf, 0.0]), np.array([0, 0])) == math.inf


def test_tensors_on_a_device_give_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for tensors on a GPU, run on the CPU, gives the same numbers."""
    random = np.random.default_rng(2)
    scores, labels = random.normal(size=500).round(1).astype(np.float32), random.random(500) < 0.3
    scores[:2], labels[:2] = (math.inf, -math.inf), (True, False)
    expected = auc(scores, labels), log_loss(scores, labels)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for module in ("auc", "log_loss"):
        name = f"cadam.online.metrics.{module}.as_pair"
        monkeypatch.setattr(name, lambda *pair: tuple(torch.as_tensor(x, device=device) for x in pair))
    assert auc(scores, labels) == expected[0]
    assert log_loss(scores, labels) == pytest.approx(expected[1], rel=1e-12)
