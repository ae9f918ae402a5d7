"""Code that both engines on CUDA share: kernel launches, refusals, and the transfer of numbers to the device.

Gradients move from step to step. Their addresses go to the device together with the coefficients, in one asynchronous
transfer. With `capturable`, steps are counted on the device and the coefficients are computed there, so that a CUDA
graph can contain the step.
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
"""Warps of a program, unless a launch says otherwise."""
COEFFICIENT_THREADS = 32
"""Threads of a program that computes coefficients."""
TYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Triton's names of the dtypes that kernels support."""

_captured: list[Any] = []
"""Memory that captured CUDA graphs read when they are replayed. Torch does not tell when a graph is deleted, so it is
never freed: a few kilobytes for each capture."""


# Kernels -------------------------------------------------------------------------------------------------------


@cache
def kernel(spec: KernelSpec, kind: str) -> Any:
    """Return the Triton kernel of this kind (dense, rows or spanning_rows) for a rule."""
    made = triton_source.module(spec.name, triton_source.source(spec))
    return getattr(made, f"{spec.name}_{kind}")


@cache
def coefficients_launch(name: str, source: str, more: bool, guarded: bool, early: bool, columns: int) -> Launch:
    """Return the kernel that advances step counts and computes coefficients, one parameter in each thread.

    Args:
        name: The name of the rule.
        source: The generated source of the kernel.
        more: Whether the kernel copies further numbers, the addresses of gradients.
        guarded: Whether the step is skipped if a gradient overflowed.
        early: Whether the next kernel begins early and waits for the coefficients itself.
        columns: The number of coefficients of a parameter, with padding.
    """
    made = getattr(triton_source.module(f"{name}_coefficients", source), f"{name}_coefficients")
    constants = {"MORE": more, "GUARD": guarded, "EARLY": early, "COLUMNS": columns, "BLOCK": COEFFICIENT_THREADS}
    return Launch(made, constants, COEFFICIENT_THREADS // 32)


@cache
def supports_early_launch(device: torch.device) -> bool:
    """Whether a kernel on this device can begin before the previous one has ended, and wait for it later.

    CUDA calls this programmatic dependent launch. It needs compute capability 9.0, and driver 12.3 in CUDA graphs.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:  # the driver library has another name on this system
        return False
    return version.value >= 12_030 and _has_known_launcher()


@cache
def _has_known_launcher() -> bool:
    """Whether this is a version of Triton whose launcher is known, so that compiled kernels are launched directly."""
    import triton  # type: ignore[import-not-found,unused-ignore]

    return str(triton.__version__).startswith(("3.6.", "3.7."))


@dataclass
class Launch:
    """A Triton kernel with its constants.

    Triton examines all arguments in every launch to choose the compiled version. The arguments of an optimizer hardly
    ever change in type or alignment, so the compiled version is kept under the `kind` of the arguments, which contains
    everything that could ask for another version.

    Attributes:
        kernel: The Triton kernel.
        constants: Its compile-time constants by name.
        warps: Warps of a program.
        registers: The maximum number of registers of a thread; None lets the compiler choose.
        early: Whether the kernel may begin before the previous kernel has ended.
        compiled: The compiled versions by kind.
    """

    kernel: Any
    constants: dict[str, Any]
    warps: int = WARPS
    registers: int | None = None
    early: bool = False
    compiled: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.constant_values = tuple(self.constants.values())

    def __call__(self, grid: tuple[int, int, int], kind: Any, *args: Any) -> None:
        """Launch the kernel on the current stream.

        Args:
            grid: The number of programs in each dimension.
            kind: A hashable object that differs if the arguments need another compiled version.
            *args: The arguments that are not constants.
        """
        compiled = self.compiled.get(kind)
        if compiled is not None:
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            metadata = compiled.packed_metadata
            compiled.run(*grid, stream, compiled.function, metadata, None, None, None, *args, *self.constant_values)
            return
        # Fused multiply-add would round differently from the reference engine, and would not be faster.
        options: dict[str, Any] = {"num_warps": self.warps, "maxnreg": self.registers, "enable_fp_fusion": False}
        if self.early:
            options["launch_pdl"] = True
        compiled = self.kernel[grid](*args, **self.constants, **options)
        if compiled is not None and _has_known_launcher():
            self.compiled[kind] = compiled


@cache
def triton_type(dtype: torch.dtype) -> Any:
    """Return Triton's type for a dtype."""
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

    return tl.uint8 if dtype == torch.uint8 else getattr(tl, TYPES[dtype])


# Refusals --------------------------------------------------------------------------------------------------


def storage_refusal(slot: ParamSlot, rows: bool) -> Refusal | None:
    """Return why the kernels cannot serve moments that are stored this way, or None if they can."""
    reason = _unsupported_storage(slot, rows)
    return None if reason is None else Refusal.unsupported(reason)


def _unsupported_storage(slot: ParamSlot, rows: bool) -> str | None:
    if not rows and slot.row_steps is not None:
        return "rows have their own step counts, and the gradient is dense"
    if not rows and "second_moment" in slot.storage:
        return "rows share their second moment, and the gradient is dense"
    if (reason := moment_state.scale_mismatch(slot, rows)) is not None:
        return reason
    if not rows and any(not scales.is_contiguous() for scales in slot.scales.values()):
        return "the scales of its moments are not contiguous"
    if rows and not moment_state.has_uniform_row_strides(slot):
        return "the rows of its moments, or of their scales, are not equally far apart in memory"
    return None


class CudaEngine(Engine):
    """The common part of both engines on CUDA."""

    fused = True
    rounds_stochastically = True
    skips_overflow = True
    device = "cuda"

    def record_step(self, work: Work, containers: TrackedContainers) -> ReplayedStep | Refusal:
        """Record the step that was just taken, so that it can be replayed."""
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
            return f"{name} has another memory layout than the parameter"
    where = param.device if group.keeps_scalars_on_device else torch.device("cpu")
    if slot.step.device != where or slot.step.dtype != torch.float32:
        return f"counts steps in float32 on {where}, and this count is {slot.step.dtype} on {slot.step.device}"
    return None


def overflowed(job: KernelBatch) -> bool:
    """Whether the step is skipped because a gradient overflowed.

    If steps are counted on the host, the host reads the flag. Otherwise the kernels read it on the device.
    """
    if job.found_inf is None or job.group.keeps_scalars_on_device:
        return False
    return bool(job.found_inf.item())


def rounds_stochastically(group: ResolvedGroup) -> bool:
    """Whether bfloat16 parameters are rounded stochastically."""
    return bool(group.options["stochastic_rounding"])


# Transfers to the device ---------------------------------------------------------------------------------------


def keep_for_graphs(memory: Any, device: torch.device) -> None:
    """Keep memory alive that a CUDA graph reads, if one is being captured."""
    if capturing(device):
        _captured.append(memory)


@dataclass
class Channel:
    """Sends numbers to a device without waiting for it.

    Attributes:
        device: The device.
        spare: Pinned memory for the next capture of a CUDA graph, during which none can be allocated.
    """

    device: torch.device
    spare: Tensor | None = None

    def send(self, *parts: Any, capturable: bool = False) -> Tensor:
        """Concatenate arrays of 64-bit numbers into one tensor that kernels can read.

        Args:
            *parts: The arrays.
            capturable: Whether pinned memory is kept ready for the capture of a CUDA graph. The first kernel of a graph
                reads pinned memory directly, which is faster than a copy to the device.
        """
        size = sum(map(len, parts))
        if self.device.type == "cpu":
            return _filled(_host(size), parts)
        if not capturing(self.device):
            if capturable and (self.spare is None or len(self.spare) != size):
                self.spare = _host(size, pinned=True)
            # The allocator of pinned memory does not reuse it before the device has read it.
            host = _host(size, pinned=True)
            return _filled(host, parts).to(self.device, non_blocking=True)
        if self.spare is not None and len(self.spare) == size:
            host, self.spare = self.spare, None
            _captured.append(host)
            return _filled(host, parts)
        # Without pinned memory, the numbers become arguments of kernels, which the graph stores itself.
        sent = torch.zeros(size, dtype=torch.int64, device=self.device)
        torch._foreach_add_(list(sent.unbind()), _filled(_host(size), parts).tolist())
        return sent


def _host(size: int, pinned: bool = False) -> Tensor:
    """Allocate memory of the host, independent of the user's default device."""
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=pinned)


def mark_in_use(pinned: Tensor, device: torch.device) -> None:
    """Tell torch that the current stream uses pinned memory, so that it is not reused before the stream is done.

    Torch does not notice when kernels or the driver read the memory. It does notice its own copy, so one is made.
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
    """Return the step count after this one, like `moment_state.next_step`."""
    return step + 1 if step < MAX_EXACT_STEP else float(np.nextafter(np.float32(step), np.float32(np.inf)))


class StepNumbers:
    """The step counts of some parameters on one device, and the coefficients that depend on them.

    Attributes:
        columns: The number of coefficients of a parameter, rounded up to a multiple of 16.
        on_device: Whether steps are counted on the device.
        steps: The step counts in one tensor, or their addresses if they are on the device.
        counts: The step counts as an array; None if they are on the device.
        stream: The stream on which the numbers were sent.
    """

    def __init__(
        self, slots: Sequence[ParamSlot], group: ResolvedGroup, spec: KernelSpec, device: torch.device
    ) -> None:
        self.names = spec.coefficients
        self.columns = -(-(1 + len(self.names)) // 16) * 16
        self.size = len(slots)
        self.on_device = group.keeps_scalars_on_device
        self.channel = Channel(device)
        steps = [slot.step for slot in slots]
        if self.on_device:
            self.steps = Channel(device).send(np.fromiter(map(Tensor.data_ptr, steps), np.int64, len(steps)))
        else:
            # All counts share one memory, so that counting is one operation. The tensors stay the same objects.
            self.steps = torch.stack(steps)
            for step, count in zip(steps, self.steps.unbind(), strict=True):
                step.data = count
        self.counts = None if self.on_device else self.steps.numpy()
        self.stream = Stream.current(device)

    def advance(self, job: KernelBatch, more: Words, early: bool = False) -> Sent:
        """Count a step and send its coefficients to the device.

        Args:
            job: The batch of the parameters.
            more: Further numbers to send.
            early: Whether the next kernel begins early and waits for the coefficients itself, if a kernel computes
                them.
        """
        return self._on_device(job, more, early) if self.on_device else self._on_host(job, more)

    def _on_host(self, job: KernelBatch, more: Words) -> Sent:
        steps = self.counts
        if steps is None:
            raise AssertionError("the steps are counted on the device")
        if steps.max() < MAX_EXACT_STEP:
            steps += 1
        else:
            steps[:] = [*map(next_step, steps.tolist())]
        different, owner = steps[:1], None
        if len(steps) > 1 and not (steps == steps[0]).all():
            different, owner = np.unique(steps, return_inverse=True)
        scale = read_number(job.grad_scale)
        rows = np.empty((len(different), self.columns))
        on_device: list[tuple[int, int, Tensor]] = []
        for k, t in enumerate(different.tolist()):
            values = [t, *job.group.kernel_coefficients(t, scale).values()]
            for j, value in enumerate(values):
                if isinstance(value, Tensor):
                    on_device.append((k, j, value))
                    values[j] = 0.0
            rows[k, : len(values)] = values
        rows = rows if owner is None else rows[owner]
        sent = self._sent(self.channel.send(rows.ravel(), more), len(rows))
        for k, j, value in on_device:
            for i in [0] if owner is None else np.flatnonzero(owner == k).tolist():
                sent.rows[i, j].copy_(value.squeeze(), non_blocking=True)
        return sent

    def _on_device(self, job: KernelBatch, more: Words, early: bool) -> Sent:
        """Count a step and compute the coefficients in one kernel, from plain numbers and tensors on the device."""
        trace, name, device = Trace(), job.group.update.rule.name, self.channel.device
        tensors: list[Tensor] = []

        def to_input(value: Any) -> Any:
            """Return plain numbers unchanged, and an input of the traced kernel for a tensor on the device."""
            if isinstance(value, Tensor) and value.numel() > 1:
                value = value.unbind()
            if isinstance(value, (tuple, list)):
                return tuple(map(to_input, value))
            if not isinstance(value, Tensor) or device.type != value.device.type == "cpu":
                return read_number(value)
            tensors.append(value.to(device))
            return trace.input()

        options = {option: to_input(value) for option, value in job.group.options.items()}
        step, scale = Value(trace, "t", scalar=True), to_input(job.grad_scale)
        c = job.group.update.general_coefficients(step, options, trace, scale)
        source, numbers = triton_source.coefficients(name, trace, c.values())
        words = self.channel.send(more, capturable=True) if len(more) else None
        memory = torch.empty(self.size * self.columns + len(more), dtype=torch.int64, device=device)
        sent = self._sent(memory, self.size)
        launch = coefficients_launch(name, source, len(more) > 0, job.found_inf is not None, early, self.columns)
        arguments = [self.steps, words, sent.coefficients, sent.more, job.found_inf, *tensors]
        kind = tuple(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in arguments)
        bits = np.array(numbers).view(np.int64).tolist()
        launch((-(-self.size // COEFFICIENT_THREADS), 1, 1), (device, kind), *arguments, *bits, self.size)
        sent.inputs += tensors
        return sent

    def _sent(self, memory: Tensor, rows: int) -> Sent:
        more = memory[rows * self.columns :]
        return Sent(memory.view(torch.float64), self.columns if rows > 1 else 0, more, (rows, self.columns))


@dataclass
class Sent:
    """The numbers of a step on the device.

    Attributes:
        coefficients: A row of coefficients for each parameter, or one row for all; then `more`.
        stride: The distance between the rows of two parameters; 0 if all parameters share one row.
        more: Further numbers, such as the addresses of gradients.
        shape: The number of rows and their length.
        inputs: The tensors that the coefficients were computed from. They are kept alive, because a kernel that begins
            early could otherwise get their memory.
    """

    coefficients: Tensor
    stride: int
    more: Tensor
    shape: tuple[int, ...]
    inputs: list[Tensor] = field(default_factory=list)

    @property
    def rows(self) -> Tensor:
        """The coefficients as a matrix."""
        return self.coefficients[: self.shape[0] * self.shape[1]].view(self.shape)

    def of(self, i: int) -> Tensor:
        """Return a tensor that begins with the coefficients of parameter i."""
        return self.coefficients[i * self.stride :] if i * self.stride else self.coefficients


# Streams -------------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """The stream on which numbers were sent. Every other stream that uses them has to wait once.

    Attributes:
        device: The device.
        synchronized: The streams that need not wait.
        ready: The event after which the numbers are on the device.
    """

    device: torch.device
    synchronized: set[int]
    ready: Any

    @classmethod
    def current(cls, device: torch.device) -> Stream:
        """Return the current stream of a device."""
        if device.type != "cuda" or capturing(device):
            return cls(device, set(), None)
        stream = torch.cuda.current_stream(device)
        return cls(device, {stream.cuda_stream}, stream.record_event())

    def follow(self, tensors: Sequence[Tensor]) -> None:
        """Make the current stream wait for tensors that were sent on this stream."""
        if self.ready is None or torch._C._cuda_getCurrentRawStream(self.device.index) in self.synchronized:
            return
        if capturing(self.device):  # the capture of a graph begins with a synchronization
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self.ready)
        for tensor in tensors:
            if tensor.device == self.device:
                tensor.record_stream(stream)
        self.synchronized.add(stream.cuda_stream)

    @staticmethod
    def on(device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which `device` is the current device, on which Triton launches kernels."""
        if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
            return _NOTHING
        return torch.cuda.device(device)


_NOTHING = nullcontext()
