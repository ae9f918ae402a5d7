"""VGG, ResNet and DenseNet in the variants for images of 32x32 pixels, and small versions for a CPU.

Unlike the variants for ImageNet, they start with a 3x3 convolution at full resolution and end with one linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .densenet import DenseNet
from .layers import batch_norm, convolution


class VGG(nn.Module):
    """VGG (https://arxiv.org/abs/1409.1556) with batch normalization: stages of 3x3 convolutions and max pooling."""

    def __init__(self, stages: Sequence[Sequence[int]], inputs: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for stage in stages:
            for width in stage:
                layers += [convolution(inputs, width, 3), batch_norm(width), nn.ReLU(inplace=True)]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.classifier(self.features(x).mean((2, 3)))
        return x


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut connection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(inputs, width, 3, stride), batch_norm(width)
        self.conv2, self.norm2 = convolution(width, width, 3), batch_norm(width)
        same = stride == 1 and inputs == width
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(convolution(inputs, width, 1, stride), batch_norm(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the convolutions and add the shortcut."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        return F.relu(inner + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """ResNet (https://arxiv.org/abs/1512.03385): stages of residual blocks.

    Each stage except the first halves the resolution and doubles the number of channels.
    """

    def __init__(self, blocks: Sequence[int], width: int, inputs: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(inputs, width, 3), batch_norm(width), nn.ReLU(inplace=True))
        layers: list[nn.Module] = []
        before = width
        for stage, count in enumerate(blocks):
            after = width << stage
            for block in range(count):
                layers.append(ResidualBlock(before, after, 2 if stage and not block else 1))
                before = after
        self.stages = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.classifier(self.stages(self.stem(x)).mean((2, 3)))
        return x


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "VGG-16": partial(VGG, ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)),
    "ResNet-18": partial(ResNet, (2, 2, 2, 2), 64),
    "DenseNet-121": partial(DenseNet, (6, 12, 24, 16), 32),
    "small VGG": partial(VGG, ((8,), (16,), (32,))),
    "small ResNet": partial(ResNet, (1, 1), 8),
    "small DenseNet": partial(DenseNet, (2, 1), 4),
}
"""Functions that build each model from the numbers of input channels and of classes, by name."""


def build(name: str, channels: int, classes: int, seed: int) -> nn.Module:
    """Build a model whose initial weights depend only on the seed, not on the device.

    Raises:
        ValueError: If there is no model with this name.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; the models are {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](channels, classes)
