"""Dense blocks by kernels of their own.

A layer of a block reads all features before it, normalises them and throws the result away: by torch's operators, or
compiled from them, that is most of the time of a step. Here the 1x1 convolutions normalise what they read, and hand
their gradients to one array that all layers add to. Mean and variance of a feature are the same for every layer that
reads it and are found once, when it is written. The 3x3 convolutions are cuDNN's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from . import densenet_kernels as kernels

if TYPE_CHECKING:
    from .densenet import DenseBlock

FINISH: dict[str, Any] = {"TILES": 256, "WIDTH": 8, "num_warps": 4}
"""How the kernels go about that add tiles up."""


class Tiling(NamedTuple):
    """How a kernel's work is shared out: rows and columns at once, by so many warps, so many loads ahead."""

    rows: int
    width: int
    warps: int = 4
    stages: int = 3
    split: int = 1
    """Into how many parts a sum over pixels is split, a power of two."""

    @property
    def options(self) -> dict[str, int]:
        return {"ROWS": self.rows, "WIDTH": self.width, "num_warps": self.warps, "num_stages": self.stages}


TILINGS: dict[str, list[Tiling]] = {
    "plain": [Tiling(128, 64), Tiling(128, 64), Tiling(64, 32), Tiling(64, 32)],
    "narrow": [Tiling(256, 32), Tiling(64, 32, 2), Tiling(64, 32, 2), Tiling(32, 32)],
    "squeeze": [Tiling(128, 32, 4, 4), Tiling(128, 64), Tiling(64, 64), Tiling(32, 64)],
    "squeeze back": [Tiling(128, 32), Tiling(128, 32), Tiling(128, 64), Tiling(32, 128)],
    "squeeze back kernel": [
        Tiling(64, 64, split=128),
        Tiling(64, 64, split=64),
        Tiling(64, 64, split=32),
        Tiling(128, 64, split=8),
    ],
}
"""By the number of pixels: those of 128 images of 32x32, 16x16, 8x8 and 4x4. The fastest found on an H200."""


class Layer(NamedTuple):
    """The parameters of a layer."""

    weight: Tensor
    bias: Tensor
    kernel: Tensor
    inner_weight: Tensor
    inner_bias: Tensor
    inner_kernel: Tensor


class Moments(NamedTuple):
    """Of some channels, over a batch: mean, 1 / standard deviation and unbiased variance."""

    mean: Tensor
    scale: Tensor
    variance: Tensor

    def part(self, start: int, end: int) -> Moments:
        return Moments(*(each[start:end] for each in self))


class Norm(NamedTuple):
    """A batch norm and what it comes to: x * factor + shift."""

    weight: Tensor
    bias: Tensor
    factor: Tensor
    shift: Tensor


class Image(NamedTuple):
    """What a batch measures."""

    number: int
    height: int
    breadth: int

    @property
    def pixels(self) -> int:
        return self.number * self.height * self.breadth

    def tiling(self, kernel: str) -> Tiling:
        return TILINGS[kernel][sum(self.pixels < 1 << power for power in (17, 15, 13))]

    def pooled(self, window: int) -> Image:
        return Image(self.number, self.height // window, self.breadth // window)

    def rows(self, x: Tensor) -> Tensor:
        """Images, pixel by pixel."""
        return x.permute(0, 2, 3, 1).reshape(self.pixels, -1).contiguous()

    def images(self, rows: Tensor) -> Tensor:
        return rows.view(self.number, self.height, self.breadth, -1).permute(0, 3, 1, 2)


def run(block: DenseBlock, x: Tensor) -> Tensor:
    """What `block` gives for `x`; in training its norms take note of the batch."""
    window = block.window or x.shape[2]
    if x.shape[2] % window or x.shape[3] % window or (block.window is None and x.shape[2] != x.shape[3]):
        raise ValueError(f"images of {x.shape[2]}x{x.shape[3]} pixels cannot be pooled by {window}x{window}")
    outer, inner = _norms(block)
    width = max(norm.num_features for norm in (*outer, *inner))
    if x.numel() // x.shape[1] * width >= 1 << 31:
        raise ValueError(f"{len(x)} images at once are too many: {width} features of theirs have over 2^31 elements")
    if any(norm.training != block.training for norm in (*outer, *inner)):
        raise ValueError("a fused dense block is trained or evaluated as a whole, and so are its norms")
    if block.training and x.numel() < 2 * x.shape[1]:
        raise ValueError(f"more than one pixel is needed for training, got {len(x)} images of {x.shape[2:].numel()}")
    if not block.training:
        if torch.is_grad_enabled():
            raise RuntimeError("a fused dense block gives gradients in training alone: evaluate it under no_grad()")
        return _evaluate(block, x, window)
    parameters = [
        each
        for layer in block.layers
        for part in (layer.norm1, layer.conv1, layer.norm2, layer.conv2)
        for each in part.parameters()
    ]
    parameters += block.norm.parameters()
    handed = Block.apply(x, window, block.norm.eps, *parameters)  # type: ignore[no-untyped-call]
    pooled: Tensor = handed[0]
    _note(block, *handed[1:])
    return pooled


def _norms(block: DenseBlock) -> tuple[list[nn.BatchNorm2d], list[nn.BatchNorm2d]]:
    """Those of the features, the last one that of the block itself; and those inside of the layers."""
    return [*(layer.norm1 for layer in block.layers), block.norm], [layer.norm2 for layer in block.layers]


@torch.no_grad()
def _note(block: DenseBlock, mean: Tensor, variance: Tensor, inner_mean: Tensor, inner_variance: Tensor) -> None:
    """Running averages, of all norms at once."""
    outer, inner = _norms(block)
    averages: list[Any] = [norm.running_mean for norm in (*outer, *inner)]
    averages += [norm.running_var for norm in (*outer, *inner)]
    found = [mean[: norm.num_features] for norm in outer] + [*inner_mean]
    found += [variance[: norm.num_features] for norm in outer] + [*inner_variance]
    momentum: Any = block.norm.momentum
    torch._foreach_lerp_(averages, found, momentum)


@torch.no_grad()
def _evaluate(block: DenseBlock, x: Tensor, window: int) -> Tensor:
    """With the running averages."""
    outer, inner = _norms(block)
    means: Any = [norm.running_mean for norm in (*outer, *inner)]
    variances: Any = [norm.running_var for norm in (*outer, *inner)]
    weights: Any = [norm.weight for norm in (*outer, *inner)]
    biases: Any = [norm.bias for norm in (*outer, *inner)]
    factors: Any = torch._foreach_add(variances, block.norm.eps)
    torch._foreach_rsqrt_(factors)
    torch._foreach_mul_(factors, weights)
    shifts: Any = torch._foreach_mul(means, factors)
    shifts = torch._foreach_sub(biases, shifts)
    known = [Norm(*each) for each in zip(weights, biases, factors, shifts, strict=True)]
    count = len(inner)
    image, width = Image(x.shape[0], *x.shape[2:]), x.shape[1]
    features = x.new_empty(image.pixels, block.norm.num_features)
    features[:, :width] = image.rows(x)
    halves = _halves([layer.conv1.weight for layer in block.layers], [layer.conv2.weight for layer in block.layers], x)
    for half, norm, inner_norm in zip(halves, known[:count], known[count + 1 :], strict=True):
        inside = x.new_empty(image.pixels, len(half[0]))
        _squeeze(features, inside, half[0], norm, None, image)
        _, grown = _grow(inside, half[1], inner_norm, image)
        features[:, width : width + grown.shape[1]] = grown
        width += grown.shape[1]
    return _pool(features, known[count], image, window)


class Block(torch.autograd.Function):
    """Dense layers, then norm, ReLU and average pool, on batch statistics, which are handed out too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: int, epsilon: float, *parameters: Tensor) -> tuple[Tensor, ...]:
        layers = [Layer(*parameters[i : i + 6]) for i in range(0, len(parameters) - 2, 6)]
        growth, tall = layers[0].inner_kernel.shape[:2]
        image, width = Image(x.shape[0], *x.shape[2:]), x.shape[1]
        total = width + growth * len(layers)
        halves = _halves([layer.kernel for layer in layers], [layer.inner_kernel for layer in layers], x)
        features = x.new_empty(image.pixels, total)
        moments = Moments(*torch.empty(3, total, device=x.device))
        inner_moments = torch.empty(len(layers), 3, tall, device=x.device)
        norms = [_norm(layer.weight, layer.bias) for layer in layers] + [_norm(*parameters[-2:])]
        inner_norms = [_norm(layer.inner_weight, layer.inner_bias) for layer in layers]
        inners, shows = [], []
        parts = _take(image.rows(x), features, image)
        _finish_moments(parts, "narrow", moments, norms[0], 0, image, epsilon)
        for number, (kernel, inner_kernel) in enumerate(halves):
            inner = x.new_empty(image.pixels, tall)
            parts = _parts(image, "squeeze", tall, x)
            _squeeze(features, inner, kernel, norms[number], parts, image)
            inside = Moments(*inner_moments[number])
            _finish_moments(parts, "squeeze", inside, inner_norms[number], 0, image, epsilon)
            shown, grown = _grow(inner, inner_kernel, inner_norms[number], image)
            parts = _take(grown, features[:, width:], image)
            _finish_moments(parts, "narrow", moments, norms[number + 1], width, image, epsilon)
            width += growth
            inners.append(inner)
            shows.append(shown)
        ctx.save_for_backward(*parameters)
        ctx.kept = features, moments, inner_moments, norms, inner_norms, inners, shows, halves
        ctx.image, ctx.window = image, window
        handed = moments.mean, moments.variance, inner_moments[:, 0], inner_moments[:, 2]
        ctx.mark_non_differentiable(*handed)
        return _pool(features, norms[-1], image, window), *handed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, passed: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        image, window = ctx.image, ctx.window
        features, moments, inner_moments, norms, inner_norms, inners, shows, halves = ctx.kept
        parameters, width = ctx.saved_tensors, features.shape[1]
        back = Back(features, torch.empty_like(features), torch.zeros(2, width, device=features.device), moments, image)

        tiling = image.tiling("plain")
        parts = _parts(image, "plain", width, features)
        kernels.pool_back[len(parts), -(-width // tiling.width)](
            features, image.pooled(window).rows(passed.to(features.dtype)), back.gradient, *moments[:2],
            *norms[-1][2:], parts, image.pixels, image.breadth, width, WINDOW=window, **tiling.options,
        )  # fmt: skip
        found = [*_finish_sums(parts, norms[-1], back.through)]
        for number in reversed(range(len(halves))):
            growth = len(halves[number][1])
            width -= growth
            inside = Moments(*inner_moments[number])
            ours = back.layer(
                Layer(*parameters[6 * number : 6 * number + 6]), halves[number], back.finished(width, width + growth),
                norms[number], inner_norms[number], inside, inners[number], shows[number],
            )  # fmt: skip
            found = [*ours, *found]
        return image.images(back.finished(0, width)), None, None, *found


@dataclass
class Back:
    """The gradient of the features of a block, which all that read them add to.

    What goes through their mean and variance is summed up beside it, and taken in at the end. By then the gradient is
    rounded: what is taken off is often less than half a step of bfloat16, rounds back, and up to a third of a mean
    stays in where there are 131,072 pixels (0.04 where there are 32,768). The gradients behind it are then up to 1.9
    times as far from those of float32 as by torch's operators in bfloat16, which take the mean off before they round.
    """

    features: Tensor
    gradient: Tensor
    through: Tensor
    moments: Moments
    image: Image

    def finished(self, start: int, end: int) -> Tensor:
        """The whole gradient of some columns."""
        tiling, pixels = self.image.tiling("narrow"), self.image.pixels
        out = self.features.new_empty(pixels, end - start)
        kernels.finish_gradient[-(-pixels // tiling.rows), -(-(end - start) // tiling.width)](
            self.features[:, start:], self.gradient[:, start:], out, *self.moments.part(start, end)[:2],
            *self.through[:, start:end], pixels, end - start, self.features.shape[1], **tiling.options,
        )  # fmt: skip
        return out

    def layer(
        self,
        layer: Layer,
        halves: tuple[Tensor, Tensor],
        given: Tensor,
        norm: Norm,
        inner_norm: Norm,
        inside: Moments,
        inner: Tensor,
        shown: Tensor,
    ) -> tuple[Tensor, ...]:
        """The gradients of a layer's parameters; what it hands back to the features is added to theirs."""
        image, (kernel, inner_kernel) = self.image, halves
        pixels, (tall, width), stride = image.pixels, kernel.shape, self.features.shape[1]
        grads, inner_found, _ = torch.ops.aten.convolution_backward(
            image.images(given), image.images(shown), inner_kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
            [True, True, False],
        )  # fmt: skip
        passed = image.rows(grads)
        tiling = image.tiling("plain")
        parts = _parts(image, "plain", tall, inner)
        grid = len(parts), -(-tall // tiling.width)
        through_norm = *inside[:2], *inner_norm[2:]
        kernels.inner_sums[grid](inner, passed, *through_norm, parts, pixels, tall, **tiling.options)
        inner_sums = _finish_sums(parts, inner_norm, None)
        kernels.inner_back[grid](inner, passed, *through_norm, *inner_sums[::-1], pixels, tall, **tiling.options)

        tiling = image.tiling("squeeze back")
        parts = _parts(image, "squeeze back", width, inner)
        kernels.squeeze_back[-(-width // tiling.width), len(parts)](
            passed, self.features, self.gradient, kernel, *self.moments[:2], *norm[2:], parts, pixels, width, stride,
            INNER=tall, **tiling.options,
        )  # fmt: skip
        sums = _finish_sums(parts, norm, self.through)

        tiling = image.tiling("squeeze back kernel")
        parts = torch.empty(tiling.split, tall * width, device=inner.device)
        each = tiling.rows * -(-pixels // (tiling.rows * tiling.split))
        kernels.squeeze_back_kernel[-(-width // tiling.width), tiling.split](
            passed, self.features, parts, *norm[2:], pixels, width, stride, each, INNER=tall, **tiling.options
        )
        found = torch.empty_like(layer.kernel)
        size = 4096 // tiling.split
        kernels.add_up[-(-found.numel() // size),](parts, found, found.numel(), PARTS=tiling.split, SIZE=size)
        return *sums, found, *inner_sums, inner_found.float()


# Parts of both ---------------------------------------------------------------------------------------------------


def _halves(kernels: Sequence[Tensor], inner: Sequence[Tensor], like: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Kernels in the precision of the products, their inputs last in memory."""
    full = [kernel.detach().flatten(1) for kernel in kernels]
    full += [kernel.detach().permute(0, 2, 3, 1) for kernel in inner]
    halves = [like.new_empty(kernel.shape) for kernel in full]
    torch._foreach_copy_(halves, full)
    inner = [half.permute(0, 3, 1, 2) for half in halves[len(kernels) :]]
    return list(zip(halves[: len(kernels)], inner, strict=True))


def _norm(weight: Tensor, bias: Tensor) -> Norm:
    return Norm(weight, bias, *torch.empty(2, len(weight), device=weight.device))


def _parts(image: Image, kernel: str, width: int, like: Tensor) -> Tensor:
    """Room for two sums a tile."""
    return torch.empty(-(-image.pixels // image.tiling(kernel).rows), 2, width, device=like.device)


def _take(x: Tensor, columns: Tensor, image: Image) -> Tensor:
    tiling, width = image.tiling("narrow"), x.shape[1]
    parts = _parts(image, "narrow", width, x)
    grid = len(parts), -(-width // tiling.width)
    kernels.take[grid](x, columns, parts, image.pixels, width, columns.stride(0), **tiling.options)
    return parts


def _finish_moments(
    parts: Tensor, kernel: str, moments: Moments, norm: Norm, old: int, image: Image, epsilon: float
) -> None:
    width, rows = len(norm.weight), image.tiling(kernel).rows
    kernels.finish_moments[-(-width // FINISH["WIDTH"]),](
        parts, *moments, *norm, image.pixels, len(parts), old, width, epsilon, ROWS=rows, **FINISH
    )


def _squeeze(features: Tensor, inner: Tensor, kernel: Tensor, norm: Norm, parts: Tensor | None, image: Image) -> None:
    tiling, (tall, width) = image.tiling("squeeze"), kernel.shape
    kernels.squeeze[-(-image.pixels // tiling.rows),](
        features, inner, kernel, *norm[2:], parts, image.pixels, width, features.shape[1], INNER=tall,
        MEASURE=parts is not None, **tiling.options,
    )  # fmt: skip


def _grow(inner: Tensor, kernel: Tensor, norm: Norm, image: Image) -> tuple[Tensor, Tensor]:
    """Norm and ReLU; and the 3x3 convolution of what they give."""
    tiling, tall = image.tiling("plain"), inner.shape[1]
    shown = torch.empty_like(inner)
    grid = -(-image.pixels // tiling.rows), -(-tall // tiling.width)
    kernels.show[grid](inner, shown, *norm[2:], image.pixels, tall, **tiling.options)
    return shown, image.rows(F.conv2d(image.images(shown), kernel, padding=1))


def _pool(features: Tensor, norm: Norm, image: Image, window: int) -> Tensor:
    small, width = image.pooled(window), features.shape[1]
    tiling = small.tiling("plain")
    pooled = features.new_empty(small.pixels, width)
    grid = -(-small.pixels // tiling.rows), -(-width // tiling.width)
    kernels.pool[grid](features, pooled, *norm[2:], small.pixels, small.breadth, width, WINDOW=window, **tiling.options)
    return small.images(pooled)


def _finish_sums(parts: Tensor, norm: Norm, through: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias of a norm."""
    tiles, _, width = parts.shape
    bias_sum, weight_sum = torch.empty(2, width, device=parts.device)
    kept = (None, None) if through is None else through
    kernels.finish_sums[-(-width // FINISH["WIDTH"]),](
        parts, bias_sum, weight_sum, norm.factor, *kept, tiles, width, KEEP=through is not None, **FINISH
    )
    return weight_sum, bias_sum
