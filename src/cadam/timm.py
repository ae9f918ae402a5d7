"""The optimizers with confidence in timm, under names of ours: `cadam.timm.register()`.

timm's own `cadamw`, `clion`, ... are *cautious* optimizers: the same mask, but what passes it is scaled up by the
inverse of the share that passed. Here nothing is scaled.
"""

from __future__ import annotations

import inspect

from .optim import classes
from .optim.optimizer import Optimizer


def register() -> dict[str, type[Optimizer]]:
    """Add the optimizers with confidence to timm's registry, as `confidentadam`, `confidentadamw`, ...; returns them.

    Afterwards `timm.optim.create_optimizer_v2(model, "confidentadamw", lr=1e-3)` works. Names have no underscore, which
    timm reads as a prefix.
    """
    try:
        from timm.optim import OptimInfo
        from timm.optim._optim_factory import default_registry
    except ImportError as error:
        raise ImportError("cadam.timm.register() requires timm 1.0.12 or later: pip install timm") from error
    made = {f"confident{c.__name__.removeprefix('C').lower()}": c for c in confident()}
    for name, optimizer in made.items():
        takes = inspect.signature(optimizer.__init__).parameters
        default_registry.register(
            OptimInfo(
                name=name,
                opt_class=optimizer,
                description=f"cadam.{optimizer.__name__}, with confidence: masked, not rescaled",
                has_eps="eps" in takes,
                has_momentum="momentum" in takes,
                has_betas="betas" in takes,
            )
        )
    return made


def confident() -> list[type[Optimizer]]:
    """The optimizers with confidence of the catalogue."""
    return [
        value
        for value in vars(classes).values()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer and value.confidence
    ]
