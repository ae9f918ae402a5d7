"""Sharders for DistributedModelParallel whose tables are updated in backward by an optimizer of cadam."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist, RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv, ShardingEnv2D, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..optim.alignment import Alignment, Ratio
from ..optim.classes import CAdam
from ..optim.optimizer import Optimizer
from .kernels import BY_TABLE_KEY, OPTIMIZER_KEY, OptimizerChoice, PooledLookup, SequenceLookup
from .tables import Tables

SHARDING_TYPES = ("data_parallel", "table_wise", "row_wise", "column_wise")
REPLICATED = (DpPooledEmbeddingSharding, DpSequenceEmbeddingSharding)
POOLED = (TwPooledEmbeddingSharding, CwPooledEmbeddingSharding, RwPooledEmbeddingSharding, DpPooledEmbeddingSharding)
SEQUENCE = (
    TwSequenceEmbeddingSharding,
    CwSequenceEmbeddingSharding,
    RwSequenceEmbeddingSharding,
    DpSequenceEmbeddingSharding,
)


class ShardedBags(ShardedEmbeddingBagCollection):
    """TorchRec's sharded EmbeddingBagCollection, with the tables of this package."""

    _output_dists: list[nn.Module]
    _has_mean_pooling_callback: bool

    def _create_lookups(self) -> None:
        for sharding in self._embedding_shardings:
            _check_supported(sharding, POOLED)
            is_row_wise = isinstance(sharding, RwPooledEmbeddingSharding)
            self._lookups.append(
                PooledLookup(
                    sharding._grouped_embedding_configs,
                    device=sharding._device,
                    pg=sharding._env.process_group,
                    scale_weight_gradients=not isinstance(sharding, REPLICATED),
                    sharding_type=ShardingType.ROW_WISE if is_row_wise else None,
                    env=sharding._env,
                )
            )

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Send the ids to the ranks that have their rows.

        TorchRec computes the divisor of mean pooling even for a batch without samples, which a rank may have, and
        fails. For such a batch the computation is turned off, and the divisor is an empty tensor.
        """
        if not self._has_mean_pooling_callback or not _is_empty(features):
            return super().input_dist(ctx, features)
        is_first_batch, self._has_mean_pooling_callback = self._has_uninitialized_input_dist, False
        try:
            sent = super().input_dist(ctx, features)
        finally:
            self._has_mean_pooling_callback = True
        if is_first_batch:
            self._init_mean_pooling_callback(features.keys(), ctx.inverse_indices)
        ctx.divisor = torch.ones(0, sum(self._embedding_dims), device=features.device())
        return sent

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        self._output_dists = [_pad_for_gloo(module) for module in self._output_dists]

    def init_data_parallel(self) -> None:
        """Make replicated tables equal on all ranks."""
        _broadcast_replicas(zip(self._embedding_shardings, self._lookups, strict=True))


class PaddedRowWiseDist(RwPooledEmbeddingDist):
    """Row-wise output distribution for gloo, which can only sum batches of the same size on all ranks.

    Smaller batches are padded with zeros, and the padding is removed from the result.
    """

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> Any:
        """Sum the parts of pooled rows over the ranks."""
        sizes = sharding_ctx.batch_size_per_rank if sharding_ctx is not None else []
        if len(set(sizes)) < 2:
            return super().forward(local_embs, sharding_ctx)
        largest, own = max(sizes), sizes[dist.get_rank(self._pg)]
        parts = [nn.functional.pad(part, (0, 0, 0, largest - len(part))) for part in torch.split(local_embs, sizes)]
        result = super().forward(torch.cat(parts))
        result.callbacks.append(lambda rows: rows[:own])
        return result


def _pad_for_gloo(module: nn.Module) -> nn.Module:
    """Replace a row-wise output distribution over gloo by one that pads batches."""
    if not isinstance(module, RwPooledEmbeddingDist) or dist.get_backend(module._pg) != "gloo":
        return module
    return PaddedRowWiseDist(module._pg, module._embedding_dims, module._qcomm_codecs_registry)


def _is_empty(features: Any) -> bool:
    """Whether this rank's batch has no samples."""
    return isinstance(features, KeyedJaggedTensor) and features.stride() == 0


class ShardedSequences(ShardedEmbeddingCollection):
    """TorchRec's sharded EmbeddingCollection, with the tables of this package."""

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Send the ids to the ranks that have their rows."""
        if _is_empty(features):
            raise ValueError(
                "an EmbeddingCollection got a batch without samples, which TorchRec cannot look up: add a sample "
                "without ids, and remove it from the result"
            )
        return super().input_dist(ctx, features)

    def _create_lookups(self) -> None:
        for sharding in self._sharding_type_to_sharding.values():
            _check_supported(sharding, SEQUENCE)
            self._lookups.append(
                SequenceLookup(
                    sharding._grouped_embedding_configs,
                    pg=sharding._env.process_group,
                    device=sharding._device,
                    env=sharding._env,
                )
            )

    def init_data_parallel(self) -> None:
        """Make replicated tables equal on all ranks."""
        _broadcast_replicas(zip(self._sharding_type_to_sharding.values(), self._lookups, strict=True))


def _check_supported(sharding: Any, supported: tuple[type, ...]) -> None:
    """Raise NotImplementedError for a sharding that this package does not support."""
    if not issubclass(type(sharding), supported):
        allowed = ", ".join(SHARDING_TYPES)
        raise NotImplementedError(f"{type(sharding).__name__} is not supported; sharding types are {allowed}")
    if isinstance(sharding, REPLICATED) and not hasattr(ShardedEmbeddingBagCollection, "init_data_parallel"):
        raise NotImplementedError("data_parallel tables need TorchRec 1.8.0: older releases wrap them in DDP")
    if isinstance(sharding._env, ShardingEnv2D):
        raise NotImplementedError("DMPCollection (2D parallelism) is not supported; use DistributedModelParallel")


def _broadcast_replicas(lookups: Iterable[tuple[Any, nn.Module]]) -> None:
    """Copy the replicated tables from rank 0, as DistributedDataParallel does.

    They stay equal, because all ranks make the same updates.
    """
    for sharding, lookup in lookups:
        if isinstance(sharding, REPLICATED):
            for tables in _tables_of_lookup(lookup):
                dist.broadcast(tables.flat_weights(), group=tables.replicas, group_src=0)


class _Sharder:
    """The common part of both sharders."""

    sharded_class: type[nn.Module]
    sharded_options: Mapping[str, Any] = {}
    """Further arguments of the sharded class."""
    fused_params: dict[str, Any]
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Build the sharded module from the plan; TorchRec calls this."""
        return self.sharded_class(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **self.sharded_options,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """List the sharding types that the planner may use. State per row excludes sharding by columns."""
        has_row_state = self.fused_params[OPTIMIZER_KEY].per_row_option is not None
        return [kind for kind in SHARDING_TYPES if not (has_row_state and kind == ShardingType.COLUMN_WISE.value)]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """List the compute kernels: `fused`, or for replicated tables `dense` in the planner's terms."""
        is_replicated = sharding_type == ShardingType.DATA_PARALLEL.value
        return [(EmbeddingComputeKernel.DENSE if is_replicated else EmbeddingComputeKernel.FUSED).value]


class BagSharder(_Sharder, EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection whose tables are updated in backward.

    Args:
        optimizer: an optimizer class of cadam.
        by_table: update each table separately, which is slower, and count the alignment ratio of each. By default
            tables of the same width are updated and counted together.
        output_dtype: the dtype of the embeddings that a lookup returns (FBGEMM's SparseType); FP32 by default.
        qcomm_codecs_registry: TorchRec's quantized communication.
        **options: options of the optimizer, such as `lr`. The learning rate can be scheduled through the
            `param_groups` of the sharded model's `fused_optimizer`.

    Example:
        ```python
        model = DistributedModelParallel(module, sharders=[BagSharder(cadam.CAdam, lr=1e-3)])
        ```
    """

    sharded_class = ShardedBags

    def __init__(
        self,
        optimizer: type[Optimizer] = CAdam,
        *,
        by_table: bool = False,
        output_dtype: Any = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(_fused_params(optimizer, options, by_table, output_dtype), qcomm_codecs_registry)


class SequenceSharder(_Sharder, EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection, which returns one row per id. Its tables are updated in backward.

    Args:
        optimizer: an optimizer class of cadam.
        by_table: see `BagSharder`.
        output_dtype: see `BagSharder`.
        qcomm_codecs_registry: TorchRec's quantized communication.
        use_index_dedup: send every id only once.
        **options: options of the optimizer, such as `lr`.
    """

    sharded_class = ShardedSequences

    def __init__(
        self,
        optimizer: type[Optimizer] = CAdam,
        *,
        by_table: bool = False,
        output_dtype: Any = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            _fused_params(optimizer, options, by_table, output_dtype), qcomm_codecs_registry, use_index_dedup
        )
        self.sharded_options = {"use_index_dedup": use_index_dedup}


def _fused_params(
    optimizer: type[Optimizer], options: dict[str, Any], by_table: bool, output_dtype: Any
) -> dict[str, Any]:
    params: dict[str, Any] = {OPTIMIZER_KEY: OptimizerChoice.of(optimizer, options), BY_TABLE_KEY: by_table}
    return params if output_dtype is None else {**params, "output_dtype": output_dtype}


def _tables_of_lookup(lookup: Any) -> Iterator[Tables]:
    for kernel in lookup._emb_modules:
        yield kernel.emb_module


def iter_tables(model: nn.Module) -> Iterator[Tables]:
    """Yield the tables of this rank, one object per group of tables. `model.modules()` does not contain them."""
    for module in model.modules():
        if isinstance(module, (ShardedBags, ShardedSequences)):
            for lookup in module._lookups:
                yield from _tables_of_lookup(lookup)


def table_names(model: nn.Module) -> list[list[str]]:
    """List the names of the tables of each collection, including tables on other ranks."""
    collections = (module for module in model.modules() if isinstance(module, (ShardedBags, ShardedSequences)))
    return [list(dict.fromkeys(collection.module_sharding_plan)) for collection in collections]


def warn_about_unsharded_collections(model: nn.Module) -> None:
    """Warn about collections without a sharder, which are not sharded and not updated in backward.

    Args:
        model: the sharded model.
    """
    sharders = {EmbeddingBagCollection: BagSharder, EmbeddingCollection: SequenceSharder}
    for name, module in model.named_modules():
        if (sharder := sharders.get(type(module))) is not None:
            warnings.warn(
                f"{name or 'the model'} is a plain {type(module).__name__}, which no sharder has replaced: its tables "
                f"are parameters of the dense part. Give DistributedModelParallel a {sharder.__name__} too",
                stacklevel=3,
            )


def alignment(model: nn.Module, *, reset: bool = False) -> Alignment:
    """Return the alignment ratio of the tables on this rank.

    `alignment(model).over_ranks()` is the ratio over all ranks, in which a replicated table counts once. Counting does
    not synchronize with the device; this function does.

    Args:
        model: the sharded model.
        reset: set the counts to zero afterwards.

    Returns:
        The ratio of all tables, and by table.
    """
    warn_about_unsharded_collections(model)
    ratios: dict[str, Ratio] = {}
    is_replicated: dict[str, bool] = {}
    for tables in iter_tables(model):
        for name, ratio in tables.alignment(reset=reset).items():
            # Two collections may have a table of the same name.
            ratios[name] = ratios.get(name, Ratio(0, 0, 0)) + ratio
            is_replicated[name] = is_replicated.get(name, True) and tables.replicas is not None
    total = sum(ratios.values(), Ratio(0, 0, 0))
    return Alignment(total, (total,), ratios, {name: 0 for name, replicated in is_replicated.items() if replicated})
