"""Sharders: give one to DistributedModelParallel, and its tables are updated in backward by the chosen optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
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
from .kernels import BY_TABLE, CHOICE, Choice, PooledLookup, SequenceLookup
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
    """TorchRec's sharded EmbeddingBagCollection with our tables in it."""

    _output_dists: list[nn.Module]
    _has_mean_pooling_callback: bool

    def _create_lookups(self) -> None:
        for sharding in self._embedding_shardings:
            _check(sharding, POOLED)
            rows = isinstance(sharding, RwPooledEmbeddingSharding)
            self._lookups.append(
                PooledLookup(
                    sharding._grouped_embedding_configs,
                    device=sharding._device,
                    pg=sharding._env.process_group,
                    scale_weight_gradients=not isinstance(sharding, REPLICATED),
                    sharding_type=ShardingType.ROW_WISE if rows else None,
                    env=sharding._env,
                )
            )

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """TorchRec's divisor of means fails on a batch without samples, which a rank may have: nothing to divide."""
        if not self._has_mean_pooling_callback or not _is_empty(features):
            return super().input_dist(ctx, features)
        first, self._has_mean_pooling_callback = self._has_uninitialized_input_dist, False
        try:
            sent = super().input_dist(ctx, features)
        finally:
            self._has_mean_pooling_callback = True
        if first:
            self._init_mean_pooling_callback(features.keys(), ctx.inverse_indices)
        ctx.divisor = torch.ones(0, sum(self._embedding_dims), device=features.device())
        return sent

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        self._output_dists = [
            _even(way) if isinstance(way, RwPooledEmbeddingDist) else way for way in self._output_dists
        ]

    def init_data_parallel(self) -> None:
        _replicate(zip(self._embedding_shardings, self._lookups, strict=True))


class EvenRows(RwPooledEmbeddingDist):
    """Adds up the parts of pooled rows with gloo, which can do that for batches of one length on all ranks only.

    Shorter ones are filled up with zeros on the way.
    """

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> Any:
        sizes = sharding_ctx.batch_size_per_rank if sharding_ctx is not None else []
        if len(set(sizes)) < 2:
            return super().forward(local_embs, sharding_ctx)
        longest, own = max(sizes), sizes[dist.get_rank(self._pg)]
        parts = [nn.functional.pad(part, (0, 0, 0, longest - len(part))) for part in torch.split(local_embs, sizes)]
        result = super().forward(torch.cat(parts))
        result.callbacks.append(lambda rows: rows[:own])
        return result


def _even(way: nn.Module) -> nn.Module:
    if not isinstance(way, RwPooledEmbeddingDist) or dist.get_backend(way._pg) != "gloo":
        return way
    return EvenRows(way._pg, way._embedding_dims, way._qcomm_codecs_registry)


def _is_empty(features: Any) -> bool:
    """Whether this rank's batch has no samples."""
    return isinstance(features, KeyedJaggedTensor) and features.stride() == 0


class ShardedSequences(ShardedEmbeddingCollection):
    """TorchRec's sharded EmbeddingCollection with our tables in it."""

    def input_dist(self, ctx: Any, features: Any) -> Any:
        if _is_empty(features):
            raise ValueError(
                "an EmbeddingCollection was given a batch without samples, which TorchRec cannot look up in it: give "
                "it a sample without ids, and take that out of the result"
            )
        return super().input_dist(ctx, features)

    def _create_lookups(self) -> None:
        for sharding in self._sharding_type_to_sharding.values():
            _check(sharding, SEQUENCE)
            self._lookups.append(
                SequenceLookup(
                    sharding._grouped_embedding_configs,
                    pg=sharding._env.process_group,
                    device=sharding._device,
                    env=sharding._env,
                )
            )

    def init_data_parallel(self) -> None:
        _replicate(zip(self._sharding_type_to_sharding.values(), self._lookups, strict=True))


def _check(sharding: Any, known: tuple[type, ...]) -> None:
    if not issubclass(type(sharding), known):
        allowed = ", ".join(SHARDING_TYPES)
        raise NotImplementedError(f"{type(sharding).__name__} is not supported; sharding types are {allowed}")
    if isinstance(sharding, REPLICATED) and not hasattr(ShardedEmbeddingBagCollection, "init_data_parallel"):
        raise NotImplementedError("data_parallel tables need TorchRec 1.8.0: an older one wraps them before we can")
    if isinstance(sharding._env, ShardingEnv2D):
        raise NotImplementedError("DMPCollection (2D parallelism) is not supported; use DistributedModelParallel")


def _replicate(lookups: Iterable[tuple[Any, nn.Module]]) -> None:
    """Start replicated tables equal on all ranks, as DistributedDataParallel does; they stay so by equal updates."""
    for sharding, lookup in lookups:
        if isinstance(sharding, REPLICATED):
            for tables in _tables(lookup):
                dist.broadcast(tables.memory(), group=tables.replicas, group_src=0)
                seed = torch.tensor(tables.seed, device=tables.memory().device)
                dist.broadcast(seed, group=tables.replicas, group_src=0)
                tables.set_seed(int(seed))


class _Sharder:
    """What both sharders do alike."""

    fused_params: dict[str, Any]

    def sharding_types(self, compute_device_type: str) -> list[str]:
        whole_rows = self.fused_params[CHOICE].by_row is not None
        return [kind for kind in SHARDING_TYPES if not (whole_rows and kind == ShardingType.COLUMN_WISE.value)]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Always fused; replicated tables go by the name under which TorchRec's planner knows them."""
        replicated = sharding_type == ShardingType.DATA_PARALLEL.value
        return [(EmbeddingComputeKernel.DENSE if replicated else EmbeddingComputeKernel.FUSED).value]


class BagSharder(_Sharder, EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection whose tables `optimizer` updates in backward.

    Args:
        optimizer: a class of the catalogue.
        options: its options, such as ``lr``. The learning rate can be scheduled through the ``param_groups`` of the
            sharded model's ``fused_optimizer``.
        by_table: update tables one by one, which is slower, and count the alignment ratio of each. By default those
            with rows of one length are updated and counted together.
        output_dtype: dtype of the embeddings that a lookup returns (FBGEMM's SparseType); FP32 by default.
        qcomm_codecs_registry: TorchRec's quantized communication.
    """

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

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedBags:
        return ShardedBags(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )


class SequenceSharder(_Sharder, EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection, which gives a row for each id; arguments as for `BagSharder`.

    `use_index_dedup` sends every id once.
    """

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

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedSequences:
        return ShardedSequences(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )


def _fused_params(
    optimizer: type[Optimizer], options: dict[str, Any], by_table: bool, output_dtype: Any
) -> dict[str, Any]:
    chosen: dict[str, Any] = {CHOICE: Choice.of(optimizer, options), BY_TABLE: by_table}
    return chosen if output_dtype is None else {**chosen, "output_dtype": output_dtype}


def _tables(lookup: Any) -> Iterator[Tables]:
    for kernel in lookup._emb_modules:
        yield kernel.emb_module


def tables_of(model: nn.Module) -> Iterator[Tables]:
    """The tables of this rank, group by group; `model.modules()` does not show them."""
    for module in model.modules():
        if isinstance(module, (ShardedBags, ShardedSequences)):
            for lookup in module._lookups:
                yield from _tables(lookup)


def table_names(model: nn.Module) -> list[list[str]]:
    """By collection, the names of its tables, of those on other ranks too."""
    collections = (m for m in model.modules() if isinstance(m, (ShardedBags, ShardedSequences)))
    return [list(dict.fromkeys(collection.module_sharding_plan)) for collection in collections]


def warn_of_plain_collections(model: nn.Module) -> None:
    """Warn of collections that no sharder has taken: each rank has them whole, and backward does not update them."""
    kinds = {EmbeddingBagCollection: BagSharder, EmbeddingCollection: SequenceSharder}
    for name, module in model.named_modules():
        if (sharder := kinds.get(type(module))) is not None:
            warnings.warn(
                f"{name or 'the model'} is a plain {type(module).__name__}, which none of the sharders took: its "
                f"tables are parameters of the dense part. Give DistributedModelParallel a {sharder.__name__} too",
                stacklevel=3,
            )


def alignment(model: nn.Module, *, reset: bool = False) -> Alignment:
    """The alignment ratio on this rank; ``alignment(model).over_ranks()`` is that of all ranks.

    There a replicated table counts once. Reading waits for the device, counting never does.
    """
    warn_of_plain_collections(model)
    ratios: dict[str, Ratio] = {}
    copied: dict[str, bool] = {}  # by name; two collections may have a table of one name
    for tables in tables_of(model):
        for name, ratio in tables.alignment(reset=reset).items():
            ratios[name] = ratios.get(name, Ratio(0, 0, 0)) + ratio
            copied[name] = copied.get(name, True) and tables.replicas is not None
    total = sum(ratios.values(), Ratio(0, 0, 0))
    return Alignment(total, (total,), ratios, {name: 0 for name, whole in copied.items() if whole})
