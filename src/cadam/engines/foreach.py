"""Lists of tensors, one call per operation for all of them: fewer launches on an accelerator.

Runs the recorded program of the update; a temporary that nothing needs any more is overwritten in place.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..codegen.program import Op, Program, Value, record
from ..rules import Options
from ..update import Update
from . import scalars
from .base import Engine, Item, Job
from .eager import Tensors


class Foreach(Engine):
    name = "foreach"
    traceable = True

    def lacks(self, update: Update, item: Item, grad: Tensor | None, options: Options) -> str | None:
        if options["differentiable"]:
            return "differentiable=True needs the eager engine"
        if options["foreach"] is False:
            return "foreach=False was asked for"
        if any(tensor.is_neg() for tensor in (item.param, *item.state.values())):
            return "list operations cannot write to tensors that are negated lazily (resolve_neg() makes plain ones)"
        if options["foreach"] is None and item.param.device.type == "cpu":
            return "on the CPU lists of tensors save nothing (foreach=True insists)"
        return None

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            torch._foreach_add_([item.step for item in job.items], 1)
            for alike in _alike(job):
                _step(job, alike)


Pair = tuple[Item, Tensor]


def _alike(job: Job) -> list[list[Pair]]:
    """The items by what one list operation must share: device, dtypes and, where it can be read, the step."""
    lists: dict[Any, list[Pair]] = defaultdict(list)
    read = not scalars.stay_on_device(job.options)
    for item, grad in job:
        dtypes = (item.param.dtype, grad.dtype, *(b.dtype for b in item.state.values()))
        lists[(item.param.device, dtypes, item.step.item() if read else None)].append((item, grad))
    return list(lists.values())


def _step(job: Job, pairs: list[Pair]) -> None:
    items = [item for item, _ in pairs]
    c = _coefficients(job.update, job.options, items, job.grad_scale)
    work, buffers = items[0].work_dtype, tuple(items[0].state)
    program = record(job.update, buffers, tuple(c))
    inputs: dict[str, list[Tensor]] = {
        "p": [item.param.to(work) for item in items],
        "g": [grad.to(work) for _, grad in pairs],
    }
    for name in buffers:
        inputs[name] = [item.state[name].to(work) for item in items]
    results = _interpret(program, inputs, c)
    torch._foreach_copy_([item.param for item in items], results[program.param.name])
    for name in buffers:
        torch._foreach_copy_([item.state[name] for item in items], results[program.state[name].name])
    if job.options["track_alignment"]:
        assert program.alignment is not None
        _count(items, results[program.alignment.name])


def _coefficients(update: Update, options: Options, items: list[Item], grad_scale: Tensor | None) -> dict[str, Any]:
    """One number for all items or, where steps stay on the device, a list of 0-dim tensors."""
    if not scalars.stay_on_device(options):
        return scalars.of_step(update, options, items[0].step, grad_scale)
    steps = torch.stack([scalars.exact(item.step) for item in items])
    c = update.coefficients(steps, options, scalars.Scalars, grad_scale)
    return {name: list(v.unbind()) if isinstance(v, Tensor) and v.dim() == 1 else v for name, v in c.items()}


def _interpret(program: Program, inputs: dict[str, list[Tensor]], c: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {**inputs, **c}
    ours: set[str] = set()  # temporaries made here, which may be overwritten
    for op, dying in zip(program.ops, program.last_use, strict=True):
        args = [values[arg.name] if isinstance(arg, Value) else arg for arg in op.args]
        if op.out.scalar:
            values[op.out.name] = _on_scalars(op.kind, args)
            continue
        reuse = _reusable(op, dying & ours)
        values[op.out.name] = _on_lists(op.kind, args, in_place=reuse is not None)
        ours.add(op.out.name)
        for name in dying:
            del values[name]
    return values


def _reusable(op: Op, dying: frozenset[str]) -> str | None:
    first = op.args[1] if op.kind == "hold" else op.args[0]
    return first.name if isinstance(first, Value) and first.name in dying else None


def _on_lists(kind: str, args: list[Any], in_place: bool) -> list[Tensor]:
    if kind == "hold":
        return [Tensors.hold(alignment, step) for alignment, step in zip(*args, strict=True)]
    if kind == "maximum" and not isinstance(args[1], list):
        kind = "clamp_min"
    suffix = "_" if in_place else ""
    result = getattr(torch, f"_foreach_{kind}{suffix}")(*args)
    return args[0] if in_place else list(result)


_SCALAR_OPS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "reciprocal": lambda x: 1 / x,
    "sqrt": scalars.Scalars.sqrt,
    "maximum": scalars.Scalars.maximum,
}


def _on_scalars(kind: str, args: list[Any]) -> Any:
    """An operation between coefficients, each a number, a tensor or a list of 0-dim tensors."""
    length = next((len(a) for a in args if isinstance(a, list)), None)
    if length is None:
        return _SCALAR_OPS[kind](*args)
    spread = [a if isinstance(a, list) else [a] * length for a in args]
    return [_SCALAR_OPS[kind](*each) for each in zip(*spread, strict=True)]


def _count(items: list[Item], alignments: list[Tensor]) -> None:
    counters = [item.counts for item in items if item.counts is not None]
    sizes = [item.param.numel() for item in items]
    torch._foreach_add_([c[0] for c in counters], [(a > 0).sum() for a in alignments])
    torch._foreach_add_([c[1:] for c in counters], sizes)
