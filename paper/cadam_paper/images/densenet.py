"""DenseNet (https://arxiv.org/abs/1608.06993) in the variant for images of 32x32 pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .layers import batch_norm, convolution


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution whose output is concatenated to their input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = batch_norm(inputs), convolution(inputs, 4 * growth, 1)
        self.norm2, self.conv2 = batch_norm(4 * growth), convolution(4 * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with the new channels appended."""
        inner = self.conv1(F.relu(self.norm1(x), inplace=True))
        return torch.cat([x, self.conv2(F.relu(self.norm2(inner), inplace=True))], 1)


class DenseBlock(nn.Module):
    """Dense layers followed by batch normalization, ReLU and average pooling."""

    def __init__(self, layers: int, inputs: int, growth: int, window: int | None) -> None:
        super().__init__()
        self.layers: Iterable[DenseLayer] = nn.ModuleList(  # type: ignore[assignment]
            DenseLayer(inputs + layer * growth, growth) for layer in range(layers)
        )
        self.norm = batch_norm(inputs + layers * growth)
        self.window = window
        """Width of the pooling window; None for global average pooling."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers and the pooling."""
        for layer in self.layers:
            x = layer(x)
        x = F.relu(self.norm(x), inplace=True)
        return x.mean((2, 3), keepdim=True) if self.window is None else F.avg_pool2d(x, self.window)


class DenseNet(nn.Module):
    """Dense blocks with transitions between them that halve the number of channels and the resolution.

    The average pooling comes before the 1x1 convolution of a transition. Both orders give the same result, and this one
    needs a quarter of the operations.
    """

    def __init__(self, blocks: Sequence[int], growth: int, inputs: int, classes: int) -> None:
        super().__init__()
        width = 2 * growth
        layers: list[nn.Module] = [convolution(inputs, width, 3)]
        for block, count in enumerate(blocks):
            last = block == len(blocks) - 1
            layers.append(DenseBlock(count, width, growth, None if last else 2))
            width += count * growth
            if not last:
                layers.append(convolution(width, width // 2, 1))
                width //= 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.classifier(self.features(x).flatten(1))
        return x
