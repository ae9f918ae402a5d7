"""The engine of list operations: one torch call per operation for all tensors.

A list operation needs fewer launches on an accelerator and fewer Python calls on a CPU than one call per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ..rules.update import ScalarFunctions
from . import foreach_interpreter, reference
from .base import PLAIN, Engine, KernelBatch, ParamSlot, Refusal, RefusalKind
from .resolved_group import ResolvedGroup, to_float64


class Foreach(Engine):
    """Dense gradients on any device, by torch's ``_foreach`` operations."""

    name = "foreach"
    traceable = True

    def input_refusal(self, group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Refusal | None:
        """Refuse autograd and, unless ``foreach=True``, tensor subclasses."""
        if group.options["differentiable"]:
            return Refusal.unsupported("differentiable=True needs the eager engine")
        if group.options["foreach"] is False:
            return Refusal(RefusalKind.NOT_REQUESTED, "foreach=False was asked for")
        subclasses = [x for x in (slot.param, grad) if x is not None and type(x) not in PLAIN]
        if group.options["foreach"] is None and subclasses:
            name = type(subclasses[0]).__name__
            return Refusal.unsupported(f"a {name} may not have list operations (foreach=True uses them anyway)")
        return None

    def run(self, batches: Sequence[KernelBatch]) -> None:
        """Update each batch, with one list for all slots of the same device, dtypes and step count."""
        for batch in batches:
            foreach_interpreter.count_steps(batch.slots)
            on_device = batch.group.keeps_scalars_on_device
            coefficients = batch.group.coefficients(batch.grad_scale)
            step_at = None if on_device else foreach_interpreter.steps(batch)
            pairs = list(batch)
            # List operations cannot write to lazily negated tensors or to fake ones.
            alone = [slot.is_negated or slot.is_fake for slot, _ in pairs]
            for slot, grad in compress(pairs, alone):
                aligned = reference.step(batch, slot, grad, coefficients(slot.step))
                foreach_interpreter.count(batch, [slot], [aligned])
            pairs = [pair for pair, is_alone in zip(pairs, alone, strict=True) if not is_alone]
            for count, slots, grads in _alike(pairs, read_steps=not on_device):
                if step_at is None:
                    step = foreach_interpreter.Step(batch, slots[0], _coefficients_on_device(batch, slots))
                else:
                    step = step_at(count)
                foreach_interpreter.count(batch, slots, step.run_lists(slots, grads))


def _alike(
    pairs: Sequence[tuple[ParamSlot, Tensor]], read_steps: bool
) -> list[tuple[Any, list[ParamSlot], list[Tensor]]]:
    """Divide slots into lists that share device, dtypes and, where it can be read, the step count."""
    if not pairs:
        return []
    slots, grads = map(list, zip(*pairs, strict=True))
    steps = [slot.step.item() if read_steps else None for slot in slots]
    dtypes = [[slot.state[name].dtype for slot in slots] for name in slots[0].state]
    devices = [(slot.param.device, slot.param.dtype) for slot in slots]
    lists: dict[Any, tuple[Any, list[ParamSlot], list[Tensor]]] = {}
    for slot, grad, *key in zip(slots, grads, steps, devices, [grad.dtype for grad in grads], *dtypes, strict=True):
        _, some_slots, some_grads = lists.setdefault(tuple(key), (key[0], [], []))
        some_slots.append(slot)
        some_grads.append(grad)
    return list(lists.values())


def _coefficients_on_device(batch: KernelBatch, slots: Sequence[ParamSlot]) -> dict[str, Any]:
    """Return coefficients as numbers where they do not depend on the step, else as lists of 0-dim tensors."""
    steps = torch.stack([to_float64(slot.step) for slot in slots])
    c = batch.group.update.coefficients(steps, batch.group.options, ScalarFunctions, batch.grad_scale)
    return {name: list(v.unbind()) if isinstance(v, Tensor) and v.dim() == 1 else v for name, v in c.items()}
