"""Ready-made models for the features of a schema: linear, FM, DeepFM, DCN-v2 and a plain network (MLP)."""

from .inputs import Inputs, Normalised
from .networks import DCN, FM, MLP, MODELS, DeepFM, Linear, build, pairs

__all__ = ["DCN", "FM", "MLP", "MODELS", "DeepFM", "Inputs", "Linear", "Normalised", "build", "pairs"]
