"""Per-event training (batch size 1) of the ready-made models linear and FM with compiled code, without autograd."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import unwrap

import numpy as np
import torch
from torch import nn

from ..engines.base import KernelBatch, ParamSlot
from ..engines.resolved_group import ResolvedGroup
from ..optim.optimizer import Optimizer
from ..rules.moment_storage import first_nondefault_option
from .data.events import Array, Columns
from .models import FM, Inputs, Linear, NumberNormalizer
from .models.compiled_inputs import HOOKS
from .models.inputs import BINS, MAX_SHIFT, SAMPLE_SIZE, SLOT_STRIDE
from .models.model_file import LOG_LOSS
from .per_event_kernel import PARTS, Layout, PerEventModel, find_unsupported
from .training_step import Loss

CHUNK_SIZE = 4096
"""How many events are read at once: enough to make reading cheap, and few enough to react quickly to a stop."""
COMPILED_MODULES = (Linear, FM, Inputs, NumberNormalizer, nn.Embedding)
"""The modules that the compiled code implements."""


WEIGHTED = "with torch: events with weights are not compiled"
"""The reason why events of a schema with a weight are trained with torch."""


class PerEventTraining:
    """Trains a model with compiled code, one event per step. Its state is the same as that of training with torch.

    Use `create`, which checks whether model, optimizer and loss are supported.
    """

    def __init__(self, model: Linear, optimizer: Optimizer) -> None:
        self.model, self.inputs, self.optimizer = model, model.inputs, optimizer

    @classmethod
    def create(cls, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> PerEventTraining | str:
        """Return a compiled trainer, or the reason why the model has to be trained with torch."""
        if not isinstance(model, Linear) or type(model) not in (Linear, FM):
            return f"with torch: the model is {type(model).__name__}; linear and fm are compiled"
        if loss is not LOG_LOSS:
            return "with torch: the loss is not the log loss"
        if not isinstance(optimizer, Optimizer):
            return f"with torch: {type(optimizer).__name__} is not an optimizer of cadam"
        training = cls(model, optimizer)
        reason = training.find_unsupported() or find_unsupported(training._kernel_batch()[0])
        return training if reason is None else f"with torch: {reason}"

    def find_unsupported(self) -> str | None:
        """Return what the compiled code does not support about the current model and optimizer, or None."""
        optimizer, params = self.optimizer, list(self.model.parameters())
        if self.inputs.ids is not None:
            return "the model has features of the kind id"
        if len(optimizer.param_groups) > 1:
            return "the optimizer has more than one group of parameters"
        group = optimizer.param_groups[0]
        if {id(param) for param in group["params"]} != {id(param) for param in params}:
            return "the optimizer does not have all parameters of the model"
        if (option := first_nondefault_option(group)) is not None:
            return f"the optimizer has {option}"
        if not all(param.requires_grad for param in params):
            return "a parameter is frozen"
        if unwrap(type(optimizer).step) is not unwrap(Optimizer.step) or "step" in vars(optimizer):
            return "the step of the optimizer is overridden, or a scheduler counts its steps"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return "the optimizer has hooks"
        for module in self.model.modules():
            if type(module) not in COMPILED_MODULES or "forward" in vars(module):
                return f"the model has a {type(module).__name__} whose forward is overridden"
            if any(vars(module)[kind] for kind in HOOKS):
                return "the model has hooks"
        if any(param._backward_hooks or param._post_accumulate_grad_hooks for param in params):
            return "a parameter has hooks"
        for table in (self.inputs.table, self.inputs.linear):
            if table is not None and (table.padding_idx is not None or table.max_norm or table.scale_grad_by_freq):
                return "a table has padding_idx, max_norm or scale_grad_by_freq"
        return None

    def find_supported(self, features: Columns) -> Array:
        """Return a mask of the events that the compiled code can process.

        Ids must be rows of their tables, and numbers must not be infinite. No event is supported if a feature is
        missing, or has another shape or type than the model expects.
        """
        count = len(next(iter(features.values())))
        supported = np.ones(count, dtype=bool)
        for name, length in self.inputs.lengths.items():
            values = features.get(name)
            is_number = name in self.inputs.numbers
            if values is None or values.shape != ((count, length) if length else (count,)):
                return np.zeros(count, dtype=bool)
            if values.dtype not in ((np.float32, np.float64) if is_number else (np.int64,)):
                return np.zeros(count, dtype=bool)
            if is_number:
                supported &= ~np.isinf(values).reshape(count, -1).any(1)
            elif name in self.inputs.row_ranges:
                rows = self.inputs.row_ranges[name][1]
                if count and (values.min() < 0 or values.max() >= rows):
                    supported &= ((values >= 0) & (values < rows)).reshape(count, -1).all(1)
        return supported

    def train(self, features: Columns, labels: Array) -> tuple[Array, int]:
        """Predict each event and learn it before the next one is predicted.

        Args:
            features: supported events, see `find_supported`.
            labels: their labels.

        Returns:
            The scores, and how many events were learned. Processing stops at the first event without a finite label or
            score; the events after it have the score nan.
        """
        model = self._current_model()
        if model is None:
            return np.full(len(labels), np.nan, np.float32), 0
        events = self._encode(features, model.layout.entries)
        with torch.no_grad():
            scores, learned = model.train(*events, np.ascontiguousarray(labels))
        # autograd must notice that the parameters have changed.
        torch.autograd.graph.increment_version([slot.param for slot in model.batch.slots])
        scores[learned + 1 :] = np.nan
        return scores, learned

    def predict(self, features: Columns) -> Array:
        """Predict supported events without learning them; nan if model or optimizer are no longer supported."""
        model = self._current_model()
        if model is None:
            return np.full(len(next(iter(features.values()))), np.nan, np.float32)
        return model.predict(*self._encode(features, model.layout.entries))

    def _current_model(self) -> PerEventModel | None:
        """Return the model for the kernels, or None if model or optimizer are no longer supported."""
        if self.find_unsupported() is not None:
            return None
        batch, slots = self._kernel_batch()
        return None if find_unsupported(batch) else PerEventModel(batch, slots, _layout(self.inputs))

    def _kernel_batch(self) -> tuple[KernelBatch, Mapping[str, ParamSlot]]:
        """Collect the parameters and their state. They are not cached, because loading a state replaces tensors."""
        (group,) = self.optimizer.param_groups
        params = {name: getattr(self.inputs, name) for name in PARTS}
        weights = {n: p.weight if isinstance(p, nn.Embedding) else p for n, p in params.items() if p is not None}
        slots = {name: self.optimizer._slot(param, group, name) for name, param in weights.items()}
        resolved = ResolvedGroup.resolve(self.optimizer.rule, group)
        return KernelBatch(resolved, list(slots.values())), slots

    def _encode(self, features: Columns, entries: int) -> tuple[Array, Array | None, Array]:
        """Convert events to the layout of the kernels.

        Returns:
            The table rows of each event (events, entries), the weight of each row in the mean of its list (None if all
            are 1), and the numbers.
        """
        inputs = self.inputs
        count = len(next(iter(features.values())))
        rows = np.empty((count, entries), np.int64)
        weights = np.empty((count, entries), np.float32) if inputs.id_lists else None
        start = 0
        for name in (*inputs.single_ids, *inputs.id_lists):
            values = features[name].reshape(count, -1)
            end = start + values.shape[1]
            np.add(values, inputs.row_ranges[name][0], out=rows[:, start:end])
            if weights is not None:
                is_list = name in inputs.id_lists
                weights[:, start:end] = _mean_weights(values, inputs.zero_is_missing[name]) if is_list else 1
            start = end
        columns = [features[name].reshape(count, -1) for name in inputs.numbers]
        numbers = np.concatenate(columns, 1, dtype=np.float64) if columns else np.empty((count, 0))
        return rows, weights, np.ascontiguousarray(numbers)


def _mean_weights(ids: Array, zero_is_missing: bool) -> Array:
    """Compute the weight of each entry of a list in the mean over the list."""
    present = (ids > 0).astype(np.float32) if zero_is_missing else np.ones(ids.shape, np.float32)
    weights: Array = present / np.maximum(present.sum(1, keepdims=True), 1)
    return weights


def _layout(inputs: Inputs) -> Layout:
    fields = len(inputs.single_ids)
    field_of, alike_from = list(range(fields)), list(range(fields))
    for name in inputs.id_lists:
        alike_from += [len(field_of)] * inputs.lengths[name]
        field_of += [fields] * inputs.lengths[name]
        fields += 1
    numbers = len(inputs.bin_starts)
    alike_from += range(len(field_of), len(field_of) + numbers)
    field_of += range(fields, fields + numbers)
    normalizer = inputs.normalizer
    return Layout(
        field_of=np.array(field_of, np.int32),
        alike_from=np.array(alike_from, np.int32),
        fields=fields,
        bin_starts=inputs.bin_starts.numpy().copy(),
        bins=BINS,
        count=normalizer.count,
        sample=normalizer.sample,
        sample_size=SAMPLE_SIZE,
        slot_stride=SLOT_STRIDE,
        max_shift=MAX_SHIFT,
    )
