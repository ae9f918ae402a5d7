"""Sparse gradients under DistributedDataParallel."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def gather_rows(model: DistributedDataParallel) -> None:
    """Let the ranks of a model exchange sparse gradients as rows, so that each rank gets the rows of all ranks.

    Call it on every rank, right after the model was wrapped, and again for a copy of the model. A model without tables
    that are trained with ``sparse=True`` stays unchanged, and so does a model that was passed before. The gradients are
    not coalesced.

    Without this function, torch adds the sparse gradients of all ranks. It supports that on gloo only, where it
    corrupts memory (seen with torch 2.13): sooner or later, a process ends with a segmentation fault or an error of
    malloc.

    Args:
        model: The wrapped model.

    Raises:
        ValueError: If the model already has a communication hook, of which torch allows only one.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> cadam.gather_rows(model)
    """
    tables = _count_sparse_tables(model)
    if not tables or any(type(state) is _PendingGradients and state.group for _, state in model._comm_hooks):
        return
    try:
        model.register_comm_hook(_PendingGradients(model.process_group, tables), _exchange_bucket)
    except RuntimeError as error:
        model._comm_hooks.pop()  # Torch adds the hook to this list before it checks that there is no other.
        raise ValueError("the model already has a communication hook; torch allows only one, remove it") from error


def _count_sparse_tables(model: DistributedDataParallel) -> int:
    """Return the number of parameters for which torch expects a sparse gradient. Each has its own bucket."""
    is_sparse: dict[nn.Parameter, bool] = {}
    for name, module in model.module.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and f"{name}.{parameter_name}" not in model.parameters_to_ignore:
                is_sparse.setdefault(parameter, sparse)
    return sum(is_sparse.values())


class _PendingGradients:
    """Collects the sparse gradients of a backward pass until those of all tables are exchanged in one message."""

    def __init__(self, group: Any, tables: int) -> None:
        self.group, self.tables = group, tables
        self.gradients: list[Tensor] = []
        self.futures: list[Future[Tensor]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without the process group: torch does not call the hook of a copied model."""
        return _PendingGradients, (None, self.tables)

    def add(self, gradient: Tensor) -> Future[Tensor]:
        """Add the gradient of one table. Returns its exchanged gradient, which is there after the last table."""
        future: Future[Tensor] = Future()
        self.gradients.append(gradient)
        self.futures.append(future)
        if len(self.gradients) == self.tables:
            for waiting, exchanged in zip(self.futures, _exchange(self.gradients, self.group), strict=True):
                waiting.set_result(exchanged)
            self.gradients, self.futures = [], []
        return future


# Torch compares the annotations of a hook with types, so they must not be strings.
def _exchange_bucket(pending: _PendingGradients, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Exchange one bucket, as a communication hook. Torch calls it for all buckets, in the same order on all ranks."""
    gradient = bucket.buffer()
    return pending.add(gradient) if gradient.is_sparse else allreduce_hook(pending.group, bucket)


def _exchange(gradients: list[Tensor], group: Any) -> list[Tensor]:
    """Return each gradient with the rows of all ranks in the order of the ranks, divided by the number of ranks."""
    # A gradient with more rows than its table is smaller after its duplicates are summed.
    gradients = [g.coalesce() if g._nnz() > g.shape[: g.sparse_dim()].numel() else g for g in gradients]
    # Ids and values of all gradients travel in one message of bytes, padded to the length of the longest rank's.
    tensors = [tensor for gradient in gradients for tensor in (gradient._indices().mT, gradient._values())]
    rows = torch.tensor([len(tensor) for tensor in tensors], device=tensors[0].device)
    rows_by_rank = [counts.tolist() for counts in _all_gather(rows, group)]
    row_bytes = [tensor.shape[1:].numel() * tensor.element_size() for tensor in tensors]
    sizes_by_rank = [[n * size for n, size in zip(counts, row_bytes, strict=True)] for counts in rows_by_rank]
    message = torch.cat([_as_bytes(tensor) for tensor in tensors])
    messages = _all_gather(nn.functional.pad(message, (0, max(map(sum, sizes_by_rank)) - len(message))), group)
    parts_by_rank = [
        torch.split(received[: sum(sizes)], sizes) for received, sizes in zip(messages, sizes_by_rank, strict=True)
    ]
    joined = [
        torch.cat(parts).view(tensor.dtype).view(sum(counts), *tensor.shape[1:])
        for tensor, parts, counts in zip(
            tensors, zip(*parts_by_rank, strict=True), zip(*rows_by_rank, strict=True), strict=True
        )
    ]
    return [
        torch.sparse_coo_tensor(ids.mT, values.div_(len(messages)), gradient.shape, check_invariants=False)
        for ids, values, gradient in zip(joined[::2], joined[1::2], gradients, strict=True)
    ]


def _as_bytes(x: Tensor) -> Tensor:
    """Return a copy as bytes. `contiguous` may keep a stride of a one-element tensor that cannot be viewed as bytes."""
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _all_gather(tensor: Tensor, group: Any) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group)
    return gathered
