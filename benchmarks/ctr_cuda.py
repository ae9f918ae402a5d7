"""Check the trainer of the click study on a CUDA device: its results in a graph, its speed, and the speed of its input.

    python benchmarks/ctr_cuda.py [--out FOLDER] [--parts PART...]

At the paper's size: 910,747 ids, embeddings of 16, DeepFM with five layers of 1000, batch 10,000, generated clicks.
Each part stands for itself: one that fails prints its traceback, and the others continue.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cadam_paper.ctr import models, study
from cadam_paper.ctr.data import Feed
from cadam_paper.ctr.generator import Generated, best_auc
from cadam_paper.ctr.train import Learner, Task, numerics, train_epoch, train_stream
from cadam_paper.harness.cuda_runs import Captured
from ctr_cpu import Torchs

Line = tuple[str, str]
BAR = 2.5e6
ROWS = 6_000_000
STEPS = 200


def task(model: str = "DeepFM", optimizer: str = "CAdam", **more: Any) -> Task:
    return Task(model, optimizer, 1e-3, 0, **more)


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


# Parts ---------------------------------------------------------------------------------------------------------


def same_curves(found: dict[str, Any]) -> list[Line]:
    """Compare a run in a graph and a second run without one with a run without a graph. The last batch is short."""
    lines, clicks = [], Generated(rows=300_001)
    for model in models.MODELS:
        for optimizer in ("CAdam", "Adam") if model == "DeepFM" else ("CAdam",):
            what = task(model, optimizer, max_norm=0.05)  # so low that gradients are clipped
            graph, plain, again = (train_epoch(what, clicks, here(), graph=graph) for graph in (True, False, False))
            apart = {
                name: [float(np.abs(r.loss - plain.loss).max()), float(np.abs(r.norm - plain.norm).max())]
                for name, r in (("graph", graph), ("plain again", again))
            }
            auc = {name: r.scores["test"].auc for name, r in (("graph", graph), ("plain", plain), ("again", again))}
            found[f"{model} {optimizer}"] = {"apart (loss, norm)": apart, "auc": auc}
            clipped = float((plain.norm > what.max_norm).mean())
            text = f"loss {apart['graph'][0]:.1e} (plain again {apart['plain again'][0]:.1e}), norm "
            text += f"{apart['graph'][1]:.1e}, test AUC {auc['graph'] - auc['plain']:+.1e} at {auc['plain']:.4f}, "
            lines.append((f"graph - plain, {model} {optimizer}, 24 steps", f"{text}{clipped:.0%} clipped"))
    return lines


def steps(learner: Learner, feed: Feed, graph: bool, warm: int, count: int) -> tuple[float, float]:
    """Return the seconds per step until the device is done, and until the host is done."""
    run = learner.training(feed, graph=graph)
    for _ in range(warm):
        next(run)
    start = synchronized()
    for _ in range(count):
        next(run)
    asked = time.perf_counter() - start
    seconds = synchronized() - start
    run.close()  # type: ignore[attr-defined]
    return seconds / count, asked / count


def speed(found: dict[str, Any]) -> list[Line]:
    """Measure examples per second in training: every model with CAdam, and DeepFM with every optimizer."""
    lines, clicks = [], Generated(rows=ROWS)
    arms = [("DeepFM", optimizer) for optimizer in ("CAdam", *study.OPTIMIZERS, "SGDM", "CSGDM")]
    arms = list(dict.fromkeys([*arms, *((model, "CAdam") for model in models.MODELS)]))
    for model, optimizer in arms:
        what = task(model, optimizer)
        with numerics(what, here()):
            torch.cuda.reset_peak_memory_stats()
            begin = synchronized()
            learner = Learner(what, clicks, here())
            feed = clicks.feed("train", what.batch, device=here())
            ready = synchronized() - begin
            seconds, asked = steps(learner, feed, True, 20, STEPS)
            memory = torch.cuda.max_memory_allocated()
        rate = what.batch / seconds
        found[f"{model} {optimizer}, graph"] = {
            "seconds a step": seconds,
            "host": asked,
            "examples a second": rate,
            "set-up": ready,
            "peak memory": memory,
        }
        bar = f", {'meets' if rate >= BAR else 'MISSES'} {BAR / 1e6:g}M" if (model, optimizer) == arms[0] else ""
        text = f"{rate / 1e6:.2f}M examples a second, {1e3 * seconds:.3f} ms a step{bar}"
        lines.append((f"{model} {optimizer}, graph", text))
        print(f"  {lines[-1][0]}: {text}; set-up {ready:.1f} s, {memory / 1e9:.1f} GB", flush=True)
    return lines


def against_torch(found: dict[str, Any]) -> list[Line]:
    """DeepFM with CAdam in a graph, CAdam in a plain loop, and torch's Adam with SparseAdam; interleaved, medians.

    SparseAdam waits for the device, so no graph can hold it. All three are clipped by cadam's own function, for torch's
    refuses sparse gradients.
    """
    clicks, what = Generated(rows=ROWS), task()
    kinds = ("CAdam, graph", "CAdam, plain loop", "torch Adam + SparseAdam, plain loop")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with numerics(what, here()):
        for _ in range(3):
            for kind in kinds:
                learner = Learner(what, clicks, here())
                if kind.startswith("torch"):
                    learner.optimizer = Torchs(learner.model, what.lr)  # type: ignore[assignment]
                feed = clicks.feed("train", what.batch, device=here())
                times[kind].append(steps(learner, feed, kind == kinds[0], 20, 60)[0])
    seconds = {kind: float(np.median(times[kind])) for kind in kinds}
    found["against torch"] = times
    torchs = seconds[kinds[2]]
    return [
        (kind, f"{1e-6 * what.batch / s:.2f}M examples a second, {torchs / s:.2f} times torch's")
        for kind, s in seconds.items()
    ]


def still(feed: Feed) -> Feed:
    """A feed that reuses its batches, which shows the cost of a step without its input."""

    class Still:
        rows, batch_size, filled = feed.rows, feed.batch_size, 0

        def fill(self, index: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> None:
            if Still.filled < 2:  # during warm-up; the graph is captured later
                Still.filled += 1
                feed.fill(index, ids, labels)

    return Still()


def share_of_input(found: dict[str, Any]) -> list[Line]:
    """Time the production of batches, alone and as part of the step."""
    clicks, what, lines = Generated(rows=ROWS), task(), []
    with numerics(what, here()):
        for noise in (0.0, 0.01):
            feed = clicks.feed("train", what.batch, device=here(), noise=noise)
            index = torch.zeros((), dtype=torch.int64, device=here())
            ids = torch.empty(what.batch, len(clicks.vocabulary), dtype=torch.int64, device=here())
            labels = torch.empty(what.batch, device=here())
            fill = Captured(lambda: _advance(feed, index, ids, labels), torch.cuda.current_stream())  # noqa: B023
            for _ in range(10):
                fill()
            start = synchronized()
            for _ in range(STEPS):
                fill()
            alone = (synchronized() - start) / STEPS
            moving = steps(Learner(what, clicks, here()), feed, True, 20, STEPS)[0]
            static = steps(Learner(what, clicks, here()), still(feed), True, 20, STEPS)[0]
            found[f"input, noise {noise:g}"] = {"alone": alone, "step": moving, "step without input": static}
            text = f"{1e3 * alone:.3f} ms alone ({1e-6 * what.batch / alone:.0f}M rows a second); step "
            text += f"{1e3 * moving:.3f} ms with it, {1e3 * static:.3f} ms without: {1 - static / moving:.1%} of a step"
            lines.append((f"input, noise {noise:.0%}", text))
    return lines


def _advance(feed: Feed, index: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> None:
    feed.fill(index, ids, labels)
    index.add_(1)


def whole_run(found: dict[str, Any]) -> list[Line]:
    """Compute a run as the study does, for its two protocols."""
    lines, clicks = [], Generated(rows=ROWS)
    best = best_auc(clicks, rows=500_000, device=here())
    for optimizer in ("Adam", "CAdam"):
        for reading in ("table", "stream"):
            start = synchronized()
            if reading == "table":
                record = train_epoch(task(optimizer=optimizer), clicks, here())
            else:
                moving = replace(clicks, drift="sudden")
                record = train_stream(task(optimizer=optimizer), moving, here(), 50)
            seconds = synchronized() - start
            scores = {part: [s.auc, s.log_loss] for part, s in record.scores.items()}
            ratios = record.dense.over_touched, record.tables.over_touched
            found[f"{reading} {optimizer}"] = {
                "seconds": seconds,
                "scores (auc, log loss)": scores,
                "alignment": ratios,
                "largest norm": float(record.norm.max()),
                "loss": [float(record.loss[0]), float(record.loss[-20:].mean())],
            }
            text = ", ".join(f"{part} AUC {s[0]:.4f}" for part, s in scores.items())
            text += f" (best possible {best:.4f}); alignment {ratios[0]:.3f}, tables {ratios[1]:.3f}"
            lines.append((f"{reading}, {ROWS:,} rows, DeepFM {optimizer}", f"{seconds:.1f} s; {text}"))
    return lines


def kernels(found: dict[str, Any]) -> list[Line]:
    """Profile a DeepFM step."""
    from torch.profiler import ProfilerActivity, profile

    clicks, what = Generated(rows=ROWS), task()
    with numerics(what, here()):
        run: Iterator[None] = Learner(what, clicks, here()).training(clicks.feed("train", what.batch, device=here()))
        for _ in range(10):
            next(run)
        synchronized()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(20):
                next(run)
            synchronized()
        run.close()  # type: ignore[attr-defined]
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 20
    count = sum(row.count for row in rows) / 20
    found["kernels"] = [(row.key, row.self_device_time_total / 20, row.count / 20) for row in rows[:60]]
    for row in rows[:30]:
        print(f"  {row.self_device_time_total / 20:8.1f} us {row.count / 20:6.1f} x  {row.key[:110]}", flush=True)
    return [("a DeepFM step", f"{total:.0f} us in {count:.0f} kernels")]


PARTS: dict[str, Callable[[dict[str, Any]], list[Line]]] = {
    "same": same_curves,
    "speed": speed,
    "torch": against_torch,
    "input": share_of_input,
    "kernels": kernels,
    "run": whole_run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="FOLDER")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "failed": [],
        "parts": {},
    }
    print(found, flush=True)
    lines: list[Line] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        start = time.perf_counter()
        print(f"{name}:", flush=True)
        try:
            lines += PARTS[name](found["parts"].setdefault(name, {}))
        except Exception:
            traceback.print_exc()
            found["failed"].append(name)
            lines.append((name, "FAILED, see its traceback above"))
        torch.cuda.empty_cache()
        print(f"  took {time.perf_counter() - start:.1f} s", flush=True)
        (options.out / "ctr_cuda.json").write_text(json.dumps(found, indent=1))
    width = max(len(what) for what, _ in lines)
    table = "\n".join(f"{what:{width}}  {text}" for what, text in lines)
    (options.out / "ctr_cuda.txt").write_text(f"{found['device']}, torch {found['torch']}\n{table}\n")
    print(f"\n{table}")
    if found["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
