"""PyTorch's own tests of its optimizers, schedulers and averaging, with our classes in the place of torch's.

python -m tests.torch_tests FOLDER [options of unittest, such as -k NAME]

FOLDER is `test` of a source tree of PyTorch, of 2.6 for example; a wheel does not have it. Nothing of it is changed:
here `torch.optim` gets our classes under torch's names before the tests are imported.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import common_optimizers

import cadam


class Adam(cadam.CAdam):
    pass


class AdamW(cadam.CAdamW):
    pass


class RAdam(cadam.CRAdam):
    pass


class SparseAdam(cadam.CAdam):
    pass


class SGD(cadam.CSGDM):
    """SGD with the defaults of torch."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **common)


STAND_INS: dict[str, type[cadam.Optimizer]] = {cls.__name__: cls for cls in (Adam, AdamW, RAdam, SparseAdam, SGD)}


def without_complex(error_inputs: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Torch's SparseAdam rejects complex parameters; CAdam accepts them, so it raises nothing."""

    def inputs(**where: Any) -> list[Any]:
        return [error for error in error_inputs(**where) if "does not support complex" not in error.error_regex]

    return inputs


def main(folder: str, *arguments: str) -> None:
    common_optimizers.optim_db[:] = [info for info in common_optimizers.optim_db if info.name in STAND_INS]
    for info in common_optimizers.optim_db:
        info.optim_cls = STAND_INS[info.name]  # type: ignore[assignment]
        info.optim_error_inputs_func = without_complex(info.optim_error_inputs_func)
    for name, cls in STAND_INS.items():
        setattr(torch.optim, name, cls)
    sys.path.insert(0, folder)
    import test_optim  # type: ignore[import-not-found]

    for name in [name for name in dir(test_optim.TestLRScheduler) if "verbose" in name]:
        delattr(test_optim.TestLRScheduler, name)  # for an option that later releases of torch removed
    unittest.main(module=test_optim, argv=[sys.argv[0], *arguments])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
