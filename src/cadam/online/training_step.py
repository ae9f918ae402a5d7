"""A model under its optimizer: scores of events, steps over events, and what cannot be scored or learnt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from .data.events import Array, Columns, Events, select_features

Loss = Callable[[Tensor, Tensor], Tensor]
IN_A_ROW = 1000  # so many events in a row without a finite score, or not to be learnt from, are the model's fault
FATAL = tuple(getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name))
NOT_THE_EVENTS = (TypeError, MemoryError, *FATAL)  # a model that is called wrongly, or a machine that fails


class Training:
    """Calls the model with the features by name, ``model(**features)``; it gives a score per event."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.learned = self.steps = 0
        self.unscored = self.unlearned = 0  # events in a row
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._finite = {name for name, value in model.named_buffers() if _is_finite(value)}  # a mask may never be

    # Scores --------------------------------------------------------------------------------------------------

    def score(self, features: Columns, count: int) -> Array:
        """Scores of events; whatever the model raises is raised."""
        _set_mode(self.model, training=False)
        with torch.no_grad():
            scores: Array = self._forward(features, count).cpu().numpy()
            return scores

    def scores(self, events: Events, *, first: bool) -> tuple[Array, dict[int, str]]:
        """Scores, nan where the model refused the event; and why it did.

        A model that refuses all of its first events is wrong itself; later, `IN_A_ROW` say so.
        """
        try:
            return self.score(events.features, len(events)), {}
        except NOT_THE_EVENTS:
            raise
        except Exception as error:
            whole = error
        scores, failed = np.full(len(events), np.nan, dtype=np.float32), {}
        halves = [slice(0, len(events))]
        while halves:  # one event may spoil a batch: look for it, half by half
            half = halves.pop()
            try:
                part = {name: values[half] for name, values in events.features.items()}
                scores[half] = self.score(part, half.stop - half.start)
            except NOT_THE_EVENTS:
                raise
            except Exception as error:
                middle = (half.start + half.stop) // 2
                if middle == half.start:
                    failed[half.start] = f"the model refused it: {type(error).__name__}: {error}"
                else:
                    halves += [slice(half.start, middle), slice(middle, half.stop)]
        if len(failed) == len(events) > 1 and first:
            raise whole
        return scores, failed

    def _forward(self, features: Columns, count: int) -> Tensor:
        scores = self.model(**{name: self._tensor(values) for name, values in features.items()})
        if not isinstance(scores, Tensor) or scores.numel() != count:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"the model must give a score per event: {count} events gave {shape}")
        return scores.reshape(count).float()

    def _tensor(self, values: Array) -> Tensor:
        if not values.flags.writeable or not values.flags.c_contiguous:
            values = np.array(values, order="C")
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    # Steps ---------------------------------------------------------------------------------------------------

    def step(self, columns: Columns) -> None:
        """One step over the mean loss of these events."""
        self._update(self._loss_of(columns), len(columns["label"]))

    def learn(self, columns: Columns, refused: Callable[[Columns, Exception], None]) -> Exception | None:
        """A step, or if the model refuses it, two half as long. The last refusal.

        The model has scored these events. What it cannot be trained on may be a single one, by batch norm: `refused`
        is told of that; `IN_A_ROW` of them are the model's fault.
        """
        try:
            loss = self._loss_of(columns)
        except NOT_THE_EVENTS:
            raise
        except Exception as error:
            count = len(columns["label"])
            if count == 1:
                self.unlearned += 1
                if self.unlearned > IN_A_ROW:
                    raise
                refused(columns, error)
                return error
            halves = (slice(0, count // 2), slice(count // 2, count))
            refusals = [self.learn({name: v[half] for name, v in columns.items()}, refused) for half in halves]
            return refusals[1] or refusals[0]
        self._update(loss, len(columns["label"]))
        return None

    def _loss_of(self, columns: Columns) -> Tensor:
        features = select_features(columns)
        labels = self._tensor(columns["label"])
        _set_mode(self.model, training=True)
        self.optimizer.zero_grad()
        return self.loss(self._forward(features, len(labels)), labels)

    def _update(self, loss: Tensor, count: int) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.count(1, count)

    def count(self, steps: int, events: int) -> None:
        """So many steps were taken, over so many events."""
        self.steps += steps
        self.learned += events
        self.unlearned = 0

    # Divergence ----------------------------------------------------------------------------------------------

    def check_scored(self, failed: dict[int, str]) -> None:
        """That the model is not to blame for events without a finite score."""
        if self.unscored:
            self.check_finite()
        if self.unscored > IN_A_ROW and failed:
            raise RuntimeError(f"the model refused {self.unscored} events in a row; {failed[max(failed)]}")
        if self.unscored > IN_A_ROW:
            raise FloatingPointError(f"the model has diverged: {self.unscored} events in a row have no finite score")

    def check_finite(self) -> None:
        """Of weights, buffers and the optimizer's state: an infinite second moment holds a weight still for ever."""
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        names = {value: name for name, value in found.items()}
        found |= {name: value for name, value in self.model.named_buffers() if name in self._finite}
        for param, state in self.optimizer.state.items():
            whose = names.get(param, "a parameter")
            found |= {f"the optimizer's {kind} of {whose}": v for kind, v in state.items() if isinstance(v, Tensor)}
        for name, value in found.items():
            if not _is_finite(value):
                raise FloatingPointError(f"the model has diverged: {name} is no longer finite")


def _set_mode(module: nn.Module, training: bool) -> None:
    """As `module.train(training)`, but for the price of nn.Module's setting of attributes, at every batch."""
    if type(module).train is not nn.Module.train or "train" in module.__dict__:
        module.train(training)  # in its own way
        return
    module.__dict__["training"] = training
    for child in module._modules.values():
        if child is not None:
            _set_mode(child, training)


def _is_finite(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())
