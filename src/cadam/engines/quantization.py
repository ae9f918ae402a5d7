"""The quantizer of optimizer state: float32 values as int8 with a shared exponent, or as bfloat16.

`cadam.rules.moment_storage` defines the formats; the functions here apply them to tensors. Like the block-wise
quantization of 8-bit optimizers (Dettmers et al., 2021, https://arxiv.org/abs/2110.02861; implemented in bitsandbytes
and torchao), blocks of elements share a scale. Unlike there, the scale is a power of two, the values are floating-point
numbers of 8 bits, and rounding is stochastic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..rules.moment_storage import BLOCK_SIZE, MANTISSA_BITS, MIN_SCALE, NAN_VALUES, NONFINITE_EXPONENT
from .base import fills_memory

ROUND_TO_NEAREST = 1 << 15
"""The noise that makes stochastic rounding round to the nearest value."""
QUANTIZED_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.uint8}
"""The dtypes of quantized values, by the option `moments`."""
MAX_ELEMENTS_PER_CHUNK = 1 << 20
"""Elements that are quantized at once. Temporary tensors are several times as large as the result."""


def quantize(kind: str, values: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor]:
    """Quantize float32 values to int8.

    Args:
        kind: ``"signed"`` or ``"positive"``, the kind of moment.
        values: The values, of shape (blocks, elements of a block).
        noise: Random 16-bit numbers for stochastic rounding, one for each value, or one number for all.

    Returns:
        The quantized values and the shared exponent of each block, both as uint8.
    """
    if isinstance(noise, Tensor):
        return _quantize(kind, values, noise)
    chunks = [_quantize(kind, chunk, noise) for chunk in torch.split(values, _blocks_per_chunk(values))]
    quantized, exponents = zip(*chunks, strict=True)
    return torch.cat(quantized), torch.cat(exponents)


def dequantize(kind: str, quantized: Tensor, exponents: Tensor) -> Tensor:
    """Return the float32 values of int8 values.

    Args:
        kind: ``"signed"`` or ``"positive"``, the kind of moment.
        quantized: The quantized values, of shape (blocks, elements of a block).
        exponents: The shared exponent of each block.
    """
    size = _blocks_per_chunk(quantized)
    if len(quantized) <= size:
        return _dequantize(kind, quantized, exponents)
    values = torch.empty(quantized.shape, dtype=torch.float32, device=quantized.device)
    for start in range(0, len(quantized), size):
        chunk = slice(start, start + size)
        values[chunk] = _dequantize(kind, quantized[chunk], exponents[chunk])
    return values


def round_to_bfloat16(values: Tensor, noise: Tensor | int) -> Tensor:
    """Round float32 values to bfloat16 stochastically, with 16-bit noise for each value."""
    bits = values.contiguous().view(torch.int32)
    rounded = (bits + noise) >> 16 << 16
    rounded = torch.where(values.isfinite(), rounded, bits)
    return torch.where(values.isnan(), math.nan, rounded.view(torch.float32)).to(torch.bfloat16)


def _blocks_per_chunk(x: Tensor) -> int:
    return max(1, MAX_ELEMENTS_PER_CHUNK // max(1, x.shape[1]))


def _quantize(kind: str, values: Tensor, noise: Tensor | int) -> tuple[Tensor, Tensor]:
    mantissa_bits = MANTISSA_BITS[kind]
    shift = 23 - mantissa_bits
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # Adding noise to the bits of a NaN, which are larger than those of infinity, could overflow.
    rounded = (magnitude.clamp_max(NONFINITE_EXPONENT << 23) + (noise << (shift - 16))) >> shift
    is_nan = rounded + 1 >= NONFINITE_EXPONENT << mantissa_bits
    finite = torch.where(is_nan, 0, rounded)
    largest = finite.amax(1, keepdim=True) if finite.shape[1] else finite.new_zeros(len(finite), 1)
    exponent = ((largest + 1) >> mantissa_bits).clamp_min(MIN_SCALE)
    smallest = magnitude.clamp(max=1) if kind == "positive" else torch.zeros_like(magnitude)
    quantized = torch.maximum(rounded - ((exponent - 31) << mantissa_bits), smallest)
    quantized = torch.where(is_nan, NAN_VALUES[kind], quantized)
    if kind == "signed":
        quantized = quantized | (bits >> 31 & 1) << 7
    return quantized.to(torch.uint8), exponent[:, 0].to(torch.uint8)


def _dequantize(kind: str, quantized: Tensor, exponents: Tensor) -> Tensor:
    shift, exponent = 23 - MANTISSA_BITS[kind], exponents.int()[:, None]
    quantized = quantized.int()
    magnitude = quantized & 0x7F if kind == "signed" else quantized
    bits = (magnitude << shift) + ((exponent - 31) << 23)
    if kind == "signed":
        bits = bits | (quantized >> 7) << 31
    values = torch.where(magnitude == NAN_VALUES[kind], math.nan, bits.view(torch.float32))
    return torch.where(magnitude == 0, 0.0, values)


# Whole tensors ----------------------------------------------------------------------------------------------------


def as_rows(x: Tensor) -> Tensor:
    """Return a tensor of shape (rows, elements of a row)."""
    return x.reshape(len(x), x.shape[1:].numel())


def in_memory_order(x: Tensor) -> Tensor:
    """Return the elements of a tensor that fills its memory, in the order in which they are stored."""
    assert fills_memory(x)
    return x.as_strided((x.numel(),), (1,))


def with_layout_of(param: Tensor, values: Tensor) -> Tensor:
    """Return float32 values with the strides of a parameter."""
    if values.stride() == param.stride() and fills_memory(values):
        return values
    return torch.empty_like(param, dtype=torch.float32, requires_grad=False).copy_(values)


def quantize_tensor(kind: str, values: Tensor, noise: Tensor | int, quantized: Tensor, scales: Tensor) -> None:
    """Quantize a tensor to int8 and write the result to `quantized` and `scales`."""
    if isinstance(noise, Tensor):
        noise = _blocks(noise.view(values.shape) if scales.dim() == 2 else noise, scales)
    blocks, exponents = quantize(kind, _blocks(values, scales), noise)
    if scales.dim() == 2:
        quantized.copy_(blocks.view(quantized.shape))
    else:
        in_memory_order(quantized).copy_(blocks.reshape(-1)[: quantized.numel()])
    scales.view(-1).copy_(exponents)


def dequantize_tensor(kind: str, quantized: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values of a tensor of int8 values with one scale for each row or block."""
    values = dequantize(kind, _blocks(quantized, scales), scales.view(-1))
    if scales.dim() == 2:
        return values.view(quantized.shape)
    out = torch.empty_like(quantized, dtype=torch.float32)
    in_memory_order(out).copy_(values.reshape(-1)[: out.numel()])
    return out


def _blocks(x: Tensor, scales: Tensor) -> Tensor:
    """Return the elements that share each scale: the rows, or blocks of memory, of which the last one is padded."""
    if scales.dim() == 2:
        return as_rows(x)
    x = in_memory_order(x)
    return torch.nn.functional.pad(x, (0, -len(x) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
