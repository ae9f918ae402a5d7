"""The tables of one rank: FBGEMM's module with its forward, and a backward that updates rows with our engines.

FBGEMM looks rows up for many tables at once. Its own backward knows a few optimizers, on the CPU not even Adam, so it
is left out: gradients of pooled bags are spread to the rows they came from, and `cadam.optim.sparse_update` does the
rest in place.
Nothing as large as a table is made, and on CUDA nothing waits for the device.
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

from ..engines import quantization
from ..engines.cuda.sparse import Bags
from ..engines.huge_pages import filled_like
from ..optim import alignment
from ..optim.alignment import Ratio
from ..optim.optimizer import Optimizer
from ..optim.options import unknown
from ..optim.sparse_update import RowUpdate, new_state
from ..rules.moment_storage import SEED

Specs = Sequence[tuple[int, int, EmbeddingLocation, ComputeDevice]]  # rows, columns, where, computed where
MOST_NOTED = 256  # steps whose changed rows are kept before those of all of them are put together


@dataclass(frozen=True)
class Slab:
    """Neighbouring tables with rows of one length: they lie in memory as one table, and one call updates them."""

    tables: range
    features: range
    first_rows: Tensor
    """By feature: where its table begins in the slab."""
    update: RowUpdate


class Tables(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's table-batched embeddings, updated in backward by any optimizer of the catalogue.

    Each backward is one step. `options` are those of a parameter group and may change between steps.

    Args:
        specs: rows, columns, location and device of each table.
        optimizer: a class of the catalogue.
        options: all its options.
        feature_table_map: by feature, the number of its table; features of a table stand together.
        table_names: what the tables are called; shards of one table have the same name.
        pooling_mode: how the rows of a bag become one; NONE gives a row for each id.
        weights_precision: dtype of the tables, FP32, BF16 or FP16.
        output_dtype: dtype of what a lookup returns.
        device: where the tables are.
        replicas: the ranks that each hold a copy of these tables, if they do (data-parallel); all of them make the
            same update, with the mean of their gradients.
        places: of each shard, its first row and column in the whole table; by default the tables are whole.
        merge: update tables with rows of one length in one call, which is faster; the alignment ratio is then counted
            for all of them together. If not, on CUDA a lookup waits for the device, to tell their ids apart.
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
        places: Sequence[tuple[int, int]] | None = None,
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
            raise ValueError(f"the features of a table must stand together, got the tables {feature_table_map}")
        if pooling_mode == PoolingMode.NONE and len({spec[1] for spec in specs}) > 1:
            raise ValueError(f"tables {table_names} are looked up without pooling, so their rows must be of one length")
        super().__init__(
            list(specs),
            feature_table_map=feature_table_map,
            pooling_mode=pooling_mode,
            weights_precision=weights_precision,
            output_dtype=output_dtype,
            optimizer=EmbOptimType.EXACT_SGD,  # never run; of FBGEMM's it is the one without state
            stochastic_rounding=False,
            # There is no cache; FBGEMM wants it in a precision that it could have one in.
            cache_precision=SparseType.FP32 if weights_precision == SparseType.BF16 else None,
            bounds_check_mode=BoundsCheckMode.FATAL,
            device=device,
            table_names=table_names,
        )
        self.optimizer_class, self.options, self.replicas = optimizer, options, replicas
        self.output_dtype_as_torch: torch.dtype = output_dtype.as_dtype()
        self.weights_host.data = filled_like(self.weights_host, 0.0, self.weights_host.dtype)  # in huge pages
        self._merge, self.seed = merge, torch.initial_seed() % 2**63
        self.stored_anew: Callable[[], None] = lambda: None
        """What is to be done when `store_as` has made other state."""
        self._make_state()
        self.steps = torch.zeros(len(specs), dtype=torch.float64)
        """By table, how many steps it has taken."""
        self._columns = [0]
        for table in feature_table_map:
            self._columns.append(self._columns[-1] + specs[table][1])
        self._slabs = self._cut(merge)
        self.places = [(0, 0)] * len(specs) if places is None else list(places)
        self._first_rows = torch.tensor([0, *accumulate(spec[0] for spec in specs)], device=self.memory().device)
        self._noted: list[Tensor] | None = None  # rows that changed, counted through all tables

    # Memory -----------------------------------------------------------------------------------------------

    def memory(self) -> Tensor:
        """The memory of all tables, one after the other."""
        return self._weights().detach().reshape(-1)

    def _weights(self) -> Tensor:
        weights: Tensor = self.weights_host if self.weights_host.numel() else self.weights_dev
        return weights

    def by_table(self, flat: Tensor, *, by_row: bool = False) -> list[Tensor]:
        """The part of each table of such memory, as rows; `by_row` says that it has one number for each row."""
        shapes = [(rows, 1 if by_row else columns) for rows, columns, _, _ in self.embedding_specs]
        parts = torch.split(flat, [rows * columns for rows, columns in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _make_state(self) -> None:
        """New state as the options say: the buffers of all tables, one after the other as the tables are."""
        memory, o = self.memory(), {**self.options}
        o.pop("params", None)
        example = new_state(memory.new_zeros(1, 2), self.optimizer_class, **o)
        self.is_coded = example.pop(SEED, None) is not None
        self.starts = {name: one.flatten()[0].item() for name, one in example.items()}
        """What a new row has in each buffer."""
        self.by_row = frozenset(name for name, one in example.items() if one.numel() == 1)
        """The buffers that have one number for each row."""
        rows = memory.new_empty(sum(spec[0] for spec in self.embedding_specs))
        self.flat_state = {
            name: filled_like(rows if name in self.by_row else memory, self.starts[name], one.dtype)
            for name, one in example.items()
        }

    def set_seed(self, seed: int) -> None:
        """Have the roundings of coded moments go by this, not by torch's own seed: before the first step."""
        self.seed = seed
        self._slabs = self._cut(self._merge)

    def store_as(self, moments: str, second_moment: str, row_steps: bool) -> None:
        """Keep the moments in another way from now on, with the values that they have.

        Coded ones are rounded to the nearest. Second moments of elements become the mean of their row, and those of a
        row the same for all its elements. Where rows begin to count their steps, they begin at zero.
        """
        asked = {"moments": moments, "second_moment": second_moment, "row_steps": row_steps}
        if all(self.options[name] == value for name, value in asked.items()):
            return
        old, rule = self.get_optimizer_state(), self.optimizer_class.rule
        if self.is_coded:
            old = [{**state, SEED: quantization.new_seed(0)} for state in old]
        self.options.update(asked)
        self._make_state()
        dtype = torch.bfloat16 if moments == "bfloat16" else torch.float32
        for table, state, new in zip(self.by_table(self.memory()), old, self.get_optimizer_state(), strict=True):
            quantization.complete(state, table, rule, self.options, dtype, rows=True)
            for name, buffer in new.items():
                buffer.copy_(state[name])
        self._slabs = self._cut(self._merge)
        self.stored_anew()

    def _cut(self, merge: bool) -> list[Slab]:
        memory, slabs, start, row = self.memory(), [], 0, 0
        self._address = memory.data_ptr()
        widths = [spec[1] for spec in self.embedding_specs]
        for tables in _runs(widths if merge else range(len(widths))):
            heights, width = [self.embedding_specs[t][0] for t in tables], widths[tables[0]]
            features = [f for f, t in enumerate(self.feature_table_map) if t in tables]
            first = dict(zip(tables, [0, *accumulate(heights)], strict=False))
            part = slice(start, start := start + sum(heights) * width)
            rows = slice(row, row := row + sum(heights))
            state = {
                name: buffer[rows].view(-1, 1) if name in self.by_row else buffer[part].view(-1, width)
                for name, buffer in self.flat_state.items()
            }
            if self.is_coded:
                state[SEED] = quantization.new_seed(zlib.crc32(self.table_names[tables[0]].encode()), self.seed)
            update = RowUpdate(
                memory[part].view(-1, width),
                state,
                self.optimizer_class,
                self.options,
                counts=alignment.new_counts(memory.device) if self.options["track_alignment"] else None,
                name="table " + ", ".join(dict.fromkeys(self.table_names[t] for t in tables)),
            )
            first_rows = torch.tensor([first[self.feature_table_map[f]] for f in features], device=memory.device)
            slabs.append(Slab(tables, range(features[0], features[-1] + 1), first_rows, update))
        return slabs

    # Lookup and update ------------------------------------------------------------------------------------

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        **rest: Any,
    ) -> Tensor:
        """FBGEMM's lookup; its backward is `update_`."""
        if feature_requires_grad is not None or batch_size_per_feature_per_rank is not None:
            raise NotImplementedError(
                f"tables {self.table_names}: feature_requires_grad and batches of different size for each feature "
                "are not supported; give every feature the same batch"
            )
        if indices.device.type == "cpu" and len(indices):
            self._check_ids(indices, offsets)
        if not torch.is_grad_enabled():
            return self.look_up(indices, offsets, per_sample_weights, rest)
        anchor = self.placeholder_autograd_tensor  # so that backward is called though no input has a gradient
        looked_up: Tensor = _Lookup.apply(anchor, self, indices, offsets, per_sample_weights, rest)  # type: ignore[no-untyped-call]
        return looked_up

    def _check_ids(self, indices: Tensor, offsets: Tensor) -> None:
        """Refuse ids that are no rows of their tables. Looks at the features one by one only if it may have to."""
        least, most = (int(x) for x in indices.aminmax())
        heights = [self.embedding_specs[table][0] for table in self.feature_table_map]
        if least >= 0 and most < min(heights):
            return
        batch = (len(offsets) - 1) // len(heights)
        ends = offsets[::batch].tolist()
        for table, rows, (start, end) in zip(self.feature_table_map, heights, pairwise(ends), strict=True):
            if start == end:
                continue
            least, most = (int(x) for x in indices[start:end].aminmax())
            if least < 0 or most >= rows:
                name, wrong, first = self.table_names[table], least if least < 0 else most, self.places[table][0]
                shard = f" (of its shard that begins with row {first}, from where ids are counted)" if first else ""
                raise IndexError(f"table {name!r}: {wrong} is no id, it has {rows} rows{shard}")

    def look_up(self, indices: Tensor, offsets: Tensor, weights: Tensor | None, rest: Mapping[str, Any]) -> Tensor:
        """What a lookup returns, without gradients."""
        if self.weights_precision == SparseType.BF16:
            indices, offsets, weights, _ = self.prepare_inputs(indices, offsets, weights)
            return self.pooled(self.look_at(indices, offsets), weights)
        found: Tensor = super().forward(indices, offsets, weights, **rest)
        return found

    @torch.no_grad()
    def update_(
        self, grad: Tensor, looked_up: LookedUp, weights: Tensor | None, *, weights_need_grad: bool
    ) -> Tensor | None:
        """One step: update every row that was looked up, from the gradient of what the lookup returned.

        Returns the gradient of the weights of the ids, if wanted.
        """
        if self._weights().data_ptr() != self._address:
            raise RuntimeError(f"the memory of the tables {self.table_names} was moved; make them where they are to be")
        weight_grads, steps = [], self.steps.numpy()
        for number, slab in enumerate(looked_up.slabs):
            part, step = looked_up.parts[number], int(steps[slab.tables[0]]) + 1
            if weights is None and self.replicas is None and self._update_bags(slab, looked_up, part, grad, step):
                if self._noted is not None:
                    self._note(slab.tables[0], self._ids(slab, looked_up, number).rows)
                continue
            ids = self._ids(slab, looked_up, number)
            rows, grads = ids.rows, self._row_grads(slab, ids, part, grad)
            if weights is not None:
                if weights_need_grad:
                    weight_grads.append((slab.update.table.index_select(0, rows) * grads).sum(1))
                grads = grads * weights[part].unsqueeze(1)
            if self.replicas is not None:
                sizes = [of_rank[number] for of_rank in looked_up.sizes]
                rows = _gathered(rows, sizes, self.replicas)
                grads = _gathered(grads / len(sizes), sizes, self.replicas)
            slab.update(rows, grads, step=step)
            self._note(slab.tables[0], rows)
        steps += 1
        return torch.cat(weight_grads) if weights_need_grad else None

    def _update_bags(self, slab: Slab, looked_up: LookedUp, part: slice, grad: Tensor, step: int) -> bool:
        """The update of one slab with the gradients of bags as they are, where the row engine can read them so."""
        if self.pooling_mode == PoolingMode.NONE or not slab.update.takes_bags(grad.dtype):
            return False
        batch, features = looked_up.batch, slab.features
        ids, offsets, grads = looked_up.ids, looked_up.offsets, grad
        if len(looked_up.slabs) > 1:
            ids = ids[part]
            offsets = offsets[features[0] * batch : (features[-1] + 1) * batch + 1]
            grads = grad[:, self._columns[features[0]] : self._columns[features[-1] + 1]]
        if self.pooling_mode == PoolingMode.MEAN:
            lengths = offsets.diff().view(-1, batch).t().unsqueeze(2)
            grads = _as_wide(grads, slab).reshape(batch, len(features), -1) / lengths
        slab.update.pooled(ids, Bags(offsets, slab.first_rows, batch, part.start), grads.contiguous(), step=step)
        return True

    def _ids(self, slab: Slab, looked_up: LookedUp, number: int) -> Ids:
        """The ids of one slab."""
        part, batch, features = looked_up.parts[number], looked_up.batch, len(slab.features)
        rows = looked_up.ids[part]
        lengths = looked_up.offsets[slab.features[0] * batch : (slab.features[-1] + 1) * batch + 1].diff()
        bag = torch.repeat_interleave(lengths, output_size=len(rows))  # by id, counted feature by feature
        feature = bag // batch
        if len(slab.tables) > 1:
            # A negative id stays one, for the engine to find: it must not become a row of the table before.
            rows = torch.where(rows < 0, rows, rows + slab.first_rows.index_select(0, feature))
        if self.pooling_mode == PoolingMode.NONE:
            return Ids(rows, None, None)
        means = lengths.index_select(0, bag).unsqueeze(1) if self.pooling_mode == PoolingMode.MEAN else None
        # Gradients have their bags sample by sample: from feature * batch + sample to sample * features + feature.
        return Ids(rows, torch.sub(bag * features, feature, alpha=batch * features - 1), means)

    def _row_grads(self, slab: Slab, ids: Ids, part: slice, grad: Tensor) -> Tensor:
        """The gradient of each id's row as if its weight were 1, from that of what the lookup returned."""
        if ids.bags is None:
            grads = grad[part]
        else:
            pooled = grad[:, self._columns[slab.features[0]] : self._columns[slab.features[-1] + 1]]
            grads = pooled.reshape(-1, slab.update.table.shape[1]).index_select(0, ids.bags)
        grads = _as_wide(grads, slab)
        return grads if ids.lengths is None else grads / ids.lengths

    def pooled(self, looked_up: LookedUp, weights: Tensor | None) -> Tensor:
        """The lookup in plain torch, in float32: FBGEMM has none for bfloat16 on the CPU."""
        found = []
        for number, slab in enumerate(looked_up.slabs):
            ids = self._ids(slab, looked_up, number)
            rows = slab.update.table.index_select(0, ids.rows).float()
            rows = rows if weights is None else rows * weights[looked_up.parts[number]].unsqueeze(1)
            rows = rows if ids.lengths is None else rows / ids.lengths
            if ids.bags is not None:
                bags = rows.new_zeros(looked_up.batch * len(slab.features), rows.shape[1])
                rows = bags.index_add_(0, ids.bags, rows).view(looked_up.batch, len(slab.features) * rows.shape[1])
            found.append(rows)
        whole = torch.cat(found, 0 if self.pooling_mode == PoolingMode.NONE else 1)
        return whole.to(self.output_dtype_as_torch)

    def look_at(self, ids: Tensor, offsets: Tensor) -> LookedUp:
        """Note what a lookup reads: all that `update_` needs to know of it."""
        steps = self.steps.tolist()
        if any(len({steps[t] for t in slab.tables}) > 1 for slab in self._slabs):
            self._slabs = self._cut(merge=False)  # a checkpoint brought tables of different age together
        batch = (len(offsets) - 1) // len(self.feature_table_map)
        parts = [slice(0, len(ids))]
        if len(self._slabs) > 1:
            # On CUDA this waits for the device: rows of different lengths cost a synchronization.
            ends = offsets[[(slab.features[-1] + 1) * batch for slab in self._slabs]].tolist()
            parts = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        sizes = [[part.stop - part.start for part in parts]]
        if self.replicas is not None:
            mine = torch.tensor(sizes[0], device=ids.device)
            sizes = _gathered(mine, [len(parts)] * self.replicas.size(), self.replicas).view(-1, len(parts)).tolist()
        return LookedUp(ids.long(), offsets, batch, self._slabs, parts, sizes)

    # What has changed ---------------------------------------------------------------------------------------

    def note_changes(self) -> None:
        """Note from now on which rows are updated or made new."""
        self._noted = []

    def _note(self, table: int, rows: Tensor) -> None:
        """Rows counted from the beginning of `table`. On CUDA this waits for the device in one step of many only."""
        if self._noted is None:
            return
        rows = rows + sum(spec[0] for spec in self.embedding_specs[:table])
        self._noted.append(rows if rows.is_cuda else torch.unique(rows))
        if len(self._noted) >= MOST_NOTED:
            self._noted = [torch.unique(torch.cat(self._noted))]

    def take_changes(self) -> list[Tensor]:
        """By table, the rows that have changed since the last time, in order."""
        if self._noted is None:
            raise RuntimeError("nothing was tracked: call track_changes(model) before training")
        rows = torch.unique(torch.cat([self._first_rows[:0], *self._noted]))
        self._noted = []
        ends = torch.searchsorted(rows, self._first_rows).tolist()
        parts = [rows[a:b] for a, b in pairwise(ends)]
        return [part - first for part, first in zip(parts, self._first_rows[:-1], strict=True)]

    # What FBGEMM and TorchRec ask of tables -------------------------------------------------------------------

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """By table, its buffers; the step is not among them, since it belongs to no row."""
        buffers = {name: self.by_table(flat, by_row=name in self.by_row) for name, flat in self.flat_state.items()}
        return [{name: buffers[name][t] for name in buffers} for t in range(len(self.embedding_specs))]

    def split_optimizer_states(self, *args: Any, **kwargs: Any) -> list[list[Tensor]]:
        return [list(state.values()) for state in self.get_optimizer_state()]

    def reset_embedding_weight_momentum(
        self, pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor
    ) -> None:
        """Make rows new: zero the weights, start the buffers anew.

        TorchRec calls this when managed collision gives a slot to another id, and then initialises the weights.
        FBGEMM's own does nothing but for one of its optimizers; the new id would go on with the old one's momentum,
        and confidence would test against it.
        """
        tables = self.by_table(self.memory())
        state = self.get_optimizer_state()
        ends = pruned_indices_offsets.tolist()
        for number, table in enumerate(logical_table_ids.tolist()):
            rows = pruned_indices[ends[number] : ends[number + 1]].to(tables[table].device)
            shards = [t for t, name in enumerate(self.table_names) if name == self.table_names[table]]
            for t in shards:
                self._note(t, rows)
                tables[t].index_fill_(0, rows, 0.0)
                for name, start in self.starts.items():
                    state[t][name].index_fill_(0, rows, start)

    def set_learning_rate(self, lr: float) -> None:
        self.options["lr"] = lr

    def get_learning_rate(self) -> float:
        return float(self.options["lr"])

    def set_optimizer_step(self, step: int) -> None:
        self.steps.fill_(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        for name in params_dict:
            if name not in self.options:
                raise ValueError(unknown(name, self.options))
        self.options.update(params_dict)

    def alignment(self, *, reset: bool = False) -> dict[str, Ratio]:
        """The alignment ratio by table (by tables that are updated together), since the last reset."""
        ratios: dict[str, Ratio] = {}
        counts = [slab.update.counts for slab in self._slabs]
        for slab, ratio in zip(self._slabs, alignment.read(counts), strict=True):
            name = ", ".join(dict.fromkeys(self.table_names[t] for t in slab.tables))
            ratios[name] = ratios.get(name, Ratio(0, 0, 0)) + ratio
        for counter in counts:
            if reset and counter is not None:
                counter.zero_()
        return ratios


@dataclass(frozen=True)
class LookedUp:
    """What a lookup read: ids and where their bags begin, feature by feature, and how they fall to the slabs."""

    ids: Tensor
    offsets: Tensor
    batch: int
    slabs: list[Slab]
    parts: list[slice]
    """By slab, which of the ids are its own."""
    sizes: list[list[int]]
    """By rank that holds a copy of the tables, and by slab, how many ids were looked up."""


@dataclass(frozen=True)
class Ids:
    """Ids of one slab: their rows in it, their bags (None without pooling) and, for means, how long those are."""

    rows: Tensor
    bags: Tensor | None
    lengths: Tensor | None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        tables: Tables,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        rest: dict[str, Any],
    ) -> Tensor:
        found = tables.look_up(indices, offsets, weights, rest)
        ctx.tables, ctx.looked_up = tables, tables.look_at(indices, offsets)
        ctx.save_for_backward(weights)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4]
        return None, None, None, None, ctx.tables.update_(grad, ctx.looked_up, weights, weights_need_grad=wanted), None


def _as_wide(grads: Tensor, slab: Slab) -> Tensor:
    """In the dtype of the table, if that is the wider one."""
    return grads.to(torch.promote_types(grads.dtype, slab.update.table.dtype))


def _runs(values: Sequence[int]) -> list[range]:
    """Positions of equal neighbours: of 7, 7, 3 the first two and the third."""
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(values)], strict=True)]


def _gathered(mine: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of every rank, one rank after the other; `sizes` says how many each has."""
    longest = max(sizes)
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: len(mine)] = mine
    every = mine.new_empty(len(sizes) * longest, *mine.shape[1:])
    dist.all_gather_into_tensor(every, padded, group=group)
    return torch.cat([every[rank * longest : rank * longest + size] for rank, size in enumerate(sizes)])
