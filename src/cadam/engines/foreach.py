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
from .base import PLAIN, Engine, Item, Job


class Foreach(Engine):
    name = "foreach"
    traceable = True

    def lacks(self, update: Update, item: Item, grad: Tensor | None, options: Options) -> str | None:
        if options["differentiable"]:
            return "differentiable=True needs the eager engine"
        if options["foreach"] is False:
            return "foreach=False was asked for"
        odd = [x for x in (item.param, grad) if x is not None and type(x) not in PLAIN]
        if options["foreach"] is None and odd:
            return f"a {type(odd[0]).__name__} may not have list operations (foreach=True insists)"
        return None

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            foreach_interpreter.count_steps(job.items)
            on_device = scalars.stay_on_device(job.options)
            coefficients = scalars.of_steps(job.update, job.options, job.grad_scale)
            step_of = None if on_device else foreach_interpreter.steps(job)
            pairs = list(job)
            alone = [item.is_negated or item.is_stand_in for item, _ in pairs]
            for item, grad in compress(pairs, alone):
                foreach_interpreter.count(job, [item], [reference.step(job, item, grad, coefficients(item.step))])
            pairs = [pair for pair, is_alone in zip(pairs, alone, strict=True) if not is_alone]
            for t, items, grads in _alike(pairs, read=not on_device):
                step = (
                    foreach_interpreter.Step(job, items[0], _on_device(job, items)) if step_of is None else step_of(t)
                )
                foreach_interpreter.count(job, items, step.run_lists(items, grads))


def _alike(pairs: Sequence[tuple[Item, Tensor]], read: bool) -> list[tuple[Any, list[Item], list[Tensor]]]:
    """The items by what one list operation must share: device, dtypes and, where it can be read, the step."""
    if not pairs:
        return []
    items, grads = map(list, zip(*pairs, strict=True))
    steps = [item.step.item() if read else None for item in items]
    dtypes = [[item.state[name].dtype for item in items] for name in items[0].state]
    devices = [(item.param.device, item.param.dtype) for item in items]
    found: dict[Any, tuple[Any, list[Item], list[Tensor]]] = {}
    for item, grad, *key in zip(items, grads, steps, devices, [grad.dtype for grad in grads], *dtypes, strict=True):
        _, some, theirs = found.setdefault(tuple(key), (key[0], [], []))
        some.append(item)
        theirs.append(grad)
    return list(found.values())


def _on_device(job: Job, items: Sequence[Item]) -> dict[str, Any]:
    """The coefficients as numbers where they do not depend on the step, else as lists of 0-dim tensors."""
    steps = torch.stack([scalars.exact(item.step) for item in items])
    c = job.update.coefficients(steps, job.options, scalars.Scalars, job.grad_scale)
    return {name: list(v.unbind()) if isinstance(v, Tensor) and v.dim() == 1 else v for name, v in c.items()}
