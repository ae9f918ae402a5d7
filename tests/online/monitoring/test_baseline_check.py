"""The advice about a model that is no better than a constant names the actual cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cadam.online.metrics.log_loss import LogLoss, entropy
from cadam.online.monitoring.baseline_check import BaselineCheck

LOST, AT_CONSTANT = 1.1, 1.004
"""Losses in units of the best constant's: far from it, and that of a model without useful features."""


def advise(
    loss: float,
    *,
    steps: int = 1000,
    waiting: int = 0,
    late_labels: int = 0,
    left_out: tuple[str, ...] = (),
    is_tuned: bool = False,
    rate: float = 0.4,
    weight: float = 1.0,
) -> str:
    """The warning after two reports of 4,000 labeled events each."""
    check = BaselineCheck(left_out)
    for count in (1, 2):
        events = 4000 * count
        weights = weight * events
        total = LogLoss(events, rate * weights, loss * entropy(rate) * weights, rate * weights, weights)
        learner: Any = SimpleNamespace(
            log_loss=total,
            has_log_loss=True,
            steps=steps,
            rate_tuning=object() if is_tuned else None,
            pending=SimpleNamespace(counts=SimpleNamespace(late_labels=late_labels)),
            join=SimpleNamespace(waits_for_horizon=True),
        )
        learner.pending = type("Pending", (), {"__len__": lambda self: waiting, "counts": learner.pending.counts})()
        if count == 1:
            check(learner)
    return check.warning(learner)


@pytest.mark.parametrize(
    ("cause", "options", "text"),
    [
        ("dropped columns", {"loss": AT_CONSTANT, "steps": 157, "left_out": ("code",)}, "columns were left out: code"),
        ("late labels", {"loss": AT_CONSTANT, "steps": 94, "waiting": 16_000}, "labels are late: up to 16,000"),
        (
            "labels after the horizon",
            {"loss": AT_CONSTANT, "late_labels": 3000},
            "3,000 labels arrived after --horizon",
        ),
        ("too few steps", {"loss": LOST, "steps": 100}, "there were only 100 steps"),
        ("hardly any step", {"loss": AT_CONSTANT, "steps": 6}, "there were only 6 steps"),
    ],
)
def test_the_cause_is_named_and_no_other(cause: str, options: dict[str, Any], text: str) -> None:
    warning = advise(**options)
    assert f"Possible causes: {text}" in warning, cause
    assert "--lr" not in warning
    assert warning.count(";") <= 1  # one cause, whose advice may follow a semicolon


def test_events_that_say_nothing_about_the_model_are_named() -> None:
    assert "all have the same label" in advise(1.0, rate=0.0)
    assert "all have the same label" in advise(1.0, rate=1.0)
    assert "weights of the last 4,000 labeled events are all 0" in advise(1.0, weight=0.0)


def test_the_learning_rate_is_named_if_nothing_else_is_known() -> None:
    assert "Try a lower --lr" in advise(LOST)
    assert advise(0.9) == ""


@pytest.mark.parametrize("loss", [LOST, AT_CONSTANT])
def test_a_tuned_learning_rate_is_not_the_cause(loss: float) -> None:
    warning = advise(loss, is_tuned=True)
    assert "The learning rate is tuned, and no other rate was better, so the features may" in warning
    assert "--lr" not in warning
    assert "cadam ab" not in warning
    assert "Possible causes: there were only 6 steps" in advise(loss, steps=6, is_tuned=True)
