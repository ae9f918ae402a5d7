"""An embedding table without a fixed size, for ids that come and go.

The design, for those who want to change it:

- **Index.** `IdIndex` (compiled, on the host) maps ids to row numbers. It also keeps when and how often each id was
  seen, from which admission, expiry and eviction follow.
- **Rows.** The rows are in chunks, each of which is a parameter. A table grows by another chunk, half as large as the
  table. Nothing is copied then, neither rows nor optimizer state, because optimizers keep state by parameter. One
  parameter that grows in place would not have these properties: autograd remembers the shape of a parameter from the
  forward pass, optimizers other than our own would have to copy their state, and CUDA memory cannot grow in place. A
  table of 10 million rows that began with 65,536 has 13 chunks.
- **Optimizer.** `attach` makes the connection explicit. It adds new chunks to the optimizer, resets the moments of a
  row that is given to another id, and prevents rows from being given away between the lookup and the optimizer step
  that uses their gradients.
- **Threads.** A lock protects the index, because a lookup may move its records in memory. Rows are read without it.
- **Determinism.** Rows, initial values, admission and eviction depend on the ids, their order and the seed alone, not
  on wall-clock time, addresses or the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engines.huge_pages import filled
from ..native.loader import package_library
from .attachment import Attachment, ResetRows
from .chunks import Lookup, write_rows
from .id_index import BYTES_PER_ID, MAX_ROWS, SHARED_ROW, IdIndex
from .ids import Ids, convert_ids
from .mapped_memory import mapped_zeros
from .row_assignment import Counters, RowAssignment, check_positive


class DynamicEmbedding(nn.Module):
    """An embedding table whose rows belong to any ids of 64 bits, or to texts.

    In training mode, a lookup gives rows to ids that have none. In evaluation mode it changes nothing; unknown ids have
    the shared row. Gradients are sparse.

    Texts are hashed to 64 bits. Two texts with the same hash share a row; among 10 million texts, the probability that
    any two of them do is 3 in a million. The integers -1 and 2**64 - 1 have the same bits and are the same id.

    Args:
        embedding_dim: The width of a row.
        max_rows: The largest number of ids that have a row at the same time; None for no limit.
        max_bytes: The limit in bytes instead: rows and index, without the state of the optimizer.
        evict: Which ids lose their rows if the table is full: ``"lru"`` (least recently used), ``"lfu"`` (least
            frequently used), or ``"none"``, with which new ids have the shared row instead.
        admit_after: An id gets a row in the batch in which it is seen for this number of times, at most 65,535. Until
            then it has the shared row. A count-min sketch counts, which sometimes counts too much.
        sketch_width: Counters in each of the four lines of the sketch, a power of two. A counter has two bytes. After
            this number of sightings of ids without a row all counters are halved, so that the sketch forgets. It must
            be at least `admit_after`. By default, the power of two that follows the limit of rows, or 2**20 without a
            limit, or more for a large `admit_after`.
        expire_after: An id loses its row when it was not seen for this long, in the unit of `advance`. Rows are
            released within another 1/32 of this time. None: never.
        std: The standard deviation of initial values.
        seed: The seed of initial values, which depend on it and on the id alone.
        chunk_rows: The number of rows of the first chunk.
        memory_rows: The number of rows that are in memory if there is an `overflow_folder`.
        overflow_folder: A folder on a disk. Rows beyond `memory_rows`, and their moments, are in memory-mapped files in
            this folder. The files have no names and vanish with the table.
        device: Where rows are. The index is always in the memory of the host.
        dtype: The dtype of rows.

    Raises:
        ValueError: If an argument is out of range.
        UnavailableError: If there is no compiled library.

    Example:
        >>> table = DynamicEmbedding(16, max_rows=1_000_000, admit_after=2, expire_after=30 * 86400)
        >>> optimizer = cadam.CAdam(table.parameters(), lr=0.01)
        >>> table.attach(optimizer)
        >>> table.advance(1_700_000_000)  # seconds
        >>> table(["ann", "bob"]).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        evict: str = "lru",
        admit_after: int = 1,
        sketch_width: int | None = None,
        expire_after: int | None = None,
        std: float = 0.01,
        seed: int = 0,
        chunk_rows: int = 1 << 16,
        memory_rows: int | None = None,
        overflow_folder: str | Path | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(embedding_dim=embedding_dim, chunk_rows=chunk_rows)
        if max_rows is not None and max_bytes is not None:
            raise ValueError("pass max_rows or max_bytes, not both")
        if not 0 <= std < float("inf"):
            raise ValueError(f"std must be a finite number that is not negative, got {std}")
        dtype = dtype or torch.get_default_dtype()
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
        if max_bytes is not None:
            check_positive(max_bytes=max_bytes)
            max_rows = max_bytes // (embedding_dim * dtype.itemsize + BYTES_PER_ID)
            if not max_rows:
                raise ValueError(f"max_bytes={max_bytes} is less than one row of width {embedding_dim} needs")
        self._lock = threading.RLock()
        self._assignment = RowAssignment(max_rows, evict, admit_after, sketch_width, expire_after)
        self.embedding_dim, self.std, self.seed, self.chunk_rows = embedding_dim, float(std), int(seed), chunk_rows
        self._last_attachment: Attachment | None = None
        device = torch.device(device or torch.get_default_device())
        self._overflow_folder, self._memory_rows = _check_overflow(memory_rows, overflow_folder, device)
        self._states_in_memory: list[nn.Parameter] = []
        """The mapped chunks whose moments are still to be moved to files."""
        size = min(chunk_rows, self._assignment.row_limit, self._memory_rows)
        first = self._new_chunk(size, 0, device, dtype)
        self.chunks = nn.ParameterList([first])
        shared = self._initial_values(np.array([SHARED_ROW], np.uint64), self.seed + 1)
        write_rows(self._chunks(), self._on_device(np.array([SHARED_ROW])), shared)

    @property
    def _index(self) -> IdIndex:
        return self._assignment.index

    @property
    def max_rows(self) -> int:
        """The largest number of ids that have a row at the same time."""
        return self._assignment.max_rows

    @property
    def _attachment(self) -> Attachment | None:
        """The connection to the optimizer; None if there is none, or if the optimizer does not exist any more."""
        attachment = self._last_attachment
        return None if attachment is None or attachment.find_optimizer() is None else attachment

    def _chunks(self) -> list[nn.Parameter]:
        return list(self.chunks)

    def extra_repr(self) -> str:
        """Return the width, the number of rows and the limit, for `print`."""
        limit = "" if self.max_rows == MAX_ROWS else f" of {self.max_rows:,}"
        return f"{self.embedding_dim}, rows={len(self._index):,}{limit}, evict={self._assignment.evict!r}"

    # Lookups -------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, ids: Any) -> Tensor:
        """Return the embeddings of ids.

        Args:
            ids: A tensor or an array of integers, an array of texts, or a sequence of integers or of texts.

        Returns:
            A tensor of the shape of `ids` and one more dimension of size `embedding_dim`.

        Raises:
            TypeError: If the ids are neither integers nor texts.
            ValueError: If an id does not fit into 64 bits.
            RuntimeError: If several processes train, each of which would give rows to ids in another order, or the
                table is traced, which would keep the rows of the example.
        """
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if is_traced or torch.compiler.is_exporting():
            raise RuntimeError(
                "DynamicEmbedding cannot be traced or exported: the graph would always return the rows of its example. "
                "Look the ids up outside of the exported model, and pass it the embeddings"
            )
        converted, shape = convert_ids(ids)
        with self._lock:
            rows = self._on_device(self._train_rows(converted) if self.training else self._index.find(converted))
        values: Tensor = Lookup.apply(rows, self._check_attached, *self._chunks())  # type: ignore[no-untyped-call]
        return values.view(*shape, self.embedding_dim)

    def _check_attached(self) -> None:
        if self._attachment is None:
            raise RuntimeError("the table has no optimizer: call table.attach(optimizer) before you train it")

    def _on_device(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(rows).to(self.chunks[0].device)

    def _train_rows(self, ids: Ids) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the rows of ids, and give rows to those that have none."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "DynamicEmbedding trains in one process: with several, each would give rows to ids in another order, "
                "and gradients could not be added. Shard ids by process, or use cadam.torchrec"
            )
        attachment = self._attachment
        if attachment is None:
            self._index.finish_step()
        capacity = sum(map(len, self.chunks))
        rows, new = self._assignment.assign(ids, capacity=capacity, prepare=self._add_chunks)
        if len(new.rows):
            write_rows(self._chunks(), self._on_device(new.rows), self._initial_values(new.ids, self.seed))
            reused = new.rows[new.is_reused]
            if attachment is not None and len(reused):
                attachment.reset_rows(self._on_device(reused))
        return rows

    def _add_chunks(self, rows: int) -> None:
        """Add chunks until there is this number of rows."""
        while (capacity := sum(map(len, self.chunks))) < rows:
            size = max(self.chunk_rows, min(capacity, self._memory_rows) // 2)
            if capacity < self._memory_rows:
                size = min(size, self._memory_rows - capacity)
            size = min(size, self._assignment.row_limit - capacity)
            self._set_chunks([*self._chunks(), self._another_chunk(size, capacity)])

    def _initial_values(self, ids: Ids, seed: int) -> Tensor:
        library, values = (
            package_library(),
            torch.empty(len(ids), self.embedding_dim, device="cpu", dtype=torch.float32),
        )
        library.c.cadam_initial_rows(
            ids.ctypes.data,
            len(ids),
            self.embedding_dim,
            (seed + (1 << 63)) % (1 << 64) - (1 << 63),
            self.std,
            values.data_ptr(),
            library.parallel_for,
        )
        return values

    # Chunks --------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # optimizers cannot update a tensor that was made in inference mode
    def _new_chunk(self, rows: int, first_row: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
        if self._overflow_folder is None or first_row < self._memory_rows:
            return nn.Parameter(filled((rows, self.embedding_dim), 0.0, dtype, device))
        chunk = nn.Parameter(mapped_zeros(self._overflow_folder, (rows, self.embedding_dim), dtype))
        self._states_in_memory.append(chunk)
        return chunk

    def _another_chunk(self, rows: int, first_row: int) -> nn.Parameter:
        """Return a chunk on the device and in the dtype of the first one, and frozen if that one is."""
        first = self.chunks[0]
        chunk = self._new_chunk(rows, first_row, first.device, first.dtype)
        chunk.requires_grad = first.requires_grad
        return chunk

    def _finish_step(self) -> None:
        """Let the rows of the step be released, and move the moments of new mapped chunks to files."""
        with self._lock:
            self._index.finish_step()
        folder, attachment = self._overflow_folder, self._attachment
        if not self._states_in_memory or folder is None or attachment is None:
            return

        def moved(value: Tensor) -> Tensor:
            return mapped_zeros(folder, value.shape, value.dtype).copy_(value)

        self._states_in_memory = [
            chunk for chunk in self._states_in_memory if not attachment.replace_state(chunk, moved)
        ]

    def _set_chunks(self, chunks: list[nn.Parameter]) -> None:
        attachment = self._attachment
        if attachment is not None:
            attachment.set_chunks(chunks)
        self.chunks = nn.ParameterList(chunks)

    def attach(self, optimizer: torch.optim.Optimizer, reset: ResetRows | None = None) -> None:
        """Connect the table to the optimizer that updates it.

        From then on new chunks are added to the parameter group of the table, the moments of a row are reset when it is
        given to another id, and a row keeps its id from the lookup to the next step of the optimizer. A copy of the
        table is not attached. Attaching another optimizer replaces the first one.

        Args:
            optimizer: An optimizer of cadam, SparseAdam, SGD without momentum, or another one together with `reset`.
            reset: A function of a parameter and row numbers that resets the state of these rows in the optimizer.

        Raises:
            ValueError: If the optimizer does not have the parameters of this table, or is not one of those above.
        """
        attachment = Attachment(optimizer, self._chunks(), lambda: self._finish_step(), reset)
        if self._last_attachment is not None:
            self._last_attachment.detach()
        self._last_attachment = attachment

    # Time ----------------------------------------------------------------------------------------------------------

    def advance(self, time: int) -> None:
        """Set the stream time of the lookups that follow, and release the rows of expired ids.

        Without this method, time is the number of lookups in training mode.

        Args:
            time: The time of the events, in any unit, such as seconds. If it is earlier than the present time, which
                happens in streams that are not sorted, nothing changes.

        Raises:
            TypeError: If the time is not an integer.
            RuntimeError: If ids were seen before the first call, so that their times are numbers of lookups.
        """
        with self._lock:
            self._assignment.advance(time)

    # Counters and memory -------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """Return how many rows are in use, and how many ids were admitted, evicted, expired and refused."""
        return self._assignment.counters()

    def memory(self) -> dict[str, int]:
        """Return the memory in bytes of the rows, of the index with its sketch, and of the optimizer state."""
        attachment = self._attachment
        state = {} if attachment is None else attachment.optimizer.state
        tensors = [x for chunk in self.chunks for x in state.get(chunk, {}).values() if isinstance(x, Tensor)]
        return {
            "rows": sum(chunk.nbytes for chunk in self.chunks),
            "index": self._index.nbytes,
            "optimizer": sum(x.nbytes for x in tensors),
        }

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle. A copy is not attached to the optimizer."""
        state = {**self.__dict__, "_last_attachment": None}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the part of the state dict that is not the rows: the index, the clock and the counters."""
        with self._lock:
            return {**self._assignment.state_dict(), "seed": self.seed}

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: `_load_from_state_dict` loads the index together with the chunks."""

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *args: Any
    ) -> None:
        """Load the index and give the table the chunks of a state dict, whose values torch then copies.

        Everything is checked first. If anything is missing or damaged, the table stays as it is. A state dict without
        any part of the table has missing keys, which ``strict=False`` allows.
        """
        if not any(key.startswith((f"{prefix}chunks.", f"{prefix}_extra_state")) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
            return
        if self._attachment is not None and local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) replaces parameters, which the attached optimizer would not notice: load "
                "the state dict before you create the optimizer"
            )
        try:
            index, extra, sizes = self._read_state(state_dict, prefix)
        except (ValueError, TypeError, KeyError) as error:
            name = f" {prefix.rstrip('.')!r}" if prefix else ""
            raise RuntimeError(f"the state dict of the table{name} cannot be loaded: {error}") from error
        kept = 0
        while kept < min(len(sizes), len(self.chunks)) and len(self.chunks[kept]) == sizes[kept]:
            kept += 1
        ends = np.cumsum(sizes).tolist()
        new = [self._another_chunk(size, end - size) for size, end in zip(sizes[kept:], ends[kept:], strict=True)]
        with self._lock:
            if new or kept < len(self.chunks):
                self._set_chunks([*self._chunks()[:kept], *new])
            self._assignment.load_state_dict(extra, index)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _read_state(self, state_dict: Mapping[str, Any], prefix: str) -> tuple[IdIndex, dict[str, Any], list[int]]:
        """Return the index, the extra state and the sizes of the chunks of a state dict."""
        extra = state_dict.get(f"{prefix}_extra_state")
        index = self._assignment.read_index(extra)  # type: ignore[arg-type]
        assert isinstance(extra, dict)
        if extra["seed"] != self.seed:
            raise ValueError(f"its seed is {extra['seed']}, and this table has {self.seed}")
        sizes: list[int] = []
        while (chunk := state_dict.get(f"{prefix}chunks.{len(sizes)}")) is not None:
            if not isinstance(chunk, Tensor):
                raise ValueError(f"its rows are of type {type(chunk).__name__}")
            if chunk.dim() != 2 or chunk.shape[1] != self.embedding_dim:
                raise ValueError(
                    f"its rows have shape {tuple(chunk.shape[1:])}, and this table has {self.embedding_dim}"
                )
            sizes.append(len(chunk))
        if index.row_count > sum(sizes):
            raise ValueError(f"its index has {index.row_count} rows, and its chunks {sum(sizes)}")
        return index, extra, sizes


def _check_overflow(
    memory_rows: int | None, folder: str | Path | None, device: torch.device
) -> tuple[Path | None, int]:
    """Return the folder for rows that are not in memory, and the number of those that are.

    Raises:
        ValueError: If only one of the two options is given, or the rows are not in the memory of the host.
    """
    if memory_rows is None and folder is None:
        return None, MAX_ROWS + 1
    if memory_rows is None or folder is None:
        raise ValueError("memory_rows and overflow_folder need each other")
    check_positive(memory_rows=memory_rows)
    if device.type != "cpu":
        raise ValueError(f"overflow_folder needs rows in the memory of the host, got device={str(device)!r}")
    if not Path(folder).is_dir():
        raise ValueError(f"overflow_folder={str(folder)!r} is not a folder")
    return Path(folder), memory_rows
