"""Compare replayed and planned steps with sparse gradients on a CUDA device: equality and time.

    python benchmarks/sparse_cuda.py

Models with tables alone and with tables and dense parameters are trained with and without replay and compared bit by
bit. Row updates of plain tensors follow, with a gradient for each id and for each bag of ids. Then whole steps are
timed beside torch's SparseAdam.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cadam
from cadam.optim.sparse_update import Bags, RowUpdate, complete, new_state
from peers import cases, timing

ROWS = 100_000
CASES: dict[str, tuple[Any, torch.dtype, list[int], list[int]]] = {  # optimizer, dtype, widths of tables, dense sizes
    "a table": (cadam.CAdam, torch.float32, [16], []),
    "tables beside dense parameters": (cadam.CAdam, torch.float32, [10, 1, 200], [5, 1 << 16, 300]),
    "bfloat16": (cadam.CAdam, torch.bfloat16, [64], [300]),
    "CAmsGrad with decay": (partial(cadam.CAmsGrad, weight_decay=0.1), torch.float32, [16, 3], [7]),
    "Adam, not counting": (partial(cadam.Adam, track_alignment=False), torch.float32, [16], []),
}


def trained(case: str, replay: bool) -> tuple[list[Tensor], cadam.Optimizer, int]:
    """Return the parameters after some steps, the optimizer, and how many steps left a recording to replay."""
    make, dtype, widths, sizes = CASES[case]
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [*((ROWS, width) for width in widths), *((size,) for size in sizes)]
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]
    optimizer = make(params, replay=replay)
    recorded = 0
    for turn in range(14):
        ids = cases.sample_ids("skewed" if turn % 3 else "zipf", ROWS, 30_000 - 999 * (turn % 4), seed=turn).cuda()
        for p in params:
            p.grad = torch.randn_like(p)
            if p.dim() == 2:
                values = torch.randn(len(ids), p.shape[1], device="cuda").to(dtype)
                p.grad = torch.sparse_coo_tensor(ids[None], values, p.shape, check_invariants=False)
        if turn == 6:
            optimizer.param_groups[0]["lr"] *= 0.5
        if turn == 8:
            params[0].data = params[0].data.clone()
        if turn == 10:
            params[0].grad = params[0].grad.coalesce()  # type: ignore[union-attr]
        optimizer.step()
        recorded += optimizer.explain().steps == "replayed"
    return params, optimizer, recorded


def same_steps() -> bool:
    """Whether training with and without replay gives the same bits."""
    good = True
    for case in CASES:
        (replayed, a, served), (planned, b, none) = (trained(case, replay) for replay in (True, False))
        torch.cuda.synchronize()
        different = []
        for i, (p, q) in enumerate(zip(replayed, planned, strict=True)):
            pairs = {"parameter": (p, q)} | {k: (v, b.state[q][k]) for k, v in a.state[p].items()}
            different += [f"{what} of {i}" for what, (x, y) in pairs.items() if not torch.equal(x, y)]
        if a.param_groups[0]["track_alignment"] and a.alignment() != b.alignment():
            different.append("alignment")
        fine = not different and served > 5 and none == 0
        replays = f"{served} of 14 steps could be replayed ({none} without replay)"
        print(f"{'same bits' if fine else 'FAILED'}: {case}: {replays}")
        if not fine:
            good = False
            print(f"  different: {different}; {a.explain().steps}")
    return good


def updated(replay: bool, in_bags: bool) -> tuple[list[Tensor], int]:
    """Return a table of four features, its state and counts after some updates, and how many updates were replayed."""
    torch.manual_seed(0)
    table, batch, served = torch.randn(ROWS, 32, device="cuda"), 3000, 0
    counts = torch.zeros(3, dtype=torch.int64, device="cuda")
    state = new_state(table)
    update = RowUpdate(table, state, cadam.CAdam, complete(cadam.CAdam, {"replay": replay}), counts=counts)
    starts = torch.arange(4, device="cuda") * (ROWS // 4)
    for step in range(1, 9):
        lengths = torch.randint(0, 5, (4 * batch,), device="cuda")
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids = cases.sample_ids("zipf", ROWS // 4, int(offsets[-1]), seed=step).cuda()
        grads = torch.randn(batch, 4, 32, device="cuda")
        recorded = update._replay.ready
        if in_bags:
            update.pooled(ids, Bags(offsets, starts, batch), grads, step=step)
        else:
            bag = torch.repeat_interleave(lengths)
            rows = ids + starts[bag // batch]
            update(rows, grads[bag % batch, bag // batch], step=step)
        served += recorded is not None and update._replay.ready is recorded
    return [table, *state.values(), counts], served


def same_updates() -> bool:
    """Whether row updates with and without replay and bags give the same bits."""
    usual, none = updated(False, False)
    good = True
    for replay, in_bags in ((True, False), (False, True), (True, True)):
        found, served = updated(replay, in_bags)
        fine = all(map(torch.equal, found, usual)) and (served > 4) == replay and not none
        what = f"{'bags' if in_bags else 'ids'}, {served} of 8 updates replayed"
        print(f"{'same bits' if fine else 'FAILED'}: {what}")
        good = good and fine
    return good


def host_times() -> None:
    """Print the microseconds until step() returns, and until the device is done."""
    for kind, rows, width in (("fields", 1_000_000, 16), ("zipf", 1_000_000, 10)):
        places = [cases.sample_ids(kind, rows, cases.IDS_PER_BATCH, seed).to("cuda") for seed in range(4)]
        contenders = {
            way: cases.sparse_contender(way, partial(cadam.CAdam, replay=way == "replayed"), places, rows, width)
            for way in ("replayed", "planned")
        }
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in contenders}
        for turn in range(24):
            for way, contender in contenders.items():
                contender.prepare()
                torch.cuda.synchronize()
                start = time.perf_counter_ns()
                contender.step()
                returned = time.perf_counter_ns()
                torch.cuda.synchronize()
                done = time.perf_counter_ns()
                if turn >= 4:
                    times[way].append(((returned - start) / 1e3, (done - start) / 1e3))
        for way, taken in times.items():
            host, whole = (statistics.median(t) for t in zip(*taken, strict=True))
            print(f"{kind} {rows} x {width}, {way}: host {host:.0f} us, done after {whole:.0f} us")


def main() -> int:
    good = same_steps()
    good = same_updates() and good
    host_times()
    for kind, rows, width in (
        ("fields", 1, 16),
        ("zipf", 1, 10),
        ("skewed", 1, 16),
        ("zipf", 5, 16),
        ("fields", 50, 16),
    ):
        contenders = partial(cases.sparse_contenders, kind, rows * 1_000_000, width, cases.IDS_PER_BATCH, "cuda", True)
        case = cases.Case(cases.sparse_name(kind, rows * 1_000_000, width), "torch SparseAdam", contenders, rounds=15)
        timing.print_results(timing.measure(case, "cuda", None))
    print("all the same" if good else "FAILED: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
