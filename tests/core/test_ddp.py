"""Sparse gradients under DistributedDataParallel: every rank has the rows of all of them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import assert_identical, present
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import run

from cadam.ddp import gather_rows


class Tables(nn.Module):
    """Tables of several widths and dtypes, an odd number of bytes among them, before a dense layer."""

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
    ([0, 0], [4, 6, 6, 1]),  # only the row that is kept as it is: no gradient for one of the tables
)


def backward(model: nn.Module, ids: list[int]) -> None:
    model.zero_grad()
    model(torch.tensor(ids, dtype=torch.int64)).square().sum().backward()


def gradients_of_ranks() -> list[list[list[Tensor]]]:
    """For each batch, and rank by rank: the gradients that this rank alone has, and those it has after the exchange."""
    rank, found = dist.get_rank(), []
    model = DistributedDataParallel(Tables())
    alone = deepcopy(model.module)
    gather_rows(model)
    gather_rows(model)  # changes nothing
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


def register() -> list[Any]:
    without, other = (
        DistributedDataParallel(nn.Embedding(5, 2)),
        DistributedDataParallel(nn.Embedding(5, 2, sparse=True)),
    )
    gather_rows(without)
    other.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="has the communication hook allreduce_hook already"):
        gather_rows(other)
    return [len(model._comm_hooks) for model in (without, other)]


def test_a_model_without_sparse_tables_is_left_as_it_is_and_one_with_another_hook_is_refused(tmp_path: Path) -> None:
    assert run(1, tmp_path / "world", register) == [0, 1]
