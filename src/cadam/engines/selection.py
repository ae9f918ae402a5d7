"""The choice of an engine for each parameter."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .base import Engine, ParamSlot, Refusal, RefusalKind
from .cpu.dense import Native
from .cpu.sparse import NativeRows
from .cuda.dense import Cuda
from .cuda.sparse import CudaRows
from .foreach import Foreach
from .reference import Eager
from .resolved_group import ResolvedGroup
from .sparse_reference import Rows

ENGINES: tuple[Engine, ...] = (Cuda(), CudaRows(), Native(), NativeRows(), Foreach(), Rows(), Eager())
"""All engines, fastest first. One of the last two serves any gradient: `Rows` the sparse and `Eager` the dense ones."""


@dataclass(frozen=True)
class Choice:
    """The engine that serves a parameter, and the refusal of each faster engine by its name."""

    engine: Engine
    passed_over: dict[str, Refusal]


def choose(group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Choice:
    """Return the fastest engine that can serve a parameter with this gradient and these options."""
    passed_over: dict[str, Refusal] = {}
    for engine in ENGINES:
        refusal = engine.refusal(group, slot, grad)
        if refusal is None:
            return Choice(engine, passed_over)
        passed_over[engine.name] = refusal
    raise AssertionError("the engine 'eager' serves every dense gradient and 'rows' every sparse one")


def check_requested_engine(group: ResolvedGroup, slot: ParamSlot, choice: Choice) -> None:
    """Raise an error if an option asks for an engine that cannot serve, and warn if fused kernels are missing.

    No option falls back silently to another engine.

    Raises:
        RuntimeError: If `fused`, `foreach` or `stochastic_rounding` cannot be honored.
    """
    options, param, passed_over = group.options, slot.param, choice.passed_over
    fused = {engine.name: passed_over[engine.name] for engine in ENGINES if engine.fused and engine.name in passed_over}
    applicable = {name: refusal for name, refusal in fused.items() if refusal.kind is not RefusalKind.NOT_APPLICABLE}
    reasons = "; ".join(f"{name} {refusal}" for name, refusal in (applicable or fused).items())
    if options["fused"] and not choice.engine.fused:
        # Code that catches torch's error looks for this sentence.
        torch_message = "`fused=True` requires all the params to be floating point Tensors of supported devices"
        raise RuntimeError(f"{slot.name}: fused=True, but no fused engine can serve it: {reasons}. {torch_message}.")
    if options["foreach"] and "foreach" in passed_over and choice.engine.name == "eager":
        raise RuntimeError(f"{slot.name}: foreach=True was asked for, but {passed_over['foreach']}")
    if options["stochastic_rounding"] and param.dtype == torch.bfloat16 and not choice.engine.rounds_stochastically:
        if param.device.type != "cuda":
            reasons = f"it is on {param.device}"
        raise RuntimeError(f"{slot.name}: stochastic_rounding=True needs the CUDA engine: {reasons}")
    for refusal in passed_over.values():
        if refusal.kind is RefusalKind.UNAVAILABLE and not choice.engine.fused:
            _warn_once(param.device.type, choice.engine.name, refusal.reason)


@cache
def _warn_once(device: str, engine: str, reason: str) -> None:
    """Warn that fused kernels are missing, once for each reason."""
    warnings.warn(
        f"cadam: no fused kernels on {device}, so the engine {engine!r} runs and steps are slower: {reason}. "
        "foreach=True or foreach=False selects an engine without kernels and silences this warning.",
        RuntimeWarning,
        stacklevel=2,
    )
