"""VGG, ResNet and DenseNet in the forms usual for images of 32x32 pixels, and small ones for a CPU.

Against the forms for ImageNet they begin with a 3x3 convolution at full resolution and end with one linear layer.
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
    """Stages of 3x3 convolutions with batch norm, each ended by a max pool that halves the resolution."""

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
        x = self.classifier(self.features(x).mean((2, 3)))
        return x


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(inputs, width, 3, stride), batch_norm(width)
        self.conv2, self.norm2 = convolution(width, width, 3), batch_norm(width)
        same = stride == 1 and inputs == width
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(convolution(inputs, width, 1, stride), batch_norm(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        return F.relu(inner + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Stages of residual blocks; each but the first halves the resolution and doubles the width."""

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
"""By name, made from the number of input channels and of classes."""


def build(name: str, channels: int, classes: int, seed: int) -> nn.Module:
    """A model with the initial weights of a seed, the same on every device."""
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](channels, classes)
