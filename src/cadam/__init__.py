"""CAdam: Adam with confidence, and the same confidence for every momentum optimizer.

Names are imported on first use, so that `import cadam` is fast and works without torch, as in the build environment.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .rules.family import FAMILY as _FAMILY

if TYPE_CHECKING:
    from .optim import classes, sparse_update
    from .optim.alignment import Alignment, Ratio
    from .optim.classes import *  # noqa: F403
    from .optim.clip_grad import clip_grad_norm_
    from .optim.optimizer import Optimizer
    from .optim.state_dict import for_torch, join_state_dicts
    from .rules import Rule, Step

__version__ = "0.2.0"

_MODULES = {
    "Alignment": "optim.alignment",
    "Optimizer": "optim.optimizer",
    "Ratio": "optim.alignment",
    "Rule": "rules",
    "Step": "rules",
    "clip_grad_norm_": "optim.clip_grad",
    "for_torch": "optim.state_dict",
    "join_state_dicts": "optim.state_dict",
    **{f"{prefix}{member.name}": "optim.classes" for member in _FAMILY for prefix in ("", "C")},
}
"""The module in which each public name is defined."""

_SUBMODULES = {"engines": "engines", "optim": "optim", "rules": "rules", "sparse_update": "optim.sparse_update"}
"""Modules that can be used as attributes without an import statement."""

if TYPE_CHECKING:
    __all__ = ["Alignment", "Optimizer", "Ratio", "Rule", "Step", "clip_grad_norm_", "for_torch", "join_state_dicts"]
    __all__ += ["sparse_update"]
    __all__ += classes.__all__
else:
    __all__ = [*_MODULES, "sparse_update"]

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return import_module(f".{_SUBMODULES[name]}", __name__)
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__, *_SUBMODULES})
