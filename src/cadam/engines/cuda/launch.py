"""What the engines on CUDA share: kernels and their launches, what they can serve, and how numbers get to the device.

Gradients move from step to step: their addresses go to the device together with the coefficients, in one transfer that
nobody waits for. Where steps are counted on the device (`capturable`), so are the coefficients computed there, and a
CUDA graph can hold the step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...codegen import triton_source as triton_source
from ...codegen.kernel_spec import KernelSpec
from ...codegen.trace import Trace, Value
from ...rules.moment_storage import MAX_EXACT_STEP
from .. import moment_state, quantization
from ..base import (
    Engine,
    KernelBatch,
    ParamSlot,
    Refusal,
    RefusalKind,
    Words,
    Work,
    capturing,
    fills_memory,
    unreadable_memory,
)
from ..replay import ReplayedStep, TrackedContainers
from ..resolved_group import ResolvedGroup, read_number

WARPS = 4
THREADS = 32  # of a program that computes coefficients
TYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}

# What captured graphs read at every replay. Nothing tells when a graph is gone, so it is kept for good: a few
# kilobytes for each capture.
_captured: list[Any] = []


# Kernels -------------------------------------------------------------------------------------------------------


@cache
def kernel(spec: KernelSpec, kind: str) -> Any:
    made = triton_source.module(spec.name, triton_source.source(spec))
    return getattr(made, f"{spec.name}_{kind}")


@cache
def coefficients_launch(name: str, source: str, more: bool, guarded: bool, early: bool, columns: int) -> Launch:
    """The kernel that counts steps and computes coefficients, of which each thread does those of a parameter.

    `early`: does the next kernel wait for them itself?
    """
    made = getattr(triton_source.module(f"{name}_coefficients", source), f"{name}_coefficients")
    constants = {"MORE": more, "GUARD": guarded, "EARLY": early, "COLUMNS": columns, "BLOCK": THREADS}
    return Launch(made, constants, THREADS // 32)


@cache
def begins_early(device: torch.device) -> bool:
    """Can a kernel on this device begin before the last one has ended, and wait for it later, also in a graph?"""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:  # it has another name
        return False
    return version.value >= 12_030 and _direct()


@cache
def _direct() -> bool:
    """May a compiled kernel be launched as it is, or early? Known of these versions of Triton only."""
    import triton  # type: ignore[import-not-found,unused-ignore]

    return str(triton.__version__).startswith(("3.6.", "3.7."))


@dataclass
class Launch:
    """A kernel and its constants.

    Triton looks at all arguments in every launch to find out which compiled version serves them. They hardly ever
    change here, so the version is kept: `kind` stands for whatever about the arguments could call for another.
    """

    kernel: Any
    constants: dict[str, Any]
    warps: int = WARPS
    registers: int | None = None
    """At most, of a thread; None leaves it to the compiler."""
    early: bool = False
    """May it begin before the kernel in front of it has ended?"""
    compiled: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rest = tuple(self.constants.values())

    def __call__(self, grid: tuple[int, int, int], kind: Any, *args: Any) -> None:
        compiled = self.compiled.get(kind)
        if compiled is not None:
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *self.rest
            )
            return
        # Without contraction to fused multiply-adds the result is the reference's, bit for bit, and no slower.
        how: dict[str, Any] = {"num_warps": self.warps, "maxnreg": self.registers, "enable_fp_fusion": False}
        if self.early:
            how["launch_pdl"] = True
        compiled = self.kernel[grid](*args, **self.constants, **how)
        if compiled is not None and _direct():
            self.compiled[kind] = compiled


@cache
def triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

    return tl.uint8 if dtype == torch.uint8 else getattr(tl, TYPES[dtype])


# What the engines can serve ------------------------------------------------------------------------------------


def storage_refusal(slot: ParamSlot, rows: bool) -> Refusal | None:
    """Return why the kernels cannot serve moments that are stored this way, or None if they can."""
    reason = _unsupported_storage(slot, rows)
    return None if reason is None else Refusal.unsupported(reason)


def _unsupported_storage(slot: ParamSlot, rows: bool) -> str | None:
    if not rows and slot.row_steps is not None:
        return "rows count their own steps, and the gradient is dense"
    if not rows and "second_moment" in slot.storage:
        return "the second moment is that of rows, and the gradient is dense"
    if (reason := moment_state.scale_mismatch(slot, rows)) is not None:
        return reason
    if not rows and any(not scales.is_contiguous() for scales in slot.scales.values()):
        return "the scales of its moments are not contiguous"
    if rows and not moment_state.has_uniform_row_strides(slot):
        return "the rows of its moments, or of their scales, do not all lie in memory in the same way"
    return None


class CudaEngine(Engine):
    """What both engines on CUDA have in common."""

    fused = True
    rounds_stochastically = True
    skips_overflow = True
    device = "cuda"

    def record_step(self, work: Work, containers: TrackedContainers) -> ReplayedStep | Refusal:
        from . import step_replay

        return step_replay.record(work, containers)


@cache
def missing_requirement(device: torch.device) -> str | None:
    """Return what this installation or this device lacks for the kernels, or None if nothing is missing."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return None
    if torch.version.cuda is None:
        return "needs a torch that is built for CUDA"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs compute capability 8.0 or later, and {device} has {major}.{minor}"


def kernel_refusal(group: ResolvedGroup, slot: ParamSlot, rows: bool = False) -> Refusal | None:
    """Return why the kernels for sparse (`rows`) or dense gradients cannot serve a parameter, or None if they can."""
    for option, unwanted in (("fused", False), ("foreach", True), ("differentiable", True)):
        if group.options[option] is unwanted:
            return Refusal(RefusalKind.NOT_REQUESTED, f"{option}={unwanted} was asked for")
    missing = missing_requirement(slot.param.device)
    if missing:
        return Refusal(RefusalKind.UNAVAILABLE, missing)
    reason = unreadable_memory(slot) or _unsupported_tensors(group, slot, rows)
    return None if reason is None else Refusal.unsupported(reason)


def _unsupported_tensors(group: ResolvedGroup, slot: ParamSlot, rows: bool) -> str | None:
    param = slot.param
    by_row = {name for name, buffer in slot.state.items() if moment_state.is_row_moment(buffer, param)}
    dtypes = {buffer.dtype for name, buffer in slot.state.items() if name not in by_row}
    wanted = quantization.QUANTIZED_DTYPES.get(slot.moments)
    if wanted is not None and dtypes - {wanted}:
        return f"keeps moments={slot.moments!r} in {wanted}, and these are {dtypes}"
    for dtype in (param.dtype, *dtypes - {wanted}):
        if dtype not in TYPES:
            return f"has no kernels for {dtype}"
    if len(dtypes) > 1:
        return "the buffers of the state differ in dtype"
    if not fills_memory(param):
        return "the parameter's elements overlap or have gaps between them"
    in_records = moment_state.quantized_buffers(slot) if rows else ()
    for name, buffer in slot.state.items():
        alike = buffer.stride() == param.stride() or name in in_records
        if name not in by_row and (buffer.shape != param.shape or not alike):
            return f"{name} does not lie in memory as the parameter does"
    where = param.device if group.keeps_scalars_on_device else torch.device("cpu")
    if slot.step.device != where or slot.step.dtype != torch.float32:
        return f"counts steps in float32 on {where}, and this count is {slot.step.dtype} on {slot.step.device}"
    return None


def overflowed(job: KernelBatch) -> bool:
    """Is this known to be a step that an overflow forbids? Counts on the host cannot wait for the device to tell."""
    if job.found_inf is None or job.group.keeps_scalars_on_device:
        return False
    return bool(job.found_inf.item())


def stochastic(group: ResolvedGroup) -> bool:
    return bool(group.options["stochastic_rounding"])


# To the device -------------------------------------------------------------------------------------------------


def keep(what: Any, device: torch.device) -> None:
    """Keep what a graph that is being captured will read."""
    if capturing(device):
        _captured.append(what)


@dataclass
class Channel:
    """Brings numbers to a device without waiting for it."""

    device: torch.device
    spare: Tensor | None = None
    """Pinned memory for a capture: it cannot be allocated while one is under way."""

    def send(self, *parts: Any, capturable: bool = False) -> Tensor:
        """Arrays of 8-byte numbers, one after the other in one tensor that kernels can read.

        It is on the device, or in a capture of what is `capturable` in pinned memory: the first kernel of a graph
        reads that faster than it is copied.
        """
        size = sum(map(len, parts))
        if self.device.type == "cpu":
            return _filled(_host(size), parts)
        if not capturing(self.device):
            if capturable and (self.spare is None or len(self.spare) != size):
                self.spare = _host(size, pinned=True)
            # The allocator of pinned memory sees to it that none is handed out again before it has been read.
            host = _host(size, pinned=True)
            return _filled(host, parts).to(self.device, non_blocking=True)
        if self.spare is not None and len(self.spare) == size:
            host, self.spare = self.spare, None
            _captured.append(host)
            return _filled(host, parts)
        # As arguments of kernels, which a graph remembers by itself.
        sent = torch.zeros(size, dtype=torch.int64, device=self.device)
        torch._foreach_add_(list(sent.unbind()), _filled(_host(size), parts).tolist())
        return sent


def _host(size: int, pinned: bool = False) -> Tensor:
    """Memory of the host, whatever the user's default device is."""
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=pinned)


def mark_in_use(pinned: Tensor, device: torch.device) -> None:
    """Tell torch that the current stream uses this memory: after release it is handed out only when the stream is done.

    Torch does not see what kernels and the driver do with it, but it sees a copy of its own.
    """
    if device.type == "cuda":
        torch.empty_like(pinned, device=device).copy_(pinned, non_blocking=True)


def _filled(host: Tensor, parts: Sequence[Any]) -> Tensor:
    numbers, start = host.numpy(), 0
    for part in parts:
        if len(part):
            numbers[start : start + len(part)] = part.view(np.int64)
            start += len(part)
    return host


def next_step(step: float) -> float:
    """The step count after this one, as `codes.next_step` has it."""
    return step + 1 if step < MAX_EXACT_STEP else float(np.nextafter(np.float32(step), np.float32(np.inf)))


class StepNumbers:
    """The step counts of some parameters on one device, and the coefficients that come from them."""

    def __init__(
        self, slots: Sequence[ParamSlot], group: ResolvedGroup, spec: KernelSpec, device: torch.device
    ) -> None:
        self.names = spec.coefficients
        self.columns = -(-(1 + len(self.names)) // 16) * 16
        self.size = len(slots)
        self.stay = group.keeps_scalars_on_device
        self.channel = Channel(device)
        steps = [slot.step for slot in slots]
        if self.stay:
            self.steps = Channel(device).send(np.fromiter(map(Tensor.data_ptr, steps), np.int64, len(steps)))
        else:
            # One memory for all counts, so that counting is one operation. The tensors stay the same objects.
            self.steps = torch.stack(steps)
            for step, place in zip(steps, self.steps.unbind(), strict=True):
                step.data = place
        self.counts = None if self.stay else self.steps.numpy()
        self.stream = Stream.current(device)

    def advance(self, job: KernelBatch, more: Words, early: bool = False) -> Sent:
        """Count one step; bring its coefficients to the device, and `more` with them.

        `early`: if a kernel makes them, does the next one wait for it itself?
        """
        return self._on_device(job, more, early) if self.stay else self._on_host(job, more)

    def _on_host(self, job: KernelBatch, more: Words) -> Sent:
        steps = self.counts
        if steps is None:
            raise AssertionError("these steps are counted on the device")
        if steps.max() < MAX_EXACT_STEP:
            steps += 1
        else:
            steps[:] = [*map(next_step, steps.tolist())]
        different, owner = steps[:1], None
        if len(steps) > 1 and not (steps == steps[0]).all():
            different, owner = np.unique(steps, return_inverse=True)
        scale = read_number(job.grad_scale)
        rows = np.empty((len(different), self.columns))
        later: list[tuple[int, int, Tensor]] = []
        for k, t in enumerate(different.tolist()):
            values = [t, *job.group.kernel_coefficients(t, scale).values()]
            for j, value in enumerate(values):
                if isinstance(value, Tensor):
                    later.append((k, j, value))
                    values[j] = 0.0
            rows[k, : len(values)] = values
        rows = rows if owner is None else rows[owner]
        sent = self._sent(self.channel.send(rows.ravel(), more), len(rows))
        for k, j, value in later:
            for i in [0] if owner is None else np.flatnonzero(owner == k).tolist():
                sent.rows[i, j].copy_(value.squeeze(), non_blocking=True)
        return sent

    def _on_device(self, job: KernelBatch, more: Words, early: bool) -> Sent:
        """One kernel counts and computes, from numbers of the host and from tensors that are on the device."""
        trace, name, device = Trace(), job.group.update.rule.name, self.channel.device
        tensors: list[Tensor] = []

        def known(value: Any) -> Any:
            if isinstance(value, Tensor) and value.numel() > 1:
                value = value.unbind()
            if isinstance(value, (tuple, list)):
                return tuple(map(known, value))
            if not isinstance(value, Tensor) or device.type != value.device.type == "cpu":
                return read_number(value)
            tensors.append(value.to(device))
            return trace.input()

        options = {option: known(value) for option, value in job.group.options.items()}
        step, scale = Value(trace, "t", scalar=True), known(job.grad_scale)
        c = job.group.update.general_coefficients(step, options, trace, scale)
        source, numbers = triton_source.coefficients(name, trace, c.values())
        words = self.channel.send(more, capturable=True) if len(more) else None
        memory = torch.empty(self.size * self.columns + len(more), dtype=torch.int64, device=device)
        sent = self._sent(memory, self.size)
        launch = coefficients_launch(name, source, len(more) > 0, job.found_inf is not None, early, self.columns)
        arguments = [self.steps, words, sent.coefficients, sent.more, job.found_inf, *tensors]
        kind = tuple(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in arguments)
        bits = np.array(numbers).view(np.int64).tolist()
        launch((-(-self.size // THREADS), 1, 1), (device, kind), *arguments, *bits, self.size)
        sent.read += tensors
        return sent

    def _sent(self, memory: Tensor, rows: int) -> Sent:
        more = memory[rows * self.columns :]
        return Sent(memory.view(torch.float64), self.columns if rows > 1 else 0, more, (rows, self.columns))


@dataclass
class Sent:
    """What a step needs on the device: a row of coefficients for each parameter or one for all, and other numbers."""

    coefficients: Tensor
    """One row after the other; what follows them is `more`."""
    stride: int
    """How far apart the coefficients of two parameters are: 0 where all have the same."""
    more: Tensor
    shape: tuple[int, ...]
    read: list[Tensor] = field(default_factory=list)
    """What the kernel reads that makes them. Kept, or else its memory could go to a kernel that begins early."""

    @property
    def rows(self) -> Tensor:
        return self.coefficients[: self.shape[0] * self.shape[1]].view(self.shape)

    def of(self, i: int) -> Tensor:
        """The coefficients of one parameter, from the start of what this returns."""
        return self.coefficients[i * self.stride :] if i * self.stride else self.coefficients


# Streams -------------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """The stream on which something was sent; another one has to wait for it once."""

    device: torch.device
    known: set[int]
    ready: Any

    @classmethod
    def current(cls, device: torch.device) -> Stream:
        if device.type != "cuda" or capturing(device):
            return cls(device, set(), None)
        stream = torch.cuda.current_stream(device)
        return cls(device, {stream.cuda_stream}, stream.record_event())

    def follow(self, tensors: Sequence[Tensor]) -> None:
        """Let the current stream use what was sent."""
        if self.ready is None or torch._C._cuda_getCurrentRawStream(self.device.index) in self.known:
            return
        if capturing(self.device):  # a capture begins with a synchronization
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self.ready)
        for tensor in tensors:
            if tensor.device == self.device:
                tensor.record_stream(stream)
        self.known.add(stream.cuda_stream)

    @staticmethod
    def on(device: torch.device) -> AbstractContextManager[Any]:
        """Triton launches on the current device."""
        if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
            return _NOTHING
        return torch.cuda.device(device)


_NOTHING = nullcontext()
