"""Event by event on the CPU: a chunk of events is predicted and learnt from, one after the other, in one call of C.

The models are sums over the fields of an event, see native/src/per_event_models.c; updates are those of the row and
dense kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..engines.base import KernelBatch, ParamSlot, Words
from ..engines.cpu.dense import MAX_BUFFERS, MAX_COEFFICIENTS, kernel, kernel_refusal

PARTS = ("linear", "table", "bias", "slopes", "vectors")
"""The parameters of a model: the first two are tables, of weights and of embeddings."""
MOST_STEPS = 2.0**24
"""Steps are counted in float32, which does not go further."""
MOST_ROWS = 2**32
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Layout:
    """What an event is made of, as the kernels want it."""

    field_of: np.ndarray[Any, np.dtype[np.int32]]
    """By entry (a row that an event names): its field. Those of the numbers come last."""
    alike_from: np.ndarray[Any, np.dtype[np.int32]]
    """By entry: the first one that may name the same row."""
    fields: int
    """Without those of the numbers."""
    bin_starts: Words
    """By number: the first row of its bins."""
    bins: int
    count: Tensor
    mean: Tensor
    variance: Tensor
    memory: float
    """The statistics of the numbers, float64, and how far the count goes."""

    @property
    def numbers(self) -> int:
        return len(self.bin_starts)

    @property
    def entries(self) -> int:
        """Without those of the numbers."""
        return len(self.field_of) - self.numbers


def lacks(batch: KernelBatch) -> str | None:
    """Why the kernels cannot serve the parameters of this batch; None if they can."""
    for slot in batch.slots:
        if slot.param.device.type != "cpu" or str(slot.param.dtype) != "torch.float32":
            return f"serves float32 on the CPU, and {slot.name} is {slot.param.dtype} on {slot.param.device}"
        if not slot.param.is_contiguous():
            return f"{slot.name} is not contiguous"
        if slot.storage:
            return f"has no {slot.storage}"
        if len(slot.param) > MOST_ROWS:
            return f"numbers rows with 32 bits, and {slot.name} has {len(slot.param):,}"
        if refusal := kernel_refusal(batch.group, slot):
            return refusal.reason
    if len({slot.step.item() for slot in batch.slots}) > 1:
        return "the parameters have not taken the same number of steps"
    return None


class EventModel:
    """The parameters of a model by the names of `PARTS`, with their optimizer's state: all of one batch."""

    def __init__(self, batch: KernelBatch, parts: Mapping[str, ParamSlot], layout: Layout) -> None:
        self.batch, self.layout = batch, layout
        self.library, number = kernel(batch)
        words = np.zeros(len(PARTS) * (MAX_BUFFERS + 4) + 12, np.int64)
        for row, name in zip(words[:-12].reshape(-1, MAX_BUFFERS + 4), PARTS, strict=True):
            if (slot := parts.get(name)) is not None:
                row[0] = slot.param.data_ptr()
                row[1 : 1 + len(slot.state)] = [buffer.data_ptr() for buffer in slot.state.values()]
                row[1 + MAX_BUFFERS] = 0 if slot.counts is None else slot.counts.data_ptr()
                rows = len(slot.param) if name in PARTS[:2] else 1
                row[-2:] = rows, slot.param.numel() // max(rows, 1)
        pointers = [array.ctypes.data for array in (layout.field_of, layout.alike_from, layout.bin_starts)]
        statistics = [tensor.data_ptr() for tensor in (layout.count, layout.mean, layout.variance)]
        words[-12:-1] = [
            number,
            layout.entries,
            layout.fields,
            layout.numbers,
            *pointers,
            layout.bins,
            *statistics,
        ]
        words[-1:].view(np.float64)[0] = layout.memory
        self.words = words

    def learn(self, rows: Words, weights: Floats | None, numbers: Floats, labels: Floats) -> tuple[Floats, int]:
        """Predict each event and learn from it before the next: the scores, and how many events were learnt from.

        The first event whose score or label is not finite is only predicted, and those after it are left.
        """
        step = self.batch.slots[0].step.item()
        c = self._coefficients(step, len(labels))
        scores, done = self._call(self.library.c.cadam_learn_per_event, rows, weights, numbers, labels, c)
        for slot in self.batch.slots:
            slot.step.fill_(min(step + done, MOST_STEPS))
        return scores, done

    def scores(self, rows: Words, weights: Floats | None, numbers: Floats) -> Floats:
        """Predict events and learn from none."""
        none = np.empty(0, np.float32)
        return self._call(self.library.c.cadam_score_events, rows, weights, numbers, none, none)[0]

    def _call(
        self, function: Any, rows: Words, weights: Floats | None, numbers: Floats, labels: Floats, c: Floats
    ) -> tuple[Floats, int]:
        scores = np.empty(len(rows), np.float32)
        arrays = (rows, weights, numbers, labels, c, scores)
        assert all(array is None or array.flags.c_contiguous for array in arrays)
        given = np.array([len(rows), *(0 if array is None else array.ctypes.data for array in arrays)], np.int64)
        done = int(function(self.words.ctypes.data, given.ctypes.data))
        if done == -2:
            raise MemoryError(f"no memory for the {len(rows):,} events of a chunk; nothing was learnt from them")
        return scores, done

    def _coefficients(self, step: float, count: int) -> Floats:
        """Of each of the next steps, in the kernel's order."""
        t = np.minimum(step + 1 + np.arange(count), MOST_STEPS)
        found = self.batch.group.kernel_coefficients(t)
        c = np.zeros((count, MAX_COEFFICIENTS), np.float32)
        for column, values in enumerate(found.values()):
            c[:, column] = values
        return c
