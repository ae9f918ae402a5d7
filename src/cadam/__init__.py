"""CAdam: Adam with confidence, and the same confidence for every momentum optimizer.

Names are imported when they are first asked for: the environment that builds the package has no torch, and
`import cadam` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "rows",
]

# Where a public name is defined, if not in the catalogue.
_HOME = {
    "Alignment": "alignment",
    "Optimizer": "optimizer",
    "Ratio": "alignment",
    "Rule": "rules",
    "Step": "rules",
    "clip_grad_norm_": "clip",
    "for_torch": "checkpoint",
    "join_state_dicts": "checkpoint",
}


_MODULES = (
    "alignment",
    "catalog",
    "checkpoint",
    "clip",
    "ddp",
    "engines",
    "optimizer",
    "options",
    "rows",
    "rules",
    "update",
)
"""Submodules that are there without being imported by name."""

if not TYPE_CHECKING:  # a type checker knows the names from above, and that there are no others

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_HOME.get(name, 'catalog')}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__, *_MODULES})
