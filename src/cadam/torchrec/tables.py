"""The embedding tables of one rank: FBGEMM's lookup with a backward that updates rows with cadam's engines.

FBGEMM looks up rows of many tables at once. Its own backward supports few optimizers, on the CPU not even Adam, so it
is not used. Here, backward distributes the gradient of each pooled bag to the rows of the bag, and
`cadam.optim.sparse_update` updates these rows in place. Nothing of the size of a table is allocated, and on CUDA no
step synchronizes with the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from ..engines import moment_state
from ..engines.cuda.sparse_grad import Bags
from ..engines.huge_pages import filled_like
from ..optim import alignment
from ..optim.alignment import Ratio
from ..optim.optimizer import Optimizer
from ..optim.options import describe_unknown
from ..optim.sparse_update import RowUpdate, new_state
from ..rules.moment_storage import SEED, STORAGE_DEFAULTS
from ..rules.sparse_updates import AGING_OPTIONS, LAST_STEPS, aging_options

Specs = Sequence[tuple[int, int, EmbeddingLocation, ComputeDevice]]
"""Rows, columns, memory location and compute device of each table."""
STATE_OPTIONS: Mapping[str, Any] = {**STORAGE_DEFAULTS, "sparse_updates": "lazy", "confidence_after": 0}
"""The options that the form of the state depends on, with their defaults."""
MAX_TRACKED_STEPS = 256
"""Steps after which the changed rows of all steps are merged, to bound the memory they take."""


@dataclass(frozen=True)
class TableGroup:
    """Adjacent tables of the same width. In memory they form one table, which one call updates."""

    tables: range
    """The numbers of the tables."""
    features: range
    """The numbers of the features that are looked up in these tables."""
    first_rows: Tensor
    """The first row of the table of each feature, counted within the group."""
    update: RowUpdate
    """The optimizer step of the group."""


@dataclass(frozen=True)
class Lookup:
    """The ids of one lookup and how they are distributed over the table groups."""

    ids: Tensor
    offsets: Tensor
    """The start of each bag in `ids`, ordered by feature and then by sample, and the end of the last bag."""
    batch: int
    """The number of samples."""
    groups: list[TableGroup]
    parts: list[slice]
    """The part of `ids` that belongs to each group."""
    sizes: list[list[int]]
    """The number of ids of each group (second index), for each rank that holds a copy of the tables (first index)."""


@dataclass(frozen=True)
class GroupIds:
    """The ids of one lookup in one table group."""

    rows: Tensor
    """The row of each id within the group."""
    bags: Tensor | None
    """The bag of each id, numbered as the gradients are; None without pooling."""
    lengths: Tensor | None
    """The number of ids in the bag of each id, for mean pooling; None otherwise."""


class Tables(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's table-batched embeddings, updated in backward by an optimizer of cadam.

    Each backward is one optimizer step. The options are those of a parameter group and may change between steps.

    Args:
        specs: rows, columns, location and device of each table.
        optimizer: an optimizer class of cadam.
        options: all options of the optimizer.
        feature_table_map: the number of the table of each feature, in ascending order.
        table_names: the names of the tables. Shards of one table have the same name.
        pooling_mode: how the rows of a bag are combined; NONE returns one row per id.
        weights_precision: the dtype of the tables: FP32, BF16 or FP16.
        output_dtype: the dtype of the result of a lookup.
        device: the device of the tables.
        replicas: the process group whose ranks each hold a copy of these tables (data parallel). All of them make the
            same update, with the mean of their gradients. None: there are no copies.
        shard_offsets: the first row and column of each shard in its whole table; by default (0, 0).
        merge: update tables of the same width in one call, which is faster. Their alignment ratio is then counted
            together. Without it, a lookup on CUDA synchronizes with the device to find the ids of each table.
    """

    def __init__(
        self,
        specs: Specs,
        optimizer: type[Optimizer],
        options: dict[str, Any],
        *,
        feature_table_map: list[int],
        table_names: list[str],
        pooling_mode: PoolingMode = PoolingMode.SUM,
        weights_precision: SparseType = SparseType.FP32,
        output_dtype: SparseType = SparseType.FP32,
        device: torch.device | None = None,
        replicas: dist.ProcessGroup | None = None,
        shard_offsets: Sequence[tuple[int, int]] | None = None,
        merge: bool = True,
    ) -> None:
        for name, (_, _, location, _) in zip(table_names, specs, strict=True):
            if location not in (EmbeddingLocation.HOST, EmbeddingLocation.DEVICE):
                raise ValueError(
                    f"table {name!r} is placed in {location.name}; tables must be in HOST or DEVICE memory"
                )
        if weights_precision not in (SparseType.FP32, SparseType.BF16, SparseType.FP16):
            raise ValueError(f"tables {table_names} are in {weights_precision}; FP32, BF16 and FP16 are supported")
        if feature_table_map != sorted(feature_table_map):
            raise ValueError(f"the features of a table must be adjacent, got the tables {feature_table_map}")
        if pooling_mode == PoolingMode.NONE and len({spec[1] for spec in specs}) > 1:
            raise ValueError(f"tables {table_names} are looked up without pooling, so they must have the same width")
        super().__init__(
            list(specs),
            feature_table_map=feature_table_map,
            pooling_mode=pooling_mode,
            weights_precision=weights_precision,
            output_dtype=output_dtype,
            optimizer=EmbOptimType.EXACT_SGD,  # never used; it is FBGEMM's only optimizer without state
            stochastic_rounding=False,
            # FBGEMM checks the precision of the cache even though there is no cache here.
            cache_precision=SparseType.FP32 if weights_precision == SparseType.BF16 else None,
            bounds_check_mode=BoundsCheckMode.FATAL,
            device=device,
            table_names=table_names,
        )
        self.optimizer_class, self.options, self.replicas = optimizer, options, replicas
        self.output_dtype_as_torch: torch.dtype = output_dtype.as_dtype()
        # Allocate the weights again in huge pages.
        self.weights_host.data = filled_like(self.weights_host, 0.0, self.weights_host.dtype)
        self._merge = merge
        self.on_state_replaced: Callable[[], None] = lambda: None
        """Called after `set_storage` has allocated new state."""
        self._allocate_state()
        self.steps = torch.zeros(len(specs), dtype=torch.float64)
        """The number of steps that each table has taken."""
        widths = (specs[table][1] for table in feature_table_map)
        self._columns = [0, *accumulate(widths)]
        """The first column of each feature in the result of a pooled lookup, and the end of the last one."""
        self.shard_offsets = [(0, 0)] * len(specs) if shard_offsets is None else list(shard_offsets)
        self._groups = self._build_groups(merge)
        heights = (spec[0] for spec in specs)
        self._first_rows = torch.tensor([0, *accumulate(heights)], device=self.flat_weights().device)
        """The first row of each table, counted over all tables, and the end of the last one."""
        self._changed_rows: list[Tensor] | None = None
        """The rows that each recent step has changed, counted over all tables; None while tracking is off."""

    # Memory -----------------------------------------------------------------------------------------------

    def flat_weights(self) -> Tensor:
        """Return the memory of all tables, one after the other, as a flat tensor."""
        return self._weights().detach().reshape(-1)

    def _weights(self) -> Tensor:
        weights: Tensor = self.weights_host if self.weights_host.numel() else self.weights_dev
        return weights

    def split_by_table(self, flat: Tensor, *, per_row: bool = False) -> list[Tensor]:
        """Split a flat tensor of all tables into one matrix per table. With `per_row` it has one value per row."""
        shapes = [(rows, 1 if per_row else columns) for rows, columns, _, _ in self.embedding_specs]
        parts = torch.split(flat, [rows * columns for rows, columns in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _allocate_state(self) -> None:
        """Allocate the optimizer state as the options ask for: flat buffers in the order of the tables."""
        weights, options = self.flat_weights(), {**self.options}
        options.pop("params", None)
        example = new_state(weights.new_zeros(1, 2), self.optimizer_class, **options)
        self.is_quantized = example.pop(SEED, None) is not None
        self.initial_values = {name: buffer.flatten()[0].item() for name, buffer in example.items()}
        """The value of each buffer in a new row."""
        self.per_row_buffers = frozenset(name for name, buffer in example.items() if buffer.numel() == 1)
        """The buffers with one value per row."""
        rows = weights.new_empty(sum(spec[0] for spec in self.embedding_specs))
        self.flat_state = {
            name: filled_like(rows if name in self.per_row_buffers else weights, self.initial_values[name], one.dtype)
            for name, one in example.items()
        }

    def set_storage(self, **storage: Any) -> None:
        """Change how the moments are stored, and convert their values.

        Quantized values are rounded to the nearest. Second moments of elements become the mean of their row; second
        moments of rows are copied to all elements. Counts of the updates of rows start at zero. Rows that have missed
        steps make up for them before their updates become lazy.

        Args:
            storage: the options of the optimizer that the form of the state depends on, `STATE_OPTIONS`.
        """
        if all(self.options[name] == value for name, value in storage.items()):
            return
        old_states, rule = self.get_optimizer_state(), self.optimizer_class.rule
        if LAST_STEPS in self.flat_state:
            aged_by = torch.tensor(aging_options(rule, self.options), dtype=torch.float64, device="cpu")
            old_states = [{**state, AGING_OPTIONS: aged_by} for state in old_states]
        old_states = [{**state, "step": step} for state, step in zip(old_states, self.steps, strict=True)]
        if self.is_quantized:
            old_states = [{**state, SEED: moment_state.new_seed(self.options, 0)} for state in old_states]
        self.options.update(storage)
        self._allocate_state()
        dtype = torch.bfloat16 if self.options["moments"] == "bfloat16" else torch.float32
        tables, new_states = self.split_by_table(self.flat_weights()), self.get_optimizer_state()
        for table, old_state, new_state_of_table in zip(tables, old_states, new_states, strict=True):
            moment_state.complete_state(old_state, table, rule, self.options, dtype, rows=True)
            for name, buffer in new_state_of_table.items():
                buffer.copy_(old_state[name])
        self._groups = self._build_groups(self._merge)
        self.on_state_replaced()

    def adopt_options(self) -> None:
        """Use the present options also for the steps that rows have missed, as after loading a checkpoint."""
        for group in self._groups:
            group.update.adopt_options()

    def _build_groups(self, merge: bool) -> list[TableGroup]:
        """Form groups of adjacent tables: those of the same width with `merge`, else one group per table."""
        weights, groups, start, first_row = self.flat_weights(), [], 0, 0
        self._address = weights.data_ptr()
        widths = [spec[1] for spec in self.embedding_specs]
        for tables in _equal_runs(widths if merge else range(len(widths))):
            heights, width = [self.embedding_specs[t][0] for t in tables], widths[tables[0]]
            features = [f for f, t in enumerate(self.feature_table_map) if t in tables]
            row_of_table = dict(zip(tables, [0, *accumulate(heights)], strict=False))
            elements = slice(start, start := start + sum(heights) * width)
            rows = slice(first_row, first_row := first_row + sum(heights))
            state = {
                name: buffer[rows].view(-1, 1) if name in self.per_row_buffers else buffer[elements].view(-1, width)
                for name, buffer in self.flat_state.items()
            }
            if self.is_quantized:
                # Replicas have the same name and offset, so they round alike. Other shards have other offsets.
                shard = f"{self.table_names[tables[0]]} {self.shard_offsets[tables[0]]}"
                state[SEED] = moment_state.new_seed(self.options, zlib.crc32(shard.encode()))
            update = RowUpdate(
                weights[elements].view(-1, width),
                state,
                self.optimizer_class,
                self.options,
                counts=alignment.new_counts(weights.device) if self.options["track_alignment"] else None,
                name=f"table {self._names(tables)}",
            )
            first_rows = [row_of_table[self.feature_table_map[f]] for f in features]
            groups.append(
                TableGroup(
                    tables,
                    range(features[0], features[-1] + 1),
                    torch.tensor(first_rows, device=weights.device),
                    update,
                )
            )
        return groups

    def _names(self, tables: range) -> str:
        return ", ".join(dict.fromkeys(self.table_names[t] for t in tables))

    # Lookup and update ------------------------------------------------------------------------------------

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        **fbgemm_options: Any,
    ) -> Tensor:
        """Look up rows with FBGEMM. Backward updates the tables; see `update`."""
        if feature_requires_grad is not None or batch_size_per_feature_per_rank is not None:
            raise NotImplementedError(
                f"tables {self.table_names}: feature_requires_grad and batch sizes per feature are not supported; "
                "give every feature the same batch"
            )
        if indices.device.type == "cpu" and len(indices):
            self._check_ids(indices, offsets)
        if not torch.is_grad_enabled():
            return self.look_up(indices, offsets, per_sample_weights, fbgemm_options)
        # Autograd calls backward only if an input requires a gradient, and the tables are not inputs.
        placeholder = self.placeholder_autograd_tensor
        result: Tensor = _LookupFunction.apply(  # type: ignore[no-untyped-call]
            placeholder, self, indices, offsets, per_sample_weights, fbgemm_options
        )
        return result

    def _check_ids(self, indices: Tensor, offsets: Tensor) -> None:
        """Raise IndexError for ids outside of their table. Features are checked one by one only if necessary."""
        smallest, largest = (int(x) for x in indices.aminmax())
        heights = [self.embedding_specs[table][0] for table in self.feature_table_map]
        if smallest >= 0 and largest < min(heights):
            return
        batch = (len(offsets) - 1) // len(heights)
        ends = offsets[::batch].tolist()
        for table, rows, (start, end) in zip(self.feature_table_map, heights, pairwise(ends), strict=True):
            if start == end:
                continue
            smallest, largest = (int(x) for x in indices[start:end].aminmax())
            if smallest < 0 or largest >= rows:
                wrong = smallest if smallest < 0 else largest
                first_row = self.shard_offsets[table][0]
                shard = f" in the shard that starts at row {first_row} (ids count from there)" if first_row else ""
                raise IndexError(f"table {self.table_names[table]!r}: id {wrong} is not one of its {rows} rows{shard}")

    def look_up(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, fbgemm_options: Mapping[str, Any]
    ) -> Tensor:
        """Look up rows without gradients."""
        if self.weights_precision == SparseType.BF16:
            indices, offsets, weights, _ = self.prepare_inputs(indices, offsets, weights)
            return self.pool_rows(self.describe_lookup(indices, offsets), weights)
        result: Tensor = super().forward(indices, offsets, weights, **fbgemm_options)
        return result

    @torch.no_grad()
    def update(self, grad: Tensor, lookup: Lookup, weights: Tensor | None, *, weights_need_grad: bool) -> Tensor | None:
        """Take one optimizer step: update every row of a lookup.

        Args:
            grad: the gradient of the result of the lookup.
            lookup: the ids of the lookup.
            weights: the weight of each id, if the lookup had weights.
            weights_need_grad: whether to compute the gradient of the weights.

        Returns:
            The gradient of the weights, or None.
        """
        if self._weights().data_ptr() != self._address:
            raise RuntimeError(
                f"the memory of the tables {self.table_names} was moved; create them on their final device"
            )
        weight_grads, steps = [], self.steps.numpy()
        for number, group in enumerate(lookup.groups):
            part, step = lookup.parts[number], int(steps[group.tables[0]]) + 1
            if weights is None and self.replicas is None and self._update_with_bags(group, lookup, part, grad, step):
                if self._changed_rows is not None:
                    self._record_changes(group.tables[0], self._group_ids(group, lookup, number).rows)
                continue
            ids = self._group_ids(group, lookup, number)
            rows, grads = ids.rows, self._row_grads(group, ids, part, grad)
            if weights is not None:
                if weights_need_grad:
                    weight_grads.append((group.update.table.index_select(0, rows) * grads).sum(1))
                grads = grads * weights[part].unsqueeze(1)
            if self.replicas is not None:
                sizes = [sizes_of_rank[number] for sizes_of_rank in lookup.sizes]
                rows = _gather_rows(rows, sizes, self.replicas)
                grads = _gather_rows(grads / len(sizes), sizes, self.replicas)
            group.update(rows, grads, step=step)
            self._record_changes(group.tables[0], rows)
        steps += 1
        return torch.cat(weight_grads) if weights_need_grad else None

    def _update_with_bags(self, group: TableGroup, lookup: Lookup, part: slice, grad: Tensor, step: int) -> bool:
        """Update a group with the gradients of its bags, without copying them to rows. False if no engine can."""
        if self.pooling_mode == PoolingMode.NONE or not group.update.takes_bags(grad.dtype):
            return False
        batch, features = lookup.batch, group.features
        ids, offsets, grads = lookup.ids, lookup.offsets, grad
        if len(lookup.groups) > 1:
            ids = ids[part]
            offsets = offsets[features[0] * batch : (features[-1] + 1) * batch + 1]
            grads = grad[:, self._columns[features[0]] : self._columns[features[-1] + 1]]
        if self.pooling_mode == PoolingMode.MEAN:
            lengths = offsets.diff().view(-1, batch).t().unsqueeze(2)
            grads = _widen(grads, group).reshape(batch, len(features), -1) / lengths
        group.update.pooled(ids, Bags(offsets, group.first_rows, batch, part.start), grads.contiguous(), step=step)
        return True

    def _group_ids(self, group: TableGroup, lookup: Lookup, number: int) -> GroupIds:
        """Convert the ids of one group to rows and bags of the group."""
        part, batch, features = lookup.parts[number], lookup.batch, len(group.features)
        rows = lookup.ids[part]
        lengths = lookup.offsets[group.features[0] * batch : (group.features[-1] + 1) * batch + 1].diff()
        bag = torch.repeat_interleave(lengths, output_size=len(rows))  # numbered by feature, then by sample
        feature = bag // batch
        if len(group.tables) > 1:
            # A negative id must stay negative, so that the engine finds it and it does not become a row of the table
            # before.
            rows = torch.where(rows < 0, rows, rows + group.first_rows.index_select(0, feature))
        if self.pooling_mode == PoolingMode.NONE:
            return GroupIds(rows, None, None)
        means = lengths.index_select(0, bag).unsqueeze(1) if self.pooling_mode == PoolingMode.MEAN else None
        # Gradients number their bags by sample: sample * features + feature instead of feature * batch + sample.
        return GroupIds(rows, torch.sub(bag * features, feature, alpha=batch * features - 1), means)

    def _row_grads(self, group: TableGroup, ids: GroupIds, part: slice, grad: Tensor) -> Tensor:
        """Compute the gradient of the row of each id, for a weight of 1, from the gradient of the lookup's result."""
        if ids.bags is None:
            grads = grad[part]
        else:
            pooled = grad[:, self._columns[group.features[0]] : self._columns[group.features[-1] + 1]]
            grads = pooled.reshape(-1, group.update.table.shape[1]).index_select(0, ids.bags)
        grads = _widen(grads, group)
        return grads if ids.lengths is None else grads / ids.lengths

    def pool_rows(self, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """Look up rows with torch operations in float32. FBGEMM has no lookup for bfloat16 on the CPU."""
        results = []
        for number, group in enumerate(lookup.groups):
            ids = self._group_ids(group, lookup, number)
            rows = group.update.table.index_select(0, ids.rows).float()
            rows = rows if weights is None else rows * weights[lookup.parts[number]].unsqueeze(1)
            rows = rows if ids.lengths is None else rows / ids.lengths
            if ids.bags is not None:
                bags = rows.new_zeros(lookup.batch * len(group.features), rows.shape[1])
                rows = bags.index_add_(0, ids.bags, rows).view(lookup.batch, len(group.features) * rows.shape[1])
            results.append(rows)
        result = torch.cat(results, 0 if self.pooling_mode == PoolingMode.NONE else 1)
        return result.to(self.output_dtype_as_torch)

    def describe_lookup(self, ids: Tensor, offsets: Tensor) -> Lookup:
        """Collect what `update` needs to know about a lookup."""
        steps = self.steps.tolist()
        if any(len({steps[t] for t in group.tables}) > 1 for group in self._groups):
            # A checkpoint has given the tables of a group different step counts, so they need separate updates.
            self._groups = self._build_groups(merge=False)
        batch = (len(offsets) - 1) // len(self.feature_table_map)
        parts = [slice(0, len(ids))]
        if len(self._groups) > 1:
            # On CUDA, tolist() synchronizes with the device; tables of different widths cannot avoid it.
            ends = offsets[[(group.features[-1] + 1) * batch for group in self._groups]].tolist()
            parts = [slice(start, end) for start, end in pairwise([0, *ends])]
        sizes = [[part.stop - part.start for part in parts]]
        if self.replicas is not None:
            own_sizes = torch.tensor(sizes[0], device=ids.device)
            ranks = self.replicas.size()
            sizes = _gather_rows(own_sizes, [len(parts)] * ranks, self.replicas).view(-1, len(parts)).tolist()
        return Lookup(ids.long(), offsets, batch, self._groups, parts, sizes)

    # Change tracking ----------------------------------------------------------------------------------------

    def start_tracking(self) -> None:
        """Record from now on which rows are updated or reset."""
        self._changed_rows = []

    def _record_changes(self, table: int, rows: Tensor) -> None:
        """Record changed rows, counted from the first row of a table.

        On CUDA, removing duplicates synchronizes with the device, so it is done once in many steps.
        """
        if self._changed_rows is None:
            return
        rows = rows + sum(spec[0] for spec in self.embedding_specs[:table])
        self._changed_rows.append(rows if rows.is_cuda else torch.unique(rows))
        if len(self._changed_rows) >= MAX_TRACKED_STEPS:
            self._changed_rows = [torch.unique(torch.cat(self._changed_rows))]

    def pop_changes(self) -> list[Tensor]:
        """Return the sorted rows of each table that have changed since the last call."""
        if self._changed_rows is None:
            raise RuntimeError("changes are not tracked: call track_changes(model) before training")
        rows = torch.unique(torch.cat([self._first_rows[:0], *self._changed_rows]))
        self._changed_rows = []
        ends = torch.searchsorted(rows, self._first_rows).tolist()
        parts = [rows[start:end] for start, end in pairwise(ends)]
        return [part - first for part, first in zip(parts, self._first_rows[:-1], strict=True)]

    # The interface that FBGEMM and TorchRec expect -----------------------------------------------------------

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Return the buffers of each table. The step is not one of them, because it has no rows."""
        buffers = {
            name: self.split_by_table(flat, per_row=name in self.per_row_buffers)
            for name, flat in self.flat_state.items()
        }
        return [{name: buffers[name][t] for name in buffers} for t in range(len(self.embedding_specs))]

    def split_optimizer_states(self, *args: Any, **kwargs: Any) -> list[list[Tensor]]:
        """Return the buffers of each table without their names."""
        return [list(state.values()) for state in self.get_optimizer_state()]

    def reset_embedding_weight_momentum(
        self, pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor
    ) -> None:
        """Set the weights of rows to zero and their buffers to the initial values.

        TorchRec calls this when managed collision gives a row to another id, and initializes the weights afterwards.
        FBGEMM's implementation resets only one of its optimizers. Without a reset, the new id would continue with the
        momentum of the old one, and the confidence mask would compare with it.
        """
        tables = self.split_by_table(self.flat_weights())
        state = self.get_optimizer_state()
        ends = pruned_indices_offsets.tolist()
        for number, table in enumerate(logical_table_ids.tolist()):
            rows = pruned_indices[ends[number] : ends[number + 1]].to(tables[table].device)
            shards = [t for t, name in enumerate(self.table_names) if name == self.table_names[table]]
            for t in shards:
                self._record_changes(t, rows)
                tables[t].index_fill_(0, rows, 0.0)
                for name, value in self.initial_values.items():
                    state[t][name].index_fill_(0, rows, value)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next step."""
        self.options["lr"] = lr

    def get_learning_rate(self) -> float:
        """Return the learning rate."""
        return float(self.options["lr"])

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps that all tables have taken."""
        self.steps.fill_(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Change options of the optimizer."""
        for name in params_dict:
            if name not in self.options:
                raise ValueError(describe_unknown(name, self.options))
        self.options.update(params_dict)

    def alignment(self, *, reset: bool = False) -> dict[str, Ratio]:
        """Return the alignment ratio since the last reset, by table or by tables that are updated together."""
        ratios: dict[str, Ratio] = {}
        counts = [group.update.counts for group in self._groups]
        for group, ratio in zip(self._groups, alignment.read(counts), strict=True):
            name = self._names(group.tables)
            ratios[name] = ratios.get(name, Ratio(0, 0, 0)) + ratio
        for counter in counts:
            if reset and counter is not None:
                counter.zero_()
        return ratios


class _LookupFunction(torch.autograd.Function):
    """The lookup as an autograd function, whose backward updates the tables."""

    @staticmethod
    def forward(
        ctx: Any,
        placeholder: Tensor,
        tables: Tables,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        fbgemm_options: dict[str, Any],
    ) -> Tensor:
        result = tables.look_up(indices, offsets, weights, fbgemm_options)
        ctx.tables, ctx.lookup = tables, tables.describe_lookup(indices, offsets)
        ctx.save_for_backward(weights)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        weight_grads = ctx.tables.update(grad, ctx.lookup, weights, weights_need_grad=ctx.needs_input_grad[4])
        return None, None, None, None, weight_grads, None


def _widen(grads: Tensor, group: TableGroup) -> Tensor:
    """Convert gradients to the dtype of the table if that is wider."""
    return grads.to(torch.promote_types(grads.dtype, group.update.table.dtype))


def _equal_runs(values: Sequence[int]) -> list[range]:
    """Return the positions of each run of equal values: [0, 1] and [2] for the values 7, 7, 3."""
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return [range(start, end) for start, end in pairwise([*starts, len(values)])]


def _gather_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Concatenate the rows of all ranks. `sizes` has the number of rows of each rank."""
    largest = max(sizes)
    padded = rows.new_zeros(largest, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = rows.new_empty(len(sizes) * largest, *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    return torch.cat([gathered[rank * largest : rank * largest + size] for rank, size in enumerate(sizes)])
