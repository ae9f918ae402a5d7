"""A small GPT over bytes: pre-norm transformer blocks with rotary positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

BYTES = 256
"""Size of the vocabulary."""


@dataclass(frozen=True)
class Size:
    """The shape of a model.

    Attributes:
        width: Length of the vector of a position.
        layers: Number of transformer blocks.
        heads: Number of attention heads.
    """

    width: int
    layers: int
    heads: int


SIZES = {
    "tiny GPT": Size(32, 2, 2),
    "GPT 3M": Size(256, 4, 4),
    "GPT 10M": Size(384, 6, 6),
    "GPT 50M": Size(640, 10, 10),
}
"""The models by name; the name has the number of parameters."""


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a normalization and a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width, bias=False)
        self.attention = nn.Linear(size.width, 3 * size.width, bias=False)
        self.projection = nn.Linear(size.width, size.width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(size.width, bias=False)
        self.expansion = nn.Linear(size.width, 4 * size.width, bias=False)
        self.contraction = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the vectors of all positions after attention and the feed-forward network.

        Args:
            x: The vectors of the positions, of shape (batch, length, width).
            cosine: The cosines of the rotary embedding, of shape (length, half the width of a head).
            sine: The sines of the rotary embedding.
        """
        batch, length, width = x.shape
        mixed = self.attention(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.transpose(1, 3).unbind(2)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        output: Tensor = x + self.contraction(F.gelu(self.expansion(self.feed_forward_norm(x))))
        return output


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


class GPT(nn.Module):
    """A language model that predicts the next byte.

    Args:
        size: The shape of the model.
        context: Number of bytes of an example.
        seed: Seed of the initial weights.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, size: Size, context: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(BYTES, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.output = nn.Linear(size.width, BYTES, bias=False)
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(context), 10_000 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() < 2:
                    continue
                # Layers that add to the residual stream start smaller, so that its variance does not grow with depth.
                is_residual = name.endswith(("projection.weight", "contraction.weight"))
                std = 0.02 / (2 * size.layers) ** 0.5 if is_residual else 0.02
                parameter.normal_(0, std, generator=generator)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the byte after each position.

        Args:
            text: Bytes as integers, of shape (batch, length).
        """
        # A product with one-hot vectors instead of a lookup: its gradient is a sum in a fixed order.
        x = F.one_hot(text, BYTES).to(torch.get_autocast_dtype(text.device.type) if _casts(text) else torch.float32)
        x = x @ self.embedding
        length = text.shape[1]
        for block in self.blocks:
            x = block(x, self.cosine[:length], self.sine[:length])
        logits: Tensor = self.output(self.norm(x))
        return logits


def _casts(text: Tensor) -> bool:
    return torch.is_autocast_enabled(text.device.type)
