"""Importance weights for learning every event as a negative first, and positives again when their label arrives.

The stream that the model is trained on then contains an event with features x as a negative once, and with probability
p(x) as a positive too. In it, the share of positives is p / (1 + p) instead of p. Ktena et al. call the negatives that
turn positive later fake negatives, and give the importance weights that make the expected loss that of the real
distribution:

    weight of a positive = 1 + p(x)
    weight of a negative = (1 - p(x)) (1 + p(x))

The probability p(x) is unknown, so the model's own prediction takes its place; no gradient flows through it. The
expected gradient of the log loss is zero where the prediction equals p.

This is the paper's fake negative weighted loss. Its alternative, fake negative calibration, trains without weights and
corrects each prediction b to b / (1 - b). The weighted loss is used here because the scores of the model then need no
correction wherever they are logged, measured, exported or served, and a prediction above one half needs no clipping.

Ktena et al. (2019), "Addressing Delayed Feedback for Continuous Training with Neural Networks in CTR prediction",
https://arxiv.org/abs/1907.06558, section 4.
"""

from __future__ import annotations

from torch import Tensor, nn


def importance_weights(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute the weight of each event from the model's own scores.

    Args:
        scores: logits. No gradient flows through them.
        labels: 1 for positives, and 0 for events that are learned as negatives when they arrive.
    """
    probability = scores.detach().sigmoid()
    return (1 + probability) * (1 - probability * (1 - labels))


def fake_negative_weighted_loss(scores: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the mean log loss with importance weights.

    Args:
        scores: logits.
        labels: 0 or 1.
        weight: further weights of the events.
    """
    weights = importance_weights(scores, labels)
    if weight is not None:
        weights = weights * weight
    return nn.functional.binary_cross_entropy_with_logits(scores, labels, weight=weights)
