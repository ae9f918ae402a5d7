"""The fused engine on the CPU: C kernels over raw pointers, on torch's own threads, one call a step.

A step reads and writes every value once. The pointers are taken anew in each step: gradients move, and nothing
keeps a user from replacing what a parameter or a buffer points to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...codegen.c_source import stored, stored_by_row
from ...codegen.kernel_spec import Structure
from ...native.library import Library, find
from ...native.tensor_snapshot import CHANGED, Watched, lay_out, watched_grads
from ...numpy_functions import OnHost
from ...rules import Options
from ...rules.update import Update
from .. import coefficients, quantization
from ..base import PLAIN, Engine, Item, Job, NotThere, UnavailableError, Words, fills_memory, unreadable

MAX_BUFFERS, MAX_COEFFICIENTS, MAX_CODED, WIDEST = 4, 32, 2, 1024  # as in native/cadam.h
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
STORAGES = {"float32": 0, "bfloat16": 1, "int8": 2}
SIZES = np.array([4, 8, 2, 2])  # in bytes, in that order

Floats64 = np.ndarray[Any, np.dtype[np.float64]]

GRAIN = 32768  # elements below which a second thread is not worth waking


# What the engines can serve ------------------------------------------------------------------------------------


def refusal(update: Update, item: Item, options: Options) -> str | None:
    """Why the kernels cannot serve a parameter, whatever its gradient; None if they can."""
    if options["fused"] is False or (options["foreach"] is not None and not options["fused"]):
        return f"fused={options['fused']}, foreach={options['foreach']} was asked for"
    if options["differentiable"]:
        return "differentiable=True needs the eager engine"
    reason = unreadable(item)
    if reason:
        return reason
    if item.param.dtype not in DTYPES:
        return f"has no kernels for {item.param.dtype}"
    work = torch.promote_types(item.param.dtype, torch.float32)
    for name, buffer in item.state.items():
        shared = quantization.shares(item.param, item.kinds.get(name, ""), options) and quantization.is_by_row(
            buffer, item.param
        )
        wanted = work if shared else quantization.CODES.get(item.moments, work)
        if buffer.dtype != wanted:
            return f"keeps the state of {item.param.dtype} in {wanted}, and {name} is {buffer.dtype}"
        if shared and not is_of_rows(buffer, item.param):
            return f"{name} does not have one number for each row"
        if not shared and (buffer.shape != item.param.shape or buffer.stride() != item.param.stride()):
            return f"{name} does not lie in memory as the parameter does"
    if not fills_memory(item.param):
        return "the parameter's elements overlap or have gaps between them"
    if any(t.data_ptr() % t.element_size() for t in (item.param, *item.state.values()) if t.device.type == "cpu"):
        return "the parameter or its state is not aligned in memory"
    if item.step.device.type != "cpu" or item.step.dtype != torch.float32:
        return f"counts steps in float32 on the CPU, and this count is {item.step.dtype} on {item.step.device}"
    if any(not scales.is_contiguous() for scales in item.scales.values()):
        return "the scales of its moments are not contiguous"
    structure = Structure.of(update.rule, coefficients.as_numbers(options))
    by_row = [quantization.is_by_row(buffer, item.param) for buffer in item.state.values()]
    if any(by_row) and by_row != [item.kinds[name] != "signed" for name in item.state]:
        return "some of its second moments are those of rows, and others are not"
    storages = stored_by_row(structure) if any(by_row) else ["float32", *stored(structure)]
    if item.moments not in storages:
        return f"has no {item.storage} for the moments of the rule {update.rule.name!r}"
    found = find(structure)
    return NotThere(found) if isinstance(found, UnavailableError) else None


def is_of_rows(x: Tensor, table: Tensor) -> bool:
    """Has it one number for each row, one after the other in memory?"""
    return x.shape == quantization.by_row(table) and x.is_contiguous() and x.device == table.device


def lacks_storage(item: Item, rows: bool) -> str | None:
    """Why the kernels cannot serve moments that are stored like these; None if they can."""
    shared = quantization.shares_moments(item)
    if not rows and (shared or item.row_steps is not None):
        return f"has no {item.storage} for dense gradients"
    if item.param.dtype == torch.float64 and (shared or item.moments in quantization.CODES):
        return f"has {item.storage} for at most float32, and the parameter is {item.param.dtype}"
    return quantization.other_scales(item, rows)


# Dense ---------------------------------------------------------------------------------------------------------

# Of a dense_tensor:
P, G, S, STEP, COUNTS, N, KERNEL, DTYPE, C, SCALES, SEED, MOMENTS, COLUMNS = 0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16


class Native(Engine):
    name = "native"
    device = "cpu"
    fused = True
    finds_grads = True

    def lacks_storage(self, item: Item) -> str | None:
        return lacks_storage(item, rows=False)

    def lacks(self, update: Update, item: Item, grad: Tensor | None, options: Options) -> str | None:
        reason = refusal(update, item, options)
        if reason is not None or grad is None:
            return reason
        if grad.dtype != item.param.dtype:
            return f"the gradient is {grad.dtype}, the parameter {item.param.dtype}"
        return None if type(grad) in PLAIN else f"serves plain gradients only, not {type(grad).__name__}"

    def stale(self, jobs: Sequence[Job]) -> bool:
        return _step(jobs).stale()

    def run(self, jobs: Sequence[Job]) -> None:
        _step(jobs).step(jobs)


def _step(jobs: Sequence[Job]) -> DenseStep:
    made: DenseStep | None = jobs[0].memo.get("native")
    if made is None or not made.serves(jobs):
        made = jobs[0].memo["native"] = DenseStep.of(jobs)
    return made


@dataclass
class DenseStep:
    """All tensors of a step as the kernels want them: a row of numbers each."""

    library: Library
    members: list[Sequence[Item]]
    """The items of each job. Not the jobs themselves: they keep this."""
    rows: Words
    params: Watched
    grads: Watched
    steps: Watched
    buffers: list[tuple[list[int] | slice, int, Watched]]
    """The first buffers, the second..., then their scales: rows and column that they belong in, and they themselves."""
    strided: dict[int, tuple[int, ...]]
    """The strides of parameters that are not contiguous."""
    disjoint: bool
    """Does no parameter share memory with another?"""

    def __post_init__(self) -> None:
        self.fit = self._fit()

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> DenseStep:
        items = [item for job in jobs for item in job.items]
        rows = np.zeros((len(items), COLUMNS), np.int64)
        start = 0
        for job in jobs:
            library, number = kernel(job)
            for row, item in zip(rows[start:], job.items, strict=False):
                row[KERNEL] = number
                row[DTYPE] = DTYPES[item.param.dtype]
                row[COUNTS] = 0 if item.counts is None else item.counts.data_ptr()
                row[SEED], row[MOMENTS] = item.seed, STORAGES[item.moments]
            start += len(job.items)
        params = Watched([item.param for item in items], threads=True)
        rows[:, P], rows[:, N] = params.addresses, params.sizes
        return cls(
            library,
            [job.items for job in jobs],
            rows,
            params,
            watched_grads(params.tensors, [grad for job in jobs for grad in job.gradients()], threads=True),
            Watched([item.step for item in items], threads=True),
            [_nth([item.state for item in items], k, S) for k in range(max(len(item.state) for item in items))]
            + [
                _nth([item.scales for item in items], k, SCALES) for k in range(max(len(item.scales) for item in items))
            ],
            {i: param.stride() for i, param in enumerate(params.tensors) if not param.is_contiguous()},
            _disjoint(params),
        )

    def serves(self, jobs: Sequence[Job]) -> bool:
        return len(jobs) == len(self.members) and all(
            job.items is items for job, items in zip(jobs, self.members, strict=True)
        )

    def stale(self) -> bool:
        """Kernels trust sizes and layouts: has a parameter other memory, a buffer or a gradient another size?"""
        if self.params.look():
            return True
        items = [item for members in self.members for item in members] if self.strided else []
        for i, stride in self.strided.items():
            if any(tensor.stride() != stride for tensor in (items[i].param, *items[i].state.values())):
                return True
        if self.steps.look() & CHANGED or any(buffers.look() & CHANGED for _, _, buffers in self.buffers):
            return True
        if self.grads.look() & CHANGED:
            self.fit = self._fit()
        return not self.fit

    def _fit(self) -> bool:
        """Do the gradients have the sizes, dtypes and device of their parameters?"""
        grads, params = self.grads, self.params
        return np.array_equal(grads.sizes, params.sizes) and np.array_equal(grads.kinds // 2, params.kinds // 2)

    def step(self, jobs: Sequence[Job]) -> None:
        rows = self.rows
        grads, copies = self._grads(jobs)
        rows[:, G], rows[:, STEP] = grads, self.steps.addresses
        for where, column, buffers in self.buffers:
            rows[where, column] = buffers.addresses
        c = self._coefficients(jobs)
        for part in [rows] if self.disjoint else np.split(rows, len(rows)):
            failed = self.library.c.cadam_dense(
                part.ctypes.data, len(part), c.ctypes.data, len(c), GRAIN, self.library.parallel_for
            )
            if failed:
                raise MemoryError("no memory for the step; nothing was changed")
        del copies
        torch.autograd.graph.increment_version(self.params.tensors)

    def _grads(self, jobs: Sequence[Job]) -> tuple[Words, list[Tensor]]:
        """Where the gradients lie, as the parameters do: one that does not is copied."""
        kinds = self.grads.kinds != self.params.kinds
        aligned = not np.bitwise_or.reduce(self.grads.addresses) & 7
        if aligned and not self.strided and not kinds.any():
            return self.grads.addresses, []
        odd = kinds | (self.grads.addresses % SIZES[self.rows[:, DTYPE]] != 0)
        odd[list(self.strided)] = True
        every = [grad for job in jobs for grad in job.gradients()]
        return lay_out(self.grads.addresses, np.flatnonzero(odd).tolist(), every, self.params.tensors)

    def _coefficients(self, jobs: Sequence[Job]) -> Floats64:
        """The sets of coefficients, one for each group and step count; notes in each row which is its own."""
        steps = np.empty(len(self.rows))
        self.library.c.cadam_read_steps(self.rows.ctypes.data, len(self.rows), steps.ctypes.data)
        steps += 1
        made: list[Floats64] = []
        start = 0
        for job in jobs:
            own = slice(start, start + len(job.items))
            start = own.stop
            different, index = steps[own][:1], np.zeros((), np.int64)
            if (steps[own] != different).any():
                different, index = np.unique(steps[own], return_inverse=True)
            self.rows[own, C] = index + sum(map(len, made))
            made.append(sets(job, different.tolist()))
        return np.concatenate(made)


def _disjoint(params: Watched) -> bool:
    order = np.argsort(params.addresses, kind="stable")
    starts = params.addresses[order]
    ends = starts + np.array([param.nbytes for param in params.tensors], np.int64)[order]
    return bool((ends[:-1] <= starts[1:]).all())


def _nth(held: Sequence[Mapping[str, Tensor]], k: int, first: int) -> tuple[list[int] | slice, int, Watched]:
    """The number `k` of all of these, for the column `first + k`."""
    where = [row for row, tensors in enumerate(held) if len(tensors) > k]
    tensors = Watched([list(held[row].values())[k] for row in where], threads=True)
    return slice(None) if len(where) == len(held) else where, first + k, tensors


def kernel(job: Job) -> tuple[Library, int]:
    """The kernel that serves a job, as its number in its library."""
    found = find(Structure.of(job.update.rule, coefficients.as_numbers(job.options)))
    if isinstance(found, UnavailableError):
        raise AssertionError(found)
    return found


def sets(job: Job, steps: Sequence[float] | Floats64) -> Floats64:
    """A set of coefficients of a job for each of these steps, in the kernel's order."""
    grad_scale = None if job.grad_scale is None else job.grad_scale.item()
    options, made = coefficients.as_numbers(job.options), np.zeros((len(steps), MAX_COEFFICIENTS))
    many = isinstance(steps, np.ndarray)  # all at once
    for rows, t in [(made, steps)] if many else zip(made, steps, strict=True):
        c = job.update.general_coefficients(t, options, OnHost if many else coefficients.Scalars, grad_scale)
        for column, value in enumerate(c.values()):
            rows[..., column] = value
    return made
