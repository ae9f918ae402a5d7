"""Five models of click-through rate: DeepFM, Wide & Deep, a plain network (DNN), PNN and DCN.

All look their ids up in one table with a row for every id of every field, whose gradients are sparse: a step touches
the rows of its batch and no others. A model takes ids (batch, fields) and gives logits (batch,).
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
    """How large a model is."""

    width: int = 16
    """Of an embedding."""
    hidden: tuple[int, ...] = (1000,) * 5
    dropout: float = 0.2
    """After each hidden layer of the network."""
    crosses: int = 4
    """Cross layers, where a model has them."""


# Parts ---------------------------------------------------------------------------------------------------------


def table(rows: int, width: int) -> nn.Embedding:
    """A table of embeddings with sparse gradients, small at the start."""
    weight = torch.empty(rows, width).normal_(0, EMBEDDING_STD)
    return nn.Embedding(rows, width, sparse=True, _weight=weight)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear layer, Xavier normal, without a bias at the start."""
    layer = nn.Linear(inputs, outputs, bias)
    nn.init.xavier_normal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def network(inputs: int, sizes: Sizes) -> nn.Sequential:
    """Hidden layers with ReLU and dropout."""
    layers: list[nn.Module] = []
    for width in sizes.hidden:
        layers += [linear(inputs, width), nn.ReLU(), nn.Dropout(sizes.dropout)]
        inputs = width
    return nn.Sequential(*layers)


# Models --------------------------------------------------------------------------------------------------------


class DNN(nn.Module):
    """The embeddings of all fields beside each other, through a network."""

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__()
        self.table = table(rows, sizes.width)
        self.deep = network(fields * sizes.width, sizes)
        self.out = linear(sizes.hidden[-1], 1)

    def score(self, embedded: Tensor) -> Tensor:
        """What the network makes of embeddings (batch, fields, width)."""
        score: Tensor = self.out(self.deep(embedded.flatten(1))).squeeze(1)
        return score

    def forward(self, ids: Tensor) -> Tensor:
        return self.score(self.table(ids))


class WideDeep(DNN):
    """A weight for every id beside the network."""

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__(rows, fields, sizes)
        self.wide = table(rows, 1)

    def forward(self, ids: Tensor) -> Tensor:
        wide: Tensor = self.wide(ids).sum((1, 2))
        return super().forward(ids) + wide


class DeepFM(WideDeep):
    """A factorization machine (inner products of all pairs of embeddings, summed) beside Wide & Deep, and a bias."""

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__(rows, fields, sizes)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.table(ids)
        score: Tensor = self.score(embedded) + pairwise_interactions(embedded) + self.wide(ids).sum((1, 2)) + self.bias
        return score


class PNN(nn.Module):
    """The inner product of every pair of embeddings as inputs of the network, beside the embeddings themselves."""

    pairs: Tensor

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__()
        self.table = table(rows, sizes.width)
        first, second = torch.triu_indices(fields, fields, 1, device="cpu")
        self.register_buffer("pairs", first * fields + second, persistent=False)
        self.deep = network(fields * sizes.width + fields * (fields - 1) // 2, sizes)
        self.out = linear(sizes.hidden[-1], 1)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.table(ids)
        products = (embedded @ embedded.mT).flatten(1).index_select(1, self.pairs)
        score: Tensor = self.out(self.deep(torch.cat([embedded.flatten(1), products], 1))).squeeze(1)
        return score


class Cross(nn.Module):
    """x0 * (w . x) + b + x: products of the inputs with what the layer before made of them."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight = linear(inputs, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(inputs))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        crossed: Tensor = x0 * self.weight(x) + self.bias + x
        return crossed


class DCN(nn.Module):
    """Deep and cross network (the first version): cross layers beside the network, joined by a linear layer."""

    def __init__(self, rows: int, fields: int, sizes: Sizes) -> None:
        super().__init__()
        inputs = fields * sizes.width
        self.table = table(rows, sizes.width)
        self.crosses = nn.ModuleList([Cross(inputs) for _ in range(sizes.crosses)])
        self.deep = network(inputs, sizes)
        self.out = linear(inputs + sizes.hidden[-1], 1)

    def forward(self, ids: Tensor) -> Tensor:
        x0 = x = self.table(ids).flatten(1)
        for cross in self.crosses:
            x = cross(x0, x)
        score: Tensor = self.out(torch.cat([x, self.deep(x0)], 1)).squeeze(1)
        return score


FIVE, TWO = Sizes(), Sizes(hidden=(1000, 1000))
MODELS: dict[str, tuple[Callable[[int, int, Sizes], nn.Module], Sizes]] = {
    "DeepFM": (DeepFM, FIVE),
    "WideDeep": (WideDeep, FIVE),
    "DNN": (DNN, FIVE),
    "PNN": (PNN, TWO),
    "DCN": (DCN, FIVE),
}
"""By name: what makes one from the number of ids, of fields and the sizes; and its usual sizes. Add your own here."""


def build(
    name: str,
    vocabulary: Sequence[int],
    seed: int,
    *,
    width: int | None = None,
    hidden: int | Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A model with the initial weights of a seed, the same on every device.

    `width` and `hidden` make it smaller or larger than usual: the length of an embedding, and of each hidden layer or
    of all alike.
    """
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    make, sizes = MODELS[name]
    if width is not None:
        sizes = replace(sizes, width=width)
    if hidden is not None:
        sizes = replace(sizes, hidden=(hidden,) * len(sizes.hidden) if isinstance(hidden, int) else tuple(hidden))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(sum(vocabulary), len(vocabulary), sizes).to(device)


def parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters with dense gradients, and the tables, whose gradients are sparse."""
    sparse = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding) and module.sparse}
    both = list(model.parameters())
    return [p for p in both if id(p) not in sparse], [p for p in both if id(p) in sparse]
