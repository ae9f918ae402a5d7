"""Time quantized moments on the CPU beside float32, torch and other packages with quantized moments.

    python benchmarks/quantized_cpu.py [dense] [rows]     # about two minutes each
    python benchmarks/quantized_cpu.py bfloat16           # parameters in bfloat16: about two minutes

Dense: one tensor of 50M, the peer is torch's fused Adam in float32. Rows: 260,000 Zipf ids a step, the peer is our own
float32. All sides are interleaved in each round and medians are given; alignment is counted. torchao and bitsandbytes
(8-bit Adam) and fbgemm-gpu-cpu take part where they are installed, else a line says why not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cadam
from peers import cases, timing

Make = Callable[[list[Tensor]], torch.optim.Optimizer]

ELEMENTS = 50_000_000
DENSE: dict[str, dict[str, Any]] = {name: {"moments": name} for name in ("float32", "bfloat16", "int8")}
ROWS: dict[str, dict[str, Any]] = {
    **DENSE,
    "float32, row v": {"second_moment": "row"},
    "bfloat16, row v": {"moments": "bfloat16", "second_moment": "row"},
    "int8, row v": {"moments": "int8", "second_moment": "row"},
    "float32, row steps": {"row_steps": True},
}
TABLES = [(5_000_000, 16), (1_000_000, 64)]


def ours(storages: dict[str, dict[str, Any]]) -> dict[str, Make]:
    return {f"cadam.CAdam {name}": partial(cadam.CAdam, **options) for name, options in storages.items()}


def peers() -> Iterator[tuple[str, Make]]:
    """Yield the 8-bit optimizers that are installed and run on this machine."""
    from_where = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}
    for name, module in from_where.items():
        label = f"{name} Adam8bit"
        try:
            make: Make = getattr(__import__(module, fromlist=["Adam8bit"]), "Adam8bit")  # noqa: B009
            cases.dense_contender(label, make, [(8192,)], "cpu").step()
        except Exception as error:  # another package may raise any exception
            print(f"{label} is left out: {type(error).__name__}: {error}", flush=True)
        else:
            yield label, make


class Fbgemm(torch.optim.Optimizer):
    """FBGEMM's tables, which are updated in backward: a step calls it with the gradients of rows, one bag per id."""

    def __init__(self, params: list[Tensor], kind: str) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        super().__init__(params, {})
        (self.table,) = params
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(*self.table.shape, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType[kind],
            pooling_mode=PoolingMode.NONE,
        )
        self.out = torch.zeros(0)
        self.grads = torch.zeros(0)

    def look_up(self) -> None:
        """Run the forward pass, which is not timed."""
        grad = self.table.grad
        assert grad is not None
        ids, self.grads = grad._indices()[0], grad._values()
        self.out = self.tables(ids, torch.arange(len(ids) + 1))

    def step(self, closure: Any = None) -> None:
        self.out.backward(self.grads)


def fbgemm(places: list[Tensor], rows: int, width: int) -> Iterator[cases.Contender]:
    for kind in ("PARTIAL_ROWWISE_ADAM", "EXACT_ROWWISE_ADAGRAD"):
        made: list[Fbgemm] = []

        def make(params: list[Tensor], kind: str = kind, made: list[Fbgemm] = made) -> torch.optim.Optimizer:
            made.append(Fbgemm(params, kind))
            return made[0]

        try:
            contender = cases.sparse_contender(f"FBGEMM {kind}", make, places, rows, width)
        except (ImportError, AssertionError, OSError) as error:
            print(f"FBGEMM {kind} is left out: {type(error).__name__}: {error}", flush=True)
            continue
        renew = contender.prepare

        def prepare(renew: Callable[[], None] = renew, own: Fbgemm = made[0]) -> None:
            renew()
            own.look_up()

        contender.prepare = prepare
        yield contender


def dense(dtype: torch.dtype) -> list[cases.Contender]:
    makers = ours(DENSE)
    if dtype == torch.float32:
        makers = {"torch Adam fused": partial(torch.optim.Adam, fused=True), **makers, **dict(peers())}
    return [cases.dense_contender(name, make, [(ELEMENTS,)], "cpu", dtype) for name, make in makers.items()]


def rows(count: int, width: int, dtype: torch.dtype) -> list[cases.Contender]:
    places = [cases.sample_ids("zipf", count, cases.IDS_PER_BATCH, seed) for seed in range(8)]
    makers = ours(ROWS)
    if dtype == torch.float32:
        makers["torch SparseAdam"] = torch.optim.SparseAdam
    made = [cases.sparse_contender(name, make, places, count, width, dtype) for name, make in makers.items()]
    return [*made, *fbgemm(places, count, width)] if dtype == torch.float32 else made


PEER = "cadam.CAdam float32"
FLOAT32, BFLOAT16 = partial(dense, torch.float32), partial(dense, torch.bfloat16)
CASES = {
    "dense": cases.Case("dense, one tensor of 50M", "torch Adam fused", FLOAT32, ELEMENTS, rounds=9),
    "bfloat16 dense": cases.Case("one tensor of 50M in bfloat16", PEER, BFLOAT16, rounds=9),
}
for count, width in TABLES:
    for name, more, dtype in (("rows", "", torch.float32), ("bfloat16", " in bfloat16", torch.bfloat16)):
        CASES[f"{name} {width}"] = cases.Case(
            f"rows {count / 1e6:g}M x {width}{more}, {cases.IDS_PER_BATCH} Zipf ids",
            PEER,
            partial(rows, count, width, dtype),
            rounds=15,
        )


def main() -> None:
    """Run each case in a separate process, because earlier cases influence the memory layout of the tables."""
    if len(sys.argv) == 3 and sys.argv[1] == "--case":
        timing.print_results(
            timing.measure(CASES[sys.argv[2]], "cpu", cases.cpu_limit if sys.argv[2] == "dense" else None)
        )
        return
    print(", ".join(f"{name} {value}" for name, value in timing.describe_machine("cpu").items()), flush=True)
    for name in CASES:
        if name.split()[0] in (sys.argv[1:] or ["dense", "rows"]):
            subprocess.run([sys.executable, __file__, "--case", name], check=True)


if __name__ == "__main__":
    main()
