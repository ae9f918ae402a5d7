"""Compare the options of tables on a CUDA device: time, and agreement with dense gradients.

    python benchmarks/exact_sparse_cuda.py      # about a minute

Steps of lazy updates, exact updates and `confidence_after` are interleaved; ratios are speeds relative to lazy updates.
The last lines count the rows of a float32
table that differ from dense gradients after many steps, as in `exact_sparse_cpu.py`.
"""

from __future__ import annotations

from functools import partial

import cadam
from exact_sparse_cpu import LATE, VARIANTS, measure_rounding
from peers import cases, timing

TABLES = [("fields", 1, 16), ("zipf", 1, 10), ("skewed", 1, 16), ("zipf", 1, 64), ("zipf", 1, 128), ("fields", 50, 16)]
"""Distribution of the ids, millions of rows, and columns."""
STORAGES = ("float32", "int8")
ROUNDS = 40


def contenders(kind: str, rows: int, width: int, moments: str) -> list[cases.Contender]:
    """Build the optimizers of one table, with the same batches of ids."""
    batches = [cases.sample_ids(kind, rows, cases.IDS_PER_BATCH, seed).to("cuda") for seed in range(8)]
    return [
        cases.sparse_contender(
            name, partial(cadam.CAdam, **VARIANTS[name], moments=moments, fused=True), batches, rows, width
        )
        for name in ("lazy", "exact", LATE)
    ]


def main() -> None:
    for moments in STORAGES:
        for kind, millions, width in TABLES:
            rows = millions * 1_000_000
            name = f"{cases.sparse_name(kind, rows, width)}, moments in {moments}"
            case = cases.Case(name, "lazy", partial(contenders, kind, rows, width, moments), rounds=ROUNDS)
            timing.print_results(timing.measure(case, "cuda", None))
    measure_rounding(device="cuda")


if __name__ == "__main__":
    main()
