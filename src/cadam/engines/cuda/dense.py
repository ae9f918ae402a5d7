"""The fused engine on CUDA: Triton kernels, generated from the rules, with one launch for all but huge tensors.

A step reads and writes every value once. The kernels find the tensors through a table of addresses on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...native.tensor_snapshot import align_layouts, snapshot_grads
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
    keep_for_graphs,
    kernel,
    kernel_refusal,
    overflowed,
    rounds_stochastically,
    storage_refusal,
    triton_type,
)

BLOCK = 1024
"""Number of elements that a program updates."""
HUGE = 1 << 24
"""Number of elements from which a tensor gets its own launch."""
QUANTIZED_WARPS = 1
"""Warps of a program with quantized moments. One warp finds the scale of a block without synchronization."""


@dataclass(frozen=True)
class QuantizedProgram:
    """The work of a program with quantized moments.

    A limited number of registers lets more programs run at once; only the code for incomplete blocks then uses memory
    instead. A huge tensor is divided into chunks such that several programs work on neighboring chunks at the same
    time, because memory is faster for accesses that are close to each other.

    Attributes:
        block: Elements of a program.
        chunk: Consecutive elements of a program.
        registers: Registers of a thread.
    """

    block: int
    chunk: int
    registers: int


SMALL_QUANTIZED, HUGE_QUANTIZED = QuantizedProgram(2048, 2048, 64), QuantizedProgram(8192, 1024, 72)


class Cuda(CudaEngine):
    """Dense gradients on CUDA, by Triton kernels."""

    name = "cuda"
    finds_grads = True

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        """Refuse moments and step counts that belong to rows."""
        return storage_refusal(slot, rows=False)

    def input_refusal(self, group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Refusal | None:
        """Refuse dtypes without kernels, and tensor subclasses."""
        refusal = kernel_refusal(group, slot)
        if refusal is not None or grad is None:
            return refusal
        if grad.dtype not in TYPES:
            return Refusal.unsupported(f"has no kernels for gradients in {grad.dtype}")
        if type(grad) not in PLAIN:
            return Refusal.unsupported(f"serves plain gradients only, not {type(grad).__name__}")
        return None

    def run(self, jobs: Sequence[KernelBatch]) -> None:
        """Update all batches."""
        for job in jobs:
            if overflowed(job):
                continue
            batches = job.memo.get("cuda") or Batch.split(job)
            for batch in batches:
                batch.step(job)
                for slot in batch.slots if batch.is_quantized else ():
                    stay_for_graphs(slot)
                keep_for_graphs((batch.table, batch.owners, batch.numbers), batch.numbers.channel.device)
            if not any(batch.in_capture for batch in batches):  # memory of a capture is filled only when it is replayed
                job.memo["cuda"] = batches


@dataclass
class Batch:
    """Parameters with the same device and dtypes, in the form that the kernels need.

    Attributes:
        positions: The positions of the parameters among the slots of the job.
        slots: The parameters with their state.
        grad_dtype: The dtype of the gradients.
        kernel: The Triton kernel.
        table: Addresses and sizes of all tensors, on the device.
        owners: The parameter that each block belongs to, for parameters that share a launch.
        numbers: The step counts and coefficients.
        launches: The blocks of each launch, the index of the parameter, and whether it has the launch alone.
        params: The parameters.
        is_quantized: Whether the moments are quantized.
        in_capture: Whether the batch was made while a CUDA graph was captured.
        compiled: The launches that were compiled, by their constants.
    """

    positions: list[int]
    slots: list[ParamSlot]
    grad_dtype: torch.dtype
    kernel: Any
    table: Tensor
    owners: Tensor
    numbers: StepNumbers
    launches: list[tuple[int, int, bool]]
    params: list[Tensor]
    is_quantized: bool
    in_capture: bool
    compiled: dict[Any, Launch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_contiguous = all(map(Tensor.is_contiguous, self.params))

    @classmethod
    def split(cls, job: KernelBatch) -> list[Batch]:
        """Divide the parameters of a job into batches."""
        alike: dict[Any, list[int]] = {}
        for i, (slot, grad) in enumerate(job):
            dtypes = (slot.param.dtype, grad.dtype, *(buffer.dtype for buffer in slot.state.values()))
            alike.setdefault((slot.param.device, dtypes), []).append(i)
        return [cls.of(job, positions) for positions in alike.values()]

    @classmethod
    def of(cls, job: KernelBatch, positions: list[int]) -> Batch:
        """Make a batch of the parameters at these positions."""
        slots, grad = [job.slots[i] for i in positions], job.gradients()[positions[0]]
        spec = job.group.kernel_spec
        params = [slot.param for slot in slots]
        buffers = [[slot.state[name] for slot in slots] for name in spec.buffers]
        sizes = np.array([p.numel() for p in params], np.int64)
        huge = sizes >= HUGE
        block, huge_block = (SMALL_QUANTIZED.block, HUGE_QUANTIZED.block) if spec.storages else (BLOCK, BLOCK)
        blocks = np.where(huge, 0, -(-sizes // block))
        counts = [0 if slot.counts is None else slot.counts.data_ptr() for slot in slots]
        first_blocks = np.where(huge, 0, np.cumsum(blocks) - blocks)
        columns = [addresses(params), counts, sizes, first_blocks, *map(addresses, buffers)]
        if spec.storages:
            scales = [[slot.scales[name] for slot in slots] for name in spec.buffers if name in slots[0].scales]
            columns += map(addresses, scales)
        columns.append([slot.seed for slot in slots])
        table = np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
        owners = np.repeat(np.arange(len(slots)), blocks)
        launches = [(int(blocks.sum()), 0, False)] if blocks.any() else []
        launches += [(-(-int(sizes[i]) // huge_block), i, True) for i in np.flatnonzero(huge).tolist()]
        device = params[0].device
        channel = Channel(device)
        return cls(
            positions,
            slots,
            grad.dtype,
            kernel(spec, "dense"),
            channel.send(table.ravel()),
            channel.send(np.pad(owners, (0, len(owners) % 2)).astype(np.int32).view(np.int64)).view(torch.int32),
            StepNumbers(slots, job.group, spec, device),
            launches,
            params,
            bool(spec.storages),
            capturing(device),
        )

    @property
    def state(self) -> list[Tensor]:
        """Buffers, scales and step counts of all parameters."""
        return [tensor for slot in self.slots for tensor in (*slot.state.values(), *slot.scales.values(), slot.step)]

    def step(self, job: KernelBatch) -> None:
        """Count a step and update the parameters."""
        grads, copies = self._gradients(job)
        numbers = self.numbers
        numbers.stream.follow([self.table, self.owners, numbers.steps])
        with Stream.on(numbers.channel.device):
            sent = numbers.advance(job, grads)
            found_inf = job.found_inf if numbers.on_device else None
            kind = (is_aligned(found_inf), rounds_stochastically(job.group))
            for blocks, i, alone in self.launches:
                launch = self.launch(alone, *kind)
                arguments = (self.table, sent.more, sent.coefficients, sent.stride, self.owners, i, found_inf)
                launch((blocks, 1, 1), kind, *arguments)
        del copies  # after the launches, other work on this stream may reuse the memory
        torch.autograd.graph.increment_version(self.params)

    def launch(self, alone: bool, guard: bool | None, stochastic: bool) -> Launch:
        """Return the kernel with its constants.

        Args:
            alone: Whether the launch is for one huge parameter.
            guard: Whether `found_inf` is aligned; None if there is none.
            stochastic: Whether bfloat16 parameters are rounded stochastically.
        """
        key = (alone, guard, stochastic)
        if key not in self.compiled:
            first = self.slots[0]
            constants = {
                "PARAM": triton_type(first.param.dtype),
                "GRAD": triton_type(self.grad_dtype),
                "STATE": triton_type(next(iter(first.state.values()), first.param).dtype),
                "WORK": triton_type(first.work_dtype),
                "SINGLE_TENSOR": alone,
                "COUNT": first.counts is not None,
                "GUARD": guard is not None,
                "STOCHASTIC": stochastic and first.param.dtype == torch.bfloat16,
                "BLOCK": BLOCK,
                "UNIT": BLOCK,
                "CHUNK": BLOCK,
            }
            resources: dict[str, Any] = {}
            if self.is_quantized:
                program = HUGE_QUANTIZED if alone else SMALL_QUANTIZED
                constants |= {"BLOCK": program.block, "UNIT": moment_storage.BLOCK_SIZE, "CHUNK": program.chunk}
                resources = {"warps": QUANTIZED_WARPS, "registers": program.registers}
            self.compiled[key] = Launch(self.kernel, constants, **resources)
        return self.compiled[key]

    def _gradients(self, job: KernelBatch) -> tuple[Words, list[Tensor]]:
        """Return the addresses of the gradients, and copies of those that have another memory layout."""
        snapshot, index = job.grad_snapshot, job.grad_index
        if snapshot is None:
            grads = [job.gradients()[i] for i in self.positions]
            snapshot, positions = snapshot_grads(self.params, grads), np.arange(len(grads))
        else:
            positions = index[self.positions]
        found, kinds = snapshot.addresses[positions], snapshot.kinds[positions]
        if (kinds & 1).all() and (kinds >= 0).all() and self.is_contiguous:
            return found, []
        grads = [job.gradients()[i] for i in self.positions]
        return align_layouts(found, range(len(grads)), grads, self.params)


def is_aligned(x: Tensor | None) -> bool | None:
    """Whether a tensor is aligned to 16 bytes, which Triton compiles for; None if there is no tensor."""
    return None if x is None else x.data_ptr() % 16 == 0


def addresses(tensors: Sequence[Tensor]) -> Words:
    """Return the addresses of tensors."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
