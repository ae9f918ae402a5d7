"""The plan of a step: which engine does what. Made once, kept while only gradients and numbers change."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..codegen.kernel_spec import KernelSpec
from ..optim.options import HOW_IT_RUNS, check_kinds, pair
from ..rules import Rule
from ..rules.defaults import defaults
from ..rules.update import Update
from . import coefficients
from .base import Engine, KernelBatch, ParamSlot, ReplayController, TrackedContainers, share_memory
from .selection import check_requested_engine, choose

Group = Mapping[str, Any]


@dataclass
class View:
    """An slot that is not the parameter itself, but its local shard or its real view.

    While it lives, it is the slot that has the gradient as the engine is to see it.
    """

    param: Tensor
    buffers: list[Tensor]
    """The rule's own in the parameter's state, and its step count: what else is there is the user's."""
    slot: ParamSlot

    def __post_init__(self) -> None:
        self.memory = self._memory()

    def _memory(self) -> list[Any]:
        """Where the tensors lie that the slot was made of, and how."""
        found = (getattr(tensor, "_local_tensor", tensor) for tensor in (self.param, *self.buffers))
        return [(id(x), x.data_ptr(), x.shape, x.stride(), x.is_conj(), x.is_neg()) for x in found]

    def renew(self) -> bool:
        """Give the slot this step's gradient; False if it is no longer the parameter's, or cannot hold it."""
        grad = self.param.grad
        if grad is None or hasattr(grad, "to_local") != hasattr(self.param, "to_local"):
            return False
        return self.memory == self._memory() and self.hold(real_local_grad(grad, self.param))

    def hold(self, grad: Tensor) -> bool:
        slot, kind = self.slot.param, (grad.shape, grad.dtype, grad.device)
        if grad.layout != torch.strided or kind != (slot.shape, slot.dtype, slot.device):
            return False
        slot.grad = grad
        return True


@dataclass
class PlannedBatch:
    """A batch with what must stay the same for it to serve the next step."""

    engine: Engine
    batch: KernelBatch
    states: list[dict[str, Tensor]]
    values: list[Tensor]
    """Of all states, one after the other."""
    layouts: list[torch.layout]
    views: list[View]

    @classmethod
    def of(cls, engine: Engine, batch: KernelBatch, states: list[dict[str, Tensor]], views: list[View]) -> PlannedBatch:
        values = list(chain.from_iterable(map(dict.values, states)))
        return cls(engine, batch, states, values, [grad.layout for grad in batch.grads], views)

    def renew(self) -> bool:
        if sum(map(len, self.states)) != len(self.values):
            return False
        if not all(map(is_, chain.from_iterable(map(dict.values, self.states)), self.values)):
            return False
        if not all(view.renew() for view in self.views):
            return False
        if self.engine.finds_grads:
            self.batch.grads = ()
            return True
        grads = [slot.param.grad for slot in self.batch.slots]
        if [grad if grad is None else grad.layout for grad in grads] != self.layouts:
            return False
        self.batch.grads = grads  # type: ignore[assignment]
        return True


@dataclass
class Plan:
    """This step's work. `renew` brings it up to the next step, or says that a new plan is needed."""

    rule: Rule
    confidence: bool
    work: list[tuple[Engine, list[KernelBatch]]]
    names: Sequence[str]
    """Of the options that a choice may depend on: not the learning rate, nor notes of the user's own in a group."""
    lasting: bool
    """May it be renewed? Not where an engine sees a view that cannot hold the gradient."""
    given: Any = None
    """The options that the signature was made of: while they are the same, so is it."""
    signature: Any = None
    params: list[list[Tensor]] = field(default_factory=list)
    absent: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    batches: list[PlannedBatch] = field(default_factory=list)
    replay: ReplayController = field(default_factory=ReplayController)

    def sparse_grads(self) -> dict[Tensor, bool]:
        """By parameter that had a gradient: was that sparse? Those of which an engine sees a view are left out."""
        return {slot.param: planned.engine.sparse for planned in self.batches for slot in planned.batch.slots}

    @classmethod
    def of(
        cls,
        rule: Rule,
        confidence: bool,
        groups: Sequence[Group],
        slots: Sequence[Mapping[Tensor, ParamSlot]],
        state: Mapping[Tensor, dict[str, Tensor]],
        grad_scale: Tensor | None,
    ) -> Plan:
        """The plan for the slots of each group, which are its parameters with gradients."""
        work: dict[str, tuple[Engine, list[KernelBatch]]] = {}
        names = [name for name in defaults(rule) if name != "lr"]
        plan = cls(rule, confidence, [], names, lasting=True, params=[list(group["params"]) for group in groups])
        for group, of_group in zip(groups, slots, strict=True):
            update = Update.of(rule, confidence, group, unscale=grad_scale is not None)
            plan.absent += [param for param in group["params"] if param.grad is None]
            by_engine: dict[str, tuple[Engine, list[tuple[Tensor, ParamSlot, Tensor]]]] = {}
            for param, slot in of_group.items():
                grad = real_local_grad(param.grad, param)  # type: ignore[arg-type]
                choice = choose(update, slot, grad, group)
                check_requested_engine(slot, choice, group)
                by_engine.setdefault(choice.engine.name, (choice.engine, []))[1].append((param, slot, grad))
            for name, (engine, members) in by_engine.items():
                # What a batch holds may be moved all at once, so no two of it may share memory.
                apart = share_memory([slot.param for _, slot, _ in members])
                for together in [[member] for member in members] if apart else [members]:
                    views = []
                    for param, slot, grad in together:
                        if slot.param is not param:
                            views.append(View(param, [state[param][name] for name in (*slot.state, "step")], slot))
                            plan.lasting &= not group["differentiable"] and views[-1].hold(grad)
                    batch = KernelBatch(
                        update, group, [slot for _, slot, _ in together], [g for *_, g in together], grad_scale
                    )
                    work.setdefault(name, (engine, []))[1].append(batch)
                    plan.batches.append(PlannedBatch.of(engine, batch, [state[param] for param, *_ in together], views))
        plan.work = list(work.values())
        plan.states = list(state.values())
        plan.given, plan.signature = _given(plan.names, groups, grad_scale), _signature(plan, groups, grad_scale)
        return plan

    def renew(self, groups: Sequence[Group], state: Mapping[Tensor, Any], grad_scale: Tensor | None) -> bool:
        if not self.lasting:
            return False
        given = _given(self.names, groups, grad_scale)
        if given != self.given:
            for number, group in enumerate(groups):
                if any(planned.batch.options is group for planned in self.batches):
                    check_kinds(self.batches[0].batch.update.rule, group, f"group {number}")
            if self.signature != _signature(self, groups, grad_scale):
                return False
            self.given = given
        if not all(_is_same(group["params"], params) for group, params in zip(groups, self.params, strict=True)):
            return False
        if not _is_same(state.values(), self.states):
            return False
        if any(p.grad is not None for p in self.absent) or not all(planned.renew() for planned in self.batches):
            return False
        for planned in self.batches:
            planned.batch.grad_scale, planned.batch.found_inf = grad_scale, None
        return not any(engine.stale(batches) for engine, batches in self.work)

    def record(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> None:
        """Have the next step ready, if it is going to be like this one."""
        if any(planned.views for planned in self.batches):
            self.replay.reason = "a parameter is complex or a DTensor"
            return

        def containers() -> TrackedContainers:
            return TrackedContainers(
                groups, state, [one for planned in self.batches for one in planned.states], self.absent
            )

        self.replay.after_step(self.work, containers)

    def release(self) -> None:
        """Forget the gradients."""
        for planned in self.batches:
            planned.batch.grads = ()
            for view in planned.views:
                view.slot.param.grad = None


def _is_same(now: Collection[Any], then: Collection[Any]) -> bool:
    """The very same objects in the same order?"""
    return len(now) == len(then) and all(map(is_, now, then))


def real_local(tensor: Tensor) -> Tensor:
    """The tensor that an engine works on: the local shard of a DTensor, the real view of a complex one."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if not tensor.is_complex():
        return tensor
    # A plan keeps the view. Detached, it does not hold on to the tensor, which torch could not swap else.
    return torch.view_as_real(tensor if torch.is_grad_enabled() else tensor.detach())


def real_local_grad(grad: Tensor, param: Tensor) -> Tensor:
    """The same of a gradient, with the parameter's sharding; a sparse one stays as it is."""
    if grad.is_sparse:
        return grad
    if hasattr(grad, "to_local") and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return real_local(grad.resolve_conj())


def _given(names: Sequence[str], groups: Sequence[Group], grad_scale: Tensor | None) -> Any:
    """The groups and the options of these names; of the learning rate, which changes all the time, its type."""
    options = [
        [type(group["lr"]), *[pair(group[name]) if name == "betas" else group[name] for name in names]]
        for group in groups
    ]
    return list(map(id, groups)), options, grad_scale is None


def _signature(plan: Plan, groups: Sequence[Group], grad_scale: Tensor | None) -> Any:
    """What the choice of updates, buffers and engines depends on: nothing in groups without gradients."""
    stepped = {id(planned.batch.options) for planned in plan.batches}
    return [
        (id(group),)
        if id(group) not in stepped
        else (
            id(group),
            Update.of(plan.rule, plan.confidence, group, unscale=grad_scale is not None),
            KernelSpec.of(plan.rule, coefficients.as_numbers(group)),
            *(group[name] for name in HOW_IT_RUNS),
        )
        for group in groups
    ]
