"""Step replay on CUDA: one call of a compiled function from `step()` to the kernel launches.

From one step to the next, usually only the addresses of the gradients, the learning rate and the step count change.
Planning such a step in Python takes longer than the step of a small model, and keeps the device waiting for a large
one. So a step is recorded: a compiled function then checks that options, parameters and state are the same objects in
the same memory, writes the gradients' addresses and the coefficients into pinned memory, copies them to the device and
launches the kernels. If anything else has changed it does nothing, and the step is planned again.

The ids of sparse gradients are sorted by torch. A second call launches the kernels that need the sorted ids; meanwhile
the device updates the dense parameters.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...native.container_snapshot import ContainerSnapshot, python_functions
from ...native.loader import package_library
from ...native.structs import REPLAY_LAUNCH, REPLAY_PART, REPLAY_STEP, Records
from ...native.tensor_snapshot import TensorSnapshot, can_snapshot_in_c
from ...native.torch_symbols import torch_symbols
from ...rules.update import ScalarFunctions
from ..base import KernelBatch, Refusal, RefusalKind, UnavailableError, Words, Work, capturing
from ..replay import TrackedContainers, is_replay_enabled
from ..resolved_group import ResolvedGroup
from .dense import Batch, Cuda
from .launch import Launch, mark_in_use, next_step, rounds_stochastically
from .sparse import CudaRows, RowBatch, find_launches, tensors_of
from .sparse_grad import IDS_PER_PROGRAM, MAX_IDS, RowGrad, error_of, key_dtype, kind_of, make_keys

DRIVER_FUNCTIONS = (
    "cuCtxGetCurrent",
    "cuStreamIsCapturing",
    "cuEventQuery",
    "cuEventRecord",
    "cuMemcpyHtoDAsync_v2",
    "cuLaunchKernel",
)
"""Functions of the CUDA driver, in the order of the struct cuda_functions of native/src/structs.h."""
SLOTS = 8
"""Maximum number of steps that the host may be ahead of the device. Further steps are not replayed but planned."""
MUTABLE = (Tensor, np.ndarray, list, dict, set)
"""Types of options whose value can change while the object stays the same."""


def record(work: Work, containers: TrackedContainers) -> CudaStep | Refusal:
    """Record the step that was just taken, or return why it cannot be replayed."""
    reason = disabled_reason(containers.groups)
    if reason:
        return Refusal(RefusalKind.NOT_REQUESTED, reason)
    try:
        return CudaStep(work, containers)
    except (UnavailableError, RuntimeError) as error:  # for example out of memory; the step itself is complete
        return Refusal(RefusalKind.UNAVAILABLE, str(error))


def disabled_reason(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why the user does not want steps to be replayed, or None."""
    try:
        if not is_replay_enabled():
            return f"CADAM_REPLAY={os.environ['CADAM_REPLAY']} is set"
    except ValueError as error:  # an invalid value that was set after the optimizer was constructed
        return str(error)
    return "replay=False was asked for" if any(group.get("replay") is False for group in groups) else None


class CudaStep:
    """A recorded step with everything that is needed to take it again. Implements `ReplayedStep`."""

    def __init__(self, work: Work, containers: TrackedContainers) -> None:
        """Record a step.

        Args:
            work: The batches of all engines, which have just run.
            containers: The dicts and lists that must keep their entries.

        Raises:
            UnavailableError: This step cannot be replayed; the message says why.
        """
        batches = _replayable_batches(work)
        device = batches[0][1].params[0].device
        # Each replay compares the current context with that of the recording.
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            raise UnavailableError("the parameters are not on the current device")
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise UnavailableError("this Python has no global interpreter lock")
        _require_compiled_snapshots()
        self.driver = driver()
        self.device_index = -1 if device.index is None else device.index
        self.stream = self.driver.current_stream(self.device_index)
        self.containers = containers
        self.parts = [_Part(job, batch) for job, batch in batches]
        words = sum(part.words for part in self.parts)
        host = torch.empty((SLOTS, words), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        mark_in_use(host, device)
        self.device_words = torch.empty(words, dtype=torch.int64, device=device)
        events = [self.driver.event() for _ in range(SLOTS)]
        event_addresses = np.array([address for _, address in events], np.int64)
        self.part_records = parts = np.array([part.record for part in self.parts], REPLAY_PART)
        self.tables: list[ReplayedTable] = []
        self._arguments: list[Any] = []
        launches = self._make_launches()
        self._track_containers()
        library = package_library()
        self.header = np.zeros(1, REPLAY_STEP)
        self.header[0] = (
            library.torch.ctypes.data,
            python_functions().ctypes.data,
            self.driver.functions.ctypes.data,
            len(self.tracked.records),
            self.tracked.records.ctypes.data,
            len(parts),
            parts.ctypes.data,
            len(launches) - 2 * len(self.tables),
            launches.ctypes.data,
            self.driver.context(),
            host.data_ptr(),
            words,
            SLOTS,
            0,
            event_addresses.ctypes.data,
            self.device_words.data_ptr(),
        )
        self._keep_alive = [library, host, events, event_addresses, parts, launches]
        self._replay_step, self._launch = library.locked.cadam_replay_step, library.c.cadam_replay_launch
        after_sort = launches[len(launches) - 2 * len(self.tables) :]
        self._launches_after_sort = self.driver.functions.ctypes.data, after_sort.ctypes.data, len(after_sort)

    def step(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Replay the step. Returns False, without any effect, if something else than the gradients has changed."""
        if groups is not self.containers.groups or state is not self.containers.state or not self._is_same_stream():
            return False
        sorted_tables: dict[Any, ReplayedTable] = {}
        return all(table.take(table.param.grad, sorted_tables) for table in self.tables) and self._replay()

    def update_rows(self, grad: RowGrad, step: int) -> bool:
        """Replay the update of a single table with this gradient and step count. Returns False like `step`."""
        self.parts[0].steps[0] = step - 1
        return self._is_same_stream() and self.tables[0].take_rows(grad) and self._replay()

    def renew(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any]) -> bool:
        """Adopt the options and step counts after a step that was planned.

        Returns:
            False if the recording cannot be used any more: a table has moved or got too many ids or steps, the
            coefficients of its rows were computed again, the groups are different ones, steps are taken on another
            stream, or replay was turned off.
        """
        if groups is not self.containers.groups or state is not self.containers.state or disabled_reason(groups):
            return False
        # The memory of dense parameters is checked by the plan.
        news = [part.update_snapshots() for part in self.parts]
        if any(new and part.is_sparse for new, part in zip(news, self.parts, strict=True)):
            return False
        if any(table.is_outdated for table in self.tables):
            return False
        tracked = self._tracked_groups()
        if len(tracked) != self.group_containers or not all(map(_is_trackable, tracked)):
            return False
        # Only the groups are tracked again. The containers of the state do not change while the plan is valid.
        for index, container in enumerate(tracked):
            self.tracked.track(index, container)
        renewed = [part.renew() for part in self.parts]
        return all(renewed) and self._is_same_stream()

    def _is_same_stream(self) -> bool:
        return self.driver.current_stream(self.device_index) == self.stream

    def _replay(self) -> bool:
        """Replay the step after the tables have accepted their gradients."""
        for part in self.parts:
            if part.options["lr"] is not part.lr and not part.renew():
                return False
        if any(param.grad is not None for param in self.containers.absent):
            return False
        for part in self.parts:
            part.read_handles()
        failed = self._replay_step(self.header.ctypes.data, self.stream)
        if failed < 0:
            return False
        if self.tables and not failed:
            in_use = [table.sort() for table in self.tables]
            failed = self._launch(*self._launches_after_sort, self.stream)
            del in_use  # after the launches, other work on this stream may reuse the memory
        if failed:
            raise RuntimeError(f"the CUDA driver reports error {failed} for a step of the optimizer")
        for part in self.parts:
            torch.autograd.graph.increment_version(part.params)
            part.renew()  # while the device is busy with this step
        return True

    def _track_containers(self) -> None:
        """Remember the objects in all dicts and lists that must not change."""
        groups = self._tracked_groups()
        containers = [*groups, self.containers.state, *self.containers.states]
        if not all(map(_is_trackable, containers)):
            raise UnavailableError("the parameter groups or their parameters are not in lists")
        self.group_containers = len(groups)
        self.tracked = ContainerSnapshot(containers, ignored_keys=("lr",))

    def _tracked_groups(self) -> list[Any]:
        """Return the parameter groups, their list, and the lists of their parameters."""
        groups = self.containers.groups
        return [*groups, groups, *(group["params"] for group in groups if "params" in group)]

    def _make_launches(self) -> Records:
        """Return the kernel launches. The last ones, two for each table, come after its ids are sorted."""
        launches: list[tuple[int, ...]] = []
        start = self.device_words.data_ptr()
        for part in self.parts:
            batch = part.batch
            if isinstance(batch, RowBatch):
                self.tables += [ReplayedTable(part.group, batch, i, start) for i in range(len(batch.params))]
            else:
                kind = (None, bool(part.options["stochastic_rounding"]))
                for blocks, i, alone in batch.launches:
                    kernel = BoundKernel.of(batch.launch(alone, *kind), kind)
                    launches.append(self._dense_launch(kernel, batch, blocks, i, start, start + 8 * len(part.row)))
            start += 8 * part.words
        dense = len(launches)
        launches += [table.launches[0] for table in self.tables]
        launches += [launch for table in self.tables for launch in table.launches[1:]]
        records = np.array(launches, REPLAY_LAUNCH)
        for i, table in enumerate(self.tables):
            after_sort = dense + len(self.tables) + 2 * i
            table.set_launches(records[dense + i], records[after_sort], records[after_sort + 1])
        return records

    def _dense_launch(
        self, kernel: BoundKernel, batch: Batch, blocks: int, i: int, coefficients: int, grads: int
    ) -> tuple[int, ...]:
        values = {"table": batch.table.data_ptr(), "grads": grads, "coefficients": coefficients, "stride": 0}
        values |= {"owners": batch.owners.data_ptr(), "tensor_number": i}
        arguments = _arguments(values)
        addresses = kernel.argument_addresses(_field_addresses(arguments))
        self._arguments += [arguments, addresses]
        return kernel.function, blocks, 1, kernel.threads, kernel.shared_bytes, addresses.ctypes.data


class _Part:
    """A batch of a recorded step: its snapshots, and the coefficients of the next step.

    The coefficients are computed while the device is busy with the present step.

    Attributes:
        record: The fields of the C struct replay_part.
        words: The number of 64-bit words that the device receives: coefficients, then addresses of gradients.
    """

    def __init__(self, job: KernelBatch, batch: Batch | RowBatch) -> None:
        self.group, self.options, self.update = job.group, job.group.source, job.group.update
        self.batch, self.params = batch, batch.params
        self.is_sparse = isinstance(batch, RowBatch)
        self.row = np.zeros(batch.numbers.columns)
        self.lr: Any = None
        steps = batch.numbers.counts
        if steps is None:
            raise UnavailableError("step counts are on the device")
        if not self.renew():
            raise UnavailableError("an option is a tensor, an array or a list, whose value may change unnoticed")
        self.steps = steps
        self.fixed = TensorSnapshot([*batch.params, *batch.state], swappable=batch.params)
        self.grads = None if self.is_sparse else TensorSnapshot(batch.params, of_grads=True)
        grads = 0 if self.grads is None else len(batch.params)
        self.words = len(self.row) + grads + grads % 2
        self.record = (
            len(self.fixed.tensors),
            self.fixed.handles.ctypes.data,
            self.fixed.addresses.ctypes.data,
            self.fixed.sizes.ctypes.data,
            self.fixed.kinds.ctypes.data,
            len(batch.params),
            0 if self.grads is None else self.grads.handles.ctypes.data,
            0 if self.grads is None else self.grads.sizes.ctypes.data,
            0 if self.grads is None else self.grads.kinds.ctypes.data,
            self.steps.ctypes.data,
            len(self.row),
            self.row.ctypes.data,
            self.is_sparse,
        )

    def renew(self) -> bool:
        """Compute the coefficients of the next step. Returns False if an option may change unnoticed until then."""
        options, steps = self.options, self.batch.numbers.counts
        is_mutable = isinstance(options["lr"], str) or any(isinstance(value, MUTABLE) for value in _flat(options))
        if steps is None or is_mutable:  # numpy would convert a string to a number; planning the step rejects it
            self.row[0] = np.nan  # NaN never equals a step count, so the compiled function does not take the step
            return False
        t = next_step(float(steps[0]))
        values = self.update.general_coefficients(t, options, ScalarFunctions)
        self.row[: 1 + len(values)] = [t, *values.values()]
        self.lr = options["lr"]
        return True

    def read_handles(self) -> None:
        """Read the handles of parameters and gradients."""
        self.fixed.read_handles()
        if self.grads is not None:
            self.grads.read_handles()

    def update_snapshots(self) -> int:
        """Adopt the memory of parameters and state, and return the kinds of changes.

        The kinds of gradients stay those of the recording, which the kernels can read. A planned step may have copied
        gradients of another kind, such as zeros without memory, and a replayed step would read their address.
        """
        return self.fixed.update()


def _flat(options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values of all options, and the entries of tuples."""
    for name, value in options.items():
        if name not in ("params", "param_names"):
            yield from value if isinstance(value, tuple) else (value,)


def _is_trackable(container: Any) -> bool:
    return isinstance(container, dict | list)


def _replayable_batches(work: Work) -> list[tuple[KernelBatch, Batch | RowBatch]]:
    """Return the batches of a step, or raise UnavailableError if it cannot be replayed."""
    if not work or not all(isinstance(engine, Cuda | CudaRows) for engine, _ in work):
        raise UnavailableError("replays only steps of the engines 'cuda' and 'cuda-rows'")
    made = [(job, job.memo.get(engine.name, [])) for engine, jobs in work for job in jobs]
    if not all(batches for _, batches in made):
        raise UnavailableError("every step so far was captured into a CUDA graph")
    all_batches: list[tuple[KernelBatch, Batch | RowBatch]] = [(job, batch) for job, some in made for batch in some]
    device = all_batches[0][1].params[0].device
    for job, batch in all_batches:
        if any(param.is_inference() for param in batch.params):
            raise UnavailableError("a parameter was created in inference mode")
        if batch.params[0].device != device:
            raise UnavailableError("the parameters are on several devices")
        if job.grad_scale is not None or job.found_inf is not None or batch.numbers.on_device:
            raise UnavailableError("step counts or gradient scales are on the device")
        if isinstance(batch, RowBatch):
            if rounds_stochastically(job.group):
                raise UnavailableError("embedding rows are rounded stochastically")
            continue
        grads = job.grad_snapshot
        kinds = None if grads is None else grads.kinds[job.grad_index[batch.positions]]
        if kinds is None or (kinds < 0).any():
            raise UnavailableError("gradients are not in plain memory")
        if not batch.is_contiguous or not (kinds & 1).all():
            raise UnavailableError("parameters or gradients are not contiguous")
    if capturing(device):
        raise UnavailableError("a CUDA graph is being captured")
    return all_batches


# Tables ---------------------------------------------------------------------------------------------------------------

GRADIENT_ARGUMENTS = (
    "ids",
    "n",
    "values",
    "made",
    "partials",
    "sources",
    "offsets",
    "starts",
    "bags",
    "batch",
    "first",
)
"""Arguments of a table's kernels that depend on the gradient of the step; `made` are the keys before sorting."""
SORT_ARGUMENTS = ("keys", "order")
"""Kernel arguments that are results of torch's sort."""


class ReplayedTable:
    """An embedding table of a recorded step.

    `take` accepts the gradient of a step before the first launch, which makes the keys. `sort` comes after that launch
    and before the two others, which update the rows.
    """

    def __init__(self, group: ResolvedGroup, batch: RowBatch, i: int, coefficients: int) -> None:
        """Record the launches of a table.

        Args:
            group: The resolved options of the table's group.
            batch: The batch of the table.
            i: The index of the table in the batch.
            coefficients: The address of the coefficients on the device.

        Raises:
            UnavailableError: The launches of the table are not known.
        """
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
        kernels = [BoundKernel.of(make_keys(self.in_bags), kind)]
        self.coefficient_table = batch.coefficient_table
        self.coefficients_by_step = None if self.coefficient_table is None else self.coefficient_table.rows
        state = tensors_of(slot, self.coefficients_by_step, batch.aging_tables.tables.get(slot.work_dtype))
        steps = batch.numbers.counts
        assert steps is not None  # `_Part` refuses step counts on the device
        self.step_count = steps[i : i + 1]
        self.last_step = batch.aging_tables.last_step(group, slot)
        self.kernels, kind = find_launches(
            spec, param, state, dtypes[0], in_bags=self.in_bags, counts=slot.counts, seed=slot.seed
        )
        kernels.append(BoundKernel.of(self.kernels.within_tiles, kind))
        self.max_ids, self.outgrown = MAX_IDS, False
        try:
            kernels.append(BoundKernel.of(self.kernels.across_tiles, kind))
        except UnavailableError:  # no step had more than one tile yet, so the kernel is not compiled
            kernels.append(kernels[-1])  # it is never launched, because of `max_ids`
            self.max_ids = self.kernels.tile.ids
        tensors = {"p": param, **state, "error": error}
        if slot.counts is not None:
            tensors["counts"] = slot.counts
        fixed = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        fixed |= {"coefficients": coefficients, "rows": self.rows, "width": self.width, "seed": slot.seed}
        self.arguments = _arguments({**dict.fromkeys((*GRADIENT_ARGUMENTS, *SORT_ARGUMENTS), 0), **fixed})
        addresses = _field_addresses(self.arguments)
        before_sort = {**addresses, "keys": addresses["made"]}
        self.argument_addresses = [
            kernel.argument_addresses(named)
            for kernel, named in zip(kernels, (before_sort, addresses, addresses), strict=True)
        ]
        self.launches = [
            (kernel.function, 0, 1, kernel.threads, kernel.shared_bytes, where.ctypes.data)
            for kernel, where in zip(kernels, self.argument_addresses, strict=True)
        ]
        self.n = 0
        self.memory = torch.empty(0, dtype=key_dtype(self.rows), device=param.device)
        self.partials = torch.empty(0, dtype=self.kernels.work, device=param.device)
        self.sources = torch.empty(0, dtype=torch.int32, device=param.device)
        self._keep_alive = tensors
        self.sorted_by = self
        """The table that sorts the ids: another one if both are looked up with the same ids."""

    @property
    def is_outdated(self) -> bool:
        """Whether the table got too many ids or steps, or the coefficients by step were computed again."""
        table = self.coefficient_table
        return self.outgrown or (table is not None and table.rows is not self.coefficients_by_step)

    def set_launches(self, make_keys: Any, *after_sort: Any) -> None:
        """Set the launch records that this table fills in."""
        self.make_keys, self.after_sort = make_keys, after_sort

    def take(self, grad: Tensor | None, sorted_tables: dict[Any, ReplayedTable]) -> bool:
        """Accept the gradient of this step. Returns False if it differs from those before in type or shape.

        Args:
            grad: The gradient.
            sorted_tables: The tables that have accepted their gradients, by the ids of these.
        """
        if type(grad) is not Tensor or not grad.is_sparse or grad.is_coalesced() or grad.shape != self.shape:
            return False
        ids = grad._indices()
        if not self._take(ids, grad._values(), ids.numel()):
            return False
        self.sorted_by = sorted_tables.setdefault((ids.data_ptr(), self.n, self.rows), self)
        if self.sorted_by is not self:
            self.make_keys["blocks_x"] = 0
        return True

    def take_rows(self, grad: RowGrad) -> bool:
        """Accept the gradient of a table that is updated alone. Returns False like `take`."""
        bags = grad.bags
        if grad.distinct or (bags is None) == self.in_bags:
            return False
        if bags is None:
            return self._take(grad.ids, grad.values, grad.ids.numel())
        offsets, starts = bags.offsets, bags.starts
        if offsets.dtype is not self.dtypes[2] or starts.dtype is not torch.int64:
            return False
        if (offsets.data_ptr() | starts.data_ptr()) & 15:
            return False
        arguments = self.arguments
        arguments["offsets"], arguments["starts"] = offsets.data_ptr(), starts.data_ptr()
        arguments["bags"], arguments["batch"], arguments["first"] = bags.number, bags.batch, bags.first
        return self._take(grad.ids, grad.values, bags.number)

    def _take(self, ids: Tensor, values: Tensor, gradients: int) -> bool:
        n, ids_address, values_address = ids.numel(), ids.data_ptr(), values.data_ptr()
        if values.numel() != gradients * self.width or not 0 < n <= MAX_IDS or self.error[0]:
            return False
        if (ids_address | values_address) & 15:
            return False
        if n > self.max_ids or (self.last_step is not None and self.step_count[0] >= self.last_step):
            self.outgrown = True
            return False
        if values.dtype is not self.dtypes[0] or ids.dtype is not self.dtypes[1] or self.param.shape != self.shape:
            return False
        if not ids.is_contiguous() or not values.is_contiguous():
            return False
        if n != self.n:
            self._allocate(n)
        arguments = self.arguments
        arguments["ids"], arguments["n"], arguments["values"] = ids_address, n, values_address
        self.make_keys["blocks_x"] = -(-n // IDS_PER_PROGRAM)
        return True

    def _allocate(self, n: int) -> None:
        """Provide memory for n ids, and set the number of blocks of the launches."""
        (tiles, across), device = self.kernels.tile.grid(n, self.width), self.param.device
        if n > len(self.memory):
            partials = torch.empty((tiles, 2, self.width), dtype=self.kernels.work, device=device)
            sources = torch.empty(n if self.in_bags else 0, dtype=torch.int32, device=device)
            memory = torch.empty(n, dtype=self.memory.dtype, device=device)
            # Assigned together, so that an allocation that fails leaves all of them unchanged.
            self.memory, self.partials, self.sources = memory, partials, sources
        self.n, self.made = n, self.memory[:n]
        arguments = self.arguments
        arguments["made"], arguments["partials"] = self.made.data_ptr(), self.partials.data_ptr()
        arguments["sources"] = self.sources.data_ptr()
        for launch, blocks in zip(self.after_sort, (tiles, tiles - 1), strict=True):
            launch["blocks_x"], launch["blocks_y"] = blocks, across

    def sort(self) -> Any:
        """Sort the keys. The caller keeps the returned tensors until the launches that follow."""
        arguments = self.arguments
        if self.sorted_by is not self:
            for name in SORT_ARGUMENTS:
                arguments[name] = self.sorted_by.arguments[name]
            return None
        result = torch.sort(self.made, stable=True)
        arguments["keys"], arguments["order"] = result[0].data_ptr(), result[1].data_ptr()
        return result


# Compiled functions ---------------------------------------------------------------------------------------------------


def _arguments(values: Mapping[str, int]) -> Records:
    """Return the arguments of a kernel as a record with one 64-bit word for each."""
    arguments = np.zeros((), np.dtype([(name, np.int64) for name in values]))
    for name, value in values.items():
        arguments[name] = value
    return arguments


def _field_addresses(arguments: Records) -> dict[str, int]:
    offsets = {name: int(field[1]) for name, field in dict(arguments.dtype.fields or {}).items()}
    return {name: arguments.ctypes.data + offset for name, offset in offsets.items()}


class Driver:
    """The functions of the CUDA driver that the compiled function calls, and those that recording needs."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self.functions = _function_addresses(library, DRIVER_FUNCTIONS)
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"the CUDA driver lacks a function: {error}") from None
        self.current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.get_context = library.cuCtxGetCurrent

    def context(self) -> int:
        """Return the current context of this thread."""
        context = ctypes.c_void_p()
        self.get_context(ctypes.byref(context))
        return context.value or 0

    def event(self) -> tuple[Any, int]:
        """Return a recorded event and its address."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event, int(event.cuda_event)


@cache
def driver() -> Driver:
    """Return the CUDA driver of this process."""
    return Driver()


def _function_addresses(library: ctypes.CDLL, names: Sequence[str]) -> Words:
    return np.array([ctypes.cast(library[name], ctypes.c_void_p).value for name in names], np.int64)


_NO_SCRATCH = np.zeros(1, np.int64)


@dataclass(frozen=True)
class BoundKernel:
    """A compiled Triton kernel in the form in which the CUDA driver launches it.

    Attributes:
        function: The handle of the kernel.
        threads: The threads of a block.
        shared_bytes: The memory that the threads of a block share.
        names: The arguments, each a 64-bit word. Two scratch buffers of Triton follow, which these kernels do not use.
    """

    function: int
    threads: int
    shared_bytes: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, launch: Launch, kind: Any) -> BoundKernel:
        """Return the kernel that earlier launches of this kind used.

        Raises:
            UnavailableError: There was no such launch, or this version of Triton launches kernels in another way.
        """
        if kind not in launch.compiled:
            raise UnavailableError("this version of Triton launches kernels in an unknown way")
        return cls.of_compiled(launch.compiled[kind])

    @classmethod
    def of_compiled(cls, compiled: Any) -> BoundKernel:
        """Read the launch parameters of a compiled kernel.

        Raises:
            UnavailableError: The kernel needs more than the driver call of the replay provides.
        """
        packed, metadata = compiled.packed_metadata, compiled.metadata
        unsupported = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
        missing = [name for name in unsupported if not hasattr(metadata, name)]
        if len(packed) != 3 or missing:
            raise UnavailableError(f"Triton describes the kernel {compiled.name} by {packed}, without {missing}")
        warps, blocks_in_cluster, shared_bytes = packed
        needs = [name for name in unsupported if getattr(metadata, name)]
        types = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        needs += [f"{name}: {kind}" for name, kind in types.items() if kind[0] != "*" and kind not in ("i32", "i64")]
        if blocks_in_cluster != 1 or needs:
            raise UnavailableError(
                f"the kernel {compiled.name} needs clusters of {blocks_in_cluster} blocks, and {needs}"
            )
        return cls(compiled.function, 32 * warps, shared_bytes, tuple(types))

    def argument_addresses(self, addresses: Mapping[str, int]) -> Words:
        """Return the addresses of the arguments, in the order of the kernel."""
        scratch = _NO_SCRATCH.ctypes.data
        return np.array([*(addresses[name] for name in self.names), scratch, scratch], np.int64)


def _require_compiled_snapshots() -> None:
    if not can_snapshot_in_c():
        missing = torch_symbols().missing
        reason = f"torch {torch.__version__} lacks the symbols {', '.join(missing)}" if missing else "no C kernels"
        raise UnavailableError(f"compiled snapshots of tensors are not available: {reason}")
