"""Where updates run. `job.py` says what an engine is; `choose` picks one for each parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..rules import Options
from ..update import Update
from .base import Engine, Item, Job, NotMeant
from .cpu.dense import Native, NativeRows
from .cuda.dense import Cuda
from .cuda.rows import CudaRows, check_ids
from .eager import Eager
from .foreach import Foreach
from .rows import Rows

# Fastest first; for every gradient one of the last two is able.
ENGINES: tuple[Engine, ...] = (Cuda(), CudaRows(), Native(), NativeRows(), Foreach(), Rows(), Eager())


@dataclass(frozen=True)
class Choice:
    """The engine that serves a parameter, and why each faster one does not."""

    engine: Engine
    passed_over: dict[str, str]


def choose(update: Update, item: Item, grad: Tensor | None, options: Options) -> Choice:
    """The fastest engine that can serve this parameter with such a gradient and these options."""
    passed_over: dict[str, str] = {}
    for engine in ENGINES:
        reason = engine.refuses(update, item, grad, options)
        if reason is None:
            return Choice(engine, passed_over)
        passed_over[engine.name] = reason
    raise AssertionError("eager serves every dense gradient and rows every sparse one")


__all__ = ["Choice", "Engine", "Item", "Job", "NotMeant", "check_ids", "choose"]
