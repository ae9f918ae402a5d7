"""VGG, ResNet and DenseNet in the forms usual for images of 32x32 pixels, and small ones for a CPU.

Against the forms for ImageNet they begin with a 3x3 convolution at full resolution and end with one linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Batch norm that does not count its batches: only a momentum of None asks for that, and each costs a launch."""
    layer = nn.BatchNorm2d(channels)
    layer.num_batches_tracked = None
    return layer


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Without a bias: a batch norm after it takes it out again, and computing it costs a seventh of a step."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


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


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution whose output is put beside their input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = batch_norm(inputs), convolution(inputs, 4 * growth, 1)
        self.norm2, self.conv2 = batch_norm(4 * growth), convolution(4 * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.relu(self.norm1(x), inplace=True))
        return torch.cat([x, self.conv2(F.relu(self.norm2(inner), inplace=True))], 1)


class DenseBlock(nn.Module):
    """Dense layers, then the norm, the ReLU and the average pool that follow them."""

    def __init__(self, layers: int, inputs: int, growth: int, window: int | None) -> None:
        super().__init__()
        self.layers: Iterable[DenseLayer] = nn.ModuleList(  # type: ignore[assignment]
            DenseLayer(inputs + layer * growth, growth) for layer in range(layers)
        )
        self.norm = batch_norm(inputs + layers * growth)
        self.window = window
        """The pool's; None: all of the image."""
        self.fused = False
        """Run by the kernels of dense.py, which need a CUDA device."""

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            from . import dense

            return dense.run(self, x)
        for layer in self.layers:
            x = layer(x)
        x = F.relu(self.norm(x), inplace=True)
        return x.mean((2, 3), keepdim=True) if self.window is None else F.avg_pool2d(x, self.window)


class DenseNet(nn.Module):
    """Dense blocks; between them, width and resolution are halved.

    The pool goes before the 1x1 convolution that halves the width: both orders give the same, and this one takes a
    quarter of the work.
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
        x = self.classifier(self.features(x).flatten(1))
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


def fuse(model: nn.Module) -> bool:
    """Have a model on a CUDA device run by kernels of its own, where there are any: those of DenseNet's blocks."""
    blocks = [part for part in model.modules() if isinstance(part, DenseBlock)]
    for block in blocks:
        layer = next(iter(block.layers))
        width, growth = layer.conv1.in_channels, layer.conv2.out_channels
        if growth < 8 or growth & (growth - 1) or width % 8:
            raise ValueError(
                f"a dense block of {width} channels that grows by {growth} cannot be fused: its channels must be a "
                "multiple of 8, and it must grow by a power of two, of at least 8"
            )
        block.fused = True
    return bool(blocks)
