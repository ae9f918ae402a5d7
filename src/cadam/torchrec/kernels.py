"""Kernels and lookups that put `Tables` where TorchRec expects FBGEMM's tables.

A kernel holds the tables of one rank and their optimizer. A lookup is the module that TorchRec calls.
"""

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
from ..rules.sparse_updates import counts_updates
from .tables import Tables

OPTIMIZER_KEY, BY_TABLE_KEY = "cadam", "by_table"
"""Keys of the fused parameters, with which a sharder passes its arguments to the kernels."""


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer of a sharder's tables: a class of cadam and all its options."""

    optimizer: type[Optimizer]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, optimizer: type[Optimizer], options: dict[str, Any]) -> OptimizerChoice:
        """Check the options and add the defaults, as the constructor of the optimizer does."""
        if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
            raise TypeError(f"optimizer must be an optimizer class of cadam, such as cadam.CAdam; got {optimizer!r}")
        complete = optimizer.options_of(**options)
        for name in ("capturable", "differentiable", "stochastic_rounding"):
            if complete[name]:
                raise ValueError(f"{name}=True is not supported for tables that are updated in backward")
        return cls(optimizer, tuple(complete.items()))

    @property
    def per_row_option(self) -> str | None:
        """The option that keeps state per row, such as `row_steps=True`; None if there is none.

        A table with such state cannot be sharded by columns.
        """
        per_row = {"moments": "int8", "second_moment": "row", "row_steps": True, "sparse_updates": "exact"}
        options = dict(self.options)
        if counts_updates(options):
            return f"confidence_after={options['confidence_after']}"
        return next((f"{name}={value!r}" for name, value in per_row.items() if options[name] == value), None)


class CadamFusedOptimizer(FusedOptimizer):
    """TorchRec's view of the update in backward: parameters, state and options, for checkpoints and schedulers.

    The state of a table is sharded like the table; that of a replicated table is a plain tensor. The step is one number
    per table and the same on every rank, so that any number of ranks can load it. The options are the dictionary of the
    tables: a learning rate set in `param_groups` applies to the next backward.
    """

    def __init__(self, config: GroupedEmbeddingConfig, tables: Tables, group: dist.ProcessGroup | None) -> None:
        shards: dict[str, list[int]] = {}
        for number, table in enumerate(config.embedding_tables):
            shards.setdefault(table.name, []).append(number)
        self._config, self._group, self.tables, self._shards = config, group, tables, shards
        weights = tables.split_by_table(tables.flat_weights())
        self._weights = {
            name: self._sharded_tensor([weights[n] for n in numbers], numbers) for name, numbers in shards.items()
        }
        tables.options["params"] = list(self._weights.values())
        tables.on_state_replaced = self._refresh_state
        params = {f"{name}.weight": weight for name, weight in self._weights.items()}
        super().__init__(params, self._states(), [tables.options])

    def _states(self) -> dict[Any, Any]:
        """Build the state of every table under the keys that TorchRec expects."""
        tables, shard_states, states = self.tables, self.tables.get_optimizer_state(), {}
        for name, numbers in self._shards.items():
            state = states[self._weights[name]] = {f"{name}.step": tables.steps[numbers[0]]}
            for buffer in tables.flat_state:
                parts = [shard_states[n][buffer] for n in numbers]
                per_row = buffer in tables.per_row_buffers
                state[f"{name}.{buffer}"] = self._sharded_tensor(parts, numbers, per_row=per_row)
        return states

    def _sharded_tensor(self, parts: list[Tensor], numbers: list[int], *, per_row: bool = False) -> Any:
        """Build the ShardedTensor of a table from its shards on this rank. With `per_row` it has one column."""
        if self.tables.replicas is not None:
            return parts[0]
        shards = [self._config.embedding_tables[n] for n in numbers]
        metadata = copy.deepcopy(shards[0].global_metadata)
        local = [copy.deepcopy(table.local_metadata) for table in shards]
        if per_row:
            metadata.size = torch.Size((metadata.size[0], 1))
            for shard in (*metadata.shards_metadata, *local):
                shard.shard_offsets[1], shard.shard_sizes[1] = 0, 1
        metadata.tensor_properties.dtype = parts[0].dtype
        metadata.tensor_properties.requires_grad = False
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(part, shard) for part, shard in zip(parts, local, strict=True)],
            sharded_tensor_metadata=metadata,
            process_group=self._group,
        )

    def _refresh_state(self) -> None:
        """Replace the state after the tables allocated new buffers."""
        self.state.update(self._states())

    def post_load_state_dict(self) -> None:
        """Copy the step of a table's first shard on this rank, which was loaded, to its other shards.

        The loaded options also apply to the steps that rows have missed.
        """
        for numbers in self._shards.values():
            self.tables.steps[numbers] = self.tables.steps[numbers[0]].item()
        self.tables.adopt_options()

    def step(self, closure: Any = None) -> None:
        """Do nothing: the tables were updated in backward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: the tables have no gradients."""

    def set_optimizer_step(self, step: int) -> None:
        """Set the step of all tables."""
        self.tables.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Change options of the tables' optimizer."""
        self.tables.update_hyper_parameters(params_dict)


def _build_tables(
    kernel: Any, pooling: PoolingMode, group: dist.ProcessGroup | None, device: torch.device | None
) -> None:
    """Give a kernel its tables and their optimizer, from the kernel's configuration."""
    config = kernel._config
    fused_params: dict[str, Any] = config.fused_params or {}
    choice: OptimizerChoice = fused_params[OPTIMIZER_KEY]
    location = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    if device is not None and device.type == "cuda":
        location = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    is_replicated = all(table.global_metadata is None for table in config.embedding_tables)
    if option := choice.per_row_option:
        for table in config.embedding_tables:
            if table.local_cols != table.embedding_dim:
                raise ValueError(
                    f"table {table.name!r} is sharded by columns, and {option} keeps state per row: shard it by rows "
                    "or as a whole (sharding_types in the planner's constraints)"
                )
    kernel._emb_module = Tables(
        [(rows, columns, *location) for rows, columns in zip(kernel._local_rows, kernel._local_cols, strict=True)],
        choice.optimizer,
        dict(choice.options),
        feature_table_map=kernel._feature_table_map,
        table_names=[table.name for table in config.embedding_tables],
        pooling_mode=pooling,
        weights_precision=data_type_to_sparse_type(config.data_type),
        output_dtype=fused_params.get("output_dtype", SparseType.FP32),
        device=device,
        replicas=group if is_replicated else None,
        shard_offsets=[
            (0, 0) if table.local_metadata is None else tuple(table.local_metadata.shard_offsets)
            for table in config.embedding_tables
        ],
        merge=not fused_params.get(BY_TABLE_KEY, False),
    )
    kernel._optim = CadamFusedOptimizer(config, kernel._emb_module, group)
    kernel.init_parameters()


class _Kernel:
    """The common part of both kernels: it marks the parameter of each table as updated in backward."""

    _emb_module: Tables
    _optim: CadamFusedOptimizer

    @property
    def _param_per_table(self) -> dict[str, TableBatchedEmbeddingSlice]:
        return dict(self._parameters_by_table())

    @_param_per_table.setter
    def _param_per_table(self, value: dict[str, TableBatchedEmbeddingSlice]) -> None:
        """Ignore the value: TorchRec's constructor sets the attribute to an empty dictionary."""

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
    """The kernel of tables whose lookups are pooled."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        group: dist.ProcessGroup | None,
        device: torch.device | None,
        sharding_type: ShardingType | None,
    ) -> None:
        BaseBatchedEmbeddingBag.__init__(self, config, group, device, sharding_type)
        _build_tables(self, self._pooling, group, device)


class SequenceKernel(_Kernel, BatchedFusedEmbedding):
    """The kernel of tables whose lookups return one row per id."""

    def __init__(
        self, config: GroupedEmbeddingConfig, group: dist.ProcessGroup | None, device: torch.device | None
    ) -> None:
        BaseBatchedEmbedding.__init__(self, config, group, device)
        _build_tables(self, PoolingMode.NONE, group, device)


def _check_kernel(config: GroupedEmbeddingConfig) -> None:
    """Raise an error for tables that the plan gives an unsupported kernel or layout.

    All tables are updated in backward. TorchRec calls the kernel of replicated tables `dense`, that of others `fused`.
    """
    is_replicated = all(table.global_metadata is None for table in config.embedding_tables)
    expected = EmbeddingComputeKernel.DENSE if is_replicated else EmbeddingComputeKernel.FUSED
    for table in config.embedding_tables:
        if table.compute_kernel not in (expected, EmbeddingComputeKernel.FUSED):
            raise ValueError(
                f"table {table.name!r}: the plan asks for the compute kernel {table.compute_kernel.value!r}, but "
                f"cadam.torchrec only supports {expected.value!r}; set compute_kernels=[{expected.value!r}] in the "
                "planner's constraints"
            )
    if any(table.dtensor_metadata is not None for table in config.embedding_tables):
        raise NotImplementedError("tables as DTensor (output_dtensor=True) are not supported")


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """The lookup of pooled rows."""

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
        """The lookup itself. TorchRec reads `module` of a replicated lookup, which it expects to be wrapped by DDP."""
        return self


class SequenceLookup(GroupedEmbeddingsLookup):
    """The lookup of one row per id."""

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
        """The lookup itself. TorchRec reads `module` of a replicated lookup, which it expects to be wrapped by DDP."""
        return self
