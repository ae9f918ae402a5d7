"""What all models of the image study are made of."""

from __future__ import annotations

from torch import nn


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm that does not count its batches: only a momentum of None asks for that, and each costs a launch."""
    layer = nn.BatchNorm2d(channels)
    layer.num_batches_tracked = None
    return layer


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Without a bias: a batch norm after it takes it out again, and computing it costs a seventh of a step."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
