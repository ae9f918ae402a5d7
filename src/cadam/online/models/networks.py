"""The ready-made models: from the embeddings of an event to its score."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..data.schema import Schema
from .inputs import Inputs

DEFAULT_WIDTH = 8
CROSS_LAYERS = 2
MAX_FULL_RANK_INPUTS = 256
"""Cross layers with more inputs use a matrix of rank `LOW_RANK`."""
LOW_RANK = 64


def feed_forward(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Build hidden layers with ReLU, followed by one output."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 1))


class Linear(nn.Module):
    """Logistic regression: one weight for every category, hash and bin, and one slope for every number."""

    has_linear_terms = True
    has_pairs = False
    has_embeddings = False
    has_hidden = False

    def __init__(self, schema: Schema, width: int = DEFAULT_WIDTH, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        self.inputs = Inputs(schema, width if self.has_embeddings else 0, self.has_linear_terms, self.has_pairs)

    def forward(self, **features: Tensor) -> Tensor:
        """Compute one logit per event."""
        embedded, terms = self.inputs(features)
        return self.score(embedded, terms)

    def score(self, embedded: Tensor, terms: Tensor) -> Tensor:
        """Compute the logit from the outputs of the input layer."""
        return terms


class FM(Linear):
    """A factorization machine (https://doi.org/10.1109/ICDM.2010.127)."""

    has_pairs = has_embeddings = True


class MLP(Linear):
    """A feed-forward network over the concatenated embeddings of all fields."""

    has_linear_terms, has_embeddings, has_hidden = False, True, True

    def __init__(self, schema: Schema, width: int = DEFAULT_WIDTH, hidden: Sequence[int] = ()) -> None:
        super().__init__(schema, width)
        inputs = self.inputs.fields * width
        self.deep = feed_forward(inputs, hidden or default_hidden(inputs))

    def score(self, embedded: Tensor, terms: Tensor) -> Tensor:
        """Add the output of the network."""
        score: Tensor = terms + self.deep(embedded.flatten(1)).squeeze(1)
        return score


class DeepFM(MLP):
    """A factorization machine and a network over the same embeddings (https://arxiv.org/abs/1703.04247)."""

    has_linear_terms = has_pairs = True


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, where W is the product of two narrow matrices if there are many inputs."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        low_rank = [nn.Linear(inputs, LOW_RANK, bias=False), nn.Linear(LOW_RANK, inputs)]
        self.weight = nn.Linear(inputs, inputs) if inputs <= MAX_FULL_RANK_INPUTS else nn.Sequential(*low_rank)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Apply the layer; x0 is the input of the first cross layer."""
        crossed: Tensor = x0 * self.weight(x) + x
        return crossed


class DCN(MLP):
    """Deep and cross network, version 2: cross layers in parallel to a network (https://arxiv.org/abs/2008.13535)."""

    def __init__(self, schema: Schema, width: int = DEFAULT_WIDTH, hidden: Sequence[int] = ()) -> None:
        super().__init__(schema, width, hidden)
        inputs = self.inputs.fields * width
        self.crosses = nn.ModuleList([CrossLayer(inputs) for _ in range(CROSS_LAYERS)])
        self.out = nn.Linear(inputs, 1, bias=False)

    def score(self, embedded: Tensor, terms: Tensor) -> Tensor:
        """Add the outputs of the cross layers and of the network."""
        x0 = x = embedded.flatten(1)
        for cross in self.crosses:
            x = cross(x0, x)
        score: Tensor = super().score(embedded, terms) + self.out(x).squeeze(1)
        return score


MODELS: dict[str, type[Linear]] = {"linear": Linear, "fm": FM, "deepfm": DeepFM, "dcn": DCN, "mlp": MLP}
"""The ready-made models by name."""


def default_hidden(inputs: int) -> tuple[int, ...]:
    """Choose one hidden layer, whose size depends on the number of inputs."""
    if inputs <= 128:
        return (32,)
    return (64,) if inputs <= 1024 else (128,)


def build(name: str, schema: Schema, *, width: int | None = None, hidden: Sequence[int] | None = None) -> Linear:
    """Build a model for the features of a schema. Its weights are drawn from torch's default generator.

    Args:
        name: a key of `MODELS`.
        schema: the features.
        width: the width of the embeddings (default: 8).
        hidden: sizes of the hidden layers (default: one layer of 32 to 128 units, by the number of inputs).

    Raises:
        ValueError: if the name is unknown, or if a size is below 1.

    Example::

        model = build("deepfm", Schema({"item": "hash:1000", "price": "number"}, label="click"))
    """
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}, or FILE.py:FUNCTION")
    if (width is not None and width < 1) or any(size < 1 for size in hidden or ()):
        raise ValueError("the width and the hidden layers of a model must be at least 1")
    return MODELS[name](schema, width or DEFAULT_WIDTH, tuple(hidden or ()))
