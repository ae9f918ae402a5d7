"""An interpreter that runs an update on tensors or lists of tensors, one torch call per operation.

`cadam.codegen.foreach_fusion` turns an update into a program of fused operations (`addcmul`, `lerp`, ...), and says
which of them may overwrite an operand. This module translates the program into torch calls and runs it. On the CPU,
large tensors are divided into blocks that stay in the cache through all operations; this also bounds the memory of
temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..codegen.foreach_fusion import Instruction, in_place_program
from ..codegen.trace import ARITHMETIC
from ..rules.update import ScalarFunctions, Update
from .base import PLAIN, KernelBatch, ParamSlot, fills_memory
from .resolved_group import read_number

BLOCK = 1 << 17
"""Elements that pass through all operations together. Their parameter, gradient and state fit into a core's cache."""

GATHERED = 1 << 13
"""Elements up to which small tensors are copied into one vector, which is cheaper than a call for each of them."""

MAX_EXACT_COUNT = 1 << 24
"""Up to this number, counting in float32 is exact."""

# Operations --------------------------------------------------------------------------------------------------

mask = torch.ops.aten.threshold_backward.default
"""``torch.where(y <= threshold, 0, x)`` for arguments (x, y, threshold), by the fastest kernel of torch."""
_mask_into = torch.ops.aten.threshold_backward.grad_input


def _mask_(alignment: Tensor, step: Tensor) -> None:
    _mask_into(step, alignment, 0, grad_input=step)


def _mask_list(alignment: list[Tensor], step: list[Tensor]) -> list[Tensor]:
    return [mask(s, a, 0) for a, s in zip(alignment, step, strict=True)]


def _mask_list_(alignment: list[Tensor], step: list[Tensor]) -> None:
    for a, s in zip(alignment, step, strict=True):
        _mask_into(s, a, 0, grad_input=s)


def _maximums(x: list[Tensor], y: Any) -> Any:
    return torch._foreach_maximum(x, y) if isinstance(y, list) else torch._foreach_clamp_min(x, y)


def _maximums_(x: list[Tensor], y: Any) -> None:
    torch._foreach_maximum_(x, y) if isinstance(y, list) else torch._foreach_clamp_min_(x, y)


def maximum(x: Tensor, y: Any) -> Tensor:
    """Return the elementwise maximum of a tensor and a tensor or number."""
    return torch.maximum(x, y) if isinstance(y, Tensor) else torch.clamp_min(x, y)


Forms = dict[str, tuple[Callable[..., Any], Callable[..., Any]]]
"""For each kind of operation, the call that returns a new result and the call that works in place."""
TENSORS: Forms = {
    **{kind: (getattr(Tensor, kind), getattr(Tensor, kind + "_")) for kind in ("add", "sub", "mul", "div", "lerp")},
    **{kind: (getattr(Tensor, kind), getattr(Tensor, kind + "_")) for kind in ("neg", "reciprocal", "sqrt", "sign")},
    "add_scaled": (lambda a, x, s: a.add(x, alpha=s), lambda a, x, s: a.add_(x, alpha=s)),
    "addcmul": (lambda a, x, y, s: a.addcmul(x, y, value=s), lambda a, x, y, s: a.addcmul_(x, y, value=s)),
    "addcdiv": (lambda a, x, y, s: a.addcdiv(x, y, value=s), lambda a, x, y, s: a.addcdiv_(x, y, value=s)),
    "maximum": (maximum, lambda x, y: x.copy_(maximum(x, y))),
    "mask": (lambda a, s: mask(s, a, 0), _mask_),
}
LISTS: Forms = {
    **{
        kind: (getattr(torch, f"_foreach_{kind}"), getattr(torch, f"_foreach_{kind}_"))
        for kind in ("add", "sub", "mul", "div", "lerp", "neg", "reciprocal", "sqrt", "sign", "addcmul", "addcdiv")
    },
    "add_scaled": (
        lambda a, x, s: torch._foreach_add(a, x, alpha=s),
        lambda a, x, s: torch._foreach_add_(a, x, alpha=s),
    ),
    "maximum": (_maximums, _maximums_),
    "mask": (_mask_list, _mask_list_),
}
_SCALARS: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    "sqrt": ScalarFunctions.sqrt,
    "maximum": ScalarFunctions.maximum,
}


def _on_scalars(kind: str, args: list[Any]) -> Any:
    """Run an operation on coefficients, each a number, a tensor or a list of 0-dim tensors."""
    length = next((len(a) for a in args if isinstance(a, list)), None)
    if length is None:
        return _SCALARS[kind](*args)
    spread = [a if isinstance(a, list) else [a] * length for a in args]
    return [_SCALARS[kind](*each) for each in zip(*spread, strict=True)]


# Routines ----------------------------------------------------------------------------------------------------

Code = list[tuple[Callable[..., Any], tuple[int, ...], int | None, tuple[int, ...]]]
"""For each operation: the call, the registers of its arguments, the register of a new result, registers to clear."""


@dataclass(frozen=True)
class Routine:
    """An update as operations on registers: parameter, gradient, buffers, coefficients, then temporaries."""

    registers: int
    numbers: dict[int, float]
    """Registers that contain the same number in every step."""
    coefficients: dict[str, int]
    on_scalars: list[tuple[str, tuple[int, ...], int]]
    on_tensors: Code
    on_lists: Code
    results: list[tuple[int, int, bool]]
    """For each updated input: its register, the register of its new value, and whether both are the same memory."""
    alignment: int | None


@cache
def routine(update: Update, buffers: tuple[str, ...], coefficients: tuple[str, ...], numbers: bool) -> Routine:
    """Compile an update into operations on registers: inputs, coefficients, constants and intermediate values."""
    program = in_place_program(update, buffers, coefficients, numbers)
    register: dict[Any, int] = {name: i for i, name in enumerate(("p", "g", *buffers, *coefficients))}
    constants: dict[int, float] = {}

    def find(arg: Any) -> int:
        if arg not in register:
            register[arg] = len(register)
            constants[register[arg]] = arg
        return register[arg]

    on_scalars = []
    for op in program.scalars:
        args = tuple(find(arg) for arg in op.args)
        register[op.out] = len(register)
        on_scalars.append((op.kind, args, register[op.out]))
    calls: list[tuple[Instruction, tuple[int, ...], int | None, tuple[int, ...]]] = []
    home = dict(register)
    for op in program.elements:
        args = tuple(home[arg] if arg in home else find(arg) for arg in op.args)
        if op.overwritten is None:
            home[op.out] = register[op.out] = len(register)
        else:
            home[op.out] = args[op.overwritten]
            register[op.out] = len(register)  # a new number, which no other register has
        if op.overwritten == 1 and op.kind != "mask":
            args = (args[1], args[0])
        dead = tuple(home[name] for name in op.last_uses if home[name] != home[op.out])
        calls.append((op, args, home[op.out] if op.overwritten is None else None, dead))
    on_tensors, on_lists = (
        [(forms[op.kind][op.overwritten is not None], args, out, dead) for op, args, out, dead in calls]
        for forms in (TENSORS, LISTS)
    )
    results = [(home[name], home[result], name not in program.not_in_place) for name, result in program.results.items()]
    alignment = None if program.alignment is None else home[program.alignment]
    named = {name: register[name] for name in coefficients}
    return Routine(len(register), constants, named, on_scalars, on_tensors, on_lists, results, alignment)


class Step:
    """The routine of a batch, with the coefficients of one step count in its registers.

    A coefficient may be a list of 0-dim tensors, one for each slot; then only `run_lists` can be used.
    """

    def __init__(self, batch: KernelBatch, slot: ParamSlot, coefficients: dict[str, Any]) -> None:
        self.has_numbers = not any(isinstance(value, (Tensor, list)) for value in coefficients.values())
        self.routine = routine(batch.group.update, tuple(slot.state), tuple(coefficients), self.has_numbers)
        self.names = tuple(slot.state)
        self.registers: list[Any] = [None] * self.routine.registers
        for register, number in self.routine.numbers.items():
            self.registers[register] = number
        for name, register in self.routine.coefficients.items():
            self.registers[register] = coefficients[name]
        for kind, args, register in self.routine.on_scalars:
            self.registers[register] = _on_scalars(kind, [self.registers[arg] for arg in args])

    def run(self, slot: ParamSlot, grad: Tensor) -> Tensor | None:
        """Update one slot. Returns the number of its aligned elements, or None if they are not counted."""
        if grad._is_zerotensor():  # It has no memory that an operation could overwrite.
            grad = grad.clone()
        aligned = [
            self._on_tensors([block.param, block_grad, *block.state.values()], slot)
            for block, block_grad in blocks(slot, grad)
        ]
        return aligned[0] if len(aligned) == 1 or aligned[0] is None else concatenate(aligned).sum()

    def run_lists(self, slots: Sequence[ParamSlot], grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Update slots of the same device and dtypes. Returns aligned counts; a vector may contain several of them."""
        if not torch.compiler.is_compiling():
            grads = [grad.clone() if grad._is_zerotensor() else grad for grad in grads]
        if slots[0].param.device.type != "cpu" or not self.has_numbers:
            return self._on_lists(slots, grads)
        aligned: list[Tensor | None] = []
        for block in _gatherings(slots):
            if len(slots[block]) > 1:
                aligned.append(self._gathered(slots[block], grads[block]))
            else:
                aligned += map(self.run, slots[block], grads[block])
        return aligned

    def _columns(self, slots: Sequence[ParamSlot], grads: Sequence[Tensor]) -> list[list[Tensor]]:
        states = [[slot.state[name] for slot in slots] for name in self.names]
        return [[slot.param for slot in slots], list(grads), *states]

    def _on_lists(self, slots: Sequence[ParamSlot], grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        columns, work = self._columns(slots, grads), slots[0].work_dtype
        loaded = [c if c[0].dtype == work else [x.to(work) for x in c] for c in columns]
        values = _call(self.routine.on_lists, self.registers, loaded)
        for register, result, in_place in self.routine.results:
            if not in_place or loaded[register] is not columns[register]:
                torch._foreach_copy_(columns[register], values[result])
        if slots[0].counts is None or self.routine.alignment is None:
            return [None] * len(slots)
        return [_positive(alignment) for alignment in values[self.routine.alignment]]

    def _gathered(self, slots: Sequence[ParamSlot], grads: Sequence[Tensor]) -> Tensor | None:
        """Update small tensors on the CPU as one vector, because a call costs more than their elements."""
        columns, work = self._columns(slots, grads), slots[0].work_dtype
        loaded = [torch._C._nn.flatten_dense_tensors(column).to(work) for column in columns]
        values = _call(self.routine.on_tensors, self.registers, loaded)
        for register, result, _ in self.routine.results:
            parts = torch._C._nn.unflatten_dense_tensors(values[result], columns[register])
            torch._foreach_copy_(columns[register], parts)
        if slots[0].counts is None or self.routine.alignment is None:
            return None
        ends = torch.tensor([0, *accumulate(param.numel() for param in columns[0])])
        until = torch.nn.functional.pad(values[self.routine.alignment].gt_(0).cumsum(0), (1, 0))
        return until[ends].diff()

    def _on_tensors(self, tensors: Sequence[Tensor], slot: ParamSlot) -> Tensor | None:
        work = slot.work_dtype
        loaded = [tensor if tensor.dtype == work else tensor.to(work) for tensor in tensors]
        values = _call(self.routine.on_tensors, self.registers, loaded)
        for register, result, in_place in self.routine.results:
            if not in_place or loaded[register] is not tensors[register]:
                tensors[register].copy_(values[result])
        if slot.counts is None or self.routine.alignment is None:
            return None
        return _positive(values[self.routine.alignment])


def _call(code: Code, registers: list[Any], inputs: Sequence[Any]) -> list[Any]:
    r = registers.copy()
    r[: len(inputs)] = inputs
    get = r.__getitem__
    for call, args, out, dead in code:
        result = call(*map(get, args))
        if out is not None:
            r[out] = result
        for register in dead:
            r[register] = None
    return r


def steps(batch: KernelBatch) -> Callable[[float], Step]:
    """Return a function that makes the `Step` of a batch for a step count, once for each count."""
    group, grad_scale = batch.group, read_number(batch.grad_scale)

    @cache
    def step(count: float) -> Step:
        c = group.update.coefficients(count, group.numbers, ScalarFunctions, grad_scale)
        return Step(batch, batch.slots[0], c)

    return step


# Blocks and counting -----------------------------------------------------------------------------------------


def blocks(slot: ParamSlot, grad: Tensor) -> Iterator[tuple[ParamSlot, Tensor]]:
    """Yield a large slot on the CPU in blocks, if all its tensors have the same memory layout, else the slot itself."""
    tensors = [slot.param, grad, *slot.state.values()]
    if tensors[0].numel() <= BLOCK or (flat := _flat(tensors)) is None:
        yield slot, grad
        return
    for param, block_grad, *state in zip(*(torch.split(tensor, BLOCK) for tensor in flat), strict=True):
        yield replace(slot, param=param, state=dict(zip(slot.state, state, strict=True))), block_grad


def _gatherings(slots: Sequence[ParamSlot]) -> Iterator[slice]:
    """Yield runs of slots with at most `GATHERED` elements together, and larger slots alone."""
    start = elements = 0
    for number, slot in enumerate(slots):
        size = slot.param.numel()
        if number > start and elements + size > GATHERED:
            yield slice(start, number)
            start, elements = number, 0
        elements += size
    yield slice(start, len(slots))


def _flat(tensors: list[Tensor]) -> list[Tensor] | None:
    """Return tensors on the CPU as vectors if all have the same order of elements in memory, else None."""
    first = tensors[0]
    if first.device.type != "cpu":
        return None
    for tensor in tensors:
        if type(tensor) not in PLAIN or tensor.is_neg() or tensor.stride() != first.stride():
            return None
    return [tensor.as_strided((first.numel(),), (1,)) for tensor in tensors] if fills_memory(first) else None


def _positive(alignment: Tensor) -> Tensor:
    """Count positive elements, and overwrite them: summing ones is many times faster than summing booleans."""
    return alignment.gt_(0).sum() if alignment.numel() < MAX_EXACT_COUNT else (alignment > 0).sum()


def count_steps(slots: Sequence[ParamSlot]) -> None:
    """Add one to the step counts.

    For a Python number, torch would make a new tensor for each step count on the CPU, so a tensor is added there.
    FakeTensorMode knows the value of a count only after the addition of a Python number.
    """
    counts = [slot.step for slot in slots]
    if torch.compiler.is_compiling() or any(type(x) is not Tensor or x.device.type != "cpu" for x in counts):
        torch._foreach_add_(counts, 1)
    else:
        torch._foreach_add_(counts, torch.ones(()), alpha=1.0)


def concatenate(numbers: Sequence[Tensor | None]) -> Tensor:
    """Return 0-dim and one-dimensional tensors as one vector of integers."""
    tensors = [number for number in numbers if number is not None]
    if any(number.dtype != tensors[0].dtype for number in tensors):
        tensors = [number.long() for number in tensors]
    return torch.hstack(tensors).long()


class Counters:
    """The alignment counters of slots on the CPU, moved into one tensor so that counting is one operation.

    The counter of each slot stays the same tensor object, which now refers to a row of this tensor.
    """

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        counters = [slot.counts for slot in slots if slot.counts is not None]
        self.rows = {id(slot): row for row, slot in enumerate(slots)}
        with torch.inference_mode(False):  # Later steps may run outside of the current inference mode.
            self.all = torch.stack(counters)
        self.one = self.all.new_tensor([[0, slot.param.numel(), slot.param.numel()] for slot in slots])
        for counts, row in zip(counters, self.all.unbind(), strict=True):
            counts.data = row

    def add(self, slots: Sequence[ParamSlot], aligned: Tensor) -> None:
        """Add one step to the counters of the slots; `aligned` has the number of aligned elements of each."""
        if len(slots) == len(self.rows):
            self.all += self.one
            self.all[:, 0] += aligned
        else:
            rows = torch.tensor([self.rows[id(slot)] for slot in slots])
            self.all[rows] += self.one[rows]
            self.all[rows, 0] += aligned


def count(batch: KernelBatch, slots: Sequence[ParamSlot], aligned: Sequence[Tensor | None]) -> None:
    """Add one step to the alignment counters of slots of a batch on one device."""
    counters = [slot.counts for slot in slots if slot.counts is not None]
    if not counters or aligned[0] is None:
        return
    total = concatenate(aligned)
    if total.device.type == "cpu" and type(total) is Tensor and not torch.compiler.is_compiling():
        if "counters" not in batch.memo:
            batch.memo["counters"] = Counters([slot for slot in batch.slots if slot.param.device.type == "cpu"])
        batch.memo["counters"].add(slots, total)
    else:  # A copy from the host could not be captured in a graph.
        torch._foreach_add_([c[0] for c in counters], list(total.unbind()))
        torch._foreach_add_([c[1:] for c in counters], [slot.param.numel() for slot in slots])
