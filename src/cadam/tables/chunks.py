"""Lookups in a table whose rows are in several chunks, with one sparse gradient for each chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def split_rows(rows: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """Split row numbers by the chunk in which the rows are.

    Args:
        rows: Row numbers of the table, one-dimensional.
        sizes: The number of rows of each chunk.

    Yields:
        For each chunk that has any of the rows: its number, the positions of its rows in `rows`, or None if the chunk
        has all of them, and the row numbers within the chunk.
    """
    if len(sizes) == 1:
        yield 0, None, rows
        return
    ends = torch.tensor(sizes, device=rows.device).cumsum(0)
    chunk_of = torch.bucketize(rows, ends, right=True)
    order = chunk_of.argsort(stable=True)
    counts = torch.bincount(chunk_of, minlength=len(sizes)).tolist()
    start = 0
    for chunk, positions in enumerate(torch.split(order, counts)):
        if len(positions):
            yield chunk, positions, rows.index_select(0, positions) - start
        start += sizes[chunk]


class Lookup(torch.autograd.Function):
    """Reads rows of a table. The gradient of each chunk is sparse and names the rows that were read."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, check: Callable[[], None], *chunks: Tensor) -> Tensor:
        """Return the values of the rows.

        Args:
            ctx: The context of autograd.
            rows: Row numbers, one-dimensional, on the device of the chunks.
            check: Called before gradients are computed; it may raise an error.
            chunks: The chunks of the table.
        """
        ctx.check, ctx.shapes = check, [chunk.shape for chunk in chunks]
        ctx.parts = list(split_rows(rows, [len(chunk) for chunk in chunks]))
        values = chunks[0].new_empty(len(rows), chunks[0].shape[1])
        for number, positions, local in ctx.parts:
            if positions is None:
                torch.index_select(chunks[number], 0, local, out=values)
            else:
                values.index_copy_(0, positions, chunks[number].index_select(0, local))
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the sparse gradients of the chunks, and None for chunks without a row in the batch."""
        ctx.check()
        grads: list[Tensor | None] = [None] * len(ctx.shapes)
        for number, positions, local in ctx.parts:
            values = grad if positions is None else grad.index_select(0, positions)
            grads[number] = torch.sparse_coo_tensor(local[None], values, ctx.shapes[number], check_invariants=False)
        return None, None, *grads


def write_rows(chunks: Sequence[Tensor], rows: Tensor, values: Tensor) -> None:
    """Set rows of a table to new values, which may be on another device than the table."""
    for number, positions, local in split_rows(rows, [len(chunk) for chunk in chunks]):
        chunk = chunks[number]
        part = values if positions is None else values.index_select(0, positions.to(values.device))
        chunk.detach().index_copy_(0, local, part.to(chunk.device, chunk.dtype))
