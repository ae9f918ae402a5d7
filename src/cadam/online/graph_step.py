"""The training step on a CUDA device, captured once for each batch size as CUDA graphs and then replayed.

A step of a small model consists of hundreds of short kernels. Launching them one by one takes the host longer than the
device needs to execute them; a graph is launched at once. There are two graphs, so that a batch with a score that is
not finite changes nothing. The first one copies the batch from pinned memory, computes the scores and copies them back.
The second one computes the loss and the gradients and takes the optimizer step. The host waits only for the first one:
while the second one runs, it updates metrics and prepares the next batch.

A batch size is captured exactly, without padding: padded rows would count as updated rows of an embedding table.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..engines.resolved_group import read_number
from ..optim.optimizer import Optimizer
from .data.events import FEATURE_PREFIX, Array, Columns, select_features
from .models.compiled_inputs import HOOKS
from .models.id_features import IdFeatures
from .models.mode import has_only_known_code, is_own
from .training_step import Loss, TrainingStep, set_mode

logger = logging.getLogger("cadam.online")

EAGER_STEPS = 2
"""The steps before a batch size is captured, which compile kernels and create the optimizer state."""
MAX_GRAPHS = 8
"""The number of batch sizes whose graphs are kept."""
MAX_CAPTURES = 64
"""After this many captures, batches are processed without graphs, because capturing takes longer than it saves."""

_OF_ALL_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has. A snapshot does not compare them by their names: it compares parameters,
buffers and submodules separately, and the others do not change a graph."""

Key = tuple[int, int]
"""The number of events of a batch, and the number of its columns."""


class GraphStep(TrainingStep):
    """Learns batches of labeled events by replaying CUDA graphs, where model, loss and optimizer allow it.

    The optimizer gets the option `capturable`, with which its step count and its coefficients stay on the device. Steps
    with and without graphs compute the same weights.

    Args:
        model: returns one score per event. All of its parameters are on one CUDA device.
        optimizer: updates the parameters of the model.
        loss: computes the mean loss from scores and labels.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        super().__init__(model, optimizer, loss)
        self.unsupported = _find_unsupported(self)
        """Why batches are processed without graphs, or None."""
        if self.unsupported is None:
            _make_capturable(optimizer)
        else:
            logger.info("training steps are not captured as CUDA graphs: %s", self.unsupported)
        self._hooks = [vars(module)[kind] for module in model.modules() for kind in HOOKS]
        self._hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        self._params = list(model.parameters())
        self._graphs: dict[Key, CapturedStep] = {}
        self._eager_steps: Counter[Key] = Counter()
        self._captures = 0

    @property
    def description(self) -> str:
        """A description of how the model is trained, and of the reason if CUDA graphs are not used."""
        graphs = "as CUDA graphs" if self.unsupported is None else f"not as CUDA graphs: {self.unsupported}"
        return f"in batches, {graphs}"

    def learn(self, columns: Columns) -> Array | None:
        """Compute the scores of labeled events, then take one optimizer step, as described in `TrainingStep.learn`."""
        captured = None
        if self.unsupported is None and self.has_single_pass and len(columns["label"]) and not self._has_hooks():
            captured = self._find_graphs(columns)
        if captured is None or not captured.copy_batch(columns):
            return super().learn(columns)
        scores = captured.forward()
        if scores is not None:
            captured.update()
            self.count_steps(1, len(scores))
        return scores

    def _has_hooks(self) -> bool:
        """Whether Python code is called during a step, which a graph would not call."""
        return (
            any(self._hooks)
            or any(param._backward_hooks or param._post_accumulate_grad_hooks for param in self._params)
            or bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]
        )

    def _find_graphs(self, columns: Columns) -> CapturedStep | None:
        """Return the graphs for a batch, or None if it is processed without them."""
        key = len(columns["label"]), len(columns)
        captured = self._graphs.get(key)
        if captured is not None and captured.is_valid():
            return captured
        self._eager_steps[key] += 1
        if self._eager_steps[key] <= EAGER_STEPS:
            return None
        if captured is not None or len(self._graphs) == MAX_GRAPHS:
            self._graphs.clear()
        self._captures += 1
        if self._captures > MAX_CAPTURES:
            self._stop_capturing(f"batch sizes or optimizer options have changed {MAX_CAPTURES} times")
            return None
        try:
            self._graphs[key] = CapturedStep(self, columns)
        except Exception as error:
            # The first error is the reason, such as a model that reads a value of a tensor on the host. Ending the
            # capture then fails too.
            cause: BaseException = error
            while cause.__context__ is not None:
                cause = cause.__context__
            self._stop_capturing(": ".join([type(cause).__name__, *str(cause).splitlines()[:1]]))
            return None
        return self._graphs[key]

    def _stop_capturing(self, reason: str) -> None:
        self.unsupported = reason
        self._graphs.clear()
        torch.cuda.synchronize()
        self.optimizer.zero_grad()  # gradients of the failed capture have no values
        # After a failed capture, torch's random number generator is not reset until the next one has ended.
        with _capture(torch.cuda.CUDAGraph(), torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            pass
        logger.warning("training steps are no longer captured as CUDA graphs: %s", reason)


class CapturedStep:
    """The graphs of one batch size, with the memory that they read and write.

    Args:
        step: the step that is captured.
        batch: a batch of this size. Others have the same columns.
    """

    def __init__(self, step: GraphStep, batch: Columns) -> None:
        self.model, self.optimizer = step.model, step.optimizer
        used = {name: v for name, v in batch.items() if name in ("label", "weight") or name.startswith(FEATURE_PREFIX)}
        self._sources: list[tuple[Array, list[str], list[tuple[int, ...]]]] = []
        """For each type: the pinned memory that batches are copied to, and the names and shapes of its columns."""
        copies: list[tuple[Tensor, Tensor]] = []
        columns: dict[str, Tensor] = {}
        for dtype in {values.dtype for values in used.values()}:
            members = {name: values for name, values in used.items() if values.dtype == dtype}
            sizes = [values.size for values in members.values()]
            host = torch.empty(sum(sizes), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=True)
            on_device = torch.empty_like(host, device=step._device)
            self._sources.append((host.numpy(), list(members), [values.shape for values in members.values()]))
            copies.append((on_device, host))
            parts = torch.split(on_device, sizes)
            columns |= {n: part.view(v.shape) for (n, v), part in zip(members.items(), parts, strict=True)}
        count = len(columns["label"])
        self._scores = torch.empty(count, pin_memory=True)
        buffers = [buffer for module in step._declared_modules for buffer in module.buffers()]
        self._earlier = [(buffer, torch.empty_like(buffer)) for buffer in buffers]
        """The buffers that the forward pass changes, and copies of them."""
        self._copies = copies  # keeps the memory alive that the graphs read and write
        self._forward, self._update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        set_mode(self.model, training=True)
        self.optimizer.zero_grad()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with _capture(self._forward, stream):
            for on_device, host in copies:
                on_device.copy_(host, non_blocking=True)
            for buffer, earlier in self._earlier:
                earlier.copy_(buffer)
            outputs = step._call_model(select_features(columns), count)
            self._scores.copy_(outputs.detach(), non_blocking=True)
        with _capture(self._update, stream, self._forward.pool()):
            weight = {"weight": columns["weight"]} if "weight" in columns else {}
            step.loss(outputs, columns["label"], **weight).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self._snapshot = StepSnapshot(self.model, self.optimizer)

    def is_valid(self) -> bool:
        """Whether the graphs still use the tensors, attributes and options of model and optimizer."""
        return self._snapshot.is_unchanged()

    def copy_batch(self, columns: Columns) -> bool:
        """Copy a batch to pinned memory. Returns False if the type or the shape of a column is another one."""
        try:
            for host, names, shapes in self._sources:
                values = [columns[name] for name in names]
                if [column.shape for column in values] != shapes:
                    return False
                flat = [column if column.ndim == 1 else column.reshape(-1) for column in values]
                np.concatenate(flat, out=host, casting="equiv")
        except (KeyError, TypeError):
            return False
        return True

    def forward(self) -> Array | None:
        """Return the scores of the copied batch, or None if one of them is not finite. Then nothing has changed."""
        if not self.model.training:
            set_mode(self.model, training=True)
        self._forward.replay()
        self._done.record()
        self._done.synchronize()
        scores: Array = self._scores.numpy().copy()
        if np.isfinite(scores).all():
            return scores
        for buffer, earlier in self._earlier:
            buffer.copy_(earlier)
        return None

    def update(self) -> None:
        """Take the optimizer step of the batch whose scores were computed last."""
        self._update.replay()


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture a graph like `torch.cuda.graph`, but without collecting garbage before it, which takes longer.

    Garbage is not collected during the capture either: it may contain graphs and pinned memory of another learner, and
    to release them would invalidate the capture.

    Args:
        graph: receives the operations.
        stream: the stream that is captured. A backward pass runs on the stream of its forward pass.
        pool: the memory of an earlier graph, whose tensors this graph uses.
    """
    torch.cuda.synchronize()
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            # Another thread may allocate memory meanwhile, so only this thread must not.
            graph.capture_begin(pool or torch.cuda.graph_pool_handle(), "thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects_garbage:
            gc.enable()


class StepSnapshot:
    """Everything about a model and an optimizer that a graph of their training step has captured.

    Args:
        model: the model.
        optimizer: its optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        modules = list(model.modules())
        owners: list[dict[Any, Any]] = [
            entries for module in modules for entries in (module._modules, module._parameters, module._buffers)
        ]
        owners += [vars(optimizer)["state"], *optimizer.state.values()]
        self._entries = [(entries, name, value) for entries in owners for name, value in entries.items()]
        """Dicts of modules, parameters, buffers, attributes and states, each with a key and the value that it had."""
        self._entries += [(vars(optimizer), name, vars(optimizer)[name]) for name in ("state", "param_groups")]
        self._tensors = [value for _, _, value in self._entries if isinstance(value, Tensor)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._params = list(model.parameters())
        attributes = [
            (vars(module), name) for module in modules for name in vars(module) if name not in _OF_ALL_MODULES
        ]
        self._entries += [(entries, name, entries[name]) for entries, name in attributes]
        self._sizes = [(vars(module), len(vars(module))) for module in modules]
        # The containers of this package do not change, and comparing them would take time.
        changeable = [vars(module) for module in modules if not is_own(type(module))]
        self._containers = [
            value
            for entries, name in attributes
            if any(entries is each for each in changeable)
            if isinstance(value := entries[name], (list, set, dict))
        ]
        self._option_keys = [(group, name) for group in optimizer.param_groups for name in group if name != "params"]
        self._values = self._read_values()

    def is_unchanged(self) -> bool:
        """Whether a new graph would be equal to one that was captured when the snapshot was taken."""
        return (
            all(entries.get(name) is value for entries, name, value in self._entries)
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and all(len(entries) == size for entries, size in self._sizes)
            and self._read_values() == self._values
        )

    def _read_values(self) -> list[Any]:
        """Return the values that may change in place: options, frozen parameters, and lists of the user's models."""
        # The host reads an option that is a tensor on the CPU, so a graph has its value and not its address.
        options = (read_number(group[name]) for group, name in self._option_keys)
        return [
            *(value.data_ptr() if isinstance(value, Tensor) else value for value in options),
            *(param.requires_grad for param in self._params),
            *(leaf for container in self._containers for leaf in _leaves(container)),
        ]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and values in nested containers. A tensor is represented by its identity and its memory."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        yield len(value)
        for entry in value:
            yield from _leaves(entry)
    else:
        yield (id(value), value.data_ptr()) if isinstance(value, Tensor) else value


def _find_unsupported(step: GraphStep) -> str | None:
    """Return why the steps of a model cannot be captured, or None if they may be.

    A graph repeats what the device did when it was captured, but no Python code. So the code of the model and of the
    loss must be known not to change with anything but its inputs.
    """
    if not isinstance(step.optimizer, Optimizer):
        return f"{type(step.optimizer).__name__} is not an optimizer of cadam"
    if any(group["differentiable"] for group in step.optimizer.param_groups):
        return "the optimizer is differentiable"
    if any(group["sparse_updates"] == "exact" for group in step.optimizer.param_groups):
        return "exact sparse updates count their steps on the host"
    if not step.has_single_pass:
        return "scores and gradients need different forward passes, see same_in_training"
    if any(isinstance(module, IdFeatures) for module in step.model.modules()):
        return "features of the kind id get their rows on the host"
    devices = {tensor.device for tensor in (*step.model.parameters(), *step.model.buffers())}
    if len(devices) != 1:
        return "the model is on several devices"
    return None if has_only_known_code(step.model, step.loss) else "the model or the loss has code that is not analyzed"


def _make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer keep its step counts on the device, and move those that it has already."""
    if all(group["capturable"] for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
