"""The plan of a step: the engine of each parameter, and the batches that the engines update.

Making a plan takes longer than a small step, so a plan is kept while it fits. Users may change anything between two
steps, and every change must count in the next step. `StepPlan` is the one place that notices changes:

| possible change | how it is noticed |
| --- | --- |
| options of a group | `ResolvedGroup.refresh` compares their values |
| groups, parameters of a group, entries and buffers of `optimizer.state` | by the identity of the objects |
| memory of a parameter or buffer: `tensor.data = ...`, another dtype | a snapshot of addresses, sizes and kinds |
| gradients that appear or vanish, become sparse, change their dtype | a snapshot, and `_grad_signature` |

A changed gradient concerns its own parameter only: the plan keeps the slots of all other parameters and makes new
batches. In a mixture of experts, for example, other parameters have gradients in each step. Any other change means that
a new plan is made from scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..native.container_snapshot import ContainerSnapshot
from ..native.tensor_snapshot import CHANGED, TensorSnapshot
from ..rules import Rule
from .base import PLAIN, Engine, KernelBatch, ParamSlot, share_memory
from .replay import ReplayController, TrackedContainers
from .resolved_group import ResolvedGroup
from .selection import check_requested_engine, choose


@dataclass
class PlannedParam:
    """A parameter and, once it has had a gradient, its slot and engine.

    Attributes:
        param: The parameter.
        group_number: The number of its group.
        position: Its position in the group.
        slot: The slot that the engine receives; None before the first gradient.
        engine: The engine that updates the slot; None before the first gradient.
        state: The entry of the parameter in `optimizer.state`.
        signature: The type of gradient that slot and engine were chosen for.
        memory: Where the parameter and its state are in memory, if the slot is a view of them.
    """

    param: Tensor
    group_number: int
    position: int
    slot: ParamSlot | None = None
    engine: Engine | None = None
    state: dict[str, Any] = field(default_factory=dict)
    signature: Any = None
    memory: Any = None

    @property
    def grad_holder(self) -> Tensor:
        """The tensor whose `grad` the engine reads: the parameter, or the view of it in the slot."""
        return self.param if self.slot is None else self.slot.param

    @property
    def is_view(self) -> bool:
        """Whether the slot has the local shard of a DTensor or the real view of a complex tensor."""
        return self.grad_holder is not self.param

    def hold_grad(self) -> bool:
        """Give the view in the slot this step's gradient. Returns False if torch does not allow that."""
        view, grad = self.grad_holder, self.param.grad
        if grad is not None:
            if hasattr(grad, "to_local") != hasattr(self.param, "to_local"):
                return False
            grad = real_local_grad(grad, self.param)
            if grad.layout != torch.strided:
                return False
            if (grad.shape, grad.dtype, grad.device) != (view.shape, view.dtype, view.device):
                return False
        view.grad = grad
        return True

    def engine_grad(self) -> Tensor:
        """Return the gradient for the engine: the local shard of a DTensor, the real view of a complex gradient."""
        grad = self.grad_holder.grad
        return real_local_grad(self.param.grad, self.param) if grad is None else grad  # type: ignore[arg-type]

    def view_memory(self) -> list[Any]:
        """Return identity, address, shape and strides of the parameter, the rule's buffers and the step count.

        Other entries of the state belong to the user and are ignored.
        """
        if self.slot is None:
            return []
        tensors = [self.param, *(self.state[name] for name in (*self.slot.state, "step"))]
        local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
        return [(id(x), x.data_ptr(), x.shape, x.stride(), x.is_conj(), x.is_neg()) for x in local]


class StepPlan:
    """The engines and batches of a step, kept from step to step while they fit.

    The optimizer uses it like this::

        if plan is None or not plan.fits(groups, state, unscale):
            plan = StepPlan(rule, groups, state, unscale)
        for planned in plan.find_new_params():
            plan.set_slot(planned, make_slot(planned))
        for engine, batches in plan.make_work(grad_scale):
            engine.run(batches)
        plan.finish()

    Attributes:
        work: The batches of each engine in this step.
        is_reusable: Whether the plan may serve another step.
        replay: The recorded step, if there is one.
    """

    def __init__(self, rule: Rule, groups: list[dict[str, Any]], state: dict[Tensor, Any], unscale: bool) -> None:
        self.rule, self.unscale = rule, unscale
        self.groups, self.state = groups, state
        self.group_params = [group["params"] for group in groups]
        self.resolved: list[ResolvedGroup | None] = [None] * len(self.groups)
        unique: dict[Tensor, PlannedParam] = {}
        for number, params in enumerate(self.group_params):
            for position, param in enumerate(params):
                unique.setdefault(param, PlannedParam(param, number, position))
        self.params = list(unique.values())
        self.signatures: list[Any] = [None] * len(self.params)
        """The type of each gradient in this step; None if the parameter has none."""
        self.work: list[tuple[Engine, list[KernelBatch]]] = []
        self.replay = ReplayController()
        self.last_step = object()
        """Identifies the last step: each step replaces it, so that a step that was taken in between is noticed."""
        self._repetitions: list[Callable[[], None]] | None = None
        self.is_reusable, self.is_finished = True, False
        self.has_new_slots, self.has_new_batches = False, True
        self.overlaps = False
        self._snapshot_grads()
        self._snapshot_memory()
        self._snapshot_containers()

    # Changes between steps -----------------------------------------------------------------------------------------

    def fits(self, groups: list[dict[str, Any]], state: Mapping[Tensor, Any], unscale: bool) -> bool:
        """Whether the plan can serve the next step: at most gradients and numeric options have changed.

        Raises:
            ValueError: If an option has been set to a value of the wrong type.
        """
        return (
            self.is_reusable
            and self.is_finished  # An engine that raised an error may have adopted only a part of the changes.
            and unscale == self.unscale
            and groups is self.groups
            and state is self.state
            and all(group["params"] is params for group, params in zip(groups, self.group_params, strict=False))
            and self.containers.is_unchanged()
            and self._refresh_options()
            and not self._has_moved()
        )

    def _refresh_options(self) -> bool:
        """Adopt changed numeric options. Returns False if the options now need another update, kernel or engine."""
        for number, group in enumerate(self.resolved):
            if group is None:
                continue
            refreshed = group.refresh(f"group {number}")
            if refreshed is None:
                return False
            if refreshed is not group:
                self.resolved[number] = refreshed
                for _, batches in self.work:
                    for batch in batches:
                        if batch.group is group:
                            batch.group = refreshed
        return True

    def _snapshot_containers(self) -> None:
        """Note the groups, their parameters, the entries of `optimizer.state` and the buffers of all slots."""
        states = [planned.state for planned in self.params if planned.slot is not None]
        containers = [self.groups, self.state, *self.group_params, *states]
        self.is_reusable &= all(isinstance(container, list | dict) for container in containers)
        if self.is_reusable:
            self.containers = ContainerSnapshot(containers)

    def _snapshot_memory(self) -> None:
        """Record the address and layout of the tensors of all slots.

        Fused engines hand addresses to compiled kernels, so any change matters to them. The other engines work on
        tensor objects, and only depend on the shapes.
        """
        planned = [
            (each.slot, each.engine) for each in self.params if each.slot is not None and each.engine is not None
        ]
        in_kernels = [x for slot, engine in planned if engine.fused for x in slot.tensors]
        self.memory = TensorSnapshot(
            in_kernels,
            threads=all(x.device.type == "cpu" for x in in_kernels),
            swappable=[each.param for each in self.params],
        )
        self.strides = [(x, x.stride()) for x in in_kernels if not x.is_contiguous()]
        self.shapes = [
            (x, x.shape) for slot, engine in planned if not engine.fused for x in (slot.param, *slot.state.values())
        ]
        self.views = [each for each in self.params if each.is_view]

    def _has_moved(self) -> bool:
        """Whether the memory of a parameter or a buffer has changed."""
        return (
            bool(self.memory.update())
            or any(x.stride() != stride for x, stride in self.strides)
            or any(x.shape != shape for x, shape in self.shapes)
            or any(view.memory != view.view_memory() for view in self.views)
        )

    def _snapshot_grads(self) -> None:
        """Prepare the compiled snapshot of gradients. It cannot describe those of tensor subclasses."""
        holders = [planned.grad_holder for planned in self.params]
        readable = [i for i, x in enumerate(holders) if type(x) in PLAIN and (x.grad is None or type(x.grad) in PLAIN)]
        # Torch's threads speed up a snapshot only while they are awake, as in steps on the CPU.
        on_cpu = all(x.device.type == "cpu" for x in holders)
        self.grads = TensorSnapshot([holders[i] for i in readable], of_grads=True, threads=on_cpu)
        self.readable = np.array(readable, np.int64)
        self.unreadable = sorted(set(range(len(holders))) - set(readable))
        self.grad_position = dict(zip(readable, range(len(readable)), strict=True))
        self.grad_kinds, self.grad_sizes = np.full((2, len(readable)), -1)
        self.has_unclear_grads = True

    def _adopt_grads(self) -> None:
        """Store the kinds and sizes of this step's gradients, with which the next step compares its own."""
        self.grad_kinds, self.grad_sizes = self.grads.kinds | 1, self.grads.sizes.copy()
        self.has_unclear_grads = bool((self.grad_kinds < 0).any())

    def find_new_params(self) -> list[PlannedParam]:
        """Compare the gradients with those of the last step, and return the parameters that need a new slot.

        A parameter needs a slot when it has its first gradient, or a gradient of another type than before.
        """
        for view in self.views:
            if not view.hold_grad():
                view.slot = None
        suspects = self.unreadable
        news = self.grads.update()
        if news & CHANGED or self.has_unclear_grads:
            # A gradient without a readable kind is missing, sparse or lazily negated. The last bit of a kind says
            # whether the gradient is contiguous, which is the engine's concern.
            kinds, sizes = self.grads.kinds | 1, self.grads.sizes
            unclear = (kinds < 0) | (kinds != self.grad_kinds) | (sizes != self.grad_sizes)
            suspects = [*suspects, *self.readable[unclear].tolist()]
            self._adopt_grads()
        new = []
        for i in suspects:
            planned, signature = self.params[i], _grad_signature(self.params[i].param.grad)
            if signature != self.signatures[i]:
                self.signatures[i], self.has_new_batches = signature, True
            if signature is not None and (planned.slot is None or planned.signature != signature):
                planned.signature = signature
                new.append(planned)
        return new

    # This step -----------------------------------------------------------------------------------------------------

    def resolve(self, group_number: int) -> ResolvedGroup:
        """Return the resolved options of a group. They are resolved when a parameter of the group has a gradient."""
        group = self.resolved[group_number]
        if group is None:
            group = self.resolved[group_number] = ResolvedGroup.resolve(
                self.rule,
                self.groups[group_number],
                unscale=self.unscale,
                label=f"group {group_number}",
            )
        return group

    def set_slot(self, planned: PlannedParam, slot: ParamSlot) -> None:
        """Set the slot of a parameter that `find_new_params` returned, and choose its engine.

        Raises:
            RuntimeError: If an option asks for an engine that cannot serve the parameter.
        """
        group = self.resolve(planned.group_number)
        grad = real_local_grad(planned.param.grad, planned.param)  # type: ignore[arg-type]
        choice = choose(group, slot, grad)
        check_requested_engine(group, slot, choice)
        planned.slot, planned.engine, planned.state = slot, choice.engine, self.state[planned.param]
        if planned.is_view:
            planned.memory = planned.view_memory()
            # With `differentiable`, autograd differentiates through the view of a step, so each step needs its plan.
            self.is_reusable &= not group.options["differentiable"] and planned.hold_grad()
        self.has_new_slots = self.has_new_batches = True

    def make_work(self, grad_scale: Tensor | None) -> list[tuple[Engine, list[KernelBatch]]]:
        """Return the batches of each engine, with the gradients of this step."""
        self.is_finished = False
        if self.has_new_slots:
            self.overlaps = share_memory([planned.slot.param for planned in self.params if planned.slot is not None])
            self._snapshot_memory()
            self._snapshot_grads()
            self._adopt_grads()
        if self.has_new_batches:
            self._make_batches()
        for engine, batches in self.work:
            for batch, members in zip(batches, self.members[engine.name], strict=True):
                batch.grad_scale, batch.found_inf = grad_scale, None
                if self.has_new_batches or not engine.finds_grads:
                    batch.grads = [planned.engine_grad() for planned in members]
        return self.work

    def _make_batches(self) -> None:
        """Make a batch for the parameters of each group and engine that have a gradient."""
        positions: dict[tuple[int, str], list[int]] = {}
        for i, (planned, signature) in enumerate(zip(self.params, self.signatures, strict=True)):
            if signature is not None and planned.engine is not None:
                positions.setdefault((planned.group_number, planned.engine.name), []).append(i)
        work: dict[str, tuple[Engine, list[KernelBatch]]] = {}
        self.members: dict[str, list[list[PlannedParam]]] = {}
        for (number, name), together in positions.items():
            # A batch may be updated in parallel, so parameters that share memory must be in different batches.
            for some in [[i] for i in together] if self.overlaps else [together]:
                members = [self.params[i] for i in some]
                slots = [planned.slot for planned in members if planned.slot is not None]
                index = np.array([self.grad_position.get(i, -1) for i in some], np.int64)
                batch = KernelBatch(
                    self.resolve(number), slots, overlaps=self.overlaps, grad_snapshot=self.grads, grad_index=index
                )
                work.setdefault(name, (members[0].engine, []))[1].append(batch)  # type: ignore[arg-type]
                self.members.setdefault(name, []).append(members)
        self.work = list(work.values())
        self.replay = ReplayController()

    def finish(self, keeps_grads: bool = False) -> None:
        """Complete a step: adopt what the engines have moved, record the step if it repeats, release the gradients.

        Gradients are as large as the parameters, and the user may be about to delete them.

        Args:
            keeps_grads: Whether engines may keep gradients to `repeat` the step.
        """
        self.last_step, self._repetitions = object(), None
        if self.has_new_batches:
            # Engines move the step counts of a new batch into one tensor, which changes their addresses.
            self.memory.update()
        if self.has_new_slots:
            self._snapshot_containers()
        self.has_new_slots = self.has_new_batches = False
        if self.is_reusable:
            self._record()
        for _, batches in self.work:
            for batch in batches:
                batch.grads = ()
                if not keeps_grads:
                    batch.memo.pop("step", None)
        for view in self.views:
            view.grad_holder.grad = None
        self.is_finished = True

    def _record(self) -> None:
        if self.views:
            self.replay.reason = "a parameter is complex or a DTensor"
            return

        def containers() -> TrackedContainers:
            absent = [p.param for p, signature in zip(self.params, self.signatures, strict=True) if signature is None]
            present = [p.state for p, signature in zip(self.params, self.signatures, strict=True) if signature]
            return TrackedContainers(self.groups, self.state, present, absent)

        self.replay.after_step(self.work, containers)

    def repeat(self) -> bool:
        """Run the last step again, with new values in the memory of the same gradients; the plan must fit.

        Returns:
            Whether the step was run. If an engine cannot repeat it, nothing has changed.
        """
        if self._repetitions is None:
            repetitions = [engine.repetition(batches) for engine, batches in self.work]
            if self.views or any(repetition is None for repetition in repetitions):
                return False
            self._repetitions = [repetition for repetition in repetitions if repetition is not None]
        self.is_finished = False  # If a kernel fails, the next step makes a new plan.
        for repetition in self._repetitions:
            repetition()
        self.last_step, self.is_finished = object(), True
        return True

    def last_layouts(self) -> dict[Tensor, str]:
        """Return "sparse" or "dense" for each parameter that had a gradient in the last step."""
        return {
            planned.param: "sparse" if planned.engine.sparse else "dense"
            for planned, signature in zip(self.params, self.signatures, strict=True)
            if signature is not None and planned.engine is not None
        }


def _grad_signature(grad: Tensor | None) -> Any:
    """Return everything about a gradient that the choice of an engine depends on; None if there is no gradient."""
    if grad is None:
        return None
    sparse_dim = grad.sparse_dim() if grad.is_sparse else grad.layout
    return type(grad), grad.dtype, grad.shape, grad.device, sparse_dim


def real_local(tensor: Tensor) -> Tensor:
    """Return the tensor that an engine works on: the local shard of a DTensor, the real view of a complex tensor."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if not tensor.is_complex():
        return tensor
    # A plan keeps the view. torch.utils.swap_tensors refuses tensors that an attached view refers to.
    return torch.view_as_real(tensor if torch.is_grad_enabled() else tensor.detach())


def real_local_grad(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient as engines receive it, with the sharding of its parameter; sparse gradients stay unchanged."""
    if grad.is_sparse:
        return grad
    if hasattr(grad, "to_local") and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return real_local(grad.resolve_conj())
