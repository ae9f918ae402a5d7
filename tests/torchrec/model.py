"""A small model with sharded tables, and the same model in one process. Imported only where TorchRec is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

import cadam
from cadam.distributed.process_group import all_gather_objects
from cadam.torchrec import BagSharder, SequenceSharder

BATCH = 24  # can be divided among one to four ranks
LENGTH = 3  # ids of one feature in one sample, at most


@dataclass(frozen=True)
class Table:
    name: str
    rows: int
    features: tuple[str, ...]
    mean: bool = False
    width: int = 8


@dataclass(frozen=True)
class Setting:
    """The model that is trained, and the sharding of its tables."""

    sharding: str = "row_wise"
    sequences: bool = False
    weighted: bool = False
    optimizer: type[cadam.Optimizer] = cadam.CAdam
    options: tuple[tuple[str, Any], ...] = (("lr", 0.05),)
    tables: tuple[Table, ...] = (Table("users", 37, ("user",)), Table("goods", 50, ("shown", "clicked"), mean=True))
    half: bool = False
    seed: int = 0
    shards: int = 2  # the maximum number of columns of a shard

    @property
    def features(self) -> list[Table]:
        return [table for table in self.tables for _ in table.features]

    def start(self, table: Table) -> Tensor:
        generator = torch.Generator().manual_seed(table.rows + self.seed)
        start = torch.randn(table.rows, table.width, generator=generator) / 2
        return start.bfloat16() if self.half else start


@dataclass(frozen=True)
class Batch:
    """The ids of each sample and their weights, by feature."""

    ids: list[list[Tensor]]
    weights: list[list[Tensor]]
    labels: Tensor

    def share(self, rank: int, world: int) -> Batch:
        part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        return Batch([x[part] for x in self.ids], [x[part] for x in self.weights], self.labels[part])


def batch(setting: Setting, step: int) -> Batch:
    """Return bags of different lengths, some of them empty or with duplicate ids."""
    generator = torch.Generator().manual_seed(1000 * setting.seed + step)
    ids, weights = [], []
    for table in setting.features:
        lengths = torch.randint(0, LENGTH + 1, (BATCH,), generator=generator).tolist()
        # Small ids are frequent.
        ids.append([(torch.rand(n, generator=generator) ** 2 * table.rows).long() for n in lengths])
        weights.append([torch.rand(n, generator=generator) + 0.5 for n in lengths])
    return Batch(ids, weights, torch.randn(BATCH, generator=generator))


def keyed(setting: Setting, share: Batch) -> KeyedJaggedTensor:
    flat = [sample for feature in share.ids for sample in feature]
    return KeyedJaggedTensor(
        keys=[name for table in setting.tables for name in table.features],
        values=torch.cat([torch.empty(0, dtype=torch.int64), *flat]),
        lengths=torch.tensor([len(sample) for sample in flat], dtype=torch.int64),
        weights=torch.cat([w for feature in share.weights for w in feature]) if setting.weighted else None,
    )


class Head(nn.Module):
    """The dense part: a linear layer, which starts equal on all ranks."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.linear = nn.Linear(sum(table.width for table in setting.features), 1)
        generator = torch.Generator().manual_seed(setting.seed + 7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def forward(self, pooled: Tensor) -> Tensor:
        output: Tensor = self.linear(pooled).squeeze(1)
        return output


class Net(nn.Module):
    def __init__(self, setting: Setting, sparse: nn.Module) -> None:
        super().__init__()
        self.setting, self.sparse, self.head = setting, sparse, Head(setting)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = self.sparse(features)
        names = [name for table in self.setting.tables for name in table.features]
        if not self.setting.sequences:
            return self.head(torch.cat([found[name] for name in names], 1))
        pooled = []
        for name in names:
            values, lengths = found[name].values(), found[name].lengths()
            bag = torch.arange(len(lengths)).repeat_interleave(lengths)
            pooled.append(torch.zeros(len(lengths), values.shape[1]).index_add(0, bag, values))
        return self.head(torch.cat(pooled, 1))


def loss_of(output: Tensor, share: Batch) -> Tensor:
    return (output - share.labels).square().mean()


# One plain process -------------------------------------------------------------------------------------------------


def train_plainly(
    setting: Setting, steps: int, slower_from: int | None = None, rate: float = 0.001
) -> dict[str, Tensor]:
    """Tables as parameters with sparse gradients, the whole batch at once, the ordinary optimizer.

    From step `slower_from` on the learning rate is `rate`.
    """
    tables = {table.name: nn.Parameter(setting.start(table)) for table in setting.tables}
    head = Head(setting)
    optimizer = setting.optimizer([*tables.values(), *head.parameters()], **dict(setting.options))
    for step in range(steps):
        if step == slower_from:
            optimizer.param_groups[0]["lr"] = rate
        data, pooled = batch(setting, step), []
        for table, ids, weights in zip(setting.features, data.ids, data.weights, strict=True):
            lengths = torch.tensor([len(sample) for sample in ids])
            rows = nn.functional.embedding(torch.cat(ids), tables[table.name], sparse=True).float()
            if setting.weighted:
                rows = rows * torch.cat(weights).unsqueeze(1)
            bag = torch.arange(BATCH).repeat_interleave(lengths)
            total = torch.zeros(BATCH, table.width).index_add(0, bag, rows)
            mean = table.mean and not setting.sequences
            pooled.append(total / lengths.clamp(min=1).unsqueeze(1) if mean else total)
        optimizer.zero_grad()
        loss_of(head(torch.cat(pooled, 1)), data).backward()
        optimizer.step()
    result = {name: parameter.detach() for name, parameter in head.named_parameters()}
    for name, parameter in tables.items():
        result[name] = parameter.detach()
        for buffer, value in optimizer.state[parameter].items():
            result[f"{name}.{buffer}"] = value
    return result


# Sharded -----------------------------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """The model on this rank, its optimizers, and the number of batches so far."""

    setting: Setting
    model: DistributedModelParallel
    dense: cadam.Optimizer
    position: int = 0

    def train(self, steps: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for _ in range(steps):
            share = batch(self.setting, self.position).share(rank, world)
            self.dense.zero_grad()
            loss_of(self.model(keyed(self.setting, share)), share).backward()
            self.dense.step()
            self.position += 1

    def result(self) -> dict[str, Tensor]:
        """Return what `train_plainly` returns, gathered from all ranks."""
        result = {f"linear.{n}": p.detach() for n, p in self.head.linear.named_parameters()}
        return {**result, **state_of(self.model)}

    @property
    def head(self) -> Head:
        return next(m for m in self.model.modules() if isinstance(m, Head))


def state_of(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Return the tables and their state, gathered from all ranks."""
    result = {}
    for key, value in model.state_dict().items():
        if key.split(".")[-3:-2] == ["embedding_bags"] or key.split(".")[-3:-2] == ["embeddings"]:
            result[key.split(".")[-2]] = whole(value)
    mine = model.fused_optimizer.state_dict()["state"]
    state: dict[str, Any] = {}
    for of_rank in all_gather_objects(
        {name: parts_of(value) for table in mine.values() for name, value in table.items()}
    ):
        for name, parts in of_rank.items():
            state.setdefault(name, []).extend(parts)
    return {**result, **{name: assembled(parts) for name, parts in state.items()}}


def parts_of(value: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    if not hasattr(value, "local_shards"):
        return [((0,) * value.dim(), value.detach().clone())]
    return [(tuple(shard.metadata.shard_offsets), shard.tensor.detach().clone()) for shard in value.local_shards()]


def assembled(parts: Sequence[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    shape = [max(place[d] + part.shape[d] for place, part in parts) for d in range(parts[0][1].dim())]
    dtype = parts[0][1].dtype
    result = torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)
    for place, part in parts:
        result[tuple(slice(start, start + size) for start, size in zip(place, part.shape, strict=True))] = part
    return result


def whole(value: Any) -> Tensor:
    return assembled([part for of_rank in all_gather_objects(parts_of(value)) for part in of_rank])


def sharded(setting: Setting) -> Trainer:
    """Return the model of `setting`, sharded over all ranks."""
    dtype = DataType.BF16 if setting.half else DataType.FP32
    shared = [
        {
            "name": table.name,
            "embedding_dim": table.width,
            "num_embeddings": table.rows,
            "feature_names": list(table.features),
            "data_type": dtype,
        }
        for table in setting.tables
    ]
    if setting.sequences:
        sparse = EmbeddingCollection([EmbeddingConfig(**kw) for kw in shared], device=torch.device("meta"))
    else:
        pooling = [PoolingType.MEAN if table.mean else PoolingType.SUM for table in setting.tables]
        configs = [EmbeddingBagConfig(**kw, pooling=p) for kw, p in zip(shared, pooling, strict=True)]
        sparse = EmbeddingBagCollection(configs, is_weighted=setting.weighted, device=torch.device("meta"))
    kind = SequenceSharder if setting.sequences else BagSharder
    model = distributed(Net(setting, sparse), [kind(setting.optimizer, **dict(setting.options))], setting)
    fill(model, {table.name: setting.start(table) for table in setting.tables})
    head = next(m for m in model.modules() if isinstance(m, Head))
    return Trainer(setting, model, setting.optimizer(head.parameters(), **dict(setting.options)))


def distributed(module: nn.Module, sharders: list[Any], setting: Setting) -> DistributedModelParallel:
    """Shard a module as a setting asks for."""
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=[setting.sharding],
            compute_kernels=["dense" if setting.sharding == "data_parallel" else "fused"],
            min_partition=table.width // setting.shards if setting.sharding == "column_wise" else None,
        )
        for table in setting.tables
    }
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).collective_plan(
        module, sharders, dist.group.WORLD
    )
    found = {p.sharding_type for of_module in plan.plan.values() for p in of_module.values()}
    assert found == {setting.sharding}
    return DistributedModelParallel(module, device=torch.device("cpu"), plan=plan, sharders=sharders)


def fill(model: DistributedModelParallel, starts: Mapping[str, Tensor]) -> None:
    """Start the tables from given weights."""
    for key, value in model.state_dict().items():
        name = key.split(".")[-2]
        if name not in starts:
            continue
        parts = value.local_shards() if hasattr(value, "local_shards") else None
        if parts is None:
            value.detach().copy_(starts[name])
            continue
        for shard in parts:
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.tensor.shape
            shard.tensor.copy_(starts[name][row : row + rows, column : column + columns])


def furthest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest difference between two results, which must have the same entries."""
    assert set(a) == set(b), set(a) ^ set(b)
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)
