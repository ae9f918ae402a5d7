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

from ...native.tensor_snapshot import TensorSnapshot, align_layouts, snapshot_grads
from ...rules import moment_storage
from ..base import PLAIN, KernelBatch, ParamSlot, Refusal, Words, capturing
from ..resolved_group import ResolvedGroup
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
    kernel_refusal,
    overflowed,
    stochastic,
    storage_refusal,
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

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        return storage_refusal(slot, rows=False)

    def input_refusal(self, group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Refusal | None:
        reason = kernel_refusal(group, slot)
        if reason is not None or grad is None:
            return reason
        if grad.dtype not in TYPES:
            return Refusal.unsupported(f"has no kernels for gradients in {grad.dtype}")
        if type(grad) not in PLAIN:
            return Refusal.unsupported(f"serves plain gradients only, not {type(grad).__name__}")
        return None

    def run(self, jobs: Sequence[KernelBatch]) -> None:
        for job in jobs:
            if overflowed(job):
                continue
            batches = job.memo.get("cuda") or Batch.split(job)
            for batch in batches:
                batch.step(job)
                for slot in batch.slots if batch.coded else ():
                    stay_for_graphs(slot)
                keep((batch.table, batch.owners, batch.numbers), batch.numbers.channel.device)
            if not any(batch.in_capture for batch in batches):  # what was made in a capture is filled at replays only
                job.memo["cuda"] = batches


@dataclass
class Batch:
    """Parameters of a job that are alike in device and dtypes, with what the kernels want to know about them."""

    positions: list[int]
    slots: list[ParamSlot]
    grad_dtype: torch.dtype
    kernel: Any
    table: Tensor
    owners: Tensor
    """The parameter that each block belongs to, for those that share a launch."""
    numbers: StepNumbers
    launches: list[tuple[int, int, bool]]
    """Their blocks and, where it is for one parameter alone, which."""
    params: list[Tensor]
    lasting: TensorSnapshot
    """Parameters, then buffers and step counts."""
    grads: TensorSnapshot
    seed: int
    coded: bool
    in_capture: bool
    compiled: dict[Any, Launch] = field(default_factory=dict)

    @classmethod
    def split(cls, job: KernelBatch) -> list[Batch]:
        alike: dict[Any, list[int]] = {}
        for i, (slot, grad) in enumerate(job):
            dtypes = (slot.param.dtype, grad.dtype, *(buffer.dtype for buffer in slot.state.values()))
            alike.setdefault((slot.param.device, dtypes), []).append(i)
        return [cls.of(job, positions) for positions in alike.values()]

    @classmethod
    def of(cls, job: KernelBatch, positions: list[int]) -> Batch:
        slots, grads = [job.slots[i] for i in positions], job.gradients()
        spec = job.group.kernel_spec
        params = [slot.param for slot in slots]
        buffers = [[slot.state[name] for slot in slots] for name in spec.buffers]
        sizes = np.array([p.numel() for p in params], np.int64)
        huge = sizes >= HUGE
        block, alone = (CODED[0], HUGE_CODED[0]) if spec.storages else (BLOCK, BLOCK)
        blocks = np.where(huge, 0, -(-sizes // block))
        counts = [0 if slot.counts is None else slot.counts.data_ptr() for slot in slots]
        columns = [addresses(params), counts, sizes, np.cumsum(blocks) - blocks, *map(addresses, buffers)]
        if spec.storages:
            scales = [[slot.scales[name] for slot in slots] for name in spec.buffers if name in slots[0].scales]
            columns += [*map(addresses, scales), np.array([slot.seed for slot in slots], np.int64)]
        table = np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
        table[huge, 3] = 0
        owners = np.repeat(np.arange(len(slots)), blocks)
        launches = [(int(blocks.sum()), 0, False)] if blocks.any() else []
        launches += [(-(-int(sizes[i]) // alone), i, True) for i in np.flatnonzero(huge).tolist()]
        device = params[0].device
        channel = Channel(device)
        state = [tensor for slot in slots for tensor in (*slot.state.values(), *slot.scales.values(), slot.step)]
        numbers = StepNumbers(slots, job.group, spec, device)
        return cls(
            positions,
            slots,
            grads[positions[0]].dtype,
            kernel(spec, "dense"),
            channel.send(table.ravel()),
            channel.send(np.pad(owners, (0, len(owners) % 2)).astype(np.int32).view(np.int64)).view(torch.int32),
            numbers,
            launches,
            params,
            TensorSnapshot([*params, *state], swappable=params),
            snapshot_grads(params, [grads[i] for i in positions]),
            torch.initial_seed() & (2**63 - 1),
            bool(spec.storages),
            capturing(device),
        )

    def step(self, job: KernelBatch) -> None:
        self.grads.update()
        grads, copies = self._laid_out(job)
        numbers = self.numbers
        numbers.stream.follow([self.table, self.owners, numbers.steps])
        with Stream.on(numbers.channel.device):
            sent = numbers.advance(job, grads)
            found_inf = job.found_inf if numbers.stay else None
            kind = (aligned(found_inf), stochastic(job.group))
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
            first = self.slots[0]
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
                constants |= {"BLOCK": block, "UNIT": moment_storage.BLOCK_SIZE, "CHUNK": chunk}
                how = {"warps": CODED_WARPS, "registers": registers}
            self.compiled[key] = Launch(self.kernel, constants, **how)
        return self.compiled[key]

    def _laid_out(self, job: KernelBatch) -> tuple[Words, list[Tensor]]:
        """Where the gradients lie, as the parameters do: one that does not is copied."""
        kinds = self.grads.kinds
        if (kinds & self.lasting.kinds[: len(kinds)] & 1).all() and (kinds >= 0).all():
            return self.grads.addresses, []
        every = job.gradients()
        grads = [every[i] for i in self.positions]
        return align_layouts(self.grads.addresses, range(len(grads)), grads, self.params)


def aligned(x: Tensor | None) -> bool | None:
    """Does it lie at a multiple of 16 bytes? Triton compiles for either; None if there is none."""
    return None if x is None else x.data_ptr() % 16 == 0


def addresses(tensors: Sequence[Tensor]) -> Words:
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
