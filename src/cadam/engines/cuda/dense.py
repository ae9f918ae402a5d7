"""The fused engine on CUDA: Triton kernels, generated from the rules, one launch for all but huge tensors.

A step reads and writes every value once. The kernels find the tensors through a table of addresses on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...codegen.kernel_spec import Structure
from ...native.tensor_snapshot import CHANGED, Watched, lay_out, watched_grads
from ...rules import Options, moment_storage
from ...rules.update import Update
from .. import coefficients
from ..base import PLAIN, Item, Job, Words, capturing
from ..row_layout import stay_for_graphs
from .launch import (
    TYPES,
    Channel,
    CudaEngine,
    Launch,
    StepNumbers,
    Stream,
    keep,
    kernel,
    lacks_storage,
    overflowed,
    refusal,
    stochastic,
    triton_type,
)

BLOCK = 1024  # elements of one program
# With coded moments a program is one warp, which needs no barriers to find the scale of the elements that share it. The
# limit of registers has but the rare parts of its code use memory instead: blocks that are not whole. A huge tensor is
# cut into chunks, of which neighbours are done at the same time by several programs: memory is faster where what all
# read at a time lies together.
CODED_WARPS = 1
CODED, HUGE_CODED = (2048, 2048, 64), (8192, 1024, 72)  # elements of a program, of a chunk, registers
HUGE = 1 << 24  # elements from which a tensor gets a launch of its own


class Cuda(CudaEngine):
    name = "cuda"
    finds_grads = True

    def lacks_storage(self, item: Item) -> str | None:
        return lacks_storage(item, rows=False)

    def lacks(self, update: Update, item: Item, grad: Tensor | None, options: Options) -> str | None:
        reason = refusal(item, options)
        if reason is not None or grad is None:
            return reason
        if grad.dtype not in TYPES:
            return f"has no kernels for gradients in {grad.dtype}"
        return None if type(grad) in PLAIN else f"serves plain gradients only, not {type(grad).__name__}"

    def stale(self, jobs: Sequence[Job]) -> bool:
        batches = [job.memo.get("cuda") for job in jobs]
        return any(made is None or any(batch.stale() for batch in made) for made in batches)

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if overflowed(job):
                continue
            batches = job.memo.get("cuda") or Batch.split(job)
            for batch in batches:
                batch.step(job)
                for item in batch.items if batch.coded else ():
                    stay_for_graphs(item)
                keep((batch.table, batch.owners, batch.numbers), batch.numbers.channel.device)
            if not any(batch.in_capture for batch in batches):  # what was made in a capture is filled at replays only
                job.memo["cuda"] = batches


@dataclass
class Batch:
    """Parameters of a job that are alike in device and dtypes, with what the kernels want to know about them."""

    positions: list[int]
    items: list[Item]
    grad_dtype: torch.dtype
    kernel: Any
    table: Tensor
    owners: Tensor
    """The parameter that each block belongs to, for those that share a launch."""
    numbers: StepNumbers
    launches: list[tuple[int, int, bool]]
    """Their blocks and, where it is for one parameter alone, which."""
    params: list[Tensor]
    lasting: Watched
    """Parameters, then buffers and step counts."""
    grads: Watched
    seed: int
    coded: bool
    in_capture: bool
    compiled: dict[Any, Launch] = field(default_factory=dict)

    @classmethod
    def split(cls, job: Job) -> list[Batch]:
        alike: dict[Any, list[int]] = {}
        for i, (item, grad) in enumerate(job):
            dtypes = (item.param.dtype, grad.dtype, *(buffer.dtype for buffer in item.state.values()))
            alike.setdefault((item.param.device, dtypes), []).append(i)
        return [cls.of(job, positions) for positions in alike.values()]

    @classmethod
    def of(cls, job: Job, positions: list[int]) -> Batch:
        items = [job.items[i] for i in positions]
        structure = Structure.of(job.update.rule, coefficients.as_numbers(job.options))
        params = [item.param for item in items]
        buffers = [[item.state[name] for item in items] for name in structure.buffers]
        sizes = np.array([p.numel() for p in params], np.int64)
        huge = sizes >= HUGE
        block, alone = (CODED[0], HUGE_CODED[0]) if structure.stored else (BLOCK, BLOCK)
        blocks = np.where(huge, 0, -(-sizes // block))
        counts = [0 if item.counts is None else item.counts.data_ptr() for item in items]
        columns = [addresses(params), counts, sizes, np.cumsum(blocks) - blocks, *map(addresses, buffers)]
        if structure.stored:
            scales = [[item.scales[name] for item in items] for name in structure.buffers if name in items[0].scales]
            columns += [*map(addresses, scales), np.array([item.seed for item in items], np.int64)]
        table = np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
        table[huge, 3] = 0
        owners = np.repeat(np.arange(len(items)), blocks)
        launches = [(int(blocks.sum()), 0, False)] if blocks.any() else []
        launches += [(-(-int(sizes[i]) // alone), i, True) for i in np.flatnonzero(huge).tolist()]
        device = params[0].device
        channel = Channel(device)
        state = [tensor for item in items for tensor in (*item.state.values(), *item.scales.values(), item.step)]
        numbers = StepNumbers(items, job.options, structure, device)
        return cls(
            positions,
            items,
            job.grads[positions[0]].dtype,
            kernel(structure, "dense"),
            channel.send(table.ravel()),
            channel.send(np.pad(owners, (0, len(owners) % 2)).astype(np.int32).view(np.int64)).view(torch.int32),
            numbers,
            launches,
            params,
            Watched([*params, *state]),
            watched_grads(params, [job.grads[i] for i in positions]),
            torch.initial_seed() & (2**63 - 1),
            bool(structure.stored),
            capturing(device),
        )

    def stale(self) -> bool:
        """Does anything not lie where it did, or are the gradients not what they were?"""
        return bool(self.lasting.look() or self.grads.look() & CHANGED or (self.grads.kinds < 0).any())

    def step(self, job: Job) -> None:
        grads, copies = self._laid_out(job)
        numbers = self.numbers
        numbers.stream.follow([self.table, self.owners, numbers.steps])
        with Stream.on(numbers.channel.device):
            sent = numbers.advance(job, grads)
            found_inf = job.found_inf if numbers.stay else None
            kind = (aligned(found_inf), stochastic(job.options))
            for blocks, i, alone in self.launches:
                launch = self.launch(alone, *kind)
                launch(
                    (blocks, 1, 1),
                    kind,
                    self.table,
                    sent.more,
                    sent.coefficients,
                    sent.stride,
                    self.owners,
                    i,
                    found_inf,
                    self.seed,
                )
        del copies  # the memory goes back to this stream
        torch.autograd.graph.increment_version(self.params)

    def launch(self, alone: bool, guard: bool | None, randomly: bool) -> Launch:
        key = (alone, guard, randomly)
        if key not in self.compiled:
            first = self.items[0]
            constants = {
                "PARAM": triton_type(first.param.dtype),
                "GRAD": triton_type(self.grad_dtype),
                "STATE": triton_type(next(iter(first.state.values()), first.param).dtype),
                "WORK": triton_type(first.work_dtype),
                "ALONE": alone,
                "COUNT": first.counts is not None,
                "GUARD": guard is not None,
                "STOCHASTIC": randomly and first.param.dtype == torch.bfloat16,
                "BLOCK": BLOCK,
                "UNIT": BLOCK,
                "CHUNK": BLOCK,
            }
            how: dict[str, Any] = {}
            if self.coded:
                block, chunk, registers = HUGE_CODED if alone else CODED
                constants |= {"BLOCK": block, "UNIT": moment_storage.BLOCK, "CHUNK": chunk}
                how = {"warps": CODED_WARPS, "registers": registers}
            self.compiled[key] = Launch(self.kernel, constants, **how)
        return self.compiled[key]

    def _laid_out(self, job: Job) -> tuple[Words, list[Tensor]]:
        """Where the gradients lie, as the parameters do: one that does not is copied."""
        kinds = self.grads.kinds
        if (kinds & self.lasting.kinds[: len(kinds)] & 1).all() and (kinds >= 0).all():
            return self.grads.addresses, []
        every = job.gradients()
        grads = [every[i] for i in self.positions]
        return lay_out(self.grads.addresses, range(len(grads)), grads, self.params)


def aligned(x: Tensor | None) -> bool | None:
    """Does it lie at a multiple of 16 bytes? Triton compiles for either; None if there is none."""
    return None if x is None else x.data_ptr() % 16 == 0


def addresses(tensors: Sequence[Tensor]) -> Words:
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
