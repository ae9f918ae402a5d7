"""The same step on CUDA once more: one call of a compiled function from `step()` to the launch.

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
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import scalars
from ..base import Engine, Job
from ..cpu.library import Library, Numbers, UnavailableError, torch_library
from ..watch import Eyes, Layout, Watched, eyes, layout
from .dense import Batch, Bound, Cuda, capturing, lend, stochastic
from .rows import CudaRows, RowBatch, Table

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
IMAGE, GRAD_IMAGE = 9, 3  # words, as in native/tensors.c
SLOTS = 8  # steps that the host may be ahead of the device before it goes the usual way
MUTABLE = (Tensor, np.ndarray, list, dict, set)  # options that can change and stay the same object

Address = int


class Driver:
    """What the compiled function calls of CUDA, and what is needed of it beforehand."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self.functions = _addresses(library, CUDA)
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"the CUDA driver does not lend what it takes: {error}") from None
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
def _python() -> Numbers:
    return _addresses(ctypes.pythonapi, PYTHON)


def _addresses(library: ctypes.CDLL, names: Sequence[str]) -> Numbers:
    return np.array([ctypes.cast(library[name], ctypes.c_void_p).value for name in names], np.int64)


@dataclass(frozen=True)
class Same:
    """Whose dicts and lists must hold the very objects they did, apart from the learning rate."""

    groups: list[dict[str, Any]]
    state: dict[Any, Any]
    states: Sequence[dict[str, Any]] = ()
    """Of the parameters that are stepped."""
    absent: Sequence[Tensor] = ()
    """Those that have no gradient."""


class Again:
    """A step that was taken before, ready to be taken once more."""

    def __init__(self, work: Sequence[tuple[Engine, Sequence[Job]]], same: Same) -> None:
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
        self.same = same
        self.numbers = [Coefficients(job, batch) for job, batch in batches]
        self.lasting: list[Watched] = []
        """Tables and their state. The parameters of other batches are looked at by the plan."""
        self.kept: list[Any] = []  # what the compiled function has addresses of
        sight, place = _eyes(), _layout()
        words = sum(c.words for c in self.numbers)
        host = torch.empty((SLOTS, words), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        lend(host, device)
        self.sent = torch.empty(words, dtype=torch.int64, device=device)
        events = [self.driver.event() for _ in range(SLOTS)]
        parts = [self._part(c) for c in self.numbers]
        self.tables: list[Table] = []
        launches = self._launches()
        self._watch()
        self.header = self._keep(
            sight.library.torch.ctypes.data,
            _python().ctypes.data,
            self.driver.functions.ctypes.data,
            _bump_version(),
            self._keep(*astuple(place)).ctypes.data,
            sight.place,
            len(self.containers),
            self.containers.ctypes.data,
            len(same.absent),
            self._keep(*map(id, same.absent)).ctypes.data,
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
        self.kept += [sight, host, events]
        self._calls(sight.library, launches)
        self.note(self.address)

    def _calls(self, library: Library, launches: Numbers) -> None:
        self.call, self.note = library.locked.cadam_step_again, library.locked.cadam_note
        self.address = self.header.ctypes.data
        self.launch, later = library.c.cadam_launch, 2 * len(self.tables)
        self.rest = self.driver.functions.ctypes.data, launches[len(launches) - later :].ctypes.data, later

    def step(self, groups: Any, state: Any) -> bool:
        """Take the step, if nothing else has changed. False: nothing was done."""
        if not self.is_of(groups, state) or not self.is_here():
            return False
        known: dict[Any, Table] = {}
        return all(table.take(table.param.grad, known) for table in self.tables) and self.go()

    def is_of(self, groups: Any, state: Any) -> bool:
        return groups is self.same.groups and state is self.same.state

    def is_here(self) -> bool:
        """Are steps taken on the stream that it was prepared for?"""
        return self.current_stream(self.index) == self.stream

    def go(self) -> bool:
        """The same, once the tables have taken the rows of this step; `is_here` is for the caller to ask."""
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

    def renew(self) -> bool:
        """After a step that was taken the usual way: take the options and step counts as they are now.

        False if this will not serve again, and must be let go: a table lies elsewhere or got too many ids, groups are
        not what they were, or steps are taken on another stream.
        """
        if any(lasting.look() for lasting in self.lasting) or any(table.outgrown for table in self.tables):
            return False
        held = self._groups()
        if len(held) != self.lists or not all(map(_watchable, held)):
            return False
        for number, one in enumerate(held):  # the state's are the same as long as the plan is
            self._expect(number, one)
        renewed = [coefficients.renew() for coefficients in self.numbers]
        self.note(self.address)
        return all(renewed) and self.is_here()

    def _watch(self) -> None:
        """See to it that dicts and lists hold the very objects that they hold now."""
        groups = self._groups()
        held = [*groups, self.same.state, *self.same.states]
        if not all(map(_watchable, held)):
            raise UnavailableError("groups or their parameters are not in lists")
        self.lists = len(groups)
        self.containers = np.zeros((len(held), 4), np.int64)
        self.expected: dict[int, Any] = {}
        for number, one in enumerate(held):
            self._expect(number, one)

    def _groups(self) -> list[Any]:
        """The dicts and lists that groups and parameters are in."""
        groups = self.same.groups
        return [*groups, groups, *(group["params"] for group in groups if "params" in group)]

    def _expect(self, number: int, held: Any) -> None:
        is_dict = isinstance(held, dict)
        items = list(held.items() if is_dict else enumerate(held))
        ids = np.array([0 if key == "lr" else id(value) for key, value in items], np.int64)
        self.containers[number] = id(held), is_dict, len(ids), ids.ctypes.data
        # The objects too: an address tells one from another only while both are there.
        self.expected[number] = held, items, ids

    def _launches(self) -> Numbers:
        """Each as six words: function, blocks, blocks across, threads, shared memory and where its arguments are.

        Last come two for each table, for when its ids are sorted.
        """
        words: list[list[int]] = []
        start = self.sent.data_ptr()
        for c in self.numbers:
            batch = c.batch
            if isinstance(batch, RowBatch):
                self.tables += [Table(batch, i, start) for i in range(len(batch.params))]
            else:
                kind = (None, stochastic(c.options))
                for blocks, i, alone in batch.launches:
                    bound = batch.launch(alone, *kind).bound(kind)
                    words.append(self._launch(bound, batch, blocks, i, start, start + 8 * len(c.row)))
            start += 8 * c.words
        first = len(words)
        for table in self.tables:
            words.append(table.launches[0])
        for table in self.tables:
            words += table.launches[1:]
        launches = np.array(words, np.int64).reshape(-1, 6)
        self.kept.append(launches)
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
            self.kept.append(params)
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

    def _keep(self, *words: int) -> Numbers:
        made = np.array(words, np.int64)
        self.kept.append(made)
        return made


class Coefficients:
    """The coefficients of the next step of a batch, worked out while the device is at work on this one."""

    def __init__(self, job: Job, batch: Batch | RowBatch) -> None:
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
        if steps is None or any(isinstance(value, MUTABLE) for value in _flat(options)):
            self.row[0] = np.nan  # no step is the one before this
            return False
        t = float(steps[0] + 1)
        values = self.update.general_coefficients(t, options, scalars.Scalars)
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


def _batches(work: Sequence[tuple[Engine, Sequence[Job]]]) -> list[tuple[Job, Batch | RowBatch]]:
    if not work or not all(isinstance(engine, Cuda | CudaRows) for engine, _ in work):
        raise UnavailableError("serves the engines 'cuda' and 'cuda-rows' only")
    made = [(job, job.memo.get(engine.name, [])) for engine, jobs in work for job in jobs]
    if not all(batches for _, batches in made):
        raise UnavailableError("no step of it was taken yet, but in a graph")
    found: list[tuple[Job, Batch | RowBatch]] = [(job, batch) for job, batches in made for batch in batches]
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
        elif not (batch.grads.kinds & batch.lasting.kinds[: len(batch.params)] & 1).all() or not batch.grads.grads:
            raise UnavailableError("parameters or gradients are not contiguous")
    if capturing(device):
        raise UnavailableError("a graph is being captured")
    return found


def _eyes() -> Eyes:
    found = eyes()
    if found is None:
        raise UnavailableError("the package was installed without its compiled kernels")
    return found


def _layout() -> Layout:
    found = layout()
    if found is None:
        raise UnavailableError(f"what tensors of torch {torch.__version__} are made of is not known")
    return found


@cache
def _bump_version() -> Address:
    """What tells autograd that a tensor was changed."""
    try:
        return int(_addresses(ctypes.CDLL(torch_library("libtorch_cpu")), [BUMP_VERSION])[0])
    except (AttributeError, OSError) as error:
        raise UnavailableError(f"torch {torch.__version__} does not lend what it takes: {error}") from None
