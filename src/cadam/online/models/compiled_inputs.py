"""The input layer in compiled code, as one function of autograd. It computes the same as `Inputs.forward_with_torch`.

See native/src/batch_inputs.c. The gradients of the tables are sparse tensors with one row for each id of the batch, so
that optimizers, hooks and DistributedDataParallel work as with `torch.nn.Embedding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...engines.cpu.dense import DTYPES
from ...native.loader import UnavailableError, package_library
from ...native.structs import INPUT_BATCH, INPUT_LAYER, Records
from ...native.tensor_snapshot import PLAIN

if TYPE_CHECKING:
    from .inputs import Inputs

PARAMETERS = ("table", "linear", "bias", "slopes", "vectors")
"""The parameters of `Inputs`."""
TABLE_GRADIENTS = ("table_grads", "linear_grads")
GRADIENTS = (*TABLE_GRADIENTS, "bias_grad", "slope_grads", "vector_grads")
"""The gradients of the parameters, by their names in the struct of a batch."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
DONE, OUT_OF_MEMORY = -1, -2
"""The results of the C functions. Another result of the forward pass means that an id is not a row of its feature."""


class CompiledInputs:
    """Calls the compiled code of an input layer.

    Args:
        inputs: the layer.
        constants: the constants of the normalization of numbers, by their names in the C struct.

    Raises:
        UnavailableError: if there is no compiled library.
    """

    def __init__(self, inputs: Inputs, constants: Mapping[str, int]) -> None:
        self.library = package_library().c
        id_features = [*inputs.single_ids, *inputs.id_lists]
        self.features: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            (name, (inputs.lengths[name],) if inputs.lengths[name] else (), dtype)
            for names, dtype in ((id_features, torch.int64), (inputs.numbers, torch.float64))
            for name in names
        ]
        lengths = [inputs.lengths[name] or 1 for name, _, _ in self.features]
        arrays = {
            "lengths": lengths,
            "is_list": [name in inputs.id_lists for name in id_features],
            "zero_is_missing": [inputs.zero_is_missing.get(name, False) for name in id_features],
            "starts": [inputs.row_ranges[name][0] for name in id_features],
            "sizes": [inputs.row_ranges[name][1] for name in id_features],
            "bin_starts": inputs.bin_starts.tolist(),
        }
        self._arrays: dict[str, np.ndarray[Any, Any]] = {n: np.array(values, np.int64) for n, values in arrays.items()}
        self._arrays["normals"] = np.empty(2 * constants["sample_size"] + 1)
        self.library.cadam_normal_numbers(constants["sample_size"], self._arrays["normals"].ctypes.data)
        self.has_lists = bool(inputs.id_lists)
        self.first_entries = [sum(lengths[:number]) for number in range(len(id_features))]
        """The first entry of each feature with ids."""
        self.entries = sum(lengths[: len(id_features)])
        self.numbers = len(inputs.bin_starts)
        self.layer = np.zeros((), INPUT_LAYER)
        for name, values in self._arrays.items():
            self.layer[name] = values.ctypes.data
        self.layer["width"], self.layer["has_pairs"] = inputs.width, inputs.has_pairs
        self.layer["id_features"] = self.layer["fields"] = len(id_features)
        self.layer["entries"], self.layer["numbers"] = self.entries, self.numbers
        for name, value in constants.items():
            self.layer[name] = value

    def find_unsupported(self, inputs: Inputs) -> str | None:
        """Return why the compiled code does not support the layer in its present state, or None if it does."""
        params = [param for name in PARAMETERS if (param := _weight(getattr(inputs, name))) is not None]
        for child in ("table", "linear", "normalizer"):
            module = getattr(inputs, child)
            if module is None:
                continue
            if "forward" in vars(module) or any(vars(module)[kind] for kind in HOOKS):
                return f"{child} has hooks or another forward"
            if isinstance(module, nn.Embedding):
                if type(module) is not nn.Embedding or not module.sparse:
                    return f"{child} is not an nn.Embedding with sparse gradients"
                if module.padding_idx is not None or module.max_norm or module.scale_grad_by_freq:
                    return f"{child} has padding_idx, max_norm or scale_grad_by_freq"
        first = params[0]
        for param in params:
            if type(param) not in PLAIN or not param.is_cpu or not param.is_contiguous():
                return "a parameter is not a contiguous tensor on the CPU"
            if param.dtype != first.dtype or param.dtype not in (torch.float32, torch.float64):
                return f"a parameter is {param.dtype}; all of them must be float32, or float64"
            if param.requires_grad != first.requires_grad:
                return "some of the parameters are frozen"
        for name, dtype in (("count", torch.int64), ("sample", torch.float64)):
            buffer = getattr(inputs.normalizer, name)
            if type(buffer) is not Tensor or not buffer.is_cpu or not buffer.is_contiguous() or buffer.dtype != dtype:
                return f"the {name} of normalizer is not a contiguous tensor of {dtype} on the CPU"
        return None

    def __call__(self, inputs: Inputs, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Compute what `Inputs.forward` returns, or return None if the compiled code does not support the batch."""
        if torch._C._are_functorch_transforms_active() or self.find_unsupported(inputs) is not None:
            return None
        columns = self._columns(features)
        if columns is None:
            return None
        batch = InputBatch(self, inputs, columns, inputs.normalizer.training)
        if batch.call(self.library.cadam_inputs_forward) != DONE:
            return None
        if torch.is_grad_enabled() and inputs.bias.requires_grad:
            outputs: tuple[Tensor, Tensor] = _InputFunction.apply(batch, *batch.params)  # type: ignore[no-untyped-call]
            return outputs
        return batch.embedded, batch.terms

    def _columns(self, features: Mapping[str, Tensor]) -> list[Tensor] | None:
        """Return the features in the order of the kernel, or None if one has another type or shape than expected."""
        columns: list[Tensor] = []
        count = features[self.features[0][0]].shape[0]
        for name, shape, dtype in self.features:
            column = features[name]
            if column.dtype == torch.float32 and dtype == torch.float64:
                column = column.double()
            if column.dtype != dtype or column.shape != (count, *shape) or type(column) is not Tensor:
                return None
            if not column.is_cpu or not column.is_contiguous():
                return None
            columns.append(column)
        return columns


class InputBatch:
    """The tensors of one batch, and the C structs that point to them.

    Args:
        compiled: the compiled code of the layer.
        inputs: the layer.
        columns: the features, in the order of `CompiledInputs.features`.
        is_training: whether the forward pass adds the numbers of the batch to the samples of the normalizer.
    """

    def __init__(self, compiled: CompiledInputs, inputs: Inputs, columns: Sequence[Tensor], is_training: bool) -> None:
        self.compiled, self.columns, self.count = compiled, columns, len(columns[0])
        self.params = [_weight(getattr(inputs, name)) for name in PARAMETERS]
        self.dtype, self.width = inputs.bias.dtype, inputs.width
        self.layer: Records = compiled.layer.copy()
        self.layer["dtype"] = DTYPES[self.dtype]
        for name, param in zip(PARAMETERS, self.params, strict=True):
            self.layer[name] = 0 if param is None else param.data_ptr()
        self.layer["count"] = inputs.normalizer.count.data_ptr()
        self.layer["sample"] = inputs.normalizer.sample.data_ptr()
        self.record: Records = np.zeros((), INPUT_BATCH)
        self.record["n"], self.record["is_training"] = self.count, is_training
        self.addresses = np.array([column.data_ptr() for column in columns], np.int64)
        self.record["columns"] = self.addresses.ctypes.data
        entries, numbers = compiled.entries, compiled.numbers
        self.rows = self._new("rows", self.count, entries + numbers, dtype=torch.int64)
        self.weights = self._new("weights", self.count, entries, dtype=torch.float32) if compiled.has_lists else None
        self.scaled = self._new("scaled", self.count, numbers)
        self.embedded = self._new("embedded", self.count, inputs.fields if self.width else 0, self.width)
        self.sums = self._new("sums", self.count, 2, self.width)
        self.terms = self._new("terms", self.count)

    def _new(self, field: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor, to which a field of the record points."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device="cpu")
        self.record[field] = tensor.data_ptr()
        return tensor

    def call(self, function: Any) -> int:
        """Call a function of the library, and return its result."""
        result = int(function(self.layer.ctypes.data, self.record.ctypes.data))
        if result == OUT_OF_MEMORY:
            raise MemoryError(f"no memory for a batch of {self.count:,} events")
        return result

    def compute_gradients(self, embedded_grads: Tensor | None, term_grads: Tensor | None) -> list[Tensor | None]:
        """Compute the gradients of the parameters from those of the outputs; None means zero."""
        output_grads = [None if grad is None else grad.contiguous() for grad in (embedded_grads, term_grads)]
        grads = self.new_gradients(*output_grads)
        self.call(self.compiled.library.cadam_inputs_backward)
        return grads

    def new_gradients(self, embedded_grads: Tensor | None, term_grads: Tensor | None) -> list[Tensor | None]:
        """Return tensors for the gradients of the parameters. The backward pass computes them from those given here.

        All gradients must be contiguous, and those of the outputs must exist until the backward pass.
        """
        for name, grad in (("embedded_grads", embedded_grads), ("term_grads", term_grads)):
            self.record[name] = 0 if grad is None else grad.data_ptr()
        ids = self.rows.view(1, -1)
        grads: list[Tensor | None] = []
        for name, param in zip(GRADIENTS, self.params, strict=True):
            if param is None:
                grads.append(None)
            elif name in TABLE_GRADIENTS:
                values = self._new(name, ids.shape[1], param.shape[1])
                grads.append(torch.sparse_coo_tensor(ids, values, param.shape, check_invariants=False))
            else:
                grads.append(self._new(name, *param.shape))
        return grads


class _InputFunction(torch.autograd.Function):
    """Connects a batch to autograd: from the parameters to the embeddings and terms that were computed from them."""

    @staticmethod
    def forward(ctx: Any, batch: InputBatch, *params: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.batch = batch
        ctx.save_for_backward(batch.embedded)
        ctx.set_materialize_grads(False)
        outputs = batch.embedded, batch.terms
        del batch.embedded, batch.terms  # these tensors refer to `ctx` from now on
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, embedded_grads: Tensor | None, term_grads: Tensor | None) -> tuple[Any, ...]:
        (_,) = ctx.saved_tensors  # raises an error if the embeddings have been changed in place
        return None, *ctx.batch.compute_gradients(embedded_grads, term_grads)


_COMPILED: WeakKeyDictionary[Inputs, CompiledInputs | str] = WeakKeyDictionary()
"""The compiled code of each layer. It is not an attribute, because it can be neither copied nor pickled."""


def compiled_inputs(inputs: Inputs, constants: Mapping[str, int]) -> CompiledInputs | str:
    """Return the compiled code of an input layer, or the reason why there is none."""
    compiled = _COMPILED.get(inputs)
    if compiled is None:
        try:
            compiled = CompiledInputs(inputs, constants)
        except UnavailableError as error:
            compiled = str(error)
        _COMPILED[inputs] = compiled
    return compiled


def _weight(parameter: Tensor | nn.Embedding | None) -> Tensor | None:
    return parameter.weight if isinstance(parameter, nn.Embedding) else parameter
