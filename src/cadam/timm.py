"""The optimizers with confidence in timm's registry.

timm's own `cadamw`, `clion` and so on are *cautious* optimizers (https://arxiv.org/abs/2411.16085): they have the same
mask, but scale up the remaining step by the inverse of the share of elements that pass the mask. The optimizers of
cadam do not rescale, so they are registered under other names.
"""

from __future__ import annotations

import inspect

from .optim import classes
from .optim.optimizer import Optimizer


def register() -> dict[str, type[Optimizer]]:
    """Add the optimizers with confidence to timm's registry, as `confidentadam`, `confidentadamw` and so on.

    The names have no underscore, because timm would read the part before it as a prefix.

    Returns:
        The registered classes, by name.

    Raises:
        ImportError: If timm is not installed, or is older than 1.0.12.

    Example:
        >>> cadam.timm.register()
        >>> timm.optim.create_optimizer_v2(model, "confidentadamw", lr=1e-3)
    """
    try:
        from timm.optim import OptimInfo
        from timm.optim._optim_factory import default_registry
    except ImportError as error:
        raise ImportError("cadam.timm.register() requires timm 1.0.12 or later: pip install timm") from error
    registered = {f"confident{cls.__name__.removeprefix('C').lower()}": cls for cls in confident_classes()}
    for name, cls in registered.items():
        arguments = inspect.signature(cls).parameters
        default_registry.register(
            OptimInfo(
                name=name,
                opt_class=cls,
                description=f"cadam.{cls.__name__}, with confidence: masked, not rescaled",
                has_eps="eps" in arguments,
                has_momentum="momentum" in arguments,
                has_betas="betas" in arguments,
            )
        )
    return registered


def confident_classes() -> list[type[Optimizer]]:
    """Return the optimizer classes with confidence."""
    family: list[type[Optimizer]] = [getattr(classes, name) for name in classes.__all__]
    return [cls for cls in family if cls.confidence]
