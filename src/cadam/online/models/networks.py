"""From embeddings to a score: the models by name, in sizes that follow from the schema."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..data.schema import Schema
from .inputs import Inputs

WIDTH = 8
CROSSES = 2
FULL_RANK = 256
"""Cross layers of up to so many inputs have a whole matrix, wider ones one of rank `LOW_RANK`."""
LOW_RANK = 64


def pairs(embedded: Tensor) -> Tensor:
    """Inner products of all pairs of embeddings (batch, fields, width), summed: ((sum v)^2 - sum v^2) / 2."""
    products: Tensor = 0.5 * (embedded.sum(1).square() - embedded.square().sum(1)).sum(1)
    return products


def network(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Hidden layers with ReLU, and one output."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 1))


class Linear(nn.Module):
    """A weight for every place, bin and number."""

    linear = True
    """Whether it has these weights."""
    embeds = False
    """Whether it has embeddings."""
    has_hidden = False
    """Whether it has hidden layers."""

    def __init__(self, schema: Schema, width: int = WIDTH, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        self.inputs = Inputs(schema, width if self.embeds else 0, self.linear)

    def forward(self, **features: Tensor) -> Tensor:
        """A logit per event."""
        embedded, linear = self.inputs(features)
        score: Tensor = linear + self.beside(embedded)
        return score

    def beside(self, embedded: Tensor) -> Tensor:
        """What is added to the linear terms."""
        return embedded.new_zeros(len(embedded))


class FM(Linear):
    """A factorization machine: inner products of all pairs of embeddings beside the weights."""

    embeds = True

    def beside(self, embedded: Tensor) -> Tensor:
        return pairs(embedded)


class MLP(Linear):
    """The embeddings of all fields beside each other, through a network."""

    linear, embeds, has_hidden = False, True, True

    def __init__(self, schema: Schema, width: int = WIDTH, hidden: Sequence[int] = ()) -> None:
        super().__init__(schema, width)
        inputs = self.inputs.fields * width
        self.deep = network(inputs, hidden or usual_hidden(inputs))

    def beside(self, embedded: Tensor) -> Tensor:
        score: Tensor = self.deep(embedded.flatten(1)).squeeze(1)
        return score


class DeepFM(MLP):
    """A factorization machine and a network over the same embeddings."""

    linear = True

    def beside(self, embedded: Tensor) -> Tensor:
        return pairs(embedded) + super().beside(embedded)


class Cross(nn.Module):
    """x0 * (W x + b) + x, where W is a product of two narrow matrices if there are many inputs."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        low = [nn.Linear(inputs, LOW_RANK, bias=False), nn.Linear(LOW_RANK, inputs)]
        self.weight = nn.Linear(inputs, inputs) if inputs <= FULL_RANK else nn.Sequential(*low)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        crossed: Tensor = x0 * self.weight(x) + x
        return crossed


class DCN(MLP):
    """Deep and cross network, version 2: cross layers beside the network."""

    def __init__(self, schema: Schema, width: int = WIDTH, hidden: Sequence[int] = ()) -> None:
        super().__init__(schema, width, hidden)
        inputs = self.inputs.fields * width
        self.crosses = nn.ModuleList([Cross(inputs) for _ in range(CROSSES)])
        self.out = nn.Linear(inputs, 1, bias=False)

    def beside(self, embedded: Tensor) -> Tensor:
        x0 = x = embedded.flatten(1)
        for cross in self.crosses:
            x = cross(x0, x)
        score: Tensor = self.out(x).squeeze(1) + super().beside(embedded)
        return score


MODELS: dict[str, type[Linear]] = {"linear": Linear, "fm": FM, "deepfm": DeepFM, "dcn": DCN, "mlp": MLP}


def usual_hidden(inputs: int) -> tuple[int, ...]:
    """One hidden layer, wider the more inputs there are."""
    return (32 if inputs <= 128 else 64 if inputs <= 1024 else 128,)


def build(name: str, schema: Schema, *, width: int | None = None, hidden: Sequence[int] | None = None) -> Linear:
    """A model for the features of a schema, with weights drawn from torch's generator.

    Args:
        name: one of `MODELS`.
        width: of an embedding (default: 8).
        hidden: sizes of the hidden layers (default: one of 32 to 128, by the number of inputs).
    """
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}, or FILE.py:FUNCTION")
    if (width is not None and width < 1) or any(size < 1 for size in hidden or ()):
        raise ValueError("the width and the hidden layers of a model must be at least 1")
    return MODELS[name](schema, width or WIDTH, tuple(hidden or ()))
