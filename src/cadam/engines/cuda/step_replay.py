"""The prepared step on CUDA: one call of a compiled function from `step()` to the launch.

From one step to the next, as a rule, nothing changes but where the gradients lie, the learning rate and the step
count. Python's way to find that out, and then to the launch, takes longer than the step of a small model, and keeps
the device waiting in front of a large one. So everything is prepared: the compiled function looks whether the state,
the parameters and the options are the objects they were and lie where they did, writes the gradients' addresses and
the coefficients into pinned memory, has them copied to the device and launches the kernels. Where anything else is
new it does nothing, and the step is taken the usual way.

Row ids are sorted by torch: a second call launches what comes after that. In between, the device has the dense
parameters to do.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...native.library import Library
from ...native.tensor_snapshot import CompiledLook, Watched, compiled_look
from ...native.torch_symbols import address as address_of
from ...native.torch_symbols import torch_symbols
from ...optim.options import switch
from .. import coefficients as scalars
from ..base import KernelBatch, Refusal, RefusalKind, TrackedContainers, UnavailableError, Words, Work, capturing
from .dense import Batch, Cuda
from .launch import Launch, mark_in_use, next_step, stochastic
from .sparse import (
    KEYS,
    LONGEST,
    CudaRows,
    RowBatch,
    RowGrad,
    error_of,
    key_dtype,
    kind_of,
    launches_for,
    make_keys,
    tensors_of,
)

CUDA = (
    "cuCtxGetCurrent",
    "cuStreamIsCapturing",
    "cuEventQuery",
    "cuEventRecord",
    "cuMemcpyHtoDAsync_v2",
    "cuLaunchKernel",
)
PYTHON = ("PyDict_Next", "PyList_Size", "PyList_GetItem", "PyEval_SaveThread", "PyEval_RestoreThread")
BUMP_VERSION = "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"
IMAGE, GRAD_IMAGE = 9, 3  # words, as in native/src/step_replay.c
SLOTS = 8  # steps that the host may be ahead of the device before it goes the usual way
MUTABLE = (Tensor, np.ndarray, list, dict, set)  # options that can change and stay the same object

Address = int


def record(work: Work, containers: TrackedContainers) -> CudaStep | Refusal:
    """This step, ready to be taken again; or why it cannot be."""
    reason = turned_off(containers.groups)
    if reason:
        return Refusal(RefusalKind.NOT_REQUESTED, reason)
    try:
        return CudaStep(work, containers)
    except (UnavailableError, RuntimeError) as error:  # out of memory, say: the step itself is done
        return Refusal(RefusalKind.UNAVAILABLE, str(error))


def turned_off(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Who does not want steps to be prepared, if anyone."""
    try:
        if not switch("CADAM_REPLAY"):
            return f"CADAM_REPLAY={os.environ['CADAM_REPLAY']} is set"
    except ValueError as error:  # set since an optimizer was made, which refuses it
        return str(error)
    return "replay=False was asked for" if any(group.get("replay") is False for group in groups) else None


class CudaStep:
    """A step that was taken before, with all that it takes to take it again. Implements `ReplayedStep`."""

    def __init__(self, work: Work, containers: TrackedContainers) -> None:
        """Raises UnavailableError, with the reason, where this step cannot be prepared."""
        batches = _batches(work)
        device = batches[0][1].params[0].device
        # In each step, the current context is compared with the one of now.
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            raise UnavailableError("the parameters are not on the current device")
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise UnavailableError("this Python has no global lock")
        self.driver = driver()
        self.index = -1 if device.index is None else device.index
        self.current_stream, self.stream = self.driver.current_stream, self.driver.current_stream(self.index)
        self.containers = containers
        self.numbers = [Coefficients(job, batch) for job, batch in batches]
        self.lasting: list[Watched] = []
        """Tables and their state. The parameters of other batches are looked at by the plan."""
        self.alive: list[Any] = []  # what the compiled function has addresses of
        sight, place = _look(), _known_layout()
        words = sum(c.words for c in self.numbers)
        host = torch.empty((SLOTS, words), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        mark_in_use(host, device)
        self.sent = torch.empty(words, dtype=torch.int64, device=device)
        events = [self.driver.event() for _ in range(SLOTS)]
        parts = [self._part(c) for c in self.numbers]
        self.tables: list[ReplayedTable] = []
        launches = self._launches()
        self._watch()
        self.header = self._keep(
            sight.library.torch.ctypes.data,
            _python().ctypes.data,
            self.driver.functions.ctypes.data,
            _bump_version(),
            self._keep(*astuple(place)).ctypes.data,
            sight.place,
            len(self.expectations),
            self.expectations.ctypes.data,
            len(containers.absent),
            self._keep(*map(id, containers.absent)).ctypes.data,
            len(parts),
            self._keep(*[word for part in parts for word in part]).ctypes.data,
            len(launches) - 2 * len(self.tables),
            launches.ctypes.data,
            self.driver.context(),
            host.data_ptr(),
            words,
            SLOTS,
            0,
            self._keep(*[address for _, address in events]).ctypes.data,
            self.sent.data_ptr(),
        )
        self.alive += [sight, host, events]
        self._calls(sight.library, launches)
        self.note(self.address)

    def _calls(self, library: Library, launches: Words) -> None:
        compiled = _compiled(library.c._name)
        self.call, self.note = compiled.step, compiled.note
        self.address: Address = self.header.ctypes.data
        self.launch, later = compiled.launch, 2 * len(self.tables)
        self.rest = self.driver.functions.ctypes.data, launches[len(launches) - later :].ctypes.data, later

    def step(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Take the step, if nothing else has changed. False: nothing was done."""
        if groups is not self.containers.groups or state is not self.containers.state or not self._is_here():
            return False
        known: dict[Any, ReplayedTable] = {}
        return all(table.take(table.param.grad, known) for table in self.tables) and self._go()

    def update_rows(self, grad: RowGrad, step: int) -> bool:
        """The same for the step of a single table."""
        if not self._is_here() or not self.tables[0].take_rows(grad):
            return False
        self.numbers[0].steps[0] = step - 1
        return self._go()

    def _is_here(self) -> bool:
        """Are steps taken on the stream that it was prepared for?"""
        return self.current_stream(self.index) == self.stream

    def _go(self) -> bool:
        """Take it, once the tables have taken the rows of this step."""
        for coefficients in self.numbers:
            if coefficients.options["lr"] is not coefficients.lr and not coefficients.renew():
                return False
        failed = self.call(self.address, self.stream)
        if failed < 0:
            return False
        if self.tables and not failed:
            in_use = [table.sort() for table in self.tables]
            failed = self.launch(*self.rest, self.stream)
            del in_use  # the memory goes back to this stream
        if failed:
            raise RuntimeError(f"the CUDA driver reports error {failed} for a step of the optimizer")
        for coefficients in self.numbers:  # while the device is at work
            coefficients.renew()
        return True

    def renew(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """After a step that was taken the usual way: take the options and step counts as they are now.

        False if this will not serve again, and must be released: a table lies elsewhere or got too many ids, groups
        are not what they were, steps are taken on another stream, or are no longer to be prepared.
        """
        if groups is not self.containers.groups or state is not self.containers.state or turned_off(groups):
            return False
        if any(lasting.look() for lasting in self.lasting) or any(table.outgrown for table in self.tables):
            return False
        held = self._groups()
        if len(held) != self.lists or not all(map(_watchable, held)):
            return False
        for number, one in enumerate(held):  # the state's are the same as long as the plan is
            self._expect(number, one)
        renewed = [coefficients.renew() for coefficients in self.numbers]
        self.note(self.address)
        return all(renewed) and self._is_here()

    def _watch(self) -> None:
        """See to it that dicts and lists hold the very objects that they hold now."""
        groups = self._groups()
        held = [*groups, self.containers.state, *self.containers.states]
        if not all(map(_watchable, held)):
            raise UnavailableError("groups or their parameters are not in lists")
        self.lists = len(groups)
        self.expectations = np.zeros((len(held), 4), np.int64)
        self.expected: dict[int, Any] = {}
        for number, one in enumerate(held):
            self._expect(number, one)

    def _groups(self) -> list[Any]:
        """The dicts and lists that groups and parameters are in."""
        groups = self.containers.groups
        return [*groups, groups, *(group["params"] for group in groups if "params" in group)]

    def _expect(self, number: int, held: Any) -> None:
        is_dict = isinstance(held, dict)
        entries = list(held.items() if is_dict else enumerate(held))
        ids = np.array([0 if key == "lr" else id(value) for key, value in entries], np.int64)
        self.expectations[number] = id(held), is_dict, len(ids), ids.ctypes.data
        # The objects too: an address tells one from another only while both are there.
        self.expected[number] = held, entries, ids

    def _launches(self) -> Words:
        """Each as six words: function, blocks, blocks across, threads, shared memory and where its arguments are.

        Last come two for each table, for when its ids are sorted.
        """
        words: list[list[int]] = []
        start = self.sent.data_ptr()
        for c in self.numbers:
            batch = c.batch
            if isinstance(batch, RowBatch):
                self.tables += [ReplayedTable(batch, i, start) for i in range(len(batch.params))]
            else:
                kind = (None, stochastic(c.options))
                for blocks, i, alone in batch.launches:
                    bound = Bound.of(batch.launch(alone, *kind), kind)
                    words.append(self._launch(bound, batch, blocks, i, start, start + 8 * len(c.row)))
            start += 8 * c.words
        first = len(words)
        for table in self.tables:
            words.append(table.launches[0])
        for table in self.tables:
            words += table.launches[1:]
        launches = np.array(words, np.int64).reshape(-1, 6)
        self.alive.append(launches)
        for i, table in enumerate(self.tables):
            later = first + len(self.tables) + 2 * i
            table.place(launches[first + i], launches[later], launches[later + 1])
        return launches

    def _launch(self, bound: Bound, batch: Batch, blocks: int, i: int, row: Address, grads: Address) -> list[int]:
        values = {"table": batch.table.data_ptr(), "grads": grads, "coefficients": row, "stride": 0}
        values |= {"owners": batch.owners.data_ptr(), "only": i, "seed": batch.seed}
        arguments = self._keep(*[values[name] for name in bound.names])
        places = self._keep(*bound.places({name: arguments[k:] for k, name in enumerate(bound.names)}))
        return [bound.function, blocks, 1, bound.threads, bound.shared, places.ctypes.data]

    def _part(self, c: Coefficients) -> list[int]:
        """A batch as the compiled function wants it."""
        batch = c.batch
        if isinstance(batch, RowBatch):
            params, lasting, sparse = Watched(batch.params), Watched([*batch.params, *batch.state]), True
            self.lasting.append(lasting)
            self.alive.append(params)
            itemsize = 0
        else:
            params, lasting, sparse, itemsize = batch.grads, batch.lasting, False, batch.grad_dtype.itemsize
        return [
            len(lasting.tensors),
            lasting.objects.ctypes.data,
            self._keep(*[0] * IMAGE * len(lasting.tensors)).ctypes.data,
            len(params.tensors),
            params.objects.ctypes.data,
            self._keep(*[0] * GRAD_IMAGE * len(params.tensors)).ctypes.data,
            params.sizes.ctypes.data,
            params.kinds.ctypes.data,
            itemsize,
            c.steps.ctypes.data,
            len(c.row),
            c.row.ctypes.data,
            sparse,
        ]

    def _keep(self, *words: int) -> Words:
        made = np.array(words, np.int64)
        self.alive.append(made)
        return made


class Coefficients:
    """The coefficients of the next step of a batch, worked out while the device is at work on this one."""

    def __init__(self, job: KernelBatch, batch: Batch | RowBatch) -> None:
        self.options, self.update, self.batch = job.options, job.update, batch
        self.row = np.zeros(batch.numbers.columns)
        self.lr: Any = None
        steps = batch.numbers.counts
        if steps is None:
            raise UnavailableError("numbers of the step are on the device")
        if not self.renew():
            raise UnavailableError("an option is a tensor, an array or a list, which may change unseen")
        self.steps = steps
        grads = 0 if isinstance(batch, RowBatch) else len(batch.params)
        self.words = len(self.row) + grads + grads % 2
        """That the device gets of it: the coefficients, then where the gradients lie."""

    def renew(self) -> bool:
        """Work them out; False if that has to wait until they are needed, since an option may change unseen."""
        options, steps = self.options, self.batch.numbers.counts
        unseen = isinstance(options["lr"], str) or any(isinstance(value, MUTABLE) for value in _flat(options))
        if steps is None or unseen:  # numpy would read a number out of a string: let the usual step refuse it
            self.row[0] = np.nan  # no step is the one before this
            return False
        t = next_step(float(steps[0]))
        values = self.update.general_coefficients(t, options, scalars.ScalarFunctions)
        self.row[: 1 + len(values)] = [t, *values.values()]
        self.lr = options["lr"]
        return True


def _flat(options: Mapping[str, Any]) -> list[Any]:
    """All values, those in tuples too."""
    found: list[Any] = []
    for name, value in options.items():
        if name not in ("params", "param_names"):
            found += value if isinstance(value, tuple) else (value,)
    return found


def _watchable(held: Any) -> bool:
    return isinstance(held, dict | list)


def _batches(work: Work) -> list[tuple[KernelBatch, Batch | RowBatch]]:
    if not work or not all(isinstance(engine, Cuda | CudaRows) for engine, _ in work):
        raise UnavailableError("serves the engines 'cuda' and 'cuda-rows' only")
    made = [(job, job.memo.get(engine.name, [])) for engine, jobs in work for job in jobs]
    if not all(batches for _, batches in made):
        raise UnavailableError("no step of it was taken yet, but in a graph")
    found: list[tuple[KernelBatch, Batch | RowBatch]] = [(job, batch) for job, batches in made for batch in batches]
    device = found[0][1].params[0].device
    for job, batch in found:
        if any(param.is_inference() for param in batch.params):
            raise UnavailableError("a parameter was made in inference mode")
        if batch.params[0].device != device:
            raise UnavailableError("serves one device only")
        if job.grad_scale is not None or job.found_inf is not None or batch.numbers.stay:
            raise UnavailableError("numbers of the step are on the device")
        if isinstance(batch, RowBatch):
            if stochastic(job.options):
                raise UnavailableError("rows are to be rounded stochastically")
            if batch.by_step is not None:
                raise UnavailableError("rows count their own steps")
        elif not batch.grads.grads or (batch.grads.kinds < 0).any():
            raise UnavailableError("gradients are not in plain memory")
        elif not (batch.grads.kinds & batch.lasting.kinds[: len(batch.params)] & 1).all():
            raise UnavailableError("parameters or gradients are not contiguous")
    if capturing(device):
        raise UnavailableError("a graph is being captured")
    return found


# Tables ---------------------------------------------------------------------------------------------------------------

# Words that the arguments of prepared kernels lie in. Those of a step:
STEPS_OWN = ("ids", "n", "values", "made", "partials", "sources", "offsets", "starts", "bags", "batch", "first")
AFTER_SORTING = ("keys", "order")


class ReplayedTable:
    """A table of a prepared step: `take` gives it the gradient of this one, before the first of its launches;
    `sort` has to come after that, and before the two others."""

    def __init__(self, batch: RowBatch, i: int, coefficients: int) -> None:
        """`coefficients`: where on the device they lie. Raises UnavailableError where launches are not known."""
        slot, dtypes = batch.slots[i], batch.dtypes[i]
        param, spec = slot.param, batch.specs[i]
        self.param, self.shape, self.rows = param, param.shape, param.shape[0]
        self.width = param.numel() // self.rows if self.rows else 0
        if not self.width:
            raise UnavailableError("a table is empty")
        self.dtypes, self.in_bags = dtypes, len(dtypes) > 2
        error = error_of(param)
        self.error = error.numpy()
        aligned = [(dtype, True) for dtype in dtypes[1:]]
        kind = param.device, self.rows, kind_of(error), (*aligned, *[(torch.int64, True)] * self.in_bags)
        bounds = [Bound.of(make_keys(self.in_bags), kind)]
        state, seed = tensors_of(slot), slot.seed if slot.storage else None
        self.how, kind = launches_for(
            spec, param, state, dtypes[0], in_bags=self.in_bags, counts=slot.counts, seed=seed
        )
        bounds.append(Bound.of(self.how.rows, kind))
        self.longest, self.outgrown = LONGEST, False
        try:
            bounds.append(Bound.of(self.how.seams, kind))
        except UnavailableError:  # no step had more than one tile yet
            bounds.append(bounds[-1])  # and is not launched
            self.longest = self.how.cut.tile
        lasting = {"p": param, **state}
        lasting |= {"error": error} | ({} if slot.counts is None else {"counts": slot.counts})
        fixed = {name: tensor.data_ptr() for name, tensor in lasting.items()}
        fixed |= {"coefficients": coefficients, "rows": self.rows, "width": self.width, "seed": seed or 0}
        self.words = np.array([0] * len(STEPS_OWN + AFTER_SORTING) + list(fixed.values()), np.int64)
        named = {name: self.words[k:] for k, name in enumerate([*STEPS_OWN, *AFTER_SORTING, *fixed])}
        before = {**named, "keys": named["made"]}
        self.places = [
            np.array(bound.places(words), np.int64) for bound, words in zip(bounds, (before, named, named), strict=True)
        ]
        self.launches = [
            [bound.function, 0, 1, bound.threads, bound.shared, places.ctypes.data]
            for bound, places in zip(bounds, self.places, strict=True)
        ]
        self.n = 0
        self.memory = torch.empty(0, dtype=key_dtype(self.rows), device=param.device)
        self.partials = torch.empty(0, dtype=self.how.work, device=param.device)
        self.sources = torch.empty(0, dtype=torch.int32, device=param.device)
        self.alive = lasting
        self.like = self

    def place(self, making: Words, *after: Words) -> None:
        """Its launches are going to be read here."""
        self.making, self.after = making, after

    def take(self, grad: Tensor | None, known: dict[Any, ReplayedTable]) -> bool:
        """The gradient of this step, if it is like those before. `known` are tables that have taken theirs, by ids."""
        if type(grad) is not Tensor or not grad.is_sparse or grad.is_coalesced() or grad.shape != self.shape:
            return False
        ids = grad._indices()
        if not self._take(ids, grad._values(), ids.numel()):
            return False
        self.like = known.setdefault((int(self.words[0]), self.n, self.rows), self)
        if self.like is not self:  # tables that are looked up with the same ids share one sort
            self.making[1] = 0
        return True

    def take_rows(self, grad: RowGrad) -> bool:
        """The same for a table that is updated alone."""
        bags = grad.bags
        if grad.distinct or (bags is None) == self.in_bags:
            return False
        if bags is None:
            return self._take(grad.ids, grad.values, grad.ids.numel())
        offsets, starts = bags.offsets, bags.starts
        where = offsets.data_ptr(), starts.data_ptr()
        if offsets.dtype is not self.dtypes[2] or starts.dtype is not torch.int64 or (where[0] | where[1]) & 15:
            return False
        self.words[6:11] = *where, bags.number, bags.batch, bags.first
        return self._take(grad.ids, grad.values, bags.number)

    def _take(self, ids: Tensor, values: Tensor, gradients: int) -> bool:
        n, where, at = ids.numel(), ids.data_ptr(), values.data_ptr()
        if values.numel() != gradients * self.width or not 0 < n <= LONGEST or (where | at) & 15 or self.error[0]:
            return False
        if n > self.longest:
            self.outgrown = True
            return False
        if values.dtype is not self.dtypes[0] or ids.dtype is not self.dtypes[1] or self.param.shape != self.shape:
            return False
        if not ids.is_contiguous() or not values.is_contiguous():
            return False
        if n != self.n:
            self._make_room(n)
        self.words[:3] = where, n, at
        self.making[1] = -(-n // KEYS)
        return True

    def _make_room(self, n: int) -> None:
        (tiles, across), device = self.how.cut.grid(n, self.width), self.param.device
        if n > len(self.memory):
            partials = torch.empty((tiles, 2, self.width), dtype=self.how.work, device=device)
            sources = torch.empty(n if self.in_bags else 0, dtype=torch.int32, device=device)
            memory = torch.empty(n, dtype=self.memory.dtype, device=device)
            self.memory, self.partials, self.sources = memory, partials, sources  # all or, out of memory, none
        self.n, self.made = n, self.memory[:n]
        self.words[3:6] = self.made.data_ptr(), self.partials.data_ptr(), self.sources.data_ptr()
        for launch, blocks in zip(self.after, (tiles, tiles - 1), strict=True):
            launch[1:3] = blocks, across

    def sort(self) -> Any:
        """Sort the keys. What this returns must live until the launches that follow."""
        if self.like is not self:
            self.words[11:13] = self.like.words[11:13]
            return None
        found = torch.sort(self.made, stable=True)
        self.words[11:13] = found[0].data_ptr(), found[1].data_ptr()
        return found


# Compiled functions, and what they call -------------------------------------------------------------------------------


class Driver:
    """What the compiled function calls of CUDA, and what is needed of it to prepare a step."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self.functions = _addresses(library, CUDA)
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"the CUDA driver lacks what it takes: {error}") from None
        self.current_stream: Callable[[int], Address] = torch._C._cuda_getCurrentRawStream
        self.get_context = library.cuCtxGetCurrent

    def context(self) -> Address:
        context = ctypes.c_void_p()
        self.get_context(ctypes.byref(context))
        return context.value or 0

    def event(self) -> tuple[Any, Address]:
        """An event that has happened."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event, int(event.cuda_event)


@cache
def driver() -> Driver:
    return Driver()


@cache
def _python() -> Words:
    return _addresses(ctypes.pythonapi, PYTHON)


def _addresses(library: ctypes.CDLL, names: Sequence[str]) -> Words:
    return np.array([ctypes.cast(library[name], ctypes.c_void_p).value for name in names], np.int64)


_NO_SCRATCH = np.zeros(1, np.int64)


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
    def of(cls, launch: Launch, kind: Any) -> Bound:
        """What a launch like those before takes. Raises UnavailableError where that is not known."""
        if kind not in launch.compiled:
            raise UnavailableError("how this version of Triton launches kernels is not known")
        return cls.of_compiled(launch.compiled[kind])

    @classmethod
    def of_compiled(cls, compiled: Any) -> Bound:
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
        return [*(words[name].ctypes.data for name in self.names), _NO_SCRATCH.ctypes.data, _NO_SCRATCH.ctypes.data]


def _look() -> CompiledLook:
    found = compiled_look()
    if found is None:
        missing = torch_symbols().missing
        reason = f"torch {torch.__version__} lacks the symbols {', '.join(missing)}" if missing else "no C kernels"
        raise UnavailableError(f"the compiled function that looks at tensors is not there: {reason}")
    return found


def _known_layout() -> Layout:
    found = layout()
    if found is None:
        raise UnavailableError(f"what tensors of torch {torch.__version__} are made of is not known")
    return found


@cache
def _bump_version() -> Address:
    """What tells autograd that a tensor was changed."""
    found = address_of("libtorch_cpu", BUMP_VERSION)
    if not found:
        raise UnavailableError(f"torch {torch.__version__} lacks the symbol {BUMP_VERSION}")
    return found


@dataclass(frozen=True)
class Compiled:
    """The functions of native/src/step_replay.c."""

    step: Any
    note: Any
    launch: Any


@cache
def _compiled(path: str) -> Compiled:
    """Of the library at this path. Python's lock is held while they look at its dicts and lists, not in launches."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    locked = ctypes.PyDLL(path)
    locked.cadam_replay_step.argtypes, locked.cadam_replay_step.restype = [pointer, pointer], number
    locked.cadam_replay_note.argtypes, locked.cadam_replay_note.restype = [pointer], None
    launch = ctypes.CDLL(path).cadam_replay_launch
    launch.argtypes, launch.restype = [pointer, pointer, number, pointer], number
    return Compiled(locked.cadam_replay_step, locked.cadam_replay_note, launch)


# What torch's tensors are made of --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where torch keeps what matters in its tensors and storages, counted in words of 8 bytes."""

    storage: int
    offset: int
    size: int
    """The word after it holds dtype, device and flags, and the next one the keys that say of what kind it is."""
    data: int
    meant: int = -1
    """The bits of that word with dtype, device and flags that mean something; others may hold anything."""

    def image(self, tensor: Tensor) -> tuple[int, ...]:
        size, flags, keys = _words(tensor._cdata, TENSOR_WORDS)[self.size : self.size + 3]
        return size, flags & self.meant, keys


TENSOR_WORDS, STORAGE_WORDS = 23, 5  # that there are at the least


@cache
def layout() -> Layout | None:
    """The layout, if some samples show one that tells apart all that must be told apart."""
    with torch.device("cpu"), torch.inference_mode(False):  # whatever the user's default is
        return _layout()


def _layout() -> Layout | None:
    ones = partial(torch.ones, dtype=torch.float32)
    sample = ones(150_000).as_strided((127, 331), (331, 1), 104_729)
    storage = sample.untyped_storage()
    places = [_only(_words(sample._cdata, TENSOR_WORDS), n) for n in (storage._cdata, 104_729, 127 * 331)]
    places.append(_only(_words(storage._cdata, STORAGE_WORDS - 2), storage.data_ptr()))
    if any(place is None for place in places) or (places[2] or 0) + 3 > TENSOR_WORDS:
        return None
    found = Layout(*places)  # type: ignore[arg-type]
    plain = ones(6, 6)
    alike = [ones(6, 6), ones(36).view(6, 6), ones(100)[3:39].view(6, 6)]
    alike += [ones(6, 6) for _ in range(200)]
    varying = 0
    for x in alike:
        varying |= found.image(x)[1] ^ found.image(plain)[1]
    found = replace(found, meant=~varying)
    other = [plain.t(), plain.int(), plain.double(), ones(6, 6, device="meta"), plain[:5]]
    other += [
        torch._neg_view(plain),
        plain.to_sparse(),
        torch._efficientzerotensor((6, 6), dtype=torch.float32),
        plain[0].expand(6, 6),
    ]
    image = found.image(plain)
    good = all(found.image(x) == image for x in alike) and all(found.image(x) != image for x in other)
    return found if good else None


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def _only(words: list[int], number: int) -> int | None:
    return words.index(number) if words.count(number) == 1 else None
