"""Sparse gradients under DistributedDataParallel: every rank gets the rows of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import cadam
from cadam.optim.ddp import gather_rows
from tests.optim.exact import assert_identical, present
from tests.process_groups import run


class Tables(nn.Module):
    """Tables of several widths and dtypes, one with an odd number of bytes, before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Embedding(9, 3, sparse=True, dtype=torch.bfloat16)
        self.bag = nn.EmbeddingBag(7, 5, sparse=True, mode="sum")
        self.wide = nn.Embedding(11, 4, sparse=True, dtype=torch.float64, padding_idx=0)
        self.dense = nn.Embedding(9, 3)
        self.out = nn.Linear(15, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = [self.narrow(ids).float(), self.bag(ids[:, None]), self.wide(ids).float(), self.dense(ids)]
        score: Tensor = self.out(torch.cat(found, 1))
        return score


IDS: tuple[tuple[list[int], list[int]], ...] = (
    ([1, 1, 5], [5, 2]),
    ([3], []),  # a rank without events
    ([], []),
    ([0, 0], [4, 6, 6, 1]),  # on rank 0 only the padding row, so that one of the tables has no gradient
)


def backward(model: nn.Module, ids: list[int]) -> None:
    model.zero_grad()
    model(torch.tensor(ids, dtype=torch.int64)).square().sum().backward()


def gradients_of_ranks() -> list[list[list[Tensor]]]:
    """Return for each batch, by rank: the gradients of this rank alone, and the gradients after the exchange."""
    rank, found = dist.get_rank(), []
    model = DistributedDataParallel(Tables())
    alone = deepcopy(model.module)
    gather_rows(model)
    gather_rows(model)  # the second call changes nothing
    assert len(model._comm_hooks) == 1
    for ids in IDS:
        backward(alone, ids[rank % 2])
        backward(model, ids[rank % 2])
        here = [present(p.grad) for p in (*alone.parameters(), *model.parameters())]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, here)
        found.append(every)
    return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_has_the_rows_of_all(world: int, tmp_path: Path) -> None:
    for every in run(world, tmp_path / "world", gradients_of_ranks):
        count = len(every[0]) // 2
        assert sum(gradient.is_sparse for gradient in every[0][:count]) == 3
        for place in range(count):
            alone = [of_rank[place] for of_rank in every]
            exchanged = [of_rank[count + place] for of_rank in every]
            for gradient in exchanged:
                assert gradient.layout == alone[0].layout
                assert_identical(gradient.to_dense(), exchanged[0].to_dense())
            if alone[0].is_sparse:
                assert_identical(exchanged[0]._indices(), torch.cat([g._indices() for g in alone], 1))
                assert_identical(exchanged[0]._values(), torch.cat([g._values() for g in alone]) / world)
            else:
                torch.testing.assert_close(exchanged[0], torch.stack(alone).sum(0) / world)


def compare(options: dict[str, Any], passes: Callable[[DistributedDataParallel | nn.Module, int], None]) -> list[Any]:
    """Return the mean gradients over ranks of a model without DDP, and those of the model that exchanges rows."""
    model = DistributedDataParallel(Tables(), **options)
    alone = deepcopy(model.module)
    gather_rows(model)
    passes(alone, dist.get_rank())
    passes(model, dist.get_rank())
    means = []
    for parameter in alone.parameters():
        mean = present(parameter.grad).to_dense().double() / dist.get_world_size()
        dist.all_reduce(mean)
        means.append(mean.to(parameter.dtype))
    return [means, [present(parameter.grad) for parameter in model.parameters()]]


def once(model: nn.Module, rank: int) -> None:
    backward(model, IDS[0][rank])


def accumulated(model: nn.Module, rank: int) -> None:
    """Learn one event twice, because torch's sum of two sparse tensors with one row has odd strides."""
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        model(torch.tensor([5])).sum().backward()
    model(torch.tensor([5])).sum().backward()


def many(model: nn.Module, rank: int) -> None:
    """Learn more events than the tables have rows."""
    backward(model, [1 + rank + i % 5 for i in range(50)])


CASES: dict[str, tuple[dict[str, Any], Callable[[nn.Module, int], None]]] = {
    "static_graph": ({"static_graph": True}, once),
    "bucket views": ({"gradient_as_bucket_view": True}, once),
    "many buckets": ({"bucket_cap_mb": 1e-5}, once),
    "unused": ({"find_unused_parameters": True}, once),
    "accumulated": ({}, accumulated),
    "many": ({}, many),
}


def compare_all() -> dict[str, list[Any]]:
    return {name: compare(*case) for name, case in CASES.items()}


def test_in_every_mode_the_gradients_are_the_mean(tmp_path: Path) -> None:
    found = run(2, tmp_path / "world", compare_all)
    assert set(found) == set(CASES)
    for name, (means, exchanged) in found.items():
        for mean, gradient in zip(means, exchanged, strict=True):
            tolerance = 0.02 if mean.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(gradient.to_dense(), mean, rtol=tolerance, atol=tolerance), name
    rows = {gradient._nnz() for gradient in found["many"][1] if gradient.is_sparse}
    assert rows == {10}  # five rows of each rank, whose duplicates were added before the exchange


def groups_of_one() -> None:
    """A model whose process group contains only this rank keeps its own gradients."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = DistributedDataParallel(Tables(), process_group=own)
    alone = deepcopy(model.module)
    gather_rows(model)
    for one in (alone, model):
        backward(one, IDS[0][dist.get_rank()])
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_identical(present(mine.grad).to_dense(), present(expected.grad).to_dense())


def test_the_ranks_are_those_of_the_models_group(tmp_path: Path) -> None:
    run(2, tmp_path / "world", groups_of_one)


class Shared(nn.Module):
    """Two tables with a shared weight, and a table that the ranks do not exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.ignored = (nn.Embedding(9, 2, sparse=True) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.first(ids) + self.second(ids + 1) + self.ignored(ids)
        return found


def rows_of_shared() -> list[int]:
    module = Shared()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["ignored.weight"])
    model = DistributedDataParallel(module)
    gather_rows(model)
    backward(model, [1, 3, 5])
    return [present(table.weight.grad)._nnz() for table in (module.first, module.ignored)]


def test_tables_that_share_a_weight_and_those_that_are_not_exchanged(tmp_path: Path) -> None:
    assert run(2, tmp_path / "world", rows_of_shared, seconds=60) == [12, 3]


def copied() -> list[int]:
    """A copy of a model has no hook in torch, and `gather_rows` can add one."""
    model = DistributedDataParallel(nn.EmbeddingBag(5, 2, sparse=True, mode="sum"))
    gather_rows(model)
    counts = []
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(2):
            gather_rows(copy)
        copy(torch.tensor([[1, 1, 3]])).sum().backward()
        counts.append(present(copy.module.weight.grad)._nnz())
    return counts


def test_a_copy_of_a_model_exchanges_rows_too(tmp_path: Path) -> None:
    assert run(2, tmp_path / "world", copied) == [6, 6]  # the sum of torch would have two rows


def trained_with_a_seed_per_rank(storage: str) -> list[bool]:
    """Whether each parameter is the same on both ranks after some steps."""
    model = DistributedDataParallel(Tables().float())
    gather_rows(model)
    torch.manual_seed(dist.get_rank())
    optimizer = cadam.CAdam(model.named_parameters(), lr=0.01, moments=storage)
    for step in range(10):
        backward(model, IDS[step % len(IDS)][dist.get_rank()])
        optimizer.step()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(model.module.parameters()))
    return [torch.equal(*both) for both in zip(*every, strict=True)]


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_replicas_with_rounded_moments_stay_equal_though_each_rank_has_its_seed(storage: str, tmp_path: Path) -> None:
    assert all(run(2, tmp_path / "world", trained_with_a_seed_per_rank, storage))


def refused() -> list[int]:
    """Return the numbers of hooks of models that need none, and of models with another hook."""
    frozen = nn.Embedding(5, 2, sparse=True).requires_grad_(False)
    models = [nn.Embedding(5, 2), nn.Sequential(frozen, nn.Linear(2, 1))]
    without = [DistributedDataParallel(model) for model in models]
    for model in without:
        gather_rows(model)
    others = [DistributedDataParallel(nn.Embedding(5, 2, sparse=True)) for _ in range(2)]
    others[0].register_comm_hook(None, allreduce_hook)
    others[1]._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)  # type: ignore[attr-defined]
    for model in others * 2:
        with pytest.raises(ValueError, match="communication hook"):
            gather_rows(model)
    return [len(model._comm_hooks) for model in (*without, *others)]


def test_a_model_without_sparse_tables_is_left_as_it_is_and_one_with_another_hook_is_refused(tmp_path: Path) -> None:
    assert run(1, tmp_path / "world", refused) == [0, 0, 1, 0]
