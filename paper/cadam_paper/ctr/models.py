"""The five CTR prediction models of the paper's tables 1 and 2: DeepFM, Wide & Deep, DNN, PNN and DCN.

All models have one embedding table with a row for every id of every field. Its gradients are sparse: a step updates
only the rows of its batch. A model maps ids of shape (batch, fields) to logits of shape (batch,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cadam.online.models import pairwise_interactions

EMBEDDING_STD = 1e-4


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    width: int = 16
    """Length of an embedding."""
    hidden: tuple[int, ...] = (1000,) * 5
    """Widths of the hidden layers of the MLP."""
    dropout: float = 0.2
    """Dropout probability after each hidden layer."""
    crosses: int = 4
    """Number of cross layers, for DCN."""


# Layers ---------------------------------------------------------------------------------------------------------


def table(rows: int, width: int) -> nn.Embedding:
    """Return an embedding table with sparse gradients and small initial values."""
    weight = torch.empty(rows, width).normal_(0, EMBEDDING_STD)
    return nn.Embedding(rows, width, sparse=True, _weight=weight)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """Return a linear layer with Xavier normal weights and a bias of 0."""
    layer = nn.Linear(inputs, outputs, bias)
    nn.init.xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def network(inputs: int, sizes: Sizes) -> nn.Sequential:
    """Return the hidden layers of an MLP with ReLU and dropout."""
    layers: list[nn.Module] = []
    for width in sizes.hidden:
        layers += [linear(inputs, width), nn.ReLU(), nn.Dropout(sizes.dropout)]
        inputs = width
    return nn.Sequential(*layers)


# Models --------------------------------------------------------------------------------------------------------


class DNN(nn.Module):
    """An MLP on the concatenated embeddings of all fields."""

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__()
        self.table = table(rows, sizes.width)
        self.deep = network(fields * sizes.width, sizes)
        self.out = linear(sizes.hidden[-1], 1)

    def score(self, embedded: Tensor) -> Tensor:
        """Return the logits of the MLP for embeddings of shape (batch, fields, width)."""
        score: Tensor = self.out(self.deep(embedded.flatten(1))).squeeze(1)
        return score

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return self.score(self.table(ids))


class WideDeep(DNN):
    """Wide & Deep (https://arxiv.org/abs/1606.07792): the MLP plus a linear model with a weight for every id."""

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__(rows, fields, sizes)
        self.wide = table(rows, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of a batch."""
        wide: Tensor = self.wide(ids).sum((1, 2))
        return super().forward(ids) + wide


class DeepFM(WideDeep):
    """DeepFM (https://arxiv.org/abs/1703.04247): Wide & Deep plus a factorization machine and a bias.

    The factorization machine is the sum of the inner products of all pairs of embeddings.
    """

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__(rows, fields, sizes)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of a batch."""
        embedded = self.table(ids)
        score: Tensor = self.score(embedded) + pairwise_interactions(embedded) + self.wide(ids).sum((1, 2)) + self.bias
        return score


class PNN(nn.Module):
    """PNN (https://arxiv.org/abs/1611.00144): an MLP on the embeddings and the inner products of all their pairs."""

    pairs: Tensor

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__()
        self.table = table(rows, sizes.width)
        first, second = torch.triu_indices(fields, fields, 1, device="cpu")
        self.register_buffer("pairs", first * fields + second, persistent=False)
        self.deep = network(fields * sizes.width + fields * (fields - 1) // 2, sizes)
        self.out = linear(sizes.hidden[-1], 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of a batch."""
        embedded = self.table(ids)
        products = (embedded @ embedded.mT).flatten(1).index_select(1, self.pairs)
        score: Tensor = self.out(self.deep(torch.cat([embedded.flatten(1), products], 1))).squeeze(1)
        return score


class Cross(nn.Module):
    """A cross layer of DCN: x0 * (w . x) + b + x, where x0 is the input of the first layer and x of this layer."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight = linear(inputs, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(inputs))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Apply the layer to its input x."""
        crossed: Tensor = x0 * self.weight(x) + self.bias + x
        return crossed


class DCN(nn.Module):
    """DCN, version 1 (https://arxiv.org/abs/1708.05123): cross layers and an MLP, combined by a linear layer."""

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__()
        inputs = fields * sizes.width
        self.table = table(rows, sizes.width)
        self.crosses = nn.ModuleList([Cross(inputs) for _ in range(sizes.crosses)])
        self.deep = network(inputs, sizes)
        self.out = linear(inputs + sizes.hidden[-1], 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of a batch."""
        x0 = x = self.table(ids).flatten(1)
        for cross in self.crosses:
            x = cross(x0, x)
        score: Tensor = self.out(torch.cat([x, self.deep(x0)], 1)).squeeze(1)
        return score


FIVE_LAYERS, TWO_LAYERS = Sizes(), Sizes(hidden=(1000, 1000))
MODELS: dict[str, tuple[Callable[[int, int, Sizes], nn.Module], Sizes]] = {
    "DeepFM": (DeepFM, FIVE_LAYERS),
    "WideDeep": (WideDeep, FIVE_LAYERS),
    "DNN": (DNN, FIVE_LAYERS),
    "PNN": (PNN, TWO_LAYERS),
    "DCN": (DCN, FIVE_LAYERS),
}
"""The class of each model, which takes the numbers of ids and of fields and the sizes, and its default sizes."""


def build(
    name: str,
    vocabulary: Sequence[int],
    seed: int,
    *,
    width: int | None = None,
    hidden: int | Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Build a model whose initial weights depend only on the seed, not on the device.

    Args:
        name: Name of a model in `MODELS`.
        vocabulary: Number of ids per field.
        seed: The seed of the initial weights.
        width: Length of an embedding; None for the default of the model.
        hidden: Widths of the hidden layers, or one width for all; None for the default of the model.
        device: The device of the model.

    Raises:
        ValueError: If there is no model with this name.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; the models are {', '.join(MODELS)}")
    make, sizes = MODELS[name]
    if width is not None:
        sizes = replace(sizes, width=width)
    if hidden is not None:
        sizes = replace(sizes, hidden=(hidden,) * len(sizes.hidden) if isinstance(hidden, int) else tuple(hidden))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(sum(vocabulary), len(vocabulary), sizes).to(device)


def parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters with dense gradients, and the embedding tables, whose gradients are sparse."""
    sparse = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding) and module.sparse}
    both = list(model.parameters())
    return [p for p in both if id(p) not in sparse], [p for p in both if id(p) in sparse]
