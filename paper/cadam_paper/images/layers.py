"""Layers that all models of the image experiments share."""

from __future__ import annotations

from torch import nn


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch normalization layer without the counter of batches.

    PyTorch uses the counter only if `momentum` is None, and updating it costs a kernel launch per layer and step.
    """
    layer = nn.BatchNorm2d(channels)
    layer.num_batches_tracked = None
    return layer


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without a bias.

    The batch normalization after it would remove the bias again, and computing it takes a seventh of a training step.
    """
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
