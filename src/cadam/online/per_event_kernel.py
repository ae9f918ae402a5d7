"""Per-event training on the CPU: C code predicts and learns the events of a chunk one after the other in one call.

The models are sums over the fields of an event, see native/src/per_event_models.c. The updates are those of the sparse
and dense kernels of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..engines.base import KernelBatch, ParamSlot, Words
from ..engines.cpu.dense import kernel, kernel_refusal
from ..native.structs import EVENT_BATCH, EVENT_MODEL, MAX_COEFFICIENTS
from ..rules.sparse_updates import counts_updates

TABLES = ("linear", "table")
"""The parameters with one row per id: linear weights and embeddings."""
PARTS = (*TABLES, "bias", "slopes", "vectors")
"""All parameters of a model, by their names in `Inputs`."""
MAX_STEP = 2.0**24
"""The largest step count: it is stored as float32, which cannot represent 2**24 + 1."""
MAX_ROWS = 2**32
"""The kernels store row numbers in 32 bits."""
OUT_OF_MEMORY = -2
"""The value that the C functions return if they cannot allocate memory."""
Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Layout:
    """The arrangement of the features of an event for the kernels.

    An entry is one id of an event, that is, one row of the tables. An id feature has one entry and a list has several.
    The entries of numbers, which name the bins of the numbers, come last.
    """

    field_of: np.ndarray[Any, np.dtype[np.int32]]
    """The field of each entry."""
    alike_from: np.ndarray[Any, np.dtype[np.int32]]
    """For each entry, the first entry that may have the same row."""
    fields: int
    """The number of fields, without numbers."""
    bin_starts: Words
    """The first row of the bins of each number."""
    bins: int
    """The number of bins of a number."""
    count: Tensor
    """The state of `NumberNormalizer`, which `sample` and the constants that follow also belong to."""
    sample: Tensor
    sample_size: int
    slot_stride: int
    max_shift: int

    @property
    def numbers(self) -> int:
        """The number of numeric features of an event."""
        return len(self.bin_starts)

    @property
    def entries(self) -> int:
        """The number of entries, without those of numbers."""
        return len(self.field_of) - self.numbers


def find_unsupported(batch: KernelBatch) -> str | None:
    """Return why the kernels do not support the parameters of a batch, or None if they do."""
    if batch.group.row_update.ages:
        return "sparse_updates='exact' is not supported"
    if counts_updates(batch.group.options):
        return "confidence_after is not supported"
    for slot in batch.slots:
        if slot.param.device.type != "cpu" or str(slot.param.dtype) != "torch.float32":
            return f"only float32 on the CPU is supported, and {slot.name} is {slot.param.dtype} on {slot.param.device}"
        if not slot.param.is_contiguous():
            return f"{slot.name} is not contiguous"
        if slot.storage:
            return f"{slot.storage} is not supported"
        if len(slot.param) > MAX_ROWS:
            return f"at most {MAX_ROWS:,} rows are supported, and {slot.name} has {len(slot.param):,}"
        if refusal := kernel_refusal(batch.group, slot):
            return refusal.reason
    if len({slot.step.item() for slot in batch.slots}) > 1:
        return "the parameters have not taken the same number of steps"
    return None


class PerEventModel:
    """A model and its optimizer state, as the C functions see them.

    Args:
        batch: all parameters.
        parts: the parameters by the names of `PARTS`.
        layout: the arrangement of the features.
    """

    def __init__(self, batch: KernelBatch, parts: Mapping[str, ParamSlot], layout: Layout) -> None:
        self.batch, self.layout = batch, layout
        self.library, kernel_number = kernel(batch)
        model = np.zeros((), EVENT_MODEL)
        for name, slot in parts.items():
            part = model[name]
            part["param"] = slot.param.data_ptr()
            part["state"][: len(slot.state)] = [buffer.data_ptr() for buffer in slot.state.values()]
            part["counts"] = 0 if slot.counts is None else slot.counts.data_ptr()
            part["rows"] = len(slot.param) if name in TABLES else 1
            part["width"] = slot.param.numel() // max(int(part["rows"]), 1)
        model["kernel"] = kernel_number
        for name in ("entries", "fields", "numbers", "bins", "sample_size", "slot_stride", "max_shift"):
            model[name] = getattr(layout, name)
        for name in ("field_of", "alike_from", "bin_starts"):
            model[name] = getattr(layout, name).ctypes.data
        for name in ("count", "sample"):
            model[name] = getattr(layout, name).data_ptr()
        self._model = model

    def train(self, rows: Words, weights: Floats | None, numbers: Doubles, labels: Floats) -> tuple[Floats, int]:
        """Predict each event and learn it before the next one is predicted.

        The first event whose score or label is not finite is predicted but not learned, and processing stops there.

        Returns:
            The scores, and how many events were learned.
        """
        step = self.batch.slots[0].step.item()
        step_coefficients = self._coefficients(step, len(labels))
        scores, learned = self._call(
            self.library.c.cadam_learn_per_event, rows, weights, numbers, labels, step_coefficients
        )
        for slot in self.batch.slots:
            slot.step.fill_(min(step + learned, MAX_STEP))
        return scores, learned

    def predict(self, rows: Words, weights: Floats | None, numbers: Doubles) -> Floats:
        """Predict events without learning them."""
        unused = np.empty(0, np.float32)
        return self._call(self.library.c.cadam_score_events, rows, weights, numbers, unused, unused)[0]

    def _call(
        self,
        function: Any,
        rows: Words,
        weights: Floats | None,
        numbers: Doubles,
        labels: Floats,
        step_coefficients: Floats,
    ) -> tuple[Floats, int]:
        scores = np.empty(len(rows), np.float32)
        events = np.zeros((), EVENT_BATCH)
        events["n"] = len(rows)
        arrays = {
            "rows": rows,
            "weights": weights,
            "numbers": numbers,
            "labels": labels,
            "c": step_coefficients,
            "scores": scores,
        }
        for name, array in arrays.items():
            if array is not None:
                assert array.flags.c_contiguous
                events[name] = array.ctypes.data
        result = int(function(self._model.ctypes.data, events.ctypes.data))
        if result == OUT_OF_MEMORY:
            raise MemoryError(f"no memory for a chunk of {len(rows):,} events; nothing was learned from them")
        return scores, result

    def _coefficients(self, step: float, count: int) -> Floats:
        """Compute the coefficients of the next `count` steps, in the order that the kernel expects."""
        t = np.minimum(step + 1 + np.arange(count), MAX_STEP)
        by_name = self.batch.group.kernel_coefficients(t)
        values = np.zeros((count, MAX_COEFFICIENTS), np.float32)
        for column, value in enumerate(by_name.values()):
            values[:, column] = value
        return values
