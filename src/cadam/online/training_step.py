"""The generic training step: predicts and trains with any model and optimizer of torch, and rejects single events."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from .data.events import Array, Columns, Events, select_features
from .models.id_features import IdFeatures
from .models.inputs import Inputs, cast_features, feature_dtype
from .models.mode import declared_modules, is_own, is_same_in_training
from .models.model_file import LOG_LOSS

Loss = Callable[..., Tensor]
"""Computes the mean loss from scores and labels, and from the keyword argument `weight` if the events have weights."""
MIN_WORK_FOR_THREADS = 100_000_000
"""The number of multiplications of dense weights per step from which on a second thread saves a quarter of the time."""
MAX_CONSECUTIVE_FAILURES = 1000
"""If more events in a row cannot be scored or learned, the model is considered broken, not the events."""
_DEVICE_ERRORS = tuple(
    getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name)
)
FATAL_ERRORS = (TypeError, MemoryError, *_DEVICE_ERRORS)
"""Errors that no single event causes: the model is called incorrectly, or the machine fails."""


def default_threads(model: nn.Module, batch_size: int) -> int:
    """Return how many threads torch should use for a model: one for a small model, else those of torch.

    In small operations threads mostly wait for each other. On a machine that is busy with other processes, a step then
    takes many times as long. The number of threads can change the last bits of the weights, so a small number that does
    not depend on the machine also makes runs reproducible.

    Args:
        model: the model.
        batch_size: the number of events per step.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    dense = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    return 1 if dense * batch_size < MIN_WORK_FOR_THREADS else torch.get_num_threads()


class ModelOutputError(TypeError):
    """The model does not return one score per event, or its loss is not one number with a gradient."""


class TrainingStep:
    """Calls a model with features by name, ``model(**features)``, for predictions and for optimizer steps.

    There are three operations: `predict` computes scores, `train` takes an optimizer step, and `learn` does both with
    one forward pass. `predict_robustly` and `train_robustly` do the same as the first two, but reject events for which
    the model fails.

    This class works with any model. Subclasses are faster for certain models: they override some of the methods, and
    fall back to those of this class for batches that they do not support. All of them compute the same scores and
    weights, up to rounding.

    Features in float64, such as those of the kind ``number``, are converted to the type of `feature_dtype`.

    Args:
        model: returns one score per event.
        optimizer: updates the parameters of the model.
        loss: computes the mean loss from scores and labels.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.learned_events = self.steps = 0
        self.consecutive_unscored = self.consecutive_unlearned = 0
        self._feature_dtype = feature_dtype(model)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._shares_memory = is_own(type(model)) and (loss is LOG_LOSS or is_own(loss))
        """Whether tensors on the CPU share the memory of the columns. The user's own code gets copies, because it may
        change tensors in place, and the columns are used again, for example in metrics."""
        self.has_single_pass = is_same_in_training(model)
        """Whether `learn` computes one forward pass for the scores and the gradients."""
        self._declared_modules = declared_modules(model)
        self.id_features = [module for module in model.modules() if isinstance(module, IdFeatures)]
        """The features of the kind `id`. Their rows are part of the model."""
        for module in self.id_features:
            module.attach(optimizer)
        # Buffers that are not finite from the beginning, such as attention masks, are not a sign of divergence.
        self._finite_buffers = {name for name, value in model.named_buffers() if _is_finite(value)}

    @property
    def description(self) -> str:
        """A description of how the model is trained, and of the reason if compiled code is not used."""
        layers = [module for module in self.model.modules() if isinstance(module, Inputs)]
        reasons = [reason for layer in layers if (reason := layer.find_uncompiled()) is not None]
        if layers and not reasons:
            return "in batches, with a compiled input layer"
        return "with torch, in batches" + "".join(f": {reason}" for reason in reasons)

    @property
    def models(self) -> list[nn.Module]:
        """All models that learn: the one that predicts, and those that compete with it."""
        return [self.model]

    def advance(self, time: float, events: int) -> None:
        """Set the clock of features of the kind `id`, see `IdFeatures.advance`."""
        for module in self.id_features:
            module.advance(time, events)

    # Predictions ------------------------------------------------------------------------------------------------

    def predict(self, features: Columns, count: int) -> Array:
        """Compute the scores of `count` events. Errors of the model are not caught."""
        set_mode(self.model, training=False)
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
        return self._call_model(self._to_tensors(features), count)

    def _call_model(self, features: dict[str, Tensor], count: int) -> Tensor:
        scores = self._compute_scores(cast_features(features, self._feature_dtype))
        if not isinstance(scores, Tensor) or scores.numel() != count:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ModelOutputError(f"the model must return one score per event: {count} events gave {shape}")
        return scores.reshape(count).float()

    def _compute_scores(self, features: dict[str, Tensor]) -> Tensor:
        scores: Tensor = self.model(**features)
        return scores

    def _to_tensors(self, columns: Columns) -> dict[str, Tensor]:
        if self._device.type != "cpu":
            return copy_columns(columns, self._device)
        if not self._shares_memory:
            return {name: torch.from_numpy(np.array(values, order="C")) for name, values in columns.items()}
        return {name: torch.from_numpy(_as_writable(values)) for name, values in columns.items()}

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

    def learn(self, columns: Columns) -> Array | None:
        """Compute the scores of labeled events, then take one optimizer step on their mean loss, if possible.

        One forward pass gives both the scores, which are those before the step, and the gradients. If this is not
        possible, nothing changes, and the caller uses `predict_robustly` and `train_robustly` instead. This is so

        - if the model could compute other scores in training mode than in evaluation mode, see `is_same_in_training`;
        - if an event may have to be rejected, because the model fails or a score is not finite;
        - in this class, if there are features of the kind `id`: a training pass gives rows to new ids, which could not
          be taken back if an event had to be rejected.

        Args:
            columns: features and finite labels.

        Returns:
            The scores, all of them finite; None if nothing has changed.
        """
        if not self.has_single_pass or self.id_features:
            return None
        # A module may declare that its scores do not depend on the mode although training mode changes its buffers.
        buffers = [(buffer, buffer.clone()) for module in self._declared_modules for buffer in module.buffers()]
        try:
            labels = self._labels(columns)
            outputs = self._training_forward(columns)
            # A copy, because the outputs may share memory with a parameter, or the loss may change them.
            scores: Array = outputs.detach().cpu().numpy().copy()
            loss = self._mean_loss(outputs, labels, columns) if np.isfinite(scores).all() else None
        except Exception:  # two passes will find the event that causes it, or raise it again
            loss = None
        if loss is None:
            with torch.no_grad():
                for buffer, earlier in buffers:
                    buffer.copy_(earlier)
            return None
        self._update(loss, len(labels))
        return scores

    def _compute_loss(self, columns: Columns) -> Tensor:
        labels = self._labels(columns)
        return self._mean_loss(self._training_forward(columns), labels, columns)

    def _mean_loss(self, scores: Tensor, labels: Tensor, columns: Columns) -> Tensor:
        """Compute the mean of the loss, or of weight times loss if the events have weights.

        The sum is divided by the number of events, not by the sum of weights, so that the weight of an event does not
        depend on the other events of its batch.

        Raises:
            ModelOutputError: if the loss is not one number.
        """
        weight = self._to_tensors({"weight": columns["weight"]}) if "weight" in columns else {}
        loss = self.loss(scores, labels, **weight)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelOutputError(f"the loss must return a tensor with the mean over events, and it returned {shape}")
        return loss

    def _labels(self, columns: Columns) -> Tensor:
        return self._to_tensors({"label": columns["label"]})["label"]

    def _training_forward(self, columns: Columns) -> Tensor:
        set_mode(self.model, training=True)
        self.optimizer.zero_grad()
        return self._forward(select_features(columns), len(columns["label"]))

    def _update(self, loss: Tensor, events: int) -> None:
        if not loss.requires_grad:
            raise ModelOutputError(
                "the loss does not depend on any parameter that can be learned: all of them are frozen, or the scores "
                "are detached, rounded or computed without gradients"
            )
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


def copy_columns(columns: Columns, device: torch.device) -> dict[str, Tensor]:
    """Copy columns to a device. All columns of one type take one transfer, and no transfer is waited for.

    A transfer takes some microseconds, whatever its size, and is asynchronous only from pinned memory.
    """
    tensors: dict[str, Tensor] = {}
    for dtype in {values.dtype for values in columns.values()}:
        members = {name: values for name, values in columns.items() if values.dtype == dtype}
        sizes = [values.size for values in members.values()]
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        host = torch.empty(sum(sizes), dtype=torch_dtype, pin_memory=device.type == "cuda")
        np.concatenate([values.reshape(-1) for values in members.values()], out=host.numpy())
        parts = torch.split(host.to(device, non_blocking=True), sizes)
        tensors |= {n: part.view(v.shape) for (n, v), part in zip(members.items(), parts, strict=True)}
    return {name: tensors[name] for name in columns}


def _as_writable(values: Array) -> Array:
    """Return an array that `torch.from_numpy` accepts without a warning: writable and contiguous, copied if needed."""
    return values if values.flags.writeable and values.flags.c_contiguous else np.array(values, order="C")


def set_mode(module: nn.Module, training: bool) -> None:
    """Do the same as `module.train(training)` in less time: nn.Module intercepts every assignment of an attribute."""
    if type(module).train is not nn.Module.train or "train" in module.__dict__:
        module.train(training)  # the module has its own implementation of `train`
        return
    module.__dict__["training"] = training
    for child in module._modules.values():
        if child is not None:
            set_mode(child, training)


def _is_finite(value: Tensor) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return True
    # A finite sum proves that all values are finite, in one pass and without a mask. If the sum is not finite, it may
    # have overflowed, so every value is checked.
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
