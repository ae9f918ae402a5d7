"""Our tables where TorchRec looks for FBGEMM's: kernels (tables of one rank with their optimizer) and lookups."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torchrec.distributed.batched_embedding_kernel import (
    BaseBatchedEmbedding,
    BaseBatchedEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import data_type_to_sparse_type
from torchrec.optim.fused import FusedOptimizer

from ..optim.optimizer import Optimizer
from .tables import Tables

CHOICE, BY_TABLE = "cadam", "by_table"  # among the fused parameters that a sharder hands down to its tables


@dataclass(frozen=True)
class Choice:
    """The optimizer of a sharder's tables: a class of the catalogue and all its options."""

    optimizer: type[Optimizer]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, optimizer: type[Optimizer], given: dict[str, Any]) -> Choice:
        """Checked and completed as the optimizer's constructor does it."""
        if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
            raise TypeError(f"optimizer must be a class of cadam's catalogue, such as cadam.CAdam; got {optimizer!r}")
        options = optimizer.options_of(**given)
        for name in ("capturable", "differentiable", "stochastic_rounding"):
            if options[name]:
                raise ValueError(f"{name}=True is not supported for tables that are updated in backward")
        return cls(optimizer, tuple(options.items()))

    @property
    def by_row(self) -> str | None:
        """The option that keeps numbers for whole rows, which cannot be cut into columns; None if there is none."""
        kept = {"moments": "int8", "second_moment": "row", "row_steps": True}
        given = dict(self.options)
        return next((f"{name}={value!r}" for name, value in kept.items() if given[name] == value), None)


class TableOptimizer(FusedOptimizer):
    """What TorchRec sees of the update in backward: parameters, state and options, to be saved and scheduled.

    State is sharded as its table is; a replicated table's is a plain tensor. The step belongs to the table as a
    whole: one number, the same on every rank, so that it can be loaded by any number of them. The options are the
    tables' own: a learning rate set in ``param_groups`` counts in the next backward.
    """

    def __init__(self, config: GroupedEmbeddingConfig, tables: Tables, group: dist.ProcessGroup | None) -> None:
        shards: dict[str, list[int]] = {}
        for number, table in enumerate(config.embedding_tables):
            shards.setdefault(table.name, []).append(number)
        self._config, self._group, self.tables, self._shards = config, group, tables, shards
        weights = tables.by_table(tables.memory())
        self._weights = {name: self._whole([weights[n] for n in own], own) for name, own in shards.items()}
        tables.options["params"] = list(self._weights.values())
        tables.stored_anew = self._renew
        params = {f"{name}.weight": weight for name, weight in self._weights.items()}
        super().__init__(params, self._states(), [tables.options])

    def _states(self) -> dict[Any, Any]:
        """By table, its state as TorchRec wants it."""
        tables, states, found = self.tables, self.tables.get_optimizer_state(), {}
        for name, own in self._shards.items():
            state = found[self._weights[name]] = {f"{name}.step": tables.steps[own[0]]}
            for buffer in tables.flat_state:
                parts = [states[n][buffer] for n in own]
                state[f"{name}.{buffer}"] = self._whole(parts, own, by_row=buffer in tables.by_row)
        return found

    def _whole(self, parts: list[Tensor], own: list[int], *, by_row: bool = False) -> Any:
        """The whole of what these shards of a table are parts of; `by_row` says that it has one column."""
        if self.tables.replicas is not None:
            return parts[0]
        of_shards = [self._config.embedding_tables[n] for n in own]
        metadata = copy.deepcopy(of_shards[0].global_metadata)
        local = [copy.deepcopy(table.local_metadata) for table in of_shards]
        if by_row:
            metadata.size = torch.Size((metadata.size[0], 1))
            for place in (*metadata.shards_metadata, *local):
                place.shard_offsets[1], place.shard_sizes[1] = 0, 1
        metadata.tensor_properties.dtype = parts[0].dtype
        metadata.tensor_properties.requires_grad = False
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(part, place) for part, place in zip(parts, local, strict=True)],
            sharded_tensor_metadata=metadata,
            process_group=self._group,
        )

    def _renew(self) -> None:
        """Show the state that the tables have now."""
        self.state.update(self._states())

    def post_load_state_dict(self) -> None:
        """The step was loaded for a table's first shard here; the others are of the same table."""
        for numbers in self._shards.values():
            self.tables.steps[numbers] = self.tables.steps[numbers[0]].item()

    def step(self, closure: Any = None) -> None:
        """Nothing: backward has done it."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: there are no gradients."""

    def set_optimizer_step(self, step: int) -> None:
        self.tables.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        self.tables.update_hyper_parameters(params_dict)


def _make(kernel: Any, pooling: PoolingMode, group: dist.ProcessGroup | None, device: torch.device | None) -> None:
    """Give a kernel its tables and their optimizer, as its configuration says."""
    config = kernel._config
    fused: dict[str, Any] = config.fused_params or {}
    choice: Choice = fused[CHOICE]
    cuda = device is not None and device.type == "cuda"
    where = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    replicated = all(table.global_metadata is None for table in config.embedding_tables)
    if by_row := choice.by_row:
        for table in config.embedding_tables:
            if table.local_cols != table.embedding_dim:
                raise ValueError(
                    f"table {table.name!r} is sharded by columns, and {by_row} keeps numbers for whole rows: shard it "
                    "by rows or as a whole (sharding_types in the planner's constraints)"
                )
    kernel._emb_module = Tables(
        [(rows, columns, *where) for rows, columns in zip(kernel._local_rows, kernel._local_cols, strict=True)],
        choice.optimizer,
        dict(choice.options),
        feature_table_map=kernel._feature_table_map,
        table_names=[table.name for table in config.embedding_tables],
        pooling_mode=pooling,
        weights_precision=data_type_to_sparse_type(config.data_type),
        output_dtype=fused.get("output_dtype", SparseType.FP32),
        device=device,
        replicas=group if replicated else None,
        places=[
            (0, 0) if table.local_metadata is None else tuple(table.local_metadata.shard_offsets)
            for table in config.embedding_tables
        ],
        merge=not fused.get(BY_TABLE, False),
    )
    kernel._optim = TableOptimizer(config, kernel._emb_module, group)
    kernel.init_parameters()


class _Kernel:
    """What the two kernels share: a table's parameter is marked as updated in backward, by its optimizer."""

    _emb_module: Tables
    _optim: TableOptimizer

    @property
    def _param_per_table(self) -> dict[str, TableBatchedEmbeddingSlice]:
        return dict(self._parameters_by_table())

    @_param_per_table.setter
    def _param_per_table(self, value: dict[str, TableBatchedEmbeddingSlice]) -> None:
        """TorchRec's constructor sets it to nothing."""

    def _parameters_by_table(self) -> Iterator[tuple[str, TableBatchedEmbeddingSlice]]:
        tables, start = self._emb_module, 0
        memory = tables.weights_host if tables.weights_host.numel() else tables.weights_dev
        names = tables.table_names
        for number, (rows, columns, _, _) in enumerate(tables.embedding_specs):
            if names.index(names[number]) == number:
                end = start + names.count(names[number]) * rows * columns
                parameter = TableBatchedEmbeddingSlice(memory, start, end, -1, columns)
                parameter._in_backward_optimizers = [self._optim]
                yield names[number], parameter
            start += rows * columns


class PooledKernel(_Kernel, BatchedFusedEmbeddingBag):
    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        group: dist.ProcessGroup | None,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> None:
        BaseBatchedEmbeddingBag.__init__(self, config, group, device, sharding_type)
        _make(self, self._pooling, group, device)


class SequenceKernel(_Kernel, BatchedFusedEmbedding):
    def __init__(
        self, config: GroupedEmbeddingConfig, group: dist.ProcessGroup | None, device: torch.device | None
    ) -> None:
        BaseBatchedEmbedding.__init__(self, config, group, device)
        _make(self, PoolingMode.NONE, group, device)


def _check_kernel(config: GroupedEmbeddingConfig) -> None:
    """Tables are fused; replicated ones, which TorchRec calls dense, are fused by us all the same."""
    replicated = all(table.global_metadata is None for table in config.embedding_tables)
    wanted = EmbeddingComputeKernel.DENSE if replicated else EmbeddingComputeKernel.FUSED
    for table in config.embedding_tables:
        if table.compute_kernel not in (wanted, EmbeddingComputeKernel.FUSED):
            raise ValueError(
                f"table {table.name!r}: the plan asks for the compute kernel {table.compute_kernel.value!r}, and "
                f"cadam.torchrec has {wanted.value!r} only; set compute_kernels=[{wanted.value!r}] in the planner's "
                "constraints"
            )
    if any(table.dtensor_metadata is not None for table in config.embedding_tables):
        raise NotImplementedError("tables as DTensor (output_dtensor=True) are not supported")


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """Looks up bags in our tables."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: Any,
    ) -> PooledKernel:
        _check_kernel(config)
        return PooledKernel(config, pg, device, sharding_type)

    @property
    def module(self) -> PooledLookup:
        """Itself, where TorchRec takes off the DistributedDataParallel around a replicated lookup: there is none."""
        return self


class SequenceLookup(GroupedEmbeddingsLookup):
    """Looks up a row for each id in our tables."""

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: Any = None,
    ) -> SequenceKernel:
        _check_kernel(config)
        return SequenceKernel(config, pg, device)

    @property
    def module(self) -> SequenceLookup:
        """Itself, as for `PooledLookup`."""
        return self
