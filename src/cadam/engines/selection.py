"""The choice of an engine for each parameter."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..rules import Options
from ..rules.update import Update
from .base import Engine, ParamSlot, Refusal, RefusalKind
from .cpu.dense import Native
from .cpu.sparse import NativeRows
from .cuda.dense import Cuda
from .cuda.sparse import CudaRows
from .foreach import Foreach
from .reference import Eager
from .sparse_reference import Rows

# Fastest first; for every gradient one of the last two is able.
ENGINES: tuple[Engine, ...] = (Cuda(), CudaRows(), Native(), NativeRows(), Foreach(), Rows(), Eager())


@dataclass(frozen=True)
class Choice:
    """The engine that serves a parameter, and why each faster one does not."""

    engine: Engine
    passed_over: dict[str, Refusal]


def choose(update: Update, slot: ParamSlot, grad: Tensor | None, options: Options) -> Choice:
    """The fastest engine that can serve this parameter with such a gradient and these options."""
    passed_over: dict[str, Refusal] = {}
    for engine in ENGINES:
        refusal = engine.refusal(update, slot, grad, options)
        if refusal is None:
            return Choice(engine, passed_over)
        passed_over[engine.name] = refusal
    raise AssertionError("eager serves every dense gradient and rows every sparse one")


def check_requested_engine(slot: ParamSlot, choice: Choice, options: Options) -> None:
    """Raise if an option asks for an engine that cannot serve, warn if one is missing: nothing falls back silently."""
    over = choice.passed_over
    fused = {engine.name: over[engine.name] for engine in ENGINES if engine.fused and engine.name in over}
    meant = {name: reason for name, reason in fused.items() if reason.kind is not RefusalKind.NOT_APPLICABLE}
    reasons = "; ".join(f"{name} {reason}" for name, reason in (meant or fused).items())
    if options["fused"] and not choice.engine.fused:
        torchs = "`fused=True` requires all the params to be floating point Tensors of supported devices"
        raise RuntimeError(f"{slot.name}: fused=True, but no fused engine can serve it: {reasons}. {torchs}.")
    if options["foreach"] and "foreach" in choice.passed_over and choice.engine.name == "eager":
        raise RuntimeError(f"{slot.name}: foreach=True was asked for, but {choice.passed_over['foreach']}")
    if (
        options["stochastic_rounding"]
        and slot.param.dtype == torch.bfloat16
        and not choice.engine.rounds_stochastically
    ):
        if slot.param.device.type != "cuda":
            reasons = f"it is on {slot.param.device}"
        raise RuntimeError(f"{slot.name}: stochastic_rounding=True needs the CUDA engine: {reasons}")
    for reason in choice.passed_over.values():
        if reason.kind is RefusalKind.UNAVAILABLE and not choice.engine.fused:
            _warn(slot.param.device.type, choice.engine.name, reason.reason)


@cache
def _warn(device: str, engine: str, reason: str) -> None:
    """Once for each reason."""
    warnings.warn(
        f"cadam: no fused kernels on {device}, so the engine {engine!r} runs and steps are slower: {reason}. "
        "foreach=True or foreach=False asks for an engine without kernels, and silences this.",
        RuntimeWarning,
        stacklevel=2,
    )
