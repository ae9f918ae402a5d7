"""CAdam: Adam with confidence, and the same confidence for every momentum optimizer.

Names are imported when they are first asked for: the environment that builds the package has no torch, and
`import cadam` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .optim import sparse_update as sparse_update
    from .optim.alignment import Alignment, Ratio
    from .optim.classes import (
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
    from .optim.clip_grad import clip_grad_norm_
    from .optim.optimizer import Optimizer
    from .optim.state_dict import for_torch, join_state_dicts
    from .rules import Rule, Step

__version__ = "0.2.0"

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
    "sparse_update",
]

# Where a public name is defined, if not in the catalogue.
_HOME = {
    "Alignment": "optim.alignment",
    "Optimizer": "optim.optimizer",
    "Ratio": "optim.alignment",
    "Rule": "rules",
    "Step": "rules",
    "clip_grad_norm_": "optim.clip_grad",
    "for_torch": "optim.state_dict",
    "join_state_dicts": "optim.state_dict",
}


_MODULES = ("engines", "optim", "rules")
"""Submodules that are there without being imported by name."""

if not TYPE_CHECKING:  # a type checker knows the names from above, and that there are no others

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        if name == "sparse_update":
            return import_module(".optim.sparse_update", __name__)
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_HOME.get(name, 'optim.classes')}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__, *_MODULES})
