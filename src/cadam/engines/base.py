"""What an engine is, and what it is given: the parameters of a group that take the same update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, cached_property, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..native.loader import UnavailableError as UnavailableError
from ..native.structs import Words as Words
from ..native.tensor_snapshot import PLAIN as PLAIN
from ..rules import Options
from ..rules.update import Update

if TYPE_CHECKING:
    from .cuda.sparse import RowGrad


@dataclass(frozen=True)
class ParamSlot:
    """One parameter with what belongs to it, as plain real tensors.

    A DTensor comes as its local shard, a complex tensor as its real view.
    `counts` are the three alignment counters (aligned, touched, seen), or None when nobody counts.
    """

    param: Tensor
    state: dict[str, Tensor]
    step: Tensor
    counts: Tensor | None
    name: str = "the parameter"
    moments: str = "float32"
    """How they are stored, see `cadam.rules.moment_storage`. The `state` holds their codes."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """What kind of moment each buffer is, as the rule says."""
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    """The shared exponents of buffers that are coded in a byte: one a row, two-dimensional, or one a block."""
    seed: int = 0
    """Of the rounding of coded moments."""
    row_steps: Tensor | None = None
    """Step counts of rows, or None where all go by the one of the parameter."""
    planned: bool = False
    """Is its state yet to be made? Then missing buffers are stand-ins without memory."""

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: that of the parameter and its buffers, and float32 at the least."""
        floats = [buffer.dtype for buffer in self.state.values() if buffer.is_floating_point()]
        return _promoted(self.param.dtype, *floats)

    @cached_property
    def storage(self) -> str:
        """How the moments are kept, as options say it; empty if every element has its own, in plain numbers."""
        said = [f"moments={self.moments!r}"] if self.moments != "float32" else []
        if any(buffer.shape != self.param.shape for buffer in self.state.values()):
            said.append("second_moment='row'")
        return ", ".join([*said, *(["row_steps=True"] if self.row_steps is not None else [])])

    @property
    def is_negated(self) -> bool:
        """Is a tensor negated lazily? List operations do not write to such a one, nor does what works in place."""
        return any(map(Tensor.is_neg, (self.param, *self.state.values())))

    @property
    def is_stand_in(self) -> bool:
        """Is it on CUDA in a torch without? So can be tensors of a FakeTensorMode, to which nothing can be copied."""
        return self.param.is_cuda and not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]


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
    """Items of one group, the update they take and the options that its scalars come from.

    A batch lives on while nothing but gradients and numbers change from step to step. What an engine works out
    about its slots may be kept in `memo` for that long. `grads` are there during a step only, and from the second
    step on not for an engine that looks at gradients by itself.
    """

    update: Update
    options: Options
    slots: Sequence[ParamSlot]
    grads: Sequence[Tensor] = ()
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[ParamSlot, Tensor]]:
        return iter(zip(self.slots, self.gradients(), strict=True))

    def gradients(self) -> Sequence[Tensor]:
        return self.grads or [slot.param.grad for slot in self.slots]  # type: ignore[misc]


class Engine:
    """Where updates run. An engine gets all its batches of a step in one call."""

    name: str
    device: str | None = None
    """The only type of device that it serves; None if it serves any."""
    sparse = False
    """Does it serve sparse gradients, and not dense ones?"""
    fused = False
    """Is it what ``fused=True`` asks for?"""
    rounds_stochastically = False
    """Can it?"""
    skips_overflow = False
    """Does it look at `found_inf` itself, on the device? If not, the optimizer reads it before the step."""
    finds_grads = False
    """Does it find gradients by itself, through the parameters?"""
    takes_row_grads = False
    """Does it take gradients of rows that are no sparse tensors, by `update`?"""
    any_storage = False
    """Whether it serves every way to store moments. If not, `storage_refusal` decides."""
    traceable = False
    """Can torch.compile look through it?"""

    def refusal(self, update: Update, slot: ParamSlot, grad: Tensor | None, options: Options) -> Refusal | None:
        """Return why this engine cannot serve a parameter with this gradient, or None if it can.

        Without a gradient, a dense one is expected.
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
        return self.input_refusal(update, slot, grad, options)

    def storage_refusal(self, slot: ParamSlot) -> Refusal | None:
        """Return why this engine cannot serve moments that are quantized or shared by a row, or None if it can."""
        return Refusal.unsupported(f"has no {slot.storage}")

    def input_refusal(self, update: Update, slot: ParamSlot, grad: Tensor | None, options: Options) -> Refusal | None:
        """Return why this engine cannot serve this parameter, gradient and options, or None if it can.

        Called only for the device and the kind of gradient that the engine is made for.
        """
        return None

    def stale(self, batches: Sequence[KernelBatch]) -> bool:
        """Did a tensor change in a way that the choice of this engine, or its memo, depends on?"""
        for batch in batches:
            for slot, grad in batch:
                shape = slot.param.shape
                if not slot.storage and any(buffer.shape != shape for buffer in slot.state.values()):
                    return True
                if grad.device != slot.param.device:
                    return True
                if not grad.is_sparse and (grad.shape != shape or grad.is_complex()):
                    return True
        return False

    def check(self, batches: Sequence[KernelBatch]) -> None:
        """Raise if an input is bad. All engines check before any of them runs."""

    def run(self, batches: Sequence[KernelBatch]) -> None:
        """Count the step of every slot, and update parameters, buffers and counters in place."""
        raise NotImplementedError

    def update(self, batch: KernelBatch, grads: Sequence[RowGrad]) -> None:
        """The same with gradients of rows, where `takes_row_grads`."""
        raise NotImplementedError

    def record_step(self, work: Work, containers: TrackedContainers) -> ReplayedStep | Refusal:
        """Record the step that all engines just took together, so that it can be replayed; or return why not."""
        return Refusal.unsupported(f"the engine {self.name!r} does not replay steps")


Work: TypeAlias = Sequence[tuple[Engine, Sequence[KernelBatch]]]
"""A step: its batches by engine."""


# Step replay -----------------------------------------------------------------------------------------------------


class ReplayedStep(Protocol):
    """A step that can be taken again in one call, while nothing but gradients and numbers changes."""

    def step(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Take it. False: something else has changed, and nothing was done."""
        ...

    def update_rows(self, grad: RowGrad, step: int) -> bool:
        """The same for a single table that is given its gradient and step count."""
        ...

    def renew(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """After a step in the usual way: go by how things are now. False if this will not serve again."""
        ...


@dataclass(frozen=True)
class TrackedContainers:
    """The dicts and lists that must hold the very objects they did for a replayed step, apart from learning rates."""

    groups: list[dict[str, Any]]
    state: Mapping[Tensor, Any]
    states: Sequence[dict[str, Any]] = ()
    """Of the parameters that are stepped."""
    absent: Sequence[Tensor] = ()
    """Parameters that have no gradient."""


class ReplayController:
    """Records a step for replay once steps repeat, and keeps it while it still fits."""

    def __init__(self) -> None:
        self.ready: ReplayedStep | None = None
        self.reason = "no step was like the one before"
        """Why there is none."""
        self.steps, self.attempts = 0, 0

    def after_step(self, work: Work, containers: Callable[[], TrackedContainers]) -> None:
        """After a step in the usual way: have the next one ready, if it is going to be like this one."""
        ready, self.ready = self.ready, None  # what is interrupted here must not be used again
        if ready is not None:
            held = containers()
            if ready.renew(held.groups, held.state):
                self.ready = ready
            else:
                self.reason = "the last step was on another stream, or with other groups, options or memory"
            return
        self.steps += 1
        if work and self.steps > 1 << self.attempts:  # it takes a while: the less often, the less it helped
            self.attempts += 1
            made = work[0][0].record_step(work, containers())
            if isinstance(made, Refusal):
                self.reason = made.reason
            else:
                self.ready = made


# Tensors ---------------------------------------------------------------------------------------------------------


def unreadable_memory(slot: ParamSlot) -> str | None:
    """Why kernels must not touch a parameter, its state or its step count: they are handed bare addresses."""
    for tensor in (slot.param, slot.step, *slot.state.values()):
        if type(tensor) not in PLAIN or tensor.is_neg():
            kind = type(tensor).__name__ + " with a lazy sign" * tensor.is_neg()
            return f"the parameter, its state or its step count is no plain tensor but {kind}"
    for name, buffer in slot.state.items():
        if buffer.device != slot.param.device and not (slot.planned and buffer.is_meta):
            return f"{name} is on {buffer.device}, the parameter on {slot.param.device}"
    return None


def capturing(device: torch.device) -> bool:
    """Is a CUDA graph being captured there?"""
    return device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing()


def fills_memory(x: Tensor) -> bool:
    """Do the elements fill a stretch of memory, each once, in whatever order of dimensions?"""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Do two of them reach into the same stretch of memory?"""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]  # not addresses: fake tensors have none
    if len(set(storages)) == len(storages):
        return False
    stretches = []
    for storage, x in zip(storages, tensors, strict=True):
        if x.numel():
            reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            stretches.append((storage, x.storage_offset() * x.itemsize, (x.storage_offset() + reach) * x.itemsize))
    stretches.sort()
    return any(one[0] == next_[0] and one[2] > next_[1] for one, next_ in pairwise(stretches))
