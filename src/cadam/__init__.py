"""CAdam: Adam with confidence, and the same confidence for every momentum optimizer."""

from . import rows
from .alignment import Alignment, Ratio
from .catalog import (
    CSGDM,
    SGDM,
    AdaBelief,
    Adam,
    AdamW,
    AmsGrad,
    CAdaBelief,
    CAdam,
    CAdamW,
    CAmsGrad,
    CLion,
    CRAdam,
    CYogi,
    Lion,
    RAdam,
    Yogi,
)
from .checkpoint import for_torch, join_state_dicts
from .clip import clip_grad_norm_
from .optimizer import Optimizer
from .rules import Rule, Step

__version__ = "0.1.0"

__all__ = [
    "CSGDM",
    "SGDM",
    "AdaBelief",
    "Adam",
    "AdamW",
    "Alignment",
    "AmsGrad",
    "CAdaBelief",
    "CAdam",
    "CAdamW",
    "CAmsGrad",
    "CLion",
    "CRAdam",
    "CYogi",
    "Lion",
    "Optimizer",
    "RAdam",
    "Ratio",
    "Rule",
    "Step",
    "Yogi",
    "clip_grad_norm_",
    "for_torch",
    "join_state_dicts",
    "rows",
]
