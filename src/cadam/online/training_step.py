"""Predicting and training with any torch model and optimizer, and handling events that the model cannot process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from .data.events import Array, Columns, Events, select_features

Loss = Callable[[Tensor, Tensor], Tensor]
"""Computes the mean loss from scores and labels."""
MAX_CONSECUTIVE_FAILURES = 1000
"""If more events in a row cannot be scored or learned, the model is considered broken, not the events."""
_DEVICE_ERRORS = tuple(
    getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name)
)
FATAL_ERRORS = (TypeError, MemoryError, *_DEVICE_ERRORS)
"""Errors that no single event causes: the model is called incorrectly, or the machine fails."""


class TrainingStep:
    """Calls a model with features by name, ``model(**features)``, for predictions and for optimizer steps.

    Args:
        model: returns one score per event.
        optimizer: updates the parameters of the model.
        loss: computes the mean loss from scores and labels.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.learned_events = self.steps = 0
        self.consecutive_unscored = self.consecutive_unlearned = 0
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        # Some buffers are never finite, for example attention masks. Only the others are checked for divergence.
        self._finite_buffers = {name for name, value in model.named_buffers() if _is_finite(value)}

    # Predictions ------------------------------------------------------------------------------------------------

    def predict(self, features: Columns, count: int) -> Array:
        """Compute the scores of `count` events. Errors of the model are not caught."""
        _set_mode(self.model, training=False)
        with torch.no_grad():
            scores: Array = self._forward(features, count).cpu().numpy()
            return scores

    def predict_robustly(self, events: Events, *, is_first: bool) -> tuple[Array, dict[int, str]]:
        """Compute the scores of events, even if the model fails for some of them.

        If a batch fails, it is split in halves until the failing events are found.

        Args:
            events: the events.
            is_first: whether no event has been scored yet. If the model fails for all of its first events, its error
                is raised.

        Returns:
            The scores, nan for events that failed; and an explanation for each failed row.
        """
        try:
            return self.predict(events.features, len(events)), {}
        except FATAL_ERRORS:
            raise
        except Exception as error:
            batch_error = error
        scores, failures = np.full(len(events), np.nan, dtype=np.float32), {}
        parts = [slice(0, len(events))]
        while parts:
            part = parts.pop()
            try:
                features = {name: values[part] for name, values in events.features.items()}
                scores[part] = self.predict(features, part.stop - part.start)
            except FATAL_ERRORS:
                raise
            except Exception as error:
                middle = (part.start + part.stop) // 2
                if middle == part.start:
                    failures[part.start] = f"the model refused it: {type(error).__name__}: {error}"
                else:
                    parts += [slice(part.start, middle), slice(middle, part.stop)]
        if len(failures) == len(events) > 1 and is_first:
            raise batch_error
        return scores, failures

    def _forward(self, features: Columns, count: int) -> Tensor:
        scores = self.model(**{name: self._to_tensor(values) for name, values in features.items()})
        if not isinstance(scores, Tensor) or scores.numel() != count:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"the model must return one score per event: {count} events gave {shape}")
        return scores.reshape(count).float()

    def _to_tensor(self, values: Array) -> Tensor:
        if not values.flags.writeable or not values.flags.c_contiguous:
            values = np.array(values, order="C")
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    # Training ---------------------------------------------------------------------------------------------------

    def train(self, columns: Columns) -> None:
        """Take one optimizer step on the mean loss of events. Errors of the model are not caught."""
        self._update(self._compute_loss(columns), len(columns["label"]))

    def train_robustly(self, columns: Columns, reject: Callable[[Columns, Exception], None]) -> Exception | None:
        """Take one optimizer step; if the model fails, split the events in halves and take a step on each.

        The model has already scored these events, so it is expected to process them. A single event can fail
        nevertheless, for example with batch normalization.

        Args:
            columns: features and labels.
            reject: is called with each event that fails alone, and its error.

        Returns:
            The last error, or None.
        """
        try:
            loss = self._compute_loss(columns)
        except FATAL_ERRORS:
            raise
        except Exception as error:
            count = len(columns["label"])
            if count == 1:
                self.consecutive_unlearned += 1
                if self.consecutive_unlearned > MAX_CONSECUTIVE_FAILURES:
                    raise
                reject(columns, error)
                return error
            halves = (slice(0, count // 2), slice(count // 2, count))
            errors = [self.train_robustly({name: v[half] for name, v in columns.items()}, reject) for half in halves]
            return errors[1] or errors[0]
        self._update(loss, len(columns["label"]))
        return None

    def _compute_loss(self, columns: Columns) -> Tensor:
        labels = self._to_tensor(columns["label"])
        _set_mode(self.model, training=True)
        self.optimizer.zero_grad()
        return self.loss(self._forward(select_features(columns), len(labels)), labels)

    def _update(self, loss: Tensor, events: int) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.count_steps(1, events)

    def count_steps(self, steps: int, events: int) -> None:
        """Count optimizer steps and the events that they were computed from."""
        self.steps += steps
        self.learned_events += events
        self.consecutive_unlearned = 0

    # Divergence -------------------------------------------------------------------------------------------------

    def check_scores(self, failures: dict[int, str]) -> None:
        """Raise if more than `MAX_CONSECUTIVE_FAILURES` events in a row have no finite score.

        Raises:
            RuntimeError: if the model refuses the events.
            FloatingPointError: if the model has diverged.
        """
        if self.consecutive_unscored:
            self.check_finite()
        if self.consecutive_unscored <= MAX_CONSECUTIVE_FAILURES:
            return
        if failures:
            raise RuntimeError(
                f"the model refused {self.consecutive_unscored} events in a row; {failures[max(failures)]}"
            )
        raise FloatingPointError(
            f"the model has diverged: {self.consecutive_unscored} events in a row have no finite score"
        )

    def check_finite(self) -> None:
        """Raise FloatingPointError if a weight, a buffer or a state of the optimizer is not finite.

        The optimizer counts too: an infinite second moment would stop a weight from changing ever again.
        """
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        names = {value: name for name, value in tensors.items()}
        tensors |= {name: value for name, value in self.model.named_buffers() if name in self._finite_buffers}
        for param, state in self.optimizer.state.items():
            owner = names.get(param, "a parameter")
            tensors |= {f"the optimizer's {key} of {owner}": v for key, v in state.items() if isinstance(v, Tensor)}
        for name, value in tensors.items():
            if not _is_finite(value):
                raise FloatingPointError(f"the model has diverged: {name} is no longer finite")


def _set_mode(module: nn.Module, training: bool) -> None:
    """Do the same as `module.train(training)`, which is slow because nn.Module intercepts every attribute."""
    if type(module).train is not nn.Module.train or "train" in module.__dict__:
        module.train(training)  # the module has its own implementation of `train`
        return
    module.__dict__["training"] = training
    for child in module._modules.values():
        if child is not None:
            _set_mode(child, training)


def _is_finite(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())
