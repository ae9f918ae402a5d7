"""All optimizer classes, and helpers for the tests of the mathematics.

The classes of the package are found by their public names. A rule without a class gets two classes here, so that a new
file in cadam/rules is tested like the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import cadam
from cadam.codegen.kernel_spec import KernelSpec
from cadam.rules import RULES
from cadam.rules.defaults import defaults
from tests.engines.engines_under_test import ROWS

FAMILY: dict[str, type[cadam.Optimizer]] = {
    name: cls
    for name in cadam.__all__
    if inspect.isclass(cls := getattr(cadam, name)) and issubclass(cls, cadam.Optimizer) and cls is not cadam.Optimizer
}
PUBLIC = {cls.rule.name for cls in FAMILY.values()}
for rule in (rule for rule in RULES.values() if rule.name not in PUBLIC):
    for name, confidence in ((rule.name, False), (f"C{rule.name}", True)):
        FAMILY[name] = globals()[name] = type(name, (cadam.Optimizer,), {"rule": rule, "confidence": confidence})

CONFIDENT = {name: cls for name, cls in FAMILY.items() if cls.confidence}
# Each class with confidence, and the same class without it.
PAIRS = {name: (cls, FAMILY[name[1:]]) for name, cls in CONFIDENT.items() if name[1:] in FAMILY}
# The class of each rule without confidence, and the one with it, in which no other option is fixed.
OF_RULE = {(cls.rule.name, cls.confidence): cls for cls in FAMILY.values() if not cls.fixed}
# Every specification that kernels are compiled for: its name, the name of its rule, and options that select it.
KERNEL_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    KernelSpec.of(rule, {**defaults(rule), **variant}).name: (rule.name, dict(variant))
    for rule in RULES.values()
    for variant in ({}, *rule.variants)
}


def parameter(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.nn.Parameter(torch.as_tensor(values, dtype=dtype).clone())


def sparse(ids: Sequence[tuple[int, ...]], values: Any, like: Tensor) -> Tensor:
    """Return an uncoalesced gradient of `like`: one row of `values` for each of `ids`, including duplicates."""
    rows = torch.as_tensor(values, dtype=like.dtype)
    sparse_dim = like.dim() - (rows.dim() - 1)
    indices = torch.tensor(ids, dtype=torch.int64).reshape(len(ids), sparse_dim).t()
    return torch.sparse_coo_tensor(indices, rows, like.shape, check_invariants=True)


def gradient(layout: str, values: Any, like: Tensor) -> Tensor:
    """Return a gradient of all elements. In the layout of rows, each row is split into two parts that add up to it."""
    dense = torch.as_tensor(values, dtype=like.dtype)
    if layout != ROWS:
        return dense
    ids = [(row,) for row in range(len(dense))] * 2
    return sparse(ids, torch.cat([dense / 2, dense / 2]), like)


def buffers(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Return the state of one parameter without its step count."""
    return {name: value for name, value in optimizer.state[param].items() if name != "step"}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Assert equality bit for bit, including NaN and the sign of zero."""
    return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)


def _bits(x: Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
