"""The control arms: Adam with other masks than CAdam's, and with a longer momentum, for dense and sparse gradients.

They show what the agreement in sign contributes. A random mask of the same share tests whether it is enough to skip
updates, a rescaled mask ("cautious") whether smaller steps are what helps, and a larger beta1 whether it is averaging
over more gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cadam.online.models.model_file import OptimizerSpec
from cadam.optim import alignment
from cadam.optim.alignment import Alignment, Ratio

Mask = Literal["none", "sign", "cautious", "random"]
MIN_SHARE = 1e-3
"""Lower bound on the share of agreeing elements by which the cautious mask divides, as in timm."""


@dataclass(frozen=True)
class ControlArm:
    """An optimizer that is compared with Adam and CAdam.

    Attributes:
        mask: The elements that are updated, see `mask_factor`.
        beta1: Decay rate of the first moment.
    """

    mask: Mask
    beta1: float = 0.9


CAUTIOUS, RANDOM, LONG_MOMENTUM = "cautious Adam", "Adam with a random mask", "Adam with beta1 0.95"
CONTROL_ARMS: Mapping[str, ControlArm] = {
    CAUTIOUS: ControlArm("cautious"),
    RANDOM: ControlArm("random"),
    LONG_MOMENTUM: ControlArm("none", beta1=0.95),
}
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Touched:
    """The elements of a table that a sparse gradient contains.

    Attributes:
        rows: Whether the gradient contains a row, of shape (rows, 1).
        count: The number of elements in these rows.
    """

    rows: Tensor
    count: Tensor


def mask_factor(
    mask: Mask, moment: Tensor, gradient: Tensor, generator: torch.Generator | None, touched: Touched | None = None
) -> Tensor:
    r"""Return the factor of each element of an update.

    With the first moment :math:`m`, the gradient :math:`g`, and the share :math:`a` of elements with :math:`m g > 0`,
    the factor is

    - `none`: 1, which is Adam;
    - `sign`: 1 where :math:`m g > 0` and 0 elsewhere, which is CAdam;
    - `cautious`: :math:`1 / \max(a, 0.001)` where :math:`m g > 0` (Liang et al. 2024,
      https://arxiv.org/abs/2411.16085, as in timm);
    - `random`: 1 at elements that are chosen at random with probability :math:`a`.

    Args:
        mask: The kind of mask.
        moment: The first moment.
        gradient: The gradient.
        generator: Source of the random mask.
        touched: The elements that the gradient contains; None for all. The share is computed over them, and the
            factor of the others is 0.
    """
    if mask == "none":
        return torch.ones_like(gradient) if touched is None else touched.rows.to(gradient.dtype).expand_as(gradient)
    agrees = (moment * gradient > 0).to(moment.dtype)
    if mask == "sign":
        return agrees
    share = agrees.mean() if touched is None else agrees.sum() / touched.count
    if mask == "cautious":
        return agrees / share.clamp(min=MIN_SHARE)
    drawn = torch.rand(agrees.shape, device=agrees.device, generator=generator) < share
    return (drawn if touched is None else drawn & touched.rows).to(agrees.dtype)


class MaskedAdam(torch.optim.Optimizer):
    """Adam whose update is multiplied by a mask, as an independent implementation in tensor operations.

    For a sparse gradient, only the rows in the gradient are read and updated, as with the lazy updates of `cadam.Adam`.
    The share of agreeing elements is then computed over these rows. Every parameter must have a gradient at each step.

    Args:
        params: Parameters or parameter groups, all on one device.
        lr: The learning rate.
        betas: Decay rates of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: L2 penalty, which is added to the gradient; of a sparse gradient to its rows.
        mask: The kind of mask.
        generator: Source of the random mask, on the device of the parameters.
        capturable: Whether a CUDA graph can capture a step with sparse gradients. The step then computes all rows of a
            table, because the number of distinct rows in a gradient is not known to the host.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        mask: Mask = "none",
        generator: torch.Generator | None = None,
        *,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.mask: Mask = mask
        self.generator, self.capturable = generator, capturable
        device = self.param_groups[0]["params"][0].device
        self.steps = torch.zeros((), dtype=torch.float64, device=device)
        self._counts = [alignment.new_counts(device) for _ in self.param_groups]
        for group in self.param_groups:
            for parameter in group["params"]:
                for name in MOMENTS:
                    self.state[parameter][name] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        self.steps += 1
        for group, counts in zip(self.param_groups, self._counts, strict=True):
            parameters = group["params"]
            counts[2].add_(sum(parameter.numel() for parameter in parameters))
            for is_sparse, consecutive in groupby(parameters, lambda parameter: parameter.grad.is_sparse):
                if is_sparse:
                    for table in consecutive:
                        (self._update_table if self.capturable else self._update_rows)(table, group, counts)
                else:
                    dense = list(consecutive)
                    first, second = ([self.state[p][name] for p in dense] for name in MOMENTS)
                    self._update(dense, [p.grad for p in dense], first, second, group, counts)

    def _update_rows(self, table: Tensor, group: Mapping[str, Any], counts: Tensor) -> None:
        """Update the rows of a sparse gradient."""
        assert table.grad is not None
        gradient = table.grad.coalesce()
        rows, state = gradient.indices()[0], self.state[table]
        values, first, second = (tensor[rows] for tensor in (table, state["exp_avg"], state["exp_avg_sq"]))
        self._update([values], [gradient.values()], [first], [second], group, counts)
        table[rows], state["exp_avg"][rows], state["exp_avg_sq"][rows] = values, first, second

    def _update_table(self, table: Tensor, group: Mapping[str, Any], counts: Tensor) -> None:
        """Compute all rows of a table, and keep the results of those that a sparse gradient contains."""
        assert table.grad is not None
        ids, values, state = table.grad._indices()[0], table.grad._values(), self.state[table]
        # The sum of duplicate rows does not depend on the order of threads, unlike that of index_add_.
        gradient = torch.ops.aten.embedding_dense_backward(values, ids, len(table), -1, False)
        rows = torch.zeros(len(table), 1, dtype=torch.bool, device=table.device).index_fill_(0, ids, value=True)
        touched = Touched(rows, rows.sum() * table.shape[1])
        moments = [state[name].clone() for name in MOMENTS]
        self._update([table], [gradient], moments[:1], moments[1:], group, counts, touched)
        for name, moment in zip(MOMENTS, moments, strict=True):
            state[name].copy_(torch.where(rows, moment, state[name]))

    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        group: Mapping[str, Any],
        counts: Tensor,
        touched: Touched | None = None,
    ) -> None:
        """Update tensors and their moments in place, and count elements."""
        (beta1, beta2), dtype = group["betas"], first[0].dtype
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
            if touched is not None:
                torch._foreach_mul_(gradients, [touched.rows] * len(gradients))
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_div(second, (1 - beta2**self.steps).to(dtype))
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(first, (1 - beta1**self.steps).to(dtype))
        torch._foreach_div_(updates, denominators)
        pairs = list(zip(first, gradients, strict=True))
        counts[0].add_(torch.stack([(moment * gradient > 0).sum() for moment, gradient in pairs]).sum())
        counts[1].add_(sum(gradient.numel() for gradient in gradients) if touched is None else touched.count)
        if self.mask != "none" or touched is not None:
            factors = [mask_factor(self.mask, *pair, self.generator, touched) for pair in pairs]
            torch._foreach_mul_(updates, factors)
        torch._foreach_mul_(updates, -group["lr"])
        torch._foreach_add_(parameters, updates)

    def alignment_counts(self) -> Tensor:
        """Return the numbers of elements aligned, touched and seen so far, as a tensor on the device."""
        return torch.stack(self._counts).sum(0)

    def alignment(self) -> Alignment:
        """Return the alignment ratio of all parameters and of each group."""
        groups = tuple(alignment.read(self._counts))
        return Alignment(sum(groups, Ratio(0, 0, 0)), groups, {})


def masked(
    name: str,
    params: Iterable[Any],
    lr: float,
    seed: int,
    device: torch.device,
    *,
    weight_decay: float = 0.0,
    capturable: bool = False,
) -> MaskedAdam:
    """Return the optimizer of a control arm.

    Args:
        name: A name of `CONTROL_ARMS`.
        params: Parameters or parameter groups.
        lr: The learning rate.
        seed: Seed of the random mask.
        device: The device of the parameters.
        weight_decay: L2 penalty, which is added to the gradient.
        capturable: Whether a CUDA graph can capture a step with sparse gradients.
    """
    arm, generator = CONTROL_ARMS[name], torch.Generator(device).manual_seed(seed)
    betas = (arm.beta1, 0.999)
    return MaskedAdam(
        params, lr, betas, weight_decay=weight_decay, mask=arm.mask, generator=generator, capturable=capturable
    )


def build(name: str, model: nn.Module, lr: float, seed: int) -> torch.optim.Optimizer:
    """Return the optimizer of an arm for a model on the CPU.

    Args:
        name: A name of `CONTROL_ARMS`, or an optimizer of cadam, as `OptimizerSpec` reads it.
        model: The model.
        lr: The learning rate.
        seed: Seed of the random mask.
    """
    if name not in CONTROL_ARMS:
        return OptimizerSpec.parse(name).build(model, lr)
    return masked(name, model.parameters(), lr, seed, torch.device("cpu"))


def agreement(optimizer: Any) -> float:
    """Return the share of updated elements whose momentum and gradient agreed in sign."""
    return float(optimizer.alignment().total.over_touched)


def generators(optimizer: torch.optim.Optimizer) -> list[torch.Generator]:
    """Return the random number generators of an optimizer, which a CUDA graph of its step has to know."""
    generator = optimizer.generator if isinstance(optimizer, MaskedAdam) else None
    return [] if generator is None else [generator]
