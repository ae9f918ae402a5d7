"""The family as optimizers of Keras 3, on its JAX, torch and TensorFlow backends.

    model.compile(optimizer=cadam.keras.CAdam(learning_rate=1e-3), loss="binary_crossentropy")

Arguments have the names that Keras gives them; the defaults are those of the classes of `cadam`, so the numbers are
the same in every framework. Weight decay is decoupled, as it is for every optimizer of Keras. Importing this imports
torch only where Keras runs on it.
"""

from typing import Any

try:
    import keras
except ImportError as error:
    raise ImportError(f"cadam.keras needs Keras 3 ({error}): pip install 'cadam[keras]'") from error

from ..rules.adabelief import ADABELIEF
from ..rules.adam import ADAM
from ..rules.lion import LION
from ..rules.radam import RADAM
from ..rules.sgdm import SGDM as RULE_SGDM
from ..rules.yogi import YOGI
from .optimizer import Optimizer

_serializable = keras.saving.register_keras_serializable(package="cadam")


@_serializable
class Adam(Optimizer):
    """Adam; `amsgrad` takes the maximum of the corrected second moment."""

    rule = ADAM

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        amsgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        own = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon, "amsgrad": amsgrad}
        super().__init__(learning_rate, own, kwargs)


@_serializable
class AdamW(Adam):
    """Adam with a weight decay of 0.01 by default."""

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        weight_decay: float = 1e-2,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        amsgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay=weight_decay, **kwargs)


@_serializable
class AmsGrad(Optimizer):
    """Adam with ``amsgrad=True``."""

    rule = ADAM
    fixed = {"amsgrad": True}

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}, kwargs)


@_serializable
class SGDM(Optimizer):
    """SGD with momentum: the moving average of the paper, or with ``dampening=0.0`` the sum of torch.optim.SGD."""

    rule = RULE_SGDM

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        dampening: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}, kwargs)


@_serializable
class Lion(Optimizer):
    """Lion."""

    rule = LION

    def __init__(self, learning_rate: Any = 1e-4, beta_1: float = 0.9, beta_2: float = 0.99, **kwargs: Any) -> None:
        super().__init__(learning_rate, {"beta_1": beta_1, "beta_2": beta_2}, kwargs)


@_serializable
class RAdam(Optimizer):
    """RAdam as torch.optim.RAdam computes it."""

    rule = RADAM

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}, kwargs)


@_serializable
class Yogi(Optimizer):
    """Yogi; the second moment starts at `initial_accumulator_value`."""

    rule = YOGI

    def __init__(
        self,
        learning_rate: Any = 1e-2,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-3,
        initial_accumulator_value: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        own = {
            "beta_1": beta_1,
            "beta_2": beta_2,
            "epsilon": epsilon,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(learning_rate, own, kwargs)


@_serializable
class AdaBelief(Optimizer):
    """AdaBelief."""

    rule = ADABELIEF

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-16,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}, kwargs)


@_serializable
class CAdam(Adam):
    """Adam with confidence: an element moves only where momentum and gradient agree in sign."""

    confidence = True


@_serializable
class CAdamW(AdamW):
    """AdamW with confidence. The decay acts on every element, waiting or not."""

    confidence = True


@_serializable
class CAmsGrad(AmsGrad):
    """CAdam with ``amsgrad=True``."""

    confidence = True


@_serializable
class CSGDM(SGDM):
    """SGDM with confidence."""

    confidence = True


@_serializable
class CLion(Lion):
    """Lion with confidence, tested with the interpolant that Lion takes the sign of."""

    confidence = True


@_serializable
class CRAdam(RAdam):
    """RAdam with confidence."""

    confidence = True


@_serializable
class CYogi(Yogi):
    """Yogi with confidence."""

    confidence = True


@_serializable
class CAdaBelief(AdaBelief):
    """AdaBelief with confidence."""

    confidence = True


__all__ = [
    "CSGDM",
    "SGDM",
    "AdaBelief",
    "Adam",
    "AdamW",
    "AmsGrad",
    "CAdaBelief",
    "CAdam",
    "CAdamW",
    "CAmsGrad",
    "CLion",
    "CRAdam",
    "CYogi",
    "Lion",
    "Optimizer",
    "RAdam",
    "Yogi",
]
