"""Event by event, compiled: the ready-made models linear and FM, learnt from one event at a time without autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import unwrap

import numpy as np
import torch
from torch import nn

from ..engines.base import KernelBatch, ParamSlot
from ..engines.resolved_group import ResolvedGroup
from ..optim.optimizer import Optimizer
from ..rules.moment_storage import first_nondefault_option
from .data.events import Array, Columns
from .models import FM, Inputs, Linear, Normalised
from .models.inputs import BINS, MEMORY
from .models.model_file import LOG_LOSS
from .per_event_kernel import PARTS, EventModel, Layout, lacks
from .training_step import Loss

CHUNK = 4096
"""Events that are read at one go: large enough that reading costs little, small enough that a stop is heeded soon."""


COMPILED = (Linear, FM, Inputs, Normalised, nn.Embedding)
"""The modules whose forward the compiled code does."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Given:
    """Events as the kernels want them."""

    rows: Array
    weights: Array | None
    numbers: Array


class EventByEvent:
    """A model that is learnt from one event at a time by compiled code, with the same state as torch's way has."""

    def __init__(self, model: Linear, optimizer: Optimizer) -> None:
        self.model, self.inputs, self.optimizer = model, model.inputs, optimizer

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> EventByEvent | str:
        """Or why the model has to be learnt from by torch."""
        if not isinstance(model, Linear) or type(model) not in (Linear, FM):
            return f"by torch: the model is {type(model).__name__}; linear and fm are compiled"
        if loss is not LOG_LOSS:
            return "by torch: the loss is not the log loss"
        if not isinstance(optimizer, Optimizer):
            return f"by torch: {type(optimizer).__name__} is not of cadam"
        made = cls(model, optimizer)
        reason = made.refusal() or lacks(made._batch()[0])
        return made if reason is None else f"by torch: {reason}"

    def refusal(self) -> str | None:
        """Why model and optimizer, as they are now, ask for more than the compiled code does."""
        optimizer, params = self.optimizer, list(self.model.parameters())
        if len(optimizer.param_groups) > 1:
            return "the optimizer has more than one group of parameters"
        if {id(param) for param in optimizer.param_groups[0]["params"]} != {id(param) for param in params}:
            return "the optimizer does not have all parameters of the model"
        group = optimizer.param_groups[0]
        if (given := first_nondefault_option(group)) is not None:
            return f"the optimizer has {given}"
        if not all(param.requires_grad for param in params):
            return "a parameter is frozen"
        if unwrap(type(optimizer).step) is not unwrap(Optimizer.step) or "step" in vars(optimizer):
            return "the optimizer has a step of its own, or a scheduler that counts steps"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return "the optimizer has hooks"
        for module in self.model.modules():
            if type(module) not in COMPILED or "forward" in vars(module):
                return f"the model has a {type(module).__name__} with a forward of its own"
            if any(vars(module)[kind] for kind in HOOKS):
                return "the model has hooks"
        if any(param._backward_hooks or param._post_accumulate_grad_hooks for param in params):
            return "a parameter has hooks"
        for table in (self.inputs.table, self.inputs.linear):
            if table is not None and (table.padding_idx is not None or table.max_norm or table.scale_grad_by_freq):
                return "a table has padding_idx, max_norm or scale_grad_by_freq"
        return None

    def fits(self, features: Columns) -> Array:
        """Which events can be learnt from here: those whose ids are rows, and whose numbers are not infinite.

        No event can, if a feature is missing, or has another shape or type than the model takes.
        """
        count = len(next(iter(features.values())))
        good = np.ones(count, dtype=bool)
        for name, length in self.inputs.lengths.items():
            values = features.get(name)
            if values is None or values.shape != ((count, length) if length else (count,)):
                return np.zeros(count, dtype=bool)
            if values.dtype != (np.float32 if name in self.inputs.numbers else np.int64):
                return np.zeros(count, dtype=bool)
            if name in self.inputs.numbers:
                good &= ~np.isinf(values).reshape(count, -1).any(1)
            elif name in self.inputs.ranges:
                rows = self.inputs.ranges[name][1]
                if count and (values.min() < 0 or values.max() >= rows):
                    good &= ((values >= 0) & (values < rows)).reshape(count, -1).all(1)
        return good

    def learn(self, features: Columns, labels: Array) -> tuple[Array, int]:
        """Predict each event and learn from it before the next: scores, and how many were learnt from.

        All must be fit for it (`fits`). It stops at the first one without a finite label or score; those after it have
        no scores.
        """
        nothing = np.full(len(labels), np.nan, np.float32), 0
        if self.refusal() is not None:
            return nothing
        layout, (batch, parts) = _layout(self.inputs), self._batch()
        if lacks(batch):
            return nothing
        given, model = self._given(features, layout.entries), EventModel(batch, parts, layout)
        with torch.no_grad():
            scores, done = model.learn(given.rows, given.weights, given.numbers, np.ascontiguousarray(labels))
        torch.autograd.graph.increment_version([slot.param for slot in batch.slots])
        scores[done + 1 :] = np.nan
        return scores, done

    def scores(self, features: Columns) -> Array:
        """Predict events, which must be fit for it, and learn from none; nan where torch has to."""
        count = len(next(iter(features.values())))
        layout, (batch, parts) = _layout(self.inputs), self._batch()
        if self.refusal() is not None or lacks(batch):
            return np.full(count, np.nan, np.float32)
        given = self._given(features, layout.entries)
        return EventModel(batch, parts, layout).scores(given.rows, given.weights, given.numbers)

    def _batch(self) -> tuple[KernelBatch, Mapping[str, ParamSlot]]:
        """The parameters as they are now: whoever loads a state replaces what belongs to them."""
        (group,) = self.optimizer.param_groups
        inputs = self.inputs
        params = {name: getattr(inputs, name) for name in PARTS}
        weights = {n: p.weight if isinstance(p, nn.Embedding) else p for n, p in params.items() if p is not None}
        slots = {name: self.optimizer._slot(param, group, name) for name, param in weights.items()}
        resolved = ResolvedGroup.resolve(self.optimizer.rule, self.optimizer.confidence, group)
        return KernelBatch(resolved, list(slots.values())), slots

    def _given(self, features: Columns, entries: int) -> Given:
        inputs = self.inputs
        count = len(next(iter(features.values())))
        rows = np.empty((count, entries), np.int64)
        weights = np.empty((count, entries), np.float32) if inputs.bags else None
        at = 0
        for name in (*inputs.places, *inputs.bags):
            values = features[name].reshape(count, -1)
            end = at + values.shape[1]
            np.add(values, inputs.ranges[name][0], out=rows[:, at:end])
            if weights is not None:
                weights[:, at:end] = 1 if name in inputs.places else _shares(values, inputs.missing_first[name])
            at = end
        columns = [features[name].reshape(count, -1) for name in inputs.numbers]
        numbers = np.concatenate(columns, 1) if columns else np.empty((count, 0), np.float32)
        return Given(rows, weights, np.ascontiguousarray(numbers))


def _shares(inside: Array, missing_first: bool) -> Array:
    """What each entry of a list counts in its mean."""
    there = (inside > 0).astype(np.float32) if missing_first else np.ones(inside.shape, np.float32)
    shares: Array = there / np.maximum(there.sum(1, keepdims=True), 1)
    return shares


def _layout(inputs: Inputs) -> Layout:
    fields = len(inputs.places)
    field_of, alike_from = list(range(fields)), list(range(fields))
    for name in inputs.bags:
        alike_from += [len(field_of)] * inputs.lengths[name]
        field_of += [fields] * inputs.lengths[name]
        fields += 1
    numbers = len(inputs.bin_starts)
    alike_from += range(len(field_of), len(field_of) + numbers)
    field_of += range(fields, fields + numbers)
    statistics = inputs.normalised
    return Layout(
        np.array(field_of, np.int32),
        np.array(alike_from, np.int32),
        fields,
        inputs.bin_starts.numpy().copy(),
        BINS,
        statistics.count,
        statistics.mean,
        statistics.variance,
        MEMORY,
    )
