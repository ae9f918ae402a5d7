"""The fused engine on CUDA: Triton kernels, generated from the rules, one launch for all but huge tensors.

A step reads and writes every value once. The kernels find the tensors through a table of addresses on the device.
Gradients move from step to step: their addresses go to the device together with the coefficients, in one transfer
that nobody waits for. Where steps are counted on the device (`capturable`), so are the coefficients computed there,
and a CUDA graph can hold the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...codegen import triton as triton_source
from ...codegen.structure import Structure
from ...rules import Options
from ...update import Update
from .. import scalars
from ..base import DENSE_ONLY, PLAIN, Item, Job, NotMeant, fills_memory, unreadable
from ..cpu.library import UnavailableError
from ..watch import CHANGED, Watched, lay_out, watched_grads

BLOCK = 1024  # elements of one program
WARPS = 4
HUGE = 1 << 24  # elements from which a tensor gets a launch of its own
TYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}

Words = np.ndarray[Any, np.dtype[np.int64]]
_NONE = np.zeros(1, np.int64)

# What captured graphs read at every replay. Nothing tells when a graph is gone, so it is kept for good: a few
# kilobytes for each capture.
_captured: list[Any] = []


# Kernels -------------------------------------------------------------------------------------------------------


@cache
def kernel(structure: Structure, kind: str) -> Any:
    return getattr(triton_source.module(structure), f"{structure.name}_{kind}")


@cache
def _direct() -> bool:
    """May a compiled kernel be launched as it is? Known of these versions of Triton only."""
    import triton  # type: ignore[import-not-found,unused-ignore]

    return str(triton.__version__).startswith(("3.6.", "3.7."))


@dataclass(frozen=True)
class Bound:
    """A compiled kernel as the CUDA driver launches it."""

    function: int
    threads: int
    shared: int
    """Bytes of memory that the threads of a block share."""
    names: tuple[str, ...]
    """Its arguments, each in a word of 8 bytes; two scratch memories of Triton's follow, which it does not use."""

    @classmethod
    def of(cls, compiled: Any) -> Bound:
        """Raises UnavailableError where a launch takes more than is known here."""
        packed, about = compiled.packed_metadata, compiled.metadata
        wants = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
        unknown = [name for name in wants if not hasattr(about, name)]
        if len(packed) != 3 or unknown:
            raise UnavailableError(
                f"Triton says other things of the kernel {compiled.name}: {packed}, without {unknown}"
            )
        warps, ctas, shared = packed
        more = [name for name in wants if getattr(about, name)]
        kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        more += [f"{name}: {kind}" for name, kind in kinds.items() if kind[0] != "*" and kind not in ("i32", "i64")]
        if ctas != 1 or more:
            raise UnavailableError(f"the kernel {compiled.name} takes more than usual: {ctas} blocks, {more}")
        return cls(compiled.function, 32 * warps, shared, tuple(kinds))

    def places(self, words: Mapping[str, Words]) -> list[int]:
        """Where its arguments are, each at the beginning of its words."""
        return [*(words[name].ctypes.data for name in self.names), _NONE.ctypes.data, _NONE.ctypes.data]


@dataclass
class Launch:
    """A kernel and its constants.

    Triton looks at all arguments in every launch to find out which compiled version serves them. They hardly ever
    change here, so the version is kept: `kind` stands for whatever about the arguments could call for another.
    """

    kernel: Any
    constants: dict[str, Any]
    warps: int = WARPS
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
        compiled = self.kernel[grid](*args, **self.constants, num_warps=self.warps, enable_fp_fusion=False)
        if compiled is not None and _direct():
            self.compiled[kind] = compiled

    def bound(self, kind: Any) -> Bound:
        """What a launch like those before takes of the driver. Raises UnavailableError where that is not known."""
        if kind not in self.compiled:
            raise UnavailableError("how this version of Triton launches kernels is not known")
        return Bound.of(self.compiled[kind])


@cache
def triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

    return getattr(tl, TYPES[dtype])


# What the engines can serve ------------------------------------------------------------------------------------


@cache
def lacking(device: torch.device) -> str | None:
    """What this installation or this device lacks."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return None
    if torch.version.cuda is None:
        return "needs a torch that is built for CUDA"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs compute capability 8.0 or later, and {device} has {major}.{minor}"


def refusal(item: Item, options: Options, device: str) -> str | None:
    """Why the kernels cannot serve a parameter, whatever its gradient; None if they can."""
    param = item.param
    if param.device.type != device:
        return NotMeant("serves CUDA only")
    for option, unwanted in (("fused", False), ("foreach", True), ("differentiable", True)):
        if options[option] is unwanted:
            return f"{option}={unwanted} was asked for"
    missing = lacking(param.device)
    if missing:
        return missing
    reason = unreadable(item)
    if reason:
        return reason
    dtypes = {buffer.dtype for buffer in item.state.values()}
    for dtype in (param.dtype, *dtypes):
        if dtype not in TYPES:
            return f"has no kernels for {dtype}"
    if len(dtypes) > 1:
        return "the buffers of the state differ in dtype"
    if not fills_memory(param):
        return "the parameter's elements overlap or have gaps between them"
    for name, buffer in item.state.items():
        if buffer.shape != param.shape or buffer.stride() != param.stride():
            return f"{name} does not lie in memory as the parameter does"
    where = param.device if scalars.stay_on_device(options) else torch.device("cpu")
    if item.step.device != where or item.step.dtype != torch.float32:
        return f"counts steps in float32 on {where}, and this count is {item.step.dtype} on {item.step.device}"
    return None


# To the device -------------------------------------------------------------------------------------------------


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing()


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
        """Arrays of 8-byte numbers, one after the other in one tensor on the device."""
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
            return _filled(host, parts).to(self.device, non_blocking=True)
        # As arguments of kernels, which a graph remembers by itself.
        sent = torch.zeros(size, dtype=torch.int64, device=self.device)
        torch._foreach_add_(list(sent.unbind()), _filled(_host(size), parts).tolist())
        return sent


def _host(size: int, pinned: bool = False) -> Tensor:
    """Memory of the host, whatever the user's default device is."""
    return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=pinned)


def lend(pinned: Tensor, device: torch.device) -> None:
    """Tell torch that the current stream uses this memory: once let go, it is not handed out before the stream is done.

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


class Numbers:
    """The step counts of some parameters on one device, and the coefficients that come from them."""

    def __init__(self, items: Sequence[Item], options: Options, structure: Structure, device: torch.device) -> None:
        self.names = structure.coefficients
        self.columns = -(-(1 + len(self.names)) // 16) * 16
        self.size = len(items)
        self.stay = scalars.stay_on_device(options)
        self.channel = Channel(device)
        steps = [item.step for item in items]
        if self.stay:
            self.steps = Channel(device).send(np.fromiter(map(Tensor.data_ptr, steps), np.int64, len(steps)))
        else:
            # One memory for all counts, so that counting is one operation. The tensors stay the same objects.
            self.steps = torch.stack(steps)
            for step, place in zip(steps, self.steps.unbind(), strict=True):
                step.data = place
        self.counts = None if self.stay else self.steps.numpy()
        self.stream = Stream.current(device)

    def advance(self, job: Job, more: Words) -> Sent:
        """Count one step; bring its coefficients to the device, and `more` with them."""
        return self._on_device(job, more) if self.stay else self._on_host(job, more)

    def _on_host(self, job: Job, more: Words) -> Sent:
        steps = self.counts
        if steps is None:
            raise AssertionError("these steps are counted on the device")
        steps += 1
        different, owner = steps[:1], None
        if len(steps) > 1 and not (steps == steps[0]).all():
            different, owner = np.unique(steps, return_inverse=True)
        options = scalars.plain(job.options)
        scale = None if job.grad_scale is None else scalars.plain({"scale": job.grad_scale})["scale"]
        rows = np.empty((len(different), self.columns))
        later: list[tuple[int, int, Tensor]] = []
        for k, t in enumerate(different.tolist()):
            values = [t, *job.update.general_coefficients(t, options, scalars.Scalars, scale).values()]
            for j, value in enumerate(values):
                if isinstance(value, Tensor):
                    later.append((k, j, value))
                    values[j] = 0.0
            rows[k, : len(values)] = values
        sent = self._send(rows if owner is None else rows[owner], more, capturable=False)
        for k, j, value in later:
            for i in [0] if owner is None else np.flatnonzero(owner == k).tolist():
                sent.rows[i, j].copy_(value.squeeze(), non_blocking=True)
        return sent

    def _on_device(self, job: Job, more: Words) -> Sent:
        from .blocks import count_steps

        now = torch.empty(self.size, dtype=torch.float64, device=self.channel.device)
        found_inf = job.found_inf
        count_steps[(-(-self.size // 256),)](self.steps, now, found_inf, self.size, found_inf is not None, 256)
        c = job.update.general_coefficients(now, job.options, scalars.Scalars, job.grad_scale)
        rows = np.zeros((self.size, self.columns))
        later: dict[int, Tensor] = {0: now} if stochastic(job.options) else {}
        for j, value in enumerate(c.values(), 1):
            if isinstance(value, Tensor) and value.device == self.channel.device:
                later[j] = value
            else:
                rows[:, j] = float(value)
        sent = self._send(rows, more, capturable=True)
        for j, value in later.items():
            sent.rows[:, j].copy_(value)
        return sent

    def _send(self, rows: np.ndarray[Any, np.dtype[np.float64]], more: Words, capturable: bool) -> Sent:
        sent = self.channel.send(rows.ravel(), more, capturable=capturable)
        return Sent(sent.view(torch.float64), self.columns if len(rows) > 1 else 0, sent[rows.size :], rows.shape)


@dataclass
class Sent:
    """What a step needs on the device: a row of coefficients for each parameter or one for all, and other numbers."""

    coefficients: Tensor
    """One row after the other; what follows them is `more`."""
    stride: int
    """How far apart the coefficients of two parameters are: 0 where all have the same."""
    more: Tensor
    shape: tuple[int, ...]

    @property
    def rows(self) -> Tensor:
        return self.coefficients[: self.shape[0] * self.shape[1]].view(self.shape)

    def of(self, i: int) -> Tensor:
        """The coefficients of one parameter, from the start of what this returns."""
        return self.coefficients[i * self.stride :] if i * self.stride else self.coefficients


# Dense ---------------------------------------------------------------------------------------------------------


class Cuda:
    name = "cuda"
    fused = True
    by_chance = True
    skips_overflow = True
    looks = True
    traceable = False
    device = "cuda"

    def refuses(self, update: Update, item: Item, grad: Tensor | None, options: Options) -> str | None:
        if grad is not None and grad.is_sparse:
            return DENSE_ONLY
        reason = refusal(item, options, self.device)
        if reason is not None or grad is None:
            return reason
        if grad.dtype not in TYPES:
            return f"has no kernels for gradients in {grad.dtype}"
        return None if type(grad) in PLAIN else f"serves plain gradients only, not {type(grad).__name__}"

    def stale(self, jobs: Sequence[Job]) -> bool:
        batches = [job.memo.get("cuda") for job in jobs]
        return any(made is None or any(batch.stale() for batch in made) for made in batches)

    def check(self, jobs: Sequence[Job]) -> None:
        pass

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if overflowed(job):
                continue
            batches = job.memo.get("cuda") or Batch.split(job)
            for batch in batches:
                batch.step(job)
                keep((batch.table, batch.owners, batch.numbers), batch.numbers.channel.device)
            if not any(batch.in_capture for batch in batches):  # what was made in a capture is filled at replays only
                job.memo["cuda"] = batches


def overflowed(job: Job) -> bool:
    """Is this known to be a step that an overflow forbids? Counts on the host cannot wait for the device to tell."""
    if job.found_inf is None or scalars.stay_on_device(job.options):
        return False
    return bool(job.found_inf.item())


def stochastic(options: Options) -> bool:
    return bool(options.get("stochastic_rounding"))


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
    numbers: Numbers
    launches: list[tuple[int, int, bool]]
    """Their blocks and, where it is for one parameter alone, which."""
    params: list[Tensor]
    lasting: Watched
    """Parameters, then buffers and step counts."""
    grads: Watched
    seed: int
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
        structure = Structure.of(job.update.rule, scalars.plain(job.options))
        params = [item.param for item in items]
        buffers = [[item.state[name] for item in items] for name in structure.buffers]
        sizes = np.array([p.numel() for p in params], np.int64)
        huge = sizes >= HUGE
        blocks = np.where(huge, 0, -(-sizes // BLOCK))
        counts = [0 if item.counts is None else item.counts.data_ptr() for item in items]
        columns = [addresses(params), counts, sizes, np.cumsum(blocks) - blocks, *map(addresses, buffers)]
        table = np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
        table[huge, 3] = 0
        owners = np.repeat(np.arange(len(items)), blocks)
        launches = [(int(blocks.sum()), 0, False)] if blocks.any() else []
        launches += [(-(-int(sizes[i]) // BLOCK), i, True) for i in np.flatnonzero(huge).tolist()]
        device = params[0].device
        channel = Channel(device)
        state = [tensor for item in items for tensor in (*item.state.values(), item.step)]
        numbers = Numbers(items, job.options, structure, device)
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
            }
            self.compiled[key] = Launch(self.kernel, constants)
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
