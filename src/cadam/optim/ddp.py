"""Sparse gradients under DistributedDataParallel."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def gather_rows(model: DistributedDataParallel) -> None:
    """Let the ranks of a model exchange sparse gradients as rows: each rank gets the rows of all of them.

    Call it on every rank, right after the model was wrapped, and again for a copy of the model. One without tables that
    are trained with ``sparse=True`` is left as it is, and so is one that was given here before. The gradients are not
    coalesced.

    Without it torch adds the sparse gradients of all ranks up. It can do so on gloo only, and there it damages memory
    (seen with torch 2.13): sooner or later a process ends with a segmentation fault or an error of malloc.

    Raises:
        ValueError: the model has a communication hook already, and torch allows for one.
    """
    tables = _sparse_tables(model)
    if not tables or any(type(state) is _Waiting and state.group for _, state in model._comm_hooks):
        return
    try:
        model.register_comm_hook(_Waiting(model.process_group, tables), _gather)
    except RuntimeError as error:
        model._comm_hooks.pop()  # torch notes it before it looks whether there is another
        raise ValueError("the model has a communication hook already, torch allows for one: leave it out") from error


def _sparse_tables(model: DistributedDataParallel) -> int:
    """How many parameters torch expects a sparse gradient of; each has a bucket of its own."""
    seen: dict[nn.Parameter, bool] = {}
    for name, module in model.module.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and f"{name}.{own}" not in model.parameters_to_ignore:
                seen.setdefault(parameter, sparse)
    return sum(seen.values())


class _Waiting:
    """The sparse gradients of one backward, until those of all `tables` are there: they are exchanged together."""

    def __init__(self, group: Any, tables: int) -> None:
        self.group, self.tables = group, tables
        self.gradients: list[Tensor] = []
        self.exchanged: list[Future[Tensor]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """For a copy of a model, in which torch does not call the hook."""
        return _Waiting, (None, self.tables)

    def add(self, gradient: Tensor) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        self.gradients.append(gradient)
        self.exchanged.append(future)
        if len(self.gradients) == self.tables:
            for waiting, whole in zip(self.exchanged, _exchanged(self.gradients, self.group), strict=True):
                waiting.set_result(whole)
            self.gradients, self.exchanged = [], []
        return future


# Torch compares the annotations of a hook with types: they must not be strings.
def _gather(waiting: _Waiting, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A communication hook. Torch calls it for one bucket after the other, in the same order on all ranks."""
    gradient = bucket.buffer()
    return waiting.add(gradient) if gradient.is_sparse else allreduce_hook(waiting.group, bucket)


def _exchanged(gradients: list[Tensor], group: Any) -> list[Tensor]:
    """Each gradient with the rows of all ranks, one rank after the other, divided by the number of ranks."""
    # More rows than the table has are worth adding up first.
    gradients = [g.coalesce() if g._nnz() > g.shape[: g.sparse_dim()].numel() else g for g in gradients]
    # Ids and values of all gradients travel in one message, as bytes; it is as long on each rank as on the longest.
    tensors = [tensor for gradient in gradients for tensor in (gradient._indices().mT, gradient._values())]
    rows = torch.tensor([len(tensor) for tensor in tensors], device=tensors[0].device)
    rows_of_ranks = [of_rank.tolist() for of_rank in _all_gather(rows, group)]
    of_a_row = [tensor.shape[1:].numel() * tensor.element_size() for tensor in tensors]
    sizes = [[n * size for n, size in zip(of_rank, of_a_row, strict=True)] for of_rank in rows_of_ranks]
    message = torch.cat([_as_bytes(tensor) for tensor in tensors])
    messages = _all_gather(nn.functional.pad(message, (0, max(map(sum, sizes)) - len(message))), group)
    pieces = [torch.split(whole[: sum(size)], size) for whole, size in zip(messages, sizes, strict=True)]
    joined = [
        torch.cat(of_ranks).view(tensor.dtype).view(sum(n), *tensor.shape[1:])
        for tensor, of_ranks, n in zip(
            tensors, zip(*pieces, strict=True), zip(*rows_of_ranks, strict=True), strict=True
        )
    ]
    return [
        torch.sparse_coo_tensor(ids.mT, values.div_(len(messages)), gradient.shape, check_invariants=False)
        for ids, values, gradient in zip(joined[::2], joined[1::2], gradients, strict=True)
    ]


def _as_bytes(x: Tensor) -> Tensor:
    """A copy; `contiguous` would leave a tensor of one element with a stride that cannot be seen as bytes."""
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _all_gather(mine: Tensor, group: Any) -> list[Tensor]:
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group)
    return every
