"""The optimizers of `cadam` for Keras 3, on its JAX, torch and TensorFlow backends.

    model.compile(optimizer=cadam.keras.CAdam(learning_rate=1e-3), loss="binary_crossentropy")

Arguments have the names that Keras gives them; the defaults are those of the classes of `cadam`, so results are the
same in every framework. Weight decay is decoupled, as in every Keras optimizer. This package imports torch only if
Keras runs on its torch backend.
"""

try:
    import keras  # noqa: F401
except ImportError as error:
    raise ImportError(f"cadam.keras needs Keras 3 ({error}): pip install 'cadam[keras]'") from error

from . import family
from .family import *  # noqa: F403
from .optimizer import Optimizer

__all__ = ["Optimizer"]
__all__ += family.__all__
