"""The explanation of a step: which engine updates each parameter, and why no faster one does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engines import moment_state
from ..engines.base import Refusal, RefusalKind
from ..engines.resolved_group import ResolvedGroup
from ..engines.selection import choose
from ..engines.step_plan import real_local_grad
from .optimizer import unsupported_dtype

if TYPE_CHECKING:
    from .optimizer import Optimizer

ABSENT_ROWS = 0.5
"""The share of rows without a gradient from which on a parameter is taken for an embedding table."""


@dataclass(frozen=True)
class ExplainedParam:
    """The engine of one parameter.

    Attributes:
        name: The name of the parameter, or its position.
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
        gradient: Whether its gradient is dense or sparse.
        engine: The name of the engine that updates it.
        passed_over: The refusal of each faster engine, by the engine's name.
        warning: A problem with the storage of its moments or with dense gradients of a table, or None.
        storage: The storage of its moments in words; empty for one float32 value per element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    gradient: str
    engine: str
    passed_over: Mapping[str, Refusal]
    warning: str | None = None
    storage: str = ""


class Explanation(list[ExplainedParam]):
    """A list with one `ExplainedParam` for each parameter, printed as text.

    Attributes:
        steps: Whether steps on CUDA are replayed, and if not, why. None without CUDA kernels.
    """

    def __init__(self, params: Iterable[ExplainedParam], steps: str | None = None) -> None:
        super().__init__(params)
        self.steps = steps

    def __str__(self) -> str:
        lines = []
        for param in self:
            kind = f"{list(param.shape)} {str(param.dtype).removeprefix('torch.')} {param.device}"
            storage = f", {param.storage}" if param.storage else ""
            lines.append(f"{param.name}: {kind}, gradient {param.gradient}{storage}: {param.engine}")
            lines += [
                f"    not {engine}: {refusal}"
                for engine, refusal in param.passed_over.items()
                if refusal.kind is not RefusalKind.NOT_APPLICABLE
            ]
            if param.warning is not None:
                lines.append(f"    warning: {param.warning}")
        if self.steps is not None:
            lines.append(f"Steps are {self.steps}")
        return "\n".join(lines)


def explain(optimizer: Optimizer) -> Explanation:
    """Explain how an optimizer would update its parameters with the gradients that they have now.

    A parameter without a gradient is explained by its last gradient, and as dense if it never had one.
    """
    plan = optimizer._plan
    last_layouts = {} if plan is None else plan.last_layouts()
    groups = [ResolvedGroup.resolve(optimizer.rule, group) for group in optimizer.param_groups]
    params = [
        _explain_param(optimizer, name, param, groups[number], last_layouts.get(param))
        for name, number, param in optimizer._named_params()
    ]
    if not any(param.engine in ("cuda", "cuda-rows") for param in params):
        return Explanation(params)
    if plan is None:
        return Explanation(params, "not replayed: no step was taken yet, or none that another can be like")
    replay = plan.replay
    return Explanation(params, "replayed" if replay.ready is not None else f"not replayed: {replay.reason}")


def _explain_param(
    optimizer: Optimizer, name: str, param: Tensor, group: ResolvedGroup, last_layout: str | None
) -> ExplainedParam:
    grad = param.grad
    if grad is not None:
        gradient = "sparse" if grad.is_sparse else "dense"
    elif last_layout is None:
        gradient = "none yet, taken as dense"
    else:
        gradient = f"none now, {last_layout} in the last step"
        grad = _empty_sparse_grad(param) if last_layout == "sparse" else None
    identity = name, tuple(param.shape), param.dtype, param.device, gradient
    dtype_problem = unsupported_dtype(param)
    if dtype_problem is not None:
        return ExplainedParam(*identity, "none", {"any": Refusal.unsupported(dtype_problem)})
    slot = optimizer._preview_slot(param, group.source)
    choice = choose(group, slot, None if grad is None else real_local_grad(grad, param))
    warning = moment_state.dominant_column_warning(slot) or _dense_table_warning(param, group)
    storage = moment_state.describe_storage(slot, group.options)
    return ExplainedParam(*identity, choice.engine.name, choice.passed_over, warning, storage)


def _dense_table_warning(param: Tensor, group: ResolvedGroup) -> str | None:
    """Return a warning if the parameter looks like an embedding table with dense gradients and has confidence."""
    grad = param.grad
    if grad is None or grad.layout != torch.strided or grad.dim() != 2 or hasattr(grad, "to_local") or not grad.numel():
        return None
    absent = 1 - float((grad != 0).any(1).float().mean())
    if not group.update.confidence or absent < ABSENT_ROWS:
        return None
    share = ""
    if {"betas", "eps"} <= group.numbers.keys():
        share = f", down to {1 - float(group.numbers['betas'][0]):.2g} of its distance for the rarest rows"
    return (
        f"{absent:.0%} of its rows have no gradient, as in an embedding table with dense gradients: their momentum "
        f"decays in every step, and with confidence a rare row moves much less than without{share}. sparse=True keeps "
        "the moments until the row appears again, see docs/swap.md"
    )


def _empty_sparse_grad(param: Tensor) -> Tensor:
    ids = torch.empty((1, 0), dtype=torch.int64)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype)
    return torch.sparse_coo_tensor(ids, values, param.shape, device=param.device, check_invariants=False)
