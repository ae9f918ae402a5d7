"""Ready-made models for the features of a schema: linear, FM, DeepFM, DCN-v2 and a feed-forward network (MLP)."""

from .inputs import Inputs, NumberNormalizer, pairwise_interactions
from .networks import DCN, FM, MLP, MODELS, DeepFM, Linear, build

__all__ = [
    "DCN",
    "FM",
    "MLP",
    "MODELS",
    "DeepFM",
    "Inputs",
    "Linear",
    "NumberNormalizer",
    "build",
    "pairwise_interactions",
]
