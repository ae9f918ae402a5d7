"""Where updates run. `job.py` says what an engine is; `choose` picks one for each parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..rules import Options
from .eager import Eager
from .foreach import Foreach
from .job import Engine, Item, Job
from .rows import Rows

EAGER, FOREACH, ROWS = Eager(), Foreach(), Rows()

# Fastest first; the last one refuses nothing.
DENSE_ENGINES: tuple[Engine, ...] = (FOREACH, EAGER)


@dataclass(frozen=True)
class Choice:
    """The engine that serves a parameter, and why each faster one does not."""

    engine: Engine
    passed_over: dict[str, str]


def choose(param: Tensor, sparse: bool, options: Options) -> Choice:
    """The fastest engine that can serve `param` (a plain tensor) with such a gradient and these options."""
    if sparse:
        return Choice(ROWS, {engine.name: "serves dense gradients only" for engine in DENSE_ENGINES})
    passed_over: dict[str, str] = {}
    for engine in DENSE_ENGINES:
        reason = engine.refuses(param, options)
        if reason is None:
            return Choice(engine, passed_over)
        passed_over[engine.name] = reason
    raise AssertionError("the eager engine serves every parameter")


__all__ = ["Choice", "Engine", "Item", "Job", "choose"]
