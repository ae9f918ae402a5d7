"""The training step of the ready-made models on the CPU, without autograd.

The input layer is compiled code (native/src/batch_inputs.c), torch computes the matrix products, and most tensors of a
batch, including its gradients, are allocated once for each batch size. The optimizer is called as usual. Scores and
weights are those of `TrainingStep` up to rounding, and `TrainingStep` processes every batch that is not supported.
"""

from __future__ import annotations

import platform
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from ..native.container_snapshot import ContainerSnapshot
from ..native.tensor_snapshot import TensorSnapshot
from ..optim.optimizer import Optimizer
from ..tables.joint_assignment import JointBatch
from .compiled_step import CompiledStep
from .data.events import FEATURE_PREFIX, Array, Columns
from .graph_step import GraphStep
from .models.compiled_inputs import DONE, HOOKS, CompiledInputs, InputBatch, compiled_inputs
from .models.id_features import IdFeatures
from .models.inputs import KERNEL_CONSTANTS, Inputs
from .models.model_file import LOG_LOSS
from .models.networks import FM, MLP, DeepFM, Linear
from .training_step import Loss, TrainingStep, set_mode

MODELS = (Linear, FM, MLP, DeepFM)
"""The models that are supported. Their subclasses may compute something else."""
MAX_SIZES = 8
"""The number of batch sizes for which tensors are kept."""
MIN_WORK_FOR_ONEDNN = 1_000_000
"""The number of multiplications from which on oneDNN computes a matrix product. For smaller products, the code that it
compiles for each shape would not pay."""
_METHODS = {
    (kind, name): getattr(kind, name)
    for kind in (*MODELS, Inputs)
    for name in ("forward", "score")
    if hasattr(kind, name)
}
"""The methods that are computed here in another way. If one of them is replaced, as tests and programs of users may do,
batches are not supported any more."""
_EMBEDDING_OPTIONS = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": True}


@cache
def has_onednn() -> bool:
    """Whether torch can compute matrix products of float32 on this processor by oneDNN.

    By default torch uses MKL, which does not use the widest vectors of processors that are not made by Intel: on an AMD
    EPYC with AVX-512 it takes 1.7 times as long for these products. The choice does not depend on measured times,
    because a resumed run must be equal to the bit.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    is_built = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return is_x86 and is_built and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def create_training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, *, compile: bool = False
) -> TrainingStep:
    """Return the fastest implementation of the training step for a model, an optimizer and a loss.

    Args:
        model: the model.
        optimizer: its optimizer.
        loss: computes the mean loss from scores and labels.
        compile: whether `torch.compile` compiles the model, which must not be a ready-made one.
    """
    if compile:
        return CompiledStep(model, optimizer, loss)
    if any(param.device.type == "cuda" for param in model.parameters()):
        return GraphStep(model, optimizer, loss)
    kind = FusedStep if type(model) in MODELS and loss is LOG_LOSS else TrainingStep
    return kind(model, optimizer, loss)


class FusedStep(TrainingStep):
    """Learns batches of labeled events without autograd, where model and optimizer allow it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        super().__init__(model, optimizer, loss)
        assert isinstance(model, Linear)
        self._layout: _Layout | None = None
        self._passes: dict[int, FusedPass] = {}

    def learn(self, columns: Columns) -> Array | None:
        """Compute the scores of labeled events, then take one optimizer step, as described in `TrainingStep.learn`."""
        if not self.has_single_pass:
            return None
        count = len(columns["label"])
        fused = self._find_pass(count) if count and "weight" not in columns else None
        if fused is None:
            return super().learn(columns)
        with torch.no_grad():
            scores = fused.forward(columns)
            if scores is not None:
                fused.assign_rows()
                fused.backward(self._labels(columns))
        if scores is None:
            return super().learn(columns)
        if isinstance(self.optimizer, Optimizer):
            fused.last_step = self.optimizer.step_on_same_grads(fused.last_step)
        else:
            self.optimizer.step()
        self.count_steps(1, count)
        return scores

    @property
    def description(self) -> str:
        """A description of how the model is trained, as that of `TrainingStep`."""
        return super().description if self.find_unsupported() else "in batches, with a fused training step"

    def find_unsupported(self) -> str | None:
        """Return why batches are processed by autograd in the present state of model and optimizer, or None."""
        assert isinstance(self.model, Linear)
        layout = _Layout(self.model, self.optimizer)
        return layout.find_unsupported(self.model) or self._find_unsupported_optimizer(layout)

    def _find_unsupported_optimizer(self, layout: _Layout) -> str | None:
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            return "the optimizer has its own zero_grad"
        optimized = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        if optimized != {id(param) for param in layout.params}:
            return "the optimizer does not have exactly the parameters of the model"
        return None

    def _find_pass(self, count: int) -> FusedPass | None:
        """Return the pass for a batch size, or None if batches are processed by autograd."""
        assert isinstance(self.model, Linear)
        if self._layout is None or not self._layout.is_unchanged(self.optimizer):
            self._passes.clear()
            self._layout = None
            if self.find_unsupported() is not None:
                return None
            self._layout = _Layout(self.model, self.optimizer)
        fused = self._passes.get(count)
        if fused is None or fused.has_cleared_gradients():
            if len(self._passes) == MAX_SIZES:
                self._passes.clear()
            compiled = compiled_inputs(self.model.inputs, KERNEL_CONSTANTS)
            assert isinstance(compiled, CompiledInputs)
            fused = self._passes[count] = FusedPass(self.model, compiled, count)
        if not self.model.training:
            set_mode(self.model, training=True)
        return fused


class _Layout:
    """A snapshot of everything about a model and its optimizer that decides whether batches are supported.

    It includes the addresses of the parameters, to which the passes point.

    Args:
        model: the model.
        optimizer: its optimizer.
    """

    def __init__(self, model: Linear, optimizer: torch.optim.Optimizer) -> None:
        self.modules = list(model.modules())
        self.types = list(map(type, self.modules))
        self.params = list(model.parameters())
        self.has_shared_params = len(list(model.named_parameters(remove_duplicate=False))) > len(self.params)
        self.tables = [vars(module) for module in self.modules if isinstance(module, nn.Embedding)]
        owners = [entries for x in self.modules for entries in (x._modules, x._parameters, x._buffers)]
        self.owners = ContainerSnapshot(owners)
        self.hooks = [vars(module)[kind] for module in self.modules for kind in HOOKS]
        self.groups = [len(group["params"]) for group in optimizer.param_groups]
        self.memory = TensorSnapshot([*self.params, model.inputs.normalizer.count, model.inputs.normalizer.sample])

    def is_unchanged(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether model and optimizer are still supported as they were when this snapshot was taken."""
        return (
            self.owners.is_unchanged()
            and list(map(type, self.modules)) == self.types
            and not self._has_hooks()
            and not self._has_other_forward()
            and not self.memory.update()
            and all(param.requires_grad for param in self.params)
            and [len(group["params"]) for group in optimizer.param_groups] == self.groups
            and all(table[name] == value for table in self.tables for name, value in _EMBEDDING_OPTIONS.items())
            and not _are_methods_replaced()
        )

    def _has_hooks(self) -> bool:
        return (
            any(self.hooks)
            or any(param._backward_hooks or param._post_accumulate_grad_hooks for param in self.params)
            or torch.is_autocast_enabled("cpu")
            or not torch.is_grad_enabled()
            or bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]
        )

    def _has_other_forward(self) -> bool:
        """Whether a module has its own function `forward` or `score` instead of that of its class."""
        return any("forward" in module.__dict__ or "score" in module.__dict__ for module in self.modules)

    def find_unsupported(self, model: Linear) -> str | None:
        """Return what is not supported about a model, or None."""
        if (reason := model.inputs.find_uncompiled()) is not None:
            return reason
        if self._has_hooks() or self._has_other_forward():
            return "the model or a parameter has hooks or another forward, or autocast is on"
        if _are_methods_replaced():
            return "a method of a ready-made model has been replaced"
        if self.has_shared_params:
            return "a parameter belongs to several layers, so its gradients have to be added"
        if not all(param.requires_grad and param.is_contiguous() for param in self.params):
            return "a parameter is frozen or not contiguous"
        if len({param.dtype for param in self.params}) != 1:
            return "the parameters differ in their dtype"
        layers = list(model.deep) if isinstance(model, MLP) else []
        expected = [nn.ReLU if index % 2 else nn.Linear for index in range(len(layers))]
        if isinstance(model, MLP) and ([type(layer) for layer in layers] != expected or len(layers) % 2 == 0):
            return "the hidden layers are not linear layers with ReLU between them"
        if any(isinstance(layer, nn.Linear) and layer.bias is None for layer in layers):
            return "a hidden layer has no bias"
        return None


def _are_methods_replaced() -> bool:
    return any(getattr(kind, name) is not method for (kind, name), method in _METHODS.items())


class FusedPass:
    """The tensors of one batch size, and the forward and the backward pass that use them.

    Args:
        model: a model that is supported.
        compiled: the compiled code of its input layer.
        count: the number of events of a batch.
    """

    def __init__(self, model: Linear, compiled: CompiledInputs, count: int) -> None:
        self.count, self.library = count, compiled.library
        self.last_step: object = None
        """The last step of the optimizer on the gradients of this object, see `Optimizer.step_on_same_grads`."""
        self.names = [FEATURE_PREFIX + name for name, _, _ in compiled.features]
        self.shapes = [(count, *shape) for _, shape, _ in compiled.features]
        sizes = [count * int(np.prod(shape)) for _, shape, _ in compiled.features]
        self.id_count = sum(dtype == torch.int64 for _, _, dtype in compiled.features)
        """The number of features with ids. They come before those with numbers."""
        self.id_features = model.inputs.ids if isinstance(model.inputs.ids, IdFeatures) else None
        parts = sizes[: self.id_count], sizes[self.id_count :]
        self.staged = np.empty(sum(parts[0]), np.int64), np.empty(sum(parts[1]), np.float64)
        """The memory that the ids and the numbers of a batch are copied to, feature by feature."""
        staged_features = [
            feature
            for staged, part in zip(self.staged, parts, strict=True)
            for feature in torch.split(torch.from_numpy(staged), part)
        ]
        columns = [feature.view(shape) for feature, shape in zip(staged_features, self.shapes, strict=True)]
        self.batch = InputBatch(compiled, model.inputs, columns, is_training=False)
        self.id_batch = self._new_id_batch(compiled)
        """The features of the kind `id`, whose rows replace their ids in `staged`; None if there are none."""
        dtype = self.batch.dtype
        layers = [layer for layer in model.deep if isinstance(layer, nn.Linear)] if isinstance(model, MLP) else []
        self.weights, self.biases = [x.weight.detach() for x in layers], [x.bias.detach() for x in layers]
        inputs = self.batch.embedded.view(count, -1)
        self.outputs = [inputs, *(inputs.new_empty(count, len(weight)) for weight in self.weights)]
        """The embeddings, then the output of each layer: of hidden layers after the ReLU, and last the scores."""
        self.output_grads = [torch.empty_like(output) for output in self.outputs] if layers else []
        self.uses_onednn = [
            dtype == torch.float32 and has_onednn() and count * weight.numel() >= MIN_WORK_FOR_ONEDNN
            for weight in self.weights
        ]
        """Whether oneDNN computes the products with the weights of each layer."""
        self.scores, self.errors = torch.empty(count), torch.empty(count)
        self.term_grads = self.errors if dtype == torch.float32 else torch.empty(count, dtype=dtype)
        embedded_grads = self.output_grads[0] if layers else None
        input_grads = self.batch.new_gradients(embedded_grads, self.term_grads)
        self.weight_grads = [torch.empty_like(weight) for weight in self.weights]
        self.bias_grads = [torch.empty_like(bias) for bias in self.biases]
        deep = [(x.weight, grad) for x, grad in zip(layers, self.weight_grads, strict=True)]
        deep += [(x.bias, grad) for x, grad in zip(layers, self.bias_grads, strict=True)]
        self.grads: list[tuple[Tensor, Tensor]] = [
            *(
                (param, grad)
                for param, grad in zip(self.batch.params, input_grads, strict=True)
                if param is not None and grad is not None
            ),
            *deep,
        ]
        """Each parameter and its gradient."""
        self.table_grads = [grad for _, grad in self.grads if grad.is_sparse]

    def has_cleared_gradients(self) -> bool:
        """Whether a sparse gradient has lost its memory, as by `zero_grad(set_to_none=False)`."""
        return any(grad._nnz() != self.batch.rows.numel() for grad in self.table_grads)

    def _new_id_batch(self, compiled: CompiledInputs) -> JointBatch | None:
        if self.id_features is None:
            return None
        position = {name: number for number, (name, _, _) in enumerate(compiled.features)}
        numbers = [position[name] for name in self.id_features.assignments]
        lengths = [int(np.prod(compiled.features[number][1])) for number in numbers]
        firsts = [compiled.first_entries[number] for number in numbers]
        parts = [self.count * first for first in firsts]
        rows = [self.staged[0][part : part + self.count * size] for part, size in zip(parts, lengths, strict=True)]
        batch = self.id_features.new_batch([np.empty(len(each), np.uint64) for each in rows], rows)
        batch.write_table_rows(self.batch.rows.numpy(), firsts, lengths)
        return batch

    def forward(self, columns: Columns) -> Array | None:
        """Return the scores of a batch, or None if it is not supported. Then nothing has changed.

        A batch is not supported if a feature has an unexpected type or shape, if an id is not a row of its feature, or
        if a score is not finite.
        """
        values = [columns[name] for name in self.names if name in columns]
        if [value.shape for value in values] != self.shapes:
            return None
        flat = [value if value.ndim == 1 else value.reshape(-1) for value in values]
        try:
            for staged, arrays in zip(self.staged, (flat[: self.id_count], flat[self.id_count :]), strict=True):
                if arrays:
                    np.concatenate(arrays, out=staged, casting="equiv")
        except TypeError:
            return None
        if self.id_batch is not None:
            for ids, rows in zip(self.id_batch.ids, self.id_batch.rows, strict=True):
                ids[:] = rows.view(np.uint64)
            self.id_batch.find()
        if self.batch.call(self.library.cadam_inputs_forward) != DONE:
            return None
        total = self.batch.terms
        for layer in range(len(self.weights)):
            self._apply_layer(layer)
        if self.weights:
            total = total + self.outputs[-1].squeeze(1)
        scores: Array = self.scores.copy_(total).numpy().copy()
        if not np.isfinite(scores).all():
            return None
        if self.batch.call(self.library.cadam_inputs_add_numbers) != DONE:
            return None
        return scores

    def _apply_layer(self, layer: int) -> None:
        """Compute the output of a layer, of hidden layers with the ReLU."""
        x, weight, bias = self.outputs[layer], self.weights[layer], self.biases[layer]
        is_hidden = self._is_hidden(layer)
        if self.uses_onednn[layer]:
            activation = "relu" if is_hidden else "none"
            self.outputs[layer + 1] = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")
            return
        torch.addmm(bias, x, weight.t(), out=self.outputs[layer + 1])
        if is_hidden:
            self.outputs[layer + 1].relu_()

    def _is_hidden(self, layer: int) -> bool:
        return layer < len(self.weights) - 1

    def assign_rows(self) -> None:
        """Give rows to new ids of the batch, with the values that the scores were computed from."""
        if self.id_features is not None and self.id_batch is not None:
            self.id_features.assign(self.id_batch)

    def backward(self, labels: Tensor) -> None:
        """Compute the gradients of the mean log loss of the batch, and assign them to the parameters."""
        torch.sigmoid(self.scores, out=self.errors)
        self.errors.sub_(labels).div_(self.count)
        if self.term_grads is not self.errors:
            self.term_grads.copy_(self.errors)
        if self.weights:
            self.output_grads[-1].copy_(self.term_grads.unsqueeze(1))
        for layer in reversed(range(len(self.weights))):
            if self._is_hidden(layer):
                grad, output = self.output_grads[layer + 1], self.outputs[layer + 1]
                torch.ops.aten.threshold_backward.grad_input(grad, output, 0, grad_input=grad)
            self._differentiate_layer(layer)
        if self.weights:
            self.batch.record["embedded_grads"] = self.output_grads[0].data_ptr()
        self.batch.call(self.library.cadam_inputs_backward)
        for param, grad in self.grads:
            param.grad = grad

    def _differentiate_layer(self, layer: int) -> None:
        """Compute the gradients of the parameters and of the input of a layer from that of its output."""
        x, weight, grad = self.outputs[layer], self.weights[layer], self.output_grads[layer + 1]
        torch.sum(grad, 0, out=self.bias_grads[layer])
        if self.uses_onednn[layer]:
            linear = torch.ops.mkldnn._linear_pointwise
            self.weight_grads[layer].copy_(linear(grad.t(), x.t(), None, "none", [], ""))
            self.output_grads[layer] = linear(grad, weight.t(), None, "none", [], "")
            return
        torch.mm(grad.t(), x, out=self.weight_grads[layer])
        torch.mm(grad, weight, out=self.output_grads[layer])
