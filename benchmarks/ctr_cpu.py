"""A CPU step of a small click model: cadam's one optimizer against torch's SparseAdam and Adam, side by side.

    python benchmarks/ctr_cpu.py [--model DeepFM] [--rounds N] [--json FILE]

The model has a table of 1M x 10 and three hidden layers of 300, the batch 10,000 generated impressions of 39 fields.
Both sides see the same batches; rounds are interleaved, and medians are given. torch's dense Adam is its fused one, the
fastest it has. torch cannot clip sparse gradients: its side coalesces them first, which SparseAdam then need not do,
and takes the norm of their values.

A third side has dense gradients and torch's fused Adam for everything. That is another update, which moves rows that no
impression has met, so no bar is set by it; but on a table of this size it is what a user of torch may take for speed.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import cadam
from cadam_paper.ctr import models
from cadam_paper.ctr.fields import VOCABULARY
from cadam_paper.ctr.generator import Generated

ROWS, WIDTH, HIDDEN, BATCH = 1_000_000, 10, (300, 300, 300), 10_000
BAR_SHARE, BAR_STEP = 5.0, 1.25
Kind = Literal["ours", "torch", "dense"]


class Torchs:
    """SparseAdam for tables and Adam for the rest, as torch has them."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        dense, tables = models.parameters(model)
        self.dense = torch.optim.Adam(dense, lr=lr, fused=True)
        self.tables = torch.optim.SparseAdam(tables, lr=lr)

    def clip(self, max_norm: float) -> None:
        """A model and its optimizer, written with torch alone."""
        every = [p for part in (self.dense, self.tables) for p in part.param_groups[0]["params"]]
        for p in self.tables.param_groups[0]["params"]:
            p.grad = p.grad.coalesce()
        values = [p.grad.values() if p.grad.is_sparse else p.grad for p in every]
        factor = (max_norm / (nn.utils.get_total_norm(values) + 1e-6)).clamp(max=1.0)
        for value in values:
            value.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.dense.zero_grad(set_to_none)
        self.tables.zero_grad(set_to_none)

    def step(self) -> None:
        self.dense.step()
        self.tables.step()


class Side:
    """A model with its optimizers, and the times of the parts of its steps."""

    def __init__(self, model: str, vocabulary: tuple[int, ...], kind: Kind, clip: bool) -> None:
        self.model = models.build(model, vocabulary, 0, width=WIDTH, hidden=HIDDEN)
        self.clip = clip
        self.optimizer: cadam.CAdam | Torchs | torch.optim.Adam
        if kind == "ours":
            self.optimizer = cadam.CAdam(self.model.parameters(), lr=1e-3)
        elif kind == "torch":
            self.optimizer = Torchs(self.model, 1e-3)
        else:
            for module in self.model.modules():
                if isinstance(module, nn.Embedding):
                    module.sparse = False
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        self.times: dict[str, list[float]] = {"step": [], "optimizer": [], "tables": [], "clip": []}

    def step(self, ids: Tensor, labels: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(self.model(ids), labels).backward()
        before = time.perf_counter()
        if self.clip and isinstance(self.optimizer, Torchs):
            self.optimizer.clip(10.0)
        elif self.clip:
            cadam.clip_grad_norm_(self.model.parameters(), 10.0)
        clipped = time.perf_counter()
        if isinstance(self.optimizer, Torchs):
            self.optimizer.dense.step()
            dense_done = time.perf_counter()
            self.optimizer.tables.step()
        else:
            dense_done = clipped
            self.optimizer.step()
        end = time.perf_counter()
        for name, seconds in (
            ("step", end - start),
            ("optimizer", end - clipped),
            ("tables", end - dense_done),
            ("clip", clipped - before),
        ):
            self.times[name].append(seconds)

    def median(self, name: str) -> float:
        return median(self.times[name])


def measure(model: str, rounds: int, clip: bool, tell: Callable[[str], None]) -> dict[str, float]:
    vocabulary = (*VOCABULARY[:-1], VOCABULARY[-1] + ROWS - sum(VOCABULARY))
    clicks = Generated(rows=10 * BATCH, vocabulary=vocabulary)
    batches = list(clicks.batches("train", BATCH, device=torch.device("cpu")))[:4]
    kinds: tuple[Kind, ...] = ("ours", "torch", "dense")
    sides = [Side(model, vocabulary, kind, clip) for kind in kinds]
    for number in range(rounds + 2):
        batch = batches[number % len(batches)]
        for side in sides if number % 2 else reversed(sides):
            side.step(batch.ids, batch.labels)
        if number == 1:  # the first rounds warm up
            for side in sides:
                for times in side.times.values():
                    times.clear()
    ours, torchs, dense = sides
    found = {
        "ours, step": ours.median("step"),
        "torch, step": torchs.median("step"),
        "ours, optimizer": ours.median("optimizer"),
        "torch, optimizer": torchs.median("optimizer"),
        "torch, SparseAdam": torchs.median("tables"),
        "ours, clip": ours.median("clip"),
        "torch, clip": torchs.median("clip"),
        "torch dense, step": dense.median("step"),
        "torch dense, optimizer": dense.median("optimizer"),
        "distinct rows": float(len(batches[0].ids.unique())),
    }
    share, whole = found["torch, SparseAdam"] / found["ours, optimizer"], found["torch, step"] / found["ours, step"]
    kind = f"{model}, {'clipped' if clip else 'not clipped'}"
    if not clip:  # SparseAdam would otherwise get a coalesced gradient
        tell(
            f"{kind}: optimizer {1e3 * found['ours, optimizer']:.1f} ms, SparseAdam alone "
            f"{1e3 * found['torch, SparseAdam']:.1f} ms: {share:.1f} times "
            f"({'meets' if share >= BAR_SHARE else 'MISSES'} {BAR_SHARE:g})"
        )
    tell(
        f"{kind}: step {1e3 * found['ours, step']:.1f} ms, torch's {1e3 * found['torch, step']:.1f} ms: {whole:.2f} "
        f"times ({'meets' if whole >= BAR_STEP else 'MISSES'} {BAR_STEP:g}); of that clipping "
        f"{1e3 * found['ours, clip']:.1f} ms, torch's {1e3 * found['torch, clip']:.1f} ms"
    )
    tell(
        f"{kind}: with dense gradients and torch's fused Adam {1e3 * found['torch dense, step']:.1f} ms, of that the "
        f"optimizer {1e3 * found['torch dense, optimizer']:.1f} ms: another update, no bar"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=models.MODELS, default="DeepFM")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, table {ROWS:,} x {WIDTH}, batch {BATCH:,}")
    found = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        **{
            f"{options.model}, {'clipped' if clip else 'not clipped'}": measure(
                options.model, options.rounds, clip, lambda line: print(line, flush=True)
            )
            for clip in (True, False)
        },
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
