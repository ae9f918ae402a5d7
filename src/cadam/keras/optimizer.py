"""A rule of `cadam.rules` as an optimizer of Keras 3, on whichever backend Keras runs.

`cadam.rules.update.Update` runs on tensors of the backend. Keras does here what it does for every optimizer:
decoupled weight decay, clipping, moving averages, gradient accumulation, loss scaling and saving.
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

# What Keras calls the options of rules; the two betas are a pair there.
OPTIONS = {"epsilon": "eps", "initial_accumulator_value": "initial_accumulator"}


class Tensors:
    """The functions that a rule may call, on tensors."""

    sqrt = staticmethod(ops.sqrt)
    square = staticmethod(ops.square)
    sign = staticmethod(ops.sign)
    maximum = staticmethod(ops.maximum)

    @staticmethod
    def positive(x: Any) -> Any:
        return ops.cast(x > 0, x.dtype)

    @staticmethod
    def mask(alignment: Any, step: Any) -> Any:
        """The step, but zero where the alignment is not positive. A NaN is never masked, so that it stays visible."""
        return ops.where(alignment <= 0, ops.zeros_like(step), step)


class Optimizer(keras.optimizers.Optimizer):
    """The base of the family.

    Args:
        learning_rate: a float, or a schedule of Keras's.
        own: the arguments of the subclass beside it, as `get_config` gives them.
        of_keras: the arguments of every Keras optimizer: ``weight_decay`` (decoupled), ``clipnorm``, ``clipvalue``,
            ``global_clipnorm``, ``use_ema``, ``ema_momentum``, ``ema_overwrite_frequency``, ``loss_scale_factor``,
            ``gradient_accumulation_steps``, ``name``.
    """

    rule: ClassVar[Rule]
    confidence: ClassVar[bool] = False
    fixed: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, learning_rate: Any, own: Mapping[str, Any], of_keras: Mapping[str, Any]) -> None:
        super().__init__(learning_rate=learning_rate, **of_keras)
        self._own = dict(own)
        given = {OPTIONS.get(name, name): value for name, value in own.items() if not name.startswith("beta_")}
        if "beta_1" in own:
            given["betas"] = (own["beta_1"], own["beta_2"])
        self._options = {**defaults(self.rule), **given, **self.fixed, "weight_decay": 0.0}
        check_ranges(self._options, float)
        self.rule.check(self._options)
        self._update = Update.of(self.rule, self.confidence, self._options)

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._buffers = [
            {name: self._new_buffer(variable, name, start) for name, start in self.rule.state(self._options).items()}
            for variable in variables
        ]
        # By variable: the share that agreed, and in which step that was. One without a gradient has no part in a step.
        self._aligned = self.add_variable(shape=(2, len(variables)), dtype="float32", name="aligned")

    def _new_buffer(self, variable: Any, name: str, start: float) -> Any:
        return self.add_variable(
            shape=variable.shape,
            initializer=keras.initializers.Constant(start),
            dtype=_work_dtype(variable),
            layout=getattr(variable, "_layout", None),
            name=f"{variable.path.replace('/', '_')}_{name}",
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        work, index = _work_dtype(variable), self._get_variable_index(variable)
        buffers = self._buffers[index]
        moved = self._update(
            ops.cast(variable, work),
            ops.cast(_dense(gradient), work),
            {name: ops.convert_to_tensor(buffer) for name, buffer in buffers.items()},
            {**self._coefficients(work), "lr": ops.cast(learning_rate, work)},
            Tensors,
        )
        self.assign(variable, ops.cast(moved.param, variable.dtype))
        for name, buffer in buffers.items():
            self.assign(buffer, moved.state[name])
        share = ops.sum(ops.cast(moved.alignment > 0, "float32")) / max(math.prod(variable.shape), 1)
        seen = ops.stack([share, ops.cast(self.iterations + 1, "float32")])
        is_this = ops.arange(len(self._buffers)) == index
        self.assign(self._aligned, ops.where(is_this, seen[:, None], ops.convert_to_tensor(self._aligned)))

    def _coefficients(self, work: str) -> dict[str, Any]:
        """The scalars of this step, computed in float64 and where JAX has none as precisely."""
        step = ops.convert_to_tensor(self.iterations) + 1
        if keras.backend.backend() == "jax":
            from ..jax_arrays import step_coefficients

            c = step_coefficients(self._update, step, self._options)
        else:
            c = self._update.coefficients(ops.cast(step, "float64"), self._options, Tensors)
        return {name: value if isinstance(value, (int, float)) else ops.cast(value, work) for name, value in c.items()}

    @property
    def alignment(self) -> float:
        """The share of elements whose momentum and gradient agreed in sign in the last step; 0 before the first."""
        if not self.built:
            return 0.0
        shares, steps = ops.convert_to_numpy(self._aligned)
        sizes = np.array([math.prod(variable.shape) for variable in self._trainable_variables]) * (steps == steps.max())
        return float(shares @ sizes / max(sizes.sum(), 1))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._own}


def _dense(gradient: Any) -> Any:
    """The gradient as an array; those of looked-up tables may come as slices of rows."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(gradient)
    return ops.convert_to_tensor(gradient, sparse=False)


def _work_dtype(variable: Any) -> str:
    """That of the moments and the arithmetic: the variable's, and float32 for half precision."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return "float64" if dtype == "float64" else "float32"
