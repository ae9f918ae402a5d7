"""Sparse gradients under DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def gather_rows(model: DistributedDataParallel) -> None:
    """Let the ranks of a model exchange sparse gradients as rows: each rank gets the rows of all of them.

    Call it on every rank, right after the model was wrapped. A model without ``sparse=True`` in any table is left as it
    is, and so is one that was given here before.

    Without it torch adds the sparse gradients of all ranks up. It can do so on gloo only, and there it damages memory
    (seen with torch 2.13): sooner or later a process ends with a segmentation fault or an error of malloc.

    Raises:
        ValueError: the model has a communication hook of its own; it can have one only.
    """
    tables = [m for m in model.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    registered = [hook for hook, _ in model._comm_hooks]
    if not tables or registered == [_gather]:
        return
    if registered:
        raise ValueError(f"the model has the communication hook {registered[0].__qualname__} already: call this first")
    model.register_comm_hook(_Waiting(model.process_group), _gather)


class _Waiting:
    """The sparse gradients of one backward, until all of them are there: they are exchanged together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.gradients: list[Tensor] = []
        self.exchanged: list[Future[Tensor]] = []

    def add(self, gradient: Tensor) -> Future[Tensor]:
        self.gradients.append(gradient)
        self.exchanged.append(Future())
        return self.exchanged[-1]

    def exchange(self) -> None:
        for future, gradient in zip(self.exchanged, _exchanged(self.gradients, self.group), strict=True):
            future.set_result(gradient)
        self.gradients, self.exchanged = [], []


# Torch compares the annotations of a hook with types: they must not be strings.
def _gather(waiting: _Waiting, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A communication hook. Torch calls it for one bucket after the other, in the same order on all ranks."""
    gradient = bucket.buffer()
    future = waiting.add(gradient) if gradient.is_sparse else allreduce_hook(waiting.group, bucket)
    if bucket.is_last():
        waiting.exchange()
    return future


def _exchanged(gradients: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each gradient with the rows of all ranks, one rank after the other, divided by the number of ranks."""
    if not gradients:
        return []
    # Ids and values of all gradients travel in one message, as bytes; it is as long on each rank as on the longest.
    tensors = [tensor for gradient in gradients for tensor in (gradient._indices().mT, gradient._values())]
    rows = torch.tensor([len(tensor) for tensor in tensors], device=tensors[0].device)
    rows_of_ranks = [of_rank.tolist() for of_rank in _all_gather(rows, group)]
    of_a_row = [tensor.shape[1:].numel() * tensor.element_size() for tensor in tensors]
    sizes = [[n * size for n, size in zip(of_rank, of_a_row, strict=True)] for of_rank in rows_of_ranks]
    message = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
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


def _all_gather(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group)
    return every
