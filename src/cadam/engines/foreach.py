"""Lists of tensors, one call per operation for all of them: fewer launches on an accelerator, fewer calls on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ..rules import Options
from ..rules.update import Update
from . import coefficients as scalars
from . import foreach_interpreter, reference
from .base import PLAIN, Engine, KernelBatch, ParamSlot, Refusal, RefusalKind


class Foreach(Engine):
    name = "foreach"
    traceable = True

    def input_refusal(self, update: Update, slot: ParamSlot, grad: Tensor | None, options: Options) -> Refusal | None:
        if options["differentiable"]:
            return Refusal.unsupported("differentiable=True needs the eager engine")
        if options["foreach"] is False:
            return Refusal(RefusalKind.NOT_REQUESTED, "foreach=False was asked for")
        odd = [x for x in (slot.param, grad) if x is not None and type(x) not in PLAIN]
        if options["foreach"] is None and odd:
            return Refusal.unsupported(f"a {type(odd[0]).__name__} may not have list operations (foreach=True insists)")
        return None

    def run(self, batches: Sequence[KernelBatch]) -> None:
        for batch in batches:
            foreach_interpreter.count_steps(batch.slots)
            on_device = scalars.stay_on_device(batch.options)
            coefficients = scalars.of_steps(batch.update, batch.options, batch.grad_scale)
            step_of = None if on_device else foreach_interpreter.steps(batch)
            pairs = list(batch)
            alone = [slot.is_negated or slot.is_stand_in for slot, _ in pairs]
            for slot, grad in compress(pairs, alone):
                foreach_interpreter.count(batch, [slot], [reference.step(batch, slot, grad, coefficients(slot.step))])
            pairs = [pair for pair, is_alone in zip(pairs, alone, strict=True) if not is_alone]
            for t, slots, grads in _alike(pairs, read=not on_device):
                step = (
                    foreach_interpreter.Step(batch, slots[0], _on_device(batch, slots))
                    if step_of is None
                    else step_of(t)
                )
                foreach_interpreter.count(batch, slots, step.run_lists(slots, grads))


def _alike(pairs: Sequence[tuple[ParamSlot, Tensor]], read: bool) -> list[tuple[Any, list[ParamSlot], list[Tensor]]]:
    """The slots by what one list operation must share: device, dtypes and, where it can be read, the step."""
    if not pairs:
        return []
    slots, grads = map(list, zip(*pairs, strict=True))
    steps = [slot.step.item() if read else None for slot in slots]
    dtypes = [[slot.state[name].dtype for slot in slots] for name in slots[0].state]
    devices = [(slot.param.device, slot.param.dtype) for slot in slots]
    found: dict[Any, tuple[Any, list[ParamSlot], list[Tensor]]] = {}
    for slot, grad, *key in zip(slots, grads, steps, devices, [grad.dtype for grad in grads], *dtypes, strict=True):
        _, some, theirs = found.setdefault(tuple(key), (key[0], [], []))
        some.append(slot)
        theirs.append(grad)
    return list(found.values())


def _on_device(batch: KernelBatch, slots: Sequence[ParamSlot]) -> dict[str, Any]:
    """The coefficients as numbers where they do not depend on the step, else as lists of 0-dim tensors."""
    steps = torch.stack([scalars.exact(slot.step) for slot in slots])
    c = batch.update.coefficients(steps, batch.options, scalars.ScalarFunctions, batch.grad_scale)
    return {name: list(v.unbind()) if isinstance(v, Tensor) and v.dim() == 1 else v for name, v in c.items()}
