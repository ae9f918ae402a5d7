"""Measure the effect of quantized moments and bfloat16 tables on a click model with a million rows.

    python benchmarks/quantized_clicks.py [--rows 45840617] [--seeds 5] [--lr 2e-3] [--drift gradual]

A DeepFM with CAdam at the paper's size predicts generated clicks before it learns from them; the results are
differences of AUC and log loss to float32. Each
storage is that of all moments, dense ones too, under the same seeds as float32. The noise floor is float32 under as
many other seeds. On an H200 a run of 20 million rows takes 8 seconds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

from cadam.statistics.comparison import noise_floor
from cadam.statistics.intervals import interval
from cadam_paper.ctr import train
from cadam_paper.ctr.generator import Generated

LIGHT = {"moments": "int8", "second_moment": "row"}
BFLOAT16_TABLES: dict[str, dict[str, Any]] = {
    "bfloat16 tables": {},
    "bfloat16 tables, rounded at random": {"stochastic_rounding": True},
    "the same, int8, row v": {"stochastic_rounding": True, **LIGHT},
}
STORAGES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"moments": "bfloat16"},
    "int8": {"moments": "int8"},
    "row v": {"second_moment": "row"},
    "int8, row v": LIGHT,
    "row steps": {"row_steps": True},
    **BFLOAT16_TABLES,
}
REPEAT = 100
"""Offset of the seeds of the noise floor, so that they differ from the others."""
METRICS = ("AUC", "log loss", "alignment of tables")


class Learner(train.Learner):
    """A learner whose tables may be in bfloat16. Looked-up rows are converted to float32."""

    def __init__(self, *given: Any, halves: bool) -> None:
        super().__init__(*given)
        for module in self.model.modules():
            if halves and isinstance(module, nn.Embedding):
                module.weight.data = module.weight.data.bfloat16()
                module.register_forward_hook(_widened)


def _widened(module: nn.Module, given: Any, found: Tensor) -> Tensor:
    return found.float()


def run(clicks: Generated, name: str, seed: int, lr: float, device: torch.device, **sizes: Any) -> dict[str, float]:
    """Return the AUC in points, the log loss along the stream, and the alignment ratio of the tables."""
    task = train.Task("DeepFM", "CAdam", lr, seed, options=STORAGES[name], **sizes)
    with train.numerics(task, device):
        learner = Learner(task, clicks, device, halves=name in BFLOAT16_TABLES)
        scores = train.compute_scores(
            *learner.test(clicks.feed("stream", task.batch, seed=seed, device=device), learn=True)
        )
        _, tables = learner.optimizer.alignment().groups
        found = (100 * scores.auc, scores.log_loss, tables.over_touched)
        return dict(zip(METRICS, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=Generated().rows)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--drift", default="gradual")
    parser.add_argument("--only", nargs="+", default=list(STORAGES), choices=list(STORAGES), metavar="STORAGE")
    wanted = parser.parse_args()
    device = torch.device("cuda")
    clicks = Generated(wanted.rows, drift=wanted.drift)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {clicks.description}; lr {wanted.lr:g}")
    names = ["float32", *(name for name in wanted.only if name != "float32")]
    arms = [(name, seed) for seed in range(wanted.seeds) for name in names]
    arms += [("float32", REPEAT + seed) for seed in range(wanted.seeds)]
    found: dict[tuple[str, int], dict[str, float]] = {}
    start = time.monotonic()
    for name, seed in arms:
        found[name, seed] = run(clicks, name, seed, wanted.lr, device)
        passed = time.monotonic() - start
        left = passed / len(found) * (len(arms) - len(found))
        said = ", ".join(f"{metric} {value:.5f}" for metric, value in found[name, seed].items())
        print(f"{name:36} seed {seed:3}: {said} ({passed:.0f} s, {left:.0f} s left)", flush=True)
    for metric in METRICS:
        of = {name: [found[name, seed][metric] for seed in range(wanted.seeds)] for name in names}
        again = [found["float32", REPEAT + seed][metric] for seed in range(wanted.seeds)]
        mean, floor = sum(of["float32"]) / wanted.seeds, noise_floor(of["float32"], again).half_width
        print(f"\n{metric} minus float32's, which is {mean:.5f}; noise floor {floor:.5f}")
        for name in names[1:]:
            d = interval([mine - theirs for mine, theirs in zip(of[name], of["float32"], strict=True)])
            print(f"  {name:36} {d.mean:+.5f} [{d.low:+.5f}, {d.high:+.5f}]")


if __name__ == "__main__":
    main()
