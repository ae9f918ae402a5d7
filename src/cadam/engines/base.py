"""The interface of engines, and the objects that they receive: slots, batches and refusals.

An engine is a place where updates run: C kernels, Triton kernels, list operations or plain tensor operations. A step is
planned as a list of batches for each engine (`cadam.engines.step_plan`); `Engine.run` updates them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, cached_property, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..native.loader import UnavailableError as UnavailableError
from ..native.structs import Words as Words
from ..native.tensor_snapshot import PLAIN as PLAIN
from .resolved_group import ResolvedGroup

if TYPE_CHECKING:
    from ..native.tensor_snapshot import TensorSnapshot
    from .cuda.sparse_grad import RowGrad
    from .replay import ReplayedStep, TrackedContainers


@dataclass(frozen=True)
class ParamSlot:
    """One parameter with its optimizer state, as the real tensors that an engine works on.

    A DTensor is represented by its local shard, a complex tensor by its real view.

    Attributes:
        param: The parameter.
        state: The buffers of the rule by name. Quantized moments are stored as quantized values.
        step: The step count, a 0-dim float32 tensor.
        counts: The alignment counters (aligned, touched, seen), or None if they are not tracked.
        name: How error messages refer to the parameter.
        moments: The storage of the moments, see `cadam.rules.moment_storage`.
        kinds: The kind of moment that each buffer is, `Rule.moments`.
        scales: The shared exponents of int8 moments: one per row (two-dimensional) or one per block.
        seed: The seed of the stochastic rounding of quantized moments and of bfloat16 parameters.
        row_steps: The step count of each row of a table, or None if all rows use `step`.
        row_updates: The number of updates of each row, if the confidence mask depends on it, else None. It is
            `row_steps` where there are both.
        last_steps: The step of each row's last update, if sparse updates are exact, else None.
        is_planned: Whether the state does not exist yet; missing buffers are placeholders on the meta device.
    """

    param: Tensor
    state: dict[str, Tensor]
    step: Tensor
    counts: Tensor | None
    name: str = "the parameter"
    moments: str = "float32"
    kinds: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0
    row_steps: Tensor | None = None
    row_updates: Tensor | None = None
    last_steps: Tensor | None = None
    is_planned: bool = False

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: at least float32, and at least that of the parameter and its buffers."""
        floats = [buffer.dtype for buffer in self.state.values() if buffer.is_floating_point()]
        return _promoted(self.param.dtype, *floats)

    @cached_property
    def storage(self) -> str:
        """The non-default storage options that the state has, as users write them; empty if there are none."""
        options = [f"moments={self.moments!r}"] if self.moments != "float32" else []
        if any(buffer.shape != self.param.shape for buffer in self.state.values()):
            options.append("second_moment='row'")
        if self.row_steps is not None:
            options.append("row_steps=True")
        if self.last_steps is not None:
            options.append("sparse_updates='exact'")
        return ", ".join(options)

    @property
    def row_counts(self) -> Tensor | None:
        """The number of updates of each row, if its coefficients or its mask depend on it, else None."""
        return self.row_updates if self.row_steps is None else self.row_steps

    @property
    def is_negated(self) -> bool:
        """Whether a tensor has torch's lazy negation bit. List and in-place operations cannot write to it."""
        return any(map(Tensor.is_neg, (self.param, *self.state.values())))

    @property
    def is_fake(self) -> bool:
        """Whether the parameter is on CUDA in a torch without CUDA, as under FakeTensorMode. It cannot be written."""
        return self.param.is_cuda and not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that an update reads or writes, except the gradient and the alignment counters."""
        yield self.param
        yield self.step
        yield from self.state.values()
        yield from self.scales.values()
        if self.row_counts is not None:
            yield self.row_counts
        if self.last_steps is not None:
            yield self.last_steps


@cache
def _promoted(*dtypes: torch.dtype) -> torch.dtype:
    return reduce(torch.promote_types, dtypes, torch.float32)


class RefusalKind(Enum):
    """The kinds of reasons for which an engine does not serve a parameter."""

    NOT_APPLICABLE = auto()
    """The engine is made for other devices, or for the other kind of gradient (dense or sparse)."""
    NOT_REQUESTED = auto()
    """An option forbids the engine, such as ``fused=False``."""
    UNAVAILABLE = auto()
    """This installation or machine lacks something that the engine needs."""
    UNSUPPORTED = auto()
    """The engine has no code for this dtype, memory layout or combination of options."""


@dataclass(frozen=True)
class Refusal:
    """The reason why an engine does not serve a parameter, as `Optimizer.explain` prints it."""

    kind: RefusalKind
    reason: str

    @classmethod
    def unsupported(cls, reason: str) -> Refusal:
        """Make a refusal of the most common kind."""
        return cls(RefusalKind.UNSUPPORTED, reason)

    def __str__(self) -> str:
        return self.reason


@dataclass
class KernelBatch:
    """Parameters of one group that an engine updates together.

    A batch is used for every step until the plan changes.

    Attributes:
        group: The resolved options of the group.
        slots: The parameters with their state.
        grads: The gradient of each slot during a step. Empty from the second step on for engines that find gradients
            through the parameters (`Engine.finds_grads`).
        grad_scale: The scale of the gradients, set by torch.amp.GradScaler.
        found_inf: A tensor that is nonzero if a gradient overflowed, set by torch.amp.GradScaler.
        overlaps: Whether parameters of this step share memory, so that they must be updated one after the other.
        grad_snapshot: The snapshot of gradients that the plan refreshes before each step, or None without a plan.
        grad_index: The positions of this batch's gradients in the snapshot.
        memo: Results that an engine derives from the slots and keeps as long as the batch.
    """

    group: ResolvedGroup
    slots: Sequence[ParamSlot]
    grads: Sequence[Tensor] = ()
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    overlaps: bool = False
    grad_snapshot: TensorSnapshot | None = None
    grad_index: Any = None
    memo: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[ParamSlot, Tensor]]:
        return iter(zip(self.slots, self.gradients(), strict=True))

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradient of each slot."""
        return self.grads or [slot.param.grad for slot in self.slots]  # type: ignore[misc]


class Engine:
    """A place where updates run. An engine receives all its batches of a step in one call."""

    name: str
    device: str | None = None
    """The only type of device that the engine serves; None if it serves any."""
    sparse = False
    """Whether the engine serves sparse gradients. If not, it serves dense ones."""
    fused = False
    """Whether ``fused=True`` asks for this engine. Fused engines hand raw addresses to compiled kernels."""
    rounds_stochastically = False
    """Whether the engine supports `stochastic_rounding`."""
    skips_overflow = False
    """Whether the kernels read `found_inf` on the device. If not, the optimizer reads it before the step."""
    finds_grads = False
    """Whether the engine finds gradients through the parameters, so that a batch need not list them."""
    takes_row_grads = False
    """Whether `update` also accepts gradients of rows in other forms than sparse tensors."""
    any_storage = False
    """Whether the engine serves every storage of moments. If not, `storage_refusal` decides."""
    traceable = False
    """Whether torch.compile can trace the engine."""

    def refusal(self, group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Refusal | None:
        """Return why this engine cannot serve a parameter with this gradient, or None if it can.

        Args:
            group: The resolved options of the parameter's group.
            slot: The parameter with its state.
            grad: The gradient; None if there is none yet, which counts as dense.
        """
        if self.sparse != (grad is not None and grad.is_sparse):
            kind = "sparse" if self.sparse else "dense"
            return Refusal(RefusalKind.NOT_APPLICABLE, f"serves {kind} gradients only")
        if self.device is not None and self.device != slot.param.device.type:
            return Refusal(RefusalKind.NOT_APPLICABLE, f"serves {self.device} only")
        if slot.storage and not self.any_storage:
            refusal = self.storage_refusal(slot)
            if refusal is not None:
                return refusal
        return self.input_refusal(group, slot, grad)

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        """Return why this engine cannot serve moments that are quantized or shared by a row, or None if it can."""
        return Refusal.unsupported(f"has no {slot.storage}")

    def input_refusal(self, group: ResolvedGroup, slot: ParamSlot, grad: Tensor | None) -> Refusal | None:
        """Return why this engine cannot serve this parameter, gradient and options, or None if it can.

        Called only for the device and the kind of gradient that the engine is made for.
        """
        return None

    def check(self, batches: Sequence[KernelBatch]) -> None:
        """Raise an error if an input is invalid. All engines check before any of them changes a parameter."""

    def run(self, batches: Sequence[KernelBatch]) -> None:
        """Count the step of every slot, and update parameters, buffers and alignment counters in place."""
        raise NotImplementedError

    def repetition(self, batches: Sequence[KernelBatch]) -> Callable[[], None] | None:
        """Return a function that runs the last step again, with new values in the memory of the same gradients.

        Returns:
            The function, which is valid as long as the plan, or None if the engine does not repeat this step.
        """
        return None

    def update(self, batch: KernelBatch, grads: Sequence[RowGrad]) -> None:
        """Count and update the slots of one batch with gradients of rows, if `takes_row_grads`."""
        raise NotImplementedError

    def record_step(self, work: Work, containers: TrackedContainers) -> ReplayedStep | Refusal:
        """Record the step that all engines just took together, so that it can be replayed; or return why not."""
        return Refusal.unsupported(f"the engine {self.name!r} does not replay steps")


Work: TypeAlias = Sequence[tuple[Engine, Sequence[KernelBatch]]]
"""A step: the batches of each engine."""


# Tensors ---------------------------------------------------------------------------------------------------------


def unreadable_memory(slot: ParamSlot) -> str | None:
    """Return why kernels, which receive raw addresses, must not touch a parameter or its state, or None if they may."""
    for tensor in (slot.param, slot.step, *slot.state.values()):
        if type(tensor) not in PLAIN or tensor.is_neg():
            kind = type(tensor).__name__ + " with a lazy sign" * tensor.is_neg()
            return f"the parameter, its state or its step count is not a plain tensor but a {kind}"
    for name, buffer in slot.state.items():
        if buffer.device != slot.param.device and not (slot.is_planned and buffer.is_meta):
            return f"{name} is on {buffer.device}, the parameter on {slot.param.device}"
    return None


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing()


def fills_memory(x: Tensor) -> bool:
    """Whether the elements fill one range of memory, each once, in any order of dimensions."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether the memory ranges of any two tensors overlap."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]  # Fake tensors have storages but no addresses.
    if len(set(storages)) == len(storages):
        return False
    ranges = []
    for storage, x in zip(storages, tensors, strict=True):
        if x.numel():
            reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            ranges.append((storage, x.storage_offset() * x.itemsize, (x.storage_offset() + reach) * x.itemsize))
    ranges.sort()
    return any(a[0] == b[0] and a[2] > b[1] for a, b in pairwise(ranges))
