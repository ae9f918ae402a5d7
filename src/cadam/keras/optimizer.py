"""A rule of `cadam.rules` as an optimizer of Keras 3, on any backend of Keras.

`cadam.rules.update.Update` runs on tensors of the backend. Keras itself does decoupled weight decay, clipping, moving
averages of the weights, gradient accumulation, loss scaling and saving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from ..rules import Rule
from ..rules.defaults import check_ranges, defaults
from ..rules.update import Update

KERAS_NAMES = {"eps": "epsilon", "initial_accumulator": "initial_accumulator_value"}
"""Names of options in Keras, where they differ. The two betas are separate arguments there."""


SPARSE_OPTIONS = {"confidence_after", "sparse_updates"}
"""Options of the torch classes that need to know which rows of a table a step updates."""


class KerasFunctions:
    """The functions that a rule may call, on tensors of Keras's backend."""

    sqrt = staticmethod(ops.sqrt)
    square = staticmethod(ops.square)
    sign = staticmethod(ops.sign)
    maximum = staticmethod(ops.maximum)

    @staticmethod
    def positive(x: Any) -> Any:
        """Return 1 where x > 0, else 0."""
        return ops.cast(x > 0, x.dtype)

    @staticmethod
    def mask(alignment: Any, step: Any) -> Any:
        """Return the step, or zero where the alignment is not positive. A NaN is not masked, so that it shows."""
        return ops.where(alignment <= 0, ops.zeros_like(step), step)


class Optimizer(keras.optimizers.Optimizer):
    """The base class of the Keras optimizers.

    Args:
        learning_rate: A number, or a Keras learning rate schedule.
        own: Arguments of the subclass other than the learning rate, as `get_config` returns them.
        keras_arguments: Arguments of every Keras optimizer: ``weight_decay`` (decoupled), ``clipnorm``, ``clipvalue``,
            ``global_clipnorm``, ``use_ema``, ``ema_momentum``, ``ema_overwrite_frequency``, ``loss_scale_factor``,
            ``gradient_accumulation_steps``, ``name``.
    """

    rule: ClassVar[Rule]
    """The update rule."""
    confidence: ClassVar[bool] = False
    """Whether an element moves only where momentum and gradient agree in sign."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Options whose values the class fixes, so that they are not arguments of its constructor."""

    def __init__(self, learning_rate: Any, own: Mapping[str, Any], keras_arguments: Mapping[str, Any]) -> None:
        for name in SPARSE_OPTIONS & keras_arguments.keys():
            raise ValueError(
                f"{name} is an option of sparse updates, and the Keras optimizers make all gradients dense, so that "
                "every backend has the same result: a step does not know which rows it updates. Use "
                "cadam.jax.sparse_update or the torch classes for such tables"
            )
        super().__init__(learning_rate=learning_rate, **keras_arguments)
        self._own = dict(own)
        rule_names = {keras_name: name for name, keras_name in KERAS_NAMES.items()}
        options = {rule_names.get(name, name): value for name, value in own.items() if not name.startswith("beta_")}
        if "beta_1" in own:
            options["betas"] = (own["beta_1"], own["beta_2"])
        self._options = {**defaults(self.rule), **options, **self.fixed, "weight_decay": 0.0}
        check_ranges(self._options, float)
        self.rule.check(self._options)
        self._update = Update.of(self.rule, self.confidence, self._options)

    def build(self, variables: Sequence[Any]) -> None:
        """Create the buffers of the rule; Keras calls it before the first step."""
        if self.built:
            return
        super().build(variables)
        self._buffers = [
            {
                name: self._new_buffer(variable, name, initial)
                for name, initial in self.rule.state(self._options).items()
            }
            for variable in variables
        ]
        # For each variable: the share of aligned elements, and the step in which it was computed. A variable without a
        # gradient takes no part in a step.
        self._aligned = self.add_variable(shape=(2, len(variables)), dtype="float32", name="aligned")

    def _new_buffer(self, variable: Any, name: str, initial: float) -> Any:
        return self.add_variable(
            shape=variable.shape,
            initializer=keras.initializers.Constant(initial),
            dtype=_compute_dtype(variable),
            layout=getattr(variable, "_layout", None),
            name=f"{variable.path.replace('/', '_')}_{name}",
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable and its buffers; Keras calls it for each variable in each step."""
        dtype, index = _compute_dtype(variable), self._get_variable_index(variable)
        buffers = self._buffers[index]
        result = self._update(
            ops.cast(variable, dtype),
            ops.cast(_dense(gradient), dtype),
            {name: ops.convert_to_tensor(buffer) for name, buffer in buffers.items()},
            {**self._coefficients(dtype), "lr": ops.cast(learning_rate, dtype)},
            KerasFunctions,
        )
        self.assign(variable, ops.cast(result.param, variable.dtype))
        for name, buffer in buffers.items():
            self.assign(buffer, result.state[name])
        share = ops.sum(ops.cast(result.alignment > 0, "float32")) / max(math.prod(variable.shape), 1)
        column = ops.stack([share, ops.cast(self.iterations + 1, "float32")])
        is_this = ops.arange(len(self._buffers)) == index
        self.assign(self._aligned, ops.where(is_this, column[:, None], ops.convert_to_tensor(self._aligned)))

    def _coefficients(self, dtype: str) -> dict[str, Any]:
        """Return the scalars of this step, computed in float64 or, on JAX, by the functions of `cadam.jax_arrays`."""
        step = ops.convert_to_tensor(self.iterations) + 1
        if keras.backend.backend() == "jax":
            from ..jax_arrays import step_coefficients

            c = step_coefficients(self._update, step, self._options)
        else:
            c = self._update.coefficients(ops.cast(step, "float64"), self._options, KerasFunctions)
        return {name: value if isinstance(value, (int, float)) else ops.cast(value, dtype) for name, value in c.items()}

    @property
    def alignment(self) -> float:
        """The share of elements whose momentum and gradient agreed in sign in the last step; 0 before the first."""
        if not self.built:
            return 0.0
        shares, steps = ops.convert_to_numpy(self._aligned)
        sizes = np.array([math.prod(variable.shape) for variable in self._trainable_variables]) * (steps == steps.max())
        return float(shares @ sizes / max(sizes.sum(), 1))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, from which Keras can create the optimizer again."""
        return {**super().get_config(), **self._own}


def _dense(gradient: Any) -> Any:
    """Return the gradient as a dense array. The gradient of an embedding may consist of slices."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(gradient)
    return ops.convert_to_tensor(gradient, sparse=False)


def _compute_dtype(variable: Any) -> str:
    """Return the dtype of moments and arithmetic: the variable's, but at least float32."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return "float64" if dtype == "float64" else "float32"
